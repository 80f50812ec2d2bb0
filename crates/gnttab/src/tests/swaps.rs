//! Entries of the caller's own table that change places.

use std::vec::Vec;

use super::fake::*;
use crate::abi::{MapGrantRef, SwapGrantRef};
use crate::{Call, Errno, GrantStorage, GuestAddress, Outcome, Version};

const SWAP: u32 = 11;
const SUB_PAGE: u16 = 1 << 8;
const TRANSITIVE: u16 = 3;

fn request(first: u32, second: u32) -> SwapGrantRef {
    SwapGrantRef { first, second, status: POISON, padding: 0 }
}

/// Swaps in one call that must succeed, and tells the statuses.
#[track_caller]
fn swap(world: &World, requests: &[SwapGrantRef]) -> Vec<i16> {
    world.write(ARRAY, requests);
    assert_eq!(world.call(SWAP, requests.len() as u32), Outcome::Done);
    world.read::<SwapGrantRef>(ARRAY, requests.len()).iter().map(|done| done.status).collect()
}

/// All words of the first frame of the caller's table, and its status words.
fn words(world: &World) -> (Vec<u64>, Vec<u16>) {
    let order = core::sync::atomic::Ordering::SeqCst;
    let tables = world.tables.borrow();
    let storage = tables[&CALLER].storage();
    let shared = storage.shared(0).unwrap().iter().map(|word| word.load(order)).collect();
    let status = storage.status(0).into_iter().flatten().map(|word| word.load(order)).collect();
    (shared, status)
}

fn world(version: Version) -> World {
    let world = World::new();
    world.set_version(CALLER, version);
    for reference in 0..version.per_page() as u32 {
        world.grant(CALLER, reference, PERMIT, OTHER);
    }
    world
}

#[track_caller]
fn check(version: Version, first: u32, second: u32, want: i16) {
    let world = world(version);
    let (mut shared, mut status) = words(&world);
    let done = swap(&world, &[request(first, second)]);
    assert_eq!(done, [want], "{first} and {second}");
    if want == 0 {
        let width = 512 / version.per_page();
        let (first, second) = (first as usize, second as usize);
        (0..width).for_each(|word| shared.swap(first * width + word, second * width + word));
        if version == Version::V2 {
            status.swap(first, second);
        }
    }
    assert!(words(&world) == (shared, status), "{first} and {second}, {version:?}");
    world.assert_clean();
}

#[test]
fn two_entries_change_places_and_no_other_moves() {
    for (version, last) in [(Version::V1, 511), (Version::V2, 255)] {
        for (first, second, want) in [
            (8, 9, 0),
            (9, 8, 0),
            (0, last, 0),
            (77, 77, 0),
            (8, last + 1, -3),
            (last + 1, 8, -3),
            (u32::MAX, u32::MAX, -3),
            (last + 1, last + 1, -3),
        ] {
            check(version, first, second, want);
        }
    }
}

#[test]
fn each_sort_of_entry_moves_as_a_whole() {
    let world = world(Version::V2);
    world.grant_v2(CALLER, 20, (PERMIT | SUB_PAGE, OTHER), (100, 50), 0x1234);
    world.grant_v2(CALLER, 30, (TRANSITIVE, GRANTER), (3, 0), 0x5678);
    let (before, _) = words(&world);
    assert_eq!(swap(&world, &[request(20, 30)]), [0]);
    let (after, _) = words(&world);
    assert_eq!((&after[40..42], &after[60..62]), (&before[60..62], &before[40..42]));
    assert_eq!(swap(&world, &[request(30, 20)]), [0]);
    assert_eq!(words(&world).0, before);
}

#[test]
fn a_status_word_goes_with_its_entry() {
    // A guest may write what it likes there; nobody holds the entry, so no bit is ours.
    let world = world(Version::V2);
    let order = core::sync::atomic::Ordering::SeqCst;
    world.tables.borrow()[&CALLER].storage().status(0).unwrap()[20].store(0x60, order);
    assert_eq!(swap(&world, &[request(20, 30)]), [0]);
    let (_, status) = words(&world);
    assert_eq!((status[20], status[30]), (0, 0x60));
}

#[test]
fn an_entry_in_use_keeps_its_place() {
    for version in [Version::V1, Version::V2] {
        for (first, second) in [(20, 30), (30, 20), (20, 5)] {
            let world = world(version);
            world.grant(CALLER, 20, PERMIT, CALLER);
            let map = MapGrantRef { domain: CALLER.get(), ..super::fake::request(20) };
            let mapped = world.map_one(map);
            assert_eq!(mapped.status, 0);
            let before = words(&world);
            assert_eq!(swap(&world, &[request(first, second), request(20, 20)]), [-12, 0]);
            assert_eq!(words(&world), before);
            assert_eq!(world.unmap(&[unmap_of(&mapped)]), [0]);
            assert_eq!(swap(&world, &[request(first, second)]), [0]);
        }
    }
}

#[test]
fn what_is_mapped_after_a_swap_is_the_other_page() {
    let world = world(Version::V1);
    world.grant(CALLER, 20, PERMIT, CALLER);
    assert_eq!(swap(&world, &[request(20, 30)]), [0]);
    let map = |reference| MapGrantRef { domain: CALLER.get(), ..super::fake::request(reference) };
    assert_eq!(world.map_one(map(20)).status, -1, "that one is now granted to another");
    let mapped = world.map_one(map(30));
    assert_eq!(mapped.status, 0);
    assert_eq!(world.p2m.borrow()[&(mapped.host_addr >> 12)].mfn, World::page(CALLER, 20));
}

#[test]
fn a_swap_is_left_after_each_element_and_ends_at_a_fault() {
    let world = world(Version::V1);
    world.preempt.set(true);
    world.write(ARRAY, &[request(20, 30), request(20, 40), request(20, 50)]);
    let call = Call { command: SWAP, argument: GuestAddress(ARRAY), count: 3 };
    let Outcome::Continue { done: 1, rest } = call.run(&world) else { panic!("it goes on") };
    assert_eq!(rest.count, 2);
    world.preempt.set(false);
    world.read_fault.set(byte_of::<SwapGrantRef>(2));
    assert_eq!(rest.run(&world), Outcome::Failed(Errno::Fault));
    let statuses: Vec<_> =
        world.read::<SwapGrantRef>(ARRAY, 3).iter().map(|done| done.status).collect();
    assert_eq!(statuses, [0, 0, POISON]);
}
