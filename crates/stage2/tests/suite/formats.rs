//! One suite over every format: what goes in comes out, and nothing else is taken.

use flush::{Gfn, Mfn, Run};
use proptest::prelude::*;
use stage2::format::arm64::{Arm64, Granule};
use stage2::format::ept::{Ept, EptLevels};
use stage2::format::npt::{Npt, NptLevels};
use stage2::format::vtd::{Vtd, VtdLevels};
use stage2::{Access, Entry, Format, Geometry, Leaf, Level, MemoryType, Tag, Unencodable};

use MemoryType::{Uncacheable, WriteBack, WriteCombining, WriteProtected, WriteThrough};

pub(crate) const TYPES: [MemoryType; 5] =
    [Uncacheable, WriteCombining, WriteThrough, WriteProtected, WriteBack];

pub(crate) fn level(number: u8) -> Level {
    Level::new(number).unwrap()
}

pub(crate) fn leaf(mfn: u64, access: Access) -> Leaf {
    Leaf::new(Mfn::new(mfn), access)
}

/// Every leaf that a format can be asked for, in all combinations of small values.
fn leaves(order: u8, width: u8) -> impl Iterator<Item = Leaf> {
    let unit = 1u64 << order;
    let frames = [0, unit, unit * 3, (1 << (width - 12)) - unit];
    frames.into_iter().flat_map(|mfn| {
        (0..8).flat_map(move |access| {
            TYPES.into_iter().flat_map(move |memory| {
                let marks =
                    [(0, false, false), (1, true, false), (7, false, true), (5, true, true)];
                marks.into_iter().zip([0, 3, 2, 1]).map(move |((tag, accessed, dirty), origin)| {
                    Leaf {
                        mfn: Mfn::new(mfn),
                        access: Access::from_bits(access),
                        memory,
                        tag: Tag::new(tag).unwrap(),
                        origin: level(origin),
                        accessed,
                        dirty,
                    }
                })
            })
        })
    })
}

#[track_caller]
fn check_format<F: Format>(format: F, levels: u8, accesses: &[u8], types: &[MemoryType]) {
    let geometry = format.geometry();
    assert_eq!(geometry.address_bits(), 12 + 9 * levels);
    assert!(!format.break_before_make());
    check_round_trips(&format, (levels, 52), accesses, types, |leaf| leaf);
    // Large leaves are aligned, and a word with stray frame bits is no usable leaf.
    for number in 1..=format.largest_leaf().get() {
        let half = 1u64 << (geometry.order(level(number)) - 1);
        let word = format.leaf(level(number), leaf(0, Access::READ)).unwrap() | half << 12;
        assert!(!usable(format.decode(level(number), word)));
    }
}

/// What goes in comes out as `kept` says, at every level; nothing else is taken.
#[track_caller]
pub(crate) fn check_round_trips<F: Format>(
    format: &F,
    (levels, width): (u8, u8),
    accesses: &[u8],
    types: &[MemoryType],
    kept: impl Fn(Leaf) -> Leaf,
) {
    let geometry = format.geometry();
    assert_eq!(geometry.levels(), levels);

    for number in 0..levels {
        let at = level(number);
        assert_eq!(format.decode(at, 0), Entry::Empty);
        for leaf in leaves(geometry.order(at), width) {
            let word = format.leaf(at, leaf);
            let taken = number <= format.largest_leaf().get()
                && accesses.contains(&leaf.access.bits())
                && types.contains(&leaf.memory);
            assert_eq!(word.is_ok(), taken, "{at:?} {leaf:?}");
            let Ok(word) = word else { continue };
            assert_eq!(format.decode(at, word), Entry::Leaf(kept(leaf)));
            for bits in 0..8 {
                let access = Access::from_bits(bits);
                let changed = format.with_access(at, word, access);
                assert_eq!(changed.is_ok(), accesses.contains(&bits));
                if let Ok(changed) = changed {
                    let leaf = kept(Leaf { access, ..leaf });
                    assert_eq!(format.decode(at, changed), Entry::Leaf(leaf));
                }
            }
        }
        let table = Mfn::new(0x1_2345 << geometry.page_order());
        match format.table(at, table) {
            Ok(word) => {
                assert_eq!((format.decode(at, word), number > 0), (Entry::Table(table), true))
            }
            Err(error) => assert_eq!((error, number), (Unencodable::Level, 0)),
        }
    }
    for number in levels..5 {
        assert_eq!(format.table(level(number), Mfn::new(1)), Err(Unencodable::Level));
    }
    // There is no leaf at level 4, so none is a part of one.
    let part = Leaf { origin: level(4), memory: types[0], ..leaf(0, Access::READ) };
    assert_eq!(format.leaf(Level::PAGE, part), Err(Unencodable::Level));
    for number in 0..=format.largest_leaf().get() {
        let order = geometry.order(level(number));
        if order > 0 {
            let bad = leaf(1 << (order - 1), Access::READ);
            assert_eq!(format.leaf(level(number), bad), Err(Unencodable::Frame));
        }
    }
}

