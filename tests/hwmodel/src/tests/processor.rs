//! Processors keep what the manual lets them keep, and not more

use super::*;
use crate::cpu::{CpuFault, Root};
use crate::types::Access;
use crate::witness::{Actor, WitnessKind};

struct Guest {
    machine: Machine,
    tables: Tables,
    root: Root,
}

const TAG: u64 = 3;

impl Guest {
    #[track_caller]
    fn new(format: Format, levels: u8) -> Self {
        let machine = machine(Policy::Greedy);
        let tables = Tables::new(&machine, format, levels);
        let root = Root { format, frame: tables.root, levels, tag: TAG, accessed_dirty: false };
        machine.load_root(0, root);
        Self { machine, tables, root }
    }

    #[track_caller]
    fn mapped(&self, page: u64) -> Frame {
        let frame = self.machine.allocate(GUEST).expect("a page");
        self.tables.map(page, 0, frame, Rights::ALL);
        frame
    }

    fn reaches(&self, page: u64) -> bool {
        self.machine.cpu_write64(0, page << 12, 1).is_ok()
    }
}

const SHAPES: [(Format, u8); 4] =
    [(Format::Ept, 4), (Format::Ept, 5), (Format::Npt, 4), (Format::Npt, 5)];

#[test]
fn accesses_reach_the_mapped_byte() {
    for (format, levels) in SHAPES {
        let guest = Guest::new(format, levels);
        let top = (1_u64 << (9 * levels)) - 1;
        for page in [0, 5, 511, 512, 1 << 18, top] {
            let frame = guest.mapped(page);
            guest.machine.cpu_write64(0, (page << 12) + 0xff8, page ^ 0xabc).expect("mapped");
            assert_eq!(
                guest.machine.read64(frame.address() + 0xff8),
                page ^ 0xabc,
                "{format:?} {levels} {page:#x}"
            );
            assert_eq!(guest.machine.cpu_read64(0, (page << 12) + 0xff8), Ok(page ^ 0xabc));
        }
        assert_eq!(guest.machine.cpu_read64(0, (top + 1) << 12), Err(CpuFault::Width));
        assert_eq!(guest.machine.witnesses(), []);
        assert_eq!(guest.machine.misuses(), []);
    }
}

#[test]
fn a_cleared_leaf_stays_until_its_own_tag_is_invalidated_on_that_processor() {
    type Act = fn(&Guest);
    let cases: [(&str, Act, bool); 7] = [
        ("nothing", |_| {}, true),
        (
            "leave and enter",
            |guest| {
                guest.machine.leave(0);
                guest.machine.enter(0).expect("a root");
            },
            true,
        ),
        (
            "another root and back",
            |guest| {
                let other = Root { tag: 9, ..guest.root };
                guest.machine.load_root(0, other);
                guest.machine.load_root(0, guest.root);
            },
            true,
        ),
        (
            "another tag",
            |guest| {
                guest.machine.invalidate(0, TAG + 1).expect("works");
            },
            true,
        ),
        (
            "another processor",
            |guest| {
                guest.machine.invalidate_all(1).expect("works");
            },
            true,
        ),
        (
            "its tag",
            |guest| {
                guest.machine.invalidate(0, TAG).expect("works");
            },
            false,
        ),
        (
            "all tags",
            |guest| {
                guest.machine.invalidate_all(0).expect("works");
            },
            false,
        ),
    ];
    for (format, levels) in SHAPES {
        for (name, act, stale) in &cases {
            let guest = Guest::new(format, levels);
            guest.mapped(5);
            assert!(guest.reaches(5));
            guest.tables.clear(5, 0);
            act(&guest);
            assert_eq!(guest.reaches(5), *stale, "{format:?} {levels}: {name}");
            // Nobody gave the frame away, so nothing wrong has happened yet.
            assert_eq!(guest.machine.witnesses(), []);
        }
    }
}

