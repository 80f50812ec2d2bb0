//! Copies between grants: every status, what granters see, what is left.

use std::{boxed::Box, format, vec::Vec};

use zerocopy::FromZeros;

use super::fake::*;
use crate::abi::{CopyPlace, GrantCopy, MapGrantRef};
use crate::{Action, Call, Errno, GuestAddress, Outcome, PageError, Version};

/// Operation and flags as guests know them.
const COPY: u32 = 5;
const SOURCE: u16 = 1;
const DEST: u16 = 2;
const SUB_PAGE: u16 = 1 << 8;
const TRANSITIVE: u16 = 3;
const SELF: u16 = 0x7ff0;

/// The grant that copies read, and the one they write: of two granters.
const READ: u32 = 20;
const WRITTEN: u32 = 30;

const BOTH: u16 = READING | WRITING;

fn request() -> GrantCopy {
    GrantCopy {
        source: CopyPlace { frame: READ.into(), domain: GRANTER.get(), offset: 8, padding: 0 },
        dest: CopyPlace { frame: WRITTEN.into(), domain: OTHER.get(), offset: 16, padding: 0 },
        length: 100,
        flags: SOURCE | DEST,
        status: POISON,
        ..GrantCopy::new_zeroed()
    }
}

/// A page of bytes that tell their place.
fn pattern(seed: u8) -> Vec<u8> {
    (0..4096_u32).map(|place| (place % 251) as u8 ^ seed).collect()
}

fn world(version: Version) -> World {
    let world = World::new();
    world.set_version(GRANTER, version);
    world.set_version(OTHER, version);
    world.set_version(CALLER, version);
    world.bytes.borrow_mut().insert(World::page(GRANTER, READ.into()), pattern(1));
    world.bytes.borrow_mut().insert(World::page(OTHER, WRITTEN.into()), pattern(2));
    world
}

/// Copies in one call that must succeed, and tells the statuses.
#[track_caller]
fn copy(world: &World, requests: &[GrantCopy]) -> Vec<i16> {
    world.write(ARRAY, requests);
    assert_eq!(world.call(COPY, requests.len() as u32), Outcome::Done);
    world.read::<GrantCopy>(ARRAY, requests.len()).iter().map(|element| element.status).collect()
}

/// A copy that is refused: its status, and the page it would have written is as it was.
#[track_caller]
fn check_refused(world: &World, request: GrantCopy, want: i16, name: &str) {
    let before = world.content(World::page(OTHER, WRITTEN.into()));
    assert_eq!(copy(world, &[request]), [want], "{name}");
    assert_eq!(world.content(World::page(OTHER, WRITTEN.into())), before, "{name}");
    assert_eq!(world.flushes.get(), (0, 0), "{name}");
    world.assert_clean();
}

