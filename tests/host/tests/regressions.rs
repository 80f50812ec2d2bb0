//! Defects of the DMA side that were found once, each played again on the model.
//!
//! A [`Bench`] is a domain with tables of its own and one device, which uses what it has
//! cached whenever it can. Each test says what was seen, why, and what was changed.

use std::sync::{
    Arc, Mutex,
    atomic::{AtomicU64, Ordering},
};

use flush::{
    Batch, Cover, Dfn, DomainId, Failure, Flush, FlushError, Gfn, Gone, Hardware, Iotlb, Mfn,
    Released, Run, TablePage, Tlb,
};
use host::{Layout, Ram, Setup, World, world::BACKEND};
use hwmodel::{Frame, Owner, UnitId};
use iommu_vtd::{Device, DmaDomain, DmaFlush, DmaFlushError, Expected, Guarded, Members, SourceId};
use stage2::{
    Access, Budget, Leaf, Rest, Sink, Stop, TableMemory, Unheld,
    format::vtd::{Vtd, VtdLevels},
};

const ID: DomainId = DomainId::new(9);
const SOURCE: SourceId = SourceId::new(0x100);

#[derive(Debug)]
struct Lock<T>(Mutex<T>);

impl<T> Guarded<T> for Lock<T> {
    fn with<R>(&self, action: impl FnOnce(&mut T) -> R) -> R {
        action(&mut self.0.lock().expect("no panic under the lock"))
    }
}

/// No CPU walks the tables of a bench.
struct NoCpu;

impl Flush<Tlb> for NoCpu {
    type InFlight = ();
    type Error = ();

    fn start(&self, _: DomainId, _: &Cover) {}

    fn wait(&self, (): ()) -> Result<(), ()> {
        Ok(())
    }
}

/// The one proof of an edit that clears one leaf.
struct One<'a, 'id>(&'a mut Option<Gone<'id, Iotlb>>);

impl<'id> Sink<'id, Iotlb> for One<'_, 'id> {
    fn left(&self) -> usize {
        usize::from(self.0.is_none())
    }

    fn take(&mut self, _: Run, _: Leaf, gone: Gone<'id, Iotlb>) {
        *self.0 = Some(gone);
    }
}

type Pages = Batch<Frame, 32>;
type Failed = Failure<Frame, 32, (), DmaFlushError>;

struct Bench {
    world: World,
    domain: DmaDomain<Lock<Members>>,
    device: Device,
}

impl Bench {
    fn new(device_tlb: bool) -> Self {
        let unit = hwmodel::UnitConfig { device_tlb, ..hwmodel::UnitConfig::default() };
        let world = World::new(Setup { unit, ..Setup::default() });
        world.machine.add_device(UnitId(0), SOURCE.get(), device_tlb);
        let memory = &world.hypervisor.memory;
        let root = memory.link(memory.allocate().expect("a page for the root"));
        let format = Vtd::new(VtdLevels::Four);
        let domain = DmaDomain::new(ID, format, root, Lock(Mutex::new(Members::new())));
        let device = Device {
            unit: 0,
            source: SOURCE,
            physical_function: SOURCE,
            device_tlb: device_tlb.then_some(1),
        };
        Self { world, domain, device }
    }

    fn attach(&self) {
        let memory = &self.world.hypervisor.memory;
        self.domain.attach(&self.world.units, memory, self.device).expect("attaches");
    }

    fn detach(&self) {
        let memory = &self.world.hypervisor.memory;
        self.domain.detach(&self.world.units, memory, 0, SOURCE).expect("detaches");
    }

    /// Writes with the device to a byte of its own address space.
    fn dma(&self, page: u64) -> bool {
        self.world.machine.dma_write64(SOURCE.get(), page << 12, 0xbad).is_ok()
    }

    fn page(&self) -> Frame {
        self.world.machine.allocate(Owner(ID.get().into())).expect("a page")
    }

    fn map(&self, batch: &mut Pages, run: Run, first: Frame) {
        let memory = &self.world.hypervisor.memory;
        let (rest, access, mut budget) = (Rest::new(run), Access::READ_WRITE, Budget::UNLIMITED);
        let mfn = Mfn::new(first.0);
        batch
            .edit_many(|skipped, _| {
                self.domain.map(memory, rest, mfn, access, &mut budget, skipped)
            })
            .expect("maps");
    }

    /// Takes one page away, and holds it in `batch`.
    fn take(&self, batch: &mut Pages, page: u64, frame: Frame) {
        let memory = &self.world.hypervisor.memory;
        let rest = Rest::new(Run::single(Gfn::new(page)));
        batch
            .hold(|skipped| {
                let (mut gone, mut budget) = (None, Budget::UNLIMITED);
                let sink = One(&mut gone);
                self.domain.clear_run(memory, rest, &mut budget, skipped, sink).expect("clears");
                Ok::<_, ()>((frame, skipped.absent::<Tlb>().with(&gone.expect("a leaf"))))
            })
            .expect("room for the page");
    }

