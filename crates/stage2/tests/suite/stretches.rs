//! Pages of one table that are mapped, or cleared, together.

use flush::{Batch, DomainId, FreshTable, Gfn, Gone, Iotlb, Mfn, Run, Tlb};
use stage2::format::ept::{Ept, EptLevels};
use stage2::{
    Access, Budget, Emptied, Format, Leaf, Level, MapError, Marks, Recorder, Rest, Sink, Stop,
    TableMemory, Tables, Unheld, Unwalked, clear, lookup, map_run,
};

use crate::arena::Arena;
use crate::lending::Lending;
use crate::log::Log;
use crate::pages::HARDWARE;

const FORMAT: Ept = Ept::new(EptLevels::Four);

fn rest(first: u64, last: u64) -> Rest {
    Rest::new(Run::new(Gfn::new(first), Gfn::new(last)).unwrap())
}

fn leaf(mfn: u64) -> Leaf {
    Leaf::new(Mfn::new(mfn), Access::READ_WRITE)
}

fn fill(arena: &Arena, over: Rest, budget: u64) -> Result<u64, (MapError, u64, u64)> {
    let (mut budget, first) = (Budget::new(budget), over.run().first().get());
    let tables = arena.tables(&FORMAT);
    match map_run(tables, over, leaf(first), Level::PAGE, &mut budget, &mut Log::new()) {
        Ok(()) => Ok(budget.left()),
        Err(stopped) => Err((stopped.error, stopped.rest.run().first().get(), budget.left())),
    }
}

#[test]
fn a_run_of_pages_costs_its_budget_a_page() {
    for budget in [1, 2, 10, 99, 100, 101] {
        let arena = Arena::new(&FORMAT);
        // Over the border of two tables.
        let done = fill(&arena, rest(500, 599), budget);
        let expected =
            if budget < 100 { Err((MapError::Budget, 500 + budget, 0)) } else { Ok(budget - 100) };
        assert_eq!(done, expected);
        for gfn in 500..700 {
            let found = lookup(arena.tables(&FORMAT), Gfn::new(gfn)).unwrap();
            let shown = found.leaf_at(Gfn::new(gfn)).map(|(_, mfn)| mfn.get());
            assert_eq!(shown, (gfn < 500 + budget.min(100)).then_some(gfn));
        }
        arena.check(&FORMAT, 0);
    }
}

#[test]
fn a_run_of_pages_ends_before_one_that_is_taken() {
    let arena = Arena::new(&FORMAT);
    assert_eq!(fill(&arena, rest(20, 20), 1), Ok(0));
    let (error, at, left) = fill(&arena, rest(5, 40), 100).unwrap_err();
    assert!(matches!(error, MapError::Occupied(found) if found.run == Run::single(Gfn::new(20))));
    // The one that was refused was paid for.
    assert_eq!((at, left), (20, 100 - 16));
    arena.check(&FORMAT, 0);
}

#[test]
fn a_large_leaf_still_takes_the_place_of_an_emptied_table() {
    let arena = Arena::new(&FORMAT);
    let (tables, mut log) = (arena.tables(&FORMAT), Log::new());
    assert!(fill(&arena, rest(512, 513), 2).is_ok());
    let budget = &mut Budget::UNLIMITED.clone();
    clear(tables, rest(512, 513), budget, Emptied::Keep, &mut log).unwrap();
    map_run(tables, rest(510, 1025), leaf(510), Level::ONE, budget, &mut log).unwrap();
    let level = |gfn| lookup(tables, Gfn::new(gfn)).unwrap().level;
    assert_eq!([510, 600, 1024].map(level), [Level::PAGE, Level::ONE, Level::PAGE]);
    log.flush(&arena, 1, 1);
    arena.check(&FORMAT, 0);
}

