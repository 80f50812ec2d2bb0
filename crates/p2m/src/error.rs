//! Why an edit of a p2m was refused, one type for each operation.
//!
//! Any of these means that nothing was unmapped, so nothing may be given away.

use core::{error, fmt};

use flush::{Gfn, Run};
use stage2::{MapError, PageError, SplitError, Unencodable};

use crate::{kind::PageKind, table::Mapping};

/// Why [`P2m::set`](crate::P2m::set) mapped nothing.
///
/// A large leaf may have been split by then; it still maps the same.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SetError {
    /// The frames are beyond the space of the format.
    OutOfRange,
    /// The frames are not aligned to the order, or the format has no such leaf.
    Unencodable(Unencodable),
    /// No level maps blocks of this order, or the kind is mapped by single pages only.
    Order(u8),
    /// A grant, a foreign page, a device or an unknown entry is there: clear it first.
    Protected(Mapping),
    /// Smaller mappings are there: clear the range first.
    Occupied,
    /// There was no page for a table.
    NoTable,
    /// The batch cannot carry the empty table that would have to go: flush it first.
    Full,
    /// The entry was edited by somebody else, without the lock.
    Contended,
}

impl fmt::Display for SetError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::OutOfRange => f.write_str("frames beyond the space"),
            Self::Unencodable(error) => error.fmt(f),
            Self::Order(order) => write!(f, "not mapped by blocks of order {order}"),
            Self::Protected(mapping) => write!(f, "must not be replaced: {mapping:?}"),
            Self::Occupied => f.write_str("smaller mappings in the way"),
            Self::NoTable => f.write_str("no page for a new table"),
            Self::Full => f.write_str("no room on record for the table that would go"),
            Self::Contended => f.write_str("the entry is being edited by somebody else"),
        }
    }
}

impl error::Error for SetError {}

impl From<SplitError> for SetError {
    fn from(error: SplitError) -> Self {
        match error {
            SplitError::OutOfRange => Self::OutOfRange,
            // A split stays pending with break-before-make only, which `new` refuses.
            SplitError::Absent | SplitError::Contended | SplitError::Pending(_) => Self::Contended,
            SplitError::NoTable => Self::NoTable,
            SplitError::Unencodable(error) => Self::Unencodable(error),
        }
    }
}

/// Why [`P2m::clear`](crate::P2m::clear) cleared nothing. Nothing may be released then.
///
/// A large leaf may have been split by then; it still maps the same.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ClearError {
    /// The frame is beyond the space of the format.
    OutOfRange,
    /// Nothing is mapped there.
    Absent,
    /// Something else is mapped there.
    Unexpected(Mapping),
    /// The frame is part of a large leaf, and there was no page for a table.
    NoTable,
    /// The format cannot express the smaller leaves.
    Unencodable(Unencodable),
    /// The entry was edited by somebody else, without the lock.
    Contended,
}

impl fmt::Display for ClearError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::OutOfRange => f.write_str("frame beyond the space"),
            Self::Absent => f.write_str("nothing is mapped there"),
            Self::Unexpected(mapping) => write!(f, "not as expected: {mapping:?}"),
            Self::NoTable => f.write_str("no page for a new table"),
            Self::Unencodable(error) => error.fmt(f),
            Self::Contended => f.write_str("the entry is being edited by somebody else"),
        }
    }
}

impl error::Error for ClearError {}

impl From<SplitError> for ClearError {
    fn from(error: SplitError) -> Self {
        match error {
            SplitError::OutOfRange => Self::OutOfRange,
            // A split stays pending with break-before-make only, which `new` refuses.
            SplitError::Absent | SplitError::Contended | SplitError::Pending(_) => Self::Contended,
            SplitError::NoTable => Self::NoTable,
            SplitError::Unencodable(error) => Self::Unencodable(error),
        }
    }
}

/// Why [`P2m::new`](crate::P2m::new) made none.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NewError {
    /// There was no page for the root.
    NoTable,
    /// The format cannot change a valid entry in one step, and the edits here do.
    BreakBeforeMake,
}

impl fmt::Display for NewError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::NoTable => "no page for the root",
            Self::BreakBeforeMake => "format with break-before-make",
        })
    }
}

impl error::Error for NewError {}

impl From<MapError> for SetError {
    fn from(error: MapError) -> Self {
        match error {
            MapError::OutOfRange => SetError::OutOfRange,
            MapError::Unaligned => SetError::Unencodable(Unencodable::Frame),
            MapError::Unencodable(error) => SetError::Unencodable(error),
            MapError::Occupied(_) => SetError::Occupied,
            MapError::NoTable => SetError::NoTable,
            MapError::Full => SetError::Full,
            // The look just before saw a leaf; the others belong to calls not made here.
            MapError::Unexpected(_)
            | MapError::FlushFirst
            | MapError::Contended
            | MapError::Budget => SetError::Contended,
        }
    }
}

impl ClearError {
    /// The single page at `gfn` was not cleared.
    pub(crate) fn single(error: PageError, gfn: Gfn) -> Self {
        match error {
            PageError::OutOfRange => ClearError::OutOfRange,
            PageError::Absent => ClearError::Absent,
            PageError::Unexpected(leaf) => {
                let (run, kind) = (Run::single(gfn), PageKind::from_tag(leaf.tag));
                ClearError::Unexpected(Mapping { mfn: leaf.mfn, run, kind, access: leaf.access })
            }
            PageError::Large(_) | PageError::Contended => ClearError::Contended,
        }
    }
}
