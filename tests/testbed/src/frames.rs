//! Which frames of memory are managed, and which of those are free.
//!
//! Two bits for each frame below a fixed limit. A frame becomes managed only by
//! [`FrameMap::add`] and stays so; claiming and giving back change one bit atomically, so
//! that processors and interrupt handlers may share the map without a lock.

use core::fmt;
use core::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use flush::Mfn;

/// Frames in one word of a map.
const WORD: usize = 64;
/// The largest block that can be claimed is `2^MAX_ORDER` frames (1 GiB).
pub const MAX_ORDER: u8 = 18;

/// A map of the frames `0..64 * WORDS`. All are unmanaged at first.
pub struct FrameMap<const WORDS: usize> {
    managed: [AtomicU64; WORDS],
    free: [AtomicU64; WORDS],
    /// The frame where the next search begins.
    next: AtomicUsize,
}

/// No free block of the size asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OutOfFrames {
    /// The size asked for: `2^order` frames.
    pub order: u8,
}

impl fmt::Display for OutOfFrames {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "no free block of 2^{} frames", self.order)
    }
}

impl core::error::Error for OutOfFrames {}

/// A block that was given back but is not, as a whole, claimed and managed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NotClaimed {
    /// The first frame of the block.
    pub first: Mfn,
    /// Its size: `2^order` frames.
    pub order: u8,
}

impl fmt::Display for NotClaimed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { first, order } = self;
        write!(f, "2^{order} frames from {first:?} are not claimed")
    }
}

impl core::error::Error for NotClaimed {}

impl<const WORDS: usize> FrameMap<WORDS> {
    /// A map that manages no frame.
    #[must_use]
    pub const fn new() -> Self {
        Self {
            managed: [const { AtomicU64::new(0) }; WORDS],
            free: [const { AtomicU64::new(0) }; WORDS],
            next: AtomicUsize::new(0),
        }
    }

    /// Manage the frames `first..=last` and make them free; those past the map are left out.
    ///
    /// Only while nobody claims frames yet.
    pub fn add(&self, first: Mfn, last: Mfn) {
        for (managed, free, bits) in self.words(first, last) {
            managed.fetch_or(bits, Ordering::AcqRel);
            free.fetch_or(bits, Ordering::AcqRel);
        }
    }

    /// Stop managing the frames `first..=last`.
    ///
    /// Only while nobody claims frames yet.
    pub fn remove(&self, first: Mfn, last: Mfn) {
        for (managed, free, bits) in self.words(first, last) {
            free.fetch_and(!bits, Ordering::AcqRel);
            managed.fetch_and(!bits, Ordering::AcqRel);
        }
    }

    /// Whether the frame is managed, claimed or free.
    #[must_use]
    pub fn is_managed(&self, frame: Mfn) -> bool {
        position(frame).is_some_and(|(index, bit)| {
            self.managed.get(index).is_some_and(|word| word.load(Ordering::Acquire) & bit != 0)
        })
    }

    /// Whether the frame is managed and free.
    #[must_use]
    pub fn is_free(&self, frame: Mfn) -> bool {
        position(frame).is_some_and(|(index, bit)| {
            self.free.get(index).is_some_and(|word| word.load(Ordering::Acquire) & bit != 0)
        })
    }

    /// How many managed frames are free at the moment.
    #[must_use]
    pub fn free_frames(&self) -> u64 {
        self.free.iter().map(|word| u64::from(word.load(Ordering::Relaxed).count_ones())).sum()
    }

