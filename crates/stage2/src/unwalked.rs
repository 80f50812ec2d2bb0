//! Trees that no hardware can walk: built, changed and taken down without a flush.
//!
//! [`Unwalked`] owns such a tree. It is made from one of two proofs: a root that is
//! still a [`FreshTable`], or a root that came out of a flushed batch. It shows nobody
//! where the root is, until [`publish`](Unwalked::publish) ends it.

use flush::{FreshTable, Gfn, Mfn, Released, Run, TablePage};

use crate::destroy::{RootError, destroy_early};
use crate::entry::{Leaf, Level};
use crate::format::Format;
use crate::map::{MapError, Over, map};
use crate::memory::{Marks, TableMemory};
use crate::page::lookup;
use crate::record::Record;
use crate::stop::{Budget, Rest, Stopped, Tally};
use crate::tree::{Found, Tables};

/// A tree that no hardware can walk.
///
/// Whoever holds it knows that no cache holds anything of the tree: so edits need no
/// record and pages need no flush. Only a root that is fresh or released makes one, and
/// a page that was merely unlinked does not:
///
/// ```compile_fail,E0308
/// use flush::TablePage;
/// use stage2::{Format, TableMemory, Unwalked};
///
/// fn skip<'a, F: Format, M: TableMemory>(
///     format: &'a F,
///     memory: &'a M,
///     root: TablePage,
/// ) -> Unwalked<'a, F, M> {
///     Unwalked::released(format, memory, root) // wants Released<TablePage>
/// }
/// ```
///
/// Nor can a published tree be taken back:
///
/// ```compile_fail,E0382
/// use stage2::{Budget, Format, TableMemory, Unwalked};
///
/// fn skip<F: Format, M: TableMemory>(mut tree: Unwalked<'_, F, M>) {
///     let root = tree.publish();
///     tree.teardown(&mut Budget::UNLIMITED.clone(), |_, _| ()); // moved
/// }
/// ```
#[derive(Debug)]
#[must_use = "dropping it leaks every page of the tree"]
pub struct Unwalked<'a, F, M> {
    tables: Tables<'a, F, M>,
    /// `None` once the root is gone.
    rest: Option<Rest>,
}

impl<'a, F: Format, M: TableMemory> Unwalked<'a, F, M> {
    /// An empty tree. A concatenated root is one block of pages, known by its first.
    pub fn new(format: &'a F, memory: &'a M, root: FreshTable) -> Self {
        let tables = Tables { format, memory, root: memory.link(root) };
        Self { tables, rest: Some(Rest::new(format.geometry().space())) }
    }

    /// The tree below a root that [`retire`] put on record, now that the flush is done.
    ///
    /// The flush covered the whole space, walk caches included, and no hardware was
    /// given the root since: so nothing below it can be reached either.
    pub fn released(format: &'a F, memory: &'a M, root: Released<TablePage>) -> Self {
        Self::new(format, memory, root.recycle())
    }

    /// Installs a leaf over a vacant entry, as [`map()`] does.
    ///
    /// # Errors
    ///
    /// See [`MapError`]; nothing was changed. Also [`MapError::OutOfRange`] once the
    /// tree is taken down.
    pub fn map(&mut self, gfn: Gfn, level: Level, leaf: Leaf) -> Result<(), MapError> {
        if self.rest.is_none() {
            return Err(MapError::OutOfRange);
        }
        self.rest = Some(Rest::new(self.tables.format.geometry().space()));
        let mut record = Unrecorded { memory: self.tables.memory, removed: |_, _| () };
        let mut put = || map(self.tables, gfn, level, leaf, Over::Vacant, &mut record);
        match put() {
            // The old table is gone and there is nobody to flush.
            Err(MapError::FlushFirst) => put().map(|_| ()),
            result => result.map(|_| ()),
        }
    }

    /// What is mapped at `gfn`; `None` beyond the space, and once the tree is taken
    /// down.
    #[must_use]
    pub fn lookup(&self, gfn: Gfn) -> Option<Found> {
        self.rest?;
        lookup(self.tables, gfn)
    }

    /// The root, for hardware: from now on every edit needs a record. `None` if the
    /// tree is taken down.
    #[must_use = "dropping it leaks every page of the tree"]
    pub fn publish(self) -> Option<Mfn> {
        self.rest.map(|_| self.tables.root)
    }

    /// Clears every leaf and gives every table page, the root last, straight back to the
    /// memory. `removed` sees each leaf as it goes. Costs what is mapped: behind the last
    /// entry in use of a table nothing is read.
    ///
    /// # Errors
    ///
    /// As [`destroy`](crate::destroy); the next call goes on there. After success it does nothing.
    pub fn teardown(
        &mut self,
        budget: &mut Budget,
        removed: impl FnMut(Run, Leaf),
    ) -> Result<Tally, Stopped> {
        let Some(rest) = self.rest else {
            let reached = self.tables.format.geometry().space().last();
            return Ok(Tally { reads: 0, leaves: 0, tables: 0, reached });
        };
        let mut record = Unrecorded { memory: self.tables.memory, removed };
        let result = destroy_early(self.tables, rest, budget, &mut record);
        self.rest = result.as_ref().err().map(|stopped| stopped.rest);
        result
    }

    /// Whether the tree is taken down: every page was given back.
    #[must_use]
    pub fn is_done(&self) -> bool {
        self.rest.is_none()
    }
}

/// Puts the root of a whole tree on record, with all that hangs on it still in place.
///
/// The record is everything: leaves of every order go with the tree, so no run could say
/// in blocks of which order to flush it. Once the batch is flushed, the root comes out
/// of it, and [`Unwalked::released`] takes the rest down without another flush. No
/// hardware may be given the root any more, and nobody may edit the tree in between.
///
/// # Errors
///
/// [`RootError::Full`]; nothing was changed then.
pub fn retire<F: Format, M: TableMemory>(
    tables: Tables<'_, F, M>,
    record: &mut impl Record,
) -> Result<(), RootError> {
    if record.tables_left() == 0 {
        return Err(RootError::Full);
    }
    record.everything();
    let space = tables.format.geometry().space();
    record.table(space, tables.memory.unlink(tables.root)).map_err(|_leaked| RootError::Full)
}

/// The record of a tree that nothing can have cached. Private: only [`Unwalked`] may say
/// so.
struct Unrecorded<'m, M, C> {
    memory: &'m M,
    removed: C,
}

impl<M: TableMemory, C: FnMut(Run, Leaf)> Record for Unrecorded<'_, M, C> {
    fn leaves_left(&self) -> usize {
        usize::MAX
    }

    fn tables_left(&self) -> usize {
        usize::MAX
    }

    // No hardware walks the tree, so none marks it.
    #[inline]
    fn marks(&self) -> Marks {
        Marks::Unwanted
    }

    fn removed(&mut self, run: Run, _order: u8, leaf: Leaf) {
        (self.removed)(run, leaf);
    }

    fn changed(&mut self, _run: Run, _order: u8, _leaf: Leaf) {}

    fn added(&mut self, _run: Run) {}

    fn linked(&mut self, _run: Run) {}

    fn table(&mut self, _run: Run, page: TablePage) -> Result<(), TablePage> {
        // As good as fresh: it hung on a root that no hardware can reach.
        self.memory.discard(FreshTable::new(page.mfn()));
        Ok(())
    }

    fn everything(&mut self) {}
}

static_assertions::assert_not_impl_any!(Unwalked<'static, u8, u8>: Clone, Copy, Default);
