//! The table of the last page, kept for the next one.
//!
//! A [`Path`] belongs to one tree and lives behind the lock of that tree's edits. Pages
//! that are cleared one after the other mostly share a table, and their way down need not
//! begin at the root each time.

use flush::{Gfn, Mfn};

use crate::entry::Level;
use crate::format::Format;
use crate::memory::TableMemory;
use crate::tree::{Slot, Tables};

/// The table of the last page that was looked for.
///
/// It is used only while the memory says that no table was unlinked since
/// ([`TableMemory::unlinked`]): so it still is where it was in the tree. A memory that does
/// not count gets no help from it.
#[derive(Clone, Copy, Debug)]
pub struct Path {
    /// The number of any page in the table, or [`NOWHERE`].
    gfn: u64,
    table: Mfn,
    root: Mfn,
    /// What the memory had unlinked by then.
    unlinked: u64,
}

/// Differs from every frame of every space in the highest bits: no table has it.
const NOWHERE: u64 = u64::MAX;

impl Path {
    /// No table is known. For a tree that is new, or of which nothing was looked for yet.
    pub const NEW: Self = Self { gfn: NOWHERE, table: Mfn::new(0), root: Mfn::new(0), unlinked: 0 };
}

impl Default for Path {
    fn default() -> Self {
        Self::NEW
    }
}

impl<F: Format, M: TableMemory> Tables<'_, F, M> {
    /// As [`find`](Self::find) to a page, in the table of the last one if it is there.
    #[inline]
    pub(crate) fn find_page(&self, gfn: Gfn, path: &mut Path) -> (Slot, u64) {
        let geometry = self.format.geometry();
        let (page, bits) = (geometry.page_order(), geometry.index_bits());
        let (differ, now) = (gfn.get() ^ path.gfn, self.memory.unlinked());
        if differ >> (page + bits) == 0 && now == Some(path.unlinked) && path.root == self.root {
            let (table, index) = (path.table, geometry.index(page, gfn));
            let raw = self.memory.read(table, index);
            return (Slot { table, index, level: Level::PAGE }, raw);
        }
        let (slot, raw) = self.find(gfn, Level::PAGE);
        if let Some(unlinked) = now.filter(|_| slot.level == Level::PAGE) {
            *path = Path { gfn: gfn.get(), table: slot.table, root: self.root, unlinked };
        }
        (slot, raw)
    }
}
