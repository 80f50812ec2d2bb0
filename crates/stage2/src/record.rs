//! What an edit reports to, and how much of it that still has room for.
//!
//! [`Recorder`] puts an edit on the record that a batch lends. The walker asks for room
//! before it does harm and reports after the store, so a [`Record`] never refuses.

use core::marker::PhantomData;

use flush::{Gone, Iotlb, Records, Run, Skipped, TablePage};

use crate::entry::Leaf;
use crate::memory::Marks;

/// What the functions that change tables report to.
pub trait Record {
    /// How many more leaves may be removed; at 0 a walk stops with
    /// [`Stop::Full`](crate::Stop::Full) before the next.
    fn leaves_left(&self) -> usize;

    /// How many more table pages [`table`](Self::table) will take.
    fn tables_left(&self) -> usize;

    /// Whether anybody looks at the marks of leaves that are removed.
    #[inline]
    fn marks(&self) -> Marks {
        Marks::Wanted
    }

    /// The valid leaf over `run` is gone; it had 2^`order` frames.
    fn removed(&mut self, run: Run, order: u8, leaf: Leaf);

    /// Valid leaves over all of `run` are gone, of 2^`order` frames each; `leaves` says what
    /// each one was, in order.
    fn removed_pages(&mut self, run: Run, order: u8, leaves: impl Iterator<Item = (Run, Leaf)>) {
        debug_assert!(run.pages() >> order > 0);
        for (run, leaf) in leaves {
            self.removed(run, order, leaf);
        }
    }

    /// The valid leaf over `run`, of 2^`order` frames, was replaced: by one with other
    /// rights or another frame, or by a table of smaller ones. `leaf` is the old one.
    fn changed(&mut self, run: Run, order: u8, leaf: Leaf);

    /// A leaf was put over `run`, where no hardware could see one before.
    fn added(&mut self, run: Run);

    /// An entry on the way to `run` points at a table that was not there before.
    fn linked(&mut self, run: Run);

    /// The table page that served `run` is unlinked and waits for the flush.
    ///
    /// # Errors
    ///
    /// Gives the page back where there was no room. The walker asks
    /// [`tables_left`](Self::tables_left) first; a record that refuses nevertheless
    /// leaks the page, which is safe.
    fn table(&mut self, run: Run, page: TablePage) -> Result<(), TablePage>;

    /// A tree with all that hangs on it is out of use: whatever was cached of it has to
    /// go, leaves of every order and walk caches included.
    fn everything(&mut self);
}

/// Where the proofs of removed leaves go: one for each, for the page behind it.
pub trait Sink<'id, K: Records> {
    /// How many more leaves it can take.
    fn left(&self) -> usize;

    /// Whether it looks at the marks of the leaves it takes.
    #[inline]
    fn marks(&self) -> Marks {
        Marks::Wanted
    }

    /// The leaf over `run` is gone and on record; `gone` is the proof.
    ///
    /// Called at most [`left`](Self::left) times since that was asked.
    fn take(&mut self, run: Run, leaf: Leaf, gone: Gone<'id, K>);

    /// Takes leaves that went together, with a proof for each: at most
    /// [`left`](Self::left).
    #[inline]
    fn take_all(&mut self, leaves: impl Iterator<Item = (Run, Leaf, Gone<'id, K>)>) {
        leaves.for_each(|(run, leaf, gone)| self.take(run, leaf, gone));
    }
}

/// The sink of an edit after which nobody gives the pages behind the leaves away.
///
/// The flush stays on record; only the proofs go unused.
#[derive(Clone, Copy, Debug, Default)]
pub struct Unheld;

impl<'id, K: Records> Sink<'id, K> for Unheld {
    fn left(&self) -> usize {
        usize::MAX
    }

    #[inline]
    fn marks(&self) -> Marks {
        Marks::Unwanted
    }

    fn take(&mut self, _run: Run, _leaf: Leaf, _gone: Gone<'id, K>) {}
}

/// Puts edits of a table that `K` walks on the record a batch lends.
#[derive(Debug)]
pub struct Recorder<'r, 'id, K, S = Unheld> {
    skipped: &'r mut Skipped<'id>,
    sink: S,
    kind: PhantomData<K>,
}

impl<'r, 'id, K: Records, S: Sink<'id, K>> Recorder<'r, 'id, K, S> {
    /// Records to `skipped` and hands each removed leaf's proof to `sink`.
    pub fn new(skipped: &'r mut Skipped<'id>, sink: S) -> Self {
        Self { skipped, sink, kind: PhantomData }
    }

    /// Gives the sink back.
    pub fn into_sink(self) -> S {
        self.sink
    }
}

impl<'id, K: Records, S: Sink<'id, K>> Record for Recorder<'_, 'id, K, S> {
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

    #[inline]
    fn removed(&mut self, run: Run, order: u8, leaf: Leaf) {
        let gone = self.skipped.leaf::<K>(run, order);
        self.sink.take(run, leaf, gone);
    }

    #[inline]
    fn removed_pages(&mut self, run: Run, order: u8, leaves: impl Iterator<Item = (Run, Leaf)>) {
        let leaves = leaves.zip(self.skipped.leaves::<K>(run, order));
        self.sink.take_all(leaves.map(|((run, leaf), gone)| (run, leaf, gone)));
    }

    #[inline]
    fn changed(&mut self, run: Run, order: u8, leaf: Leaf) {
        let gone = self.skipped.leaf::<K>(run, order);
        Unheld.take(run, leaf, gone);
    }

    // No CPU caches that something is absent: what is new matters to devices only,
    // whose unit may run in caching mode and have cached a missing table as well.
    #[inline]
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
