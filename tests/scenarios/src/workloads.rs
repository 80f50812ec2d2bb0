//! The generated workloads W1 to W8, by name.
//!
//! Their steps come from fixed seeds; see [`host::workloads`].

use host::workloads::{self, Workload};

/// Whether there is a workload of this name.
#[must_use]
pub fn known(name: &str) -> bool {
    matches!(name, "W1" | "W2" | "W3" | "W4" | "W5" | "W6" | "W7" | "W8")
}

/// The workload of this name.
#[must_use]
pub fn named(name: &str) -> Option<Workload> {
    workloads::all().into_iter().find(|workload| workload.name == name)
}
