//! Refused requests: reasons, records, collapse and overflow

use super::*;
use crate::types::Access;
use crate::vtd::dma::DmaError;
use crate::vtd::fault::{FaultReason, FaultRecord};

fn record(bench: &Bench, index: u64) -> Option<FaultRecord> {
    let at = 0x220 + 16 * index;
    let read = |offset| bench.machine.register_read64(bench.driver.unit, offset);
    FaultRecord::from_words(read(at), read(at + 8))
}

fn clear(bench: &Bench, index: u64) {
    bench.machine.register_write32(bench.driver.unit, 0x220 + 16 * index + 12, 1 << 31);
}

#[track_caller]
fn check(set_up: impl FnOnce(&Bench), page: u64, access: Access, reason: FaultReason, code: u8) {
    let bench = Bench::new(UnitConfig::default());
    bench.mapped(5);
    set_up(&bench);
    let refused = match access {
        Access::Write => bench.machine.dma_write64(SID, page << 12, 1),
        Access::Read | Access::Execute => bench.machine.dma_read64(SID, page << 12).map(|_| ()),
    };
    assert_eq!(refused, Err(DmaError::Fault(reason)));
    assert_eq!(
        record(&bench, 0),
        Some(FaultRecord { sid: SID, page, reason: code, read: access != Access::Write })
    );
    let status = bench.machine.register_read32(bench.driver.unit, FSTS);
    assert_eq!(status & (FSTS_PPF | FSTS_PFO), FSTS_PPF);
    clear(&bench, 0);
    assert_eq!(record(&bench, 0), None);
    let status = bench.machine.register_read32(bench.driver.unit, FSTS);
    assert_eq!(status & FSTS_PPF, 0);
}

#[test]
fn each_reason_has_its_code() {
    let contexts = |bench: &Bench| {
        Frame::containing(bench.machine.read64(bench.driver.root.address())).address()
            + 16 * u64::from(SID)
    };
    check(|_| {}, 6, Access::Read, FaultReason::Read, 0x6);
    check(|_| {}, 6, Access::Write, FaultReason::Write, 0x5);
    check(|_| {}, 1 << 36, Access::Write, FaultReason::Width, 0x4);
    check(
        |bench| bench.driver.clear_context(SID),
        5,
        Access::Write,
        FaultReason::ContextNotPresent,
        0x2,
    );
    check(
        |bench| bench.machine.write64(bench.driver.root.address(), 0),
        5,
        Access::Read,
        FaultReason::RootNotPresent,
        0x1,
    );
    check(
        |bench| bench.machine.write64(bench.driver.root.address() + 8, 1),
        5,
        Access::Read,
        FaultReason::RootReserved,
        0xa,
    );
    check(
        move |bench| {
            let at = contexts(bench);
            bench.machine.write64(at, bench.machine.read64(at) | 1 << 4);
        },
        5,
        Access::Read,
        FaultReason::ContextReserved,
        0xb,
    );
    check(
        // Five levels, which this unit does not have.
        move |bench| bench.machine.write64(contexts(bench) + 8, 0x703),
        5,
        Access::Read,
        FaultReason::ContextInvalid,
        0x3,
    );
    check(
        |bench| {
            bench.machine.write64(bench.tables.slot(5, 0), 1 << 50 | 0x5003);
        },
        5,
        Access::Write,
        FaultReason::EntryReserved,
        0xc,
    );
    check(
        |bench| {
            let link = bench.tables.slot(5, 1);
            bench.machine.write64(link, 0xf_0000_0003);
        },
        5,
        Access::Write,
        FaultReason::TableAccess,
        0x7,
    );
    check(
        |bench| {
            bench.machine.write64(bench.driver.root.address(), 0xf_0000_0001);
        },
        5,
        Access::Write,
        FaultReason::ContextTableAccess,
        0x9,
    );
}

#[test]
fn a_second_fault_collapses_or_overflows() {
    let bench = Bench::new(UnitConfig::default());
    bench.machine.add_device(bench.driver.unit, 9, false);
    assert!(!bench.reaches(6));
    assert!(!bench.reaches(7));
    let status = || bench.machine.register_read32(bench.driver.unit, FSTS);
    assert_eq!(status() & FSTS_PFO, 0, "the same source collapses");
    assert_eq!(record(&bench, 0).expect("on record").page, 6);
    assert!(bench.machine.dma_write64(9, 0, 1).is_err());
    assert_eq!(status() & FSTS_PFO, FSTS_PFO, "another one overflows");
    assert_eq!(record(&bench, 0).expect("on record").sid, SID);
    // Until the overflow is cleared nothing more is recorded.
    clear(&bench, 0);
    assert!(!bench.reaches(6));
    assert_eq!(record(&bench, 0), None);
    bench.machine.register_write32(bench.driver.unit, FSTS, FSTS_PFO);
    assert!(!bench.reaches(8));
    assert_eq!(record(&bench, 0).expect("on record").page, 8);
    let counters = bench.machine.counters().units[0];
    assert_eq!((counters.faults, counters.faults_recorded), (5, 2));
}

#[test]
fn several_records_are_used_in_turn() {
    let bench = Bench::new(UnitConfig { fault_records: 2, ..UnitConfig::default() });
    for sid in [9, 10, 11] {
        bench.machine.add_device(bench.driver.unit, sid, false);
        assert!(bench.machine.dma_read64(sid, 0).is_err());
    }
    let sids: Vec<u16> =
        (0..2).map(|index| record(&bench, index).expect("on record").sid).collect();
    assert_eq!(sids, [9, 10]);
    let status = bench.machine.register_read32(bench.driver.unit, FSTS);
    assert_eq!(status & (FSTS_PFO | FSTS_PPF), FSTS_PFO | FSTS_PPF);
    assert_eq!(status >> 8 & 0xff, 0);
    clear(&bench, 0);
    let status = bench.machine.register_read32(bench.driver.unit, FSTS);
    assert_eq!(status & FSTS_PPF, FSTS_PPF, "one is left");
    clear(&bench, 1);
    let status = bench.machine.register_read32(bench.driver.unit, FSTS);
    assert_eq!(status & FSTS_PPF, 0);
}

#[test]
fn a_quiet_context_leaves_no_record() {
    let bench = Bench::new(UnitConfig::default());
    let contexts = Frame::containing(bench.machine.read64(bench.driver.root.address()));
    let at = contexts.address() + 16 * u64::from(SID);
    bench.machine.write64(at, bench.machine.read64(at) | 2);
    assert!(!bench.reaches(6));
    assert_eq!(record(&bench, 0), None);
    let counters = bench.machine.counters().units[0];
    assert_eq!((counters.faults, counters.faults_recorded), (1, 0));
}

#[test]
fn the_fault_event_is_raised_or_kept_pending() {
    let bench = Bench::new(UnitConfig::default());
    let unit = bench.driver.unit;
    assert!(!bench.reaches(6));
    assert_ne!(bench.machine.register_read32(unit, FECTL) & FECTL_IP, 0);
    assert_eq!(bench.machine.counters().units[0].fault_interrupts, 0);
    bench.machine.register_write32(unit, FECTL, 0);
    assert_eq!(bench.machine.counters().units[0].fault_interrupts, 1);
    clear(&bench, 0);
    assert!(!bench.reaches(6));
    assert_eq!(bench.machine.counters().units[0].fault_interrupts, 2);
}
