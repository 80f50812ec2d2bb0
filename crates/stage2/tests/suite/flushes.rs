//! Which edits ask for a flush: those after which a cache may hold something gone.

use std::cell::Cell;
use std::convert::Infallible;

use flush::{Batch, Cover, Depth, DomainId, Flush, Gfn, Hardware, Kind, Mfn, Run, Tlb};
use stage2::format::arm64::{Arm64, Granule};
use stage2::format::ept::{Ept, EptLevels};
use stage2::format::npt::{Npt, NptLevels};
use stage2::format::vtd::{Vtd, VtdLevels};
use stage2::{
    Access, Budget, Chunk, Emptied, Format, Leaf, Level, MapError, Over, Pace, Recorder, Rest,
    Tables, Unheld, chunked, clear, map, protect,
};

use crate::arena::Arena;

/// CPUs that count how often they are told to forget, and how deep.
#[derive(Default)]
struct Cpus {
    flushes: Cell<u32>,
    depth: Cell<Option<Depth>>,
}

impl<K: Kind> Flush<K> for Cpus {
    type InFlight = ();
    type Error = Infallible;

    fn start(&self, _: DomainId, cover: &Cover) {
        self.flushes.set(self.flushes.get() + 1);
        self.depth.set(Some(cover.depth()));
    }

    fn wait(&self, (): ()) -> Result<(), Infallible> {
        Ok(())
    }
}

type Held = Batch<(), 1>;

/// Flushes what the batch owes, gives its tables back, and returns the flushes it took.
fn settle(batch: &mut Held, arena: &Arena) -> (u32, Option<Depth>) {
    let cpus = Cpus::default();
    let mut flushed = batch.flush(&Hardware { tlb: &cpus, iotlb: &cpus }).unwrap();
    while let Some(page) = flushed.next_table() {
        arena.recycle(page);
    }
    (cpus.flushes.get(), cpus.depth.get())
}

/// Makes one edit with a batch of its own; returns the flushes it asked for.
fn edit<R>(
    arena: &Arena,
    change: impl for<'r, 'id> FnOnce(&mut Recorder<'r, 'id, Tlb>) -> R,
) -> (R, u32, Option<Depth>) {
    let mut batch = Held::new(DomainId::new(1));
    let result =
        batch.edit_many(|skipped, _| change(&mut Recorder::<Tlb, _>::new(skipped, Unheld)));
    let (flushes, depth) = settle(&mut batch, arena);
    (result, flushes, depth)
}

fn put<F: Format>(tables: Tables<'_, F, Arena>, arena: &Arena, gfn: u64, level: Level) -> Leaf {
    let leaf = Leaf::new(Mfn::new(gfn), Access::READ_WRITE);
    let (result, flushes, _) =
        edit(arena, |record| map(tables, Gfn::new(gfn), level, leaf, Over::Vacant, record));
    // No CPU holds that something is absent.
    assert_eq!((result, flushes), (Ok(None), 0));
    leaf
}

fn wipe<F: Format>(
    tables: Tables<'_, F, Arena>,
    arena: &Arena,
    run: Run,
    emptied: Emptied,
) -> (u64, u32, Option<Depth>) {
    let (tally, flushes, depth) = edit(arena, |record| {
        clear(tables, Rest::new(run), &mut Budget::UNLIMITED.clone(), emptied, record)
    });
    (tally.unwrap().leaves, flushes, depth)
}

/// Runs one promise over every format.
macro_rules! over_every_format {
    ($check:ident) => {
        $check(Ept::new(EptLevels::Four));
        $check(Ept::new(EptLevels::Five));
        $check(Npt::new(NptLevels::Four));
        $check(Vtd::new(VtdLevels::Three));
        $check(Arm64::new(Granule::Kib4, 40).unwrap());
        $check(Arm64::new(Granule::Kib4, 48).unwrap());
        $check(Arm64::wide(Granule::Kib16, 52).unwrap());
        $check(Arm64::new(Granule::Kib64, 48).unwrap());
    };
}

#[track_caller]
fn check_empty<F: Format>(format: F) {
    let arena = Arena::new(&format);
    let tables = arena.tables(&format);
    let geometry = format.geometry();
    let unit = 1 << geometry.page_order();
    for emptied in [Emptied::Keep, Emptied::Free] {
        assert_eq!(wipe(tables, &arena, geometry.space(), emptied), (0, 0, None));
    }
    // Beside a mapped page, in the same table.
    put(tables, &arena, 0, Level::PAGE);
    let beside = Run::new(Gfn::new(unit), geometry.space().last()).unwrap();
    assert_eq!(wipe(tables, &arena, beside, Emptied::Free), (0, 0, None));
    // In a table that a clear left empty: no flush while it stays.
    let page = geometry.span(Level::PAGE, Gfn::new(0));
    assert_eq!(wipe(tables, &arena, page, Emptied::Keep), (1, 1, Some(Depth::Leaves)));
    assert_eq!(wipe(tables, &arena, geometry.space(), Emptied::Keep), (0, 0, None));
    // A table that goes does ask, for walk caches too.
    assert_eq!(wipe(tables, &arena, page, Emptied::Free), (0, 1, Some(Depth::Tables)));
    assert_eq!(wipe(tables, &arena, geometry.space(), Emptied::Free), (0, 0, None));
}

