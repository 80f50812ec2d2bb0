//! A guest's physical map, and the CPU side of flushing it.
//!
//! [`P2m`] says which page is behind which guest frame number, and as what
//! ([`PageKind`]). Its edits put what they take away on the record of a
//! [`flush::Batch`]. [`GuestCpus`] knows which CPUs could still use it, and
//! [`TlbFlush`] makes them forget, once for the whole batch.
//!
//! ```text
//! P2m::clear(gfn, expected, skipped) -> Gone      under the embedder's lock, per page
//! batch.flush(&Hardware { tlb: &TlbFlush { .. }, .. })     without it, once
//! GuestCpus::enter / leave                        around every stay in the guest
//! ```
//!
//! [`hardware`] has the encodings and instructions of both vendors.
#![no_std]
#![expect(unexpected_cfgs, reason = "`--cfg loom` is passed by hand, to the tests alone")]

#[cfg(test)]
extern crate std;

mod cpus;
mod error;
pub mod hardware;
mod kind;
mod marked;
pub mod nested;
mod record;
mod sync;
mod table;
mod teardown;
#[cfg(test)]
mod testing;
mod tlb;

#[cfg(all(test, loom))]
mod interleavings;

pub use cpus::{EnterError, Generation, GuestCpus, Invalidate, TlbCounts};
pub use error::{ClearError, NewError, SetError};
pub use kind::PageKind;
pub use marked::MarkedP2m;
pub use record::Walkers;
pub use table::{Clearing, Displaced, Expected, Mapping, P2m};
pub use teardown::Teardown;
pub use tlb::{AtNextEntry, Cpus, Kicked, LeaveFirst, TlbError, TlbFlush};
