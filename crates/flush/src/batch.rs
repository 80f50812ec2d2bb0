//! The batch: hold pages, flush once, give them out.
//!
//! A [`Batch`] owns up to `N` pages whose translations are cleared but not flushed.
//! [`Batch::flush`] turns it into [`Flushed`], which gives them out as
//! [`Released`](crate::Released), or into [`Held`], which keeps every one of them.
//! Dropping a batch that still holds something leaks it and counts it in
//! [`leaked_pages`], dropping one that owes a flush counts in [`unflushed_batches`]: a
//! drop neither flushes nor frees.

use core::{
    marker::PhantomData,
    mem,
    sync::atomic::{AtomicU64, Ordering, fence},
};

use arrayvec::ArrayVec;

use crate::{
    Cleared, Cover, DomainId, Flush, Hardware, Iotlb, Released, Skipped, TablePage, Tlb,
    skipped::Record,
};

static LEAKED: AtomicU64 = AtomicU64::new(0);
static UNFLUSHED: AtomicU64 = AtomicU64::new(0);

/// How many pages and table pages were leaked by dropping an unflushed batch.
///
/// Anything but 0 is a defect of the embedder: memory is lost, never unsafe.
pub fn leaked_pages() -> u64 {
    LEAKED.load(Ordering::Relaxed)
}

/// How many batches were dropped while they owed a flush, with pages or without.
///
/// Anything but 0 is a defect of the embedder: rights that were lowered, or an entry that
/// was edited before its batch was given up, may still be in use.
pub fn unflushed_batches() -> u64 {
    UNFLUSHED.load(Ordering::Relaxed)
}

/// The pages of a batch and what is owed for them; the one place that leaks.
#[derive(Debug)]
struct Contents<P, const N: usize> {
    record: Record,
    pages: ArrayVec<P, N>,
}

impl<P, const N: usize> Contents<P, N> {
    #[inline]
    const fn new(domain: DomainId) -> Self {
        Self { record: Record::new(domain), pages: ArrayVec::new_const() }
    }

    /// Flushes what is on record. A kind that completed owes nothing afterwards.
    fn flush<T: Flush<Tlb>, I: Flush<Iotlb>>(
        &mut self,
        hardware: &Hardware<'_, T, I>,
    ) -> Result<Report, FlushError<T::Error, I::Error>> {
        let Hardware { tlb: cpus, iotlb: units } = hardware;
        let Record { domain, covers, tables: _ } = &mut self.record;
        covers.end_of_edit();
        let (tlb, iotlb) = (covers.tlb(), covers.iotlb());
        // Entries may have been emptied by plain stores. Who is asked to forget finds them empty,
        // and so does a CPU that is found outside of the domain and enters it.
        fence(Ordering::SeqCst);
        // Devices first: their units work while the CPUs are being kicked.
        let on_units = (!iotlb.is_nothing()).then(|| units.start(*domain, iotlb));
        let on_cpus = (!tlb.is_nothing()).then(|| cpus.start(*domain, tlb));
        let report = Report { tlb: on_cpus.is_some(), iotlb: on_units.is_some() };
        // Both are waited for before either result is looked at.
        let error = FlushError {
            tlb: on_cpus.and_then(|token| cpus.wait(token).err()),
            iotlb: on_units.and_then(|token| units.wait(token).err()),
        };
        covers.paid(error.tlb.is_none(), error.iotlb.is_none());
        match error {
            FlushError { tlb: None, iotlb: None } => Ok(report),
            failed => Err(failed),
        }
    }

    /// Whether nothing is owed: the entries are gone from every cache.
    fn is_paid(&self) -> bool {
        let Record { domain: _, covers, tables: _ } = &self.record;
        covers.is_nothing()
    }
}

impl<P, const N: usize> Drop for Contents<P, N> {
    fn drop(&mut self) {
        let lost = self.pages.len() + self.record.tables.len();
        while let Some(page) = self.pages.pop() {
            mem::forget(page);
        }
        if lost > 0 {
            LEAKED.fetch_add(lost as u64, Ordering::Relaxed);
        }
        if !self.is_paid() {
            UNFLUSHED.fetch_add(1, Ordering::Relaxed);
        }
    }
}

/// Up to `N` pages whose translations are cleared and not yet flushed.
///
/// It belongs to one call of one vCPU and lives on its stack.
#[derive(Debug)]
#[must_use = "what it recorded is only forgotten by hardware once it is flushed"]
pub struct Batch<P, const N: usize>(Contents<P, N>);

