//! What the backend's device does, and what becomes of it.
//!
//! Every write is judged by memory and by the fault record: the controller itself
//! reports success for data that was refused.

use core::sync::atomic::Ordering;

use arrayvec::ArrayVec;
use flush::{Gfn, Mfn};
use iommu_vtd::{Device, Fault, FaultSummary, Guarded, Reason, Request};
use testbed::address::BusAddress;
use testbed::failure::{Context, Failure};
use testbed::nvme::Command;
use testbed::{ensure, fail};

use super::World;
use crate::devices::edu::Edu;
use crate::embedding::Guest;
use crate::{memory, poison};

/// The bus address of a page.
pub(crate) fn address(gfn: Gfn) -> Result<BusAddress, Failure> {
    BusAddress::of_frame(gfn.into()).context("bus address")
}

/// The words of an edu transfer that writes the end of a page.
const TAIL: usize = 1;

impl World {
    /// Let the controller write the whole page at `gfn`, wherever that ends.
    ///
    /// # Errors
    /// If it does not take commands any more.
    pub(crate) fn write_page(&self, gfn: Gfn) -> Result<(), Failure> {
        let command = Command::Identify(address(gfn)?);
        Ok(self.nvme.with(|nvme| nvme.run(command))?)
    }

    /// Let the controller read 8 bytes at `gfn`.
    ///
    /// # Errors
    /// If it does not take commands any more.
    pub(crate) fn read_page(&self, gfn: Gfn) -> Result<(), Failure> {
        let command = Command::SetTimestamp(address(gfn)?);
        Ok(self.nvme.with(|nvme| nvme.run(command))?)
    }

    /// What the controller's clock, in milliseconds, shows: what it
    /// [read](Self::read_page) last, and the time since then.
    ///
    /// # Errors
    /// If `guest`, which has the controller, has no memory for the answer, or the
    /// controller does not take commands any more.
    pub(crate) fn timestamp(&self, guest: &Guest) -> Result<u64, Failure> {
        let (frame, answer) = self.queue(guest, 2)?;
        self.nvme.with(|nvme| nvme.run(Command::GetTimestamp(answer)))?;
        let words = memory::words(frame).context("an answer")?;
        Ok(words[0].load(Ordering::SeqCst) & ((1 << 48) - 1))
    }

    /// Stop the controller: it starts no more DMA.
    ///
    /// # Errors
    /// If it does not stop.
    pub(crate) fn stop_controller(&self) -> Result<(), Failure> {
        Ok(self.nvme.with(|nvme| nvme.stop())?)
    }

    /// Whether a write of the controller to `gfn` reaches `frame`.
    ///
    /// The frame is poisoned first. It may have been released: that is the point.
    ///
    /// # Errors
    /// If the write was torn, or the controller is lost.
    pub(crate) fn lands(&self, gfn: Gfn, frame: Mfn) -> Result<bool, Failure> {
        let words = poison::fill(frame)?;
        self.write_page(gfn)?;
        match words.iter().filter(|word| !poison::is_left(word)).count() {
            0 => Ok(false),
            512 => Ok(true),
            some => fail!("{some} words of {frame:?} were written"),
        }
    }

    /// Whether a write of `edu` to the last 8 bytes of the page at `gfn` reaches `frame`.
    ///
    /// # Errors
    /// If another word was written, or the device is lost.
    pub(crate) fn edu_lands(edu: &Edu, gfn: Gfn, frame: Mfn) -> Result<bool, Failure> {
        let words = poison::fill(frame)?;
        Self::edu_writes(edu, gfn)?;
        let (body, tail) = words.split_at(words.len() - TAIL);
        ensure!(body.iter().all(poison::is_left), "another word of {frame:?} was written");
        Ok(!tail.iter().all(poison::is_left))
    }

    /// Let `edu` write to the last 8 bytes of the page at `gfn`, wherever that ends.
    ///
    /// # Errors
    /// If the device is lost.
    pub(crate) fn edu_writes(edu: &Edu, gfn: Gfn) -> Result<(), Failure> {
        let at = address(gfn)?.checked_add(4096 - 8).context("bus address")?;
        Ok(edu.write_memory(at, 8)?)
    }

    /// The recorded faults, and whether more were lost; the records are free again.
    pub(crate) fn faults(&self) -> (ArrayVec<Fault, 4>, FaultSummary) {
        let mut list = ArrayVec::new();
        let summary = self.unit().take_faults(|fault| {
            // More than four records would show in the summary.
            list.try_push(fault).ok();
        });
        (list, summary)
    }

    /// The one fault on record must be that `device` was refused `request` at `gfn`.
    ///
    /// # Errors
    /// If it is not, or there is none, or more than one.
    pub(crate) fn refused(
        &self,
        device: Device,
        request: Request,
        gfn: Gfn,
        reason: Reason,
    ) -> Result<(), Failure> {
        let expected = Fault { source: device.source, page: gfn.into(), request, reason };
        let (faults, summary) = self.faults();
        ensure!(
            *faults == [expected] && summary.records == 1 && !summary.overflowed,
            "expected {expected:x?}, found {faults:x?} with {summary:?}"
        );
        Ok(())
    }

    /// A write of the controller to `gfn` must not reach `frame`, and leave its fault.
    ///
    /// # Errors
    /// If it reaches it, or the fault record says something else.
    pub(crate) fn is_kept_out(&self, gfn: Gfn, frame: Mfn) -> Result<(), Failure> {
        ensure!(!self.lands(gfn, frame)?, "a write through {gfn:?} reached {frame:?}");
        self.refused(self.controller, Request::Write, gfn, Reason::NotWritable)
    }

    /// There must be no fault on record.
    ///
    /// # Errors
    /// If there is one.
    pub(crate) fn no_fault(&self) -> Result<(), Failure> {
        let (faults, summary) = self.faults();
        ensure!(summary == FaultSummary::default(), "{faults:x?} with {summary:?}");
        Ok(())
    }
}
