//! Pages of failed flushes, kept until a later flush has done what theirs did not.
//!
//! A [`Quarantine`] is storage of the embedder for whole failed batches, of any domains.
//! Getting out of it takes three steps, so that its lock is not held while a flush is
//! waited for: [`owed`](Quarantine::owed) adds up what every batch of a domain still owes,
//! [`Owed::flush`] flushes that once, and [`settle`](Quarantine::settle) believes the
//! [`Paid`] that comes back. A batch that came in meanwhile is not covered by it. Only a
//! batch that owes nothing gives its pages out.

use core::{
    cell::RefCell,
    sync::atomic::{AtomicU64, Ordering},
};

use arrayvec::ArrayVec;

use crate::{
    Cover, DomainId, Flush, FlushError, Hardware, Held, Iotlb, Kind, Released, TablePage, Tlb,
};

/// Tells quarantines apart, so that what was paid for one is not believed by another.
static NAMES: AtomicU64 = AtomicU64::new(1);

/// Room for `BATCHES` failed batches of up to `N` pages each.
///
/// Batches are told apart by the number of their domain alone: while it keeps one of a
/// domain, no other domain may get that number. Hardware of the new one would flush other
/// CPUs, or under another tag, and be believed for the old one.
///
/// Dropping it leaks what it holds, as dropping each [`Held`] does.
#[derive(Debug)]
#[must_use = "dropping it leaks every page in it"]
pub struct Quarantine<P, const N: usize, const BATCHES: usize> {
    /// 0 before the first batch.
    name: u64,
    /// The number of the batch that came last; they are numbered from 1.
    last: u64,
    kept: ArrayVec<Kept<P, N>, BATCHES>,
}

#[derive(Debug)]
struct Kept<P, const N: usize> {
    number: u64,
    held: Held<P, N>,
}

impl<P, const N: usize> Kept<P, N> {
    /// Whether nothing is owed and nothing held.
    fn is_over(&mut self) -> bool {
        self.held.is_empty() && self.held.tables() == 0 && self.held.retry(&NOBODY).is_ok()
    }
}

impl<P, const N: usize, const BATCHES: usize> Quarantine<P, N, BATCHES> {
    /// Nothing in it.
    pub const fn new() -> Self {
        Self { name: 0, last: 0, kept: ArrayVec::new_const() }
    }

    /// Keeps one failed batch.
    ///
    /// # Errors
    /// Gives it back if there is no room: retry it, or drop it, which leaks its pages.
    #[expect(clippy::result_large_err, reason = "no heap, and a full quarantine is rare")]
    pub fn keep(&mut self, held: Held<P, N>) -> Result<(), Held<P, N>> {
        if self.name == 0 {
            self.name = NAMES.fetch_add(1, Ordering::Relaxed);
        }
        let number = self.last.saturating_add(1);
        let full = self.kept.try_push(Kept { number, held });
        full.map_err(|full| full.element().held)?;
        self.last = number;
        Ok(())
    }

    /// How many batches it keeps.
    #[must_use]
    pub fn batches(&self) -> usize {
        self.kept.len()
    }

    /// How many pages it keeps, table pages apart.
    #[must_use]
    pub fn pages(&self) -> usize {
        self.kept.iter().map(|kept| kept.held.len()).sum()
    }

    /// How many table pages it keeps.
    #[must_use]
    pub fn tables(&self) -> usize {
        self.kept.iter().map(|kept| kept.held.tables()).sum()
    }

    /// All that batches of `domain` still owe; `None` if there is nothing.
    ///
    /// It is a copy: nothing changes before it was flushed and [settled](Self::settle).
    #[must_use]
    pub fn owed(&mut self, domain: DomainId) -> Option<Owed> {
        let (tlb, iotlb) = (Listener::default(), Listener::default());
        let both = Hardware { tlb: &tlb, iotlb: &iotlb };
        let mut through = None;
        for kept in self.kept.iter_mut().filter(|kept| kept.held.domain() == domain) {
            if kept.held.retry(&both).is_err() {
                through = through.max(Some(kept.number));
            }
        }
        let (tlb, iotlb) = (tlb.0.into_inner(), iotlb.0.into_inner());
        let name = self.name;
        through.map(|through| Owed { name, through, domain, tlb, iotlb })
    }

    /// Takes off each batch's debt what was paid for it. Says whether pages can be taken out.
    ///
    /// What was owed to another quarantine changes nothing here.
    pub fn settle(&mut self, paid: Paid) -> bool {
        let Paid { name, through, domain, tlb, iotlb } = paid;
        if name != self.name {
            return false;
        }
        let both = Hardware { tlb: &Answer(tlb), iotlb: &Answer(iotlb) };
        let mut free = false;
        for kept in &mut self.kept {
            if kept.held.domain() == domain && kept.number <= through {
                free |= kept.held.retry(&both).is_ok();
            }
        }
        self.kept.retain(|kept| !kept.is_over());
        free
    }

