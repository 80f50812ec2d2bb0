//! Atomics: the real ones, or the model checker's when the tests ask for it.
//!
//! What CPUs write while others look is built from here, so that `--cfg loom` checks the
//! code that ships.

#[cfg(not(all(test, loom)))]
pub(crate) use core::sync::atomic::AtomicU64;
#[cfg(all(test, loom))]
pub(crate) use loom::sync::atomic::AtomicU64;