/// Whether hardware can get at memory through the entry.
pub(crate) fn usable(entry: Entry) -> bool {
    match entry {
        Entry::Table(_) => true,
        Entry::Leaf(leaf) => leaf.access != Access::NONE,
        Entry::Empty | Entry::Inert => false,
    }
}

const R: u8 = 1;
const W: u8 = 2;
const X: u8 = 4;

#[test]
fn ept_keeps_what_it_is_given_and_refuses_the_rest() {
    let accesses = [R, R | W, R | X, R | W | X];
    check_format(Ept::new(EptLevels::Four), 4, &accesses, &TYPES);
    check_format(Ept::new(EptLevels::Five), 5, &accesses, &TYPES);
    let small = Ept::new(EptLevels::Four).with_largest_leaf(Level::PAGE);
    check_format(small, 4, &accesses, &TYPES);
    let more = Ept::new(EptLevels::Four).with_execute_only().with_largest_leaf(Level::ONE);
    check_format(more, 4, &[R, R | W, R | X, R | W | X, X], &TYPES);
}

#[test]
fn npt_keeps_what_it_is_given_and_refuses_the_rest() {
    let accesses = [R, R | W, R | X, R | W | X];
    let types = [Uncacheable, WriteThrough, WriteBack];
    check_format(Npt::new(NptLevels::Four), 4, &accesses, &types);
    check_format(Npt::new(NptLevels::Five), 5, &accesses, &types);
    check_format(Npt::new(NptLevels::Four).with_largest_leaf(Level::ONE), 4, &accesses, &types);
}

#[test]
fn vtd_keeps_what_it_is_given_and_refuses_the_rest() {
    let accesses = [R, W, R | W];
    check_format(Vtd::new(VtdLevels::Three), 3, &accesses, &[WriteBack]);
    check_format(Vtd::new(VtdLevels::Four), 4, &accesses, &[WriteBack]);
    check_format(Vtd::new(VtdLevels::Five), 5, &accesses, &[WriteBack]);
    check_format(
        Vtd::new(VtdLevels::Four).with_largest_leaf(Level::PAGE),
        4,
        &accesses,
        &[WriteBack],
    );
}

#[track_caller]
pub(crate) fn check_width<F: Format>(format: F) {
    let unit = 1 << format.geometry().page_order();
    let (last, beyond) = ((1 << 28) - unit, 1 << 28);
    let good = format.leaf(Level::PAGE, leaf(last, Access::READ)).unwrap();
    assert!(usable(format.decode(Level::PAGE, good)));
    assert_eq!(format.leaf(Level::PAGE, leaf(beyond, Access::READ)), Err(Unencodable::Frame));
    assert_eq!(format.leaf(Level::PAGE, leaf(u64::MAX, Access::READ)), Err(Unencodable::Frame));
    for bit in 28..64 {
        let far = leaf(1 << bit, Access::READ);
        assert_eq!(format.leaf(Level::PAGE, far), Err(Unencodable::Frame), "bit {bit}");
    }
    assert_eq!(format.table(Level::ONE, Mfn::new(beyond)), Err(Unencodable::Frame));
    assert!(!usable(format.decode(Level::PAGE, good | 1 << 40)));
    let table = format.table(Level::ONE, Mfn::new(last)).unwrap();
    assert!(!usable(format.decode(Level::ONE, table | 1 << 40)));
}

