//! Promises of the quarantine, on hardware that fails on demand.

extern crate std;

use core::cell::Cell;
use std::{vec, vec::Vec};

use super::*;
use crate::{Batch, Gfn, Mfn, Run, Shared};

const ONE: DomainId = DomainId::new(1);
const TWO: DomainId = DomainId::new(2);

/// Hardware of one kind: counts flushes and pages, and fails if told to.
#[derive(Default)]
struct Unit {
    flushes: Cell<u64>,
    pages: Cell<u64>,
    broken: Cell<bool>,
}

impl<K: Kind> Flush<K> for Unit {
    type InFlight = ();
    type Error = ();

    fn start(&self, _: DomainId, cover: &Cover) {
        self.flushes.set(self.flushes.get() + 1);
        self.pages.set(self.pages.get() + cover.pages());
    }

    fn wait(&self, (): ()) -> Result<(), ()> {
        if self.broken.get() { Err(()) } else { Ok(()) }
    }
}

#[derive(Default)]
struct World {
    cpus: Unit,
    units: Unit,
}

impl World {
    fn hardware(&self) -> Hardware<'_, Unit, Unit> {
        Hardware { tlb: &self.cpus, iotlb: &self.units }
    }

    fn broken(&self, cpus: bool, units: bool) {
        self.cpus.broken.set(cpus);
        self.units.broken.set(units);
    }

    /// How many flushes of each kind there were since the last time.
    fn flushes(&self) -> (u64, u64) {
        (self.cpus.flushes.take(), self.units.flushes.take())
    }

    /// A batch with these pages and one table page, whose flush failed.
    fn failed(&self, domain: DomainId, frames: core::ops::Range<u64>) -> Held<u64, 4> {
        let mut batch: Batch<u64, 4> = Batch::new(domain);
        for frame in frames.clone() {
            let run = Run::single(Gfn::new(frame));
            batch
                .hold(|skipped| Ok::<_, ()>((frame, skipped.leaf::<Shared>(run, 0).into())))
                .unwrap();
        }
        let table = TablePage::unlinked(Mfn::new(1000 + frames.start));
        let run = Run::single(Gfn::new(frames.start));
        batch.edit_many(|skipped, _| skipped.table::<Shared>(run, table)).unwrap();
        batch.flush(&self.hardware()).unwrap_err().held
    }
}

type Kept = Quarantine<u64, 4, 3>;

fn out(quarantine: &mut Kept, domain: DomainId) -> Vec<u64> {
    let mut pages = vec![];
    while let Some(page) = quarantine.next_page(domain) {
        pages.push(*page.get());
    }
    while let Some(table) = quarantine.next_table(domain) {
        pages.push(table.get().mfn().get());
    }
    pages.sort_unstable();
    pages
}

/// Flushes for `domain`; says whether it was free of errors.
fn flush(world: &World, quarantine: &mut Kept, domain: DomainId) -> bool {
    let attempt = quarantine.owed(domain).unwrap().flush(&world.hardware());
    let fine = attempt.error.is_none();
    assert_eq!(quarantine.settle(attempt.paid), fine);
    fine
}

#[test]
fn one_flush_of_each_kind_releases_every_batch_of_the_domain_and_no_other() {
    let world = World::default();
    world.broken(true, true);
    let mut quarantine = Kept::new();
    for (domain, frames) in [(ONE, 0..4), (TWO, 10..12), (ONE, 20..22)] {
        quarantine.keep(world.failed(domain, frames)).unwrap();
    }
    assert_eq!((quarantine.batches(), quarantine.pages(), quarantine.tables()), (3, 8, 3));
    assert_eq!(out(&mut quarantine, ONE), [], "nothing is flushed yet");
    world.broken(false, false);
    world.flushes();
    world.cpus.pages.set(0);
    assert!(flush(&world, &mut quarantine, ONE));
    assert_eq!((world.flushes(), world.cpus.pages.get()), ((1, 1), 6));
    assert_eq!(out(&mut quarantine, TWO), []);
    assert_eq!(out(&mut quarantine, ONE), [0, 1, 2, 3, 20, 21, 1000, 1020]);
    assert_eq!((quarantine.batches(), quarantine.pages(), quarantine.tables()), (1, 2, 1));
    assert!(quarantine.owed(ONE).is_none());
    assert!(flush(&world, &mut quarantine, TWO));
    assert_eq!(out(&mut quarantine, TWO), [10, 11, 1010]);
    assert_eq!(quarantine.batches(), 0);
}

