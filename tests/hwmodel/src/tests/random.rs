//! The random policy: repeatable, never wrong by itself, able to show a bug

use super::*;
use crate::cpu::Root;
use crate::witness::Witness;

/// Maps, uses, unmaps and reuses pages on a processor and a device; `flush` says whether to flush in between.
fn run(policy: Policy, flush: bool) -> (Vec<Witness>, u64) {
    let bench = Bench::with_policy(UnitConfig::default(), policy, true);
    let guest = Tables::new(&bench.machine, Format::Npt, 4);
    let root = Root::nested(1, guest.root.address());
    bench.machine.load_root(0, root);
    for round in 0..40_u64 {
        let page = round % 5;
        let frame = bench.machine.allocate(GUEST).expect("a page");
        bench.tables.map(page, 0, frame, Rights::READ_WRITE);
        guest.map(page, 0, frame, Rights::ALL);
        bench.machine.tick();
        assert!(bench.reaches(page));
        bench.machine.cpu_write64(0, page << 12, round).expect("mapped");
        bench.tables.clear(page, 0);
        guest.clear(page, 0);
        if flush {
            bench.driver.run(&[hinted(iotlb_page(DID, page, 0)), device_tlb(SID, page)]);
            bench.machine.invalidate(0, root.tag).expect("works");
        }
        bench.machine.release(frame);
        if flush {
            assert_eq!(bench.machine.audit(), []);
        }
        // Whether they are refused is up to the policy when nothing was flushed.
        let _reached: bool = bench.reaches(page);
        let _reached: bool = bench.machine.cpu_read64(0, page << 12).is_ok();
    }
    let counters = bench.machine.counters();
    (bench.machine.witnesses(), counters.cpus[0].fills + counters.units[0].fills)
}

#[test]
fn a_proper_flush_leaves_no_witness_whatever_the_hardware_chooses() {
    assert_eq!(run(Policy::Greedy, true).0, []);
    for seed in 0..50 {
        assert_eq!(run(Policy::Random(seed), true).0, [], "seed {seed}");
    }
}

#[test]
fn a_missing_flush_is_seen_by_both_policies() {
    assert!(run(Policy::Greedy, false).0.len() >= 80);
    for seed in 0..20 {
        assert!(!run(Policy::Random(seed), false).0.is_empty(), "seed {seed}");
    }
}

#[test]
fn the_same_seed_gives_the_same_run_and_another_one_does_not() {
    assert_eq!(run(Policy::Random(7), false), run(Policy::Random(7), false));
    let different = (0..10)
        .map(|seed| run(Policy::Random(seed), false).1)
        .collect::<std::collections::BTreeSet<u64>>();
    assert!(different.len() > 1);
    let mut generator = crate::policy::Xorshift::new(0);
    assert_ne!(generator.next(), generator.next(), "seed 0 is not stuck");
}
