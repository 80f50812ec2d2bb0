//! Tables whose CPUs mark what they use, where memory and processors fail.
//!
//! A clear that finds no mark asks for no flush, so what was refused before it must have
//! left marks and entries as they were.

use std::cell::{Cell, RefCell};

use flush::{Batch, CpuSet, DomainId, Flushed, Gfn, Gone, Hardware, Mfn, NoIommu, Run, Tlb};
use host::{Memory, world::ModelRam};
use hwmodel::{Failure, Frame, InvalidateFailed, Machine, MachineConfig, Owner, Root};
use p2m::{Cpus, Expected, GuestCpus, Invalidate, MarkedP2m, PageKind, Teardown, TlbFlush};
use stage2::{
    Access, Budget, Emptied, Leaf, Rest, Sink,
    format::ept::{Ept, EptLevels},
};

use crate::Say;

const ID: DomainId = DomainId::new(5);
const FRAMES: u64 = 1280;
/// Runs the guest; CPU 0 flushes.
const GUEST_CPU: usize = 1;
/// Where grants are mapped, far apart; and a block of memory.
const GRANTS: [u64; 3] = [0x10_0000, 0x10_0001, 0x800_0000];
const RAM: u64 = 0x40_0000;

/// What fails in one run.
#[derive(Clone, Copy, Debug)]
enum Fault {
    /// The n-th hardware operation.
    Operation(u64),
    /// The n-th request for a frame.
    Allocation(u64),
}

/// A leaf that was cleared: its first frame, and the binary logarithm of their number.
type Taken = (Mfn, u32);
type Pages = Batch<Taken, 32>;

/// A guest without devices.
struct Bench {
    machine: Machine,
    memory: Memory<ModelRam>,
    map: RefCell<MarkedP2m<Memory<ModelRam>>>,
    cpus: GuestCpus,
    eptp: u64,
    time: Cell<u64>,
    /// Frames of the guest that were not released yet.
    pages: Cell<usize>,
}

fn new_map(memory: &Memory<ModelRam>) -> MarkedP2m<Memory<ModelRam>> {
    MarkedP2m::new(Ept::new(EptLevels::Four), memory.clone()).expect("a root")
}

/// Makes one CPU forget the guest.
struct Local<'b>(&'b Bench, usize);

impl Invalidate for Local<'_> {
    type Error = InvalidateFailed;

    fn invalidate(&self) -> Result<(), InvalidateFailed> {
        self.0.machine.invalidate(self.1, self.0.eptp & !0xfff)
    }
}

impl Cpus for Bench {
    type Deadline = u64;

    fn this_cpu(&self) -> usize {
        0
    }

    fn kick(&self, cpus: &CpuSet) {
        cpus.iter().for_each(|cpu| self.machine.send_ipi(cpu));
    }

    fn deadline(&self) -> u64 {
        self.time.get() + 100
    }

    fn has_passed(&self, deadline: &u64) -> bool {
        self.time.get() > *deadline
    }

    fn relax(&self) {
        self.time.set(self.time.get() + 1);
        if self.machine.take_ipi(GUEST_CPU) {
            self.machine.leave(GUEST_CPU);
            self.cpus.leave(GUEST_CPU);
        }
    }
}

/// Collects leaves as long as a batch has room for them.
struct Collect<'c, 'id>(usize, &'c mut Vec<(Run, Leaf, Gone<'id, Tlb>)>);

impl<'id> Sink<'id, Tlb> for Collect<'_, 'id> {
    fn left(&self) -> usize {
        self.0
    }

    fn take(&mut self, run: Run, leaf: Leaf, gone: Gone<'id, Tlb>) {
        self.0 = self.0.saturating_sub(1);
        self.1.push((run, leaf, gone));
    }
}

impl Bench {
    fn new() -> Self {
        let config = MachineConfig { frames: FRAMES, cpus: 2, ..MachineConfig::default() };
        let machine = Machine::new(config);
        let memory = Memory::new(ModelRam::new(machine.clone(), FRAMES));
        let map = new_map(&memory);
        let eptp = map.eptp().expect("a small root").bits();
        let (map, cpus) = (RefCell::new(map), GuestCpus::new(ID));
        Self { machine, memory, map, cpus, eptp, time: Cell::default(), pages: Cell::default() }
    }

