//! The other end of a guest's console ring, and of its store's.
//!
//! A page is shared with a guest, which may write anything to it at any moment. [`drain`]
//! takes what the guest has put into its console. [`answer`] answers each request to the
//! store: it knows the guest's own number, and has nothing else of any name. Counters run
//! on past a ring's size and start again at zero, so they are subtracted modulo 2^32.
//!
//! Source: Xen's public headers `io/console.h` and `io/xs_wire.h`.

use core::fmt::Write as _;
use core::sync::atomic::{AtomicU64, Ordering, fence};

use arrayvec::ArrayString;

/// A page that is shared with a guest.
pub type Page = [AtomicU64; 512];

/// Where the console's output lies.
const OUTPUT: usize = 1024;
/// Bytes of it.
const OUTPUT_BYTES: u32 = 2048;
/// Its counters: taken, and put.
const OUTPUT_TAKEN: usize = 3080;
const OUTPUT_PUT: usize = 3084;

/// The store: requests, and replies.
const REQUESTS: usize = 0;
const REPLIES: usize = 1024;
/// Bytes of each.
const STORE_BYTES: u32 = 1024;
const REQUESTS_TAKEN: usize = 2048;
const REQUESTS_PUT: usize = 2052;
const REPLIES_TAKEN: usize = 2056;
const REPLIES_PUT: usize = 2060;
/// Bytes of a message's head: type, request, transaction, length.
const MESSAGE: u32 = 16;
/// The type of a request to read a value, and the one value there is.
const READ: u32 = 2;
const OWN_NUMBER: &[u8] = b"domid\0";
/// The type of a reply that says no, and what it says.
const ERROR: u32 = 16;
const NO_ENTRY: &[u8] = b"ENOENT\0";

/// The word that byte `at` is in, and by how many bits it is shifted.
fn word(page: &Page, at: usize) -> Option<(&AtomicU64, usize)> {
    Some((page.get(at / 8)?, at % 8 * 8))
}

fn byte(page: &Page, at: usize) -> u8 {
    word(page, at).map_or(0, |(word, shift)| (word.load(Ordering::Acquire) >> shift) as u8)
}

fn set_byte(page: &Page, at: usize, value: u8) {
    set(page, at, u64::from(value), 0xff);
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

/// Where in the page the byte at this count of a ring lies.
const fn place(ring: usize, count: u32, bytes: u32) -> usize {
    ring + (count % bytes) as usize
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
            *slot = byte(page, place(OUTPUT, taken, OUTPUT_BYTES));
            taken = taken.wrapping_add(1);
            length += 1;
        }
        left = left.saturating_sub(length as u32);
        show(piece.get(..length).unwrap_or_default());
    }
    fence(Ordering::SeqCst);
    set_counter(page, OUTPUT_TAKEN, put);
}

