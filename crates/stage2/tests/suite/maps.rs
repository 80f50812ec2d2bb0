//! Installing leaves: what is refused, and what a replacement records.

use flush::{Gfn, Mfn, Run};
use stage2::{
    Access, Budget, Emptied, Entry, Leaf, Level, MapError, MapStopped, Over, Rest, Tables,
    Unencodable, clear, lookup, map, map_run,
};

use crate::arena::{Arena, view};
use crate::log::Log;
use crate::plain::{ACCESSED, DIRTY, Plain};

fn run(first: u64, last: u64) -> Run {
    Run::new(Gfn::new(first), Gfn::new(last)).unwrap()
}

fn leaf(mfn: u64) -> Leaf {
    Leaf::new(Mfn::new(mfn), Access::READ_WRITE)
}

fn put(
    tables: Tables<'_, Plain, Arena>,
    gfn: u64,
    level: Level,
    leaf: Leaf,
    over: Over,
    log: &mut Log,
) -> Result<Option<Leaf>, MapError> {
    map(tables, Gfn::new(gfn), level, leaf, over, log)
}

#[test]
fn a_first_leaf_is_added_and_its_tables_are_linked() {
    let format = Plain::small();
    let arena = Arena::new(&format);
    let tables = arena.tables(&format);
    let mut log = Log::new();
    assert_eq!(put(tables, 5, Level::PAGE, leaf(7), Over::Vacant, &mut log), Ok(None));
    assert_eq!((&log.added[..], &log.linked[..]), (&[run(5, 5)][..], &[run(5, 5)][..]));
    assert_eq!(put(tables, 6, Level::PAGE, leaf(8), Over::Vacant, &mut log), Ok(None));
    assert_eq!((log.added.len(), log.linked.len()), (2, 1));
    assert!(!log.asks_for_flush());
    assert_eq!(arena.linked(), 4);
    arena.check(&format, 0);
}

#[test]
fn a_lack_of_pages_at_any_step_changes_nothing() {
    let format = Plain::small();
    for allowance in 0..3 {
        let arena = Arena::new(&format);
        let tables = arena.tables(&format);
        arena.allowance.set(allowance);
        let mut log = Log::new();
        let result = put(tables, 5, Level::PAGE, leaf(7), Over::Vacant, &mut log);
        assert_eq!(result, Err(MapError::NoTable));
        assert_eq!((log.added.len(), log.linked.len(), arena.linked()), (0, 0, 1));
        arena.check(&format, 0);
    }
}

#[test]
fn what_is_mapped_is_not_overwritten_unless_it_is_expected() {
    let format = Plain::small();
    let arena = Arena::new(&format);
    let tables = arena.tables(&format);
    let mut log = Log::new();
    put(tables, 5, Level::PAGE, leaf(7), Over::Vacant, &mut log).unwrap();
    put(tables, 16, Level::TWO, leaf(0x40), Over::Vacant, &mut log).unwrap();
    let before = view(tables);
    let refused = |gfn, level, over| {
        let mut log = Log::new();
        let error = put(tables, gfn, level, leaf(0x80), over, &mut log).unwrap_err();
        assert!(log.added.is_empty() && !log.asks_for_flush());
        error
    };
    let occupied = |error| matches!(error, MapError::Occupied(_));
    let unexpected = |error| matches!(error, MapError::Unexpected(_));
    assert!(occupied(refused(5, Level::PAGE, Over::Vacant))); // a leaf
    assert!(occupied(refused(4, Level::ONE, Over::Vacant))); // a table in use
    assert!(occupied(refused(20, Level::PAGE, Over::Vacant))); // below a large leaf
    assert!(unexpected(refused(5, Level::PAGE, Over::Expected(leaf(8)))));
    let other_rights = Leaf { access: Access::READ, ..leaf(7) };
    assert!(unexpected(refused(5, Level::PAGE, Over::Expected(other_rights))));
    assert!(unexpected(refused(6, Level::PAGE, Over::Expected(leaf(7))))); // nothing there
    assert!(unexpected(refused(4, Level::ONE, Over::Expected(leaf(7))))); // a table
    assert!(unexpected(refused(16, Level::PAGE, Over::Expected(leaf(0x40))))); // larger
    assert!(unexpected(refused(99, Level::PAGE, Over::Expected(leaf(7))))); // no table
    assert_eq!(refused(6, Level::ONE, Over::Vacant), MapError::Unaligned);
    assert_eq!(refused(256, Level::PAGE, Over::Vacant), MapError::OutOfRange);
    assert_eq!(refused(u64::MAX, Level::PAGE, Over::Vacant), MapError::OutOfRange);
    let too_high = Level::new(4).unwrap();
    assert_eq!(refused(0, too_high, Over::Vacant), MapError::OutOfRange);
    let no_such_leaf = MapError::Unencodable(Unencodable::Level);
    assert_eq!(refused(64, Level::new(3).unwrap(), Over::Vacant), no_such_leaf);
    assert_eq!(view(tables), before);

    let mut log = Log::new();
    // Hardware marks the entry between the read and the exchange.
    arena.marks.borrow_mut().extend([DIRTY, ACCESSED]);
    let old = put(tables, 5, Level::PAGE, leaf(9), Over::Expected(leaf(7)), &mut log);
    let marked = Leaf { accessed: true, dirty: true, ..leaf(7) };
    assert_eq!(old, Ok(Some(marked)));
    assert_eq!(log.changed, [(run(5, 5), 0, marked)]);
    assert!(log.added.is_empty());
    assert_eq!(view(tables)[5], Some((9, 3)));
    arena.check(&format, 0);
}

