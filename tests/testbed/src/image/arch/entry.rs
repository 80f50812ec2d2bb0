//! The first instructions, and the call into Rust.

// UNSAFETY: the processor starts in 32-bit mode without a stack, so this is assembly.
#![expect(unsafe_code)]

use core::arch::global_asm;

use testbed::address::PhysicalAddress;

global_asm!(include_str!("boot.s"));

/// Where the assembly goes on, once, on the boot stack.
///
/// `loader` is EAX at the multiboot2 entry, or 0 for PVH; `information` is EBX.
// SAFETY: no other symbol of this name is linked in.
#[unsafe(no_mangle)]
extern "C" fn rust_entry(loader: u32, information: u32) -> ! {
    crate::run(loader, PhysicalAddress::new(u64::from(information)))
}
