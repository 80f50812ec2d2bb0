//! Granters that rewrite their entries between any two of our accesses.

use core::cell::Cell;
use core::sync::atomic::{AtomicU16, AtomicU64, Ordering};

use flush::Gfn;

use super::fake::*;
use crate::Rights::{self, Read, ReadWrite};
use crate::active::{Pins, Use};
use crate::entry::{
    OpenError, Opened, Sorts, TRIES, Target, Window, Word, close_v1, open_v1, open_v2,
};

/// A word that the granter rewrites: the n-th access sees the n-th value.
struct Rewritten<'a> {
    values: &'a [u64],
    accesses: Cell<usize>,
    stored: Cell<Option<u64>>,
}

impl<'a> Rewritten<'a> {
    fn new(values: &'a [u64]) -> Self {
        Self { values, accesses: Cell::new(0), stored: Cell::new(None) }
    }
    fn now(&self) -> u64 {
        let access = self.accesses.get();
        self.accesses.set(access + 1);
        self.values[access.min(self.values.len() - 1)]
    }
}

impl Word for Rewritten<'_> {
    fn load(&self) -> u64 {
        self.now()
    }
    fn exchange(&self, expected: u64, new: u64) -> Result<(), u64> {
        let now = self.now();
        if now != expected {
            return Err(now);
        }
        self.stored.set(Some(new));
        Ok(())
    }
}

const fn v1(flags: u16, domain: u16, frame: u32) -> u64 {
    flags as u64 | (domain as u64) << 16 | (frame as u64) << 32
}

const GOOD: u64 = v1(PERMIT, 1, 0x77);
const TO_OTHER: u64 = v1(PERMIT, 3, 0x77);
const REVOKED: u64 = v1(0, 1, 0x77);
const LOCKED: u64 = v1(PERMIT | READ_ONLY, 1, 0x77);
const OTHER_FRAME: u64 = v1(PERMIT, 1, 0xffff_ffff);

#[track_caller]
fn check_v1(values: &[u64], rights: Rights, want: Result<u64, OpenError>, stored: Option<u64>) {
    let word = Rewritten::new(values);
    let opened = open_v1(&word, CALLER, rights).map(|opened| opened.target);
    let want = want.map(|frame| Target::Page { frame: Gfn::new(frame), window: Window::PAGE });
    assert_eq!((opened, word.stored.get()), (want, stored));
    assert!(word.accesses.get() <= 1 + TRIES);
}

#[test]
fn version_1_believes_only_what_its_exchange_covered() {
    let both = u64::from(READING | WRITING);
    check_v1(&[GOOD], ReadWrite, Ok(0x77), Some(GOOD | both));
    check_v1(&[GOOD], Read, Ok(0x77), Some(GOOD | u64::from(READING)));
    check_v1(&[LOCKED], Read, Ok(0x77), Some(LOCKED | u64::from(READING)));
    check_v1(&[LOCKED], ReadWrite, Err(OpenError::Refused), None);
    // The grantee, the frame, or the right changes before the exchange.
    check_v1(&[GOOD, TO_OTHER], Read, Err(OpenError::Refused), None);
    check_v1(&[GOOD, REVOKED], Read, Err(OpenError::Refused), None);
    check_v1(&[GOOD, LOCKED], ReadWrite, Err(OpenError::Refused), None);
    check_v1(&[GOOD, OTHER_FRAME], ReadWrite, Ok(0xffff_ffff), Some(OTHER_FRAME | both));
    check_v1(&[TO_OTHER, GOOD], Read, Err(OpenError::Refused), None);
}

#[test]
fn version_1_gives_a_restless_granter_five_tries() {
    let (a, b) = (GOOD, OTHER_FRAME);
    check_v1(&[a, b, a, b, a, a], Read, Ok(0x77), Some(a | u64::from(READING)));
    check_v1(&[a, b, a, b, a, b, b], Read, Err(OpenError::Unstable), None);
}

#[test]
fn version_2_looks_again_after_its_bits_are_set() {
    let both = READING | WRITING;
    for (values, before, rights, want, after) in [
        (&[GOOD, GOOD][..], 0, ReadWrite, Ok(both), both),
        (&[GOOD, GOOD], READING, ReadWrite, Ok(WRITING), both),
        (&[GOOD, GOOD], both, Read, Ok(0), both),
        (&[REVOKED], 0, Read, Err(OpenError::Refused), 0),
        (&[GOOD, REVOKED], 0, ReadWrite, Err(OpenError::Unstable), 0),
        (&[GOOD, TO_OTHER], READING, ReadWrite, Err(OpenError::Unstable), READING),
        (&[GOOD, LOCKED], READING, ReadWrite, Err(OpenError::Unstable), READING),
        (&[GOOD, REVOKED], both, ReadWrite, Err(OpenError::Unstable), both),
        (&[GOOD, LOCKED], 0, Read, Ok(READING), READING),
    ] {
        let status = AtomicU16::new(before);
        let head = Rewritten::new(values);
        let frame = Rewritten::new(&[0x1_2345_6789_abcd]);
        let opened = open_v2(&head, &frame, &status, CALLER, rights, Sorts::Pages);
        let frame = Gfn::new(0x1_2345_6789_abcd);
        let target = Target::Page { frame, window: Window::PAGE };
        let want = want.map(|newly_set| Opened { target, newly_set });
        assert_eq!(opened, want, "{values:x?}");
        assert_eq!(status.load(Ordering::SeqCst), after, "{values:x?}");
    }
}

