//! A table tree, and the way down to one entry of it.
//!
//! [`Tables`] bundles the three things every operation needs; [`Found`] says what is
//! at an address and how much of the address space the answer covers.

use flush::{Gfn, Mfn, Run};

use crate::entry::{Entry, Leaf, Level};
use crate::format::{Format, Geometry};
use crate::memory::TableMemory;

/// How often a compare-exchange is tried again when the entry moved.
///
/// Hardware sets two bits by itself, so a third failure says that somebody else edits
/// the tree.
const TRIES: usize = 4;

/// A table tree: its format, the memory it lives in, and its root.
#[derive(Debug)]
pub struct Tables<'a, F, M> {
    /// What its words mean.
    pub format: &'a F,
    /// Where they are.
    pub memory: &'a M,
    /// The page of the root, the first one of a concatenated root.
    pub root: Mfn,
}

impl<F, M> Clone for Tables<'_, F, M> {
    #[inline]
    fn clone(&self) -> Self {
        *self
    }
}

impl<F, M> Copy for Tables<'_, F, M> {}

/// What is at an address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Found {
    /// All frames that the entry answers for.
    pub run: Run,
    /// The entry's level.
    pub level: Level,
    /// The entry.
    pub entry: Entry,
}

impl Found {
    /// The leaf, and the machine frame that it shows for `gfn`.
    ///
    /// `None` if there is no leaf or `gfn` is outside [`run`](Self::run).
    #[must_use]
    #[inline]
    pub fn leaf_at(&self, gfn: Gfn) -> Option<(Leaf, Mfn)> {
        match self.entry {
            Entry::Leaf(leaf) if self.run.contains(gfn) => {
                let offset = gfn.get().saturating_sub(self.run.first().get());
                Some((leaf, Mfn::new(leaf.mfn.get().saturating_add(offset))))
            }
            Entry::Leaf(_) | Entry::Empty | Entry::Inert | Entry::Table(_) => None,
        }
    }
}

/// Where an entry is.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Slot {
    /// The page it is in.
    pub(crate) table: Mfn,
    /// Its index there.
    pub(crate) index: usize,
    /// Its level.
    pub(crate) level: Level,
}

/// Where an entry is, and what it spans.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Place {
    /// The page it is in.
    pub(crate) table: Mfn,
    /// Its index there.
    pub(crate) index: usize,
    /// Its level.
    pub(crate) level: Level,
    /// What it spans.
    pub(crate) span: Run,
}

impl Place {
    #[inline]
    pub(crate) fn new(geometry: Geometry, table: Mfn, level: Level, frame: Gfn) -> Self {
        let (table, index) = geometry.slot(table, level, frame);
        Self { table, index, level, span: geometry.span(level, frame) }
    }

    #[inline]
    pub(crate) fn slot(&self) -> Slot {
        Slot { table: self.table, index: self.index, level: self.level }
    }
}

/// The entry was not what the caller saw, and it is not hardware that changed it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Contended;

impl<F: Format, M: TableMemory> Tables<'_, F, M> {
    /// The entry for `gfn` at level `to`, or the one above it where the path ends.
    ///
    /// `gfn` must be inside the space.
    #[inline]
    pub(crate) fn descend(&self, gfn: Gfn, to: Level) -> (Place, u64, Entry) {
        let (slot, raw) = self.find(gfn, to);
        let span = self.format.geometry().span(slot.level, gfn);
        let place = Place { table: slot.table, index: slot.index, level: slot.level, span };
        (place, raw, self.format.decode(slot.level, raw))
    }

    /// As [`descend`](Self::descend), without looking at what the entry is.
    #[inline]
    pub(crate) fn find(&self, gfn: Gfn, to: Level) -> (Slot, u64) {
        let geometry = self.format.geometry();
        let (mut order, step) = geometry.orders();
        let mut level = geometry.top();
        let (mut table, mut index) = geometry.root_slot(self.root, gfn);
        loop {
            let raw = self.memory.read(table, index);
            let (true, Some(below)) = (level > to, level.below()) else {
                return (Slot { table, index, level }, raw);
            };
            let Some(child) = self.format.child(level, raw) else {
                return (Slot { table, index, level }, raw);
            };
            // Not below the order of a page: this is done once a level.
            order -= step;
            (table, index, level) = (child, geometry.index(order, gfn), below);
        }
    }

    /// Replaces `leaf`, whose word was `raw`, by what `new` makes of it, and returns the
    /// leaf that was really there: hardware may have marked it meanwhile.
    ///
    /// `new` sees the leaf again after each such change and may refuse it.
    #[inline]
    pub(crate) fn replace_leaf<E: From<Contended>>(
        &self,
        slot: Slot,
        raw: u64,
        leaf: Leaf,
        mut new: impl FnMut(u64, &Leaf) -> Result<u64, E>,
    ) -> Result<Leaf, E> {
        let word = new(raw, &leaf)?;
        match self.memory.compare_exchange(slot.table, slot.index, raw, word) {
            Ok(()) => Ok(leaf),
            Err(found) => self.replace_moved(slot, found, new),
        }
    }

    /// The rest of [`replace_leaf`](Self::replace_leaf), when the entry moved to `raw`.
    #[cold]
    #[inline(never)]
    fn replace_moved<E: From<Contended>>(
        &self,
        slot: Slot,
        mut raw: u64,
        mut new: impl FnMut(u64, &Leaf) -> Result<u64, E>,
    ) -> Result<Leaf, E> {
        for _ in 1..TRIES {
            let Entry::Leaf(leaf) = self.format.decode(slot.level, raw) else { break };
            let word = new(raw, &leaf)?;
            match self.memory.compare_exchange(slot.table, slot.index, raw, word) {
                Ok(()) => return Ok(leaf),
                Err(found) => raw = found,
            }
        }
        Err(Contended.into())
    }

    /// The order that a change of `leaf`, at `level`, goes on record with: its own, or
    /// that of the larger leaf it came from, which hardware may hold in its place.
    #[inline]
    pub(crate) fn recorded_order(&self, level: Level, leaf: &Leaf) -> u8 {
        self.format.geometry().order(level.max(leaf.origin))
    }

    /// Whether no entry of the root is in use, on any of its pages.
    pub(crate) fn root_is_empty(&self) -> bool {
        let geometry = self.format.geometry();
        let step = 1u64 << geometry.page_order();
        let pages = (geometry.root_entries() / geometry.entries()).max(1) as u64;
        (0..pages).all(|page| {
            let offset = page.saturating_mul(step);
            self.memory.live(Mfn::new(self.root.get().saturating_add(offset))) == 0
        })
    }

    /// Replaces a pointer at `child` whose word was `raw`.
    pub(crate) fn replace_table(
        &self,
        place: &Place,
        mut raw: u64,
        child: Mfn,
        word: u64,
    ) -> Result<(), Contended> {
        for _ in 0..TRIES {
            if self.format.decode(place.level, raw) != Entry::Table(child) {
                break;
            }
            match self.memory.compare_exchange(place.table, place.index, raw, word) {
                Ok(()) => return Ok(()),
                Err(found) => raw = found,
            }
        }
        Err(Contended)
    }
}
