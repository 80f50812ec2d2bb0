//! Maps that fail or displace, domains that end, tables that change their version.

use std::sync::{Arc, Mutex, atomic::Ordering};

use flush::{Gfn, Mfn};
use gnttab::{Errno, GrantStorage, Outcome, Status, TableFrame, Teardown, Version, release_all};
use host::{
    Layout, Ram, Setup, World,
    calls::{Fate, Shared, map_request, operation, unmap_request},
    world::{BACKEND, DEVICE, FIRST_REFERENCE, FRONTEND, Flushes, OTHER_CPU, granted_gfn},
};
use hwmodel::{Frame, FrameState, Owner};

const FIRST: u64 = 0x10_0000;
const LAYOUTS: [Layout; 2] = [Layout::Separate, Layout::Shared];

fn world(layout: Layout) -> World {
    World::new(Setup { layout, ..Setup::default() })
}

fn state(world: &World, mfn: Mfn) -> FrameState {
    world.machine.frame(Frame(mfn.get())).expect("a frame of this machine").state
}

/// Maps a fresh grant at `gfn`, which fails, and leaves everything as it was.
#[track_caller]
fn check_failed_map(world: &World, gfn: Gfn) {
    let reference = FIRST_REFERENCE + 200;
    let mfn = world.grant(reference, granted_gfn(reference), false);
    let was = world.backend().lookup(gfn);
    let reached = (world.cpu_reaches(OTHER_CPU, gfn), world.device_reaches(gfn));
    let mut element = [map_request(FRONTEND, reference, gfn, false)];
    let ended = world.call_on(BACKEND, operation::MAP, &mut element);
    assert_eq!((ended.outcome, element[0].status), (Outcome::Done, -1), "{gfn:?}");
    assert_eq!((element[0].handle, element[0].dev_bus_addr), (u32::MAX, 0), "{gfn:?}");
    assert_eq!(world.backend().lookup(gfn), was, "{gfn:?}");
    assert_eq!(world.hypervisor.pages.get(mfn), (1, 0), "{gfn:?}");
    assert_eq!(world.in_use(reference), (false, false), "{gfn:?}");
    assert_eq!(world.frontend().grants().pinned(), usize::from(was.is_some_and(is_grant)));
    let after = (world.cpu_reaches(OTHER_CPU, gfn), world.device_reaches(gfn));
    assert_eq!(after, reached, "{gfn:?}");
    world.take_back(reference, granted_gfn(reference));
    world.check_clean();
}

fn is_grant(mapping: p2m::Mapping) -> bool {
    use p2m::PageKind::{GrantReadOnly, GrantReadWrite};
    matches!(mapping.kind, Some(GrantReadOnly | GrantReadWrite))
}

#[test]
fn a_map_where_a_grant_is_or_beyond_the_space_is_undone() {
    for layout in LAYOUTS {
        let world = world(layout);
        let grants = world.share_at(FIRST, 1, 1);
        check_failed_map(&world, grants[0].gfn);
        world.touch(grants[0].gfn);
        let (_, statuses) = world.give_back(&grants);
        assert_eq!(statuses, [0]);
        for gfn in [1 << 36, (1 << 40) - 1, (1 << 52) - 1] {
            check_failed_map(&world, Gfn::new(gfn));
        }
        world.take_back_and_try(&grants, OTHER_CPU);
        world.check_handles_free(0);
    }
}