    /// The next page of `domain` that no hardware can reach any more.
    pub fn next_page(&mut self, domain: DomainId) -> Option<Released<P>> {
        self.next(domain, |held| held.retry(&NOBODY).ok()?.next_page())
    }

    /// The next table page of `domain` that no hardware can reach any more.
    pub fn next_table(&mut self, domain: DomainId) -> Option<Released<TablePage>> {
        self.next(domain, |held| held.retry(&NOBODY).ok()?.next_table())
    }

    fn next<R>(
        &mut self,
        domain: DomainId,
        mut take: impl FnMut(&mut Held<P, N>) -> Option<R>,
    ) -> Option<R> {
        let mut own = self.kept.iter_mut().filter(|kept| kept.held.domain() == domain);
        let found = own.find_map(|kept| take(&mut kept.held));
        self.kept.retain(|kept| !kept.is_over());
        found
    }
}

impl<P, const N: usize, const BATCHES: usize> Default for Quarantine<P, N, BATCHES> {
    fn default() -> Self {
        Self::new()
    }
}

/// What all batches of a domain in one quarantine owe.
#[derive(Debug)]
#[must_use = "nothing is flushed by looking at it"]
pub struct Owed {
    name: u64,
    through: u64,
    domain: DomainId,
    tlb: Cover,
    iotlb: Cover,
}

impl Owed {
    /// What CPUs must forget.
    #[must_use]
    pub fn tlb(&self) -> &Cover {
        &self.tlb
    }

    /// What devices must forget.
    #[must_use]
    pub fn iotlb(&self) -> &Cover {
        &self.iotlb
    }

    /// Flushes every kind that is owed, once for all batches, and waits. No lock is needed.
    ///
    /// A kind that completed is paid even if the other failed.
    pub fn flush<T: Flush<Tlb>, I: Flush<Iotlb>>(
        self,
        hardware: &Hardware<'_, T, I>,
    ) -> Attempt<T::Error, I::Error> {
        let Self { name, through, domain, tlb, iotlb } = self;
        let Hardware { tlb: cpus, iotlb: units } = hardware;
        // Devices first: their units work while the CPUs are being kicked.
        let on_units = (!iotlb.is_nothing()).then(|| units.start(domain, &iotlb));
        let on_cpus = (!tlb.is_nothing()).then(|| cpus.start(domain, &tlb));
        let tlb = on_cpus.and_then(|token| cpus.wait(token).err());
        let iotlb = on_units.and_then(|token| units.wait(token).err());
        let paid = Paid { name, through, domain, tlb: tlb.is_none(), iotlb: iotlb.is_none() };
        let failed = tlb.is_some() || iotlb.is_some();
        Attempt { paid, error: failed.then_some(FlushError { tlb, iotlb }) }
    }
}

/// How a flush for a quarantine ended.
#[derive(Debug)]
#[must_use = "settle what was paid"]
pub struct Attempt<TE, IE> {
    /// For [`Quarantine::settle`], whatever failed.
    pub paid: Paid,
    /// What failed, if anything did.
    pub error: Option<FlushError<TE, IE>>,
}

/// Proof of a flush for the batches that were in a quarantine when it was asked what it
/// is owed.
#[derive(Debug)]
#[must_use = "only the quarantine can do something with it"]
pub struct Paid {
    name: u64,
    through: u64,
    domain: DomainId,
    tlb: bool,
    iotlb: bool,
}

/// Stands where hardware does, adds up what it is asked for, and does none of it.
#[derive(Debug)]
struct Listener(RefCell<Cover>);

impl Default for Listener {
    fn default() -> Self {
        Self(RefCell::new(Cover::NOTHING))
    }
}

impl<K: Kind> Flush<K> for Listener {
    type InFlight = ();
    type Error = ();

    fn start(&self, _: DomainId, cover: &Cover) {
        self.0.borrow_mut().merge(cover);
    }

    fn wait(&self, (): ()) -> Result<(), ()> {
        Err(())
    }
}

/// Stands where hardware does, and knows already whether it has forgotten.
#[derive(Debug)]
struct Answer(bool);

/// Has forgotten nothing: a batch gets past it that owes nothing.
const NOBODY: Hardware<'static, Answer, Answer> =
    Hardware { tlb: &Answer(false), iotlb: &Answer(false) };

impl<K: Kind> Flush<K> for Answer {
    type InFlight = ();
    type Error = ();

    fn start(&self, _: DomainId, _: &Cover) {}

    fn wait(&self, (): ()) -> Result<(), ()> {
        if self.0 { Ok(()) } else { Err(()) }
    }
}

static_assertions::assert_not_impl_any!(Quarantine<u8, 1, 1>: Clone, Copy);
static_assertions::assert_not_impl_any!(Owed: Clone, Copy);
static_assertions::assert_not_impl_any!(Paid: Clone, Copy);

#[cfg(test)]
#[path = "quarantine_tests.rs"]
mod tests;
