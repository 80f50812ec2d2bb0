//! A handle names one mapping, is freed exactly once, and comes back last.

use flush::{DomainId, Gfn};
use gnttab::{Crash, Outcome, Teardown, release_all};
use host::{
    Layout, Setup, World,
    calls::{Fate, Shared, map_request, operation, unmap_request},
    world::{BACKEND, FIRST_REFERENCE, FRONTEND, Flushes, OTHER_CPU, granted_gfn},
};

const FIRST: u64 = 0x10_0000;
const LAYOUTS: [Layout; 2] = [Layout::Separate, Layout::Shared];

fn world(layout: Layout) -> World {
    World::new(Setup { layout, ..Setup::default() })
}

/// Unmaps `pick` out of 40 grants, some of them more than once: each first time is good.
#[track_caller]
fn check_repeats(pick: &[usize], flushes: u64) {
    for layout in LAYOUTS {
        let world = world(layout);
        let grants = world.share_at(FIRST, 1, 40);
        let picked: Vec<Shared> = pick.iter().map(|place| grants[*place]).collect();
        let (ended, statuses) = world.give_back(&picked);
        assert_eq!(ended.outcome, Outcome::Done);
        assert_eq!(ended.flushes, Flushes { tlb: flushes, iotlb: flushes }, "{layout:?}");
        for (position, status) in statuses.iter().enumerate() {
            let repeated = pick[..position].contains(&pick[position]);
            assert_eq!(*status, if repeated { -4 } else { 0 }, "{layout:?}: {position}");
        }
        let gone = |place| if pick.contains(&place) { Fate::Back } else { Fate::Mapped };
        world.check_fates(&grants, gone);
        let gone: Vec<Shared> = picked
            .iter()
            .enumerate()
            .filter(|(position, _)| !pick[..*position].contains(&pick[*position]))
            .map(|(_, grant)| *grant)
            .collect();
        world.take_back_and_try(&gone, OTHER_CPU);
        world.check_handles_free(40 - u32::try_from(gone.len()).expect("few grants"));
    }
}

#[test]
fn a_handle_given_twice_is_freed_once() {
    check_repeats(&[5, 5], 1);
    check_repeats(&[0, 1, 2, 1, 0, 3], 1);
    check_repeats(&[7; 32], 1);
    // Across chunks: a second chunk of repeats alone has nothing to flush.
    check_repeats(&[7; 33], 1);
    let across: Vec<usize> = (0..40).chain(0..40).collect();
    check_repeats(&across, 2);
    let last_and_first: Vec<usize> = (0..32).chain([31]).collect();
    check_repeats(&last_and_first, 1);
}

/// An unmap of a handle that stands for nothing: it has a status and no effect.
#[track_caller]
fn check_bad(handle: impl Fn(&[Shared]) -> u32) {
    for layout in LAYOUTS {
        let world = world(layout);
        let grants = world.share_at(FIRST, 1, 3);
        let handle = handle(&grants);
        for operation in [operation::UNMAP, operation::REPLACE] {
            let mut element = [unmap_request(handle, grants[0].gfn)];
            let ended = world.call_on(BACKEND, operation, &mut element);
            assert_eq!(ended.outcome, Outcome::Done);
            assert_eq!(element[0].status, -4, "{layout:?}: handle {handle:#x}");
            assert_eq!(ended.flushes, Flushes::default());
        }
        world.check_fates(&grants, |_| Fate::Mapped);
        world.check_handles_free(3);
        world.check_clean();
    }
}

#[test]
fn a_handle_that_was_never_given_out_changes_nothing() {
    check_bad(|grants| grants[2].handle + 1);
    // The first beyond all handles there are, and others that are far beyond.
    check_bad(|_| 256);
    for handle in [0x4_0000, 1 << 24, (1 << 31) - 1, 1 << 31, u32::MAX - 1, u32::MAX] {
        check_bad(move |_| handle);
    }
}

#[test]
fn a_stale_handle_changes_nothing() {
    for layout in LAYOUTS {
        let world = world(layout);
        let grants = world.share_at(FIRST, 1, 3);
        let (_, statuses) = world.give_back(&grants[..1]);
        assert_eq!(statuses, [0]);
        // The frame shows another grant by now, which the old handle must not name.
        let again = world.share_again(grants[1].reference, grants[0].gfn, false);
        let (ended, statuses) = world.give_back(&grants[..1]);
        assert_eq!((statuses, ended.flushes), (vec![-4], Flushes::default()), "{layout:?}");
        world.touch(again.gfn);
        assert_eq!(world.hypervisor.pages.get(again.mfn), (3, 2));
        world.check_clean();
    }
}

