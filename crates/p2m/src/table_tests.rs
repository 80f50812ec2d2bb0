//! Promises of the map: every kind, both formats, own and shared tables.

use std::{vec, vec::Vec};

use flush::{Batch, Change, Cover, Depth, Extent, HoldError, Shared};
use stage2::{
    MemoryType, Stop, Tag,
    format::{
        ept::{Ept, EptLevels},
        npt::{Npt, NptLevels},
    },
};

use super::*;
use crate::testing::{DOMAIN, Heap, Owed, Taken, edit};

const EPT: Ept = Ept::new(EptLevels::Four);
const NPT: Npt = Npt::new(NptLevels::Four);
const GFN: Gfn = Gfn::new(0x4_0321);
const MFN: Mfn = Mfn::new(0x8_8765);
const OTHER: Mfn = Mfn::new(0x9_9999);

fn new<F: Format, K: Walkers>(format: F, heap: &Heap) -> P2m<F, &Heap, K> {
    P2m::new(format, heap).expect("a page for the root")
}

/// Sets what must succeed and replace nothing; nothing may be owed by CPUs for it.
#[track_caller]
fn put<F: Format, K: Walkers>(
    p2m: &mut P2m<F, &Heap, K>,
    gfn: Gfn,
    order: u8,
    mfn: Mfn,
    kind: PageKind,
) -> Owed {
    let (replaced, owed) = edit(|skipped| p2m.set(gfn, order, mfn, kind, skipped).map(is_some));
    assert_eq!(replaced, Ok(false));
    assert!(owed.tlb.is_nothing());
    owed
}

fn is_some<'id, K: Walkers>(displaced: Option<Displaced<'id, K>>) -> bool {
    displaced.is_some()
}

/// What a table that `K` walks owes for one changed leaf.
fn leaf<K: Walkers>(run: Run, order: u8) -> Owed {
    let mut cover = Cover::NOTHING;
    cover.record(run, order, Depth::Leaves, Change::Modified);
    let iotlb = if K::IOTLB { cover.clone() } else { Cover::NOTHING };
    Owed { tlb: cover, iotlb }
}

#[track_caller]
fn check_nothing_owed(owed: &Owed) {
    let Owed { tlb, iotlb } = owed;
    assert!(tlb.is_nothing() && iotlb.is_nothing(), "{owed:?}");
}

/// Runs `check` for both formats, with tables for CPUs alone and with shared ones.
macro_rules! for_all_tables {
    ($check:ident $(, $argument:expr)*) => {
        $check::<_, Tlb>(EPT $(, $argument)*);
        $check::<_, Shared>(EPT $(, $argument)*);
        $check::<_, Tlb>(NPT $(, $argument)*);
        $check::<_, Shared>(NPT $(, $argument)*);
    };
}

fn kind_reads_back<F: Format, K: Walkers>(format: F, kind: PageKind) {
    let heap = Heap::new(8);
    let mut p2m = new::<F, K>(format, &heap);
    assert_eq!(p2m.get(GFN), None);

    let owed = put(&mut p2m, GFN, 0, MFN, kind);
    assert_eq!(owed.iotlb.is_nothing(), !K::IOTLB);
    let shown =
        Mapping { mfn: MFN, run: Run::single(GFN), kind: Some(kind), access: kind.access() };
    assert_eq!(p2m.get(GFN), Some(shown));
    assert_eq!(p2m.get(Gfn::new(GFN.get() + 1)), None);
    let found = stage2::lookup(p2m.tables(), GFN).expect("inside the space");
    let (leaf, _) = found.leaf_at(GFN).expect("mapped");
    assert_eq!(leaf.memory, kind.memory_type());
}

#[test]
fn every_kind_is_mapped_with_its_rights_and_reads_back() {
    for kind in PageKind::ALL {
        for_all_tables!(kind_reads_back, kind);
    }
}

/// RAM in one large leaf, and pages granted in its neighbourhood and far away.
fn furnished<F: Format, K: Walkers>(format: F, heap: &Heap) -> P2m<F, &Heap, K> {
    let mut p2m = new::<F, K>(format, heap);
    put(&mut p2m, Gfn::new(0x200), 9, Mfn::new(0x8_0200), PageKind::RamReadWrite);
    for gfn in [0x1ff, 0x400, 0x401, 0x20_0000] {
        put(&mut p2m, Gfn::new(gfn), 0, Mfn::new(0x8_0000 + gfn), PageKind::GrantReadWrite);
    }
    p2m
}

