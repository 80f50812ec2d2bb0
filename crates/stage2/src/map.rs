//! Installing leaves, with the tables they need.
//!
//! [`map()`] installs one leaf of any size. New tables are filled before one store makes
//! them visible, so that a lack of pages changes nothing. [`map_run`] covers a range
//! with the largest leaves that fit.

use core::fmt;

use flush::{FreshTable, Gfn, Mfn, Run};

use crate::entry::{Entry, Leaf, Level, MAX_LEVELS};
use crate::format::{Format, Unencodable};
use crate::memory::TableMemory;
use crate::record::Record;
use crate::stop::{Budget, Rest};
use crate::tree::{Contended, Found, Place, Tables};

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
    /// The budget of [`map_run`] is spent.
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

/// How far [`map_run`] came.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use = "the rest is not mapped"]
pub struct MapStopped {
    /// What is not mapped yet.
    pub rest: Rest,
    /// Why.
    pub error: MapError,
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
                    install_chain(&tables, &place, gfn, level, word)?;
                    record.linked(span);
                }
                Entry::Empty => {
                    install(&tables, &place, raw, word)?;
                    tables.memory.add_live(place.table, 1);
                }
                // It counts as live already.
                Entry::Inert if place.level == level => install(&tables, &place, raw, word)?,
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

