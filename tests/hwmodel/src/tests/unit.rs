//! A unit keeps what the manual lets it keep, and not more

use super::*;
use crate::types::Access;
use crate::vtd::dma::DmaError;
use crate::vtd::fault::FaultReason;
use crate::witness::{Actor, WitnessKind};

#[test]
fn dma_reaches_the_mapped_byte_at_every_depth() {
    for levels in [3, 4, 5] {
        let machine = machine(Policy::Greedy);
        let config = UnitConfig { levels_5: true, address_bits: 57, ..UnitConfig::default() };
        let driver = Driver::new(&machine, config);
        let tables = Tables::new(&machine, Format::Vtd, levels);
        driver.set_context(SID, DID, &tables, 0);
        machine.add_device(driver.unit, SID, false);
        let top = (1_u64 << (9 * levels)) - 1;
        for page in [0, 5, 511, 512, 1 << 18, top] {
            let frame = machine.allocate(GUEST).expect("a page");
            tables.map(page, 0, frame, Rights::READ_WRITE);
            machine.dma_write64(SID, (page << 12) + 8, page ^ 0xabc).expect("mapped");
            assert_eq!(machine.read64(frame.address() + 8), page ^ 0xabc);
            assert_eq!(machine.dma_read64(SID, (page << 12) + 8), Ok(page ^ 0xabc));
        }
        assert_eq!(
            machine.dma_write64(SID, (top + 1) << 12, 1),
            Err(DmaError::Fault(FaultReason::Width)),
            "{levels}"
        );
        assert_eq!(machine.witnesses(), []);
        assert_eq!(machine.misuses(), []);
    }
}

/// A leaf of 2^`order` pages at `page` is cached and cleared; what do `commands` make of a write to it?
#[track_caller]
fn check(name: &str, page: u64, order: u8, commands: &[Descriptor], still_reached: bool) {
    let bench = Bench::new(UnitConfig::default());
    let block = bench.machine.allocate_block(GUEST, order).expect("a block");
    let first = page & !((1 << order) - 1);
    bench.tables.map(first, order, block, Rights::READ_WRITE);
    assert!(bench.reaches(page));
    bench.tables.clear(first, order);
    if !commands.is_empty() {
        bench.driver.run(commands);
    }
    assert_eq!(bench.reaches(page), still_reached, "{name}");
    // The frame was not given away: staleness alone is no witness.
    assert_eq!(bench.machine.witnesses(), [], "{name}");
    assert_eq!(bench.machine.audit().is_empty(), !still_reached, "{name}: the audit agrees");
    if still_reached {
        bench.machine.release(block.plus(page - first));
        assert!(bench.reaches(page), "{name}");
        let witnesses = bench.machine.witnesses();
        assert_eq!(witnesses.len(), 1, "{name}");
        assert_eq!(witnesses[0].kind, WitnessKind::ReleasedFrame);
        assert_eq!(witnesses[0].actor, Actor::Unit(bench.driver.unit, SID));
    }
}

#[test]
fn a_cleared_leaf_stays_until_a_command_that_names_it() {
    check("no command", 5, 0, &[], true);
    check("global", 5, 0, &[iotlb_global()], false);
    check("its domain", 5, 0, &[iotlb_domain(DID)], false);
    check("its page", 5, 0, &[iotlb_page(DID, 5, 0)], false);
    check("another domain", 5, 0, &[iotlb_domain(DID + 1)], true);
    check("page of another domain", 5, 0, &[iotlb_page(DID + 1, 5, 0)], true);
    check("the page before", 5, 0, &[iotlb_page(DID, 4, 0)], true);
    check("the page after", 5, 0, &[iotlb_page(DID, 6, 0)], true);
    check("a block around it", 5, 0, &[iotlb_page(DID, 4, 1)], false);
    check("a block ending before it", 8, 0, &[iotlb_page(DID, 0, 3)], true);
    check("not aligned to its mask", 5, 0, &[iotlb_page(DID, 7, 2)], false);
    check("not aligned, next block", 8, 0, &[iotlb_page(DID, 7, 2)], true);
    check("the largest mask", 5, 0, &[iotlb_page(DID, 0, 18)], false);
    check("just beyond it", 1 << 18, 0, &[iotlb_page(DID, 0, 18)], true);
    check("context cache only", 5, 0, &[context_global()], true);
    check("hint", 5, 0, &[hinted(iotlb_page(DID, 5, 0))], false);
}

