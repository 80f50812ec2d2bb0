//! Promises of the combiner that need no interleaving, and many threads at once.

extern crate std;

use core::{
    cell::{Cell, RefCell},
    sync::atomic::{AtomicU64 as Word, AtomicUsize, Ordering::SeqCst},
};
use std::{thread, vec::Vec};

use super::*;
use crate::{
    Batch, Change, Depth, Extent, Failure, FlushError, Flushed, Gfn, Kind, NoIommu, Run, Shared,
};

const DOMAIN: DomainId = DomainId::new(1);

/// Hardware that writes down what it was asked for, and fails on demand.
#[derive(Debug, Default)]
struct Log {
    covers: RefCell<Vec<Cover>>,
    fail: Cell<bool>,
}

impl<K: Kind> Flush<K> for Log {
    type InFlight = ();
    type Error = &'static str;
    fn start(&self, domain: DomainId, cover: &Cover) {
        assert_eq!(domain, DOMAIN);
        self.covers.borrow_mut().push(cover.clone());
    }
    fn wait(&self, (): ()) -> Result<(), &'static str> {
        if self.fail.get() { Err("broken") } else { Ok(()) }
    }
}

type Logged = Combiner<Log, Log, 256>;

fn logged() -> Logged {
    Combiner::new(DOMAIN, Log::default(), Log::default())
}

fn idle() {
    panic!("nobody else leads");
}

fn run(first: u64, last: u64) -> Run {
    Run::new(Gfn::new(first), Gfn::new(last)).unwrap()
}

fn single(frame: u64) -> Cover {
    let mut cover = Cover::NOTHING;
    cover.record(run(frame, frame), 0, Depth::Leaves, Change::Modified);
    cover
}

/// Publishes a cover that nobody waits for yet.
fn publish(seat: &Seat<'_, Log, Log, fn(), 256, 32>, frame: u64) {
    drop(Flush::<Tlb>::start(seat, DOMAIN, &single(frame)));
}

fn hold<const N: usize>(batch: &mut Batch<u64, N>, frame: u64) {
    let edit = batch.hold(|skipped| {
        let gone = skipped.leaf::<Shared>(run(frame, frame), 0);
        Ok::<_, ()>((frame, gone.into()))
    });
    assert_eq!(edit, Ok(()));
}

fn holding(frames: core::ops::Range<u64>) -> Batch<u64, 32> {
    let mut batch = Batch::new(DOMAIN);
    frames.for_each(|frame| hold(&mut batch, frame));
    batch
}

fn give_out<const N: usize>(mut flushed: Flushed<'_, u64, N>) -> usize {
    core::iter::from_fn(|| flushed.next_page()).count()
}

#[test]
fn a_batch_at_a_seat_costs_one_flush_of_each_kind_and_gives_its_pages_out() {
    let combiner = logged();
    let seat = combiner.seat(0, idle).unwrap();
    let mut batch = holding(64..96);
    assert_eq!(batch.flush(&seat.hardware()).map(give_out).ok(), Some(32));
    for log in [&combiner.tlb, &combiner.iotlb] {
        let covers = log.covers.borrow();
        assert_eq!(covers.len(), 1);
        assert_eq!(covers[0].extent(), Extent::Runs(&[run(64, 95)]));
    }
    assert_eq!((combiner.tickets(), combiner.flushes()), (1, 1));
    assert!(batch.is_idle());
}

#[test]
fn a_kind_that_nobody_asks_for_is_left_alone() {
    let combiner = logged();
    let seat = combiner.seat(0, idle).unwrap();
    let asked = Flush::<Tlb>::start(&seat, DOMAIN, &single(5));
    assert_eq!(Flush::<Tlb>::wait(&seat, asked), Ok(()));
    assert_eq!(combiner.tlb.covers.borrow().len(), 1);
    assert_eq!(combiner.iotlb.covers.borrow().len(), 0);

    let without = Combiner::<_, _, 1>::new(DOMAIN, Log::default(), NoIommu);
    let seat = without.seat(0, idle).unwrap();
    let asked = Flush::<Tlb>::start(&seat, DOMAIN, &single(5));
    assert_eq!(Flush::<Tlb>::wait(&seat, asked), Ok(()));
}

