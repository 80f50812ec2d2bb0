//! The queue: nothing is done before the wait says so; errors stop it

use super::*;
use crate::failure::{Failure, Misuse};
use crate::vtd::command::{Command, Granularity};

#[test]
fn a_tail_write_fetches_and_carries_nothing_out() {
    let bench = Bench::new(UnitConfig::default());
    bench.mapped(5);
    assert!(bench.reaches(5));
    bench.tables.clear(5, 0);
    let done_before = bench.machine.commands(bench.driver.unit).len();
    bench.driver.submit(&[iotlb_page(DID, 5, 0)]);
    assert!(bench.reaches(5), "fetched, not done");
    assert!(!bench.driver.is_done());
    // The head moves with fetching: it is no proof of anything.
    let head = bench.machine.register_read64(bench.driver.unit, IQH);
    assert_eq!(head, bench.driver.next_slot());
    assert!(bench.reaches(5));
    assert!(!bench.driver.is_done());
    bench.driver.poll("the wait", || bench.driver.is_done());
    assert!(!bench.reaches(5));
    let log = bench.machine.commands(bench.driver.unit);
    assert_eq!(
        log[done_before..],
        [
            Command::Iotlb {
                granularity: Granularity::Selective,
                did: DID,
                page: 5,
                address_mask: 0,
                hint: false,
                drain_writes: true,
                drain_reads: true,
            },
            Command::Wait {
                status: Some((bench.driver.wait_descriptor().1, STATUS_DONE)),
                interrupt: false,
                fence: false,
            }
        ]
    );
}

#[test]
fn a_wait_is_done_after_everything_ahead_of_it_and_before_anything_behind() {
    let bench = Bench::new(UnitConfig::default());
    for page in 0..12 {
        bench.mapped(page);
        assert!(bench.reaches(page));
        bench.tables.clear(page, 0);
    }
    let first: Vec<Descriptor> = (0..6).map(|page| iotlb_page(DID, page, 0)).collect();
    let second: Vec<Descriptor> = (6..12).map(|page| iotlb_page(DID, page, 0)).collect();
    bench.driver.submit(&first);
    bench.driver.write(&second);
    bench.driver.write_tail();
    bench.driver.poll("the wait", || bench.driver.is_done());
    let reached: Vec<bool> = (0..12).map(|page| bench.reaches(page)).collect();
    assert_eq!(reached[..6], [false; 6]);
    assert_eq!(reached[6..], [true; 6]);
}

#[test]
fn time_passes_with_register_reads_and_ticks_only() {
    let bench = Bench::new(UnitConfig::default());
    bench.driver.submit(&[iotlb_global()]);
    for _ in 0..100 {
        assert!(!bench.driver.is_done(), "memory polling alone");
    }
    for _ in 0..10 {
        // Only the passing of time matters here.
        let _status: u32 = bench.machine.register_read32(bench.driver.unit, FSTS);
    }
    assert!(bench.driver.is_done());
}

#[test]
fn the_ring_wraps() {
    let bench = Bench::new(UnitConfig::default());
    for round in 0..300 {
        bench.driver.run(&[iotlb_page(DID, round, 0)]);
    }
    assert!(bench.machine.counters().units[0].waits >= 300);
    assert_eq!(bench.machine.misuses(), []);
}

/// A descriptor the manual does not allow stops the queue with the head on it.
#[track_caller]
fn check_bad(name: &str, config: UnitConfig, bad: Descriptor) {
    let bench = Bench::new(config);
    bench.mapped(5);
    assert!(bench.reaches(5));
    bench.tables.clear(5, 0);
    let slot = bench.driver.next_slot();
    bench.driver.submit(&[bad, iotlb_domain(DID)]);
    for _ in 0..100 {
        bench.machine.tick();
    }
    let unit = bench.driver.unit;
    assert_eq!(bench.machine.register_read32(unit, FSTS) & FSTS_IQE, FSTS_IQE, "{name}");
    assert_eq!(bench.machine.register_read64(unit, IQH), slot, "{name}");
    assert!(!bench.driver.is_done() && bench.reaches(5), "{name}");
    // A tail write alone does not get it going.
    bench.driver.write_tail();
    bench.machine.tick();
    assert_eq!(bench.machine.register_read64(unit, IQH), slot, "{name}");
    // Replace the descriptor, clear the error, write the tail.
    let (low, high) = iotlb_domain(DID);
    bench.machine.write64(bench.driver.slot_address(slot), low);
    bench.machine.write64(bench.driver.slot_address(slot) + 8, high);
    bench.machine.register_write32(unit, FSTS, FSTS_IQE);
    bench.driver.write_tail();
    bench.driver.poll("the wait", || bench.driver.is_done());
    assert!(!bench.reaches(5), "{name}");
    assert_eq!(bench.machine.register_read32(unit, FSTS) & FSTS_IQE, 0);
}

