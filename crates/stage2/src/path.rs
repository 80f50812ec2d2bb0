//! The tables of the last pages, kept for the next ones.
//!
//! A [`Path`] belongs to one tree and lives behind the lock of that tree's edits. Pages
//! that are cleared one after the other mostly share a table, or one above it, and their
//! way down need not begin at the root each time.

use flush::{Gfn, Mfn};

use crate::entry::Level;
use crate::format::Format;
use crate::memory::TableMemory;
use crate::tree::Tables;

/// The tables of the last pages that were looked for.
///
/// It is used only while the memory says that no table was unlinked since
/// ([`TableMemory::unlinked`]): so they still are where they were in the tree. A memory that
/// does not count gets help from it only from page to page under one lock.
#[derive(Clone, Copy, Debug)]
pub struct Path {
    /// The table of the last page.
    nearest: Kept,
    root: Mfn,
    /// What the memory had unlinked by then.
    unlinked: Option<u64>,
    /// Tables one level up, each in the place that its block has.
    above: [Kept; WAYS],
}

/// A table that is kept.
#[derive(Clone, Copy, Debug)]
struct Kept {
    /// The number of the block that it serves, among blocks of that size, or [`NOWHERE`].
    block: u64,
    table: Mfn,
}

impl Kept {
    const NONE: Self = Self { block: NOWHERE, table: Mfn::new(0) };
}

/// How many tables above the lowest are kept: 8 GiB of x86 pages.
const WAYS: usize = 8;

/// Above the number of every block of two frames or more.
pub(crate) const NOWHERE: u64 = u64::MAX;

impl Path {
    /// No table is known. For a tree that is new, or of which nothing was looked for yet.
    pub const NEW: Self = Self::from(Mfn::new(0), None);

    const fn from(root: Mfn, unlinked: Option<u64>) -> Self {
        Self { nearest: Kept::NONE, root, unlinked, above: [Kept::NONE; WAYS] }
    }
}

impl Default for Path {
    fn default() -> Self {
        Self::NEW
    }
}

impl<F: Format, M: TableMemory> Tables<'_, F, M> {
    /// Forgets what may be in the tree no more. Until the lock of its edits is given up, the
    /// path is right, as long as no table is unlinked.
    #[inline]
    pub(crate) fn renew(&self, path: &mut Path) {
        let now = self.memory.unlinked();
        if now.is_none() || now != path.unlinked || path.root != self.root {
            *path = Path::from(self.root, now);
        }
    }

    /// The number of the block that the table of the page at `gfn` serves.
    #[inline]
    pub(crate) fn block(&self, gfn: Gfn) -> u64 {
        let geometry = self.format.geometry();
        gfn.get() >> (geometry.page_order() + geometry.index_bits())
    }

    /// The table of the page at `gfn`, and the index of its entry there; `None` if there is no
    /// such table. The path was [renewed](Self::renew) under the lock that is held.
    #[inline]
    pub(crate) fn find_page(&self, gfn: Gfn, path: &mut Path) -> Option<(Mfn, usize)> {
        let geometry = self.format.geometry();
        let index = geometry.index(geometry.page_order(), gfn);
        let block = self.block(gfn);
        if block != path.nearest.block {
            path.nearest = Kept { block, table: self.find_table(gfn, path)? };
        }
        Some((path.nearest.table, index))
    }

    /// The table of the page at `gfn`, from the table above it if that one is known.
    #[inline]
    fn find_table(&self, gfn: Gfn, path: &mut Path) -> Option<Mfn> {
        let geometry = self.format.geometry();
        let (page, bits) = (geometry.page_order(), geometry.index_bits());
        let block = gfn.get() >> (page + bits + bits);
        let above = &mut path.above[block as usize % WAYS];
        let raw = if above.block == block {
            self.memory.read(above.table, geometry.index(page + bits, gfn))
        } else {
            let (table, raw) = self.find_above(gfn)?;
            // A root of several pages is the table of more than one block.
            if geometry.top() > Level::ONE {
                *above = Kept { block, table };
            }
            raw
        };
        self.format.child(Level::ONE, raw)
    }

    /// The table above that of the page at `gfn`, and the word of its entry there.
    #[inline(never)]
    fn find_above(&self, gfn: Gfn) -> Option<(Mfn, u64)> {
        if !self.format.geometry().contains(gfn) {
            return None;
        }
        let (slot, raw) = self.find(gfn, Level::ONE);
        (slot.level == Level::ONE).then_some((slot.table, raw))
    }
}
