//! Arguments that are lent: elements go together, and end as they do one by one.

use core::sync::atomic::Ordering;
use std::{boxed::Box, format, string::String, vec, vec::Vec};

use zerocopy::FromZeros;

use super::fake::*;
use crate::abi::{MapGrantRef, UnmapGrantRef};
use crate::{Action, ClearError, Domain, GuestAddress, Outcome};

/// A world that lends, and one that copies.
fn both() -> [World; 2] {
    [true, false].map(|lends| {
        let world = World::new();
        world.lends.set(lends);
        world
    })
}

/// Everything that a call leaves behind, the order of free handles included.
fn books(world: &World) -> String {
    let in_use: Vec<u16> = [GRANTER, OTHER]
        .into_iter()
        .flat_map(|granter| (0..40).map(move |reference| (granter, reference)))
        .map(|(granter, reference)| world.in_use(granter, reference))
        .collect();
    let left = format!(
        "{:?} {:?} {:?} {in_use:?} {:?} {:?} {:?}",
        world.statuses(40),
        world.p2m.borrow(),
        world.counts.borrow(),
        world.covers.borrow(),
        world.flushes.get(),
        world.crashes.borrow(),
    );
    let handles = (300..364).map(|place| world.map_one(request(place)).handle);
    format!("{left} {:?}", handles.collect::<Vec<_>>())
}

/// Maps 40 grants of two granters, by four vCPUs.
fn mapped(world: &World) -> Vec<MapGrantRef> {
    (0..40_u32)
        .map(|place| {
            world.vcpu.set(place / 3 % 4);
            let granter = if place % 5 < 3 { GRANTER } else { OTHER };
            let flags = HOST | if place % 7 == 0 { MAP_READ_ONLY } else { 0 };
            let mapped =
                world.map_one(MapGrantRef { domain: granter.get(), flags, ..request(place) });
            assert_eq!(mapped.status, 0);
            mapped
        })
        .collect()
}

/// Gives `victim` back, as another vCPU does.
fn unmap_elsewhere(world: &World, victim: UnmapGrantRef) {
    let lends = world.lends.replace(false);
    world.write(0x4000, &[victim]);
    let call = crate::Call { command: 1, argument: GuestAddress(0x4000), count: 1 };
    assert_eq!(call.run(world), Outcome::Done);
    world.lends.set(lends);
}

#[test]
fn elements_that_go_together_end_as_they_do_one_by_one() {
    let mut state = 0x9e37_79b9_7f4a_7c15_u64;
    let mut next = move || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state
    };
    let mut longest = 0;
    for round in 0..150 {
        let (count, plain, command) = (next() % 40 + 1, next() % 3 == 0, [1, 7][round % 2]);
        let choices: Vec<_> = (0..count).map(|_| (next(), next(), next())).collect();
        let (race, victim) = (next() % 3 == 0, next());
        let (second, denied) = (next(), next() % 16 == 0);
        let left: Vec<String> = both()
            .into_iter()
            .map(|world| {
                let mapped = mapped(&world);
                let mut unmaps = Vec::new();
                for (place, (which, how, other)) in choices.iter().enumerate() {
                    let which = if plain { place as u64 } else { *which };
                    let mut unmap = unmap_of(&mapped[which as usize % 40]);
                    match if plain { 99 } else { how % 16 } {
                        0 => unmap.handle = *other as u32,
                        1 => unmap.handle = (*other % 1024) as u32,
                        2 => unmap.host_addr = mapped[*other as usize % 40].host_addr,
                        3 => unmap.host_addr = 0,
                        4 => unmap.dev_bus_addr = *other,
                        5 => unmap.host_addr = *other,
                        _ => {}
                    }
                    unmaps.push(unmap);
                }
                world.write(ARRAY, &unmaps);
                world.covers.borrow_mut().clear();
                world.flushes.set((0, 0));
                world.second.set(second as usize % 97);
                world.denied.set(denied.then_some(Action::Unmap));
                if race {
                    let victim = unmap_of(&mapped[victim as usize % 40]);
                    *world.during_policy.borrow_mut() =
                        Some(Box::new(move |world| unmap_elsewhere(world, victim)));
                }
                assert_eq!(world.call(command, count as u32), Outcome::Done);
                world.denied.set(None);
                *world.during_policy.borrow_mut() = None;
                longest = world.together.borrow().iter().copied().fold(longest, usize::max);
                books(&world)
            })
            .collect();
        assert!(left[0] == left[1], "round {round}:\n{:.200}\n{:.200}", left[0], left[1]);
    }
    assert!(longest >= 3, "{longest} went together");
}

#[test]
fn a_whole_chunk_of_one_granter_goes_together_and_the_next_waits_for_its_flush() {
    let world = World::new();
    world.lends.set(true);
    let count = 40;
    world.map_and_prepare(count);
    assert_eq!(world.call(1, count), Outcome::Done);
    assert_eq!(*world.together.borrow(), [32, 8]);
    assert_eq!((world.reads.get(), world.writes.get()), (0, 0), "nothing was copied");
    assert_eq!(world.flushes.get(), (2, 2));
    assert_eq!(world.statuses(count as usize), [0; 40]);
    world.assert_clean();
}

#[test]
fn what_cannot_be_lent_is_copied() {
    let world = World::new();
    let unmaps = world.map_and_prepare(3);
    // Words are lent from an address that eight divides.
    world.lends.set(true);
    world.write(ARRAY + 4, &unmaps);
    let call = crate::Call { command: 1, argument: GuestAddress(ARRAY + 4), count: 3 };
    assert_eq!(call.run(&world), Outcome::Done);
    assert!(world.together.borrow().is_empty());
    world.assert_clean();
}