#[test]
fn clearing_a_run_of_pages_costs_its_budget_a_page() {
    for budget in [1, 2, 33, 90, 99] {
        let arena = Arena::new(&FORMAT);
        fill(&arena, rest(500, 599), 100).unwrap();
        let (mut log, mut left) = (Log::new(), Budget::new(budget));
        let over = rest(500, 599);
        let stopped = clear(arena.tables(&FORMAT), over, &mut left, Emptied::Keep, &mut log);
        let stopped = stopped.unwrap_err();
        // The way down to the first page is free, the table entry of the second is not.
        let done = if budget > 12 { budget - 1 } else { budget };
        assert_eq!((stopped.stop, left.left()), (Stop::Budget, 0));
        assert_eq!((stopped.tally.leaves, log.removed.len() as u64), (done, done));
        assert_eq!(stopped.rest.run().first().get(), 500 + done);
        arena.check(&FORMAT, 0);
    }
}

/// Counts proofs, and notes what each was for.
struct Proofs<'p> {
    seen: &'p mut Vec<(u64, u64)>,
    room: usize,
}

impl<'id> Sink<'id, Tlb> for Proofs<'_> {
    fn left(&self) -> usize {
        self.room - self.seen.len()
    }

    fn take(&mut self, run: Run, leaf: Leaf, _: Gone<'id, Tlb>) {
        self.seen.push((run.first().get(), leaf.mfn.get()));
    }
}

#[test]
fn every_page_of_a_stretch_is_on_record_and_gets_a_proof() {
    for (first, last) in [(0, 0), (0, 1), (3, 36), (500, 599), (0, 1023)] {
        let arena = Arena::new(&FORMAT);
        fill(&arena, rest(first, last), 1024).unwrap();
        let mut batch = Batch::<(), 1>::new(DomainId::new(1));
        let mut seen = Vec::new();
        batch.edit_many(|skipped, _| {
            let sink = Proofs { seen: &mut seen, room: 1024 };
            let mut record = Recorder::<Tlb, _>::new(skipped, sink);
            let budget = &mut Budget::UNLIMITED.clone();
            let tables = arena.tables(&FORMAT);
            clear(tables, rest(first, last), budget, Emptied::Keep, &mut record).unwrap();
        });
        let pages: Vec<_> = (first..=last).map(|gfn| (gfn, gfn)).collect();
        assert_eq!(seen, pages);
        let run = rest(first, last).run();
        assert_eq!(batch.tlb().extent(), flush::Extent::Runs(&[run]));
        assert!(batch.flush(&HARDWARE).is_ok());
    }
}

#[test]
fn no_more_pages_are_cleared_than_the_sink_has_room_for() {
    let arena = Arena::new(&FORMAT);
    fill(&arena, rest(0, 99), 100).unwrap();
    let mut batch = Batch::<(), 1>::new(DomainId::new(1));
    let mut seen = Vec::new();
    batch.edit_many(|skipped, _| {
        let mut record = Recorder::<Tlb, _>::new(skipped, Proofs { seen: &mut seen, room: 40 });
        let budget = &mut Budget::UNLIMITED.clone();
        let stopped = clear(arena.tables(&FORMAT), rest(0, 99), budget, Emptied::Keep, &mut record);
        let stopped = stopped.unwrap_err();
        assert_eq!((stopped.stop, stopped.rest), (Stop::Full, rest(40, 99)));
    });
    assert_eq!((seen.len(), batch.tlb().pages()), (40, 40));
    assert!(lookup(arena.tables(&FORMAT), Gfn::new(40)).unwrap().leaf_at(Gfn::new(40)).is_some());
    assert!(batch.flush(&HARDWARE).is_ok());
}

#[test]
fn proofs_are_as_many_as_leaves_whatever_their_size() {
    let mut batch = Batch::<(), 1>::new(DomainId::new(1));
    batch.edit_many(|skipped, _| {
        let run = |first, last| Run::new(Gfn::new(first), Gfn::new(last)).unwrap();
        assert_eq!(skipped.leaves::<Iotlb>(run(8, 15), 0).count(), 8);
        assert_eq!(skipped.leaves::<Iotlb>(run(16, 31), 2).count(), 4);
        assert_eq!(skipped.leaves::<Iotlb>(run(512, 1023), 9).count(), 1);
    });
    assert_eq!(batch.iotlb().pages(), 8 + 16 + 512);
    assert!(batch.flush(&HARDWARE).is_ok());
}