#[test]
fn a_stale_access_to_a_released_frame_is_a_witness_with_its_history() {
    let guest = Guest::new(Format::Ept, 4);
    let frame = guest.mapped(5);
    assert!(guest.reaches(5));
    let filled = guest.machine.now();
    guest.tables.clear(5, 0);
    let cleared = guest.machine.now();
    guest.machine.release(frame);
    let released = guest.machine.now();
    assert_eq!(guest.machine.audit()[0].kind, WitnessKind::CachesReleasedFrame);
    assert!(guest.reaches(5));
    let witnesses = guest.machine.take_witnesses();
    assert_eq!(witnesses.len(), 1);
    let witness = witnesses[0];
    assert_eq!(witness.kind, WitnessKind::ReleasedFrame);
    assert_eq!(witness.actor, Actor::Cpu(0));
    assert_eq!((witness.address, witness.frame), (0x5000, frame));
    assert_eq!(witness.access, Some(Access::Write));
    assert_eq!(witness.history.filled, filled);
    assert_eq!(witness.history.table_changed, Some(cleared));
    assert_eq!(witness.history.given_away, Some(released));
    let text = witness.to_string();
    assert!(text.contains("frame given away at op"), "{text}");
    // Re-owned is no better than free.
    assert_eq!(guest.machine.allocate(STRANGER), Some(frame));
    assert!(guest.reaches(5));
    assert_eq!(guest.machine.count(WitnessKind::ReleasedFrame), 1);
    // After the flush there is nothing left to report.
    guest.machine.invalidate(0, TAG).expect("works");
    assert!(!guest.reaches(5));
    assert_eq!(guest.machine.audit(), []);
    assert_eq!(guest.machine.count(WitnessKind::ReleasedFrame), 1);
}

#[test]
fn a_frame_mapped_again_after_its_release_is_no_witness() {
    let guest = Guest::new(Format::Npt, 4);
    let frame = guest.mapped(5);
    assert!(guest.reaches(5));
    guest.tables.clear(5, 0);
    guest.machine.invalidate(0, TAG).expect("works");
    guest.machine.release(frame);
    assert_eq!(guest.machine.allocate(GUEST), Some(frame));
    guest.tables.map(5, 0, frame, Rights::ALL);
    assert!(guest.reaches(5));
    assert_eq!(guest.machine.witnesses(), []);
    assert_eq!(guest.machine.audit(), []);
}

#[test]
fn tables_that_still_map_a_frame_given_away_are_a_witness_even_uncached() {
    let guest = Guest::new(Format::Ept, 4);
    let frame = guest.mapped(5);
    guest.machine.give(frame, STRANGER);
    assert!(guest.reaches(5));
    let witnesses = guest.machine.witnesses();
    assert_eq!(witnesses.len(), 1);
    assert_eq!(witnesses[0].kind, WitnessKind::ReleasedFrame);
    assert_eq!(witnesses[0].history.table_changed, None);
}

#[test]
fn a_revoked_frame_is_stale_in_that_space_only_and_until_mapped_again() {
    let guest = Guest::new(Format::Ept, 4);
    let frame = guest.mapped(5);
    guest.tables.map(6, 0, frame, Rights::ALL);
    assert!(guest.reaches(5));
    guest.machine.revoke(frame, Space::Cpu(TAG + 1));
    assert!(guest.reaches(5));
    guest.machine.revoke_page(frame, Space::Cpu(TAG), 6);
    assert!(guest.reaches(5));
    assert_eq!(guest.machine.witnesses(), []);
    assert!(guest.reaches(6));
    assert_eq!(guest.machine.take_witnesses().len(), 1);
    guest.machine.revoke(frame, Space::Cpu(TAG));
    assert!(guest.reaches(5));
    assert_eq!(guest.machine.take_witnesses().len(), 1);
    // The entry is written again and the old translation flushed: a new grant of the same frame.
    guest.tables.map(5, 0, frame, Rights::ALL);
    guest.machine.invalidate(0, TAG).expect("works");
    assert!(guest.reaches(5));
    assert_eq!(guest.machine.witnesses(), []);
}

#[test]
fn a_held_frame_may_be_reached_through_a_stale_entry() {
    let guest = Guest::new(Format::Ept, 4);
    let frame = guest.mapped(5);
    assert!(guest.reaches(5));
    guest.tables.clear(5, 0);
    assert_eq!(guest.machine.audit().len(), 1);
    guest.machine.hold(frame);
    assert_eq!(guest.machine.audit(), []);
    assert!(guest.reaches(5));
    assert_eq!(guest.machine.settled(Space::Cpu(TAG), 0, 10), 0);
    assert_eq!(guest.machine.witnesses(), []);
}

