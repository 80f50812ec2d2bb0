//! The generated workloads W1 to W8, by name.
//!
//! Their steps come from fixed seeds; see [`host::workloads`].

use std::sync::OnceLock;

use host::workloads::{self, Leaf, Workload};

/// Elements that one call takes at most.
pub(crate) const ELEMENTS: usize = 512;

/// Whether there is a workload of this name.
#[must_use]
pub fn known(name: &str) -> bool {
    matches!(name, "W1" | "W2" | "W3" | "W4" | "W5" | "W6" | "W7" | "W8")
}

/// The workload of this name.
#[must_use]
pub fn named(name: &str) -> Option<&'static Workload> {
    // To generate them takes longer than to play one.
    static ALL: OnceLock<Vec<Workload>> = OnceLock::new();
    ALL.get_or_init(workloads::all).iter().find(|workload| workload.name == name)
}

/// Cuts leaves into runs of one size and one distance, none longer than a call takes.
pub(crate) fn even_runs(leaves: &[Leaf]) -> Vec<&[Leaf]> {
    let mut runs = Vec::new();
    let mut rest = leaves;
    while let Some(first) = rest.first() {
        let distance = |pair: &[Leaf]| pair[1].first.get().wrapping_sub(pair[0].first.get());
        let step = rest.get(..2).map(distance);
        let more = rest
            .windows(2)
            .take(ELEMENTS - 1)
            .take_while(|pair| pair[1].order == first.order && Some(distance(pair)) == step);
        let (run, others) = rest.split_at(1 + more.count());
        runs.push(run);
        rest = others;
    }
    runs
}
