//! How many entries a walk reads, and how many walks a chunked loop makes.

use flush::{Gfn, Mfn, Run};
use stage2::format::ept::{Ept, EptLevels};
use stage2::{Access, Budget, Emptied, Format, Leaf, Level, Over, Rest, Tables, clear, map};

use crate::arena::Arena;
use crate::log::Log;
use crate::plain::Plain;

fn put<F: Format>(tables: Tables<'_, F, Arena>, gfn: u64) {
    let leaf = Leaf::new(Mfn::new(gfn), Access::READ_WRITE);
    map(tables, Gfn::new(gfn), Level::PAGE, leaf, Over::Vacant, &mut Log::new()).unwrap();
}

/// Clears the whole space in chunks of 2^`chunk` frames, each a walk of its own that
/// may reach beyond its chunk, and returns the number of walks.
fn chunked<F: Format>(
    tables: Tables<'_, F, Arena>,
    chunk: u8,
    emptied: Emptied,
    log: &mut Log,
) -> u64 {
    let space = tables.format.geometry().space();
    let (mut at, mut walks) = (space.first(), 0);
    loop {
        let run = Run::new(at, Run::block(at, chunk).last()).unwrap();
        let tally =
            clear(tables, Rest::new(run), &mut Budget::UNLIMITED.clone(), emptied, log).unwrap();
        walks += 1;
        assert!(tally.reached >= run.last(), "a walk that succeeds makes progress");
        if tally.reached >= space.last() {
            return walks;
        }
        at = Gfn::new(tally.reached.get() + 1);
    }
}

#[track_caller]
fn check_chunked<F: Format>(format: F, chunk: u8, pages: &[u64], emptied: Emptied, walks: u64) {
    let arena = Arena::new(&format);
    for page in pages {
        put(arena.tables(&format), *page);
    }
    let mut log = Log::new();
    assert_eq!(chunked(arena.tables(&format), chunk, emptied, &mut log), walks);
    assert_eq!(log.removed.len(), pages.len());
}

const GIB: u8 = 18;
const TWO_MIB: u8 = 9;

#[test]
fn an_empty_space_costs_one_walk_per_root_entry_or_chunk() {
    let check = |shape: (u8, u8, u8, u8), chunk, walks| {
        let format = Plain::new(shape.0, shape.1, shape.2, shape.3);
        check_chunked(format, chunk, &[], Emptied::Free, walks);
    };
    check((0, 9, 3, 10), GIB, 1024); // 4K granule, 40 bits
    check((0, 9, 3, 13), GIB, 8192); // 43
    check((0, 9, 4, 5), GIB, 32); // 44
    check((0, 9, 4, 9), GIB, 512); // 48
    check((0, 9, 4, 13), GIB, 8192); // 52
    check((2, 11, 3, 12), 13, 4096); // 16K granule, 48 bits
    check((2, 11, 4, 5), 13, 32); // 52
    check((4, 13, 2, 17), 17, 131_072); // 64K granule, 46 bits
    check((4, 13, 3, 6), 17, 64); // 48
    check((4, 13, 3, 10), 17, 1024); // 52
    check_chunked(Ept::new(EptLevels::Four), TWO_MIB, &[], Emptied::Free, 512);
    check_chunked(Ept::new(EptLevels::Five), TWO_MIB, &[], Emptied::Free, 512);
}

#[test]
fn one_page_costs_the_walks_below_its_root_entry() {
    let (four, five) = (Ept::new(EptLevels::Four), Ept::new(EptLevels::Five));
    let free = Emptied::Free;
    check_chunked(four, GIB, &[0], free, 513);
    check_chunked(four, TWO_MIB, &[0], free, 513);
    check_chunked(four, GIB, &[21 << 18], free, 534);
    check_chunked(four, GIB, &[33 << 18], free, 546);
    check_chunked(four, GIB, &[34 << 18], free, 547);
    check_chunked(four, GIB, &[510 << 18], free, 1023);
    check_chunked(four, GIB, &[511 << 18], free, 1023);
    check_chunked(Plain::new(2, 11, 4, 5), 13, &[0], free, 33);
    check_chunked(four, GIB, &[0], Emptied::Keep, 1023);
    check_chunked(four, TWO_MIB, &[0], Emptied::Keep, 1534);
    check_chunked(five, GIB, &[0], Emptied::Keep, 1534);
    check_chunked(five, TWO_MIB, &[0], Emptied::Keep, 2045);
}

#[track_caller]
fn check_reads<F: Format>(format: F, pages: impl Iterator<Item = u64>, reads: u64) {
    let arena = Arena::new(&format);
    let tables = arena.tables(&format);
    for page in pages {
        put(tables, page);
    }
    arena.reads.set(0);
    let space = Rest::new(format.geometry().space());
    let mut budget = Budget::new(1_000_000);
    let mut log = Log::new();
    let tally = clear(tables, space, &mut budget, Emptied::Free, &mut log).unwrap();
    assert_eq!((tally.reads, arena.reads.get()), (reads, reads));
    let free = 1_000_000 - budget.left();
    assert!(free <= reads && reads - free < u64::from(format.geometry().levels()));
    assert_eq!(tally.tables, log.tables.len() as u64);
    log.flush(&arena, 0, 0);
    arena.check(&format, 0);
    assert_eq!(arena.linked(), 1);
}

#[test]
fn a_walk_reads_every_entry_of_every_table_once() {
    let four = Ept::new(EptLevels::Four);
    check_reads(four, std::iter::empty(), 512);
    check_reads(four, std::iter::once(0), 512 * 4);
    // One page in the last GiB of every root entry.
    check_reads(four, (0..512).map(|entry| entry << 27 | 511 << 18), 512 + 512 * 3 * 512);
}
