//! Plans against every set of pages of a small universe, and some of large ones.

use super::*;
use crate::{Change, Depth};

extern crate std;
use std::vec::Vec;

const WIDE: Limits = Limits { page_selective: true, max_order: 18 };

fn cover(runs: &[(u64, u64, u8)]) -> Cover {
    let mut cover = Cover::NOTHING;
    for (first, last, order) in runs {
        let run = Run::new(Gfn::new(*first), Gfn::new(*last)).unwrap();
        cover.record(run, *order, Depth::Leaves, Change::Modified);
    }
    cover
}

/// The cover of the pages whose bits are set.
fn pages(bits: u32) -> Cover {
    let set: Vec<_> = (0..32).filter(|page| bits >> page & 1 == 1).map(|p| (p, p, 0)).collect();
    cover(&set)
}

/// First page and order of each block, or nothing for a plan that names none.
fn blocks(plan: &Plan) -> Vec<(u64, u8)> {
    match plan {
        Plan::Blocks(blocks) => blocks.clone().map(|b| (b.base(), b.order())).collect(),
        Plan::Nothing | Plan::Domain | Plan::Global => Vec::new(),
    }
}

fn bits(base: u64, order: u8) -> u32 {
    (((1_u64 << (1 << order)) - 1) << base) as u32
}

#[track_caller]
fn check(policy: Policy, runs: &[(u64, u64, u8)], expected: &[(u64, u8)]) {
    let plan = Planner::new(policy).plan(&cover(runs), WIDE);
    assert_eq!(blocks(&plan), expected, "{policy:?} of {runs:?}");
}

#[test]
fn no_policy_misses_a_page_or_names_a_block_beyond_the_limit() {
    for set in 1..1_u32 << 12 {
        let cover = pages(set);
        for (max_order, policy) in (0..=4).flat_map(|m| Policy::ALL.map(|policy| (m, policy))) {
            let limits = Limits { page_selective: true, max_order };
            let plan = Planner::new(policy).plan(&cover, limits);
            let named = blocks(&plan);
            let union = named.iter().fold(0, |sum, (base, order)| sum | bits(*base, *order));
            let wide = matches!(plan, Plan::Domain | Plan::Global);
            assert!(wide || set & !union == 0, "{policy:?} of {set:#b}: {named:?}");
            assert!(
                named
                    .iter()
                    .all(|(base, order)| *order <= max_order && base >> order << order == *base)
            );
            if policy == Policy::Exact || policy == Policy::PerPage {
                assert_eq!(union, set, "{policy:?}");
            }
            if policy == Policy::TwoBlock {
                let named: u32 = named.iter().map(|(_, order)| 1 << order).sum();
                assert!(named < 2 * set.count_ones(), "{set:#b}: {named}");
            }
        }
    }
}

/// The price of the cheapest set of nodes of at most `max_order` that covers each set of
/// 8 pages: every set of nodes is built up node by node, whatever it covers already.
fn cheapest_of_all(max_order: u8, costs: &CostModel) -> Vec<u64> {
    let nodes: Vec<u32> = (0..=max_order.min(3))
        .flat_map(|order| (0..8 >> order).map(move |place| bits(place << order, order)))
        .collect();
    let cheapest = |set: u32| {
        // The cheapest way found to cover each union of nodes.
        let mut best = [u64::MAX; 256];
        best[0] = 0;
        for node in &nodes {
            let lost = u64::from((node & !set).count_ones()).min(costs.live_entries).div_ceil(2);
            let price = costs.page.get() + costs.refill.get() * lost;
            for union in (0..256_u32).rev() {
                let price = best[union as usize].saturating_add(price);
                let with = &mut best[(union | node) as usize];
                *with = (*with).min(price);
            }
        }
        (0..256_u32)
            .filter(|union| set & !union == 0)
            .map(|union| best[union as usize])
            .min()
            .unwrap()
    };
    (0..256).map(cheapest).collect()
}

