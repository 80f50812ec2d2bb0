//! Splitting large leaves, directly and with break-before-make.

use flush::{Batch, DomainId, Gfn, Mfn, Run, Tlb};
use stage2::format::ept::{Ept, EptLevels};
use stage2::format::npt::{Npt, NptLevels};
use stage2::format::vtd::{Vtd, VtdLevels};
use stage2::{
    Access, Budget, Emptied, Entry, Format, Leaf, Level, Over, Rest, SplitError, Stop, Tag,
    abandon_split, clear, clear_page, finish_split, lookup, map, protect, split,
};

use crate::arena::{Arena, view};
use crate::log::Log;
use crate::plain::{ACCESSED, DIRTY, Plain};

fn run(first: u64, last: u64) -> Run {
    Run::new(Gfn::new(first), Gfn::new(last)).unwrap()
}

#[track_caller]
fn check_split<F: Format>(format: F) {
    let arena = Arena::new(&format);
    let tables = arena.tables(&format);
    let gib = Gfn::new(1 << 18);
    let mut log = Log::new();
    let leaf = Leaf {
        accessed: true,
        dirty: true,
        ..Leaf::new(Mfn::new(3 << 18), Access::READ_WRITE).tagged(Tag::new(5).unwrap())
    };
    map(tables, gib, Level::TWO, leaf, Over::Vacant, &mut log).unwrap();
    let at = Gfn::new((1 << 18) + 0x1234);
    split(tables, at, Level::PAGE, &mut log).unwrap();
    let orders: Vec<_> = log.changed.iter().map(|(run, order, old)| (*run, *order, *old)).collect();
    let part = Leaf { origin: Level::TWO, ..leaf };
    let two = Leaf { mfn: Mfn::new((3 << 18) + 0x1200), ..part };
    assert_eq!(orders, [(Run::block(at, 18), 18, leaf), (Run::block(at, 9), 18, two)]);
    for (offset, level) in
        [(0, 1), (0x11ff, 1), (0x1200, 0), (0x1234, 0), (0x13ff, 0), (0x1400, 1), (0x3_ffff, 1)]
    {
        let gfn = Gfn::new((1 << 18) + offset);
        let found = lookup(tables, gfn).unwrap();
        let (shown, mfn) = found.leaf_at(gfn).unwrap();
        assert_eq!((mfn.get(), found.level.get()), ((3 << 18) + offset, level));
        assert_eq!(Leaf { mfn: leaf.mfn, ..shown }, part);
    }
    arena.check(&format, 0);
    assert_eq!(split(tables, at, Level::PAGE, &mut log), Ok(()));
    assert_eq!(log.changed.len(), 2);
    assert_eq!(split(tables, Gfn::new(0), Level::PAGE, &mut log), Err(SplitError::Absent));
    let beyond = Gfn::new(u64::MAX);
    assert_eq!(split(tables, beyond, Level::PAGE, &mut log), Err(SplitError::OutOfRange));
}

#[test]
fn the_parts_of_a_leaf_map_what_the_leaf_mapped() {
    check_split(Ept::new(EptLevels::Four));
    check_split(Ept::new(EptLevels::Five));
    check_split(Npt::new(NptLevels::Four));
    check_split(Vtd::new(VtdLevels::Three));
    check_split(Vtd::new(VtdLevels::Five));
}

fn with_leaf_of_16(format: &Plain) -> Arena {
    let arena = Arena::new(format);
    let leaf = Leaf::new(Mfn::new(0x40), Access::READ_WRITE);
    let tables = arena.tables(format);
    map(tables, Gfn::new(16), Level::TWO, leaf, Over::Vacant, &mut Log::new()).unwrap();
    arena
}

#[test]
fn clearing_part_of_a_leaf_records_all_of_it_and_keeps_the_other_part() {
    let format = Plain::small();
    let arena = with_leaf_of_16(&format);
    let tables = arena.tables(&format);
    let mut log = Log::new();
    let rest = Rest::new(run(20, 22));
    let tally = clear(tables, rest, &mut Budget::UNLIMITED.clone(), Emptied::Free, &mut log);
    assert_eq!(tally.unwrap().leaves, 3);
    let changed: Vec<_> = log.changed.iter().map(|(run, order, _)| (*run, *order)).collect();
    assert_eq!(changed, [(run(16, 31), 4), (run(20, 23), 4)]);
    assert_eq!(log.removals(), [(20, 4), (21, 4), (22, 4)]);
    let view = view(tables);
    for (frame, seen) in (16..32).zip(&view[16..]) {
        let kept = !(20..=22).contains(&frame);
        assert_eq!(*seen, kept.then_some((0x30 + frame, 3)), "frame {frame}");
    }
}

