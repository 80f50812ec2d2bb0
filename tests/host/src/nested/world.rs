//! A guest with guests of its own, on the model and beside a reference.
//!
//! [`NestedWorld::access`] is a nested guest that touches memory. It does what an embedder
//! does: pick a shadow, prepare it, enter, fill what faults.

use std::{
    cell::{Cell, RefCell},
    collections::BTreeMap,
    fmt,
};

use flush::{
    Batch, CpuSet, DomainId, Flushed, Gfn, Hardware, Mfn, NoIommu, Released, TablePage, Tlb,
};
use hwmodel::{
    Access as Touch, Actor, CpuFault, InvalidateFailed, Machine, MachineConfig, Policy,
    Translation, WitnessKind,
};
use p2m::{
    Cpus, GuestCpus, Invalidate, P2m, TlbFlush,
    nested::{
        Context, FillError, InUse, Nested, NestedCounts, ReverseEntry, Shadow, Walked, Wiped,
    },
};
use stage2::{Access, Budget, Emptied, format::ept::Ept};

use super::{edits::Late, sorts::Walks, tables::Tables};
use crate::{FlushLie, Lying, Memory, world::ModelRam};

/// The guest.
pub(super) const GUEST: DomainId = DomainId::new(1);
/// CPUs `0..VCPUS` run nested guests.
pub(super) const VCPUS: usize = 2;
/// The CPU that edits and flushes.
const EDITOR: usize = VCPUS;
/// Frames of memory: one block of 512, some pages, the tables.
const FRAMES: u64 = 2048;
/// More tries than an access can need.
const TRIES: usize = 12;

/// A bug of the embedder.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NestedLie {
    /// The flush at the end of an emulated one is said to be done, and was not.
    ForgetFlush,
    /// A CPU that invalidates forgets the canonical root only.
    ForgetShadowRoots,
    /// The ticket for a fill is taken after the guest's table was read.
    LateTicket,
}

/// What a world is made of.
#[derive(Clone, Copy, Debug)]
pub struct NestedSetup {
    /// How many shadows there are.
    pub shadows: usize,
    /// How many of their leaves the reverse map has room for.
    pub records: usize,
    /// What the hardware does where it may choose.
    pub policy: Policy,
    /// What the embedder does wrong.
    pub lie: Option<NestedLie>,
}

/// Room for the shadows of a world.
#[derive(Debug)]
pub struct Storage {
    shadows: Vec<Shadow>,
    entries: Vec<ReverseEntry>,
}

impl Storage {
    /// As much as the setup says.
    #[must_use]
    pub fn new(setup: NestedSetup) -> Self {
        let shadows = (0..setup.shadows).map(|_| Shadow::VACANT).collect();
        Self { shadows, entries: vec![ReverseEntry::EMPTY; setup.records] }
    }
}

/// A page of the guest.
#[derive(Clone, Copy, Debug)]
pub(super) struct Page {
    pub(super) mfn: Mfn,
    pub(super) writable: bool,
}

/// One CPU of the guest.
#[derive(Default)]
struct Vcpu {
    /// The nested guest it runs, and on what.
    shadow: Option<(Context, InUse)>,
    inside: bool,
}

pub(super) type Model<'s, F> = Nested<'s, F, Memory<ModelRam>, Tlb>;

/// A guest with nested guests on the software model.
pub struct NestedWorld<'s, F: Walks = Ept> {
    /// The hardware.
    pub machine: Machine,
    pub(super) memory: Memory<ModelRam>,
    pub(super) nested: RefCell<Model<'s, F>>,
    cpus: GuestCpus,
    vcpus: RefCell<[Vcpu; VCPUS]>,
    pub(super) tables: RefCell<Tables>,
    pub(super) canonical: RefCell<BTreeMap<u64, Page>>,
    /// Emulated flushes that are under way.
    pub(super) late: RefCell<Vec<Late>>,
    lie: Option<NestedLie>,
    /// Memory and hardware may fail: what is refused stays undone, and a flush that fails is
    /// tried again once hardware is repaired, with its pages held until then.
    pub forgiving: Cell<bool>,
    time: Cell<u64>,
    wrong: RefCell<Vec<String>>,
}

impl<F: Walks> fmt::Debug for NestedWorld<'_, F> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("NestedWorld").field("nested", &self.nested).finish_non_exhaustive()
    }
}

