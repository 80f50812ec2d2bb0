//! The end of a domain: nothing runs or reaches it, everything is given back
//!
//! [`Hypervisor::end`] needs no exclusive access: it may come in the middle of a batch of
//! this very domain, whose pages stay held until that batch was flushed.
//! [`Hypervisor::remove`] takes away what is left, the tables themselves.

use core::sync::atomic::Ordering;

use arrayvec::ArrayVec;
use flush::{
    Batch, Cleared, DomainId, Flushed, Gone, Hardware, Iotlb, Mfn, Records, Room, Run, Skipped,
};
use gnttab::{Domain as _, Teardown, release_all};
use iommu_vtd::{Device, Guarded as _};
use p2m::{AtNextEntry, PageKind, TlbFlush};
use stage2::{Budget, Emptied, Leaf, Recorder, Rest, Sink, Stop, Stopped, Unheld};
use testbed::failure::{Context as _, Failure};
use testbed::{ensure, fail};

use super::guest::Tables;
use super::hypervisor::Kicks;
use super::page_info::PageInfo;
use super::{Caller, Guest, Hypervisor, Memory};
use crate::memory;

/// Leaves of one batch.
const LEAVES: usize = 32;

/// What one cleared leaf showed.
#[derive(Debug)]
struct Taken {
    mfn: Mfn,
    pages: u64,
    /// Of the domain's own memory, which it counts. What it had mapped of others is
    /// counted by its handles.
    own: bool,
}

type TakenBatch = Batch<Taken, LEAVES>;

/// Collects the proofs of leaves.
struct Collect<'c, 'id, K: Records> {
    left: usize,
    leaves: &'c mut ArrayVec<(Run, Leaf, Gone<'id, K>), LEAVES>,
}

impl<'id, K: Records> Sink<'id, K> for Collect<'_, 'id, K> {
    fn left(&self) -> usize {
        self.left
    }

    fn take(&mut self, run: Run, leaf: Leaf, gone: Gone<'id, K>) {
        self.left = self.left.saturating_sub(1);
        // There is room: `left` began as no more than that.
        self.leaves.push((run, leaf, gone));
    }
}

fn hold<'id>(room: &mut Room<'_, 'id, Taken, LEAVES>, run: Run, leaf: Leaf, cleared: Cleared<'id>) {
    let own = PageKind::from_tag(leaf.tag).is_some_and(PageKind::gives_way);
    let taken = Taken { mfn: leaf.mfn, pages: run.pages(), own };
    // The sink took no more leaves than there was room for.
    room.hold(taken, cleared).ok();
}

impl Guest {
    /// Clear what is mapped in `rest`, as far as the batch has room; the tables stay.
    ///
    /// # Errors
    /// [`Stopped`] with what is left, for want of room among other reasons.
    fn clear_everything<'id>(
        &self,
        rest: Rest,
        skipped: &mut Skipped<'id>,
        room: &mut Room<'_, 'id, Taken, LEAVES>,
    ) -> Result<(), Stopped> {
        let (left, mut budget) = (room.left(), Budget::UNLIMITED);
        self.with_tables(|tables| match tables {
            Tables::Shared(map) => {
                let mut leaves = ArrayVec::new();
                let sink = Collect { left, leaves: &mut leaves };
                let done = map.clear_range(rest, &mut budget, Emptied::Keep, skipped, sink);
                for (run, leaf, gone) in leaves {
                    hold(room, run, leaf, gone.into());
                }
                done.map(drop)
            }
            Tables::Separate(map) => {
                let mut leaves = ArrayVec::new();
                let sink = Collect { left, leaves: &mut leaves };
                let done = map.clear_range(rest, &mut budget, Emptied::Keep, skipped, sink);
                for (run, leaf, gone) in leaves {
                    let device = self.clear_device_leaves(run, skipped)?;
                    hold(room, run, leaf, gone.with(&device));
                }
                done.map(drop)
            }
        })
    }

    /// Clear a run in the devices' own table, whose tables stay.
    fn clear_device_leaves<'id>(
        &self,
        run: Run,
        skipped: &mut Skipped<'id>,
    ) -> Result<Gone<'id, Iotlb>, Stopped> {
        let mut record = Recorder::<Iotlb, _>::new(skipped, Unheld);
        let (rest, mut budget) = (Rest::new(run), Budget::UNLIMITED);
        stage2::clear(self.dma().tables(&Memory), rest, &mut budget, Emptied::Keep, &mut record)?;
        // Each leaf of the run is on record by now.
        Ok(skipped.absent())
    }
}

