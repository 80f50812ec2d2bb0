//! Grants that no CPU used need no CPU flush, where CPUs mark what they use.
//!
//! The model marks entries as the manual says, prefetches included. Hardware that does not,
//! an embedder that runs the guest without marks, and one that wipes a mark are seen.

use std::cell::RefCell;

use flush::{Batch, DomainId, FreshTable, Gfn, Hardware, Mfn, NoIommu, Released, Run};
use host::{Memory, world::ModelRam};
use hwmodel::{CpuLie, Frame, InvalidateFailed, Machine, MachineConfig, Owner, Root, WitnessKind};
use p2m::{Cpus, Expected, GuestCpus, Invalidate, MarkedP2m, PageKind, TlbFlush};
use stage2::{
    Access, Budget, Rest, TableMemory,
    format::ept::{Ept, EptLevels},
};

const ID: DomainId = DomainId::new(5);
const FRAMES: u64 = 1024;
/// Runs the guest; CPU 0 flushes.
const GUEST_CPU: usize = 1;
const GFN: Gfn = Gfn::new(0x10_0000);

/// What happens right before an entry is exchanged.
type Interruption = Option<Box<dyn Fn()>>;

/// Tables that something may happen to just before an exchange, once.
struct Tables {
    memory: Memory<ModelRam>,
    before_exchange: RefCell<Interruption>,
}

impl TableMemory for &Tables {
    fn read(&self, table: Mfn, index: usize) -> u64 {
        self.memory.read(table, index)
    }

    fn swap(&self, table: Mfn, index: usize, new: u64) -> u64 {
        self.memory.swap(table, index, new)
    }

    fn compare_exchange(&self, table: Mfn, index: usize, old: u64, new: u64) -> Result<(), u64> {
        if let Some(action) = self.before_exchange.take() {
            action();
        }
        self.memory.compare_exchange(table, index, old, new)
    }

    fn allocate(&self) -> Option<FreshTable> {
        self.memory.allocate()
    }

    fn discard(&self, table: FreshTable) {
        self.memory.discard(table);
    }

    fn live(&self, table: Mfn) -> u16 {
        self.memory.live(table)
    }

    fn add_live(&self, table: Mfn, entries: u16) {
        self.memory.add_live(table, entries);
    }

    fn drop_live(&self, table: Mfn) -> u16 {
        self.memory.drop_live(table)
    }
}

struct Bench<'t> {
    machine: Machine,
    tables: &'t Tables,
    map: RefCell<MarkedP2m<&'t Tables>>,
    cpus: GuestCpus,
    /// What CPUs load.
    eptp: u64,
}

/// Makes one CPU forget the guest.
struct Local<'b> {
    machine: &'b Machine,
    cpu: usize,
    tag: u64,
}

impl Invalidate for Local<'_> {
    type Error = InvalidateFailed;

    fn invalidate(&self) -> Result<(), InvalidateFailed> {
        self.machine.invalidate(self.cpu, self.tag)
    }
}

impl Cpus for Bench<'_> {
    type Deadline = ();

    fn this_cpu(&self) -> usize {
        0
    }

    fn kick(&self, cpus: &flush::CpuSet) {
        cpus.iter().for_each(|cpu| self.machine.send_ipi(cpu));
    }

    fn deadline(&self) {}

    fn has_passed(&self, (): &()) -> bool {
        false
    }

    fn relax(&self) {
        if self.machine.take_ipi(GUEST_CPU) {
            self.cpus.leave(GUEST_CPU);
            self.enter();
        }
    }
}

type Pages = Batch<Frame, 4>;

