//! The arm64 formats: shapes, words, splits, for every granule and width.

use flush::{Gfn, Mfn, Run};
use stage2::format::arm64::{Arm64, Granule};
use stage2::{
    Access, Entry, Format, Leaf, Level, MapError, MemoryType, Over, SplitError, Tag, Unencodable,
    finish_split, lookup, map, split,
};

use Granule::{Kib4, Kib16, Kib64};
use MemoryType::{Uncacheable, WriteBack, WriteCombining, WriteThrough};

use crate::arena::Arena;
use crate::formats::{check_round_trips, check_width, check_word, leaf, level};
use crate::log::Log;

const GRANULES: [Granule; 3] = [Kib4, Kib16, Kib64];

/// Every width that a granule has, in both kinds of descriptor.
pub(crate) fn every_format() -> impl Iterator<Item = (Granule, u8, Arm64)> {
    GRANULES.into_iter().flat_map(|granule| {
        let narrow = (32..=48).filter_map(move |bits| Some((bits, Arm64::new(granule, bits)?)));
        let wide = (32..=52).filter_map(move |bits| Some((bits, Arm64::wide(granule, bits)?)));
        narrow.chain(wide).map(move |(bits, format)| (granule, bits, format))
    })
}

#[test]
fn every_granule_has_every_width_up_to_the_widest_of_its_descriptors() {
    assert_eq!(every_format().count(), 3 * (17 + 21));
    for granule in GRANULES {
        for bits in [0, 31, 49, 52, 255] {
            assert_eq!(Arm64::new(granule, bits), None);
        }
        for bits in [0, 31, 53, 255] {
            assert_eq!(Arm64::wide(granule, bits), None);
        }
    }
}

#[test]
fn no_root_has_more_than_sixteen_pages_or_a_level_that_concatenation_saves() {
    for (_, bits, format) in every_format() {
        let geometry = format.geometry();
        assert_eq!(geometry.address_bits(), bits);
        assert_eq!(geometry.space(), Run::block(Gfn::new(0), bits - 12));
        let (root, page) = (geometry.root_entries(), geometry.entries());
        assert!(root <= 16 * page);
        // One level less would need more than sixteen pages, or leave a single level.
        assert!(geometry.levels() == 2 || root * page > 16 * page, "{geometry:?}");
    }
}

#[track_caller]
fn check_shape(granule: Granule, bits: u8, levels: u8, root_entries: usize) {
    let geometry = Arm64::wide(granule, bits).unwrap().geometry();
    assert_eq!((geometry.levels(), geometry.root_entries()), (levels, root_entries));
    if bits <= 48 {
        assert_eq!(Arm64::new(granule, bits).unwrap().geometry(), geometry);
    }
}

#[test]
fn both_sides_of_every_change_of_levels_have_the_shape_of_the_manual() {
    check_shape(Kib4, 34, 2, 8192);
    check_shape(Kib4, 35, 3, 32);
    check_shape(Kib4, 40, 3, 1024);
    check_shape(Kib4, 43, 3, 8192);
    check_shape(Kib4, 44, 4, 32);
    check_shape(Kib4, 48, 4, 512);
    check_shape(Kib4, 52, 4, 8192);
    check_shape(Kib16, 40, 2, 32_768);
    check_shape(Kib16, 41, 3, 32);
    check_shape(Kib16, 48, 3, 4096);
    check_shape(Kib16, 51, 3, 32_768);
    check_shape(Kib16, 52, 4, 32);
    check_shape(Kib64, 46, 2, 131_072);
    check_shape(Kib64, 47, 3, 32);
    check_shape(Kib64, 48, 3, 64);
    check_shape(Kib64, 52, 3, 1024);
}

#[test]
fn arm64_keeps_what_it_is_given_and_refuses_the_rest() {
    let accesses = [1, 2, 3, 4, 5, 6, 7];
    let types = [Uncacheable, WriteCombining, WriteThrough, WriteBack];
    // Hardware marks nothing: whatever is mapped may be used, and written if it can be.
    let kept =
        |leaf: Leaf| Leaf { accessed: true, dirty: leaf.access.allows(Access::WRITE), ..leaf };
    for (_, _, format) in every_format() {
        assert!(format.break_before_make());
        let shape = (format.geometry().levels(), output_bits(format));
        check_round_trips(&format, shape, &accesses, &types, kept);
    }
}

/// How wide an output address of the format is.
fn output_bits(format: Arm64) -> u8 {
    let beyond = Mfn::new(1 << 36);
    if format.table(Level::ONE, beyond).is_ok() { 52 } else { 48 }
}

