//! A granter sees its page in use until every flush for it has completed.

use std::sync::{Arc, Mutex};

use flush::Gfn;
use gnttab::Outcome;
use host::{
    FlushLie, Layout, Setup, World,
    calls::{Fate, Shared},
    world::{FIRST_REFERENCE, OTHER_CPU},
};

const FIRST: u64 = 0x10_0000;
const LAYOUTS: [Layout; 2] = [Layout::Separate, Layout::Shared];

/// What was seen of a chunk while the hypervisor worked, one step after the other.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Seen {
    /// Steps at which its flushes had not all completed.
    before: u64,
    /// Of these, steps at which the granter saw one of its pages unused.
    unused_early: u64,
    /// Of these, steps at which one of its pages was marked dirty.
    dirty_early: u64,
    /// Of these, steps at which one of its pages had lost a reference.
    dropped_early: u64,
    /// Steps after which all of its pages were unused, marked and dropped.
    ended: u64,
}

/// Unmaps `grants` and looks at them after each step, as the granter could.
fn watch(world: &World, grants: &[Shared]) -> Vec<Seen> {
    let chunks = grants.len().div_ceil(32);
    let seen = Arc::new(Mutex::new(vec![Seen::default(); chunks]));
    let progress = {
        let machine = world.machine.clone();
        move || {
            let counters = machine.counters();
            (counters.units[0].waits, counters.cpus[OTHER_CPU].acknowledged)
        }
    };
    let (waits, interrupts) = progress();
    let view = world.granter_view();
    let pages = Arc::clone(&world.hypervisor.pages);
    let (results, watched) = (Arc::clone(&seen), grants.to_vec());
    world.observe(Some(Box::new(move || {
        let now = progress();
        // A chunk's flushes completed when the unit carried out its wait and the CPU
        // was forced out, whichever comes last.
        let flushed = (now.0 - waits).min(now.1 - interrupts);
        let mut seen = results.lock().expect("no panic in here");
        for (chunk, (grants, seen)) in watched.chunks(32).zip(seen.iter_mut()).enumerate() {
            let unused = |grant: &&Shared| view.in_use(grant.reference) != (true, true);
            let dirty = |grant: &&Shared| pages.dirty(grant.mfn) != 0;
            let dropped = |grant: &&Shared| pages.get(grant.mfn) != (2, 1);
            let states = [&unused as &dyn Fn(&&Shared) -> bool, &dirty, &dropped]
                .map(|state| grants.iter().filter(state).count());
            if flushed <= chunk as u64 {
                seen.before += 1;
                seen.unused_early += u64::from(states[0] > 0);
                seen.dirty_early += u64::from(states[1] > 0);
                seen.dropped_early += u64::from(states[2] > 0);
            } else {
                seen.ended += u64::from(states == [grants.len(); 3]);
            }
        }
    })));
    let (ended, statuses) = world.give_back(grants);
    world.observe(None);
    assert_eq!(ended.outcome, Outcome::Done);
    assert!(statuses.iter().all(|status| *status == 0));
    seen.lock().expect("no panic in there").clone()
}

#[test]
fn a_page_is_in_use_clean_and_counted_until_both_flushes_of_its_chunk_completed() {
    for layout in LAYOUTS {
        for latency in [1, 5, 40] {
            let mut setup = Setup { layout, ..Setup::default() };
            setup.unit.latency = latency;
            let world = World::new(setup);
            let grants = world.share_at(FIRST, 3, 70);
            let seen = watch(&world, &grants);
            for (chunk, seen) in seen.iter().enumerate() {
                let at = format!("{layout:?}, latency {latency}, chunk {chunk}: {seen:?}");
                // One step for each copy and each edit, and the turns of the waits.
                assert!(seen.before > 3 * 32, "{at}");
                let early = (seen.unused_early, seen.dirty_early, seen.dropped_early);
                assert_eq!(early, (0, 0, 0), "{at}");
                // After the last chunk nothing more happens that could be looked at.
                assert_eq!(seen.ended > 0, chunk < 2, "{at}");
            }
            for grant in &grants {
                assert_eq!(world.fate(grant), Fate::Back);
                assert_eq!(world.hypervisor.pages.dirty(grant.mfn), 1, "marked once");
            }
            world.take_back_and_try(&grants, OTHER_CPU);
        }
    }
}

#[test]
fn a_flush_that_is_not_waited_for_is_seen_here() {
    for lies in [(Some(FlushLie::NoWait), None), (None, Some(FlushLie::NoWait))] {
        let mut setup = Setup::default();
        setup.unit.latency = 40;
        let world = World::new(setup);
        let grants = world.share_at(FIRST, 3, 70);
        world.lies.set(lies);
        let seen = watch(&world, &grants);
        // The second chunk's steps come while the first one's flush is under way.
        let Seen { unused_early, dirty_early, dropped_early, .. } = seen[0];
        assert!(unused_early > 0 && dirty_early > 0 && dropped_early > 0, "{lies:?}: {seen:?}");
    }
}