fn cleared_together_or_alone<F: Format + Copy, K: Walkers>(format: F) {
    let asked: Vec<(Gfn, Expected)> = [
        (0x1ff, PageKind::GrantReadWrite),
        // Out of the middle of the large leaf, which is split; then beside it.
        (0x234, PageKind::RamReadWrite),
        (0x235, PageKind::RamReadWrite),
        (0x234, PageKind::RamReadWrite),
        (0x236, PageKind::GrantReadWrite),
        (0x20_0000, PageKind::GrantReadWrite),
        (0x401, PageKind::GrantReadOnly),
        (0x401, PageKind::GrantReadWrite),
        (0x7000_0000, PageKind::GrantReadWrite),
        (u64::MAX >> 12, PageKind::GrantReadWrite),
        (0x400, PageKind::GrantReadWrite),
    ]
    .map(|(gfn, kind)| (Gfn::new(gfn), Expected { mfn: Mfn::new(0x8_0000 + gfn), kind }))
    .to_vec();
    let heaps = [Heap::new(16), Heap::new(16)];
    let [mut together, mut alone] = heaps.each_ref().map(|heap| furnished::<F, K>(format, heap));
    let left = edit(|skipped| {
        let mut clearing = together.clearing();
        let mut clear = |(gfn, expected)| clearing.clear(gfn, expected, skipped).map(drop);
        asked.iter().copied().map(&mut clear).collect::<Vec<_>>()
    });
    let right = edit(|skipped| {
        let mut clear = |(gfn, expected)| alone.clear(gfn, expected, skipped).map(drop);
        asked.iter().copied().map(&mut clear).collect::<Vec<_>>()
    });
    assert_eq!(left, right);
    let cleared: Vec<bool> = left.0.iter().map(Result::is_ok).collect();
    let ends = [true, true, true, false, false, true, false, true, false, false, true];
    assert_eq!(cleared, ends, "{:?}", left.0);
    for gfn in [0x1ff, 0x200, 0x233, 0x234, 0x235, 0x236, 0x3ff, 0x400, 0x401, 0x20_0000] {
        let gfn = Gfn::new(gfn);
        assert_eq!(together.get(gfn), alone.get(gfn));
    }
}

/// Over the split of a large leaf, absent frames and frames beyond the space.
#[test]
fn frames_that_are_cleared_under_one_lock_end_as_they_do_one_by_one() {
    for_all_tables!(cleared_together_or_alone);
}

fn clear_is_exact<F: Format, K: Walkers>(format: F, kind: PageKind) {
    let heap = Heap::new(8);
    let mut p2m = new::<F, K>(format, &heap);
    put(&mut p2m, GFN, 0, MFN, kind);
    let shown = p2m.get(GFN).expect("mapped");
    let tables = heap.pages();

    let mut refused = vec![Expected { mfn: OTHER, kind }];
    refused.extend(
        PageKind::ALL
            .into_iter()
            .filter(|other| *other != kind)
            .map(|kind| Expected { mfn: MFN, kind }),
    );
    for expected in refused {
        let (result, owed) = edit(|skipped| p2m.clear(GFN, expected, skipped).map(drop));
        assert_eq!(result, Err(ClearError::Unexpected(shown)), "{expected:?}");
        check_nothing_owed(&owed);
        assert_eq!(p2m.get(GFN), Some(shown));
    }

    let expected = Expected { mfn: MFN, kind };
    let (result, owed) = edit(|skipped| p2m.clear(GFN, expected, skipped).map(drop));
    assert_eq!(result, Ok(()));
    assert_eq!(owed, leaf::<K>(Run::single(GFN), 0));
    assert_eq!(p2m.get(GFN), None);
    assert_eq!(heap.pages(), tables, "emptied tables stay for the next map");

    let (again, owed) = edit(|skipped| p2m.clear(GFN, expected, skipped).map(drop));
    assert_eq!(again, Err(ClearError::Absent));
    check_nothing_owed(&owed);
}

#[test]
fn only_the_expected_frame_and_kind_is_cleared_and_goes_on_record() {
    for kind in PageKind::ALL {
        for_all_tables!(clear_is_exact, kind);
    }
}

