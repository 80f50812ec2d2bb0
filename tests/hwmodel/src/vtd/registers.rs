//! The register file: offsets, bits, and what a read or write does
//!
//! Offsets and bits are those of the VT-d specification, section 11.4 "register descriptions". Registers of 64
//! bits may be accessed in halves; a command in the upper half is given by the write that contains it.

use super::Unit;
use super::dma::Fabric;
use crate::failure::{Failure, Misuse, OperationKind};
use crate::machine::Machine;
use crate::types::UnitId;
use crate::world::World;

/// Version, 32 bits.
pub const VER: u64 = 0x00;
/// Capabilities, 64 bits.
pub const CAP: u64 = 0x08;
/// Extended capabilities, 64 bits.
pub const ECAP: u64 = 0x10;
/// Global command, 32 bits.
pub const GCMD: u64 = 0x18;
/// Global status, 32 bits.
pub const GSTS: u64 = 0x1c;
/// Root table address, 64 bits.
pub const RTADDR: u64 = 0x20;
/// Context command, 64 bits.
pub const CCMD: u64 = 0x28;
/// Fault status, 32 bits.
pub const FSTS: u64 = 0x34;
/// Fault event control, 32 bits.
pub const FECTL: u64 = 0x38;
/// Invalidation queue head, 64 bits.
pub const IQH: u64 = 0x80;
/// Invalidation queue tail, 64 bits.
pub const IQT: u64 = 0x88;
/// Invalidation queue address, 64 bits.
pub const IQA: u64 = 0x90;
/// Invalidation completion status, 32 bits.
pub const ICS: u64 = 0x9c;
/// Invalidation event control, 32 bits.
pub const IECTL: u64 = 0xa0;

/// GCMD: translation enable.
pub const GCMD_TE: u32 = 1 << 31;
/// GCMD: set root table pointer.
pub const GCMD_SRTP: u32 = 1 << 30;
/// GCMD: flush the write buffer.
pub const GCMD_WBF: u32 = 1 << 27;
/// GCMD: queued invalidation enable.
pub const GCMD_QIE: u32 = 1 << 26;
/// GSTS: translation is on.
pub const GSTS_TES: u32 = 1 << 31;
/// GSTS: the root table pointer is set.
pub const GSTS_RTPS: u32 = 1 << 30;
/// GSTS: the write buffer is being flushed.
pub const GSTS_WBFS: u32 = 1 << 27;
/// GSTS: queued invalidation is on.
pub const GSTS_QIES: u32 = 1 << 26;
/// FSTS: primary fault overflow, write 1 to clear.
pub const FSTS_PFO: u32 = 1 << 0;
/// FSTS: a fault record is pending.
pub const FSTS_PPF: u32 = 1 << 1;
/// FSTS: invalidation queue error, write 1 to clear.
pub const FSTS_IQE: u32 = 1 << 4;
/// FSTS: invalidation completion error, write 1 to clear.
pub const FSTS_ICE: u32 = 1 << 5;
/// FSTS: invalidation time-out error, write 1 to clear.
pub const FSTS_ITE: u32 = 1 << 6;
/// FECTL and IECTL: interrupt mask.
pub const FECTL_IM: u32 = 1 << 31;
/// FECTL and IECTL: interrupt pending.
pub const FECTL_IP: u32 = 1 << 30;
/// ICS: a wait with the interrupt flag has completed, write 1 to clear.
pub const ICS_IWC: u32 = 1;
/// CCMD: invalidate the context cache; stays set until done.
pub const CCMD_ICC: u64 = 1 << 63;
/// IOTLB register: invalidate; stays set until done.
pub const IOTLB_IVT: u64 = 1 << 63;
/// IOTLB register: lowest bit of the granularity asked for.
pub const IOTLB_IIRG_SHIFT: u32 = 60;
/// IOTLB register: lowest bit of the granularity carried out.
pub const IOTLB_IAIG_SHIFT: u32 = 57;
/// IQA: log2 of the ring's pages.
pub const IQA_SIZE: u64 = 7;

/// GCMD bits that hold a state (TE, EAFL, QIE, IRE, CFI).
const LEVEL_COMMANDS: u32 = GCMD_TE | (1 << 28) | GCMD_QIE | (1 << 25) | (1 << 23);
/// GCMD bits that start something (SRTP, SFL, WBF, SIRTP).
const ONE_SHOT_COMMANDS: u32 = GCMD_SRTP | (1 << 29) | GCMD_WBF | (1 << 24);
/// FSTS bits that software clears by writing 1.
const FSTS_CLEARABLE: u32 = FSTS_PFO | (3 << 2) | FSTS_IQE | FSTS_ICE | FSTS_ITE;

impl Unit {
    fn iva_offset(&self) -> u64 {
        u64::from(self.config.iotlb_offset)
    }