impl<'s, F: Walks> NestedWorld<'s, F> {
    /// A guest without memory.
    ///
    /// # Panics
    /// If the machine has no memory for its root.
    #[must_use]
    pub fn new(setup: NestedSetup, storage: &'s mut Storage) -> Self {
        let config = MachineConfig {
            frames: FRAMES,
            cpus: VCPUS + 1,
            policy: setup.policy,
            ..MachineConfig::default()
        };
        let machine = Machine::new(config);
        let memory = Memory::new(ModelRam::new(machine.clone(), FRAMES));
        let p2m = P2m::new(F::four_levels(), memory.clone()).expect("memory for a root");
        let Storage { shadows, entries } = storage;
        Self {
            machine,
            memory,
            nested: RefCell::new(Nested::new(p2m, shadows, entries, 0x5eed)),
            cpus: GuestCpus::new(GUEST),
            vcpus: RefCell::default(),
            tables: RefCell::default(),
            canonical: RefCell::default(),
            late: RefCell::default(),
            lie: setup.lie,
            forgiving: Cell::new(false),
            time: Cell::new(0),
            wrong: RefCell::default(),
        }
    }

    /// A nested guest reads or writes a frame on CPU `cpu`. `meanwhile` happens once,
    /// after the guest's table was read for a fill and before the fill.
    ///
    /// Returns whether it got through.
    ///
    /// # Panics
    /// If the machine is out of memory.
    pub fn access(
        &self,
        cpu: usize,
        context: Context,
        nested: u64,
        write: bool,
        meanwhile: impl FnOnce(),
    ) -> bool {
        let mut meanwhile = Some(meanwhile);
        for _ in 0..TRIES {
            if !self.enter(cpu, context) {
                return false;
            }
            let touch = if write { Touch::Write } else { Touch::Read };
            match self.machine.access(cpu, nested << 12, touch) {
                Ok(reached) => {
                    self.judge(cpu, context, nested, write, reached);
                    return true;
                }
                Err(CpuFault::NotPresent { .. } | CpuFault::Rights) => {}
                Err(fault) => self.complain(format!("CPU {cpu}, {nested:#x}: {fault:?}")),
            }
            self.exit(cpu);
            if !self.fill(cpu, context, nested, write, &mut meanwhile) {
                return false;
            }
        }
        self.complain(format!("CPU {cpu}: no way to {nested:#x} of {context:?}"));
        false
    }

    /// Serves a fault. `false` if the guest has to hear of it.
    fn fill(
        &self,
        cpu: usize,
        context: Context,
        nested: u64,
        write: bool,
        meanwhile: &mut Option<impl FnOnce()>,
    ) -> bool {
        let ticket = || {
            let vcpus = self.vcpus.borrow();
            let shadow = vcpus[cpu].shadow.as_ref().map(|(_, shadow)| shadow);
            self.nested.borrow().ticket(shadow.expect("picked before it was entered"))
        };
        let early = ticket();
        let shown = self.tables.borrow().read(context, nested);
        let Some(shown) = shown.filter(|shown| shown.writable || !write) else { return false };
        if let Some(meanwhile) = meanwhile.take() {
            meanwhile();
        }
        let ticket = if self.lie == Some(NestedLie::LateTicket) { ticket() } else { early };
        let access = if shown.writable { Access::ALL } else { Access::READ | Access::EXECUTE };
        let canonical = Gfn::new(shown.canonical);
        let walked = Walked { canonical, order: shown.order, access };
        let mut batch: Batch<(), 1> = Batch::new(GUEST);
        let filled = batch.edit_many(|skipped, _| {
            let vcpus = self.vcpus.borrow();
            let (_, shadow) = vcpus[cpu].shadow.as_ref().expect("picked before it was entered");
            self.nested.borrow_mut().fill(shadow, ticket, Gfn::new(nested), walked, skipped)
        });
        self.flush(&mut batch, |_| {});
        let page = self.canonical.borrow().get(&shown.canonical).copied();
        match filled {
            Ok(_) => page.is_some_and(|page| page.writable || !write),
            Err(FillError::Stale | FillError::Pending | FillError::Barred | FillError::Full) => {
                true
            }
            Err(FillError::NotMapped) => {
                if page.is_some() {
                    self.complain(format!("{nested:#x} was refused its page"));
                }
                false
            }
            Err(FillError::NoTable) if self.forgiving.get() => false,
            Err(error) => {
                self.complain(format!("{nested:#x} was not filled: {error}"));
                false
            }
        }
    }

