//! A domain under EPT: its p2m, and the processors that run it.
//!
//! No device belongs to it, since the machines with VMX here have no remapping unit: the
//! word for that is [`NoIommu`]. Pages come and go through the same batch and the same
//! flush as everywhere.

use core::sync::atomic::Ordering;

use flush::{Batch, DomainId, Flush, Gfn, Hardware, Mfn, NoIommu, Run, Tlb};
use iommu_vtd::Guarded;
use p2m::hardware::vmx::{AccessedDirty, Ept as LocalEpt, Eptp};
use p2m::{Expected, GuestCpus, P2m, PageKind, TlbFlush};
use stage2::format::ept::{Ept, EptLevels};
use stage2::{Access, Budget, Level, Rest};
use testbed::failure::{Context as _, Failure};
use testbed::{ensure, fail};

use super::processor::VmxProcessor;
use super::program;
use crate::embedding::{Kicks, Lock, Memory};
use crate::memory;

/// Frames that one batch takes away.
pub(crate) const BATCH: usize = gnttab::BATCH;
/// Levels of the tables.
const LEVELS: u8 = 4;

/// One domain.
pub(crate) struct Guest {
    id: DomainId,
    map: Lock<P2m<Ept, Memory, Tlb>>,
    /// The processors that run it or may hold its translations.
    pub(crate) cpus: GuestCpus,
}

/// Flushes the processors of a guest, from the one that has `local`.
pub(crate) type GuestTlb<'g, 'p> = TlbFlush<'g, Kicks, LocalEpt<'p>>;

impl Guest {
    /// A domain without memory, with the largest leaves that this processor has.
    ///
    /// # Errors
    /// If there is no memory for its root.
    pub(crate) fn new(id: DomainId, processor: &VmxProcessor) -> Result<Self, Failure> {
        let largest = match processor.capabilities.large_leaves() {
            (true, true) => Level::TWO,
            (true, false) => Level::ONE,
            (false, _) => Level::PAGE,
        };
        let format = Ept::new(EptLevels::Four).with_largest_leaf(largest);
        let map = P2m::new(format, Memory).context("p2m")?;
        Ok(Self { id, map: Lock::new(map), cpus: GuestCpus::new(id) })
    }

    /// The pointer to its tables. Accessed bits are off: entries change by us alone.
    ///
    /// # Errors
    /// If the root is beyond what a pointer can hold.
    pub(crate) fn eptp(&self) -> Result<Eptp, Failure> {
        let root = self.map.with(|map| map.root());
        Eptp::new(root, LEVELS, AccessedDirty::Off).context("an EPT pointer")
    }

