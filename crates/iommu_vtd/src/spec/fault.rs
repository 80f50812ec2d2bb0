//! Fault recording registers and fault reasons (11.4.7.6, 7.1.3).
//!
//! A record is two quadwords; the top bit of the second says that it is valid and
//! frees the register when 1 is written to it.

use super::{bit, bits};

/// Size of one recording register, in bytes.
pub const RECORD_SIZE: u32 = 16;
/// Offset, within a record, of the 32-bit word that holds the fault bit.
pub const FAULT_WORD: u32 = 12;
/// The fault bit within that word; writing 1 clears it.
pub const FAULT_BIT: u32 = 1 << 31;

/// Whether the high quadword of a record holds a fault (F).
#[must_use]
pub const fn is_set(high: u64) -> bool {
    bit(high, 63)
}

/// Page frame of the faulting address (FI, low quadword).
#[must_use]
pub const fn page(low: u64) -> u64 {
    low >> 12
}

/// Requester id of the faulting device (SID).
#[must_use]
pub const fn source(high: u64) -> u16 {
    bits(high, 0, 16) as u16
}

/// Fault reason code (FR).
#[must_use]
pub const fn reason(high: u64) -> u8 {
    bits(high, 32, 8) as u8
}

/// Whether the request was a read (T1). Atomic operations, which also write, are
/// recorded as reads; T2 would tell them apart.
#[must_use]
pub const fn is_read(high: u64) -> bool {
    bit(high, 62)
}

/// Reason codes of legacy-mode address translation (table of 7.1.3).
pub mod reason {
    /// The root entry is not present.
    pub const ROOT_NOT_PRESENT: u8 = 0x1;
    /// The context entry is not present.
    pub const CONTEXT_NOT_PRESENT: u8 = 0x2;
    /// The context entry is present but malformed, or the root of its tables could not
    /// be read.
    pub const CONTEXT_INVALID: u8 = 0x3;
    /// The address is wider than the tables or the unit allow.
    pub const ADDRESS_WIDTH: u8 = 0x4;
    /// A write without write permission.
    pub const NOT_WRITABLE: u8 = 0x5;
    /// A read without read permission.
    pub const NOT_READABLE: u8 = 0x6;
    /// A second-stage table below the root could not be read.
    pub const TABLE_ACCESS: u8 = 0x7;
    /// The root table could not be read.
    pub const ROOT_ACCESS: u8 = 0x8;
    /// The context table could not be read.
    pub const CONTEXT_ACCESS: u8 = 0x9;
    /// A reserved bit is set in a present root entry.
    pub const ROOT_RESERVED: u8 = 0xa;
    /// A reserved bit is set in a present context entry.
    pub const CONTEXT_RESERVED: u8 = 0xb;
    /// A reserved bit is set in a present second-stage entry.
    pub const TABLE_RESERVED: u8 = 0xc;
    /// A translation or translated request the context entry's type blocks.
    pub const TYPE_BLOCKED: u8 = 0xd;
}
