//! A frontend that grants, a backend that maps, and the backend's DMA device.
//!
//! [`World`] is the hypervisor with its domains, brought up as the command line says
//! (`iommu=queue`, or `iommu=registers`). The backend has the NVMe controller.

mod device;
mod guests;
mod slips;
mod tamper;

use flush::{DomainId, Gfn, Mfn};
use gnttab::{Call, Outcome};
use iommu_vtd::{Counters, Device, Guarded};
use testbed::address::BusAddress;
use testbed::audit::{Audit, Lie, Watched};
use testbed::failure::{Context, Failure};
use testbed::{ensure, fail};

use crate::devices::nvme::{Nvme, Queues};
use crate::embedding::{Caller, Guest, GuestSeat, Hypervisor, Iommu, Layout, Lock, Shape, VtdUnit};
use crate::machine::Machine;
use crate::say;

pub(crate) use device::address;
pub(crate) use guests::{Grants, Operation, scripted};
pub(crate) use slips::{Faults, Mischief, Slip, Slipping};
pub(crate) use tamper::Hung;

/// The domain that grants.
pub(crate) const FRONTEND: DomainId = DomainId::new(1);
/// The domain that maps, and has the device.
pub(crate) const BACKEND: DomainId = DomainId::new(2);
/// A third domain, for what concerns neither.
pub(crate) const BYSTANDER: DomainId = DomainId::new(3);

/// All of them.
pub(crate) const DOMAINS: [DomainId; 3] = [FRONTEND, BACKEND, BYSTANDER];

/// Where a domain that has the NVMe controller keeps its two queues.
const QUEUES: Gfn = Gfn::new(0x20);

/// How a hypercall is carried out.
#[derive(Clone, Copy)]
pub(crate) struct Manner<'a> {
    /// What its flushes of processors claim falsely.
    pub(crate) cpus: Lie,
    /// What its flushes of devices claim falsely.
    pub(crate) devices: Lie,
    /// Called when everything of a batch is cleared and no device is flushed yet.
    pub(crate) before_flush: &'a dyn Fn(),
}

impl Manner<'_> {
    /// As an embedder should.
    pub(crate) const HONEST: Manner<'static> =
        Manner { cpus: Lie::None, devices: Lie::None, before_flush: &|| {} };

    /// With a lie about devices. If nothing is flushed, no processor is either.
    pub(crate) const fn lying(lie: Lie) -> Manner<'static> {
        let cpus = match lie {
            Lie::Skipped => Lie::Skipped,
            Lie::None | Lie::Misdirected(_) => Lie::None,
        };
        Manner { cpus, devices: lie, ..Manner::HONEST }
    }
}

/// A guest of this world in a hypercall.
pub(crate) type WorldCaller<'w> =
    Caller<'w, Watched<'w, &'w GuestSeat<'w>>, Watched<'w, &'w GuestSeat<'w>>, Audit>;

/// Descriptors that the recovery of a queue overwrote before the unit got to them.
///
/// The project counts them when they are written, the unit never carries them out.
#[derive(Clone, Copy, Default)]
pub(crate) struct Overwritten {
    /// IOTLB commands.
    pub(crate) iotlb_commands: u64,
    /// Waits.
    pub(crate) waits: u64,
}

/// The hypervisor, its domains, and the backend's device.
pub(crate) struct World {
    /// The hypervisor.
    pub(crate) hypervisor: Hypervisor,
    /// What it did.
    pub(crate) audit: Audit,
    /// The NVMe controller, as the IOMMU knows it.
    pub(crate) controller: Device,
    nvme: Lock<Nvme>,
}

impl World {
    /// Bring everything up; the controller runs in the backend.
    ///
    /// # Errors
    /// If anything of that does not work.
    pub(crate) fn new(machine: &Machine, layout: Layout) -> Result<Self, Failure> {
        Self::shaped(machine, Shape::of(layout))
    }

    /// As [`new`](Self::new), with domains of another shape.
    ///
    /// # Errors
    /// As there.
    pub(crate) fn shaped(machine: &Machine, shape: Shape) -> Result<Self, Failure> {
        let queue = match machine.command_line().get("iommu") {
            None | Some("queue") => true,
            Some("registers") => false,
            Some(other) => fail!("iommu={other} is neither queue nor registers"),
        };
        let nvme = Nvme::open(0)?;
        let mut hypervisor = Hypervisor::new(Iommu::bring_up(machine.dmar()?, queue)?);
        for id in DOMAINS {
            hypervisor.add(Guest::shaped(id, shape, &hypervisor.iommu)?)?;
        }
        let controller = hypervisor.iommu.device(nvme.function())?;
        let nvme = Lock::new(nvme);
        let world = Self { hypervisor, audit: Audit::default(), controller, nvme };
        ensure!(world.unit().uses_queue() == queue, "the unit has no queue");
        let backend = world.guest(BACKEND)?;
        world.attach(backend, world.controller)?;
        world.start_controller(backend)?;
        let (tag, unit) = (world.tag(backend)?, world.unit());
        say!(
            "@ iommu queue={} caching_mode={} coherent={} tag={tag}",
            unit.uses_queue(),
            unit.capabilities().caching_mode(),
            !unit.needs_write_back()
        );
        Ok(world)
    }

