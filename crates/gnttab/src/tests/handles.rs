//! Handles: first in first out, per vCPU, grown by pages, each freed once.

use std::{boxed::Box, vec::Vec};

use super::fake::*;
use crate::abi::{MapGrantRef, UnmapGrantRef};
use crate::{Maptrack, VcpuId};

fn map_at(world: &World, place: u64) -> MapGrantRef {
    let reference = (place % 500) as u32;
    world.map_one(MapGrantRef { host_addr: (FIRST_GFN + place) << 12, ..request(reference) })
}

#[test]
fn a_freed_handle_is_the_last_to_come_back() {
    let world = World::with_handles(1);
    let first = map_at(&world, 0);
    assert_eq!(world.unmap(&[unmap_of(&first)]), [0]);
    let mut seen = Vec::new();
    for place in 0..256 {
        seen.push(map_at(&world, place).handle);
    }
    assert_eq!(seen.last(), Some(&first.handle));
    seen.sort_unstable();
    assert!(seen.into_iter().eq(0..256));
}

#[test]
fn handles_come_back_in_the_order_they_were_freed() {
    let world = World::with_handles(1);
    let mapped: Vec<_> = (0..256).map(|place| map_at(&world, place)).collect();
    let freed = [200, 3, 77, 0, 255];
    for place in freed {
        assert_eq!(world.unmap(&[unmap_of(&mapped[place])]), [0]);
    }
    let again: Vec<_> = (0..5).map(|place| map_at(&world, 1000 + place).handle).collect();
    assert_eq!(again, freed.map(|place| mapped[place].handle));
}

#[test]
fn the_map_beyond_the_last_handle_fails_alone() {
    let world = World::with_handles(1);
    let mapped: Vec<_> = (0..257).map(|place| map_at(&world, place)).collect();
    let statuses: Vec<_> = mapped.iter().map(|map| map.status).collect();
    assert!(statuses[..256].iter().all(|status| *status == 0));
    assert_eq!(statuses[256], -13);
    assert_eq!(world.count(GRANTER, 256).references, 0);
    for map in &mapped[..256] {
        assert_eq!(world.unmap(&[unmap_of(map)]), [0]);
        assert_eq!(world.unmap(&[unmap_of(map)]), [-4], "a freed handle is bad");
    }
    world.assert_clean();
    world.assert_handles_free(256);
}

#[test]
fn a_map_that_fails_gives_its_handle_back() {
    let world = World::with_handles(1);
    for _ in 0..300 {
        world.insert_fails.set(true);
        assert_eq!(map_at(&world, 1).status, -1);
        world.insert_fails.set(false);
        assert_eq!(world.map_one(MapGrantRef { reference: 9999, ..request(0) }).status, -3);
    }
    world.assert_handles_free(256);
}

#[test]
fn handles_grow_by_pages_up_to_the_limit() {
    let world = World::with_handles(2);
    assert_eq!(world.maptrack.borrow().handles(), 0);
    map_at(&world, 0);
    assert_eq!(world.maptrack.borrow().handles(), 256);
    for place in 1..=256 {
        assert_eq!(map_at(&world, place).status, 0);
    }
    assert_eq!(world.maptrack.borrow().handles(), 512);
}

#[test]
fn a_vcpu_without_handles_takes_one_of_another() {
    let world = World::with_handles(1);
    let mine = map_at(&world, 0);
    world.vcpu.set(3);
    // No page can be added: vCPU 0 has 255 left.
    let taken = map_at(&world, 1);
    assert_eq!((taken.status, taken.handle), (0, mine.handle + 1));
    // It stays with the vCPU that took it.
    assert_eq!(world.unmap(&[unmap_of(&taken)]), [0]);
    assert_eq!(map_at(&world, 2).handle, taken.handle);
    world.vcpu.set(0);
    assert_eq!(map_at(&world, 3).handle, mine.handle + 2);
}

#[test]
fn each_vcpu_reuses_its_own_handles() {
    let world = World::with_handles(2);
    let of_0 = map_at(&world, 0);
    world.vcpu.set(1);
    let of_1 = map_at(&world, 1);
    assert_eq!((of_0.handle, of_1.handle), (0, 256));
    // A handle goes back to its owner's list, whoever unmaps.
    assert_eq!(world.unmap(&[unmap_of(&of_0)]), [0]);
    let next: Vec<_> = (0..255).map(|place| map_at(&world, 10 + place).handle).collect();
    assert!(next.iter().all(|handle| (257..512).contains(handle)));
}

#[test]
fn a_vcpu_that_does_not_exist_gets_no_handle() {
    let world = World::with_handles(2);
    map_at(&world, 0);
    world.vcpu.set(4);
    assert_eq!(map_at(&world, 1).status, -13);
    world.vcpu.set(u32::MAX);
    assert_eq!(map_at(&world, 1).status, -13);
}

#[test]
fn a_limit_beyond_what_handles_can_name_is_cut() {
    let mut maptrack = Maptrack::new(Handles::default(), usize::MAX);
    assert!(maptrack.reserve(VcpuId(0)).is_some());
    assert_eq!(maptrack.handles(), 256);
    assert_eq!(maptrack.live(u32::MAX, |index, _| index), None);
}

#[test]
fn freeing_twice_puts_a_handle_on_the_list_once() {
    let world = World::with_handles(1);
    let mapped = map_at(&world, 0);
    for _ in 0..3 {
        world.maptrack.borrow_mut().free(mapped.handle);
        world.maptrack.borrow_mut().free(1 << 30);
    }
    let mut maptrack = world.maptrack.borrow_mut();
    let taken = (0..300).filter_map(|_| maptrack.reserve(VcpuId(0))).count();
    assert_eq!(taken, 256);
}

/// Another vCPU ends the mapping behind the second element, after all were read and looked up,
/// and gets the same handle again for the same grant at `place`.
#[track_caller]
fn check_handle_that_came_back(place: u64, want: i16) {
    let world = World::with_handles(1);
    let mapped: Vec<_> = (0..256).map(|place| map_at(&world, place)).collect();
    let (first, second) = (mapped[0], mapped[1]);
    world.during_write.replace(Some(Box::new(move |world: &World| {
        assert_eq!(world.unmap(&[unmap_of(&second)]), [0]);
        let host_addr = (FIRST_GFN + place) << 12;
        let again = world.map_one(MapGrantRef { host_addr, ..request(second.reference) });
        assert_eq!((again.status, again.handle), (0, second.handle));
    })));
    assert_eq!(world.unmap(&[first, second].map(|map| unmap_of(&map))), [0, want]);
    assert!(world.during_write.borrow().is_none(), "it came in between");
    let left = i64::from(want != 0);
    assert_eq!(world.count(GRANTER, 1).references, left);
    assert_eq!(world.p2m.borrow().contains_key(&(FIRST_GFN + place)), want != 0);
    if want != 0 {
        // Nothing of the try is left: the new mapping can be ended by whoever knows its place.
        let host_addr = (FIRST_GFN + place) << 12;
        assert_eq!(world.unmap(&[UnmapGrantRef { host_addr, ..unmap_of(&second) }]), [0]);
    }
    for map in &mapped[2..] {
        assert_eq!(world.unmap(&[unmap_of(map)]), [0]);
    }
    world.assert_clean();
    world.assert_handles_free(256);
}

#[test]
fn a_handle_that_came_back_meanwhile_ends_what_is_at_the_address_or_nothing() {
    check_handle_that_came_back(1, 0);
    check_handle_that_came_back(1000, -1);
}
