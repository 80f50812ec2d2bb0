//! Pages that are cleared one after the other in tables that the memory lends.

use flush::{Batch, DomainId, Gfn, Iotlb, Mfn, Run, Tlb};
use stage2::format::arm64::{Arm64, Granule};
use stage2::format::ept::{Ept, EptLevels};
use stage2::format::npt::{Npt, NptLevels};
use stage2::format::vtd::{Vtd, VtdLevels};
use stage2::{
    Access, Format, Leaf, Level, Likely, Near, Over, PageError, Path, Tables, clear_page_near,
    lookup, map, split,
};

use crate::lending::Lending;
use crate::log::Log;
use crate::pages::HARDWARE;

const RIGHTS: [Access; 2] = [Access::READ_WRITE, Access::READ];

fn put<F: Format>(tables: Tables<'_, F, Lending>, gfn: u64, leaf: Leaf) {
    let mapped = map(tables, Gfn::new(gfn), Level::PAGE, leaf, Over::Vacant, &mut Log::new());
    mapped.expect("nothing is there");
}

fn found<F: Format>(tables: Tables<'_, F, Lending>, gfn: u64) -> Option<Leaf> {
    let gfn = Gfn::new(gfn);
    lookup(tables, gfn).unwrap().leaf_at(gfn).map(|(leaf, mfn)| Leaf { mfn, ..leaf })
}

fn random() -> impl FnMut(u64) -> u64 {
    let mut state = 0x9e37_79b9_7f4a_7c15_u64;
    move |below| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state % below
    }
}

/// Pages of several frames and rights in several tables, cleared in any order, some of them
/// expected to show another frame or other rights, or taken out of a large leaf.
fn check<F: Format>(format: &F) {
    let memory = Lending::new(format, 64);
    let tables = memory.tables(format);
    let geometry = format.geometry();
    let (page, table) = (1 << geometry.order(Level::PAGE), 1_u64 << geometry.order(Level::ONE));
    let mut next = random();
    let mut ends = [0; 3];
    let mut path = Path::NEW;
    for _ in 0..400 {
        for _ in 0..next(6) {
            let gfn = next(4) * table + next(6) * page;
            let leaf = Leaf::new(Mfn::new((1 + next(2)) * page), RIGHTS[next(2) as usize]);
            if found(tables, gfn).is_none() {
                put(tables, gfn, leaf);
            }
        }
        let mut batch = Batch::<(), 1>::new(DomainId::new(1));
        let mut gone = Vec::new();
        batch.edit_many(|skipped, _| {
            let mut near = Near::new(tables, &mut path);
            for _ in 0..next(6) {
                let gfn = next(5) * table + next(6) * page;
                let mfn = Mfn::new((1 + next(2)) * page);
                let model = Leaf::new(mfn, RIGHTS[next(2) as usize]);
                let was = found(tables, gfn);
                let same = |leaf: &Leaf| leaf.same_mapping(&model);
                let likely = Likely::new(format, model);
                let result = near.clear::<Iotlb>(Gfn::new(gfn), mfn, skipped, &likely, same);
                let expected = match was {
                    None => Err(PageError::Absent),
                    Some(leaf) if leaf.same_mapping(&model) => Ok(()),
                    Some(leaf) => Err(PageError::Unexpected(leaf)),
                };
                assert_eq!(result.map(drop), expected, "{gfn:#x}");
                let after = if expected.is_ok() { None } else { was };
                assert_eq!(found(tables, gfn), after);
                match expected {
                    Ok(()) => gone.push(gfn),
                    Err(PageError::Absent) => ends[1] += 1,
                    Err(_) => ends[2] += 1,
                }
            }
        });
        ends[0] += gone.len();
        gone.sort_unstable();
        gone.dedup();
        assert_eq!(batch.iotlb().pages(), gone.len() as u64 * page, "what went, and no more");
        let covers = |gfn| batch.iotlb().covers(Run::block(Gfn::new(gfn), 0), flush::Depth::Leaves);
        assert!(gone.into_iter().all(covers));
        assert!(batch.flush(&HARDWARE).is_ok());
        memory.check();
    }
    assert!(ends.iter().all(|count| *count > 50), "{ends:?}");
}

#[test]
fn pages_of_tables_that_are_lent_go_as_expected_and_are_counted_and_recorded() {
    check(&Ept::new(EptLevels::Four));
    check(&Npt::new(NptLevels::Four));
    check(&Vtd::new(VtdLevels::Three));
    check(&Arm64::new(Granule::Kib16, 48).unwrap());
}

#[test]
fn pages_of_one_lent_table_are_found_without_a_read_once_one_of_them_was() {
    let format = Ept::new(EptLevels::Four);
    let memory = Lending::new(&format, 8);
    let tables = memory.tables(&format);
    let leaf = |gfn| Leaf::new(Mfn::new(gfn + 7), Access::READ_WRITE);
    (0..32).for_each(|gfn| put(tables, gfn, leaf(gfn)));
    // Hardware marks as it likes.
    for (index, marks) in [(1, 1 << 8), (7, 3 << 8), (31, 1 << 9)] {
        memory.mark(index, marks);
    }
    let (mut path, mut batch) = (Path::NEW, Batch::<(), 1>::new(DomainId::new(1)));
    memory.asked.set(0);
    memory.lent.set(0);
    batch.edit_many(|skipped, _| {
        let mut near = Near::new(tables, &mut path);
        let likely = Likely::new(&format, leaf(0));
        for gfn in 0..32 {
            let (at, mfn) = (Gfn::new(gfn), leaf(gfn).mfn);
            let gone = near.clear::<Iotlb>(at, mfn, skipped, &likely, |_| panic!("as likely"));
            assert!(gone.is_ok());
        }
    });
    assert_eq!((memory.asked.get(), memory.lent.get()), (3, 1));
    assert!(batch.flush(&HARDWARE).is_ok());
}

