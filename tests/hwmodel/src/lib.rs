//! Software hardware that caches, goes stale, and reports the use of a stale entry
//!
//! A [`Machine`] is the oracle of the tests: memory whose frames know their owner, processors and VT-d units
//! that keep every translation the manuals let them keep, and devices that access memory through those caches.
//! It shares no code with the crates it judges, not even the layouts: it has its own decoders.
//!
//! What a test does with it:
//!
//! 1. build page tables in its memory through [`Machine::write64`], load a root on a processor
//!    ([`Machine::load_root`]) or attach a device to a unit ([`Machine::add_unit`], [`Machine::add_device`]);
//! 2. access memory through the caches ([`Machine::cpu_write64`], [`Machine::dma_write64`]);
//! 3. change the tables, flush (or forget to), hand frames on ([`Machine::release`], [`Machine::revoke`]);
//! 4. access again, and look at [`Machine::witnesses`]: every use of a translation that should be gone is there,
//!    with the moment it was cached, the moment the tables changed and the moment the frame was given away.
//!
//! ```
//! use hwmodel::{Format, Frame, Machine, Owner, Root, WitnessKind};
//!
//! let machine = Machine::default();
//! let table = || machine.allocate_zeroed(Owner(0)).expect("memory");
//! let (root, upper, middle, lower) = (table(), table(), table(), table());
//! for (above, below) in [(root, upper), (upper, middle), (middle, lower)] {
//!     machine.write64(above.address(), below.address() | 7);
//! }
//! let page: Frame = machine.allocate(Owner(1)).expect("memory");
//! machine.write64(lower.address(), page.address() | 7);
//! let root = Root { format: Format::Ept, frame: root, levels: 4, tag: 1, accessed_dirty: false };
//! machine.load_root(0, root);
//! machine.cpu_write64(0, 0, 42).expect("mapped");
//!
//! machine.write64(lower.address(), 0);
//! machine.release(page); // too early: nobody has flushed
//! machine.cpu_write64(0, 0, 43).expect("still cached");
//! assert_eq!(machine.count(WitnessKind::ReleasedFrame), 1);
//!
//! machine.invalidate(0, root.tag).expect("works");
//! assert!(machine.cpu_write64(0, 0, 44).is_err());
//! ```
//!
//! [`Machine::audit`] finds such translations before anybody uses them.
//!
//! Layouts follow the Intel SDM volume 3C (EPT), the AMD APM volume 2 (nested paging) and the Intel VT-d
//! architecture specification, revision 5.10, in legacy mode; the module of each names its sections.

mod audit;
mod cache;
mod counters;
mod cpu;
mod decode;
mod failure;
mod machine;
mod policy;
mod processors;
mod ram;
mod speculate;
mod types;
mod vtd;
mod walk;
mod witness;
mod world;

pub use counters::{Counters, CpuCounters, UnitCounters};
pub use cpu::{CpuFault, InvalidateFailed, Root, Translation};
pub use decode::{Decoded, Format, Limits, decode};
pub use failure::{CpuLie, Failure, Lie, Misuse, OperationKind};
pub use machine::{Machine, MachineConfig};
pub use policy::Policy;
pub use ram::{FrameInfo, FrameState, POISON};
pub use types::{Access, Frame, Op, Owner, Rights, Space, UnitId};
pub use vtd::command::{Command, Granularity};
pub use vtd::config::UnitConfig;
pub use vtd::dma::{DmaError, DmaTicket, Finished};
pub use vtd::fault::{FaultReason, FaultRecord};
pub use vtd::registers;
pub use witness::{Actor, History, Witness, WitnessKind};

#[cfg(test)]
mod tests;