#[test]
fn bad_descriptors_raise_the_queue_error() {
    let full = UnitConfig::default();
    let no_pages = UnitConfig { page_selective: false, ..full };
    let no_device_tlb = UnitConfig { device_tlb: false, ..full };
    check_bad("type 0", full, (0, 0));
    check_bad("type 6", full, (6, 0));
    check_bad("type 0x12", full, (0x2f2, 0));
    check_bad("granularity 0", full, (0x2, 0));
    check_bad("mask too large", full, iotlb_page(DID, 0, 19));
    check_bad("IOTLB reserved low", full, (0xf2 | 1 << 32, 0));
    check_bad("IOTLB reserved high", full, (0xf2, 1 << 7));
    check_bad("pages without PSI", no_pages, iotlb_page(DID, 5, 0));
    check_bad("device TLB without DT", no_device_tlb, device_tlb(SID, 5));
    check_bad("context granularity 0", full, (1, 0));
    check_bad("context reserved", full, (0x11, 1));
    check_bad("device TLB reserved", full, (3, 2));
    check_bad("wait reserved", full, (0x25 | 1 << 12, 0x1000));
    check_bad("wait address", full, (0x25, 0x1002));
    // With a small MAMV the limit follows.
    let small = UnitConfig { max_address_mask: 9, ..full };
    check_bad("mask above 9", small, iotlb_page(DID, 0, 10));
}

#[test]
fn a_time_out_drops_the_waits_inside_and_stops_fetching() {
    let bench = Bench::with_policy(UnitConfig::default(), Policy::Greedy, true);
    bench.mapped(5);
    assert!(bench.reaches(5));
    bench.machine.set_device_answers(SID, false);
    let unit = bench.driver.unit;
    bench.driver.submit(&[iotlb_page(DID, 5, 0), device_tlb(SID, 5)]);
    bench.driver.poll("the error", || bench.machine.register_read32(unit, FSTS) & FSTS_ITE != 0);
    assert_eq!(bench.machine.counters().units[0].waits_aborted, 1);
    let head = bench.machine.register_read64(unit, IQH);
    bench.driver.write(&[iotlb_domain(DID)]);
    bench.driver.write_tail();
    for _ in 0..100 {
        bench.machine.tick();
    }
    assert!(!bench.driver.is_done(), "the wait was dropped");
    assert_eq!(bench.machine.register_read64(unit, IQH), head);
    bench.machine.register_write32(unit, FSTS, FSTS_ITE);
    bench.driver.run(&[]);
    assert_ne!(bench.machine.register_read64(unit, IQH), head);
    assert!(bench.reaches(5), "the device TLB still holds it");
    // The device comes back.
    bench.machine.set_device_answers(SID, true);
    bench.tables.clear(5, 0);
    bench.driver.run(&[iotlb_page(DID, 5, 0), device_tlb(SID, 5)]);
    assert!(!bench.reaches(5));
}

#[test]
fn a_device_behind_another_unit_never_answers() {
    let bench = Bench::with_policy(UnitConfig::default(), Policy::Greedy, true);
    let other = Driver::new(&bench.machine, UnitConfig::default());
    other.submit(&[device_tlb(SID, 5)]);
    other.poll("the error", || bench.machine.register_read32(other.unit, FSTS) & FSTS_ITE != 0);
    assert_eq!(bench.machine.misuses(), [Misuse::WrongUnit(SID)]);
}

#[test]
fn a_device_without_a_tlb_never_answers() {
    let bench = Bench::new(UnitConfig::default());
    bench.driver.submit(&[device_tlb(SID, 5)]);
    bench.driver.poll("the error", || {
        bench.machine.register_read32(bench.driver.unit, FSTS) & FSTS_ITE != 0
    });
}

