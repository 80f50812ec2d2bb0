//! Keys of all other steps.

use serde::Deserialize;

use super::helpers::some_pages;
use crate::values::{Count, Names};

/// `faults`: each replaces what an earlier step said.
#[derive(Clone, Copy, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Faults {
    /// The n-th element of each call's array cannot be read, from 0.
    pub read: Option<u64>,
    /// The n-th copy to the guest fails.
    pub write: Option<u64>,
    /// Preemption is wanted whenever the library asks.
    pub preempt: bool,
    /// Policy forbids all unmaps.
    pub deny_unmap: bool,
    /// CPUs that are kicked stay outside.
    pub stay_out: bool,
    /// CPUs take no interrupts.
    pub deaf: bool,
}

/// `retry`.
#[derive(Clone, Copy, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Retry {
    /// How many batches are still held afterwards.
    pub left: usize,
}

/// `destroy`.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Destroy {
    /// Which domain.
    pub domain: String,
    /// Entries read before taking its tables down pauses, and what was taken is flushed; 0
    /// is no pause.
    #[serde(default)]
    pub budget: u64,
    /// In how many steps it is done, each with its flush.
    pub steps: Option<Count>,
    /// Requests to flush CPUs, while its handles are released.
    pub tlb: Option<Count>,
    /// Requests to flush devices.
    pub iotlb: Option<Count>,
}

/// `mark`.
#[derive(Clone, Copy, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Mark {}

/// `check`.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Check {
    /// Mappings that are there.
    pub mapped: Option<Names>,
    /// Mappings that are gone from the tables while their pages are still counted.
    pub held: Option<Names>,
    /// Mappings that are gone, with nothing counted for them.
    pub released: Option<Names>,
    /// Pages that are free.
    pub free: Option<Names>,
    /// Pages that are not free.
    pub kept: Option<Names>,
    /// Grants that are in use for writing.
    pub writing: Option<Names>,
    /// Grants that are in use, for reading only.
    pub reading: Option<Names>,
    /// Grants that are not in use.
    pub idle: Option<Names>,
    /// References that each of `counted` has.
    pub references: Option<u32>,
    /// Pages for `references`.
    pub counted: Option<Names>,
    /// Commands that units carried out since the mark, waits left out.
    pub commands: Option<Vec<String>>,
    /// IOTLB commands since the mark.
    pub iotlb_commands: Option<Count>,
    /// Pages that they named.
    pub pages_flushed: Option<Count>,
    /// Interrupts sent to CPUs since the mark.
    pub kicks: Option<Count>,
    /// Table pages in use.
    pub tables: Option<Count>,
    /// Batches whose flush failed.
    pub batches_held: Option<usize>,
    /// Grants of a domain's table that are pinned: `front`'s.
    pub pinned: Option<usize>,
    /// Handles that `back`'s table has room for.
    pub handles: Option<Count>,
}

/// `workload`.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Workload {
    /// W1 to W8.
    pub name: String,
    /// How many of its steps are run; all if absent.
    pub steps: Option<usize>,
    /// How many pages of each step are mapped.
    #[serde(default = "some_pages")]
    pub pages: usize,
}