#[test]
fn lowered_rights_show_once_the_range_is_settled() {
    for (format, levels) in SHAPES {
        let guest = Guest::new(format, levels);
        let frame = guest.mapped(5);
        assert!(guest.reaches(5));
        guest.tables.map(5, 0, frame, Rights::READ);
        assert!(guest.reaches(5));
        assert_eq!(guest.machine.witnesses(), []);
        assert_eq!(guest.machine.settled(Space::Cpu(TAG), 6, 7), 0);
        assert_eq!(guest.machine.settled(Space::Cpu(TAG), 0, 5), 1);
        assert_eq!(guest.machine.count(WitnessKind::CachesMoreRights), 1);
        assert!(guest.reaches(5));
        assert_eq!(guest.machine.count(WitnessKind::MoreRights), 1);
        guest.machine.invalidate(0, TAG).expect("works");
        assert_eq!(guest.machine.settled(Space::Cpu(TAG), 0, 5), 0);
        assert_eq!(guest.machine.cpu_write64(0, 0x5000, 1), Err(CpuFault::Rights));
        assert!(guest.machine.cpu_read64(0, 0x5000).is_ok());
        assert_eq!(guest.machine.count(WitnessKind::MoreRights), 1);
    }
}

#[test]
fn raised_rights_need_no_invalidation() {
    for (format, levels) in SHAPES {
        let guest = Guest::new(format, levels);
        let frame = guest.machine.allocate(GUEST).expect("a page");
        guest.tables.map(5, 0, frame, Rights::READ);
        assert!(guest.machine.cpu_read64(0, 0x5000).is_ok());
        assert!(!guest.reaches(5));
        guest.tables.map(5, 0, frame, Rights::READ_WRITE);
        assert!(guest.reaches(5));
        assert_eq!(guest.machine.witnesses(), []);
    }
}

#[test]
fn a_table_released_while_a_pointer_to_it_is_cached_is_a_witness() {
    for (format, levels) in SHAPES {
        let guest = Guest::new(format, levels);
        guest.mapped(5);
        guest.mapped(6);
        assert!(guest.reaches(5));
        let link = guest.tables.slot(5, 1);
        let table = Frame::containing(guest.machine.read64(link) & 0x000f_ffff_ffff_f000);
        // The leaf of page 6 is not cached; the pointer to its table is.
        guest.machine.write64(link, 0);
        assert!(guest.reaches(6));
        assert_eq!(guest.machine.witnesses(), []);
        guest.machine.release(table);
        let audit = guest.machine.audit();
        assert!(
            audit.iter().any(|witness| witness.kind == WitnessKind::CachesReleasedTable),
            "{audit:?}"
        );
        assert!(!guest.reaches(7));
        let witnesses = guest.machine.take_witnesses();
        assert_eq!(witnesses.len(), 1, "{format:?} {levels}");
        assert_eq!(witnesses[0].kind, WitnessKind::ReleasedTable);
        assert_eq!(witnesses[0].frame, table);
        // The violation dropped the pointer; the next walk starts further up and sees the truth.
        assert!(!guest.reaches(7));
        assert_eq!(guest.machine.witnesses(), []);
    }
}

#[test]
fn words_shaped_like_entries_in_a_reused_table_are_not_believed_silently() {
    let guest = Guest::new(Format::Ept, 4);
    guest.mapped(5);
    assert!(guest.reaches(5));
    let link = guest.tables.slot(5, 1);
    let table = Frame::containing(guest.machine.read64(link) & 0x000f_ffff_ffff_f000);
    guest.machine.write64(link, 0);
    guest.machine.release(table);
    assert_eq!(guest.machine.allocate(STRANGER), Some(table));
    let secret = guest.machine.allocate(STRANGER).expect("a page");
    guest.machine.write64(table.address() + 8 * 7, entry(Format::Ept, secret, Rights::ALL, false));
    assert!(guest.reaches(7));
    assert_eq!(guest.machine.count(WitnessKind::ReleasedTable), 1);
}

