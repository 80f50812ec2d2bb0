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
use crate::path::Path;
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

/// Pages of one tree that are cleared one after the other, all under one lock.
///
/// A path that was kept from pages before leads to the first one, each page to the next.
#[derive(Debug)]
pub struct Near<'p, 'a, F, M> {
    tables: Tables<'a, F, M>,
    path: &'p mut Path,
}

impl<'p, 'a, F: Format, M: TableMemory> Near<'p, 'a, F, M> {
    /// Begins at the page that `path` leads to.
    ///
    /// As long as this value exists, the lock of the tree's edits is held and nothing else
    /// edits the tree.
    #[inline]
    pub fn new(tables: Tables<'a, F, M>, path: &'p mut Path) -> Self {
        tables.renew(path);
        Self { tables, path }
    }

    /// As [`clear_page`]. `likely` is the leaf that is mostly there; where it is, `expected`
    /// is not asked, and must accept it.
    ///
    /// # Errors
    ///
    /// As [`clear_page`].
    #[inline(always)]
    pub fn clear<'id, K: Records>(
        &mut self,
        gfn: Gfn,
        skipped: &mut Skipped<'id>,
        likely: Leaf,
        expected: impl FnMut(&Leaf) -> bool,
    ) -> Result<Gone<'id, K>, PageError> {
        match self.clear_likely(gfn, skipped, likely) {
            Some(gone) => Ok(gone),
            None => clear_page(self.tables, gfn, skipped, expected).map(|(_, gone)| gone),
        }
    }

    /// Clears the page at `gfn` if its leaf is this one, up to the marks of hardware; else
    /// changes nothing.
    #[inline(always)]
    fn clear_likely<'id, K: Records>(
        &mut self,
        gfn: Gfn,
        skipped: &mut Skipped<'id>,
        likely: Leaf,
    ) -> Option<Gone<'id, K>> {
        let Tables { format, memory, root: _ } = self.tables;
        // It never was part of a larger one, so its order is that of a page.
        let word = format.leaf(Level::PAGE, Leaf { origin: Level::PAGE, ..likely }).ok()?;
        let (table, index) = self.tables.find_page(gfn, self.path)?;
        if !memory.empty_if(table, index, word, format.marks()) {
            return None;
        }
        let geometry = format.geometry();
        let order = geometry.order(Level::PAGE);
        Some(skipped.leaf::<K>(geometry.span(Level::PAGE, gfn), order))
    }
}

/// As [`Near::clear`], for one page.
///
/// # Errors
///
/// As [`clear_page`].
#[inline(always)]
pub fn clear_page_near<'id, K: Records, F: Format, M: TableMemory>(
    tables: Tables<'_, F, M>,
    path: &mut Path,
    gfn: Gfn,
    skipped: &mut Skipped<'id>,
    likely: Leaf,
    expected: impl FnMut(&Leaf) -> bool,
) -> Result<Gone<'id, K>, PageError> {
    Near::new(tables, path).clear(gfn, skipped, likely, expected)
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
