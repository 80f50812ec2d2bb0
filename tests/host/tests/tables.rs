//! Table pages are freed once, after the flush; large leaves go as a whole.
//!
//! The backend's own memory is cleared in ranges, through batches that also hold the
//! tables that get empty.

use std::cell::RefCell;

use flush::{Gfn, Hardware, Mfn, Run};
use gnttab::Outcome;
use host::{
    Layout, Ram, RangeError, Setup, TakenBatch, World,
    world::{BACKEND, CALLING_CPU, DEVICE, Local, OTHER_CPU},
};
use hwmodel::{Command, Failure, Frame, FrameState, Granularity, Space, UnitConfig, UnitId};
use iommu_vtd::DmaFlush;
use p2m::{PageKind, TlbFlush};
use stage2::Access;

const LAYOUTS: [Layout; 2] = [Layout::Separate, Layout::Shared];
/// Where the backend has nothing else: a multiple of 2^18.
const RAM: u64 = 0x40_0000;
const TABLE_SPAN: u64 = 512;

fn run(first: u64, last: u64) -> Run {
    Run::new(Gfn::new(first), Gfn::new(last)).expect("first before last")
}

/// Pages with a table each, over two tables of the next level.
fn sparse(world: &World, pages: u64) -> Vec<(Gfn, Mfn)> {
    let gfns = (0..pages).map(|page| Gfn::new(RAM + 16 * TABLE_SPAN * page + page));
    gfns.map(|gfn| (gfn, world.populate_block(BACKEND, gfn, 0)))
        .inspect(|(gfn, _)| world.touch(*gfn))
        .collect()
}

#[track_caller]
fn check_clean(world: &World) {
    let mut seen = world.machine.witnesses();
    seen.extend(world.audit());
    let seen: Vec<String> = seen.iter().map(ToString::to_string).collect();
    assert!(seen.is_empty(), "{seen:#?}");
    assert_eq!(world.machine.misuses(), []);
}

fn is_free(world: &World, mfn: Mfn) -> bool {
    let frame = world.machine.frame(Frame(mfn.get())).expect("a frame of this machine");
    frame.state == FrameState::Free
}

/// Table pages in use before and after each flush of a range clear.
fn clear_watched(world: &World, run: Run) -> Vec<u64> {
    let in_use = RefCell::new(Vec::new());
    let note = |batch: &TakenBatch| {
        assert!(batch.len() <= 32);
        in_use.borrow_mut().push(world.hypervisor.memory.tables_in_use());
        // What was unlinked is still nobody else's.
        assert!(!world.audit().iter().any(|witness| witness.kind.happened()));
        assert_eq!(world.machine.misuses(), []);
    };
    let ended = world.call_as(BACKEND, |caller| {
        caller.clear_range(run, note).expect("the flush completes");
        Outcome::Done
    });
    assert_eq!(ended.outcome, Outcome::Done);
    in_use.into_inner()
}

#[test]
fn a_cleared_range_gives_back_each_table_once_and_none_before_its_flush() {
    for (layout, trees) in [(Layout::Separate, 2), (Layout::Shared, 1)] {
        for device_tlb in [false, true] {
            let world = World::new(Setup { layout, device_tlb, ..Setup::default() });
            let before = world.hypervisor.memory.tables_in_use();
            let pages = sparse(&world, 40);
            let grown = world.hypervisor.memory.tables_in_use();
            // 40 lowest tables below two of the next level, in each tree.
            assert_eq!(grown - before, trees * 42);

            let last = RAM + 16 * TABLE_SPAN * 40;
            let in_use = clear_watched(&world, run(RAM, last));
            assert_eq!(in_use[0], grown, "no table was freed before the first flush");
            assert!(in_use.len() > 1, "more than fits into one batch");
            assert!(in_use.is_sorted_by(|more, fewer| more > fewer), "some after each flush");
            assert_eq!(world.hypervisor.memory.tables_in_use(), before);
            assert!(pages.iter().all(|(_, mfn)| is_free(&world, *mfn)));
            for (gfn, _) in &pages {
                assert!(!world.device_reaches(*gfn) && !world.cpu_reaches(OTHER_CPU, *gfn));
            }
            check_clean(&world);
        }
    }
}

