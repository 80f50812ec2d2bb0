//! Every planted bug is seen as a witness, and without it the same steps are clean

use super::*;
use crate::cpu::Root;
use crate::failure::{CpuLie, Lie};
use crate::witness::WitnessKind;

/// Unmaps pages 6 and 7 and their table properly on a unit that may lie, releases everything, and tries again.
fn witnesses_of_a_proper_unmap(lie: Option<Lie>) -> Vec<WitnessKind> {
    let bench = Bench::with_policy(UnitConfig::default(), Policy::Greedy, true);
    bench.machine.add_device(bench.driver.unit, 9, false);
    bench.driver.set_context(9, DID, &bench.tables, 0);
    let frames = [bench.mapped(6), bench.mapped(7)];
    let plain = |page: u64| bench.machine.dma_write64(9, page << 12, 1);
    for page in [6, 7] {
        assert!(bench.reaches(page) && plain(page).is_ok());
    }
    let in_flight = bench.machine.dma_begin_write(9, 0x6000, &[1; 8]).expect("mapped");
    bench.machine.set_lie(bench.driver.unit, lie);
    let link = bench.tables.slot(6, 1);
    let table = Frame::containing(bench.machine.read64(link));
    bench.tables.clear(6, 0);
    bench.tables.clear(7, 0);
    bench.machine.write64(link, 0);
    bench.driver.run(&[iotlb_page(DID, 6, 1), device_tlb(SID, 6), device_tlb(SID, 7)]);
    for frame in frames {
        bench.machine.release(frame);
    }
    bench.machine.release(table);
    for page in [6, 7] {
        bench.reaches(page);
        // Whether it is refused is not the point here.
        let _reached: bool = plain(page).is_ok();
    }
    bench.machine.dma_finish(in_flight).expect("begun");
    let mut kinds: Vec<WitnessKind> =
        bench.machine.witnesses().iter().map(|witness| witness.kind).collect();
    kinds.sort_unstable();
    kinds.dedup();
    kinds
}

#[test]
fn every_lie_about_translations_is_seen() {
    use WitnessKind::{ReleasedFrame, ReleasedTable};
    let cases: [(Option<Lie>, &[WitnessKind]); 8] = [
        (None, &[]),
        (Some(Lie::IgnoreIotlb), &[ReleasedFrame]),
        (Some(Lie::IgnoreDeviceTlb), &[ReleasedFrame]),
        (Some(Lie::SmallerMask), &[ReleasedFrame]),
        (Some(Lie::WrongDomain), &[ReleasedFrame]),
        (Some(Lie::EarlyWait), &[ReleasedFrame]),
        (Some(Lie::IgnoreDrain), &[ReleasedFrame]),
        (Some(Lie::KeepWalks), &[ReleasedTable]),
    ];
    for (lie, expected) in cases {
        assert_eq!(witnesses_of_a_proper_unmap(lie), expected, "{lie:?}");
    }
}

#[test]
fn a_lie_about_contexts_is_seen() {
    for (lie, expected) in [(None, 0), (Some(Lie::IgnoreContext), 1)] {
        let bench = Bench::new(UnitConfig::default());
        bench.mapped(5);
        assert!(bench.reaches(5));
        bench.machine.set_lie(bench.driver.unit, lie);
        bench.driver.clear_context(SID);
        bench.driver.run(&[context_device(DID, SID), iotlb_domain(DID)]);
        bench.machine.release(bench.tables.root);
        bench.reaches(5);
        assert_eq!(bench.machine.count(WitnessKind::ReleasedTable), expected, "{lie:?}");
    }
}

#[test]
fn every_lie_of_a_processor_is_seen() {
    use WitnessKind::{ReleasedFrame, ReleasedTable};
    let cases: [(Option<CpuLie>, &[WitnessKind]); 4] = [
        (None, &[]),
        (Some(CpuLie::IgnoreInvalidate), &[ReleasedFrame]),
        (Some(CpuLie::KeepWalks), &[ReleasedTable]),
        (Some(CpuLie::KeepRunning), &[ReleasedFrame]),
    ];
    for (lie, expected) in cases {
        let machine = machine(Policy::Greedy);
        let tables = Tables::new(&machine, Format::Ept, 4);
        let root = Root::from_eptp(tables.root.address() | 3 << 3 | 6);
        machine.load_root(1, root);
        let frame = machine.allocate(GUEST).expect("a page");
        tables.map(5, 0, frame, Rights::ALL);
        machine.cpu_write64(1, 0x5000, 1).expect("mapped");
        machine.set_cpu_lie(1, lie);
        let link = tables.slot(5, 1);
        let table = Frame::containing(machine.read64(link) & 0x000f_ffff_ffff_f000);
        tables.clear(5, 0);
        machine.write64(link, 0);
        machine.send_ipi(1);
        assert!(machine.take_ipi(1));
        // Pages go as soon as the processor says that it has left: it invalidates before it comes back.
        machine.release(frame);
        machine.release(table);
        let still_inside = machine.is_running(1);
        if !still_inside {
            machine.invalidate(1, root.tag).expect("works");
            machine.enter(1).expect("a root");
        }
        // Whether it faults is not the point here.
        let _reached: bool = machine.cpu_write64(1, 0x5000, 1).is_ok();
        let kinds: Vec<WitnessKind> =
            machine.witnesses().iter().map(|witness| witness.kind).collect();
        assert_eq!(kinds, expected, "{lie:?}");
    }
}
