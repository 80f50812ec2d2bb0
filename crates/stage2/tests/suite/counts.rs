//! How many entries a walk reads, and how many walks a chunked loop makes.

use std::ops::ControlFlow;

use flush::{Gfn, Mfn, Run};
use stage2::format::arm64::{Arm64, Granule};
use stage2::format::ept::{Ept, EptLevels};
use stage2::{
    Access, Budget, Chunk, Emptied, Format, Leaf, Level, Over, Pace, Rest, Tables, chunked, clear,
    map,
};

use Granule::{Kib4, Kib16, Kib64};

use crate::arena::Arena;
use crate::log::Log;

fn put<F: Format>(tables: Tables<'_, F, Arena>, gfn: u64) {
    let leaf = Leaf::new(Mfn::new(gfn), Access::READ_WRITE);
    map(tables, Gfn::new(gfn), Level::PAGE, leaf, Over::Vacant, &mut Log::new()).unwrap();
}

/// Clears the whole space in chunks, stepping over what is empty, and returns the number
/// of walks.
fn in_chunks<F: Format>(
    tables: Tables<'_, F, Arena>,
    chunk: Chunk,
    emptied: Emptied,
    log: &mut Log,
) -> u64 {
    let walk = |log: &mut Log, rest| {
        clear(tables, rest, &mut Budget::UNLIMITED.clone(), emptied, log).map(|tally| tally.reached)
    };
    let pause = |_: &mut Log, _| ControlFlow::Continue(());
    let space = Rest::new(tables.format.geometry().space());
    chunked(space, chunk, Pace::Resume, log, walk, pause).unwrap()
}

#[track_caller]
fn check_chunked<F: Format>(format: F, chunk: Chunk, pages: &[u64], emptied: Emptied, walks: u64) {
    let arena = Arena::new(&format);
    for page in pages {
        put(arena.tables(&format), *page);
    }
    let mut log = Log::new();
    assert_eq!(in_chunks(arena.tables(&format), chunk, emptied, &mut log), walks);
    assert_eq!(log.removed.len(), pages.len());
}

const GIB: Chunk = Chunk::new(18);
const TWO_MIB: Chunk = Chunk::new(9);

#[test]
fn an_empty_space_costs_one_walk_per_root_entry_or_chunk() {
    let check = |granule, bits, walks| {
        let format = Arm64::wide(granule, bits).unwrap();
        let chunk = Chunk::usual(format.geometry());
        check_chunked(format, chunk, &[], Emptied::Free, walks);
        if let Some(narrow) = Arm64::new(granule, bits) {
            check_chunked(narrow, chunk, &[], Emptied::Free, walks);
        }
    };
    check(Kib4, 40, 1024);
    check(Kib4, 43, 8192);
    check(Kib4, 44, 32);
    check(Kib4, 48, 512);
    check(Kib4, 52, 8192);
    check(Kib16, 48, 4096);
    check(Kib16, 52, 32);
    check(Kib64, 46, 131_072);
    check(Kib64, 48, 64);
    check(Kib64, 52, 1024);
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
    check_chunked(Arm64::wide(Kib16, 52).unwrap(), Chunk::new(13), &[0], free, 33);
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

/// Reads of a walk over a range in which nothing is mapped.
#[track_caller]
fn check_empty_range(first: u64, last: u64, reads: u64) {
    let format = Ept::new(EptLevels::Four);
    let arena = Arena::new(&format);
    let tables = arena.tables(&format);
    [0, 600, 511 << 9 | 511, 3 << 18].iter().for_each(|page| put(tables, *page));
    arena.reads.set(0);
    let rest = Rest::new(Run::new(Gfn::new(first), Gfn::new(last)).unwrap());
    let mut log = Log::new();
    let tally = clear(tables, rest, &mut Budget::new(1000), Emptied::Free, &mut log).unwrap();
    assert_eq!((tally.reads, arena.reads.get()), (reads, reads), "{first:#x} to {last:#x}");
    assert!(!log.asks_for_flush());
}

#[test]
fn a_walk_reads_no_entry_beyond_its_range() {
    for last in 1..512 {
        check_empty_range(1, last, 3 + last);
        check_empty_range(last, 511, 3 + 512 - last);
        check_empty_range(last, last, 4);
    }
    // Blocks of 512 pages from the third on, which may be cut at both ends.
    for block in 2..511 {
        check_empty_range(2 << 9, block << 9 | 511, 2 + block - 1);
        check_empty_range(2 << 9 | 5, block << 9 | 7, 2 + block - 1);
    }
    // From a page table into the blocks behind it, and from one GiB into the next.
    check_empty_range(500, 511, 3 + 12);
    check_empty_range(601, 2 << 9, 3 + 1023 - 600 + 1);
    check_empty_range(1 << 18, (3 << 18) - 1, 1 + 2);
    check_empty_range(1 << 18 | 77, 2 << 18 | 1, 1 + 2);
}
