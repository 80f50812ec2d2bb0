//! The page of shared information: pending events, and the rate of the clock.
//!
//! A page of this layout is shared with a guest, which may write anything to it. Only the
//! first virtual processor's part is used, and the first word of event bits.
//!
//! Source: Xen's public headers `xen.h` (`shared_info`, `vcpu_info`, `vcpu_time_info`) and
//! `arch-x86/xen.h`.

use core::sync::atomic::{AtomicU64, Ordering};

use super::Width;
use super::ring::Page;

/// Bits of events, one for each port.
const PENDING: usize = 2048;
/// Bits that hold events back, by width.
const fn mask_at(width: Width) -> usize {
    match width {
        Width::Narrow => 2048 + 128,
        Width::Wide => 2048 + 512,
    }
}
/// In the first processor's part: a byte that says something is pending.
const UPCALL: u64 = 0xff;
/// Its clock: version, then what it counts from, then the rate.
const TIME: usize = 32;

/// Write the rate of the time-stamp counter, in thousands of ticks a second.
///
/// The guest's clock counts nanoseconds from where the counter is zero.
pub fn set_rate(page: &Page, kilohertz: u32) {
    let mut rate = u64::from(kilohertz.max(1)).saturating_mul(1000);
    let mut shift = 0_u64;
    while rate <= 1_000_000_000 {
        rate <<= 1;
        shift += 1;
    }
    // Nanoseconds of a tick, in units of 2^-32.
    let scale = (1_000_000_000_u64 << 32).checked_div(rate).unwrap_or(0);
    if let Some(word) = page.get((TIME + 24) / 8) {
        word.store(scale & 0xffff_ffff | shift << 32, Ordering::Release);
    }
}

/// Make an event pending; whether the guest has to be told, which it need not be twice.
pub fn raise(page: &Page, width: Width, port: u32) -> bool {
    let bit = bit(port);
    let Some((pending, mask)) = events(page, width) else { return false };
    let was = pending.fetch_or(bit, Ordering::SeqCst);
    was & bit == 0 && mask.load(Ordering::SeqCst) & bit == 0 && tell(page, width)
}

/// Hold an event back no longer; whether the guest has to be told that it is pending.
pub fn unmask(page: &Page, width: Width, port: u32) -> bool {
    let bit = bit(port);
    let Some((pending, mask)) = events(page, width) else { return false };
    let was = mask.fetch_and(!bit, Ordering::SeqCst);
    was & pending.load(Ordering::SeqCst) & bit != 0 && tell(page, width)
}

const fn bit(port: u32) -> u64 {
    if port < u64::BITS { 1 << port } else { 0 }
}

/// The words of pending events and of those held back.
fn events(page: &Page, width: Width) -> Option<(&AtomicU64, &AtomicU64)> {
    Some((page.get(PENDING / 8)?, page.get(mask_at(width) / 8)?))
}

/// Say that an event is pending; whether that was not said already.
fn tell(page: &Page, width: Width) -> bool {
    // The word that has the event: the first one.
    match width {
        Width::Narrow => page[0].fetch_or(1 << 32, Ordering::SeqCst),
        Width::Wide => page[1].fetch_or(1, Ordering::SeqCst),
    };
    page[0].fetch_or(1, Ordering::SeqCst) & UPCALL == 0
}

/// Whether the guest has events that it has not taken.
#[must_use]
pub fn is_pending(page: &Page) -> bool {
    page[0].load(Ordering::SeqCst) & UPCALL != 0
}

#[cfg(test)]
mod tests {
    use super::*;

    fn page() -> Page {
        [const { AtomicU64::new(0) }; 512]
    }

    #[test]
    fn an_event_sets_its_bit_the_word_s_bit_and_the_upcall_once() {
        for (width, word, selected) in [(Width::Narrow, 0, 1 << 32 | 1), (Width::Wide, 1, 1)] {
            let page = page();
            assert!(raise(&page, width, 5) && is_pending(&page));
            assert!(!raise(&page, width, 5), "it is pending already");
            assert_eq!(page[256].load(Ordering::Relaxed), 1 << 5);
            assert_eq!(page[word].load(Ordering::Relaxed), selected);
            assert!(!raise(&page, width, 6), "the guest was told");
            page[0].fetch_and(!UPCALL, Ordering::Relaxed);
            assert!(!is_pending(&page));
            assert!(raise(&page, width, 7), "it has to be told again");
        }
    }

    #[test]
    fn a_masked_event_is_pending_and_told_to_nobody() {
        for (width, mask) in [(Width::Narrow, 2176 / 8), (Width::Wide, 2560 / 8)] {
            let page = page();
            page[mask].store(1 << 3, Ordering::Relaxed);
            assert!(!raise(&page, width, 3) && !is_pending(&page));
            assert_eq!(page[256].load(Ordering::Relaxed), 1 << 3);
            assert!(raise(&page, width, 4));
        }
    }

    #[test]
    fn an_event_that_came_while_it_was_masked_is_told_when_it_is_not() {
        for (width, mask) in [(Width::Narrow, 2176 / 8), (Width::Wide, 2560 / 8)] {
            let page = page();
            page[mask].store(1 << 3 | 1 << 4, Ordering::Relaxed);
            assert!(!raise(&page, width, 3));
            assert!(!unmask(&page, width, 4) && !is_pending(&page), "nothing came");
            assert!(unmask(&page, width, 3) && is_pending(&page));
            assert_eq!(page[mask].load(Ordering::Relaxed), 0);
            page[0].fetch_and(!UPCALL, Ordering::Relaxed);
            assert!(!unmask(&page, width, 3), "it was not held back");
            assert!(!unmask(&page, width, 64) && !unmask(&page, width, u32::MAX));
        }
    }

    #[track_caller]
    fn nanoseconds(kilohertz: u32, ticks: u64) -> u64 {
        let page = page();
        set_rate(&page, kilohertz);
        let word = page[56 / 8].load(Ordering::Relaxed);
        let shifted = u128::from(ticks) << (word >> 32);
        u64::try_from((shifted * u128::from(word & 0xffff_ffff)) >> 32).expect("in range")
    }

    #[test]
    fn a_second_of_ticks_is_a_second() {
        for kilohertz in [1_000, 999_999, 1_000_000, 2_400_000, u32::MAX] {
            let second = nanoseconds(kilohertz, u64::from(kilohertz) * 1000);
            assert!((999_999_990..=1_000_000_000).contains(&second), "{kilohertz}: {second}");
        }
        assert_ne!(nanoseconds(0, 1000), 0);
    }
}
