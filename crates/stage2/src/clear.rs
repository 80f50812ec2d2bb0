//! Clearing a range.
//!
//! The [`Action`] takes entries out and puts what was there on record. Pages of
//! one table that follow each other are taken out first and recorded together.

use flush::{Gfn, Mfn, Run};

use crate::entry::{Entry, Leaf, Level};
use crate::format::Format;
use crate::memory::TableMemory;
use crate::record::Record;
use crate::split::split_entry;
use crate::stop::{Budget, Rest, Stop, Stopped, Tally};
use crate::tree::{Place, Tables};
use crate::walk::{Action, Step, walk};

/// What becomes of a table that has no live entry when a walk leaves it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Emptied {
    /// It stays linked, for the next map.
    Keep,
    /// Its parent entry is cleared and the page goes on record.
    Free,
}

struct Clear<'w, 'a, F, M, R> {
    tables: &'w Tables<'a, F, M>,
    record: &'w mut R,
    emptied: Emptied,
    /// Nothing behind the last entry in use of a table is looked at.
    early: bool,
    leaves: u64,
    pages: u64,
}

impl<F: Format, M: TableMemory, R: Record> Action for Clear<'_, '_, F, M, R> {
    fn entry(&mut self, place: &Place, raw: u64, entry: Entry, whole: bool) -> Result<Step, Stop> {
        let memory = self.tables.memory;
        match entry {
            Entry::Leaf(leaf) if !whole => {
                split_entry(self.tables, place, raw, leaf, self.record)?;
                return Ok(Step::Again);
            }
            Entry::Leaf(_) if self.record.leaves_left() == 0 => return Err(Stop::Full),
            // The sweep begins with it.
            Entry::Leaf(leaf) if is_single(place, &leaf) => {}
            Entry::Leaf(leaf) => {
                let zero = |_, _: &_| Ok::<_, Stop>(0);
                let leaf = self.tables.replace_leaf(place.slot(), raw, leaf, zero)?;
                memory.drop_live(place.table);
                let order = self.tables.recorded_order(place.level, &leaf);
                self.record.removed(place.span, order, leaf);
                self.leaves = self.leaves.saturating_add(1);
            }
            Entry::Inert if whole => {
                let cleared = memory.compare_exchange(place.table, place.index, raw, 0);
                cleared.map_err(|_| Stop::Contended)?;
                memory.drop_live(place.table);
            }
            Entry::Inert | Entry::Empty | Entry::Table(_) => {}
        }
        Ok(Step::Next)
    }

    #[inline]
    fn frees(&self, child: Mfn) -> bool {
        self.emptied == Emptied::Free && self.tables.memory.live(child) == 0
    }

    fn free(&mut self, parent: &Place, child: Mfn) -> Result<(), Stop> {
        let memory = self.tables.memory;
        if self.record.tables_left() == 0 {
            return Err(Stop::Full);
        }
        let old = memory.swap(parent.table, parent.index, 0);
        if self.tables.format.decode(parent.level, old) != Entry::Table(child) {
            memory.swap(parent.table, parent.index, old);
            return Err(Stop::Contended);
        }
        memory.drop_live(parent.table);
        self.pages = self.pages.saturating_add(1);
        self.record.table(parent.span, memory.unlink(child)).map_err(|_leaked| Stop::Full)
    }

    #[inline]
    fn is_done_with(&self, table: Mfn) -> bool {
        self.early && self.tables.memory.live(table) == 0
    }

    #[inline(always)]
    fn sweep(
        &mut self,
        place: &mut Place,
        seen: (u64, Entry),
        last: Gfn,
        budget: &mut Budget,
        tally: &mut Tally,
    ) {
        let mut model = match seen {
            (word, Entry::Leaf(leaf)) if is_single(place, &leaf) => Some((word, leaf)),
            (_, Entry::Empty | Entry::Inert | Entry::Table(_) | Entry::Leaf(_)) => None,
        };
        // The first one was paid for.
        let (mut next, mut paid) = (place.index, 1);
        while let Some(like) = model {
            let left = Sweep { next, paid, last };
            model = self.sweep_some(place, like, left, budget, tally);
            (next, paid) = (place.index.saturating_add(1), 0);
        }
    }

    fn counts(&self) -> (u64, u64) {
        (self.leaves, self.pages)
    }
}

