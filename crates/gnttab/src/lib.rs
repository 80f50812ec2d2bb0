//! Xen-compatible grant tables with batched unmap.
//!
//! [`Call`] is a guest's hypercall, [`Domain`] what the embedder provides for it. A call
//! that unmaps goes over its elements in chunks of 32: each element's mapping is cleared
//! and its [`Pin`] put into a batch, the batch is flushed once, and only what the flushed
//! batch gives out is dropped. The granter sees its page in use until then. A copy between
//! grants maps nothing: it holds both pages while the embedder moves the bytes.
//!
//! ```
//! # use gnttab::*;
//! fn grant_table_op<D: Domain>(domain: &D, command: u32, argument: u64, count: u32) -> i64 {
//!     let mut call = Call { command, argument: GuestAddress(argument), count };
//!     loop {
//!         match call.run(domain) {
//!             Outcome::Done => return 0,
//!             Outcome::Failed(errno) => return errno.value(),
//!             // ... run whatever is more urgent ...
//!             Outcome::Continue { done: _, rest } => call = rest,
//!         }
//!     }
//! }
//! ```
//!
//! There is no heap and no lock here. Tables and handles live in storage that the
//! embedder owns ([`GrantStorage`], [`MaptrackStorage`]) and adds page by page.
#![no_std]
#![forbid(unsafe_code)]
#![expect(unexpected_cfgs, reason = "`--cfg loom` is passed by hand, to the tests alone")]

#[cfg(test)]
extern crate std;

pub mod abi;
mod active;
mod copy;
mod domain;
mod entry;
mod frames;
mod hypercall;
mod lend;
mod map;
mod maptrack;
mod pin;
mod release;
mod setup;
mod swap;
mod sync;
mod table;
mod teardown;
mod together;
mod unmap;
mod words;

pub use abi::{Errno, Operation, Status};
pub use active::{ACTIVE_PER_PAGE, ActiveEntry};
pub use domain::{
    Action, BATCH, ClearError, Crash, Domain, Expected, FlushFailure, GrantedFrame, GuestAddress,
    GuestFault, Inserted, Mapping, NoMemory, NotCopied, NotInserted, PageBytes, PageCopy,
    PageError, RETRIES, Removed, Verdict,
};
pub use entry::{Rights, SharedPage, StatusPage};
pub use frames::{FrameError, VersionError};
pub use hypercall::{Call, Outcome};
pub use maptrack::{FreeList, MAPTRACK_PER_PAGE, Maptrack, MaptrackEntry, MaptrackStorage, VcpuId};
pub use pin::{Grant, PageReference, Pin, Purpose};
pub use release::{give_out, release};
pub use swap::SwapError;
pub use table::{AccessError, GrantStorage, GrantTable, TableFrame, Version};
pub use teardown::{Teardown, release_all};
pub use together::Removals;
pub use words::GuestWords;

#[cfg(test)]
mod tests;

#[cfg(all(test, loom))]
mod interleavings;
