//! Why a combined flush is not known to have completed.

use core::{error, fmt};

/// Why a combined flush is not known to have completed.
///
/// Any translation of the cover may still be in use. The cover is withdrawn; a retry
/// publishes it again and takes a new ticket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CombineError<E> {
    /// This caller led the flush, and the hardware said why.
    Led(E),
    /// Flushes that others led failed, as often as this caller tried; they have the reason.
    Joined,
    /// Nothing was asked for.
    Refused(Refused),
}

/// Why a seat took no ticket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refused {
    /// The cover is of another domain than the combiner.
    OtherDomain,
    /// The seat is still asking for an earlier cover of this kind.
    InFlight,
    /// The token is not of this seat, or was not of a flush that it began.
    NotAsked,
}

impl fmt::Display for Refused {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::OtherDomain => "the cover is of another domain than the combiner",
            Self::InFlight => "the seat is still asking for an earlier cover of this kind",
            Self::NotAsked => "the seat did not begin this flush",
        })
    }
}

impl error::Error for Refused {}

impl<E: fmt::Display> fmt::Display for CombineError<E> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Led(error) => write!(f, "the combined flush failed: {error}"),
            Self::Joined => f.write_str("the combined flushes that others led failed"),
            Self::Refused(refused) => write!(f, "the combined flush was refused: {refused}"),
        }
    }
}

impl<E: error::Error> error::Error for CombineError<E> {}
