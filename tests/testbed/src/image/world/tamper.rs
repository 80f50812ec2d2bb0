//! Changes made behind the driver's back, to see what it does about them.

use core::sync::atomic::{AtomicU64, Ordering};

use flush::{Batch, Iotlb, Mfn, Tlb};
use iommu_vtd::Device;
use iommu_vtd::spec::registers::{FSTS, GCMD, GSTS, IQA, IQT, RTADDR, fault_status, global};
use testbed::ensure;
use testbed::failure::{Context, Failure};

use super::World;
use crate::embedding::Guest;
use crate::memory;
use crate::mmio::Registers;

/// A queue that hangs, and what it had carried out by then.
pub(crate) struct Hung {
    registers: Registers,
    executed: &'static [AtomicU64],
}

impl Hung {
    /// Turn the queue on again: what was submitted meanwhile is carried out, late.
    ///
    /// A unit begins at the start of the ring then. Commands that it has carried out are
    /// replaced by ones that change no count: context-cache invalidations.
    ///
    /// # Errors
    /// If the unit does not obey.
    pub(crate) fn resume(self) -> Result<(), Failure> {
        const CONTEXT_GLOBAL: u64 = 0x11;
        for (index, word) in self.executed.iter().enumerate() {
            let value = if index.is_multiple_of(2) { CONTEXT_GLOBAL } else { 0 };
            word.store(value, Ordering::SeqCst);
        }
        set_queue(self.registers, true)
    }
}

/// Turn the queue on or off, past the driver.
fn set_queue(registers: Registers, on: bool) -> Result<(), Failure> {
    let kept = registers.read32(GSTS.into()) & global::KEEP & !global::QUEUE;
    registers.write32(GCMD.into(), if on { kept | global::QUEUE } else { kept });
    let is_on = registers.read32(GSTS.into()) & global::QUEUE != 0;
    ensure!(is_on == on, "the queue is on: {is_on}");
    Ok(())
}

/// The frame that a table entry or a table register names.
const fn frame(word: u64) -> Mfn {
    Mfn::new((word & 0x000f_ffff_ffff_f000) >> 12)
}

impl World {
    /// Let `action` run while the context entry of `device` is not present, and no cache
    /// was told of it.
    ///
    /// # Errors
    /// Those of `action`; or there is no such entry.
    pub(crate) fn without_context(
        &self,
        device: Device,
        action: impl FnOnce() -> Result<(), Failure>,
    ) -> Result<(), Failure> {
        let registers = self.hypervisor.iommu.registers(device.unit)?;
        let root = memory::words(frame(registers.read64(RTADDR.into()))).context("root table")?;
        let bus = root.get(2 * usize::from(device.source.bus())).context("root entry")?;
        let table = memory::words(frame(bus.load(Ordering::SeqCst))).context("context table")?;
        let entry = table.get(2 * usize::from(device.source.device_function()));
        let entry: &AtomicU64 = entry.context("context entry")?;
        let word = entry.swap(0, Ordering::SeqCst);
        memory::write_back(entry);
        ensure!(word & 1 != 0, "the context entry was not present");
        let result = action();
        entry.store(word, Ordering::SeqCst);
        memory::write_back(entry);
        result
    }

    /// Give the queue a descriptor of no type, which its driver knows nothing of.
    ///
    /// The unit stops there, with an error in its status.
    ///
    /// # Errors
    /// If it does not.
    pub(crate) fn plant_bad_descriptor(&self) -> Result<(), Failure> {
        const NO_TYPE: u64 = 0xf;
        const RING_BYTES: u64 = 4096;
        let registers = self.hypervisor.iommu.registers(self.controller.unit)?;
        let ring = memory::words(frame(registers.read64(IQA.into()))).context("the ring")?;
        let tail = registers.read64(IQT.into());
        let slot = usize::try_from(tail / 8).context("the tail")?;
        let (low, high) = (ring.get(slot), ring.get(slot + 1));
        low.context("the slot at the tail")?.store(NO_TYPE, Ordering::SeqCst);
        high.context("the slot at the tail")?.store(0, Ordering::SeqCst);
        registers.write64(IQT.into(), (tail + 16) % RING_BYTES);
        let status = registers.read32(FSTS.into());
        ensure!(
            status & fault_status::QUEUE_ERROR != 0,
            "the bad descriptor was taken: status {status:#x}"
        );
        Ok(())
    }

    /// Turn the queue off: the unit takes no command any more, and says nothing.
    ///
    /// # Errors
    /// If the unit does not obey.
    pub(crate) fn hang_queue(&self) -> Result<Hung, Failure> {
        let registers = self.hypervisor.iommu.registers(self.controller.unit)?;
        let ring = memory::words(frame(registers.read64(IQA.into()))).context("the ring")?;
        let executed = usize::try_from(registers.read64(IQT.into()) / 8).context("the tail")?;
        set_queue(registers, false)?;
        Ok(Hung { registers, executed: ring.get(..executed).context("the ring")? })
    }

    /// Make hardware forget everything of a domain, whatever was left out before.
    ///
    /// # Errors
    /// If the flush fails.
    pub(crate) fn flush_everything(&self, guest: &Guest) -> Result<(), Failure> {
        let mut batch: Batch<(), 1> = Batch::new(guest.id());
        batch.edit_many(|skipped, _| {
            skipped.everything::<Tlb>();
            skipped.everything::<Iotlb>();
        });
        let seat = guest.place()?.seat();
        let flushed = batch.flush(&seat.hardware());
        let report = flushed.map_err(|failed| failed.error).context("flush")?.report();
        ensure!(report.iotlb && report.tlb, "nothing was flushed");
        Ok(())
    }
}
