//! Single pages: look one up, clear one.
//!
//! [`clear_page`] is the path of a grant unmap. It goes down once, makes one
//! compare-exchange, and keeps the tables that it empties: the same guest frame is
//! mapped again soon.

use core::fmt;

use flush::{Gfn, Gone, Records, Skipped};

use crate::entry::{Entry, Leaf, Level};
use crate::format::Format;
use crate::memory::TableMemory;
use crate::tree::{Contended, Found, Tables};

/// Why [`clear_page`] changed nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PageError {
    /// The frame is beyond the space.
    OutOfRange,
    /// No valid leaf maps it.
    Absent,
    /// A leaf of this level maps it; split that first.
    Large(Level),
    /// This leaf maps it, and the caller's check refused.
    Unexpected(Leaf),
    /// Somebody else edits the tree.
    Contended,
}

impl fmt::Display for PageError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::OutOfRange => f.write_str("frame beyond the space"),
            Self::Absent => f.write_str("no valid leaf there"),
            Self::Large(level) => write!(f, "part of a large leaf at {level:?}"),
            Self::Unexpected(leaf) => write!(f, "not the expected leaf but {leaf:?}"),
            Self::Contended => f.write_str("the entry is being edited by somebody else"),
        }
    }
}

impl core::error::Error for PageError {}

impl From<Contended> for PageError {
    fn from(_: Contended) -> Self {
        Self::Contended
    }
}

/// What is mapped at `gfn`, or `None` beyond the space.
///
/// Reads at most one entry a level.
#[must_use]
pub fn lookup<F: Format, M: TableMemory>(tables: Tables<'_, F, M>, gfn: Gfn) -> Option<Found> {
    if !tables.format.geometry().contains(gfn) {
        return None;
    }
    let (place, _, entry) = tables.descend(gfn, Level::PAGE);
    Some(Found { run: place.span, level: place.level, entry })
}

/// Clears the single-page leaf at `gfn` if `expected` accepts it, and records that.
///
/// `expected` may be asked again when hardware marks the entry meanwhile. Returns the
/// leaf as it was last, with the marks, and the proof for the kind of cache that walks
/// this table. A table left empty stays linked.
///
/// # Errors
///
/// See [`PageError`]; nothing was changed or recorded then.
// The caller seldom wants the whole leaf, and only then is it put together.
#[inline(always)]
pub fn clear_page<'id, K: Records, F: Format, M: TableMemory>(
    tables: Tables<'_, F, M>,
    gfn: Gfn,
    skipped: &mut Skipped<'id>,
    mut expected: impl FnMut(&Leaf) -> bool,
) -> Result<(Leaf, Gone<'id, K>), PageError> {
    if !tables.format.geometry().contains(gfn) {
        return Err(PageError::OutOfRange);
    }
    let (slot, raw) = tables.find(gfn, Level::PAGE);
    if slot.level != Level::PAGE {
        return Err(tables.no_page(slot.level, raw));
    }
    // The level is a constant here, so there is less to decode.
    let Entry::Leaf(leaf) = tables.format.decode(Level::PAGE, raw) else {
        return Err(PageError::Absent);
    };
    let leaf = tables.replace_leaf(slot, raw, leaf, |_, leaf| {
        if expected(leaf) { Ok(0) } else { Err(PageError::Unexpected(*leaf)) }
    })?;
    tables.memory.drop_live(slot.table);
    let order = tables.recorded_order(Level::PAGE, &leaf);
    let span = tables.format.geometry().span(Level::PAGE, gfn);
    Ok((leaf, skipped.leaf::<K>(span, order)))
}

impl<F: Format, M: TableMemory> Tables<'_, F, M> {
    /// Why there is no single page where the way down ended above the pages.
    #[cold]
    #[inline(never)]
    fn no_page(&self, level: Level, raw: u64) -> PageError {
        match self.format.decode(level, raw) {
            Entry::Leaf(_) => PageError::Large(level),
            Entry::Empty | Entry::Inert | Entry::Table(_) => PageError::Absent,
        }
    }
}