#[test]
fn no_frame_beyond_the_physical_width_is_written_or_followed() {
    check_width(Ept::new(EptLevels::Four).with_physical_bits(40));
    check_width(Npt::new(NptLevels::Four).with_physical_bits(40));
    check_width(Vtd::new(VtdLevels::Four).with_physical_bits(40));
}

#[track_caller]
pub(crate) fn check_word<F: Format>(format: F, at: u8, word: u64, means: Entry) {
    assert_eq!(format.decode(level(at), word), means);
}

fn plain_leaf(mfn: u64, access: u8) -> Entry {
    Entry::Leaf(leaf(mfn, Access::from_bits(access)))
}

#[test]
fn ept_words_mean_what_the_manual_says() {
    let ept = Ept::new(EptLevels::Five);
    check_word(ept, 0, 0x5037, plain_leaf(5, 7));
    check_word(ept, 0, 0x5031, plain_leaf(5, 1));
    check_word(ept, 0, 0x50b1, plain_leaf(5, 1)); // bit 7 is ignored at level 0
    check_word(ept, 1, 0x4000_00b3, plain_leaf(0x4_0000, 3));
    check_word(ept, 2, 0x4000_00b3, plain_leaf(0x4_0000, 3));
    check_word(ept, 1, 0x5007, Entry::Table(Mfn::new(5)));
    check_word(ept, 4, 0x5107, Entry::Table(Mfn::new(5))); // accessed
    check_word(ept, 0, 0x5030, Entry::Inert); // no rights
    check_word(ept, 0, 0x5032, Entry::Inert); // write-only
    check_word(ept, 0, 0x5036, Entry::Inert); // write and execute
    check_word(ept, 0, 0x5034, Entry::Inert); // execute-only, not there
    check_word(ept.with_execute_only(), 0, 0x5034, plain_leaf(5, 4));
    check_word(ept, 0, 0x5017, Entry::Inert); // memory type 2
    check_word(ept, 0, 0x501f, Entry::Inert); // memory type 3
    check_word(ept, 0, 0x503f, Entry::Inert); // memory type 7
    check_word(ept, 3, 0x50b7, Entry::Inert); // no leaf at this level
    check_word(ept, 2, 0x500f, Entry::Inert); // reserved bit 3 of a table entry
    check_word(ept, 2, 0x4000_000f, Entry::Inert); // the same, aligned like a leaf
    check_word(ept, 2, 0x5004, Entry::Inert); // execute-only, not there
    check_word(ept.with_execute_only(), 2, 0x5004, Entry::Table(Mfn::new(5)));
    check_word(ept, 1, 0x10_10b7, Entry::Inert); // stray frame bits
    check_word(ept, 0, 1 << 63, Entry::Inert);
    check_word(ept.with_largest_leaf(Level::ONE), 2, 0x4000_00b3, Entry::Inert);
    check_word(
        ept,
        0,
        0x01f0_0000_0000_5301 | 1 << 3,
        Entry::Leaf(Leaf {
            memory: WriteCombining,
            tag: Tag::new(7).unwrap(),
            origin: level(3),
            accessed: true,
            dirty: true,
            ..leaf(5, Access::READ)
        }),
    );
}

#[test]
fn npt_words_mean_what_the_manual_says() {
    let npt = Npt::new(NptLevels::Four);
    check_word(npt, 0, 0x5007, plain_leaf(5, 7));
    check_word(npt, 0, 0x8000_0000_0000_5005, plain_leaf(5, 1));
    check_word(npt, 0, 0x5085, plain_leaf(5, 5)); // bit 7 is the PAT's at level 0
    check_word(npt, 1, 0x4000_0087, plain_leaf(0x4_0000, 7));
    check_word(npt, 1, 0x4000_1087, plain_leaf(0x4_0000, 7)); // bit 12 is the PAT's
    check_word(npt, 2, 0x5027, Entry::Table(Mfn::new(5)));
    check_word(npt, 0, 0x5006, Entry::Inert); // not present
    check_word(npt, 0, 0x5003, plain_leaf(5, 0)); // U clear: faults, may be cached
    check_word(npt, 3, 0x5087, plain_leaf(0, 0)); // no leaf at this level
    check_word(npt, 1, 0x4000_3087, plain_leaf(0x4_0000, 0)); // stray frame bits
    let uncached = Leaf { memory: Uncacheable, ..leaf(5, Access::ALL) };
    check_word(npt, 0, 0x5017, Entry::Leaf(uncached)); // UC-
    check_word(npt, 0, 0x501f, Entry::Leaf(uncached));
    let marked = Leaf { accessed: true, dirty: true, ..leaf(5, Access::ALL) };
    check_word(npt, 0, 0x5067, Entry::Leaf(marked));
}