/// Whether a leaf is a single page, and never was part of a larger one.
fn is_single(place: &Place, leaf: &Leaf) -> bool {
    place.level == Level::PAGE && leaf.origin == Level::PAGE
}

/// What a sweep has still to do in its table.
struct Sweep {
    /// The next entry.
    next: usize,
    /// How many entries from there on were paid for.
    paid: u64,
    /// The end of the range.
    last: Gfn,
}

/// Pages that are recorded together at most.
const STRETCH: usize = 32;

impl<F: Format, M: TableMemory, R: Record> Clear<'_, '_, F, M, R> {
    /// Takes out what is next in the table of `place`, as much as may go at a time. Returns
    /// what to go on with, if there may be more.
    ///
    /// At this level no entry is a table, so each one can go before it was looked at. Most
    /// are like `model`, a page's word and leaf.
    #[inline(always)]
    fn sweep_some(
        &mut self,
        place: &mut Place,
        (like, model): (u64, Leaf),
        Sweep { next, paid, last }: Sweep,
        budget: &mut Budget,
        tally: &mut Tally,
    ) -> Option<(u64, Leaf)> {
        let Tables { format, memory, root: _ } = *self.tables;
        let geometry = format.geometry();
        let order = geometry.order(Level::PAGE);
        let ahead = next.saturating_sub(place.index) as u64;
        let first = place.span.first().get().saturating_add(ahead << order);
        // As many as the table has, the range covers whole, and all others allow.
        let left = last.get().saturating_add(1).saturating_sub(first) >> order;
        let affordable = budget.left().saturating_add(paid);
        let all = (geometry.entries().saturating_sub(next))
            .min(usize::try_from(left.min(affordable)).unwrap_or(usize::MAX))
            .min(self.record.leaves_left())
            .min(usize::from(memory.live(place.table)).max(paid as usize));
        let room = all.min(STRETCH);
        let end = room.checked_sub(1)?;

        let mut words = [0; STRETCH];
        let words = &mut words[..room];
        memory.take_out(place.table, next, words, self.record.marks());
        let span =
            |at: usize| Run::block(Gfn::new(first.saturating_add((at as u64) << order)), order);

        let same = !format.varying();
        let differ = words.iter().fold(0, |differ, word| differ | (word ^ like) & same);
        let taken = if differ == 0 {
            let leaves = words.iter().zip(0..room);
            let leaves = leaves.map(|(word, at)| (span(at), format.like(*word, model)));
            self.record.removed_pages(span(0).hull(span(end)), order, leaves);
            self.leaves = self.leaves.saturating_add(room as u64);
            room
        } else {
            words.iter().zip(0..).filter(|(word, at)| self.took(**word, span(*at))).count()
        };
        // Not above the number of entries of a table.
        memory.drop_live_by(place.table, taken as u16);
        let unpaid = (room as u64).saturating_sub(paid);
        tally.reads = tally.reads.saturating_add(unpaid);
        budget.spend(unpaid);
        (place.index, place.span) = (next.saturating_add(end), span(end));
        if all == room {
            return None;
        }
        let word = *words.last()?;
        match format.decode(Level::PAGE, word) {
            Entry::Leaf(leaf) if leaf.origin == Level::PAGE => Some((word, leaf)),
            Entry::Empty | Entry::Inert | Entry::Table(_) | Entry::Leaf(_) => None,
        }
    }

    /// Records an entry of a table of pages that was taken out, if it was a leaf. Whether
    /// there was anything.
    fn took(&mut self, word: u64, span: Run) -> bool {
        if let Entry::Leaf(leaf) = self.tables.format.decode(Level::PAGE, word) {
            let order = self.tables.recorded_order(Level::PAGE, &leaf);
            self.record.removed(span, order, leaf);
            self.leaves = self.leaves.saturating_add(1);
        }
        word != 0
    }
}

/// Clears every entry of the range; a large leaf that it covers in part is split.
///
/// A valid leaf goes on record, an empty or inert one does not. An inert entry that
/// spans more than the range stays.
///
/// # Errors
///
/// See [`Stop`]; what was done before [`Stopped::rest`] is done and on record.
#[inline]
pub fn clear<F: Format, M: TableMemory>(
    tables: Tables<'_, F, M>,
    rest: Rest,
    budget: &mut Budget,
    emptied: Emptied,
    record: &mut impl Record,
) -> Result<Tally, Stopped> {
    clear_how(tables, rest, budget, (emptied, false), record)
}

