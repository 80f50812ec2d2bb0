//! A call may be left between chunks, with nothing pending, and nowhere else.

use flush::Gfn;
use gnttab::{Call, Outcome, Teardown, abi::MapGrantRef, release_all};
use host::{
    Layout, Setup, World,
    calls::{Fate, map_request, operation, unmap_requests},
    world::{
        ARGUMENTS, BACKEND, DEVICE, FIRST_REFERENCE, FRONTEND, Flushes, OTHER_CPU, POISON,
        granted_gfn,
    },
};
use zerocopy::{FromZeros, IntoBytes};

const FIRST: u64 = 0x10_0000;
const LAYOUTS: [Layout; 2] = [Layout::Separate, Layout::Shared];

fn world(layout: Layout) -> World {
    World::new(Setup { layout, ..Setup::default() })
}

/// Unmaps `count` grants with preemption wanted all the time, and frees what it can
/// whenever the call is left: `expected` says after how many elements that is.
#[track_caller]
fn check_unmap(count: u32, expected: &[u32]) {
    for layout in LAYOUTS {
        let at = format!("{layout:?}, {count} grants");
        let world = world(layout);
        let grants = world.share_at(FIRST, 3, count);
        let base = ARGUMENTS.get() << 12;
        world.put(BACKEND, base, unmap_requests(&grants).as_bytes());
        world.faults.preempt.set(true);

        let mut left_after = Vec::new();
        let mut total = 0;
        let mut command = (operation::UNMAP, base, count);
        loop {
            let (operation, argument, elements) = command;
            let ended = world.call(BACKEND, operation, argument, elements);
            assert_eq!(ended.flushes, Flushes { tlb: 1, iotlb: 1 }, "{at}: one chunk an entry");
            let before = total;
            total = match ended.outcome {
                Outcome::Continue { done, rest } => {
                    let Call { command: operation, argument, count: elements } = rest;
                    assert_eq!(done + elements, count - before, "{at}: nothing is lost");
                    command = (operation, argument.0, elements);
                    before + done
                }
                Outcome::Done => count,
                Outcome::Failed(errno) => panic!("{at}: {errno:?}"),
            };
            if ended.outcome != Outcome::Done {
                left_after.push(total);
            }
            // Statuses are written so far and no further, and nothing is pending: the
            // pages can be given away right here.
            for (place, status) in world.statuses(count as usize).into_iter().enumerate() {
                let expected = if place < total as usize { 0 } else { POISON };
                assert_eq!(status, expected, "{at}: status {place} after {total}");
            }
            let (begin, end) = (before as usize, total as usize);
            world.check_fates(&grants[begin..end], |_| Fate::Back);
            world.check_fates(&grants[end..], |_| Fate::Mapped);
            world.take_back_and_try(&grants[begin..end], OTHER_CPU);
            if ended.outcome == Outcome::Done {
                break;
            }
        }
        assert_eq!(left_after, expected, "{at}");
    }
}

#[test]
fn an_unmap_is_left_after_each_chunk_but_the_last_with_nothing_pending() {
    check_unmap(1, &[]);
    check_unmap(32, &[]);
    check_unmap(33, &[32]);
    check_unmap(64, &[32]);
    check_unmap(100, &[32, 64, 96]);
    check_unmap(129, &[32, 64, 96, 128]);
}

#[test]
fn without_preemption_a_call_is_not_left() {
    for layout in LAYOUTS {
        let world = world(layout);
        let grants = world.share_at(FIRST, 1, 100);
        let (ended, _) = world.give_back(&grants);
        assert_eq!(ended.outcome, Outcome::Done);
        assert_eq!(ended.flushes, Flushes { tlb: 4, iotlb: 4 });
        world.take_back_and_try(&grants, OTHER_CPU);
    }
}

#[test]
fn a_map_is_left_after_each_chunk_but_the_last() {
    for layout in LAYOUTS {
        let world = world(layout);
        let references = FIRST_REFERENCE..FIRST_REFERENCE + 70;
        let elements: Vec<MapGrantRef> = references
            .clone()
            .map(|reference| {
                world.grant(reference, granted_gfn(reference), false);
                let gfn = Gfn::new(FIRST + u64::from(reference));
                map_request(FRONTEND, reference, gfn, false)
            })
            .collect();
        let base = ARGUMENTS.get() << 12;
        world.put(BACKEND, base, elements.as_bytes());
        world.faults.preempt.set(true);
        let mut rest = (base, 70);
        for left in [38, 6] {
            let outcome = world.call(BACKEND, operation::MAP, rest.0, rest.1).outcome;
            let Outcome::Continue { done: 32, rest: Call { argument, count, .. } } = outcome else {
                panic!("{layout:?}: {outcome:?} with {left} to be left")
            };
            assert_eq!(count, left);
            rest = (argument.0, count);
        }
        assert_eq!(world.call(BACKEND, operation::MAP, rest.0, rest.1).outcome, Outcome::Done);
        let mut mapped = vec![MapGrantRef::new_zeroed(); 70];
        world.get(BACKEND, base, mapped.as_mut_bytes());
        for (reference, element) in references.zip(&mapped) {
            assert_eq!(element.status, 0, "{layout:?}: {reference}");
            world.touch(Gfn::new(FIRST + u64::from(reference)));
        }
        world.check_clean();
    }
}

