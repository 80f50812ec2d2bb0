//! A mapping gives what its grant gives, and is removed only as what it is.

use flush::Gfn;
use gnttab::{Action, Errno, Outcome};
use host::{
    Layout, Setup, World,
    calls::{Fate, Shared, map_request, operation, unmap_request},
    world::{BACKEND, DEVICE, FIRST_REFERENCE, FRONTEND, Flushes, OTHER_CPU, granted_gfn},
};
use hwmodel::Access;

const FIRST: u64 = 0x10_0000;
const LAYOUTS: [Layout; 2] = [Layout::Separate, Layout::Shared];

fn world(layout: Layout) -> World {
    World::new(Setup { layout, ..Setup::default() })
}

/// Grants a page at a fresh reference.
fn grant(world: &World, place: u32, read_only: bool) -> (u32, flush::Mfn) {
    let reference = FIRST_REFERENCE + place;
    (reference, world.grant(reference, granted_gfn(reference), read_only))
}

/// What CPU and device may do at a frame of the backend: read, write, execute; read, write.
fn reach(world: &World, gfn: Gfn) -> ([bool; 3], [bool; 2]) {
    let address = gfn.get() << 12;
    let cpu = |access| world.machine.access(OTHER_CPU, address, access).is_ok();
    (
        [Access::Read, Access::Write, Access::Execute].map(cpu),
        [
            world.machine.dma_read64(DEVICE.get(), address).is_ok(),
            world.machine.dma_write64(DEVICE.get(), address, 7).is_ok(),
        ],
    )
}

#[test]
fn cpu_and_device_get_the_rights_that_were_asked_for_and_no_others() {
    for layout in LAYOUTS {
        let world = world(layout);
        // Granted read-only, mapped read-only; then the granted rights that allow both.
        for (place, granted_read_only, read_only) in
            [(0, true, true), (1, false, true), (2, false, false)]
        {
            let (reference, mfn) = grant(&world, place, granted_read_only);
            let gfn = Gfn::new(FIRST + u64::from(place));
            let mapped = world.share_again(reference, gfn, read_only);
            let write = !read_only;
            let expected = ([true, write, false], [true, write]);
            assert_eq!(reach(&world, gfn), expected, "{layout:?}: {place}");
            assert_eq!(world.hypervisor.pages.get(mfn), (2, u32::from(write)));
            assert_eq!(world.in_use(reference), (true, write));
            assert_eq!(world.fate(&mapped), Fate::Mapped);

            let (_, statuses) = world.give_back(&[mapped]);
            assert_eq!(statuses, [0]);
            assert_eq!(reach(&world, gfn), ([false; 3], [false; 2]), "{layout:?}: {place}");
            assert_eq!(world.fate(&mapped), Fate::Back);
            // A read-only mapping cannot have dirtied its page.
            assert_eq!(world.hypervisor.pages.dirty(mfn), u64::from(write));
        }
        world.check_clean();
    }
}

#[test]
fn a_read_only_grant_is_not_mapped_for_writing() {
    for layout in LAYOUTS {
        let world = world(layout);
        let (reference, mfn) = grant(&world, 0, true);
        let gfn = Gfn::new(FIRST);
        assert_eq!(world.map(&[(reference, gfn)], false)[0].0, -1, "{layout:?}");
        assert_eq!(world.backend().lookup(gfn), None);
        assert_eq!(world.hypervisor.pages.get(mfn), (1, 0));
        assert_eq!(world.in_use(reference), (false, false));
        // Nor beside a mapping that only reads.
        let mapped = world.share_again(reference, gfn, true);
        assert_eq!(world.map(&[(reference, Gfn::new(FIRST + 1))], false)[0].0, -1);
        assert_eq!(world.fate(&mapped), Fate::Mapped);
        world.give_back(&[mapped]);
        world.take_back_and_try(&[mapped], OTHER_CPU);
        world.check_handles_free(0);
    }
}

#[test]
fn a_guest_cannot_have_written_what_it_may_only_read() {
    for layout in LAYOUTS {
        let world = world(layout);
        let (reference, mfn) = grant(&world, 0, true);
        let gfn = Gfn::new(FIRST);
        let mapped = world.share_again(reference, gfn, true);
        let before = world.fill(mfn, 1);
        // The elements are read from the granter's page, the status has no place there.
        for operation in [operation::MAP, operation::UNMAP, operation::COPY] {
            let ended = world.call(BACKEND, operation, gfn.get() << 12, 1);
            assert_eq!(ended.outcome, Outcome::Failed(Errno::Fault), "{layout:?}: {operation}");
            assert!(world.content(mfn) == before, "{layout:?}: {operation}");
        }
        world.give_back(&[mapped]);
        world.take_back_and_try(&[mapped], OTHER_CPU);
    }
}