    /// The guest tries to write a page.
    fn touch(&self, gfn: u64) {
        if !self.machine.is_running(GUEST_CPU) {
            if self.cpus.enter(GUEST_CPU, &Local(self, GUEST_CPU)).is_err() {
                return;
            }
            self.machine.load_root(GUEST_CPU, Root::from_eptp(self.eptp));
        }
        self.machine.cpu_write64(GUEST_CPU, gfn << 12, 1).ok();
    }

    /// Edits, flushes, and frees what was held; a flush that fails is made good after a
    /// repair, and the guest goes on meanwhile.
    fn edit(&self, edit: impl FnOnce(&mut MarkedP2m<Memory<ModelRam>>, &mut Pages)) {
        let mut batch = Pages::new(ID);
        edit(&mut self.map.borrow_mut(), &mut batch);
        self.flush(batch);
    }

    fn flush(&self, mut batch: Pages) {
        let local = Local(self, 0);
        let tlb = TlbFlush { guest: &self.cpus, machine: self, local: &local };
        let hardware = Hardware { tlb: &tlb, iotlb: &NoIommu };
        match batch.flush(&hardware) {
            Ok(flushed) => self.free(flushed),
            Err(mut failure) => {
                GRANTS.into_iter().chain([RAM, RAM + 7]).for_each(|gfn| self.touch(gfn));
                self.check();
                self.machine.repair();
                self.free(failure.held.retry(&hardware).expect("repaired hardware"));
            }
        }
    }

    fn free(&self, mut flushed: Flushed<'_, Taken, 32>) {
        while let Some(page) = flushed.next_page() {
            let (first, order) = *page.get();
            for offset in 0..1_u64 << order {
                self.machine.release(Frame(first.get() + offset));
                self.pages.set(self.pages.get() - 1);
            }
        }
        while let Some(table) = flushed.next_table() {
            self.memory.free_table(table.recycle());
        }
    }

    /// 2^`order` pages come, or not.
    fn set(&self, gfn: u64, order: u8, kind: PageKind) {
        let Some(first) = self.machine.allocate_block(Owner(5), order) else { return };
        self.pages.set(self.pages.get() + (1 << order));
        let mut set = false;
        self.edit(|map, batch| {
            set = batch.edit_many(|skipped, room| {
                let was = map.set(Gfn::new(gfn), order, Mfn::new(first.0), kind, skipped);
                let set = was.is_ok();
                if let Ok(Some(was)) = was {
                    let cleared = was.gone.with(&NoIommu.gone(skipped));
                    room.hold((was.mapping.mfn, 0), cleared).expect("the batch is empty");
                }
                set
            });
        });
        if !set {
            (0..1 << order).for_each(|offset| self.machine.release(Frame(first.0 + offset)));
            self.pages.set(self.pages.get() - (1 << order));
        }
    }

    /// A page goes, or not.
    fn clear(&self, gfn: u64) {
        let gfn = Gfn::new(gfn);
        self.edit(|map, batch| {
            let Some(found) = map.get(gfn) else { return };
            let Some(kind) = found.kind else { return };
            // A refusal is fine.
            batch
                .hold(|skipped| {
                    let expected = Expected { mfn: found.mfn, kind };
                    let gone = map.clear_grant(gfn, expected, skipped)?;
                    let cleared = gone.with(&NoIommu.gone(skipped));
                    Ok::<_, p2m::ClearError>(((found.mfn, 0), cleared))
                })
                .ok();
        });
    }

    fn restrict(&self, first: u64, last: u64) {
        let run = Run::new(Gfn::new(first), Gfn::new(last)).expect("first before last");
        self.edit(|map, batch| {
            let budget = &mut Budget::UNLIMITED.clone();
            // A refusal is fine.
            batch.edit_many(|skipped, _| {
                map.restrict(Rest::new(run), Access::READ, budget, skipped).is_ok()
            });
        });
    }