/// What one range clear asks the unit for.
fn iotlb_commands(world: &World, since: usize) -> Vec<(Granularity, u64, u8, bool)> {
    let told = world.machine.commands(UnitId(0)).split_off(since);
    let iotlb = |command| {
        let Command::Iotlb { granularity, page, address_mask, hint, .. } = command else {
            return None;
        };
        Some((granularity, page, address_mask, hint))
    };
    told.into_iter().filter_map(iotlb).collect()
}

#[test]
fn a_flush_with_tables_drops_the_walk_caches_of_all_that_the_tables_served() {
    for layout in LAYOUTS {
        let world = World::new(Setup { layout, ..Setup::default() });
        let gfn = Gfn::new(RAM + 5);
        world.populate_block(BACKEND, gfn, 0);
        world.touch(gfn);
        let since = world.machine.commands(UnitId(0)).len();
        clear_watched(&world, Run::block(gfn, 9));
        // The lowest table alone is empty and within the range; no hint.
        let told = iotlb_commands(&world, since);
        let covers = |(granularity, page, mask, hint): &(_, u64, u8, bool)| {
            *granularity == Granularity::Selective && *page == RAM && *mask >= 9 && !hint
        };
        assert!(told.iter().any(covers), "{layout:?}: {told:?}");
        check_clean(&world);
    }
}

#[test]
fn a_failed_flush_keeps_tables_and_pages_until_one_completes() {
    for layout in LAYOUTS {
        let world = World::new(Setup { layout, ..Setup::default() });
        let before = world.hypervisor.memory.tables_in_use();
        let pages = sparse(&world, 10);
        let grown = world.hypervisor.memory.tables_in_use();
        world.call_as(BACKEND, |caller| {
            // The tail of the unit's queue is not taken.
            world.machine.fail_operation(1, Failure::Hang);
            let whole = run(RAM, RAM + 16 * TABLE_SPAN * 10);
            let ended = caller.clear_range(whole, |_| {}).expect_err("hardware hangs");
            let RangeError::Flush(mut failure) = ended else { panic!("{ended:?}") };
            assert_eq!(failure.held.len(), 10);
            assert!(failure.held.tables() > 0);
            assert_eq!(world.hypervisor.memory.tables_in_use(), grown);
            for (gfn, mfn) in &pages {
                assert!(!is_free(&world, *mfn));
                // What the device has cached leads to a page that is kept.
                assert!(world.device_reaches(*gfn));
            }
            assert_eq!(world.machine.witnesses(), []);

            world.machine.repair();
            let hardware = Hardware { tlb: &caller.tlb, iotlb: &caller.iotlb };
            let flushed = failure.held.retry(&hardware).expect("hardware works again");
            world.hypervisor.free(flushed);
            Outcome::Done
        });
        assert!(pages.iter().all(|(_, mfn)| is_free(&world, *mfn)));
        assert_eq!(world.hypervisor.memory.tables_in_use(), before);
        assert!(!pages.iter().any(|(gfn, _)| world.device_reaches(*gfn)));
        check_clean(&world);
    }
}