/// Maps a grant with memory for only `left` table pages: whether it went well.
#[track_caller]
fn map_with_memory(layout: Layout, left: usize) -> bool {
    let world = world(layout);
    let reference = FIRST_REFERENCE;
    let mfn = world.grant(reference, granted_gfn(reference), false);
    // The first map makes sure that there is a page of handles.
    let gfn = Gfn::new(FIRST);
    let other = FIRST_REFERENCE + 1;
    world.grant(other, granted_gfn(other), false);
    let there = world.share_again(other, gfn, false);

    // A frame whose path shares only the root with that one.
    let far = Gfn::new(FIRST + (1 << 27));
    let tables = world.hypervisor.memory.tables_in_use();
    let mut drained = Vec::new();
    while let Some(frame) = world.machine.allocate(Owner(99)) {
        drained.push(frame);
    }
    for frame in drained.drain(..left) {
        world.machine.release(frame);
    }
    let (status, handle) = world.map(&[(reference, far)], false)[0];
    let mapped = status == Status::Okay.value();
    if mapped {
        world.touch(far);
        let (_, statuses) =
            world.give_back(&[Shared { reference, gfn: far, mfn, handle, read_only: false }]);
        assert_eq!(statuses, [0]);
    } else {
        assert_eq!((status, handle), (-1, u32::MAX), "{layout:?}, {left} pages");
        assert_eq!(world.backend().lookup(far), None, "{layout:?}, {left} pages");
    }
    assert!(!world.cpu_reaches(OTHER_CPU, far) && !world.device_reaches(far));
    assert_eq!(world.hypervisor.pages.get(mfn), (1, 0), "{layout:?}, {left} pages");
    assert_eq!(world.in_use(reference), (false, false), "{layout:?}, {left} pages");
    assert_eq!(world.fate(&there), Fate::Mapped);
    world.check_clean();

    // Tables that were made stay for the next attempt, which needs no more than the rest.
    let made = world.hypervisor.memory.tables_in_use() - tables;
    for frame in drained {
        world.machine.release(frame);
    }
    let again = world.share_again(reference, far, false);
    world.touch(far);
    let needed = world.hypervisor.memory.tables_in_use() - tables;
    assert!(made <= left as u64 && made <= needed, "{layout:?}: {made} of {needed}");
    world.give_back(&[again, there]);
    world.take_back_and_try(&[again, there], OTHER_CPU);
    world.check_handles_free(0);
    mapped
}

#[test]
fn a_map_that_finds_no_memory_for_tables_is_undone() {
    // Three levels below the root, in each set of tables.
    for (layout, needed) in [(Layout::Separate, 6), (Layout::Shared, 3)] {
        for left in 0..=needed {
            assert_eq!(map_with_memory(layout, left), left == needed, "{layout:?}, {left} pages");
        }
    }
}

#[test]
fn ram_that_a_map_displaces_is_not_free_before_both_flushes_completed() {
    for layout in LAYOUTS {
        let mut setup = Setup { layout, ..Setup::default() };
        setup.unit.latency = 20;
        let world = World::new(setup);
        let gfn = Gfn::new(FIRST);
        let ram = world.hypervisor.populate(world.backend(), gfn);
        world.touch(gfn);
        world.grant(FIRST_REFERENCE, granted_gfn(FIRST_REFERENCE), false);

        let seen = Arc::new(Mutex::new(Vec::new()));
        let (machine, results) = (world.machine.clone(), Arc::clone(&seen));
        let counters = world.machine.counters();
        let before = (counters.units[0].waits, counters.cpus[OTHER_CPU].acknowledged);
        world.observe(Some(Box::new(move || {
            let counters = machine.counters();
            let flushed = (counters.units[0].waits - before.0)
                .min(counters.cpus[OTHER_CPU].acknowledged - before.1);
            let state = machine.frame(Frame(ram.get())).expect("a frame of it").state;
            results.lock().expect("no panic in here").push((flushed, state));
        })));
        let mapped = world.share_again(FIRST_REFERENCE, gfn, false);
        world.observe(None);
        let seen = seen.lock().expect("no panic in there");
        let waiting = seen.iter().filter(|(flushed, _)| *flushed == 0);
        assert!(waiting.clone().count() > 20, "{layout:?}");
        let owned = waiting.clone().all(|(_, state)| *state == FrameState::Owned);
        assert!(owned, "{layout:?}: {seen:?}");
        assert_eq!(state(&world, ram), FrameState::Free, "{layout:?}");

        // The very next owner of the frame is not reached.
        world.touch(gfn);
        world.check_clean();
        world.give_back(&[mapped]);
        world.take_back_and_try(&[mapped], OTHER_CPU);
    }
}