    fn flush(&self, batch: &mut Pages) -> Result<(), Box<Failed>> {
        let iotlb = DmaFlush::new(&self.world.units, &self.domain);
        let mut flushed =
            batch.flush(&Hardware { tlb: &NoCpu, iotlb: &iotlb }).map_err(Box::new)?;
        while let Some(page) = flushed.next_page() {
            self.give_away(&page);
        }
        while let Some(table) = flushed.next_table() {
            self.free(&table);
        }
        Ok(())
    }

    /// The page is somebody else's from here on.
    fn give_away(&self, page: &Released<Frame>) {
        self.world.machine.release(*page.get());
    }

    fn free(&self, table: &Released<TablePage>) {
        self.world.hypervisor.memory.ram().release(table.get().mfn());
    }

    #[track_caller]
    fn check_clean(&self) {
        assert_eq!(self.world.machine.witnesses(), []);
        assert_eq!(self.world.machine.misuses(), []);
    }
}

fn batch() -> Pages {
    Batch::new(ID)
}

/// Symptom: a device wrote to a page that had been released. Cause: one batch split a
/// large leaf; before its flush a second batch took another part away and flushed a
/// single page, through which hardware kept the large leaf. Cure: the parts of a split
/// leaf go on record at its size, in every batch.
#[test]
fn a_part_of_a_leaf_that_an_unflushed_batch_split_is_out_of_reach_once_released() {
    let bench = Bench::new(false);
    let block = bench.world.machine.allocate_block(Owner(ID.get().into()), 9).expect("a block");
    let mut setup = batch();
    bench.map(&mut setup, Run::block(Gfn::new(0x200), 9), block);
    bench.attach();
    bench.flush(&mut setup).expect("flushes");
    assert!(bench.dma(0x200), "the large leaf is cached");
    let (mut first, mut second) = (batch(), batch());
    bench.take(&mut first, 0x201, Frame(block.0 + 1));
    bench.take(&mut second, 0x202, Frame(block.0 + 2));
    bench.flush(&mut second).expect("flushes");
    assert!(!bench.dma(0x202));
    bench.flush(&mut first).expect("flushes");
    assert!(!bench.dma(0x201) && bench.dma(0x203));
    bench.check_clean();
}

/// Symptom: a device that did not answer wrote to a released page. Cause: once it was
/// declared gone, a flush left it out, although its context entry still let requests
/// pass that its own cache had translated. Cure: such a flush fails until the device is
/// detached.
#[test]
fn a_page_of_a_silent_device_is_released_only_after_the_device_was_detached() {
    let bench = Bench::new(true);
    let (page, mut mapped) = (bench.page(), batch());
    bench.map(&mut mapped, Run::single(Gfn::new(5)), page);
    bench.attach();
    bench.flush(&mut mapped).expect("flushes");
    assert!(bench.dma(5));
    bench.world.machine.set_device_answers(SOURCE.get(), false);
    let mut batch = batch();
    let expected = Expected { mfn: Mfn::new(page.0), access: Access::READ_WRITE };
    let memory = &bench.world.hypervisor.memory;
    batch
        .hold(|skipped| {
            let gone = bench.domain.clear(memory, Dfn::new(5), expected, skipped)?;
            Ok::<_, stage2::PageError>((page, skipped.absent::<Tlb>().with(&gone)))
        })
        .expect("clears");
    let mut held = bench.flush(&mut batch).expect_err("times out").held;
    bench.world.units[0].device_gone(SOURCE).expect("room for one");
    let iotlb = DmaFlush::new(&bench.world.units, &bench.domain);
    let hardware = Hardware { tlb: &NoCpu, iotlb: &iotlb };
    let gone = DmaFlushError::Gone { unit: 0, source: SOURCE };
    let error = held.retry(&hardware).map(drop).expect_err("still a member");
    assert_eq!(error, FlushError { tlb: None, iotlb: Some(gone) });
    bench.detach();
    let mut flushed = held.retry(&hardware).expect("nobody is left to be told");
    bench.give_away(&flushed.next_page().expect("the page"));
    assert!(!bench.dma(5));
    bench.check_clean();
}

