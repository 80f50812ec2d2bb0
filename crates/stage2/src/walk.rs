//! The one walk over a range: clear, protect, visit, destroy.
//!
//! All four are the same loop with another [`Action`]. It goes over the entries of a
//! range in order, steps over empty and large ones by their whole span, can stop before
//! any entry, and says in [`Stopped`] where to go on. A resume point is an address: the
//! tables may have changed in between.

use core::fmt;
use core::ops::ControlFlow;

use flush::{Gfn, Mfn};

use crate::cursor::Cursor;
use crate::entry::{Access, Entry, Leaf, Level, MAX_LEVELS};
use crate::format::Format;
use crate::memory::TableMemory;
use crate::record::Record;
use crate::split::split_entry;
use crate::stop::{Budget, Rest, Stop, Stopped, Tally};
use crate::tree::{Found, Place, Tables};

/// What becomes of a table that has no live entry when a walk leaves it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Emptied {
    /// It stays linked, for the next map.
    Keep,
    /// Its parent entry is cleared and the page goes on record.
    Free,
}

/// What happens after an entry was dealt with.
enum Step {
    /// Move past its span.
    Next,
    /// It is a table now: read it again, at no cost.
    Again,
}

/// What a walk does at each entry.
trait Action {
    /// Deals with an entry that is neither empty nor a table. `whole` says that the range
    /// covers its span.
    fn entry(&mut self, place: &Place, raw: u64, entry: Entry, whole: bool) -> Result<Step, Stop>;

    /// Whether the table page `child` goes when the walk leaves it.
    #[inline]
    fn frees(&self, _child: Mfn) -> bool {
        false
    }

    /// Frees the table page `child`, which the entry at `parent` points at.
    fn free(&mut self, _parent: &Place, _child: Mfn) -> Result<(), Stop> {
        Ok(())
    }

    /// How many leaves and tables this has dealt with.
    fn counts(&self) -> (u64, u64);
}

fn walk<F: Format, M: TableMemory>(
    tables: &Tables<'_, F, M>,
    rest: Rest,
    budget: &mut Budget,
    action: &mut impl Action,
) -> Result<Tally, Stopped> {
    let geometry = tables.format.geometry();
    let (first, last) = (rest.run().first(), rest.run().last());
    let mut tally = Tally { reads: 0, leaves: 0, tables: 0, reached: first };
    let halt = |stop, at: Gfn, action: &_, tally: Tally| {
        let (leaves, tables) = Action::counts(action);
        let tally = Tally { leaves, tables, ..tally };
        Err(Stopped { rest: Rest::from(at, last), stop, tally })
    };
    if !geometry.contains(last) {
        return halt(Stop::OutOfRange, first, action, tally);
    }
    if !geometry.cuts_no_page(rest.run()) {
        return halt(Stop::Unaligned, first, action, tally);
    }

    let mut path = [tables.root; MAX_LEVELS];
    let mut cursor = Cursor::new(tables, &mut path, first);
    let mut raw = cursor.read();
    tally.reads = 1;
    // Tables on the way to the first address are free, the entry at the end is not.
    while cursor.down(raw) {
        tally.reads = tally.reads.saturating_add(1);
        raw = cursor.read();
    }
    if !budget.take() {
        return halt(Stop::Budget, first, action, tally);
    }
    loop {
        // The word at the cursor is paid for and points at no table.
        let mut ahead = None;
        if raw == 0 {
            ahead = cursor.step_over(last, budget, &mut tally);
        } else {
            let (place, entry) = (cursor.place(), tables.format.decode(cursor.level(), raw));
            match action.entry(&place, raw, entry, rest.run().covers(place.span)) {
                Ok(Step::Next) => {}
                Ok(Step::Again) => {
                    raw = match cursor.descend(cursor.read(), budget, &mut tally) {
                        Some(raw) => raw,
                        None => return halt(Stop::Budget, cursor.at(), action, tally),
                    };
                    continue;
                }
                Err(stop) => return halt(stop, cursor.at(), action, tally),
            }
        }

        // Leave every table that ends here, or all of them at the end of the range. One
        // that stays is in use, and so are those above it.
        tally.reached = cursor.last();
        let done = tally.reached >= last;
        if !(done && cursor.page().is_none_or(|page| !action.frees(page))) {
            while let Some(page) = cursor.page().filter(|_| done || cursor.ends_page()) {
                cursor.up();
                if action.frees(page)
                    && let Err(stop) = action.free(&cursor.place(), page)
                {
                    // From the entry before: the next call has to leave this table again.
                    return halt(stop, cursor.at(), action, tally);
                }
            }
        }
        if done {
            let (leaves, tables) = action.counts();
            return Ok(Tally { leaves, tables, ..tally });
        }

        cursor.next();
        let word = match ahead {
            Some(word) => Some(word),
            None => cursor.pay(budget, &mut tally),
        };
        raw = match word.and_then(|word| cursor.descend(word, budget, &mut tally)) {
            Some(raw) => raw,
            None => return halt(Stop::Budget, cursor.at(), action, tally),
        };
    }
}

