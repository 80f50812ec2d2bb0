//! What the machine did so far, in counts that cost about the same everywhere.

use iommu_vtd::Counters;

use super::Hypervisor;
use crate::{processors, svm};

/// Counts since the start, or between two moments.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Activity {
    /// Interrupts sent to end stays in guests, or sleeps.
    pub(crate) kicks: u64,
    /// Stays in guests that ended, for whatever reason.
    pub(crate) exits: u64,
    /// IOTLB commands to all units.
    pub(crate) iotlb_commands: u64,
    /// Waits for all units.
    pub(crate) waits: u64,
    /// Submissions to the queues of all units.
    pub(crate) tail_writes: u64,
}

impl Activity {
    /// What was done from `earlier` to this.
    pub(crate) const fn since(self, earlier: Self) -> Self {
        Self {
            kicks: self.kicks.saturating_sub(earlier.kicks),
            exits: self.exits.saturating_sub(earlier.exits),
            iotlb_commands: self.iotlb_commands.saturating_sub(earlier.iotlb_commands),
            waits: self.waits.saturating_sub(earlier.waits),
            tail_writes: self.tail_writes.saturating_sub(earlier.tail_writes),
        }
    }
}

impl Hypervisor {
    /// What was done so far.
    pub(crate) fn activity(&self) -> Activity {
        let mut sum =
            Activity { kicks: processors::kicks_sent(), exits: svm::exits(), ..Default::default() };
        for unit in self.iommu.units() {
            let Counters { iotlb_commands, waits, tail_writes, .. } = unit.counters();
            sum.iotlb_commands = sum.iotlb_commands.saturating_add(iotlb_commands);
            sum.waits = sum.waits.saturating_add(waits);
            sum.tail_writes = sum.tail_writes.saturating_add(tail_writes);
        }
        sum
    }
}
