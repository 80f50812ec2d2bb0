//! Over the hypervisor's shoulder: who flushed, and who gave up pages too early.
//!
//! A [`Watched`] flusher stands between a batch and its hardware. It may lie as it is
//! told to, it knows which flushes were genuine, and [`Audit`] knows which of them came
//! after each page was cleared.

use core::cell::{Cell, RefCell};

use arrayvec::ArrayVec;
use flush::{Cover, DomainId, Flush, Kind, Mfn};

/// Pages that may wait for their flush at a time.
const OWED: usize = 128;

/// What an embedder claims falsely.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Lie {
    /// Nothing.
    None,
    /// That it flushed, when it did nothing.
    Skipped,
    /// That it flushed its own devices, when it flushed those of another domain.
    Misdirected(DomainId),
}

/// The flushes of one kind, in order.
#[derive(Default)]
pub struct Flushes {
    started: Cell<u64>,
    completed: Cell<u64>,
    carried_out: Cell<u64>,
}

impl Flushes {
    /// How many flushes were asked for and really carried out.
    #[must_use]
    pub fn carried_out(&self) -> u64 {
        self.carried_out.get()
    }

    /// How many genuine flushes were asked for, carried out or not.
    #[must_use]
    pub fn asked(&self) -> u64 {
        self.started.get()
    }

    fn start(&self) -> u64 {
        let number = self.started.get().saturating_add(1);
        self.started.set(number);
        number
    }

    fn complete(&self, number: u64) {
        self.completed.set(self.completed.get().max(number));
        self.carried_out.set(self.carried_out.get().saturating_add(1));
    }
}

/// A page whose mapping is gone, and how many flushes had started by then.
struct Owed {
    page: Mfn,
    tlb: u64,
    iotlb: u64,
}

/// The flushes of a whole run, and the pages that were given up before theirs.
#[derive(Default)]
pub struct Audit {
    /// Of processors.
    pub tlb: Flushes,
    /// Of devices.
    pub iotlb: Flushes,
    owed: RefCell<ArrayVec<Owed, OWED>>,
    early: Cell<u64>,
    given_up: Cell<u64>,
    lent: Cell<u64>,
}

impl Audit {
    /// Pages given up before a flush of each kind that started after their mapping went
    /// had completed.
    #[must_use]
    pub fn released_early(&self) -> u64 {
        self.early.get()
    }

    /// Pages given up, early or not.
    #[must_use]
    pub fn given_up(&self) -> u64 {
        self.given_up.get()
    }

    /// How often words of a caller's memory were lent.
    #[must_use]
    pub fn times_lent(&self) -> u64 {
        self.lent.get()
    }

    /// Words of a caller's memory are lent.
    pub fn lent(&self) {
        self.lent.set(self.lent.get().saturating_add(1));
    }

    /// The mapping of a page was taken out of every table; its flush is owed.
    pub fn cleared(&self, page: Mfn) {
        let owed = Owed { page, tlb: self.tlb.started.get(), iotlb: self.iotlb.started.get() };
        // One that finds no room counts as early when it is given up.
        self.owed.borrow_mut().try_push(owed).ok();
    }

    /// The reference of a mapping that has ended is about to be dropped.
    pub fn give_up(&self, page: Mfn) {
        self.given_up.set(self.given_up.get().saturating_add(1));
        let mut list = self.owed.borrow_mut();
        let place = list.iter().position(|owed| owed.page == page);
        let in_time = place.is_some_and(|place| {
            let owed = list.swap_remove(place);
            self.tlb.completed.get() > owed.tlb && self.iotlb.completed.get() > owed.iotlb
        });
        if !in_time {
            self.early.set(self.early.get().saturating_add(1));
        }
    }
}

/// A flusher that is watched, and lies if it is told to.
pub struct Watched<'a, F> {
    /// The flusher.
    pub inner: F,
    /// What it claims falsely.
    pub lie: Lie,
    /// The books of its kind.
    pub flushes: &'a Flushes,
    /// Called when everything of the batch is cleared and nothing is flushed.
    pub before: &'a dyn Fn(),
}

/// A flush that was started, and its number if it is genuine.
#[must_use = "wait for it"]
pub struct Started<T>(Option<T>, Option<u64>);

