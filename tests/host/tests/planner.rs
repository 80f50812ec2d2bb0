//! Plans for covers anywhere, against the leaves; and what a unit is told of them.
//!
//! Small universes are tried out whole in the crate itself; here are large ones.

use std::collections::BTreeSet;

use flush::{
    Block, Change, Cover, Depth, Gfn, Run,
    plan::{COMMANDS, CostModel, Limits, Nanoseconds, Plan, Planner, Policy, Recent, SUBMISSION},
};
use gnttab::Outcome;
use host::{Setup, World};
use hwmodel::{Command, Granularity, UnitId};
use proptest::prelude::*;

/// First pages and orders of leaves, as walks record them: aligned, close together or far
/// apart, at either end of the space.
fn leaves() -> impl Strategy<Value = Vec<(u64, u8)>> {
    let page = prop_oneof![
        0..64_u64,
        0x3_ff00..0x4_0100_u64,
        0..1_u64 << 30,
        (1_u64 << 52) - 2048..1_u64 << 52,
    ];
    let order = prop_oneof![8 => Just(0_u8), 1 => Just(9), 1 => 0..6_u8];
    prop::collection::vec((page, order), 1..48)
}

fn limits() -> impl Strategy<Value = Limits> {
    (prop::bool::weighted(0.9), 0..24_u8)
        .prop_map(|(page_selective, max_order)| Limits { page_selective, max_order })
}

fn costs() -> impl Strategy<Value = CostModel> {
    let price = || (0..2000_u64).prop_map(Nanoseconds::new);
    (price(), price(), price(), price(), price(), price(), 0..5000_u64).prop_map(
        |(page, domain, global, wait, tail, refill, live_entries)| CostModel {
            page,
            domain,
            global,
            wait,
            tail,
            refill,
            live_entries,
        },
    )
}

fn cover(leaves: &[(u64, u8)]) -> Cover {
    let mut cover = Cover::NOTHING;
    for (page, order) in leaves {
        let run = Run::block(Gfn::new(*page), *order);
        cover.record(run, *order, Depth::Leaves, Change::Modified);
    }
    cover
}

/// Every leaf lies in one block of the plan: a smaller block need not drop it.
fn check_covers(plan: &Plan, leaves: &[(u64, u8)], limits: Limits) -> Result<(), TestCaseError> {
    let Plan::Blocks(blocks) = plan else {
        prop_assert!(matches!(plan, Plan::Domain | Plan::Global));
        return Ok(());
    };
    let blocks: BTreeSet<(u64, u8)> = blocks.clone().map(|b| (b.base(), b.order())).collect();
    prop_assert!(limits.page_selective && (1..=COMMANDS).contains(&plan.commands()));
    for (base, order) in &blocks {
        prop_assert!(*order <= limits.max_order && base >> order << order == *base);
    }
    for (page, order) in leaves {
        let around = |larger: u8| (page >> larger << larger, larger);
        let covered = (*order..=limits.max_order).any(|larger| blocks.contains(&around(larger)));
        prop_assert!(covered, "{page:#x} of order {order} is in none of {blocks:x?}");
    }
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    #[test]
    fn no_policy_misses_a_leaf_and_planned_is_never_dearer(
        leaves in leaves(),
        limits in limits(),
        costs in costs(),
        before in leaves(),
    ) {
        let recent = Recent::new();
        recent.note(&cover(&before));
        let cover = cover(&leaves);
        let planner = Planner::new(Policy::Planned).with_costs(costs).with_recent(&recent);
        let planned = planner.estimate(&cover, &planner.plan(&cover, limits));
        for policy in Policy::ALL {
            let plan = Planner::new(policy).with_costs(costs).plan(&cover, limits);
            check_covers(&plan, &leaves, limits)?;
            prop_assert!(planned <= planner.estimate(&cover, &plan), "{policy:?}");
        }
    }

    #[test]
    fn exact_names_each_page_once_as_long_as_the_cover_is_exact(
        leaves in prop::collection::vec((0..2000_u64, prop_oneof![Just(0_u8), Just(4)]), 1..=32),
    ) {
        // A tree has one leaf for a page: no small one below a large one.
        let large: BTreeSet<u64> =
            leaves.iter().filter(|leaf| leaf.1 == 4).map(|leaf| leaf.0 >> 4).collect();
        let mut leaves = leaves;
        leaves.retain(|(page, order)| *order == 4 || !large.contains(&(page >> 4)));
        let limits = Limits { page_selective: true, max_order: 18 };
        let Plan::Blocks(blocks) = Planner::new(Policy::Exact).plan(&cover(&leaves), limits) else {
            return Err(TestCaseError::fail("pages can be named"));
        };
        let named: Vec<u64> = blocks.flat_map(|b| b.base()..b.base() + b.pages()).collect();
        let run = |(page, order): &(u64, u8)| Block::around(Run::single(Gfn::new(*page))).at_least(*order);
        let changed: BTreeSet<u64> =
            leaves.iter().map(run).flat_map(|b| b.base()..b.base() + b.pages()).collect();
        prop_assert!(named.iter().eq(&changed), "{named:x?} for {changed:x?}");
    }
}

