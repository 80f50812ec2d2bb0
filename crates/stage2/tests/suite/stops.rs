//! Where walks stop, that they change nothing they have no room for, and go on.

use std::ops::ControlFlow;

use flush::{Gfn, Mfn, Run};
use stage2::{
    Access, Budget, Emptied, Entry, Format, Leaf, Level, Over, Rest, Stop, Tables, clear, destroy,
    lookup, map, protect, visit,
};

use crate::arena::{Arena, view};
use crate::log::Log;
use crate::plain::Plain;

fn run(first: u64, last: u64) -> Run {
    Run::new(Gfn::new(first), Gfn::new(last)).unwrap()
}

fn unlimited() -> Budget {
    Budget::UNLIMITED
}

/// Frames 0..=255 in a mix of leaves: pages, fours and sixteens, with holes.
fn populate(tables: Tables<'_, Plain, Arena>) {
    let put = |gfn: u64, level| {
        let leaf = Leaf::new(Mfn::new(0x4000 + gfn), Access::READ_WRITE);
        map(tables, Gfn::new(gfn), level, leaf, Over::Vacant, &mut Log::new()).unwrap();
    };
    for gfn in [0, 1, 3, 17, 200, 255] {
        put(gfn, Level::PAGE);
    }
    for gfn in [4, 8, 128, 252 - 16] {
        put(gfn, Level::ONE);
    }
    for gfn in [32, 48, 160] {
        put(gfn, Level::TWO);
    }
}

struct Outcome {
    view: Vec<Option<(u64, u8)>>,
    removals: Vec<(u64, u8)>,
    changes: Vec<(Run, u8)>,
    freed: usize,
    calls: usize,
}

/// Drives one operation to its end, with little of everything.
fn drive(
    over: Run,
    budget: u64,
    rooms: (usize, usize),
    walk: impl Fn(
        Tables<'_, Plain, Arena>,
        Rest,
        &mut Budget,
        &mut Log,
    ) -> Result<stage2::Tally, stage2::Stopped>,
) -> Outcome {
    let format = Plain::small();
    let arena = Arena::new(&format);
    let tables = arena.tables(&format);
    populate(tables);
    let mut log = Log::with_room(rooms.0, rooms.1);
    let (mut rest, mut freed, mut calls) = (Rest::new(over), 0, 0);
    loop {
        calls += 1;
        assert!(calls < 2000, "no progress at {rest:?}");
        match walk(tables, rest, &mut Budget::new(budget), &mut log) {
            Ok(_) => break,
            Err(stopped) => {
                assert!(matches!(stopped.stop, Stop::Budget | Stop::Full), "{stopped:?}");
                let (last, new) = (rest.run(), stopped.rest.run());
                assert!(new.last() == last.last() && new.first() >= last.first());
                rest = stopped.rest;
                freed += log.flush(&arena, rooms.0, rooms.1);
                arena.check(&format, 0);
            }
        }
    }
    freed += log.flush(&arena, rooms.0, rooms.1);
    arena.check(&format, 0);
    Outcome {
        view: view(tables),
        removals: log.removals(),
        changes: log.changed.iter().map(|(run, order, _)| (*run, *order)).collect(),
        freed,
        calls,
    }
}

#[track_caller]
fn check_same(one: &Outcome, other: &Outcome) {
    assert_eq!(one.view, other.view);
    assert_eq!(one.removals, other.removals);
    assert_eq!(one.changes, other.changes);
    assert_eq!(one.freed, other.freed);
}

#[test]
fn a_walk_with_little_budget_and_room_ends_like_one_with_plenty() {
    for over in [run(0, 255), run(1, 254), run(6, 130), run(33, 34), run(255, 255), run(0, 0)] {
        for emptied in [Emptied::Free, Emptied::Keep] {
            let clearing = |tables: Tables<'_, _, _>, rest, budget: &mut _, log: &mut Log| {
                clear(tables, rest, budget, emptied, log)
            };
            let whole = drive(over, u64::MAX, (usize::MAX, usize::MAX), clearing);
            assert_eq!(whole.calls, 1);
            for frame in 0..256 {
                assert!(whole.view[frame].is_none() || !over.contains(Gfn::new(frame as u64)));
            }
            for budget in 1..20 {
                for room in 1..4 {
                    let outcome = drive(over, budget, (room, 1), clearing);
                    check_same(&outcome, &whole);
                    let outcome = drive(over, budget, (4, room), clearing);
                    check_same(&outcome, &whole);
                }
            }
        }
        let protecting = |tables: Tables<'_, _, _>, rest, budget: &mut _, log: &mut Log| {
            protect(tables, rest, budget, log, |leaf| leaf.access.without(Access::WRITE))
        };
        let whole = drive(over, u64::MAX, (0, 0), protecting);
        assert_eq!(whole.calls, 1);
        for budget in 1..20 {
            check_same(&drive(over, budget, (0, 0), protecting), &whole);
        }
    }
}

