//! One page walk, from a root or a cached pointer down to a leaf
//!
//! [`Walk::run`] reads memory and changes nothing; what to cache and what to report is up to whoever walks.

use crate::cache::{Leaf, Origin, Pointer, Walks, block_of, table_order};
use crate::decode::{Decoded, Format, Limits, accessed_dirty, decode};
use crate::ram::{Ram, View};
use crate::types::{Frame, Op, Rights};

/// Where and how to walk.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Walk {
    pub(crate) format: Format,
    pub(crate) limits: Limits,
    pub(crate) root: Frame,
    /// Levels of table, 1..=5.
    pub(crate) levels: u8,
    /// How the hardware came by the root.
    pub(crate) root_origin: Origin,
    pub(crate) view: View,
}

/// Why a walk found no leaf. The level is that of the table whose entry stopped it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Stop {
    NotPresent {
        level: u8,
    },
    Reserved {
        level: u8,
    },
    OutsideRam {
        level: u8,
    },
    /// The input address does not fit the levels.
    Width,
}

/// A table page that was read on the way.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Visited {
    pub(crate) level: u8,
    pub(crate) table: Frame,
    /// What the entries above it allow.
    pub(crate) rights: Rights,
    pub(crate) origin: Origin,
    /// Address of the entry read in it.
    pub(crate) entry: u64,
}

/// What a walk found.
#[derive(Clone, Debug)]
pub(crate) struct Outcome {
    pub(crate) result: Result<(u8, Leaf), Stop>,
    pub(crate) visited: Vec<Visited>,
    /// Addresses of the entries read, by level.
    pub(crate) path: [u64; 5],
}

impl Walk {
    /// The level of the root table.
    pub(crate) fn top(&self) -> u8 {
        self.levels.clamp(1, 5) - 1
    }

    /// Walks for input page `page` at `now`, starting at the deepest pointer of `tag` in `walks` if given.
    pub(crate) fn run(
        &self,
        ram: &Ram,
        page: u64,
        now: Op,
        walks: Option<(&Walks, u64)>,
    ) -> Outcome {
        let mut outcome = Outcome { result: Err(Stop::Width), visited: Vec::new(), path: [0; 5] };
        let top = self.top();
        if block_of(page, table_order(top)) != 0 {
            return outcome;
        }
        let (mut level, mut at) =
            walks.and_then(|(walks, tag)| walks.deepest(tag, page, top)).unwrap_or((
                top,
                Pointer { table: Some(self.root), rights: Rights::ALL, origin: self.root_origin },
            ));
        loop {
            let Some(table) = at.table else {
                // A cached "no table here": the entry that said so is one level up.
                outcome.result = Err(Stop::NotPresent { level: level.saturating_add(1) });
                return outcome;
            };
            let index = block_of(page, 9 * level) & 511;
            let entry = table.address().saturating_add(8 * index);
            outcome.path = at.origin.path;
            if let Some(place) = outcome.path.get_mut(usize::from(level)) {
                *place = entry;
            }
            outcome.visited.push(Visited {
                level,
                table,
                rights: at.rights,
                origin: at.origin,
                entry,
            });
            let Some(raw) = ram.read(entry, self.view) else {
                outcome.result = Err(Stop::OutsideRam { level });
                return outcome;
            };
            let origin = Origin {
                filled: now,
                basis: ram.changed_at(entry).unwrap_or(now),
                condemned: at.origin.condemned,
                path: outcome.path,
            };
            match decode(self.format, self.limits, level, raw) {
                Decoded::NotPresent => {
                    outcome.result = Err(Stop::NotPresent { level });
                    return outcome;
                }
                Decoded::Reserved => {
                    outcome.result = Err(Stop::Reserved { level });
                    return outcome;
                }
                Decoded::Leaf { frame, order, rights } => {
                    let leaf = Leaf {
                        frame,
                        rights: at.rights.and(rights),
                        present: true,
                        origin,
                        source: None,
                        dirty: accessed_dirty(self.format)
                            .is_some_and(|(_, dirty_bit)| raw & dirty_bit != 0),
                    };
                    outcome.result = Ok((order, leaf));
                    return outcome;
                }
                Decoded::Table { frame, rights } => {
                    // A level 0 entry never decodes to a table, so this stays above the bottom.
                    level = level.saturating_sub(1);
                    at = Pointer { table: Some(frame), rights: at.rights.and(rights), origin };
                }
            }
        }
    }
}

impl Outcome {
    /// Sets the accessed bit on the path and, for `write`, the dirty bit of the leaf, where the format has them.
    pub(crate) fn mark(&self, ram: &Ram, format: Format, write: bool) {
        let (Some((accessed, dirty)), Ok(_)) = (accessed_dirty(format), &self.result) else {
            return;
        };
        let last = self.visited.len().saturating_sub(1);
        for (position, visited) in self.visited.iter().enumerate() {
            let bits = if write && position == last { accessed | dirty } else { accessed };
            ram.hardware_or(visited.entry, bits);
        }
    }
}
