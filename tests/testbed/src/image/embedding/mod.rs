//! The crates embedded: what the author of a hypervisor writes to use them.
//!
//! [`Caller`] joins grant tables, p2m and IOMMU for one hypercall. Everything it needs
//! is here as well: memory for tables, storage for grants and handles, the books of
//! pages, and [`Hypervisor`], which has the domains and the remapping units.

mod activity;
mod caller;
mod clear;
mod ending;
mod flushers;
mod guest;
mod guest_memory;
mod hypervisor;
mod iommu;
mod life;
mod lock;
mod memory;
mod page_info;
mod pages;
mod ranges;
mod storage;

pub(crate) use activity::Activity;
pub(crate) use caller::{Caller, Watcher};
pub(crate) use flushers::GuestSeat;
pub(crate) use guest::{Guest, Layout, Shape};
pub(crate) use hypervisor::{Hypervisor, Kicks};
pub(crate) use iommu::{Iommu, VtdUnit};
pub(crate) use lock::Lock;
pub(crate) use memory::Memory;
pub(crate) use page_info::PageInfo;
pub(crate) use pages::PageNotMoved;
pub(crate) use ranges::{Taken, TakenBatch, give_back};
pub(crate) use storage::Grants;
