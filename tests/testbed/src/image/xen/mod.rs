//! Domains that are guests of Xen's interface, started by the PVH protocol.
//!
//! A [`Domain`] is what the hypervisor keeps of one beside its tables and its grants.
//! [`House`] has all of them, and runs their virtual processors: each exit is answered
//! here, most of them by [`testbed::xen`]. What a guest does with its memory, its
//! registers and its calls can end that guest, and nothing else.

mod assigned;
mod call;
mod domain;
mod exits;
mod house;
mod ledger;
mod linear;
mod start;

pub(crate) use assigned::Assigned;
pub(crate) use domain::Domain;
pub(crate) use house::House;
pub(crate) use start::{Plan, start};
