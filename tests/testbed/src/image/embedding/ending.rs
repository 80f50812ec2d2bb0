//! The end of a domain: nothing runs or reaches it, everything is given back
//!
//! [`Hypervisor::end`] needs no exclusive access: it may come in the middle of a batch of
//! this very domain, whose pages stay held until that batch was flushed.
//! [`Hypervisor::remove`] takes away what is left, the tables themselves.

use core::sync::atomic::Ordering;

use flush::{DomainId, Hardware};
use gnttab::{Domain as _, Teardown, release_all};
use iommu_vtd::{Device, Guarded as _};
use p2m::{AtNextEntry, TlbFlush};
use stage2::{Budget, Emptied, Rest, Stop, Stopped, Unheld};
use testbed::failure::{Context as _, Failure};
use testbed::{ensure, fail};

use super::guest::Tables;
use super::hypervisor::Kicks;
use super::ranges::give_back;
use super::{Caller, Guest, Hypervisor, Memory, TakenBatch};

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
        let seat = guest.place()?.seat();
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
            let (emptied, mut budget) = (Emptied::Keep, Budget::UNLIMITED);
            let edited = batch.edit_many(|skipped, room| {
                guest.clear_range(left, emptied, &mut budget, skipped, room)
            });
            rest = match edited {
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