#[test]
fn a_large_leaf_needs_its_own_order() {
    check("no command", 0x423, 9, &[], true);
    check("one page", 0x423, 9, &[iotlb_page(DID, 0x423, 0)], true);
    check("order 8", 0x423, 9, &[iotlb_page(DID, 0x423, 8)], true);
    check("order 9", 0x423, 9, &[iotlb_page(DID, 0x423, 9)], false);
    check("order 18", 0x423, 9, &[iotlb_page(DID, 0x423, 18)], false);
    check("the block after", 0x423, 9, &[iotlb_page(DID, 0x600, 9)], true);
    check("domain", 0x423, 9, &[iotlb_domain(DID)], false);
    // As QEMU does it, if asked for.
    let bench = Bench::new(UnitConfig { small_mask_drops_large: true, ..UnitConfig::default() });
    let block = bench.machine.allocate_block(GUEST, 9).expect("a block");
    bench.tables.map(0x400, 9, block, Rights::READ_WRITE);
    assert!(bench.reaches(0x423));
    bench.tables.clear(0x400, 9);
    bench.driver.run(&[iotlb_page(DID, 0x400, 0)]);
    assert!(!bench.reaches(0x423));
}

#[test]
fn a_leaf_of_1_gib_is_dropped_by_order_18_only() {
    let machine = Machine::new(MachineConfig { frames: (1 << 19) + 1, ..MachineConfig::default() });
    let driver = Driver::new(&machine, UnitConfig::default());
    let tables = Tables::new(&machine, Format::Vtd, 4);
    driver.set_context(SID, DID, &tables, 0);
    machine.add_device(driver.unit, SID, false);
    tables.map(1 << 18, 18, Frame(1 << 18), Rights::READ_WRITE);
    let reaches = || machine.dma_write64(SID, 0x4012_3000, 1);
    // Nobody owns the frames of that leaf, and the model says so.
    assert_eq!(reaches(), Ok(()));
    assert_eq!(machine.take_witnesses().len(), 1);
    tables.clear(1 << 18, 18);
    driver.run(&[iotlb_page(DID, 1 << 18, 17)]);
    assert_eq!(reaches(), Ok(()));
    driver.run(&[iotlb_page(DID, 1 << 18, 18)]);
    assert_eq!(reaches(), Err(DmaError::Fault(FaultReason::Write)));
}

#[test]
fn lowered_rights_are_ignored_until_the_flush() {
    let bench = Bench::new(UnitConfig::default());
    let frame = bench.mapped(5);
    assert!(bench.reaches(5));
    bench.tables.map(5, 0, frame, Rights::READ);
    assert!(bench.reaches(5));
    assert_eq!(bench.machine.settled(bench.driver.space(DID), 5, 5), 1);
    assert!(bench.reaches(5));
    assert_eq!(bench.machine.count(WitnessKind::MoreRights), 1);
    bench.driver.run(&[iotlb_page(DID, 5, 0)]);
    assert_eq!(bench.machine.dma_write64(SID, 0x5000, 1), Err(DmaError::Fault(FaultReason::Write)));
    assert!(bench.machine.dma_read64(SID, 0x5000).is_ok());
    assert_eq!(bench.machine.settled(bench.driver.space(DID), 5, 5), 0);
}

/// The pointer to the table of page 5 is cached, the table is unlinked and replaced by one that maps page 6.
#[track_caller]
fn check_walk_cache(name: &str, commands: &[Descriptor], sees_new_table: bool) {
    let bench = Bench::new(UnitConfig::default());
    bench.mapped(5);
    assert!(bench.reaches(5));
    let link = bench.tables.slot(5, 1);
    let old = Frame::containing(bench.machine.read64(link));
    bench.machine.write64(link, 0);
    bench.mapped(6);
    bench.driver.run(commands);
    assert_eq!(bench.reaches(6), sees_new_table, "{name}");
    assert_eq!(bench.machine.witnesses(), []);
    if !sees_new_table {
        bench.machine.release(old);
        bench.reaches(6);
        assert_eq!(bench.machine.count(WitnessKind::ReleasedTable), 1, "{name}");
    }
}

#[test]
fn pointers_to_tables_stay_under_a_hint_and_outside_the_block() {
    check_walk_cache("nothing", &[], false);
    check_walk_cache("hint", &[hinted(iotlb_page(DID, 5, 0))], false);
    check_walk_cache("wide hint", &[hinted(iotlb_page(DID, 0, 18))], false);
    check_walk_cache("no hint", &[iotlb_page(DID, 5, 0)], true);
    check_walk_cache("any page below the table", &[iotlb_page(DID, 400, 0)], true);
    check_walk_cache("outside the table", &[iotlb_page(DID, 512, 0)], false);
    check_walk_cache("domain", &[iotlb_domain(DID)], true);
    check_walk_cache("other domain", &[iotlb_domain(DID + 1)], false);
    check_walk_cache("global", &[iotlb_global()], true);
    check_walk_cache("context", &[context_global()], false);
}

