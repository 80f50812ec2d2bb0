//! The processor: entry, traps, stacks, and the few instructions others need.

// UNSAFETY: reads the time-stamp counter and the addresses of linker symbols.
#![expect(unsafe_code)]

mod builtins;
mod entry;
mod segments;
pub(crate) mod traps;

use core::arch::x86_64::_rdtsc;
use core::ptr;

use testbed::address::{Extent, PhysicalAddress};
use x86_64::instructions::{hlt, interrupts};

use crate::port::Port;

/// Install segments, stacks and trap handlers; mask the old interrupt controllers.
///
/// Interrupts stay off.
pub(crate) fn initialise() {
    segments::load();
    traps::load();
    Port::PIC1_MASK.write8(0xff);
    Port::PIC2_MASK.write8(0xff);
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