/// Prices that make commands dear, lost entries dear, and both free.
fn models() -> [CostModel; 6] {
    let model = |page, refill, live_entries| CostModel {
        page: Nanoseconds::new(page),
        refill: Nanoseconds::new(refill),
        // Never worth it: this is about blocks.
        domain: Nanoseconds::new(1 << 40),
        global: Nanoseconds::new(1 << 40),
        live_entries,
        ..CostModel::DEFAULT
    };
    [
        model(200, 50, 1024),
        model(200, 50, 3),
        model(200, 150, 1024),
        model(1, 200, 1024),
        model(1000, 1, 1024),
        model(0, 0, 0),
    ]
}

#[test]
fn the_planned_cover_is_the_cheapest_of_all_sets_of_blocks() {
    for costs in models() {
        for max_order in 0..=3 {
            let best = cheapest_of_all(max_order, &costs);
            let planner = Planner::new(Policy::Planned).with_costs(costs);
            let submission = costs.wait.plus(costs.tail).get();
            for (set, best) in best.iter().enumerate().skip(1) {
                let cover = pages(set as u32);
                let plan = planner.plan(&cover, Limits { page_selective: true, max_order });
                let cost = planner.estimate(&cover, &plan).get();
                assert_eq!(cost, best + submission, "{set:#b} up to {max_order}: {costs:?}");
            }
        }
    }
}

#[test]
fn planned_is_never_dearer_than_another_policy() {
    for costs in models().into_iter().chain([CostModel::DEFAULT]) {
        for set in (1..1_u32 << 16).step_by(61) {
            let cover = pages(set);
            for max_order in [0, 2, 5] {
                let limits = Limits { page_selective: true, max_order };
                let planner = Planner::new(Policy::Planned).with_costs(costs);
                let planned = planner.estimate(&cover, &planner.plan(&cover, limits));
                for policy in Policy::ALL {
                    let other = Planner::new(policy).with_costs(costs).plan(&cover, limits);
                    let other = planner.estimate(&cover, &other);
                    assert!(planned <= other, "{set:#b}: {policy:?} {other:?} < {planned:?}");
                }
            }
        }
    }
}

#[test]
fn each_policy_names_the_blocks_of_its_name() {
    let runs = [(3, 4, 0), (8, 10, 0)];
    check(Policy::PerPage, &runs, &[(3, 0), (4, 0), (8, 0), (9, 0), (10, 0)]);
    check(Policy::Hull, &runs, &[(0, 4)]);
    check(Policy::Gather, &runs, &[(0, 3), (8, 2)]);
    check(Policy::Exact, &runs, &[(3, 0), (4, 0), (8, 1), (10, 0)]);
    check(Policy::TwoBlock, &runs, &[(3, 0), (4, 0), (8, 2)]);
    check(Policy::Planned, &runs, &[(0, 4)]);
    check(Policy::Planned, &[(32, 63, 0)], &[(32, 5)]);
    // Eight pages more, half of them in use, are as dear as one command more, and one
    // command is less to send.
    check(Policy::Planned, &[(0, 3, 0), (12, 15, 0)], &[(0, 4)]);
    check(Policy::Planned, &[(0, 3, 0), (14, 15, 0)], &[(0, 2), (14, 1)]);
}

#[test]
fn pages_that_went_last_are_not_spared_until_they_are_mapped_again() {
    let recent = Recent::new();
    let planner = Planner::default().with_recent(&recent);
    let plan = |runs: &[(u64, u64, u8)]| blocks(&planner.plan(&cover(runs), WIDE));
    let next = [(46, 63, 0)];
    let apart = [(46, 1), (48, 4)];
    assert_eq!(plan(&next), apart);
    recent.note(&cover(&[(20, 45, 0)]));
    assert_eq!(plan(&next), [(32, 5)]);
    // On record means mapped until now, whatever went before.
    assert_eq!(plan(&[(45, 63, 0)]), [(44, 2), (48, 4)]);
    let mut mapped = Cover::NOTHING;
    mapped.record(Run::single(Gfn::new(23)), 0, Depth::Leaves, Change::Added);
    recent.note(&mapped);
    assert_eq!(plan(&next), apart);
    // An embedder that knows is asked alone.
    recent.note(&cover(&[(20, 45, 0)]));
    let asked = planner.with_live(&LowHalf).plan(&cover(&next), WIDE);
    assert_eq!(blocks(&asked), apart);
}

