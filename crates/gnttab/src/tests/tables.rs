//! A table's size, frames and version.

use core::sync::atomic::Ordering;
use std::{vec, vec::Vec};

use flush::Mfn;
use zerocopy::FromZeros;

use super::fake::*;
use crate::abi::{GetStatusFrames, GetVersion, QuerySize, SetVersion, SetupTable};
use crate::{
    Action, Errno, FrameError, GrantStorage, GrantTable, Outcome, TableFrame, Version, VersionError,
};

const SELF: u16 = 0x7ff0;
const LIST: u64 = 0x8000;

fn setup(world: &World, domain: u16, frames: u32, list: u64) -> i16 {
    world.write(LIST, &[0x5555_u64; 8]);
    world.write(ARRAY, &[SetupTable { domain, frames, list, ..SetupTable::new_zeroed() }]);
    assert_eq!(world.call(2, 1), Outcome::Done);
    world.read::<SetupTable>(ARRAY, 1)[0].status
}

fn frames(world: &World) -> usize {
    world.tables.borrow()[&CALLER].frames()
}

#[test]
fn setup_grows_and_lists_exactly_what_was_asked_for() {
    for (asked, status, now, list) in [
        (0, 0, 1, vec![]),
        (1, 0, 1, vec![0x7000]),
        // The third frame is not mapped by the guest.
        (4, 0, 4, vec![0x7000, 0x7001, u64::MAX, 0x7003]),
        (5, -1, 1, vec![]),
        (40, -1, 1, vec![]),
        (u32::MAX, -1, 1, vec![]),
    ] {
        for domain in [SELF, CALLER.get()] {
            let world = World::new();
            assert_eq!(setup(&world, domain, asked, LIST), status, "{asked} frames");
            assert_eq!(frames(&world), now);
            let written = world.read::<u64>(LIST, 8);
            assert_eq!(written[..list.len()], list);
            assert!(written[list.len()..].iter().all(|word| *word == 0x5555));
        }
    }
}

#[test]
fn a_list_longer_than_one_piece_is_whole() {
    let world = World::new();
    let table = GrantTable::new(CALLER, Grants::default(), 1, 80).unwrap();
    world.tables.borrow_mut().insert(CALLER, table);
    assert_eq!(setup(&world, SELF, 80, LIST), 0);
    let list = world.read::<u64>(LIST, 80);
    let want = (0..80_u64).map(|page| if page == 2 { u64::MAX } else { 0x7000 + page });
    assert!(list.into_iter().eq(want));
}

#[test]
fn setup_has_its_own_refusals() {
    let world = World::new();
    assert_eq!(setup(&world, 99, 1, LIST), -2);
    assert_eq!(setup(&world, GRANTER.get(), 1, LIST), 0);
    world.denied.set(Some(Action::Setup));
    assert_eq!(setup(&world, GRANTER.get(), 1, LIST), -8);
    assert_eq!(setup(&world, SELF, 1, LIST), 0, "never refused to itself");
    for list in [u64::MAX, u64::MAX - 8, 0xffff] {
        assert_eq!(setup(&world, SELF, 2, list), -5);
    }
    world.tables.borrow()[&CALLER].storage().no_memory_after.set(Some(1));
    assert_eq!(setup(&world, SELF, 4, LIST), -1);
    assert_eq!(frames(&world), 2);
    world.tables.borrow()[&CALLER].storage().no_memory_after.set(None);
    assert_eq!(setup(&world, SELF, 4, LIST), 0, "asked again, it goes on");
}

#[test]
fn query_size_tells_frames_and_limit() {
    let world = World::new();
    setup(&world, SELF, 3, LIST);
    for (domain, want) in [(SELF, (3, 4, 0)), (GRANTER.get(), (1, 4, 0)), (99, (0, 0, -2))] {
        world.write(ARRAY, &[QuerySize { domain, ..QuerySize::new_zeroed() }]);
        assert_eq!(world.call(6, 1), Outcome::Done);
        let got = world.read::<QuerySize>(ARRAY, 1)[0];
        assert_eq!((got.frames, got.maximum, got.status), want);
    }
}

fn set_version(world: &World, version: u32) -> (Outcome, u32) {
    world.write(ARRAY, &[SetVersion { version }]);
    let outcome = world.call(8, 1);
    (outcome, world.read::<SetVersion>(ARRAY, 1)[0].version)
}

#[test]
fn the_version_asked_for_is_the_version_told() {
    let world = World::new();
    for (asked, want) in [
        (1, (Outcome::Done, 1)),
        (2, (Outcome::Done, 2)),
        (3, (Outcome::Failed(Errno::Invalid), 3)),
        (0, (Outcome::Failed(Errno::Invalid), 0)),
        (1, (Outcome::Done, 1)),
        (2, (Outcome::Done, 2)),
    ] {
        assert_eq!(set_version(&world, asked), want);
        let told = if want.0 == Outcome::Done { asked } else { 2 };
        world.write(ARRAY, &[GetVersion { domain: SELF, ..GetVersion::new_zeroed() }]);
        assert_eq!(world.call(10, 1), Outcome::Done);
        assert_eq!(world.read::<GetVersion>(ARRAY, 1)[0].version, told);
    }
    world.write(ARRAY, &[GetVersion { domain: 99, ..GetVersion::new_zeroed() }]);
    assert_eq!(world.call(10, 1), Outcome::Failed(Errno::NoSuchDomain));
    world.denied.set(Some(Action::Query));
    world.write(ARRAY, &[GetVersion { domain: GRANTER.get(), ..GetVersion::new_zeroed() }]);
    assert_eq!(world.call(10, 1), Outcome::Failed(Errno::NotPermitted));
}