#[test]
fn no_frame_beyond_the_physical_width_is_written_or_followed_on_arm64() {
    for granule in GRANULES {
        check_width(Arm64::new(granule, 48).unwrap().with_physical_bits(40));
        check_width(Arm64::wide(granule, 52).unwrap().with_physical_bits(40));
        let narrow = Arm64::new(granule, 48).unwrap().with_physical_bits(52);
        assert_eq!(narrow.table(Level::ONE, Mfn::new(1 << 36)), Err(Unencodable::Frame));
        assert_eq!(narrow, Arm64::new(granule, 48).unwrap());
        let low = Arm64::new(granule, 48).unwrap();
        assert_eq!(low.with_physical_bits(0), low.with_physical_bits(32));
    }
}

#[track_caller]
fn check_largest(granule: Granule, narrow: u8, wide: u8) {
    let formats = [Arm64::new(granule, 48).unwrap(), Arm64::wide(granule, 48).unwrap()];
    for (format, largest) in formats.into_iter().zip([narrow, wide]) {
        assert_eq!(format.largest_leaf(), level(largest));
        assert_eq!(format.with_largest_leaf(level(4)), format);
        let small = format.with_largest_leaf(Level::PAGE);
        assert_eq!(small.largest_leaf(), Level::PAGE);
        assert_eq!(small.leaf(Level::ONE, leaf(0, Access::READ)), Err(Unencodable::Level));
    }
    // No level above the root's.
    let low = Arm64::wide(granule, 32).unwrap();
    assert!(low.largest_leaf() <= low.geometry().top());
}

#[test]
fn blocks_exist_at_the_levels_that_the_granule_has() {
    check_largest(Kib4, 2, 3); // 1 GiB, 512 GiB
    check_largest(Kib16, 1, 2); // 32 MiB, 64 GiB
    check_largest(Kib64, 1, 2); // 512 MiB, 4 TiB
}

fn plain(mfn: u64, access: u8) -> Leaf {
    let access = Access::from_bits(access);
    Leaf { accessed: true, dirty: access.allows(Access::WRITE), ..leaf(mfn, access) }
}

#[test]
fn arm64_words_mean_what_the_manual_says() {
    let arm = Arm64::new(Kib4, 48).unwrap();
    let leaf = |mfn, access| Entry::Leaf(plain(mfn, access));
    check_word(arm, 0, 0x57ff, leaf(5, 7));
    check_word(arm, 0, 0x0040_0000_0000_577f, leaf(5, 1));
    check_word(arm, 0, 0x0040_0000_0000_57bf, leaf(5, 2)); // write-only is legal
    check_word(arm, 0, 0x573f, leaf(5, 4)); // so is execute-only
    check_word(arm, 0, 0x0040_0000_0000_573f, leaf(5, 0)); // no rights, but valid: cached
    check_word(arm, 0, 0x0020_0000_0000_57ff, leaf(5, 7)); // executes at one level at least
    check_word(arm, 0, 0x0060_0000_0000_57ff, leaf(5, 7));
    check_word(arm, 0, 0x0010_0000_0000_57ff, leaf(5, 7)); // the contiguous bit
    check_word(arm, 0, 0x53ff, Entry::Leaf(Leaf { accessed: false, ..plain(5, 7) }));
    check_word(arm, 0, 0x57fd, Entry::Inert); // reserved at level 0
    check_word(arm, 0, 0x57fe, Entry::Inert); // not valid
    check_word(arm, 1, 0x4000_07fd, leaf(0x4_0000, 7));
    check_word(arm, 2, 0x4000_07fd, leaf(0x4_0000, 7));
    check_word(arm, 1, 0x4001_07fd, leaf(0x4_0000, 7)); // nT, and bits that are ignored
    check_word(arm, 1, 0x4010_57fd, leaf(0x4_0000, 7));
    check_word(arm, 3, 0x4000_07fd, Entry::Inert); // no block of 512 GiB
    check_word(arm, 3, 0x5003, Entry::Table(Mfn::new(5)));
    check_word(arm, 1, 0x5ffb | 1 << 63, Entry::Table(Mfn::new(5))); // ignored bits
    let memory = |bits: u64, memory| {
        let word = 0x57c3 | bits << 2;
        check_word(arm, 0, word, Entry::Leaf(Leaf { memory, ..plain(5, 7) }));
    };
    memory(0b0000, Uncacheable);
    memory(0b0011, Uncacheable);
    memory(0b0101, WriteCombining);
    memory(0b1101, WriteCombining);
    memory(0b1110, WriteThrough);
    let tagged = Leaf { tag: Tag::new(7).unwrap(), origin: level(3), ..plain(5, 7) };
    check_word(arm, 0, 0x57ff | 0x1f << 55, Entry::Leaf(tagged));
    check_word(arm, 0, 0x57ff | 0x7 << 60, leaf(5, 7));
}

