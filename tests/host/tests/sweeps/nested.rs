//! Nested guests on machines whose memory and processors fail.
//!
//! A script is one of pseudo-random steps. What an edit or a fill is refused stays undone;
//! the reference beside the world then still says what nested guests may reach.

use host::nested::{NestedSetup, NestedWorld, Step, Storage, Walks};
use hwmodel::{Failure, Policy};
use stage2::format::{ept::Ept, npt::Npt};

use crate::Say;

const SETUP: NestedSetup =
    NestedSetup { shadows: 2, records: 8, policy: Policy::Greedy, lie: None };
const STEPS: usize = 60;

/// What fails in one run.
#[derive(Clone, Copy, Debug)]
enum Fault {
    /// The n-th hardware operation.
    Operation(u64),
    /// The n-th request for a frame.
    Allocation(u64),
}

/// A page of the block that is one leaf at first: to replace it needs a table.
const IN_BLOCK: u64 = 0x2bc;

/// The steps of a seed.
fn steps(seed: u64) -> impl Iterator<Item = Step> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    std::iter::from_fn(move || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        let [_, a, _, b, _, c, _, d] = state.to_le_bytes();
        Some(Step::new([a, b, c, d]))
    })
    .take(STEPS)
}

/// Runs a script with something failing; how many operations and frames it asked for.
fn run<F: Walks>(seed: u64, fault: Option<Fault>) -> (u64, u64) {
    let _say =
        Say(format!("nested guests, {}, seed {seed}, {fault:?}", std::any::type_name::<F>()));
    let mut storage = Storage::new(SETUP);
    let world = NestedWorld::<F>::new(SETUP, &mut storage);
    world.populate();
    world.forgiving.set(true);
    let before = world.asked();
    match fault {
        None => {}
        Some(Fault::Operation(n)) => world.machine.fail_operation(n, Failure::Hang),
        Some(Fault::Allocation(n)) => world.refuse_allocation(n),
    }
    let check = || {
        assert_eq!(world.verdict(), Vec::<String>::new());
        assert_eq!(world.lost_frames(), 0);
    };
    for step in [Step::Put(IN_BLOCK, 1000)].into_iter().chain(steps(seed)) {
        world.run(step);
        check();
    }
    let after = world.asked();
    world.machine.repair();
    world.refuse_allocation(0);
    world.forgiving.set(false);
    world.finish();
    check();
    for step in steps(seed + 1) {
        world.run(step);
    }
    world.finish();
    check();
    (after.0 - before.0, after.1 - before.1)
}

fn sweep<F: Walks>() {
    for seed in 1..6 {
        let (operations, allocations) = run::<F>(seed, None);
        assert!(operations > 0 && allocations > 0, "seed {seed}");
        println!("sweep | nested, seed {seed} | {operations} operations, {allocations} requests");
        let faults = (1..=operations).map(Fault::Operation);
        for fault in faults.chain((1..=allocations).map(Fault::Allocation)) {
            run::<F>(seed, Some(fault));
        }
    }
}

#[test]
fn whatever_fails_under_nested_guests_nothing_stale_is_used_and_no_page_is_lost() {
    sweep::<Ept>();
    sweep::<Npt>();
}
