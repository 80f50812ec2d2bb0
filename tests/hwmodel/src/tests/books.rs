//! The counters say what was asked for

use super::*;
use crate::cpu::Root;
use crate::failure::OperationKind;

#[test]
fn commands_are_counted_by_kind() {
    let bench = Bench::with_policy(UnitConfig::default(), Policy::Greedy, true);
    let before = bench.machine.counters().units[0];
    for page in 0..3 {
        bench.mapped(page);
        assert!(bench.reaches(page) && bench.reaches(page));
    }
    bench.driver.run(&[
        context_global(),
        context_domain(DID),
        iotlb_page(DID, 0, 0),
        iotlb_page(DID, 0, 5),
        iotlb_domain(DID),
        iotlb_global(),
        device_tlb(SID, 0),
        (0x4, 0),
    ]);
    let after = bench.machine.counters().units[0];
    assert_eq!(after.context_commands - before.context_commands, 2);
    assert_eq!(after.iotlb_page - before.iotlb_page, 2);
    assert_eq!(after.iotlb_domain - before.iotlb_domain, 1);
    assert_eq!(after.iotlb_global - before.iotlb_global, 1);
    assert_eq!(after.iotlb_commands() - before.iotlb_commands(), 4);
    assert_eq!(after.pages_flushed - before.pages_flushed, 33);
    assert_eq!(after.device_tlb_commands - before.device_tlb_commands, 1);
    assert_eq!(after.interrupt_commands - before.interrupt_commands, 1);
    assert_eq!(after.waits - before.waits, 1);
    assert_eq!(after.tail_writes - before.tail_writes, 1);
    assert_eq!(after.dropped - before.dropped, 3);
    assert_eq!(after.waits_aborted, 0);
    // The device asked again for the page it lost.
    assert_eq!(after.refills - before.refills, 1);
}

#[test]
fn refills_count_what_a_flush_cost() {
    let bench = Bench::new(UnitConfig::default());
    for page in 0..4 {
        bench.mapped(page);
        assert!(bench.reaches(page));
    }
    bench.driver.run(&[iotlb_page(DID, 0, 1)]);
    for page in 0..4 {
        assert!(bench.reaches(page));
    }
    let counters = bench.machine.counters().units[0];
    assert_eq!(counters.dropped, 2);
    assert_eq!((counters.fills, counters.refills), (6, 2));
    assert_eq!(counters.hits, 2);
}

#[test]
fn processors_are_counted_each() {
    let machine = machine(Policy::Greedy);
    let tables = Tables::new(&machine, Format::Ept, 4);
    let root = Root::from_eptp(tables.root.address() | 3 << 3 | 6);
    machine.load_root(1, root);
    let frame = machine.allocate(GUEST).expect("a page");
    tables.map(5, 0, frame, Rights::ALL);
    machine.cpu_write64(1, 0x5000, 1).expect("mapped");
    machine.cpu_write64(1, 0x5000, 1).expect("mapped");
    machine.invalidate(1, root.tag).expect("works");
    machine.invalidate_all(1).expect("works");
    machine.send_ipi(1);
    machine.send_ipi(1);
    assert!(machine.take_ipi(1));
    let counters = machine.counters();
    assert_eq!(counters.cpus[0], crate::CpuCounters::default());
    let cpu = counters.cpus[1];
    assert_eq!((cpu.invalidations, cpu.full_invalidations), (1, 1));
    assert_eq!((cpu.dropped, cpu.fills, cpu.hits), (1, 1, 1));
    assert_eq!((cpu.ipis, cpu.acknowledged), (2, 1));
    assert_eq!(machine.operations_of(OperationKind::Invalidate), 2);
    assert_eq!(machine.operations_of(OperationKind::IpiAcknowledge), 1);
    assert_eq!(machine.operations_of(OperationKind::Command), 0);
    assert_eq!(counters.operations, 3);
}

#[test]
fn moments_only_move_forward() {
    let machine = machine(Policy::Greedy);
    let before = machine.now();
    machine.tick();
    let frame = machine.allocate(GUEST).expect("a page");
    machine.write64(frame.address(), 1);
    assert!(machine.now() > before);
    let now = machine.now();
    assert_eq!(machine.peek64(frame.address()), Some(1));
    assert_eq!(machine.now(), now, "a peek is no event");
    assert_eq!(machine.counters().host_changes, 1);
    machine.write64(frame.address(), 1);
    assert_eq!(machine.counters().host_changes, 1);
    machine.write_back(frame.address());
    assert_eq!(machine.counters().write_backs, 1);
}
