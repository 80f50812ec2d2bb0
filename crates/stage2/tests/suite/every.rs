//! Interrupted walks over every real format: same end, same record, no table lost.

use flush::{Gfn, Mfn, Run};
use stage2::format::arm64::{Arm64, Granule};
use stage2::format::ept::{Ept, EptLevels};
use stage2::format::npt::{Npt, NptLevels};
use stage2::format::vtd::{Vtd, VtdLevels};
use stage2::{
    Access, Budget, Emptied, Format, Leaf, Level, Over, Rest, Stop, Stopped, Tables, Tally, clear,
    destroy, finish_split, lookup, map, protect,
};

use crate::arena::Arena;
use crate::log::Log;

/// Pages at both ends of the space and around a block, a block of pages' size, and the
/// largest leaf.
fn populate<F: Format>(tables: Tables<'_, F, Arena>) -> Vec<(u64, Level)> {
    let geometry = tables.format.geometry();
    let (page, block) = (1u64 << geometry.order(Level::PAGE), 1u64 << geometry.order(Level::ONE));
    let largest = tables.format.largest_leaf();
    let end = geometry.space().last().get() + 1;
    let large = (end / 2) & !((1 << geometry.order(largest)) - 1);
    let placed = vec![
        (0, Level::PAGE),
        (block - page, Level::PAGE),
        (block, Level::ONE),
        (2 * block, Level::PAGE),
        (large, largest),
        (end - page, Level::PAGE),
    ];
    for (gfn, level) in &placed {
        let leaf = Leaf::new(Mfn::new(*gfn & 0xffff_ffff), Access::READ_WRITE);
        map(tables, Gfn::new(*gfn), *level, leaf, Over::Vacant, &mut Log::new()).unwrap();
    }
    placed
}

struct Outcome {
    shown: Vec<Option<(u64, u8)>>,
    removed: Vec<(u64, u8)>,
    changed: Vec<Run>,
    freed: usize,
    linked: usize,
}

/// Carries one walk through all of its stops, with little of everything.
fn drive<F: Format>(
    format: &F,
    over: Run,
    budget: u64,
    room: usize,
    walk: impl Fn(Tables<'_, F, Arena>, Rest, &mut Budget, &mut Log) -> Result<Tally, Stopped>,
) -> Outcome {
    let arena = Arena::new(format);
    let tables = arena.tables(format);
    let probes: Vec<u64> = populate(tables).into_iter().map(|(gfn, _)| gfn).collect();
    let (mut log, mut rest, mut freed) = (Log::with_room(room, room), Rest::new(over), 0);
    while let Err(stopped) = walk(tables, rest, &mut Budget::new(budget), &mut log) {
        let (old, new) = (rest.run(), stopped.rest.run());
        assert!(new.last() == old.last() && new.first() >= old.first());
        rest = stopped.rest;
        match stopped.stop {
            Stop::Budget => {}
            // Only a flush makes room.
            Stop::Full => freed += log.flush(&arena, room.max(1), room.max(1)),
            Stop::Split(pending) => {
                freed += log.flush(&arena, room, room);
                finish_split(tables, pending, &mut log).unwrap();
            }
            Stop::NoTable
            | Stop::Contended
            | Stop::OutOfRange
            | Stop::Unaligned
            | Stop::Refused(_)
            | Stop::Asked => panic!("{:?}", stopped.stop),
        }
    }
    freed += log.flush(&arena, 0, 0);
    arena.check(format, 0);
    let show = |gfn: &u64| {
        let gfn = Gfn::new(*gfn);
        let (leaf, mfn) = lookup(tables, gfn)?.leaf_at(gfn)?;
        Some((mfn.get(), leaf.access.bits()))
    };
    Outcome {
        shown: probes.iter().map(show).collect(),
        removed: log.removals(),
        changed: log.changed.iter().map(|(run, _, _)| *run).collect(),
        freed,
        linked: arena.linked(),
    }
}

#[track_caller]
fn check_same(one: &Outcome, other: &Outcome) {
    assert_eq!(one.shown, other.shown);
    assert_eq!(one.removed, other.removed);
    assert_eq!(one.changed, other.changed);
    assert_eq!((one.freed, one.linked), (other.freed, other.linked));
}

#[track_caller]
fn check_interrupted<F: Format>(format: F) {
    let geometry = format.geometry();
    let space = geometry.space();
    let page = 1u64 << geometry.order(Level::PAGE);
    let (first, last) = (space.first().get(), space.last().get());
    // Whole, and cutting the block and the largest leaf.
    let cut =
        Run::new(Gfn::new(geometry.entries() as u64 * page + page), Gfn::new(last / 2 + page));
    let ranges =
        [space, cut.unwrap(), Run::new(Gfn::new(first + page), Gfn::new(last - page)).unwrap()];
    let size = geometry.entries() as u64;
    let budgets = [1, 2, 3, size - 1, size, size + 1, 2 * size + 1];
    for over in ranges {
        let lower = |tables: Tables<'_, F, _>, rest, budget: &mut _, log: &mut Log| {
            protect(tables, rest, budget, log, |leaf| leaf.access.without(Access::WRITE))
        };
        let whole = drive(&format, over, u64::MAX, usize::MAX, lower);
        for budget in budgets {
            check_same(&drive(&format, over, budget, 0, lower), &whole);
        }
        for emptied in [Emptied::Free, Emptied::Keep] {
            let clearing = |tables: Tables<'_, F, _>, rest, budget: &mut _, log: &mut Log| {
                clear(tables, rest, budget, emptied, log)
            };
            let whole = drive(&format, over, u64::MAX, usize::MAX, clearing);
            for budget in budgets {
                check_same(&drive(&format, over, budget, usize::MAX, clearing), &whole);
            }
            for room in 0..4 {
                check_same(&drive(&format, over, u64::MAX, room, clearing), &whole);
                check_same(&drive(&format, over, size, room, clearing), &whole);
            }
        }
    }
}

