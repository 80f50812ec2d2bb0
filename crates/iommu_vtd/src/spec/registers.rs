//! The register file of a remapping unit: offsets and fields (11.4).
//!
//! [`Capabilities`] and [`ExtendedCapabilities`] are values read once at bring-up;
//! what they say decides which commands a unit may be given.

use super::{bit, bits};

/// Version register, 32 bits (11.4.1).
pub const VER: u32 = 0x00;
/// Capability register, 64 bits (11.4.2).
pub const CAP: u32 = 0x08;
/// Extended capability register, 64 bits (11.4.3).
pub const ECAP: u32 = 0x10;
/// Global command register, 32 bits, write only (11.4.4.1).
pub const GCMD: u32 = 0x18;
/// Global status register, 32 bits (11.4.4.2).
pub const GSTS: u32 = 0x1c;
/// Root table address register, 64 bits (11.4.5).
pub const RTADDR: u32 = 0x20;
/// Context command register, 64 bits (11.4.6.1).
pub const CCMD: u32 = 0x28;
/// Fault status register, 32 bits (11.4.7.1).
pub const FSTS: u32 = 0x34;
/// Fault event control register, 32 bits (11.4.7.2).
pub const FECTL: u32 = 0x38;
/// Invalidation queue head register, 64 bits (11.4.9.1).
pub const IQH: u32 = 0x80;
/// Invalidation queue tail register, 64 bits (11.4.9.2).
pub const IQT: u32 = 0x88;
/// Invalidation queue address register, 64 bits (11.4.9.3).
pub const IQA: u32 = 0x90;

/// Bits of [`GCMD`] and, at the same positions, of [`GSTS`] (11.4.4).
pub mod global {
    /// Translation enable.
    pub const TRANSLATION: u32 = 1 << 31;
    /// Set root table pointer; one-shot.
    pub const ROOT_POINTER: u32 = 1 << 30;
    /// Write-buffer flush; one-shot, its status bit clears when done.
    pub const WRITE_BUFFER: u32 = 1 << 27;
    /// Queued invalidation enable.
    pub const QUEUE: u32 = 1 << 26;
    /// The status bits that must be written back with every command: everything
    /// but the one-shot bits, which would start their operation again.
    pub const KEEP: u32 = 0x96ff_ffff;
}

/// Bits of [`FSTS`] (11.4.7.1). All but the pending bit and the index clear on writing 1.
pub mod fault_status {
    /// Primary fault overflow.
    pub const OVERFLOW: u32 = 1 << 0;
    /// Primary pending fault: some recording register holds a fault. Read only.
    pub const PENDING: u32 = 1 << 1;
    /// Invalidation queue error.
    pub const QUEUE_ERROR: u32 = 1 << 4;
    /// Invalidation completion error.
    pub const COMPLETION_ERROR: u32 = 1 << 5;
    /// Invalidation time-out error.
    pub const TIME_OUT: u32 = 1 << 6;
    /// The three errors that concern invalidations.
    pub const INVALIDATION: u32 = QUEUE_ERROR | COMPLETION_ERROR | TIME_OUT;

    /// Index of the oldest pending fault record.
    #[must_use]
    pub const fn first_record(status: u32) -> u16 {
        ((status >> 8) & 0xff) as u16
    }
}

/// Interrupt mask bit of [`FECTL`] (11.4.7.2).
pub const FECTL_MASK: u32 = 1 << 31;

/// Bits of [`CCMD`] (11.4.6.1).
pub mod context_command {
    /// Invalidate context cache: set to start, cleared by hardware when done.
    pub const INVALIDATE: u64 = 1 << 63;
    /// Lowest bit of the requested granularity (two bits).
    pub const GRANULARITY_LOW: u32 = 61;
    /// The requested granularity, as written and read back.
    pub const GRANULARITY: u64 = 3 << GRANULARITY_LOW;
    /// Lowest bit of the requester id; the domain id is in bits 0 to 15.
    pub const SOURCE_LOW: u32 = 16;
    /// The granularity hardware reports, 0 for a request it refused.
    #[must_use]
    pub const fn performed(value: u64) -> u64 {
        super::bits(value, 59, 2)
    }
}

/// Bits of the IOTLB invalidate register (11.4.6.3), at [`ExtendedCapabilities::iotlb_offset`] + 8.
pub mod iotlb_command {
    /// Invalidate IOTLB: set to start, cleared by hardware when done.
    pub const INVALIDATE: u64 = 1 << 63;
    /// Lowest bit of the requested granularity (two bits).
    pub const GRANULARITY_LOW: u32 = 60;
    /// The requested granularity, as written and read back.
    pub const GRANULARITY: u64 = 3 << GRANULARITY_LOW;
    /// Drain reads.
    pub const DRAIN_READS: u64 = 1 << 49;
    /// Drain writes.
    pub const DRAIN_WRITES: u64 = 1 << 48;
    /// Lowest bit of the domain id.
    pub const DOMAIN_LOW: u32 = 32;
    /// The granularity hardware reports, 0 for a request it refused.
    #[must_use]
    pub const fn performed(value: u64) -> u64 {
        super::bits(value, 57, 2)
    }
}

/// Contents of the capability register (11.4.2).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Capabilities(u64);