#[test]
fn an_unlinked_table_is_found_by_an_audit_unless_it_is_held() {
    let guest = Guest::new(Format::Ept, 4);
    let frame = guest.mapped(5);
    assert!(guest.reaches(5));
    let link = guest.tables.slot(5, 1);
    let table = Frame::containing(guest.machine.read64(link) & 0x000f_ffff_ffff_f000);
    guest.tables.clear(5, 0);
    guest.machine.write64(link, 0);
    let kinds: Vec<WitnessKind> =
        guest.machine.audit().iter().map(|witness| witness.kind).collect();
    assert_eq!(kinds, [WitnessKind::CachesMoreRights, WitnessKind::CachesOldTable]);
    guest.machine.hold(frame);
    guest.machine.hold(table);
    assert_eq!(guest.machine.audit(), []);
    guest.machine.invalidate(0, TAG).expect("works");
    guest.machine.release(frame);
    guest.machine.release(table);
    assert_eq!(guest.machine.audit(), []);
    assert_eq!(guest.machine.misuses(), []);
}

#[test]
fn a_large_leaf_is_one_entry_and_outlives_its_split() {
    for (format, levels) in SHAPES {
        let guest = Guest::new(format, levels);
        let block = guest.machine.allocate_block(GUEST, 9).expect("a block");
        guest.tables.map(0x400, 9, block, Rights::ALL);
        assert!(guest.reaches(0x400 + 300));
        assert!(guest.machine.access(0, 0x40_0000, Access::Read).expect("mapped").cached);
        assert_eq!(guest.machine.access(0, 0x40_0000, Access::Read).expect("mapped").order, 9);
        // Split into small leaves with one missing: until the flush the large one answers for it.
        guest.tables.clear(0x400, 9);
        for page in (0..512).filter(|page| *page != 17) {
            guest.tables.map(0x400 + page, 0, block.plus(page), Rights::ALL);
        }
        assert!(guest.reaches(0x400 + 17));
        assert_eq!(guest.machine.settled(Space::Cpu(TAG), 0x400, 0x5ff), 1);
        guest.machine.release(block.plus(17));
        assert!(guest.reaches(0x400 + 16));
        assert_eq!(guest.machine.count(WitnessKind::ReleasedFrame), 0);
        assert!(guest.reaches(0x400 + 17));
        assert_eq!(guest.machine.count(WitnessKind::ReleasedFrame), 1);
        guest.machine.invalidate(0, TAG).expect("works");
        assert!(!guest.reaches(0x400 + 17));
        assert!(guest.reaches(0x400 + 16));
        assert_eq!(guest.machine.audit(), []);
    }
}

#[test]
fn small_entries_survive_a_promotion_and_the_oldest_one_answers() {
    let guest = Guest::new(Format::Ept, 4);
    let block = guest.machine.allocate_block(GUEST, 9).expect("a block");
    for page in 0..512 {
        guest.tables.map(0x400 + page, 0, block.plus(page), Rights::ALL);
    }
    for page in [0, 1, 255, 510, 511] {
        assert!(guest.reaches(0x400 + page));
    }
    guest.tables.map(0x400, 9, block, Rights::ALL);
    guest.machine.invalidate(1, TAG).expect("works");
    guest.tables.clear(0x400, 9);
    for page in [0, 1, 255, 510, 511] {
        assert!(guest.reaches(0x400 + page), "{page}");
    }
}

#[test]
fn of_two_entries_for_one_address_the_older_answers() {
    let guest = Guest::new(Format::Ept, 4);
    let small = guest.mapped(0x400 + 1);
    assert!(guest.reaches(0x400 + 1));
    let block = guest.machine.allocate_block(GUEST, 9).expect("a block");
    guest.tables.map(0x400, 9, block, Rights::ALL);
    // The first access faults on the old table and drops the pointer to it; the old leaf of another page stays.
    assert!(guest.machine.cpu_read64(0, (0x400 + 300) << 12).is_err());
    assert!(guest.reaches(0x400 + 300));
    guest.machine.cpu_write64(0, (0x400 + 1) << 12, 0x77).expect("cached");
    assert_eq!(guest.machine.read64(small.address()), 0x77);
}

