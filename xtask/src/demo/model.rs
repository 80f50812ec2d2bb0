//! The demo's rows from the software model
//!
//! The one place where this program calls the crates embedded on the model.

use host::demo;

use super::row::{Hardware, Policy, Row};

/// Unmaps `grants` grants under `policy` on the software model.
pub(super) fn run(policy: Policy, grants: u32) -> Row {
    let demo::Row {
        tlb_flushes,
        iotlb_flushes,
        iotlb_commands,
        waits,
        pages_changed,
        pages_flushed,
        stale_accesses,
        released_early,
    } = demo::run(
        match policy {
            Policy::PerPage => demo::Policy::PerPage,
            Policy::Batched => demo::Policy::Batched,
            Policy::NoFlush => demo::Policy::NoFlush,
        },
        grants,
    );
    Row {
        hardware: Hardware::Model,
        policy,
        grants: grants.into(),
        tlb_flushes,
        iotlb_flushes,
        iotlb_commands,
        waits,
        pages_changed,
        pages_flushed,
        stale_accesses,
        released_early,
    }
}
