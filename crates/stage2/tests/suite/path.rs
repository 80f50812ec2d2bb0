//! The way down that is kept from one page to the next.

use flush::{Batch, Cover, DomainId, Gfn, Iotlb, Mfn, Run};
use stage2::format::arm64::{Arm64, Granule};
use stage2::format::ept::{Ept, EptLevels};
use stage2::format::npt::{Npt, NptLevels};
use stage2::format::vtd::{Vtd, VtdLevels};
use stage2::{
    Access, Budget, Emptied, Format, Leaf, Level, Likely, Near, Over, PageError, Path, Rest,
    TableMemory, Tables, clear, clear_page_near, lookup, map, split,
};

use crate::arena::Arena;
use crate::log::Log;
use crate::pages::HARDWARE;

/// Every page shows the same frame, so a way to a wrong one is not noticed there.
const FRAME: Mfn = Mfn::new(0x10);
const LEAF: Leaf = Leaf::new(FRAME, Access::READ_WRITE);

fn put<F: Format>(tables: Tables<'_, F, Arena>, gfn: u64) {
    map(tables, Gfn::new(gfn), Level::PAGE, LEAF, Over::Vacant, &mut Log::new()).unwrap();
}

fn shows<F: Format>(tables: Tables<'_, F, Arena>, gfn: u64) -> bool {
    let gfn = Gfn::new(gfn);
    lookup(tables, gfn).unwrap().leaf_at(gfn).is_some()
}

/// Clears the page that shows the frame, along `path`.
fn take<F: Format>(
    tables: Tables<'_, F, Arena>,
    path: &mut Path,
    gfn: u64,
) -> (Result<(), PageError>, Cover) {
    let mut batch = Batch::<(), 1>::new(DomainId::new(1));
    let same = |found: &Leaf| found.mfn == FRAME;
    let result = batch.edit_many(|skipped, _| {
        let at = Gfn::new(gfn);
        clear_page_near::<Iotlb, _, _>(tables, path, at, skipped, LEAF, same).map(|_| ())
    });
    let cover = batch.iotlb().clone();
    assert!(batch.flush(&HARDWARE).is_ok());
    (result, cover)
}

/// What is done with each format.
trait Check {
    fn check<F: Format>(&self, format: &F);

    fn every_format(&self) {
        self.check(&Ept::new(EptLevels::Four));
        self.check(&Ept::new(EptLevels::Five));
        self.check(&Npt::new(NptLevels::Four));
        self.check(&Vtd::new(VtdLevels::Three));
        self.check(&Vtd::new(VtdLevels::Five));
        self.check(&Arm64::new(Granule::Kib4, 43).unwrap());
        self.check(&Arm64::new(Granule::Kib16, 48).unwrap());
        self.check(&Arm64::wide(Granule::Kib64, 52).unwrap());
    }
}

struct Freed;

impl Check for Freed {
    fn check<F: Format>(&self, format: &F) {
        let arena = Arena::new(format);
        let tables = arena.tables(format);
        let step = 1 << format.geometry().order(Level::PAGE);
        // One in the same table as the first, and one in the next table.
        for next in [step, 1 << format.geometry().order(Level::ONE)] {
            let (mut path, mut log) = (Path::NEW, Log::new());
            [0, next].iter().for_each(|gfn| put(tables, *gfn));
            assert_eq!(take(tables, &mut path, 0).0, Ok(()));

            // The tables of both go, and so do those above them. The arena panics if one is
            // looked at now.
            let rest = Rest::new(Run::new(Gfn::new(0), Gfn::new(next + step - 1)).unwrap());
            let budget = &mut Budget::UNLIMITED.clone();
            clear(tables, rest, budget, Emptied::Free, &mut log).unwrap();
            log.flush(&arena, 8, 8);
            assert_eq!(take(tables, &mut path, next).0, Err(PageError::Absent));

            // There is another one in its place.
            put(tables, next);
            assert_eq!(take(tables, &mut path, next).0, Ok(()));
        }
        arena.check(format, 0);
    }
}

#[test]
fn a_way_through_a_table_that_was_freed_is_not_used_again() {
    Freed.every_format();
}

struct Scattered;

