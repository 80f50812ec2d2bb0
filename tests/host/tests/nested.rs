//! Nested guests: what a changed page costs, and that nothing stale is ever used.
//!
//! Scripts of pseudo-random steps run on the model, once by an honest embedder and once
//! for each bug of a lying one.

use std::{cell::Cell, ops::Range};

use host::nested::{NestedLie, NestedSetup, NestedWorld, Shown, Step, Storage, Walks, precise};
use hwmodel::Policy;
use p2m::nested::{Context, NestedCounts, Scope};
use stage2::{
    Emptied,
    format::{ept::Ept, npt::Npt},
};

const CONTEXT: Context = Context(0x101e);
const OTHER: Context = Context(0x201e);

const HONEST: NestedSetup =
    NestedSetup { shadows: 2, records: 64, policy: Policy::Greedy, lie: None };

fn page(canonical: u64) -> Option<Shown> {
    Some(Shown { canonical, order: 0, writable: true })
}

fn world<F: Walks, R>(setup: NestedSetup, test: impl FnOnce(&NestedWorld<'_, F>) -> R) -> R {
    let mut storage = Storage::new(setup);
    let world = NestedWorld::<F>::new(setup, &mut storage);
    world.populate();
    test(&world)
}

/// The steps of a seed.
fn steps(seed: u64, count: usize) -> impl Iterator<Item = Step> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    std::iter::from_fn(move || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        let [_, a, _, b, _, c, _, d] = state.to_le_bytes();
        Some(Step::new([a, b, c, d]))
    })
    .take(count)
}

