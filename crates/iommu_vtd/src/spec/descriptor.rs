//! Invalidation descriptors: the 128-bit commands of the queue (6.5.2).
//!
//! A [`Descriptor`] is an encoded command; holding one says nothing about hardware.

/// One slot of the invalidation queue (6.5.2).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Descriptor {
    /// Bits 0 to 63.
    pub low: u64,
    /// Bits 64 to 127.
    pub high: u64,
}

/// Type field, bits 0 to 3; its upper part, bits 9 to 11, is zero in all of these (6.5.2).
pub mod kind {
    /// Context-cache invalidate (6.5.2.1).
    pub const CONTEXT: u64 = 1;
    /// IOTLB invalidate (6.5.2.3).
    pub const IOTLB: u64 = 2;
    /// Device-TLB invalidate (6.5.2.5).
    pub const DEVICE_TLB: u64 = 3;
    /// Invalidation wait (6.5.2.9).
    pub const WAIT: u64 = 5;
}

/// Granularity of context-cache and IOTLB invalidations, in descriptors (bits 4 and 5)
/// and in the register interface (11.4.6) alike.
pub mod granularity {
    /// Everything the unit caches.
    pub const GLOBAL: u64 = 1;
    /// One domain id.
    pub const DOMAIN: u64 = 2;
    /// One device (context cache) or one block of pages (IOTLB).
    pub const NARROW: u64 = 3;
}

/// Lowest bit of the granularity (6.5.2.1, 6.5.2.3).
pub const GRANULARITY_LOW: u32 = 4;
/// Lowest bit of the domain id (6.5.2.1, 6.5.2.3).
pub const DOMAIN_LOW: u32 = 16;
/// Lowest bit of the source id (6.5.2.1, 6.5.2.5).
pub const SOURCE_LOW: u32 = 32;
/// Drain writes, in the low quadword of an IOTLB descriptor (6.5.2.3).
pub const DRAIN_WRITES: u64 = 1 << 6;
/// Drain reads, in the low quadword of an IOTLB descriptor (6.5.2.3).
pub const DRAIN_READS: u64 = 1 << 7;
/// Invalidation hint, in the high quadword of an IOTLB descriptor and in the
/// invalidate address register: no entry that points at a table changed (6.5.2.3, 11.4.6.4).
pub const HINT_LEAVES_ONLY: u64 = 1 << 6;
/// Lowest bit of the most invalidations a device takes at a time, 5 bits, 0 for 32 (6.5.2.5).
pub const MAX_PENDING_LOW: u32 = 16;
/// The physical function's source id, spread over the low quadword of a device-TLB
/// descriptor: its lowest 4 bits from bit 12 on, the other 12 from bit 52 on (6.5.2.5).
#[must_use]
pub const fn physical_function(source: u16) -> u64 {
    (source as u64 & 0xf) << 12 | (source as u64 >> 4) << 52
}
/// Size bit of a device-TLB descriptor's high quadword: more than one page (6.5.2.5).
pub const DEVICE_SIZE: u64 = 1;
/// Status write, in the low quadword of a wait descriptor (6.5.2.9).
pub const WAIT_STATUS_WRITE: u64 = 1 << 5;
/// Lowest bit of a wait descriptor's status data, 32 bits (6.5.2.9).
pub const WAIT_DATA_LOW: u32 = 32;

impl Descriptor {
    /// A wait that stores `data` at `address` once everything ahead of it, up to the wait
    /// before it, has completed (6.5.2.12).
    ///
    /// `address` is a multiple of 4; lower bits are dropped. The interrupt flag stays
    /// clear: completion is polled (6.5.2.9).
    #[must_use]
    pub const fn wait(address: u64, data: u32) -> Self {
        Self {
            low: kind::WAIT | WAIT_STATUS_WRITE | (data as u64) << WAIT_DATA_LOW,
            high: address & !3,
        }
    }
}
