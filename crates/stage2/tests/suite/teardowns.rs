//! Taking trees down: through the record where hardware may walk, else without.

use std::convert::Infallible;

use flush::plan::{Limits, Plan, Planner, Policy};
use flush::{
    Batch, Cover, DomainId, Flush, FreshTable, Gfn, Hardware, Iotlb, Kind, Mfn, Released, Run,
    TablePage, Tlb,
};
use stage2::format::arm64::{Arm64, Granule};
use stage2::format::ept::{Ept, EptLevels};
use stage2::format::vtd::{Vtd, VtdLevels};
use stage2::{
    Access, Budget, Emptied, Format, Leaf, Level, MapError, Over, Recorder, Rest, RootError, Stop,
    TableMemory, Tables, Unheld, Unwalked, clear, lookup, map, retire,
};

use crate::arena::Arena;
use crate::log::Log;
use crate::plain::Plain;

fn leaf(mfn: u64) -> Leaf {
    Leaf::new(Mfn::new(mfn), Access::READ_WRITE)
}

/// A root that no hardware has seen, in an arena of its own.
fn fresh_root(arena: &Arena) -> FreshTable {
    arena.allocate().unwrap()
}

const PAGES: [u64; 6] = [0, 1, 5, 70, 128, 255];

fn built<'a>(format: &'a Plain, arena: &'a Arena) -> Unwalked<'a, Plain, Arena> {
    let mut tree = Unwalked::new(format, arena, fresh_root(arena));
    for gfn in PAGES {
        tree.map(Gfn::new(gfn), Level::PAGE, leaf(gfn)).unwrap();
    }
    tree.map(Gfn::new(16), Level::TWO, leaf(0x40)).unwrap();
    tree
}

#[test]
fn a_tree_that_no_hardware_saw_comes_down_without_a_flush_at_any_budget() {
    for format in [Plain::small(), Plain::small().breaking()] {
        for budget in 1..40 {
            let arena = Arena::new(&format);
            let before = arena.linked();
            let mut tree = built(&format, &arena);
            let pages = arena.linked() - before;
            let mut removed = Vec::new();
            let (mut tables, mut leaves, mut calls) = (0, 0, 0);
            while !tree.is_done() {
                calls += 1;
                assert!(calls < 500, "no progress");
                let seen = |run: Run, _: Leaf| removed.push(run.first().get());
                let tally = match tree.teardown(&mut Budget::new(budget), seen) {
                    Ok(tally) => tally,
                    Err(stopped) => {
                        assert_eq!(stopped.stop, Stop::Budget);
                        stopped.tally
                    }
                };
                tables += tally.tables;
                leaves += tally.leaves;
            }
            assert_eq!(removed, [0, 1, 5, 16, 70, 128, 255]);
            assert_eq!((leaves, tables), (7, pages as u64));
            assert_eq!((arena.linked(), arena.free_pages()), (before, pages));
            // Done is done.
            let again = tree.teardown(&mut Budget::new(0), |_, _| panic!("removed twice"));
            assert_eq!(again.map(|tally| (tally.leaves, tally.tables)), Ok((0, 0)));
            assert_eq!(tree.lookup(Gfn::new(0)), None);
            let late = tree.map(Gfn::new(0), Level::PAGE, leaf(1));
            assert_eq!(late, Err(MapError::OutOfRange));
            assert_eq!(tree.publish(), None);
        }
    }
}

#[test]
fn a_published_tree_is_an_ordinary_one() {
    let format = Plain::small();
    let arena = Arena::new(&format);
    let tree = built(&format, &arena);
    assert!(tree.lookup(Gfn::new(70)).unwrap().leaf_at(Gfn::new(70)).is_some());
    let tables = Tables { format: &format, memory: &arena, root: tree.publish().unwrap() };
    for gfn in PAGES.map(Gfn::new) {
        assert_eq!(
            lookup(tables, gfn).unwrap().leaf_at(gfn),
            Some((leaf(gfn.get()), Mfn::new(gfn.get())))
        );
    }
    let mut log = Log::new();
    let all = Rest::new(format.geometry().space());
    clear(tables, all, &mut Budget::UNLIMITED.clone(), Emptied::Free, &mut log).unwrap();
    assert_eq!(log.removed.len(), 7);
}

