//! Walks interrupted at every budget and every room, over every format and granule.
//!
//! The mappings lie around the middle of the space, where every table ends and another
//! begins, or at its end. So a range of a few pages meets all that a walk can meet, and
//! all budgets and rooms can be tried.

use std::ops::ControlFlow;

use flush::{Gfn, Mfn, Run};
use stage2::format::arm64::{Arm64, Granule};
use stage2::format::ept::{Ept, EptLevels};
use stage2::format::npt::{Npt, NptLevels};
use stage2::format::vtd::{Vtd, VtdLevels};
use stage2::{
    Access, Budget, Emptied, Format, Found, Leaf, Level, Over, Rest, Stop, Stopped, Tables, Tally,
    clear, destroy, finish_split, lookup, map, protect, visit,
};

use crate::arena::Arena;
use crate::log::Log;
use crate::plain::Plain;

/// What is mapped, and the range that a walk gets.
struct Layout {
    leaves: Vec<(u64, Level)>,
    range: Run,
}

/// The sizes that layouts are made of, in frames.
struct Sizes {
    page: u64,
    block: u64,
    /// The border in the middle of the space: the root's entries meet there, and the
    /// pages of a concatenated root.
    middle: u64,
    end: u64,
    largest: Level,
}

impl Sizes {
    fn of(format: &impl Format) -> Self {
        let geometry = format.geometry();
        let end = geometry.space().last().get() + 1;
        Self {
            page: 1 << geometry.order(Level::PAGE),
            block: 1 << geometry.order(Level::ONE),
            middle: end / 2,
            end,
            largest: format.largest_leaf(),
        }
    }

    /// A block cut by the start of the range, a whole one, and pages behind the border.
    fn blocks_then_pages(&self) -> Layout {
        let (page, block, middle) = (self.page, self.block, self.middle);
        let pages = [0, 1, 3, 7].map(|number| (middle + number * page, Level::PAGE));
        let blocks = [(middle - 2 * block, Level::ONE), (middle - block, Level::ONE)];
        Layout {
            leaves: blocks.into_iter().chain(pages).collect(),
            range: run(middle - block - 2 * page, middle + 5 * page - 1),
        }
    }

    /// Pages before the border, and behind it the largest leaf, cut by the range's end.
    fn pages_then_large(&self) -> Layout {
        let (page, middle) = (self.page, self.middle);
        let pages = [9, 4, 2, 1].map(|number| (middle - number * page, Level::PAGE));
        let whole = if self.largest > Level::ONE { self.block } else { 0 };
        Layout {
            leaves: pages.into_iter().chain([(middle, self.largest)]).collect(),
            range: run(middle - 4 * page, middle + whole + 2 * page - 1),
        }
    }

    /// The last pages of the space, and nothing else in it.
    fn last_pages(&self) -> Layout {
        let pages = [6, 4, 3, 1].map(|number| (self.end - number * self.page, Level::PAGE));
        Layout { leaves: pages.to_vec(), range: run(self.end - 6 * self.page, self.end - 1) }
    }
}

fn run(first: u64, last: u64) -> Run {
    Run::new(Gfn::new(first), Gfn::new(last)).unwrap()
}

fn leaf_at(gfn: u64) -> Leaf {
    Leaf::new(Mfn::new(gfn & 0xffff_ffff), Access::READ_WRITE)
}

/// How much room a record has, for leaves and for tables, at the start and after each
/// flush.
type Rooms = (usize, usize);

const AMPLE: Rooms = (usize::MAX, usize::MAX);

#[derive(Debug, PartialEq)]
struct Outcome {
    /// What is left at each border of a mapping or of the range.
    shown: Vec<Option<(u64, u8)>>,
    removed: Vec<(Run, u8, Leaf)>,
    changed: Vec<(Run, u8, Leaf)>,
    /// What was put in for a split, and the tables that were linked.
    put_in: (Vec<Run>, Vec<Run>),
    /// The spans of the tables that were freed, in order.
    freed: Vec<Run>,
    linked: usize,
}