impl Check for Scattered {
    fn check<F: Format>(&self, format: &F) {
        let arena = Arena::new(format);
        let tables = arena.tables(format);
        let geometry = format.geometry();
        let step = 1 << geometry.order(Level::PAGE);
        // Neighbours, others in the same table, and pages that share tables of every level.
        let mut pages = vec![0, step, 7 * step, geometry.space().last().get() + 1 - step];
        let mut level = Level::PAGE;
        while let Some(above) = level.above().filter(|above| *above <= geometry.top()) {
            let span = 1 << geometry.order(above);
            pages.extend([span, span + step, 2 * span - step]);
            level = above;
        }
        pages.sort_unstable();
        pages.dedup();

        pages.iter().for_each(|gfn| put(tables, *gfn));
        let mut path = Path::NEW;
        let mut take_and_put_back = |gfn: u64| {
            let (result, cover) = take(tables, &mut path, gfn);
            assert_eq!((result, cover.pages()), (Ok(()), step), "{gfn:#x}");
            let gone: Vec<_> = pages.iter().filter(|page| !shows(tables, **page)).collect();
            assert_eq!(gone, [&gfn]);
            let (result, cover) = take(tables, &mut path, gfn);
            assert_eq!((result, cover.is_nothing()), (Err(PageError::Absent), true), "{gfn:#x}");
            put(tables, gfn);
        };
        // From each page to each other one.
        for from in &pages {
            for to in &pages {
                take_and_put_back(*from);
                take_and_put_back(*to);
            }
        }
        arena.check(format, 0);
    }
}

#[test]
fn along_a_path_each_page_is_found_and_no_other() {
    Scattered.every_format();
}

struct Mixed;

impl Check for Mixed {
    fn check<F: Format>(&self, format: &F) {
        let geometry = format.geometry();
        let order = |level| geometry.order(level);
        let (page, table) = (1 << order(Level::PAGE), 1_u64 << order(Level::ONE));
        let two = Level::ONE.above().filter(|two| *two <= geometry.top());
        let above = two.map_or(table, |two| 1 << order(two));
        let mut state = 0x9e37_79b9_7f4a_7c15_u64;
        let mut next = move |below: u64| {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            state % below
        };
        let arena = Arena::new(format);
        let tables = arena.tables(format);
        let (mut path, mut cleared) = (Path::NEW, [0; 2]);
        // Pages in few tables, some of which have the same place in the path.
        let somewhere = |next: &mut dyn FnMut(u64) -> u64| {
            next(2) * 8 * above + next(2) * above + next(3) * table + next(4) * page
        };
        for _ in 0..600 {
            let gfn = somewhere(&mut next);
            let large = Gfn::new(gfn - gfn % table);
            let mut log = Log::new();
            match next(8) {
                0 => {
                    let span = [page, table, above][next(3) as usize];
                    let first = gfn - gfn % span;
                    let run = Run::new(Gfn::new(first), Gfn::new(first + span - 1)).unwrap();
                    let budget = &mut Budget::UNLIMITED.clone();
                    drop(clear(tables, Rest::new(run), budget, Emptied::Free, &mut log));
                }
                1 => {
                    let leaf = Leaf { mfn: Mfn::new(large.get()), ..LEAF };
                    map(tables, large, Level::ONE, leaf, Over::Vacant, &mut log).ok();
                }
                2 => drop(split(tables, Gfn::new(gfn), Level::PAGE, &mut log)),
                _ => {
                    let at = Gfn::new(gfn);
                    map(tables, at, Level::PAGE, LEAF, Over::Vacant, &mut log).ok();
                }
            }
            log.flush(&arena, usize::MAX, usize::MAX);
            let mut batch = Batch::<(), 1>::new(DomainId::new(1));
            batch.edit_many(|skipped, _| {
                let mut near = Near::new(tables, &mut path);
                let likely = Likely::new(format, LEAF);
                for _ in 0..next(6) {
                    let gfn = Gfn::new(somewhere(&mut next));
                    let found = lookup(tables, gfn).unwrap();
                    let there = found.leaf_at(gfn).is_some_and(|(leaf, _)| leaf.mfn == FRAME);
                    let there = there && found.level == Level::PAGE;
                    let same = |leaf: &Leaf| leaf.mfn == FRAME;
                    let result = near.clear::<Iotlb>(gfn, FRAME, skipped, &likely, same);
                    assert_eq!(result.is_ok(), there, "{gfn:?}");
                    assert!(!there || !shows(tables, gfn.get()));
                    cleared[usize::from(there)] += 1;
                }
            });
            assert!(batch.flush(&HARDWARE).is_ok());
        }
        assert!(cleared.iter().all(|count| *count > 100), "{cleared:?}");
    }
}

/// The arena panics if a table is looked at that is gone.
#[test]
fn several_pages_under_one_lock_are_found_whatever_was_done_to_the_tree_before() {
    Mixed.every_format();
}

#[test]
fn pages_of_one_table_are_read_once_each() {
    let format = Ept::new(EptLevels::Four);
    let arena = Arena::new(&format);
    let tables = arena.tables(&format);
    (0..32).for_each(|gfn| put(tables, gfn));
    let mut path = Path::NEW;
    for (place, gfn) in (0..32).rev().enumerate() {
        arena.reads.set(0);
        assert_eq!(take(tables, &mut path, gfn).0, Ok(()));
        assert_eq!(arena.reads.get(), if place == 0 { 4 } else { 1 }, "{gfn}");
    }
}