fn set_over<F: Format, K: Walkers>(format: F, old: PageKind, new_kind: PageKind) {
    let heap = Heap::new(8);
    let mut p2m = new::<F, K>(format, &heap);
    put(&mut p2m, GFN, 0, MFN, old);
    let shown = p2m.get(GFN).expect("mapped");
    for mfn in [OTHER, MFN] {
        let same = mfn == MFN && old == new_kind;
        let (result, owed) = edit(|skipped| {
            p2m.set(GFN, 0, mfn, new_kind, skipped).map(|displaced| {
                displaced.map(|Displaced { mapping, gone }| {
                    drop(gone);
                    mapping
                })
            })
        });
        if !old.gives_way() {
            assert_eq!(result, Err(SetError::Protected(shown)));
            check_nothing_owed(&owed);
            assert_eq!(p2m.get(GFN), Some(shown));
        } else if same {
            assert_eq!(result, Ok(None));
            check_nothing_owed(&owed);
        } else {
            // A page that only changes its kind is not given away.
            let displaced = (mfn != MFN).then_some(shown);
            assert_eq!(result, Ok(displaced), "{old:?} to {new_kind:?}");
            assert_eq!(owed, leaf::<K>(Run::single(GFN), 0));
            assert_eq!(p2m.get(GFN).map(|now| (now.mfn, now.kind)), Some((mfn, Some(new_kind))));
            // Back to the start for the next round.
            p2m = new::<F, K>(p2m.format, &heap);
            heap.stock.set(8);
            put(&mut p2m, GFN, 0, MFN, old);
        }
    }
}

#[test]
fn only_own_memory_gives_way_and_what_it_showed_is_on_record() {
    for old in PageKind::ALL {
        for new_kind in PageKind::ALL {
            for_all_tables!(set_over, old, new_kind);
        }
    }
}

#[track_caller]
fn check_refused(gfn: u64, order: u8, mfn: u64, kind: PageKind, error: SetError) {
    let heap = Heap::new(8);
    let mut p2m = new::<_, Tlb>(EPT, &heap);
    let (result, owed) =
        edit(|skipped| p2m.set(Gfn::new(gfn), order, Mfn::new(mfn), kind, skipped).map(is_some));
    assert_eq!(result, Err(error));
    check_nothing_owed(&owed);
    assert_eq!(heap.pages(), 1, "no table was built");
}

#[test]
fn leaves_that_cannot_be_are_refused_before_any_change() {
    use PageKind::{Foreign, GrantReadOnly, GrantReadWrite, MmioDirect, RamReadWrite};
    for kind in [Foreign, GrantReadOnly, GrantReadWrite] {
        for order in [1, 9, 18] {
            check_refused(0, order, 0, kind, SetError::Order(order));
        }
    }
    for order in [1, 8, 10, 27, 64, 255] {
        check_refused(0, order, 0, RamReadWrite, SetError::Order(order));
        check_refused(0, order, 0, MmioDirect, SetError::Order(order));
    }
    let misaligned = SetError::Unencodable(Unencodable::Frame);
    check_refused(1, 9, 0x200, RamReadWrite, misaligned);
    check_refused(0x200, 9, 1, RamReadWrite, misaligned);
    check_refused(0x200, 18, 0x200, RamReadWrite, misaligned);
    check_refused(0, 0, 1 << 40, RamReadWrite, misaligned);
    check_refused(0, 0, u64::MAX, RamReadWrite, misaligned);
    check_refused(1 << 36, 0, 1, RamReadWrite, SetError::OutOfRange);
    check_refused(u64::MAX, 0, 1, RamReadWrite, SetError::OutOfRange);
    check_refused(1 << 36, 9, 0x200, RamReadWrite, SetError::OutOfRange);
}

#[test]
fn the_last_frame_of_the_space_works_and_the_next_does_not() {
    let heap = Heap::new(8);
    let mut p2m = new::<_, Tlb>(EPT, &heap);
    let last = Gfn::new((1 << 36) - 1);
    let expected = Expected { mfn: MFN, kind: PageKind::GrantReadWrite };
    put(&mut p2m, last, 0, MFN, PageKind::GrantReadWrite);
    let (result, owed) = edit(|skipped| p2m.clear(last, expected, skipped).map(drop));
    assert_eq!((result, owed), (Ok(()), leaf::<Tlb>(Run::single(last), 0)));
    for beyond in [1 << 36, u64::MAX] {
        let (result, _) = edit(|skipped| p2m.clear(Gfn::new(beyond), expected, skipped).map(drop));
        assert_eq!(result, Err(ClearError::OutOfRange));
        assert_eq!(p2m.get(Gfn::new(beyond)), None);
    }
}

