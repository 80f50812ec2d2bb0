//! The parts of the testbed that touch no hardware.
//!
//! The bootable image is the binary of this package. What it must understand before it
//! may trust anything (boot information, ACPI tables, its command line, frame
//! bookkeeping, register layouts) lives here and is tested on the host.

#![no_std]
#![forbid(unsafe_code)]
#![expect(
    clippy::result_large_err,
    reason = "a failure carries its sentence, there is no heap, and it ends the run"
)]

#[cfg(test)]
extern crate std;

pub mod acpi;
pub mod address;
pub mod audit;
pub mod boot_info;
pub mod command_line;
pub mod elf;
pub mod failure;
pub mod frames;
pub mod gate;
pub mod madt;
pub mod multiboot2;
pub mod nvme;
pub mod paging;
pub mod pci;
pub mod physical;
pub mod pvh;
pub mod scenario;
pub mod start_info;
pub mod svm;
pub mod vmx;
pub mod words;
pub mod xen;