#[test]
fn another_number_of_words_than_was_asked_for_is_not_used() {
    for amiss in [-1, 1] {
        let world = World::new();
        let unmaps = world.map_and_prepare(3);
        world.lends.set(true);
        world.lends_amiss.set(amiss);
        assert_eq!(world.unmap(&unmaps), [0; 3]);
        assert!(world.together.borrow().is_empty(), "{amiss} words");
        world.assert_clean();
    }
}

/// Of one handle that is there twice, the second ends as the first left it.
#[test]
fn a_handle_that_is_there_twice_is_looked_at_twice() {
    for (first, statuses) in [(0x6666_0000, [-1, 0]), (0, [0, 0])] {
        for world in both() {
            let [unmap] = world.map_and_prepare(1)[..] else { panic!("one was mapped") };
            let unmaps = [UnmapGrantRef { host_addr: first, ..unmap }, unmap];
            assert_eq!(world.unmap(&unmaps), statuses);
            world.assert_clean();
        }
    }
    for world in both() {
        let [unmap] = world.map_and_prepare(1)[..] else { panic!("one was mapped") };
        assert_eq!(world.unmap(&[unmap; 32])[..3], [0, -4, -4]);
        world.assert_clean();
    }
}

#[test]
fn what_the_tables_refuse_keeps_its_handle() {
    for error in [ClearError::NotGrant, ClearError::Failed] {
        let world = World::new();
        world.lends.set(true);
        let unmaps = world.map_and_prepare(8);
        world.clear_fails.set(Some(error));
        assert_eq!(world.unmap(&unmaps), [-1; 8]);
        assert_eq!(world.p2m.borrow().len(), 8);
        world.clear_fails.set(None);
        assert_eq!(world.unmap(&unmaps), [0; 8]);
        world.assert_clean();
        world.assert_handles_free(1024);
    }
}

#[test]
fn what_the_embedder_does_not_answer_for_stays() {
    let world = World::new();
    world.lends.set(true);
    let unmaps = world.map_and_prepare(8);
    world.answers.set(5);
    assert_eq!(world.unmap(&unmaps), [0, 0, 0, 0, 0, -1, -1, -1]);
    assert_eq!(world.p2m.borrow().len(), 3);
    world.answers.set(usize::MAX);
    assert_eq!(world.unmap(&unmaps[5..]), [0; 3]);
    world.assert_clean();
    world.assert_handles_free(1024);
}

/// The guest rewrites its elements once they were read, and what it wrote is still there.
#[test]
fn an_element_is_read_once_and_only_its_status_is_written() {
    let world = World::new();
    world.lends.set(true);
    world.map_and_prepare(4);
    *world.during_policy.borrow_mut() = Some(Box::new(|world| {
        for word in world.lent.borrow().iter() {
            word.fetch_xor(0xffff_0000_ffff_ffff, Ordering::Relaxed);
        }
    }));
    let asked: Vec<UnmapGrantRef> = world.read(ARRAY, 4);
    assert_eq!(world.call(1, 4), Outcome::Done);
    for (before, after) in asked.iter().zip(world.read::<UnmapGrantRef>(ARRAY, 4)) {
        assert_eq!((after.handle, after.padding, after.status), (!before.handle, !0, 0));
        assert_eq!(after.host_addr, before.host_addr ^ 0xffff_0000_ffff_ffff);
    }
    world.assert_clean();
}

/// The first element's granter is looked up before its lock is taken.
#[test]
fn a_handle_that_went_before_the_lock_is_bad_and_those_after_it_are_not() {
    let world = World::new();
    world.lends.set(true);
    let unmaps = world.map_and_prepare(3);
    let first = unmaps[0];
    *world.during_policy.borrow_mut() = Some(Box::new(move |world| unmap_elsewhere(world, first)));
    assert_eq!(world.unmap(&unmaps), [-4, 0, 0]);
    world.assert_clean();
}

#[test]
fn a_handle_of_a_granter_that_is_not_there_crashes_the_caller_and_only_that_one_fails() {
    for world in both() {
        let mapped = world.map(&[request(0), MapGrantRef { domain: 3, ..request(1) }]);
        let table = world.tables.borrow_mut().remove(&OTHER).unwrap();
        let unmaps: Vec<_> = mapped.iter().map(unmap_of).collect();
        assert_eq!(world.unmap(&[unmaps[1], unmaps[0], unmaps[1]]), [-1, 0, -1]);
        assert_eq!(world.crashes.borrow().len(), 2);
        world.tables.borrow_mut().insert(OTHER, table);
        assert_eq!(world.unmap(&unmaps[1..]), [0]);
        world.assert_clean();
    }
}

/// A chunk may begin anywhere, and lie on two pages.
#[test]
fn a_status_goes_to_its_element_wherever_the_page_ends() {
    let world = World::new();
    world.lends.set(true);
    for second in 0..=96 {
        let unmaps = world.map_and_prepare(32);
        world.second.set(second);
        let statuses = world.unmap(&unmaps);
        assert_eq!(statuses, vec![0; 32], "{second} words on the second page");
        let bad = [UnmapGrantRef { handle: 1 << 20, ..UnmapGrantRef::new_zeroed() }; 32];
        assert_eq!(world.unmap(&bad), vec![-4; 32]);
    }
    assert_eq!(world.vcpu().0, 0);
    world.assert_clean();
}
