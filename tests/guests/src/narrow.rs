//! A guest that stays in 32-bit mode, on page tables of the extended format.
//!
//! All of it is assembly: there is no compiler for such code here. It does what 32-bit
//! guests lay out differently, and says on its console what went wrong.

// Assembly counts as code that nobody checks, although it stands in no block of its own.
#![expect(unsafe_code)]
#![no_std]
#![no_main]

use core::arch::global_asm;
use core::panic::PanicInfo;

global_asm!(include_str!("narrow.s"));

#[panic_handler]
fn panicked(_: &PanicInfo<'_>) -> ! {
    loop {}
}