/// Puts one 2 MiB or 1 GiB leaf of RAM around `GFN` and says what it shows there.
fn large<F: Format, K: Walkers>(p2m: &mut P2m<F, &Heap, K>, order: u8) -> (Run, Mfn) {
    let block = Run::block(GFN, order);
    let mfn = Mfn::new(0x10_0000);
    put(p2m, block.first(), order, mfn, PageKind::RamReadWrite);
    let shown = p2m.get(GFN).expect("mapped");
    assert_eq!(shown.run, block);
    (block, shown.mfn)
}

/// A split owes the whole old leaf at its order, and that a table is new.
#[track_caller]
fn check_split_owed<K: Walkers>(owed: &Owed, block: Run, order: u8) {
    assert_eq!(owed.tlb.extent(), Extent::Runs(&[block]));
    assert_eq!((owed.tlb.order(), owed.tlb.change()), (order, Change::Modified));
    if K::IOTLB {
        assert_eq!(owed.iotlb.extent(), Extent::Runs(&[block]));
        assert_eq!((owed.iotlb.order(), owed.iotlb.depth()), (order, Depth::Tables));
    } else {
        assert!(owed.iotlb.is_nothing());
    }
}

fn grant_inside_large_leaf<F: Format, K: Walkers>(format: F, order: u8) {
    let heap = Heap::new(8);
    let mut p2m = new::<F, K>(format, &heap);
    let (block, shown) = large(&mut p2m, order);
    let (displaced, owed) = edit(|skipped| {
        p2m.set(GFN, 0, MFN, PageKind::GrantReadOnly, skipped)
            .map(|displaced| displaced.map(|displaced| displaced.mapping))
    });
    let displaced = displaced.expect("RAM gives way").expect("RAM was there");
    assert_eq!((displaced.mfn, displaced.run), (shown, Run::single(GFN)));
    check_split_owed::<K>(&owed, block, order);
    let kind = |gfn| p2m.get(Gfn::new(gfn)).and_then(|mapping| mapping.kind);
    assert_eq!(kind(GFN.get()), Some(PageKind::GrantReadOnly));
    for neighbour in [GFN.get() - 1, GFN.get() + 1, block.first().get(), block.last().get()] {
        assert_eq!(kind(neighbour), Some(PageKind::RamReadWrite));
        let shown = p2m.get(Gfn::new(neighbour)).expect("mapped").mfn;
        assert_eq!(shown.get() - 0x10_0000, neighbour - block.first().get());
    }
}

fn page_out_of_large_leaf<F: Format, K: Walkers>(format: F, order: u8) {
    let heap = Heap::new(8);
    let mut p2m = new::<F, K>(format, &heap);
    let (block, shown) = large(&mut p2m, order);
    let before = p2m.get(GFN).expect("mapped");
    let expected = Expected { mfn: shown, kind: PageKind::RamReadWrite };
    for refused in
        [Expected { mfn: OTHER, ..expected }, Expected { kind: PageKind::LogDirty, ..expected }]
    {
        let (result, owed) = edit(|skipped| p2m.clear(GFN, refused, skipped).map(drop));
        assert_eq!(result, Err(ClearError::Unexpected(before)));
        check_nothing_owed(&owed);
    }
    let stock = heap.stock.replace(0);
    let (result, owed) = edit(|skipped| p2m.clear(GFN, expected, skipped).map(drop));
    assert_eq!(result, Err(ClearError::NoTable));
    check_nothing_owed(&owed);
    assert_eq!(p2m.get(GFN), Some(before));

    heap.stock.set(stock);
    let (result, owed) = edit(|skipped| p2m.clear(GFN, expected, skipped).map(drop));
    assert_eq!(result, Ok(()));
    check_split_owed::<K>(&owed, block, order);
    assert_eq!(p2m.get(GFN), None);
    assert!(p2m.get(Gfn::new(GFN.get() + 1)).is_some());
}

#[test]
fn one_page_of_a_large_leaf_costs_the_whole_leaf_on_record() {
    for order in [9, 18] {
        for_all_tables!(grant_inside_large_leaf, order);
        for_all_tables!(page_out_of_large_leaf, order);
    }
}

