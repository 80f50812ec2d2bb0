//! What plans added up to, in numbers an operator can read at any time.
//!
//! [`Figures`] are those of one plan, or of all so far. [`Statistics`] is where plans of
//! several CPUs are added up; reading it takes no lock and stops nobody.

use core::sync::atomic::{AtomicU64, Ordering::Relaxed};

use super::{Blocks, Plan};
use crate::{Block, Cover};

/// What plans asked for. Sums stay at the largest value.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Figures {
    /// Plans that asked for anything: flushes of one unit.
    pub flushes: u64,
    /// Leaves on record for them: flushes there would have been without batches.
    pub leaves: u64,
    /// Commands.
    pub commands: u64,
    /// Of these, commands for a whole domain or for everything.
    pub wide_commands: u64,
    /// Waits, each with one write of the queue's tail.
    pub waits: u64,
    /// Pages on record; none for a cover of everything.
    pub pages_changed: u64,
    /// Pages that commands named; none for a wide one.
    pub pages_flushed: u64,
}

impl Figures {
    /// Flushes that were not needed because leaves shared one.
    #[must_use]
    pub const fn avoided(&self) -> u64 {
        self.leaves.saturating_sub(self.flushes)
    }

    /// One flush of all that is on record in `cover`, before anything is known of the
    /// commands it takes.
    #[must_use]
    pub fn recorded(cover: &Cover) -> Self {
        let leaves = cover.runs().map(|(run, order)| {
            run.pages().div_ceil(1_u64.checked_shl(order.into()).unwrap_or(u64::MAX))
        });
        let pages = cover.runs().map(|(run, _)| run.pages());
        Self {
            flushes: 1,
            leaves: leaves.fold(0, u64::saturating_add),
            pages_changed: pages.fold(0, u64::saturating_add),
            ..Self::default()
        }
    }

    /// Both together.
    #[must_use]
    pub fn plus(&self, other: &Self) -> Self {
        let Self { flushes, leaves, commands, wide_commands, waits, pages_changed, pages_flushed } =
            other;
        Self {
            flushes: self.flushes.saturating_add(*flushes),
            leaves: self.leaves.saturating_add(*leaves),
            commands: self.commands.saturating_add(*commands),
            wide_commands: self.wide_commands.saturating_add(*wide_commands),
            waits: self.waits.saturating_add(*waits),
            pages_changed: self.pages_changed.saturating_add(*pages_changed),
            pages_flushed: self.pages_flushed.saturating_add(*pages_flushed),
        }
    }
}

impl Plan {
    /// What it asks for, if it is a plan for `cover`.
    #[must_use]
    pub fn figures(&self, cover: &Cover) -> Figures {
        let (wide, pages_flushed) = match self {
            Self::Nothing => return Figures::default(),
            Self::Blocks(blocks) => (0, named(blocks)),
            Self::Domain | Self::Global => (1, 0),
        };
        Figures {
            commands: self.commands() as u64,
            wide_commands: wide,
            waits: self.submissions() as u64,
            pages_flushed,
            ..Figures::recorded(cover)
        }
    }
}

fn named(blocks: &Blocks) -> u64 {
    blocks.clone().map(Block::pages).fold(0, u64::saturating_add)
}

/// Classes of flushes by the number of their leaves: 1, 2, up to 4, 8, 16, 32, and more.
pub const SIZES: usize = 7;

/// Where several CPUs add up what they planned. Counters wrap at 2^64.
#[derive(Debug, Default)]
pub struct Statistics {
    flushes: AtomicU64,
    leaves: AtomicU64,
    commands: AtomicU64,
    wide_commands: AtomicU64,
    waits: AtomicU64,
    pages_changed: AtomicU64,
    pages_flushed: AtomicU64,
    sizes: [AtomicU64; SIZES],
}

impl Statistics {
    /// All at 0.
    #[must_use]
    pub const fn new() -> Self {
        Self {
            flushes: AtomicU64::new(0),
            leaves: AtomicU64::new(0),
            commands: AtomicU64::new(0),
            wide_commands: AtomicU64::new(0),
            waits: AtomicU64::new(0),
            pages_changed: AtomicU64::new(0),
            pages_flushed: AtomicU64::new(0),
            sizes: [const { AtomicU64::new(0) }; SIZES],
        }
    }

    /// Adds one plan's figures. A plan of nothing adds nothing.
    pub fn add(&self, figures: &Figures) {
        if *figures == Figures::default() {
            return;
        }
        let Self {
            flushes,
            leaves,
            commands,
            wide_commands,
            waits,
            pages_changed,
            pages_flushed,
            sizes,
        } = self;
        flushes.fetch_add(figures.flushes, Relaxed);
        leaves.fetch_add(figures.leaves, Relaxed);
        commands.fetch_add(figures.commands, Relaxed);
        wide_commands.fetch_add(figures.wide_commands, Relaxed);
        waits.fetch_add(figures.waits, Relaxed);
        pages_changed.fetch_add(figures.pages_changed, Relaxed);
        pages_flushed.fetch_add(figures.pages_flushed, Relaxed);
        let class = figures.leaves.max(1).next_power_of_two().ilog2() as usize;
        if let Some(size) = sizes.get(class.min(SIZES - 1)) {
            size.fetch_add(figures.flushes, Relaxed);
        }
    }

    /// What was added so far. Figures of a plan that is being added may be in part there.
    #[must_use]
    pub fn read(&self) -> Figures {
        Figures {
            flushes: self.flushes.load(Relaxed),
            leaves: self.leaves.load(Relaxed),
            commands: self.commands.load(Relaxed),
            wide_commands: self.wide_commands.load(Relaxed),
            waits: self.waits.load(Relaxed),
            pages_changed: self.pages_changed.load(Relaxed),
            pages_flushed: self.pages_flushed.load(Relaxed),
        }
    }

    /// How many flushes there were of 1 leaf, of 2, of up to 4, 8, 16 and 32, and of more.
    #[must_use]
    pub fn sizes(&self) -> [u64; SIZES] {
        self.sizes.each_ref().map(|size| size.load(Relaxed))
    }
}
