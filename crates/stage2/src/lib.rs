//! Second-stage table formats, and the one walker over all of them.
//!
//! Three layers: a [`Format`] knows bits, a [`TableMemory`] knows where words live, and
//! the functions here know what to do in which order. What an edit took away goes to
//! its [`Record`], which for everybody but a test is a [`Recorder`] over the
//! [`Skipped`](flush::Skipped) that a batch lends:
//!
//! - [`map()`] and [`map_run`] install leaves, [`split()`] breaks a large one;
//! - [`clear`], [`protect`], [`visit`] and [`destroy`] walk a range, can stop anywhere,
//!   and say where to go on ([`Rest`]) and why they stopped ([`Stop`]);
//! - [`clear_page`] and [`lookup`] serve a single page, [`clear_page_near`] pages near each
//!   other;
//! - [`Unwalked`] is a tree that no hardware can walk, so that it needs no flush;
//! - [`chunked`] runs a walk piece by piece, and [`Tracked`] holds mappings that are in
//!   no table.
//!
//! ```
//! use flush::{FreshTable, Gfn, Mfn};
//! use stage2::format::ept::{Ept, EptLevels};
//! use stage2::{Access, Format, Leaf, Level, Over, Record, TableMemory, Tables, lookup, map};
//!
//! fn show(memory: &impl TableMemory, root: FreshTable, record: &mut impl Record) {
//!     let format = Ept::new(EptLevels::Four);
//!     let tables = Tables { format: &format, memory, root: memory.link(root) };
//!     let leaf = Leaf::new(Mfn::new(0x1234), Access::READ_WRITE);
//!     map(tables, Gfn::new(5), Level::PAGE, leaf, Over::Vacant, record).unwrap();
//!     let found = lookup(tables, Gfn::new(5)).unwrap();
//!     assert_eq!(found.leaf_at(Gfn::new(5)), Some((leaf, Mfn::new(0x1234))));
//!     assert_eq!(format.geometry().space().pages(), 1 << 36);
//! }
//! ```
//!
//! Frames are 4 KiB for every format, levels count from 0 for single pages, and ranges
//! are inclusive.
#![no_std]
#![forbid(unsafe_code)]

mod chunked;
mod clear;
mod cursor;
mod destroy;
mod entry;
mod fill;
pub mod format;
mod map;
mod marked;
mod memory;
mod near;
mod page;
mod path;
mod record;
mod split;
mod stop;
mod tracked;
mod tree;
mod unwalked;
mod walk;

pub use chunked::{Chunk, Halt, Halted, Pace, Stops, chunked};
pub use clear::{Emptied, clear};
pub use destroy::{RootError, destroy, free_root};
pub use entry::{Access, Entry, Leaf, Level, MAX_LEVELS, MemoryType, Tag};
pub use fill::{MapStopped, map_run};
pub use format::{Format, Geometry, Unencodable};
pub use map::{MapError, Over, map};
pub use marked::clear_marked_page;
pub use memory::{Lent, Marks, TableMemory};
pub use near::{Likely, Near, Shown, clear_page_near};
pub use page::{PageError, clear_page, lookup};
pub use path::Path;
pub use record::{Record, Recorder, Sink, Unheld};
pub use split::{PendingSplit, SplitError, abandon_split, finish_split, split};
pub use stop::{Budget, Rest, Stop, Stopped, Tally};
pub use tracked::{Refused, Slot, Sweep, SweepStopped, Tracked};
pub use tree::{Found, Tables};
pub use unwalked::{Unwalked, retire};
pub use walk::{protect, visit};
