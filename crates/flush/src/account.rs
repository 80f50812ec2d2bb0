//! What batches asked of hardware, in numbers an operator can read at any time.
//!
//! An [`Account`] is storage of the embedder, for one domain or for all. A [`Metered`]
//! stands before the hardware of one kind, hands everything on, and counts it there. What
//! is read takes no lock and stops nobody; the difference of two readings is what
//! happened in between, so around one flush it is that of one batch.
//!
//! Which commands a unit was told, how often it was late, which CPUs were kicked, and
//! which tickets another's flush served is counted where it happens: by the unit, by the
//! CPUs of a domain, and by a [`Combiner`](crate::Combiner).

use core::sync::atomic::{AtomicU64, Ordering::Relaxed};

use crate::{
    Cover, DomainId, Flush, Kind,
    plan::{Figures, SIZES, Statistics},
};

/// What was asked of hardware of one kind. Counters wrap at 2^64.
#[derive(Debug, Default)]
pub struct Meter {
    /// Flushes that completed.
    completed: Statistics,
    issued: AtomicU64,
    failed: AtomicU64,
    runs: AtomicU64,
}

impl Meter {
    /// All at 0.
    #[must_use]
    pub const fn new() -> Self {
        Self {
            completed: Statistics::new(),
            issued: AtomicU64::new(0),
            failed: AtomicU64::new(0),
            runs: AtomicU64::new(0),
        }
    }

    /// What was counted so far.
    #[must_use]
    pub fn read(&self) -> Counted {
        let Self { completed, issued, failed, runs } = self;
        let Figures { flushes, leaves, pages_changed, .. } = completed.read();
        Counted {
            asked: leaves,
            recorded: runs.load(Relaxed),
            issued: issued.load(Relaxed),
            completed: flushes,
            failed: failed.load(Relaxed),
            pages_changed,
            sizes: completed.sizes(),
        }
    }
}

/// What was asked of one kind of hardware.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counted {
    /// Flushes there would have been without batches: one for each leaf. Each is counted
    /// once, when a flush of it completes.
    pub asked: u64,
    /// Runs of pages on record that they were merged into.
    pub recorded: u64,
    /// Flushes begun, those that were tried again among them.
    pub issued: u64,
    /// Flushes that completed.
    pub completed: u64,
    /// Flushes that failed.
    pub failed: u64,
    /// Pages on record; none for a cover of everything.
    pub pages_changed: u64,
    /// Flushes of 1 leaf, of 2, of up to 4, 8, 16 and 32, and of more.
    pub sizes: [u64; SIZES],
}

impl Counted {
    /// Flushes that were not needed because leaves shared one.
    #[must_use]
    pub const fn avoided(&self) -> u64 {
        self.asked.saturating_sub(self.completed)
    }

    /// What was counted since it was `earlier`.
    #[must_use]
    pub fn since(&self, earlier: &Self) -> Self {
        let Self { asked, recorded, issued, completed, failed, pages_changed, sizes } = earlier;
        let mut new = self.sizes;
        for (size, before) in new.iter_mut().zip(sizes) {
            *size = size.saturating_sub(*before);
        }
        Self {
            asked: self.asked.saturating_sub(*asked),
            recorded: self.recorded.saturating_sub(*recorded),
            issued: self.issued.saturating_sub(*issued),
            completed: self.completed.saturating_sub(*completed),
            failed: self.failed.saturating_sub(*failed),
            pages_changed: self.pages_changed.saturating_sub(*pages_changed),
            sizes: new,
        }
    }
}

/// Hardware of one kind, and where what it is asked for is counted.
#[derive(Clone, Copy, Debug)]
pub struct Metered<'a, F> {
    hardware: F,
    meter: &'a Meter,
}

impl<'a, F> Metered<'a, F> {
    /// Counts what `hardware` is asked for on `meter`.
    #[must_use]
    pub const fn new(hardware: F, meter: &'a Meter) -> Self {
        Self { hardware, meter }
    }

    /// The hardware.
    #[must_use]
    pub const fn hardware(&self) -> &F {
        &self.hardware
    }
}

/// A flush under way, and what it will have been.
#[derive(Debug)]
#[must_use = "the flush is over when it was waited for"]
pub struct MeteredFlush<T> {
    in_flight: T,
    figures: Figures,
    runs: u64,
}

impl<K: Kind, F: Flush<K>> Flush<K> for Metered<'_, F> {
    type InFlight = MeteredFlush<F::InFlight>;
    type Error = F::Error;

    fn start(&self, domain: DomainId, cover: &Cover) -> Self::InFlight {
        let in_flight = self.hardware.start(domain, cover);
        // Hardware works meanwhile.
        self.meter.issued.fetch_add(1, Relaxed);
        let runs = cover.runs().count() as u64;
        MeteredFlush { in_flight, figures: Figures::recorded(cover), runs }
    }

    fn wait(&self, in_flight: Self::InFlight) -> Result<(), F::Error> {
        let MeteredFlush { in_flight, figures, runs } = in_flight;
        let result = self.hardware.wait(in_flight);
        let Meter { completed, issued: _, failed, runs: recorded } = self.meter;
        if result.is_ok() {
            completed.add(&figures);
            recorded.fetch_add(runs, Relaxed);
        } else {
            failed.fetch_add(1, Relaxed);
        }
        result
    }
}

