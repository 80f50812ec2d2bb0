//! Destroying a whole tree.
//!
//! [`destroy`] clears the whole space and frees every table, the root last. [`free_root`] is its
//! end, for those who clear in pieces of their own.

use core::fmt;

use crate::clear::{Emptied, clear_how};
use crate::entry::Level;
use crate::format::Format;
use crate::memory::TableMemory;
use crate::record::Record;
use crate::stop::{Budget, Rest, Stop, Stopped, Tally};
use crate::tree::Tables;

/// Clears the whole space, frees every table, and at last the root.
///
/// The first call gets the whole [`space`](crate::Geometry::space), later ones the rest
/// that the call before returned. After success the tree is gone: no hardware may be
/// given its root any more. The root page, the first one of a concatenated root, comes
/// out of the flushed record like any other table.
///
/// # Errors
///
/// As [`clear`](crate::clear). [`Stop::OutOfRange`] if `rest` does not end where the space ends, and
/// [`Stop::Contended`] with the whole space as the rest if the root is not empty after
/// the walk, because `rest` did not go on where the last call stopped.
pub fn destroy<F: Format, M: TableMemory>(
    tables: Tables<'_, F, M>,
    rest: Rest,
    budget: &mut Budget,
    record: &mut impl Record,
) -> Result<Tally, Stopped> {
    destroy_how(tables, rest, budget, false, record)
}

/// As [`destroy`], for a tree that no hardware walks and that nobody else looks at: what is
/// behind the last entry in use of a table is not even read.
pub(crate) fn destroy_early<F: Format, M: TableMemory>(
    tables: Tables<'_, F, M>,
    rest: Rest,
    budget: &mut Budget,
    record: &mut impl Record,
) -> Result<Tally, Stopped> {
    destroy_how(tables, rest, budget, true, record)
}

fn destroy_how<F: Format, M: TableMemory>(
    tables: Tables<'_, F, M>,
    rest: Rest,
    budget: &mut Budget,
    early: bool,
    record: &mut impl Record,
) -> Result<Tally, Stopped> {
    let geometry = tables.format.geometry();
    let space = geometry.space();
    if rest.run().last() != space.last() {
        let tally = Tally { reads: 0, leaves: 0, tables: 0, reached: rest.run().first() };
        return Err(Stopped { rest, stop: Stop::OutOfRange, tally });
    }
    let mut tally = clear_how(tables, rest, budget, (Emptied::Free, early), record)?;
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