#[test]
fn an_empty_range_asks_for_no_flush() {
    over_every_format!(check_empty);
}

#[track_caller]
fn check_notes<F: Format>(format: F, note: u64) {
    let arena = Arena::new(&format);
    let tables = arena.tables(&format);
    let geometry = format.geometry();
    arena.poke(tables.root, 3, note);
    let (leaves, flushes, _) = wipe(tables, &arena, geometry.space(), Emptied::Free);
    assert_eq!((leaves, flushes, arena.linked_words()), (0, 0, 0));
}

#[test]
fn notes_that_hardware_does_not_cache_ask_for_no_flush() {
    check_notes(Ept::new(EptLevels::Four), 0x1230);
    check_notes(Npt::new(NptLevels::Four), 0x1230);
    check_notes(Vtd::new(VtdLevels::Three), 0x1230);
    check_notes(Arm64::new(Granule::Kib4, 48).unwrap(), 0x1230);
    check_notes(Arm64::wide(Granule::Kib16, 52).unwrap(), 0x1230);
}

#[track_caller]
fn check_rights<F: Format>(format: F) {
    let arena = Arena::new(&format);
    let tables = arena.tables(&format);
    put(tables, &arena, 0, Level::PAGE);
    let all = Rest::new(format.geometry().space());
    let give = |rights| {
        let (tally, flushes, depth) = edit(&arena, |record| {
            protect(tables, all, &mut Budget::UNLIMITED.clone(), record, |_| rights)
        });
        (tally.unwrap().leaves, flushes, depth)
    };
    assert_eq!(give(Access::READ_WRITE), (0, 0, None)); // as it was
    assert_eq!(give(Access::READ), (1, 1, Some(Depth::Leaves)));
    assert_eq!(give(Access::READ), (0, 0, None));
    assert_eq!(give(Access::READ_WRITE), (1, 1, Some(Depth::Leaves))); // raised: as well
}

#[test]
fn changed_rights_ask_for_a_flush_and_unchanged_ones_do_not() {
    over_every_format!(check_rights);
}

#[track_caller]
fn check_frames<F: Format>(format: F) {
    let arena = Arena::new(&format);
    let tables = arena.tables(&format);
    let old = put(tables, &arena, 0, Level::PAGE);
    let new = Leaf { mfn: Mfn::new(0x100), ..old };
    let change =
        |over| edit(&arena, |record| map(tables, Gfn::new(0), Level::PAGE, new, over, record));
    let (result, flushes, depth) = change(Over::Expected(old));
    assert_eq!((flushes, depth), (1, Some(Depth::Leaves)));
    if format.break_before_make() {
        assert_eq!(result, Err(MapError::FlushFirst));
        assert_eq!(change(Over::Vacant), (Ok(None), 0, None));
    } else {
        assert!(result.unwrap().unwrap().same_mapping(&old));
    }
    // What was not the expected leaf is not changed and asks for nothing.
    let (result, flushes, _) = change(Over::Expected(old));
    assert!(matches!(result, Err(MapError::Unexpected(_))) && flushes == 0);
}

#[test]
fn a_changed_frame_asks_for_a_flush() {
    over_every_format!(check_frames);
}

#[track_caller]
fn check_chunks<F: Format>(format: F, pages: &[u64], pace: Pace, flushes: u32) {
    let arena = Arena::new(&format);
    let tables = arena.tables(&format);
    for page in pages {
        put(tables, &arena, *page, Level::PAGE);
    }
    let mut count = 0;
    let walk = |count: &mut u32, rest| {
        let (tally, flushes, _) = edit(&arena, |record| {
            clear(tables, rest, &mut Budget::UNLIMITED.clone(), Emptied::Keep, record)
        });
        *count += flushes;
        tally.map(|tally| tally.reached)
    };
    let go_on = |_: &mut u32, _| std::ops::ControlFlow::Continue(());
    let geometry = format.geometry();
    let (space, chunk) = (Rest::new(geometry.space()), Chunk::usual(geometry));
    chunked(space, chunk, pace, &mut count, walk, go_on).unwrap();
    assert_eq!(count, flushes);
}

#[test]
fn a_loop_flushes_once_for_each_chunk_in_which_something_was_mapped() {
    let four = Arm64::new(Granule::Kib4, 40).unwrap();
    for pace in [Pace::Resume, Pace::EveryChunk] {
        check_chunks(four, &[], pace, 0);
        check_chunks(four, &[0, 1, 511, 512], pace, 1);
        check_chunks(four, &[0, 1 << 18, 3 << 18, (3 << 18) + 9], pace, 3);
        check_chunks(Ept::new(EptLevels::Four), &[5, (511 << 27) + 5], pace, 2);
    }
}