#[test]
fn maps_over_ram_share_flushes_and_free_all_of_it() {
    for layout in LAYOUTS {
        let world = world(layout);
        let references = FIRST_REFERENCE..FIRST_REFERENCE + 40;
        let at = |reference: u32| Gfn::new(FIRST + u64::from(reference));
        let mut ram = Vec::new();
        for reference in references.clone() {
            ram.push(world.hypervisor.populate(world.backend(), at(reference)));
            world.touch(at(reference));
            world.grant(reference, granted_gfn(reference), false);
        }
        let mut elements: Vec<_> = references
            .clone()
            .map(|reference| map_request(FRONTEND, reference, at(reference), false))
            .collect();
        let ended = world.call_on(BACKEND, operation::MAP, &mut elements);
        assert_eq!(ended.outcome, Outcome::Done);
        // A map may put three pages into the batch, so it is flushed with 30 of 32.
        assert_eq!(ended.flushes, Flushes { tlb: 3, iotlb: 3 }, "{layout:?}");
        for (reference, (mfn, element)) in references.zip(ram.iter().zip(&elements)) {
            assert_eq!(element.status, 0, "{layout:?}: {reference}");
            assert_eq!(world.hypervisor.pages.get(*mfn), (0, 0), "{layout:?}: {reference}");
            world.touch(at(reference));
        }
        world.check_clean();
    }
}

/// Writes a version 1 entry of the backend's own table.
fn grant_own(world: &World, reference: u32, gfn: Gfn) {
    let table = world.backend().grants();
    let words = table.storage().shared(0).expect("a table has a page");
    let word = 1 | u64::from(BACKEND.get()) << 16 | gfn.get() << 32;
    words[reference as usize].store(word, Ordering::SeqCst);
}

#[test]
fn a_domain_that_maps_its_own_grant_moves_the_page() {
    for layout in LAYOUTS {
        for onto_itself in [false, true] {
            let at = format!("{layout:?}, onto itself {onto_itself}");
            let world = world(layout);
            let (from, to) = (Gfn::new(FIRST), Gfn::new(FIRST + u64::from(!onto_itself) * 0x123));
            let mfn = world.hypervisor.populate(world.backend(), from);
            world.touch(from);
            grant_own(&world, FIRST_REFERENCE, from);
            let mut element = [map_request(BACKEND, FIRST_REFERENCE, to, false)];
            let ended = world.call_on(BACKEND, operation::MAP, &mut element);
            assert_eq!((ended.outcome, element[0].status), (Outcome::Done, 0), "{at}");
            assert_eq!(ended.flushes, Flushes { tlb: 1, iotlb: 1 }, "{at}: the old number");
            if !onto_itself {
                assert_eq!(world.backend().lookup(from), None, "{at}");
                assert!(!world.cpu_reaches(OTHER_CPU, from) && !world.device_reaches(from));
            }
            world.touch(to);
            assert_eq!(world.hypervisor.pages.get(mfn), (1, 1), "{at}: the mapping's alone");
            world.check_clean();

            let mut unmap = [unmap_request(element[0].handle, to)];
            let ended = world.call_on(BACKEND, operation::UNMAP, &mut unmap);
            assert_eq!((ended.outcome, unmap[0].status), (Outcome::Done, 0), "{at}");
            // It has no number now, so nobody has it.
            for gfn in [from, to] {
                assert_eq!(world.backend().lookup(gfn), None, "{at}");
                assert!(!world.cpu_reaches(OTHER_CPU, gfn) && !world.device_reaches(gfn));
            }
            assert_eq!(world.hypervisor.pages.get(mfn), (0, 0), "{at}");
            assert_eq!(state(&world, mfn), FrameState::Free, "{at}");
            world.check_clean();
            world.check_handles_free(0);
        }
    }
}

#[test]
fn a_second_mapping_of_ones_own_grant_has_nothing_to_move() {
    for layout in LAYOUTS {
        let world = world(layout);
        let mfn = world.hypervisor.populate(world.backend(), Gfn::new(FIRST));
        grant_own(&world, FIRST_REFERENCE, Gfn::new(FIRST));
        let at = |place| Gfn::new(FIRST + 8 + place);
        let mut elements: Vec<_> =
            (0..2).map(|place| map_request(BACKEND, FIRST_REFERENCE, at(place), false)).collect();
        world.call_on(BACKEND, operation::MAP, &mut elements);
        assert_eq!(elements.iter().map(|element| element.status).collect::<Vec<_>>(), [0, 0]);
        (0..2).for_each(|place| world.touch(at(place)));
        assert_eq!(world.hypervisor.pages.get(mfn), (2, 2), "{layout:?}");
        // One goes, the other stays usable.
        let mut unmap = [unmap_request(elements[0].handle, at(0))];
        world.call_on(BACKEND, operation::UNMAP, &mut unmap);
        assert_eq!(unmap[0].status, 0);
        assert!(!world.cpu_reaches(OTHER_CPU, at(0)) && !world.device_reaches(at(0)));
        world.touch(at(1));
        assert_eq!(state(&world, mfn), FrameState::Owned);
        world.check_clean();
    }
}