#[test]
fn an_edit_between_two_steps_is_taken_down_too() {
    let format = Plain::small().breaking();
    let arena = Arena::new(&format);
    let before = arena.linked();
    let mut tree = built(&format, &arena);
    let stopped = tree.teardown(&mut Budget::new(9), |_, _| ()).unwrap_err();
    assert_eq!(stopped.stop, Stop::Budget);
    tree.map(Gfn::new(0), Level::PAGE, leaf(9)).unwrap();
    let mut removed = Vec::new();
    tree.teardown(&mut Budget::UNLIMITED.clone(), |run, _| removed.push(run)).unwrap();
    assert_eq!(removed[0], Run::single(Gfn::new(0)));
    assert_eq!(arena.linked(), before);
}

#[test]
fn a_leaf_replaces_an_emptied_table_at_once_where_nobody_walks() {
    for format in [Plain::small(), Plain::small().breaking()] {
        let arena = Arena::new(&format);
        let tables = arena.tables(&format);
        let mut log = Log::new();
        map(tables, Gfn::new(0), Level::PAGE, leaf(9), Over::Vacant, &mut log).unwrap();
        // The table of the page is empty, and still linked when the tree is retired.
        let page = Rest::new(Run::single(Gfn::new(0)));
        let budget = &mut Budget::UNLIMITED.clone();
        clear(tables, page, budget, Emptied::Keep, &mut log).unwrap();
        let mut tree = Unwalked::released(&format, &arena, retired(tables, &mut 0));
        let free = arena.free_pages();
        assert_eq!(tree.map(Gfn::new(0), Level::ONE, leaf(4)), Ok(()));
        assert_eq!(arena.free_pages(), free + 1);
        assert_eq!(tree.lookup(Gfn::new(3)).unwrap().level, Level::ONE);
        while tree.teardown(&mut Budget::new(1), |_, _| ()).is_err() {}
    }
}

/// Hardware that forgets at once, and counts how often it is told to.
struct Counting(std::cell::Cell<u32>);

impl<K: Kind> Flush<K> for Counting {
    type InFlight = ();
    type Error = Infallible;

    fn start(&self, _: DomainId, cover: &Cover) {
        assert_eq!(cover.depth(), flush::Depth::Tables);
        self.0.set(self.0.get() + 1);
    }

    fn wait(&self, (): ()) -> Result<(), Infallible> {
        Ok(())
    }
}

/// Retires the root through a batch and returns it after the flush.
fn retired<F: Format>(tables: Tables<'_, F, Arena>, flushes: &mut u32) -> Released<TablePage> {
    let mut batch: Batch<(), 1> = Batch::new(DomainId::new(1));
    batch
        .edit_many(|skipped, _| retire(tables, &mut Recorder::<Tlb, _>::new(skipped, Unheld)))
        .unwrap();
    assert_eq!(batch.tlb().extent(), flush::Extent::Everything);
    let hardware = Counting(0.into());
    let mut flushed = batch.flush(&Hardware { tlb: &hardware, iotlb: &hardware }).unwrap();
    *flushes += hardware.0.get();
    flushed.next_table().unwrap()
}

#[track_caller]
fn check_retired<F: Format>(format: F) {
    let arena = Arena::new(&format);
    let tables = arena.tables(&format);
    let geometry = format.geometry();
    let page = 1 << geometry.page_order();
    let last = geometry.space().last().get() + 1 - page;
    for gfn in [0, (last / 2) & !(page - 1), last] {
        let put =
            map(tables, Gfn::new(gfn), Level::PAGE, leaf(page), Over::Vacant, &mut Log::new());
        put.unwrap();
    }
    let pages = arena.linked();
    let mut flushes = 0;
    let root = retired(tables, &mut flushes);
    assert_eq!(root.get().mfn(), tables.root);
    let mut tree = Unwalked::released(&format, &arena, root);
    let mut removed = 0;
    while tree.teardown(&mut Budget::new(5), |_, _| removed += 1).is_err() {}
    assert_eq!((removed, flushes), (3, 1));
    let roots = (geometry.root_entries() / geometry.entries()).max(1);
    assert_eq!(arena.free_pages(), pages - (roots - 1));
}

