//! What the search finds, as a scenario file: it fails as the input does.

use std::{path::Path, time::Duration};

use fuzz::{Limit, Plant, Search, Target};
use rand::{RngCore, SeedableRng, rngs::StdRng};
use scenarios::{Manner, parse, plants};

/// Runs a scenario; what it breaks, with its line.
fn run(text: &str, plant: Option<&'static Plant>, seed: u64) -> Option<String> {
    let script = parse::parse(Path::new("found.toml"), text)
        .unwrap_or_else(|problem| panic!("{problem}\n{text}"));
    let broken = scenarios::run(&script, Manner { seed, plant, ..Manner::default() }).broken;
    broken.map(|broken| format!("line {}: {}", broken.line, broken.text))
}

/// Searches with a bug planted. Most of what is found fails as a scenario with it; all that
/// does passes without.
///
/// Not all does: hardware at random forgets other things where other steps come before.
/// Nothing is made smaller, for how far that gets depends on the time it has.
#[track_caller]
fn check(target: &str, plant: &str) {
    const SEARCHES: u64 = 5;
    let target = Target::named(target).expect("a target of that name");
    let plant = plants::named(plant);
    let mut failing = 0;
    for seed in 0..SEARCHES {
        let limit = Limit::Executions(500);
        let searched = target.search(Search { seed, limit, shrinking: Duration::ZERO, plant });
        let crash = searched.crash.expect("the bug is found");
        let scenario = target.scenario(&crash.input, plant).expect("it is a story");
        let text = &scenario.text;
        let Some(seed) = scenario.seed else { continue };
        failing += 1;
        assert!(run(text, plant, seed).is_some(), "{text}");
        assert_eq!(run(text, None, seed), None, "without the bug\n{text}");
    }
    assert!(failing * 2 > SEARCHES, "{failing} of {SEARCHES} fail as scenarios");
}

#[test]
fn an_operation_that_breaks_a_promise_does_so_as_a_scenario() {
    check("operations", "skip-iotlb");
    check("operations", "cpu-keep-walks");
}

#[test]
fn a_hypercall_that_breaks_a_promise_does_so_as_a_scenario() {
    check("hypercall", "skip-tlb");
    check("hypercall", "wrong-domain");
}

#[test]
fn a_granter_that_breaks_a_promise_does_so_as_a_scenario() {
    check("granter", "no-wait-iotlb");
    check("granter", "smaller-mask");
}

/// Inputs that break no promise break none as scenarios: what those expect is so.
#[track_caller]
fn check_good(target: &str, inputs: u64) {
    let target = Target::named(target).expect("a target of that name");
    for seed in 0..inputs {
        let mut input = vec![0; usize::try_from(seed).expect("few") * 7 % target.longest + 20];
        StdRng::seed_from_u64(seed).fill_bytes(&mut input);
        let scenario = target.scenario(&input, None).expect("it is a story");
        let broken = run(&scenario.text, None, 0);
        assert_eq!(broken, None, "{}\n{}", target.tell(&input), scenario.text);
    }
}

#[test]
fn what_scenarios_of_stories_expect_is_so() {
    check_good("operations", 15);
    check_good("hypercall", 15);
    check_good("granter", 10);
}