    /// Makes the CPU run the nested guest. `false` if no shadow is to be had for it.
    fn enter(&self, cpu: usize, context: Context) -> bool {
        let runs = |vcpu: &Vcpu| vcpu.shadow.as_ref().is_some_and(|(own, _)| *own == context);
        if !runs(&self.vcpus.borrow()[cpu]) {
            self.exit(cpu);
            let old = self.vcpus.borrow_mut()[cpu].shadow.take();
            if let Some((_, old)) = old {
                self.nested.borrow_mut().leave(old);
            }
            let Ok(new) = self.nested.borrow_mut().pick(context) else { return false };
            self.vcpus.borrow_mut()[cpu].shadow = Some((context, new));
        }
        while !self.vcpus.borrow()[cpu].inside {
            let Some(root) = self.root(cpu) else {
                self.prepare(cpu);
                continue;
            };
            if self.cpus.enter(cpu, &Forget { world: self, cpu }).is_err() {
                if !self.forgiving.get() {
                    self.complain(format!("CPU {cpu} did not invalidate"));
                }
                return false;
            }
            self.machine.load_root(cpu, F::root(root));
            self.vcpus.borrow_mut()[cpu].inside = true;
        }
        true
    }

    fn root(&self, cpu: usize) -> Option<Mfn> {
        let vcpus = self.vcpus.borrow();
        let (_, shadow) = vcpus[cpu].shadow.as_ref()?;
        self.nested.borrow().root(shadow)
    }

    /// Unmaps what is left of the shadow's past, and opens it.
    fn prepare(&self, cpu: usize) {
        let mut batch: Batch<Wiped, 1> = Batch::new(GUEST);
        let mut held = false;
        while !held {
            let step = batch.hold(|skipped| {
                let vcpus = self.vcpus.borrow();
                let (_, shadow) = vcpus[cpu].shadow.as_ref().expect("picked just now");
                let budget = &mut Budget::new(700);
                self.nested.borrow_mut().prepare(shadow, budget, Emptied::Free, skipped)
            });
            held = step.is_ok();
            if held || batch.tlb().depth() == flush::Depth::Tables {
                self.flush(&mut batch, |wiped| {
                    self.nested.borrow_mut().open(wiped);
                });
            }
        }
    }

    /// Leaves the nested guest.
    pub(super) fn exit(&self, cpu: usize) {
        let inside = std::mem::take(&mut self.vcpus.borrow_mut()[cpu].inside);
        if inside {
            self.machine.leave(cpu);
            self.cpus.leave(cpu);
        }
    }

    /// Flushes a batch and gives out what it held; table pages go back to memory.
    pub(super) fn flush<P, const N: usize>(
        &self,
        batch: &mut Batch<P, N>,
        give: impl FnMut(Released<P>),
    ) {
        self.flush_or_lie(batch, None, give);
    }

    /// As [`flush`](Self::flush), at the end of an emulated flush.
    pub(super) fn flush_emulated(&self, batch: &mut Batch<Wiped, 1>) {
        let lie = (self.lie == Some(NestedLie::ForgetFlush)).then_some(FlushLie::Skip);
        self.flush_or_lie(batch, lie, |wiped| {
            self.nested.borrow_mut().open(wiped);
        });
    }

    fn flush_or_lie<P, const N: usize>(
        &self,
        batch: &mut Batch<P, N>,
        lie: Option<FlushLie>,
        mut give: impl FnMut(Released<P>),
    ) {
        let local = Forget { world: self, cpu: EDITOR };
        let tlb = Lying::new(TlbFlush { guest: &self.cpus, machine: self, local: &local }, lie);
        let hardware = Hardware { tlb: &tlb, iotlb: &NoIommu };
        match batch.flush(&hardware) {
            Ok(flushed) => self.give_all(flushed, &mut give),
            Err(mut failure) if self.forgiving.get() => {
                // CPUs use what they still hold, which is all held here.
                self.machine.speculate();
                self.machine.repair();
                match failure.held.retry(&hardware) {
                    Ok(flushed) => self.give_all(flushed, &mut give),
                    Err(_) => self.complain("a flush failed on repaired hardware".into()),
                }
            }
            Err(_) => self.complain("a flush failed".into()),
        }
    }

    fn give_all<P, const N: usize>(
        &self,
        mut flushed: Flushed<'_, P, N>,
        give: &mut impl FnMut(Released<P>),
    ) {
        while let Some(page) = flushed.next_page() {
            give(page);
        }
        while let Some(table) = flushed.next_table() {
            self.memory.free_table(Released::<TablePage>::recycle(table));
        }
    }

