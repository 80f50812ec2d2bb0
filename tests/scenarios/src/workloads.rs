//! The generated workloads W1 to W8, by name.
//!
//! Their steps come from fixed seeds; see [`host::workloads`].

use std::sync::OnceLock;

use host::workloads::{self, Workload};

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
