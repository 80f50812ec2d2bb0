//! A fault in a copy from or to the guest leaves nothing pending, nothing lost.

use flush::Gfn;
use gnttab::{
    Errno, Outcome,
    abi::{MapGrantRef, UnmapGrantRef},
};
use host::{
    Layout, Setup, World,
    calls::{Fate, Shared, map_request, operation},
    world::{
        ARGUMENTS, BACKEND, FIRST_REFERENCE, FRONTEND, Flushes, OTHER_CPU, POISON, granted_gfn,
    },
};

const FIRST: u64 = 0x10_0000;
const COUNT: u32 = 40;

/// Which copy of an element fails.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Copy {
    Read,
    Write,
}

impl Copy {
    /// Makes the copy for the element of type `T` at `position` fail, from now on counted.
    fn arm<T>(self, world: &World, position: u64) {
        world.faults.copies.set((0, 0));
        let byte = (ARGUMENTS.get() << 12) + position * size_of::<T>() as u64;
        world.faults.unreadable.set((self == Self::Read).then_some(byte));
        world.faults.fail_write.set((self == Self::Write).then_some(position));
    }

    /// How many elements count as done when the one at `position` fails.
    const fn done(self, position: usize) -> usize {
        match self {
            Self::Read => position,
            Self::Write => position + 1,
        }
    }

    /// Copies to the guest made up to and with the failed one.
    const fn told(self, position: u64) -> u64 {
        match self {
            Self::Read => position,
            Self::Write => position + 1,
        }
    }
}

fn disarm(world: &World) {
    world.faults.unreadable.set(None);
    world.faults.fail_write.set(None);
}

/// One world for each sort of table; a case leaves it as it found it.
fn each_world(check: impl Fn(&World)) {
    for layout in [Layout::Separate, Layout::Shared] {
        let world = World::new(Setup { layout, frames: 2048, ..Setup::default() });
        check(&world);
        world.check_handles_free(0);
    }
}

#[track_caller]
fn check_unmap(world: &World, copy: Copy, position: usize) {
    let at = format!("{copy:?} {position}");
    let grants = world.share_at(FIRST, 3, COUNT);
    copy.arm::<UnmapGrantRef>(world, position as u64);
    let (ended, statuses) = world.give_back(&grants);
    let done = copy.done(position);

    assert_eq!(ended.outcome, Outcome::Failed(Errno::Fault), "{at}");
    assert_eq!(world.faults.copies.get().1, copy.told(position as u64), "{at}");
    let flushes = done.div_ceil(32) as u64;
    assert_eq!(ended.flushes, Flushes { tlb: flushes, iotlb: flushes }, "{at}");
    assert!(ended.failed.is_empty(), "{at}: the flush was fine");
    for (place, status) in statuses.iter().enumerate() {
        assert_eq!(*status, if place < position { 0 } else { POISON }, "{at}: status {place}");
    }
    world.check_fates(&grants, |place| if place < done { Fate::Back } else { Fate::Mapped });
    world.take_back_and_try(&grants[..done], OTHER_CPU);

    // What the guest was not told of is gone all the same; the rest is as it was.
    disarm(world);
    let (ended, statuses) = world.give_back(&grants[position..]);
    assert_eq!(ended.outcome, Outcome::Done, "{at}");
    for (place, status) in statuses.iter().enumerate() {
        assert_eq!(*status, if position + place < done { -4 } else { 0 }, "{at}: again {place}");
    }
    world.check_fates(&grants[done..], |_| Fate::Back);
    world.take_back_and_try(&grants[done..], OTHER_CPU);
    world.check_handles_free(0);
}

#[test]
fn an_unmap_whose_read_fails_ends_before_that_element() {
    each_world(|world| (0..COUNT as usize).for_each(|at| check_unmap(world, Copy::Read, at)));
}

#[test]
fn an_unmap_whose_status_write_fails_ends_after_that_element() {
    each_world(|world| (0..COUNT as usize).for_each(|at| check_unmap(world, Copy::Write, at)));
}

#[track_caller]
fn check_map(world: &World, copy: Copy, position: usize) {
    let at = format!("{copy:?} {position}");
    let mut grants: Vec<Shared> = (0..COUNT)
        .map(|place| {
            let reference = FIRST_REFERENCE + place;
            let mfn = world.grant(reference, granted_gfn(reference), false);
            let gfn = Gfn::new(FIRST + u64::from(place));
            Shared { reference, gfn, mfn, handle: u32::MAX, read_only: false }
        })
        .collect();
    let mut elements: Vec<MapGrantRef> = grants
        .iter()
        .map(|grant| map_request(FRONTEND, grant.reference, grant.gfn, false))
        .collect();
    copy.arm::<MapGrantRef>(world, position as u64);
    let ended = world.call_on(BACKEND, operation::MAP, &mut elements);
    disarm(world);

    assert_eq!(ended.outcome, Outcome::Failed(Errno::Fault), "{at}");
    assert!(ended.failed.is_empty(), "{at}: the flush was fine");
    for (place, element) in elements.iter().enumerate() {
        let expected = if place < position { 0 } else { POISON };
        assert_eq!(element.status, expected, "{at}: status {place}");
        grants[place].handle = element.handle;
    }
    // A mapping that the guest cannot know the handle of does not stay.
    world.check_fates(&grants, |place| if place < position { Fate::Mapped } else { Fate::Back });
    for grant in &grants[..position] {
        world.touch(grant.gfn);
    }
    world.take_back_and_try(&grants[position..], OTHER_CPU);
    world.check_handles_free(u32::try_from(position).expect("few grants"));

    let (ended, statuses) = world.give_back(&grants[..position]);
    assert_eq!(ended.outcome, Outcome::Done, "{at}");
    assert!(statuses.iter().all(|status| *status == 0), "{at}: {statuses:?}");
    world.take_back_and_try(&grants[..position], OTHER_CPU);
}

#[test]
fn a_map_whose_copy_fails_leaves_no_mapping_that_the_guest_was_not_told_of() {
    each_world(|world| {
        for position in 0..COUNT as usize {
            check_map(world, Copy::Read, position);
            check_map(world, Copy::Write, position);
        }
    });
}

#[test]
fn without_a_fault_elements_are_copied_in_eight_at_a_time_and_each_status_out_once() {
    each_world(|world| {
        let grants = world.share_at(FIRST, 1, COUNT);
        Copy::Read.arm::<UnmapGrantRef>(world, COUNT.into());
        let (ended, statuses) = world.give_back(&grants);
        assert_eq!(ended.outcome, Outcome::Done);
        assert_eq!(world.faults.copies.get(), (u64::from(COUNT).div_ceil(8), COUNT.into()));
        disarm(world);
        assert!(statuses.iter().all(|status| *status == 0));
        world.take_back_and_try(&grants, OTHER_CPU);
    });
}
