//! The hypervisor: its domains, its remapping units, and what waits in quarantine.

use core::sync::atomic::{AtomicBool, Ordering};
use core::time::Duration;

use arrayvec::ArrayVec;
use flush::{Batch, CpuSet, DomainId, Flush, Gfn, Held, Iotlb, Mfn, Quarantine, Released, Tlb};
use gnttab::{BATCH, Domain, Pin, release};
use iommu_vtd::Guarded;
use p2m::{Cpus, PageKind};
use testbed::failure::{Context, Failure};
use testbed::{ensure, fail};

use super::page_info::PageInfo;
use super::{Caller, Guest, Iommu, Lock, Memory, Watcher};
use crate::{arch, clock, memory, processors};

/// Domains this image has room for.
const GUESTS: usize = 4;
/// Failed batches that can be kept.
const FAILED: usize = 4;

/// No kick arrives, as where processors have their interrupts off for good.
static LOST: AtomicBool = AtomicBool::new(false);

/// The processors, for a flush.
pub(crate) struct Kicks;

impl Kicks {
    /// Let the kicks of flushes get lost from now on, or arrive again.
    pub(crate) fn lose(lost: bool) {
        LOST.store(lost, Ordering::SeqCst);
    }
}

impl Cpus for Kicks {
    type Deadline = Duration;

    fn this_cpu(&self) -> usize {
        arch::this_processor()
    }

    fn kick(&self, cpus: &CpuSet) {
        if !LOST.load(Ordering::SeqCst) {
            processors::kick(cpus);
        }
    }

    // An emulator on a busy machine may keep a processor waiting for long.
    fn deadline(&self) -> Duration {
        clock::now().saturating_add(Duration::from_secs(2))
    }

    fn has_passed(&self, deadline: &Duration) -> bool {
        clock::now() > *deadline
    }

    fn relax(&self) {
        arch::take_interrupts();
    }
}

/// The hypervisor.
pub(crate) struct Hypervisor {
    /// The remapping units.
    pub(crate) iommu: Iommu,
    guests: ArrayVec<Guest, GUESTS>,
    /// Batches whose flush failed, with every page they hold.
    quarantine: Lock<Quarantine<Pin, BATCH, FAILED>>,
}

impl Hypervisor {
    /// No domain yet.
    pub(crate) const fn new(iommu: Iommu) -> Self {
        Self { iommu, guests: ArrayVec::new_const(), quarantine: Lock::new(Quarantine::new()) }
    }

    /// Add a domain. All are added before the first hypercall.
    ///
    /// # Errors
    /// If there is no room for another.
    pub(crate) fn add(&mut self, guest: Guest) -> Result<(), Failure> {
        self.guests.try_push(guest).map_err(|_| Failure::new(format_args!("too many domains")))
    }

    /// The domain with this number.
    pub(crate) fn guest(&self, id: DomainId) -> Option<&Guest> {
        self.guests.iter().find(|guest| guest.id() == id)
    }

    /// Take a domain off the list.
    ///
    /// # Errors
    /// If there is none with this number.
    pub(super) fn take(&mut self, id: DomainId) -> Result<Guest, Failure> {
        let place = self.guests.iter().position(|guest| guest.id() == id);
        Ok(self.guests.remove(place.context("a domain to take away")?))
    }

    /// Give `guest` 2^`order` frames of memory at `gfn`, where nothing was.
    ///
    /// # Errors
    /// If memory is short, the number is taken, or a flush fails.
    pub(crate) fn populate(&self, guest: &Guest, gfn: Gfn, order: u8) -> Result<Mfn, Failure> {
        let first = memory::allocate_block(order)?;
        for frame in (first.get()..).take(1 << order) {
            let info = PageInfo::of(Mfn::new(frame)).context("books of a frame")?;
            info.take(false).context("a first reference")?;
        }
        let mut batch: Batch<Mfn, 1> = Batch::new(guest.id());
        let mapped = batch.edit_many(|skipped, _| {
            let was = guest.map(gfn, order, first, PageKind::RamReadWrite, skipped);
            was.is_ok_and(|was| was.is_none())
        });
        ensure!(mapped, "no room for memory at {gfn:?}");
        // A unit in caching mode may have cached that there was nothing.
        self.flush(guest, &mut batch)?;
        Ok(first)
    }

