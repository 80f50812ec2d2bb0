//! Guest memory that faults: everything done is flushed, and nothing is lost.

use std::vec::Vec;

use super::fake::*;
use crate::abi::{MapGrantRef, UnmapGrantRef};
use crate::{Call, Errno, GuestAddress, Outcome};

const COUNT: u32 = 40;

/// Unmaps 40 grants with one copy faulting, and tells how many were unmapped.
fn unmapped_with(arrange: impl FnOnce(&World)) -> (World, Vec<UnmapGrantRef>, usize) {
    let world = World::new();
    let unmaps = world.map_and_prepare(COUNT);
    arrange(&world);
    assert_eq!(world.call(1, COUNT), Outcome::Failed(Errno::Fault));
    world.read_fault.set(None);
    world.write_fault.set(None);
    let left = world.p2m.borrow().len();
    let done = COUNT as usize - left;
    for frame in 0..COUNT as usize {
        let expected = i64::from(frame >= done);
        assert_eq!(world.count(GRANTER, frame as u64).references, expected, "{frame} of {done}");
        assert_eq!(world.in_use(GRANTER, frame as u32) == 0, frame < done);
    }
    (world, unmaps, done)
}

fn finish(world: &World, rest: &[UnmapGrantRef]) {
    assert!(world.unmap(rest).iter().all(|status| *status == 0));
    world.assert_clean();
}

#[test]
fn an_element_that_cannot_be_read_is_not_counted() {
    for position in 0..COUNT as usize {
        let (world, unmaps, done) =
            unmapped_with(|world| world.read_fault.set(byte_of::<UnmapGrantRef>(position)));
        assert_eq!(done, position);
        let statuses = world.statuses(COUNT as usize);
        assert!(statuses[..done].iter().all(|status| *status == 0));
        assert!(statuses[done..].iter().all(|status| *status == POISON));
        let chunks = position.div_ceil(32);
        assert_eq!(world.flushes.get(), (chunks, chunks), "position {position}");
        finish(&world, &unmaps[done..]);
    }
}

#[test]
fn an_element_whose_status_cannot_be_written_is_counted() {
    for position in 0..COUNT as usize {
        let (world, unmaps, done) = unmapped_with(|world| world.write_fault.set(Some(position)));
        assert_eq!(done, position + 1);
        let statuses = world.statuses(COUNT as usize);
        assert!(statuses[..position].iter().all(|status| *status == 0));
        assert!(statuses[position..].iter().all(|status| *status == POISON));
        let chunks = done.div_ceil(32);
        assert_eq!(world.flushes.get(), (chunks, chunks), "position {position}");
        finish(&world, &unmaps[done..]);
    }
}

#[test]
fn a_map_that_cannot_be_read_maps_nothing_more() {
    for position in 0..COUNT as usize {
        let world = World::new();
        let maps: Vec<_> = (0..COUNT).map(request).collect();
        world.write(ARRAY, &maps);
        world.read_fault.set(byte_of::<MapGrantRef>(position));
        assert_eq!(world.call(0, COUNT), Outcome::Failed(Errno::Fault));
        assert_eq!(world.p2m.borrow().len(), position);
        let done = world.read::<MapGrantRef>(ARRAY, position);
        finish(&world, &done.iter().map(unmap_of).collect::<Vec<_>>());
    }
}

#[test]
fn a_map_that_cannot_be_told_is_taken_back_through_a_flush() {
    // With and without RAM in the way, so that the batch also fills up.
    for base in [FIRST_GFN, 0x10] {
        for position in 0..COUNT as usize {
            let world = World::new();
            let maps: Vec<_> = (0..COUNT)
                .map(|reference| MapGrantRef {
                    host_addr: (base + u64::from(reference)) << 12,
                    ..request(reference)
                })
                .collect();
            world.write(ARRAY, &maps);
            world.write_fault.set(Some(position));
            world.busy_during_flush.borrow_mut().clear();
            assert_eq!(world.call(0, COUNT), Outcome::Failed(Errno::Fault));
            assert_eq!(world.p2m.borrow().len(), position, "base {base:#x}");
            assert_eq!(world.count(GRANTER, position as u64).references, 0);
            assert_eq!(world.in_use(GRANTER, position as u32), 0);
            assert_eq!(world.unflushed.get(), 0);
            let done = world.read::<MapGrantRef>(ARRAY, position);
            finish(&world, &done.iter().map(unmap_of).collect::<Vec<_>>());
        }
    }
}

