//! Every status of map, unmap and unmap_and_replace, and which comes first.

use std::{vec, vec::Vec};

use flush::DomainId;
use zerocopy::FromZeros;

use super::fake::*;
use crate::abi::{MapGrantRef, UnmapAndReplace, UnmapGrantRef};
use crate::{Action, ClearError, Crash, PageError, Rights, Version};

/// One thing wrong with a map, the status it gives, and what undoes it.
struct MapFault {
    name: &'static str,
    status: i16,
    apply: fn(&World, &mut MapGrantRef),
    /// Faults of one group cannot happen together.
    group: u8,
}

const fn fault(
    name: &'static str,
    status: i16,
    group: u8,
    apply: fn(&World, &mut MapGrantRef),
) -> MapFault {
    MapFault { name, status, apply, group }
}

/// In order of precedence.
const MAP_FAULTS: &[MapFault] = &[
    fault("neither host nor device", -3, 1, |_, map| map.flags &= !HOST),
    fault("device map", -1, 1, |_, map| map.flags |= 1),
    fault("application map", -1, 0, |_, map| map.flags |= 1 << 3),
    fault("page-table entry map", -1, 0, |_, map| map.flags |= 1 << 4),
    fault("unknown granter", -2, 2, |_, map| map.domain = 99),
    fault("self is not translated", -2, 2, |_, map| map.domain = 0x7ff0),
    fault("policy", -8, 0, |world, _| world.denied.set(Some(Action::Map))),
    fault("no handle", -13, 0, |world, _| {
        *world.maptrack.borrow_mut() = crate::Maptrack::new(Handles::default(), 0);
    }),
    fault("reference just out of range", -3, 3, |_, map| map.reference = 512),
    fault("reference far out of range", -3, 3, |_, map| map.reference = u32::MAX),
    fault("no grant", -1, 4, |world, map| world.grant(GRANTER, map.reference.min(511), 0, CALLER)),
    fault("transfer", -1, 4, |world, map| world.grant(GRANTER, map.reference.min(511), 2, CALLER)),
    fault("transitive", -1, 4, |world, map| {
        world.grant(GRANTER, map.reference.min(511), 3, CALLER)
    }),
    fault("sub-page", -1, 4, |world, map| {
        world.grant(GRANTER, map.reference.min(511), PERMIT | 1 << 8, CALLER);
    }),
    fault("granted to another", -1, 4, |world, map| {
        world.grant(GRANTER, map.reference.min(511), PERMIT, OTHER);
    }),
    fault("write of a read-only grant", -1, 4, |world, map| {
        world.grant(GRANTER, map.reference.min(511), PERMIT | READ_ONLY, CALLER);
    }),
    fault("not RAM", -9, 5, |world, _| world.page_error.set(Some(PageError::NotRam))),
    fault("not present", -12, 5, |world, _| world.page_error.set(Some(PageError::NotPresent))),
    fault("no reference", -1, 5, |world, _| world.page_error.set(Some(PageError::Refused))),
    fault("guest flag", -1, 0, |_, map| map.flags |= 1 << 16),
    fault("undefined flag", -1, 0, |_, map| map.flags |= 1 << 5),
    fault("p2m", -1, 0, |world, _| world.insert_fails.set(true)),
];

/// References tests map: one reserved, one not.
const REFERENCES: [u32; 2] = [3, 200];

#[track_caller]
fn check_map(faults: &[&MapFault], version: Version, reference: u32, want: i16) {
    let names: Vec<_> = faults.iter().map(|fault| fault.name).collect();
    let world = World::new();
    world.set_version(GRANTER, version);
    let mut map = request(reference);
    for fault in faults {
        (fault.apply)(&world, &mut map);
    }
    let mapped = world.map_one(map);
    assert_eq!(mapped.status, want, "{names:?}, {version:?}, reference {reference}");
    assert_eq!((mapped.handle, mapped.dev_bus_addr), (u32::MAX, 0), "{names:?}");
    world.assert_clean();
}

#[test]
fn each_defect_of_a_map_has_its_status_and_leaves_nothing_behind() {
    for fault in MAP_FAULTS {
        for version in [Version::V1, Version::V2] {
            for reference in REFERENCES {
                check_map(&[fault], version, reference, fault.status);
            }
        }
    }
}

#[test]
fn of_two_defects_of_a_map_the_earlier_check_decides() {
    for (place, first) in MAP_FAULTS.iter().enumerate() {
        for second in &MAP_FAULTS[place + 1..] {
            if first.group == 0 || first.group != second.group {
                // Both orders of making the defects: it must not matter.
                check_map(&[first, second], Version::V1, 200, first.status);
                check_map(&[second, first], Version::V1, 200, first.status);
            }
        }
    }
}

