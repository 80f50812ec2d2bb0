//! Mapping a range, in the largest leaves that fit.
//!
//! [`map_run`] maps what [`map()`] would leaf by leaf. Pages that belong into one table are put
//! into it together, and if there is none yet, before it is linked.

use flush::{Gfn, Mfn, Run};

use crate::entry::{Entry, Leaf, Level};
use crate::format::Format;
use crate::map::{MapError, Over, install_chain, map};
use crate::memory::TableMemory;
use crate::record::Record;
use crate::stop::{Budget, Rest};
use crate::tree::{Found, Tables};

/// How far [`map_run`] came.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use = "the rest is not mapped"]
pub struct MapStopped {
    /// What is not mapped yet.
    pub rest: Rest,
    /// Why.
    pub error: MapError,
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
        let span = match fill(&tables, left, part, largest, budget, record).map_err(stopped)? {
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

/// Pages that are put in together at most.
const STRETCH: usize = 32;

/// Maps the pages at the start of `left` that belong into one table, as long as nothing is
/// in the way there. `None` if there are none, or something larger may fit.
///
/// # Errors
///
/// That of the table it needs; nothing was changed then.
fn fill<F: Format, M: TableMemory>(
    tables: &Tables<'_, F, M>,
    left: Run,
    leaf: Leaf,
    largest: Level,
    budget: &mut Budget,
    record: &mut impl Record,
) -> Result<Option<Run>, MapError> {
    let geometry = tables.format.geometry();
    let order = geometry.order(Level::PAGE);
    let block = Run::block(left.first(), order + geometry.index_bits());
    if largest > Level::PAGE && left.covers(block) {
        return Ok(None);
    }
    let (slot, raw) = tables.find(left.first(), Level::PAGE);
    if raw != 0 {
        return Ok(None);
    }
    let last = left.last().min(block.last());
    let pages = (last.get().saturating_sub(left.first().get()) >> order).saturating_add(1);
    let most = usize::try_from(pages.min(budget.left())).unwrap_or(usize::MAX);
    let mut pages = Pages { leaf, step: 1 << order, most };
    let (table, index, before) = if slot.level == Level::PAGE {
        (slot.table, slot.index, 0)
    } else {
        let mut words = [0; STRETCH];
        let words = pages.next_words(tables.format, &mut words);
        if words.is_empty() {
            return Ok(None);
        }
        let table = install_chain(tables, slot, left.first(), Level::PAGE, words)?;
        let (_, index) = geometry.slot(table, Level::PAGE, left.first());
        (table, index.saturating_add(words.len()), words.len() as u16)
    };
    let after = put(tables, table, index, &mut pages);
    if after > 0 {
        tables.memory.add_live(table, after);
    }
    let count = before.saturating_add(after);
    let Some(beyond) = count.checked_sub(1) else { return Ok(None) };
    let end = left.first().get().saturating_add(u64::from(beyond) << order);
    let run = Run::single(left.first()).hull(geometry.span(Level::PAGE, Gfn::new(end)));
    budget.spend(u64::from(count));
    if slot.level != Level::PAGE {
        record.linked(run);
    }
    record.added(run);
    Ok(Some(run))
}

/// Puts `pages` into a table, from the entry at `index` on, and returns how many went in: never
/// more than a table has.
#[inline]
fn put<F: Format, M: TableMemory>(
    tables: &Tables<'_, F, M>,
    table: Mfn,
    index: usize,
    pages: &mut Pages,
) -> u16 {
    let (mut words, mut count) = ([0; STRETCH], 0);
    while pages.most > 0 {
        let words = pages.next_words(tables.format, &mut words);
        let put = tables.memory.put_in(table, index.saturating_add(count), words);
        count = count.saturating_add(put);
        if put < STRETCH {
            break;
        }
    }
    count as u16
}

/// Pages that show consecutive frames.
struct Pages {
    /// The next one.
    leaf: Leaf,
    /// Frames in a page.
    step: u64,
    /// How many pages there are at most.
    most: usize,
}

impl Pages {
    /// The words of the next few, or of none if there are none or the format has no such leaf.
    #[inline]
    fn next_words<'w, F: Format>(
        &mut self,
        format: &F,
        words: &'w mut [u64; STRETCH],
    ) -> &'w [u64] {
        let (mut leaf, mut count) = (self.leaf, 0);
        for word in words.iter_mut().take(self.most) {
            let Ok(next) = format.leaf(Level::PAGE, leaf) else { break };
            *word = next;
            count += 1;
            leaf.mfn = Mfn::new(leaf.mfn.get().saturating_add(self.step));
        }
        self.leaf = leaf;
        self.most = self.most.saturating_sub(count);
        words.get(..count).unwrap_or_default()
    }
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
