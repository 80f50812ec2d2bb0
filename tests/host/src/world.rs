//! The hypervisor on the software model: its CPUs, its VT-d unit, its devices.
//!
//! A [`World`] has two domains. The *frontend* grants pages; the *backend* maps them,
//! touches them from its CPUs and with a device, and gives them back. The model keeps
//! every stale entry the manuals allow and reports each use of one.

mod guests;
mod model;
mod stays;
mod tagged;

use std::{
    cell::{Cell, RefCell},
    collections::BTreeMap,
    fmt,
};

use flush::{
    CpuSet, DomainId, Gfn, Metered, Mfn,
    plan::{self, Planner},
};
use gnttab::{Call, Domain, GuestAddress, Outcome, VcpuId, give_out};
use hwmodel::{
    Actor, Frame, InvalidateFailed, Machine, MachineConfig, Owner, Policy, Space, UnitId,
    WitnessKind,
};
use iommu_vtd::{Device, DmaFlush, Members, QueueMemory, SourceId, Unit, UnitConfig, UnitState};
use p2m::{Cpus, Generation, Invalidate, TlbFlush, hardware::svm::FlushByAsid};
use stage2::{
    Level,
    format::vtd::{Vtd, VtdLevels},
};

use crate::{
    Caller, CpuTables, Faults, FlushLie, Guest, Hypervisor, Layout, Lying, Ram,
    hypervisor::{Locked, lock},
    memory::HYPERVISOR,
};

/// The domain that grants.
pub const FRONTEND: DomainId = DomainId::new(1);
/// The domain that maps.
pub const BACKEND: DomainId = DomainId::new(2);
/// The backend's device.
pub const DEVICE: SourceId = SourceId::new(0x10);
/// The CPU that makes hypercalls.
pub const CALLING_CPU: usize = 0;
/// A CPU that stays in the backend.
pub const OTHER_CPU: usize = 1;

/// What a world is made of.
#[derive(Clone, Copy, Debug)]
pub struct Setup {
    /// What processors walk. Devices can walk the same only where it is plain EPT.
    pub cpus: CpuTables,
    /// The ASIDs of each processor, where it has any.
    pub asids: Asids,
    /// Whose tables devices walk.
    pub layout: Layout,
    /// The remapping unit.
    pub unit: hwmodel::UnitConfig,
    /// Drive the unit through its registers, not its queue.
    pub registers: bool,
    /// The device has a TLB of its own and uses it.
    pub device_tlb: bool,
    /// What the hardware does where it may choose.
    pub policy: Policy,
    /// Frames of memory.
    pub frames: u64,
    /// How many such units there are, each with a [device](device_behind) of the backend.
    pub units: usize,
    /// Depth of the tables that devices have of their own.
    pub levels: VtdLevels,
    /// Binary logarithm of the pages of each unit's queue, 0 to 7.
    pub ring: u8,
}

impl Setup {
    /// The format of tables that devices of such a unit can walk.
    #[must_use]
    pub fn device_format(&self) -> Vtd {
        let largest = match (self.unit.large_2m, self.unit.large_1g) {
            (true, true) => Level::TWO,
            (true, false) => Level::ONE,
            (false, _) => Level::PAGE,
        };
        Vtd::new(self.levels).with_largest_leaf(largest)
    }
}

/// The backend's device behind unit `unit`; [`DEVICE`] is the one behind unit 0.
///
/// # Panics
/// For units beyond the bus.
#[must_use]
pub fn device_behind(unit: usize) -> SourceId {
    let unit = u16::try_from(unit).expect("few units");
    SourceId::new(DEVICE.get() + 8 * unit)
}

impl Default for Setup {
    fn default() -> Self {
        Self {
            cpus: CpuTables::Ept,
            asids: Asids { count: 8, flush_by_asid: FlushByAsid::Available },
            layout: Layout::Separate,
            unit: hwmodel::UnitConfig::default(),
            registers: false,
            device_tlb: false,
            policy: Policy::Greedy,
            frames: 8192,
            units: 1,
            levels: VtdLevels::Four,
            ring: 0,
        }
    }
}

pub use guests::{FIRST_REFERENCE, POISON, granted_gfn};
pub use model::{ModelRam, Observer, Registers};
pub use tagged::Asids;
use tagged::Vmruns;

type ModelUnit = Unit<crate::Memory<ModelRam>, Registers, Locked<UnitState>>;
type ModelDma<'w> =
    DmaFlush<'w, crate::Memory<ModelRam>, Registers, Locked<UnitState>, Locked<Members>>;