/// Unmaps `handle` at `gfn`, neither of which fit: refused, and nothing changes.
#[track_caller]
fn check_mismatch(world: &World, handle: u32, gfn: Gfn, mapped: &[Shared]) {
    let reached: Vec<_> = mapped.iter().map(|grant| reach(world, grant.gfn)).collect();
    let mut element = [unmap_request(handle, gfn)];
    let ended = world.call_on(BACKEND, operation::UNMAP, &mut element);
    assert_eq!((ended.outcome, element[0].status), (Outcome::Done, -1), "{handle} at {gfn:?}");
    assert_eq!(ended.flushes, Flushes::default(), "{handle} at {gfn:?}");
    let after: Vec<_> = mapped.iter().map(|grant| reach(world, grant.gfn)).collect();
    assert_eq!(after, reached, "{handle} at {gfn:?}");
}

#[test]
fn a_mapping_of_another_page_or_with_other_rights_is_not_removed() {
    for layout in LAYOUTS {
        let world = world(layout);
        let (one, one_mfn) = grant(&world, 0, false);
        let (other, other_mfn) = grant(&world, 1, false);
        let at = |place| Gfn::new(FIRST + place);
        let written = world.share_again(one, at(0), false);
        let read = world.share_again(one, at(1), true);
        let second = world.share_again(other, at(2), false);
        let all = [written, read, second];
        // Other rights: the same page, mapped to be written and mapped to be read.
        check_mismatch(&world, written.handle, read.gfn, &all);
        check_mismatch(&world, read.handle, written.gfn, &all);
        // Another page, with the same and with other rights.
        check_mismatch(&world, written.handle, second.gfn, &all);
        check_mismatch(&world, second.handle, written.gfn, &all);
        check_mismatch(&world, read.handle, second.gfn, &all);
        // Not a grant at all: own memory, nothing, beyond the space.
        for gfn in [host::world::ARGUMENTS, at(9), Gfn::new(1 << 40), Gfn::new((1 << 52) - 1)] {
            check_mismatch(&world, written.handle, gfn, &all);
        }
        assert_eq!(world.hypervisor.pages.get(one_mfn), (3, 1));
        assert_eq!(world.hypervisor.pages.get(other_mfn), (2, 1));

        // Two writable mappings of one page may stand for each other: they are equal.
        let twin = world.share_again(other, at(3), false);
        let swapped =
            [Shared { gfn: twin.gfn, ..second }, Shared { gfn: second.gfn, ..twin }, written, read];
        let (_, statuses) = world.give_back(&swapped);
        assert_eq!(statuses, [0; 4], "{layout:?}");
        world.take_back_and_try(&[written, second], OTHER_CPU);
        world.check_handles_free(0);
    }
}

#[test]
fn the_low_bits_of_an_address_do_not_matter() {
    for layout in LAYOUTS {
        let world = world(layout);
        let (reference, _) = grant(&world, 0, false);
        let gfn = Gfn::new(FIRST);
        let mut map = [map_request(FRONTEND, reference, gfn, false)];
        map[0].host_addr |= 0xabc;
        world.call_on(BACKEND, operation::MAP, &mut map);
        assert_eq!((map[0].status, map[0].dev_bus_addr), (0, gfn.get() << 12), "{layout:?}");
        world.touch(gfn);
        let mut unmap = [unmap_request(map[0].handle, gfn)];
        unmap[0].host_addr |= 0x123;
        world.call_on(BACKEND, operation::UNMAP, &mut unmap);
        assert_eq!(unmap[0].status, 0, "{layout:?}");
        assert_eq!(reach(&world, gfn), ([false; 3], [false; 2]));
        world.check_clean();
    }
}

#[test]
fn what_policy_forbids_changes_nothing() {
    for layout in LAYOUTS {
        let world = world(layout);
        let (reference, mfn) = grant(&world, 0, false);
        let gfn = Gfn::new(FIRST);
        world.faults.denied.set(Some(Action::Map));
        assert_eq!(world.map(&[(reference, gfn)], false)[0].0, -8, "{layout:?}");
        assert_eq!((world.backend().lookup(gfn), world.hypervisor.pages.get(mfn)), (None, (1, 0)));
        world.faults.denied.set(Some(Action::Unmap));
        let mapped = world.share_again(reference, gfn, false);
        world.touch(gfn);
        let (ended, statuses) = world.give_back(&[mapped]);
        assert_eq!((statuses, ended.flushes), (vec![-8], Flushes::default()), "{layout:?}");
        assert_eq!(world.fate(&mapped), Fate::Mapped);
        world.faults.denied.set(None);
        let (_, statuses) = world.give_back(&[mapped]);
        assert_eq!(statuses, [0]);
        world.take_back_and_try(&[mapped], OTHER_CPU);
    }
}
