//! Running guests on processors with VMX and EPT.
//!
//! A [`VmxProcessor`] says that VMX is on, on the processor that holds it. A [`Vcpu`] is
//! one virtual processor there, and [`Vcpu::run`] is one stay in its guest. What the
//! flushes of the guest want of an entry is decided by `p2m`, which also executes INVEPT.
//!
//! Guests here use neither floating point nor model-specific registers: those are not
//! switched, and access to the latter ends the stay.

mod enter;
mod guest;
mod processor;
mod program;
mod spec;
mod vcpu;

pub(crate) use guest::{BATCH, Guest};
pub(crate) use processor::VmxProcessor;
pub(crate) use program::Command;
pub(crate) use vcpu::{Exit, Vcpu};