#[track_caller]
fn check_not_split(gfn: u64, order: u8, mfn: u64, error: SetError) {
    let heap = Heap::new(8);
    let mut p2m = new::<_, Tlb>(EPT, &heap);
    let (block, _) = large(&mut p2m, 18);
    let gfn = Gfn::new(block.first().get() + gfn);
    let (result, owed) = edit(|skipped| {
        p2m.set(gfn, order, Mfn::new(mfn), PageKind::RamReadWrite, skipped).map(is_some)
    });
    assert_eq!(result, Err(error));
    check_nothing_owed(&owed);
    assert_eq!(p2m.get(GFN).map(|shown| shown.run), Some(block));
}

#[test]
fn a_large_leaf_is_not_split_for_a_mapping_that_cannot_be() {
    let misaligned = SetError::Unencodable(Unencodable::Frame);
    check_not_split(1, 9, 0x200, misaligned);
    check_not_split(0x200, 9, 0x201, misaligned);
    check_not_split(1, 0, 1 << 40, misaligned);
    check_not_split(1, 4, 0x200, SetError::Order(4));
}

#[test]
fn a_shared_table_tells_devices_of_what_is_new_and_one_for_cpus_tells_nobody() {
    let heap = Heap::new(16);
    let (mut shared, mut own) = (new::<_, Shared>(EPT, &heap), new::<_, Tlb>(EPT, &heap));
    let neighbour = Gfn::new(GFN.get() + 1);
    for gfn in [GFN, neighbour] {
        let owed = put(&mut shared, gfn, 0, MFN, PageKind::GrantReadOnly);
        let fresh_tables = gfn == GFN;
        assert_eq!(owed.iotlb.extent(), Extent::Runs(&[Run::single(gfn)]));
        assert_eq!(owed.iotlb.depth() == Depth::Tables, fresh_tables);
        assert_eq!(owed.iotlb.change(), Change::Added);
        check_nothing_owed(&put(&mut own, gfn, 0, MFN, PageKind::GrantReadOnly));
    }
}

fn no_room_for_tables<F: Format, K: Walkers>(format: F) {
    let heap = Heap::new(1);
    let mut p2m = new::<F, K>(format, &heap);
    let (result, owed) =
        edit(|skipped| p2m.set(GFN, 0, MFN, PageKind::RamReadWrite, skipped).map(is_some));
    assert_eq!(result, Err(SetError::NoTable));
    check_nothing_owed(&owed);
    assert_eq!(p2m.get(GFN), None);
    assert!(matches!(P2m::<F, _, K>::new(p2m.format, &heap), Err(NewError::NoTable)));
}

#[test]
fn without_pages_for_tables_nothing_changes() {
    for_all_tables!(no_room_for_tables);
}

#[test]
fn a_large_leaf_does_not_cover_smaller_mappings_but_replaces_their_empty_table() {
    let heap = Heap::new(8);
    let mut p2m = new::<_, Shared>(EPT, &heap);
    let block = Run::block(GFN, 9);
    put(&mut p2m, block.first(), 0, MFN, PageKind::RamReadWrite);
    let large = |p2m: &mut P2m<_, _, Shared>| {
        edit(|skipped| {
            p2m.set(block.first(), 9, Mfn::new(0x200), PageKind::RamReadWrite, skipped).map(is_some)
        })
    };
    let expected = Expected { mfn: MFN, kind: PageKind::RamReadWrite };
    for taken in [block.first(), GFN] {
        let (result, owed) = large(&mut p2m);
        assert_eq!(result, Err(SetError::Occupied));
        check_nothing_owed(&owed);
        put(&mut p2m, GFN, 0, MFN, PageKind::RamReadWrite);
        assert_eq!(edit(|skipped| p2m.clear(taken, expected, skipped).map(drop)).0, Ok(()));
    }
    let (result, owed) = large(&mut p2m);
    assert_eq!(result, Ok(false));
    // Walk caches may still lead to the old table.
    for cover in [&owed.tlb, &owed.iotlb] {
        assert!(cover.covers(block, Depth::Tables));
        assert_eq!(cover.change(), Change::Modified);
    }
}

fn marks_do_not_matter<F: Format, K: Walkers>(format: F, marks: u64) {
    let heap = Heap::new(8);
    let mut p2m = new::<F, K>(format, &heap);
    put(&mut p2m, GFN, 0, MFN, PageKind::GrantReadWrite);
    let expected = Expected { mfn: MFN, kind: PageKind::GrantReadWrite };
    *heap.marks.borrow_mut() = vec![marks];
    let (result, owed) = edit(|skipped| p2m.clear(GFN, expected, skipped).map(drop));
    assert_eq!(result, Ok(()));
    assert_eq!(owed, leaf::<K>(Run::single(GFN), 0));
    assert!(heap.marks.borrow().is_empty(), "the mark was set in between");
}