    /// What makes `processor`, which runs this, forget the guest.
    ///
    /// # Errors
    /// As [`eptp`](Self::eptp).
    pub(crate) fn local<'p>(&self, processor: &'p VmxProcessor) -> Result<LocalEpt<'p>, Failure> {
        Ok(processor.local(self.eptp()?))
    }

    /// Flushes its processors: kicks those that run it, and waits.
    pub(crate) const fn tlb<'g, 'p>(&'g self, local: &'g LocalEpt<'p>) -> GuestTlb<'g, 'p> {
        TlbFlush { guest: &self.cpus, machine: &Kicks, local }
    }

    /// What a frame number shows.
    pub(crate) fn lookup(&self, gfn: Gfn) -> Option<p2m::Mapping> {
        self.map.with(|map| map.get(gfn))
    }

    /// Give it 2^`order` frames of new memory at `gfn`, where nothing was.
    ///
    /// # Errors
    /// If memory is short or the number is taken.
    pub(crate) fn populate(&self, gfn: Gfn, order: u8) -> Result<Mfn, Failure> {
        let first = memory::allocate_block(order)?;
        self.show(gfn, order, first, PageKind::RamReadWrite)?;
        Ok(first)
    }

    /// Give it the program at `gfn`, which is memory that it may not write.
    ///
    /// # Errors
    /// As [`populate`](Self::populate).
    pub(crate) fn load(&self, gfn: Gfn) -> Result<(), Failure> {
        let page = memory::allocate()?;
        let words = memory::words(page).context("a page for the program")?;
        for (word, code) in words.iter().zip(program::words()) {
            word.store(code, Ordering::SeqCst);
        }
        self.show(gfn, 0, page, PageKind::RamReadOnly)
    }

    /// Map 2^`order` frames, where nothing was. This needs no flush: absence is not cached.
    ///
    /// # Errors
    /// If a table is missing, or the number taken.
    pub(crate) fn show(
        &self,
        gfn: Gfn,
        order: u8,
        first: Mfn,
        kind: PageKind,
    ) -> Result<(), Failure> {
        let mut batch: Batch<Mfn, 1> = Batch::new(self.id);
        let was = batch.edit_many(|skipped, _| {
            self.map.with(|map| map.set(gfn, order, first, kind, skipped).map(|was| was.is_some()))
        });
        ensure!(!was.context("a mapping")?, "something was mapped at {gfn:?}");
        ensure!(batch.is_idle(), "a flush is owed for {gfn:?}, where nothing was");
        Ok(())
    }

    /// Take the frame `gfn` away and flush. The page is returned, released.
    ///
    /// `before` runs when no table shows the page and every cache still may.
    ///
    /// # Errors
    /// If nothing is there, or the flush fails: then the page is lost, but nobody's.
    pub(crate) fn take<T: Flush<Tlb, Error: core::fmt::Debug>>(
        &self,
        gfn: Gfn,
        tlb: &T,
        before: impl FnOnce(Mfn) -> Result<(), Failure>,
    ) -> Result<Mfn, Failure> {
        let page = self.lookup(gfn).context("a page to take away")?.mfn;
        let mut taken = None;
        self.take_all(
            Run::single(gfn),
            tlb,
            || before(page),
            |page| {
                taken = Some(page);
                Ok(())
            },
        )?;
        taken.context("the page of a flushed batch")
    }

    /// Take up to [`BATCH`] frames away in one batch, flush once, and let `released` have
    /// each page.
    ///
    /// `before` runs when no table shows the pages and every cache still may.
    ///
    /// # Errors
    /// As [`take`](Self::take), or if there are more frames.
    pub(crate) fn take_all<T: Flush<Tlb, Error: core::fmt::Debug>>(
        &self,
        run: Run,
        tlb: &T,
        before: impl FnOnce() -> Result<(), Failure>,
        mut released: impl FnMut(Mfn) -> Result<(), Failure>,
    ) -> Result<(), Failure> {
        let mut batch: Batch<Mfn, BATCH> = Batch::new(self.id);
        for gfn in (run.first().get()..=run.last().get()).map(Gfn::new) {
            let was = self.lookup(gfn).context("a page to take away")?;
            let kind = was.kind.context("a page of some kind")?;
            let expected = Expected { mfn: was.mfn, kind };
            let held = batch.hold(|skipped| {
                let devices = NoIommu.gone(skipped);
                let gone = self.map.with(|map| map.clear(gfn, expected, skipped));
                gone.map(|gone| (was.mfn, gone.with(&devices)))
            });
            held.context("a page to take away")?;
        }
        before()?;
        let mut flushed = match batch.flush(&Hardware { tlb, iotlb: &NoIommu }) {
            Ok(flushed) => flushed,
            Err(failed) => fail!("flush: {:?}", failed.error),
        };
        while let Some(page) = flushed.next_page() {
            released(*page.get())?;
        }
        Ok(())
    }

    /// Leave it no more than `allowed` of what each page of `run` may be used for, and flush.
    ///
    /// `before` runs when the tables say so and every cache still may not.
    ///
    /// # Errors
    /// If the edit stops early, or the flush fails.
    pub(crate) fn restrict<T: Flush<Tlb, Error: core::fmt::Debug>>(
        &self,
        run: Run,
        allowed: Access,
        tlb: &T,
        before: impl FnOnce() -> Result<(), Failure>,
    ) -> Result<(), Failure> {
        let mut batch: Batch<Mfn, 1> = Batch::new(self.id);
        let mut budget = Budget::UNLIMITED;
        batch
            .edit_many(|skipped, _| {
                self.map.with(|map| map.restrict(Rest::new(run), allowed, &mut budget, skipped))
            })
            .context("rights")?;
        before()?;
        match batch.flush(&Hardware { tlb, iotlb: &NoIommu }) {
            Ok(_) => Ok(()),
            Err(failed) => fail!("flush: {:?}", failed.error),
        }
    }
}