#[test]
fn version_2_has_half_the_references_and_back_again() {
    let world = World::new();
    let mapped = |world: &World, reference| {
        let done = world.map_one(request(reference));
        if done.status == 0 {
            assert_eq!(world.unmap(&[unmap_of(&done)]), [0]);
        }
        done.status
    };
    assert_eq!((mapped(&world, 511), mapped(&world, 512)), (0, -3));
    world.set_version(GRANTER, Version::V2);
    assert_eq!((mapped(&world, 255), mapped(&world, 256), mapped(&world, 511)), (0, -3, -3));
    world.set_version(GRANTER, Version::V1);
    assert_eq!((mapped(&world, 255), mapped(&world, 511)), (0, -1));
    world.assert_clean();
}

#[test]
fn a_version_change_wipes_all_but_the_reserved_entries() {
    let world = World::new();
    let mut tables = world.tables.borrow_mut();
    let table = tables.get_mut(&GRANTER).unwrap();
    table.set_version(Version::V2).unwrap();
    let page = table.storage().shared(0).unwrap();
    let words: Vec<_> = page.iter().map(|word| word.load(Ordering::SeqCst)).collect();
    for (index, entry) in words.chunks(2).enumerate() {
        let want = if index < 8 { [0x1_0001, index as u64] } else { [0, 0] };
        assert_eq!(entry, want);
    }
    page[20].store(0x1_0001, Ordering::SeqCst);
    table.set_version(Version::V1).unwrap();
    let page = table.storage().shared(0).unwrap();
    for (index, word) in page.iter().enumerate() {
        let want = if index < 8 { 0x1_0001 | (index as u64) << 32 } else { 0 };
        assert_eq!(word.load(Ordering::SeqCst), want);
    }
}

#[test]
fn reserved_entries_carry_their_pins_across() {
    let world = World::new();
    let mapped = world.map_one(request(5));
    for version in [Version::V2, Version::V1, Version::V2] {
        world.tables.borrow_mut().get_mut(&GRANTER).unwrap().set_version(version).unwrap();
        assert_eq!(world.in_use(GRANTER, 5), READING | WRITING);
        assert_eq!(world.in_use(GRANTER, 4), 0);
    }
    assert_eq!(world.unmap(&[unmap_of(&mapped)]), [0]);
    world.assert_clean();
}

#[test]
fn a_version_stays_while_a_grant_is_pinned() {
    let world = World::new();
    let change =
        |version| world.tables.borrow_mut().get_mut(&GRANTER).unwrap().set_version(version);
    let mapped = world.map_one(request(8));
    assert_eq!(change(Version::V2), Err(VersionError::Pinned));
    assert_eq!(change(Version::V1), Ok(()), "no change");
    // Also between the clearing of a mapping and its flush.
    world.flush_fails.set(Some(0));
    world.write(ARRAY, &[unmap_of(&mapped)]);
    assert_eq!(world.call(1, 1), Outcome::Failed(Errno::Fault));
    assert_eq!(change(Version::V2), Err(VersionError::Pinned));
    world.flush_fails.set(None);
    let mut held = world.held.borrow_mut().pop().unwrap();
    crate::give_out(&world, held.retry(&crate::Domain::hardware(&world)).unwrap());
    assert_eq!(change(Version::V2), Ok(()));
    // The caller of the hypercall is told too.
    world.grant(CALLER, 30, PERMIT, CALLER);
    let own = crate::abi::MapGrantRef { domain: CALLER.get(), ..request(30) };
    assert_eq!(world.map_one(own).status, 0);
    assert_eq!(set_version(&world, 2), (Outcome::Failed(Errno::Busy), 1));
}

#[test]
fn version_2_entries_without_a_version_1_form_refuse_the_change() {
    for (head, frame, fits) in [
        (0x1_0001, 0xffff_ffff, true),
        (0x1_0001, 0x1_0000_0000, false),
        (0x1_0101, 5, false),
        (0x1_0003, 5, false),
        (0x1_0002, 5, true),
        (0x1_0000, u64::MAX, true),
    ] {
        let world = World::new();
        world.set_version(GRANTER, Version::V2);
        let mut tables = world.tables.borrow_mut();
        let table = tables.get_mut(&GRANTER).unwrap();
        let page = table.storage().shared(0).unwrap();
        page[14].store(head, Ordering::SeqCst);
        page[15].store(frame, Ordering::SeqCst);
        let want = if fits { Ok(()) } else { Err(VersionError::Unrepresentable) };
        assert_eq!(table.set_version(Version::V1), want, "{head:#x} {frame:#x}");
        let version = if fits { Version::V1 } else { Version::V2 };
        assert_eq!(table.version(), version);
    }
}