    /// The domain with this number.
    ///
    /// # Errors
    /// If there is none.
    pub(crate) fn guest(&self, id: DomainId) -> Result<&Guest, Failure> {
        self.hypervisor.guest(id).context("a domain of this world")
    }

    /// The unit that translates for the controller.
    pub(crate) fn unit(&self) -> &VtdUnit {
        &self.hypervisor.iommu.units()[self.controller.unit]
    }

    /// What the unit was told so far.
    pub(crate) fn counters(&self) -> Counters {
        self.unit().counters()
    }

    /// The number by which the unit knows the domain.
    ///
    /// # Errors
    /// If it has no device there, or the number is 0 or another domain's.
    pub(crate) fn tag(&self, guest: &Guest) -> Result<u16, Failure> {
        let tag = guest.dma().tag(self.controller.unit).context("a tag of the domain")?;
        ensure!(tag.get() != 0, "{:?} has the reserved number 0", guest.id());
        let owner = self.unit().owner(tag);
        ensure!(owner == Some(guest.id()), "{tag:?} belongs to {owner:?}");
        Ok(tag.get())
    }

    /// Give a device to a domain.
    ///
    /// # Errors
    /// If it is somebody's already, or the unit refuses.
    pub(crate) fn attach(&self, guest: &Guest, device: Device) -> Result<(), Failure> {
        let units = self.hypervisor.iommu.units();
        guest.dma().attach(units, &crate::embedding::Memory, device).context("attach")
    }

    /// Start the controller on queues in the domain's own memory.
    ///
    /// # Errors
    /// If there is no memory for them, or it does not start.
    pub(crate) fn start_controller(&self, guest: &Guest) -> Result<(), Failure> {
        let frame = |place| self.queue(guest, place);
        let ((submission, submission_bus), (completion, completion_bus)) = (frame(0)?, frame(1)?);
        let queues = Queues { submission, completion, submission_bus, completion_bus };
        Ok(self.nvme.with(|nvme| nvme.start(queues))?)
    }

    /// Let a domain have what it needs for the controller: memory for its queues and answers.
    ///
    /// # Errors
    /// If there is no memory for them.
    pub(crate) fn lend_queues(&self, guest: &Guest) -> Result<(), Failure> {
        (0..3).try_for_each(|place| self.queue(guest, place).map(drop))
    }

    /// The frame of a queue in the domain's own memory, or of what the controller answers
    /// there (place 2), and where the controller has it.
    ///
    /// # Errors
    /// If there is no memory for it.
    fn queue(&self, guest: &Guest, place: u64) -> Result<(Mfn, BusAddress), Failure> {
        let gfn = Gfn::new(QUEUES.get() + place);
        let mfn = match guest.lookup(gfn) {
            Some(mapping) => mapping.mfn,
            None => self.hypervisor.populate(guest, gfn, 0)?,
        };
        let bus = BusAddress::of_frame(gfn.into()).context("address of a queue")?;
        Ok((mfn, bus))
    }

    /// Carry out a hypercall of `guest` to its end.
    ///
    /// # Errors
    /// If there is no domain that a lie wants to flush instead.
    pub(crate) fn call(
        &self,
        guest: &Guest,
        call: Call,
        manner: &Manner<'_>,
    ) -> Result<Outcome, Failure> {
        self.as_caller(guest, manner, |caller| {
            let mut call = call;
            loop {
                match call.run(caller) {
                    Outcome::Continue { done: _, rest } => call = rest,
                    end @ (Outcome::Done | Outcome::Failed(_)) => return end,
                }
            }
        })
    }

    /// Do something as `guest` in the hypervisor.
    ///
    /// # Errors
    /// As [`call`](Self::call).
    pub(crate) fn as_caller<A>(
        &self,
        guest: &Guest,
        manner: &Manner<'_>,
        action: impl FnOnce(&WorldCaller<'_>) -> A,
    ) -> Result<A, Failure> {
        let Manner { cpus, devices, before_flush } = *manner;
        let seat = guest.place()?.seat();
        let other = match devices {
            Lie::Misdirected(other) => Some(self.guest(other)?.place()?.seat()),
            Lie::None | Lie::Skipped => None,
        };
        let devices_seat = other.as_ref().unwrap_or(&seat);
        let caller = Caller {
            hypervisor: &self.hypervisor,
            guest,
            tlb: Watched { inner: &seat, lie: cpus, flushes: &self.audit.tlb, before: &|| {} },
            iotlb: Watched {
                inner: devices_seat,
                lie: devices,
                flushes: &self.audit.iotlb,
                before: before_flush,
            },
            memory: guest,
            watcher: &self.audit,
        };
        Ok(action(&caller))
    }

    /// Print the unit's counters over the whole boot, less what a recovery overwrote: what
    /// the emulator must have seen.
    pub(crate) fn report_boot(&self, overwritten: Overwritten) {
        let Counters { iotlb_commands, waits, .. } = self.counters();
        say!(
            "@ boot iotlb_commands={} waits={}",
            iotlb_commands.saturating_sub(overwritten.iotlb_commands),
            waits.saturating_sub(overwritten.waits)
        );
    }
}