impl Capabilities {
    /// Wraps a value read from [`CAP`].
    #[must_use]
    pub const fn new(raw: u64) -> Self {
        Self(raw)
    }

    /// Number of domain ids the hardware tells apart, 16 to 65536 (ND: 2^(4 + 2 ND)).
    #[must_use]
    pub const fn domain_ids(self) -> u32 {
        let exponent = 4 + 2 * bits(self.0, 0, 3) as u32;
        // The last encoding is reserved; a domain id field has 16 bits.
        if exponent > 16 { 1 << 16 } else { 1 << exponent }
    }

    /// Software must flush the write buffers itself after it changed a table (RWBF).
    #[must_use]
    pub const fn needs_write_buffer_flush(self) -> bool {
        bit(self.0, 4)
    }

    /// Entries that are not present may be cached too (CM; 6.1).
    #[must_use]
    pub const fn caching_mode(self) -> bool {
        bit(self.0, 7)
    }

    /// Whether second-stage tables of `levels` levels (3, 4 or 5) can be walked (SAGAW).
    #[must_use]
    pub const fn walks(self, levels: u8) -> bool {
        matches!(levels, 3..=5) && bit(self.0, 8 + levels as u32 - 2)
    }

    /// Widest address a device may use, in bits (MGAW + 1).
    #[must_use]
    pub const fn guest_address_width(self) -> u8 {
        bits(self.0, 16, 6) as u8 + 1
    }

    /// Offset of the first fault recording register, in bytes (FRO).
    #[must_use]
    pub const fn fault_offset(self) -> u32 {
        bits(self.0, 24, 10) as u32 * 16
    }

    /// Order of the largest second-stage leaf for which that and every smaller
    /// size is offered: 0, 9 or 18 (SSLPS).
    #[must_use]
    pub const fn largest_leaf_order(self) -> u8 {
        match bits(self.0, 34, 2) {
            1 => 9,
            3 => 18,
            _ => 0,
        }
    }

    /// Page-selective IOTLB invalidation is offered (PSI).
    #[must_use]
    pub const fn page_selective(self) -> bool {
        bit(self.0, 39)
    }

    /// Number of fault recording registers, 1 to 256 (NFR + 1).
    #[must_use]
    pub const fn fault_records(self) -> u16 {
        bits(self.0, 40, 8) as u16 + 1
    }

    /// Largest address mask of a page-selective invalidation, as an order (MAMV).
    #[must_use]
    pub const fn max_address_mask(self) -> u8 {
        bits(self.0, 48, 6) as u8
    }

    /// Invalidations can drain translated writes (DWD).
    #[must_use]
    pub const fn drains_writes(self) -> bool {
        bit(self.0, 54)
    }

    /// Invalidations can drain translated reads (DRD).
    #[must_use]
    pub const fn drains_reads(self) -> bool {
        bit(self.0, 55)
    }
}

/// Contents of the extended capability register (11.4.3).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ExtendedCapabilities(u64);

impl ExtendedCapabilities {
    /// Wraps a value read from [`ECAP`].
    #[must_use]
    pub const fn new(raw: u64) -> Self {
        Self(raw)
    }

    /// Table walks snoop the processor's caches (C). If not, changed entries are written back.
    #[must_use]
    pub const fn coherent(self) -> bool {
        bit(self.0, 0)
    }

    /// Queued invalidation is offered (QI).
    #[must_use]
    pub const fn queue(self) -> bool {
        bit(self.0, 1)
    }

    /// Device TLBs are supported (DT).
    #[must_use]
    pub const fn device_tlb(self) -> bool {
        bit(self.0, 2)
    }

    /// Device-TLB invalidations are throttled by physical function, and name it (DIT).
    #[must_use]
    pub const fn throttles_devices(self) -> bool {
        bit(self.0, 41)
    }

    /// Offset of the invalidate address register, in bytes (IRO).
    /// The IOTLB invalidate register follows 8 bytes later.
    #[must_use]
    pub const fn iotlb_offset(self) -> u32 {
        bits(self.0, 8, 10) as u32 * 16
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_capabilities_qemu_reports_are_read_as_documented() {
        let cap = Capabilities::new(0x00d2_008c_222f_0606);
        assert_eq!(cap.domain_ids(), 1 << 16);
        assert!(!cap.needs_write_buffer_flush() && !cap.caching_mode());
        assert!(cap.walks(3) && cap.walks(4) && !cap.walks(5) && !cap.walks(2));
        assert_eq!(cap.guest_address_width(), 48);
        assert_eq!(cap.fault_offset(), 0x220);
        assert_eq!(cap.largest_leaf_order(), 18);
        assert!(cap.page_selective());
        assert_eq!(cap.fault_records(), 1);
        assert_eq!(cap.max_address_mask(), 18);
        assert!(cap.drains_writes() && cap.drains_reads());
        let extended = ExtendedCapabilities::new(0xf42);
        assert!(!extended.coherent() && extended.queue() && !extended.device_tlb());
        assert_eq!(extended.iotlb_offset(), 0xf0);
    }

    #[test]
    fn reserved_domain_id_encodings_stay_within_sixteen_bits() {
        let counts: [u32; 8] = core::array::from_fn(|nd| Capabilities::new(nd as u64).domain_ids());
        assert_eq!(counts, [16, 64, 256, 1024, 4096, 16384, 65536, 65536]);
    }
}
