//! The way down to an address, kept for the next one.
//!
//! A [`Path`] belongs to one tree and lives behind the lock of that tree's edits. Pages
//! that are cleared one after the other mostly share tables, and their way down need not
//! begin at the root each time.

use flush::{Gfn, Mfn};

use crate::entry::{Level, MAX_LEVELS};
use crate::format::Format;
use crate::memory::TableMemory;
use crate::tree::{Slot, Tables};

/// The tables on the way to the last page that was looked for.
///
/// It is used only while the memory says that no table was unlinked since
/// ([`TableMemory::unlinked`]): so every table in it is still where it was in the tree. A
/// memory that does not count gets no help from it.
#[derive(Clone, Copy, Debug)]
pub struct Path {
    /// The last page, or [`NOWHERE`].
    gfn: u64,
    /// The table of each level on the way to it; that of the top level is the root.
    tables: [Mfn; MAX_LEVELS],
    root: Mfn,
    /// What the memory had unlinked by then.
    unlinked: u64,
}

/// Differs from every frame of every space in the highest bits: only the root serves both.
const NOWHERE: u64 = u64::MAX;

impl Path {
    /// No way is known. For a tree that is new, or of which nothing was looked for yet.
    pub const NEW: Self =
        Self { gfn: NOWHERE, tables: [Mfn::new(0); MAX_LEVELS], root: Mfn::new(0), unlinked: 0 };
}

impl Default for Path {
    fn default() -> Self {
        Self::NEW
    }
}

impl<F: Format, M: TableMemory> Tables<'_, F, M> {
    /// As [`find`](Self::find) to a page, from the lowest table on `path` that serves `gfn`
    /// too.
    #[inline]
    pub(crate) fn find_page(&self, gfn: Gfn, path: &mut Path) -> (Slot, u64) {
        let geometry = self.format.geometry();
        let (page, bits) = (geometry.page_order(), geometry.index_bits());
        let (differ, now) = (gfn.get() ^ path.gfn, self.memory.unlinked());
        if differ >> (page + bits) == 0 && now == Some(path.unlinked) && path.root == self.root {
            let (table, index) = (path.tables[0], geometry.index(page, gfn));
            let raw = self.memory.read(table, index);
            return (Slot { table, index, level: Level::PAGE }, raw);
        }
        self.find_along(gfn, path)
    }

    /// The way down from the lowest table on `path` that serves `gfn`, or from the root.
    #[inline(never)]
    fn find_along(&self, gfn: Gfn, path: &mut Path) -> (Slot, u64) {
        let geometry = self.format.geometry();
        let now = self.memory.unlinked();
        let mut level = if now == Some(path.unlinked) && path.root == self.root {
            geometry.shared_level(gfn.get() ^ path.gfn)
        } else {
            geometry.top()
        };
        let (mut order, step) = (geometry.order(level), geometry.index_bits());
        let (mut table, mut index) = if level < geometry.top() {
            (path.tables[level.slot()], geometry.index(order, gfn))
        } else {
            geometry.root_slot(self.root, gfn)
        };
        // Half of it may be of another page until the end is reached.
        path.gfn = NOWHERE;
        loop {
            let raw = self.memory.read(table, index);
            let slot = Slot { table, index, level };
            let Some(below) = level.below() else {
                if let Some(unlinked) = now {
                    (path.gfn, path.root, path.unlinked) = (gfn.get(), self.root, unlinked);
                }
                return (slot, raw);
            };
            let Some(child) = self.format.child(level, raw) else { return (slot, raw) };
            path.tables[below.slot()] = child;
            // Not below the order of a page: this is done once a level.
            order -= step;
            (table, index, level) = (child, geometry.index(order, gfn), below);
        }
    }
}
