//! Many callers that flush one domain at once, each on a thread of its own.
//!
//! [`flushes`] holds the first flush open until every caller has asked for one, which is
//! the case that [`flush::Combiner`] is made for.

use std::{
    cell::Cell,
    sync::atomic::{AtomicUsize, Ordering},
    thread,
};

use flush::{Batch, Combiner, Cover, DomainId, Flush, Gfn, Run, Shared, Tlb};

use crate::Null;

/// The most callers that [`flushes`] takes.
pub const MOST_CALLERS: usize = 32;

const DOMAIN: DomainId = DomainId::new(1);

/// CPUs whose first flush ends only when as many callers wait as are expected.
struct Gate<'a> {
    waiting: &'a AtomicUsize,
    expected: usize,
}

impl Flush<Tlb> for Gate<'_> {
    type InFlight = ();
    type Error = std::convert::Infallible;

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
    let unmap = |caller: usize| {
        let counted = Cell::new(false);
        // Who waits has a ticket already.
        let relax = || {
            if !counted.replace(true) {
                waiting.fetch_add(1, Ordering::Relaxed);
            }
            thread::yield_now();
        };
        let seat = combiner.seat(caller, relax).expect("every caller has a number of its own");
        let mut batch = Batch::<usize, 1>::new(DOMAIN);
        let run = Run::single(Gfn::new(caller as u64));
        let held =
            batch.hold(|skipped| Ok::<_, ()>((caller, skipped.leaf::<Shared>(run, 0).into())));
        assert_eq!(held, Ok(()));
        let page = batch.flush(&seat.hardware()).map(|mut flushed| flushed.next_page());
        assert_eq!(page.ok().flatten().map(|page| *page.get()), Some(caller));
    };
    thread::scope(|scope| {
        for caller in 0..callers {
            let unmap = &unmap;
            scope.spawn(move || unmap(caller));
        }
    });
    assert_eq!(combiner.tickets(), callers as u64);
    Some(combiner.flushes())
}