/// Symptom: after small leaves were unmapped and a large one mapped over them, a device
/// found nothing. Cause: the empty table was overwritten with no flush of what had
/// cached the pointer at it. Cure: the table goes on record with its span.
#[test]
fn a_large_leaf_over_an_empty_table_puts_the_table_on_record() {
    for (level, gfn, mfn) in [(Level::ONE, 4, 0x40), (Level::TWO, 16, 0x40)] {
        let format = Plain::small();
        let arena = Arena::new(&format);
        let tables = arena.tables(&format);
        let mut log = Log::new();
        let size = 1 << format.geometry.order(level);
        let all = Rest::new(run(gfn, gfn + size - 1));
        let below = level.below().unwrap();
        put(tables, gfn, below, leaf(0x80), Over::Vacant, &mut log).unwrap();
        clear(tables, all, &mut Budget::UNLIMITED.clone(), Emptied::Keep, &mut log).unwrap();

        let mut log = Log::with_room(0, 0);
        let full = put(tables, gfn, level, leaf(mfn), Over::Vacant, &mut log);
        assert_eq!(full, Err(MapError::Full));
        assert!(view(tables).iter().all(Option::is_none));
        arena.check(&format, 0);

        // Hardware marks the pointer while it is replaced.
        arena.marks.borrow_mut().push(ACCESSED);
        let mut log = Log::with_room(0, 1);
        assert_eq!(put(tables, gfn, level, leaf(mfn), Over::Vacant, &mut log), Ok(None));
        assert_eq!(log.tables[0].0, all.run());
        arena.check(&format, 1);
        log.flush(&arena, 0, 0);
        assert_eq!(view(tables)[gfn as usize], Some((mfn, 3)));
    }
}

#[test]
fn an_inert_entry_counts_as_vacant_at_its_own_level_only() {
    let format = Plain::small();
    let arena = Arena::new(&format);
    let tables = arena.tables(&format);
    let mut log = Log::new();
    put(tables, 0, Level::TWO, leaf(0x40), Over::Vacant, &mut log).unwrap();
    let Entry::Table(table) = stage2_entry(&arena, &format, tables.root, 0) else {
        panic!("the root points at a table")
    };
    arena.poke(table, 1, 0x1230);
    let error = put(tables, 17, Level::PAGE, leaf(7), Over::Vacant, &mut log);
    assert!(matches!(error, Err(MapError::Occupied(found)) if found.entry == Entry::Inert));
    put(tables, 16, Level::TWO, leaf(0x50), Over::Vacant, &mut log).unwrap();
    assert_eq!(view(tables)[17], Some((0x51, 3)));
    arena.check(&format, 0);
}

fn stage2_entry(arena: &Arena, format: &Plain, table: Mfn, index: usize) -> Entry {
    use stage2::{Format, TableMemory};
    format.decode(format.geometry.top(), arena.read(table, index))
}

#[test]
fn with_break_before_make_a_replacement_waits_for_the_flush() {
    let format = Plain::small().breaking();
    let arena = Arena::new(&format);
    let tables = arena.tables(&format);
    let mut log = Log::new();
    put(tables, 4, Level::PAGE, leaf(7), Over::Vacant, &mut log).unwrap();
    let waits = put(tables, 4, Level::PAGE, leaf(9), Over::Expected(leaf(7)), &mut log);
    assert_eq!(waits, Err(MapError::FlushFirst));
    assert_eq!(log.changed.len(), 1);
    assert_eq!(view(tables)[4], None);
    arena.check(&format, 0);
    // The table is empty now: a large leaf over it waits as well.
    let waits = put(tables, 4, Level::ONE, leaf(0x40), Over::Vacant, &mut log);
    assert_eq!(waits, Err(MapError::FlushFirst));
    assert_eq!(log.tables.len(), 1);
    arena.check(&format, 1);
    log.flush(&arena, 9, 9);
    put(tables, 4, Level::ONE, leaf(0x40), Over::Vacant, &mut log).unwrap();
    assert_eq!(view(tables)[7], Some((0x43, 3)));
    arena.check(&format, 0);
}

