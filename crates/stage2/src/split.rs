//! Breaking a large leaf into a table of smaller ones that map the same.
//!
//! [`split()`] is for a caller that wants to change a part of a leaf; range walks do it
//! themselves. The whole old leaf goes on record at its order, because hardware may go
//! on using it until the flush. Other batches may take parts of it away before that, so
//! each part remembers the size of the old leaf: see [`Leaf::origin`].

use core::fmt;

use flush::{FreshTable, Gfn, Mfn, Run};

use crate::entry::{Entry, Leaf, Level};
use crate::format::{Format, Unencodable};
use crate::memory::TableMemory;
use crate::record::Record;
use crate::tree::{Contended, Place, Tables};

/// Why a leaf was not split, or only half.
#[derive(Debug, PartialEq, Eq)]
#[must_use = "a pending split unmaps its range until it is finished"]
pub enum SplitError {
    /// The frame is beyond the space.
    OutOfRange,
    /// No valid leaf maps it.
    Absent,
    /// There was no page for the new table; nothing was changed.
    NoTable,
    /// The format cannot say the smaller leaves; nothing was changed.
    Unencodable(Unencodable),
    /// Somebody else edits the tree.
    Contended,
    /// The old leaf is gone and on record: flush, then [`finish_split`].
    Pending(PendingSplit),
}

impl fmt::Display for SplitError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::OutOfRange => "frame beyond the space",
            Self::Absent => "no valid leaf there",
            Self::NoTable => "no page for a new table",
            Self::Unencodable(_) => "the smaller leaves cannot be expressed",
            Self::Contended => "the entry is being edited by somebody else",
            Self::Pending(_) => "the old leaf has to be flushed first",
        })
    }
}

impl core::error::Error for SplitError {}

impl From<Contended> for SplitError {
    fn from(_: Contended) -> Self {
        Self::Contended
    }
}

impl From<Unencodable> for SplitError {
    fn from(error: Unencodable) -> Self {
        Self::Unencodable(error)
    }
}

/// A split of a break-before-make format between its two halves.
///
/// The old leaf is gone, the table with the smaller ones is filled but not linked, and
/// accesses to [`run`](Self::run) fault. The empty entry still counts as live, so that
/// no walk frees the table it is in.
#[derive(Debug, PartialEq, Eq)]
#[must_use = "until it is finished its range is unmapped and its table page is kept"]
pub struct PendingSplit {
    fresh: FreshTable,
    level: Level,
    run: Run,
}

impl PendingSplit {
    /// What the old leaf mapped.
    #[must_use]
    pub fn run(&self) -> Run {
        self.run
    }
}

/// Fills a fresh table with the leaves that `leaf`, at `level`, consists of.
fn fill<F: Format, M: TableMemory>(
    tables: &Tables<'_, F, M>,
    fresh: &FreshTable,
    (level, below): (Level, Level),
    leaf: &Leaf,
) -> Result<(), Unencodable> {
    let geometry = tables.format.geometry();
    // Whatever was split before may be cached still.
    let origin = leaf.origin.max(level);
    let mut mfn = leaf.mfn.get();
    for index in 0..geometry.entries() {
        let part = Leaf { mfn: Mfn::new(mfn), origin, ..*leaf };
        let word = tables.format.leaf(below, part)?;
        tables.memory.swap(fresh.mfn(), index, word);
        mfn = mfn.saturating_add(1 << geometry.order(below));
    }
    Ok(())
}

/// Splits `leaf` at `place`, whose word was `raw`, by one level.
pub(crate) fn split_entry<F: Format, M: TableMemory>(
    tables: &Tables<'_, F, M>,
    place: &Place,
    raw: u64,
    leaf: Leaf,
    record: &mut impl Record,
) -> Result<(), SplitError> {
    let Some(below) = place.level.below() else {
        return Err(Unencodable::Level.into());
    };
    let Some(fresh) = tables.memory.allocate() else {
        return Err(SplitError::NoTable);
    };
    let breaks = tables.format.break_before_make();
    let replaced = tables.replace_leaf(place.slot(), raw, leaf, |_, leaf| {
        // The marks of the old leaf go into the new ones, so fill again if they moved.
        fill(tables, &fresh, (place.level, below), leaf)?;
        let word = tables.format.table(place.level, fresh.mfn())?;
        Ok::<_, SplitError>(if breaks { 0 } else { word })
    });
    let old = match replaced {
        Ok(old) => old,
        Err(error) => {
            tables.memory.discard(fresh);
            return Err(error);
        }
    };
    record.changed(place.span, tables.recorded_order(place.level, &old), old);
    if breaks {
        return Err(SplitError::Pending(PendingSplit {
            fresh,
            level: place.level,
            run: place.span,
        }));
    }
    link_full(tables, fresh);
    record.linked(place.span);
    Ok(())
}

/// Hands a full table, already stored in its parent, to the tree.
fn link_full<F: Format, M: TableMemory>(tables: &Tables<'_, F, M>, fresh: FreshTable) {
    let table = tables.memory.link(fresh);
    // At most 2^13 entries.
    tables.memory.add_live(table, tables.format.geometry().entries() as u16);
}

/// Splits what maps `gfn` until it is a leaf of level `to` or smaller.
///
/// # Errors
///
/// See [`SplitError`]. A split over two levels can stop after the first; calling again
/// goes on there.
pub fn split<F: Format, M: TableMemory>(
    tables: Tables<'_, F, M>,
    gfn: Gfn,
    to: Level,
    record: &mut impl Record,
) -> Result<(), SplitError> {
    if !tables.format.geometry().contains(gfn) {
        return Err(SplitError::OutOfRange);
    }
    // Each round goes down by one level.
    loop {
        let (place, raw, entry) = tables.descend(gfn, Level::PAGE);
        match entry {
            Entry::Leaf(_) if place.level <= to => return Ok(()),
            Entry::Leaf(leaf) => split_entry(&tables, &place, raw, leaf, record)?,
            Entry::Empty | Entry::Inert | Entry::Table(_) => return Err(SplitError::Absent),
        }
    }
}

/// Installs the smaller leaves of a pending split, once its flush is done.
///
/// # Errors
///
/// Gives the split back if its entry is no longer there and empty, which only an edit
/// by somebody else can cause.
pub fn finish_split<F: Format, M: TableMemory>(
    tables: Tables<'_, F, M>,
    pending: PendingSplit,
    record: &mut impl Record,
) -> Result<(), PendingSplit> {
    let (slot, _) = tables.find(pending.run.first(), pending.level);
    if slot.level != pending.level {
        return Err(pending);
    }
    let Ok(word) = tables.format.table(pending.level, pending.fresh.mfn()) else {
        return Err(pending);
    };
    if tables.memory.compare_exchange(slot.table, slot.index, 0, word).is_err() {
        return Err(pending);
    }
    link_full(&tables, pending.fresh);
    record.linked(pending.run);
    Ok(())
}

/// Gives a pending split up: what of its range is unmapped stays so.
pub fn abandon_split<F: Format, M: TableMemory>(tables: Tables<'_, F, M>, pending: PendingSplit) {
    let (slot, _) = tables.find(pending.run.first(), pending.level);
    if slot.level == pending.level {
        tables.memory.drop_live(slot.table);
    }
    tables.memory.discard(pending.fresh);
}

static_assertions::assert_not_impl_any!(PendingSplit: Clone, Copy, Default);