/// What the unit executes for pages given back in one call is what was planned for them.
#[track_caller]
fn check_told(policy: Policy, pages: &[u64]) {
    let world = World::new(Setup::default());
    world.planner.set(Planner::new(policy));
    let gfns: Vec<Gfn> = pages.iter().copied().map(Gfn::new).collect();
    let shared = world.share(&gfns);
    let mappings: Vec<_> =
        shared.iter().zip(&gfns).map(|((_, handle), gfn)| (*handle, *gfn)).collect();
    let before = world.machine.commands(UnitId(0)).len();
    assert_eq!(world.unmap(&mappings).outcome, Outcome::Done);
    let told = world.machine.commands(UnitId(0)).split_off(before);

    let leaves: Vec<_> = pages.iter().map(|page| (*page, 0)).collect();
    let limits = Limits { page_selective: true, max_order: 18 };
    let plan = Planner::new(policy).plan(&cover(&leaves), limits);
    let Plan::Blocks(blocks) = &plan else { panic!("{plan:?}") };
    let mut expected = Vec::new();
    for (place, block) in blocks.clone().enumerate() {
        expected.push(Some((block.base(), block.order())));
        if blocks.waits_for_each() || (place + 1).is_multiple_of(SUBMISSION) {
            expected.push(None);
        }
    }
    if expected.last().is_some_and(Option::is_some) {
        expected.push(None);
    }
    let told: Vec<_> = told
        .into_iter()
        .map(|command| {
            if let Command::Iotlb { granularity, page, address_mask, .. } = command {
                assert_eq!(granularity, Granularity::Selective);
                return Some((page, address_mask));
            }
            assert!(matches!(command, Command::Wait { .. }), "{command:?} was not planned");
            None
        })
        .collect();
    assert_eq!(told, expected, "{policy:?}");
    assert_eq!(told.iter().filter(|told| told.is_none()).count(), plan.submissions());

    world.take_back_all(gfns.len() as u32);
    assert!(!gfns.iter().any(|gfn| world.device_reaches(*gfn)));
    assert_eq!(world.machine.witnesses(), []);
    assert_eq!(world.audit(), []);
}

#[test]
fn under_each_policy_the_unit_is_told_the_plan_and_nothing_stays_stale() {
    const BASE: u64 = 0x100_0000;
    let scattered: Vec<u64> = (0..32).map(|place| BASE + place * place * 37).collect();
    let close: Vec<u64> = (0..32).map(|place| BASE + 3 + place + place / 5).collect();
    for policy in Policy::ALL {
        check_told(policy, &scattered);
        check_told(policy, &close);
        check_told(policy, &[BASE + 3, BASE + 4]);
    }
}