    /// Which fault record, and which word of it, lies at `offset`.
    fn record_at(&self, offset: u64) -> Option<(usize, bool)> {
        let within = offset.checked_sub(u64::from(self.config.fault_offset))?;
        let index = usize::try_from(within / 16).ok()?;
        (index < self.records.len()).then_some((index, within & 8 != 0))
    }

    /// The 8 bytes at `offset`, a multiple of 8.
    fn read_word(&self, offset: u64) -> u64 {
        let pair = |low: u32, high: u32| u64::from(low) | (u64::from(high) << 32);
        if let Some((index, upper)) = self.record_at(offset) {
            let record = self.records.get(index).copied().unwrap_or_default();
            return if upper { record.1 } else { record.0 };
        }
        if offset == self.iva_offset().saturating_add(8) {
            return self.iotlb_register;
        }
        match offset {
            VER => 0x10,
            CAP => self.config.cap(),
            ECAP => self.config.ecap(),
            // GCMD is write-only.
            GCMD => pair(0, self.gsts),
            RTADDR => self.root_register,
            CCMD => self.ccmd,
            0x30 => pair(0, self.fsts),
            FECTL => pair(self.fectl, self.plain_word(0x3c)),
            IQH => self.iqh,
            IQT => self.iqt,
            IQA => self.iqa,
            0x98 => pair(0, self.ics),
            IECTL => pair(self.iectl, self.plain_word(0xa4)),
            _ => pair(self.plain_word(offset), self.plain_word(offset.saturating_add(4))),
        }
    }

    fn plain_word(&self, offset: u64) -> u32 {
        self.plain.get(&offset).copied().unwrap_or(0)
    }

    /// A read of 8 bytes: time passes first.
    fn read(&mut self, world: &mut World, fabric: &mut Fabric, offset: u64) -> u64 {
        self.counters.register_reads = self.counters.register_reads.saturating_add(1);
        self.tick(world, fabric);
        self.read_word(offset & !7)
    }

    /// A write of the bytes of the 8 at `offset` that `mask` covers.
    fn write(&mut self, world: &mut World, offset: u64, value: u64, mask: u64) {
        self.counters.register_writes = self.counters.register_writes.saturating_add(1);
        match world.operation(OperationKind::RegisterWrite) {
            None | Some(Failure::CompletionError) => {}
            // Lost on the way.
            Some(Failure::Hang | Failure::QueueError | Failure::TimeOut) => return,
        }
        let offset = offset & !7;
        let low = (mask & 0xffff_ffff != 0).then_some(value as u32);
        let high = (mask >> 32 != 0).then_some((value >> 32) as u32);
        let merge = |old: u64| (old & !mask) | (value & mask);
        if let Some((index, upper)) = self.record_at(offset) {
            if upper && value & mask & (1 << 63) != 0 {
                self.clear_record(index);
            }
            return;
        }
        if offset == self.iva_offset() {
            self.iva = merge(self.iva);
            return;
        }
        if offset == self.iva_offset().saturating_add(8) {
            let written = merge(self.iotlb_register);
            self.write_iotlb(world, written);
            return;
        }
        match offset {
            VER | CAP | ECAP | IQH => {}
            GCMD => {
                if let Some(command) = low {
                    self.write_command(world, command);
                }
            }
            RTADDR => self.root_register = merge(self.root_register),
            CCMD => {
                let written = merge(self.ccmd);
                self.write_ccmd(world, written);
            }
            0x30 => {
                if let Some(clear) = high {
                    self.fsts &= !(clear & FSTS_CLEARABLE);
                }
            }
            FECTL => {
                if let Some(control) = low {
                    let raised = unmask(&mut self.fectl, control);
                    self.counters.fault_interrupts =
                        self.counters.fault_interrupts.saturating_add(raised);
                }
                self.write_plain(0x3c, high);
            }
            IQT => self.write_tail(world, merge(self.iqt)),
            IQA => {
                if self.gsts & GSTS_QIES != 0 {
                    world.misuse(Misuse::QueueMovedWhileOn);
                }
                self.iqa = merge(self.iqa);
            }
            0x98 => {
                if let Some(clear) = high {
                    self.ics &= !(clear & ICS_IWC);
                }
            }
            IECTL => {
                if let Some(control) = low {
                    let raised = unmask(&mut self.iectl, control);
                    self.counters.completion_interrupts =
                        self.counters.completion_interrupts.saturating_add(raised);
                }
                self.write_plain(0xa4, high);
            }
            _ => {
                self.write_plain(offset, low);
                self.write_plain(offset.saturating_add(4), high);
            }
        }
    }

    fn write_plain(&mut self, offset: u64, value: Option<u32>) {
        if let Some(value) = value {
            self.plain.insert(offset, value);
        }
    }

