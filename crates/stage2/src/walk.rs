//! The one walk over a range: clear, protect, visit, destroy.
//!
//! All four are the same loop with another [`Action`]; those of the two that clear are in
//! `clear`. It goes over the entries of a
//! range in order, steps over empty and large ones by their whole span, can stop before
//! any entry, and says in [`Stopped`] where to go on. A resume point is an address: the
//! tables may have changed in between.

use core::ops::ControlFlow;

use flush::{Gfn, Mfn};

use crate::cursor::Cursor;
use crate::entry::{Access, Entry, Leaf, MAX_LEVELS};
use crate::format::Format;
use crate::memory::TableMemory;
use crate::record::Record;
use crate::split::split_entry;
use crate::stop::{Budget, Rest, Stop, Stopped, Tally};
use crate::tree::{Found, Place, Tables};

/// What happens after an entry was dealt with.
pub(crate) enum Step {
    /// Move past its span.
    Next,
    /// It is a table now: read it again, at no cost.
    Again,
}

/// What a walk does at each entry.
pub(crate) trait Action {
    /// Deals with an entry that is neither empty nor a table. `whole` says that the range
    /// covers its span.
    fn entry(&mut self, place: &Place, raw: u64, entry: Entry, whole: bool) -> Result<Step, Stop>;

    /// Goes on from the entry at `place`, which was `seen` and paid for, over those of the same
    /// table up to `last`. `place` becomes the last one that it dealt with.
    #[inline]
    fn sweep(
        &mut self,
        _place: &mut Place,
        _seen: (u64, Entry),
        _last: Gfn,
        _budget: &mut Budget,
        _tally: &mut Tally,
    ) {
    }

    /// Whether there is nothing to be done in this page of a table, or nothing any more.
    #[inline]
    fn is_done_with(&self, _table: Mfn) -> bool {
        false
    }

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

pub(crate) fn walk<F: Format, M: TableMemory>(
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
            if !action.is_done_with(cursor.table()) {
                ahead = cursor.step_over(last, budget, &mut tally);
            }
        } else {
            let (mut place, entry) = (cursor.place(), tables.format.decode(cursor.level(), raw));
            match action.entry(&place, raw, entry, rest.run().covers(place.span)) {
                Ok(Step::Next) => {
                    action.sweep(&mut place, (raw, entry), last, budget, &mut tally);
                    cursor.go_to(place.span.first());
                }
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

        if ahead.is_none() && cursor.last() < last && action.is_done_with(cursor.table()) {
            cursor.go_to_end(last);
        }

        // Leave every table that ends here, or all of them at the end of the range. One
        // that stays is in use, and so are those above it.
        tally.reached = cursor.last();
        let mut done = tally.reached >= last;
        if !(done && cursor.page().is_none_or(|page| !action.frees(page))) {
            while let Some(page) = cursor.page().filter(|_| done || cursor.ends_page()) {
                cursor.up();
                if action.frees(page)
                    && let Err(stop) = action.free(&cursor.place(), page)
                {
                    // From the entry before: the next call has to leave this table again.
                    return halt(stop, cursor.at(), action, tally);
                }
                if !done && action.is_done_with(cursor.place().table) {
                    cursor.go_to_end(last);
                    tally.reached = cursor.last();
                    done = tally.reached >= last;
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