#[test]
fn without_a_page_for_the_table_a_split_changes_nothing() {
    let format = Plain::small();
    for allowance in [0, 1] {
        let arena = with_leaf_of_16(&format);
        let tables = arena.tables(&format);
        let before = view(tables);
        arena.allowance.set(allowance);
        let mut log = Log::new();
        let rest = Rest::new(run(20, 22));
        let result = clear(tables, rest, &mut Budget::UNLIMITED.clone(), Emptied::Free, &mut log);
        let stopped = result.unwrap_err();
        assert_eq!((stopped.stop, stopped.rest), (Stop::NoTable, rest));
        assert_eq!(view(tables), before);
        assert_eq!(log.changed.len(), allowance);
        arena.check(&format, 0);
        // It goes on where pages can be had again.
        arena.allowance.set(9);
        clear(tables, rest, &mut Budget::UNLIMITED.clone(), Emptied::Free, &mut log).unwrap();
        assert_eq!(log.removed.len(), 3);
    }
}

#[test]
fn marks_that_hardware_sets_during_a_split_reach_the_parts() {
    let format = Plain::small();
    let arena = with_leaf_of_16(&format);
    let tables = arena.tables(&format);
    arena.marks.borrow_mut().extend([DIRTY, ACCESSED]);
    let mut log = Log::new();
    split(tables, Gfn::new(16), Level::ONE, &mut log).unwrap();
    let old = log.changed[0].2;
    assert!(old.accessed && old.dirty);
    let (part, _) = lookup(tables, Gfn::new(31)).unwrap().leaf_at(Gfn::new(31)).unwrap();
    assert!(part.accessed && part.dirty);
    arena.check(&format, 0);
}

#[test]
fn a_leaf_that_somebody_else_rewrites_is_not_split() {
    let format = Plain::small();
    let arena = with_leaf_of_16(&format);
    let tables = arena.tables(&format);
    let before = view(tables);
    arena.marks.borrow_mut().extend([1 << 20, 1 << 21, 1 << 22, 1 << 23]);
    let mut log = Log::new();
    let result = split(tables, Gfn::new(16), Level::ONE, &mut log);
    assert_eq!(result, Err(SplitError::Contended));
    assert!(!log.asks_for_flush());
    assert_ne!(view(tables), before);
    arena.check(&format, 0);
}

#[test]
fn with_break_before_make_a_split_waits_for_the_flush() {
    let format = Plain::small().breaking();
    let arena = with_leaf_of_16(&format);
    let tables = arena.tables(&format);
    let mut log = Log::new();
    let mut rest = Rest::new(run(21, 23));
    let mut pending = Vec::new();
    loop {
        let result =
            protect(tables, rest, &mut Budget::UNLIMITED.clone(), &mut log, |_| Access::READ);
        match result {
            Ok(tally) => {
                assert_eq!(tally.leaves, 3);
                break;
            }
            Err(stopped) => {
                let Stop::Split(split) = stopped.stop else { panic!("{stopped:?}") };
                // Gone and on record, but not replaced yet.
                assert_eq!(log.changed.last().unwrap().0, split.run());
                assert_eq!(lookup(tables, Gfn::new(21)).unwrap().entry, Entry::Empty);
                // A walk in between does not free the table it will be linked in.
                let all = Rest::new(run(16, 31));
                let mut budget = Budget::UNLIMITED;
                clear(tables, all, &mut budget, Emptied::Free, &mut Log::with_room(0, 0))
                    .map_or_else(|stopped| assert_eq!(stopped.stop, Stop::Full), |_| ());
                pending.push(split.run());
                finish_split(tables, split, &mut log).unwrap();
                rest = stopped.rest;
            }
        }
    }
    assert_eq!(pending, [run(16, 31), run(20, 23)]);
    let view = view(tables);
    for (frame, seen) in (16..32).zip(&view[16..]) {
        let rights = if (21..=23).contains(&frame) { 1 } else { 3 };
        assert_eq!(*seen, Some((0x30 + frame, rights)));
    }
    arena.check(&format, 0);
}

