//! Atomics: the real ones, or the model checker's when the tests ask for it.
//!
//! Words that a granter writes as well are of these types, so that `--cfg loom` checks
//! the code that ships. Nothing else here is atomic: tables, active entries, handles and
//! their free lists are behind locks of the embedder, and taken by `&mut`.

#[cfg(not(all(test, loom)))]
pub(crate) use core::sync::atomic::{AtomicU16, AtomicU64, fence};
#[cfg(all(test, loom))]
pub(crate) use loom::sync::atomic::{AtomicU16, AtomicU64, fence};
