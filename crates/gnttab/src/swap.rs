//! Two entries of the caller's table that change places.
//!
//! [`GrantTable::swap`] works on entries that nobody uses: what another domain holds
//! through a reference never changes under its hands.

use core::sync::atomic::Ordering;

use crate::{
    abi::{Status, SwapGrantRef},
    domain::Domain,
    sync::{AtomicU16, AtomicU64},
    table::{GrantStorage, GrantTable, Version},
};

/// Why two entries kept their places.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SwapError {
    /// The table has no such reference.
    OutOfRange,
    /// Somebody holds a pin on one of them.
    InUse,
}

/// Swaps two entries of the caller, as one element asks.
pub(crate) fn swap<D: Domain>(domain: &D, request: &SwapGrantRef) -> Status {
    let SwapGrantRef { first, second, status: _, padding: _ } = *request;
    let clamp = |index, length| domain.clamp(index, length);
    let swapped = domain.with_granter(domain.id(), |table| table.swap(first, second, clamp));
    match swapped {
        Some(Ok(())) => Status::Okay,
        Some(Err(error)) => error.into(),
        None => Status::BadDomain,
    }
}

impl<S: GrantStorage> GrantTable<S> {
    /// Swaps two shared entries, status words included.
    fn swap(
        &mut self,
        first: u32,
        second: u32,
        clamp: impl Fn(usize, usize) -> usize,
    ) -> Result<(), SwapError> {
        let first = self.index(first, &clamp).ok_or(SwapError::OutOfRange)?;
        let second = self.index(second, &clamp).ok_or(SwapError::OutOfRange)?;
        if first == second {
            return Ok(());
        }
        for index in [first, second] {
            let active = self.active(index).ok_or(SwapError::OutOfRange)?;
            if !active.pins.is_empty() {
                return Err(SwapError::InUse);
            }
        }
        let words = |index: usize| {
            let per_page = self.version.per_page();
            let words = self.storage.shared(index / per_page)?;
            let width = words.len() / per_page;
            words.chunks_exact(width).nth(index % per_page)
        };
        let one = words(first).ok_or(SwapError::OutOfRange)?;
        let other = words(second).ok_or(SwapError::OutOfRange)?;
        if self.version == Version::V2 {
            let one = self.status_word(first).ok_or(SwapError::OutOfRange)?;
            let other = self.status_word(second).ok_or(SwapError::OutOfRange)?;
            swap_status(one, other);
        }
        for (one, other) in one.iter().zip(other) {
            swap_word(one, other);
        }
        Ok(())
    }
}

// The table's lock is held, so no access begins meanwhile. A granter that writes to an
// entry while it has it swapped gets either order.
pub(crate) fn swap_word(one: &AtomicU64, other: &AtomicU64) {
    let was = other.swap(one.load(Ordering::Acquire), Ordering::SeqCst);
    one.store(was, Ordering::Release);
}

fn swap_status(one: &AtomicU16, other: &AtomicU16) {
    let was = other.swap(one.load(Ordering::Acquire), Ordering::SeqCst);
    one.store(was, Ordering::Release);
}
