//! Where a walk is in its tree, and the steps it takes from there.
//!
//! A [`Cursor`] lives as long as one walk. Between two of them only an address is kept:
//! the tables may change.

use flush::{Gfn, Mfn};

use crate::entry::{Level, MAX_LEVELS};
use crate::format::Format;
use crate::memory::TableMemory;
use crate::stop::{Budget, Tally};
use crate::tree::{Place, Tables};

/// Room for the pages on the way down to an entry.
pub(crate) type Path = [Mfn; MAX_LEVELS];

/// An entry, and the pages on the way down to it.
pub(crate) struct Cursor<'w, 'a, F, M> {
    tables: &'w Tables<'a, F, M>,
    /// The pages by level, the first one of a concatenated root. Lent, because the rest
    /// of a cursor stays in registers only if nothing of it is indexed.
    path: &'w mut Path,
    level: Level,
    /// The lg2 of how many frames the entry spans.
    order: u8,
    /// The first frame of its span, or the one in it where the walk began.
    at: Gfn,
    /// The page that the entry is in and its index there, until the cursor goes up or
    /// over others.
    table: Mfn,
    index: usize,
}

/// The last frame of the block of 2^`order` frames around `frame`; orders are those of a
/// geometry.
#[inline]
fn end_of(frame: Gfn, order: u8) -> Gfn {
    Gfn::new(frame.get() | !(u64::MAX << order))
}

impl<'w, 'a, F: Format, M: TableMemory> Cursor<'w, 'a, F, M> {
    /// At the root's entry for `at`, a frame of the space.
    #[inline]
    pub(crate) fn new(tables: &'w Tables<'a, F, M>, path: &'w mut Path, at: Gfn) -> Self {
        let geometry = tables.format.geometry();
        let (table, index) = geometry.root_slot(tables.root, at);
        let (order, _) = geometry.orders();
        *path = [tables.root; MAX_LEVELS];
        Self { tables, path, table, index, level: geometry.top(), order, at }
    }

    /// The first frame that is not dealt with.
    #[inline]
    pub(crate) fn at(&self) -> Gfn {
        self.at
    }

    /// The level of the entry.
    #[inline]
    pub(crate) fn level(&self) -> Level {
        self.level
    }

    /// The last frame of the entry's span.
    #[inline]
    pub(crate) fn last(&self) -> Gfn {
        end_of(self.at, self.order)
    }

    /// The page that the entry is in, as long as the cursor has not gone up.
    #[inline]
    pub(crate) fn table(&self) -> Mfn {
        self.table
    }

    /// To the entry at `first` in the same page, which is not before this one.
    #[inline]
    pub(crate) fn go_to(&mut self, first: Gfn) {
        // The first entry of a walk may begin before the walk does.
        self.at = self.at.max(first);
    }

    /// To the last entry in the same page, or to the one at `last` if that is before.
    #[inline]
    pub(crate) fn go_to_end(&mut self, last: Gfn) {
        let (_, step) = self.tables.format.geometry().orders();
        let end = end_of(self.at, self.order + step).min(last);
        self.go_to(Gfn::new(end.get() & (u64::MAX << self.order)));
    }

    /// The entry, for an edit.
    #[inline]
    pub(crate) fn place(&self) -> Place {
        let geometry = self.tables.format.geometry();
        Place::new(geometry, self.path[self.level.slot()], self.level, self.at)
    }

    /// The entry's word.
    #[inline]
    pub(crate) fn read(&self) -> u64 {
        self.tables.memory.read(self.table, self.index)
    }

    /// The word here, if there is the budget for it.
    #[inline]
    pub(crate) fn pay(&self, budget: &mut Budget, tally: &mut Tally) -> Option<u64> {
        if !budget.take() {
            return None;
        }
        tally.reads = tally.reads.saturating_add(1);
        Some(self.read())
    }

    /// To the entry below for the same frame, if the word here points at a table.
    #[inline]
    pub(crate) fn down(&mut self, raw: u64) -> bool {
        let Some(child) = self.tables.format.child(self.level, raw) else { return false };
        let Some(below) = self.level.below() else { return false };
        let geometry = self.tables.format.geometry();
        let (_, step) = geometry.orders();
        // A level above another has at least its order.
        (self.level, self.order) = (below, self.order - step);
        (self.table, self.index) = (child, geometry.index(self.order, self.at));
        self.path[below.slot()] = child;
        true
    }

    /// From `raw` down to the first word that points at no table, and pays for each read.
    /// `None` if the budget ended on the way.
    #[inline]
    pub(crate) fn descend(
        &mut self,
        mut raw: u64,
        budget: &mut Budget,
        tally: &mut Tally,
    ) -> Option<u64> {
        while self.down(raw) {
            raw = self.pay(budget, tally)?;
        }
        Some(raw)
    }

    /// From an empty entry over all that follow it in its page, up to `last`.
    ///
    /// Nothing is ever done at an empty entry, so this is the walk itself without its
    /// turns. The cursor comes to the last of them, and the word after it comes back if
    /// it was read.
    #[inline]
    pub(crate) fn step_over(
        &mut self,
        last: Gfn,
        budget: &mut Budget,
        tally: &mut Tally,
    ) -> Option<u64> {
        let end = self.last();
        // Frames of the range beyond this entry, less one.
        let beyond = last.get().checked_sub(end.get())?.checked_sub(1)?;
        let in_range = (beyond >> self.order).saturating_add(1);
        let next = self.index.saturating_add(1);
        let in_page = self.tables.format.geometry().entries().saturating_sub(next);
        let most = in_range.min(in_page as u64).min(budget.left()) as usize;
        let entries = next..next.saturating_add(most);
        let found = self.tables.memory.first_in_use(self.table, entries);
        let empty = found.map_or(most, |(index, _)| index.saturating_sub(next));
        let read = empty.saturating_add(usize::from(found.is_some()));
        budget.spend(read as u64);
        tally.reads = tally.reads.saturating_add(read as u64);
        if empty != 0 {
            let first = self.at.get() & (u64::MAX << self.order);
            self.at = Gfn::new(first.saturating_add((empty as u64) << self.order));
        }
        found.map(|(_, raw)| raw)
    }

    /// Whether the page, or a page of the root, ends with this entry.
    #[inline]
    pub(crate) fn ends_page(&self) -> bool {
        let (_, step) = self.tables.format.geometry().orders();
        self.last() == end_of(self.at, self.order + step)
    }

    /// The page that the entry is in; `None` for the root's.
    #[inline]
    pub(crate) fn page(&self) -> Option<Mfn> {
        let (top, _) = self.tables.format.geometry().orders();
        if self.order == top { None } else { Some(self.path[self.level.slot()]) }
    }

    /// To the entry that points at the page.
    #[inline]
    pub(crate) fn up(&mut self) {
        let (_, step) = self.tables.format.geometry().orders();
        if let Some(above) = self.level.above() {
            (self.level, self.order) = (above, self.order + step);
        }
    }

    /// To the entry for the frame behind this one, in the same page or root.
    #[inline]
    pub(crate) fn next(&mut self) {
        self.at = Gfn::new(self.last().get().saturating_add(1));
        let geometry = self.tables.format.geometry();
        (self.table, self.index) = geometry.slot(self.path[self.level.slot()], self.level, self.at);
    }
}
