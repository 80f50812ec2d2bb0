//! What the cases about guests on several processors start from.
//!
//! QEMU keeps a translation for as long as a guest is not left. So a guest that goes on
//! reading shows whether it was made to leave: [`count_read`] counts what it sees.

use core::sync::atomic::Ordering;
use core::time::Duration;

use flush::{CpuSet, Gfn, Mfn};
use testbed::failure::{Context as _, Failure};
use testbed::svm::{Exit, NestedError};
use testbed::{ensure, fail};

use crate::embedding::Layout;
use crate::guest::{Program, Runner};
use crate::machine::Machine;
use crate::processors::Processors;
use crate::world::{BACKEND, Grants, World};
use crate::{clock, memory};

/// Grants of a batch.
pub(super) const BATCH: u32 = 32;
/// The pages that guests read and write, within the reach of 32-bit code.
pub(super) const PAGES: Gfn = Gfn::new(0x8_0000);
/// Where runners have their code and their results.
const RUNNERS: [Gfn; 2] = [Gfn::new(0x100), Gfn::new(0x102)];
/// How long a guest is given for an access that must not come.
pub(super) const GRACE: Duration = Duration::from_millis(20);

/// All processors, and the world on the first of them.
pub(super) struct Stage {
    /// All processors.
    pub(super) processors: Processors,
    /// The domains and their devices.
    pub(super) world: World,
}

impl Stage {
    /// Bring both up.
    pub(super) fn new(machine: &Machine) -> Result<Self, Failure> {
        let world = World::new(machine, Layout::Separate)?;
        Ok(Self { processors: Processors::start(machine)?, world })
    }

    /// A virtual processor of the backend that reads `count` pages from [`PAGES`] on.
    pub(super) fn reader(&self, place: usize, count: u32) -> Result<Runner<'_>, Failure> {
        self.runner(place, Program::Reader, [count.into(), PAGES.get() << 12])
    }

    /// A virtual processor of the backend that reads its own code, and so stays inside.
    pub(super) fn reads_its_code(&self, place: usize) -> Result<Runner<'_>, Failure> {
        self.runner(place, Program::Reader, [1, RUNNERS[place].get() << 12])
    }

    /// A virtual processor of the backend.
    pub(super) fn runner(
        &self,
        place: usize,
        program: Program,
        registers: [u64; 2],
    ) -> Result<Runner<'_>, Failure> {
        let (hypervisor, backend) = (&self.world.hypervisor, self.world.guest(BACKEND)?);
        Runner::new(hypervisor, backend, program, RUNNERS[place], registers)
    }
}

/// Write a word to the start of a frame, be it free or not.
pub(super) fn put(frame: Mfn, value: u32) -> Result<(), Failure> {
    let words = memory::words(frame).context("the words of a page")?;
    words[0].store(value.into(), Ordering::SeqCst);
    Ok(())
}

/// Write `value` and the numbers after it to the starts of frames.
pub(super) fn put_all(frames: &[Mfn], value: u32) -> Result<(), Failure> {
    frames.iter().zip(value..).try_for_each(|(frame, value)| put(*frame, value))
}

/// How many of the words that [`put_all`] wrote the guest has seen.
pub(super) fn count_seen(runner: &Runner<'_>, frames: &[Mfn], value: u32) -> Result<u64, Failure> {
    // A guest that has ended reads nothing more; any other makes a round.
    if runner.goes_on().is_err() {
        clock::wait(GRACE, || false).ok();
    }
    let pages = (value..).zip(0..frames.len());
    Ok(pages.filter(|(value, page)| runner.report.latest(*page) == *value).count() as u64)
}

/// How many of `frames` the guest reads at the moment: what is written there shows up.
pub(super) fn count_read(runner: &Runner<'_>, frames: &[Mfn], value: u32) -> Result<u64, Failure> {
    put_all(frames, value)?;
    count_seen(runner, frames, value)
}

/// The frames behind grants, while the frontend has them.
pub(super) fn frames(world: &World, grants: &Grants) -> Result<[Mfn; BATCH as usize], Failure> {
    let mut frames = [Mfn::new(0); BATCH as usize];
    for (frame, place) in frames.iter_mut().zip(grants.all()) {
        *frame = world.granted_page(place)?;
    }
    Ok(frames)
}

/// The guest must have ended with a fault in one of `count` pages from [`PAGES`] on.
pub(super) fn faulted(runner: &Runner<'_>, count: u64) -> Result<NestedError, Failure> {
    let exit = runner.exit()?;
    let Exit::NestedFault { gpa, error } = exit else {
        fail!("the guest ended with {exit:x?}");
    };
    let pages = PAGES.get()..PAGES.get() + count;
    ensure!(pages.contains(&(gpa >> 12)), "the guest faulted at {gpa:#x}");
    Ok(error)
}

/// The set of one processor.
pub(super) fn just(number: usize) -> CpuSet {
    let mut set = CpuSet::new();
    // A number beyond the sets leaves it empty, which no caller expects.
    if set.insert(number) { set } else { CpuSet::new() }
}

/// Whether the frontend sees all its grants in use, or none.
pub(super) fn in_use(world: &World, grants: &Grants, expected: bool) -> Result<(), Failure> {
    for place in grants.all() {
        let found = world.in_use(place)?;
        ensure!(found == (expected, expected), "grant {place} shows {found:?}");
    }
    Ok(())
}