    /// Take the single frame of memory at `gfn` from `guest` and free it.
    ///
    /// `before_flush` runs when no table shows the page and every cache still may.
    ///
    /// # Errors
    /// If it is not memory, a flush fails, `before_flush` does, or somebody else still
    /// counts the page: then it is not freed.
    pub(crate) fn depopulate(
        &self,
        guest: &Guest,
        gfn: Gfn,
        before_flush: impl FnOnce(Mfn) -> Result<(), Failure>,
    ) -> Result<Mfn, Failure> {
        let mfn = guest.lookup(gfn).context("a page to take away")?.mfn;
        let expected = p2m::Expected { mfn, kind: PageKind::RamReadWrite };
        let mut batch: Batch<Mfn, 1> = Batch::new(guest.id());
        let held =
            batch.hold(|skipped| guest.clear(gfn, expected, skipped).map(|cleared| (mfn, cleared)));
        held.context("a page to take away")?;
        before_flush(mfn)?;
        let page = self.flush(guest, &mut batch)?.context("the page of a flushed batch")?;
        free(&page)?;
        Ok(mfn)
    }

    /// Flush what an edit of the hypervisor's own recorded; its page comes out.
    pub(super) fn flush<P>(
        &self,
        guest: &Guest,
        batch: &mut Batch<P, 1>,
    ) -> Result<Option<Released<P>>, Failure> {
        let seat = guest.place()?.seat();
        let mut flushed = match batch.flush(&seat.hardware()) {
            Ok(flushed) => flushed,
            Err(failed) => fail!("flush: {:?}", failed.error),
        };
        while let Some(table) = flushed.next_table() {
            Memory::free_table(table.recycle());
        }
        Ok(flushed.next_page())
    }

    /// Keep a batch whose flush failed.
    pub(crate) fn keep(&self, held: Held<Pin, BATCH>) {
        // If there is no room the batch is dropped: its pages are lost, and counted by
        // `flush::leaked_pages`, but nobody gets them.
        self.quarantine.with(|quarantine| quarantine.keep(held).ok());
    }

    /// How many pages are in quarantine.
    pub(crate) fn quarantined(&self) -> usize {
        self.quarantine.with(|quarantine| quarantine.pages())
    }

    /// How many batches are in quarantine.
    pub(crate) fn batches_held(&self) -> usize {
        self.quarantine.with(|quarantine| quarantine.batches())
    }

    /// Flush once for all that is in quarantine for the domain of `caller`, and give out
    /// what then is free. Returns how many batches are still there.
    pub(crate) fn retry<T: Flush<Tlb>, I: Flush<Iotlb>, W: Watcher>(
        &self,
        caller: &Caller<'_, T, I, W>,
    ) -> usize {
        let id = caller.id();
        // The lock is not held while the flush is waited for.
        if let Some(owed) = self.quarantine.with(|quarantine| quarantine.owed(id)) {
            let attempt = owed.flush(&caller.hardware());
            self.quarantine.with(|quarantine| quarantine.settle(attempt.paid));
        }
        let next_page = || self.quarantine.with(|quarantine| quarantine.next_page(id));
        let next_table = || self.quarantine.with(|quarantine| quarantine.next_table(id));
        core::iter::from_fn(next_page).for_each(|pin| release(caller, pin));
        core::iter::from_fn(next_table).for_each(|table| caller.put_table(table));
        self.quarantine.with(|quarantine| quarantine.batches())
    }
}

/// Drop the owner's reference on a page, which must be the last one.
fn free(page: &Released<Mfn>) -> Result<(), Failure> {
    let frame = *page.get();
    let last = PageInfo::of(frame).is_some_and(|info| info.drop_one(false));
    ensure!(last, "{frame:?} is still counted by somebody else");
    Ok(memory::release(frame)?)
}
