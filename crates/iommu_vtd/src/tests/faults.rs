//! Fault records: read once, freed, and overflow noticed.

use std::vec::Vec;

use super::fake::{CAP, ECAP, Fake, WITH_QUEUE};
use super::unit_up;
use crate::{Fault, FaultSummary, Reason, Request, SourceId};
use flush::Dfn;

fn record(page: u64, source: u64, code: u64, read: bool) -> (u64, u64) {
    (page << 12, 1 << 63 | u64::from(read) << 62 | code << 32 | source)
}

#[test]
fn every_record_is_reported_once_oldest_first_and_freed() {
    let fake = Fake::new(CAP, ECAP);
    let unit = unit_up(&fake, WITH_QUEUE);
    fake.set(|hardware| {
        hardware.records[3] = record(0x111, 0x100, 5, false);
        hardware.records[0] = record(0x222, 0x108, 6, true);
        hardware.fsts = 3 << 8;
    });
    let mut faults = Vec::new();
    let summary = unit.take_faults(|fault| faults.push(fault));
    assert_eq!(summary, FaultSummary { records: 2, overflowed: false });
    let expected = [
        Fault {
            source: SourceId::at(1, 0, 0).unwrap(),
            page: Dfn::new(0x111),
            request: Request::Write,
            reason: Reason::NotWritable,
        },
        Fault {
            source: SourceId::at(1, 1, 0).unwrap(),
            page: Dfn::new(0x222),
            request: Request::Read,
            reason: Reason::NotReadable,
        },
    ];
    assert_eq!(faults, expected);
    assert_eq!(unit.take_faults(|_| panic!("reported twice")), FaultSummary::default());
}

#[test]
fn an_overflow_is_reported_and_cleared_with_no_other_error() {
    let fake = Fake::new(CAP, ECAP);
    let unit = unit_up(&fake, WITH_QUEUE);
    fake.set(|hardware| {
        hardware.records[0] = record(1, 2, 2, false);
        hardware.fsts = 1 | 1 << 4;
    });
    let summary = unit.take_faults(|fault| assert_eq!(fault.reason, Reason::NotAttached));
    assert_eq!(summary, FaultSummary { records: 1, overflowed: true });
    fake.set(|hardware| assert_eq!(hardware.fsts, 1 << 4, "the queue's error is not ours"));
}

#[test]
fn an_index_beyond_the_records_is_harmless() {
    let fake = Fake::new(CAP, ECAP);
    let unit = unit_up(&fake, WITH_QUEUE);
    fake.set(|hardware| {
        hardware.records = [record(1, 2, 0xc, false); 4];
        hardware.fsts = 0xff << 8;
    });
    let summary = unit.take_faults(|fault| assert_eq!(fault.reason, Reason::Malformed(0xc)));
    assert_eq!(summary.records, 4);
}
