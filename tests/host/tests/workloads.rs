//! The policies on the eight workloads: what has to hold of their rows.
//!
//! The rows are those that `cargo xtask bench --policies` prints.

use std::{collections::BTreeSet, sync::LazyLock};

use flush::plan::Policy;
use host::workloads::{Row, Step, all, compare};

/// The rows of each workload.
fn rows() -> &'static [Vec<Row>] {
    static ROWS: LazyLock<Vec<Vec<Row>>> = LazyLock::new(|| all().iter().map(compare).collect());
    &ROWS
}

fn row(rows: &[Row], policy: Policy) -> Row {
    *rows.iter().find(|row| row.policy == policy && row.informed).expect("each policy has a row")
}

#[test]
fn there_are_eight_workloads_of_full_and_partial_batches_and_they_never_change() {
    let (first, second) = (all(), all());
    let names: Vec<_> = first.iter().map(|workload| workload.name).collect();
    assert_eq!(names, ["W1", "W2", "W3", "W4", "W5", "W6", "W7", "W8"]);
    for (one, other) in first.iter().zip(&second) {
        assert_eq!(one.steps, other.steps, "{}", one.name);
        // Nothing is unmapped that is not mapped.
        let mut mapped = BTreeSet::new();
        for step in &one.steps {
            match step {
                Step::Use(leaves) => {
                    mapped.extend(
                        leaves
                            .iter()
                            .flat_map(|leaf| leaf.run().first().get()..=leaf.run().last().get()),
                    );
                }
                Step::Unmap(leaves) => {
                    for leaf in leaves {
                        let first = leaf.first.get();
                        assert!(mapped.contains(&first), "{}: {first:#x}", one.name);
                        if leaf.order == 0 {
                            mapped.remove(&first);
                        }
                    }
                }
            }
        }
    }
}

#[test]
fn a_planner_that_knows_the_entries_in_use_is_never_dearer_than_another_policy() {
    for rows in rows() {
        let planned = row(rows, Policy::Planned);
        for other in rows {
            assert!(planned.cost() <= other.cost(), "{planned:?} is dearer than {other:?}");
        }
    }
}

#[test]
fn a_planner_that_only_knows_what_went_last_is_never_dearer_than_the_other_policies() {
    for rows in rows() {
        let planned = rows.iter().find(|row| !row.informed).expect("a row for it");
        for policy in Policy::ALL.into_iter().filter(|policy| *policy != Policy::Planned) {
            let other = row(rows, policy);
            assert!(planned.cost() <= other.cost(), "{planned:?} is dearer than {other:?}");
        }
    }
}

#[test]
fn exact_names_the_pages_changed_and_two_block_less_than_twice_as_many() {
    for rows in rows() {
        for exact in [row(rows, Policy::Exact), row(rows, Policy::PerPage)] {
            assert_eq!((exact.pages_flushed, exact.refills), (exact.pages_changed, 0));
        }
        let two_block = row(rows, Policy::TwoBlock);
        assert!(two_block.pages_flushed < 2 * two_block.pages_changed, "{two_block:?}");
        for row in rows {
            assert!(row.pages_flushed >= row.pages_changed, "{row:?}");
        }
    }
}

#[test]
fn policies_that_batch_wait_once_for_each_batch_and_the_others_for_each_command() {
    for row in rows().iter().flatten() {
        let each = matches!(row.policy, Policy::PerPage | Policy::Gather);
        let waits = if each { row.commands } else { row.batches };
        assert_eq!((row.waits, row.tail_writes), (waits, waits), "{row:?}");
    }
}
