//! How edits of a p2m report to the record that a batch lends.
//!
//! Holding an [`Edit`] means: whatever the tables lose goes on record for the caches
//! that `K` stands for, and what they merely gain goes on record for devices alone.

use flush::{Gone, Iotlb, Records, Run, Shared, Skipped, TablePage, Tlb};
use stage2::{Leaf, Marks, Record, Sink};

/// Who walks the tables of a p2m: CPUs alone, or devices as well.
///
/// [`Tlb`] and [`Shared`] are the two; a table that only devices walk is no p2m.
pub trait Walkers: Records {}
impl Walkers for Tlb {}
impl Walkers for Shared {}

/// One edit of tables that `K` walks.
#[derive(Debug)]
pub(crate) struct Edit<'r, 'id, K: Walkers, S> {
    skipped: &'r mut Skipped<'id>,
    sink: S,
    /// The proof for the last leaf that was replaced.
    replaced: Option<Gone<'id, K>>,
}

impl<'r, 'id, K: Walkers, S: Sink<'id, K>> Edit<'r, 'id, K, S> {
    pub(crate) fn new(skipped: &'r mut Skipped<'id>, sink: S) -> Self {
        Self { skipped, sink, replaced: None }
    }

    pub(crate) fn into_replaced(self) -> Option<Gone<'id, K>> {
        self.replaced
    }
}

impl<'id, K: Walkers, S: Sink<'id, K>> Record for Edit<'_, 'id, K, S> {
    fn leaves_left(&self) -> usize {
        self.sink.left()
    }

    fn tables_left(&self) -> usize {
        self.skipped.tables_left()
    }

    #[inline]
    fn marks(&self) -> Marks {
        self.sink.marks()
    }

    fn removed(&mut self, run: Run, order: u8, leaf: Leaf) {
        let gone = self.skipped.leaf::<K>(run, order);
        self.sink.take(run, leaf, gone);
    }

    fn removed_pages(&mut self, run: Run, order: u8, leaves: impl Iterator<Item = (Run, Leaf)>) {
        let leaves = leaves.zip(self.skipped.leaves::<K>(run, order));
        self.sink.take_all(leaves.map(|((run, leaf), gone)| (run, leaf, gone)));
    }

    fn changed(&mut self, run: Run, order: u8, _leaf: Leaf) {
        self.replaced = Some(self.skipped.leaf::<K>(run, order));
    }

    // CPUs cache no absence (see `tlb`), so what is new concerns devices only: a VT-d
    // unit in caching mode may remember that an entry, or a table, was not there.
    fn added(&mut self, run: Run) {
        if K::IOTLB {
            self.skipped.added::<Iotlb>(run);
        }
    }

    fn linked(&mut self, run: Run) {
        if K::IOTLB {
            self.skipped.linked::<Iotlb>(run);
        }
    }

    fn table(&mut self, run: Run, page: TablePage) -> Result<(), TablePage> {
        self.skipped.table::<K>(run, page)
    }

    fn everything(&mut self) {
        self.skipped.everything::<K>();
    }
}