type ModelTlb<'w> = TlbFlush<'w, World, Local<'w>>;
/// A guest of a [`World`] in a hypercall.
pub type ModelCaller<'w> = Caller<'w, ModelRam, CountedTlb<'w>, CountedDma<'w>>;
type CountedTlb<'w> = Metered<'w, Lying<ModelTlb<'w>>>;
type CountedDma<'w> = Metered<'w, Lying<ModelDma<'w>>>;

/// Makes one CPU forget one guest.
#[derive(Debug)]
pub struct Local<'w> {
    world: &'w World,
    cpu: usize,
    root: Mfn,
}

impl<'w> Local<'w> {
    /// On `cpu`, for the guest with the CPU tables at `root`.
    pub fn new(world: &'w World, cpu: usize, root: Mfn) -> Self {
        Self { world, cpu, root }
    }
}

impl Invalidate for Local<'_> {
    type Error = InvalidateFailed;

    fn invalidate(&self) -> Result<(), InvalidateFailed> {
        if self.world.vmruns.is_some() {
            // ASIDs are flushed by a VMRUN, which is not to be had here.
            return Err(InvalidateFailed);
        }
        self.world.machine.invalidate(self.cpu, self.root.get() << 12)
    }
}

/// A batch of a [`World`] whose flush failed.
pub type ModelFailed<'w> = crate::caller::Failed<CountedTlb<'w>, CountedDma<'w>>;

/// How many flushes calls asked for, by kind.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Flushes {
    /// Of CPUs.
    pub tlb: u64,
    /// Of devices.
    pub iotlb: u64,
}

/// How one call ended.
#[derive(Debug)]
pub struct Ended<'w> {
    /// What the guest is told.
    pub outcome: Outcome,
    /// What it asked for.
    pub flushes: Flushes,
    /// Batches that could not be flushed.
    pub failed: Vec<ModelFailed<'w>>,
}

/// What another vCPU does in the middle of a call.
pub type OtherVcpu = Box<dyn Fn(&World)>;

/// The hypervisor on the model.
pub struct World {
    /// The hardware.
    pub machine: Machine,
    /// The software.
    pub hypervisor: Hypervisor<ModelRam>,
    /// The remapping units.
    pub units: Vec<ModelUnit>,
    /// What goes wrong in the next calls.
    pub faults: Faults,
    /// What the next calls claim falsely, for CPUs and for devices.
    pub lies: Cell<(Option<FlushLie>, Option<FlushLie>)>,
    /// Decides how units are told in the next calls.
    pub planner: Cell<Planner<'static>>,
    /// Pages whose reference was dropped while hardware could still reach them.
    pub released_early: Cell<u64>,
    /// What could still reach the first of them.
    pub first_early: Cell<Option<hwmodel::Witness>>,
    /// Polls after which a wait is given up.
    pub patience: Cell<u64>,
    /// CPUs that are kicked out of a guest stay outside, and the hypervisor believes them.
    pub stay_out: Cell<bool>,
    /// CPUs do not take interrupts.
    pub deaf: Cell<bool>,
    /// What happens while the bytes of the next copy move.
    pub during_copy: RefCell<Option<OtherVcpu>>,
    /// CPUs run guests without accessed and dirty flags, whatever the guests' tables say.
    pub without_marks: Cell<bool>,
    /// Which guest each CPU runs, and which of its vCPUs.
    resident: RefCell<BTreeMap<usize, (DomainId, usize)>>,
    /// Where CPUs enter guests by VMRUN.
    vmruns: Option<RefCell<Vmruns>>,
}

impl fmt::Debug for World {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("World").finish_non_exhaustive()
    }
}

/// Where guests keep hypercall arguments.
pub const ARGUMENTS: Gfn = Gfn::new(0x10);
const ARGUMENT_PAGES: u64 = 64;
/// Processors of a world.
const CPUS: usize = 4;