/// What the flushes of batches came to. Counters wrap at 2^64.
#[derive(Debug, Default)]
pub struct Account {
    /// The CPUs' flushes.
    pub tlb: Meter,
    /// The devices' flushes.
    pub iotlb: Meter,
    retries: AtomicU64,
    kept: AtomicU64,
    released: AtomicU64,
}

impl Account {
    /// All at 0.
    #[must_use]
    pub const fn new() -> Self {
        Self {
            tlb: Meter::new(),
            iotlb: Meter::new(),
            retries: AtomicU64::new(0),
            kept: AtomicU64::new(0),
            released: AtomicU64::new(0),
        }
    }

    /// A failed batch is flushed again.
    pub fn retried(&self) {
        self.retries.fetch_add(1, Relaxed);
    }

    /// So many pages went into quarantine.
    pub fn kept(&self, pages: usize) {
        self.kept.fetch_add(pages as u64, Relaxed);
    }

    /// So many pages came out of quarantine.
    pub fn released(&self, pages: usize) {
        self.released.fetch_add(pages as u64, Relaxed);
    }

    /// What was counted so far.
    #[must_use]
    pub fn read(&self) -> Totals {
        let Self { tlb, iotlb, retries, kept, released } = self;
        // In this order: a page that moves meanwhile is not taken for one that left first.
        let released = released.load(Relaxed);
        Totals {
            tlb: tlb.read(),
            iotlb: iotlb.read(),
            retries: retries.load(Relaxed),
            in_quarantine: kept.load(Relaxed).saturating_sub(released),
        }
    }
}

/// A reading of an [`Account`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Totals {
    /// Of the CPUs.
    pub tlb: Counted,
    /// Of the devices.
    pub iotlb: Counted,
    /// Batches flushed again after a failure.
    pub retries: u64,
    /// Pages in quarantine now.
    pub in_quarantine: u64,
}

#[cfg(test)]
mod tests {
    extern crate std;

    use core::cell::Cell;

    use super::*;
    use crate::{Batch, Gfn, Hardware, Run, Shared};

    struct Unit(Cell<bool>);

    impl<K: Kind> Flush<K> for Unit {
        type InFlight = ();
        type Error = ();

        fn start(&self, _: DomainId, _: &Cover) {}

        fn wait(&self, (): ()) -> Result<(), ()> {
            if self.0.get() { Ok(()) } else { Err(()) }
        }
    }

    fn batch(runs: &[(u64, u8)]) -> Batch<u64, 32> {
        let mut batch = Batch::new(DomainId::new(1));
        for (frame, order) in runs {
            let run = Run::block(Gfn::new(*frame), *order);
            batch
                .hold(|skipped| Ok::<_, ()>((*frame, skipped.leaf::<Shared>(run, *order).into())))
                .unwrap();
        }
        batch
    }

    #[test]
    fn a_batch_is_counted_by_its_leaves_runs_and_pages_and_only_once_however_often_it_is_tried() {
        let account = Account::new();
        let (cpus, units) = (Unit(Cell::new(true)), Unit(Cell::new(false)));
        let (tlb, iotlb) =
            (Metered::new(&cpus, &account.tlb), Metered::new(&units, &account.iotlb));
        let hardware = Hardware { tlb: &tlb, iotlb: &iotlb };
        // Two pages that touch, one apart, and a large leaf.
        let mut first = batch(&[(4, 0), (5, 0), (9, 0), (0x200, 9)]);
        let mut held = first.flush(&hardware).unwrap_err().held;
        account.retried();
        assert!(held.retry(&hardware).is_err());
        units.0.set(true);
        let mut flushed = held.retry(&hardware).unwrap();
        while flushed.next_page().is_some() {}
        let done = Counted {
            asked: 4,
            recorded: 3,
            issued: 1,
            completed: 1,
            failed: 0,
            pages_changed: 515,
            sizes: [0, 0, 1, 0, 0, 0, 0],
        };
        let read = account.read();
        assert_eq!(read.tlb, done);
        assert_eq!(read.iotlb, Counted { issued: 3, failed: 2, ..done });
        assert_eq!((read.tlb.avoided(), read.iotlb.avoided(), read.retries), (3, 3, 1));

        let mut second = batch(&[(7, 0)]);
        while second.flush(&hardware).unwrap().next_page().is_some() {}
        let one = account.read().tlb.since(&read.tlb);
        let sizes = [1, 0, 0, 0, 0, 0, 0];
        assert_eq!(one, Counted { asked: 1, recorded: 1, pages_changed: 1, sizes, ..done });
    }

    #[test]
    fn pages_in_quarantine_are_those_that_went_in_and_did_not_come_out() {
        let account = Account::new();
        account.kept(32);
        account.kept(8);
        account.released(32);
        assert_eq!(account.read().in_quarantine, 8);
    }
}
