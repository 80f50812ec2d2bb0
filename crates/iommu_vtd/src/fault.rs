//! Faults of devices, as a unit recorded them.
//!
//! A [`Fault`] says which requester was refused what, and why. Records are read and
//! cleared together, so that each is reported once.

use flush::Dfn;

use crate::spec::fault::{self, reason};
use crate::spec::registers::{FSTS, fault_status};
use crate::unit::{Unit, UnitState};
use crate::{Guarded, Mmio, Platform, SourceId};

/// Why a request was refused (7.1.3).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reason {
    /// The requester belongs to no domain.
    NotAttached,
    /// The address is wider than the domain's tables or the unit allow.
    AddressWidth,
    /// A write to a page that is absent or not writable.
    NotWritable,
    /// A read of a page that is absent or not readable.
    NotReadable,
    /// A table or entry that the unit could not read or does not accept.
    Malformed(u8),
    /// A device-TLB request of a requester that has no leave for it.
    DeviceTlbBlocked,
    /// Any other code.
    Other(u8),
}

impl Reason {
    /// The reason for a code of the fault record.
    #[must_use]
    pub const fn from_code(code: u8) -> Self {
        match code {
            reason::ROOT_NOT_PRESENT | reason::CONTEXT_NOT_PRESENT => Self::NotAttached,
            reason::ADDRESS_WIDTH => Self::AddressWidth,
            reason::NOT_WRITABLE => Self::NotWritable,
            reason::NOT_READABLE => Self::NotReadable,
            reason::CONTEXT_INVALID
            | reason::TABLE_ACCESS
            | reason::ROOT_ACCESS
            | reason::CONTEXT_ACCESS
            | reason::ROOT_RESERVED
            | reason::CONTEXT_RESERVED
            | reason::TABLE_RESERVED => Self::Malformed(code),
            reason::TYPE_BLOCKED => Self::DeviceTlbBlocked,
            other => Self::Other(other),
        }
    }
}

/// What the device tried.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Request {
    /// A read.
    Read,
    /// A write.
    Write,
}

/// One recorded fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fault {
    /// Who asked.
    pub source: SourceId,
    /// The page it asked for.
    pub page: Dfn,
    /// What for.
    pub request: Request,
    /// Why it was refused.
    pub reason: Reason,
}

/// What [`Unit::take_faults`] found.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FaultSummary {
    /// Records reported and cleared.
    pub records: u16,
    /// Faults beyond the records were lost.
    pub overflowed: bool,
}

impl<P: Platform, R: Mmio, L: Guarded<UnitState>> Unit<P, R, L> {
    /// Reports every recorded fault, oldest first, and frees the records.
    ///
    /// One sweep over the unit's records, however fast devices fault: call it again to
    /// see later ones. One CPU at a time; two would report a fault twice.
    pub fn take_faults(&self, mut report: impl FnMut(Fault)) -> FaultSummary {
        let status = self.registers.read32(FSTS);
        let mut summary = FaultSummary::default();
        if status & (fault_status::PENDING | fault_status::OVERFLOW) == 0 {
            return summary;
        }
        let count = self.capabilities().fault_records();
        let start = fault_status::first_record(status);
        for step in 0..count {
            let index = start.wrapping_add(step) % count;
            let offset = self.record_offset(index);
            let high = self.registers.read64(offset + 8);
            if !fault::is_set(high) {
                continue;
            }
            let low = self.registers.read64(offset);
            self.registers.write32(offset + fault::FAULT_WORD, fault::FAULT_BIT);
            summary.records += 1;
            report(Fault {
                source: SourceId::new(fault::source(high)),
                page: Dfn::new(fault::page(low)),
                request: if fault::is_read(high) { Request::Read } else { Request::Write },
                reason: Reason::from_code(fault::reason(high)),
            });
        }
        if status & fault_status::OVERFLOW != 0 {
            summary.overflowed = true;
            // Recording goes on once every record and then the overflow is clear (7.2.1).
            self.registers.write32(FSTS, fault_status::OVERFLOW);
        }
        summary
    }

    /// Clears every record without a look at it.
    pub(crate) fn forget_faults(&self) {
        for index in 0..self.capabilities().fault_records() {
            let offset = self.record_offset(index);
            if fault::is_set(self.registers.read64(offset + 8)) {
                self.registers.write32(offset + fault::FAULT_WORD, fault::FAULT_BIT);
            }
        }
    }

    fn record_offset(&self, index: u16) -> u32 {
        self.capabilities().fault_offset() + u32::from(index) * fault::RECORD_SIZE
    }
}