#[test]
fn a_large_leaf_is_named_at_its_order_and_a_page_beside_it_at_its_own() {
    let runs = [(511, 511, 0), (512, 1023, 9), (1024, 1024, 0)];
    check(Policy::PerPage, &runs, &[(511, 0), (512, 9), (1024, 0)]);
    check(Policy::Exact, &runs, &[(511, 0), (512, 9), (1024, 0)]);
    check(Policy::Planned, &runs, &[(511, 0), (512, 9), (1024, 0)]);
    check(Policy::Gather, &runs, &[(511, 0), (512, 9), (1024, 0)]);
    for policy in Policy::ALL {
        // Part of a leaf: all of it. The one below shares its block.
        check(policy, &[(0x205, 0x205, 9)], &[(0x200, 9)]);
        check(policy, &[(0x4_0000, 0x7_ffff, 18)], &[(0x4_0000, 18)]);
    }
    check(Policy::Exact, &[(0x1fe, 0x1fe, 0), (0x205, 0x205, 9)], &[(0x1fe, 0), (0x200, 9)]);
    check(
        Policy::Exact,
        &[(0x1fe, 0x1fe, 0), (0x201, 0x205, 9), (0x209, 0x209, 0)],
        &[(0x1fe, 0), (0x200, 9)],
    );
    check(Policy::Exact, &[(0x1fe, 0x201, 9)], &[(0, 10)]);
    // Rounded, the first reaches into the second.
    let runs = [(0x300, 0x300, 9), (0x3f0, 0x410, 0)];
    check(Policy::Exact, &runs, &[(0x200, 9), (0x400, 4), (0x410, 0)]);
    let plan = Planner::default()
        .plan(&cover(&[(0x200, 0x3ff, 9)]), Limits { page_selective: true, max_order: 8 });
    assert!(matches!(plan, Plan::Domain));
}

#[test]
fn what_cannot_be_named_is_the_domain_and_the_cheaper_of_two_wide_commands_is_planned() {
    let small = Limits { page_selective: true, max_order: 4 };
    let none = Limits { page_selective: false, max_order: 18 };
    let single = cover(&[(5, 5, 0)]);
    for policy in Policy::ALL {
        let planner = Planner::new(policy);
        assert!(matches!(planner.plan(&Cover::NOTHING, WIDE), Plan::Nothing));
        assert!(matches!(planner.plan(&single, none), Plan::Domain));
        assert!(matches!(planner.plan(&cover(&[(1 << 52, 1 << 52, 0)]), WIDE), Plan::Domain));
        assert!(matches!(planner.plan(&cover(&[(0, u64::MAX, 0)]), WIDE), Plan::Domain));
        let mut everything = Cover::NOTHING;
        everything.everything(Depth::Tables);
        assert!(matches!(planner.plan(&everything, WIDE), Plan::Domain));
        let top = (1 << 52) - 1;
        assert_eq!(blocks(&planner.plan(&cover(&[(top, top, 0)]), WIDE)), [(top, 0)]);
    }
    assert!(matches!(Planner::new(Policy::Hull).plan(&cover(&[(15, 16, 0)]), small), Plan::Domain));
    let planned = Planner::default().plan(&cover(&[(15, 16, 0)]), small);
    assert_eq!(blocks(&planned), [(15, 0), (16, 0)]);
    // 2^30 pages in blocks of 16: more commands than any plan has.
    let many = cover(&[(0, (1 << 30) - 1, 0)]);
    assert!(
        Policy::ALL.iter().all(|p| matches!(Planner::new(*p).plan(&many, small), Plan::Domain))
    );
    let costs = CostModel { global: Nanoseconds::new(10), ..CostModel::DEFAULT };
    let planner = Planner::default().with_costs(costs);
    assert!(matches!(planner.plan(&single, none), Plan::Global));
    let costs = CostModel { live_entries: 0, domain: Nanoseconds::new(10), ..CostModel::DEFAULT };
    assert!(matches!(Planner::default().with_costs(costs).plan(&single, WIDE), Plan::Domain));
}

