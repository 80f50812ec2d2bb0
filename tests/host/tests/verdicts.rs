//! What an embedder may answer to a failed flush, and the way out of quarantine.

use flush::Quarantine;
use gnttab::{BATCH, Crash, Domain, Errno, Outcome, Pin, RETRIES, Verdict, release};
use host::{
    Layout, Setup, World,
    calls::{Fate, Shared},
    world::{BACKEND, DEVICE, Ended, FIRST_REFERENCE, Flushes, OTHER_CPU, granted_gfn},
};
use hwmodel::Failure;

const FIRST: u64 = 0x10_0000;
const LAYOUTS: [Layout; 2] = [Layout::Separate, Layout::Shared];

type Kept = Quarantine<Pin, BATCH, 4>;

fn keep(kept: &mut Kept, ended: Ended<'_>) {
    for failure in ended.failed {
        kept.keep(failure.held).expect("room for it");
    }
}

/// Flushes once for all that the backend has in quarantine, and gives out what then is free.
fn settle(world: &World, kept: &mut Kept) -> Flushes {
    let ended = world.call_as(BACKEND, |caller| {
        if let Some(owed) = kept.owed(BACKEND) {
            kept.settle(owed.flush(&caller.hardware()).paid);
        }
        while let Some(pin) = kept.next_page(BACKEND) {
            release(caller, pin);
        }
        while let Some(table) = kept.next_table(BACKEND) {
            caller.put_table(table);
        }
        Outcome::Done
    });
    ended.flushes
}

/// How calls ended while one operation after the other failed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Tally {
    /// The call got over it.
    done: u32,
    /// It ended with its pages in quarantine.
    kept: u32,
    /// How often the embedder was asked.
    judged: u32,
}

/// Fails every hardware operation of an unmap of 40 pages in turn, with one answer to
/// failed flushes. Nothing is in reach that was released, in the end all of it is.
#[track_caller]
fn check(setup: Setup, failure: Failure, verdict: Verdict, expected: Tally) {
    let world = World::new(setup);
    world.faults.verdict.set(Some(verdict));
    let mut tally = Tally::default();
    for n in 1.. {
        assert!(n < 100, "the call never takes fewer operations: {tally:?}");
        let at = format!("operation {n}, {failure:?}, {verdict:?}");
        let grants = world.share_at(FIRST, 1, 40);
        world.faults.judged.set(0);
        let before = world.machine.counters().operations;
        world.machine.fail_operation(n, failure);
        let (ended, _) = world.give_back(&grants);
        if world.machine.counters().operations - before < n {
            finish(&world, &grants);
            break;
        }
        let crashes = world.faults.crashes.take();
        let mut kept = Kept::new();
        tally.judged += world.faults.judged.get();
        let owed = match ended.outcome {
            Outcome::Done => {
                assert!(ended.failed.is_empty() && crashes.is_empty(), "{at}");
                world.check_fates(&grants, |_| Fate::Back);
                tally.done += 1;
                Flushes::default()
            }
            Outcome::Failed(Errno::Fault) => {
                let crashed: &[Crash] = match verdict {
                    Verdict::Crash => &[Crash::FlushFailed],
                    Verdict::Retry | Verdict::Quarantine => &[],
                };
                assert_eq!(crashes, crashed, "{at}");
                tally.kept += 1;
                let error = ended.failed[0].error;
                let (tlb, iotlb) = (error.tlb.is_some(), error.iotlb.is_some());
                keep(&mut kept, ended);
                Flushes { tlb: tlb.into(), iotlb: iotlb.into() }
            }
            other @ (Outcome::Continue { .. } | Outcome::Failed(_)) => panic!("{at}: {other:?}"),
        };
        let held: Vec<Shared> =
            grants.iter().filter(|grant| world.fate(grant) == Fate::Held).copied().collect();
        assert_eq!(kept.pages(), held.len(), "{at}");
        for grant in &held {
            // They may be in reach, as long as they are held.
            let _by_cpu = world.cpu_reaches(OTHER_CPU, grant.gfn);
            let _by_device = world.device_reaches(grant.gfn);
        }
        world.check_unharmed();
        world.machine.repair();
        assert_eq!(settle(&world, &mut kept), owed, "{at}: only what is still owed");
        assert_eq!(kept.batches(), 0, "{at}");
        world.check_fates(&held, |_| Fate::Back);
        finish(&world, &grants);
    }
    assert_eq!(tally, expected, "{:?} {failure:?} {verdict:?}", setup.layout);
}

#[track_caller]
fn finish(world: &World, grants: &[Shared]) {
    if !world.machine.is_running(OTHER_CPU) {
        world.enter(BACKEND, OTHER_CPU);
    }
    let rest: Vec<Shared> =
        grants.iter().filter(|grant| world.fate(grant) == Fate::Mapped).copied().collect();
    assert_eq!(world.give_back(&rest).0.outcome, Outcome::Done);
    world.take_back_and_try(grants, OTHER_CPU);
}