    /// How many frames are in use beyond the guest's pages and all tables: none, unless some
    /// were lost.
    #[must_use]
    pub fn lost_frames(&self) -> i64 {
        let in_use = self.machine.frames_in_use().len() as i64;
        in_use - self.canonical.borrow().len() as i64 - self.memory.tables_in_use() as i64
    }

    /// Hardware operations and requests for frames so far.
    #[must_use]
    pub fn asked(&self) -> (u64, u64) {
        (self.machine.counters().operations, self.memory.ram().allocations())
    }

    /// Refuses the `n`-th request for a frame from now on; 0 refuses none.
    pub fn refuse_allocation(&self, n: u64) {
        self.memory.ram().refuse_allocation(n);
    }

    /// Compares what a nested guest reached with what it may reach.
    fn judge(&self, cpu: usize, context: Context, nested: u64, write: bool, reached: Translation) {
        let canonical = self.canonical.borrow();
        let tables = self.tables.borrow();
        let allowed = tables.may_show(context, nested).any(|shown| {
            canonical.get(&shown.canonical).is_some_and(|page| {
                page.mfn.get() == reached.address >> 12
                    && (!write || (shown.writable && page.writable))
            })
        });
        if !allowed {
            let what = if write { "wrote" } else { "read" };
            self.complain(format!(
                "CPU {cpu} {what} {nested:#x} of {context:?} at {:#x}, which nothing allows",
                reached.address
            ));
        }
    }

    fn complain(&self, what: String) {
        self.wrong.borrow_mut().push(what);
    }

    /// What the shadows did so far.
    #[must_use]
    pub fn counts(&self) -> NestedCounts {
        self.nested.borrow().counts()
    }

    /// What nested guests and hardware did that they must not: what the reference does not
    /// allow, and what the model saw.
    #[must_use]
    pub fn uses(&self) -> Vec<String> {
        let mut wrong = self.wrong.borrow().clone();
        wrong.extend(self.machine.witnesses().iter().map(ToString::to_string));
        wrong
    }

    /// Everything that went wrong so far: [`uses`](Self::uses), and what caches hold that
    /// they must not.
    #[must_use]
    pub fn verdict(&self) -> Vec<String> {
        let settled = self.late.borrow().is_empty();
        let always_wrong = |kind| {
            matches!(kind, WitnessKind::CachesReleasedFrame | WitnessKind::CachesReleasedTable)
        };
        // A CPU that is to invalidate before its next stay may hold what it likes.
        let usable = |actor| match actor {
            Actor::Cpu(cpu) => self.cpus.may_hold(cpu) || self.machine.is_running(cpu),
            Actor::Unit(..) | Actor::DeviceTlb(_) | Actor::InFlight(_) => true,
        };
        let audit = self.machine.audit();
        let held = audit
            .iter()
            .filter(|witness| usable(witness.actor) && (settled || always_wrong(witness.kind)));
        let mut wrong = self.uses();
        wrong.extend(held.map(ToString::to_string));
        wrong.extend(self.machine.misuses().iter().map(|misuse| format!("{misuse:?}")));
        wrong
    }
}

/// Makes one CPU forget the guest.
struct Forget<'w, 's, F: Walks> {
    world: &'w NestedWorld<'s, F>,
    cpu: usize,
}

impl<F: Walks> Invalidate for Forget<'_, '_, F> {
    type Error = InvalidateFailed;

    fn invalidate(&self) -> Result<(), InvalidateFailed> {
        let machine = &self.world.machine;
        if self.world.lie == Some(NestedLie::ForgetShadowRoots) {
            let root = self.world.nested.borrow().p2m().root();
            machine.invalidate(self.cpu, F::root(root).tag)
        } else {
            machine.invalidate_all(self.cpu)
        }
    }
}

impl<F: Walks> Cpus for NestedWorld<'_, F> {
    type Deadline = u64;

    fn this_cpu(&self) -> usize {
        EDITOR
    }

    fn kick(&self, cpus: &CpuSet) {
        for cpu in cpus.iter() {
            self.machine.send_ipi(cpu);
        }
    }

    fn deadline(&self) -> u64 {
        self.time.get() + 100
    }

    fn has_passed(&self, deadline: &u64) -> bool {
        self.time.get() > *deadline
    }

    fn relax(&self) {
        self.time.set(self.time.get() + 1);
        for cpu in 0..VCPUS {
            if self.machine.take_ipi(cpu) {
                self.exit(cpu);
            }
        }
    }
}
