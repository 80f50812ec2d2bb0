//! What a unit can do, and how its capability registers say so
//!
//! [`UnitConfig`] is the one description: the register values and the unit's behaviour both follow from it
//! (VT-d specification, sections 11.4.2 "capability register" and 11.4.3 "extended capability register").

use crate::decode::Limits;

/// A unit's capabilities and the freedom the model takes with it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct UnitConfig {
    /// Page-selective invalidation (CAP.PSI).
    pub page_selective: bool,
    /// Largest address mask of a page-selective invalidation (CAP.MAMV), 0..=63.
    pub max_address_mask: u8,
    /// Not-present entries may be cached (CAP.CM).
    pub caching_mode: bool,
    /// Host writes wait in a buffer until flushed (CAP.RWBF).
    pub write_buffer: bool,
    /// Table walks snoop the processors' caches (ECAP.C).
    pub coherent: bool,
    /// Three levels, 39 bits (CAP.SAGAW bit 1).
    pub levels_3: bool,
    /// Four levels, 48 bits (CAP.SAGAW bit 2).
    pub levels_4: bool,
    /// Five levels, 57 bits (CAP.SAGAW bit 3).
    pub levels_5: bool,
    /// Width of device addresses in bits (CAP.MGAW + 1).
    pub address_bits: u8,
    /// Leaves of 2 MiB (CAP.SLLPS bit 0).
    pub large_2m: bool,
    /// Leaves of 1 GiB (CAP.SLLPS bit 1).
    pub large_1g: bool,
    /// Bits of a domain id that are told apart: 4, 6, .., 16 (CAP.ND).
    pub domain_id_bits: u8,
    /// The invalidation queue exists (ECAP.QI).
    pub queue: bool,
    /// Device TLBs exist (ECAP.DT).
    pub device_tlb: bool,
    /// Pass-through contexts exist (ECAP.PT).
    pub pass_through: bool,
    /// The snoop bit exists (ECAP.SC).
    pub snoop: bool,
    /// Drain bits exist for writes (CAP.DWD). Without it every IOTLB invalidation drains writes.
    pub drain_writes: bool,
    /// Drain bits exist for reads (CAP.DRD). Without it every IOTLB invalidation drains reads.
    pub drain_reads: bool,
    /// Byte offset of the IOTLB registers: a multiple of 16 (ECAP.IRO).
    pub iotlb_offset: u16,
    /// Byte offset of the fault records: a multiple of 16 (CAP.FRO).
    pub fault_offset: u16,
    /// Fault records, 1..=256 (CAP.NFR + 1).
    pub fault_records: u16,
    /// Width of host addresses in bits.
    pub physical_bits: u8,
    /// Ticks from fetching a command to carrying it out, and from a register command to its status. At least 1.
    pub latency: u32,
    /// Commands the unit fetches ahead.
    pub fetch_ahead: usize,
    /// A page-selective invalidation of a part of a large cached entry drops the entry, as QEMU does. The manual
    /// wants the entry's own order, so this is off unless asked for.
    pub small_mask_drops_large: bool,
}

impl Default for UnitConfig {
    /// Coherent, queue, page-selective up to 2^18 pages, 3 and 4 levels, 2 MiB and 1 GiB leaves, 16-bit domain
    /// ids, drain bits, device TLBs, one fault record at 0x220, IOTLB registers at 0xf0.
    fn default() -> Self {
        Self {
            page_selective: true,
            max_address_mask: 18,
            caching_mode: false,
            write_buffer: false,
            coherent: true,
            levels_3: true,
            levels_4: true,
            levels_5: false,
            address_bits: 48,
            large_2m: true,
            large_1g: true,
            domain_id_bits: 16,
            queue: true,
            device_tlb: true,
            pass_through: true,
            snoop: true,
            drain_writes: true,
            drain_reads: true,
            iotlb_offset: 0xf0,
            fault_offset: 0x220,
            fault_records: 1,
            physical_bits: 46,
            latency: 2,
            fetch_ahead: 8,
            small_mask_drops_large: false,
        }
    }
}

impl UnitConfig {
    /// The capability register.
    #[must_use]
    pub fn cap(&self) -> u64 {
        let flag = |on: bool, bit: u32| u64::from(on) << bit;
        let domains = u64::from(self.domain_id_bits.clamp(4, 16) - 4) / 2;
        domains
            | flag(self.write_buffer, 4)
            | flag(self.caching_mode, 7)
            | flag(self.levels_3, 9)
            | flag(self.levels_4, 10)
            | flag(self.levels_5, 11)
            | (u64::from(self.address_bits.clamp(1, 64) - 1) << 16)
            | ((u64::from(self.fault_offset) / 16) << 24)
            | flag(self.large_2m, 34)
            | flag(self.large_1g, 35)
            | flag(self.page_selective, 39)
            | (u64::from(self.fault_records.clamp(1, 256) - 1) << 40)
            | (u64::from(self.max_address_mask & 63) << 48)
            | flag(self.drain_writes, 54)
            | flag(self.drain_reads, 55)
    }

    /// The extended capability register.
    #[must_use]
    pub fn ecap(&self) -> u64 {
        let flag = |on: bool, bit: u32| u64::from(on) << bit;
        flag(self.coherent, 0)
            | flag(self.queue, 1)
            | flag(self.device_tlb, 2)
            | flag(self.pass_through, 6)
            | flag(self.snoop, 7)
            | ((u64::from(self.iotlb_offset) / 16) << 8)
    }

    /// The part of a domain id that the caches tell apart.
    #[must_use]
    pub(crate) fn tag(&self, did: u16) -> u16 {
        let bits = u32::from(self.domain_id_bits.clamp(4, 16));
        did & ((1_u32 << bits) - 1) as u16
    }

    /// Levels of table for a context entry's address width, if supported.
    #[must_use]
    pub(crate) fn levels(&self, width: u64) -> Option<u8> {
        match width {
            1 if self.levels_3 => Some(3),
            2 if self.levels_4 => Some(4),
            3 if self.levels_5 => Some(5),
            _ => None,
        }
    }

    pub(crate) fn limits(&self) -> Limits {
        Limits {
            physical_bits: self.physical_bits,
            large_2m: self.large_2m,
            large_1g: self.large_1g,
            execute_only: false,
            snoop: self.snoop,
            transient: self.device_tlb,
        }
    }
}
