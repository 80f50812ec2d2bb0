//! What the machine saw that must not happen, with how it came about
//!
//! A [`Witness`] says who used (or could use) which stale translation, and when it was cached, when the tables
//! changed under it, and when the frame was given away.

use crate::types::{Access, Frame, Op, Rights, Space, UnitId};
use core::fmt;

/// Who did it.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum Actor {
    /// A processor, by number.
    Cpu(usize),
    /// A VT-d unit on behalf of the device with this source id.
    Unit(UnitId, u16),
    /// A device through its own TLB, by source id.
    DeviceTlb(u16),
    /// A DMA that had been translated and was still on its way, by source id.
    InFlight(u16),
}

/// What is wrong.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum WitnessKind {
    /// An access reached a frame that is free, or was released, re-owned or revoked after the translation was made.
    ReleasedFrame,
    /// A walk read a table page that is free, or was released after the pointer to it was cached.
    ReleasedTable,
    /// An access used rights that the tables had withdrawn before the range was declared settled.
    MoreRights,
    /// Audit: a cache or a DMA in flight refers to a frame that was given away.
    CachesReleasedFrame,
    /// Audit: a cache points at a table page that was given away.
    CachesReleasedTable,
    /// Audit: a cache entry allows what the tables do not, and the frame is not held.
    CachesMoreRights,
    /// Audit: a cached table pointer is not what the tables say, and the table is not held.
    CachesOldTable,
    /// Audit: a cached context entry is not what the context table says.
    CachesOldContext,
}

impl WitnessKind {
    /// Did hardware do it (true), or could it (false: found by an audit)?
    #[must_use]
    pub const fn happened(self) -> bool {
        match self {
            Self::ReleasedFrame | Self::ReleasedTable | Self::MoreRights => true,
            Self::CachesReleasedFrame
            | Self::CachesReleasedTable
            | Self::CachesMoreRights
            | Self::CachesOldTable
            | Self::CachesOldContext => false,
        }
    }
}

/// How a stale translation came about.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct History {
    /// When the translation was cached, or made if it was not cached.
    pub filled: Op,
    /// When an entry on its path was last written by the host, if that was after the fill.
    pub table_changed: Option<Op>,
    /// When the frame was last released, re-owned or revoked, if that was after the fill.
    pub given_away: Option<Op>,
    /// When the range was declared settled, if the entry was already stale then.
    pub settled: Option<Op>,
}

/// One thing that must not happen.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Witness {
    /// What is wrong.
    pub kind: WitnessKind,
    /// When it was seen.
    pub op: Op,
    /// Who did it.
    pub actor: Actor,
    /// In which address space, where there is one.
    pub space: Option<Space>,
    /// Input byte address (guest-physical or device); of the first byte for entries of more than one page.
    pub address: u64,
    /// The frame reached or referred to.
    pub frame: Frame,
    /// What was done; `None` for walks and audits.
    pub access: Option<Access>,
    /// What the translation allowed.
    pub rights: Rights,
    /// How it came about.
    pub history: History,
}

impl fmt::Display for Witness {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            formatter,
            "op {}: {:?} by {:?} at {:#x} -> frame {:#x} ({:?}",
            self.op.0, self.kind, self.actor, self.address, self.frame.0, self.rights
        )?;
        if let Some(access) = self.access {
            write!(formatter, ", {access:?}")?;
        }
        write!(formatter, "); cached at op {}", self.history.filled.0)?;
        if let Some(op) = self.history.table_changed {
            write!(formatter, ", tables changed at op {}", op.0)?;
        }
        if let Some(op) = self.history.given_away {
            write!(formatter, ", frame given away at op {}", op.0)?;
        }
        if let Some(op) = self.history.settled {
            write!(formatter, ", range settled at op {}", op.0)?;
        }
        Ok(())
    }
}