#[test]
fn a_fault_drops_the_pointer_it_came_through() {
    for (format, levels) in SHAPES {
        let guest = Guest::new(format, levels);
        guest.mapped(5);
        assert!(guest.reaches(5));
        guest.machine.write64(guest.tables.slot(5, 1), 0);
        guest.mapped(6);
        assert!(!guest.reaches(6), "through the old table");
        assert!(guest.reaches(6), "through the new one");
    }
}

#[test]
fn a_table_limits_what_its_leaves_allow() {
    for (format, levels) in SHAPES {
        for level in 1..levels {
            let guest = Guest::new(format, levels);
            guest.mapped(5);
            let link = guest.tables.slot(5, level);
            let table = Frame::containing(guest.machine.read64(link) & 0x000f_ffff_ffff_f000);
            guest.machine.write64(link, entry(format, table, Rights::READ, false));
            assert_eq!(guest.machine.cpu_write64(0, 0x5000, 1), Err(CpuFault::Rights));
            let read = guest.machine.access(0, 0x5000, Access::Read);
            assert_eq!(read.expect("readable").rights, Rights::READ);
            assert_eq!(guest.machine.access(0, 0x5000, Access::Execute), Err(CpuFault::Rights));
        }
    }
}

#[test]
fn a_released_table_is_one_witness_however_often_it_is_prefetched() {
    let guest = Guest::new(Format::Ept, 4);
    guest.mapped(5);
    assert!(guest.reaches(5));
    let link = guest.tables.slot(5, 1);
    let table = Frame::containing(guest.machine.read64(link) & 0x000f_ffff_ffff_f000);
    guest.machine.write64(link, 0);
    guest.machine.release(table);
    guest.machine.speculate();
    guest.machine.speculate();
    assert_eq!(guest.machine.count(WitnessKind::ReleasedTable), 1);
}

#[test]
fn faults_name_the_level_and_the_reason() {
    let guest = Guest::new(Format::Ept, 4);
    let read = |page: u64| guest.machine.cpu_read64(0, page << 12);
    assert_eq!(read(5), Err(CpuFault::NotPresent { level: 3 }));
    guest.mapped(5);
    assert_eq!(read(6), Err(CpuFault::NotPresent { level: 0 }));
    assert_eq!(read(512), Err(CpuFault::NotPresent { level: 1 }));
    guest.machine.write64(guest.tables.slot(6, 0), 0x5002);
    assert_eq!(read(6), Err(CpuFault::Reserved { level: 0 }));
    guest.tables.map(7, 0, Frame(1 << 30), Rights::ALL);
    assert_eq!(read(7), Err(CpuFault::OutsideRam));
    let mut bytes = [0; 16];
    assert_eq!(guest.machine.cpu_read(0, 0x5ff8, &mut bytes), Err(CpuFault::Width));
    guest.machine.leave(0);
    assert_eq!(read(5), Err(CpuFault::NotRunning));
    assert_eq!(guest.machine.cpu_read64(1, 0x5000), Err(CpuFault::NoRoot));
    assert_eq!(guest.machine.enter(1), Err(CpuFault::NoRoot));
}

#[test]
fn an_interrupt_forces_the_guest_out_only_when_it_is_taken() {
    let guest = Guest::new(Format::Npt, 4);
    guest.mapped(5);
    assert!(!guest.machine.take_ipi(0));
    guest.machine.send_ipi(0);
    assert!(guest.machine.is_running(0) && guest.machine.ipi_pending(0));
    assert!(guest.reaches(5));
    assert!(guest.machine.take_ipi(0));
    assert!(!guest.machine.is_running(0) && !guest.machine.ipi_pending(0));
    assert!(!guest.reaches(5));
}