/// Runs `test` on a guest whose CPUs mark what they use, and that has no device.
fn bench(test: impl FnOnce(&mut Bench<'_>)) {
    let config = MachineConfig { frames: FRAMES, cpus: 2, ..MachineConfig::default() };
    let machine = Machine::new(config);
    let memory = Memory::new(ModelRam::new(machine.clone(), FRAMES));
    let tables = Tables { memory, before_exchange: RefCell::default() };
    let map = MarkedP2m::new(Ept::new(EptLevels::Four), &tables).expect("a root");
    let eptp = map.eptp().expect("a small root").bits();
    let map = RefCell::new(map);
    test(&mut Bench { machine, tables: &tables, map, cpus: GuestCpus::new(ID), eptp });
}

impl Bench<'_> {
    fn local(&self, cpu: usize) -> Local<'_> {
        Local { machine: &self.machine, cpu, tag: self.eptp & !0xfff }
    }

    fn enter(&self) {
        self.cpus.enter(GUEST_CPU, &self.local(GUEST_CPU)).expect("the CPU can invalidate");
        self.machine.load_root(GUEST_CPU, Root::from_eptp(self.eptp));
    }

    /// Whether the guest reaches a page at [`GFN`].
    fn touch(&self) -> bool {
        self.machine.cpu_write64(GUEST_CPU, GFN.get() << 12, 1).is_ok()
    }

    fn page(&self) -> Frame {
        self.machine.allocate(Owner(ID.get().into())).expect("a page")
    }

    /// Maps a granted page. Nothing is to be flushed for it.
    fn map(&self, page: Frame) {
        self.map_as(PageKind::GrantReadWrite, page);
    }

    fn map_as(&self, kind: PageKind, page: Frame) {
        let mut batch: Pages = Batch::new(ID);
        let mfn = Mfn::new(page.0);
        batch.edit_many(|skipped, _| {
            let mut map = self.map.borrow_mut();
            let was = map.set(GFN, 0, mfn, kind, skipped).expect("it is free");
            assert!(was.is_none());
        });
        assert!(batch.is_idle());
    }

    /// Unmaps it into a batch of its own.
    fn clear(&self, page: Frame) -> Pages {
        self.clear_as(PageKind::GrantReadWrite, page)
    }

    fn clear_as(&self, kind: PageKind, page: Frame) -> Pages {
        let mut batch: Pages = Batch::new(ID);
        let expected = Expected { mfn: Mfn::new(page.0), kind };
        batch
            .hold(|skipped| {
                let gone = self.map.borrow_mut().clear_grant(GFN, expected, skipped)?;
                Ok::<_, p2m::ClearError>((page, gone.with(&NoIommu.gone(skipped))))
            })
            .expect("it is as expected");
        batch
    }

    /// Flushes a batch; its page is nobody's any more in the guest.
    fn flush(&self, mut batch: Pages) -> Released<Frame> {
        let tlb = TlbFlush { guest: &self.cpus, machine: self, local: &self.local(0) };
        let mut flushed = batch.flush(&Hardware { tlb: &tlb, iotlb: &NoIommu }).expect("flushes");
        flushed.next_page().expect("one page")
    }

    fn give_away(&self, page: &Released<Frame>) {
        self.machine.release(*page.get());
    }

    /// Flushes of CPUs so far.
    fn flushes(&self) -> u64 {
        self.cpus.counts().flushes
    }

    /// The address of the leaf at [`GFN`].
    fn entry(&self) -> u64 {
        let mut table = self.eptp & !0xfff;
        for level in [3, 2, 1] {
            let index = GFN.get() >> (9 * level) & 511;
            table = self.machine.peek64(table + 8 * index).expect("a table") & 0xf_ffff_ffff_f000;
        }
        table + 8 * (GFN.get() & 511)
    }

    /// Unmaps and releases the page; how many flushes of CPUs that took, and how many stale
    /// accesses the model saw then.
    fn end(&self, page: Frame) -> (u64, usize) {
        let before = self.flushes();
        let page = self.flush(self.clear(page));
        self.give_away(&page);
        self.touch();
        assert_eq!(self.machine.misuses(), []);
        (self.flushes() - before, self.machine.count(WitnessKind::ReleasedFrame))
    }
}

/// Maps a page, does `life` with it, and ends it.
#[track_caller]
fn check(life: impl FnOnce(&mut Bench<'_>, Frame), expected: (u64, usize)) {
    bench(|bench| {
        let page = bench.page();
        bench.map(page);
        life(bench, page);
        if !bench.machine.is_running(GUEST_CPU) {
            bench.enter();
        }
        assert_eq!(bench.end(page), expected, "flushes, stale accesses");
    });
}

#[test]
fn a_grant_that_no_cpu_used_needs_no_flush_of_cpus() {
    check(|_, _| (), (0, 0));
    check(|bench, _| bench.enter(), (0, 0));
}

#[test]
fn a_grant_that_a_cpu_used_or_looked_up_in_advance_is_flushed_for() {
    let enter_and = |action: fn(&Bench<'_>)| {
        move |bench: &mut Bench<'_>, _| {
            bench.enter();
            action(bench);
        }
    };
    check(enter_and(|bench| assert!(bench.touch())), (1, 0));
    check(enter_and(|bench| bench.machine.speculate()), (1, 0));
    // It used it, left, and never came back.
    check(
        enter_and(|bench| {
            assert!(bench.touch());
            bench.machine.leave(GUEST_CPU);
            bench.cpus.leave(GUEST_CPU);
        }),
        (1, 0),
    );
}