#[test]
fn a_window_is_the_one_of_the_second_look() {
    const PART: u64 = GOOD | 1 << 8;
    let (at_0, at_64) = (PART & 0xffff_ffff | 16 << 48, PART & 0xffff_ffff | 64 << 32 | 32 << 48);
    for (values, sorts, want) in [
        (&[at_0, at_64][..], Sorts::Parts, Ok(Window::of(64, 32))),
        (&[GOOD, at_0], Sorts::Forwards, Ok(Window::of(0, 16))),
        (&[at_0, GOOD], Sorts::Parts, Ok(Window::PAGE)),
        (&[GOOD, at_0], Sorts::Pages, Err(OpenError::Unstable)),
        (&[at_0, at_0], Sorts::Pages, Err(OpenError::Refused)),
    ] {
        let status = AtomicU16::new(0);
        let head = Rewritten::new(values);
        let opened = open_v2(&head, &Rewritten::new(&[5]), &status, CALLER, Read, sorts);
        let want = want.map(|window| Target::Page { frame: Gfn::new(5), window });
        assert_eq!(opened.map(|opened| opened.target), want, "{values:x?}");
        assert_eq!(status.load(Ordering::SeqCst) != 0, want.is_ok(), "{values:x?}");
    }
    // What does not lie in the page is no part of it.
    assert_eq!(Window::of(4000, u16::MAX), Window::of(4000, 96));
    assert_eq!(Window::of(u16::MAX, 7), Window::of(4096, 0));
}

#[test]
fn closing_an_entry_leaves_everything_else_to_the_granter() {
    let word = AtomicU64::new(OTHER_FRAME | u64::from(READING | WRITING | READ_ONLY));
    close_v1(&word, WRITING);
    assert_eq!(word.load(Ordering::SeqCst), OTHER_FRAME | u64::from(READING | READ_ONLY));
    close_v1(&word, READING | WRITING);
    assert_eq!(word.load(Ordering::SeqCst), OTHER_FRAME | u64::from(READ_ONLY));
}

#[test]
fn what_the_granter_does_to_a_pinned_entry_changes_nothing_for_the_holder() {
    let world = World::new();
    let first = world.map_one(request(30));
    // Revoked, and naming another frame: the holder's pin decides.
    world.grant(GRANTER, 30, 0, OTHER);
    let again = crate::abi::MapGrantRef { host_addr: 0x5_0000_0000, ..request(30) };
    let second = world.map_one(again);
    assert_eq!(second.status, 0);
    assert_eq!(world.count(GRANTER, 30).references, 2);
    assert_eq!(world.unmap(&[unmap_of(&first), unmap_of(&second)]), [0, 0]);
    assert_eq!(world.map_one(again).status, -1, "nobody holds it now");
    world.assert_clean();
}

#[test]
fn a_reader_has_to_ask_the_entry_before_it_may_write() {
    let world = World::new();
    let read = crate::abi::MapGrantRef { flags: HOST | MAP_READ_ONLY, ..request(30) };
    let reader = world.map_one(read);
    assert_eq!(reader.status, 0);
    world.grant(GRANTER, 30, PERMIT | READ_ONLY | READING, CALLER);
    let write = crate::abi::MapGrantRef { host_addr: 0x5_0000_0000, ..request(30) };
    assert_eq!(world.map_one(write).status, -1);
    assert_eq!(world.in_use(GRANTER, 30), READING);
    // A page that cannot be written takes only the new bit back.
    world.grant(GRANTER, 30, PERMIT | READING, CALLER);
    world.page_error.set(Some(crate::PageError::Refused));
    assert_eq!(world.map_one(write).status, -1);
    assert_eq!(world.in_use(GRANTER, 30), READING);
    world.page_error.set(None);
    let writer = world.map_one(write);
    assert_eq!(world.in_use(GRANTER, 30), READING | WRITING);
    assert_eq!(world.unmap(&[unmap_of(&writer)]), [0]);
    assert_eq!(world.in_use(GRANTER, 30), READING, "a reader is left");
    assert_eq!(world.unmap(&[unmap_of(&reader)]), [0]);
    world.assert_clean();
}

#[test]
fn pin_counters_never_touch_each_other() {
    for (pin, other) in [(Use::at(0), Use::at(8)), (Use::at(8), Use::at(0))] {
        let mut pins = Pins::default().add(other).unwrap();
        for count in 0..128 {
            assert_eq!((pins.count(pin), pins.count(other)), (count, 1));
            pins = pins.add(pin).unwrap();
        }
        assert_eq!(pins.add(pin), None);
        assert!(pins.writable());
        for count in (0..128).rev() {
            pins = pins.remove(pin);
            assert_eq!((pins.count(pin), pins.count(other)), (count, 1));
        }
        assert_eq!(pins.remove(pin), pins, "none to remove");
        assert!(pins.remove(other).is_empty());
    }
}