/// What a clear by one of two ways did and left.
fn cleared(
    arena: &Arena,
    over: Rest,
    (budget, room): (u64, usize),
    emptied: Emptied,
) -> impl PartialEq + std::fmt::Debug + use<> {
    let (mut budget, mut log) = (Budget::new(budget), Log::with_room(room, 9));
    let result = clear(arena.tables(&FORMAT), over, &mut budget, emptied, &mut log);
    arena.check(&FORMAT, 0);
    let shown: Vec<_> =
        (0..8).map(|gfn| lookup(arena.tables(&FORMAT), Gfn::new(gfn)).unwrap().entry).collect();
    (result, budget.left(), log.removed, shown)
}

/// A clear that keeps tables goes straight to the only one of its range, and one that frees
/// them walks there. Neither has anything to free here.
#[test]
fn a_range_in_one_table_goes_straight_as_it_would_by_a_walk() {
    let write_only = 0x77_7000 | u64::from(Access::WRITE.bits());
    let part = Leaf { origin: Level::ONE, ..leaf(77) };
    let other = Leaf { access: Access::READ, ..leaf(78) };
    let word = |leaf| FORMAT.leaf(Level::PAGE, leaf).unwrap();
    let kinds = [0, word(leaf(76)), word(other), word(part), write_only];
    for layout in 0..kinds.len().pow(4) {
        let made = Arena::new(&FORMAT);
        // What stays in the table.
        fill(&made, rest(100, 100), 1).unwrap();
        let table = lowest(made.tables(&FORMAT), Gfn::new(0));
        for place in 0..4 {
            made.poke(table, 2 + place as usize, kinds[layout / kinds.len().pow(place) % 5]);
        }
        for (first, last) in [(2, 5), (2, 2), (1, 6), (2, 40)] {
            for limits in [(99, 99), (0, 99), (1, 99), (2, 99), (3, 99), (99, 0), (99, 1), (99, 2)]
            {
                let by = |emptied| cleared(&made.clone(), rest(first, last), limits, emptied);
                assert_eq!(by(Emptied::Keep), by(Emptied::Free), "{layout} {first} {limits:?}");
            }
        }
    }
}

/// The table of pages on the way to `gfn`.
fn lowest(tables: Tables<'_, Ept, Arena>, gfn: Gfn) -> Mfn {
    let geometry = FORMAT.geometry();
    let (mut table, mut level) = (tables.root, geometry.top());
    while let Some(below) = level.below() {
        let (page, index) = geometry.slot(table, level, gfn);
        table = FORMAT.child(level, tables.memory.read(page, index)).unwrap();
        level = below;
    }
    table
}