#[test]
fn a_queue_turned_off_and_on_starts_at_the_beginning() {
    let bench = Bench::new(UnitConfig::default());
    bench.driver.submit(&[iotlb_global()]);
    let unit = bench.driver.unit;
    let set = |command: u32, status: u32, on: bool| {
        bench.machine.register_write32(unit, GCMD, command);
        bench
            .driver
            .poll("the queue", || (bench.machine.register_read32(unit, GSTS) & status != 0) == on);
    };
    set(GSTS_TES, GSTS_QIES, false);
    assert_eq!(bench.machine.register_read64(unit, IQH), 0);
    bench.machine.register_write64(unit, IQT, 0);
    set(GSTS_TES | GCMD_QIE, GSTS_QIES, true);
    for _ in 0..100 {
        bench.machine.tick();
    }
    assert_eq!(bench.machine.register_read64(unit, IQH), 0);
    assert_eq!(bench.machine.misuses(), []);
}

#[test]
fn a_root_table_counts_from_the_command_that_sets_it() {
    let bench = Bench::new(UnitConfig::default());
    bench.mapped(5);
    let unit = bench.driver.unit;
    let empty = bench.machine.allocate_zeroed(HYPERVISOR).expect("a frame");
    bench.machine.register_write64(unit, RTADDR, empty.address());
    bench.driver.run(&[context_global(), iotlb_global()]);
    assert!(bench.reaches(5), "the register alone does nothing");
    let on = GSTS_TES | GSTS_QIES;
    bench.machine.register_write32(unit, GCMD, on | GCMD_SRTP);
    assert!(bench.reaches(5));
    assert_eq!(bench.machine.register_read32(unit, GSTS) & GSTS_RTPS, 0);
    bench
        .driver
        .poll("the root table", || bench.machine.register_read32(unit, GSTS) & GSTS_RTPS != 0);
    assert!(bench.reaches(5), "the context entry is still cached");
    bench.driver.run(&[context_global(), iotlb_global()]);
    assert!(!bench.reaches(5));
}

#[test]
fn each_operation_can_be_made_to_fail() {
    // Operations of one submission of one command: tail write, command, wait.
    let unit_bench = || {
        let bench = Bench::new(UnitConfig::default());
        bench.mapped(5);
        assert!(bench.reaches(5));
        bench.tables.clear(5, 0);
        bench
    };
    let cases: [(u64, Failure, u32, bool); 8] = [
        (1, Failure::Hang, 0, true),
        (2, Failure::Hang, 0, true),
        (2, Failure::QueueError, FSTS_IQE, true),
        (2, Failure::TimeOut, FSTS_ITE, true),
        (3, Failure::Hang, 0, false),
        (3, Failure::QueueError, FSTS_IQE, false),
        (3, Failure::TimeOut, FSTS_ITE, false),
        (2, Failure::CompletionError, FSTS_ICE, false),
    ];
    for (n, failure, error, still_reached) in cases {
        let bench = unit_bench();
        bench.machine.fail_operation(n, failure);
        bench.driver.submit(&[iotlb_page(DID, 5, 0)]);
        for _ in 0..100 {
            bench.machine.tick();
        }
        let name = format!("{n} {failure:?}");
        let status = bench.machine.register_read32(bench.driver.unit, FSTS);
        let errors = FSTS_IQE | FSTS_ITE | FSTS_ICE;
        assert_eq!(status & errors, error, "{name}");
        assert_eq!(bench.driver.is_done(), failure == Failure::CompletionError, "{name}");
        assert_eq!(bench.reaches(5), still_reached, "{name}");
        assert_eq!(bench.machine.witnesses(), [], "{name}");
        // What hung goes on after a repair; the lost tail write must be repeated.
        bench.machine.repair();
        bench.machine.register_write32(bench.driver.unit, FSTS, errors);
        bench.driver.write_tail();
        if failure != Failure::TimeOut {
            bench.driver.poll(&name, || bench.driver.is_done());
            assert!(!bench.reaches(5), "{name}");
        }
    }
}

