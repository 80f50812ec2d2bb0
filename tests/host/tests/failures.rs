//! A flush that fails at any step releases nothing; a retry releases it once.

use std::cell::Cell;

use flush::{Gfn, Mfn};
use gnttab::{Errno, Outcome, Teardown, release_all};
use host::{
    Layout, Setup, World,
    calls::{Fate, Shared, map_request, operation},
    world::{
        BACKEND, Ended, FIRST_REFERENCE, FRONTEND, ModelFailed, OTHER_CPU, POISON, granted_gfn,
    },
};
use hwmodel::{Failure, Frame, FrameState, Policy};

const FIRST: u64 = 0x10_0000;
const COUNT: u32 = 40;
const LAYOUTS: [Layout; 2] = [Layout::Separate, Layout::Shared];

/// How often each end was seen while one operation after the other failed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Tally {
    /// The call got over it.
    survived: u32,
    /// The flush of the first chunk failed, or of the second.
    failed: (u32, u32),
    /// The CPUs did not all forget, or the devices.
    kinds: (u32, u32),
    /// A retry on hardware that was not repaired failed again.
    failed_again: u32,
}

/// Lets CPU and device use whatever they still hold of pages that were unmapped; how many
/// they reach. The model judges whether they may.
fn try_all(world: &World, grants: &[Shared]) -> u32 {
    let unmapped = grants.iter().filter(|grant| world.fate(grant) != Fate::Mapped);
    let reached = unmapped.map(|grant| {
        let cpu = world.cpu_reaches(OTHER_CPU, grant.gfn);
        u32::from(cpu) + u32::from(world.device_reaches(grant.gfn))
    });
    let reached = reached.sum();
    world.check_unharmed();
    reached
}

/// Unmaps 40 grants while the `n`-th hardware operation fails.
///
/// Returns the call's end, or nothing if it took fewer operations.
#[track_caller]
fn fail<'w>(world: &'w World, grants: &[Shared], n: u64, failure: Failure) -> Option<Ended<'w>> {
    let before = world.machine.counters().operations;
    world.machine.fail_operation(n, failure);
    let (ended, statuses) = world.give_back(grants);
    let reached = world.machine.counters().operations - before >= n;
    let at = format!("operation {n}, {failure:?}");
    match ended.outcome {
        Outcome::Done => {
            assert!(ended.failed.is_empty(), "{at}");
            world.check_fates(grants, |_| Fate::Back);
        }
        Outcome::Failed(Errno::Fault) => {
            assert!(reached, "{at}");
            assert_eq!(ended.failed.len(), 1, "{at}");
            // A second chunk is not begun once the first one's flush failed.
            let (begin, end) = if ended.failed[0].held.len() == 32 { (0, 32) } else { (32, 40) };
            assert_eq!(ended.failed[0].held.len(), end - begin, "{at}");
            for (place, status) in statuses.iter().enumerate() {
                assert_eq!(*status, if place < end { 0 } else { POISON }, "{at}: {place}");
            }
            world.check_fates(grants, |place| match place {
                place if place < begin => Fate::Back,
                place if place < end => Fate::Held,
                _ => Fate::Mapped,
            });
        }
        other @ (Outcome::Continue { .. } | Outcome::Failed(_)) => panic!("{at}: {other:?}"),
    }
    reached.then_some(ended)
}

/// The pages of failed batches, which are the only ones held.
fn held(world: &World, grants: &[Shared]) -> Vec<Shared> {
    grants.iter().filter(|grant| world.fate(grant) == Fate::Held).copied().collect()
}

/// Fails every operation of an unmap in turn, each time with a retry before and after
/// the hardware is repaired. In the end everything was released exactly once.
///
/// Returns how many unmapped pages hardware still reached before the retries.
#[track_caller]
fn check(setup: Setup, failure: Failure, stride: u64, expected: Tally) -> u32 {
    let world = World::new(setup);
    let mut tally = Tally::default();
    let mut reached = 0;
    for n in 1.. {
        assert!(n < 500, "the call never takes fewer operations: {tally:?}");
        let grants = world.share_at(FIRST, stride, COUNT);
        let ended = fail(&world, &grants, n, failure);
        let Some(ended) = ended else { break };
        let failed = ended.failed;
        count(&mut tally, ended.outcome, &failed);
        reached += try_all(&world, &grants);

        let waiting = held(&world, &grants);
        let failed = world.retry(BACKEND, failed);
        tally.failed_again += u32::try_from(failed.len()).expect("one at most");
        let fate = if failed.is_empty() { Fate::Back } else { Fate::Held };
        world.check_fates(&waiting, |_| fate);
        let still = try_all(&world, &grants);
        assert!(fate == Fate::Held || still == 0, "operation {n}, {failure:?}");

        world.machine.repair();
        let failed = world.retry(BACKEND, failed);
        assert!(failed.is_empty(), "operation {n}, {failure:?}: {:?}", failed[0].error);
        world.check_fates(&waiting, |_| Fate::Back);
        finish(&world, &grants);
    }
    world.machine.repair();
    world.check_handles_free(0);
    assert_eq!(tally, expected, "{:?} {failure:?}", setup.layout);
    reached
}

