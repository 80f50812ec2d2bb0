//! Whatever fails in a scenario, nothing stale is used and no page is lost.

use std::path::Path;

use scenarios::{parse, sweep::sweep};

/// Faults of each kind in each layout; `cargo xtask replay --sweep` runs all there are.
const MOST: u64 = 4;

#[test]
fn no_fault_in_a_scenario_does_harm() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("corpus");
    let (mut runs, mut harm) = (0, Vec::new());
    for file in parse::collect(&[folder]).expect("the corpus is there") {
        let script = parse::load(&file).unwrap_or_else(|problem| panic!("{problem}"));
        if script.steps.iter().any(|step| step.action.name() == "workload") {
            continue;
        }
        let swept = sweep(&script, MOST);
        runs += swept.runs;
        harm.extend(swept.harm.into_iter().map(|harm| format!("{}: {harm:?}", file.display())));
    }
    println!("sweep | {runs} faults");
    assert!(harm.is_empty(), "{harm:#?}");
}