const LEAF: Leaf = Leaf::new(Mfn::new(9), Access::READ_WRITE);

/// Pages 5 and 6 are in the CPUs' table, page 5 shows `device` in the devices'. Clears page
/// `gfn` of the one and page 5 of the other, each if both show what they should. Returns
/// whether they went, what is still mapped, and what is on record for either.
fn clear_both(gfn: u64, device: Option<Leaf>) -> (bool, [bool; 2], [Vec<Run>; 2]) {
    let (ept, vtd) = (Ept::new(EptLevels::Four), Vtd::new(VtdLevels::Four));
    let memory = [Lending::new(&ept, 8), Lending::new(&vtd, 8)];
    let (cpus, devices) = (memory[0].tables(&ept), memory[1].tables(&vtd));
    [5, 6].iter().for_each(|gfn| put(cpus, *gfn, LEAF));
    device.into_iter().for_each(|leaf| put(devices, 5, leaf));
    let mut paths = [Path::NEW, Path::NEW];
    let mut batch = Batch::<(), 1>::new(DomainId::new(1));
    let held = batch.hold(|skipped| {
        let [cpu, device] = &mut paths;
        let (mut cpu, mut device) = (Near::new(cpus, cpu), Near::new(devices, device));
        let (mfn, likely) = (LEAF.mfn, [Likely::new(&ept, LEAF), Likely::new(&vtd, LEAF)]);
        let cpu = cpu.shown::<Tlb>(Gfn::new(gfn), mfn, &likely[0]).ok_or(())?;
        let device = device.shown::<Iotlb>(Gfn::new(5), mfn, &likely[1]).ok_or(())?;
        Ok::<_, ()>(((), cpu.clear_with(device, skipped)))
    });
    let runs = [batch.tlb(), batch.iotlb()].map(|cover| cover.runs().map(|run| run.0).collect());
    let mut flushed = batch.flush(&HARDWARE).unwrap();
    assert_eq!(flushed.next_page().is_some(), held.is_ok());
    memory.iter().for_each(Lending::check);
    let left = [found(cpus, gfn), found(devices, 5)].map(|found| found.is_some());
    (held.is_ok(), left, runs)
}

#[test]
fn a_page_goes_from_both_tables_or_from_neither_and_is_recorded_for_both() {
    let page = |gfn| vec![Run::single(Gfn::new(gfn))];
    let gone = (true, [false, false], [page(5), page(5)]);
    assert_eq!(clear_both(5, Some(LEAF)), gone);
    let kept = |device| (false, [true, device], [vec![], vec![]]);
    assert_eq!(clear_both(5, None), kept(false));
    assert_eq!(clear_both(5, Some(Leaf { mfn: Mfn::new(8), ..LEAF })), kept(true));
    assert_eq!(clear_both(5, Some(Leaf { access: Access::READ, ..LEAF })), kept(true));
}

/// An embedder in error joins halves of two pages: each is on record where it was.
#[test]
fn halves_of_two_pages_go_on_record_each_for_its_own_kind() {
    let page = |gfn| vec![Run::single(Gfn::new(gfn))];
    assert_eq!(clear_both(6, Some(LEAF)), (true, [false, false], [page(6), page(5)]));
}

#[test]
fn a_page_that_its_format_cannot_say_is_not_shown_and_is_cleared_the_longer_way() {
    let format = Vtd::new(VtdLevels::Four);
    let memory = Lending::new(&format, 8);
    let tables = memory.tables(&format);
    put(tables, 5, LEAF);
    let odd = Leaf { access: Access::EXECUTE, ..LEAF };
    let likely = Likely::new(&format, odd);
    let (mut path, mut batch) = (Path::NEW, Batch::<(), 1>::new(DomainId::new(1)));
    batch.edit_many(|skipped, _| {
        let mut near = Near::new(tables, &mut path);
        for gfn in [4, 5] {
            assert!(near.shown::<Iotlb>(Gfn::new(gfn), Mfn::new(0), &likely).is_none());
        }
        let accept = |found: &Leaf| *found == LEAF;
        assert!(near.clear::<Iotlb>(Gfn::new(5), LEAF.mfn, skipped, &likely, accept).is_ok());
    });
    assert!(batch.flush(&HARDWARE).is_ok());
    memory.check();
}

/// A part of a large leaf is recorded as large as that leaf, so it is not like other pages.
#[test]
fn a_part_of_a_large_leaf_is_cleared_the_longer_way() {
    let format = Ept::new(EptLevels::Four);
    let memory = Lending::new(&format, 8);
    let tables = memory.tables(&format);
    let large = Leaf { mfn: Mfn::new(512), ..LEAF };
    let mut log = Log::new();
    map(tables, Gfn::new(0), Level::ONE, large, Over::Vacant, &mut log).unwrap();
    split(tables, Gfn::new(3), Level::PAGE, &mut log).unwrap();
    let (mut path, mut batch) = (Path::NEW, Batch::<(), 1>::new(DomainId::new(1)));
    let part = Leaf { mfn: Mfn::new(515), origin: Level::ONE, ..LEAF };
    let cleared = batch.edit_many(|skipped, _| {
        let (at, path) = (Gfn::new(3), &mut path);
        clear_page_near::<Iotlb, _, _>(tables, path, at, skipped, part, |_| true).is_ok()
    });
    assert_eq!((cleared, batch.iotlb().order()), (true, 9));
    assert!(batch.flush(&HARDWARE).is_ok());
    memory.check();
}