#[test]
fn an_answer_of_retry_gets_over_what_does_not_last_and_is_bounded_for_what_does() {
    // A chunk takes five operations: tail register, command, wait, interrupt, and the
    // invalidation at the CPU's next entry. What the queue reports, the driver gets over by
    // itself; a lost tail write is made good by the next. A CPU that does not take its
    // interrupt will not take another one, and a queue that hangs stays so.
    let asked = |kept: u32| 2 + kept * (RETRIES + 1);
    for layout in LAYOUTS {
        let setup = Setup { layout, ..Setup::default() };
        for failure in [Failure::QueueError, Failure::TimeOut] {
            let expected = Tally { done: 8, kept: 2, judged: asked(2) };
            check(setup, failure, Verdict::Retry, expected);
        }
        let hung = Tally { done: 4, kept: 6, judged: asked(6) };
        check(setup, Failure::Hang, Verdict::Retry, hung);
    }
}

#[test]
fn what_is_not_tried_again_is_kept_and_released_by_a_later_flush() {
    for layout in LAYOUTS {
        let setup = Setup { layout, ..Setup::default() };
        for verdict in [Verdict::Quarantine, Verdict::Crash] {
            for failure in [Failure::QueueError, Failure::TimeOut] {
                check(setup, failure, verdict, Tally { done: 6, kept: 4, judged: 4 });
            }
            check(setup, Failure::Hang, verdict, Tally { done: 2, kept: 8, judged: 8 });
        }
    }
}

#[test]
fn an_answer_from_a_device_that_nobody_asked_fails_no_flush() {
    for device_tlb in [false, true] {
        let setup = Setup { device_tlb, ..Setup::default() };
        let operations = if device_tlb { 12 } else { 10 };
        let fine = Tally { done: operations, kept: 0, judged: 0 };
        check(setup, Failure::CompletionError, Verdict::Quarantine, fine);
    }
}

#[test]
fn several_failed_calls_are_released_by_one_flush_that_comes_later() {
    for layout in LAYOUTS {
        let world = World::new(Setup { layout, ..Setup::default() });
        let grants = world.share_at(FIRST, 1, 96);
        let mut kept = Kept::new();
        world.deaf.set(true);
        for part in grants.chunks(32) {
            let (ended, _) = world.give_back(part);
            assert_eq!(ended.outcome, Outcome::Failed(Errno::Fault), "{layout:?}");
            keep(&mut kept, ended);
        }
        assert_eq!((kept.batches(), kept.pages()), (3, 96), "{layout:?}");
        // The devices have forgotten; nobody asks them again.
        assert_eq!(settle(&world, &mut kept), Flushes { tlb: 1, iotlb: 0 }, "{layout:?}");
        world.check_fates(&grants, |_| Fate::Held);
        world.deaf.set(false);
        // Another call's flush is not for these.
        let reference = FIRST_REFERENCE + 200;
        world.grant(reference, granted_gfn(reference), false);
        let other = world.share_again(reference, grants[0].gfn, false);
        assert_eq!(world.give_back(&[other]).0.outcome, Outcome::Done, "{layout:?}");
        world.check_fates(&grants, |_| Fate::Held);
        assert_eq!(settle(&world, &mut kept), Flushes { tlb: 1, iotlb: 0 }, "{layout:?}");
        world.take_back_and_try(&grants, OTHER_CPU);
    }
}

/// A device TLB that does not answer keeps its pages in quarantine until the device is
/// detached, whatever is tried before. Between the two it is reset, without address
/// translation services: the model takes it off its bus.
#[test]
fn pages_of_a_silent_device_leave_quarantine_once_it_is_detached() {
    for layout in LAYOUTS {
        let world = World::new(Setup { layout, device_tlb: true, ..Setup::default() });
        world.faults.verdict.set(Some(Verdict::Retry));
        let grants = world.share_at(FIRST, 1, 32);
        world.machine.set_device_answers(DEVICE.get(), false);
        let (ended, _) = world.give_back(&grants);
        assert_eq!(ended.outcome, Outcome::Failed(Errno::Fault), "{layout:?}");
        assert_eq!(world.faults.judged.get(), RETRIES + 1, "{layout:?}");
        let mut kept = Kept::new();
        keep(&mut kept, ended);
        let devices = Flushes { tlb: 0, iotlb: 1 };
        assert_eq!(settle(&world, &mut kept), devices, "{layout:?}");
        assert_eq!(kept.pages(), 32, "{layout:?}: it does not answer");
        world.units[0].device_gone(DEVICE).expect("room for one");
        assert_eq!(settle(&world, &mut kept), devices, "{layout:?}");
        assert_eq!(kept.pages(), 32, "{layout:?}: declared gone, and still a member");
        assert!(world.device_reaches(grants[0].gfn), "{layout:?}: through its own cache");
        world.check_unharmed();

        world.machine.remove_device(DEVICE.get());
        let memory = &world.hypervisor.memory;
        world.backend().dma.detach(&world.units, memory, 0, DEVICE).expect("detaches");
        settle(&world, &mut kept);
        assert_eq!(kept.batches(), 0, "{layout:?}");
        world.take_back_and_try(&grants, OTHER_CPU);
    }
}