#[test]
fn marks_set_by_hardware_in_between_do_not_break_a_clear() {
    // Accessed and dirty: EPT bits 8 and 9, NPT bits 5 and 6.
    marks_do_not_matter::<_, Tlb>(EPT, 3 << 8);
    marks_do_not_matter::<_, Shared>(EPT, 1 << 8);
    marks_do_not_matter::<_, Tlb>(NPT, 3 << 5);
    marks_do_not_matter::<_, Shared>(NPT, 1 << 5);
}

#[test]
fn an_entry_that_changes_in_between_is_judged_by_what_it_became() {
    let heap = Heap::new(8);
    let mut p2m = new::<_, Tlb>(EPT, &heap);
    put(&mut p2m, GFN, 0, MFN, PageKind::GrantReadWrite);
    let expected = Expected { mfn: MFN, kind: PageKind::GrantReadWrite };
    // Behind the lock's back the frame changes.
    *heap.marks.borrow_mut() = vec![1 << 12];
    let (result, owed) = edit(|skipped| p2m.clear(GFN, expected, skipped).map(drop));
    let now = p2m.get(GFN).expect("still mapped");
    assert_eq!(now.mfn, Mfn::new(MFN.get() ^ 1));
    assert_eq!(result, Err(ClearError::Unexpected(now)));
    check_nothing_owed(&owed);
}

fn rights_go_and_come<F: Format, K: Walkers>(format: F, kind: PageKind) {
    let heap = Heap::new(8);
    let mut p2m = new::<F, K>(format, &heap);
    put(&mut p2m, GFN, 0, MFN, kind);
    let rest = Rest::new(Run::block(GFN, 9));
    let restrict = |p2m: &mut P2m<F, &Heap, K>, allowed| {
        let (result, owed) = edit(|skipped| {
            p2m.restrict(rest, allowed, &mut Budget::UNLIMITED.clone(), skipped)
                .map(|tally| tally.leaves)
        });
        (result.expect("nothing stops it"), owed)
    };
    let read_only = kind.access() == Access::READ;
    let once = |changed: bool| {
        let nothing = Owed { tlb: Cover::NOTHING, iotlb: Cover::NOTHING };
        if changed { (1, leaf::<K>(Run::single(GFN), 0)) } else { (0, nothing) }
    };
    assert_eq!(restrict(&mut p2m, Access::ALL), once(false));
    assert_eq!(restrict(&mut p2m, Access::READ), once(!read_only));
    let shown = p2m.get(GFN).expect("mapped");
    assert_eq!((shown.access, shown.kind, shown.mfn), (Access::READ, Some(kind), MFN));
    assert_eq!(restrict(&mut p2m, Access::READ), once(false));
    // No kind gets more back than it had.
    assert_eq!(restrict(&mut p2m, Access::ALL), once(!read_only));
    assert_eq!(p2m.get(GFN).map(|shown| shown.access), Some(kind.access()));

    // The kind stays, so restricted rights do not stand in the way of the unmap.
    restrict(&mut p2m, Access::READ);
    let expected = Expected { mfn: MFN, kind };
    assert_eq!(edit(|skipped| p2m.clear(GFN, expected, skipped).map(drop)).0, Ok(()));
}

#[test]
fn lowered_rights_are_on_record_and_come_back_as_far_as_the_kind_goes() {
    for kind in PageKind::ALL {
        for_all_tables!(rights_go_and_come, kind);
    }
}

#[test]
fn restricting_part_of_a_large_leaf_owes_all_of_it() {
    let heap = Heap::new(8);
    let mut p2m = new::<_, Shared>(EPT, &heap);
    let (block, _) = large(&mut p2m, 9);
    let part = Rest::new(Run::single(GFN));
    let (result, owed) = edit(|skipped| {
        p2m.restrict(part, Access::READ, &mut Budget::UNLIMITED.clone(), skipped).map(drop)
    });
    assert_eq!(result, Ok(()));
    check_split_owed::<Shared>(&owed, block, 9);
    let access = |gfn| p2m.get(Gfn::new(gfn)).map(|shown| shown.access);
    assert_eq!(access(GFN.get()), Some(Access::READ));
    assert_eq!(access(GFN.get() + 1), Some(Access::ALL));
}

