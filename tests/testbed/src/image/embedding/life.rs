//! A domain's life: virtual processors, running, pausing, the end.
//!
//! A [`Vcpu`] is bound to nothing but its domain: whichever processor calls
//! [`Guest::run`] is the one that it runs on.

use core::sync::atomic::Ordering;
use core::time::Duration;

use testbed::failure::{Context as _, Failure};
use testbed::svm::{Exit, Mode};

use super::Guest;
use crate::svm::{NotRun, Vcpu};
use crate::{arch, clock, processors};

impl Guest {
    /// A virtual processor of this domain, which starts in `mode` at `entry`.
    ///
    /// # Errors
    /// If the domain's tables are not in reach of a processor.
    pub(crate) fn vcpu(&self, mode: Mode, entry: u64) -> Result<Vcpu, Failure> {
        Vcpu::new(self.id(), self.root(), mode, entry).context("a root for a virtual processor")
    }

    /// One stay of `vcpu` in the guest, on the processor that calls.
    ///
    /// # Errors
    /// [`NotRun`]; the guest has not run then.
    pub(crate) fn run(&self, vcpu: &mut Vcpu) -> Result<Exit, NotRun> {
        vcpu.run(self.cpus(), || self.may_run.load(Ordering::SeqCst))
    }

    /// Let no processor run the guest any more. None does when this returns.
    ///
    /// # Errors
    /// If one does not leave it.
    pub(crate) fn pause(&self) -> Result<(), Failure> {
        self.may_run.store(false, Ordering::SeqCst);
        // The set fences: who is not in it sees the store above, and turns back.
        processors::kick(&self.cpus().running());
        let stopped = clock::wait(Duration::from_secs(2), || {
            arch::take_interrupts();
            self.cpus().running().is_empty()
        });
        stopped.context("pause")
    }

    /// Let it run again.
    pub(crate) fn resume(&self) {
        self.may_run.store(true, Ordering::SeqCst);
    }
}