#[test]
fn a_version_change_without_memory_changes_nothing() {
    let world = World::new();
    world.tables.borrow()[&CALLER].storage().no_memory_after.set(Some(0));
    assert_eq!(set_version(&world, 2), (Outcome::Failed(Errno::NoMemory), 1));
}

#[test]
fn a_status_frame_that_is_mapped_is_never_freed() {
    let world = World::new();
    world.set_version(CALLER, Version::V2);
    let mut tables = world.tables.borrow_mut();
    let table = tables.get_mut(&CALLER).unwrap();
    // Look-up and insertion are one step: nothing can free the frame in between.
    let mapped = table.map_frame(TableFrame::Status(0), |storage, mfn| {
        storage.status_mapped.set(Some(0));
        mfn
    });
    assert_eq!(mapped, Ok(Mfn::new(0x6000)));
    assert_eq!(table.set_version(Version::V1), Err(VersionError::StatusMapped));
    assert_eq!((table.version(), table.status_frames()), (Version::V2, 1));
    assert!(table.storage().removed.is_empty());
    table.storage().status_mapped.set(None);
    assert_eq!(table.set_version(Version::V1), Ok(()));
    assert_eq!(table.storage().removed, [0], "freed once it may be");
    // After the change there is no such frame to map, and the insertion does not run.
    let late = table.map_frame(TableFrame::Status(0), |_, _| panic!("it was freed"));
    assert_eq!(late, Err::<(), _>(FrameError::OutOfRange));
}

#[test]
fn mapping_a_shared_frame_grows_the_table_up_to_its_limit() {
    let world = World::new();
    let mut tables = world.tables.borrow_mut();
    let table = tables.get_mut(&CALLER).unwrap();
    for (page, want, frames) in [
        (0, Ok(Mfn::new(0x5000)), 1),
        (3, Ok(Mfn::new(0x5003)), 4),
        (4, Err(FrameError::OutOfRange), 4),
        (usize::MAX, Err(FrameError::OutOfRange), 4),
        (1, Ok(Mfn::new(0x5001)), 4),
    ] {
        assert_eq!(table.map_frame(TableFrame::Shared(page), |_, mfn| mfn), want);
        assert_eq!(table.frames(), frames);
    }
    assert_eq!(table.references(), 2048);
}

#[test]
fn status_frames_are_listed_up_to_what_exists() {
    for (version, asked, status, list) in [
        (Version::V1, 0, 0, vec![]),
        (Version::V1, 1, -1, vec![]),
        (Version::V2, 0, 0, vec![]),
        (Version::V2, 1, 0, vec![0x8000]),
        (Version::V2, 2, -1, vec![]),
        (Version::V2, 8, -1, vec![]),
        (Version::V2, u32::MAX, -1, vec![]),
    ] {
        let world = World::new();
        world.set_version(CALLER, version);
        world.write(LIST, &[0x5555_u64; 8]);
        let request = GetStatusFrames { frames: asked, domain: SELF, status: POISON, list: LIST };
        world.write(ARRAY, &[request]);
        assert_eq!(world.call(9, 1), Outcome::Done);
        assert_eq!(world.read::<GetStatusFrames>(ARRAY, 1)[0].status, status, "{asked}");
        let written = world.read::<u64>(LIST, 8);
        assert_eq!(written[..list.len()], list);
        assert!(written[list.len()..].iter().all(|word| *word == 0x5555), "{asked}");
    }
}

#[test]
fn status_frames_follow_the_size_of_the_table() {
    for (frames, status_frames) in [(1, 1), (8, 1), (9, 2), (16, 2), (17, 3), (64, 8)] {
        let mut table = GrantTable::new(CALLER, Grants::default(), 1, 64).unwrap();
        table.set_version(Version::V2).unwrap();
        table.grow(frames).unwrap();
        assert_eq!(table.status_frames(), status_frames, "{frames} frames");
        let last = table.references() - 1;
        assert!(table.status_word(last).is_some());
        assert!(table.active(last).is_some());
        assert!(table.storage().status(status_frames).is_none());
        table.set_version(Version::V1).unwrap();
        let last = table.references() - 1;
        assert!(table.active(last).is_some());
        table.set_version(Version::V2).unwrap();
        assert_eq!(table.status_frames(), status_frames);
    }
}

#[test]
fn every_operation_tells_when_its_result_cannot_be_written() {
    for command in [2, 6, 8, 9, 10] {
        for domain in [SELF, 99] {
            let world = World::new();
            let first: [u16; 4] = if command == 8 { [2, 0, 0, 0] } else { [domain, 0, 0, 0] };
            world.write(ARRAY, &first);
            if command == 9 {
                world.write(ARRAY, &[0, 0, domain, 0_u16]);
            }
            world.write_fault.set(Some(0));
            let want = match (command, domain) {
                (10, 99) => Errno::NoSuchDomain,
                _ => Errno::Fault,
            };
            assert_eq!(world.call(command, 1), Outcome::Failed(want), "command {command}");
        }
    }
}
