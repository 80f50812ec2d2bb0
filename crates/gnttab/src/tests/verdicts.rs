//! What becomes of a call whose flush fails: the embedder's three answers.

use std::vec::Vec;

use flush::{Quarantine, Released};

use super::fake::*;
use crate::{
    BATCH, Crash, Domain, Errno, Outcome, Pin, RETRIES, Teardown, Verdict, release, release_all,
};

const COUNT: u32 = 65;

/// Unmaps 65 grants; `failures` flushes fail, of all kinds counted, the `first`-th and on.
fn unmap(world: &World, first: usize, failures: usize, verdict: Verdict) -> Outcome {
    world.map_and_prepare(COUNT);
    world.flush_fails.set(Some(first));
    world.failures.set(failures);
    world.verdict.set(verdict);
    world.call(1, COUNT)
}

fn references(world: &World) -> i64 {
    (0..u64::from(COUNT)).map(|frame| world.count(GRANTER, frame).references).sum()
}

#[test]
fn a_retry_that_succeeds_ends_like_a_flush_that_did_not_fail() {
    // Each chunk flushes devices, then CPUs; then each kind that failed alone.
    for first in 0..6 {
        for failures in 1..=RETRIES as usize {
            let world = World::new();
            let outcome = unmap(&world, first, failures, Verdict::Retry);
            let at = std::format!("{failures} from {first}");
            assert_eq!(outcome, Outcome::Done, "{at}");
            assert!(world.statuses(COUNT as usize).iter().all(|status| *status == 0));
            let judged = world.judged.borrow().clone();
            assert!(!judged.is_empty() && judged.len() <= failures, "{at}");
            let chunk = if first / 2 == 2 { 1 } else { 32 };
            assert_eq!(judged[0], (chunk, 0), "{at}");
            world.assert_clean();
            assert!(world.crashes.borrow().is_empty());
        }
    }
}

#[test]
fn the_embedder_is_told_what_failed_last() {
    let world = World::new();
    assert_eq!(unmap(&world, 0, 3, Verdict::Retry), Outcome::Done);
    assert_eq!(*world.failed_kinds.borrow(), [(true, true), (false, true)]);
}

#[test]
fn retries_are_bounded_whatever_the_embedder_says() {
    let world = World::new();
    let outcome = unmap(&world, 2, usize::MAX / 2, Verdict::Retry);
    assert_eq!(outcome, Outcome::Failed(Errno::Fault));
    let judged: Vec<_> = (0..=RETRIES).map(|retries| (32, retries)).collect();
    assert_eq!(*world.judged.borrow(), judged, "the second chunk, until the bound");
    // One flush of each kind for each chunk begun, and as many more as there were retries.
    assert_eq!(world.flushes.get(), (2 + RETRIES as usize, 2 + RETRIES as usize));
    assert_eq!(world.held.borrow().len(), 1);
    assert!(world.crashes.borrow().is_empty());
    assert_eq!(references(&world), 65 - 32, "the first chunk is released, no other is");
}

#[test]
fn the_verdict_is_asked_for_once_and_a_crash_ends_the_caller_with_its_pages_kept() {
    for (verdict, crashes) in
        [(Verdict::Quarantine, Vec::new()), (Verdict::Crash, [Crash::FlushFailed].into())]
    {
        for first in 0..6 {
            let world = World::new();
            let outcome = unmap(&world, first, 1, verdict);
            assert_eq!(outcome, Outcome::Failed(Errno::Fault), "{verdict:?} at {first}");
            assert_eq!(*world.crashes.borrow(), crashes);
            assert_eq!(world.judged.borrow().len(), 1);
            let released = first as i64 / 2 * 32;
            assert_eq!(references(&world), 65 - released, "no further chunk");
            // Nothing of the next chunk was begun.
            let begun = (first / 2 + 1) * 32;
            let statuses = world.statuses(COUNT as usize);
            assert!(statuses.iter().skip(begun).all(|status| *status == POISON));
            assert_eq!(world.held.borrow().len(), 1, "the pages came first");
        }
    }
}

#[test]
fn a_crash_while_a_domain_is_taken_down_loses_no_page() {
    let world = World::new();
    world.map_and_prepare(40);
    world.flush_fails.set(Some(0));
    world.verdict.set(Verdict::Crash);
    let Teardown::FlushFailed(next) = release_all(&world, 0) else { panic!("not failed") };
    assert_eq!(*world.crashes.borrow(), [Crash::FlushFailed]);
    assert_eq!(release_all(&world, next), Teardown::Done);
    assert_eq!((references(&world), world.held.borrow()[0].len()), (32, 32));
}

/// The way out of quarantine, as an embedder writes it.
fn release_from(world: &World, kept: &mut Quarantine<Pin, BATCH, 4>) -> bool {
    let Some(owed) = kept.owed(world.id()) else { return true };
    let attempt = owed.flush(&world.hardware());
    kept.settle(attempt.paid);
    let pins: Vec<Released<Pin>> = core::iter::from_fn(|| kept.next_page(world.id())).collect();
    pins.into_iter().for_each(|pin| release(world, pin));
    attempt.error.is_none()
}

#[test]
fn a_later_flush_of_every_kind_still_owed_releases_all_that_failed_before() {
    let world = World::new();
    world.map_and_prepare(96);
    let mut kept = Quarantine::new();
    for chunk in 0..3 {
        // The devices of the first, the CPUs of the second, both of the third.
        let (cpus, devices) = world.flushes.get();
        world.flush_fails.set(Some(cpus + devices + chunk % 2));
        world.failures.set(1 + chunk / 2);
        let rest = 96 - 32 * chunk as u32;
        let array = ARRAY + 24 * 32 * chunk as u64;
        let call =
            crate::Call { command: 1, argument: crate::GuestAddress(array), count: rest.min(32) };
        assert_eq!(call.run(&world), Outcome::Failed(Errno::Fault));
        kept.keep(world.held.borrow_mut().pop().unwrap()).unwrap();
    }
    let counted = || (0..96).map(|frame| world.count(GRANTER, frame).references).sum::<i64>();
    assert_eq!((kept.batches(), kept.pages(), counted()), (3, 96, 96));
    // The devices do not forget: who owes only the CPUs is free.
    let (cpus, devices) = world.flushes.get();
    world.flush_fails.set(Some(cpus + devices));
    world.failures.set(1);
    assert!(!release_from(&world, &mut kept));
    assert_eq!(world.flushes.get(), (cpus + 1, devices + 1), "one flush for all three");
    assert_eq!((kept.pages(), counted()), (64, 64));
    // Only the devices are asked again.
    world.flush_fails.set(None);
    assert!(release_from(&world, &mut kept));
    assert_eq!(world.flushes.get(), (cpus + 1, devices + 2));
    assert_eq!((kept.batches(), counted()), (0, 0));
    world.assert_clean();
}
