//! Installing leaves, with the tables they need.
//!
//! [`map()`] installs one leaf of any size. New tables are filled before one store makes
//! them visible, so that a lack of pages changes nothing.

use core::fmt;

use flush::{FreshTable, Gfn, Mfn};

use crate::entry::{Entry, Leaf, Level, MAX_LEVELS};
use crate::format::{Format, Unencodable};
use crate::memory::TableMemory;
use crate::record::Record;
use crate::tree::{Contended, Found, Place, Slot, Tables};

/// What a new leaf may replace.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Over {
    /// Nothing that hardware could use: an empty or inert entry, or a table without a
    /// live entry, which is unlinked through the record.
    Vacant,
    /// Exactly this leaf, at the same level; the marks of hardware do not matter.
    Expected(Leaf),
}

/// Why a leaf was not installed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MapError {
    /// The leaf would reach beyond the space.
    OutOfRange,
    /// The guest frame is not aligned to the level.
    Unaligned,
    /// The format has no such leaf.
    Unencodable(Unencodable),
    /// Something else is there: a leaf, a larger one, or a table with live entries.
    Occupied(Found),
    /// Not the expected leaf is there.
    Unexpected(Found),
    /// There was no page for a table.
    NoTable,
    /// An empty table would have to go, and the record has no room for it.
    Full,
    /// What was there is gone and on record; flush, then map over
    /// [`Over::Vacant`]. Only formats with break-before-make ask for it.
    FlushFirst,
    /// Somebody else edits the tree.
    Contended,
    /// The budget of [`map_run`](crate::map_run) is spent.
    Budget,
}

impl fmt::Display for MapError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::OutOfRange => f.write_str("leaf beyond the space"),
            Self::Unaligned => f.write_str("frame not aligned to the level"),
            Self::Unencodable(error) => error.fmt(f),
            Self::Occupied(found) => write!(f, "occupied by {found:?}"),
            Self::Unexpected(found) => write!(f, "not the expected leaf but {found:?}"),
            Self::NoTable => f.write_str("no page for a new table"),
            Self::Full => f.write_str("no room on record for the table that would go"),
            Self::FlushFirst => f.write_str("the old entry has to be flushed first"),
            Self::Contended => f.write_str("the entry is being edited by somebody else"),
            Self::Budget => f.write_str("budget spent"),
        }
    }
}

impl core::error::Error for MapError {}

impl From<Contended> for MapError {
    fn from(_: Contended) -> Self {
        Self::Contended
    }
}

/// Installs `leaf` at `gfn` as one entry of `level`, with the tables it needs.
///
/// Over a leaf that shows the same frame its [`origin`](Leaf::origin) is kept, and that it
/// was accessed. Over a vacant entry both are what `leaf` says, by default none: whoever
/// cleared a page there holds it until the flush. A page that nobody holds must not be
/// mapped there again, in a smaller leaf, before the flush of the larger one.
///
/// Returns the leaf that it replaced, if `over` expected one.
///
/// # Errors
///
/// See [`MapError`]; but for [`MapError::FlushFirst`] nothing was changed.
pub fn map<F: Format, M: TableMemory>(
    tables: Tables<'_, F, M>,
    gfn: Gfn,
    level: Level,
    leaf: Leaf,
    over: Over,
    record: &mut impl Record,
) -> Result<Option<Leaf>, MapError> {
    let geometry = tables.format.geometry();
    let span = geometry.span(level, gfn);
    if level > geometry.top() || !geometry.space().covers(span) {
        return Err(MapError::OutOfRange);
    }
    if span.first() != gfn {
        return Err(MapError::Unaligned);
    }
    let word = tables.format.leaf(level, leaf).map_err(MapError::Unencodable)?;
    let (place, raw, entry) = tables.descend(gfn, level);
    let found = Found { run: place.span, level: place.level, entry };
    match over {
        Over::Expected(old) => {
            if place.level != level {
                return Err(MapError::Unexpected(found));
            }
            let Entry::Leaf(shown) = entry else {
                return Err(MapError::Unexpected(found));
            };
            replace(&tables, &place, (raw, shown), &leaf, &old, record).map(Some)
        }
        Over::Vacant => {
            match entry {
                Entry::Empty if place.level > level => {
                    install_chain(&tables, place.slot(), gfn, level, &[word])?;
                    record.linked(span);
                }
                Entry::Empty => {
                    install(&tables, place.table, place.index, word)?;
                    tables.memory.add_live(place.table, 1);
                }
                // It counts as live already.
                Entry::Inert if place.level == level => tables
                    .memory
                    .compare_exchange(place.table, place.index, raw, word)
                    .map_err(|_| MapError::Contended)?,
                Entry::Table(child) if tables.memory.live(child) == 0 => {
                    return replace_empty(&tables, &place, raw, child, word, record).map(|()| None);
                }
                Entry::Inert | Entry::Table(_) | Entry::Leaf(_) => {
                    return Err(MapError::Occupied(found));
                }
            }
            record.added(span);
            Ok(None)
        }
    }
}