#[test]
fn marks_are_asked_for_where_somebody_may_look_at_them_and_nowhere_else() {
    let clear_by = |arena: &Arena, by: &dyn Fn(&Arena)| {
        fill(arena, rest(0, 40), 99).unwrap();
        by(arena);
        arena.wanted.borrow().clone()
    };
    let over = || (rest(0, 40), Budget::UNLIMITED);
    let log = |arena: &Arena| {
        let (rest, mut budget) = over();
        let tables = arena.tables(&FORMAT);
        clear(tables, rest, &mut budget, Emptied::Keep, &mut Log::new()).unwrap();
    };
    fn recorded(arena: &Arena, over: (Rest, Budget), sink: impl for<'id> Sink<'id, Tlb>) {
        let mut batch = Batch::<(), 1>::new(DomainId::new(1));
        batch.edit_many(|skipped, _| {
            let (rest, mut budget) = over;
            let mut record = Recorder::<Tlb, _>::new(skipped, sink);
            let tables = arena.tables(&FORMAT);
            clear(tables, rest, &mut budget, Emptied::Keep, &mut record).unwrap();
        });
        assert!(batch.flush(&HARDWARE).is_ok());
    }
    let proofs = |arena: &Arena| {
        recorded(arena, over(), Proofs { seen: &mut Vec::new(), room: 99 });
    };
    let unwalked = |arena: &Arena| {
        let root = FreshTable::new(arena.tables(&FORMAT).root);
        let mut tree = Unwalked::new(&FORMAT, arena, root);
        tree.teardown(&mut Budget::UNLIMITED.clone(), |_, _| ()).unwrap();
    };
    // 41 pages are two stretches.
    let (all, none) = ([Marks::Wanted; 2], [Marks::Unwanted; 2]);
    assert_eq!(clear_by(&Arena::new(&FORMAT), &log), all);
    assert_eq!(clear_by(&Arena::new(&FORMAT), &proofs), all);
    assert_eq!(clear_by(&Arena::new(&FORMAT), &|arena| recorded(arena, over(), Unheld)), none);
    assert_eq!(clear_by(&Arena::new(&FORMAT), &unwalked), none);
}

#[test]
fn a_run_that_needs_tables_is_in_them_before_they_are_linked() {
    for (first, last) in [(5, 5), (5, 36), (5, 37), (0, 511), (500, 600)] {
        let (arena, mut log) = (Arena::new(&FORMAT), Log::new());
        let over = rest(first, last);
        let budget = &mut Budget::UNLIMITED.clone();
        map_run(arena.tables(&FORMAT), over, leaf(first), Level::PAGE, budget, &mut log).unwrap();
        // One of each table of pages; only the second one begins in a table that is there.
        let border = Run::block(over.run().first(), 9).last().min(over.run().last());
        let mut runs = vec![Run::new(over.run().first(), border).unwrap()];
        runs.extend(Run::new(Gfn::new(border.get() + 1), over.run().last()));
        assert_eq!((&log.linked, &log.added), (&runs, &runs));
        for gfn in first..=last {
            let found = lookup(arena.tables(&FORMAT), Gfn::new(gfn)).unwrap();
            assert_eq!(found.leaf_at(Gfn::new(gfn)).map(|(_, mfn)| mfn.get()), Some(gfn));
        }
        arena.check(&FORMAT, 0);
    }
}

#[test]
fn a_run_without_pages_for_its_tables_changes_nothing() {
    for allowance in 0..3 {
        let arena = Arena::new(&FORMAT);
        arena.allowance.set(allowance);
        assert_eq!(fill(&arena, rest(5, 40), 99), Err((MapError::NoTable, 5, 99)));
        assert_eq!(arena.linked_words(), 0);
        arena.check(&FORMAT, 0);
    }
}

/// Every edit of many entries, on a page that has one in use at `taken`.
fn edited(memory: &impl TableMemory, taken: usize) -> Vec<u64> {
    const MARK: u64 = 1 << 8;
    let fresh = memory.allocate().unwrap();
    memory.fill(&fresh, 500, &[7, 8, 9]);
    let table = memory.link(fresh);
    memory.swap(table, taken, 5 | MARK);
    let mut seen = vec![memory.put_in(table, 10, &[1, 2, 3, 4]) as u64];
    for (first, marks) in
        [(9, Marks::Unwanted), (11, Marks::Wanted), (499, Marks::Unwanted), (501, Marks::Wanted)]
    {
        let mut out = [u64::MAX; 2];
        memory.take_out(table, first, &mut out, marks);
        seen.extend(out);
    }
    seen.extend((0..512).map(|index| memory.read(table, index)));
    seen
}

#[test]
fn edits_of_a_lent_table_do_what_those_in_atomic_steps_do() {
    for taken in [0, 9, 10, 11, 12, 13, 14, 499, 502, 503] {
        let atomic = edited(&Arena::new(&FORMAT), taken);
        assert_eq!(edited(&Lending::new(&FORMAT, 2), taken), atomic, "{taken}");
    }
}