/// Asks from each of these seats, the later ones while the earlier ones wait. Then `lead`
/// is given up, and the last one leads.
fn ask_together(combiner: &Logged, lead: &Cell<Option<Lead<'_>>>, numbers: &[usize]) {
    let Some((number, later)) = numbers.split_first() else {
        lead.set(None);
        return;
    };
    let rested = Cell::new(false);
    let relax = || {
        assert!(!rested.replace(true), "seat {number} waits in vain");
        ask_together(combiner, lead, later);
    };
    let seat = combiner.seat(*number, relax).unwrap();
    let asked = Flush::<Tlb>::start(&seat, DOMAIN, &single(*number as u64 * 10));
    assert_eq!(Flush::<Tlb>::wait(&seat, asked), Ok(()));
}

#[test]
fn the_leader_flushes_what_every_seat_asked_for() {
    let combiner = logged();
    let lead = Cell::new(Lead::take(&combiner.leading));
    let numbers = [1, 63, 64, 127, 128, 255, 7];
    ask_together(&combiner, &lead, &numbers);
    let mut all = Cover::NOTHING;
    numbers.iter().for_each(|number| all.merge(&single(*number as u64 * 10)));
    assert_eq!(*combiner.tlb.covers.borrow(), [all]);
}

#[test]
fn what_has_no_ticket_yet_is_left_to_the_next_leader() {
    let combiner = logged();
    let early = combiner.seat(1, idle as fn()).unwrap();
    publish(&early, 10);
    flush_alone(&combiner, 0, 7, Ok(()));
    assert_eq!(*combiner.tlb.covers.borrow(), [single(7)]);
}

/// Asks for one page at a seat, while nobody leads.
#[track_caller]
fn flush_alone(
    combiner: &Logged,
    number: usize,
    frame: u64,
    expected: Result<(), CombineError<&'static str>>,
) {
    let seat = combiner.seat(number, idle).unwrap();
    let asked = Flush::<Tlb>::start(&seat, DOMAIN, &single(frame));
    assert_eq!(Flush::<Tlb>::wait(&seat, asked), expected);
}

#[test]
fn what_one_leader_flushed_no_later_one_does_though_its_owner_has_not_looked() {
    let combiner = logged();
    let late = combiner.seat(1, idle).unwrap();
    let cpus = Flush::<Tlb>::start(&late, DOMAIN, &single(10));
    let units = Flush::<Iotlb>::start(&late, DOMAIN, &single(11));
    assert_eq!(Flush::<Tlb>::wait(&late, cpus), Ok(()));
    let mut batch = holding(7..8);
    assert_eq!(
        batch.flush(&combiner.seat(0, idle).unwrap().hardware()).map(give_out).ok(),
        Some(1)
    );
    assert_eq!(Flush::<Iotlb>::wait(&late, units), Ok(()));
    assert_eq!(*combiner.tlb.covers.borrow(), [single(10), single(7)]);
    assert_eq!(*combiner.iotlb.covers.borrow(), [single(11), single(7)]);
    assert_eq!(combiner.flushes(), 2);
}

#[test]
fn what_a_failed_flush_should_have_covered_the_next_one_does_and_a_third_does_not() {
    let combiner = logged();
    let lead = Cell::new(Lead::take(&combiner.leading));
    let others = || {
        lead.set(None);
        combiner.tlb.fail.set(true);
        flush_alone(&combiner, 2, 20, Err(CombineError::Led("broken")));
        combiner.tlb.fail.set(false);
        flush_alone(&combiner, 3, 30, Ok(()));
        flush_alone(&combiner, 4, 40, Ok(()));
    };
    let seat = combiner.seat(1, others).unwrap();
    let asked = Flush::<Tlb>::start(&seat, DOMAIN, &single(10));
    assert_eq!(Flush::<Tlb>::wait(&seat, asked), Ok(()));
    let both = |frame| {
        let mut cover = single(10);
        cover.merge(&single(frame));
        cover
    };
    assert_eq!(*combiner.tlb.covers.borrow(), [both(20), both(30), single(40)]);
}