    /// Claim `2^order` adjacent frames, the first a multiple of `2^order`.
    ///
    /// The search goes round from where the last one ended, so a frame that was just
    /// given back is among the last to be claimed again.
    ///
    /// # Errors
    /// [`OutOfFrames`] if no such block is free, or `order` is above [`MAX_ORDER`].
    pub fn claim(&self, order: u8) -> Result<Mfn, OutOfFrames> {
        let nothing = OutOfFrames { order };
        if order > MAX_ORDER || WORDS == 0 {
            return Err(nothing);
        }
        let size = 1_usize << order;
        let start = self.next.load(Ordering::Relaxed) % (WORDS * WORD);
        let found = if size < WORD {
            let word = start / WORD;
            let ahead = u64::MAX << (start % WORD);
            // The first word comes twice: its later part at the start, all of it at the end.
            self.claim_within(word, size, ahead).or_else(|| {
                (1..=WORDS)
                    .find_map(|step| self.claim_within((word + step) % WORDS, size, u64::MAX))
            })
        } else {
            let blocks = WORDS * WORD / size;
            let first = start.div_ceil(size);
            (0..blocks).find_map(|step| {
                let block = (first + step) % blocks;
                self.claim_words(block * size / WORD, size / WORD)
            })
        };
        let frame = found.ok_or(nothing)?;
        self.next.store(frame + size, Ordering::Relaxed);
        u64::try_from(frame).map(Mfn::new).map_err(|_| nothing)
    }

    /// Give a claimed block back.
    ///
    /// # Errors
    /// [`NotClaimed`] if any frame of it is free or unmanaged, or the block is not
    /// aligned to its size; nothing has changed then. Two processors that give the same
    /// block back at the same time may both be told that it went well.
    pub fn give_back(&self, first: Mfn, order: u8) -> Result<(), NotClaimed> {
        let refused = NotClaimed { first, order };
        if order > MAX_ORDER {
            return Err(refused);
        }
        let size = 1_u64 << order;
        let last = first.get().checked_add(size - 1).map(Mfn::new).ok_or(refused)?;
        if !first.get().is_multiple_of(size) {
            return Err(refused);
        }
        let mut claimed = 0;
        for (managed, free, bits) in self.words(first, last) {
            let held = managed.load(Ordering::Acquire) & !free.load(Ordering::Acquire);
            claimed += u64::from((held & bits).count_ones());
        }
        if claimed != size {
            return Err(refused);
        }
        for (_, free, bits) in self.words(first, last) {
            free.fetch_or(bits, Ordering::AcqRel);
        }
        Ok(())
    }

    /// Claim `size` aligned frames of one word, among those whose bit is in `among`.
    fn claim_within(&self, index: usize, size: usize, among: u64) -> Option<usize> {
        let word = self.free.get(index)?;
        let block = u64::MAX >> (WORD - size);
        let mut seen = word.load(Ordering::Acquire);
        loop {
            let bit =
                (0..WORD).step_by(size).find(|bit| ((seen & among) >> bit) & block == block)?;
            let left = seen & !(block << bit);
            match word.compare_exchange_weak(seen, left, Ordering::AcqRel, Ordering::Acquire) {
                Ok(_) => return Some(index * WORD + bit),
                Err(now) => seen = now,
            }
        }
    }

    /// Claim the frames of `count` whole words.
    fn claim_words(&self, first: usize, count: usize) -> Option<usize> {
        let words = self.free.get(first..first + count)?;
        for (taken, word) in words.iter().enumerate() {
            let claimed = word.compare_exchange(u64::MAX, 0, Ordering::AcqRel, Ordering::Acquire);
            if claimed.is_err() {
                for word in words.iter().take(taken) {
                    word.store(u64::MAX, Ordering::Release);
                }
                return None;
            }
        }
        Some(first * WORD)
    }

    /// Both words, and the bits of them, that hold each part of `first..=last`.
    fn words(&self, first: Mfn, last: Mfn) -> impl Iterator<Item = (&AtomicU64, &AtomicU64, u64)> {
        let (first, last) = (first.get(), last.get());
        let skipped = usize::try_from(first / 64).unwrap_or(usize::MAX);
        let bases = (first / 64..=last / 64).map(|word| word * 64);
        let words = self.managed.iter().zip(&self.free).skip(skipped);
        words.zip(bases).map(move |((managed, free), base)| {
            let low = first.max(base) - base;
            let high = last.min(base + 63) - base;
            (managed, free, (u64::MAX >> (63 - (high - low))) << low)
        })
    }
}

impl<const WORDS: usize> Default for FrameMap<WORDS> {
    fn default() -> Self {
        Self::new()
    }
}