#[test]
fn a_pending_split_can_be_given_up_and_is_not_finished_over_another_entry() {
    let format = Plain::small().breaking();
    let arena = with_leaf_of_16(&format);
    let tables = arena.tables(&format);
    let mut log = Log::new();
    let Err(SplitError::Pending(pending)) = split(tables, Gfn::new(20), Level::PAGE, &mut log)
    else {
        panic!("this format breaks before it makes")
    };
    arena.poke(tables.root, 0, 0);
    let pending = finish_split(tables, pending, &mut log).unwrap_err();
    assert_eq!(pending.run(), run(16, 31));
    abandon_split(tables, pending);

    let arena = with_leaf_of_16(&format);
    let tables = arena.tables(&format);
    let Err(SplitError::Pending(pending)) = split(tables, Gfn::new(20), Level::PAGE, &mut log)
    else {
        panic!("this format breaks before it makes")
    };
    abandon_split(tables, pending);
    arena.check(&format, 0);
    assert_eq!(lookup(tables, Gfn::new(16)).unwrap().entry, Entry::Empty);
}

/// The order of everything that one edit, in a batch of its own, puts on record.
#[track_caller]
fn check_orders(edit: impl FnOnce(&mut Log), expected: &[u8]) {
    let mut log = Log::new();
    edit(&mut log);
    let orders: Vec<_> =
        log.removed.iter().chain(&log.changed).map(|(_, order, _)| *order).collect();
    assert_eq!(orders, expected);
}

/// Symptom: a device wrote to a page that was another's. Cause: one batch split a large
/// leaf; before its flush a second batch took another part away, recorded it as a single
/// page, and hardware kept the large leaf through the flush of a single page. Cure: parts
/// remember the size of the leaf they come from, and go on record with it.
#[test]
fn a_part_goes_on_record_at_the_size_of_the_leaf_it_came_from() {
    let format = Plain::small();
    let arena = with_leaf_of_16(&format);
    let tables = arena.tables(&format);
    let gone = |first, last, log: &mut Log| {
        let mut budget = Budget::UNLIMITED;
        let rest = Rest::new(run(first, last));
        clear(tables, rest, &mut budget, Emptied::Keep, log).unwrap();
    };
    let put = |frame: u64, level, new: Leaf, over, log: &mut Log| {
        map(tables, Gfn::new(frame), level, new, over, log).unwrap();
    };
    let shown = |frame: u64| {
        let gfn = Gfn::new(frame);
        lookup(tables, gfn).unwrap().leaf_at(gfn).unwrap().0
    };
    split(tables, Gfn::new(20), Level::PAGE, &mut Log::new()).unwrap();

    // Taken away in a range, or alone.
    check_orders(|log| gone(20, 20, log), &[4]);
    let mut batch: Batch<(), 1> = Batch::new(DomainId::new(1));
    batch.edit_many(|skipped, _| {
        clear_page::<Tlb, _, _>(tables, Gfn::new(21), skipped, |_| true).map(drop).unwrap();
    });
    assert_eq!(batch.tlb().order(), 4);
    // With fewer rights, by a walk and by a new leaf, and then taken away.
    let lower = |log: &mut Log| {
        let mut budget = Budget::UNLIMITED;
        protect(tables, Rest::new(run(22, 22)), &mut budget, log, |_| Access::READ).unwrap();
    };
    check_orders(lower, &[4]);
    let old = shown(22);
    let same = Leaf::new(old.mfn, Access::READ_WRITE);
    check_orders(|log| put(22, Level::PAGE, same, Over::Expected(old), log), &[4]);
    check_orders(|log| gone(22, 22, log), &[4]);
    // A part of a part, and a part that is not a page.
    check_orders(|log| split(tables, Gfn::new(24), Level::PAGE, log).unwrap(), &[4]);
    check_orders(|log| gone(24, 24, log), &[4]);
    check_orders(|log| gone(28, 31, log), &[4]);
    // Another page in the place of a part, or where one was, is no part.
    let (old, other) = (shown(23), Leaf::new(Mfn::new(0x80), Access::READ));
    check_orders(|log| put(23, Level::PAGE, other, Over::Expected(old), log), &[4]);
    check_orders(|log| gone(23, 23, log), &[0]);
    check_orders(|log| put(20, Level::PAGE, other, Over::Vacant, log), &[]);
    check_orders(|log| gone(20, 20, log), &[0]);
}
