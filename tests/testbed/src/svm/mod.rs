//! A guest of an SVM processor, without the instructions that run it
//!
//! A [`Context`] is one vCPU at rest: its control block ([`Vmcb`]), the registers that the
//! processor does not switch, and its floating-point state. [`Context::stopped`] says why it
//! came to rest. After the AMD64 APM, volume 2 (24593), revision 3.44: chapter 15 and
//! appendix B.

mod context;
mod exit;
mod permissions;
mod vmcb;

pub use context::{Context, Event, Floating, Mode, Registers};
pub use exit::{Direction, Exit, ModelRegister, NestedError, PortAccess};
pub use permissions::{MSRS_OF_THE_GUEST, MsrMap, PortMap};
pub use vmcb::{Control, Save, Segment, Vmcb, intercept};
