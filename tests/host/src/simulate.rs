//! What flushing less brings as streams are added, in virtual time.
//!
//! [`Machine`] is the computer, [`System`] how it flushes, [`Rest`] how everything else
//! scales. A stream is a backend on a CPU of its own that handles pages and gives them
//! back, call after call, as a [`Workload`] says. [`run`] lets
//! streams compete for one flush at a time and says what came through. Covers are merged
//! and planned by the crate `flush` itself; only time is modelled, by [`Prices`].

mod clock;
mod outcome;
mod prices;
mod streams;

pub use outcome::{Fall, Outcome};
pub use prices::{Prices, published};

use flush::plan::Policy;

use crate::workloads::{BATCH, Workload};
use streams::Simulation;

/// The computer: CPUs that may run streams, and remapping units to flush.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Machine {
    cpus: u64,
    units: u64,
}

impl Machine {
    /// The one of the published figures: 96 CPUs; one unit is assumed.
    pub const PUBLISHED: Self = Self { cpus: 96, units: 1 };

    /// From 1 to 256 CPUs and from 1 to 16 units; `None` for other numbers.
    #[must_use]
    pub fn new(cpus: u16, units: u16) -> Option<Self> {
        let fits = (1..=256).contains(&cpus) && (1..=16).contains(&units);
        fits.then_some(Self { cpus: cpus.into(), units: units.into() })
    }
}

/// How everything but flushing scales with streams: copies, checksums, the hypercall.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rest {
    /// One server for all streams, as if a lock or one CPU were behind it. Those that wait
    /// for it stay in the domain, with all their CPUs.
    OneServer,
    /// The same, and those that wait sleep: their CPUs are not in the domain.
    OneServerAsleep,
    /// A server for each stream: streams do not disturb each other.
    PerStream,
}

/// Which CPUs are interrupted when translations went.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kick {
    /// All others of the machine.
    Every,
    /// Those that are in the domain; the rest invalidate before they enter it again.
    Running,
}

/// How a hypervisor flushes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct System {
    /// The most pages that share one flush.
    pub batch: usize,
    /// What units are told.
    pub policy: Policy,
    /// Units and CPUs are started first and waited for together.
    pub overlap: bool,
    /// Who is interrupted.
    pub kick: Kick,
    /// One flush serves all who asked before it began.
    pub combining: bool,
}

impl System {
    /// A flush of each kind for each page, one after another.
    pub const BASE: Self = Self {
        batch: 1,
        policy: Policy::Hull,
        overlap: false,
        kick: Kick::Every,
        combining: false,
    };
    /// A flush of each kind for up to 32 pages, one block over all of them.
    pub const BATCHED: Self = Self { batch: BATCH, ..Self::BASE };
    /// Batched, with the blocks that cost least.
    pub const PLANNED: Self = Self { policy: Policy::Planned, ..Self::BATCHED };
    /// Planned, and started before any is waited for.
    pub const OVERLAPPED: Self = Self { overlap: true, ..Self::PLANNED };
    /// Overlapped, and callers share flushes.
    pub const COMBINED: Self = Self { combining: true, ..Self::OVERLAPPED };
    /// All of it: combined, and only CPUs in the domain are interrupted.
    pub const PLANNED_COMBINED: Self = Self { kick: Kick::Running, ..Self::COMBINED };
    /// All of it but combining.
    pub const UNCOMBINED: Self = Self { combining: false, ..Self::PLANNED_COMBINED };
}

/// What is simulated.
#[derive(Clone, Copy, Debug)]
pub struct Scene<'a> {
    /// What each stream does.
    pub workload: &'a Workload,
    /// How many streams there are; 0 counts as 1.
    pub streams: u16,
    /// CPUs that are in the domain for each stream: the one that handles pages and gives
    /// them back, and those of the programs it serves. 0 counts as 1.
    pub cpus_per_stream: u16,
    /// On what.
    pub machine: Machine,
    /// How the rest scales.
    pub rest: Rest,
    /// How flushing is done.
    pub system: System,
    /// What each step takes.
    pub prices: Prices,
}

/// Runs `scene` until its first stream has nothing more to do, or 100,000 pages came back.
///
/// Equal scenes have equal outcomes: what varies is drawn from a fixed seed.
#[must_use]
pub fn run(scene: &Scene<'_>) -> Outcome {
    Simulation::new(scene).finish()
}
