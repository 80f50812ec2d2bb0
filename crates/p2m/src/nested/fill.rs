//! Filling a shadow on demand: one leaf for a nested access that faulted.
//!
//! The embedder walks the guest's own table and says what it found ([`Walked`]); the
//! canonical map is consulted here, under the same lock as its edits, so a shadow never
//! shows a frame that was unmapped meanwhile.

use core::fmt;

use flush::{Gfn, Run, Skipped};
use stage2::{
    Access, Budget, Emptied, Entry, Format, Found, Leaf, Level, MapError, Over, Rest, Stop,
    TableMemory, Unencodable,
};

use super::{
    Nested, edit,
    reverse::Shown,
    shadow::{InUse, Ticket},
};
use crate::record::Walkers;

/// What the guest's own table says of a nested frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Walked {
    /// The canonical frame that it shows.
    pub canonical: Gfn,
    /// The lg2 of how many frames the leaf of the guest's table has.
    pub order: u8,
    /// What all entries on the way allow.
    pub access: Access,
}

/// Why nothing was filled.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FillError {
    /// The guest asked for a flush since the ticket was taken: read its table again.
    Stale,
    /// The shadow is not open: [prepare](Nested::prepare) it.
    Pending,
    /// An edit of the canonical frame is under way, or of one that could not be told
    /// from it: try again once it went on.
    Barred,
    /// The nested frame is beyond the space of the format.
    OutOfRange,
    /// Nothing is mapped at the canonical frame.
    NotMapped,
    /// No leaf can say what is left of the rights.
    Unencodable(Unencodable),
    /// There was no page for a table.
    NoTable,
    /// The batch cannot carry the empty table that would have to go: flush it first.
    Full,
    /// The entry was edited by somebody else, without the lock.
    Contended,
}

impl fmt::Display for FillError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Stale => f.write_str("the guest's table was read before its flush"),
            Self::Pending => f.write_str("the shadow has to be prepared first"),
            Self::Barred => f.write_str("an edit of the canonical frame is under way"),
            Self::OutOfRange => f.write_str("nested frame beyond the space"),
            Self::NotMapped => f.write_str("nothing is mapped at the canonical frame"),
            Self::Unencodable(error) => error.fmt(f),
            Self::NoTable => f.write_str("no page for a new table"),
            Self::Full => f.write_str("no room on record for the table that would go"),
            Self::Contended => f.write_str("the entry is being edited by somebody else"),
        }
    }
}

impl core::error::Error for FillError {}

impl From<MapError> for FillError {
    fn from(error: MapError) -> Self {
        match error {
            MapError::OutOfRange => Self::OutOfRange,
            MapError::Unencodable(error) => Self::Unencodable(error),
            MapError::NoTable => Self::NoTable,
            MapError::Full => Self::Full,
            // The look just before saw a vacant entry; the others are not possible with
            // an aligned leaf over a vacant entry of a format without break-before-make.
            MapError::Unaligned
            | MapError::Occupied(_)
            | MapError::Unexpected(_)
            | MapError::FlushFirst
            | MapError::Budget
            | MapError::Contended => Self::Contended,
        }
    }
}

/// A leaf that could be installed, and its place.
struct Candidate {
    shown: Shown,
    level: Level,
    leaf: Leaf,
}

