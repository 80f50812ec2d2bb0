//! One shadow table: whose it is, who uses it, and what it still owes.
//!
//! A [`Shadow`] serves one context of the guest at a time and is recycled for others.
//! It is *open*, and may be walked and filled, once nothing of an older context is left
//! in its tables or in any cache.

use core::fmt;

use flush::{Mfn, Run};
use stage2::Rest;

/// What the guest calls one of its nested address spaces: the word it would give to
/// hardware, such as an EPTP or a nested CR3.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Context(pub u64);

/// Storage for one shadow table.
#[derive(Debug)]
pub struct Shadow {
    /// Its root, from the first use on.
    pub(crate) root: Option<Mfn>,
    /// Whose translations it holds.
    pub(crate) context: Option<Context>,
    /// How many vCPUs have it picked.
    pub(crate) users: u32,
    /// What the pending unmap has still to walk.
    pub(crate) rest: Option<Rest>,
    /// Not before a flush that follows this unmap may it be used, by number.
    pub(crate) unflushed: Option<Unflushed>,
    /// Counts the whole-space unmaps that were begun.
    pub(crate) generation: u64,
    /// Leaves that show these canonical frames may be without a record.
    pub(crate) unknown: Option<Run>,
    /// How many records the reverse map has of it.
    pub(crate) recorded: u64,
    /// When it was picked last.
    pub(crate) picked: u64,
    /// Its tables are being freed for good.
    pub(crate) closing: bool,
}

/// What a pending shadow waits for besides its walk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Unflushed {
    /// The walk has not ended.
    Walking,
    /// The walk ended as the unmap with this number.
    Walked(u64),
}

impl Shadow {
    /// A shadow that was never used.
    pub const VACANT: Self = Self {
        root: None,
        context: None,
        users: 0,
        rest: None,
        unflushed: None,
        generation: 0,
        unknown: None,
        recorded: 0,
        picked: 0,
        closing: false,
    };

    /// Whether it may be walked by hardware and filled.
    pub(crate) fn is_open(&self) -> bool {
        self.rest.is_none() && self.unflushed.is_none()
    }

    /// Marks it: all of `space` is unmapped, and flushed, before it is used again.
    ///
    /// A mark that is there already stays where it is: nothing was filled since.
    pub(crate) fn mark(&mut self, space: Run) {
        self.generation = self.generation.saturating_add(1);
        if self.unflushed.is_none() {
            self.rest.get_or_insert(Rest::new(space));
            self.unflushed = Some(Unflushed::Walking);
        }
    }
}

/// One vCPU's use of a shadow: it is not recycled meanwhile.
///
/// It goes back through [`Nested::leave`](super::Nested::leave). Dropped, it keeps its
/// shadow for ever.
#[derive(Debug, PartialEq, Eq)]
#[must_use = "dropping it keeps the shadow from being recycled; give it to `leave`"]
pub struct InUse {
    pub(crate) slot: usize,
    /// The canonical root: tells shadows of two guests apart.
    pub(crate) guest: Mfn,
}

/// A moment before the guest's own nested table was read.
///
/// [`Nested::fill`](super::Nested::fill) refuses what was read before a flush that the
/// guest asked for meanwhile.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ticket {
    pub(crate) slot: usize,
    pub(crate) generation: u64,
}

/// Why no shadow was picked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PickError {
    /// Every shadow serves another context that some vCPU uses.
    AllInUse,
    /// There was no page for a root, and no shadow to recycle.
    NoTable,
}

impl fmt::Display for PickError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::AllInUse => "every shadow table is in use for another context",
            Self::NoTable => "no page for the root of a shadow table",
        })
    }
}

impl core::error::Error for PickError {}

static_assertions::assert_not_impl_any!(InUse: Clone, Copy, Default);
