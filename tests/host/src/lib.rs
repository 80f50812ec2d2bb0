//! The crates embedded in a hypervisor that runs on the host.
//!
//! [`Hypervisor`] is the glue an embedder writes, over any [`Ram`]. [`World`] runs it
//! on the software model, whose hardware holds stale entries and says when one is
//! used. [`PlainRam`] is memory without hardware, and [`lean`] an embedding for counting
//! instructions. [`walks`] counts what unmapping a whole space costs, [`teardown`] what
//! taking a table down does.

pub mod books;
mod caller;
pub mod calls;
pub mod combining;
pub mod demo;
mod hypervisor;
pub mod lean;
mod memory;
pub mod nested;
pub mod parts;
mod plain;
mod plants;
pub mod scratch;
pub mod simulate;
pub mod sparse;
pub mod stats;
mod storage;
pub mod teardown;
pub mod turns;
pub mod unmaps;
pub mod walks;
pub mod workloads;
pub mod world;

pub use caller::{Caller, Faults};
pub use hypervisor::{
    CpuTables, Guest, Hypervisor, Layout, PageCounts,
    ranges::{RangeError, Taken, TakenBatch},
    take_down::TakeDown,
};
pub use memory::{Memory, Ram};
pub use plain::{Null, PlainRam};
pub use plants::{FlushLie, HONEST, Lying};
pub use storage::{Grants, Handles};
pub use world::{Setup, World};

/// The README's example is compiled and run.
#[cfg(doctest)]
#[doc = include_str!("../../../README.md")]
struct Readme;