#[test]
fn vtd_words_mean_what_the_manual_says() {
    let vtd = Vtd::new(VtdLevels::Four);
    check_word(vtd, 0, 0x5003, plain_leaf(5, 3));
    check_word(vtd, 0, 0x5002, plain_leaf(5, 2)); // write-only is legal
    check_word(vtd, 0, 0x5807, plain_leaf(5, 3)); // snoop; execute is ignored
    check_word(vtd, 0, 0x5004, Entry::Inert); // execute alone is not present
    check_word(vtd, 0, 0x5030, Entry::Inert);
    check_word(vtd, 1, 0x4000_0083, plain_leaf(0x4_0000, 3));
    check_word(vtd, 2, 0x4000_0081, plain_leaf(0x4_0000, 1));
    check_word(vtd, 3, 0x5083, Entry::Inert); // no leaf at this level
    check_word(vtd, 1, 0x10_1083, Entry::Inert); // stray frame bits
    check_word(vtd, 3, 0x5003, Entry::Table(Mfn::new(5)));
    check_word(vtd.with_largest_leaf(Level::ONE), 2, 0x4000_0081, Entry::Inert);
}

#[track_caller]
fn check_written<F: Format>(format: F, table: u64, page: u64, large: u64) {
    assert_eq!(format.table(Level::TWO, Mfn::new(5)), Ok(table));
    let page_leaf = Leaf { origin: level(1), ..leaf(5, Access::READ_WRITE) };
    let page_leaf = page_leaf.tagged(Tag::new(3).unwrap());
    assert_eq!(format.leaf(Level::PAGE, page_leaf), Ok(page));
    assert_eq!(format.leaf(Level::ONE, leaf(0x200, Access::READ)), Ok(large));
}

#[test]
fn words_are_written_as_the_manuals_say() {
    check_written(Ept::new(EptLevels::Four), 0x5007, 0x00b0_0000_0000_5033, 0x20_00b1);
    check_written(Npt::new(NptLevels::Four), 0x5007, 0x80b0_0000_0000_5007, 0x8000_0000_0020_0085);
    check_written(Vtd::new(VtdLevels::Four), 0x5003, 0x00b0_0000_0000_5003, 0x20_0081);
}

#[test]
fn a_leaf_of_a_shared_ept_means_the_same_to_a_vtd_unit() {
    let (ept, vtd) = (Ept::new(EptLevels::Four), Vtd::new(VtdLevels::Four));
    for number in 0..=2 {
        for access in [Access::READ, Access::READ_WRITE] {
            let leaf = Leaf { origin: level(2), ..leaf(0x4_0000, access) };
            let leaf = leaf.tagged(Tag::new(5).unwrap());
            let word = ept.leaf(level(number), leaf).unwrap();
            assert_eq!(vtd.decode(level(number), word), Entry::Leaf(leaf));
        }
    }
    let word = ept.table(Level::TWO, Mfn::new(7)).unwrap();
    assert_eq!(vtd.decode(Level::TWO, word), Entry::Table(Mfn::new(7)));
}