#[test]
fn a_large_leaf_over_a_cached_table_pointer_is_not_seen_without_a_full_flush() {
    let bench = Bench::new(UnitConfig::default());
    bench.mapped(5);
    assert!(bench.reaches(5));
    bench.tables.clear(5, 0);
    bench.driver.run(&[hinted(iotlb_page(DID, 5, 0))]);
    let block = bench.machine.allocate_block(GUEST, 9).expect("a block");
    bench.tables.map(0, 9, block, Rights::READ_WRITE);
    assert!(!bench.reaches(5), "the walk still ends in the empty table");
    bench.driver.run(&[iotlb_page(DID, 0, 9)]);
    assert!(bench.reaches(5));
}

/// Device in domain 7 with page 5 cached; its context entry goes; then `commands`. Reached?
#[track_caller]
fn check_context(name: &str, commands: &[Descriptor], still_reached: bool) {
    let bench = Bench::new(UnitConfig::default());
    bench.mapped(5);
    assert!(bench.reaches(5));
    bench.driver.clear_context(SID);
    bench.driver.run(commands);
    assert_eq!(bench.reaches(5), still_reached, "{name}");
}

#[test]
fn context_entries_and_translations_are_two_caches() {
    check_context("nothing", &[], true);
    check_context("IOTLB only", &[iotlb_global()], true);
    check_context("context global", &[context_global()], false);
    check_context("context domain", &[context_domain(DID)], false);
    check_context("context device", &[context_device(DID, SID)], false);
    check_context("context of another domain", &[context_domain(DID + 1)], true);
    check_context("context of another device", &[context_device(DID, SID + 1)], true);
    check_context("device with the wrong domain", &[context_device(DID + 1, SID)], true);
    // Function mask 3 ignores the function: 8 and 9 are functions 0 and 1 of device 1.
    let (low, high) = context_device(DID, SID + 1);
    check_context("function mask", &[(low | 3 << 48, high)], false);
}

#[test]
fn another_device_of_the_domain_uses_what_the_context_flush_left() {
    let bench = Bench::new(UnitConfig::default());
    let frame = bench.mapped(5);
    assert!(bench.reaches(5));
    // The device moves to domain 9 with other tables; translations of domain 7 were not flushed.
    let other = Tables::new(&bench.machine, Format::Vtd, 4);
    bench.driver.clear_context(SID);
    bench.driver.run(&[context_device(DID, SID)]);
    bench.driver.set_context(SID, 9, &other, 0);
    assert!(!bench.reaches(5));
    bench.machine.release(frame);
    // A new domain gets id 7: it hits the entries of the old one.
    bench.driver.clear_context(SID);
    bench.driver.run(&[context_device(9, SID), iotlb_domain(9)]);
    bench.driver.set_context(SID, DID, &other, 0);
    assert!(bench.reaches(5));
    assert_eq!(bench.machine.count(WitnessKind::ReleasedFrame), 1);
}

#[test]
fn an_audit_finds_an_old_context_entry() {
    let bench = Bench::new(UnitConfig::default());
    bench.mapped(5);
    assert!(bench.reaches(5));
    assert_eq!(bench.machine.audit(), []);
    let other = Tables::new(&bench.machine, Format::Vtd, 4);
    bench.driver.set_context(SID, 9, &other, 0);
    let kinds: Vec<WitnessKind> =
        bench.machine.audit().iter().map(|witness| witness.kind).collect();
    assert!(kinds.contains(&WitnessKind::CachesOldContext), "{kinds:?}");
    bench.driver.run(&[context_device(DID, SID), iotlb_domain(DID)]);
    assert_eq!(bench.machine.audit(), []);
    // The root goes while a context entry for it is cached.
    assert!(!bench.reaches(5));
    bench.machine.release(other.root);
    assert_eq!(bench.machine.audit()[0].kind, WitnessKind::CachesReleasedTable);
}

#[test]
fn domain_ids_alias_beyond_the_bits_the_unit_compares() {
    let bench = Bench::new(UnitConfig { domain_id_bits: 8, ..UnitConfig::default() });
    let frame = bench.mapped(5);
    assert!(bench.reaches(5));
    let other = Tables::new(&bench.machine, Format::Vtd, 4);
    bench.driver.set_context(9, DID + 0x100, &other, 0);
    bench.machine.add_device(bench.driver.unit, 9, false);
    assert!(bench.machine.dma_write64(9, 0x5000, 0x77).is_ok());
    assert_eq!(bench.machine.read64(frame.address()), 0x77);
}