/// Pages from 1000 on are not in use; below, each one is.
#[derive(Debug)]
struct LowHalf;

impl LiveEntries for LowHalf {
    fn within(&self, run: Run, changed: u64) -> u64 {
        let low = Run::new(run.first(), run.last().min(Gfn::new(999)));
        low.map_or(0, Run::pages).saturating_sub(changed)
    }

    fn of_unit(&self) -> u64 {
        1000
    }
}

#[test]
fn who_knows_which_entries_are_live_gets_fewer_commands_where_none_is() {
    let planner = Planner::default().with_live(&LowHalf);
    let plan = |runs: &[(u64, u64, u8)]| blocks(&planner.plan(&cover(runs), WIDE));
    assert_eq!(plan(&[(3, 4, 0)]), [(3, 0), (4, 0)]);
    assert_eq!(plan(&[(1027, 1028, 0)]), [(1024, 3)]);
    assert_eq!(plan(&[(1027, 1027, 0), (9000, 9000, 0)]), [(1027, 0), (9000, 0)]);
    assert_eq!(plan(&[(0x1403, 0x1403, 0), (0x17fe, 0x17fe, 0)]), [(0x1400, 10)]);
}

#[test]
fn more_pieces_than_the_planner_keeps_are_planned_from_what_it_can_keep() {
    let runs = |first: u64, length: u64| {
        let runs: Vec<_> =
            (0..32).map(|n| n * 4096 + first).map(|first| (first, first + length - 1, 0)).collect();
        cover(&runs)
    };
    // One short of a block of 128 at either end, 12 pieces each; the same across the middle
    // of a block of 256; and 3 pieces each, dearer together than all that is in use.
    for (cover, refill, live_entries, commands) in [
        (runs(1, 126), 50, 1 << 20, 32),
        (runs(1, 126), 100_000, 1 << 20, 384),
        (runs(65, 126), 50, 1 << 20, 64),
        (runs(65, 126), 1, 1 << 20, 32),
        (runs(128, 112), 50, 300, 1),
    ] {
        let costs = CostModel {
            refill: Nanoseconds::new(refill),
            domain: Nanoseconds::new(1 << 40),
            global: Nanoseconds::new(1 << 40),
            live_entries,
            ..CostModel::DEFAULT
        };
        let planner = Planner::default().with_costs(costs);
        let plan = planner.plan(&cover, WIDE);
        assert_eq!(plan.commands(), commands);
        assert_eq!(plan.submissions(), commands.div_ceil(SUBMISSION));
        for policy in Policy::ALL {
            let other = Planner::new(policy).with_costs(costs).plan(&cover, WIDE);
            assert!(planner.estimate(&cover, &plan) <= planner.estimate(&cover, &other));
        }
    }
}

#[test]
fn of_two_blocks_one_in_the_other_only_the_larger_is_planned_from() {
    let apart = |runs: &[(u64, u64, u8)]| -> Vec<_> {
        let halves = Blocks::fronts(ranges(&cover(runs)), front::two_block, 18);
        disjoint(halves).unwrap().into_iter().map(|b| (b.base(), b.order())).collect()
    };
    assert_eq!(apart(&[(8, 8, 0), (10, 145, 0), (300, 300, 0)]), [(0, 8), (300, 0)]);
    assert_eq!(apart(&[(9, 13, 0), (15, 15, 0)]), [(8, 3)]);
}