#[test]
fn rights_that_no_leaf_can_have_are_refused() {
    let heap = Heap::new(8);
    let mut p2m = new::<_, Tlb>(EPT, &heap);
    put(&mut p2m, GFN, 0, MFN, PageKind::RamReadWrite);
    for allowed in [Access::NONE, Access::WRITE] {
        let (result, owed) = edit(|skipped| {
            p2m.restrict(
                Rest::new(Run::single(GFN)),
                allowed,
                &mut Budget::UNLIMITED.clone(),
                skipped,
            )
            .map(drop)
            .map_err(|stopped| stopped.stop)
        });
        assert_eq!(result, Err(Stop::Refused(Unencodable::Access)));
        check_nothing_owed(&owed);
    }
}

#[test]
fn an_entry_of_no_known_kind_is_shown_and_left_alone() {
    let heap = Heap::new(8);
    let mut p2m = new::<_, Tlb>(EPT, &heap);
    let tag = Tag::default();
    let strange = Leaf::new(MFN, Access::READ_WRITE).tagged(tag).cached(MemoryType::WriteBack);
    let (result, _) = edit(|skipped| {
        let mut edit = Edit::<Tlb, _>::new(skipped, Unheld);
        stage2::map(p2m.tables(), GFN, Level::PAGE, strange, Over::Vacant, &mut edit)
    });
    assert_eq!(result, Ok(None));
    let shown = p2m.get(GFN).expect("mapped");
    assert_eq!((shown.kind, shown.access), (None, Access::READ_WRITE));
    let (result, _) =
        edit(|skipped| p2m.set(GFN, 0, OTHER, PageKind::RamReadWrite, skipped).map(is_some));
    assert_eq!(result, Err(SetError::Protected(shown)));
    for kind in PageKind::ALL {
        let expected = Expected { mfn: MFN, kind };
        let (result, _) = edit(|skipped| p2m.clear(GFN, expected, skipped).map(drop));
        assert_eq!(result, Err(ClearError::Unexpected(shown)));
    }
    let (result, owed) = edit(|skipped| {
        let rest = Rest::new(Run::single(GFN));
        p2m.restrict(rest, Access::READ, &mut Budget::UNLIMITED.clone(), skipped).map(drop)
    });
    assert_eq!(result, Ok(()));
    check_nothing_owed(&owed);
    assert_eq!(p2m.get(GFN), Some(shown));
}

#[test]
fn a_removal_that_fails_puts_no_page_into_the_batch() {
    let heap = Heap::new(8);
    let mut p2m = new::<_, Shared>(EPT, &heap);
    put(&mut p2m, GFN, 0, MFN, PageKind::GrantReadWrite);
    let mut batch: Batch<&str, 4> = Batch::new(DOMAIN);
    let mut unmap = |batch: &mut Batch<&'static str, 4>, kind| {
        batch.hold(|skipped| {
            let gone = p2m.clear(GFN, Expected { mfn: MFN, kind }, skipped)?;
            Ok(("the page", gone.into()))
        })
    };
    let failed: Result<(), HoldError<ClearError>> = unmap(&mut batch, PageKind::GrantReadOnly);
    assert!(matches!(failed, Err(HoldError::Edit(ClearError::Unexpected(_)))));
    assert!(batch.is_idle());
    assert_eq!(unmap(&mut batch, PageKind::GrantReadWrite), Ok(()));
    assert_eq!(batch.len(), 1);
    assert_eq!(batch.tlb(), batch.iotlb());
    assert_eq!(batch.tlb().extent(), Extent::Runs(&[Run::single(GFN)]));
    // Given out by a flush only; this one is deliberately lost.
    drop(batch);
}

fn three_mappings<K: Walkers>(p2m: &mut P2m<Ept, &Heap, K>) -> Vec<(Run, Mfn)> {
    let (block, _) = large(p2m, 9);
    let far = Gfn::new((1 << 36) - 1);
    let grant = Gfn::new(block.last().get() + 3);
    put(p2m, grant, 0, MFN, PageKind::GrantReadWrite);
    put(p2m, far, 0, OTHER, PageKind::Foreign);
    vec![(block, Mfn::new(0x10_0000)), (Run::single(grant), MFN), (Run::single(far), OTHER)]
}