#[track_caller]
fn check_run(gfn: (u64, u64), mfn: u64, largest: Level, levels: &[u8]) {
    let format = Plain::small();
    let arena = Arena::new(&format);
    let tables = arena.tables(&format);
    let mut log = Log::new();
    let rest = Rest::new(run(gfn.0, gfn.1));
    map_run(tables, rest, leaf(mfn), largest, &mut Budget::UNLIMITED.clone(), &mut log).unwrap();
    let view = view(tables);
    for frame in 0..256 {
        let inside = (gfn.0..=gfn.1).contains(&frame);
        let want = inside.then(|| (mfn + frame.wrapping_sub(gfn.0), 3));
        assert_eq!(view[frame as usize], want, "frame {frame}");
    }
    let (mut found, mut at) = (Vec::new(), gfn.0);
    while at <= gfn.1 {
        let leaf = lookup(tables, Gfn::new(at)).unwrap();
        found.push(leaf.level.get());
        at = leaf.run.last().get() + 1;
    }
    assert_eq!(found, levels);
    assert_eq!(log.added.iter().map(|run| run.pages()).sum::<u64>(), gfn.1 - gfn.0 + 1);
    arena.check(&format, 0);
    // The same in steps of one leaf.
    let other = Arena::new(&format);
    let (mut rest, mut first) = (rest, mfn);
    loop {
        let start = rest.run().first().get();
        let mut budget = Budget::new(1);
        let step = map_run(
            other.tables(&format),
            rest,
            leaf(first),
            largest,
            &mut budget,
            &mut Log::new(),
        );
        match step {
            Ok(()) => break,
            Err(stopped) => {
                assert_eq!(stopped.error, MapError::Budget);
                first += stopped.rest.run().first().get() - start;
                rest = stopped.rest;
            }
        }
    }
    assert_eq!(crate::arena::view(other.tables(&format)), view);
}

#[test]
fn a_run_is_mapped_in_the_largest_leaves_that_fit() {
    check_run((0, 15), 0x40, Level::TWO, &[2]);
    check_run((0, 15), 0x44, Level::TWO, &[1, 1, 1, 1]);
    check_run((0, 7), 0x41, Level::TWO, &[0; 8]);
    check_run((3, 20), 0x43, Level::TWO, &[0, 1, 1, 1, 1, 0]);
    check_run((15, 33), 0x4f, Level::TWO, &[0, 2, 0, 0]);
    check_run((0, 63), 0x40, Level::new(3).unwrap(), &[2; 4]); // no such leaf
    check_run((0, 31), 0x40, Level::ONE, &[1; 8]);
    check_run((240, 255), 0x40, Level::TWO, &[2]);
    check_run((255, 255), 0x40, Level::TWO, &[0]);
}

#[test]
fn a_run_that_does_not_fit_is_refused_whole() {
    let check = |format: Plain, over, error| {
        let arena = Arena::new(&format);
        let (rest, mut log) = (Rest::new(over), Log::new());
        let mut budget = Budget::UNLIMITED;
        let tables = arena.tables(&format);
        let result = map_run(tables, rest, leaf(0), Level::TWO, &mut budget, &mut log);
        assert_eq!(result, Err(MapStopped { rest, error }));
        assert!(log.added.is_empty());
    };
    check(Plain::small(), run(250, 256), MapError::OutOfRange);
    check(Plain::small(), Run::ALL, MapError::OutOfRange);
    check(Plain::new(2, 2, 3, 2), run(1, 7), MapError::Unaligned);
    check(Plain::new(2, 2, 3, 2), run(0, 6), MapError::Unaligned);
}

#[test]
fn a_run_goes_around_tables_in_use_and_stops_at_what_is_mapped() {
    let format = Plain::small();
    let arena = Arena::new(&format);
    let tables = arena.tables(&format);
    let mut log = Log::new();
    put(tables, 22, Level::PAGE, leaf(9), Over::Vacant, &mut log).unwrap();
    let rest = Rest::new(run(16, 31));
    let mut budget = Budget::UNLIMITED;
    let stopped = map_run(tables, rest, leaf(0x40), Level::TWO, &mut budget, &mut log).unwrap_err();
    assert!(matches!(stopped.error, MapError::Occupied(found) if found.level == Level::PAGE));
    assert_eq!(stopped.rest.run(), run(22, 31));
    let view = view(tables);
    assert_eq!(
        view[16..24],
        [
            Some((0x40, 3)),
            Some((0x41, 3)),
            Some((0x42, 3)),
            Some((0x43, 3)),
            Some((0x44, 3)),
            Some((0x45, 3)),
            Some((9, 3)),
            None
        ]
    );
    assert_eq!(lookup(tables, Gfn::new(17)).unwrap().level, Level::ONE);
}
