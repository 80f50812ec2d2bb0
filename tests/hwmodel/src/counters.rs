//! How often the hardware was asked to do what
//!
//! [`Counters`] is a snapshot; take two and subtract to see one operation's share.

/// Counts of the whole machine since it was made.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    /// Operations that [`crate::Machine::fail_operation`] numbers.
    pub operations: u64,
    /// Per processor, in order.
    pub cpus: Vec<CpuCounters>,
    /// Per VT-d unit, in order.
    pub units: Vec<UnitCounters>,
    /// Host writes to RAM that changed a word.
    pub host_changes: u64,
    /// Cache lines written back by the host.
    pub write_backs: u64,
}

/// Counts of one processor.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CpuCounters {
    /// Invalidations of one tag.
    pub invalidations: u64,
    /// Invalidations of all tags.
    pub full_invalidations: u64,
    /// Entries those dropped.
    pub dropped: u64,
    /// Inter-processor interrupts sent to it.
    pub ipis: u64,
    /// Inter-processor interrupts it took.
    pub acknowledged: u64,
    /// Accesses that hit the leaf cache.
    pub hits: u64,
    /// Leaf translations cached, prefetches included.
    pub fills: u64,
    /// Of those, by a walk for an address that had been cached before and was dropped by an invalidation.
    pub refills: u64,
}

/// Counts of one VT-d unit.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct UnitCounters {
    /// Context-cache invalidation descriptors carried out.
    pub context_commands: u64,
    /// Global IOTLB invalidation descriptors carried out.
    pub iotlb_global: u64,
    /// Domain-selective IOTLB invalidation descriptors carried out.
    pub iotlb_domain: u64,
    /// Page-selective IOTLB invalidation descriptors carried out.
    pub iotlb_page: u64,
    /// Pages named by those, at 2^AM each.
    pub pages_flushed: u64,
    /// Device-TLB invalidation descriptors carried out.
    pub device_tlb_commands: u64,
    /// Interrupt-entry-cache invalidation descriptors carried out.
    pub interrupt_commands: u64,
    /// Wait descriptors carried out.
    pub waits: u64,
    /// Wait descriptors dropped by a time-out error.
    pub waits_aborted: u64,
    /// Writes to the queue's tail register.
    pub tail_writes: u64,
    /// IOTLB invalidations asked for through the registers.
    pub register_iotlb: u64,
    /// Context-cache invalidations asked for through the registers.
    pub register_context: u64,
    /// Write-buffer flushes asked for.
    pub write_buffer_flushes: u64,
    /// Register reads.
    pub register_reads: u64,
    /// Register writes.
    pub register_writes: u64,
    /// Requests that hit the IOTLB.
    pub hits: u64,
    /// Leaf translations cached, not-present ones and prefetches included.
    pub fills: u64,
    /// Of those, for an address that had been cached before and was dropped by an invalidation.
    pub refills: u64,
    /// IOTLB entries dropped by invalidations.
    pub dropped: u64,
    /// Context entries cached.
    pub context_fills: u64,
    /// DMA drained by an invalidation.
    pub drained: u64,
    /// Faults seen, recorded or not.
    pub faults: u64,
    /// Faults written to a fault record.
    pub faults_recorded: u64,
    /// Fault-event interrupts raised (unmasked, none pending).
    pub fault_interrupts: u64,
    /// Completion interrupts raised by waits.
    pub completion_interrupts: u64,
}

impl UnitCounters {
    /// All IOTLB invalidation descriptors.
    #[must_use]
    pub const fn iotlb_commands(&self) -> u64 {
        self.iotlb_global.saturating_add(self.iotlb_domain).saturating_add(self.iotlb_page)
    }
}
