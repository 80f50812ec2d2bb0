//! Pages that move or are displaced, and domains that end.

use std::{boxed::Box, vec::Vec};

use super::fake::*;
use crate::abi::MapGrantRef;
use crate::{Crash, Errno, Outcome, Teardown, release_all};

fn own(reference: u32, gfn: u64) -> MapGrantRef {
    MapGrantRef { host_addr: gfn << 12, domain: CALLER.get(), ..request(reference) }
}

#[test]
fn mapping_ones_own_grant_moves_the_page() {
    let world = World::new();
    world.grant(CALLER, 30, PERMIT, CALLER);
    let mapped = world.map_one(own(30, 0x9000));
    assert_eq!(mapped.status, 0);
    assert_eq!(world.flushes.get(), (1, 1), "its old number is flushed");
    assert!(!world.ram.borrow().contains_key(&(CALLER, 30)), "and no longer shows it");
    assert_eq!(world.count(CALLER, 30).references, 1);
    // A second mapping of the same grant finds nothing to move.
    let second = world.map_one(own(30, 0x9001));
    assert_eq!((second.status, world.flushes.get()), (0, (1, 1)));
    assert_eq!(world.unmap(&[unmap_of(&mapped), unmap_of(&second)]), [0, 0]);
    assert!(!world.ram.borrow().contains_key(&(CALLER, 30)), "it has no number now");
    world.assert_clean();
    assert_eq!(world.map_one(own(30, 0x9000)).status, -9);
}

#[test]
fn a_page_can_move_onto_itself() {
    let world = World::new();
    world.grant(CALLER, 30, PERMIT, CALLER);
    let mapped = world.map_one(own(30, 30));
    assert_eq!(mapped.status, 0);
    assert_eq!(world.unmap(&[unmap_of(&mapped)]), [0]);
    world.assert_clean();
}

#[test]
fn many_own_grants_over_own_ram_never_overfill_a_batch() {
    let world = World::new();
    let mut maps = Vec::new();
    for reference in 0..64 {
        world.grant(CALLER, reference, PERMIT, CALLER);
        maps.push(own(reference, 100 + u64::from(reference)));
    }
    let mapped = world.map(&maps);
    assert!(mapped.iter().all(|map| map.status == 0));
    let unmaps: Vec<_> = mapped.iter().map(unmap_of).collect();
    assert!(world.unmap(&unmaps).iter().all(|status| *status == 0));
    world.assert_clean();
}

#[test]
fn ram_that_a_map_displaces_waits_for_the_flush() {
    let world = World::new();
    let map = MapGrantRef { host_addr: 60 << 12, ..request(9) };
    world.busy_during_flush.borrow_mut().push((CALLER, 60, 0));
    let mapped = world.map_one(map);
    assert_eq!(mapped.status, 0);
    assert_eq!(world.flushes.get(), (1, 1));
    assert_eq!(world.count(CALLER, 60).references, 0, "dropped after the flush");
    world.busy_during_flush.borrow_mut().clear();
    // If that flush fails, the displaced page is held; the mapping exists.
    world.flush_fails.set(Some(2));
    world.write(ARRAY, &[MapGrantRef { host_addr: 61 << 12, ..request(10) }]);
    assert_eq!(world.call(0, 1), Outcome::Failed(Errno::Fault));
    assert_eq!(world.count(CALLER, 61).references, 1);
    assert_eq!(world.held.borrow()[0].len(), 1);
    assert!(world.p2m.borrow().contains_key(&61));
}

#[test]
fn a_dying_domain_gives_back_every_grant_after_full_flushes() {
    for preempt in [false, true] {
        let world = World::new();
        let mut mapped = world.map_and_prepare(70);
        // Some are gone already; the others keep their p2m entries to the end.
        assert_eq!(world.unmap(&mapped.split_off(65)), [0; 5]);
        world.flushes.set((0, 0));
        world.covers.borrow_mut().clear();
        world.preempt.set(preempt);
        let (mut from, mut rounds) = (0, 0);
        loop {
            rounds += 1;
            match release_all(&world, from) {
                Teardown::Done => break,
                Teardown::Continue(next) => from = next,
                Teardown::FlushFailed(next) => panic!("flush failed at {next}"),
            }
        }
        assert_eq!(rounds, if preempt { 3 } else { 1 });
        assert_eq!(world.flushes.get(), (3, 3));
        assert!(world.covers.borrow().iter().all(|cover| cover.pages() == u64::MAX));
        world.p2m.borrow_mut().clear();
        world.assert_clean();
        world.assert_handles_free(1024);
    }
}

