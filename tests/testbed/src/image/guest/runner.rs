//! One virtual processor with a program, and what can be seen of it from outside.

use core::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use core::time::Duration;

use arrayvec::ArrayVec;
use flush::{CpuSet, Gfn, Mfn};
use gnttab::GuestAddress;
use iommu_vtd::Guarded;
use testbed::ensure;
use testbed::failure::{Context as _, Failure};
use testbed::svm::{Exit, Mode};

use super::Program;
use crate::embedding::{Guest, Hypervisor, Lock};
use crate::memory::{self, Words};
use crate::processors::{self, Processors, Work};
use crate::svm::{NotRun, Vcpu, turn_on};
use crate::{arch, clock, exit};

/// How long anything here may take.
const PATIENCE: Duration = Duration::from_secs(5);

/// The page into which a program writes what it sees.
#[derive(Clone, Copy)]
pub(crate) struct Report(&'static Words);

impl Report {
    /// The word that the reader last read from page `page` of its pages.
    pub(crate) fn latest(self, page: usize) -> u32 {
        let word = self.0.get(page / 2).map_or(0, |word| word.load(Ordering::SeqCst));
        (word >> (page % 2 * 32)) as u32
    }

    /// How many rounds the program has made.
    pub(crate) fn rounds(self) -> u32 {
        self.0[0x100].load(Ordering::SeqCst) as u32
    }

    /// Wait until a whole round has been made from here on.
    ///
    /// # Errors
    /// If the program does not go on.
    pub(crate) fn next_round(self) -> Result<(), Failure> {
        // The round that is under way may have begun before.
        let target = self.rounds().wrapping_add(2);
        let made = || self.rounds().wrapping_sub(target) < u32::MAX / 2;
        wait(made).context("a round of a guest")
    }
}

/// One virtual processor with a program.
pub(crate) struct Runner<'g> {
    guest: &'g Guest,
    /// Its state, while it does not run.
    pub(crate) vcpu: Lock<Vcpu>,
    /// What its program sees.
    pub(crate) report: Report,
    stop: AtomicBool,
    held_back: AtomicBool,
    interrupts: AtomicU64,
    ended: Lock<Option<Result<Exit, NotRun>>>,
}

impl<'g> Runner<'g> {
    /// A virtual processor of `guest` that runs `program`.
    ///
    /// Its code and its results take two pages of memory from `at` on. `registers` are
    /// what the program finds in RBX and RSI.
    ///
    /// # Errors
    /// If memory is short, or something is there already.
    pub(crate) fn new(
        hypervisor: &Hypervisor,
        guest: &'g Guest,
        program: Program,
        at: Gfn,
        registers: [u64; 2],
    ) -> Result<Self, Failure> {
        let results = Gfn::new(at.get() + 1);
        hypervisor.populate(guest, at, 0)?;
        let page: Mfn = hypervisor.populate(guest, results, 0)?;
        let report = Report(memory::words(page).context("a page for results")?);
        let entry = at.get() << 12;
        guest.write(GuestAddress(entry), program.code()).context("the code of a guest")?;
        let mut vcpu = guest.vcpu(Mode::Protected, entry)?;
        let state = &mut vcpu.context.registers;
        [state.rbx, state.rsi] = registers;
        state.rdi = results.get() << 12;
        Ok(Self {
            guest,
            vcpu: Lock::new(vcpu),
            report,
            stop: AtomicBool::new(false),
            held_back: AtomicBool::new(false),
            interrupts: AtomicU64::new(0),
            ended: Lock::new(None),
        })
    }

    /// Run on the processor that calls, kicks aside, to another exit or until it is fetched.
    pub(crate) fn run(&self) {
        self.serve(|| Ok(false));
    }