    fn write_command(&mut self, world: &mut World, command: u32) {
        if self.command_pending.is_some() {
            world.misuse(Misuse::CommandWhilePending);
            return;
        }
        let mut levels = command & LEVEL_COMMANDS;
        if !self.config.queue {
            levels &= !GCMD_QIE;
        }
        let one_shots = command & ONE_SHOT_COMMANDS;
        let changes = (levels ^ (self.gsts & LEVEL_COMMANDS)) | one_shots;
        if changes.count_ones() > 1 {
            world.misuse(Misuse::SeveralCommands(changes));
        }
        let target = levels | (self.gsts & !LEVEL_COMMANDS) | one_shots;
        if one_shots & GCMD_SRTP != 0 {
            self.gsts &= !GSTS_RTPS;
        }
        if one_shots & GCMD_WBF != 0 {
            self.counters.write_buffer_flushes =
                self.counters.write_buffer_flushes.saturating_add(1);
            self.gsts |= GSTS_WBFS;
        }
        self.command_pending = Some((target, self.config.latency.max(1)));
    }

    fn write_ccmd(&mut self, world: &mut World, value: u64) {
        if self.ccmd & CCMD_ICC != 0 {
            world.misuse(Misuse::RegisterInvalidationPending);
            return;
        }
        self.ccmd = value;
        if value & CCMD_ICC == 0 {
            return;
        }
        if self.gsts & GSTS_QIES != 0 {
            world.misuse(Misuse::RegisterInvalidationWithQueue);
        } else {
            self.register_context = Some(self.config.latency.max(1));
        }
    }

    fn write_iotlb(&mut self, world: &mut World, value: u64) {
        if self.iotlb_register & IOTLB_IVT != 0 {
            world.misuse(Misuse::RegisterInvalidationPending);
            return;
        }
        self.iotlb_register = value;
        if value & IOTLB_IVT == 0 {
            return;
        }
        if self.gsts & GSTS_QIES != 0 {
            world.misuse(Misuse::RegisterInvalidationWithQueue);
        } else {
            self.register_iotlb = Some(self.config.latency.max(1));
        }
    }

    fn write_tail(&mut self, world: &mut World, value: u64) {
        self.counters.tail_writes = self.counters.tail_writes.saturating_add(1);
        if value & 15 != 0 || value >= self.ring_bytes() {
            world.misuse(Misuse::BadTail(value));
            return;
        }
        self.iqt = value;
        self.fetch(world);
    }

    /// A wait with the interrupt flag is done.
    pub(super) fn completion_event(&mut self) {
        if self.ics & ICS_IWC != 0 {
            return;
        }
        self.ics |= ICS_IWC;
        if self.iectl & FECTL_IM != 0 {
            self.iectl |= FECTL_IP;
        } else {
            self.counters.completion_interrupts =
                self.counters.completion_interrupts.saturating_add(1);
        }
    }
}

/// Writes an event control register; 1 if that raises the pending interrupt.
fn unmask(register: &mut u32, value: u32) -> u64 {
    let pending = *register & FECTL_IP;
    *register = (value & FECTL_IM) | pending;
    if pending != 0 && value & FECTL_IM == 0 {
        *register &= !FECTL_IP;
        return 1;
    }
    0
}

/// Registers of a unit. Each method panics for a unit that the machine does not have; offsets beyond the register
/// file read as zero. Every read lets the unit work for one tick first.
impl Machine {
    /// Reads 4 bytes at a multiple of 4.
    #[must_use]
    pub fn register_read32(&self, unit: UnitId, offset: u64) -> u32 {
        let word = self.register_read64(unit, offset & !7);
        if offset & 4 == 0 { word as u32 } else { (word >> 32) as u32 }
    }

    /// Reads 8 bytes at a multiple of 8.
    #[must_use]
    pub fn register_read64(&self, unit: UnitId, offset: u64) -> u64 {
        self.with(|state| {
            state.world.step();
            state.units[unit.0].read(&mut state.world, &mut state.fabric, offset)
        })
    }

    /// Writes 4 bytes at a multiple of 4.
    pub fn register_write32(&self, unit: UnitId, offset: u64, value: u32) {
        let (value, mask) = if offset & 4 == 0 {
            (u64::from(value), 0xffff_ffff)
        } else {
            (u64::from(value) << 32, 0xffff_ffff << 32)
        };
        self.register_write(unit, offset, value, mask);
    }

    /// Writes 8 bytes at a multiple of 8.
    pub fn register_write64(&self, unit: UnitId, offset: u64, value: u64) {
        self.register_write(unit, offset, value, u64::MAX);
    }

    fn register_write(&self, unit: UnitId, offset: u64, value: u64, mask: u64) {
        self.with(|state| {
            state.world.step();
            state.units[unit.0].write(&mut state.world, offset, value, mask);
        });
    }
}
