//! The reference type-1 hypervisor: boots, runs one case, says how it went.
//!
//! The command line chooses the case (`case=NAME`, or `case=list` for all names). The
//! verdict is the last thing on the serial line, `PASS name` or `FAIL name: why`, and
//! the exit status of QEMU with `isa-debug-exit` at port 0xf4: 33 for a pass, 35 for a
//! failure. Lines that start with `@ ` hold `key=value` pairs for programs to read.
//!
//! Build it with `cargo build -p quiesce-testbed --features baremetal --profile testbed`.

#![no_std]
#![no_main]
#![expect(
    clippy::result_large_err,
    reason = "a failure carries its sentence, there is no heap, and it ends the run"
)]

mod apic;
mod arch;
mod cases;
mod clock;
mod devices;
mod embedding;
mod exit;
mod guest;
mod machine;
mod memory;
mod mmio;
mod pci;
mod planted;
mod poison;
mod port;
mod processors;
mod serial;
mod svm;
mod vmx;
mod world;
mod xen;

use core::panic::PanicInfo;

use testbed::address::PhysicalAddress;
use testbed::boot_info::BootInfo;
use testbed::failure::Failure;
use testbed::{fail, multiboot2};

use crate::machine::Machine;

/// Bring the machine up, run the case and leave. Called once, on the boot stack.
fn run(loader: u32, information: PhysicalAddress) -> ! {
    serial::initialise();
    arch::initialise();
    let finished = boot(loader, information).and_then(|boot| {
        clock::initialise()?;
        cases::run(&Machine::new(boot))
    });
    match finished {
        Ok(()) => exit::passed(),
        Err(failure) => exit::failed(format_args!("{failure}")),
    }
}

/// Read what the loader left and put the rest of memory to use.
fn boot(loader: u32, information: PhysicalAddress) -> Result<BootInfo<'static>, Failure> {
    let parse = match loader {
        0 => memory::Parser::Pvh,
        multiboot2::MAGIC => memory::Parser::Multiboot2,
        other => fail!("started by an unknown loader with EAX = {other:#x}"),
    };
    Ok(memory::initialise(parse, information)?)
}

#[panic_handler]
fn panicked(info: &PanicInfo<'_>) -> ! {
    match info.location() {
        Some(at) => {
            exit::failed(format_args!("panic at {}:{}: {}", at.file(), at.line(), info.message()))
        }
        None => exit::failed(format_args!("panic: {}", info.message())),
    }
}