/// Eight tables one level up are kept, each in the place that its block has.
#[test]
fn pages_of_several_tables_are_found_from_the_tables_above() {
    const GIB: u64 = 1 << 18;
    let format = Ept::new(EptLevels::Four);
    let arena = Arena::new(&format);
    let tables = arena.tables(&format);
    let pages = |round: u64| (0..9).map(move |block| block * GIB + round * 512);
    (0..3).flat_map(pages).for_each(|gfn| put(tables, gfn));
    let mut path = Path::NEW;
    for round in 0..3 {
        for (block, gfn) in pages(round).enumerate() {
            arena.reads.set(0);
            assert_eq!(take(tables, &mut path, gfn).0, Ok(()));
            // The ninth has the place of the first.
            let known = round > 0 && block % 8 != 0;
            assert_eq!(arena.reads.get(), if known { 2 } else { 4 }, "{gfn:#x}");
        }
    }
}

#[test]
fn one_path_used_with_two_trees_leads_into_neither_from_the_other() {
    let format = Vtd::new(VtdLevels::Four);
    let arena = Arena::new(&format);
    let first = arena.tables(&format);
    let second = Tables { root: arena.link(arena.allocate().unwrap()), ..first };
    [first, second].iter().for_each(|tables| (5..7).for_each(|gfn| put(*tables, gfn)));
    let mut path = Path::NEW;
    assert_eq!(take(first, &mut path, 5).0, Ok(()));
    assert_eq!(take(second, &mut path, 6).0, Ok(()));
    assert_eq!([shows(first, 6), shows(second, 6)], [true, false]);
}

#[test]
fn a_page_that_is_not_the_likely_one_is_looked_at_like_any_other() {
    let format = Ept::new(EptLevels::Four);
    let arena = Arena::new(&format);
    let tables = arena.tables(&format);
    let (mut path, mut log) = (Path::NEW, Log::new());
    // Hardware marked it; its rights are lower; it came from a larger leaf.
    put(tables, 1);
    arena.marks.borrow_mut().push(1 << 9);
    assert_eq!(take(tables, &mut path, 1).0, Ok(()));

    let read_only = Leaf { access: Access::READ, ..LEAF };
    map(tables, Gfn::new(2), Level::PAGE, read_only, Over::Vacant, &mut log).unwrap();
    assert_eq!(take(tables, &mut path, 2).0, Ok(()));

    map(
        tables,
        Gfn::new(512),
        Level::ONE,
        Leaf { mfn: Mfn::new(512), ..LEAF },
        Over::Vacant,
        &mut log,
    )
    .unwrap();
    split(tables, Gfn::new(600), Level::PAGE, &mut log).unwrap();
    let mut batch = Batch::<(), 1>::new(DomainId::new(1));
    let taken = batch.edit_many(|skipped, _| {
        let (at, likely) = (Gfn::new(600), Leaf { mfn: Mfn::new(600), ..LEAF });
        clear_page_near::<Iotlb, _, _>(tables, &mut path, at, skipped, likely, |_| true).map(|_| ())
    });
    assert_eq!((taken, batch.iotlb().order()), (Ok(()), 9), "as large as the leaf it came from");
    assert!(batch.flush(&HARDWARE).is_ok());

    put(tables, 3);
    let other = Leaf::new(Mfn::new(4), Access::READ_WRITE);
    let mut batch = Batch::<(), 1>::new(DomainId::new(1));
    let refused = batch.edit_many(|skipped, _| {
        let at = Gfn::new(3);
        clear_page_near::<Iotlb, _, _>(tables, &mut path, at, skipped, other, |_| false).map(|_| ())
    });
    assert_eq!(refused, Err(PageError::Unexpected(LEAF)));
    assert!(batch.is_idle());
}

#[test]
fn a_way_that_ended_early_is_not_taken_for_the_way_to_the_page_before() {
    const GIB: u64 = 1 << 18;
    let format = Ept::new(EptLevels::Four);
    let arena = Arena::new(&format);
    let tables = arena.tables(&format);
    let mut path = Path::NEW;
    [0, GIB, 512 * GIB + GIB].iter().for_each(|gfn| put(tables, *gfn));
    assert_eq!(take(tables, &mut path, 0).0, Ok(()));
    // Below the other root entry there is a table, but not for this one.
    assert_eq!(take(tables, &mut path, 512 * GIB + 2 * GIB).0, Err(PageError::Absent));
    assert_eq!(take(tables, &mut path, GIB).0, Ok(()));
    assert_eq!([shows(tables, GIB), shows(tables, 512 * GIB + GIB)], [false, true]);
}