proptest! {
    #[test]
    fn only_zero_is_empty_and_decoding_is_total(raw: u64, number in 0u8..5) {
        let at = level(number);
        let formats: [&dyn Format; 7] = [
            &Ept::new(EptLevels::Five),
            &Ept::new(EptLevels::Five).with_execute_only().with_physical_bits(40),
            &Npt::new(NptLevels::Five).with_physical_bits(46),
            &Vtd::new(VtdLevels::Five),
            &Arm64::new(Granule::Kib4, 48).unwrap(),
            &Arm64::wide(Granule::Kib16, 52).unwrap(),
            &Arm64::wide(Granule::Kib64, 52).unwrap().with_physical_bits(44),
        ];
        // As it is, and with fewer frame bits, so that more of the words are valid.
        for (format, raw) in formats.iter().flat_map(|format| [(format, raw), (format, raw & 0x3f_ffff_f0ff)]) {
            let entry = format.decode(at, raw);
            prop_assert_eq!(entry == Entry::Empty, raw == 0);
            prop_assert!(number > 0 || !matches!(entry, Entry::Table(_)));
            let table = if let Entry::Table(table) = entry { Some(table) } else { None };
            prop_assert_eq!(format.child(at, raw), table);
        }
    }
}

#[track_caller]
fn check_geometry(shape: (u8, u8, u8, u8), bits: u8, root: usize, chunk_order: u8) {
    let geometry = Geometry::new(shape.0, shape.1, shape.2, shape.3).unwrap();
    assert_eq!((geometry.address_bits(), geometry.root_entries()), (bits, root));
    assert_eq!(geometry.order(geometry.top()), chunk_order);
    assert_eq!(geometry.space(), Run::block(Gfn::new(0), bits - 12));
}

#[test]
fn a_geometry_has_the_width_and_the_root_of_its_format() {
    check_geometry((0, 9, 4, 9), 48, 512, 27);
    check_geometry((0, 9, 5, 9), 57, 512, 36);
    check_geometry((0, 9, 3, 10), 40, 1024, 18); // two root pages
    check_geometry((0, 9, 3, 13), 43, 8192, 18); // sixteen
    check_geometry((0, 9, 4, 5), 44, 32, 27); // a part of one
    check_geometry((2, 11, 3, 12), 48, 4096, 24);
    check_geometry((2, 11, 4, 5), 52, 32, 35);
    check_geometry((4, 13, 2, 17), 46, 131_072, 17);
    check_geometry((4, 13, 3, 6), 48, 64, 30);
}

#[test]
fn an_impossible_geometry_is_refused() {
    for shape in [
        (0, 9, 0, 9),
        (0, 9, 6, 9),
        (5, 9, 4, 9),
        (0, 0, 4, 4),
        (0, 14, 2, 9),
        (0, 9, 4, 0),
        (0, 9, 4, 14),
        (4, 13, 4, 13),
    ] {
        assert_eq!(Geometry::new(shape.0, shape.1, shape.2, shape.3), None, "{shape:?}");
    }
}

#[track_caller]
fn check_slot(geometry: Geometry, at: Level, frame: u64, page: u64, index: usize) {
    let slot = geometry.slot(Mfn::new(0x1000), at, Gfn::new(frame));
    assert_eq!(slot, (Mfn::new(0x1000 + page), index));
}

#[test]
fn a_concatenated_root_continues_on_the_next_page() {
    let two = Geometry::new(0, 9, 3, 10).unwrap();
    check_slot(two, Level::TWO, 511 << 18, 0, 511);
    check_slot(two, Level::TWO, 512 << 18, 1, 0);
    check_slot(two, Level::TWO, (1023 << 18) + 5, 1, 511);
    check_slot(two, Level::ONE, (1023 << 18) + 512, 0, 1);
    let wide = Geometry::new(4, 13, 2, 17).unwrap();
    check_slot(wide, Level::ONE, 8192 << 17, 16, 0); // a page is 16 frames
    check_slot(wide, Level::PAGE, 8191 << 4, 0, 8191);
}

#[test]
fn tags_and_levels_have_bounds() {
    assert_eq!(Tag::new(7).map(Tag::get), Some(7));
    assert_eq!(Tag::new(8), None);
    assert_eq!(Level::new(4).and_then(Level::above), None);
    assert_eq!(Level::new(5), None);
    assert_eq!(Level::PAGE.below(), None);
    assert_eq!(Level::TWO.below(), Some(Level::ONE));
}