/// Why a page was not held.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HoldError<E> {
    /// The batch holds `N` pages; the edit was not run.
    Full,
    /// The edit failed. What it recorded stays on record; no page was taken.
    Edit(E),
}

impl<P, const N: usize> Batch<P, N> {
    /// An empty batch for translations of `domain`.
    #[inline]
    pub const fn new(domain: DomainId) -> Self {
        Self(Contents::new(domain))
    }

    /// How many pages it holds.
    #[must_use]
    #[inline]
    pub fn len(&self) -> usize {
        self.0.pages.len()
    }

    /// Whether it holds no page. Something may still be on record.
    #[must_use]
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.0.pages.is_empty()
    }

    /// How many more pages it can hold.
    #[must_use]
    #[inline]
    pub fn left(&self) -> usize {
        self.0.pages.remaining_capacity()
    }

    /// Whether no flush is owed and nothing is held.
    #[must_use]
    pub fn is_idle(&self) -> bool {
        self.is_empty() && self.0.record.tables.is_empty() && self.0.is_paid()
    }

    /// What CPUs must forget.
    #[must_use]
    pub fn tlb(&self) -> &Cover {
        self.0.record.covers.tlb()
    }

    /// What devices must forget.
    #[must_use]
    pub fn iotlb(&self) -> &Cover {
        self.0.record.covers.iotlb()
    }

    /// Runs one edit and holds the page that it unmapped.
    ///
    /// # Errors
    /// [`HoldError::Full`] before the edit runs; [`HoldError::Edit`] with its own error,
    /// what it recorded staying on record.
    #[inline]
    pub fn hold<E>(
        &mut self,
        edit: impl for<'id> FnOnce(&mut Skipped<'id>) -> Result<(P, Cleared<'id>), E>,
    ) -> Result<(), HoldError<E>> {
        if self.0.pages.is_full() {
            return Err(HoldError::Full);
        }
        let edited = edit(&mut Skipped::new(&mut self.0.record)).map(|(page, _cleared)| page);
        self.0.record.covers.end_of_edit();
        self.0.pages.push(edited.map_err(HoldError::Edit)?);
        Ok(())
    }

    /// Runs an edit that unmaps any number of pages, or none.
    ///
    /// The edit must stop before it clears more than [`Room::left`] pages.
    #[inline]
    pub fn edit_many<R>(
        &mut self,
        edit: impl for<'id> FnOnce(&mut Skipped<'id>, &mut Room<'_, 'id, P, N>) -> R,
    ) -> R {
        let Contents { record, pages } = &mut self.0;
        let mut room = Room { pages, brand: PhantomData };
        let result = edit(&mut Skipped::new(record), &mut room);
        record.covers.end_of_edit();
        result
    }

    /// Flushes every kind that has something on record, and waits for all of them.
    ///
    /// Afterwards the batch is empty, save for pages that a dropped [`Flushed`] left.
    ///
    /// # Errors
    /// If any kind failed, everything held leaves the batch as [`Held`], which can be
    /// retried or kept. The batch itself is new and owes nothing.
    #[expect(clippy::result_large_err, reason = "no heap, and a failed flush is the rare exit")]
    pub fn flush<T: Flush<Tlb>, I: Flush<Iotlb>>(
        &mut self,
        hardware: &Hardware<'_, T, I>,
    ) -> Result<Flushed<'_, P, N>, Failure<P, N, T::Error, I::Error>> {
        match self.0.flush(hardware) {
            Ok(report) => Ok(Flushed { contents: &mut self.0, report }),
            Err(error) => {
                let fresh = Contents::new(self.0.record.domain);
                Err(Failure { held: Held(mem::replace(&mut self.0, fresh)), error })
            }
        }
    }
}

/// Where an edit of many pages puts them.
#[derive(Debug)]
pub struct Room<'r, 'id, P, const N: usize> {
    pages: &'r mut ArrayVec<P, N>,
    brand: PhantomData<fn(&'id ()) -> &'id ()>,
}

impl<'id, P, const N: usize> Room<'_, 'id, P, N> {
    /// How many more pages can be held.
    #[must_use]
    pub fn left(&self) -> usize {
        self.pages.remaining_capacity()
    }

    /// Holds one page whose translations are gone.
    ///
    /// # Errors
    /// Gives the page back when there is no room: it is unmapped, unflushed and the
    /// caller's to lose.
    pub fn hold(&mut self, page: P, _cleared: Cleared<'id>) -> Result<(), P> {
        self.pages.try_push(page).map_err(arrayvec::CapacityError::element)
    }
}