#[test]
fn caching_mode_remembers_that_there_was_nothing() {
    // (caching mode, command after mapping, reached)
    type Case = (bool, Option<Descriptor>, bool);
    let cases: [Case; 5] = [
        (false, None, true),
        (true, None, false),
        (true, Some(iotlb_page(DID, 6, 0)), false),
        (true, Some(iotlb_page(DID, 5, 0)), true),
        (true, Some(iotlb_domain(DID)), true),
    ];
    for (caching_mode, command, reached) in cases {
        let bench = Bench::new(UnitConfig { caching_mode, ..UnitConfig::default() });
        bench.mapped(4);
        assert!(!bench.reaches(5));
        bench.mapped(5);
        bench.driver.run(&Vec::from_iter(command));
        assert_eq!(bench.reaches(5), reached, "{caching_mode} {command:?}");
        assert_eq!(bench.machine.witnesses(), []);
    }
}

#[test]
fn caching_mode_remembers_missing_tables_under_a_hint() {
    for (hint, reached) in [(true, false), (false, true)] {
        let bench = Bench::new(UnitConfig { caching_mode: true, ..UnitConfig::default() });
        assert!(!bench.reaches(5));
        bench.mapped(5);
        let command = iotlb_page(DID, 5, 0);
        bench.driver.run(&[if hint { hinted(command) } else { command }]);
        assert_eq!(bench.reaches(5), reached, "hint {hint}");
    }
}

#[test]
fn caching_mode_remembers_lesser_rights() {
    for caching_mode in [false, true] {
        let bench = Bench::new(UnitConfig { caching_mode, ..UnitConfig::default() });
        let frame = bench.machine.allocate(GUEST).expect("a page");
        bench.tables.map(5, 0, frame, Rights::READ);
        assert!(bench.machine.dma_read64(SID, 0x5000).is_ok());
        bench.tables.map(5, 0, frame, Rights::READ_WRITE);
        assert_eq!(bench.reaches(5), !caching_mode);
        bench.driver.run(&[iotlb_page(DID, 5, 0)]);
        assert!(bench.reaches(5));
    }
}

#[test]
fn caching_mode_keeps_absent_contexts_under_domain_0() {
    let cases: [(Descriptor, bool); 4] = [
        (context_device(DID, 9), false),
        (context_domain(DID), false),
        (context_device(0, 9), true),
        (context_domain(0), true),
    ];
    for (command, reached) in cases {
        let bench = Bench::new(UnitConfig { caching_mode: true, ..UnitConfig::default() });
        bench.mapped(5);
        bench.machine.add_device(bench.driver.unit, 9, false);
        let write = || bench.machine.dma_write64(9, 0x5000, 1);
        assert_eq!(write(), Err(DmaError::Fault(FaultReason::ContextNotPresent)));
        bench.driver.set_context(9, DID, &bench.tables, 0);
        bench.driver.run(&[command]);
        assert_eq!(write().is_ok(), reached, "{command:?}");
    }
}

#[test]
fn a_unit_that_does_not_snoop_sees_old_words_until_they_are_written_back() {
    for coherent in [true, false] {
        let bench = Bench::new(UnitConfig { coherent, ..UnitConfig::default() });
        bench.mapped(5);
        let path: Vec<u64> = (0..4).map(|level| bench.tables.slot(5, level)).collect();
        assert_eq!(bench.reaches(5), coherent);
        for (left, entry) in path.iter().enumerate().rev() {
            bench.machine.write_back(*entry);
            if left != 0 {
                assert_eq!(bench.reaches(5), coherent);
            }
        }
        assert!(bench.reaches(5));
        // Clearing and flushing without writing back brings the old leaf back in.
        let frame = Frame::containing(bench.machine.read64(path[0]));
        bench.tables.clear(5, 0);
        bench.driver.run(&[iotlb_page(DID, 5, 0)]);
        assert_eq!(bench.reaches(5), !coherent);
        bench.machine.release(frame);
        assert_eq!(bench.reaches(5), !coherent);
        assert_eq!(bench.machine.count(WitnessKind::ReleasedFrame), usize::from(!coherent));
        bench.machine.write_back(path[0]);
        bench.driver.run(&[iotlb_page(DID, 5, 0)]);
        assert!(!bench.reaches(5));
    }
}

