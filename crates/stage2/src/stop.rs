//! How far a walk may go, how far it came, and why it stopped there.
//!
//! [`Rest`] is an address range, never a pointer: tables may change between two calls.

use core::fmt;

use flush::{Gfn, Run};

use crate::format::Unencodable;
use crate::split::{PendingSplit, SplitError};
use crate::tree::Contended;

/// What a walk has still to do: frames, first and last included.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rest(Run);

impl Rest {
    /// A walk over `run`, from its start.
    #[must_use]
    #[inline]
    pub const fn new(run: Run) -> Self {
        Self(run)
    }

    /// The frames.
    #[must_use]
    #[inline]
    pub const fn run(self) -> Run {
        self.0
    }

    /// From `at` on, which is not beyond `last`.
    pub(crate) fn from(at: Gfn, last: Gfn) -> Self {
        Self(Run::new(at, last).unwrap_or(Run::single(last)))
    }
}

/// How many entries a walk may still read.
///
/// Free are the table entries on the way down to where a walk starts, at most one a
/// level, and reading an entry again after it was split. So 1 is enough for progress.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Budget(u64);

impl Budget {
    /// As many as there can be.
    pub const UNLIMITED: Self = Self(u64::MAX);

    /// This many entries.
    #[must_use]
    pub const fn new(entries: u64) -> Self {
        Self(entries)
    }

    /// How many are left.
    #[must_use]
    pub const fn left(self) -> u64 {
        self.0
    }

    /// Spends one, or says that there is none.
    #[inline]
    pub(crate) fn take(&mut self) -> bool {
        match self.0.checked_sub(1) {
            Some(left) => {
                self.0 = left;
                true
            }
            None => false,
        }
    }

    /// Spends this many, or all that is left.
    #[inline]
    pub(crate) fn spend(&mut self, entries: u64) {
        self.0 = self.0.saturating_sub(entries);
    }
}

/// What one call of a walk did.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tally {
    /// Entries read, without those read again after a split.
    pub reads: u64,
    /// Valid leaves cleared, changed or visited.
    pub leaves: u64,
    /// Table pages that went on record.
    pub tables: u64,
    /// The last frame that the walk has dealt with: the end of an entry's span, which
    /// may lie past the end of the range. Before anything was done it is the first
    /// frame of the range.
    pub reached: Gfn,
}

/// Why a walk stopped early.
#[derive(Debug, PartialEq, Eq)]
pub enum Stop {
    /// The budget is spent.
    Budget,
    /// The record has no room for the next leaf or table page: flush, then go on.
    Full,
    /// A large leaf has to be split and there is no page for the table.
    NoTable,
    /// A large leaf was taken out to be split: flush, [`finish_split`](crate::finish_split),
    /// go on.
    Split(PendingSplit),
    /// An entry is being edited by somebody else, against the contract of
    /// [`TableMemory`](crate::TableMemory).
    Contended,
    /// The range reaches beyond the space; nothing was done.
    OutOfRange,
    /// The range does not consist of whole pages of the table's granule; nothing was
    /// done.
    Unaligned,
    /// The format cannot express what was asked for.
    Refused(Unencodable),
    /// The visitor asked for it.
    Asked,
}

impl fmt::Display for Stop {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Budget => "budget spent",
            Self::Full => "no room on record",
            Self::NoTable => "no page for a new table",
            Self::Split(_) => "a large leaf has to be flushed before it is split",
            Self::Contended => "an entry is being edited by somebody else",
            Self::OutOfRange => "range beyond the space",
            Self::Unaligned => "range not aligned to the page size",
            Self::Refused(_) => "not expressible in this format",
            Self::Asked => "the visitor stopped",
        })
    }
}

impl From<Contended> for Stop {
    fn from(_: Contended) -> Self {
        Self::Contended
    }
}

impl From<Unencodable> for Stop {
    fn from(error: Unencodable) -> Self {
        Self::Refused(error)
    }
}

impl From<SplitError> for Stop {
    fn from(error: SplitError) -> Self {
        match error {
            SplitError::OutOfRange => Self::OutOfRange,
            // The walk saw a leaf there.
            SplitError::Absent | SplitError::Contended => Self::Contended,
            SplitError::NoTable => Self::NoTable,
            SplitError::Unencodable(error) => Self::Refused(error),
            SplitError::Pending(pending) => Self::Split(pending),
        }
    }
}

/// Where a walk stopped, and why. Everything before `rest` is done and on record.
#[derive(Debug, PartialEq, Eq)]
#[must_use = "the walk is not complete"]
pub struct Stopped {
    /// What is left to do.
    pub rest: Rest,
    /// Why it stopped.
    pub stop: Stop,
    /// What this call did.
    pub tally: Tally,
}