#[test]
fn a_kind_is_paid_once_and_pages_wait_for_the_other() {
    let world = World::default();
    for first in [(true, false), (false, true)] {
        world.broken(true, true);
        let mut quarantine = Kept::new();
        quarantine.keep(world.failed(ONE, 0..2)).unwrap();
        world.flushes();
        assert!(!flush(&world, &mut quarantine, ONE));
        assert_eq!((world.flushes(), out(&mut quarantine, ONE)), ((1, 1), vec![]));
        world.broken(first.0, first.1);
        assert!(!flush(&world, &mut quarantine, ONE));
        assert_eq!((world.flushes(), out(&mut quarantine, ONE)), ((1, 1), vec![]));
        world.broken(false, false);
        assert!(flush(&world, &mut quarantine, ONE));
        assert_eq!(world.flushes(), (first.0.into(), first.1.into()));
        assert_eq!(out(&mut quarantine, ONE), [0, 1, 1000]);
    }
}

#[test]
fn a_flush_that_began_before_a_batch_came_in_does_not_release_it() {
    let world = World::default();
    world.broken(true, true);
    let mut quarantine = Kept::new();
    quarantine.keep(world.failed(ONE, 0..1)).unwrap();
    let late = world.failed(ONE, 1..2);
    world.broken(false, false);
    let owed = quarantine.owed(ONE).unwrap();
    quarantine.keep(late).unwrap();
    let paid = owed.flush(&world.hardware()).paid;
    assert!(quarantine.settle(paid));
    assert_eq!(out(&mut quarantine, ONE), [0, 1000]);
    assert_eq!(quarantine.pages(), 1);
    assert!(flush(&world, &mut quarantine, ONE));
    assert_eq!(out(&mut quarantine, ONE), [1, 1001]);
}

#[test]
fn what_was_paid_for_one_quarantine_is_not_believed_by_another() {
    let world = World::default();
    world.broken(true, true);
    let (mut here, mut there) = (Kept::new(), Kept::new());
    here.keep(world.failed(ONE, 0..1)).unwrap();
    there.keep(world.failed(ONE, 1..2)).unwrap();
    world.broken(false, false);
    let paid = here.owed(ONE).unwrap().flush(&world.hardware()).paid;
    assert!(!there.settle(paid));
    assert_eq!(out(&mut there, ONE), []);
    for quarantine in [&mut here, &mut there] {
        assert!(flush(&world, quarantine, ONE));
        assert_eq!(out(quarantine, ONE).len(), 2);
    }
}

#[test]
fn a_full_quarantine_gives_the_batch_back_with_every_page() {
    let world = World::default();
    world.broken(true, true);
    let mut quarantine = Kept::new();
    for frame in 0..3 {
        quarantine.keep(world.failed(ONE, frame..frame + 1)).unwrap();
    }
    let mut fourth = quarantine.keep(world.failed(ONE, 3..4)).unwrap_err();
    assert_eq!((fourth.len(), fourth.tables()), (1, 1));
    world.broken(false, false);
    let mut flushed = fourth.retry(&world.hardware()).unwrap();
    assert_eq!(flushed.next_page().map(|page| *page.get()), Some(3));
    assert!(flushed.next_table().is_some());
    assert!(flush(&world, &mut quarantine, ONE));
    assert_eq!(out(&mut quarantine, ONE), [0, 1, 2, 1000, 1001, 1002]);
    // There is room again.
    world.broken(true, true);
    quarantine.keep(world.failed(ONE, 4..5)).unwrap();
    world.broken(false, false);
    assert!(flush(&world, &mut quarantine, ONE));
    assert_eq!(out(&mut quarantine, ONE), [4, 1004]);
}