#[test]
fn writes_wait_in_the_buffer_until_it_is_flushed() {
    let config = UnitConfig { write_buffer: true, ..UnitConfig::default() };
    // A global command flushes it.
    let bench = Bench::new(config);
    bench.driver.run(&[context_global()]);
    bench.mapped(5);
    assert!(!bench.reaches(5));
    bench.machine.register_write32(bench.driver.unit, GCMD, GSTS_TES | GSTS_QIES | GCMD_WBF);
    assert!(!bench.reaches(5));
    bench.driver.poll("the write buffer", || {
        bench.machine.register_read32(bench.driver.unit, GSTS) & GSTS_WBFS == 0
    });
    assert!(bench.reaches(5));
    let counters = bench.machine.counters().units[0];
    assert_eq!(counters.write_buffer_flushes, 1);
    // So does any invalidation.
    bench.mapped(6);
    assert!(!bench.reaches(6));
    bench.driver.run(&[iotlb_page(DID, 6, 0)]);
    assert!(bench.reaches(6));
}

#[test]
fn pass_through_and_translation_off_reach_memory_as_named() {
    let machine = machine(Policy::Greedy);
    let unit = machine.add_unit(UnitConfig::default());
    machine.add_device(unit, SID, false);
    let frame = machine.allocate_zeroed(GUEST).expect("a page");
    machine.dma_write64(SID, frame.address(), 3).expect("off");
    assert_eq!(machine.read64(frame.address()), 3);
    assert_eq!(machine.dma_write64(SID, 1 << 40, 3), Err(DmaError::OutsideRam));
    machine.release(frame);
    machine.dma_write64(SID, frame.address(), 4).expect("off");
    assert_eq!(machine.take_witnesses().len(), 1);
    assert_eq!(machine.dma_write64(SID + 1, 0, 0), Err(DmaError::NoDevice));
    let bench = Bench::new(UnitConfig::default());
    bench.driver.set_context(SID, DID, &bench.tables, 2);
    let frame = bench.machine.allocate_zeroed(GUEST).expect("a page");
    bench.machine.dma_write64(SID, frame.address(), 5).expect("pass-through");
    assert_eq!(bench.machine.read64(frame.address()), 5);
}

#[test]
fn a_transfer_of_several_pages_stops_at_the_first_refusal() {
    let bench = Bench::new(UnitConfig::default());
    let first = bench.mapped(5);
    bench.machine.write64(first.address() + 0x7f8, 9);
    let second = bench.mapped(6);
    let data = vec![0x5a; 0x1800];
    assert_eq!(bench.machine.dma_write(SID, 0x5800, &data), Ok(()));
    let mut back = vec![0; 0x1800];
    assert_eq!(bench.machine.dma_read(SID, 0x5800, &mut back), Ok(()));
    assert_eq!(back, data);
    assert_eq!(bench.machine.read64(first.address() + 0x7f8), 9);
    assert_eq!(bench.machine.read64(first.address() + 0x800), 0x5a5a_5a5a_5a5a_5a5a);
    assert_eq!(bench.machine.read64(second.address()), 0x5a5a_5a5a_5a5a_5a5a);
    assert_eq!(
        bench.machine.dma_write(SID, 0x6800, &data),
        Err(DmaError::Fault(FaultReason::Write))
    );
    assert_eq!(bench.machine.read64(second.address() + 0xff8), 0x5a5a_5a5a_5a5a_5a5a);
}

#[test]
fn prefetching_caches_what_is_reachable_and_nothing_after_a_proper_flush() {
    let bench = Bench::new(UnitConfig::default());
    bench.mapped(5);
    let neighbour = bench.mapped(6);
    assert!(bench.reaches(5));
    bench.machine.speculate();
    bench.tables.clear(6, 0);
    assert!(bench.reaches(6));
    bench.driver.run(&[hinted(iotlb_page(DID, 6, 0))]);
    bench.machine.speculate();
    bench.machine.release(neighbour);
    assert!(!bench.reaches(6));
    assert_eq!(bench.machine.audit(), []);
    assert_eq!(bench.machine.witnesses(), []);
}

#[test]
fn an_access_only_ever_needs_its_own_right() {
    let bench = Bench::new(UnitConfig::default());
    let frame = bench.machine.allocate_zeroed(GUEST).expect("a page");
    let write_only = Rights { read: false, write: true, execute: false };
    for (rights, read, write) in
        [(Rights::READ, true, false), (write_only, false, true), (Rights::READ_WRITE, true, true)]
    {
        bench.tables.map(5, 0, frame, rights);
        bench.driver.run(&[iotlb_page(DID, 5, 0)]);
        assert_eq!(bench.machine.dma_read64(SID, 0x5000).is_ok(), read);
        assert_eq!(bench.machine.dma_write64(SID, 0x5000, 0).is_ok(), write);
        assert_eq!(rights.allows(Access::Write), write);
    }
}
