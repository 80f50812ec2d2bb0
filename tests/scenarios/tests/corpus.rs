//! The corpus holds on the model, and breaks where a bug is planted.

use std::path::{Path, PathBuf};

use scenarios::{
    Manner, Open, Verdict,
    parse::{self, Script},
    plants, run, table,
};

fn corpus() -> Vec<Script> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("corpus");
    let files = parse::collect(&[folder]).expect("the corpus is there");
    let load = |file: PathBuf| parse::load(&file).unwrap_or_else(|problem| panic!("{problem}"));
    files.into_iter().map(load).collect()
}

/// Whether a script takes moments, not seconds: the generated workloads do not.
fn is_short(script: &Script) -> bool {
    !script.steps.iter().any(|step| step.action.name() == "workload")
}

#[track_caller]
fn holds(script: &Script, manner: Manner) -> Verdict {
    let verdict = run(script, manner);
    if let Some(broken) = verdict.broken {
        panic!("{}: {broken:#?}", script.file.display());
    }
    verdict
}

/// Also that each bound is reached: one that is not would let needless flushes pass.
#[test]
fn the_corpus_holds_on_the_model_within_tight_bounds() {
    let mut interleavings = 0;
    let corpus = corpus();
    for script in &corpus {
        let verdict = holds(script, Manner::default());
        interleavings += verdict.interleavings;
        let bound = *script.scenario.bound.get_ref();
        assert_eq!(verdict.flushes, (bound.tlb, bound.iotlb), "{}", script.file.display());
    }
    println!("scenarios | {} files, {interleavings} interleavings", corpus.len());
}

/// What is asked for is the same whatever CPUs walk; what they forget is not.
#[test]
fn the_corpus_holds_on_processors_with_asids_too() {
    for script in corpus() {
        let manner = Manner { open: Open::Npt, once: true, ..Manner::default() };
        let verdict = holds(&script, manner);
        let bound = *script.scenario.bound.get_ref();
        if script.actors.is_empty() {
            assert_eq!(verdict.flushes, (bound.tlb, bound.iotlb), "{}", script.file.display());
        }
    }
}

#[test]
fn another_seed_and_slow_hardware_break_nothing() {
    let plant = Some(&plants::SLOW);
    for script in corpus().iter().filter(|script| is_short(script)) {
        holds(script, Manner { seed: 77, once: true, plant, ..Manner::default() });
    }
}

#[test]
fn every_scenario_breaks_under_a_planted_bug() {
    for script in corpus() {
        let name = script.file.display();
        assert!(table::first(&script).is_some(), "no planted bug breaks {name}");
    }
}

#[test]
fn every_planted_bug_breaks_a_scenario() {
    let corpus = corpus();
    for plant in plants::PLANTS {
        let manner = Manner { plant: Some(plant), once: !plant.turns, ..Manner::default() };
        let may_show =
            |script: &&Script| is_short(script) && !(plant.turns && script.actors.is_empty());
        let short = || corpus.iter().filter(may_show);
        let found = short().find(|script| run(script, manner).broken.is_some());
        let found = found.unwrap_or_else(|| panic!("nothing breaks under {}", plant.name));
        println!("planted | {:<22} | {}", plant.name, found.file.display());
    }
}

/// The steps that are shown for what breaks are those that are needed for it.
#[test]
fn what_breaks_is_shown_with_no_turn_too_many() {
    let text = "title = 't'
        bound = { tlb = 1, iotlb = 3 }
        interleave = { limit = 0, random = 100 }
        [[step]]
        grant = { pages = 'a' }
        [[step]]
        actor = 'one'
        mark = {}
        [[step]]
        actor = 'one'
        map = { pages = 'a', at = 1048576 }
        [[step]]
        actor = 'two'
        mark = {}
        [[step]]
        actor = 'two'
        check = { idle = 'a' }
        ";
    let script = parse::parse(Path::new("some.toml"), text).expect("it makes sense");
    let broken = run(&script, Manner::default()).broken.expect("the grant may be in use");
    assert_eq!(broken.text, "`a` is not idle");
    let order =
        ["one: line 6 (mark)", "one: line 9 (map)", "two: line 12 (mark)", "two: line 15 (check)"];
    assert_eq!(broken.order, order);
}

/// The reports of which a case can be written for this project.
const REPORTS: std::ops::RangeInclusive<u32> = 1..=23;

#[test]
fn each_report_that_concerns_us_has_a_scenario() {
    let corpus = corpus();
    for number in REPORTS {
        let bug = format!("B{number:02}");
        let about = |script: &&Script| script.scenario.bug.as_deref() == Some(bug.as_str());
        assert!(corpus.iter().any(|script| about(&script)), "{bug} has no scenario");
    }
}
