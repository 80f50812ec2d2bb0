//! What giving grants back costs, and what becomes of the pages.
//!
//! A [`Ledger`] counts for all domains, from this side of the hypercalls. A guest that
//! tests can open a row, give mappings back in one [`Manner`] or another, and have the
//! row printed; and it can have its own counts compared with the hypervisor's.

use core::sync::atomic::{AtomicU64, Ordering};

use flush::Mfn;
use flush::plan::Policy;
use iommu_vtd::Guarded;

use super::Domain;
use crate::embedding::{Hypervisor, Lock, Watcher};
use crate::svm::exits;
use crate::{arch, processors, say};

/// How grants are given back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Manner {
    /// Each on its own, with its own flushes.
    PerPage,
    /// 32 at a time, with one block around all of them.
    Batched,
    /// 32 at a time, with the cheapest blocks.
    Planned,
}

impl Manner {
    /// The one with this number, as guests name it.
    pub(super) const fn from_number(number: u64) -> Option<Self> {
        match number {
            0 => Some(Self::PerPage),
            1 => Some(Self::Batched),
            2 => Some(Self::Planned),
            _ => None,
        }
    }

    const fn name(self) -> &'static str {
        match self {
            Self::PerPage => "per-page",
            Self::Batched => "batched",
            Self::Planned => "planned",
        }
    }

    /// How commands for a unit are chosen.
    pub(super) const fn policy(self) -> Policy {
        match self {
            Self::PerPage => Policy::PerPage,
            Self::Batched => Policy::Hull,
            Self::Planned => Policy::Planned,
        }
    }
}

/// The counters of the machine at one moment, or what was added to them.
#[derive(Clone, Copy, Debug, Default)]
struct Sample {
    ticks: u64,
    kicks: u64,
    exits: u64,
    commands: u64,
    waits: u64,
}

impl Sample {
    fn since(self, before: Self) -> Self {
        Self {
            ticks: self.ticks.saturating_sub(before.ticks),
            kicks: self.kicks.saturating_sub(before.kicks),
            exits: self.exits.saturating_sub(before.exits),
            commands: self.commands.saturating_sub(before.commands),
            waits: self.waits.saturating_sub(before.waits),
        }
    }

    fn plus(self, more: Self) -> Self {
        Self {
            ticks: self.ticks.saturating_add(more.ticks),
            kicks: self.kicks.saturating_add(more.kicks),
            exits: self.exits.saturating_add(more.exits),
            commands: self.commands.saturating_add(more.commands),
            waits: self.waits.saturating_add(more.waits),
        }
    }
}

/// What was given back since a row was opened, and what it cost.
#[derive(Clone, Copy, Debug)]
struct Row {
    manner: Manner,
    pages: u64,
    cost: Sample,
}

/// The counts of all domains.
pub(crate) struct Ledger {
    cleared: AtomicU64,
    given_up: AtomicU64,
    row: Lock<Row>,
}

impl Watcher for Ledger {
    fn cleared(&self, _: Mfn) {
        self.cleared.fetch_add(1, Ordering::Relaxed);
    }

    fn given_up(&self, _: Mfn) {
        self.given_up.fetch_add(1, Ordering::Relaxed);
    }
}

impl Ledger {
    /// Nothing yet; grants are given back as planned.
    pub(super) const fn new() -> Self {
        let nothing = Sample { ticks: 0, kicks: 0, exits: 0, commands: 0, waits: 0 };
        Self {
            cleared: AtomicU64::new(0),
            given_up: AtomicU64::new(0),
            row: Lock::new(Row { manner: Manner::Planned, pages: 0, cost: nothing }),
        }
    }

    /// How grants are given back at the moment.
    pub(super) fn manner(&self) -> Manner {
        self.row.with(|row| row.manner)
    }

    /// Open a row: from here on grants are given back like this.
    pub(super) fn open(&self, manner: Manner) {
        self.row.with(|row| *row = Row { manner, pages: 0, cost: Sample::default() });
    }

    /// Give `pages` mappings back by `action`, on the books of the open row.
    pub(super) fn measure<A>(
        &self,
        domain: &Domain<'_>,
        pages: u32,
        action: impl FnOnce() -> A,
    ) -> A {
        let running = domain.running();
        let before = Self::sample(domain.hypervisor);
        let result = action();
        let mut after = Self::sample(domain.hypervisor);
        // Those that were kicked have exited when they are back; so has the caller.
        domain.wait_for(running);
        after.exits = exits().saturating_add(1);
        let cost = after.since(before);
        self.row.with(|row| {
            row.pages = row.pages.saturating_add(pages.into());
            row.cost = row.cost.plus(cost);
        });
        result
    }

    fn sample(hypervisor: &Hypervisor) -> Sample {
        let counters = hypervisor.iommu.units().iter().map(|unit| unit.counters());
        let (commands, waits) = counters.fold((0_u64, 0_u64), |(commands, waits), counters| {
            (commands.saturating_add(counters.iotlb_commands), waits.saturating_add(counters.waits))
        });
        Sample {
            ticks: arch::ticks(),
            kicks: processors::kicks_sent(),
            exits: exits(),
            commands,
            waits,
        }
    }

    /// Print the open row, of batches of `batch`.
    pub(super) fn close(&self, batch: u64) {
        let Row { manner, pages, cost } = self.row.with(|row| *row);
        let Sample { ticks, kicks, exits, commands, waits } = cost;
        say!(
            "@ row policy={} batch={batch} pages={pages} ticks={ticks} ipis={kicks} exits={exits} \
             iotlb_commands={commands} waits={waits}",
            manner.name()
        );
    }

    /// Whether a guest that gave `pages` mappings back has had as many cleared, and as many
    /// pages given up, beside the pages of its own that its mappings `displaced`.
    pub(super) fn agrees(&self, domain: &Domain<'_>, pages: u64, displaced: u64) -> bool {
        let cleared = self.cleared.load(Ordering::Relaxed);
        let given_up = self.given_up.load(Ordering::Relaxed);
        say!(
            "@ ledger domain={} unmapped={pages} displaced={displaced} cleared={cleared} \
             given_up={given_up} exits={}",
            domain.id(),
            exits()
        );
        cleared == pages && given_up.checked_sub(cleared) == Some(displaced)
    }
}