#[test]
fn a_handle_just_freed_is_the_last_to_come_back() {
    for layout in LAYOUTS {
        let world = world(layout);
        let grants = world.share_at(FIRST, 1, 4);
        let order = [2, 0, 3, 1];
        let freed: Vec<Shared> = order.iter().map(|place| grants[*place]).collect();
        let (_, statuses) = world.give_back(&freed);
        assert_eq!(statuses, [0; 4]);
        // 252 handles were never used; after them the freed ones come in their order.
        let mut handles = Vec::new();
        for place in 0..256 {
            let gfn = Gfn::new(FIRST + 0x1000 + place);
            let reference = grants[usize::try_from(place / 100).expect("few")].reference;
            handles.push(world.share_again(reference, gfn, true).handle);
        }
        let fresh = &handles[..252];
        assert!(freed.iter().all(|grant| !fresh.contains(&grant.handle)), "{layout:?}");
        let freed: Vec<u32> = freed.iter().map(|grant| grant.handle).collect();
        assert_eq!(handles[252..], freed, "{layout:?}");
    }
}

#[test]
fn a_granter_that_does_not_exist_crashes_the_caller_and_changes_nothing() {
    for layout in LAYOUTS {
        let mut world = world(layout);
        let grants = world.share_at(FIRST, 1, 40);
        world.hypervisor.guests.retain(|guest| guest.id() != FRONTEND);
        let (ended, statuses) = world.give_back(&grants);
        assert_eq!(ended.outcome, Outcome::Done);
        assert_eq!(ended.flushes, Flushes::default(), "{layout:?}");
        assert_eq!(statuses, [-1; 40], "{layout:?}: a status on every path");
        let crash = Crash::UnknownGranter { granter: FRONTEND };
        assert_eq!(*world.faults.crashes.borrow(), [crash; 40]);
        // The mappings are as they were, and so are their pages.
        for grant in &grants {
            assert_eq!(world.hypervisor.pages.get(grant.mfn), (2, 1));
            world.touch(grant.gfn);
        }
        world.check_clean();

        // The caller's end does not release them either: they stay counted for ever.
        let ended = world.call_as(BACKEND, |caller| {
            assert_eq!(release_all(caller, 0), Teardown::Done);
            Outcome::Done
        });
        assert!(ended.failed.is_empty());
        assert_eq!(*world.faults.crashes.borrow(), [crash; 80]);
        assert!(grants.iter().all(|grant| world.hypervisor.pages.get(grant.mfn) == (2, 1)));
        world.check_unharmed();
    }
}

#[test]
fn a_map_that_is_refused_takes_no_handle() {
    for layout in LAYOUTS {
        let world = world(layout);
        let grants = world.share_at(FIRST, 1, 1);
        let (granted, ungranted, read_only) = (FIRST_REFERENCE, 300, 301);
        world.grant(read_only, granted_gfn(read_only), true);
        // The frontend's entry names a frame where it has nothing.
        world.write_entry(302, 1 | u64::from(BACKEND.get()) << 16 | 0x7_7777 << 32);
        // Reference, flags, what comes of it: each way out of a map has its turn.
        let refused = [
            (granted, 0, -3),
            (granted, 1 << 2, -3),
            (granted, 1 << 1 | 1 << 0, -1),
            (granted, 1 << 1 | 1 << 4, -1),
            (granted, 1 << 1 | 1 << 16, -1),
            (512, 1 << 1, -3),
            (u32::MAX, 1 << 1, -3),
            (ungranted, 1 << 1, -1),
            (read_only, 1 << 1, -1),
            (302, 1 << 1, -9),
        ];
        for (reference, flags, status) in refused {
            let mut element = [map_request(FRONTEND, reference, Gfn::new(FIRST + 8), false)];
            element[0].flags = flags;
            let ended = world.call_on(BACKEND, operation::MAP, &mut element);
            let at = format!("{layout:?}: reference {reference}, flags {flags:#x}");
            assert_eq!((ended.outcome, element[0].status), (Outcome::Done, status), "{at}");
            assert_eq!(element[0].handle, u32::MAX, "{at}");
            assert_eq!(world.backend().lookup(Gfn::new(FIRST + 8)), None, "{at}");
            if reference < 512 && reference != granted {
                assert_eq!(world.in_use(reference), (false, false), "{at}");
            }
        }
        world.check_fates(&grants, |_| Fate::Mapped);
        world.check_handles_free(1);
        world.check_clean();
    }
}

#[test]
fn a_map_from_a_granter_that_does_not_exist_takes_no_handle() {
    for layout in LAYOUTS {
        let world = world(layout);
        let grants = world.share_at(FIRST, 1, 1);
        // A domain means nothing else by its own alias here.
        for granter in [3, 0x7ff0, 0x7fff, u16::MAX] {
            let granter = DomainId::new(granter);
            let gfn = Gfn::new(FIRST + 8);
            let mut element = [map_request(granter, FIRST_REFERENCE, gfn, false)];
            let ended = world.call_on(BACKEND, operation::MAP, &mut element);
            assert_eq!((ended.outcome, element[0].status), (Outcome::Done, -2), "{granter:?}");
            assert_eq!(world.backend().lookup(gfn), None);
        }
        world.check_handles_free(1);
        let (_, statuses) = world.give_back(&grants);
        assert_eq!(statuses, [0]);
        world.take_back(FIRST_REFERENCE, granted_gfn(FIRST_REFERENCE));
        world.check_clean();
    }
}