impl<'id, P, const N: usize> Room<'_, 'id, P, N> {
    /// Holds pages whose translations are gone, as many as there is room for. The others
    /// stay in `pages`.
    #[inline]
    pub fn hold_all(&mut self, pages: &mut impl Iterator<Item = (P, Cleared<'id>)>) {
        let left = self.pages.remaining_capacity();
        self.pages.extend(pages.take(left).map(|(page, _cleared)| page));
    }
}

/// Which kinds a flush carried out; a kind with nothing on record is not asked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Report {
    /// The CPUs were flushed.
    pub tlb: bool,
    /// The devices were flushed.
    pub iotlb: bool,
}

/// A batch whose flush completed: it gives its pages out, the last held first.
///
/// Pages not taken before it is dropped stay in the batch; nothing more is owed for them.
#[derive(Debug)]
#[must_use = "pages not taken out stay held"]
pub struct Flushed<'b, P, const N: usize> {
    contents: &'b mut Contents<P, N>,
    report: Report,
}

impl<P, const N: usize> Flushed<'_, P, N> {
    /// Which kinds were flushed.
    #[must_use]
    pub fn report(&self) -> Report {
        self.report
    }

    /// The next page, if any is left.
    #[inline]
    pub fn next_page(&mut self) -> Option<Released<P>> {
        self.contents.pages.pop().map(Released::new)
    }

    /// Gives out every page that is left, the last held first.
    ///
    /// A panic in `each` loses those that it has not seen.
    #[inline]
    pub fn for_each_page(&mut self, each: impl FnMut(Released<P>)) {
        self.contents.pages.drain(..).rev().map(Released::new).for_each(each);
    }

    /// The next table page, if any is left.
    pub fn next_table(&mut self) -> Option<Released<TablePage>> {
        self.contents.record.tables.pop().map(Released::new)
    }
}

/// What each kind had to say; at least one of them failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FlushError<TE, IE> {
    /// The CPU flush failed.
    pub tlb: Option<TE>,
    /// The device flush failed.
    pub iotlb: Option<IE>,
}

/// A batch whose flush failed, and why.
#[derive(Debug)]
pub struct Failure<P, const N: usize, TE, IE> {
    /// Every page of the batch.
    pub held: Held<P, N>,
    /// What went wrong.
    pub error: FlushError<TE, IE>,
}

/// The pages of a failed flush: still reachable by hardware, so still held.
///
/// It takes no more pages, so that nothing added later can pass under the completion
/// of an earlier half. Keep it (a quarantine is a place for values of this type) or
/// [`retry`](Self::retry).
#[derive(Debug)]
#[must_use = "dropping it leaks every page; retry it or keep it in quarantine"]
pub struct Held<P, const N: usize>(Contents<P, N>);

impl<P, const N: usize> Held<P, N> {
    /// How many pages it holds, table pages apart.
    #[must_use]
    pub fn len(&self) -> usize {
        self.0.pages.len()
    }

    /// Whether no page is held.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.0.pages.is_empty()
    }

    /// How many table pages it holds.
    #[must_use]
    pub fn tables(&self) -> usize {
        self.0.record.tables.len()
    }

    /// The domain whose translations may still be cached.
    #[must_use]
    pub fn domain(&self) -> DomainId {
        self.0.record.domain
    }

    /// Flushes every kind still owed.
    ///
    /// # Errors
    /// As [`Batch::flush`]; everything stays held here.
    pub fn retry<T: Flush<Tlb>, I: Flush<Iotlb>>(
        &mut self,
        hardware: &Hardware<'_, T, I>,
    ) -> Result<Flushed<'_, P, N>, FlushError<T::Error, I::Error>> {
        let report = self.0.flush(hardware)?;
        Ok(Flushed { contents: &mut self.0, report })
    }
}

static_assertions::assert_not_impl_any!(Batch<u8, 1>: Clone, Copy, Default);
static_assertions::assert_not_impl_any!(Held<u8, 1>: Clone, Copy, Default);
static_assertions::assert_not_impl_any!(Flushed<'static, u8, 1>: Clone, Copy);
// A grant's pin is at most 64 bytes; the batch lives on a hypervisor stack.
const _: () = assert!(size_of::<Batch<[u64; 8], 32>>() <= 4096);

#[cfg(test)]
#[path = "batch_tests.rs"]
mod tests;
