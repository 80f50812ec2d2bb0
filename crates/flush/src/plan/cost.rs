//! What flushing costs: commands, waits, and entries to be looked up again.
//!
//! A [`CostModel`] prices them in [`Nanoseconds`]. How many entries a block would lose
//! that nobody asked to forget is the word of a [`LiveEntries`].

use core::fmt;

use super::recent::common;
use crate::Run;

/// A length of time, or a price in time. Sums and products stay at the largest value.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Nanoseconds(u64);

impl Nanoseconds {
    /// So many nanoseconds.
    #[must_use]
    pub const fn new(count: u64) -> Self {
        Self(count)
    }

    /// How many.
    #[must_use]
    pub const fn get(self) -> u64 {
        self.0
    }

    /// Both together.
    #[must_use]
    pub const fn plus(self, other: Self) -> Self {
        Self(self.0.saturating_add(other.0))
    }

    /// So many times as much.
    #[must_use]
    pub const fn times(self, count: u64) -> Self {
        Self(self.0.saturating_mul(count))
    }
}

/// The price of each step of a flush, and how full the cache is taken to be.
///
/// The defaults are round figures for a remapping unit driven through its queue, of
/// about 0.2 us for a step. An embedder that measured passes its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CostModel {
    /// A command that names a block of pages.
    pub page: Nanoseconds,
    /// A command that names a domain.
    pub domain: Nanoseconds,
    /// A command that names everything the unit holds.
    pub global: Nanoseconds,
    /// Waiting for one submission.
    pub wait: Nanoseconds,
    /// Telling hardware about one submission.
    pub tail: Nanoseconds,
    /// Walking the tables for one entry that was lost.
    pub refill: Nanoseconds,
    /// How many entries a unit holds that are still in use.
    pub live_entries: u64,
}

impl CostModel {
    /// Round figures, see [`CostModel`].
    pub const DEFAULT: Self = Self {
        page: Nanoseconds(200),
        domain: Nanoseconds(200),
        global: Nanoseconds(200),
        wait: Nanoseconds(400),
        tail: Nanoseconds(200),
        refill: Nanoseconds(50),
        live_entries: 1024,
    };
}

impl Default for CostModel {
    fn default() -> Self {
        Self::DEFAULT
    }
}

/// Which entries are worth keeping: the knowledge of an embedder.
///
/// It decides what a flush costs and never what it covers: a wrong answer wastes time.
/// Who has none needs none: half of the other pages of a block are then taken to be in use,
/// of up to [`live_entries`](CostModel::live_entries). Where one block or its parts have to be
/// chosen, none of them or all of them may turn out to be; half leaves the least to regret.
pub trait LiveEntries: fmt::Debug {
    /// How many entries for pages of `run` the caches may hold and will need again.
    ///
    /// `changed` pages of the run are on record and do not count. A run has at least as
    /// many as each part of it.
    fn within(&self, run: Run, changed: u64) -> u64;

    /// How many entries of any domain the unit may hold and will need again.
    fn of_unit(&self) -> u64;
}

/// Half of what may be in use is: no page that went lately, and no more than a unit holds.
#[derive(Clone, Copy, Debug)]
pub(super) struct Assumed {
    /// How many entries a unit holds.
    pub(super) entries: u64,
    /// Pages that went lately; none of them is on record.
    pub(super) gone: Option<Run>,
}

impl LiveEntries for Assumed {
    fn within(&self, run: Run, changed: u64) -> u64 {
        let gone = self.gone.map_or(0, |gone| common(gone, run));
        let pages = run.pages().saturating_sub(changed).saturating_sub(gone);
        pages.min(self.entries).div_ceil(2)
    }

    fn of_unit(&self) -> u64 {
        self.entries.div_ceil(2)
    }
}
