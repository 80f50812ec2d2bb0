//! A guest with its program, asked for one access at a time.

use core::sync::atomic::Ordering;

use flush::{DomainId, Gfn, Mfn};
use testbed::ensure;
use testbed::failure::{Context as _, Failure};
use testbed::vmx::Violation;

use crate::memory;
use crate::vmx::{Command, Exit, Guest, Vcpu, VmxProcessor};

/// Where the program is.
pub(super) const CODE: Gfn = Gfn::new(0x100);
/// `jmp edx`, with which [`Command::Execute`] comes back.
const RETURN: u32 = 0xe2ff;

/// A guest that has its program.
pub(super) struct Bench {
    /// The guest.
    pub(super) guest: Guest,
}

/// How an access ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Done {
    /// It was carried out; ECX afterwards.
    Value(u32),
    /// It was not.
    Violation {
        /// The guest-physical address.
        at: u64,
        /// The guest-linear address.
        linear: Option<u64>,
        /// Access and rights.
        what: Violation,
    },
}

impl Bench {
    /// A guest with its program at [`CODE`].
    pub(super) fn new(processor: &VmxProcessor) -> Result<Self, Failure> {
        let guest = Guest::new(DomainId::new(1), processor)?;
        guest.load(CODE)?;
        Ok(Self { guest })
    }

    /// A virtual processor that has not run yet.
    pub(super) fn vcpu<'p>(&self, processor: &'p VmxProcessor) -> Result<Vcpu<'p>, Failure> {
        Vcpu::new(processor, &self.guest, CODE.get() << 12)
    }

    /// Let the guest do one thing at the guest-physical address `at`, from its start.
    ///
    /// A write stores the instruction that [`Command::Execute`] comes back by.
    pub(super) fn ask(
        &self,
        vcpu: &mut Vcpu<'_>,
        command: Command,
        at: u64,
    ) -> Result<Done, Failure> {
        vcpu.restart()?;
        self.expect_call(vcpu)?;
        vcpu.answer(command, at, RETURN, CODE.get() << 12)?;
        let exit = vcpu.run(&self.guest.cpus)?;
        if let Exit::Violation { at, linear, what } = exit {
            return Ok(Done::Violation { at, linear, what });
        }
        ensure!(exit == Exit::Call, "{command:?} at {at:#x} ended with {exit:?}");
        Ok(Done::Value(vcpu.registers.rcx as u32))
    }

    /// Let the guest go on to its next VMCALL.
    pub(super) fn expect_call(&self, vcpu: &mut Vcpu<'_>) -> Result<(), Failure> {
        let exit = vcpu.run(&self.guest.cpus)?;
        ensure!(exit == Exit::Call, "the guest does not ask what to do: {exit:?}");
        Ok(())
    }

    /// Whether the guest reads at `gfn` what is in `frame`, and writes there.
    pub(super) fn reaches(
        &self,
        vcpu: &mut Vcpu<'_>,
        gfn: Gfn,
        frame: Mfn,
    ) -> Result<bool, Failure> {
        let at = gfn.get() << 12;
        let words = memory::words(frame).context("a frame to look at")?;
        // No two frames have the same number, which fits: memory ends at 2 GiB.
        let mark = frame.get() ^ 0x5a00_0000;
        words[0].store(mark, Ordering::SeqCst);
        let read = self.ask(vcpu, Command::Read, at)?;
        let written = self.ask(vcpu, Command::Write, at)?;
        Ok(read == Done::Value(mark as u32)
            && matches!(written, Done::Value(_))
            && words[0].load(Ordering::SeqCst) == u64::from(RETURN))
    }
}

/// Make the second word of a page code that comes back at once.
pub(super) fn put_return(page: Mfn) -> Result<(), Failure> {
    let words = memory::words(page).context("a page for code")?;
    words[1].store(u64::from(RETURN), Ordering::SeqCst);
    Ok(())
}
