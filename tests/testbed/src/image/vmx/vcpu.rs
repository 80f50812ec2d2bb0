//! One virtual processor: a stay in the guest, and why it ended.
//!
//! Whether the processor has to forget translations first is not decided here:
//! [`GuestCpus::enter`] does, and has INVEPT executed by `p2m`.

use core::fmt;

use p2m::hardware::vmx::{Ept, InveptError};
use p2m::{EnterError, GuestCpus};
use testbed::failure::Failure;
use testbed::vmx::Violation;

use super::Guest;
use super::enter::{self, Registers};
use super::processor::{ControlStructure, VmxError, VmxProcessor};
use super::program::Command;
use super::spec::{Field, reason};
use crate::arch;

/// One virtual processor, bound to the processor that made it.
pub(crate) struct Vcpu<'p> {
    /// Its general registers but RSP.
    pub(crate) registers: Registers,
    structure: ControlStructure<'p>,
    ept: Ept<'p>,
    entry: u64,
    is_launched: bool,
}

/// Why a stay in the guest ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Exit {
    /// CPUID.
    Identify,
    /// HLT.
    Halt,
    /// VMCALL.
    Call,
    /// An interrupt is pending for this side, or was taken by now: a kick.
    Interrupt,
    /// The EPT did not allow an access.
    Violation {
        /// The guest-physical address.
        at: u64,
        /// The guest-linear address, if it is known.
        linear: Option<u64>,
        /// The access and the rights.
        what: Violation,
    },
    /// An exception with this vector.
    Exception(u8),
    /// A triple fault.
    Shutdown,
    /// The guest's state is not as an entry wants it; it was not entered.
    Refused,
    /// Any other basic exit reason.
    Other(u16),
}

/// A guest was not entered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum NotRun {
    /// A VMX instruction failed.
    Vmx(VmxError),
    /// Stale translations may still be there.
    Enter(EnterError<InveptError>),
}

impl fmt::Display for NotRun {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Vmx(error) => error.fmt(f),
            Self::Enter(error) => error.fmt(f),
        }
    }
}

impl core::error::Error for NotRun {}

impl From<VmxError> for NotRun {
    fn from(error: VmxError) -> Self {
        Self::Vmx(error)
    }
}

impl<'p> Vcpu<'p> {
    /// A virtual processor of `guest` that starts at `entry`, in flat 32-bit protected mode
    /// with paging off and interrupts on.
    ///
    /// # Errors
    /// If memory is short, or this processor lacks what it takes.
    pub(crate) fn new(
        processor: &'p VmxProcessor,
        guest: &Guest,
        entry: u64,
    ) -> Result<Self, Failure> {
        let structure = processor.control_structure()?;
        enter::set_up(&structure, processor, guest.eptp()?, entry)?;
        let ept = guest.local(processor)?;
        let registers = Registers::default();
        Ok(Self { registers, structure, ept, entry, is_launched: false })
    }

    /// One stay in the guest, from its next instruction to its next exit.
    ///
    /// # Errors
    /// [`NotRun`]; the guest has not run then.
    pub(crate) fn run(&mut self, cpus: &GuestCpus) -> Result<Exit, NotRun> {
        self.structure.make_current()?;
        let this = arch::this_processor();
        cpus.enter(this, &self.ept).map_err(NotRun::Enter)?;
        let stay = self.stay();
        cpus.leave(this);
        if stay == Ok(Exit::Interrupt) {
            arch::take_interrupts();
        }
        Ok(stay?)
    }

    /// Go on behind the instruction that ended the stay.
    ///
    /// # Errors
    /// If a VMX instruction fails.
    pub(crate) fn skip(&self) -> Result<(), VmxError> {
        self.structure.make_current()?;
        let rip = self.structure.read(Field::GUEST_RIP)?;
        let length = self.structure.read(Field::EXIT_INSTRUCTION_LENGTH)?;
        enter::set_rip(&self.structure, rip.saturating_add(length))
    }

    /// Start over, at the entry.
    ///
    /// # Errors
    /// If a VMX instruction fails.
    pub(crate) fn restart(&self) -> Result<(), VmxError> {
        self.structure.make_current()?;
        enter::set_rip(&self.structure, self.entry)
    }

    /// Tell the guest, which has just called, what to do: with `at` in EBX, `value` in ECX
    /// and `other` in EDX.
    ///
    /// # Errors
    /// If a VMX instruction fails.
    pub(crate) fn answer(
        &mut self,
        command: Command,
        at: u64,
        value: u32,
        other: u64,
    ) -> Result<(), VmxError> {
        let Registers { rax, rbx, rcx, rdx, .. } = &mut self.registers;
        (*rax, *rbx, *rcx, *rdx) = (u64::from(command as u32), at, u64::from(value), other);
        self.skip()
    }

    fn stay(&mut self) -> Result<Exit, VmxError> {
        enter::enter(&mut self.registers, self.is_launched)?;
        let structure = &self.structure;
        let reason = structure.read(Field::EXIT_REASON)?;
        if reason & reason::ENTRY_FAILURE != 0 {
            return Ok(Exit::Refused);
        }
        self.is_launched = true;
        Ok(match (reason & 0xffff) as u16 {
            reason::CPUID => Exit::Identify,
            reason::HLT => Exit::Halt,
            reason::VMCALL => Exit::Call,
            reason::EXTERNAL_INTERRUPT => Exit::Interrupt,
            reason::EPT_VIOLATION => {
                let what = Violation::decode(structure.read(Field::EXIT_QUALIFICATION)?);
                let linear = structure.read(Field::GUEST_LINEAR_ADDRESS)?;
                let at = structure.read(Field::GUEST_PHYSICAL_ADDRESS)?;
                Exit::Violation { at, linear: what.linear.then_some(linear), what }
            }
            // The vector is in the low byte: "Information for VM Exits Due to Vectored Events".
            reason::EXCEPTION => {
                Exit::Exception(structure.read(Field::EXIT_EVENT)?.to_le_bytes()[0])
            }
            reason::TRIPLE_FAULT => Exit::Shutdown,
            other => Exit::Other(other),
        })
    }
}