#[test]
fn a_teardown_whose_flush_fails_keeps_the_pages_and_goes_on() {
    let world = World::new();
    world.map_and_prepare(40);
    world.flush_fails.set(Some(0));
    let Teardown::FlushFailed(next) = release_all(&world, 0) else { panic!("not failed") };
    assert_eq!(next, 32);
    assert_eq!((0..40).map(|frame| world.count(GRANTER, frame).references).sum::<i64>(), 40);
    assert_eq!(release_all(&world, next), Teardown::Done);
    assert_eq!((0..40).map(|frame| world.count(GRANTER, frame).references).sum::<i64>(), 32);
    assert_eq!(world.held.borrow()[0].len(), 32);
}

#[test]
fn a_teardown_reports_a_granter_it_cannot_find() {
    let world = World::new();
    world.map_and_prepare(1);
    world.tables.borrow_mut().remove(&GRANTER);
    assert_eq!(release_all(&world, 0), Teardown::Done);
    assert_eq!(*world.crashes.borrow(), [Crash::UnknownGranter { granter: GRANTER }]);
    assert_eq!(world.count(GRANTER, 0).references, 1);
}

/// Symptom: a domain's own page was at two numbers. Cause: its first map failed and kept
/// the pin until the chunk's flush, and the second took the page for one that had moved.
/// Cure: a failed map of an own grant is flushed before the next element is looked at.
#[test]
fn an_own_page_still_moves_after_a_map_of_it_failed() {
    let world = World::new();
    let taken = world.map_one(request(9));
    world.grant(CALLER, 30, PERMIT, CALLER);
    let occupied = taken.host_addr >> 12;
    let both = world.map(&[own(30, occupied), own(30, 0x9001)]);
    assert_eq!((both[0].status, both[1].status), (-1, 0));
    assert!(!world.ram.borrow().contains_key(&(CALLER, 30)), "the page is at two numbers");
}

/// Symptom: a domain's own page was at two numbers. Cause: while a first map of it was under
/// way, and about to fail, another vCPU's map took the page for one that had moved, because it
/// was pinned. Cure: a page that is pinned has moved when its insertion succeeded, not before;
/// until then the other vCPU is asked to try again.
#[test]
fn an_own_page_has_not_moved_while_its_first_map_is_under_way() {
    for fails in [false, true] {
        let world = World::new();
        world.grant(CALLER, 30, PERMIT, CALLER);
        let page = World::page(CALLER, 30);
        // The second time shows that what had moved is forgotten with its last mapping.
        for _ in 0..2 {
            let at_its_number = |world: &World| world.ram.borrow().contains_key(&(CALLER, 30));
            *world.during_insert.borrow_mut() = Some(Box::new(move |world| {
                let other = world.map_at(0x3000, own(30, 0x9001));
                assert_eq!(other.status, -12, "{fails}");
                world.insert_fails.set(fails);
                // Nor once it has failed, as long as its pin waits for the flush.
                let later: OtherVcpu = Box::new(|world| {
                    world.insert_fails.set(false);
                    assert_eq!(world.map_at(0x3000, own(30, 0x9001)).status, -12);
                });
                *world.during_write.borrow_mut() = Some(later).filter(|_| fails);
            }));
            let first = world.map_one(own(30, 0x9000));
            assert_eq!(first.status, if fails { -1 } else { 0 });
            world.insert_fails.set(false);
            assert_eq!(at_its_number(&world), fails, "it is where it was, or has moved");
            assert!(!world.p2m.borrow().contains_key(&0x9001));
            // The other vCPU tries again.
            let again = world.map_at(0x3000, own(30, 0x9001));
            assert_eq!((again.status, at_its_number(&world)), (0, false), "{fails}");
            let last: Vec<_> =
                [first, again].iter().filter(|map| map.status == 0).map(unmap_of).collect();
            assert!(world.unmap(&last).iter().all(|status| *status == 0));
            world.assert_clean();
            // The page has no number until it is given one.
            assert_eq!(world.map_one(own(30, 0x9002)).status, -9, "{fails}");
            world.ram.borrow_mut().insert((CALLER, 30), page);
        }
    }
}

/// Symptom: an element kept the status its guest had left there. Cause: the flush after a
/// failed map of an own grant came before the copy, and failed. Cure: first the status.
#[test]
fn a_failed_own_map_has_its_status_even_if_the_flush_behind_it_fails() {
    let world = World::new();
    let taken = world.map_one(request(9));
    world.grant(CALLER, 30, PERMIT, CALLER);
    let displacing = MapGrantRef { host_addr: 61 << 12, ..request(10) };
    world.write(ARRAY, &[displacing, own(30, taken.host_addr >> 12)]);
    let (cpus, devices) = world.flushes.get();
    world.flush_fails.set(Some(cpus + devices));
    assert_eq!(world.call(0, 2), Outcome::Failed(Errno::Fault));
    let statuses: Vec<i16> =
        world.read::<MapGrantRef>(ARRAY, 2).iter().map(|element| element.status).collect();
    assert_eq!(statuses, [0, -1]);
}
