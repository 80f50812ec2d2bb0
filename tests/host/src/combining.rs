//! Many callers that flush one domain at once, each on a thread of its own.
//!
//! [`flushes`] holds the first flush open until every caller has asked for one, which is
//! the case that [`flush::Combiner`] is made for. [`going_on`] lets them ask again and again,
//! and counts the pages that all flushes name together.

use std::{
    cell::Cell,
    convert::Infallible,
    sync::atomic::{AtomicU64, AtomicUsize, Ordering},
    thread,
};

use flush::{Batch, Combiner, Cover, DomainId, Flush, Gfn, Run, Seat, Shared, Tlb};

use crate::Null;

/// The most callers that [`flushes`] and [`going_on`] take.
pub const MOST_CALLERS: usize = 32;

const DOMAIN: DomainId = DomainId::new(1);

/// CPUs whose first flush ends only when as many callers wait as are expected.
struct Gate<'a> {
    waiting: &'a AtomicUsize,
    expected: usize,
}

impl Flush<Tlb> for Gate<'_> {
    type InFlight = ();
    type Error = Infallible;

    fn start(&self, _: DomainId, _: &Cover) {}

    fn wait(&self, (): ()) -> Result<(), Self::Error> {
        while self.waiting.load(Ordering::Relaxed) < self.expected {
            thread::yield_now();
        }
        Ok(())
    }
}

/// How many flushes `callers` callers need whose requests all come before the first ends.
///
/// Each unmaps one page from a table that CPUs and devices share. `None` if there are no
/// callers, or more than [`MOST_CALLERS`].
///
/// # Panics
/// If a caller does not get its page back, which would be a defect of the combiner.
#[must_use]
pub fn flushes(callers: usize) -> Option<u64> {
    if !(1..=MOST_CALLERS).contains(&callers) {
        return None;
    }
    let waiting = AtomicUsize::new(0);
    // The leader of the first flush does not wait for itself.
    let gate = Gate { waiting: &waiting, expected: callers - 1 };
    let combiner = Combiner::<_, _, MOST_CALLERS>::new(DOMAIN, gate, Null);
    let work = |caller: usize| {
        let counted = Cell::new(false);
        // Who waits has a ticket already.
        let relax = || {
            if !counted.replace(true) {
                waiting.fetch_add(1, Ordering::Relaxed);
            }
            thread::yield_now();
        };
        let seat = combiner.seat(caller, relax).expect("every caller has a number of its own");
        unmap(&seat, caller);
    };
    together(callers, work);
    assert_eq!(combiner.tickets(), callers as u64);
    Some(combiner.flushes())
}

/// Runs `work` for each caller, on a thread of its own.
fn together(callers: usize, work: impl Fn(usize) + Sync) {
    thread::scope(|scope| {
        for caller in 0..callers {
            let work = &work;
            scope.spawn(move || work(caller));
        }
    });
}

/// Unmaps the caller's page, and gets it back.
fn unmap<T, R>(seat: &Seat<'_, T, Null, R, MOST_CALLERS, 32>, caller: usize)
where
    T: Flush<Tlb, Error = Infallible>,
    R: Fn(),
{
    let mut batch = Batch::<usize, 1>::new(DOMAIN);
    // Apart from all others, so that pages of a cover are those that were asked for.
    let run = Run::single(Gfn::new(2 * caller as u64));
    let held = batch.hold(|skipped| Ok::<_, ()>((caller, skipped.leaf::<Shared>(run, 0).into())));
    assert_eq!(held, Ok(()));
    let page = batch.flush(&seat.hardware()).map(|mut flushed| flushed.next_page());
    assert_eq!(page.ok().flatten().map(|page| *page.get()), Some(caller));
}

/// How often each caller of [`going_on`] asks.
const ROUNDS: u64 = 500;

/// CPUs whose flushes take some time, and the pages that all of them name.
#[derive(Default)]
struct Slow(AtomicU64);

impl Flush<Tlb> for Slow {
    type InFlight = ();
    type Error = Infallible;

    fn start(&self, _: DomainId, cover: &Cover) {
        self.0.fetch_add(cover.pages(), Ordering::Relaxed);
    }

    fn wait(&self, (): ()) -> Result<(), Self::Error> {
        (0..4).for_each(|_| thread::yield_now());
        Ok(())
    }
}

/// What callers came to that flush again and again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GoingOn {
    /// Pages given back, each in a batch of its own.
    pub pages: u64,
    /// Pages that the flushes named: one that two flushes name counts twice.
    pub named: u64,
}

/// What `callers` callers come to that give pages back one after the other.
///
/// `None` if there are no callers, or more than [`MOST_CALLERS`].
///
/// # Panics
/// If a caller does not get a page back, which would be a defect of the combiner.
#[must_use]
pub fn going_on(callers: usize) -> Option<GoingOn> {
    if !(1..=MOST_CALLERS).contains(&callers) {
        return None;
    }
    let combiner = Combiner::<_, _, MOST_CALLERS>::new(DOMAIN, Slow::default(), Null);
    together(callers, |caller| {
        let seat = combiner.seat(caller, thread::yield_now).expect("a number of its own");
        (0..ROUNDS).for_each(|_| unmap(&seat, caller));
    });
    let Slow(named) = combiner.tlb();
    Some(GoingOn { pages: combiner.tickets(), named: named.load(Ordering::Relaxed) })
}