#[test]
fn a_dying_domain_releases_what_it_has_mapped_after_its_devices_are_gone() {
    for layout in LAYOUTS {
        let world = world(layout);
        let mut grants = world.share_at(FIRST, 3, 300);
        let (ended, _) = world.give_back(&grants.split_off(290));
        assert_eq!(ended.outcome, Outcome::Done);
        world.leave(OTHER_CPU);
        let memory = &world.hypervisor.memory;
        assert_eq!(world.backend().dma.detach(&world.units, memory, 0, DEVICE), Ok(()));
        let ended = world.call_as(BACKEND, |caller| {
            assert_eq!(release_all(caller, 0), Teardown::Done);
            Outcome::Done
        });
        // Ten chunks; the tables are left for their own teardown.
        assert_eq!(ended.flushes, Flushes { tlb: 10, iotlb: 10 }, "{layout:?}");
        assert!(ended.failed.is_empty());
        assert_eq!(world.frontend().grants().pinned(), 0);
        for grant in &grants {
            assert_eq!(world.hypervisor.pages.get(grant.mfn), (1, 0));
            assert_eq!(world.in_use(grant.reference), (false, false));
            world.take_back(grant.reference, granted_gfn(grant.reference));
            assert!(!world.device_reaches(grant.gfn), "{layout:?}: the device is detached");
        }
        world.check_unharmed();
        // A second run finds nothing.
        let ended = world.call_as(BACKEND, |caller| {
            assert_eq!(release_all(caller, 0), Teardown::Done);
            Outcome::Done
        });
        assert_eq!(ended.flushes, Flushes::default());
    }
}

/// Asks for a version of the frontend's table: how the call ended, and what is in force.
fn set_version(world: &World, version: u32) -> (Outcome, u32) {
    let mut argument = [version];
    let outcome = world.call_on(FRONTEND, operation::SET_VERSION, &mut argument).outcome;
    (outcome, argument[0])
}

#[test]
fn a_version_change_is_refused_while_a_grant_is_pinned() {
    for layout in LAYOUTS {
        let world = world(layout);
        let grants = world.share_at(FIRST, 1, 2);
        let busy = (Outcome::Failed(Errno::Busy), 1);
        assert_eq!(set_version(&world, 2), busy, "{layout:?}");
        world.check_fates(&grants, |_| Fate::Mapped);
        world.give_back(&grants[..1]);
        assert_eq!(set_version(&world, 2), busy, "{layout:?}");
        // Unmapped but not flushed is pinned as well.
        // Twice: what is refused is asked for once more.
        for operation in [2, 10] {
            world.machine.fail_operation(operation, hwmodel::Failure::QueueError);
        }
        let (ended, _) = world.give_back(&grants[1..]);
        assert_eq!(world.fate(&grants[1]), Fate::Held);
        assert_eq!(set_version(&world, 2), busy, "{layout:?}");
        assert!(world.retry(BACKEND, ended.failed).is_empty());
        assert_eq!(set_version(&world, 2), (Outcome::Done, 2), "{layout:?}");
        assert_eq!(set_version(&world, 3).0, Outcome::Failed(Errno::Invalid));
        world.check_unharmed();
    }
}

/// Writes a version 2 entry of the frontend, for a whole page.
fn write_v2(world: &World, reference: u32, flags: u64, gfn: Gfn) {
    let table = world.frontend().grants();
    let words = table.storage().shared(reference as usize / 256).expect("a page of the table");
    let head = reference as usize % 256 * 2;
    words[head + 1].store(gfn.get(), Ordering::SeqCst);
    words[head].store(flags | u64::from(BACKEND.get()) << 16, Ordering::SeqCst);
}

/// The status word of a version 2 entry.
fn status_v2(world: &World, reference: u32) -> u16 {
    let table = world.frontend().grants();
    let words = table.storage().status(reference as usize / 2048).expect("status words");
    words[reference as usize % 2048].load(Ordering::SeqCst)
}