#[test]
fn rights_that_were_lowered_meanwhile_do_not_hide_a_use() {
    check(
        |bench, _| {
            bench.enter();
            assert!(bench.touch());
            let mut batch: Pages = Batch::new(ID);
            batch.edit_many(|skipped, _| {
                let (rest, mut budget) = (Rest::new(Run::single(GFN)), Budget::UNLIMITED);
                let mut map = bench.map.borrow_mut();
                map.restrict(rest, Access::READ, &mut budget, skipped).expect("is lowered");
            });
            // Not flushed before the end of the mapping.
            std::mem::forget(batch);
        },
        (1, 0),
    );
}

/// The entry was read without a mark already when a CPU walks to it.
#[test]
fn a_walk_just_before_the_exchange_is_noticed() {
    for prefetch in [false, true] {
        let walk = move |bench: &mut Bench<'_>, _| {
            bench.enter();
            let machine = bench.machine.clone();
            *bench.tables.before_exchange.borrow_mut() = Some(Box::new(move || {
                if prefetch {
                    machine.speculate();
                } else {
                    let written = machine.cpu_write64(GUEST_CPU, GFN.get() << 12, 1);
                    written.expect("it is mapped");
                }
            }));
        };
        check(walk, (1, 0));
    }
}

#[test]
fn the_same_page_mapped_again_before_its_flush_stays_held_by_the_first_mapping() {
    bench(|bench| {
        let page = bench.page();
        bench.map(page);
        bench.enter();
        assert!(bench.touch());
        let first = bench.clear(page);
        bench.map(page);
        let again = bench.clear(page);
        let before = bench.flushes();
        let _second = bench.flush(again);
        assert_eq!(bench.flushes() - before, 0, "nobody used the second mapping");
        // One reference is left, and it waits for the flush of what was used.
        let first = bench.flush(first);
        assert_eq!(bench.flushes() - before, 1);
        bench.give_away(&first);
        assert!(!bench.touch());
        assert_eq!(bench.machine.witnesses(), []);
    });
}

/// Symptom: a page that was the guest's memory and became its own grant, at the same number,
/// was released while a CPU still had the old mapping of it. Cause: the new leaf began without
/// a mark, and no proof waited for the change. Cure: a leaf over the same frame keeps the mark.
#[test]
fn a_grant_over_the_same_page_of_memory_keeps_the_mark_of_what_it_replaced() {
    for (used, expected) in [(true, (1, 0)), (false, (0, 0))] {
        bench(|bench| {
            let (page, mfn) = (bench.page(), |page: Frame| Mfn::new(page.0));
            bench.map_as(PageKind::RamReadWrite, page);
            bench.enter();
            assert!(!used || bench.touch());
            let mut mapping: Pages = Batch::new(ID);
            mapping.edit_many(|skipped, _| {
                let kind = PageKind::GrantReadWrite;
                let was = bench.map.borrow_mut().set(GFN, 0, mfn(page), kind, skipped);
                assert!(was.expect("memory gives way").is_none());
            });
            // The call that maps is not at its flush yet when another one unmaps.
            assert_eq!(bench.end(page), expected, "flushes, stale accesses");
            std::mem::forget(mapping);
        });
    }
}

/// Its pages are not counted for each mapping, so an older mapping may still be cached.
#[test]
fn memory_of_the_guests_own_is_flushed_for_in_any_case() {
    bench(|bench| {
        let page = bench.page();
        for kind in [PageKind::RamReadWrite, PageKind::RamReadOnly, PageKind::Foreign] {
            bench.map_as(kind, page);
            let before = bench.flushes();
            let _page = bench.flush(bench.clear_as(kind, page));
            assert_eq!(bench.flushes() - before, 1, "{kind:?}");
        }
    });
}

#[test]
fn what_breaks_the_rule_is_seen() {
    // Hardware that caches without a mark.
    check(
        |bench, _| {
            bench.machine.set_cpu_lie(GUEST_CPU, Some(CpuLie::CacheUnmarked));
            bench.enter();
            assert!(bench.touch());
        },
        (0, 1),
    );
    check(
        |bench, _| {
            bench.machine.set_cpu_lie(GUEST_CPU, Some(CpuLie::CacheUnmarked));
            bench.enter();
            bench.machine.speculate();
        },
        (0, 1),
    );
    // An embedder that loads an EPTP without marks.
    check(
        |bench, _| {
            bench.eptp &= !(1 << 6);
            bench.enter();
            assert!(bench.touch());
        },
        (0, 1),
    );
    // An embedder that wipes a mark and does not flush.
    check(
        |bench, _| {
            bench.enter();
            assert!(bench.touch());
            let entry = bench.entry();
            let marked = bench.machine.peek64(entry).expect("the leaf");
            assert_ne!(marked & 1 << 8, 0, "the model marks what is used");
            bench.machine.write64(entry, marked & !(1 << 8));
        },
        (0, 1),
    );
}
