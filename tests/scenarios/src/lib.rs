//! Scenario files: flush bugs written down, and run on the software model.
//!
//! [`parse::load`] reads a file into a [`parse::Script`]; [`run()`] plays it in every order
//! of its actors and gives a [`Verdict`]. `docs/scenarios.md` is the reference of the
//! format. [`plants`] are bugs to run it with.

mod embedding;
mod explain;
pub mod format;
mod machines;
pub mod parse;
pub mod plants;
pub mod qemu;
mod run;
mod session;
mod stage;
mod strand;
pub mod sweep;
pub mod table;
mod turns;
pub mod values;
pub mod workloads;

pub use explain::explain;
pub use machines::Open;
pub use run::{Broken, Manner, Verdict, run};
