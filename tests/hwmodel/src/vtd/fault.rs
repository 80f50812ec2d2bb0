//! Translation faults: reasons, records, overflow
//!
//! A [`FaultReason`] is what a request runs into; a [`FaultRecord`] is what the unit writes down about it
//! (VT-d specification, chapter 7 on faults and section 11.4 on the fault recording registers).

use super::Unit;
use super::registers::{FECTL_IM, FECTL_IP, FSTS_PFO, FSTS_PPF};

/// Why a request was refused, with the manual's legacy-mode codes.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
#[repr(u8)]
pub enum FaultReason {
    /// The root entry is not present.
    RootNotPresent = 0x1,
    /// The context entry is not present.
    ContextNotPresent = 0x2,
    /// The context entry asks for something the unit cannot do.
    ContextInvalid = 0x3,
    /// The address is beyond the width of the unit or of the context.
    Width = 0x4,
    /// A write that the tables do not allow; a not-present entry counts as allowing nothing.
    Write = 0x5,
    /// A read that the tables do not allow.
    Read = 0x6,
    /// A table is not RAM.
    TableAccess = 0x7,
    /// The root table is not RAM.
    RootTableAccess = 0x8,
    /// The context table is not RAM.
    ContextTableAccess = 0x9,
    /// Reserved bits in the root entry.
    RootReserved = 0xa,
    /// Reserved bits in the context entry.
    ContextReserved = 0xb,
    /// Reserved bits in a paging entry.
    EntryReserved = 0xc,
    /// A translation request, but the context does not allow device TLBs.
    TranslationRequestBlocked = 0xd,
}

/// One fault record, decoded.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct FaultRecord {
    /// The device.
    pub sid: u16,
    /// Device page number.
    pub page: u64,
    /// Reason code.
    pub reason: u8,
    /// It was a read.
    pub read: bool,
}

impl FaultRecord {
    /// Reads the two words of a record; `None` if its fault bit is clear.
    #[must_use]
    pub const fn from_words(low: u64, high: u64) -> Option<Self> {
        if high >> 63 == 0 {
            return None;
        }
        Some(Self {
            sid: high as u16,
            page: low >> 12,
            reason: (high >> 32) as u8,
            read: (high >> 62) & 1 != 0,
        })
    }

    const fn to_words(self) -> (u64, u64) {
        let read = if self.read { 1 << 62 } else { 0 };
        (self.page << 12, (1 << 63) | read | ((self.reason as u64) << 32) | self.sid as u64)
    }
}

impl Unit {
    /// Writes a fault down: collapsed if the same source is on record, overflow if there is no room.
    pub(super) fn record_fault(&mut self, sid: u16, iova: u64, reason: FaultReason, read: bool) {
        self.counters.faults_recorded = self.counters.faults_recorded.saturating_add(1);
        let record = FaultRecord { sid, page: iova >> 12, reason: reason as u8, read };
        let same_source = self
            .records
            .iter()
            .filter_map(|(low, high)| FaultRecord::from_words(*low, *high))
            .any(|pending| pending.sid == sid);
        if same_source || self.fsts & FSTS_PFO != 0 {
            self.counters.faults_recorded = self.counters.faults_recorded.saturating_sub(1);
            return;
        }
        let index = self.next_record;
        let Some(slot) = self.records.get_mut(index) else {
            return;
        };
        if slot.1 >> 63 != 0 {
            self.counters.faults_recorded = self.counters.faults_recorded.saturating_sub(1);
            self.fsts |= FSTS_PFO;
            self.fault_event();
            return;
        }
        *slot = record.to_words();
        self.next_record = (index + 1) % self.records.len();
        if self.fsts & FSTS_PPF == 0 {
            // The index of the first pending record.
            self.fsts = (self.fsts & !0xff00) | ((index as u32 & 0xff) << 8);
        }
        self.fsts |= FSTS_PPF;
        self.fault_event();
    }

    /// The fault bit of a record was cleared by software.
    pub(super) fn clear_record(&mut self, index: usize) {
        if let Some(slot) = self.records.get_mut(index) {
            slot.1 &= !(1 << 63);
        }
        if self.records.iter().all(|slot| slot.1 >> 63 == 0) {
            self.fsts &= !FSTS_PPF;
        }
    }

    /// Raises the fault event, or marks it pending if masked.
    pub(super) fn fault_event(&mut self) {
        if self.fectl & FECTL_IM != 0 {
            self.fectl |= FECTL_IP;
        } else {
            self.counters.fault_interrupts = self.counters.fault_interrupts.saturating_add(1);
        }
    }
}
