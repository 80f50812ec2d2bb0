//! The end of a domain that has grants mapped: every handle is released.
//!
//! [`release_all`] runs when none of the domain's vCPUs can run again and its devices
//! are detached. It still flushes everything once for each chunk, before any page goes.

use crate::{
    domain::{BATCH, Crash, Domain},
    pin::Pin,
    release::{PinBatch, settle},
    unmap::live,
};

/// Where a teardown has got to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use = "handles may be left"]
pub enum Teardown {
    /// No handle is left.
    Done,
    /// Preempted: call again with this handle.
    Continue(u32),
    /// A flush failed, and its pages went to the embedder: call again with this handle.
    FlushFailed(u32),
}

/// Handles looked at before preemption is asked for.
const STRIDE: usize = 1024;

/// Releases what the dying `domain` has mapped, from handle `from` on.
///
/// Entries of its p2m are not touched: its tables are destroyed as a whole. A handle
/// whose granter the embedder does not know is reported as [`Crash::UnknownGranter`] and
/// left, with its page counted for ever.
pub fn release_all<D: Domain>(domain: &D, from: u32) -> Teardown {
    let mut batch = PinBatch::new(domain.id());
    let mut handle = from;
    loop {
        let mut looked = 0;
        while batch.left() > 0 && looked < STRIDE && exists(domain, handle) {
            release_one(domain, &mut batch, handle);
            looked += 1;
            handle = handle.saturating_add(1);
        }
        if settle(domain, &mut batch).is_err() {
            return Teardown::FlushFailed(handle);
        }
        if !exists(domain, handle) {
            return Teardown::Done;
        }
        if domain.preempt() {
            return Teardown::Continue(handle);
        }
    }
}

fn exists<D: Domain>(domain: &D, handle: u32) -> bool {
    let handles = domain.with_maptrack(|maptrack| maptrack.handles());
    usize::try_from(handle).is_ok_and(|handle| handle < handles)
}

fn release_one<D: Domain>(domain: &D, batch: &mut PinBatch, handle: u32) {
    let Some(mapped) = live(domain, handle) else { return };
    let holding = mapped.holding();
    let pin = domain.with_granter(holding.granter(), |table| {
        let mfn = table.pinned_page(holding.reference(), domain.id(), |index, _| index)?;
        domain.with_maptrack(|maptrack| maptrack.free(handle));
        Some(Pin::stored(mfn, holding))
    });
    match pin {
        Some(Some(pin)) => batch.edit_many(|skipped, room| {
            let cleared = domain.forget(skipped);
            // The caller looked for room; without any the page would be lost, not released.
            drop(room.hold(pin, cleared));
        }),
        Some(None) => {}
        None => domain.crash(Crash::UnknownGranter { granter: holding.granter() }),
    }
}

const _: () = assert!(BATCH <= STRIDE);