#[test]
fn a_leader_whose_devices_were_served_asks_them_for_nothing() {
    let combiner = logged();
    let lead = Cell::new(Lead::take(&combiner.leading));
    let other = || {
        lead.set(None);
        combiner.tlb.fail.set(true);
        flush_alone(&combiner, 2, 20, Err(CombineError::Led("broken")));
        combiner.tlb.fail.set(false);
    };
    let seat = combiner.seat(1, other).unwrap();
    let cpus = Flush::<Tlb>::start(&seat, DOMAIN, &single(10));
    let units = Flush::<Iotlb>::start(&seat, DOMAIN, &single(11));
    assert_eq!(Flush::<Tlb>::wait(&seat, cpus), Ok(()));
    assert_eq!(Flush::<Iotlb>::wait(&seat, units), Ok(()));
    assert_eq!(combiner.tlb.covers.borrow().len(), 2);
    assert_eq!(*combiner.iotlb.covers.borrow(), [single(11)]);
}

#[test]
fn a_seat_that_went_away_asks_for_nothing() {
    let combiner = logged();
    let gone = combiner.seat(9, idle as fn()).unwrap();
    publish(&gone, 99);
    drop(gone);
    let seat = combiner.seat(8, idle).unwrap();
    let asked = Flush::<Tlb>::start(&seat, DOMAIN, &single(7));
    assert_eq!(Flush::<Tlb>::wait(&seat, asked), Ok(()));
    assert_eq!(combiner.tlb.covers.borrow()[0], single(7));
}

#[test]
fn a_seat_has_one_owner() {
    let combiner = logged();
    let seat = combiner.seat(3, idle);
    assert!(seat.is_some() && combiner.seat(3, idle).is_none());
    // Asking does not take it away either.
    assert!(combiner.place(3).is_none());
    assert!(combiner.seat(4, idle).is_some() && combiner.seat(256, idle).is_none());
    drop(seat);
    let place = combiner.place(3);
    assert!(place.is_some() && combiner.seat(3, idle).is_none());
    drop(place);
    assert!(combiner.seat(3, idle).is_some());
}

#[test]
fn a_failed_flush_names_its_reason_holds_every_page_and_can_be_retried() {
    let combiner = logged();
    combiner.iotlb.fail.set(true);
    let seat = combiner.seat(0, idle).unwrap();
    let mut batch = holding(0..4);
    let Err(Failure { mut held, error }) = batch.flush(&seat.hardware()) else {
        panic!("the IOMMU is broken");
    };
    let broken = FlushError { tlb: None, iotlb: Some(CombineError::Led("broken")) };
    assert_eq!((error, held.len()), (broken, 4));
    assert_eq!(held.retry(&seat.hardware()).map(drop), Err(broken));
    combiner.iotlb.fail.set(false);
    assert_eq!(held.retry(&seat.hardware()).map(give_out), Ok(4));
    // The CPUs had completed at once and were not asked again.
    assert_eq!(combiner.tlb.covers.borrow().len(), 1);
    assert_eq!(combiner.iotlb.covers.borrow().len(), 3);
    assert_eq!(combiner.tickets(), 3);
}

#[test]
fn what_cannot_be_asked_is_refused_and_asks_nobody() {
    let combiner = logged();
    let seat = combiner.seat(0, idle).unwrap();
    let refused = |refused| Err(CombineError::Refused(refused));
    let other = Flush::<Tlb>::start(&seat, DomainId::new(2), &single(1));
    assert_eq!(Flush::<Tlb>::wait(&seat, other), refused(Refused::OtherDomain));
    let elsewhere = combiner.seat(1, idle).unwrap();
    let foreign = Flush::<Tlb>::start(&elsewhere, DOMAIN, &single(3));
    assert_eq!(Flush::<Tlb>::wait(&seat, foreign), refused(Refused::NotAsked));
    drop(elsewhere);
    let first = Flush::<Tlb>::start(&seat, DOMAIN, &single(1));
    let second = Flush::<Tlb>::start(&seat, DOMAIN, &single(2));
    assert_eq!(Flush::<Tlb>::wait(&seat, second), refused(Refused::InFlight));
    assert_eq!(combiner.tickets(), 0);
    assert_eq!(Flush::<Tlb>::wait(&seat, first), Ok(()));
    assert_eq!(*combiner.tlb.covers.borrow(), [single(1)]);
}

