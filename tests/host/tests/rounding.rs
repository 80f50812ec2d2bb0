//! From a run of frames to the smallest aligned block in a command.
//!
//! Pages are granted, mapped, given back in one call; what the unit was then told is
//! compared with what trying every order finds.

use flush::{
    Gfn,
    plan::{Planner, Policy},
};
use gnttab::Outcome;
use host::{Setup, World};
use hwmodel::{Command, Granularity, UnitConfig, UnitId};
use stage2::format::vtd::VtdLevels;

/// First frame and number of frames.
type Frames = (u64, u64);

/// The smallest aligned block over `first..=last`, by trying.
fn smallest_block((first, count): Frames) -> (u64, u8) {
    let last = first + count - 1;
    let fits = |order: &u8| first >> order == last >> order;
    let order = (0..64).find(fits).expect("a block of everything fits");
    (first >> order << order, order)
}

#[track_caller]
fn check_on(setup: Setup, runs: &[Frames], expected: Option<&[(u64, u8)]>) {
    let world = World::new(setup);
    world.planner.set(Planner::new(Policy::Gather));
    let frames = |(first, count): &Frames| (*first..).take(*count as usize).map(Gfn::new);
    let gfns: Vec<Gfn> = runs.iter().flat_map(frames).collect();
    assert!(gfns.len() <= 32, "one batch");
    let shared = world.share(&gfns);
    let mappings: Vec<_> =
        shared.iter().zip(&gfns).map(|((_, handle), gfn)| (*handle, *gfn)).collect();
    let before = world.machine.commands(UnitId(0)).len();
    assert_eq!(world.unmap(&mappings).outcome, Outcome::Done);

    let told: Vec<_> = world.machine.commands(UnitId(0)).split_off(before);
    let iotlb = |command| {
        let Command::Iotlb { granularity, page, address_mask, .. } = command else {
            return None;
        };
        Some((granularity, page, address_mask))
    };
    let told: Vec<_> = told.into_iter().filter_map(iotlb).collect();
    let wanted: Vec<_> = match expected {
        Some(blocks) => {
            blocks.iter().map(|(page, mask)| (Granularity::Selective, *page, *mask)).collect()
        }
        None => vec![(Granularity::Domain, 0, 0)],
    };
    assert_eq!(told, wanted, "for {runs:x?}");

    world.take_back_all(gfns.len() as u32);
    assert!(!gfns.iter().any(|gfn| world.device_reaches(*gfn)));
    assert_eq!(world.machine.witnesses(), []);
    assert_eq!(world.audit(), []);
}

/// `blocks`: whether the unit can name them all.
#[track_caller]
fn check(runs: &[Frames], max_address_mask: u8, blocks: bool) {
    let unit = UnitConfig { max_address_mask, ..UnitConfig::default() };
    let smallest: Vec<_> = runs.iter().map(|run| smallest_block(*run)).collect();
    check_on(Setup { unit, ..Setup::default() }, runs, blocks.then_some(&smallest));
}

/// Above the frames that the world itself uses.
const BASE: u64 = 0x100_0000;

#[test]
fn a_run_across_a_boundary_gets_the_smallest_block_around_it() {
    check_on(Setup::default(), &[(BASE + 3, 2)], Some(&[(BASE, 3)]));
    check_on(Setup::default(), &[(BASE + 0x7ff0, 32)], Some(&[(BASE, 16)]));
    for lg2 in 1..=17 {
        let boundary = BASE + (1 << lg2);
        for (before, count) in [(1, 2), (1, 32), (2, 3), (31, 32)] {
            if before < 1 << lg2 {
                check(&[(boundary - before, count)], 18, true);
            }
        }
    }
}

#[test]
fn an_aligned_run_is_named_exactly() {
    for (order, count) in (0..=5).zip([1, 2, 4, 8, 16, 32]) {
        let first = BASE + 3 * count;
        check_on(Setup::default(), &[(first, count)], Some(&[(first, order)]));
    }
}

#[test]
fn a_block_beyond_the_units_mask_becomes_the_domain() {
    for mask in [0, 9, 18] {
        let boundary = BASE + (1 << mask);
        // Around the boundary at 2^mask the block has one order more.
        check(&[(boundary - 1, 2)], mask, false);
        check(&[(BASE, 1)], mask, true);
        check(&[(BASE + 2, 2)], mask, mask > 0);
        // One run that cannot be named takes all others with it.
        check(&[(BASE + 8, 1), (boundary - 1, 2)], mask, false);
    }
    check(&[(BASE + (1 << 19) - 1, 2)], 20, true);
}

#[test]
fn each_of_several_runs_gets_its_own_block() {
    check(&[(BASE + 3, 2), (BASE + 0x1ff, 2), (BASE + 0x1000, 8)], 18, true);
    let every_other: Vec<_> = (0..32).map(|place| (BASE + 2 * place, 1)).collect();
    check(&every_other, 18, true);
}

#[test]
fn the_top_of_the_space_is_named_without_wrapping() {
    let top = 1 << 36;
    for count in [1, 2, 3, 32] {
        check(&[(top - count, count)], 18, true);
    }
    // The middle of the space: the block is all of it.
    check(&[(top / 2 - 1, 2)], 18, false);
    check_on(
        Setup {
            unit: UnitConfig { max_address_mask: 40, ..UnitConfig::default() },
            ..Setup::default()
        },
        &[(top / 2 - 1, 2)],
        Some(&[(0, 36)]),
    );
}

#[test]
fn the_top_of_three_levels_is_named_without_wrapping() {
    let unit = UnitConfig { levels_4: false, address_bits: 39, ..UnitConfig::default() };
    let setup = Setup { unit, levels: VtdLevels::Three, ..Setup::default() };
    let top: u64 = 1 << 27;
    check_on(setup, &[(top - 32, 32)], Some(&[(top - 32, 5)]));
    check_on(setup, &[(top - 3, 3)], Some(&[(top - 4, 2)]));
}
