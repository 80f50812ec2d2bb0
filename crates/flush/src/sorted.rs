//! A few frames in order, mostly without comparing them.
//!
//! [`sort`] drops each frame into the bucket that the highest bits in which any two differ
//! name. Frames that lie about evenly have few others in theirs; only those are compared.

/// The most frames.
pub(crate) const MOST: usize = 32;

/// As many as there can be frames.
const BUCKETS: usize = MOST;

/// The frames, after a zero. Behind them are zeros.
pub(crate) type Sorted = [u64; MOST + 1];

/// Writes `frames`, at most [`MOST`], in order to where only zeros are. `unlike` has at least
/// the highest bit that any two of them differ in, and no higher one.
///
/// However they lie, each frame is compared with at most all of the others.
#[inline(always)]
pub(crate) fn sort(frames: impl Iterator<Item = u64> + Clone, unlike: u64, sorted: &mut Sorted) {
    let bits = u64::BITS - unlike.leading_zeros();
    let width = bits.saturating_sub(BUCKETS.ilog2());
    let bucket = |frame: u64| (frame >> width) as usize % BUCKETS;
    let mut starts = [0; BUCKETS];
    for frame in frames.clone() {
        starts[bucket(frame)] += 1;
    }
    counts_to_starts(&mut starts);
    for frame in frames {
        let start = &mut starts[bucket(frame)];
        let at = usize::from(*start) % MOST;
        *start += 1;
        // What is before it is of this bucket or of one below, or still zero.
        if sorted[at] <= frame {
            sorted[at + 1] = frame;
        } else {
            insert(sorted, at, frame);
        }
    }
}

/// Puts a frame in its place among those up to `at`, one of which is above it.
#[inline(never)]
fn insert(sorted: &mut Sorted, mut at: usize, frame: u64) {
    // The first of all is a zero, which is above none.
    while sorted[at] > frame {
        sorted[at + 1] = sorted[at];
        at -= 1;
    }
    sorted[at + 1] = frame;
}

/// Makes of how many each bucket holds how many all those before it hold.
#[inline]
fn counts_to_starts(counts: &mut [u8; BUCKETS]) {
    /// A number this many times is that number in each byte.
    const EACH: u64 = u64::from_ne_bytes([1; 8]);
    let (words, _) = counts.as_chunks_mut::<8>();
    let mut before = 0;
    for word in words {
        // Eight sums at a time. None is above the number of frames, so none leaves its byte.
        let mut sums = u64::from_le_bytes(*word);
        sums += sums << 8;
        sums += sums << 16;
        sums += sums << 32;
        *word = ((sums << 8) + before * EACH).to_le_bytes();
        before += sums >> 56;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    extern crate std;
    use std::vec::Vec;

    #[track_caller]
    fn check(frames: &[u64]) {
        let unlike = frames.iter().fold(0, |unlike, frame| unlike | (frame ^ frames[0]));
        let mut sorted = [0; MOST + 1];
        sort(frames.iter().copied(), unlike, &mut sorted);
        let mut expected = frames.to_vec();
        expected.sort();
        assert_eq!(&sorted[1..=frames.len()], &expected[..], "{frames:#x?}");
        assert_eq!(sorted[0], 0);
    }

    #[test]
    fn frames_of_every_number_and_spread_come_out_in_order() {
        let mut state = 0x9e37_79b9_7f4a_7c15_u64;
        let mut next = move || {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            state
        };
        for count in 0..=MOST {
            for bits in 0..=u64::BITS {
                let mask = u64::MAX.checked_shr(u64::BITS - bits).unwrap_or(0);
                let base = next();
                let even: Vec<u64> = (0..count).map(|_| base ^ (next() & mask)).collect();
                check(&even);
                // Most in one bucket, around a frame that may end it.
                let dense = even.iter().map(|frame| if frame % 8 == 0 { *frame } else { base });
                let dense = dense.map(|frame| frame.saturating_add(next() % 5));
                check(&dense.collect::<Vec<_>>());
            }
        }
    }

    #[test]
    fn frames_that_descend_or_are_the_same_come_out_in_order_at_either_end_of_the_space() {
        for end in [0, u64::MAX - 31, 1 << 20, (1 << 20) - 16] {
            let up: Vec<u64> = (end..=end + 31).collect();
            check(&up);
            check(&up.iter().rev().copied().collect::<Vec<_>>());
            check(&[end; MOST]);
            check(&[end + 31, 0, u64::MAX, end]);
        }
    }
}