/// Stores a word in an empty entry.
fn install<F: Format, M: TableMemory>(
    tables: &Tables<'_, F, M>,
    table: Mfn,
    index: usize,
    word: u64,
) -> Result<(), MapError> {
    match tables.memory.put_in(table, index, &[word]) {
        0 => Err(MapError::Contended),
        _ => Ok(()),
    }
}

/// Replaces the expected leaf at `place` by `new`.
fn replace<F: Format, M: TableMemory>(
    tables: &Tables<'_, F, M>,
    place: &Place,
    (raw, leaf): (u64, Leaf),
    new: &Leaf,
    expected: &Leaf,
    record: &mut impl Record,
) -> Result<Leaf, MapError> {
    let breaks = tables.format.break_before_make();
    let old = tables.replace_leaf(place.slot(), raw, leaf, |_, leaf| {
        if !leaf.same_mapping(expected) {
            let entry = Entry::Leaf(*leaf);
            return Err(MapError::Unexpected(Found { run: place.span, level: place.level, entry }));
        }
        // What is cached of the old leaf, or of a larger one, shows the same frame as the new
        // one: whoever clears that has to see so.
        let (kept, used) =
            if new.mfn == leaf.mfn { (leaf.origin, leaf.accessed) } else { (Level::PAGE, false) };
        let (origin, accessed) = (new.origin.max(kept), new.accessed || used);
        let new = Leaf { origin, accessed, ..*new };
        let word = tables.format.leaf(place.level, new).map_err(MapError::Unencodable)?;
        Ok(if breaks { 0 } else { word })
    })?;
    record.changed(place.span, tables.recorded_order(place.level, &old), old);
    if breaks {
        tables.memory.drop_live(place.table);
        return Err(MapError::FlushFirst);
    }
    Ok(old)
}

/// Replaces a table without live entries by a leaf.
fn replace_empty<F: Format, M: TableMemory>(
    tables: &Tables<'_, F, M>,
    place: &Place,
    raw: u64,
    child: Mfn,
    word: u64,
    record: &mut impl Record,
) -> Result<(), MapError> {
    if record.tables_left() == 0 {
        return Err(MapError::Full);
    }
    let breaks = tables.format.break_before_make();
    tables.replace_table(place, raw, child, if breaks { 0 } else { word })?;
    if record.table(place.span, tables.memory.unlink(child)).is_err() {
        return Err(MapError::Full);
    }
    if breaks {
        tables.memory.drop_live(place.table);
        return Err(MapError::FlushFirst);
    }
    record.added(place.span);
    Ok(())
}

/// Fresh tables, one a level, while they are not linked.
struct Chain {
    tables: [Option<FreshTable>; MAX_LEVELS],
}

impl Chain {
    fn discard<M: TableMemory>(self, memory: &M) {
        for table in self.tables.into_iter().flatten() {
            memory.discard(table);
        }
    }
}

/// Puts tables below the empty entry at `place`, down to one with `words` from `gfn` on, and
/// returns that one.
///
/// Nothing is changed on an error.
pub(crate) fn install_chain<F: Format, M: TableMemory>(
    tables: &Tables<'_, F, M>,
    place: Slot,
    gfn: Gfn,
    level: Level,
    words: &[u64],
) -> Result<Mfn, MapError> {
    let mut chain = Chain { tables: [const { None }; MAX_LEVELS] };
    match store_chain(tables, place, gfn, level, words, &mut chain) {
        Ok(lowest) => {
            for fresh in chain.tables.into_iter().flatten() {
                let table = tables.memory.link(fresh);
                tables.memory.add_live(table, 1);
            }
            tables.memory.add_live(place.table, 1);
            // The others of them; not above the number of entries of a table.
            tables.memory.add_live(lowest, words.len().saturating_sub(1) as u16);
            Ok(lowest)
        }
        Err(error) => {
            chain.discard(tables.memory);
            Err(error)
        }
    }
}

/// Builds the chain from below and stores its top entry last.
fn store_chain<F: Format, M: TableMemory>(
    tables: &Tables<'_, F, M>,
    place: Slot,
    gfn: Gfn,
    level: Level,
    words: &[u64],
    chain: &mut Chain,
) -> Result<Mfn, MapError> {
    let geometry = tables.format.geometry();
    let (mut at, mut word, mut lowest) = (level, 0, None);
    while at < place.level {
        let Some(above) = at.above() else { return Err(MapError::OutOfRange) };
        let fresh = tables.memory.allocate().ok_or(MapError::NoTable)?;
        let fresh = chain.tables[at.slot()].insert(fresh);
        let (_, index) = geometry.slot(fresh.mfn(), at, gfn);
        match lowest {
            None => tables.memory.fill(fresh, index, words),
            Some(_) => tables.memory.fill(fresh, index, &[word]),
        }
        word = tables.format.table(above, fresh.mfn()).map_err(MapError::Unencodable)?;
        lowest = lowest.or(Some(fresh.mfn()));
        at = above;
    }
    install(tables, place.table, place.index, word)?;
    lowest.ok_or(MapError::OutOfRange)
}