#[test]
fn version_2_grants_are_mapped_and_given_back_with_their_bits_in_the_status_word() {
    for layout in LAYOUTS {
        let world = world(layout);
        assert_eq!(world.frontend().grants().references(), 512);
        assert_eq!(set_version(&world, 2), (Outcome::Done, 2), "{layout:?}");
        assert_eq!(world.frontend().grants().version(), Version::V2);
        assert_eq!(world.frontend().grants().references(), 256, "a page holds half as many");
        assert!(world.frontend().grants().storage().frame(TableFrame::Status(0)).is_some());

        let references = 8..48_u32;
        let pages: Vec<Mfn> = references
            .clone()
            .map(|reference| {
                let gfn = granted_gfn(reference);
                write_v2(&world, reference, 1, gfn);
                world.hypervisor.populate(world.frontend(), gfn)
            })
            .collect();
        let at = |reference: u32| Gfn::new(FIRST + u64::from(reference));
        let grants: Vec<_> =
            references.clone().map(|reference| (reference, at(reference))).collect();
        let mapped = world.map(&grants, false);
        for ((reference, (status, _)), mfn) in references.clone().zip(&mapped).zip(&pages) {
            assert_eq!(*status, 0, "{layout:?}: {reference}");
            world.touch(at(reference));
            assert_eq!(status_v2(&world, reference), 1 << 3 | 1 << 4);
            assert_eq!(world.hypervisor.pages.get(*mfn), (2, 1));
        }
        // Out of range by now, and a write of a read-only grant.
        assert_eq!(world.map(&[(256, at(300))], false)[0].0, -3);
        write_v2(&world, 60, 1 | 1 << 2, granted_gfn(8));
        assert_eq!(world.map(&[(60, at(300))], false)[0].0, -1);
        assert_eq!(status_v2(&world, 60), 0, "{layout:?}: nothing stays set");
        assert_eq!(set_version(&world, 1), (Outcome::Failed(Errno::Busy), 2));

        let handles: Vec<(u32, Gfn)> =
            references.clone().zip(&mapped).map(|(at_, (_, handle))| (*handle, at(at_))).collect();
        let ended = world.unmap(&handles);
        assert_eq!(ended.outcome, Outcome::Done);
        assert_eq!(ended.flushes, Flushes { tlb: 2, iotlb: 2 });
        for (reference, mfn) in references.zip(&pages) {
            assert_eq!(status_v2(&world, reference), 0, "{layout:?}: {reference}");
            assert_eq!(world.hypervisor.pages.get(*mfn), (1, 0));
            assert!(!world.cpu_reaches(OTHER_CPU, at(reference)));
            assert!(!world.device_reaches(at(reference)));
        }
        world.check_clean();
        assert_eq!(set_version(&world, 1), (Outcome::Done, 1));
        assert_eq!(world.frontend().grants().references(), 512);
        assert_eq!(world.in_use(8), (false, false), "{layout:?}: wiped");
    }
}

#[test]
fn a_granter_may_go_back_to_version_1_only_when_no_status_frame_is_mapped() {
    let world = world(Layout::Separate);
    assert_eq!(set_version(&world, 2), (Outcome::Done, 2));
    let frame = world.frontend().grants().storage().frame(TableFrame::Status(0));
    let frame = frame.expect("version 2 has status words");
    let map = |storage: &mut host::Grants<_>| storage.mapped_status.insert(0);
    let mapped =
        world.frontend().grants().map_frame(TableFrame::Status(0), |storage, _| map(storage));
    assert_eq!(mapped, Ok(true));
    assert_eq!(set_version(&world, 1), (Outcome::Failed(Errno::Busy), 2));
    assert_eq!(state(&world, frame), FrameState::Owned);
    let unmap = |storage: &mut host::Grants<_>| storage.mapped_status.remove(&0);
    let unmapped =
        world.frontend().grants().map_frame(TableFrame::Status(0), |storage, _| unmap(storage));
    assert_eq!(unmapped, Ok(true));
    assert_eq!(set_version(&world, 1), (Outcome::Done, 1));
    assert_eq!(state(&world, frame), FrameState::Free);
    assert!(world.hypervisor.memory.ram().words(frame).is_some());
}