impl World {
    /// A machine with one unit and one device, and two domains; the device is the
    /// backend's, and CPU 1 runs the backend.
    ///
    /// # Panics
    /// If anything of that does not work.
    #[must_use]
    pub fn new(setup: Setup) -> Self {
        let machine = Machine::new(MachineConfig {
            frames: setup.frames,
            cpus: CPUS,
            policy: setup.policy,
            ..MachineConfig::default()
        });
        for number in 0..setup.units {
            let unit = machine.add_unit(setup.unit);
            machine.add_device(unit, device_behind(number).get(), setup.device_tlb);
        }
        let mut ram = ModelRam::new(machine.clone(), setup.frames);
        ram.write_back = !setup.unit.coherent;
        let mut hypervisor = Hypervisor::new(ram);
        for id in [FRONTEND, BACKEND] {
            hypervisor.add_on(id, setup.cpus, setup.layout, setup.device_format());
        }
        let vmruns = (setup.cpus == CpuTables::Npt)
            .then(|| RefCell::new(Vmruns::new(machine.clone(), CPUS, setup.asids)));
        let memory = hypervisor.memory.clone();
        let frame = || memory.ram().allocate(HYPERVISOR).expect("memory for the queue");
        let bring_up = |number| {
            let ring = || {
                let block = machine.allocate_block(Owner(u32::from(HYPERVISOR.get())), setup.ring);
                Mfn::new(block.expect("memory for the queue").0)
            };
            let queue = (!setup.registers).then(|| QueueMemory {
                ring: ring(),
                order: setup.ring,
                status: frame(),
            });
            let registers = Registers { machine: machine.clone(), unit: UnitId(number) };
            let config = UnitConfig { queue, timeout_us: 500 };
            let unit = Unit::new(memory.clone(), registers, Locked::default(), config);
            unit.bring_up(&memory).expect("the unit starts");
            unit
        };
        let units = (0..setup.units).map(bring_up).collect();
        let world = Self {
            machine,
            hypervisor,
            units,
            faults: Faults::default(),
            lies: Cell::new((None, None)),
            planner: Cell::new(Planner::new(plan::Policy::Planned)),
            released_early: Cell::new(0),
            first_early: Cell::new(None),
            patience: Cell::new(500),
            stay_out: Cell::new(false),
            deaf: Cell::new(false),
            during_copy: RefCell::default(),
            without_marks: Cell::new(false),
            resident: RefCell::default(),
            vmruns,
        };
        for guest in &world.hypervisor.guests {
            for page in 0..ARGUMENT_PAGES {
                world.hypervisor.populate(guest, Gfn::new(ARGUMENTS.get() + page));
            }
        }
        let device_tlb = setup.device_tlb.then_some(8);
        for unit in 0..setup.units {
            let source = device_behind(unit);
            let device = Device { unit, source, physical_function: source, device_tlb };
            let attached = world.backend().dma.attach(&world.units, &memory, device);
            attached.expect("the device attaches");
        }
        world.enter(BACKEND, OTHER_CPU);
        world
    }

    /// The domain that maps.
    ///
    /// # Panics
    /// Never: it is there from the start.
    pub fn backend(&self) -> &Guest<ModelRam> {
        self.hypervisor.guest(BACKEND).expect("the backend exists")
    }

    /// The domain that grants.
    ///
    /// # Panics
    /// Never: it is there from the start.
    pub fn frontend(&self) -> &Guest<ModelRam> {
        self.hypervisor.guest(FRONTEND).expect("the frontend exists")
    }

    /// Sets what is called after each step, or nothing.
    pub fn observe(&self, observer: Option<Observer>) {
        *lock(&self.hypervisor.memory.ram().observer) = observer;
    }