#[test]
fn below_a_root_whose_flush_is_done_nothing_needs_another() {
    check_retired(Plain::small());
    check_retired(Plain::small().breaking());
    check_retired(Ept::new(EptLevels::Four));
    check_retired(Arm64::new(Granule::Kib4, 40).unwrap());
    check_retired(Arm64::wide(Granule::Kib16, 52).unwrap());
}

#[test]
fn a_root_is_not_retired_without_room_for_it() {
    let format = Plain::small();
    let arena = Arena::new(&format);
    let full = retire(arena.tables(&format), &mut Log::with_room(9, 0));
    assert_eq!(full, Err(RootError::Full));
    arena.check(&format, 0);
}

/// Symptom: a leaf of 2^18 frames outlived its tree in a cache that was flushed in blocks
/// of 2^17. Cause: a retired tree went on record as one run of single pages, and a planner
/// asks the record how large a block has to be. Cure: it goes on record as everything.
#[test]
fn no_flush_of_a_retired_tree_is_cut_into_blocks() {
    let format = Vtd::new(VtdLevels::Three);
    let arena = Arena::new(&format);
    let tables = arena.tables(&format);
    let huge = Level::PAGE.above().and_then(Level::above).unwrap();
    map(tables, Gfn::new(0), huge, leaf(1 << 18), Over::Vacant, &mut Log::new()).unwrap();
    let mut batch: Batch<(), 1> = Batch::new(DomainId::new(1));
    batch
        .edit_many(|skipped, _| retire(tables, &mut Recorder::<Iotlb, _>::new(skipped, Unheld)))
        .unwrap();
    for policy in Policy::ALL {
        for max_order in [9, 17] {
            let limits = Limits { page_selective: true, max_order };
            let plan = Planner::new(policy).plan(batch.iotlb(), limits);
            assert!(matches!(plan, Plan::Domain), "{policy:?} with blocks of order {max_order}");
        }
    }
}

#[track_caller]
fn reads_of_teardown<F: Format>(format: F, pages: u64) -> u64 {
    let arena = Arena::new(&format);
    let mut tree = Unwalked::new(&format, &arena, fresh_root(&arena));
    for page in 0..pages {
        tree.map(Gfn::new(page), Level::PAGE, leaf(page)).unwrap();
    }
    tree.teardown(&mut Budget::UNLIMITED.clone(), |_, _| ()).unwrap().reads
}

#[test]
fn teardown_reads_what_is_in_use_whatever_the_width() {
    // Five levels cost one entry more than four, not 512 times as much.
    let (four, five) = (Ept::new(EptLevels::Four), Ept::new(EptLevels::Five));
    for pages in [1, 2, 512, 513, 5120] {
        let entries = pages + u64::div_ceil(pages, 512) + 2;
        assert_eq!(reads_of_teardown(four, pages), entries);
        assert_eq!(reads_of_teardown(five, pages), entries + 1);
    }
}

#[test]
fn teardown_of_scattered_pages_reads_up_to_the_last_one_of_each_table() {
    let format = Ept::new(EptLevels::Four);
    let arena = Arena::new(&format);
    let mut tree = Unwalked::new(&format, &arena, fresh_root(&arena));
    // At index 7 and 9 of a table, and in the last entry of the space.
    let pages = [7, 9, (1 << 36) - 1];
    pages.iter().for_each(|gfn| tree.map(Gfn::new(*gfn), Level::PAGE, leaf(1)).unwrap());
    let (before, mut seen) = (arena.free_pages(), Vec::new());
    let removed = |run: Run, _| seen.push(run.first().get());
    let tally = tree.teardown(&mut Budget::UNLIMITED.clone(), removed).unwrap();
    assert_eq!((seen.as_slice(), tally.leaves, tally.tables), (pages.as_slice(), 3, 7));
    assert_eq!(tally.reads, 10 + 1 + 1 + 512 * 4);
    assert_eq!(arena.free_pages() - before, 7);
}
