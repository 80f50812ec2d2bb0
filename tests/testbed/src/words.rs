//! Bytes moved from page to page, while others may use both.
//!
//! [`copy`] reads and writes whole words, as atomics: what lies beside the bytes in a
//! word keeps what a guest or another processor writes there meanwhile.

use core::sync::atomic::{AtomicU64, Ordering};

/// A page, shared with whoever may reach it.
pub type Words = [AtomicU64; 512];

/// Bytes of a word.
const WORD: usize = 8;
/// Bytes of a page.
const PAGE: usize = 512 * WORD;

/// The bytes do not lie in one page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OutOfPage;

/// Copies `length` bytes of `source` from byte `first` on to `target`, byte `to` and on.
///
/// The two may be the same page; bytes that both ranges have in common end up with some
/// byte of the source's.
///
/// # Errors
/// [`OutOfPage`] if a range leaves its page; then nothing was written.
pub fn copy(
    source: &Words,
    first: usize,
    target: &Words,
    to: usize,
    length: usize,
) -> Result<(), OutOfPage> {
    for start in [first, to] {
        start.checked_add(length).filter(|end| *end <= PAGE).ok_or(OutOfPage)?;
    }
    let mut done = 0;
    while done < length {
        let (from, at) = (first + done, to + done);
        let count = (length - done).min(WORD - at % WORD);
        let bytes = gather(source, from, count).ok_or(OutOfPage)?;
        merge(target.get(at / WORD).ok_or(OutOfPage)?, at % WORD, &bytes[..count]);
        done += count;
    }
    Ok(())
}

/// The `count` bytes from `first` on, at most a word of them, in the low places.
fn gather(source: &Words, first: usize, count: usize) -> Option<[u8; WORD]> {
    let start = first % WORD;
    let low = source.get(first / WORD)?.load(Ordering::Acquire);
    let high = if start + count > WORD {
        source.get(first / WORD + 1)?.load(Ordering::Acquire)
    } else {
        0
    };
    let pair = u128::from(low) | u128::from(high) << 64;
    Some(((pair >> (8 * start)) as u64).to_le_bytes())
}

/// Puts `bytes` into a word, from byte `start` on; they must fit.
pub fn merge(word: &AtomicU64, start: usize, bytes: &[u8]) {
    let merged = |old: u64| {
        let mut new = old.to_le_bytes();
        if let Some(place) = new.get_mut(start..).and_then(|rest| rest.get_mut(..bytes.len())) {
            place.copy_from_slice(bytes);
        }
        Some(u64::from_le_bytes(new))
    };
    // `merged` never declines, so this always succeeds.
    word.fetch_update(Ordering::AcqRel, Ordering::Acquire, merged).ok();
}

#[cfg(test)]
mod tests {
    use std::{boxed::Box, vec::Vec};

    use super::*;

    fn page(seed: u8) -> (Box<Words>, Vec<u8>) {
        let bytes: Vec<u8> = (0..PAGE).map(|place| (place % 251) as u8 ^ seed).collect();
        let words = Box::new([const { AtomicU64::new(0) }; 512]);
        for (word, bytes) in words.iter().zip(bytes.as_chunks().0) {
            word.store(u64::from_le_bytes(*bytes), Ordering::Relaxed);
        }
        (words, bytes)
    }

    fn content(words: &Words) -> Vec<u8> {
        words.iter().flat_map(|word| word.load(Ordering::Relaxed).to_le_bytes()).collect()
    }

    #[track_caller]
    fn check(first: usize, to: usize, length: usize) {
        let (source, read) = page(1);
        let (target, mut want) = page(0x80);
        assert_eq!(copy(&source, first, &target, to, length), Ok(()));
        want[to..to + length].copy_from_slice(&read[first..first + length]);
        assert!(content(&target) == want, "{length} bytes from {first} to {to}");
        assert!(content(&source) == read);
    }

    #[test]
    fn every_alignment_copies_what_slices_would() {
        for first in 0..9 {
            for to in 0..9 {
                for length in (0..26).chain([4000, PAGE - 8]) {
                    check(first.min(PAGE - length), to.min(PAGE - length), length);
                }
            }
        }
        check(0, 0, PAGE);
        check(PAGE - 1, 0, 1);
        check(3, PAGE - 5, 5);
    }

    #[test]
    fn what_leaves_a_page_is_not_copied() {
        let (source, _) = page(1);
        let (target, before) = page(2);
        for (first, to, length) in [
            (0, 1, PAGE),
            (1, 0, PAGE),
            (PAGE, 0, 1),
            (0, PAGE, 1),
            (0, 0, PAGE + 1),
            (9, 0, usize::MAX),
        ] {
            assert_eq!(copy(&source, first, &target, to, length), Err(OutOfPage));
        }
        assert!(content(&target) == before);
    }
}
