//! One flush of each kind for 32 grants, and nothing dropped before it.

use std::vec::Vec;

use flush::Extent;

use super::fake::*;
use crate::abi::{MapGrantRef, UnmapGrantRef};
use crate::{Domain, Errno, Outcome, give_out};

#[test]
fn a_chunk_of_32_costs_one_flush_of_each_kind() {
    for (count, chunks) in [(0, 0), (1, 1), (31, 1), (32, 1), (33, 2), (64, 2), (65, 3), (257, 9)] {
        let world = World::new();
        world.map_and_prepare(count);
        assert_eq!(world.call(1, count), Outcome::Done);
        assert_eq!(world.flushes.get(), (chunks, chunks), "{count} grants");
        assert!(world.statuses(count as usize).iter().all(|status| *status == 0));
        world.assert_clean();
    }
}

#[test]
fn the_flush_covers_what_was_cleared_and_nothing_else() {
    let world = World::new();
    let unmaps = world.map_and_prepare(32);
    world.covers.borrow_mut().clear();
    let scattered: Vec<_> = unmaps.into_iter().step_by(2).collect();
    world.unmap(&scattered);
    for cover in world.covers.borrow().iter() {
        assert_eq!(cover.pages(), 16);
        assert!(matches!(cover.extent(), Extent::Runs(runs) if runs.len() == 16));
    }
}

#[test]
fn a_batch_that_cleared_nothing_does_not_flush() {
    let world = World::new();
    let unmaps = world.map_and_prepare(32);
    let nothing: Vec<_> = unmaps
        .iter()
        .enumerate()
        .map(|(place, unmap)| match place % 2 {
            0 => UnmapGrantRef { host_addr: 0, ..*unmap },
            _ => UnmapGrantRef { handle: 1 << 20, ..*unmap },
        })
        .collect();
    world.unmap(&nothing);
    assert_eq!(world.flushes.get(), (0, 0));
    assert!(world.unmap(&unmaps).iter().all(|status| *status == 0));
    world.assert_clean();
}

#[test]
fn each_element_has_its_own_status() {
    let world = World::new();
    let mut unmaps = world.map_and_prepare(8);
    unmaps[2].handle = 255;
    unmaps[5].host_addr = 0x6666_0000;
    unmaps[6].host_addr = 0;
    unmaps[7] = unmaps[0];
    assert_eq!(world.unmap(&unmaps), [0, 0, -4, 0, 0, -1, 0, -4]);
    let mapped: Vec<_> =
        (0..8).filter(|frame| world.count(GRANTER, *frame).references > 0).collect();
    assert_eq!(mapped, [2, 5, 6, 7]);
}

#[test]
fn maps_of_one_batch_fail_or_succeed_alone() {
    let world = World::new();
    let mut maps: Vec<_> = (0..8).map(request).collect();
    maps[2].reference = 9999;
    maps[5].host_addr = maps[4].host_addr;
    let mapped = world.map(&maps);
    let statuses: Vec<_> = mapped.iter().map(|element| element.status).collect();
    assert_eq!(statuses, [0, 0, -3, 0, 0, -1, 0, 0]);
    assert_eq!(world.flushes.get(), (1, 1), "the one that was undone");
    let good: Vec<_> = mapped.iter().filter(|map| map.status == 0).map(unmap_of).collect();
    assert_eq!(world.unmap(&good), [0; 6]);
    world.assert_clean();
}

#[test]
fn the_same_handle_twice_in_one_batch_is_unmapped_once() {
    let world = World::new();
    let unmaps = world.map_and_prepare(1);
    assert_eq!(world.unmap(&[unmaps[0]; 32])[..3], [0, -4, -4]);
    assert_eq!(world.flushes.get(), (1, 1));
    world.assert_clean();
}

#[test]
fn grants_of_several_granters_in_one_batch_go_back_to_each() {
    let world = World::new();
    // One after the other, two of one in a row, and the last one alone.
    let granters = [GRANTER, OTHER, OTHER, GRANTER, GRANTER, OTHER, GRANTER];
    let maps: Vec<_> = (20..)
        .zip(granters)
        .map(|(reference, granter)| {
            world.grant(granter, reference, PERMIT, CALLER);
            MapGrantRef { domain: granter.get(), ..request(reference) }
        })
        .collect();
    let mapped = world.map(&maps);
    assert!(mapped.iter().all(|map| map.status == 0));
    assert_eq!((world.pinned(GRANTER), world.pinned(OTHER)), (4, 3));
    let unmaps: Vec<_> = mapped.iter().map(unmap_of).collect();
    assert!(world.unmap(&unmaps).iter().all(|status| *status == 0));
    assert_eq!(world.flushes.get(), (1, 1));
    for (reference, granter) in (20..).zip(granters) {
        assert_eq!(world.in_use(granter, reference), 0, "{granter:?} {reference}");
    }
    assert_eq!((world.pinned(GRANTER), world.pinned(OTHER)), (0, 0));
    world.assert_clean();
}