#[test]
fn a_52_bit_frame_lies_where_its_granule_puts_the_upper_bits() {
    let frame = 0xf_fff0_0000_0000 >> 12;
    let word = |format: Arm64| {
        let page = format.leaf(Level::PAGE, leaf(frame, Access::ALL)).unwrap();
        assert_eq!(format.decode(Level::PAGE, page), Entry::Leaf(plain(frame, 7)));
        (format.table(Level::ONE, Mfn::new(frame)).unwrap(), page)
    };
    // FEAT_LPA2: bits 50 and 51 in bits 8 and 9, where shareability was.
    let wide = (0x3_fff0_0000_0303, 0x3_fff0_0000_07ff);
    assert_eq!(word(Arm64::wide(Kib4, 52).unwrap()), wide);
    assert_eq!(word(Arm64::wide(Kib16, 52).unwrap()), wide);
    // FEAT_LPA: bits 48 to 51 in bits 12 to 15.
    assert_eq!(word(Arm64::wide(Kib64, 52).unwrap()), (0xfff0_0000_f003, 0xfff0_0000_f7ff));
    let low = Arm64::wide(Kib4, 52).unwrap().leaf(Level::PAGE, leaf(5, Access::ALL));
    assert_eq!(low, Ok(0x54ff)); // shareability is the register's
}

/// Splits the largest leaf there is down to a page, with a flush in every step.
#[track_caller]
fn check_split(format: Arm64) {
    let arena = Arena::new(&format);
    let tables = arena.tables(&format);
    let geometry = format.geometry();
    let top = format.largest_leaf();
    let order = |number: u8| geometry.order(level(number));
    let base = (1u64 << (geometry.address_bits() - 12)) - (1 << order(top.get()));
    let mfn = 3u64 << order(top.get());
    let mut log = Log::new();
    let whole = leaf(mfn, Access::READ_WRITE).tagged(Tag::new(5).unwrap());
    map(tables, Gfn::new(base), top, whole, Over::Vacant, &mut log).unwrap();

    // The last page of the last but one part, at every level.
    let offset = (0..top.get()).map(|number| 1u64 << order(number)).sum::<u64>();
    let at = Gfn::new(base + (1 << order(top.get())) - 1 - offset);
    let mut broken = Vec::new();
    while let Err(error) = split(tables, at, Level::PAGE, &mut log) {
        let SplitError::Pending(pending) = error else { panic!("{error:?}") };
        assert_eq!(lookup(tables, at).unwrap().entry, Entry::Empty);
        broken.push(pending.run());
        finish_split(tables, pending, &mut log).unwrap();
    }
    let expected: Vec<_> =
        (1..=top.get()).rev().map(|number| Run::block(at, order(number))).collect();
    assert_eq!(broken, expected);
    let recorded: Vec<_> = log.changed.iter().map(|(run, order, _)| (*run, *order)).collect();
    // Parts of parts as well, as long as the largest leaf may be cached.
    let orders = (1..=top.get()).map(|_| order(top.get()));
    assert_eq!(recorded, expected.into_iter().zip(orders).collect::<Vec<_>>());
    for gfn in [base, at.get() - 1, at.get(), at.get() + 1, geometry.space().last().get()] {
        let (part, shown) = lookup(tables, Gfn::new(gfn)).unwrap().leaf_at(Gfn::new(gfn)).unwrap();
        assert_eq!(shown.get(), mfn + (gfn - base), "{gfn:#x}");
        assert_eq!((part.access, part.tag, part.origin), (whole.access, whole.tag, top));
    }
    assert_eq!(lookup(tables, at).unwrap().level, Level::PAGE);
    arena.check(&format, 0);
}

#[test]
fn the_largest_leaf_splits_down_to_pages_through_flushes() {
    for (_, bits, format) in every_format() {
        if [34, 35, 43, 44, 46, 47, 48, 52].contains(&bits) {
            check_split(format);
        }
    }
}

#[test]
fn another_frame_goes_in_only_after_the_flush_of_the_old_one() {
    for granule in GRANULES {
        let format = Arm64::new(granule, 48).unwrap();
        let arena = Arena::new(&format);
        let tables = arena.tables(&format);
        let (old, new) = (leaf(0x100, Access::READ), leaf(0x200, Access::READ));
        let mut log = Log::new();
        let mut put = |leaf, over| map(tables, Gfn::new(0x40), Level::PAGE, leaf, over, &mut log);
        put(old, Over::Vacant).unwrap();
        assert_eq!(put(new, Over::Expected(old)), Err(MapError::FlushFirst));
        assert_eq!(lookup(tables, Gfn::new(0x40)).unwrap().entry, Entry::Empty);
        assert_eq!(put(new, Over::Vacant), Ok(None));
        assert_eq!(log.changed.len(), 1);
        arena.check(&format, 0);
    }
}
