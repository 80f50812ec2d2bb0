//! Layout of the DMA remapping reporting table (8.1 to 8.5).
//!
//! Offsets in bytes from the start of the structure they belong to; all numbers
//! are little-endian.

/// Signature of the table (8.1).
pub const SIGNATURE: [u8; 4] = *b"DMAR";
/// Offset of the table's length, 32 bits (8.1).
pub const LENGTH: usize = 4;
/// Offset of the host address width minus one, 8 bits (8.1).
pub const HOST_ADDRESS_WIDTH: usize = 36;
/// Offset of the flags, 8 bits (8.1).
pub const FLAGS: usize = 37;
/// Size of the table before its first remapping structure (8.1).
pub const HEADER: usize = 48;

/// Remapping structure types (8.2). Others are skipped by their length.
pub mod structure {
    /// DMA remapping hardware unit (8.3).
    pub const DRHD: u16 = 0;
    /// Reserved memory region (8.4).
    pub const RMRR: u16 = 1;
    /// Root port ATS capability (8.5).
    pub const ATSR: u16 = 2;
    /// Size of the type and length fields every structure opens with.
    pub const HEADER: usize = 4;
}

/// Fields of a DRHD structure (8.3).
pub mod drhd {
    /// Flags, 8 bits; bit 0 says that all other devices of the segment belong here.
    pub const FLAGS: usize = 4;
    /// PCI segment, 16 bits.
    pub const SEGMENT: usize = 6;
    /// Register base address, 64 bits.
    pub const BASE: usize = 8;
    /// First device scope.
    pub const SCOPES: usize = 16;
    /// Flag: every device of the segment that no other unit names.
    pub const INCLUDE_ALL: u8 = 1;
}

/// Fields of an RMRR structure (8.4).
pub mod rmrr {
    /// PCI segment, 16 bits.
    pub const SEGMENT: usize = 6;
    /// First byte of the region, 64 bits.
    pub const BASE: usize = 8;
    /// Last byte of the region, 64 bits.
    pub const LIMIT: usize = 16;
    /// First device scope.
    pub const SCOPES: usize = 24;
}

/// Fields of an ATSR structure (8.5).
pub mod atsr {
    /// Flags, 8 bits; bit 0 says that all root ports of the segment support ATS.
    pub const FLAGS: usize = 4;
    /// PCI segment, 16 bits.
    pub const SEGMENT: usize = 6;
    /// First device scope.
    pub const SCOPES: usize = 8;
    /// Flag: all root ports of the segment.
    pub const ALL_PORTS: u8 = 1;
}

/// Fields of a device scope (8.3.1).
pub mod scope {
    /// Type, 8 bits.
    pub const KIND: usize = 0;
    /// Length of the scope, 8 bits.
    pub const LENGTH: usize = 1;
    /// Enumeration id (an I/O APIC's or HPET's number), 8 bits.
    pub const ENUMERATION: usize = 4;
    /// Bus the path starts on, 8 bits.
    pub const START_BUS: usize = 5;
    /// First path element: device and function, 8 bits each.
    pub const PATH: usize = 6;
}