struct Clear<'w, 'a, F, M, R> {
    tables: &'w Tables<'a, F, M>,
    record: &'w mut R,
    emptied: Emptied,
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
            Entry::Leaf(leaf) => {
                if self.record.leaves_left() == 0 {
                    return Err(Stop::Full);
                }
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

    fn counts(&self) -> (u64, u64) {
        (self.leaves, self.pages)
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
pub fn clear<F: Format, M: TableMemory>(
    tables: Tables<'_, F, M>,
    rest: Rest,
    budget: &mut Budget,
    emptied: Emptied,
    record: &mut impl Record,
) -> Result<Tally, Stopped> {
    let mut action = Clear { tables: &tables, record, emptied, leaves: 0, pages: 0 };
    walk(&tables, rest, budget, &mut action)
}

struct Protect<'w, 'a, F, M, R, C> {
    tables: &'w Tables<'a, F, M>,
    record: &'w mut R,
    rights: C,
    leaves: u64,
}

impl<F, M, R, C> Action for Protect<'_, '_, F, M, R, C>
where
    F: Format,
    M: TableMemory,
    R: Record,
    C: FnMut(&Leaf) -> Access,
{
    fn entry(&mut self, place: &Place, raw: u64, entry: Entry, whole: bool) -> Result<Step, Stop> {
        let Entry::Leaf(leaf) = entry else { return Ok(Step::Next) };
        let wanted = (self.rights)(&leaf);
        if wanted == leaf.access {
            return Ok(Step::Next);
        }
        if !whole {
            split_entry(self.tables, place, raw, leaf, self.record)?;
            return Ok(Step::Again);
        }
        let format = self.tables.format;
        let old = self.tables.replace_leaf(place.slot(), raw, leaf, |raw, _| {
            format.with_access(place.level, raw, wanted).map_err(Stop::Refused)
        })?;
        self.record.changed(place.span, self.tables.recorded_order(place.level, &old), old);
        self.leaves = self.leaves.saturating_add(1);
        Ok(Step::Next)
    }

    fn counts(&self) -> (u64, u64) {
        (self.leaves, 0)
    }
}

/// Gives every valid leaf of the range the rights that `rights` says for it.
///
/// A leaf that already has them is left alone; a large leaf that the range covers in
/// part is split first. Each change goes on record, whether it takes or gives.
///
/// # Errors
///
/// See [`Stop`]; [`Stop::Refused`] for rights that the format cannot express.
pub fn protect<F: Format, M: TableMemory>(
    tables: Tables<'_, F, M>,
    rest: Rest,
    budget: &mut Budget,
    record: &mut impl Record,
    rights: impl FnMut(&Leaf) -> Access,
) -> Result<Tally, Stopped> {
    let mut action = Protect { tables: &tables, record, rights, leaves: 0 };
    walk(&tables, rest, budget, &mut action)
}

struct Visit<C> {
    seen: C,
    leaves: u64,
}

impl<C: FnMut(Found) -> ControlFlow<()>> Action for Visit<C> {
    fn entry(&mut self, place: &Place, _: u64, entry: Entry, _: bool) -> Result<Step, Stop> {
        if matches!(entry, Entry::Leaf(_) | Entry::Inert) {
            let found = Found { run: place.span, level: place.level, entry };
            if (self.seen)(found).is_break() {
                return Err(Stop::Asked);
            }
        }
        if matches!(entry, Entry::Leaf(_)) {
            self.leaves = self.leaves.saturating_add(1);
        }
        Ok(Step::Next)
    }

    fn counts(&self) -> (u64, u64) {
        (self.leaves, 0)
    }
}

/// Shows every leaf and every inert entry of the range to `seen`, in order.
///
/// When `seen` breaks, the walk stops *before* that entry: a resumed walk shows it
/// again.
///
/// # Errors
///
/// [`Stop::Budget`], [`Stop::Asked`], [`Stop::OutOfRange`], [`Stop::Unaligned`].
pub fn visit<F: Format, M: TableMemory>(
    tables: Tables<'_, F, M>,
    rest: Rest,
    budget: &mut Budget,
    seen: impl FnMut(Found) -> ControlFlow<()>,
) -> Result<Tally, Stopped> {
    walk(&tables, rest, budget, &mut Visit { seen, leaves: 0 })
}

/// Clears the whole space, frees every table, and at last the root.
///
/// The first call gets the whole [`space`](crate::Geometry::space), later ones the rest
/// that the call before returned. After success the tree is gone: no hardware may be
/// given its root any more. The root page, the first one of a concatenated root, comes
/// out of the flushed record like any other table.
///
/// # Errors
///
/// As [`clear`]. [`Stop::OutOfRange`] if `rest` does not end where the space ends, and
/// [`Stop::Contended`] with the whole space as the rest if the root is not empty after
/// the walk, because `rest` did not go on where the last call stopped.
pub fn destroy<F: Format, M: TableMemory>(
    tables: Tables<'_, F, M>,
    rest: Rest,
    budget: &mut Budget,
    record: &mut impl Record,
) -> Result<Tally, Stopped> {
    let geometry = tables.format.geometry();
    let space = geometry.space();
    if rest.run().last() != space.last() {
        let tally = Tally { reads: 0, leaves: 0, tables: 0, reached: rest.run().first() };
        return Err(Stopped { rest, stop: Stop::OutOfRange, tally });
    }
    let mut tally = clear(tables, rest, budget, Emptied::Free, record)?;
    match free_root(tables, record) {
        Ok(()) => {
            tally.tables = tally.tables.saturating_add(1);
            Ok(tally)
        }
        Err(RootError::InUse) => {
            Err(Stopped { rest: Rest::new(space), stop: Stop::Contended, tally })
        }
        Err(RootError::Full) => {
            let rest = Rest::new(geometry.span(Level::PAGE, space.last()));
            Err(Stopped { rest, stop: Stop::Full, tally })
        }
    }
}

/// Why [`free_root`] changed nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RootError {
    /// An entry of the root is in use.
    InUse,
    /// The record has no room for the page.
    Full,
}

impl fmt::Display for RootError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::InUse => "the root is not empty",
            Self::Full => "no room on record",
        })
    }
}

impl core::error::Error for RootError {}

/// Frees the root of a tree that was cleared: the end of [`destroy`], for a caller that
/// clears in pieces of its own.
///
/// No hardware may be given the root any more, and nobody may use the tree.
///
/// # Errors
///
/// See [`RootError`]; nothing was changed then.
pub fn free_root<F: Format, M: TableMemory>(
    tables: Tables<'_, F, M>,
    record: &mut impl Record,
) -> Result<(), RootError> {
    if !tables.root_is_empty() {
        return Err(RootError::InUse);
    }
    if record.tables_left() == 0 {
        return Err(RootError::Full);
    }
    let space = tables.format.geometry().space();
    match record.table(space, tables.memory.unlink(tables.root)) {
        // A record that promised room and has none leaks the page; the tree is gone.
        Ok(()) | Err(_) => Ok(()),
    }
}