    /// Makes a call as a guest's first vCPU, to its end unless it is preempted.
    pub fn call(&self, id: DomainId, command: u32, argument: u64, count: u32) -> Ended<'_> {
        let call = Call { command, argument: GuestAddress(argument), count };
        self.call_as(id, |caller| call.run(caller))
    }

    /// Runs something as a guest's first vCPU in the hypervisor.
    ///
    /// # Panics
    /// If there is no such guest.
    pub fn call_as<'w>(
        &'w self,
        id: DomainId,
        f: impl FnOnce(&ModelCaller<'_>) -> Outcome,
    ) -> Ended<'w> {
        let guest = self.hypervisor.guest(id).expect("a guest of this world");
        let local = Local { world: self, cpu: CALLING_CPU, root: guest.cpu_root() };
        let failed = RefCell::default();
        let (outcome, flushes) = {
            // The local invalidation lives as long as this call.
            let tlb = TlbFlush { guest: &guest.cpus, machine: self, local: &local };
            let dma = DmaFlush::new(&self.units, &guest.dma).with_planner(self.planner.get());
            let (tlb_lie, iotlb_lie) = self.lies.get();
            let caller = Caller {
                hypervisor: &self.hypervisor,
                guest,
                vcpu: VcpuId(0),
                tlb: Metered::new(Lying::new(tlb, tlb_lie), &self.faults.account.tlb),
                iotlb: Metered::new(Lying::new(dma, iotlb_lie), &self.faults.account.iotlb),
                faults: &self.faults,
                ended: &|mfn| self.note_end(guest, mfn),
                copying: &|| self.copying(),
                failed: &failed,
            };
            let outcome = f(&caller);
            (
                outcome,
                Flushes {
                    tlb: caller.tlb.hardware().requests(),
                    iotlb: caller.iotlb.hardware().requests(),
                },
            )
        };
        Ended { outcome, flushes, failed: failed.into_inner() }
    }

    /// Bytes are about to move: what a test planned for that moment happens, once.
    fn copying(&self) {
        if let Some(action) = self.during_copy.take() {
            action(self);
        }
    }

    /// A page's mapping by `guest` has ended: nothing of the guest's may reach it.
    pub fn note_end(&self, guest: &Guest<ModelRam>, mfn: Mfn) {
        // Once the granter has lost its page, the other reference may be a mapping as well.
        let pages = &self.hypervisor.pages;
        if pages.get(mfn).0 > 1 && pages.is_lost(mfn) && guest.shows(&self.hypervisor.memory, mfn) {
            return;
        }
        let frame = Frame(mfn.get());
        for space in self.cpu_spaces(guest) {
            self.machine.revoke(frame, space);
        }
        for unit in 0..self.units.len() {
            if let Some(tag) = guest.dma.tag(unit) {
                self.machine.revoke(frame, Space::Device { unit: UnitId(unit), did: tag.get() });
            }
        }
        let reachable = |witness: &hwmodel::Witness| {
            witness.kind == WitnessKind::CachesReleasedFrame && witness.frame == frame
        };
        if let Some(witness) = self.audit().into_iter().find(reachable) {
            self.released_early.set(self.released_early.get() + 1);
            self.first_early.set(self.first_early.get().or(Some(witness)));
        }
    }

    /// What is cached, or in flight, that must not be.
    ///
    /// Left out is what a CPU outside of a guest has of it, if the guest's books say that
    /// it invalidates before it enters, or if that guest is no more: it reaches nothing.
    #[must_use]
    pub fn audit(&self) -> Vec<hwmodel::Witness> {
        let mut found = self.machine.audit();
        found.retain(|witness| {
            let (Actor::Cpu(cpu), Some(Space::Cpu(tag))) = (witness.actor, witness.space) else {
                return true;
            };
            if let Some(vmruns) = &self.vmruns {
                return vmruns.borrow().is_usable(cpu, tag, |id| self.generation(id));
            }
            let has_tag = |guest: &&Guest<ModelRam>| guest.cpu_root().get() << 12 == tag;
            let guest = self.hypervisor.guests.iter().find(has_tag);
            let resident = self.resident.borrow().get(&cpu).copied();
            let other = resident.and_then(|(id, _)| self.hypervisor.guest(id));
            let inside = other.is_none_or(|other| has_tag(&other));
            self.machine.is_running(cpu) && inside
                || guest.is_some_and(|guest| guest.cpus.may_hold(cpu))
        });
        found
    }

    fn generation(&self, id: DomainId) -> Option<Generation> {
        self.hypervisor.guest(id).map(|guest| guest.cpus.generation())
    }

    /// Tries again to flush what a call could not, and gives out what then is free.
    ///
    /// Returns the batches that are still held.
    pub fn retry<'w>(&'w self, id: DomainId, failed: Vec<ModelFailed<'w>>) -> Vec<ModelFailed<'w>> {
        let mut left = Vec::new();
        for mut failure in failed {
            let mut error = None;
            let pages = failure.held.len();
            self.call_as(id, |caller| {
                match failure.held.retry(&caller.hardware()) {
                    Ok(flushed) => give_out(caller, flushed),
                    Err(again) => error = Some(again),
                }
                Outcome::Done
            });
            if let Some(error) = error {
                failure.error = error;
                left.push(failure);
            } else {
                self.faults.account.released(pages);
            }
        }
        left
    }
}

impl Cpus for World {
    type Deadline = u64;

    fn this_cpu(&self) -> usize {
        CALLING_CPU
    }

    fn kick(&self, cpus: &CpuSet) {
        for cpu in cpus.iter() {
            self.machine.send_ipi(cpu);
        }
    }

    fn deadline(&self) -> u64 {
        self.hypervisor.memory.ram().now_us() + self.patience.get()
    }

    fn has_passed(&self, deadline: &u64) -> bool {
        self.hypervisor.memory.ram().now_us() > *deadline
    }

    fn relax(&self) {
        self.hypervisor.memory.ram().relax();
        let resident = self.resident.borrow().clone();
        for (cpu, (id, vcpu)) in resident {
            if self.deaf.get() || !self.machine.take_ipi(cpu) {
                continue;
            }
            if self.stay_out.get() {
                self.resident.borrow_mut().remove(&cpu);
                self.hypervisor.guest(id).expect("a guest of this world").cpus.leave(cpu);
            } else {
                self.leave(cpu);
                self.try_enter_as(id, vcpu, cpu);
            }
        }
    }
}