#[test]
fn a_guest_taken_down_gives_back_every_table_and_page_once() {
    for layout in LAYOUTS {
        let mut world = World::new(Setup { layout, ..Setup::default() });
        let pages = sparse(&world, 40);
        let root = world.backend().cpu_root();
        let memory = world.hypervisor.memory.clone();
        let detached = world.backend().dma.detach(&world.units, &memory, 0, DEVICE);
        detached.expect("the device is detached");
        world.leave(OTHER_CPU);
        let place = world.hypervisor.guests.iter().position(|guest| guest.id() == BACKEND);
        let guest = world.hypervisor.guests.swap_remove(place.expect("the backend exists"));

        let mut end = guest.take_down();
        let mut done = false;
        while !done {
            let in_use = memory.tables_in_use();
            let mut batch = TakenBatch::new(end.id());
            done = end.step(&mut batch).expect("there is memory");
            assert_eq!(memory.tables_in_use(), in_use, "none is freed before the flush");
            let local = Local::new(&world, CALLING_CPU, root);
            let tlb = TlbFlush { guest: &end.cpus, machine: &world, local: &local };
            let iotlb = DmaFlush::new(&world.units, &end.dma);
            let flushed = batch.flush(&Hardware { tlb: &tlb, iotlb: &iotlb });
            world.hypervisor.free(flushed.expect("nothing can fail: nobody uses the guest"));
        }
        assert!(pages.iter().all(|(_, mfn)| is_free(&world, *mfn)));
        assert!(is_free(&world, root));
        assert_eq!(world.machine.misuses(), []);

        // A guest that gets the same root finds the CPU without what is left of the old one.
        let mut taken = Vec::new();
        while taken.last() != Some(&root) {
            taken.push(memory.ram().allocate(BACKEND).expect("the root is free"));
        }
        memory.ram().release(root);
        world.hypervisor.add(BACKEND, layout);
        assert_eq!(world.backend().cpu_root(), root);
        let gfn = pages[0].0;
        world.enter(BACKEND, OTHER_CPU);
        assert!(!world.cpu_reaches(OTHER_CPU, gfn));
        let (source, physical_function) = (DEVICE, DEVICE);
        let device = iommu_vtd::Device { unit: 0, source, physical_function, device_tlb: None };
        let attached = world.backend().dma.attach(&world.units, &memory, device);
        attached.expect("the device is attached");
        assert!(!world.device_reaches(gfn));
        world.populate_block(BACKEND, gfn, 0);
        world.touch(gfn);
        check_clean(&world);
    }
}

/// How one page goes out of a large leaf.
#[derive(Clone, Copy, Debug)]
enum Edit {
    Clear,
    Restrict,
    ClearRange,
}

/// Edits one page of a leaf of 2^`order` pages that every cache holds.
#[track_caller]
fn check_split(layout: Layout, order: u8, max_address_mask: u8, edit: Edit) {
    let unit = UnitConfig { max_address_mask, ..UnitConfig::default() };
    // A block of 2^order frames, aligned, above the first ones.
    let frames = (2 << order) + if order < 18 { 8192 } else { 0 };
    let world = World::new(Setup { layout, unit, frames, ..Setup::default() });
    let first = world.populate_block(BACKEND, Gfn::new(RAM), order);
    let (page, other) = (RAM + 77, RAM + 78);
    for gfn in [page, other] {
        world.touch(Gfn::new(gfn));
    }
    let since = world.machine.commands(UnitId(0)).len();
    world.call_as(BACKEND, |caller| {
        let (gfn, mfn) = (Gfn::new(page), Mfn::new(first.get() + 77));
        let mut batch = TakenBatch::new(BACKEND);
        match edit {
            Edit::Clear => {
                let expected = p2m::Expected { mfn, kind: PageKind::RamReadWrite };
                let taken = host::Taken { mfn, order: 0 };
                let held = batch.hold(|skipped| {
                    Ok::<_, p2m::ClearError>((taken, caller.guest.clear(gfn, expected, skipped)?))
                });
                held.expect("the page is cleared");
            }
            Edit::Restrict => {
                let run = Run::single(gfn);
                let done =
                    batch.edit_many(|skipped, _| caller.guest.restrict(run, Access::READ, skipped));
                done.expect("the rights are taken");
            }
            Edit::ClearRange => {
                assert_eq!(caller.clear_range(Run::single(gfn), |_| {}).expect("it completes"), 1);
            }
        }
        let hardware = Hardware { tlb: &caller.tlb, iotlb: &caller.iotlb };
        world.hypervisor.free(batch.flush(&hardware).expect("the flush completes"));
        Outcome::Done
    });
    let told = iotlb_commands(&world, since);
    let whole = if order <= max_address_mask {
        (Granularity::Selective, RAM, order)
    } else {
        (Granularity::Domain, 0, 0)
    };
    let told: Vec<_> = told.into_iter().map(|(which, page, mask, _)| (which, page, mask)).collect();
    assert_eq!(told, [whole], "{layout:?}, order {order}, {edit:?}");

    let tag = world.backend().dma.tag(0).expect("a device is attached").get();
    let cpu = Space::Cpu(world.backend().cpu_root().get() << 12);
    for space in [cpu, Space::Device { unit: UnitId(0), did: tag }] {
        assert_eq!(world.machine.settled(space, RAM, RAM + (1 << order) - 1), 0);
    }
    assert!(!world.device_reaches(Gfn::new(page)), "no write");
    assert!(!world.cpu_reaches(OTHER_CPU, Gfn::new(page)), "no write");
    world.touch(Gfn::new(other));
    assert_eq!(world.machine.witnesses(), []);
    assert_eq!(world.machine.misuses(), []);
}