impl<F: Format, M: TableMemory, K: Walkers> Nested<'_, F, M, K> {
    /// Installs the leaf for the nested frame `nested`, as large as the guest's leaf and
    /// the canonical one allow, with the rights that both give.
    ///
    /// Another leaf that is there is unmapped first and goes on record, so the batch has
    /// to be flushed before the guest may rely on the new one. Returns all nested frames
    /// of the leaf.
    ///
    /// # Errors
    ///
    /// See [`FillError`]; nothing was installed then.
    pub fn fill(
        &mut self,
        shadow: &InUse,
        ticket: Ticket,
        nested: Gfn,
        walked: Walked,
        skipped: &mut Skipped<'_>,
    ) -> Result<Run, FillError> {
        let slot = self.slot_of(shadow).ok_or(FillError::Stale)?;
        let state = self.shadows.get(slot).ok_or(FillError::Stale)?;
        if ticket != (Ticket { slot, generation: state.generation }) {
            return Err(FillError::Stale);
        }
        if !state.is_open() {
            return Err(FillError::Pending);
        }
        let page = self.p2m.tables().format.geometry().span(Level::PAGE, walked.canonical);
        if self.bars.touch(page) {
            return Err(FillError::Barred);
        }
        let canonical = stage2::lookup(self.p2m.tables(), walked.canonical)
            .filter(|found| matches!(found.entry, Entry::Leaf(_)))
            .ok_or(FillError::NotMapped)?;
        let mut largest = canonical.level;
        loop {
            let candidate = self.candidate(slot, nested, walked, canonical, largest)?;
            if self.would_blur(&candidate.shown) {
                return Err(FillError::Barred);
            }
            match self.install(&candidate, skipped) {
                Ok(()) => return Ok(candidate.shown.nested_run()),
                // Smaller leaves are there: a smaller one fits between them.
                Err(MapError::Occupied(Found { entry: Entry::Table(_), .. })) => {
                    largest = candidate.level.below().ok_or(FillError::Contended)?;
                }
                Err(error) => return Err(error.into()),
            }
        }
    }

    /// Whether a leaf without a record would make the whole shadow go once more for the
    /// sake of an edit that is under way.
    fn would_blur(&self, shown: &Shown) -> bool {
        let run = shown.canonical_run();
        let unknown = self.shadows.get(shown.shadow).and_then(|shadow| shadow.unknown);
        let unknown = unknown.map_or(run, |unknown| unknown.hull(run));
        !self.reverse.has_room() && self.bars.touch(unknown)
    }

    /// The largest leaf up to `largest` that both tables agree on.
    fn candidate(
        &self,
        slot: usize,
        nested: Gfn,
        walked: Walked,
        canonical: Found,
        largest: Level,
    ) -> Result<Candidate, FillError> {
        let format = self.p2m.tables().format;
        let geometry = format.geometry();
        let mut level = largest.min(format.largest_leaf());
        loop {
            let order = geometry.order(level);
            let (to, from) =
                (Run::block(nested, order).first(), Run::block(walked.canonical, order).first());
            // Both blocks are cut the same way, or their frames would be shifted.
            let offset = nested.get() ^ to.get();
            let aligned = walked.canonical.get() ^ from.get() == offset;
            if order <= walked.order
                && aligned
                && !self.bars.touch(Run::block(from, order))
                && let Some((leaf, mfn)) = canonical.leaf_at(from)
            {
                let rights = walked.access.without(Access::ALL.without(leaf.access));
                let leaf = Leaf::new(mfn, rights).tagged(leaf.tag).cached(leaf.memory);
                format.leaf(level, leaf).map_err(FillError::Unencodable)?;
                let shown = Shown { shadow: slot, order, nested: to, canonical: from };
                return Ok(Candidate { shown, level, leaf });
            }
            level = level.below().ok_or(FillError::Unencodable(Unencodable::Level))?;
        }
    }

    /// Makes room for a leaf, records it, and maps it.
    fn install(
        &mut self,
        candidate: &Candidate,
        skipped: &mut Skipped<'_>,
    ) -> Result<(), MapError> {
        let Candidate { shown, level, leaf } = candidate;
        let slot = shown.shadow;
        if self.replace(shown, *level, leaf, skipped)? {
            return Ok(());
        }
        self.record(shown);
        let Some((tables, mut edit)) =
            edit(&self.p2m, &mut *self.shadows, &mut self.reverse, slot, skipped)
        else {
            return Err(MapError::Contended);
        };
        let mapped = stage2::map(tables, shown.nested, *level, *leaf, Over::Vacant, &mut edit);
        if mapped.is_err() {
            self.unrecord(shown);
        } else {
            self.counts.fills = self.counts.fills.saturating_add(1);
        }
        mapped.map(drop)
    }

    /// Unmaps the leaf in the way, if any. `true` if it is the wanted one.
    fn replace(
        &mut self,
        shown: &Shown,
        level: Level,
        leaf: &Leaf,
        skipped: &mut Skipped<'_>,
    ) -> Result<bool, MapError> {
        let Some((tables, _)) =
            edit(&self.p2m, &mut *self.shadows, &mut self.reverse, shown.shadow, skipped)
        else {
            return Err(MapError::Contended);
        };
        let found = stage2::lookup(tables, shown.nested).ok_or(MapError::OutOfRange)?;
        let Entry::Leaf(old) = found.entry else { return Ok(false) };
        // A smaller one below is for `map` to find, which then asks for a smaller leaf.
        if found.level < level {
            return Ok(false);
        }
        if found.level == level && old.same_mapping(leaf) {
            return Ok(true);
        }
        let (rest, mut budget) = (Rest::new(found.run), Budget::UNLIMITED);
        let cleared = self.clear_in(shown.shadow, rest, &mut budget, Emptied::Keep, skipped);
        cleared.map(|_| false).map_err(|stopped| match stopped.stop {
            Stop::Full => MapError::Full,
            Stop::NoTable => MapError::NoTable,
            Stop::OutOfRange => MapError::OutOfRange,
            Stop::Refused(error) => MapError::Unencodable(error),
            Stop::Budget | Stop::Split(_) | Stop::Contended | Stop::Unaligned | Stop::Asked => {
                MapError::Contended
            }
        })
    }

    /// Makes a leaf known before it is there.
    fn record(&mut self, shown: &Shown) {
        let Some(shadow) = self.shadows.get_mut(shown.shadow) else { return };
        if self.reverse.insert(*shown) {
            shadow.recorded = shadow.recorded.saturating_add(1);
        } else {
            let run = shown.canonical_run();
            shadow.unknown = Some(shadow.unknown.map_or(run, |unknown| unknown.hull(run)));
            self.counts.unrecorded = self.counts.unrecorded.saturating_add(1);
        }
    }

    /// The leaf did not come: its record goes. What is unknown stays so.
    fn unrecord(&mut self, shown: &Shown) {
        if self.reverse.remove(shown.shadow, shown.order, shown.nested)
            && let Some(shadow) = self.shadows.get_mut(shown.shadow)
        {
            shadow.recorded = shadow.recorded.saturating_sub(1);
        }
    }
}