/// One table entry for each caller, and whether hardware still caches it.
struct Caches<'a> {
    entries: &'a [Word; CALLERS],
    cached: &'a [Word; CALLERS],
    flushes: &'a AtomicUsize,
    /// Every flush with a number that this divides fails.
    failing: usize,
}

const CALLERS: usize = 8;

impl<K: Kind> Flush<K> for Caches<'_> {
    type InFlight = Vec<(usize, u64)>;
    type Error = ();

    fn start(&self, _: DomainId, cover: &Cover) -> Self::InFlight {
        let covered = |caller: &usize| {
            let frame = *caller as u64 * 2;
            cover.covers(run(frame, frame), Depth::Leaves)
        };
        let now = |caller: usize| (caller, self.entries[caller].load(SeqCst));
        (0..CALLERS).filter(covered).map(now).collect()
    }

    fn wait(&self, in_flight: Self::InFlight) -> Result<(), ()> {
        if self.flushes.fetch_add(1, SeqCst).is_multiple_of(self.failing) {
            return Err(());
        }
        for (caller, round) in in_flight {
            self.cached[caller].store(round, SeqCst);
        }
        Ok(())
    }
}

#[test]
fn many_threads_that_flush_at_once_release_nothing_stale() {
    let entries = [const { Word::new(0) }; CALLERS];
    let cached = [const { [const { Word::new(0) }; CALLERS] }; 2];
    let flushes = [const { AtomicUsize::new(0) }; 2];
    let hardware = |kind: usize, failing| Caches {
        entries: &entries,
        cached: &cached[kind],
        flushes: &flushes[kind],
        failing,
    };
    let combiner = Combiner::<_, _, CALLERS, 1>::new(DOMAIN, hardware(0, 5), hardware(1, 7));
    let work = |caller: usize| {
        let seat = combiner.seat(caller, thread::yield_now).unwrap();
        for round in 1..=200 {
            let frame = caller as u64 * 2;
            let mut batch = Batch::<u64, 1>::new(DOMAIN);
            entries[caller].store(round, SeqCst);
            hold(&mut batch, frame);
            let mut result = batch.flush(&seat.hardware()).map(give_out);
            while let Err(Failure { held, error }) = &mut result {
                match held.retry(&seat.hardware()).map(give_out) {
                    Ok(pages) => result = Ok(pages),
                    Err(again) => *error = again,
                }
            }
            assert_eq!(result.ok(), Some(1));
            let both = [&cached[0], &cached[1]].map(|cached| cached[caller].load(SeqCst));
            assert_eq!(both, [round; 2], "stale release");
        }
    };
    thread::scope(|scope| {
        for caller in 0..CALLERS {
            scope.spawn(move || work(caller));
        }
    });
    assert!(combiner.flushes() <= combiner.tickets());
}

#[test]
fn the_flushers_are_lent_and_come_back_when_nobody_has_a_seat() {
    let combiner = logged();
    let mut batch = Batch::<u64, 1>::new(DOMAIN);
    let held = batch.hold(|skipped| Ok::<_, ()>((5, skipped.leaf::<Shared>(run(5, 5), 0).into())));
    assert_eq!(held, Ok(()));
    let seat = combiner.seat(0, idle).unwrap();
    assert!(batch.flush(&seat.hardware()).unwrap().next_page().is_some());
    drop(seat);
    combiner.iotlb().covers.borrow_mut().push(Cover::NOTHING);
    assert_eq!(*combiner.tlb().covers.borrow(), [single(5)]);
    let (tlb, iotlb) = combiner.into_hardware();
    assert_eq!((tlb.covers.into_inner().len(), iotlb.covers.into_inner().len()), (1, 2));
}