/// The word and the bit of a frame.
fn position(frame: Mfn) -> Option<(usize, u64)> {
    let index = usize::try_from(frame.get() / 64).ok()?;
    Some((index, 1 << (frame.get() % 64)))
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    fn map(first: u64, last: u64) -> FrameMap<8> {
        let map = FrameMap::new();
        map.add(Mfn::new(first), Mfn::new(last));
        map
    }

    #[test]
    fn every_managed_frame_is_claimed_once_and_no_other() {
        let map = map(5, 200);
        map.remove(Mfn::new(60), Mfn::new(70));
        let expected: BTreeSet<u64> =
            (5..=200).filter(|frame| !(60..=70).contains(frame)).collect();
        assert_eq!(map.free_frames(), 185);
        let mut seen = BTreeSet::new();
        while let Ok(frame) = map.claim(0) {
            assert!(map.is_managed(frame));
            assert!(seen.insert(frame.get()), "{frame:?} twice");
        }
        assert_eq!(seen, expected);
        assert_eq!(map.free_frames(), 0);
    }

    #[test]
    fn blocks_of_every_order_are_aligned_and_disjoint() {
        for order in 0..=9 {
            let map = map(1, 510);
            let size = 1_u64 << order;
            let mut seen = BTreeSet::new();
            while let Ok(first) = map.claim(order) {
                assert!(first.get().is_multiple_of(size), "order {order}: {first:?}");
                for frame in first.get()..first.get() + size {
                    assert!((1..=510).contains(&frame));
                    assert!(seen.insert(frame), "order {order}: frame {frame} twice");
                }
            }
            let whole = (0..512 / size)
                .filter(|block| block * size >= 1 && block * size + size <= 511)
                .count();
            assert_eq!(seen.len(), whole << order, "order {order}");
        }
    }

    #[test]
    fn a_failed_large_claim_leaves_what_it_passed_over() {
        let map = map(0, 510);
        assert_eq!(map.claim(9), Err(OutOfFrames { order: 9 }));
        assert_eq!(map.free_frames(), 511);
    }

    #[test]
    fn a_frame_given_back_is_claimed_again_only_after_the_others() {
        // Given back behind the search: in an earlier word, and in the same one.
        for back in [3, 66] {
            let map = map(0, 127);
            while map.claim(0) != Ok(Mfn::new(70)) {}
            assert_eq!(map.give_back(Mfn::new(back), 0), Ok(()));
            for ahead in 71..128 {
                assert_eq!(map.claim(0), Ok(Mfn::new(ahead)));
            }
            assert_eq!(map.claim(0), Ok(Mfn::new(back)));
        }
    }

    #[track_caller]
    fn refused(map: &FrameMap<8>, first: u64, order: u8) {
        let first = Mfn::new(first);
        let free = map.free_frames();
        assert_eq!(map.give_back(first, order), Err(NotClaimed { first, order }));
        assert_eq!(map.free_frames(), free);
    }

    #[test]
    fn only_a_whole_claimed_block_can_be_given_back() {
        let map = map(0, 255);
        let block = map.claim(7).expect("128 frames");
        refused(&map, block.get() + 128, 0);
        refused(&map, block.get(), 8);
        refused(&map, block.get() + 1, 1);
        refused(&map, 300, 0);
        refused(&map, 511, 1);
        refused(&map, 512, 0);
        refused(&map, u64::MAX, 0);
        refused(&map, u64::MAX - 1, 1);
        refused(&map, 0, 200);
        assert_eq!(map.give_back(block, 7), Ok(()));
        refused(&map, block.get(), 7);
    }

    #[test]
    fn frames_past_the_map_are_left_out() {
        let map = map(500, u64::MAX);
        assert_eq!(map.free_frames(), 12);
        assert!(!map.is_managed(Mfn::new(512)));
        assert!(!map.is_managed(Mfn::new(u64::MAX)));
        assert_eq!(map.claim(MAX_ORDER + 1), Err(OutOfFrames { order: MAX_ORDER + 1 }));
    }
}
