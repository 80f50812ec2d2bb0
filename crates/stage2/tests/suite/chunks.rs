//! The chunked loop: one loop for every walk, that resumes and loses nothing.

use std::ops::ControlFlow;

use flush::{Gfn, Mfn, Run};
use stage2::{
    Access, Budget, Chunk, Emptied, Entry, Found, Halt, Halted, Leaf, Level, Over, Pace, Rest,
    RootError, Stop, Stopped, Stops, Tables, Tally, chunked, clear, free_root, lookup, map,
    protect, visit,
};

use crate::arena::{Arena, view};
use crate::log::Log;
use crate::plain::Plain;

fn run(first: u64, last: u64) -> Run {
    Run::new(Gfn::new(first), Gfn::new(last)).unwrap()
}

/// 256 frames with leaves of 1, 4 and 16, and holes.
fn populate(tables: Tables<'_, Plain, Arena>) {
    for (gfn, level) in [(0, 0), (3, 0), (4, 1), (17, 0), (32, 2), (128, 1), (200, 0), (255, 0)] {
        let leaf = Leaf::new(Mfn::new(0x4000 + gfn), Access::READ_WRITE);
        let level = Level::new(level).unwrap();
        map(tables, Gfn::new(gfn), level, leaf, Over::Vacant, &mut Log::new()).unwrap();
    }
}

