//! VT-d DMA remapping: tables of devices, invalidation, faults.
//!
//! [`Dmar`](dmar::Dmar) finds the remapping units, a [`Unit`] drives one of them, and a
//! [`DmaDomain`] is a set of tables with the devices translated by it. What a batch
//! recorded for the IOTLB is flushed by a [`DmaFlush`].
//!
//! Legacy mode only: second-stage tables, no PASIDs, no interrupt remapping. The crate
//! has no heap, no statics and no locks of its own: registers, memory, time and locks
//! come from the embedder through [`Mmio`], [`Platform`], [`Guarded`] and
//! [`TableMemory`](stage2::TableMemory).
//!
//! # Locks
//!
//! Members of a domain > state of a unit. Both are held for bookkeeping and ring writes
//! only; while waiting for hardware no lock of this crate is held. Edits of a domain's
//! tables are serialised by a third lock, the embedder's, that this crate never sees.

#![no_std]
#![forbid(unsafe_code)]

#[cfg(test)]
extern crate std;

pub mod dmar;
pub mod spec;

mod command;
mod context;
mod counters;
mod domain;
mod edit;
mod fault;
mod flush;
mod plan;
mod platform;
mod queue;
mod submit;
mod tags;
mod teardown;
mod unit;

#[cfg(test)]
mod tests;

pub use self::flush::{DmaFlush, DmaFlushError, DmaInFlight};
pub use ::flush::Block;
pub use command::{Command, Drain, SourceId, Tag};
pub use counters::Counters;
pub use domain::{
    AttachError, DetachError, Device, DmaDomain, MAX_DEVICES, MAX_UNITS, Members, MoveError,
};
pub use edit::{Clearing, Expected};
pub use fault::{Fault, FaultSummary, Reason, Request};
pub use platform::{Guarded, Mmio, Platform};
pub use queue::QueueMemory;
pub use submit::CommandError;
pub use teardown::DmaTeardown;
pub use unit::{BringUpError, TooManyGone, Unit, UnitConfig, UnitState};
