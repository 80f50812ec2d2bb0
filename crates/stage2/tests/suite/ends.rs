//! Ranges: where they may begin and end.

use std::ops::ControlFlow;

use flush::{Gfn, Mfn, Run};
use stage2::format::arm64::{Arm64, Granule};
use stage2::format::ept::{Ept, EptLevels};
use stage2::format::npt::{Npt, NptLevels};
use stage2::format::vtd::{Vtd, VtdLevels};
use stage2::{
    Access, Budget, Emptied, Format, Leaf, Level, Over, Rest, Stop, Stopped, Tables, Tally, clear,
    finish_split, lookup, map, map_run, protect, visit,
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

/// A range names its last frame, so one of length 0 has no name: there is nothing that a
/// walk would have to refuse.
#[test]
fn a_range_of_length_zero_is_refused_before_there_is_a_walk() {
    for first in [1, 2, 16, 1 << 27, (1 << 40) - 1, u64::MAX] {
        assert_eq!(Run::new(Gfn::new(first), Gfn::new(first - 1)), None);
        assert!(Run::new(Gfn::new(first), Gfn::new(first)).is_some_and(|run| run.pages() == 1));
    }
}

type Walk = fn(Tables<'_, Plain, Arena>, Rest, &mut Log) -> Result<Tally, Stopped>;

fn clearing(tables: Tables<'_, Plain, Arena>, rest: Rest, log: &mut Log) -> Result<Tally, Stopped> {
    clear(tables, rest, &mut unlimited(), Emptied::Free, log)
}

fn lowering(tables: Tables<'_, Plain, Arena>, rest: Rest, log: &mut Log) -> Result<Tally, Stopped> {
    protect(tables, rest, &mut unlimited(), log, |leaf| leaf.access.without(Access::WRITE))
}

/// A leaf of 16 frames from 16 on, one of 4 from 40 on, and pages beside them.
#[track_caller]
fn check_ends(format: Plain, walk: Walk, after: Option<Access>) {
    for first in 14..46 {
        for last in first..46 {
            let arena = Arena::new(&format);
            let tables = arena.tables(&format);
            let layout = [
                (15, Level::PAGE),
                (16, Level::TWO),
                (32, Level::PAGE),
                (40, Level::ONE),
                (44, Level::PAGE),
            ];
            for (gfn, level) in layout {
                let leaf = Leaf::new(Mfn::new(0x1000 + gfn), Access::READ_WRITE);
                map(tables, Gfn::new(gfn), level, leaf, Over::Vacant, &mut Log::new()).unwrap();
            }
            let mut expected = view(tables);
            for frame in &mut expected[first as usize..=last as usize] {
                *frame = frame.and_then(|(mfn, _)| Some((mfn, after?.bits())));
            }
            let (mut log, mut rest) = (Log::new(), Rest::new(run(first, last)));
            while let Err(stopped) = walk(tables, rest, &mut log) {
                let Stop::Split(pending) = stopped.stop else { panic!("{stopped:?}") };
                finish_split(tables, pending, &mut log).unwrap();
                rest = stopped.rest;
            }
            assert_eq!(view(tables), expected, "{first}..={last}");
            // Whatever hardware may hold of a changed frame is on record, at its size.
            for frame in (first..=last).filter(|frame| (16..32).contains(frame)) {
                assert_eq!(log.order_of(Gfn::new(frame)), Some(4), "{first}..={last}");
            }
        }
    }
}

#[test]
fn a_range_may_begin_and_end_anywhere_inside_large_leaves() {
    for format in [Plain::small(), Plain::small().breaking()] {
        check_ends(format, clearing, None);
        check_ends(format, lowering, Some(Access::READ));
    }
}

#[track_caller]
fn check_top<F: Format>(format: F, bits: u8) {
    assert_eq!(format.geometry().address_bits(), bits);
    let arena = Arena::new(&format);
    let tables = arena.tables(&format);
    let geometry = format.geometry();
    let last = geometry.space().last().get();
    let (page_order, block_order) = (geometry.order(Level::PAGE), geometry.order(Level::ONE));
    let (first, block) = (last - ((1 << page_order) - 1), last - ((1 << block_order) - 1));
    let leaf = |number: u64| Leaf::new(Mfn::new(number << page_order), Access::READ_WRITE);
    let mut log = Log::new();

    // The last page, and the last block of them.
    let top = Gfn::new(last);
    map(tables, Gfn::new(first), Level::PAGE, leaf(5), Over::Vacant, &mut log).unwrap();
    let page = Rest::new(run(first, last));
    protect(tables, page, &mut unlimited(), &mut log, |_| Access::READ).unwrap();
    assert_eq!(log.changed.len(), 1);
    let tally = clear(tables, page, &mut unlimited(), Emptied::Free, &mut log).unwrap();
    assert_eq!((tally.leaves, tally.reached), (1, top));
    let (rest, large) = (Rest::new(run(block, last)), leaf(3 << (block_order - page_order)));
    map_run(tables, rest, large, Level::ONE, &mut unlimited(), &mut log).unwrap();
    let shown = lookup(tables, top).unwrap().leaf_at(top).unwrap().1;
    assert_eq!(shown.get(), (4 << block_order) - 1);
    assert_eq!(log.added.last(), Some(&run(block, last)));
    let whole = Rest::new(run(0, last));
    let tally = clear(tables, whole, &mut unlimited(), Emptied::Free, &mut log).unwrap();
    assert_eq!((tally.leaves, tally.reached), (1, top));
    assert_eq!(log.removals(), [(first, page_order), (block, block_order)]);

    // One frame too many: refused, nothing done.
    map(tables, Gfn::new(first), Level::PAGE, leaf(5), Over::Vacant, &mut log).unwrap();
    for over in [run(last, last + 1), run(last + 1, last + 1), run(0, u64::MAX), Run::ALL] {
        let stopped =
            clear(tables, Rest::new(over), &mut unlimited(), Emptied::Free, &mut log).unwrap_err();
        assert_eq!((stopped.stop, stopped.rest.run()), (Stop::OutOfRange, over));
        let mut none = unlimited();
        let stopped = visit(tables, Rest::new(over), &mut none, |_| ControlFlow::Continue(()));
        assert_eq!(stopped.unwrap_err().stop, Stop::OutOfRange);
        assert_eq!(none, unlimited());
    }
    assert!(lookup(tables, Gfn::new(last + 1)).is_none());
    assert!(lookup(tables, top).unwrap().leaf_at(top).is_some());
}

#[test]
fn the_last_page_of_a_space_is_like_any_other() {
    check_top(Ept::new(EptLevels::Four), 48);
    check_top(Ept::new(EptLevels::Five), 57);
    check_top(Npt::new(NptLevels::Four), 48);
    check_top(Npt::new(NptLevels::Five), 57);
    check_top(Vtd::new(VtdLevels::Three), 39);
    check_top(Vtd::new(VtdLevels::Four), 48);
    check_top(Vtd::new(VtdLevels::Five), 57);
    check_top(Plain::new(0, 9, 3, 13), 43);
    check_top(Plain::new(0, 9, 4, 5), 44);
    check_top(Plain::new(4, 13, 4, 9), 64);
    for granule in [Granule::Kib4, Granule::Kib16, Granule::Kib64] {
        for bits in [39, 40, 43, 48, 52] {
            check_top(Arm64::wide(granule, bits).unwrap(), bits);
        }
    }
}

#[test]
fn a_range_that_cuts_a_page_of_the_granule_is_refused() {
    let format = Plain::new(2, 2, 3, 2);
    let arena = Arena::new(&format);
    let tables = arena.tables(&format);
    let leaf = Leaf::new(Mfn::new(4), Access::READ);
    map(tables, Gfn::new(4), Level::PAGE, leaf, Over::Vacant, &mut Log::new()).unwrap();
    for (first, last) in [(4, 4), (5, 7), (4, 6), (3, 8), (0, 8)] {
        let rest = Rest::new(run(first, last));
        let mut log = Log::new();
        let stopped = clear(tables, rest, &mut unlimited(), Emptied::Free, &mut log).unwrap_err();
        assert_eq!(stopped.stop, Stop::Unaligned);
        assert!(!log.asks_for_flush());
    }
    let mut log = Log::new();
    let rest = Rest::new(run(4, 7));
    clear(tables, rest, &mut unlimited(), Emptied::Keep, &mut log).unwrap();
    assert_eq!(log.removed, [(run(4, 7), 2, leaf)]);
}