#[test]
fn failed_invalidations_and_interrupts_say_so() {
    let machine = machine(Policy::Greedy);
    machine.fail_operation(1, Failure::Hang);
    assert!(machine.invalidate(0, 1).is_err());
    assert!(machine.invalidate(0, 1).is_ok());
    machine.fail_operation(1, Failure::Hang);
    machine.send_ipi(0);
    assert!(!machine.take_ipi(0));
    assert!(!machine.take_ipi(0));
    machine.repair();
    assert!(machine.take_ipi(0));
    // A repair disarms.
    machine.fail_operation(1, Failure::Hang);
    machine.repair();
    assert!(machine.invalidate(0, 1).is_ok());
}

#[test]
fn registers_invalidate_when_the_queue_is_off() {
    let config = UnitConfig { queue: false, ..UnitConfig::default() };
    // (granularity asked for, IVA, domain, granularity carried out, still reached)
    let cases: [(u64, u64, u64, u64, bool); 7] = [
        (1, 0, 0, 1, false),
        (2, 0, u64::from(DID), 2, false),
        (2, 0, 8, 2, true),
        (3, 0x5000, u64::from(DID), 3, false),
        (3, 0x6000, u64::from(DID), 3, true),
        (3, 0x4000 | 1, u64::from(DID), 3, false),
        // Mask above MAMV: refused, nothing done.
        (3, 0x5000 | 19, u64::from(DID), 0, true),
    ];
    for (asked, iva, did, actual, still_reached) in cases {
        let bench = Bench::new(config);
        bench.mapped(5);
        assert!(bench.reaches(5));
        bench.tables.clear(5, 0);
        let unit = bench.driver.unit;
        bench.machine.register_write64(unit, 0xf0, iva);
        bench.machine.register_write64(
            unit,
            0xf8,
            IOTLB_IVT | asked << IOTLB_IIRG_SHIFT | 3 << 48 | did << 32,
        );
        assert!(bench.reaches(5), "not done by the write");
        let mut register = 0;
        bench.driver.poll("the register", || {
            register = bench.machine.register_read64(unit, 0xf8);
            register & IOTLB_IVT == 0
        });
        assert_eq!(register >> IOTLB_IAIG_SHIFT & 3, actual);
        assert_eq!(bench.reaches(5), still_reached);
        assert_eq!(bench.machine.misuses(), []);
    }
}

#[test]
fn the_context_register_works_in_halves() {
    let config = UnitConfig { queue: false, ..UnitConfig::default() };
    for (did, reached) in [(DID, false), (DID + 1, true)] {
        let bench = Bench::new(config);
        bench.mapped(5);
        assert!(bench.reaches(5));
        bench.driver.clear_context(SID);
        let unit = bench.driver.unit;
        bench.machine.register_write32(unit, CCMD, u32::from(SID) << 16 | u32::from(did));
        bench.machine.tick();
        assert!(bench.reaches(5), "the lower half starts nothing");
        bench.machine.register_write32(unit, CCMD + 4, 1 << 31 | 3 << 29);
        bench
            .driver
            .poll("the register", || bench.machine.register_read32(unit, CCMD + 4) >> 31 == 0);
        assert_eq!(bench.machine.register_read64(unit, CCMD) >> 59 & 3, 3);
        assert_eq!(bench.reaches(5), reached);
    }
}

#[test]
fn protocol_errors_are_recorded() {
    type Act = fn(&Driver);
    let cases: [(Act, Misuse); 9] = [
        (
            |driver| {
                driver.machine.register_write64(driver.unit, 0xf8, IOTLB_IVT | 1 << 60);
            },
            Misuse::RegisterInvalidationWithQueue,
        ),
        (
            |driver| {
                driver.machine.register_write64(driver.unit, CCMD, CCMD_ICC | 1 << 61);
            },
            Misuse::RegisterInvalidationWithQueue,
        ),
        (
            |driver| driver.machine.register_write64(driver.unit, IQA, 0x1000),
            Misuse::QueueMovedWhileOn,
        ),
        (|driver| driver.machine.register_write64(driver.unit, IQT, 4096), Misuse::BadTail(4096)),
        (|driver| driver.machine.register_write64(driver.unit, IQT, 8), Misuse::BadTail(8)),
        (
            |driver| driver.machine.register_write32(driver.unit, GCMD, 0),
            Misuse::SeveralCommands(GSTS_TES | GSTS_QIES),
        ),
        (
            |driver| {
                let on = GSTS_TES | GSTS_QIES;
                let machine = &driver.machine;
                machine.register_write32(driver.unit, GCMD, on | GCMD_WBF);
                machine.register_write32(driver.unit, GCMD, on | GCMD_WBF);
            },
            Misuse::CommandWhilePending,
        ),
        (
            |driver| {
                driver.write(&[(0x35, 0x1000)]);
                driver.write_tail();
            },
            Misuse::WaitWithBoth,
        ),
        (
            |driver| {
                driver.machine.register_write32(driver.unit, GCMD, GSTS_QIES);
                driver.machine.tick();
                driver.machine.tick();
                driver.machine.add_device(driver.unit, SID, true);
                driver.run(&[device_tlb(SID, 5)]);
            },
            Misuse::DeviceTlbWhileOff,
        ),
    ];
    for (act, misuse) in cases {
        let machine = machine(Policy::Greedy);
        let driver = Driver::new(&machine, UnitConfig::default());
        assert_eq!(machine.misuses(), []);
        act(&driver);
        assert_eq!(machine.misuses(), [misuse]);
    }
}

