//! One virtual processor.
//!
//! A [`Vcpu`] has the guest's state and its ASID. What the flushes of its guest want of
//! the next VMRUN is decided by `p2m` and written by it: no other place writes ASID or
//! TLB_CONTROL.

use core::fmt;

use flush::{DomainId, Mfn};
use p2m::GuestCpus;
use p2m::hardware::svm::{ControlArea, TlbControl, VcpuAsid};
use testbed::svm::{Context, Exit, Mode};

use super::enter::{self, NestedRoot};
use crate::arch;

/// One virtual processor, between two stays in its guest.
pub(crate) struct Vcpu {
    /// Its state.
    pub(crate) context: Context,
    domain: DomainId,
    root: NestedRoot,
    asid: VcpuAsid,
    /// Stays so far.
    stays: u64,
}

/// A guest was not entered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum NotRun {
    /// The guest may not run at the moment.
    Paused,
    /// The virtual processor is another guest's.
    OtherGuest(DomainId),
    /// SVM is not on, on this processor.
    NotOn,
    /// This processor has a number that no CPU set has.
    UnknownProcessor,
}

impl fmt::Display for NotRun {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Paused => f.write_str("the guest is paused"),
            Self::OtherGuest(owner) => write!(f, "the virtual processor belongs to {owner:?}"),
            Self::NotOn => f.write_str("SVM is not on, on this processor"),
            Self::UnknownProcessor => f.write_str("this processor is beyond the CPU sets"),
        }
    }
}

impl core::error::Error for NotRun {}

impl Vcpu {
    /// A virtual processor of `domain` that starts in `mode` at `entry`, on the nested
    /// tables below `root`. `None` for a root beyond the physical address space.
    pub(crate) fn new(domain: DomainId, root: Mfn, mode: Mode, entry: u64) -> Option<Self> {
        let (context, root) = (Context::new(mode, entry), NestedRoot::new(root)?);
        Some(Self { context, domain, root, asid: VcpuAsid::new(), stays: 0 })
    }

    /// One stay in the guest, from its next instruction to its next exit.
    ///
    /// `may_run` is asked after others can see that this processor is about to enter: who
    /// takes the permission away and looks then which processors run misses nobody.
    ///
    /// # Errors
    /// [`NotRun`]; the guest has not run then.
    pub(crate) fn run(
        &mut self,
        cpus: &GuestCpus,
        may_run: impl FnOnce() -> bool,
    ) -> Result<Exit, NotRun> {
        if cpus.domain() != self.domain {
            return Err(NotRun::OtherGuest(self.domain));
        }
        let this = arch::this_processor();
        let entered = cpus.enter_tagged(this).map_err(|_| NotRun::UnknownProcessor)?;
        let stay = if may_run() { self.stay(entered) } else { Err(NotRun::Paused) };
        cpus.leave(this);
        if stay == Ok(Exit::Interrupt) {
            arch::take_interrupts();
        }
        stay
    }

    fn stay(&mut self, entered: p2m::Generation) -> Result<Exit, NotRun> {
        let Self { context, domain: _, root, asid, stays } = self;
        let tag = enter::with_asids(|pool| asid.prepare(pool, entered)).ok_or(NotRun::NotOn)?;
        ControlArea::new(context.vmcb.words()).set_tag(&tag);
        enter::enter(context, *root);
        let exit = context.stopped();
        if exit != Exit::Invalid {
            *stays = stays.saturating_add(1);
            enter::with_asids(|pool| asid.ran(pool, tag));
        }
        Ok(exit)
    }

    /// Stays in the guest so far: VMRUNs, and so exits.
    pub(crate) const fn stays(&self) -> u64 {
        self.stays
    }

    /// ASID and TLB_CONTROL as they are in the control block.
    pub(crate) fn tag(&mut self) -> (u32, Option<TlbControl>) {
        let area = ControlArea::new(self.context.vmcb.words());
        let known = [TlbControl::Nothing, TlbControl::Everything, TlbControl::ThisAsid];
        (area.asid(), known.into_iter().find(|control| *control as u8 == area.tlb_control()))
    }
}