#[test]
fn a_change_within_a_large_leaf_flushes_the_whole_old_leaf() {
    for layout in LAYOUTS {
        for edit in [Edit::Clear, Edit::Restrict, Edit::ClearRange] {
            check_split(layout, 9, 18, edit);
            check_split(layout, 9, 8, edit);
        }
    }
}

#[test]
fn a_change_within_a_leaf_of_a_gigabyte_flushes_all_of_it() {
    for layout in LAYOUTS {
        check_split(layout, 18, 18, Edit::Clear);
        check_split(layout, 18, 17, Edit::Restrict);
    }
}

#[test]
fn a_large_leaf_cleared_as_a_whole_is_flushed_with_its_order() {
    for layout in LAYOUTS {
        let world = World::new(Setup { layout, ..Setup::default() });
        let first = world.populate_block(BACKEND, Gfn::new(RAM), 9);
        // It keeps the table above the leaf in use.
        world.populate_block(BACKEND, Gfn::new(RAM + TABLE_SPAN), 0);
        world.touch(Gfn::new(RAM + 300));
        let since = world.machine.commands(UnitId(0)).len();
        clear_watched(&world, run(RAM, RAM + TABLE_SPAN - 1));
        let told = iotlb_commands(&world, since);
        assert_eq!(told.len(), 1, "{layout:?}");
        assert_eq!((told[0].0, told[0].1, told[0].2), (Granularity::Selective, RAM, 9));
        for offset in [0, 300, 511] {
            assert!(is_free(&world, Mfn::new(first.get() + offset)));
            assert!(!world.device_reaches(Gfn::new(RAM + offset)));
        }
        check_clean(&world);
    }
}

#[test]
fn pages_cleared_from_a_table_that_stays_are_flushed_without_it() {
    for layout in LAYOUTS {
        let world = World::new(Setup { layout, ..Setup::default() });
        let gfns: Vec<_> = (RAM..RAM + 9).map(Gfn::new).collect();
        let mfns: Vec<_> = gfns.iter().map(|gfn| world.populate_block(BACKEND, *gfn, 0)).collect();
        gfns.iter().for_each(|gfn| world.touch(*gfn));
        let since = world.machine.commands(UnitId(0)).len();
        let tables = world.hypervisor.memory.tables_in_use();
        clear_watched(&world, run(RAM, RAM + 7));
        // Eight pages, and the hint that tables may stay cached.
        assert_eq!(iotlb_commands(&world, since), [(Granularity::Selective, RAM, 3, true)]);
        assert_eq!(world.hypervisor.memory.tables_in_use(), tables);
        for (gfn, mfn) in gfns.iter().zip(&mfns).take(8) {
            assert!(is_free(&world, *mfn));
            assert!(!world.device_reaches(*gfn) && !world.cpu_reaches(OTHER_CPU, *gfn));
        }
        world.touch(gfns[8]);
        check_clean(&world);
    }
}