#[test]
fn an_interrupted_walk_of_ept_ends_like_a_whole_one() {
    check_interrupted(Ept::new(EptLevels::Four));
    check_interrupted(Ept::new(EptLevels::Five));
}

#[test]
fn an_interrupted_walk_of_npt_or_vtd_ends_like_a_whole_one() {
    check_interrupted(Npt::new(NptLevels::Four));
    check_interrupted(Vtd::new(VtdLevels::Three));
}

#[test]
fn an_interrupted_walk_of_arm64_ends_like_a_whole_one() {
    check_interrupted(Arm64::new(Granule::Kib4, 40).unwrap());
    check_interrupted(Arm64::new(Granule::Kib4, 44).unwrap());
    check_interrupted(Arm64::new(Granule::Kib4, 48).unwrap());
    check_interrupted(Arm64::new(Granule::Kib16, 44).unwrap());
    check_interrupted(Arm64::wide(Granule::Kib16, 52).unwrap());
    check_interrupted(Arm64::new(Granule::Kib64, 47).unwrap());
}

#[track_caller]
fn check_teardown<F: Format>(format: F) {
    let space = format.geometry().space();
    let size = format.geometry().entries() as u64;
    let arena = Arena::new(&format);
    populate(arena.tables(&format));
    let (pages, roots) = (arena.linked(), (format.geometry().root_entries() as u64 / size).max(1));
    for budget in [1, 7, size, u64::MAX] {
        for room in [1, 2, usize::MAX] {
            let arena = Arena::new(&format);
            let tables = arena.tables(&format);
            let placed = populate(tables);
            let mut log = Log::with_room(room, room);
            let (mut rest, mut freed) = (Rest::new(space), 0);
            while let Err(stopped) = destroy(tables, rest, &mut Budget::new(budget), &mut log) {
                rest = stopped.rest;
                if stopped.stop == Stop::Full {
                    freed += log.flush(&arena, room, room);
                }
            }
            assert_eq!(log.removed.len(), placed.len());
            freed += log.flush(&arena, room, room);
            // The pages of a concatenated root travel as one.
            assert_eq!(freed as u64, pages as u64 - (roots - 1));
        }
    }
}

#[test]
fn teardown_returns_every_page_of_every_format_once() {
    check_teardown(Ept::new(EptLevels::Five));
    check_teardown(Npt::new(NptLevels::Four));
    check_teardown(Vtd::new(VtdLevels::Three));
    check_teardown(Arm64::new(Granule::Kib4, 40).unwrap());
    check_teardown(Arm64::wide(Granule::Kib4, 52).unwrap());
    check_teardown(Arm64::new(Granule::Kib16, 40).unwrap());
    check_teardown(Arm64::new(Granule::Kib64, 47).unwrap());
}
