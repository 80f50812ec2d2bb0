//! Edits of a domain's own tables: what devices may reach.
//!
//! For a domain whose tables are not those of its CPUs. Every edit is lent a batch's
//! [`Skipped`] and records there what devices must forget; nothing is flushed here.

use flush::{Dfn, Gfn, Gone, Iotlb, Mfn, Run, Skipped};
use stage2::{
    Access, Budget, Emptied, Format, Found, Leaf, Likely, MapStopped, Near, PageError, Path,
    Recorder, Rest, Shown, Sink, Stopped, TableMemory, Tables, Tally, Unheld, format::vtd::Vtd,
};

use crate::{DmaDomain, Guarded, Members};

/// What [`DmaDomain::clear`] expects to find, and must not remove anything else than.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Expected {
    /// The machine frame.
    pub mfn: Mfn,
    /// The rights, exactly.
    pub access: Access,
}

/// Pages of a domain's tables that are cleared one after the other.
///
/// The embedder's lock around these tables is held as long as it exists.
#[derive(Debug)]
pub struct Clearing<'p, M> {
    near: Near<'p, 'p, Vtd, M>,
    /// The rights of the last page,
    access: Access,
    /// and what pages with these are like.
    likely: Likely,
}

impl<M: TableMemory> Clearing<'_, M> {
    /// The entry of `dfn`, if it shows what is expected, to be cleared with that of another
    /// table. Nothing is changed.
    ///
    /// `None` says nothing about the page: [`clear`](Self::clear) looks harder.
    #[inline(always)]
    pub fn shown(&mut self, dfn: Dfn, expected: Expected) -> Option<Shown<'_, Iotlb>> {
        let Expected { mfn, access } = expected;
        self.expect(access);
        self.near.shown(Gfn::from(dfn), mfn, &self.likely)
    }

    /// As [`DmaDomain::clear`].
    ///
    /// # Errors
    ///
    /// As there.
    #[inline]
    pub fn clear<'id>(
        &mut self,
        dfn: Dfn,
        Expected { mfn, access }: Expected,
        skipped: &mut Skipped<'id>,
    ) -> Result<Gone<'id, Iotlb>, PageError> {
        let same = |leaf: &Leaf| leaf.mfn == mfn && leaf.access == access;
        self.expect(access);
        self.near.clear(Gfn::from(dfn), mfn, skipped, &self.likely, same)
    }

    #[inline(always)]
    fn expect(&mut self, access: Access) {
        if self.access != access {
            self.access = access;
            self.likely = like(self.near.tables().format, access);
        }
    }
}

#[inline]
fn like(format: &Vtd, access: Access) -> Likely {
    Likely::new(format, Leaf::new(Mfn::new(0), access))
}

impl<G: Guarded<Members>> DmaDomain<G> {
    /// The domain's tables in `memory`, for the walker of [`stage2`].
    ///
    /// Not for freeing the root, which devices may be given as long as the domain exists:
    /// see [`teardown`](Self::teardown).
    ///
    /// Edits are serialised by the embedder: its lock around this domain's tables.
    pub const fn tables<'a, M: TableMemory>(&'a self, memory: &'a M) -> Tables<'a, Vtd, M> {
        Tables { format: self.format(), memory, root: self.root() }
    }

    /// Maps the frames of `rest` to consecutive machine frames from `first` on, where
    /// nothing is mapped yet, in leaves as large as format and alignment allow.
    ///
    /// Frame numbers of `rest` are device frames. The flush that is recorded costs a
    /// command only for hardware in caching mode or with write buffers, or where a table
    /// was missing: the one before it, if another batch freed it, may still be cached.
    /// `budget` counts leaves.
    ///
    /// # Errors
    ///
    /// [`MapStopped`] says why and from where on nothing was mapped.
    pub fn map(
        &self,
        memory: &impl TableMemory,
        rest: Rest,
        first: Mfn,
        access: Access,
        budget: &mut Budget,
        skipped: &mut Skipped<'_>,
    ) -> Result<(), MapStopped> {
        let mut record = Recorder::<Iotlb, _>::new(skipped, Unheld);
        let leaf = Leaf::new(first, access);
        let largest = self.format().largest_leaf();
        stage2::map_run(self.tables(memory), rest, leaf, largest, budget, &mut record)
    }

    /// Clears the single page `dfn` if it shows what is `expected`.
    ///
    /// The proof says that the entry is gone and its flush on the batch's record. An
    /// emptied table stays, for the next mapping.
    ///
    /// # Errors
    ///
    /// [`PageError`]; nothing was changed or recorded then.
    pub fn clear<'id>(
        &self,
        memory: &impl TableMemory,
        dfn: Dfn,
        expected: Expected,
        skipped: &mut Skipped<'id>,
    ) -> Result<Gone<'id, Iotlb>, PageError> {
        self.clear_near(memory, &mut Path::NEW.clone(), dfn, expected, skipped)
    }

    /// As [`clear`](Self::clear), for pages that are cleared one after the other: `path` is
    /// the way to the last one.
    ///
    /// The embedder keeps it behind its lock around this domain's tables, and uses it with
    /// this `memory` alone.
    ///
    /// # Errors
    ///
    /// As [`clear`](Self::clear).
    #[inline]
    pub fn clear_near<'id>(
        &self,
        memory: &impl TableMemory,
        path: &mut Path,
        dfn: Dfn,
        expected: Expected,
        skipped: &mut Skipped<'id>,
    ) -> Result<Gone<'id, Iotlb>, PageError> {
        self.clearing(memory, path).clear(dfn, expected, skipped)
    }

    /// To clear several pages under one lock, each as [`clear_near`](Self::clear_near) does.
    #[inline]
    pub fn clearing<'p, M: TableMemory>(
        &'p self,
        memory: &'p M,
        path: &'p mut Path,
    ) -> Clearing<'p, M> {
        // What grants mostly allow.
        let access = Access::READ_WRITE;
        let likely = like(self.format(), access);
        Clearing { near: Near::new(self.tables(memory), path), access, likely }
    }

    /// Clears every page of `rest`, frees emptied tables through the record, and hands the
    /// proof of each leaf to `sink`.
    ///
    /// # Errors
    ///
    /// [`Stopped`]: what lies before its rest is done and on record. `budget` counts
    /// entries read.
    pub fn clear_run<'id, S: Sink<'id, Iotlb>>(
        &self,
        memory: &impl TableMemory,
        rest: Rest,
        budget: &mut Budget,
        skipped: &mut Skipped<'id>,
        sink: S,
    ) -> Result<Tally, Stopped> {
        let mut record = Recorder::new(skipped, sink);
        stage2::clear(self.tables(memory), rest, budget, Emptied::Free, &mut record)
    }

    /// What devices see at `dfn`; `None` beyond the space.
    pub fn lookup(&self, memory: &impl TableMemory, dfn: Dfn) -> Option<Found> {
        stage2::lookup(self.tables(memory), Gfn::from(dfn))
    }

    /// Every device frame the tables can map.
    pub fn space(&self) -> Run {
        self.format().geometry().space()
    }
}
