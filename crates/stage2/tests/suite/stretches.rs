//! Pages of one table that are mapped, or cleared, together.

use flush::{Batch, DomainId, Gfn, Gone, Iotlb, Mfn, Run, Tlb};
use stage2::format::ept::{Ept, EptLevels};
use stage2::{
    Access, Budget, Emptied, Leaf, Level, MapError, Recorder, Rest, Sink, Stop, clear, lookup,
    map_run,
};

use crate::arena::Arena;
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