#[test]
fn rounding_up_to_a_leaf_has_its_price() {
    let costs =
        CostModel { live_entries: 600, domain: Nanoseconds::new(100), ..CostModel::DEFAULT };
    let planner = Planner::default().with_costs(costs);
    // A page of each of two neighbours: more entries are lost than there are.
    let partial = cover(&[(5, 5, 9), (0x205, 0x205, 9)]);
    assert!(matches!(planner.plan(&partial, WIDE), Plan::Domain));
    assert_eq!(blocks(&planner.plan(&cover(&[(0, 0x3ff, 9)]), WIDE)), [(0, 10)]);
}

#[test]
fn only_policies_without_batching_wait_for_each_block() {
    let cover = cover(&[(0, 1, 0), (8, 8, 0), (100, 100, 0)]);
    let submissions = Policy::ALL.map(|p| Planner::new(p).plan(&cover, WIDE).submissions());
    assert_eq!(submissions, [4, 1, 3, 1, 1, 1]);
    assert_eq!(Plan::Domain.submissions(), 1);
    assert_eq!(Plan::Nothing.submissions(), 0);
}

#[test]
fn two_blocks_are_less_than_twice_a_run_of_any_length_anywhere() {
    for max_order in [4, 9, 18] {
        let limits = Limits { page_selective: true, max_order };
        let mut state = 1_u64;
        for length in (1..600).chain([4096, 5000, 70_000]) {
            for _ in 0..8 {
                state =
                    state.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(0x1405_7b7e_f767_814f);
                let first = state >> 36;
                let cover = cover(&[(first, first + length - 1, 0)]);
                let plan = Planner::new(Policy::TwoBlock).plan(&cover, limits);
                let named: u64 = blocks(&plan).iter().map(|(_, order)| 1 << order).sum();
                assert!(named < 2 * length, "{first:#x} + {length}: {named}");
                let tiles = length >> max_order;
                assert!(plan.commands() as u64 <= 2 + tiles || plan.commands() == 1);
            }
        }
    }
}

#[test]
fn statistics_add_up_what_plans_asked_for() {
    let statistics = Statistics::new();
    let mut sum = Figures::default();
    let mut everything = Cover::NOTHING;
    everything.everything(Depth::Leaves);
    let many: Vec<_> = (0..32).map(|n| (n * 64, n * 64, 0)).collect();
    for (cover, expected) in [
        (Cover::NOTHING, [0; 7]),
        (cover(&[(5, 5, 0)]), [1, 1, 1, 0, 1, 1, 1]),
        (cover(&[(0, 2, 0)]), [1, 3, 1, 0, 1, 3, 4]),
        (cover(&[(0, 0, 0), (512, 1535, 9)]), [1, 3, 3, 0, 1, 1025, 1025]),
        (cover(&many), [1, 32, 32, 0, 1, 32, 32]),
        (everything, [1, 0, 1, 1, 1, 0, 0]),
    ] {
        let figures = Planner::default().plan(&cover, WIDE).figures(&cover);
        let [flushes, leaves, commands, wide_commands, waits, pages_changed, pages_flushed] =
            expected;
        let expected = Figures {
            flushes,
            leaves,
            commands,
            wide_commands,
            waits,
            pages_changed,
            pages_flushed,
        };
        assert_eq!(figures, expected);
        statistics.add(&figures);
        sum = sum.plus(&figures);
    }
    assert_eq!(statistics.read(), sum);
    assert_eq!(sum.avoided(), 39 - 5);
    // One leaf, or none; three twice; 32.
    assert_eq!(statistics.sizes(), [2, 0, 2, 0, 0, 1, 0]);
}
