//! Device TLBs, and DMA that is on its way while the tables change

use super::*;
use crate::types::Access;
use crate::vtd::dma::{DmaError, DmaTicket};
use crate::vtd::fault::FaultReason;
use crate::witness::{Actor, Witness, WitnessKind};

/// A DMA to page 5 has begun; the page is unmapped, `command` carried out, the page released, the DMA finished.
#[track_caller]
fn check_drain(name: &str, config: UnitConfig, access: Access, command: Descriptor, drained: bool) {
    let bench = Bench::new(config);
    let frame = bench.mapped(5);
    bench.machine.write64(frame.address(), 0xfeed);
    let ticket: DmaTicket = match access {
        Access::Write => bench.machine.dma_begin_write(SID, 0x5000, &7_u64.to_le_bytes()),
        Access::Read | Access::Execute => bench.machine.dma_begin_read(SID, 0x5000, 8),
    }
    .expect("mapped");
    assert_eq!(bench.machine.read64(frame.address()), 0xfeed, "on its way");
    bench.tables.clear(5, 0);
    bench.driver.run(&[command]);
    let in_flight = |witnesses: &[Witness]| {
        witnesses.iter().filter(|witness| witness.actor == Actor::InFlight(SID)).count()
    };
    let expected = usize::from(!drained);
    // An IOTLB entry that was not dropped either is found as well; that is another test's business.
    assert!(bench.machine.settled(bench.driver.space(DID), 5, 5) >= expected);
    assert_eq!(in_flight(&bench.machine.take_witnesses()), expected, "{name}");
    bench.machine.release(frame);
    assert_eq!(in_flight(&bench.machine.audit()), expected, "{name}");
    let finished = bench.machine.dma_finish(ticket).expect("in flight");
    assert_eq!(finished.drained, drained, "{name}");
    let witnesses = bench.machine.witnesses();
    assert_eq!(witnesses.len(), usize::from(!drained), "{name}");
    if let Some(witness) = witnesses.first() {
        assert_eq!(witness.kind, WitnessKind::ReleasedFrame);
        assert_eq!(witness.actor, Actor::InFlight(SID));
        assert_eq!(witness.access, Some(access));
    }
    if access == Access::Read && drained {
        assert_eq!(finished.data, 0xfeed_u64.to_le_bytes());
    }
    assert_eq!(bench.machine.dma_finish(ticket), Err(DmaError::NotInFlight));
}

#[test]
fn dma_on_its_way_is_drained_only_if_asked_for() {
    let full = UnitConfig::default();
    let (write, read) = (Access::Write, Access::Read);
    let writes_only = |(low, high): Descriptor| (low & !0x80, high);
    let reads_only = |(low, high): Descriptor| (low & !0x40, high);
    let page = iotlb_page(DID, 5, 0);
    check_drain("write, both", full, write, page, true);
    check_drain("write, DW", full, write, writes_only(page), true);
    check_drain("write, DR", full, write, reads_only(page), false);
    check_drain("write, none", full, write, undrained(page), false);
    check_drain("read, both", full, read, page, true);
    check_drain("read, DR", full, read, reads_only(page), true);
    check_drain("read, DW", full, read, writes_only(page), false);
    check_drain("domain", full, write, iotlb_domain(DID), true);
    check_drain("global", full, write, iotlb_global(), true);
    check_drain("other page", full, write, iotlb_page(DID, 6, 0), false);
    check_drain("other domain", full, write, iotlb_domain(DID + 1), false);
    // A unit without drain bits drains by itself.
    let implicit = UnitConfig { drain_writes: false, drain_reads: false, ..full };
    check_drain("implicit write", implicit, write, undrained(page), true);
    check_drain("implicit read", implicit, read, undrained(page), true);
}

#[test]
fn dma_begun_separately_stays_within_a_page() {
    let bench = Bench::new(UnitConfig::default());
    bench.mapped(5);
    bench.mapped(6);
    for (iova, length) in [(0x5ff9, 8), (0x5000, 0x1001), (0x5000, 0)] {
        assert_eq!(bench.machine.dma_begin_read(SID, iova, length), Err(DmaError::CrossesPage));
    }
    assert!(bench.machine.dma_begin_read(SID, 0x5000, 0x1000).is_ok());
}

/// A device with a TLB has page 5 cached; the page is cleared; then `commands`. Reached?
#[track_caller]
fn check(name: &str, commands: &[Descriptor], still_reached: bool) {
    let bench = Bench::with_policy(UnitConfig::default(), Policy::Greedy, true);
    let frame = bench.mapped(5);
    assert!(bench.reaches(5));
    bench.tables.clear(5, 0);
    bench.driver.run(commands);
    let settled = bench.machine.settled(bench.driver.space(DID), 5, 5);
    assert_eq!(settled > 0, still_reached, "{name}");
    assert_eq!(bench.reaches(5), still_reached, "{name}");
    bench.machine.release(frame);
    bench.reaches(5);
    let witnesses = bench.machine.witnesses();
    assert_eq!(
        witnesses.iter().any(|witness| witness.kind == WitnessKind::ReleasedFrame
            && witness.actor == Actor::DeviceTlb(SID)),
        still_reached,
        "{name}"
    );
}