/// One thing wrong with a copy.
type Defect = (&'static str, i16, fn(&World, &mut GrantCopy));

/// In order of precedence.
const DEFECTS: &[Defect] = &[
    ("source past the page", -10, |_, copy| copy.source.offset = 4096 - 99),
    ("source far past the page", -10, |_, copy| copy.source.offset = u16::MAX),
    ("destination past the page", -10, |_, copy| copy.dest.offset = 4096 - 99),
    ("length past the page", -10, |_, copy| copy.length = u16::MAX),
    ("frame number of another's, to read", -8, |_, copy| copy.flags &= !SOURCE),
    ("own frame number by the caller's own id, to read", -8, |_, copy| {
        (copy.source.domain, copy.flags) = (CALLER.get(), copy.flags & !SOURCE);
    }),
    ("unknown granter to read", -2, |_, copy| copy.source.domain = 99),
    ("policy", -8, |world, _| world.denied.set(Some(Action::Copy))),
    ("frame number of another's, to write", -8, |_, copy| copy.flags &= !DEST),
    ("own frame number by the caller's own id, to write", -8, |_, copy| {
        (copy.dest.domain, copy.flags) = (CALLER.get(), copy.flags & !DEST);
    }),
    ("unknown granter to write", -2, |_, copy| copy.dest.domain = 99),
    ("reference to read out of range", -3, |_, copy| copy.source.frame = 512),
    ("reference to read far out of range", -3, |_, copy| copy.source.frame = u64::MAX),
    ("no grant to read", -1, |world, _| world.grant(GRANTER, READ, 0, CALLER)),
    ("grant to read of another", -1, |world, _| world.grant(GRANTER, READ, PERMIT, OTHER)),
    ("transfer", -1, |world, _| world.grant(GRANTER, READ, 2, CALLER)),
    ("not present to read", -12, |world, _| {
        world.page_fails.set(Some((0, PageError::NotPresent)));
    }),
    ("not RAM to read", -9, |world, _| {
        world.ram.borrow_mut().remove(&(GRANTER, READ.into()));
    }),
    ("reference to write out of range", -3, |_, copy| copy.dest.frame = 512),
    ("no grant to write", -1, |world, _| world.grant(OTHER, WRITTEN, 0, CALLER)),
    ("grant to write of another", -1, |world, _| world.grant(OTHER, WRITTEN, PERMIT, GRANTER)),
    ("read-only grant to write", -1, |world, _| {
        world.grant(OTHER, WRITTEN, PERMIT | READ_ONLY, CALLER);
    }),
    ("not present to write", -12, |world, _| {
        world.page_fails.set(Some((1, PageError::NotPresent)));
    }),
    ("no reference to write", -1, |world, _| {
        world.page_fails.set(Some((1, PageError::Refused)));
    }),
    ("not RAM to write", -9, |world, _| {
        world.ram.borrow_mut().remove(&(OTHER, WRITTEN.into()));
    }),
    ("the embedder cannot reach a page", -1, |world, _| world.copy_fails.set(true)),
];

#[test]
fn each_defect_of_a_copy_has_its_status_and_leaves_nothing_behind() {
    for (name, status, apply) in DEFECTS {
        for version in [Version::V1, Version::V2] {
            let world = world(version);
            let mut copy = request();
            apply(&world, &mut copy);
            check_refused(&world, copy, *status, &format!("{name}, {version:?}"));
        }
    }
}

#[test]
fn of_two_defects_of_a_copy_the_earlier_check_decides() {
    for (place, (first, status, spoil)) in DEFECTS.iter().enumerate() {
        for (second, _, also) in &DEFECTS[place + 1..] {
            let world = world(Version::V1);
            let mut copy = request();
            also(&world, &mut copy);
            spoil(&world, &mut copy);
            check_refused(&world, copy, *status, &format!("{first}, {second}"));
        }
    }
}

#[test]
fn a_defect_of_one_element_is_its_own() {
    let world = world(Version::V1);
    let bad = GrantCopy { length: 4096, ..request() };
    let unknown =
        GrantCopy { dest: CopyPlace { domain: 99, ..request().dest }, status: 0, ..request() };
    assert_eq!(copy(&world, &[request(), bad, request(), unknown, request()]), [0, -10, 0, -2, 0]);
    assert_eq!(world.copied.get(), 3);
    world.assert_clean();
}

/// Copies `length` bytes and compares both pages with what arrays of bytes would hold.
#[track_caller]
fn check_bytes(version: Version, offset: u16, target: u16, length: u16) {
    let world = world(version);
    let source = CopyPlace { offset, ..request().source };
    let dest = CopyPlace { offset: target, ..request().dest };
    let done = copy(&world, &[GrantCopy { source, dest, length, ..request() }]);
    assert_eq!(done, [0], "{offset} + {length} to {target}");
    let mut want = pattern(2);
    let (from, to, length) = (usize::from(offset), usize::from(target), usize::from(length));
    want[to..to + length].copy_from_slice(&pattern(1)[from..from + length]);
    assert_eq!(world.content(World::page(OTHER, WRITTEN.into())), want);
    assert_eq!(world.content(World::page(GRANTER, READ.into())), pattern(1));
    assert!(world.count(OTHER, WRITTEN.into()).dirty);
    assert!(!world.count(GRANTER, READ.into()).dirty, "only what is written is dirty");
    assert_eq!(world.flushes.get(), (0, 0), "a copy asks no hardware");
    world.assert_clean();
}

#[test]
fn the_bytes_asked_for_arrive_and_no_other_changes() {
    for version in [Version::V1, Version::V2] {
        for (offset, target, length) in
            [(0, 0, 4096), (0, 0, 0), (4096, 4096, 0), (4095, 0, 1), (1, 4095, 1), (512, 7, 1536)]
        {
            check_bytes(version, offset, target, length);
        }
    }
}

#[test]
fn the_granters_see_their_pages_in_use_while_bytes_move_and_not_after() {
    for version in [Version::V1, Version::V2] {
        let world = world(version);
        *world.during_copy.borrow_mut() = Some(Box::new(|world| {
            assert_eq!(world.in_use(GRANTER, READ), READING);
            assert_eq!(world.in_use(OTHER, WRITTEN), BOTH);
            assert_eq!((world.pinned(GRANTER), world.pinned(OTHER)), (1, 1));
            let (read, written) =
                (world.count(GRANTER, READ.into()), world.count(OTHER, WRITTEN.into()));
            assert_eq!((read.references, read.types), (1, 0));
            assert_eq!((written.references, written.types), (1, 1));
            assert!(!written.dirty, "the bytes are not there yet");
        }));
        assert_eq!(copy(&world, &[request()]), [0]);
        assert_eq!(world.copied.get(), 1);
        world.assert_clean();
    }
}

#[test]
fn a_page_of_the_callers_own_is_named_by_its_number() {
    let world = world(Version::V1);
    let own = own(7);
    let out = GrantCopy { dest: own, flags: SOURCE, ..request() };
    let back = GrantCopy { source: own, flags: DEST, ..request() };
    let within =
        GrantCopy { source: own, dest: CopyPlace { frame: 9, ..own }, flags: 0, ..request() };
    assert_eq!(copy(&world, &[out, within, back]), [0; 3]);
    assert_eq!(world.content(World::page(CALLER, 9))[..100], pattern(1)[8..108]);
    assert_eq!(world.content(World::page(OTHER, WRITTEN.into()))[16..116], pattern(1)[8..108]);
    assert!(world.count(CALLER, 7).dirty && world.count(CALLER, 9).dirty);
    world.assert_clean();
    let nowhere = CopyPlace { frame: 1 << 52, ..own };
    let refused = [
        GrantCopy { dest: nowhere, flags: SOURCE, ..request() },
        GrantCopy { source: nowhere, flags: DEST, ..request() },
    ];
    assert_eq!(copy(&world, &refused), [-9; 2]);
    world.assert_clean();
}

#[test]
fn the_caller_may_copy_through_its_own_grants_whatever_policy_says() {
    let world = world(Version::V1);
    world.grant(CALLER, 40, PERMIT, CALLER);
    world.denied.set(Some(Action::Copy));
    let own = CopyPlace { frame: 40, domain: SELF, ..CopyPlace::new_zeroed() };
    let number = CopyPlace { frame: 41, ..own };
    let requests = [
        GrantCopy { source: own, dest: number, flags: SOURCE, ..request() },
        // The upper half of a reference means nothing.
        GrantCopy {
            source: CopyPlace { frame: 0xdead_0000_0000 | 40, ..own },
            dest: CopyPlace { domain: CALLER.get(), ..own },
            ..request()
        },
    ];
    assert_eq!(copy(&world, &requests), [0, 0]);
    world.assert_clean();
}

/// Copies 100 bytes from a window of a page, and back into it.
#[track_caller]
fn check_window(window: (u16, u16), offset: u16, length: u16, want: i16) {
    let name = format!("{length} at {offset} in {window:?}");
    let world = world(Version::V2);
    world.grant_v2(GRANTER, READ, (PERMIT | SUB_PAGE, CALLER), window, READ.into());
    world.grant_v2(OTHER, WRITTEN, (PERMIT | SUB_PAGE, CALLER), window, WRITTEN.into());
    let place = CopyPlace { frame: 7, domain: SELF, ..CopyPlace::new_zeroed() };
    let source = CopyPlace { offset, ..request().source };
    let dest = CopyPlace { offset, ..request().dest };
    let requests = [
        GrantCopy { source, dest: place, length, flags: SOURCE, ..request() },
        GrantCopy { source: place, dest, length, flags: DEST, ..request() },
        GrantCopy { source, dest, length, ..request() },
    ];
    assert_eq!(copy(&world, &requests), [want; 3], "{name}");
    if want != 0 {
        assert_eq!(world.copied.get(), 0, "{name}");
        assert_eq!(world.content(World::page(OTHER, WRITTEN.into())), pattern(2), "{name}");
    }
    world.assert_clean();
}

#[test]
fn a_part_of_a_page_is_granted_to_the_byte() {
    for (window, offset, length, want) in [
        ((100, 50), 100, 50, 0),
        ((100, 50), 100, 0, 0),
        ((100, 50), 149, 1, 0),
        ((100, 50), 150, 0, 0),
        ((100, 50), 99, 1, -1),
        ((100, 50), 99, 51, -1),
        ((100, 50), 100, 51, -1),
        ((100, 50), 149, 2, -1),
        ((100, 50), 150, 1, -1),
        ((100, 50), 0, 4096, -1),
        ((0, 0), 0, 0, 0),
        ((0, 0), 0, 1, -1),
        ((0, 4096), 0, 4096, 0),
        // Windows that leave the page grant what of them lies in it.
        ((0, u16::MAX), 0, 4096, 0),
        ((4000, u16::MAX), 4000, 96, 0),
        ((4000, u16::MAX), 3999, 96, -1),
        ((4096, 10), 4095, 1, -1),
        ((u16::MAX, u16::MAX), 0, 1, -1),
        ((u16::MAX, u16::MAX), 4000, 96, -1),
    ] {
        check_window(window, offset, length, want);
    }
}

#[test]
fn a_part_of_a_page_cannot_be_mapped_while_it_is_copied() {
    let world = world(Version::V2);
    world.grant_v2(GRANTER, READ, (PERMIT | SUB_PAGE, CALLER), (0, 512), READ.into());
    *world.during_copy.borrow_mut() = Some(Box::new(|world| {
        let map = MapGrantRef { host_addr: 0x5_0000_0000, ..super::fake::request(READ) };
        world.write(0x8000, &[map]);
        let call = Call { command: 0, argument: GuestAddress(0x8000), count: 1 };
        assert_eq!(call.run(world), Outcome::Done);
        assert_eq!(world.read::<MapGrantRef>(0x8000, 1)[0].status, -1);
        assert_eq!(world.in_use(GRANTER, READ), READING, "the copy goes on");
    }));
    assert_eq!(copy(&world, &[request()]), [0]);
    assert_eq!(world.copied.get(), 1);
    world.assert_clean();
}

/// `OTHER` passes on reference 50 of `GRANTER` as its own reference 60.
fn passed_on(world: &World, flags: u16) -> CopyPlace {
    world.grant(GRANTER, 50, PERMIT | flags, OTHER);
    let entry = (TRANSITIVE | flags, CALLER);
    world.grant_v2(OTHER, 60, entry, (GRANTER.get(), 0), 0x77_0000_0000 | 50);
    CopyPlace { frame: 60, domain: OTHER.get(), ..CopyPlace::new_zeroed() }
}

fn own(frame: u64) -> CopyPlace {
    CopyPlace { frame, domain: SELF, ..CopyPlace::new_zeroed() }
}

#[test]
fn a_grant_that_is_passed_on_once_leads_to_the_third_domains_page() {
    for (flags, source, want, bits) in [
        (0, true, 0, READING),
        (READ_ONLY, true, 0, READING),
        (0, false, 0, BOTH),
        (READ_ONLY, false, -1, 0),
    ] {
        let world = world(Version::V2);
        let place = passed_on(&world, flags);
        world.bytes.borrow_mut().insert(World::page(GRANTER, 50), pattern(5));
        world.bytes.borrow_mut().insert(World::page(CALLER, 7), pattern(6));
        *world.during_copy.borrow_mut() = Some(Box::new(move |world| {
            assert_eq!((world.in_use(GRANTER, 50), world.in_use(OTHER, 60)), (bits, bits));
            assert_eq!((world.pinned(GRANTER), world.pinned(OTHER)), (1, 1));
        }));
        let request = if source {
            GrantCopy { source: place, dest: own(7), flags: SOURCE, ..request() }
        } else {
            GrantCopy { source: own(7), dest: place, flags: DEST, ..request() }
        };
        assert_eq!(copy(&world, &[request]), [want], "{flags:#x}");
        let (read, written) = if source {
            (pattern(5), world.content(World::page(CALLER, 7)))
        } else {
            (pattern(6), world.content(World::page(GRANTER, 50)))
        };
        assert_eq!(read[..100] == written[..100], want == 0);
        assert_eq!(world.count(GRANTER, 50).dirty, want == 0 && !source);
        assert_eq!(world.copied.get(), usize::from(want == 0));
        world.assert_clean();
    }
}

/// A change to a world with a grant that is passed on, and the status of a copy from it.
type Passed = (&'static str, i16, fn(&World));

#[test]
fn what_is_wrong_with_a_grant_that_is_passed_on_undoes_both_steps() {
    let cases: &[Passed] = &[
        ("passed on to another", -1, |world| {
            world.grant_v2(OTHER, 60, (TRANSITIVE, GRANTER), (GRANTER.get(), 0), 50);
        }),
        ("with a window", -1, |world| {
            world.grant_v2(OTHER, 60, (TRANSITIVE | SUB_PAGE, CALLER), (GRANTER.get(), 0), 50);
        }),
        ("third domain unknown", -1, |world| {
            world.grant_v2(OTHER, 60, (TRANSITIVE, CALLER), (99, 0), 50);
        }),
        ("self is not translated", -1, |world| {
            world.grant_v2(OTHER, 60, (TRANSITIVE, CALLER), (SELF, 0), 50);
        }),
        ("its own", -1, |world| {
            world.grant(OTHER, 61, PERMIT, OTHER);
            world.grant_v2(OTHER, 60, (TRANSITIVE, CALLER), (OTHER.get(), 0), 61);
        }),
        ("to itself", -1, |world| {
            world.grant_v2(OTHER, 60, (TRANSITIVE, CALLER), (OTHER.get(), 0), 60);
        }),
        ("reference of the third out of range", -3, |world| {
            world.grant_v2(OTHER, 60, (TRANSITIVE, CALLER), (GRANTER.get(), 0), 256);
        }),
        ("not granted by the third", -1, |world| world.grant(GRANTER, 50, 0, OTHER)),
        ("granted to the caller, not to the one who passes on", -1, |world| {
            world.grant(GRANTER, 50, PERMIT, CALLER);
        }),
        ("passed on twice", -1, |world| {
            world.grant(CALLER, 70, PERMIT, GRANTER);
            world.grant_v2(GRANTER, 50, (TRANSITIVE, OTHER), (CALLER.get(), 0), 70);
        }),
        ("in a circle", -1, |world| {
            world.grant_v2(GRANTER, 50, (TRANSITIVE, OTHER), (OTHER.get(), 0), 60);
        }),
        ("not RAM", -9, |world| {
            world.ram.borrow_mut().remove(&(GRANTER, 50));
        }),
        ("not present", -12, |world| {
            world.page_fails.set(Some((0, PageError::NotPresent)));
        }),
        ("third domain pinned by another", -1, |world| {
            world.grant(GRANTER, 50, PERMIT, CALLER);
            assert_eq!(world.map_one(super::fake::request(50)).status, 0);
            world.grant(GRANTER, 50, PERMIT | READING | WRITING, OTHER);
        }),
        ("policy about the third", -8, |world| {
            // Asked about the granter first, then about the third.
            *world.during_policy.borrow_mut() = Some(Box::new(|world| {
                *world.during_policy.borrow_mut() =
                    Some(Box::new(|world| world.denied.set(Some(Action::Copy))));
            }));
        }),
    ];
    for (name, want, apply) in cases {
        let world = world(Version::V2);
        let place = passed_on(&world, 0);
        apply(&world);
        let (mapped, taken) = (world.p2m.borrow().len(), world.pinned(GRANTER));
        world.pages_taken.set(0);
        let request = GrantCopy { source: place, dest: own(7), flags: SOURCE, ..request() };
        assert_eq!(copy(&world, &[request]), [*want], "{name}");
        assert_eq!((world.copied.get(), world.p2m.borrow().len()), (0, mapped), "{name}");
        assert_eq!((world.pinned(GRANTER), world.pinned(OTHER)), (taken, 0), "{name}");
        assert_eq!((world.in_use(OTHER, 60), world.in_use(CALLER, 70)), (0, 0), "{name}");
        if mapped == 0 {
            world.assert_clean();
        }
    }
}

#[test]
fn the_window_of_the_last_grant_counts() {
    let world = world(Version::V2);
    let place = passed_on(&world, 0);
    world.grant_v2(GRANTER, 50, (PERMIT | SUB_PAGE, OTHER), (100, 50), 50);
    for (offset, length, want) in [(100, 50, 0), (99, 50, -1), (100, 51, -1)] {
        let source = CopyPlace { offset, ..place };
        let request = GrantCopy { source, dest: own(7), length, flags: SOURCE, ..request() };
        assert_eq!(copy(&world, &[request]), [want], "{length} at {offset}");
        world.assert_clean();
    }
}

#[test]
fn a_version_1_entry_is_neither_a_part_nor_passed_on() {
    for flags in [PERMIT | SUB_PAGE, TRANSITIVE, TRANSITIVE | SUB_PAGE] {
        let world = world(Version::V1);
        world.grant(GRANTER, READ, flags, CALLER);
        check_refused(&world, request(), -1, &format!("{flags:#x}"));
    }
}

#[test]
fn a_grant_that_is_mapped_lends_the_page_that_is_mapped() {
    for version in [Version::V1, Version::V2] {
        let world = world(version);
        let read = MapGrantRef { flags: HOST | MAP_READ_ONLY, ..super::fake::request(READ) };
        let mapped = world.map_one(read);
        // The granter names another page; who has it mapped still has the old one.
        let frame = u64::from(READ);
        world.ram.borrow_mut().insert((GRANTER, frame), World::page(GRANTER, 99));
        let out = GrantCopy { dest: own(7), flags: SOURCE, ..request() };
        assert_eq!(copy(&world, &[out]), [0]);
        assert_eq!(world.content(World::page(CALLER, 7))[..100], pattern(1)[8..108]);
        assert_eq!(world.in_use(GRANTER, READ), READING, "it is still mapped");
        // A right that the mapping has not is asked of the entry.
        let place = CopyPlace { offset: 0, ..request().source };
        let into = GrantCopy { source: own(7), dest: place, flags: DEST, ..request() };
        assert_eq!(copy(&world, &[into]), [0]);
        assert_eq!(world.in_use(GRANTER, READ), READING, "writing was for the copy alone");
        world.grant(GRANTER, READ, PERMIT | READ_ONLY | READING, CALLER);
        assert_eq!(copy(&world, &[into, out]), [-1, 0]);
        assert_eq!(world.in_use(GRANTER, READ), READING);
        assert_eq!(world.unmap(&[unmap_of(&mapped)]), [0]);
        assert_eq!(world.in_use(GRANTER, READ), 0);
        world.assert_clean();
    }
}

/// Makes a call on an array of another vCPU, and tells the statuses of its unmaps.
fn unmap_elsewhere(world: &World, unmap: crate::abi::UnmapGrantRef) -> i16 {
    world.write(0x8000, &[unmap]);
    let call = Call { command: 1, argument: GuestAddress(0x8000), count: 1 };
    assert_eq!(call.run(world), Outcome::Done);
    world.read::<crate::abi::UnmapGrantRef>(0x8000, 1)[0].status
}

#[test]
fn an_unmap_in_the_middle_of_a_copy_leaves_the_page_to_the_copy() {
    for (reference, granter, bits) in [(READ, GRANTER, READING), (WRITTEN, OTHER, BOTH)] {
        let world = world(Version::V1);
        let map = MapGrantRef { domain: granter.get(), ..super::fake::request(reference) };
        let unmap = unmap_of(&world.map_one(map));
        *world.during_copy.borrow_mut() = Some(Box::new(move |world| {
            assert_eq!(world.in_use(granter, reference), BOTH);
            assert_eq!(unmap_elsewhere(world, unmap), 0);
            assert_eq!(world.in_use(granter, reference), bits, "the copy is under way");
            assert_eq!(world.count(granter, reference.into()).references, 1);
            assert_eq!(world.pinned(granter), 1);
        }));
        assert_eq!(copy(&world, &[request()]), [0]);
        assert_eq!(world.copied.get(), 1);
        world.assert_clean();
    }
}

#[test]
fn a_map_in_the_middle_of_a_copy_gets_what_the_entry_says_then() {
    let world = world(Version::V1);
    *world.during_copy.borrow_mut() = Some(Box::new(|world| {
        // The granter names another page meanwhile, which it must not: both are counted.
        world.ram.borrow_mut().insert((GRANTER, READ.into()), World::page(GRANTER, 99));
        world.write(0x8000, &[super::fake::request(READ)]);
        let call = Call { command: 0, argument: GuestAddress(0x8000), count: 1 };
        assert_eq!(call.run(world), Outcome::Done);
    }));
    assert_eq!(copy(&world, &[request()]), [0]);
    let mapped = world.read::<MapGrantRef>(0x8000, 1)[0];
    assert_eq!(mapped.status, 0);
    assert_eq!(world.p2m.borrow()[&(mapped.host_addr >> 12)].mfn, World::page(GRANTER, 99));
    assert_eq!(world.count(GRANTER, READ.into()).references, 0, "the copy gave its own back");
    assert_eq!(world.count(GRANTER, 99).references, 1);
    assert_eq!(world.in_use(GRANTER, READ), BOTH, "the mapping stays");
    assert_eq!(world.unmap(&[unmap_of(&mapped)]), [0]);
    world.assert_clean();
}

#[test]
fn an_own_grant_that_is_mapped_in_the_middle_of_a_copy_still_moves() {
    let world = world(Version::V1);
    world.grant(CALLER, 40, PERMIT, CALLER);
    *world.during_copy.borrow_mut() = Some(Box::new(|world| {
        let map = MapGrantRef { domain: CALLER.get(), ..super::fake::request(40) };
        world.write(0x8000, &[map]);
        let call = Call { command: 0, argument: GuestAddress(0x8000), count: 1 };
        assert_eq!(call.run(world), Outcome::Done);
    }));
    let source = CopyPlace { frame: 40, domain: SELF, ..CopyPlace::new_zeroed() };
    let request = GrantCopy { source, dest: own(7), flags: SOURCE, ..request() };
    assert_eq!(copy(&world, &[request]), [0]);
    assert_eq!(world.read::<MapGrantRef>(0x8000, 1)[0].status, 0);
    assert!(!world.ram.borrow().contains_key(&(CALLER, 40)), "the old number still shows it");
}

#[test]
fn a_granter_that_revokes_in_the_middle_of_a_copy_waits_for_its_end() {
    for version in [Version::V1, Version::V2] {
        let world = world(version);
        *world.during_copy.borrow_mut() = Some(Box::new(move |world| {
            let bits = if version == Version::V1 { READING } else { 0 };
            world.grant(GRANTER, READ, bits, CALLER);
            assert_eq!(world.in_use(GRANTER, READ), READING);
        }));
        assert_eq!(copy(&world, &[request(), request()]), [0, -1]);
        world.assert_clean();
    }
}

#[test]
fn no_more_than_128_copies_hold_one_grant_at_a_time() {
    fn nest(world: &World, depth: usize) {
        let at = 0x2000 + depth as u64 * 40;
        world.write(at, &[GrantCopy { dest: own(7), flags: SOURCE, ..request() }]);
        if depth < 128 {
            *world.during_copy.borrow_mut() = Some(Box::new(move |world| nest(world, depth + 1)));
        }
        let call = Call { command: COPY, argument: GuestAddress(at), count: 1 };
        assert_eq!(call.run(world), Outcome::Done);
        let status = world.read::<GrantCopy>(at, 1)[0].status;
        assert_eq!(status, if depth < 128 { 0 } else { -1 }, "copy {depth}");
    }
    let world = world(Version::V1);
    nest(&world, 0);
    world.assert_clean();
}

#[test]
fn a_source_may_be_the_destination() {
    let world = world(Version::V1);
    let dest = CopyPlace { offset: 2048, ..request().source };
    *world.during_copy.borrow_mut() = Some(Box::new(|world| {
        assert_eq!(world.in_use(GRANTER, READ), BOTH);
        assert_eq!(world.count(GRANTER, READ.into()).references, 2);
        assert_eq!(world.pinned(GRANTER), 1);
    }));
    assert_eq!(copy(&world, &[GrantCopy { dest, ..request() }]), [0]);
    assert_eq!(world.content(World::page(GRANTER, READ.into()))[2048..2148], pattern(1)[8..108]);
    world.assert_clean();
}

#[test]
fn another_domain_that_holds_the_grant_keeps_a_copy_out() {
    let world = world(Version::V1);
    let mapped = world.map_one(super::fake::request(READ));
    // The granter gives it to another while the caller has it, which it must not.
    let status = world.tables.borrow_mut().get_mut(&GRANTER).unwrap().lend(
        crate::lend::Loan {
            reference: READ,
            holder: OTHER,
            rights: crate::Rights::Read,
            sorts: crate::entry::Sorts::Forwards,
        },
        |index, _| index,
        |_| panic!("no page is asked for"),
    );
    assert_eq!(status.unwrap_err(), crate::AccessError::OtherHolder);
    assert_eq!(world.unmap(&[unmap_of(&mapped)]), [0]);
    world.assert_clean();
}

const COUNT: usize = 5;

#[test]
fn a_fault_ends_the_call_with_nothing_held_and_later_elements_as_they_were() {
    for (write, position) in (0..COUNT).flat_map(|place| [(false, place), (true, place)]) {
        let world = world(Version::V2);
        let place = passed_on(&world, 0);
        let element = GrantCopy { source: place, ..request() };
        world.write(ARRAY, &[element; COUNT]);
        world.reads.set(0);
        world.writes.set(0);
        world.read_fault.set(byte_of::<GrantCopy>(position).filter(|_| !write));
        world.write_fault.set(write.then_some(position));
        assert_eq!(world.call(COPY, COUNT as u32), Outcome::Failed(Errno::Fault));
        assert_eq!(world.copied.get(), position + usize::from(write));
        let after = world.read::<GrantCopy>(ARRAY, COUNT);
        for (place, element) in after.iter().enumerate() {
            let want = if place < position { 0 } else { POISON };
            assert_eq!(element.status, want, "{place}, write {write}, fault {position}");
        }
        world.assert_clean();
    }
}

#[test]
fn a_copy_is_left_after_each_element_but_the_last() {
    let world = world(Version::V1);
    world.preempt.set(true);
    world.write(ARRAY, &[request(); COUNT]);
    let mut call = Call { command: COPY, argument: GuestAddress(ARRAY), count: COUNT as u32 };
    for left in (1..COUNT as u32).rev() {
        let Outcome::Continue { done: 1, rest } = call.run(&world) else {
            panic!("{left} are left of {call:?}")
        };
        assert_eq!(rest.count, left);
        world.assert_clean();
        call = rest;
    }
    assert_eq!(call.run(&world), Outcome::Done);
    assert_eq!((world.copied.get(), world.preempt_asked.get()), (COUNT, COUNT - 1));
    assert!(world.read::<GrantCopy>(ARRAY, COUNT).iter().all(|element| element.status == 0));
}

#[test]
fn a_table_with_a_copy_under_way_keeps_its_version() {
    let world = world(Version::V1);
    *world.during_copy.borrow_mut() = Some(Box::new(|world| {
        for granter in [GRANTER, OTHER] {
            let changed =
                world.tables.borrow_mut().get_mut(&granter).unwrap().set_version(Version::V2);
            assert_eq!(changed, Err(crate::VersionError::Pinned));
        }
    }));
    assert_eq!(copy(&world, &[request()]), [0]);
    assert_eq!(world.copied.get(), 1);
    world.assert_clean();
}

#[test]
fn statuses_are_written_after_the_bits_have_fallen() {
    // The caller's other vCPUs may tell the granter as soon as they see a status.
    let world = world(Version::V1);
    *world.during_write.borrow_mut() = Some(Box::new(|world| {
        assert_eq!(world.copied.get(), 1);
        assert_eq!((world.in_use(GRANTER, READ), world.in_use(OTHER, WRITTEN)), (0, 0));
    }));
    assert_eq!(copy(&world, &[request()]), [0]);
    assert!(world.during_write.borrow().is_none(), "it was looked at");
}
