//! The processor: entry, traps, stacks, and the few instructions others need.

// UNSAFETY: reads the time-stamp counter and the addresses of linker symbols.
#![expect(unsafe_code)]

mod builtins;
mod entry;
mod segments;
mod start;
pub(crate) mod traps;

use core::arch::x86_64::_rdtsc;
use core::ptr;

use testbed::address::{Extent, PhysicalAddress};
use x86_64::instructions::{hlt, interrupts};

use crate::port::Port;

pub(crate) use start::Trampoline;

/// Processors that this image has stacks for.
pub(crate) const PROCESSORS: usize = 4;
/// The processor that starts the machine.
pub(crate) const BOOT_PROCESSOR: usize = 0;

/// Install segments, stacks and trap handlers; mask the old interrupt controllers.
///
/// Interrupts stay off.
pub(crate) fn initialise() {
    segments::load(BOOT_PROCESSOR);
    traps::load();
    Port::PIC1_MASK.write8(0xff);
    Port::PIC2_MASK.write8(0xff);
}

/// The number of the processor that runs this, below [`PROCESSORS`].
pub(crate) fn this_processor() -> usize {
    segments::number()
}

/// Take the interrupts that are pending, with interrupts off before and after.
///
/// A processor that waits for another does this in each turn, so that one that waits for
/// it is served.
pub(crate) fn take_interrupts() {
    interrupts::enable();
    // Interrupts are held back for one instruction after they were turned on.
    core::hint::spin_loop();
    interrupts::disable();
}

/// Sleep until an interrupt, unless one is pending; it is taken. Interrupts are off before
/// and after.
pub(crate) fn sleep() {
    interrupts::enable_and_hlt();
    interrupts::disable();
}

/// The time-stamp counter.
pub(crate) fn ticks() -> u64 {
    // SAFETY: every 64-bit processor has the instruction, and ring 0 may always use it.
    unsafe { _rdtsc() }
}

/// Stop this processor for good.
pub(crate) fn stop() -> ! {
    interrupts::disable();
    loop {
        hlt();
    }
}

/// The memory of the image, stack and guard page included.
pub(crate) fn image() -> Extent {
    let start = ptr::addr_of!(image_start).addr() as u64;
    let end = ptr::addr_of!(image_end).addr() as u64;
    Extent { start: PhysicalAddress::new(start), length: end.saturating_sub(start) }
}

// SAFETY: the linker script defines both; only their addresses are used.
unsafe extern "C" {
    safe static image_start: u8;
    safe static image_end: u8;
}