/// Carries one walk through all of its stops, and counts the entries that it read and the
/// calls that it took.
fn drive<F: Format>(
    format: &F,
    layout: &Layout,
    budget: u64,
    rooms: Rooms,
    walk: impl Fn(Tables<'_, F, Arena>, Rest, &mut Budget, &mut Log) -> Result<Tally, Stopped>,
) -> (Outcome, u64, u64) {
    let arena = Arena::new(format);
    let tables = arena.tables(format);
    for (gfn, level) in &layout.leaves {
        map(tables, Gfn::new(*gfn), *level, leaf_at(*gfn), Over::Vacant, &mut Log::new()).unwrap();
    }
    let mut log = Log::with_room(rooms.0, rooms.1);
    let (mut rest, mut freed, mut reads, mut calls) = (Rest::new(layout.range), vec![], 0, 1);
    let flush = |log: &mut Log, freed: &mut Vec<_>| {
        freed.extend(log.tables.iter().map(|(run, _)| *run));
        log.flush(&arena, rooms.0.max(1), rooms.1.max(1));
    };
    loop {
        let stopped = match walk(tables, rest, &mut Budget::new(budget), &mut log) {
            Ok(tally) => {
                reads += tally.reads;
                break;
            }
            Err(stopped) => stopped,
        };
        let (old, new) = (rest.run(), stopped.rest.run());
        assert!(new.last() == old.last() && new.first() >= old.first(), "{old:?} {new:?}");
        // Free are a table a level on the way down, and reading a split entry again.
        let spent = stopped.tally.reads.saturating_sub(u64::from(format.geometry().levels()));
        assert!(spent <= budget);
        rest = stopped.rest;
        reads += stopped.tally.reads;
        calls += 1;
        assert!(calls < 1000, "no progress at {rest:?}");
        match stopped.stop {
            Stop::Budget => {}
            // Only a flush makes room.
            Stop::Full => flush(&mut log, &mut freed),
            Stop::Split(pending) => {
                flush(&mut log, &mut freed);
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
    flush(&mut log, &mut freed);
    let destroyed = freed.last() == Some(&format.geometry().space());
    if !destroyed {
        arena.check(format, 0);
    }
    let shown = match destroyed {
        true => vec![],
        false => borders(format, layout).map(|gfn| show(tables, gfn)).collect(),
    };
    let Log { removed, changed, added, linked, .. } = log;
    let put_in = (added, linked);
    (Outcome { shown, removed, changed, put_in, freed, linked: arena.linked() }, reads, calls)
}

/// The first and last page of each mapping and of the range, and the pages next to it.
fn borders<F: Format>(format: &F, layout: &Layout) -> impl Iterator<Item = u64> {
    let geometry = format.geometry();
    let page = 1 << geometry.order(Level::PAGE);
    let (first, last) = (layout.range.first().get(), layout.range.last().get());
    let range = [first - page, first, last, (last + page).min(geometry.space().last().get())];
    let ends = |(gfn, level): &(u64, Level)| {
        let span = geometry.span(*level, Gfn::new(*gfn));
        [span.first().get(), span.last().get()]
    };
    range.into_iter().chain(layout.leaves.iter().flat_map(ends).collect::<Vec<_>>())
}

fn show<F: Format>(tables: Tables<'_, F, Arena>, gfn: u64) -> Option<(u64, u8)> {
    let gfn = Gfn::new(gfn);
    let (leaf, mfn) = lookup(tables, gfn)?.leaf_at(gfn)?;
    Some((mfn.get(), leaf.access.bits()))
}

/// Tries every budget and every room, alone and together. `after` is what becomes of the
/// rights in the range.
#[track_caller]
fn check<F: Format>(
    format: &F,
    layout: &Layout,
    after: Option<Access>,
    walk: impl Fn(Tables<'_, F, Arena>, Rest, &mut Budget, &mut Log) -> Result<Tally, Stopped>,
) {
    let (whole, reads, calls) = drive(format, layout, u64::MAX, AMPLE, &walk);
    let splits = if format.break_before_make() { 4 } else { 0 };
    assert!(calls <= 1 + splits, "not interrupted but by splits");
    // What is left is what the layout says, less the range.
    for (gfn, shown) in borders(format, layout).zip(&whole.shown) {
        let mapped = layout.leaves.iter().any(|(first, level)| {
            format.geometry().span(*level, Gfn::new(*first)).contains(Gfn::new(gfn))
        });
        let inside = layout.range.contains(Gfn::new(gfn));
        let access = if inside { after } else { Some(Access::READ_WRITE) };
        let expected = access.filter(|_| mapped).map(|access| access.bits());
        assert_eq!(shown.map(|(_, access)| access), expected, "frame {gfn:#x}");
    }

    let records = whole.removed.len().max(whole.freed.len()) + 1;
    let budgets = (1..=reads + 1).chain([u64::MAX]);
    for budget in budgets {
        let same = |rooms| {
            let (outcome, ..) = drive(format, layout, budget, rooms, &walk);
            assert_eq!(outcome, whole, "budget {budget}, room {rooms:?}");
        };
        (0..=records).for_each(|room| same((room, room)));
        same(AMPLE);
        (0..=records).for_each(|room| same((usize::MAX, room)));
        (0..=records).for_each(|room| same((room, usize::MAX)));
    }
}

#[track_caller]
fn check_clear<F: Format>(format: F) {
    let sizes = Sizes::of(&format);
    for layout in [sizes.blocks_then_pages(), sizes.pages_then_large(), sizes.last_pages()] {
        for emptied in [Emptied::Free, Emptied::Keep] {
            check(&format, &layout, None, |tables, rest, budget, log| {
                clear(tables, rest, budget, emptied, log)
            });
        }
    }
}

#[track_caller]
fn check_protect<F: Format>(format: F) {
    let sizes = Sizes::of(&format);
    for layout in [sizes.blocks_then_pages(), sizes.pages_then_large(), sizes.last_pages()] {
        check(&format, &layout, Some(Access::READ), |tables, rest, budget, log| {
            protect(tables, rest, budget, log, |leaf| leaf.access.without(Access::WRITE))
        });
    }
}

#[track_caller]
fn check_destroy<F: Format>(format: F) {
    let layout = Sizes::of(&format).last_pages();
    check(&format, &layout, None, |tables, rest, budget, log| destroy(tables, rest, budget, log));
}

/// Leaves that a visit shows, with every budget, and broken off before every one of them.
#[track_caller]
fn check_visit<F: Format>(format: F) {
    let sizes = Sizes::of(&format);
    for layout in [sizes.blocks_then_pages(), sizes.pages_then_large(), sizes.last_pages()] {
        let arena = Arena::new(&format);
        let tables = arena.tables(&format);
        for (gfn, level) in &layout.leaves {
            let log = &mut Log::new();
            map(tables, Gfn::new(*gfn), *level, leaf_at(*gfn), Over::Vacant, log).unwrap();
        }
        let visits = |budget: u64, at_once: usize| {
            let (mut found, mut rest, mut reads) = (Vec::<Found>::new(), layout.range, 0);
            loop {
                let goal = found.len().saturating_add(at_once);
                let seen = |entry| {
                    if found.len() == goal {
                        return ControlFlow::Break(());
                    }
                    found.push(entry);
                    ControlFlow::Continue(())
                };
                match visit(tables, Rest::new(rest), &mut Budget::new(budget), seen) {
                    Ok(tally) => return (found, reads + tally.reads),
                    Err(stopped) => {
                        assert!(matches!(stopped.stop, Stop::Budget | Stop::Asked));
                        reads += stopped.tally.reads;
                        rest = stopped.rest.run();
                    }
                }
            }
        };
        let (whole, reads) = visits(u64::MAX, usize::MAX);
        let leaves = layout.leaves.iter().filter(|(gfn, level)| {
            let span = format.geometry().span(*level, Gfn::new(*gfn));
            span.last() >= layout.range.first() && span.first() <= layout.range.last()
        });
        assert_eq!(whole.len(), leaves.count());
        for budget in (1..=reads + 1).chain([u64::MAX]) {
            for at_once in (1..=whole.len() + 1).chain([usize::MAX]) {
                assert_eq!(visits(budget, at_once).0, whole);
            }
        }
    }
}

/// One of our own with tables of 4 entries, and every format, granule and form of root.
macro_rules! with_every_format {
    ($check:ident) => {
        $check(Plain::small());
        $check(Plain::small().breaking());
        $check(Plain::new(0, 2, 3, 5));
        $check(Plain::new(4, 13, 4, 9)); // 64 bits
        $check(Ept::new(EptLevels::Four));
        $check(Ept::new(EptLevels::Five));
        $check(Npt::new(NptLevels::Four));
        $check(Npt::new(NptLevels::Five));
        $check(Vtd::new(VtdLevels::Three));
        $check(Vtd::new(VtdLevels::Four));
        $check(Vtd::new(VtdLevels::Five));
        for (granule, narrow, wide) in [
            (Granule::Kib4, [39, 40, 43, 44, 48], [48, 52]),
            (Granule::Kib16, [36, 40, 44, 47, 48], [48, 52]),
            (Granule::Kib64, [34, 42, 46, 47, 48], [48, 52]),
        ] {
            narrow.iter().for_each(|bits| $check(Arm64::new(granule, *bits).unwrap()));
            wide.iter().for_each(|bits| $check(Arm64::wide(granule, *bits).unwrap()));
        }
    };
}

#[test]
fn a_clear_of_every_format_ends_the_same_at_every_budget_and_room() {
    with_every_format!(check_clear);
}

#[test]
fn a_protect_of_every_format_ends_the_same_at_every_budget_and_room() {
    with_every_format!(check_protect);
}

#[test]
fn a_destroy_of_every_format_ends_the_same_at_every_budget_and_room() {
    with_every_format!(check_destroy);
}

#[test]
fn a_visit_of_every_format_shows_the_same_at_every_budget_and_pause() {
    with_every_format!(check_visit);
}
