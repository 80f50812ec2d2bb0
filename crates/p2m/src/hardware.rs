//! What the CPUs' virtualization extensions want to hear, vendor by vendor.
//!
//! Nothing in here decides anything: [`vmx`] and [`svm`] know encodings and execute
//! instructions, and the rest of the crate calls them through
//! [`Invalidate`](crate::Invalidate) and [`Generation`](crate::Generation).

pub mod svm;
pub mod vmx;