#[test]
fn a_device_tlb_is_dropped_by_its_own_command_after_the_units() {
    let device = |page| device_tlb(SID, page);
    let sized = |page: u64| (device(page).0, device(page).1 | 1);
    let unit = iotlb_page(DID, 5, 0);
    check("nothing", &[], true);
    check("unit only", &[unit], true);
    check("device only", &[device(5)], true);
    check("unit, then device", &[unit, device(5)], false);
    check("device, then unit", &[device(5), unit], true);
    check("another page", &[unit, device(4)], true);
    // With the size bit the lowest zero bit ends the block: page 4 is 4 and 5, page 1 is 0 to 3.
    check("block of two", &[unit, sized(4)], false);
    check("block of four before it", &[unit, sized(1)], true);
    check("block of eight", &[unit, sized(3)], false);
    check("everything", &[unit, sized((1 << 52) - 1)], false);
}

#[test]
fn a_device_tlb_needs_the_contexts_leave() {
    let machine = machine(Policy::Greedy);
    let driver = Driver::new(&machine, UnitConfig::default());
    let tables = Tables::new(&machine, Format::Vtd, 4);
    machine.add_device(driver.unit, SID, true);
    driver.set_context(SID, DID, &tables, 0);
    let frame = machine.allocate(GUEST).expect("a page");
    tables.map(5, 0, frame, Rights::READ_WRITE);
    assert!(machine.dma_write64(SID, 0x5000, 1).is_ok());
    tables.clear(5, 0);
    driver.run(&[iotlb_page(DID, 5, 0)]);
    assert_eq!(
        machine.dma_write64(SID, 0x5000, 1),
        Err(DmaError::Fault(FaultReason::Write)),
        "nothing was kept in the device"
    );
}

#[test]
fn a_device_tlb_keeps_rights_too() {
    let bench = Bench::with_policy(UnitConfig::default(), Policy::Greedy, true);
    let frame = bench.machine.allocate(GUEST).expect("a page");
    bench.tables.map(5, 0, frame, Rights::READ);
    assert!(bench.machine.dma_read64(SID, 0x5000).is_ok());
    assert!(!bench.reaches(5));
    bench.tables.map(5, 0, frame, Rights::READ_WRITE);
    assert!(bench.reaches(5), "more rights are asked for again");
    bench.tables.map(5, 0, frame, Rights::READ);
    bench.driver.run(&[iotlb_page(DID, 5, 0)]);
    assert!(bench.reaches(5), "less rights need the device's flush");
    bench.driver.run(&[device_tlb(SID, 5)]);
    assert!(!bench.reaches(5));
    assert!(bench.machine.dma_read64(SID, 0x5000).is_ok());
}

#[test]
fn a_refused_translation_request_leaves_no_record() {
    let bench = Bench::with_policy(UnitConfig::default(), Policy::Greedy, true);
    assert!(!bench.reaches(6));
    let counters = bench.machine.counters().units[0];
    assert_eq!((counters.faults, counters.faults_recorded), (1, 0));
}

#[test]
fn dma_through_a_device_tlb_is_finished_before_the_device_answers() {
    let bench = Bench::with_policy(UnitConfig::default(), Policy::Greedy, true);
    let frame = bench.mapped(5);
    assert!(bench.reaches(5));
    let ticket = bench.machine.dma_begin_write(SID, 0x5000, &[1; 8]).expect("mapped");
    bench.tables.clear(5, 0);
    bench.driver.run(&[undrained(iotlb_page(DID, 5, 0)), device_tlb(SID, 5)]);
    bench.machine.release(frame);
    assert!(bench.machine.dma_finish(ticket).expect("begun").drained);
    assert_eq!(bench.machine.witnesses(), []);
}

#[test]
fn a_device_keeps_its_translations_when_its_context_changes() {
    let bench = Bench::with_policy(UnitConfig::default(), Policy::Greedy, true);
    bench.mapped(5);
    assert!(bench.reaches(5));
    // They pass only where a context entry lets them, and it is not forgotten.
    bench.driver.clear_context(SID);
    assert!(bench.reaches(5));
    bench.driver.run(&[context_device(DID, SID), iotlb_domain(DID)]);
    assert!(!bench.reaches(5));
    let other = Tables::new(&bench.machine, Format::Vtd, 4);
    bench.driver.set_context(SID, DID + 1, &other, 0);
    assert!(!bench.reaches(5), "no device TLB in the new entry");
    bench.driver.set_context(SID, DID + 1, &other, 1);
    bench.driver.run(&[context_device(DID + 1, SID)]);
    assert!(bench.reaches(5), "what it kept from the other tables");
    let everything = (device_tlb(SID, 0).0, (u64::MAX << 12) | 1);
    bench.driver.run(&[everything]);
    assert!(!bench.reaches(5));
}

#[test]
fn an_unplugged_device_holds_nothing() {
    let bench = Bench::with_policy(UnitConfig::default(), Policy::Greedy, true);
    let frame = bench.mapped(5);
    assert!(bench.reaches(5));
    let ticket = bench.machine.dma_begin_write(SID, 0x5000, &[1; 8]).expect("mapped");
    bench.machine.remove_device(SID);
    bench.tables.clear(5, 0);
    bench.driver.run(&[iotlb_page(DID, 5, 0)]);
    bench.machine.release(frame);
    assert_eq!(bench.machine.audit(), []);
    assert_eq!(bench.machine.dma_finish(ticket), Err(DmaError::NotInFlight));
    assert_eq!(bench.machine.dma_read64(SID, 0x5000), Err(DmaError::NoDevice));
}