/// `how`: what becomes of emptied tables, and whether nothing behind the last entry in use of a
/// table is looked at.
#[inline]
pub(crate) fn clear_how<F: Format, M: TableMemory>(
    tables: Tables<'_, F, M>,
    rest: Rest,
    budget: &mut Budget,
    how: (Emptied, bool),
    record: &mut impl Record,
) -> Result<Tally, Stopped> {
    match straight(&tables, rest.run(), budget, how, record) {
        None => clear_all(tables, rest, budget, how, record),
        Some(done) if done.reached >= rest.run().last() => Ok(done),
        Some(done) => clear_rest(tables, rest, budget, how, record, done),
    }
}

#[inline(never)]
fn clear_all<F: Format, M: TableMemory>(
    tables: Tables<'_, F, M>,
    rest: Rest,
    budget: &mut Budget,
    (emptied, early): (Emptied, bool),
    record: &mut impl Record,
) -> Result<Tally, Stopped> {
    let mut action = Clear { tables: &tables, record, emptied, early, leaves: 0, pages: 0 };
    walk(&tables, rest, budget, &mut action)
}

/// Goes on where [`straight`] came to.
#[cold]
fn clear_rest<F: Format, M: TableMemory>(
    tables: Tables<'_, F, M>,
    rest: Rest,
    budget: &mut Budget,
    how: (Emptied, bool),
    record: &mut impl Record,
    done: Tally,
) -> Result<Tally, Stopped> {
    let next = Gfn::new(done.reached.get().saturating_add(1));
    let rest = Rest::from(next, rest.run().last());
    if budget.left() == 0 {
        return Err(Stopped { rest, stop: Stop::Budget, tally: done });
    }
    let mut result = clear_all(tables, rest, budget, how, record);
    let tally = match &mut result {
        Ok(tally) => tally,
        Err(Stopped { rest, tally, stop: _ }) => {
            if rest.run().first() == next {
                tally.reached = done.reached;
            }
            tally
        }
    };
    // It went by the same tables again.
    let way = u64::from(tables.format.geometry().levels()).saturating_sub(1);
    tally.reads = tally.reads.saturating_add(done.reads).saturating_sub(way);
    tally.leaves = tally.leaves.saturating_add(done.leaves);
    result
}

/// Takes out the pages at the start of a range that does not leave one table, without a
/// walk. `None`, with nothing done, where a walk may find more to do than that.
#[inline]
fn straight<F: Format, M: TableMemory>(
    tables: &Tables<'_, F, M>,
    run: Run,
    budget: &mut Budget,
    (emptied, early): (Emptied, bool),
    record: &mut impl Record,
) -> Option<Tally> {
    let Tables { format, memory: _, root: _ } = *tables;
    let geometry = format.geometry();
    let (first, last) = (run.first(), run.last());
    let table = geometry.page_order() + geometry.index_bits();
    if emptied == Emptied::Free
        || first.get() >> table != last.get() >> table
        || !geometry.contains(last)
        || !geometry.cuts_no_page(run)
        || record.leaves_left() == 0
    {
        return None;
    }
    let (slot, raw) = tables.find(first, Level::PAGE);
    if slot.level != Level::PAGE {
        return None;
    }
    let leaf = match format.decode(Level::PAGE, raw) {
        Entry::Leaf(leaf) if leaf.origin == Level::PAGE => leaf,
        Entry::Empty | Entry::Inert | Entry::Table(_) | Entry::Leaf(_) => return None,
    };
    if !budget.take() {
        return None;
    }
    let span = geometry.span(Level::PAGE, first);
    let mut place = Place { table: slot.table, index: slot.index, level: Level::PAGE, span };
    let reads = u64::from(geometry.levels());
    let mut tally = Tally { reads, leaves: 0, tables: 0, reached: first };
    let mut action = Clear { tables, record, emptied, early, leaves: 0, pages: 0 };
    action.sweep(&mut place, (raw, Entry::Leaf(leaf)), last, budget, &mut tally);
    Some(Tally { leaves: action.leaves, reached: place.span.last(), ..tally })
}