type Walk = dyn Fn(Tables<'_, Plain, Arena>, Rest, &mut Log) -> Result<Tally, Stopped>;

fn clearing(tables: Tables<'_, Plain, Arena>, rest: Rest, log: &mut Log) -> Result<Tally, Stopped> {
    clear(tables, rest, &mut Budget::UNLIMITED.clone(), Emptied::Free, log)
}

fn lowering(tables: Tables<'_, Plain, Arena>, rest: Rest, log: &mut Log) -> Result<Tally, Stopped> {
    protect(tables, rest, &mut Budget::UNLIMITED.clone(), log, |_| Access::READ)
}

/// Runs the loop to its end and returns what it leaves, what it recorded, and its walks.
#[track_caller]
fn run_loop(over: Run, order: u8, pace: Pace, walk: &Walk) -> (Vec<Option<(u64, u8)>>, Log, u64) {
    let format = Plain::small();
    let arena = Arena::new(&format);
    let tables = arena.tables(&format);
    populate(tables);
    let mut log = Log::new();
    let one = |log: &mut Log, rest| walk(tables, rest, log).map(|tally| tally.reached);
    let go_on = |_: &mut Log, _| ControlFlow::Continue(());
    let walks = chunked(Rest::new(over), Chunk::new(order), pace, &mut log, one, go_on).unwrap();
    arena.check(&format, log.tables.len());
    (view(tables), log, walks)
}

#[test]
fn chunks_of_any_size_end_like_one_walk() {
    for over in [run(0, 255), run(1, 254), run(6, 130), run(255, 255), run(40, 41)] {
        for walk in [&clearing as &Walk, &lowering] {
            let (whole, log, walks) = run_loop(over, 64, Pace::Resume, walk);
            assert_eq!(walks, 1);
            for order in 0..9 {
                for pace in [Pace::Resume, Pace::EveryChunk] {
                    let (left, pieces, walks) = run_loop(over, order, pace, walk);
                    assert_eq!(left, whole);
                    // Chunks below a leaf's size split it; what goes is the same.
                    let frames =
                        |log: &Log| -> u64 { log.leaf_runs().map(|run| run.pages()).sum() };
                    assert!(frames(&pieces) >= frames(&log));
                    let chunks = (over.last().get() >> order) - (over.first().get() >> order) + 1;
                    match pace {
                        Pace::EveryChunk => assert_eq!(walks, chunks),
                        Pace::Resume => assert!(walks <= chunks),
                    }
                }
            }
        }
    }
}

#[test]
fn a_walk_that_reaches_past_the_end_is_clamped_and_touches_nothing_there() {
    // 64..=127 is one empty root entry; 128.. is mapped.
    let (left, log, walks) = run_loop(run(64, 70), 2, Pace::Resume, &clearing);
    assert_eq!((walks, left[128].is_some(), log.asks_for_flush()), (1, true, false));
    let (left, log, walks) = run_loop(run(64, 130), 2, Pace::Resume, &lowering);
    assert_eq!((walks, left[130], left[131]), (2, Some((0x4082, 1)), Some((0x4083, 3))));
    assert_eq!(log.changed[0].0, run(128, 131));
}

#[test]
fn the_loop_writes_back_each_leaf_once_and_asks_for_no_flush() {
    let format = Plain::small();
    let arena = Arena::new(&format);
    let tables = arena.tables(&format);
    populate(tables);
    let mut written: Vec<Run> = Vec::new();
    let write_back = |written: &mut Vec<Run>, rest| {
        let seen = |found: Found| {
            if matches!(found.entry, Entry::Leaf(_)) {
                written.push(found.run);
            }
            ControlFlow::Continue(())
        };
        visit(tables, rest, &mut Budget::UNLIMITED.clone(), seen).map(|tally| tally.reached)
    };
    let go_on = |_: &mut Vec<Run>, _| ControlFlow::Continue(());
    let all = Rest::new(run(0, 255));
    let (chunk, pace) = (Chunk::new(4), Pace::Resume);
    let walks = chunked(all, chunk, pace, &mut written, write_back, go_on).unwrap();
    let firsts: Vec<_> = written.iter().map(|run| run.first().get()).collect();
    assert_eq!(firsts, [0, 3, 4, 17, 32, 128, 200, 255]);
    // Frames 64..=127 are one root entry; the others have tables.
    assert_eq!(walks, 12 + 1);
}

#[test]
fn the_loop_takes_a_tree_down_and_its_root_last() {
    for order in [0, 3, 4, 64] {
        let format = Plain::small();
        let arena = Arena::new(&format);
        let tables = arena.tables(&format);
        populate(tables);
        let mut log = Log::new();
        assert_eq!(free_root(tables, &mut log), Err(RootError::InUse));
        let walk = |log: &mut Log, rest| clearing(tables, rest, log).map(|tally| tally.reached);
        let go_on = |_: &mut Log, _| ControlFlow::Continue(());
        let space = Rest::new(run(0, 255));
        chunked(space, Chunk::new(order), Pace::Resume, &mut log, walk, go_on).unwrap();
        let pages = arena.linked();
        assert_eq!(pages, 1);
        assert_eq!(free_root(tables, &mut Log::with_room(9, 0)), Err(RootError::Full));
        assert_eq!(free_root(tables, &mut log), Ok(()));
        assert_eq!(log.tables.last().unwrap().0, run(0, 255));
        assert_eq!(arena.linked(), 0);
    }
}

#[test]
fn an_error_comes_out_unchanged_and_the_next_call_goes_on_there() {
    let (whole, whole_log, _) = run_loop(run(0, 255), 64, Pace::Resume, &clearing);
    for (order, budget, room) in [(4, 1, 9), (4, 3, 1), (8, 2, 2), (0, 1, 1), (2, 7, 1)] {
        let format = Plain::small();
        let arena = Arena::new(&format);
        let tables = arena.tables(&format);
        populate(tables);
        let mut log = Log::with_room(room, room);
        let mut rest = Rest::new(run(0, 255));
        for calls in 0.. {
            assert!(calls < 2000, "no progress at {rest:?}");
            let mut left = Budget::new(budget);
            let mut inner = None;
            let walk = |log: &mut Log, rest| {
                clear(tables, rest, &mut left, Emptied::Free, log).map_or_else(
                    |stopped| {
                        inner = Some((stopped.rest.run().first(), format!("{:?}", stopped.stop)));
                        Err(stopped)
                    },
                    |tally| Ok(tally.reached),
                )
            };
            let go_on = |_: &mut Log, _| ControlFlow::Continue(());
            let result = chunked(rest, Chunk::new(order), Pace::Resume, &mut log, walk, go_on);
            let Err(halted) = result else { break };
            let Halt::Walk(stopped) = halted.halt else { panic!("{halted:?}") };
            assert_eq!(inner, Some((stopped.at(), format!("{:?}", stopped.stop))));
            assert_eq!(halted.rest.run(), run(stopped.at().get(), 255));
            assert!(matches!(stopped.stop, Stop::Budget | Stop::Full));
            rest = halted.rest;
            log.flush(&arena, room, room);
        }
        log.flush(&arena, 0, 0);
        arena.check(&format, 0);
        assert_eq!(view(tables), whole);
        // Nothing before a stop was lost: every frame is on record.
        for removed in whole_log.leaf_runs() {
            let (first, last) = (removed.first().get(), removed.last().get());
            for frame in (first..=last).map(Gfn::new) {
                assert!(log.leaf_runs().any(|run| run.contains(frame)), "{frame:?}");
            }
        }
    }
}

#[test]
fn a_pause_sees_the_pending_flush_and_does_not_lose_it() {
    let format = Plain::small();
    let arena = Arena::new(&format);
    let tables = arena.tables(&format);
    populate(tables);
    let mut log = Log::new();
    let walk = |log: &mut Log, rest| clearing(tables, rest, log).map(|tally| tally.reached);
    // It stops at the first pause with something pending, as a lock that is let go wants.
    let stop = |log: &mut Log, _| {
        if log.asks_for_flush() { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    };
    let all = Rest::new(run(16, 255));
    let (chunk, pace) = (Chunk::new(4), Pace::Resume);
    let halted = chunked(all, chunk, pace, &mut log, walk, stop).unwrap_err();
    assert_eq!(halted, Halted { rest: Rest::new(run(32, 255)), halt: Halt::Asked, walks: 1 });
    assert_eq!(log.removals(), [(17, 0)]);
    assert_eq!(lookup(tables, Gfn::new(32)).unwrap().level, Level::TWO);
    // Not flushed at the pause, it is still on record after the rest of the walk.
    let mut pauses = Vec::new();
    let go_on = |log: &mut Log, rest: Rest| {
        pauses.push((rest.run().first().get(), log.removed.len()));
        ControlFlow::Continue(())
    };
    let walks = chunked(halted.rest, chunk, pace, &mut log, walk, go_on).unwrap();
    assert_eq!(log.removals(), [(17, 0), (32, 4), (128, 2), (200, 0), (255, 0)]);
    assert!(pauses.iter().all(|(_, pending)| *pending > 0));
    // One between two walks, and none after the last.
    assert_eq!(pauses.last().map(|(first, _)| *first), Some(240));
    assert_eq!(pauses.len() as u64, walks - 1);
}

#[derive(Debug, PartialEq, Eq)]
struct At(u64);

impl Stops for At {
    fn at(&self) -> Gfn {
        Gfn::new(self.0)
    }
}

#[test]
fn a_walk_without_progress_ends_the_loop() {
    let mut calls = 0;
    let short = |calls: &mut u64, rest: Rest| {
        *calls += 1;
        let end = rest.run().last().get();
        Ok::<_, At>(Gfn::new(if *calls == 2 { end - 1 } else { end }))
    };
    let go_on = |_: &mut u64, _| ControlFlow::Continue(());
    let all = Rest::new(run(0, 255));
    let halted = chunked(all, Chunk::new(4), Pace::Resume, &mut calls, short, go_on).unwrap_err();
    assert_eq!(halted, Halted { rest: Rest::new(run(16, 255)), halt: Halt::Short, walks: 2 });
    assert_eq!(calls, 2);
}

#[test]
fn an_error_that_names_another_place_neither_skips_nor_goes_back() {
    for (claimed, first) in [(0, 16), (20, 20), (31, 31), (32, 31), (u64::MAX, 31)] {
        let walk = |_: &mut (), rest: Rest| match rest.run().first().get() {
            0 => Ok(rest.run().last()),
            _ => Err(At(claimed)),
        };
        let go_on = |_: &mut (), _| ControlFlow::Continue(());
        let all = Rest::new(run(0, 255));
        let halted = chunked(all, Chunk::new(4), Pace::Resume, &mut (), walk, go_on).unwrap_err();
        assert_eq!(halted.rest, Rest::new(run(first, 255)));
        assert_eq!(halted.halt, Halt::Walk(At(claimed)));
    }
}

#[test]
fn the_loop_ends_at_the_last_frame_of_64_bits() {
    let ends = |over, order, walks| {
        for pace in [Pace::Resume, Pace::EveryChunk] {
            let walk = |_: &mut (), rest: Rest| Ok::<_, At>(rest.run().last());
            let go_on = |_: &mut (), _| ControlFlow::Continue(());
            let result = chunked(Rest::new(over), Chunk::new(order), pace, &mut (), walk, go_on);
            assert_eq!(result, Ok(walks));
        }
    };
    ends(Run::ALL, 64, 1);
    ends(Run::ALL, 255, 1);
    ends(Run::ALL, 63, 2);
    ends(Run::ALL, 60, 16);
    ends(run(u64::MAX, u64::MAX), 0, 1);
    ends(run(u64::MAX - 2, u64::MAX), 1, 2);
}
