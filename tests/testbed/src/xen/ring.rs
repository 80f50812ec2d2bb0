//! The other end of a guest's console ring.
//!
//! A page is shared with a guest, which may write anything to it at any moment. [`drain`]
//! takes what the guest has put into its console. Counters run on past the ring's size
//! and start again at zero, so they are subtracted modulo 2^32.
//!
//! Source: Xen's public header `io/console.h`.

use core::sync::atomic::{AtomicU64, Ordering, fence};

/// A page that is shared with a guest.
pub type Page = [AtomicU64; 512];

/// Where the console's output lies.
const OUTPUT: usize = 1024;
/// Bytes of it.
const OUTPUT_BYTES: u32 = 2048;
/// Its counters: taken, and put.
const OUTPUT_TAKEN: usize = 3080;
const OUTPUT_PUT: usize = 3084;

/// The word that byte `at` is in, and by how many bits it is shifted.
fn word(page: &Page, at: usize) -> Option<(&AtomicU64, usize)> {
    Some((page.get(at / 8)?, at % 8 * 8))
}

fn byte(page: &Page, at: usize) -> u8 {
    word(page, at).map_or(0, |(word, shift)| (word.load(Ordering::Acquire) >> shift) as u8)
}

fn counter(page: &Page, at: usize) -> u32 {
    word(page, at).map_or(0, |(word, shift)| (word.load(Ordering::Acquire) >> shift) as u32)
}

/// Write a counter: the guest may write the half beside it.
fn set_counter(page: &Page, at: usize, value: u32) {
    set(page, at, u64::from(value), 0xffff_ffff);
}

/// Replace the bits of `mask` at byte `at`.
fn set(page: &Page, at: usize, value: u64, mask: u64) {
    if let Some((word, shift)) = word(page, at) {
        let new = |old: u64| Some(old & !(mask << shift) | value << shift);
        // It never declines.
        word.fetch_update(Ordering::AcqRel, Ordering::Acquire, new).ok();
    }
}

/// Where in the page the byte at this count lies.
const fn place(count: u32) -> usize {
    OUTPUT + (count % OUTPUT_BYTES) as usize
}

/// Take all console output and show it in pieces.
pub fn drain(page: &Page, mut show: impl FnMut(&[u8])) {
    let put = counter(page, OUTPUT_PUT);
    let mut taken = counter(page, OUTPUT_TAKEN);
    // More than there is room for is nonsense: what the ring holds is shown.
    let mut left = put.wrapping_sub(taken).min(OUTPUT_BYTES);
    while left > 0 {
        let mut piece = [0; 256];
        let mut length = 0;
        for slot in piece.iter_mut().take(left as usize) {
            *slot = byte(page, place(taken));
            taken = taken.wrapping_add(1);
            length += 1;
        }
        left = left.saturating_sub(length as u32);
        show(piece.get(..length).unwrap_or_default());
    }
    fence(Ordering::SeqCst);
    set_counter(page, OUTPUT_TAKEN, put);
}

#[cfg(test)]
mod tests {
    use std::vec::Vec;

    use proptest::prelude::*;

    use super::*;

    fn page() -> Page {
        [const { AtomicU64::new(0) }; 512]
    }

    fn drained(page: &Page) -> Vec<u8> {
        let mut shown = Vec::new();
        drain(page, |piece| shown.extend(piece));
        shown
    }

    #[test]
    fn output_is_taken_across_the_end_of_the_ring_and_of_the_counter() {
        let page = page();
        for start in [0, 2040, u32::MAX - 3] {
            set_counter(&page, OUTPUT_TAKEN, start);
            for (index, value) in (0_u32..).zip(b"0123456789") {
                set(&page, place(start.wrapping_add(index)), u64::from(*value), 0xff);
            }
            set_counter(&page, OUTPUT_PUT, start.wrapping_add(10));
            assert_eq!(drained(&page), b"0123456789", "from {start}");
            assert_eq!(counter(&page, OUTPUT_TAKEN), start.wrapping_add(10));
            assert_eq!(drained(&page), b"");
        }
    }

    #[test]
    fn a_counter_that_makes_no_sense_costs_one_ring_at_most() {
        let page = page();
        set_counter(&page, OUTPUT_PUT, u32::MAX);
        assert_eq!(drained(&page).len(), 2048);
        assert_eq!(counter(&page, OUTPUT_TAKEN), u32::MAX);
    }

    proptest! {
        #[test]
        fn a_page_of_anything_neither_panics_nor_hangs(
            words in proptest::collection::vec(any::<u64>(), 512),
        ) {
            let page = page();
            for (to, from) in page.iter().zip(words) {
                to.store(from, Ordering::Relaxed);
            }
            prop_assert!(drained(&page).len() <= 2048);
        }
    }
}