/// On hardware that works again: unmaps what is still mapped, and frees all pages.
#[track_caller]
fn finish(world: &World, grants: &[Shared]) {
    if !world.machine.is_running(OTHER_CPU) {
        world.enter(BACKEND, OTHER_CPU);
    }
    let mapped = |grant: &&Shared| world.fate(grant) == Fate::Mapped;
    let rest: Vec<Shared> = grants.iter().filter(mapped).copied().collect();
    assert_eq!(world.give_back(&rest).0.outcome, Outcome::Done);
    world.take_back_and_try(grants, OTHER_CPU);
}

/// Makes the unit refuse the first command of the next call, and the wider one that takes
/// its place: an invalidation of the CPU and an interrupt lie between, if a CPU is inside.
fn refuse_twice(world: &World) {
    let between = if world.machine.is_running(OTHER_CPU) { 10 } else { 8 };
    world.machine.fail_operation(2, Failure::QueueError);
    world.machine.fail_operation(between, Failure::QueueError);
}

/// What the model says of a frame.
fn state(world: &World, mfn: Mfn) -> FrameState {
    world.machine.frame(Frame(mfn.get())).expect("a frame of this machine").state
}

fn count(tally: &mut Tally, outcome: Outcome, failed: &[ModelFailed<'_>]) {
    match failed {
        [] => {
            assert_eq!(outcome, Outcome::Done);
            tally.survived += 1;
        }
        [failure, ..] => {
            if failure.held.len() == 32 {
                tally.failed.0 += 1;
            } else {
                tally.failed.1 += 1;
            }
            tally.kinds.0 += u32::from(failure.error.tlb.is_some());
            tally.kinds.1 += u32::from(failure.error.iotlb.is_some());
        }
    }
}

#[test]
fn hardware_that_hangs_at_any_operation_releases_nothing_until_a_retry_succeeds() {
    // A chunk takes five operations: tail register, command, wait, interrupt, and the
    // invalidation at the CPU's next entry. The last may fail: the CPU then stays out.
    // Only a lost tail write is made good by the next one.
    let expected = Tally { survived: 2, failed: (4, 4), kinds: (2, 6), failed_again: 6 };
    for layout in LAYOUTS {
        let reached = check(Setup { layout, ..Setup::default() }, Failure::Hang, 1, expected);
        // 32 pages through a lost tail write, a command that is not carried out and an
        // interrupt that is not taken; then 8 pages through the first two. The CPU has
        // forgotten the second chunk with the first.
        assert_eq!(reached, 3 * 32 + 2 * 8, "{layout:?}");
    }
}

#[test]
fn a_queue_error_at_any_operation_releases_nothing_until_a_retry_succeeds() {
    // What is refused is asked for once more, wider, and the driver gets the queue going.
    let expected = Tally { survived: 6, failed: (2, 2), kinds: (2, 2), failed_again: 2 };
    for layout in LAYOUTS {
        let setup = Setup { layout, ..Setup::default() };
        let reached = check(setup, Failure::QueueError, 1, expected);
        assert_eq!(reached, 2 * 32 + 8, "{layout:?}");
    }
}

#[test]
fn a_time_out_at_any_operation_releases_nothing_until_a_retry_succeeds() {
    // Commands and waits that a time-out took along are asked for again at once.
    let expected = Tally { survived: 6, failed: (2, 2), kinds: (2, 2), failed_again: 2 };
    for layout in LAYOUTS {
        let reached = check(Setup { layout, ..Setup::default() }, Failure::TimeOut, 1, expected);
        assert_eq!(reached, 2 * 32 + 8, "{layout:?}");
    }
}

#[test]
fn every_command_of_a_scattered_batch_may_fail() {
    let hung = Tally { survived: 2, failed: (35, 11), kinds: (2, 44), failed_again: 44 };
    // Far enough apart to need a command each.
    let reached = check(Setup::default(), Failure::Hang, 40, hung);
    // The commands before the one that hangs are carried out.
    assert_eq!(reached, 32 + 32 + (1..=32).sum::<u32>() + 8 + (1..=8).sum::<u32>());
    let asked_again = Tally { survived: 44, failed: (2, 2), kinds: (2, 2), failed_again: 2 };
    check(Setup::default(), Failure::QueueError, 40, asked_again);
    check(Setup::default(), Failure::TimeOut, 40, asked_again);
}

#[test]
fn the_commands_of_a_device_tlb_may_fail() {
    // One more command a chunk, and one more cache that keeps the pages reachable.
    let setup = Setup { device_tlb: true, ..Setup::default() };
    let hung = Tally { survived: 2, failed: (5, 5), kinds: (2, 8), failed_again: 8 };
    check(setup, Failure::Hang, 1, hung);
    let asked_again = Tally { survived: 8, failed: (2, 2), kinds: (2, 2), failed_again: 2 };
    check(setup, Failure::QueueError, 1, asked_again);
    check(setup, Failure::TimeOut, 1, asked_again);
}

#[test]
fn register_writes_may_get_lost() {
    for layout in LAYOUTS {
        let mut setup = Setup { layout, registers: true, ..Setup::default() };
        // An address that did not arrive is noticed, and the whole domain flushed. After a
        // command that did not, the next one is good.
        let lost = Tally { survived: 4, failed: (3, 3), kinds: (2, 4), failed_again: 2 };
        check(setup, Failure::Hang, 1, lost);
        setup.unit.page_selective = false;
        check(setup, Failure::Hang, 1, Tally { survived: 2, ..lost });
    }
}

#[test]
fn hardware_of_any_mood_may_fail_at_any_operation() {
    for (seed, failure) in [(1, Failure::Hang), (2, Failure::QueueError), (3, Failure::TimeOut)] {
        let world = World::new(Setup { policy: Policy::Random(seed), ..Setup::default() });
        for n in 1..=10 {
            let grants = world.share_at(FIRST, 2, COUNT);
            let failed = fail(&world, &grants, n, failure).map_or(Vec::new(), |end| end.failed);
            try_all(&world, &grants);
            world.machine.repair();
            assert!(world.retry(BACKEND, failed).is_empty(), "{failure:?}, operation {n}");
            finish(&world, &grants);
        }
    }
}

#[test]
fn when_both_kinds_fail_both_are_reported_and_both_are_owed() {
    for layout in LAYOUTS {
        let world = World::new(Setup { layout, ..Setup::default() });
        let grants = world.share_at(FIRST, 1, 32);
        // The command hangs; the interrupt comes next, or after the wait.
        world.machine.fail_operation(3, Failure::Hang);
        world.machine.fail_operation(4, Failure::Hang);
        let ended = fail(&world, &grants, 2, Failure::Hang).expect("it was reached");
        let error = ended.failed[0].error;
        assert!(error.tlb.is_some() && error.iotlb.is_some(), "{layout:?}: {error:?}");
        // CPU and device still reach every page.
        assert_eq!(try_all(&world, &grants), 2 * 32, "{layout:?}");
        world.machine.repair();
        assert!(world.retry(BACKEND, ended.failed).is_empty(), "{layout:?}");
        world.take_back_and_try(&grants, OTHER_CPU);
    }
}

#[test]
fn ram_that_a_map_displaced_is_held_when_the_flush_fails() {
    for layout in LAYOUTS {
        for (n, failure) in [(1, Failure::Hang), (2, Failure::Hang), (4, Failure::Hang)] {
            let world = World::new(Setup { layout, ..Setup::default() });
            let gfn = Gfn::new(FIRST);
            let ram = world.hypervisor.populate(world.backend(), gfn);
            world.touch(gfn);
            world.grant(FIRST_REFERENCE, granted_gfn(FIRST_REFERENCE), false);
            world.machine.fail_operation(n, failure);
            let mut element = [map_request(FRONTEND, FIRST_REFERENCE, gfn, false)];
            let ended = world.call_on(BACKEND, operation::MAP, &mut element);
            let at = format!("{layout:?}, operation {n}, {failure:?}");
            assert_eq!(ended.outcome, Outcome::Failed(Errno::Fault), "{at}");
            // The mapping exists and the guest knows of it; the old page is not lost.
            assert_eq!(element[0].status, 0, "{at}");
            assert_eq!(ended.failed.len(), 1, "{at}");
            assert_eq!(world.hypervisor.pages.get(ram), (1, 0), "{at}");
            assert_eq!(state(&world, ram), FrameState::Owned, "{at}");
            world.touch(gfn);
            world.check_unharmed();
            world.machine.repair();
            assert!(world.retry(BACKEND, ended.failed).is_empty(), "{at}");
            assert_eq!(state(&world, ram), FrameState::Free, "{at}");
            world.touch(gfn);
            world.check_clean();
        }
    }
}

#[test]
fn the_end_of_a_domain_keeps_what_it_could_not_flush_and_goes_on() {
    for layout in LAYOUTS {
        let world = World::new(Setup { layout, ..Setup::default() });
        let grants = world.share_at(FIRST, 1, COUNT);
        // The device stays, so that there is something to fail: its full flush.
        world.leave(OTHER_CPU);
        refuse_twice(&world);
        let release = |from| {
            let end = Cell::new(Teardown::Done);
            let ended = world.call_as(BACKEND, |caller| {
                end.set(release_all(caller, from));
                Outcome::Done
            });
            (end.get(), ended.failed)
        };
        let (end, failed) = release(0);
        assert_eq!(end, Teardown::FlushFailed(32), "{layout:?}");
        assert_eq!(failed[0].held.len(), 32);
        let counted = |grant: &&Shared| world.hypervisor.pages.get(grant.mfn) == (2, 1);
        assert_eq!(grants.iter().filter(counted).count(), 40, "{layout:?}: nothing released");
        let (end, none) = release(32);
        assert_eq!((end, none.len()), (Teardown::Done, 0), "{layout:?}");
        assert_eq!(grants.iter().filter(counted).count(), 32, "{layout:?}: the failed ones");
        world.machine.repair();
        assert!(world.retry(BACKEND, failed).is_empty());
        assert_eq!(grants.iter().filter(counted).count(), 0, "{layout:?}");
        assert_eq!(world.machine.witnesses(), [], "{layout:?}");
    }
}

/// A batch that stays in quarantine while everything around it goes on.
#[test]
fn what_is_in_quarantine_stays_held_whatever_is_flushed_later() {
    for layout in LAYOUTS {
        for failure in [Failure::Hang, Failure::QueueError] {
            let world = World::new(Setup { layout, ..Setup::default() });
            let grants = world.share_at(FIRST, 1, 33);
            // The second operation is the first chunk's command.
            if failure == Failure::QueueError {
                refuse_twice(&world);
            }
            let ended = fail(&world, &grants, 2, failure).expect("it was reached");
            let quarantine = ended.failed;
            world.machine.repair();
            let (held, rest) = grants.split_at(32);
            let (ended, statuses) = world.give_back(rest);
            assert_eq!((ended.outcome, statuses), (Outcome::Done, vec![0]), "{layout:?}");
            world.check_fates(rest, |_| Fate::Back);
            world.check_fates(held, |_| Fate::Held);

            // The handles are free and the frames can be mapped again: over and over, with
            // flushes of the very same frames, and nothing of that releases the old pages.
            for _ in 0..3 {
                let again: Vec<Shared> = (FIRST_REFERENCE + 100..)
                    .zip(held)
                    .map(|(reference, held)| {
                        world.grant(reference, granted_gfn(reference), false);
                        let again = world.share_again(reference, held.gfn, false);
                        world.touch(again.gfn);
                        again
                    })
                    .collect();
                let (ended, statuses) = world.give_back(&again);
                assert_eq!((ended.outcome, statuses), (Outcome::Done, vec![0; 32]));
                world.take_back_and_try(&again, OTHER_CPU);
                world.check_fates(held, |_| Fate::Held);
            }
            try_all(&world, held);
            assert_eq!(quarantine[0].held.len(), 32);
            let failed = world.retry(BACKEND, quarantine);
            assert!(failed.is_empty(), "{layout:?} {failure:?}");
            world.take_back_and_try(held, OTHER_CPU);
        }
    }
}