#[test]
fn a_map_at_frame_0_can_be_taken_back() {
    let world = World::new();
    world.write(ARRAY, &[MapGrantRef { host_addr: 0, ..request(9) }]);
    world.write_fault.set(Some(0));
    assert_eq!(world.call(0, 1), Outcome::Failed(Errno::Fault));
    world.assert_clean();
}

#[test]
fn an_array_at_the_end_of_the_space_faults() {
    for command in [0, 1, 2, 5, 6, 7, 8, 9, 10, 11] {
        for argument in [u64::MAX, u64::MAX - 16, u64::MAX - 40, 0xffff_fff0, 0xfff8] {
            let world = World::new();
            let call = Call { command, argument: GuestAddress(argument), count: 1 };
            let outcome = call.run(&world);
            let fits = argument == 0xfff8 && matches!(command, 8 | 10);
            // A version of 0 is read where it fits; there is nothing to write back.
            let want = match (fits, command) {
                (true, 8) => Outcome::Failed(Errno::Invalid),
                (true, _) => Outcome::Failed(Errno::NoSuchDomain),
                (false, _) => Outcome::Failed(Errno::Fault),
            };
            assert_eq!(outcome, want, "command {command} at {argument:#x}");
        }
    }
}

#[test]
fn counts_and_commands_that_are_never_valid_do_nothing() {
    for (command, count, want) in [
        (1, u32::MAX, Errno::Invalid),
        (1, 1 << 31, Errno::Invalid),
        (0, 1 << 31, Errno::Invalid),
        (3, u32::MAX, Errno::Invalid),
        (1 << 12 | 1, 1, Errno::Invalid),
        (1 << 31, 1, Errno::Invalid),
        (1 << 12 | 3, 1, Errno::Invalid),
        (3, 1, Errno::NoSystemCall),
        (12, 1, Errno::NoSystemCall),
        (1 << 12 | 12, 1, Errno::NoSystemCall),
        (13, 1, Errno::NoSystemCall),
        (0xfff, 1, Errno::NoSystemCall),
        (4, 1, Errno::NotSupported),
        (2, 0, Errno::Invalid),
        (2, 2, Errno::Invalid),
        (6, 2, Errno::Invalid),
        (9, 0, Errno::Invalid),
    ] {
        let world = World::new();
        assert_eq!(world.call(command, count), Outcome::Failed(want), "{command:#x} x {count}");
        assert_eq!((world.reads.get(), world.writes.get()), (0, 0));
    }
    assert_eq!(Errno::Fault.value(), -14);
    assert_eq!(Errno::Invalid.value(), -22);
    assert_eq!(Errno::NoSystemCall.value(), -38);
    assert_eq!(Errno::NotSupported.value(), -95);
}

#[test]
fn a_huge_count_stops_at_the_first_fault() {
    let world = World::new();
    assert_eq!(world.call(1, i32::MAX as u32), Outcome::Failed(Errno::Fault));
    assert_eq!(world.writes.get(), (0x10000 - ARRAY as usize) / 24);
}

#[test]
fn elements_are_read_together_and_each_is_told_for_itself() {
    for (count, reads) in [(1, 1), (8, 1), (9, 2), (32, 4), (33, 5), (40, 5)] {
        let world = World::new();
        let unmaps = world.map_and_prepare(count);
        assert_eq!(world.call(1, count), Outcome::Done);
        assert_eq!((world.reads.get(), world.writes.get()), (reads, unmaps.len()), "{count}");
        world.assert_clean();
    }
}
