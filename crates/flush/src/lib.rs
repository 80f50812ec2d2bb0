//! What must be flushed before what may be released.
//!
//! A cleared entry leaves a record in [`Skipped`], the page behind it goes into a
//! [`Batch`], the batch is flushed once, and only [`Flushed`] gives pages out, as
//! [`Released`]. Holding a `Released<T>` therefore says: the flushes recorded for
//! `T` have completed. There is no other way to get one:
//!
//! ```compile_fail
//! let page = flush::TablePage::unlinked(flush::Mfn::new(7));
//! let released = flush::Released(page); // the constructor is private
//! ```
//!
//! A batch against hardware that needs no flushing at all:
//!
//! ```
//! use flush::{Batch, Cleared, DomainId, Gfn, Hardware, NoIommu, Run, Tlb};
//! # struct Idle;
//! # impl flush::Flush<Tlb> for Idle {
//! #     type InFlight = ();
//! #     type Error = ();
//! #     fn start(&self, _: DomainId, _: &flush::Cover) {}
//! #     fn wait(&self, (): ()) -> Result<(), ()> { Ok(()) }
//! # }
//! let mut batch: Batch<&str, 32> = Batch::new(DomainId::new(1));
//! batch
//!     .hold(|skipped| {
//!         // ... clear the entry of frame 5 here ...
//!         let cpu = skipped.leaf::<Tlb>(Run::single(Gfn::new(5)), 0);
//!         let cleared = cpu.with(&NoIommu.gone(skipped));
//!         Ok::<_, ()>(("the page behind frame 5", cleared))
//!     })
//!     .unwrap();
//! let mut flushed = batch.flush(&Hardware { tlb: &Idle, iotlb: &NoIommu }).unwrap();
//! assert_eq!(*flushed.next_page().unwrap().get(), "the page behind frame 5");
//! ```
#![no_std]
#![forbid(unsafe_code)]
#![expect(unexpected_cfgs, reason = "`--cfg loom` is passed by hand, to the tests alone")]

mod account;
mod batch;
mod block;
mod both;
mod combine;
mod cover;
mod cpus;
mod frame;
mod hardware;
mod page;
pub mod plan;
mod quarantine;
mod skipped;
mod sync;

#[cfg(all(test, loom))]
mod interleavings;

pub use account::{Account, Counted, Meter, Metered, MeteredFlush, Totals};
pub use batch::{
    Batch, Failure, FlushError, Flushed, Held, HoldError, Report, Room, leaked_pages,
    unflushed_batches,
};
pub use block::Block;
pub use combine::{Asked, CombineError, Combiner, Place, Refused, Seat};
pub use cover::{Change, Cover, Depth, Extent};
pub use cpus::{CpuSet, LiveCpus};
pub use frame::{Dfn, DomainId, Gfn, Mfn, Run};
pub use hardware::{Flush, Hardware, NoIommu, RecordedWithoutIommu, Units, UnitsError};
pub use page::{FreshTable, Released, TablePage};
pub use quarantine::{Attempt, Owed, Paid, Quarantine};
pub use skipped::{Cleared, Gone, Iotlb, Kind, Records, Shared, Skipped, TABLES, Tlb};