/// Answer all requests of `domain` to the store; whether there were any.
///
/// A request that is not whole yet waits for its rest, and one whose reply finds no room
/// for the guest to read replies.
#[must_use = "the guest waits to be told of a reply"]
pub fn answer(page: &Page, domain: u16) -> bool {
    let mut number: ArrayString<8> = ArrayString::new();
    // Five digits fit.
    write!(number, "{domain}").ok();
    let mut answered = false;
    // Each turn takes a request of at least 16 bytes from a ring of 1024.
    for _ in 0..STORE_BYTES / MESSAGE {
        let taken = counter(page, REQUESTS_TAKEN);
        let waiting = counter(page, REQUESTS_PUT).wrapping_sub(taken);
        if !(MESSAGE..=STORE_BYTES).contains(&waiting) {
            break;
        }
        let field = |offset: u32| {
            let bytes = [0, 1, 2, 3].map(|index: u32| {
                let at = taken.wrapping_add(offset).wrapping_add(index);
                byte(page, place(REQUESTS, at, STORE_BYTES))
            });
            u32::from_le_bytes(bytes)
        };
        let (kind, request, transaction, length) = (field(0), field(4), field(8), field(12));
        let name = (16..)
            .map(|offset| byte(page, place(REQUESTS, taken.wrapping_add(offset), STORE_BYTES)));
        let own = kind == READ
            && usize::try_from(length) == Ok(OWN_NUMBER.len())
            && name.take(OWN_NUMBER.len()).eq(OWN_NUMBER.iter().copied());
        let (kind, body) = if own { (READ, number.as_bytes()) } else { (ERROR, NO_ENTRY) };
        let whole = length.saturating_add(MESSAGE);
        let mut put = counter(page, REPLIES_PUT);
        let used = put.wrapping_sub(counter(page, REPLIES_TAKEN));
        let needed = MESSAGE + body.len() as u32;
        let room = STORE_BYTES.checked_sub(used).is_some_and(|room| room >= needed);
        if whole > waiting || !room {
            break;
        }
        let head = [kind, request, transaction, body.len() as u32];
        let reply = head.into_iter().flat_map(u32::to_le_bytes).chain(body.iter().copied());
        for value in reply {
            set_byte(page, place(REPLIES, put, STORE_BYTES), value);
            put = put.wrapping_add(1);
        }
        fence(Ordering::SeqCst);
        set_counter(page, REPLIES_PUT, put);
        set_counter(page, REQUESTS_TAKEN, taken.wrapping_add(whole));
        answered = true;
    }
    answered
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
                set_byte(&page, place(OUTPUT, start.wrapping_add(index), OUTPUT_BYTES), *value);
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

    /// Put a request into the ring.
    fn ask(page: &Page, request: u32, body: &[u8]) {
        let mut put = counter(page, REQUESTS_PUT);
        let head = [2, request, 7, body.len() as u32];
        for value in head.into_iter().flat_map(u32::to_le_bytes).chain(body.iter().copied()) {
            set_byte(page, place(REQUESTS, put, STORE_BYTES), value);
            put = put.wrapping_add(1);
        }
        set_counter(page, REQUESTS_PUT, put);
    }

    #[test]
    fn every_request_to_the_store_is_answered_in_order() {
        let page = page();
        let mut read = 0;
        for round in 0..100 {
            ask(&page, 2 * round, b"vm\0");
            ask(&page, 2 * round + 1, b"domid/\0");
            assert!(answer(&page, 57), "there is something to tell");
            assert!(!answer(&page, 57), "nothing is told twice");
            for request in [2 * round, 2 * round + 1] {
                let reply: Vec<u8> = (0..23)
                    .map(|index| byte(&page, place(REPLIES, read + index, STORE_BYTES)))
                    .collect();
                assert_eq!(reply[4..8], request.to_le_bytes());
                assert_eq!((reply[0], &reply[16..]), (16, b"ENOENT\0".as_slice()));
                read += 23;
            }
            assert_eq!(counter(&page, REPLIES_PUT), read);
            set_counter(&page, REPLIES_TAKEN, read);
        }
    }

    #[test]
    fn a_guest_is_told_its_own_number() {
        let page = page();
        ask(&page, 3, b"domid\0");
        assert!(answer(&page, 57));
        let reply: Vec<u8> = (0..18).map(|at| byte(&page, REPLIES + at)).collect();
        assert_eq!((reply[0], reply[4], reply[12], &reply[16..]), (2, 3, 2, b"57".as_slice()));
        assert_eq!(counter(&page, REPLIES_PUT), 18);
    }

    #[test]
    fn a_request_waits_for_its_rest_and_a_reply_for_room() {
        let page = page();
        let replies = || counter(&page, REPLIES_PUT);
        ask(&page, 1, b"abc");
        set_counter(&page, REQUESTS_PUT, 18);
        assert!(!answer(&page, 57));
        assert_eq!(replies(), 0);
        set_counter(&page, REQUESTS_PUT, 19);
        set_counter(&page, REPLIES_PUT, 1002);
        assert!(!answer(&page, 57));
        assert_eq!(replies(), 1002);
        set_counter(&page, REPLIES_TAKEN, 1);
        assert!(answer(&page, 57));
        assert_eq!(replies(), 1025);
    }

    proptest! {
        #[test]
        fn a_page_of_anything_neither_panics_nor_hangs(
            words in proptest::collection::vec(any::<u64>(), 512),
            put: u32,
        ) {
            let page = page();
            for (to, from) in page.iter().zip(words) {
                to.store(from, Ordering::Relaxed);
            }
            let taken = counter(&page, REQUESTS_TAKEN);
            set_counter(&page, REQUESTS_PUT, taken.wrapping_add(put % 1025));
            let first = answer(&page, 57);
            prop_assert!(!first || counter(&page, REQUESTS_TAKEN) != taken);
            prop_assert!(drained(&page).len() <= 2048);
        }
    }
}