/// Mappings to unmap, by place; what the granter then sees (reading, writing); and what is
/// counted then (references, writable references).
type Step<'a> = (&'a [usize], (bool, bool), (u32, u32));

/// Maps one grant several times, and unmaps it step by step.
#[track_caller]
fn check_bits(read_only: &[bool], steps: &[Step<'_>]) {
    for layout in LAYOUTS {
        let world = World::new(Setup { layout, ..Setup::default() });
        let grants = world.share_at(FIRST, 1, 1);
        let grant = grants[0];
        let mut mapped = Vec::new();
        for (place, read_only) in (1..).zip(read_only) {
            mapped.push(world.share_again(grant.reference, Gfn::new(FIRST + place), *read_only));
        }
        let (_, statuses) = world.give_back(&grants);
        assert_eq!(statuses, [0]);
        for (unmapped, in_use, counts) in steps {
            let unmapped: Vec<_> = unmapped.iter().map(|place| mapped[*place]).collect();
            let (ended, statuses) = world.give_back(&unmapped);
            assert_eq!(ended.outcome, Outcome::Done);
            assert!(statuses.iter().all(|status| *status == 0), "{layout:?} {unmapped:?}");
            assert_eq!(world.in_use(FIRST_REFERENCE), *in_use, "{layout:?} {unmapped:?}");
            assert_eq!(world.hypervisor.pages.get(grant.mfn), *counts, "{layout:?}");
            let pinned = usize::from(in_use.0);
            assert_eq!(world.frontend().grants().pinned(), pinned, "{layout:?}");
        }
        world.take_back_and_try(&grants, OTHER_CPU);
    }
}

#[test]
fn writing_ends_with_the_last_writable_mapping_and_reading_with_the_last_of_all() {
    const WRITE: bool = false;
    const READ: bool = true;
    let all = (false, false);
    let every: Vec<usize> = (1..39).collect();
    check_bits(
        &[WRITE, READ],
        &[(&[], (true, true), (3, 1)), (&[0], (true, false), (2, 0)), (&[1], all, (1, 0))],
    );
    check_bits(&[WRITE, READ], &[(&[1], (true, true), (2, 1)), (&[0], all, (1, 0))]);
    check_bits(&[WRITE, READ], &[(&[0, 1], all, (1, 0))]);
    check_bits(&[WRITE, WRITE, READ], &[(&[0], (true, true), (3, 1)), (&[2, 1], all, (1, 0))]);
    check_bits(
        &[READ, READ, WRITE],
        &[(&[2], (true, false), (3, 0)), (&[0], (true, false), (2, 0)), (&[1], all, (1, 0))],
    );
    check_bits(&[WRITE; 40], &[(&[39, 0], (true, true), (39, 38)), (&every, all, (1, 0))]);
}

#[test]
fn a_grant_is_pinned_at_most_128_times_each_way() {
    for layout in LAYOUTS {
        let world = World::new(Setup { layout, ..Setup::default() });
        let grants = world.share_at(FIRST, 1, 1);
        let again = |place: u64, read_only| {
            let gfn = Gfn::new(FIRST + 0x1000 + place);
            world.map(&[(grants[0].reference, gfn)], read_only)[0]
        };
        let mut handles: Vec<(u32, Gfn)> = vec![(grants[0].handle, grants[0].gfn)];
        for (read_only, first, more) in [(false, 0, 127), (true, 200, 128)] {
            for place in first..first + more {
                let (status, handle) = again(place, read_only);
                assert_eq!(status, 0, "{layout:?}: {place}");
                handles.push((handle, Gfn::new(FIRST + 0x1000 + place)));
            }
            assert_eq!(again(first + more, read_only).0, -1, "{layout:?}: one too many");
        }
        assert_eq!(world.hypervisor.pages.get(grants[0].mfn), (257, 128));
        assert_eq!(world.unmap(&handles).outcome, Outcome::Done);
        assert!(world.statuses(handles.len()).iter().all(|status| *status == 0));
        world.check_fates(&grants, |_| Fate::Back);
        world.take_back_and_try(&grants, OTHER_CPU);
        world.check_handles_free(0);
    }
}

#[test]
fn what_the_granter_does_to_its_entry_meanwhile_changes_nothing() {
    for layout in LAYOUTS {
        // Revoked, given to another domain, or pointed at another page, bits and all.
        for word in [0, 1 | 9 << 16 | 0x1008 << 32, 0x19 | 2 << 16 | 0x5555 << 32, u64::MAX] {
            let world = World::new(Setup { layout, ..Setup::default() });
            let grants = world.share_at(FIRST, 1, 1);
            world.write_entry(grants[0].reference, word);
            world.touch(grants[0].gfn);
            let (_, statuses) = world.give_back(&grants);
            assert_eq!(statuses, [0], "{layout:?} {word:#x}");
            assert_eq!(world.hypervisor.pages.get(grants[0].mfn), (1, 0));
            assert_eq!(world.in_use(grants[0].reference), (false, false), "{word:#x}");
            world.take_back_and_try(&grants, OTHER_CPU);
        }
    }
}