/// Runs scripts and returns what `judge` found wrong with the first that failed.
fn run<F: Walks>(
    setup: NestedSetup,
    seeds: Range<u64>,
    judge: impl Fn(&NestedWorld<'_, F>) -> Vec<String>,
) -> Vec<String> {
    for seed in seeds {
        let policy = if seed % 2 == 0 { Policy::Greedy } else { Policy::Random(seed) };
        let wrong = world::<F, _>(NestedSetup { policy, ..setup }, |world| {
            for step in steps(seed, 250) {
                world.run(step);
                let wrong = judge(world);
                if !wrong.is_empty() {
                    return wrong;
                }
            }
            world.finish();
            judge(world)
        });
        if !wrong.is_empty() {
            return wrong;
        }
    }
    Vec::new()
}

#[test]
fn honest_nested_runs_leave_nothing_stale() {
    fn check<F: Walks>() {
        let most = Cell::new([0; 6]);
        for (shadows, records) in [(2, 64), (2, 2), (3, 0), (1, 64)] {
            let setup = NestedSetup { shadows, records, ..HONEST };
            let wrong = run::<F>(setup, 1..13, |world| {
                let NestedCounts { fills, unrecorded, precise, swept, unknown, recycled, .. } =
                    world.counts();
                let now = [fills, unrecorded, precise, swept, unknown, recycled];
                most.set(std::array::from_fn(|at| now[at].max(most.get()[at])));
                world.verdict()
            });
            assert!(wrong.is_empty(), "honest nested run of {setup:?}: {wrong:#?}");
        }
        // The scripts come to everything there is.
        assert!(most.get().iter().all(|count| *count > 2), "{most:?}");
    }
    check::<Ept>();
    check::<Npt>();
}

/// The bug leads to an access that must not happen, not just to a chance of one.
#[track_caller]
fn check_lie<F: Walks>(lie: NestedLie) {
    let setup = NestedSetup { lie: Some(lie), ..HONEST };
    let wrong = run::<F>(setup, 1..60, |world| world.uses());
    assert!(!wrong.is_empty(), "{lie:?} was not noticed");
    println!("nested | {:<20} | {}", format!("{lie:?}"), wrong[0]);
}

#[test]
fn every_bug_of_the_embedder_is_noticed() {
    fn check<F: Walks>() {
        check_lie::<F>(NestedLie::ForgetFlush);
        check_lie::<F>(NestedLie::ForgetShadowRoots);
        check_lie::<F>(NestedLie::LateTicket);
    }
    check::<Ept>();
    check::<Npt>();
}

#[test]
fn a_page_taken_from_the_guest_is_out_of_reach_of_every_nested_guest() {
    fn check<F: Walks>() {
        for records in [64, 1, 0] {
            world::<F, _>(NestedSetup { records, ..HONEST }, |world| {
                for (context, nested) in [(CONTEXT, 7), (CONTEXT, 0x9_0000), (OTHER, 7)] {
                    world.write_table(context, nested, page(3));
                }
                let reached =
                    |cpu, context, nested| world.access(cpu, context, nested, true, || {});
                assert!(reached(0, CONTEXT, 7) && reached(0, CONTEXT, 0x9_0000));
                assert!(reached(1, OTHER, 7));
                world.take(3, 2);
                world.machine.speculate();
                assert!(!reached(0, CONTEXT, 7) && !reached(0, CONTEXT, 0x9_0000));
                assert!(!reached(1, OTHER, 7));
                // The frame may be another's by now; its successor is the guest's again.
                world.put(3, 2);
                assert!(reached(0, CONTEXT, 7) && reached(1, OTHER, 7));
                assert_eq!(world.verdict(), Vec::<String>::new());
            });
        }
    }
    check::<Ept>();
    check::<Npt>();
}

#[test]
fn rights_taken_from_a_page_are_taken_from_every_nested_guest() {
    fn check<F: Walks>() {
        world::<F, _>(HONEST, |world| {
            world.write_table(CONTEXT, 7, page(3));
            assert!(world.access(0, CONTEXT, 7, true, || {}));
            world.set_writable(3, false, 2);
            assert!(!world.access(0, CONTEXT, 7, true, || {}));
            assert!(world.access(0, CONTEXT, 7, false, || {}));
            world.set_writable(3, true, 2);
            assert!(world.access(0, CONTEXT, 7, true, || {}));
            assert_eq!(world.verdict(), Vec::<String>::new());
        });
    }
    check::<Ept>();
    check::<Npt>();
}

#[test]
fn an_emulated_flush_ends_what_the_guest_unmapped_before_it() {
    fn check<F: Walks>() {
        for scope in [Scope::Context(CONTEXT), Scope::AllContexts] {
            world::<F, _>(HONEST, |world| {
                world.write_table(CONTEXT, 7, page(3));
                assert!(world.access(0, CONTEXT, 7, false, || {}));
                world.write_table(CONTEXT, 7, None);
                assert!(world.access(0, CONTEXT, 7, false, || {}), "until the guest flushes");
                world.begin(scope);
                world.step(1, Emptied::Free);
                // Another CPU needs a shadow in the middle of it, and helps.
                world.write_table(CONTEXT, 8, page(4));
                assert!(world.access(1, CONTEXT, 8, false, || {}));
                world.finish();
                assert!(!world.access(0, CONTEXT, 7, false, || {}));
                assert!(world.access(0, CONTEXT, 8, false, || {}));
                assert_eq!(world.verdict(), Vec::<String>::new());
            });
        }
    }
    check::<Ept>();
    check::<Npt>();
}

#[test]
fn a_recycled_shadow_shows_nothing_of_its_former_context() {
    fn check<F: Walks>() {
        world::<F, _>(NestedSetup { shadows: 1, ..HONEST }, |world| {
            world.write_table(CONTEXT, 7, page(3));
            for _ in 0..3 {
                assert!(world.access(0, CONTEXT, 7, true, || {}));
                assert!(!world.access(0, OTHER, 7, true, || {}));
            }
            assert_eq!(world.verdict(), Vec::<String>::new());
        });
    }
    check::<Ept>();
    check::<Npt>();
}

#[test]
fn one_changed_page_costs_the_nested_leaves_that_show_it() {
    for pages in [1, 512, 5000] {
        assert_eq!(precise(pages), (pages, 1));
    }
}