#[test]
fn accessed_and_dirty_bits_are_set_behind_the_host() {
    for (format, accessed, dirty) in [(Format::Ept, 1 << 8, 1 << 9), (Format::Npt, 1 << 5, 1 << 6)]
    {
        let guest = Guest::new(format, 4);
        let root = Root { accessed_dirty: true, ..guest.root };
        guest.machine.load_root(0, root);
        let frame = guest.mapped(5);
        let leaf = guest.tables.slot(5, 0);
        let before = guest.machine.read64(leaf);
        guest.machine.cpu_read64(0, 0x5000).expect("mapped");
        assert_eq!(guest.machine.read64(leaf), before | accessed);
        assert_eq!(guest.machine.compare_exchange64(leaf, before, 0), Err(before | accessed));
        guest.machine.cpu_write64(0, 0x5000, 1).expect("mapped");
        assert_eq!(guest.machine.read64(leaf), before | accessed | dirty);
        assert_ne!(
            guest.machine.read64(guest.tables.slot(5, 1)) & accessed,
            0,
            "tables are accessed too"
        );
        assert_eq!(
            guest.machine.read64(guest.tables.slot(5, 1)) & dirty,
            0,
            "tables are not dirty"
        );
        // A write through a stale clean entry lands and leaves the cleared entry alone.
        guest.machine.invalidate(0, TAG).expect("works");
        guest.tables.map(5, 0, frame, Rights::ALL);
        guest.machine.cpu_read64(0, 0x5000).expect("mapped");
        guest.tables.clear(5, 0);
        assert!(guest.reaches(5));
        assert_eq!(guest.machine.read64(leaf), 0);
        let other = guest.machine.allocate(GUEST).expect("a page");
        guest.tables.map(5, 0, other, Rights::ALL);
        assert!(guest.reaches(5));
        assert_eq!(guest.machine.read64(leaf) & dirty, 0, "not its entry");
    }
}

#[test]
fn roots_are_read_from_their_registers() {
    let root = Root::from_eptp(0x1234_5000 | 1 << 6 | 3 << 3 | 6);
    assert_eq!(root.frame, Frame(0x12345));
    assert_eq!((root.levels, root.tag), (4, 0x1234_5000));
    assert!(root.accessed_dirty);
    let root = Root::from_eptp(0x1234_5000 | 4 << 3 | 6);
    assert_eq!((root.levels, root.accessed_dirty), (5, false));
    let root = Root::nested(7, 0x1234_5018);
    assert_eq!((root.frame, root.tag), (Frame(0x12345), 7));
}

#[test]
fn a_retired_tag_may_hold_nothing() {
    let guest = Guest::new(Format::Ept, 4);
    guest.mapped(5);
    assert!(guest.reaches(5));
    assert_eq!(guest.machine.audit(), []);
    guest.machine.retire_tag(TAG);
    assert_ne!(guest.machine.audit(), []);
    guest.machine.invalidate_all(0).expect("works");
    assert_eq!(guest.machine.audit(), []);
}

#[test]
fn a_tag_used_for_another_root_still_answers_for_the_old_one() {
    let guest = Guest::new(Format::Npt, 4);
    let frame = guest.mapped(5);
    assert!(guest.reaches(5));
    let other = Tables::new(&guest.machine, Format::Npt, 4);
    guest.machine.load_root(0, Root { frame: other.root, ..guest.root });
    assert!(guest.reaches(5));
    guest.machine.release(frame);
    assert!(guest.reaches(5));
    assert_eq!(guest.machine.count(WitnessKind::ReleasedFrame), 1);
}

#[test]
fn prefetching_caches_all_that_is_reachable_also_through_an_unlinked_table() {
    let guest = Guest::new(Format::Ept, 4);
    guest.mapped(5);
    let neighbour = guest.mapped(6);
    assert!(guest.reaches(5));
    guest.machine.write64(guest.tables.slot(5, 1), 0);
    guest.machine.speculate();
    guest.machine.release(neighbour);
    assert!(guest.reaches(6));
    assert_eq!(guest.machine.count(WitnessKind::ReleasedFrame), 1);
    // A processor outside its guest prefetches nothing.
    guest.machine.invalidate_all(0).expect("works");
    guest.mapped(9);
    guest.machine.leave(0);
    guest.machine.speculate();
    guest.machine.enter(0).expect("a root");
    guest.tables.clear(9, 0);
    assert!(!guest.reaches(9));
}
