//! A device that belongs to a domain: the NVMe controller, behind its unit.
//!
//! The guest has no driver for it. It asks for one write at a time, by the address that
//! the device is to use, and is told whether the unit let it through.

use flush::{DomainId, Gfn};
use iommu_vtd::{Device, FaultSummary, Guarded};
use testbed::address::BusAddress;
use testbed::failure::{Context as _, Failure};
use testbed::nvme::Command;
use testbed::xen::Errno;

use crate::devices::nvme::{Nvme, Queues};
use crate::embedding::{Guest, Hypervisor, Lock, Memory};

/// Where the controller's queues are: far from all memory of the guest's.
const QUEUES: Gfn = Gfn::new(0x8_0000);

/// The controller, and whose it is.
pub(crate) struct Assigned {
    owner: DomainId,
    device: Device,
    nvme: Lock<Nvme>,
}

impl Assigned {
    /// Give the controller to `guest`, and start it on queues in the guest's memory.
    ///
    /// # Errors
    /// If there is none, it does not start, or memory is short.
    pub(crate) fn new(hypervisor: &Hypervisor, guest: &Guest) -> Result<Self, Failure> {
        let mut nvme = Nvme::open(0)?;
        let device = hypervisor.iommu.device(nvme.function())?;
        guest.dma().attach(hypervisor.iommu.units(), &Memory, device).context("attach")?;
        let queue = |place| {
            let gfn = Gfn::new(QUEUES.get() + place);
            let frame = hypervisor.populate(guest, gfn, 0)?;
            let bus = BusAddress::of_frame(gfn.into()).context("address of a queue")?;
            Ok::<_, Failure>((frame, bus))
        };
        let (submission, submission_bus) = queue(0)?;
        let (completion, completion_bus) = queue(1)?;
        nvme.start(Queues { submission, completion, submission_bus, completion_bus })?;
        Ok(Self { owner: guest.id(), device, nvme: Lock::new(nvme) })
    }

    /// Let the controller write the 4 KiB at a device address of its owner's.
    ///
    /// # Errors
    /// [`Errno::NotPermitted`] for anybody else, [`Errno::Fault`] if the unit did not let
    /// the write through, [`Errno::Busy`] if the controller is lost.
    pub(super) fn write(
        &self,
        hypervisor: &Hypervisor,
        caller: DomainId,
        address: u64,
    ) -> Result<(), Errno> {
        if caller != self.owner {
            return Err(Errno::NotPermitted);
        }
        let command = Command::Identify(BusAddress::new(address));
        self.nvme.with(|nvme| nvme.run(command)).map_err(|_| Errno::Busy)?;
        let unit = hypervisor.iommu.units().get(self.device.unit).ok_or(Errno::Busy)?;
        if unit.take_faults(|_| {}) == FaultSummary::default() { Ok(()) } else { Err(Errno::Fault) }
    }
}