fn shown(leaves: &[(Run, Leaf)]) -> Vec<(Run, Mfn)> {
    leaves.iter().map(|(run, leaf)| (*run, leaf.mfn)).collect()
}

#[test]
fn a_range_gives_every_leaf_to_the_sink_and_stops_where_it_has_no_room() {
    let heap = Heap::new(16);
    let mut p2m = new::<_, Shared>(EPT, &heap);
    let mapped = three_mappings(&mut p2m);
    let (mut leaves, mut rest, mut stops) = (Vec::new(), Rest::new(Run::block(GFN, 36)), 0);
    loop {
        let (result, owed) = edit(|skipped| {
            let sink = Taken { leaves: &mut leaves, room: 1 };
            let budget = &mut Budget::UNLIMITED.clone();
            p2m.clear_range(rest, budget, Emptied::Keep, skipped, sink).map(drop)
        });
        let (run, _) = *leaves.last().expect("one a call");
        assert_eq!(owed, leaf::<Shared>(run, if run.pages() > 1 { 9 } else { 0 }));
        match result {
            Ok(()) => break,
            Err(stopped) => {
                assert_eq!(stopped.stop, Stop::Full);
                (rest, stops) = (stopped.rest, stops + 1);
            }
        }
    }
    assert_eq!((shown(&leaves), stops), (mapped, 2));
}

#[test]
fn a_teardown_in_steps_of_any_size_yields_every_leaf_and_every_table() {
    for budget in [1, 7, u64::MAX] {
        let heap = Heap::new(16);
        let mut p2m = new::<_, Tlb>(EPT, &heap);
        let mapped = three_mappings(&mut p2m);
        let (mut teardown, mut leaves) = (p2m.teardown(), Vec::new());
        while !teardown.is_done() {
            let mut batch: Batch<(), 1> = Batch::new(DOMAIN);
            let finished = batch.edit_many(|skipped, _| {
                let sink = Taken { leaves: &mut leaves, room: 1 };
                teardown.step(&mut Budget::new(budget), skipped, sink).is_ok()
            });
            assert_eq!(finished, teardown.is_done());
            let hardware = flush::Hardware { tlb: &Forgets, iotlb: &flush::NoIommu };
            let mut flushed = batch.flush(&hardware).expect("it always forgets");
            while let Some(table) = flushed.next_table() {
                heap.free(table.get().mfn());
            }
        }
        assert_eq!(shown(&leaves), mapped);
        assert_eq!(heap.pages(), 0, "the root too");
        let (again, owed) = edit(|skipped| {
            let sink = Taken { leaves: &mut leaves, room: 1 };
            teardown.step(&mut Budget::new(1), skipped, sink).is_ok()
        });
        assert!(again);
        check_nothing_owed(&owed);
    }
}

/// CPUs that forget at once.
struct Forgets;

impl flush::Flush<Tlb> for Forgets {
    type InFlight = ();
    type Error = core::convert::Infallible;

    fn start(&self, _: flush::DomainId, _: &Cover) {}

    fn wait(&self, (): ()) -> Result<(), Self::Error> {
        Ok(())
    }
}

/// Symptom: a page was released while its frame number still showed it. Cause: a change
/// of kind returned the page as displaced. Cure: only another page displaces one.
#[test]
fn a_page_that_changes_its_kind_is_on_record_and_not_given_away() {
    let heap = Heap::new(8);
    let mut p2m = new::<_, Tlb>(EPT, &heap);
    put(&mut p2m, GFN, 0, MFN, PageKind::RamReadWrite);
    let mut batch: Batch<Mfn, 4> = Batch::new(DOMAIN);
    batch.edit_many(|skipped, _| {
        let changed = p2m.set(GFN, 0, MFN, PageKind::RamReadOnly, skipped).unwrap();
        assert!(changed.is_none(), "{changed:?} is still mapped");
    });
    assert!(batch.tlb().covers(Run::single(GFN), Depth::Leaves));
    assert_eq!(p2m.get(GFN).map(|found| found.kind), Some(Some(PageKind::RamReadOnly)));
    batch.edit_many(|skipped, _| {
        let other = Mfn::new(MFN.get() + 1);
        let changed = p2m.set(GFN, 0, other, PageKind::RamReadWrite, skipped).unwrap();
        assert_eq!(changed.map(|was| was.mapping.mfn), Some(MFN));
    });
}
