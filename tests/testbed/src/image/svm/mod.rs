//! Running guests on processors with SVM and nested paging.
//!
//! A [`Vcpu`] is one virtual processor. [`Vcpu::run`] is one stay in the guest, on
//! whichever processor calls it; between two stays it may be moved to another. AMD64 APM,
//! volume 2 (24593), revision 3.44, chapter 15.

mod enter;
mod vcpu;

pub(crate) use enter::{exits, turn_on};
pub(crate) use vcpu::{NotRun, Vcpu};