    /// As many leaves of a range go as fit into a batch, or fewer.
    fn clear_range(&self, first: u64, last: u64) {
        let run = Run::new(Gfn::new(first), Gfn::new(last)).expect("first before last");
        self.edit(|map, batch| {
            batch.edit_many(|skipped, room| {
                let (mut leaves, budget) = (Vec::new(), &mut Budget::UNLIMITED.clone());
                let sink = Collect(room.left(), &mut leaves);
                // A refusal is fine.
                map.clear_range(Rest::new(run), budget, Emptied::Free, skipped, sink).ok();
                for (run, leaf, gone) in leaves {
                    let cleared = gone.with(&NoIommu.gone(skipped));
                    let taken = (leaf.mfn, run.pages().ilog2());
                    room.hold(taken, cleared).expect("the sink had no more room");
                }
            });
        });
    }

    /// Nothing stale was used, and every frame is the guest's or a table's.
    #[track_caller]
    fn check(&self) {
        assert_eq!(self.machine.witnesses(), []);
        assert_eq!(self.machine.misuses(), []);
        let in_use = self.machine.frames_in_use().len();
        assert_eq!(in_use, self.pages.get() + self.memory.tables_in_use() as usize);
    }

    fn script(&self) {
        let steps: [&dyn Fn(&Self); 11] = [
            &|bench| bench.set(RAM, 9, PageKind::RamReadWrite),
            &|bench| GRANTS.iter().for_each(|gfn| bench.set(*gfn, 0, PageKind::GrantReadWrite)),
            &|bench| bench.touch(GRANTS[0]),
            &|bench| GRANTS.iter().for_each(|gfn| bench.clear(*gfn)),
            &|bench| bench.touch(RAM + 7),
            &|bench| bench.clear(RAM + 7),
            &|bench| bench.set(RAM + 8, 0, PageKind::RamReadWrite),
            &|bench| bench.restrict(RAM + 9, RAM + 10),
            &|bench| bench.set(GRANTS[2], 0, PageKind::GrantReadOnly),
            &|bench| bench.clear_range(RAM, RAM + 20),
            &|bench| bench.clear(GRANTS[2]),
        ];
        for step in steps {
            step(self);
            GRANTS.into_iter().chain([RAM, RAM + 7]).for_each(|gfn| self.touch(gfn));
            self.check();
        }
    }

    /// The guest ends with all that it has.
    fn end(self) {
        self.machine.leave(GUEST_CPU);
        self.cpus.leave(GUEST_CPU);
        // Its place is taken by a new map, which stays.
        let map = self.map.replace(new_map(&self.memory));
        self.take_down(map.teardown());
        self.check();
        assert_eq!(self.pages.get(), 0);
        assert_eq!(self.memory.tables_in_use(), 1, "the root of the new map");
    }

    fn take_down(&self, mut end: Teardown<Ept, Memory<ModelRam>, Tlb>) {
        while !end.is_done() {
            let mut batch = Pages::new(ID);
            batch.edit_many(|skipped, room| {
                let (mut leaves, budget) = (Vec::new(), &mut Budget::UNLIMITED.clone());
                // It stops when the batch is full.
                end.step(budget, skipped, Collect(room.left(), &mut leaves)).ok();
                for (run, leaf, gone) in leaves {
                    let cleared = gone.with(&NoIommu.gone(skipped));
                    room.hold((leaf.mfn, run.pages().ilog2()), cleared).expect("there is room");
                }
            });
            self.flush(batch);
        }
    }
}

/// Runs the script with something failing; how many operations and frames it asked for.
fn run(fault: Option<Fault>) -> (u64, u64) {
    let _say = Say(format!("marked tables, {fault:?}"));
    let bench = Bench::new();
    let ram = bench.memory.ram();
    match fault {
        None => {}
        Some(Fault::Operation(n)) => bench.machine.fail_operation(n, Failure::Hang),
        Some(Fault::Allocation(n)) => ram.refuse_allocation(n),
    }
    let before = ram.allocations();
    bench.script();
    let asked = (bench.machine.counters().operations, ram.allocations() - before);
    bench.machine.repair();
    ram.refuse_allocation(0);
    bench.script();
    bench.end();
    asked
}

#[test]
fn whatever_fails_under_marked_tables_nothing_stale_is_used_and_no_page_is_lost() {
    let (operations, allocations) = run(None);
    println!("sweep | marked tables | {operations} operations, {allocations} requests");
    assert!(operations > 5 && allocations > 5);
    let faults = (1..=operations).map(Fault::Operation);
    for fault in faults.chain((1..=allocations).map(Fault::Allocation)) {
        run(Some(fault));
    }
}
