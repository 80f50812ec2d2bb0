//! The one guest program, and what it can be asked to do.

// UNSAFETY: the code lies between two symbols of the assembly.
#![expect(unsafe_code)]

use core::arch::global_asm;
use core::ptr;

global_asm!(include_str!("program.s"));

/// What the guest does next. It comes back with VMCALL, or is stopped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub(crate) enum Command {
    /// Read 4 bytes at EBX into ECX.
    Read = 0,
    /// Write ECX to the 4 bytes at EBX.
    Write = 1,
    /// Execute the code at EBX, which comes back by `jmp edx`.
    Execute = 2,
    /// Read at EBX for ever. At EDX it tells the value, how often, and all bits seen.
    Watch = 3,
    /// HLT.
    Halt = 4,
    /// CPUID.
    Identify = 5,
    /// Write ECX at EBX for ever. At EDX + 4 it tells how often.
    Fill = 6,
    /// An undefined instruction.
    Undefined = 7,
}

/// The program's instructions, padded to whole words. It starts at the first byte, in 32-bit
/// protected mode.
pub(super) fn words() -> impl Iterator<Item = u64> {
    let start = ptr::addr_of!(vmx_program);
    let length = ptr::addr_of!(vmx_program_end).addr().saturating_sub(start.addr());
    // SAFETY: the two symbols are in one section of read-only data, the start first, and
    // nothing ever writes what is between them.
    let bytes: &'static [u8] = unsafe { core::slice::from_raw_parts(start, length) };
    bytes.chunks(8).map(|chunk| {
        let mut word = [0; 8];
        word.iter_mut().zip(chunk).for_each(|(to, from)| *to = *from);
        u64::from_le_bytes(word)
    })
}

// SAFETY: `program.s` defines them; their bytes are only read.
unsafe extern "C" {
    safe static vmx_program: u8;
    safe static vmx_program_end: u8;
}
