//! How edits of shadow tables report: to the batch, and to the reverse map.
//!
//! A [`ShadowEdit`] drops the record of a leaf after the leaf is gone, never before.

use flush::{Run, Skipped, TablePage, Tlb};
use stage2::{Leaf, Marks, Record};

use super::reverse::Reverse;

/// One edit of one shadow table.
///
/// A cover names canonical frames, and a nested translation has none of its own: so
/// whatever a shadow loses is recorded as everything that CPUs hold of the guest.
#[derive(Debug)]
pub(crate) struct ShadowEdit<'e, 's, 'id> {
    pub(crate) skipped: &'e mut Skipped<'id>,
    pub(crate) reverse: &'e mut Reverse<'s>,
    /// Which shadow.
    pub(crate) shadow: usize,
    /// How many of its leaves are on record in the reverse map.
    pub(crate) recorded: &'e mut u64,
}

impl Record for ShadowEdit<'_, '_, '_> {
    // The pages behind the leaves are the canonical map's: no proof is kept for each.
    fn leaves_left(&self) -> usize {
        usize::MAX
    }

    fn tables_left(&self) -> usize {
        self.skipped.tables_left()
    }

    #[inline]
    fn marks(&self) -> Marks {
        Marks::Unwanted
    }

    fn removed(&mut self, run: Run, _order: u8, _leaf: Leaf) {
        self.skipped.everything::<Tlb>();
        // Not the order on record, which may be that of a larger leaf from before.
        let order = run.pages().trailing_zeros() as u8;
        if self.reverse.remove(self.shadow, order, run.first()) {
            *self.recorded = self.recorded.saturating_sub(1);
        }
    }

    // Shadow leaves are removed whole and never split, so there is no smaller leaf that
    // would need a record of its own.
    fn changed(&mut self, _run: Run, _order: u8, _leaf: Leaf) {
        self.skipped.everything::<Tlb>();
    }

    // No CPU caches that something is absent, and no device walks these tables.
    fn added(&mut self, _run: Run) {}

    fn linked(&mut self, _run: Run) {}

    fn table(&mut self, run: Run, page: TablePage) -> Result<(), TablePage> {
        // First, so that the nested run is not mistaken for a canonical one.
        self.skipped.everything::<Tlb>();
        self.skipped.table::<Tlb>(run, page)
    }

    fn everything(&mut self) {
        self.skipped.everything::<Tlb>();
    }
}