#[test]
fn another_vcpu_may_come_first_while_a_call_is_left() {
    for layout in LAYOUTS {
        let world = world(layout);
        let grants = world.share_at(FIRST, 1, 64);
        let base = ARGUMENTS.get() << 12;
        world.put(BACKEND, base, unmap_requests(&grants).as_bytes());
        world.faults.preempt.set(true);
        let outcome = world.call(BACKEND, operation::UNMAP, base, 64).outcome;
        let Outcome::Continue { done: 32, rest } = outcome else { panic!("{outcome:?}") };

        // The other vCPU gives back one of the second chunk, and maps something else there.
        let other = (ARGUMENTS.get() + 8) << 12;
        let mut stolen = unmap_requests(&grants[40..41]);
        world.put(BACKEND, other, stolen.as_bytes());
        assert_eq!(world.call(BACKEND, operation::UNMAP, other, 1).outcome, Outcome::Done);
        world.get(BACKEND, other, stolen.as_mut_bytes());
        assert_eq!(stolen[0].status, 0);
        world.take_back_and_try(&grants[40..41], OTHER_CPU);
        let reference = FIRST_REFERENCE + 100;
        let mfn = world.grant(reference, granted_gfn(reference), false);
        let element = map_request(FRONTEND, reference, grants[40].gfn, false);
        world.put(BACKEND, other, element.as_bytes());
        assert_eq!(world.call(BACKEND, operation::MAP, other, 1).outcome, Outcome::Done);
        world.touch(grants[40].gfn);

        let outcome = world.call(BACKEND, operation::UNMAP, rest.argument.0, rest.count).outcome;
        assert_eq!(outcome, Outcome::Done);
        for (place, status) in world.statuses(64).into_iter().enumerate() {
            assert_eq!(status, if place == 40 { -4 } else { 0 }, "{layout:?}: {place}");
        }
        assert_eq!(world.hypervisor.pages.get(mfn), (2, 1), "the new mapping is untouched");
        world.touch(grants[40].gfn);
        let others: Vec<_> = [&grants[..40], &grants[41..]].concat();
        world.take_back_and_try(&others, OTHER_CPU);
    }
}

#[test]
fn the_end_of_a_domain_is_left_after_each_chunk_but_the_last() {
    for layout in LAYOUTS {
        let world = world(layout);
        let grants = world.share_at(FIRST, 3, 70);
        world.leave(OTHER_CPU);
        let memory = &world.hypervisor.memory;
        assert_eq!(world.backend().dma.detach(&world.units, memory, 0, DEVICE), Ok(()));
        world.faults.preempt.set(true);
        let mut ends = Vec::new();
        let mut from = 0;
        loop {
            let mut end = Teardown::Done;
            let ended = world.call_as(BACKEND, |caller| {
                end = release_all(caller, from);
                Outcome::Done
            });
            assert!(ended.flushes.tlb <= 1 && ended.failed.is_empty());
            ends.push(end);
            match end {
                Teardown::Continue(next) => from = next,
                Teardown::Done | Teardown::FlushFailed(_) => break,
            }
            // Nothing is pending here: what was released can be given away.
            for grant in &grants {
                if world.hypervisor.pages.get(grant.mfn).0 == 1 {
                    assert_eq!(world.in_use(grant.reference), (false, false));
                }
            }
        }
        let Some(Teardown::Done) = ends.last() else { panic!("{layout:?}: {ends:?}") };
        assert!(ends.len() >= 3, "{layout:?}: left between chunks, {ends:?}");
        for grant in &grants {
            assert_eq!(world.hypervisor.pages.get(grant.mfn), (1, 0), "{grant:?}");
            assert_eq!(world.in_use(grant.reference), (false, false), "{grant:?}");
            world.take_back(grant.reference, granted_gfn(grant.reference));
        }
        world.check_unharmed();
    }
}