#[test]
fn without_room_a_clear_changes_nothing_and_says_full() {
    let format = Plain::small();
    let arena = Arena::new(&format);
    let tables = arena.tables(&format);
    populate(tables);
    let before = view(tables);
    let rest = Rest::new(run(0, 255));
    let mut log = Log::with_room(0, 9);
    let stopped = clear(tables, rest, &mut unlimited(), Emptied::Free, &mut log).unwrap_err();
    assert_eq!((stopped.stop, stopped.rest), (Stop::Full, rest));
    assert_eq!(view(tables), before);
    assert!(!log.asks_for_flush());

    // No room for a table: its leaves go, the table stays where it is.
    let mut log = Log::with_room(9, 0);
    let rest = Rest::new(run(200, 200));
    let stopped = clear(tables, rest, &mut unlimited(), Emptied::Free, &mut log).unwrap_err();
    assert_eq!((stopped.stop, stopped.rest), (Stop::Full, rest));
    assert_eq!(log.removals(), [(200, 0)]);
    arena.check(&format, 0);
    // The rest leads back into the emptied table.
    let mut log = Log::with_room(0, 9);
    let tally = clear(tables, stopped.rest, &mut unlimited(), Emptied::Free, &mut log).unwrap();
    assert_eq!((tally.leaves, tally.tables), (0, 2));
    assert_eq!(
        log.tables.iter().map(|(run, _)| *run).collect::<Vec<_>>(),
        [run(200, 203), run(192, 207)]
    );
    arena.check(&format, 2);
}

#[test]
fn a_budget_of_zero_does_nothing() {
    let format = Plain::small();
    let arena = Arena::new(&format);
    let tables = arena.tables(&format);
    populate(tables);
    let before = view(tables);
    let rest = Rest::new(run(0, 255));
    let mut log = Log::new();
    let stopped = clear(tables, rest, &mut Budget::new(0), Emptied::Free, &mut log).unwrap_err();
    assert_eq!((stopped.stop, stopped.rest), (Stop::Budget, rest));
    assert_eq!(view(tables), before);
}

#[test]
fn a_clear_that_finds_nothing_valid_asks_for_no_flush() {
    let format = Plain::small();
    let arena = Arena::new(&format);
    let tables = arena.tables(&format);
    // Inert notes at the root and in a table that also holds a page outside the range.
    arena.poke(tables.root, 3, 0x1230);
    map(
        tables,
        Gfn::new(0),
        Level::PAGE,
        Leaf::new(Mfn::new(9), Access::READ),
        Over::Vacant,
        &mut Log::new(),
    )
    .unwrap();
    let mut log = Log::new();
    let all = Rest::new(run(1, 255));
    let tally = clear(tables, all, &mut unlimited(), Emptied::Free, &mut log).unwrap();
    assert_eq!((tally.leaves, tally.tables), (0, 0));
    assert!(!log.asks_for_flush());
    assert_eq!(lookup(tables, Gfn::new(192)).unwrap().entry, Entry::Empty);
    arena.check(&format, 0);
}

#[test]
fn a_protect_that_changes_no_rights_asks_for_no_flush_and_splits_nothing() {
    let format = Plain::small();
    let arena = Arena::new(&format);
    let tables = arena.tables(&format);
    populate(tables);
    let pages = arena.linked();
    let mut log = Log::new();
    let rest = Rest::new(run(1, 254));
    let tally = protect(tables, rest, &mut unlimited(), &mut log, |leaf| leaf.access).unwrap();
    assert_eq!(tally.leaves, 0);
    assert!(!log.asks_for_flush());
    assert_eq!(arena.linked(), pages);
}