#[test]
fn a_register_invalidation_with_the_queue_on_never_ends() {
    let machine = machine(Policy::Greedy);
    let driver = Driver::new(&machine, UnitConfig::default());
    machine.register_write64(driver.unit, 0xf8, IOTLB_IVT | 1 << 60);
    for _ in 0..1000 {
        machine.tick();
    }
    assert_ne!(machine.register_read64(driver.unit, 0xf8) & IOTLB_IVT, 0);
}

#[test]
fn a_wait_may_interrupt_instead_of_writing() {
    let machine = machine(Policy::Greedy);
    let driver = Driver::new(&machine, UnitConfig::default());
    let unit = driver.unit;
    machine.register_write32(unit, IECTL, 0);
    driver.write(&[(0x15, 0)]);
    driver.write_tail();
    driver.poll("the interrupt", || machine.register_read32(unit, ICS) & ICS_IWC != 0);
    assert_eq!(machine.counters().units[0].completion_interrupts, 1);
    machine.register_write32(unit, ICS, ICS_IWC);
    assert_eq!(machine.register_read32(unit, ICS), 0);
    // Masked, it stays pending until unmasked.
    machine.register_write32(unit, IECTL, FECTL_IM);
    driver.write(&[(0x15, 0)]);
    driver.write_tail();
    driver.poll("the status", || machine.register_read32(unit, ICS) & ICS_IWC != 0);
    assert_eq!(machine.counters().units[0].completion_interrupts, 1);
    assert_ne!(machine.register_read32(unit, IECTL) & FECTL_IP, 0);
    machine.register_write32(unit, IECTL, 0);
    assert_eq!(machine.counters().units[0].completion_interrupts, 2);
}

#[test]
fn capabilities_say_what_the_unit_does() {
    let qemu = UnitConfig {
        device_tlb: false,
        pass_through: true,
        snoop: false,
        coherent: false,
        ..UnitConfig::default()
    };
    // What QEMU's unit reports with aw-bits=48, apart from interrupt remapping and what the model does not offer.
    assert_eq!(qemu.cap() & !(1 << 22), 0x00d2_008c_222f_0606);
    assert_eq!(qemu.ecap(), 0xf42);
    assert_eq!(UnitConfig::default().ecap(), 0xfc7);
    let machine = machine(Policy::Greedy);
    let config = UnitConfig {
        caching_mode: true,
        write_buffer: true,
        domain_id_bits: 8,
        max_address_mask: 9,
        fault_records: 4,
        ..UnitConfig::default()
    };
    let unit = machine.add_unit(config);
    let cap = machine.register_read64(unit, CAP);
    assert_eq!(cap, config.cap());
    assert_eq!(machine.register_read32(unit, CAP + 4), (config.cap() >> 32) as u32);
    assert_eq!(cap & 7, 2);
    assert_eq!(cap >> 4 & 1, 1);
    assert_eq!(cap >> 7 & 1, 1);
    assert_eq!(cap >> 40 & 0xff, 3);
    assert_eq!(cap >> 48 & 63, 9);
    assert_eq!(machine.register_read64(unit, ECAP), config.ecap());
    assert_eq!(config.ecap() & 7, 7);
}