    /// As [`run`](Self::run), and carry out its hypercalls with `call`, which says whether
    /// the guest is to go on.
    pub(crate) fn serve(&self, mut call: impl FnMut() -> Result<bool, Failure>) {
        if turn_on().is_err() {
            self.ended.with(|ended| *ended = Some(Err(NotRun::NotOn)));
            return;
        }
        while !self.stop.load(Ordering::SeqCst) {
            if self.held_back.load(Ordering::SeqCst) {
                arch::take_interrupts();
                continue;
            }
            match self.vcpu.with(|vcpu| self.guest.run(vcpu)) {
                Ok(Exit::Interrupt) => {
                    self.interrupts.fetch_add(1, Ordering::SeqCst);
                }
                Ok(exit @ Exit::Vmmcall) => match call() {
                    Ok(true) => self.vcpu.with(|vcpu| vcpu.context.skip(&exit)),
                    Ok(false) => return self.ended.with(|ended| *ended = Some(Ok(exit))),
                    Err(failure) => exit::failed(format_args!("a hypercall: {failure}")),
                },
                other => return self.ended.with(|ended| *ended = Some(other)),
            }
        }
    }

    /// Keep it from entering its guest, or let it. It does not leave by this.
    pub(crate) fn hold_back(&self, held_back: bool) {
        self.held_back.store(held_back, Ordering::SeqCst);
    }

    /// Stays that a kick ended.
    pub(crate) fn interrupts(&self) -> u64 {
        self.interrupts.load(Ordering::SeqCst)
    }

    /// Wait for an exit that no kick was the reason of.
    ///
    /// # Errors
    /// If there is none.
    pub(crate) fn exit(&self) -> Result<Exit, Failure> {
        Ok(self.end()??)
    }

    /// Wait for an exit that no kick was the reason of, or for the guest to be kept from
    /// running.
    ///
    /// # Errors
    /// If there is neither.
    pub(crate) fn end(&self) -> Result<Result<Exit, NotRun>, Failure> {
        wait(|| self.ended.with(|ended| ended.is_some())).context("the end of a guest")?;
        self.ended.with(|ended| *ended).context("the end of a guest")
    }

    /// Whether it runs on.
    ///
    /// # Errors
    /// If it has ended.
    pub(crate) fn goes_on(&self) -> Result<(), Failure> {
        let ended = self.ended.with(|ended| *ended);
        ensure!(ended.is_none(), "the guest ended with {ended:x?}");
        self.report.next_round()
    }
}

/// Poll until `condition` is true, taking kicks meanwhile.
fn wait(mut condition: impl FnMut() -> bool) -> Result<(), clock::TimedOut> {
    clock::wait(PATIENCE, || {
        arch::take_interrupts();
        condition()
    })
}

/// Let each runner run on the processor beside it while `action` goes on here, and fetch
/// it from its guest at the end.
///
/// # Errors
/// Those of `action`, or if a processor has other work.
pub(crate) fn meanwhile<A>(
    processors: Processors,
    runners: &[(&Runner<'_>, usize)],
    action: impl FnOnce() -> Result<A, Failure>,
) -> Result<A, Failure> {
    let run = |place: usize| {
        move || {
            if let Some((runner, _)) = runners.get(place) {
                runner.run();
            }
        }
    };
    let actions = [run(0), run(1)];
    ensure!(runners.len() <= actions.len(), "{} runners at a time", runners.len());
    let mut work: ArrayVec<Work<'_>, 2> = ArrayVec::new();
    for (runner, _) in runners {
        runner.ended.with(|ended| *ended = None);
    }
    for ((_, processor), action) in runners.iter().zip(&actions) {
        work.push(Work { processor: *processor, action });
    }
    let done = processors.together(&work, || {
        let done = action();
        let mut set = CpuSet::new();
        for (runner, processor) in runners {
            runner.stop.store(true, Ordering::SeqCst);
            ensure!(set.insert(*processor), "processor {processor} has an impossible number");
        }
        processors::kick(&set);
        done
    })?;
    for (runner, _) in runners {
        runner.stop.store(false, Ordering::SeqCst);
    }
    done
}