/// Stores a leaf where nothing valid was.
fn install<F: Format, M: TableMemory>(
    tables: &Tables<'_, F, M>,
    place: &Place,
    raw: u64,
    word: u64,
) -> Result<(), MapError> {
    tables
        .memory
        .compare_exchange(place.table, place.index, raw, word)
        .map_err(|_| MapError::Contended)
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

/// Puts tables below the empty entry at `place`, down to one with `word` for `gfn`.
fn install_chain<F: Format, M: TableMemory>(
    tables: &Tables<'_, F, M>,
    place: &Place,
    gfn: Gfn,
    level: Level,
    word: u64,
) -> Result<(), MapError> {
    let mut chain = Chain { tables: [const { None }; MAX_LEVELS] };
    match store_chain(tables, place, gfn, level, word, &mut chain) {
        Ok(()) => {
            for fresh in chain.tables.into_iter().flatten() {
                let table = tables.memory.link(fresh);
                tables.memory.add_live(table, 1);
            }
            tables.memory.add_live(place.table, 1);
            Ok(())
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
    place: &Place,
    gfn: Gfn,
    level: Level,
    word: u64,
    chain: &mut Chain,
) -> Result<(), MapError> {
    let geometry = tables.format.geometry();
    let (mut at, mut word) = (level, word);
    while at < place.level {
        let Some(above) = at.above() else { return Err(MapError::OutOfRange) };
        let fresh = tables.memory.allocate().ok_or(MapError::NoTable)?;
        let fresh = chain.tables[at.slot()].insert(fresh);
        let (page, index) = geometry.slot(fresh.mfn(), at, gfn);
        tables.memory.swap(page, index, word);
        word = tables.format.table(above, fresh.mfn()).map_err(MapError::Unencodable)?;
        at = above;
    }
    install(tables, place, 0, word)
}

/// Maps every frame of `rest` to consecutive machine frames from `leaf.mfn` on, over
/// vacant entries, in the largest leaves up to `largest` that fit.
///
/// Where a table with live entries is in the way of a large leaf, smaller ones are
/// used. Each leaf installed costs one of `budget`.
///
/// # Errors
///
/// Everything before [`MapStopped::rest`] is mapped; the next call starts there with
/// the machine frame that belongs to it. A range beyond the space, or one that cuts a
/// page of the granule, is refused whole.
pub fn map_run<F: Format, M: TableMemory>(
    tables: Tables<'_, F, M>,
    rest: Rest,
    leaf: Leaf,
    largest: Level,
    budget: &mut Budget,
    record: &mut impl Record,
) -> Result<(), MapStopped> {
    let geometry = tables.format.geometry();
    let (first, last) = (rest.run().first(), rest.run().last());
    if !geometry.space().covers(rest.run()) {
        return Err(MapStopped { rest, error: MapError::OutOfRange });
    }
    if !geometry.cuts_no_page(rest.run()) {
        return Err(MapStopped { rest, error: MapError::Unaligned });
    }
    let mut at = first;
    loop {
        let stopped = |error| MapStopped { rest: Rest::from(at, last), error };
        let offset = at.get().saturating_sub(first.get());
        let part = Leaf { mfn: Mfn::new(leaf.mfn.get().saturating_add(offset)), ..leaf };
        let left = Rest::from(at, last).run();
        let span = match fill(&tables, left, part, largest, budget, record) {
            Some(span) => span,
            None if !budget.take() => return Err(stopped(MapError::Budget)),
            None => map_largest(&tables, left, part, largest, record).map_err(stopped)?,
        };
        if span.last() >= last {
            return Ok(());
        }
        at = Gfn::new(span.last().get().saturating_add(1));
    }
}

/// Maps the pages at the start of `left` that belong into one table, as long as nothing is
/// in the way there. `None` if there are none, or something larger may fit.
fn fill<F: Format, M: TableMemory>(
    tables: &Tables<'_, F, M>,
    left: Run,
    leaf: Leaf,
    largest: Level,
    budget: &mut Budget,
    record: &mut impl Record,
) -> Option<Run> {
    let geometry = tables.format.geometry();
    let order = geometry.order(Level::PAGE);
    let block = Run::block(left.first(), order + geometry.index_bits());
    if largest > Level::PAGE && left.covers(block) {
        return None;
    }
    let (slot, raw) = tables.find(left.first(), Level::PAGE);
    if slot.level != Level::PAGE || raw != 0 {
        return None;
    }
    let last = left.last().min(block.last());
    let pages = (last.get().saturating_sub(left.first().get()) >> order).saturating_add(1);
    let step = 1 << order;
    let mut leaf = leaf;
    let mut count: u16 = 0;
    for index in (slot.index..).take(usize::try_from(pages.min(budget.left())).ok()?) {
        let Ok(word) = tables.format.leaf(Level::PAGE, leaf) else { break };
        if tables.memory.compare_exchange(slot.table, index, 0, word).is_err() {
            break;
        }
        count += 1;
        leaf.mfn = Mfn::new(leaf.mfn.get().saturating_add(step));
    }
    let end = u64::from(count.checked_sub(1)?) << order;
    let span = geometry.span(Level::PAGE, Gfn::new(left.first().get().saturating_add(end)));
    let run = Run::new(left.first(), span.last())?;
    tables.memory.add_live(slot.table, count);
    budget.spend(u64::from(count));
    record.added(run);
    Some(run)
}

/// Maps one leaf at the start of `left`, as large as fits, and returns what it spans.
fn map_largest<F: Format, M: TableMemory>(
    tables: &Tables<'_, F, M>,
    left: Run,
    leaf: Leaf,
    largest: Level,
    record: &mut impl Record,
) -> Result<Run, MapError> {
    let geometry = tables.format.geometry();
    let mut level = largest.min(tables.format.largest_leaf());
    loop {
        let span = geometry.span(level, left.first());
        let mfn = Run::block(Gfn::new(leaf.mfn.get()), geometry.order(level));
        let fits = span.first() == left.first()
            && left.covers(span)
            && mfn.first().get() == leaf.mfn.get();
        let Some(below) = level.below() else {
            map(*tables, left.first(), level, leaf, Over::Vacant, record)?;
            return Ok(span);
        };
        if fits {
            match map(*tables, left.first(), level, leaf, Over::Vacant, record) {
                Ok(_) => return Ok(span),
                Err(MapError::Occupied(Found { level: at, entry: Entry::Table(_), .. }))
                    if at == level => {}
                Err(error) => return Err(error),
            }
        }
        level = below;
    }
}