#[test]
fn an_inert_entry_that_spans_more_than_the_range_stays() {
    let format = Plain::small();
    let arena = Arena::new(&format);
    let tables = arena.tables(&format);
    arena.poke(tables.root, 3, 0x1230);
    let part = Rest::new(run(193, 255));
    clear(tables, part, &mut unlimited(), Emptied::Free, &mut Log::new()).unwrap();
    assert_eq!(lookup(tables, Gfn::new(192)).unwrap().entry, Entry::Inert);
}

#[test]
fn a_visit_shows_leaves_in_order_and_resumes_before_the_one_it_broke_at() {
    let format = Plain::small();
    let arena = Arena::new(&format);
    let tables = arena.tables(&format);
    populate(tables);
    let mut all = Vec::new();
    let whole = Rest::new(run(0, 255));
    let tally = visit(tables, whole, &mut unlimited(), |found| {
        all.push(found);
        ControlFlow::Continue(())
    })
    .unwrap();
    assert_eq!((all.len(), tally.leaves), (13, 13));
    assert!(all.windows(2).all(|pair| pair[0].run.last() < pair[1].run.first()));

    let mut one_by_one = Vec::new();
    let mut rest = whole;
    loop {
        let mut taken = false;
        let result = visit(tables, rest, &mut unlimited(), |found| {
            if taken {
                return ControlFlow::Break(());
            }
            taken = true;
            one_by_one.push(found);
            ControlFlow::Continue(())
        });
        match result {
            Ok(_) => break,
            Err(stopped) => {
                assert_eq!(stopped.stop, Stop::Asked);
                rest = stopped.rest;
            }
        }
    }
    assert_eq!(one_by_one, all);
}

#[test]
fn destroy_gives_every_page_to_the_record_whatever_the_room() {
    for format in [Plain::small(), Plain::new(0, 2, 3, 5)] {
        for room in 1..5 {
            let arena = Arena::new(&format);
            let tables = arena.tables(&format);
            let last = format.geometry().space().last();
            for gfn in [0, 5, 70, last.get()] {
                let leaf = Leaf::new(Mfn::new(gfn), Access::READ);
                map(tables, Gfn::new(gfn), Level::PAGE, leaf, Over::Vacant, &mut Log::new())
                    .unwrap();
            }
            let pages = arena.linked();
            let roots = (format.geometry().root_entries() / 4).max(1);
            let mut log = Log::with_room(2, room);
            let (mut rest, mut freed) = (Rest::new(format.geometry().space()), 0);
            while let Err(stopped) = destroy(tables, rest, &mut Budget::new(3), &mut log) {
                rest = stopped.rest;
                freed += log.flush(&arena, 2, room);
            }
            assert_eq!(log.tables.last().unwrap().0, format.geometry().space());
            freed += log.flush(&arena, 2, room);
            assert_eq!(log.removed.len(), 4);
            // The pages of a concatenated root travel as one.
            assert_eq!(freed, pages - (roots - 1));
        }
    }
}

#[test]
fn destroy_refuses_a_range_that_leaves_something_behind() {
    let format = Plain::small();
    let arena = Arena::new(&format);
    let tables = arena.tables(&format);
    populate(tables);
    let mut log = Log::new();
    let stopped = destroy(tables, Rest::new(run(0, 254)), &mut unlimited(), &mut log).unwrap_err();
    assert_eq!(stopped.stop, Stop::OutOfRange);
    assert!(!log.asks_for_flush());
    let stopped =
        destroy(tables, Rest::new(run(100, 255)), &mut unlimited(), &mut log).unwrap_err();
    assert_eq!((stopped.stop, stopped.rest), (Stop::Contended, Rest::new(run(0, 255))));
    destroy(tables, stopped.rest, &mut unlimited(), &mut log).unwrap();

    // Something is left on the third page of a concatenated root.
    let format = Plain::new(0, 2, 3, 5);
    let arena = Arena::new(&format);
    let tables = arena.tables(&format);
    let left = Gfn::new(9 << 4);
    map(tables, left, Level::PAGE, Leaf::new(Mfn::new(1), Access::READ), Over::Vacant, &mut log)
        .unwrap();
    let rest = Rest::new(run(10 << 4, 511));
    let stopped = destroy(tables, rest, &mut unlimited(), &mut log).unwrap_err();
    assert_eq!((stopped.stop, stopped.rest), (Stop::Contended, Rest::new(run(0, 511))));
}