#[test]
fn a_map_tells_handle_and_device_address_and_counts_once() {
    for (flags, rights, bits, types) in [
        (HOST, Rights::ReadWrite, READING | WRITING, 1),
        (HOST | MAP_READ_ONLY, Rights::Read, READING, 0),
    ] {
        let world = World::new();
        let low_bits = MapGrantRef { host_addr: request(9).host_addr | 0xfff, flags, ..request(9) };
        let mapped = world.map_one(low_bits);
        assert_eq!(mapped.status, 0);
        assert_eq!(mapped.dev_bus_addr, (FIRST_GFN + 9) << 12);
        assert_eq!(world.in_use(GRANTER, 9), bits);
        let count = world.count(GRANTER, 9);
        assert_eq!((count.references, count.types), (1, types));
        assert_eq!(world.p2m.borrow()[&(FIRST_GFN + 9)].rights, rights);
        assert_eq!(world.flushes.get(), (0, 0), "a new entry needs no flush");
        assert_eq!(world.unmap(&[unmap_of(&mapped)]), [0]);
        assert_eq!(world.count(GRANTER, 9).dirty, rights == Rights::ReadWrite);
        world.assert_clean();
    }
}

#[test]
fn a_read_only_grant_can_be_read() {
    let world = World::new();
    world.grant(GRANTER, 8, PERMIT | READ_ONLY, CALLER);
    let map = MapGrantRef { flags: HOST | MAP_READ_ONLY, ..request(8) };
    assert_eq!(world.map_one(map).status, 0);
}

#[test]
fn an_entry_pinned_by_another_domain_is_refused() {
    let world = World::new();
    assert_eq!(world.map_one(request(9)).status, 0);
    let begun = world.tables.borrow_mut().get_mut(&GRANTER).unwrap().begin_access(
        9,
        OTHER,
        Rights::Read,
        |index, _| index,
        |_| panic!("no page is asked for"),
    );
    assert_eq!(begun.unwrap_err(), crate::AccessError::OtherHolder);
    assert_eq!(world.in_use(GRANTER, 9), READING | WRITING);
}

#[test]
fn a_grant_can_be_mapped_128_times_each_way_and_no_more() {
    let world = World::new();
    let mut mapped = Vec::new();
    for flags in [HOST, HOST | MAP_READ_ONLY] {
        for time in 0..=128_u64 {
            let host_addr = (0x1000 * u64::from(flags) + time) << 12;
            let done = world.map_one(MapGrantRef { host_addr, flags, ..request(20) });
            assert_eq!(done.status, if time < 128 { 0 } else { -1 }, "time {time}");
            if done.status == 0 {
                mapped.push(unmap_of(&done));
            }
        }
    }
    assert_eq!(world.count(GRANTER, 20).references, 256);
    assert_eq!(world.pinned(GRANTER), 1);
    for (place, unmap) in mapped.iter().enumerate() {
        assert_eq!(
            world.in_use(GRANTER, 20),
            if place < 128 { READING | WRITING } else { READING }
        );
        assert_eq!(world.unmap(&[*unmap]), [0]);
    }
    world.assert_clean();
}