impl Hypervisor {
    /// End a domain: it runs no more, its `devices` are detached, its grants are released
    /// and its memory goes back, all of it after a flush.
    ///
    /// A page that somebody else has mapped stays his until he gives it back.
    ///
    /// # Errors
    /// If a processor does not leave the domain, it has other devices, or a flush fails.
    /// What was not given back by then stays held.
    pub(crate) fn end(&self, guest: &Guest, devices: &[Device]) -> Result<(), Failure> {
        guest.pause()?;
        for device in devices {
            let units = self.iommu.units();
            let gone = guest.dma().detach(units, &Memory, device.unit, device.source);
            gone.context("detach")?;
        }
        ensure!(guest.dma().devices() == 0, "{} devices are left", guest.dma().devices());
        let seat = guest.seat()?;
        let (tlb, iotlb) = (&seat, &seat);
        let caller = Caller { hypervisor: self, guest, tlb, iotlb, memory: guest, watcher: &() };
        let mut from = 0;
        loop {
            match release_all(&caller, from) {
                Teardown::Done => break,
                Teardown::Continue(next) => from = next,
                Teardown::FlushFailed(next) => fail!("the flush before handle {next} failed"),
            }
        }
        let mut rest = Some(Rest::new(guest.space()));
        while let Some(left) = rest {
            let mut batch = TakenBatch::new(guest.id());
            rest = match batch
                .edit_many(|skipped, room| guest.clear_everything(left, skipped, room))
            {
                Ok(()) => None,
                Err(Stopped { rest, stop: Stop::Full, .. }) => Some(rest),
                Err(stopped) => fail!("the memory of {:?}: {}", guest.id(), stopped.stop),
            };
            match batch.flush(&caller.hardware()) {
                Ok(flushed) => give_back(flushed)?,
                Err(failed) => fail!("flush: {:?}", failed.error),
            }
        }
        Ok(())
    }

    /// Take down the tables of a domain that has [ended](Self::end), and forget it.
    ///
    /// # Errors
    /// If there is no such domain, it has not ended, somebody still uses what it granted, or
    /// its tables are its devices' as well, which no case needs. It stays on the list then,
    /// but in the last case.
    pub(crate) fn remove(&mut self, id: DomainId) -> Result<(), Failure> {
        let guest = self.guest(id).context("a domain to take away")?;
        let (may_run, running) = (guest.may_run.load(Ordering::SeqCst), guest.cpus().running());
        ensure!(!may_run && running.is_empty(), "{id:?} has not ended: {running:?} run it");
        ensure!(guest.dma().devices() == 0, "{id:?} has {} devices", guest.dma().devices());
        let pinned = guest.grants.with(|table| table.pinned());
        ensure!(pinned == 0, "{pinned} grants of {id:?} are in use");
        let guest = self.take(id)?;
        let (tables, dma, cpus) = guest.into_tables();
        let Tables::Separate(map) = tables else {
            fail!("the tables of {id:?} are its devices' as well");
        };
        let Ok(mut devices) = dma.teardown() else {
            fail!("{id:?} has a device");
        };
        let mut processors = map.teardown();
        while !(processors.is_done() && devices.is_done()) {
            let mut batch = TakenBatch::new(id);
            let mut budget = Budget::UNLIMITED;
            let step = batch.edit_many(|skipped, _| {
                processors.step(&mut budget, skipped, Unheld)?;
                devices.step(&Memory, &mut budget, skipped, Unheld)
            });
            if let Err(stopped) = step {
                ensure!(stopped.stop == Stop::Full, "tables of {id:?}: {}", stopped.stop);
            }
            let tlb = TlbFlush { guest: &cpus, machine: &Kicks, local: &AtNextEntry };
            let iotlb = devices.flusher(self.iommu.units());
            match batch.flush(&Hardware { tlb: &tlb, iotlb: &iotlb }) {
                Ok(flushed) => give_back(flushed)?,
                Err(failed) => fail!("flush: {:?}", failed.error),
            }
        }
        Ok(())
    }
}

/// Give back what a flushed batch held.
fn give_back(mut flushed: Flushed<'_, Taken, LEAVES>) -> Result<(), Failure> {
    while let Some(table) = flushed.next_table() {
        Memory::free_table(table.recycle());
    }
    while let Some(released) = flushed.next_page() {
        let Taken { mfn, pages, own } = *released.get();
        for frame in (mfn.get()..).take(pages as usize).map(Mfn::new) {
            if own && PageInfo::of(frame).is_some_and(|info| info.drop_one(false)) {
                memory::release(frame)?;
            }
        }
    }
    Ok(())
}