#[test]
fn the_granter_sees_its_page_in_use_until_the_flush_is_done() {
    for version in [crate::Version::V1, crate::Version::V2] {
        let world = World::new();
        world.set_version(GRANTER, version);
        let read_only = MapGrantRef { flags: HOST | MAP_READ_ONLY, ..request(40) };
        let maps: Vec<_> = (8..20).map(request).chain([read_only]).collect();
        let mapped = world.map(&maps);
        *world.busy_during_flush.borrow_mut() = (8..20)
            .map(|reference| (GRANTER, reference, READING | WRITING))
            .chain([(GRANTER, 40, READING)])
            .collect();
        let unmaps: Vec<_> = mapped.iter().map(unmap_of).collect();
        assert!(world.unmap(&unmaps).iter().all(|status| *status == 0));
        assert_eq!(world.flushes.get(), (1, 1));
        world.assert_clean();
    }
}

#[test]
fn preemption_is_asked_for_between_chunks_and_loses_nothing() {
    for count in [1, 32, 33, 64, 65, 96, 97] {
        let world = World::new();
        world.map_and_prepare(count);
        world.preempt.set(true);
        world.preempt_asked.set(0);
        let mut call = crate::Call { command: 1, argument: crate::GuestAddress(ARRAY), count };
        let mut rounds = 0;
        loop {
            rounds += 1;
            match call.run(&world) {
                Outcome::Done => break,
                Outcome::Continue { done, rest } => {
                    assert_eq!(done, 32);
                    assert_eq!(rest.count, call.count - 32);
                    let unmapped = world.statuses((rounds * 32) as usize);
                    assert!(unmapped.iter().all(|status| *status == 0));
                    call = rest;
                }
                Outcome::Failed(errno) => panic!("{errno:?}"),
            }
        }
        assert_eq!(rounds, count.div_ceil(32));
        assert_eq!(world.preempt_asked.get() as u32, rounds - 1, "none after the last");
        world.assert_clean();
    }
}

#[test]
fn maps_are_preempted_likewise() {
    let world = World::new();
    world.preempt.set(true);
    let maps: Vec<_> = (0..70).map(request).collect();
    world.write(ARRAY, &maps);
    let first = world.call(0, 70);
    let Outcome::Continue { done: 32, rest } = first else { panic!("{first:?}") };
    let second = rest.run(&world);
    let Outcome::Continue { done: 32, rest } = second else { panic!("{second:?}") };
    assert_eq!(rest.count, 6);
    assert_eq!(rest.run(&world), Outcome::Done);
    assert!(world.read::<MapGrantRef>(ARRAY, 70).iter().all(|map| map.status == 0));
}

/// Unmaps 65 grants while the n-th flush fails, then retries what is held.
#[test]
fn a_flush_that_fails_at_any_position_releases_nothing_and_stops_the_call() {
    for position in 0..6 {
        let world = World::new();
        world.map_and_prepare(65);
        world.flush_fails.set(Some(position));
        assert_eq!(world.call(1, 65), Outcome::Failed(Errno::Fault));
        world.flush_fails.set(None);
        let chunk = position as u32 / 2;
        for frame in 0..65 {
            let cleared = !world.p2m.borrow().contains_key(&(FIRST_GFN + u64::from(frame)));
            assert_eq!(cleared, frame < (chunk + 1) * 32, "no further chunk");
            let released = frame < chunk * 32;
            let count = world.count(GRANTER, u64::from(frame));
            assert_eq!(count.references, i64::from(!released), "position {position}: {frame}");
            assert_eq!(count.dirty, released);
            assert_eq!(world.in_use(GRANTER, frame) == 0, released);
        }
        // What is held comes out through a flush that succeeds, and only then.
        let mut held = world.held.borrow_mut().pop().unwrap();
        let hardware = world.hardware();
        give_out(&world, held.retry(&hardware).unwrap());
        assert!(held.is_empty());
        // The handles of the failed chunk are gone; the rest is unmapped as ever.
        let done = ((chunk + 1) * 32).min(65);
        let rest: Vec<UnmapGrantRef> = world.read(ARRAY, 65).split_off(done as usize);
        assert!(world.unmap(&rest).iter().all(|status| *status == 0));
        world.assert_clean();
    }
}

#[test]
fn a_map_that_fails_after_its_insertion_drops_nothing_before_a_flush() {
    let world = World::new();
    world.insert_fails.set(true);
    world.busy_during_flush.borrow_mut().push((GRANTER, 50, READING | WRITING));
    assert_eq!(world.map_one(request(50)).status, -1);
    assert_eq!(world.flushes.get(), (1, 1));
    world.assert_clean();

    // The same with a flush that fails: the page stays counted.
    world.counts.borrow_mut().clear();
    world.flush_fails.set(Some(2));
    world.write(ARRAY, &[request(50)]);
    assert_eq!(world.call(0, 1), Outcome::Failed(Errno::Fault));
    assert_eq!(world.count(GRANTER, 50).references, 1);
    assert_eq!(world.held.borrow()[0].len(), 1);
}
