//! The code of the guests.

// UNSAFETY: the code lies between two symbols of the assembly.
#![expect(unsafe_code)]

use core::arch::global_asm;
use core::ptr;

global_asm!(include_str!("programs.s"));

/// A guest of a few instructions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Program {
    /// Does one of each thing that ends a stay. 32-bit code.
    Probe,
    /// Uses the registers of 64-bit code.
    Long,
    /// Reads some pages for ever. 32-bit code.
    Reader,
    /// Writes a page for ever. 32-bit code.
    Writer,
    /// Makes a hypercall, reads some pages, makes another, for ever. 32-bit code.
    Caller,
    /// Reads and writes where it is told, one access at a time. 64-bit code.
    Told,
}

impl Program {
    /// Its instructions.
    pub(crate) fn code(self) -> &'static [u8] {
        let (start, end) = match self {
            Self::Probe => (ptr::addr_of!(guest_probe), ptr::addr_of!(guest_probe_end)),
            Self::Long => (ptr::addr_of!(guest_long), ptr::addr_of!(guest_long_end)),
            Self::Reader => (ptr::addr_of!(guest_reader), ptr::addr_of!(guest_reader_end)),
            Self::Caller => (ptr::addr_of!(guest_caller), ptr::addr_of!(guest_caller_end)),
            Self::Told => (ptr::addr_of!(guest_told), ptr::addr_of!(guest_told_end)),
            Self::Writer => (ptr::addr_of!(guest_writer), ptr::addr_of!(guest_writer_end)),
        };
        // SAFETY: the two symbols are in one section of read-only data, the start first,
        // and nothing ever writes what is between them.
        unsafe { core::slice::from_raw_parts(start, end.addr().saturating_sub(start.addr())) }
    }
}

// SAFETY: `programs.s` defines them; their bytes are only read.
unsafe extern "C" {
    safe static guest_probe: u8;
    safe static guest_probe_end: u8;
    safe static guest_long: u8;
    safe static guest_long_end: u8;
    safe static guest_reader: u8;
    safe static guest_reader_end: u8;
    safe static guest_writer: u8;
    safe static guest_writer_end: u8;
    safe static guest_caller: u8;
    safe static guest_caller_end: u8;
    safe static guest_told: u8;
    safe static guest_told_end: u8;
}
