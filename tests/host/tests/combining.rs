//! Callers that ask for a flush while one is under way share the next one.

use flush::{Combiner, Cover, DomainId, Flush, Gfn, Hardware, Mfn, Tlb};
use gnttab::Outcome;
use host::{
    Layout, Setup, Taken, TakenBatch, World,
    combining::{GoingOn, MOST_CALLERS, flushes, going_on},
    world::{BACKEND, OTHER_CPU},
};
use p2m::PageKind;

#[track_caller]
fn check(callers: usize) {
    let flushes = flushes(callers).expect("not too many callers");
    let most = if callers == 1 { 1 } else { 2 };
    assert!((1..=most).contains(&flushes), "{callers} callers: {flushes} flushes");
}

#[test]
fn callers_that_ask_before_the_first_flush_ends_need_at_most_two() {
    (1..=MOST_CALLERS).for_each(check);
    (0..50).for_each(|_| check(8));
}

#[test]
fn no_caller_and_too_many_are_refused() {
    assert_eq!(flushes(0), None);
    assert_eq!(flushes(MOST_CALLERS + 1), None);
    assert_eq!((going_on(0), going_on(MOST_CALLERS + 1)), (None, None));
}

/// Symptom: flushes of eight callers that went on named each page almost twice. Cause: a
/// leader collected what an earlier one had flushed, as long as the owner had not looked.
/// Cure: a cover shows the ticket it waits for, and is left out once that is completed.
#[test]
fn callers_that_go_on_have_each_page_flushed_once() {
    // A caller that is stopped in the middle of taking a ticket is flushed for until it goes
    // on. That is rare, but it happens to a busy machine.
    let shares = (0..5).map(|_| going_on(8).expect("not too many callers"));
    let least = shares.min_by_key(|GoingOn { named, .. }| *named).expect("five runs");
    assert!(least.named >= least.pages, "{least:?}: a page was not flushed");
    assert!(least.named <= least.pages + least.pages / 4, "{least:?}");
}

/// A flusher with something else going on between start and wait.
struct Between<'a, F> {
    inner: &'a F,
    action: &'a dyn Fn(),
}

impl<F: Flush<Tlb>> Flush<Tlb> for Between<'_, F> {
    type InFlight = F::InFlight;
    type Error = F::Error;

    fn start(&self, domain: DomainId, cover: &Cover) -> F::InFlight {
        let started = self.inner.start(domain, cover);
        (self.action)();
        started
    }

    fn wait(&self, in_flight: F::InFlight) -> Result<(), F::Error> {
        self.inner.wait(in_flight)
    }
}

/// Two batches at one combiner, over the real flushers: one is flushed and given out
/// while the other is on its way.
#[track_caller]
fn two_batches(layout: Layout) {
    const PAGES: u64 = 3;
    let world = World::new(Setup { layout, ..Setup::default() });
    let pages = |first: u64| -> Vec<(Gfn, Mfn)> {
        let gfns = (first..first + PAGES).map(Gfn::new);
        gfns.map(|gfn| (gfn, world.populate_block(BACKEND, gfn, 0))).collect()
    };
    let (early, late) = (pages(0x40_0000), pages(0x50_0000));
    let used = |pages: &[(Gfn, Mfn)]| {
        pages.iter().filter(|(gfn, _)| world.cpu_reaches(OTHER_CPU, *gfn)).count()
    };
    assert_eq!((used(&early), used(&late)), (3, 3));

    world.call_as(BACKEND, |caller| {
        let combiner = Combiner::<_, _, 2>::new(BACKEND, &caller.tlb, &caller.iotlb);
        let nobody_else = || panic!("one thread never waits for another");
        let seats = [0, 1].map(|number| combiner.seat(number, nobody_else).expect("it is free"));
        let cleared = |pages: &[(Gfn, Mfn)]| {
            let mut batch = TakenBatch::new(BACKEND);
            for (gfn, mfn) in pages {
                let expected = p2m::Expected { mfn: *mfn, kind: PageKind::RamReadWrite };
                let taken = Taken { mfn: *mfn, order: 0 };
                let held = batch.hold(|skipped| {
                    Ok::<_, p2m::ClearError>((taken, caller.guest.clear(*gfn, expected, skipped)?))
                });
                held.expect("the page is cleared");
            }
            batch
        };
        let mut batch = cleared(&late);
        let other = || {
            let mut batch = cleared(&early);
            let flushed = batch.flush(&seats[0].hardware()).expect("the flush completes");
            world.hypervisor.free(flushed);
            assert_eq!(used(&early), 0);
        };
        let tlb = Between { inner: &seats[1], action: &other };
        let flushed = batch.flush(&Hardware { tlb: &tlb, iotlb: &seats[1] });
        world.hypervisor.free(flushed.expect("the flush completes"));
        assert_eq!((combiner.tickets(), combiner.flushes()), (2, 2));
        Outcome::Done
    });
    assert_eq!(used(&late), 0);
    let seen: Vec<_> = world.machine.witnesses().iter().map(ToString::to_string).collect();
    assert!(seen.is_empty(), "{layout:?}: {seen:#?}");
    assert_eq!(world.audit(), [], "{layout:?}");
    assert_eq!(world.machine.misuses(), []);
}

#[test]
fn batches_at_one_combiner_leave_nothing_stale_on_the_model() {
    two_batches(Layout::Separate);
    two_batches(Layout::Shared);
}