/// Symptom: a device walked tables that had been released. Cause: nothing tied the root
/// of a domain to the devices that walk from it. Cure: a domain is taken down through a
/// function that refuses while there is one.
#[test]
fn a_domain_is_taken_down_in_steps_and_only_once_no_device_is_left() {
    let bench = Bench::new(false);
    let before = bench.world.hypervisor.memory.tables_in_use();
    let mut setup = batch();
    for page in [5, 0x4_0000, 0x4_0001] {
        bench.map(&mut setup, Run::single(Gfn::new(page)), bench.page());
    }
    bench.attach();
    bench.flush(&mut setup).expect("flushes");
    assert!(bench.dma(5));
    let Bench { world, domain, device } = bench;
    let domain = domain.teardown().map(drop).expect_err("a device is attached");
    let bench = Bench { world, domain, device };
    assert!(bench.dma(5), "nothing was changed");
    bench.detach();

    let Bench { world, domain, device: _ } = bench;
    let memory = &world.hypervisor.memory;
    let mut teardown = domain.teardown().expect("no device is left");
    let (mut steps, mut tables) = (0, 0);
    while !teardown.is_done() {
        let mut batch = batch();
        // Little by little: a few entries a step.
        let mut budget = Budget::new(700);
        let step =
            batch.edit_many(|skipped, _| teardown.step(memory, &mut budget, skipped, Unheld));
        assert!(step.is_ok() || step.is_err_and(|stopped| stopped.stop == Stop::Budget));
        let iotlb = teardown.flusher(&world.units);
        let mut flushed =
            batch.flush(&Hardware { tlb: &NoCpu, iotlb: &iotlb }).expect("nobody to tell");
        while let Some(table) = flushed.next_table() {
            memory.ram().release(table.get().mfn());
            tables += 1;
        }
        steps += 1;
    }
    let mut nothing = batch();
    let mut budget = Budget::UNLIMITED;
    nothing
        .edit_many(|skipped, _| teardown.step(memory, &mut budget, skipped, Unheld))
        .expect("done already");
    assert!(nothing.is_idle());
    // Root, two tables each for 0 and for 1 GiB, and the one above both; a context table
    // that the unit keeps was made as well.
    assert!(steps > 1);
    assert_eq!((tables, memory.tables_in_use() - before), (6, 6));
    assert!(world.machine.dma_write64(SOURCE.get(), 5 << 12, 1).is_err());
    assert_eq!(world.machine.witnesses(), []);
}

/// Symptom: a device faulted on a page that was mapped, and whose batch was flushed.
/// Cause: the flush was left out because only new entries were on record. But a new table
/// stood where another batch had unlinked one, and that one was still cached. Cure: new
/// tables are flushed for.
#[test]
fn a_page_in_a_new_table_is_reached_although_the_old_table_was_not_flushed_yet() {
    let bench = Bench::new(false);
    let pages = [bench.page(), bench.page(), bench.page()];
    let mut setup = batch();
    bench.map(&mut setup, Run::single(Gfn::new(0x200)), pages[0]);
    // Keeps the table above in use.
    bench.map(&mut setup, Run::single(Gfn::new(0x400)), pages[1]);
    bench.attach();
    bench.flush(&mut setup).expect("flushes");
    assert!(bench.dma(0x200));
    let (mut first, mut second) = (batch(), batch());
    bench.take(&mut first, 0x200, pages[0]);
    bench.map(&mut second, Run::single(Gfn::new(0x201)), pages[2]);
    bench.flush(&mut second).expect("flushes");
    assert!(bench.dma(0x201));
    bench.flush(&mut first).expect("flushes");
    bench.check_clean();
}

/// Symptom: while a stopped queue was started again, devices reached all of memory.
/// Cause: translation was turned off first. Cure: it stays on.
#[test]
fn a_device_reaches_nothing_else_while_the_queue_is_started_again() {
    let bench = Bench::new(false);
    bench.attach();
    let passed = Arc::new(AtomicU64::new(0));
    let (machine, count) = (bench.world.machine.clone(), Arc::clone(&passed));
    bench.world.observe(Some(Box::new(move || {
        if machine.dma_read64(SOURCE.get(), 0x7000).is_ok() {
            count.fetch_add(1, Ordering::Relaxed);
        }
    })));
    bench.world.units[0].bring_up(&bench.world.hypervisor.memory).expect("starts again");
    bench.world.observe(None);
    assert_eq!(passed.load(Ordering::Relaxed), 0);
    bench.check_clean();
}

/// Symptom: in caching mode a device faulted in a large page that had been mapped and
/// flushed. Cause: the flush said that only leaves changed, and the unit kept that there
/// was no table. Cure: it is told of tables where a large leaf may be new.
#[test]
fn a_large_page_is_reached_although_the_lack_of_a_table_was_cached() {
    for layout in [Layout::Separate, Layout::Shared] {
        let unit = hwmodel::UnitConfig { caching_mode: true, ..hwmodel::UnitConfig::default() };
        let world = World::new(Setup { unit, layout, ..Setup::default() });
        // Two neighbouring blocks of 2 MiB: the first page makes the table above both.
        world.populate_block(BACKEND, Gfn::new(0x8_0200), 0);
        assert!(!world.device_reaches(Gfn::new(0x8_0001)));
        world.populate_block(BACKEND, Gfn::new(0x8_0000), 9);
        for page in [0x8_0000, 0x8_0001, 0x8_01ff] {
            assert!(world.device_reaches(Gfn::new(page)), "{layout:?}: {page:x}");
        }
        world.check_clean();
    }
}