impl<K: Kind, F: Flush<K>> Flush<K> for Watched<'_, F> {
    type InFlight = Started<F::InFlight>;
    type Error = F::Error;

    fn start(&self, domain: DomainId, cover: &Cover) -> Self::InFlight {
        (self.before)();
        match self.lie {
            Lie::None => {
                let number = self.flushes.start();
                Started(Some(self.inner.start(domain, cover)), Some(number))
            }
            Lie::Skipped => Started(None, None),
            Lie::Misdirected(other) => Started(Some(self.inner.start(other, cover)), None),
        }
    }

    fn wait(&self, Started(inner, number): Self::InFlight) -> Result<(), F::Error> {
        if let Some(inner) = inner {
            self.inner.wait(inner)?;
        }
        if let Some(number) = number {
            self.flushes.complete(number);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use flush::{Iotlb, Tlb};

    use super::*;

    /// Hardware that forgets at once, or fails.
    struct Fake(Result<(), ()>);

    impl<K: Kind> Flush<K> for Fake {
        type InFlight = ();
        type Error = ();

        fn start(&self, _: DomainId, _: &Cover) {}

        fn wait(&self, (): ()) -> Result<(), ()> {
            self.0
        }
    }

    const PAGE: Mfn = Mfn::new(7);

    fn flush<K: Kind>(flushes: &Flushes, hardware: Result<(), ()>, lie: Lie) {
        let watched = Watched { inner: Fake(hardware), lie, flushes, before: &|| {} };
        let token = Flush::<K>::start(&watched, DomainId::new(1), &Cover::NOTHING);
        let truth = Flush::<K>::wait(&watched, token);
        assert_eq!(truth, if lie == Lie::Skipped { Ok(()) } else { hardware });
    }

    fn flush_tlb(audit: &Audit, lie: Lie) {
        flush::<Tlb>(&audit.tlb, Ok(()), lie);
    }

    fn flush_iotlb(audit: &Audit, lie: Lie) {
        flush::<Iotlb>(&audit.iotlb, Ok(()), lie);
    }

    #[track_caller]
    fn check(early: u64, story: impl FnOnce(&Audit)) {
        let audit = Audit::default();
        story(&audit);
        assert_eq!((audit.released_early(), audit.given_up()), (early, 1));
    }

    #[test]
    fn a_page_is_early_unless_both_kinds_were_flushed_since_it_was_cleared() {
        let other = Lie::Misdirected(DomainId::new(2));
        for (tlb, iotlb, early) in [
            (Lie::None, Lie::None, 0),
            (Lie::Skipped, Lie::None, 1),
            (Lie::None, Lie::Skipped, 1),
            (Lie::None, other, 1),
        ] {
            check(early, |audit| {
                audit.cleared(PAGE);
                flush_tlb(audit, tlb);
                flush_iotlb(audit, iotlb);
                audit.give_up(PAGE);
            });
        }
    }

    #[test]
    fn flushes_that_came_before_do_not_count() {
        check(1, |audit| {
            flush_tlb(audit, Lie::None);
            flush_iotlb(audit, Lie::None);
            audit.cleared(PAGE);
            audit.give_up(PAGE);
        });
        // Started before, waited for after.
        check(1, |audit| {
            let watched = Watched {
                inner: Fake(Ok(())),
                lie: Lie::None,
                flushes: &audit.iotlb,
                before: &|| {},
            };
            let token = Flush::<Iotlb>::start(&watched, DomainId::new(1), &Cover::NOTHING);
            audit.cleared(PAGE);
            flush_tlb(audit, Lie::None);
            assert_eq!(Flush::<Iotlb>::wait(&watched, token), Ok(()));
            audit.give_up(PAGE);
        });
    }

    #[test]
    fn a_failed_flush_is_not_carried_out() {
        check(1, |audit| {
            audit.cleared(PAGE);
            flush_tlb(audit, Lie::None);
            flush::<Iotlb>(&audit.iotlb, Err(()), Lie::None);
            assert_eq!((audit.tlb.carried_out(), audit.iotlb.carried_out()), (1, 0));
            audit.give_up(PAGE);
        });
    }

    #[test]
    fn a_page_that_nobody_saw_cleared_is_early() {
        check(1, |audit| audit.give_up(PAGE));
    }
}