/// One thing about an unmap, and the status it gives.
type UnmapFault = (&'static str, i16, fn(&World, &mut UnmapGrantRef));

/// In order of precedence.
const UNMAP_FAULTS: &[UnmapFault] = &[
    ("handle just out of range", -4, |_, unmap| unmap.handle = 256),
    ("handle 2^31", -4, |_, unmap| unmap.handle = 1 << 31),
    ("handle 2^32 - 1", -4, |_, unmap| unmap.handle = u32::MAX),
    ("free handle", -4, |_, unmap| unmap.handle = 255),
    ("policy", -8, |world, _| world.denied.set(Some(Action::Unmap))),
    ("unknown granter", -1, |world, _| {
        world.tables.borrow_mut().remove(&GRANTER);
    }),
    ("both addresses zero", 0, |_, unmap| unmap.host_addr = 0),
    ("not a grant", -1, |world, _| world.clear_fails.set(Some(ClearError::NotGrant))),
    ("another frame", -1, |world, _| world.clear_fails.set(Some(ClearError::OtherFrame))),
    ("other rights", -1, |world, _| world.clear_fails.set(Some(ClearError::OtherRights))),
    ("tables fail", -1, |world, _| world.clear_fails.set(Some(ClearError::Failed))),
    ("nothing mapped there", -1, |_, unmap| unmap.host_addr <<= 8),
    ("top of the space", -1, |_, unmap| unmap.host_addr = unmap.host_addr.min(1) * u64::MAX),
];

#[track_caller]
fn check_unmap(faults: &[&UnmapFault], want: i16) {
    let names: Vec<_> = faults.iter().map(|fault| fault.0).collect();
    let world = World::new();
    let mapped = world.map_one(request(9));
    let mut unmap = unmap_of(&mapped);
    for fault in faults {
        (fault.2)(&world, &mut unmap);
    }
    assert_eq!(world.unmap(&[unmap]), [want], "{names:?}");
    assert_eq!(world.flushes.get(), (0, 0), "{names:?}");
    assert_eq!(world.count(GRANTER, 9).references, 1, "{names:?}");
    assert!(world.p2m.borrow().contains_key(&(FIRST_GFN + 9)), "{names:?}");
    let unknown = want == -1 && names.contains(&"unknown granter");
    let crashes = if unknown { vec![Crash::UnknownGranter { granter: GRANTER }] } else { vec![] };
    assert_eq!(*world.crashes.borrow(), crashes, "{names:?}");
    if world.tables.borrow().contains_key(&GRANTER) {
        // The mapping is as it was: a good call still finds it.
        world.denied.set(None);
        world.clear_fails.set(None);
        assert_eq!(world.unmap(&[unmap_of(&mapped)]), [0], "{names:?}");
        world.assert_clean();
    }
}

#[test]
fn each_defect_of_an_unmap_has_its_status_and_changes_nothing() {
    for fault in UNMAP_FAULTS {
        check_unmap(&[fault], fault.1);
    }
}

#[test]
fn of_two_defects_of_an_unmap_the_earlier_check_decides() {
    for (place, first) in UNMAP_FAULTS.iter().enumerate() {
        for second in UNMAP_FAULTS[place + 1..].iter().filter(|second| second.1 != first.1) {
            check_unmap(&[first, second], first.1);
        }
    }
}

#[test]
fn a_device_address_is_a_part_that_no_handle_here_has() {
    let world = World::new();
    let mapped = world.map_one(request(9));
    for (host_addr, dev_bus_addr) in [(0, mapped.dev_bus_addr), (0, 1), (0, u64::MAX)] {
        let unmap = UnmapGrantRef { host_addr, dev_bus_addr, ..unmap_of(&mapped) };
        for _ in 0..5 {
            assert_eq!(world.unmap(&[unmap]), [0]);
            assert_eq!(world.count(GRANTER, 9).references, 1);
        }
    }
    let both = UnmapGrantRef { dev_bus_addr: 0x123, ..unmap_of(&mapped) };
    assert_eq!(world.unmap(&[both]), [0]);
    world.assert_clean();
}

#[test]
fn a_handle_that_changed_meanwhile_is_bad() {
    let world = World::new();
    let mapped = world.map_one(request(9));
    let handle = mapped.handle;
    // Another vCPU unmaps the handle after the first look at it.
    world.during_policy.replace(Some(std::boxed::Box::new(move |world: &World| {
        world.maptrack.borrow_mut().free(handle);
    })));
    assert_eq!(world.unmap(&[unmap_of(&mapped)]), [-4]);
    assert_eq!(world.count(GRANTER, 9).references, 1);
}

#[test]
fn replace_is_a_plain_unmap_or_an_error() {
    let world = World::new();
    let mapped = world.map_one(request(9));
    let replace = UnmapAndReplace {
        host_addr: mapped.host_addr,
        handle: mapped.handle,
        status: POISON,
        ..UnmapAndReplace::new_zeroed()
    };
    for (want, request) in [
        (-4, UnmapAndReplace { handle: 77, new_addr: 0x1000, ..replace }),
        (-1, UnmapAndReplace { new_addr: 0x1000, ..replace }),
        (-1, UnmapAndReplace { new_addr: 1, host_addr: 0, ..replace }),
        (0, UnmapAndReplace { host_addr: 0, ..replace }),
        (0, replace),
        (-4, replace),
    ] {
        assert_eq!(world.replace(request), want, "{request:?}");
    }
    assert_eq!(world.flushes.get(), (1, 1));
    world.assert_clean();
}

#[test]
fn a_granter_that_is_gone_does_not_keep_the_page() {
    let world = World::new();
    let mapped = world.map_one(request(9));
    // It disappears between the clearing and the flush, which fails at first.
    world.flush_fails.set(Some(0));
    world.write(ARRAY, &[unmap_of(&mapped)]);
    assert_eq!(world.call(1, 1), crate::Outcome::Failed(crate::Errno::Fault));
    world.tables.borrow_mut().remove(&GRANTER);
    world.flush_fails.set(None);
    let mut held = world.held.borrow_mut().pop().unwrap();
    let hardware = crate::Domain::hardware(&world);
    crate::give_out(&world, held.retry(&hardware).unwrap());
    assert_eq!(world.count(GRANTER, 9).references, 0);
    assert!(world.crashes.borrow().is_empty());
}

#[test]
fn reserved_domain_numbers_are_unknown_granters() {
    for number in [0x7ff0, 0x7ff1, 0x7ff2, 0xffff] {
        let world = World::new();
        let map = MapGrantRef { domain: DomainId::new(number).get(), ..request(9) };
        assert_eq!(world.map_one(map).status, -2);
    }
}
