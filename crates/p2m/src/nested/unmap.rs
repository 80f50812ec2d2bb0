//! Unmapping: what shows some canonical frames, and whole shadows.
//!
//! A search goes in pieces of at most 512 frames, each of which costs one of the budget
//! besides the entries that it makes a walk read. When the budget ends, the frames stay
//! [barred](super::bars), so the next call finds nothing again that this one unmapped.

use flush::{Gfn, Run, Skipped};
use stage2::{Budget, Emptied, Format, Rest, Stop, Stopped, TableMemory, Tally};

use super::{
    Nested, Refused,
    bars::{next, overlap},
    edit,
    reverse::Search,
    shadow,
};
use crate::record::Walkers;

/// The lg2 of how many frames are searched for one of the budget.
pub(super) const PIECE: u8 = 9;

/// The part of the piece around `first` that lies between `first` and `last`.
pub(super) fn piece(first: Gfn, last: Gfn) -> Run {
    let end = Run::block(first, PIECE).last().min(last);
    Run::new(first, end).unwrap_or(Run::single(first))
}

/// Takes one piece off a budget. One that a walk has spent meanwhile stays spent.
pub(super) fn spend(budget: &mut Budget) {
    *budget = Budget::new(budget.left().saturating_sub(1));
}

impl<F: Format, M: TableMemory, K: Walkers> Nested<'_, F, M, K> {
    /// As [`unmap_showing`](Self::unmap_showing), for an edit of all of `run` at once.
    #[inline]
    pub(super) fn unmap_shadows<E>(
        &mut self,
        run: Run,
        budget: &mut Budget,
        skipped: &mut Skipped<'_>,
    ) -> Result<(), Refused<E>> {
        if !self.shadowed {
            return Ok(());
        }
        self.unmap_showing(run, budget, skipped).map_err(Refused::Shadows)
    }

    /// Unmaps every shadow leaf that shows a frame of `run`, and nothing else but
    /// shadows that may do so without a record.
    ///
    /// The last piece is free, so that what follows is sure of some of the budget.
    pub(super) fn unmap_showing(
        &mut self,
        run: Run,
        budget: &mut Budget,
        skipped: &mut Skipped<'_>,
    ) -> Result<(), Stop> {
        let mut from = self.bars.shown_from(run);
        while let Some(first) = from {
            let piece = piece(first, run.last());
            if let Err(stop) = self.unmap_piece(piece, budget, skipped) {
                if stop == Stop::Budget {
                    self.bars.put(run, Some(first));
                }
                return Err(stop);
            }
            from = next(piece.last()).filter(|first| *first <= run.last());
            if from.is_some() {
                spend(budget);
                if budget.left() == 0 {
                    self.bars.put(run, from);
                    return Err(Stop::Budget);
                }
            }
        }
        Ok(())
    }

    fn unmap_piece(
        &mut self,
        run: Run,
        budget: &mut Budget,
        skipped: &mut Skipped<'_>,
    ) -> Result<(), Stop> {
        for slot in 0..self.shadows.len() {
            let shadow = &mut self.shadows[slot];
            if !shadow.unknown.is_some_and(|unknown| overlap(unknown, run)) {
                continue;
            }
            if shadow.rest.is_none() {
                shadow.rest = Some(Rest::new(self.p2m.tables().format.geometry().space()));
                self.counts.unknown = self.counts.unknown.saturating_add(1);
            }
            // With tables kept the walk needs no room on record.
            self.walk(slot, budget, Emptied::Keep, skipped)?;
        }
        let mut search = Search::new(run);
        let ended = self.unmap_found(&mut search, budget, skipped);
        self.counts.searched = self.counts.searched.saturating_add(search.looks());
        ended
    }

    fn unmap_found(
        &mut self,
        search: &mut Search,
        budget: &mut Budget,
        skipped: &mut Skipped<'_>,
    ) -> Result<(), Stop> {
        while let Some(shown) = self.reverse.next(search) {
            let leaf = Rest::new(shown.nested_run());
            let tally = self.clear_in(shown.shadow, leaf, budget, Emptied::Keep, skipped);
            let tally = tally.map_err(|stopped| stopped.stop)?;
            self.counts.precise = self.counts.precise.saturating_add(tally.leaves);
            // There was no leaf: the record was one too many.
            if self.reverse.remove(shown.shadow, shown.order, shown.nested)
                && let Some(shadow) = self.shadows.get_mut(shown.shadow)
            {
                shadow.recorded = shadow.recorded.saturating_sub(1);
            }
        }
        Ok(())
    }

    /// Goes on with the pending walk of a shadow, to its end if the budget lasts.
    pub(super) fn walk(
        &mut self,
        slot: usize,
        budget: &mut Budget,
        emptied: Emptied,
        skipped: &mut Skipped<'_>,
    ) -> Result<(), Stop> {
        let Some(rest) = self.shadows.get(slot).and_then(|shadow| shadow.rest) else {
            return Ok(());
        };
        let ended = self.clear_in(slot, rest, budget, emptied, skipped);
        let tally = ended.as_ref().map_or_else(|stopped| stopped.tally, |tally| *tally);
        self.counts.swept = self.counts.swept.saturating_add(tally.leaves);
        let shadow = &mut self.shadows[slot];
        match ended {
            Ok(_) => self.walked(slot),
            Err(stopped) => {
                shadow.rest = Some(stopped.rest);
                return Err(stopped.stop);
            }
        }
        Ok(())
    }

    /// The walk of a shadow has ended: nothing is left in it, known or unknown.
    pub(super) fn walked(&mut self, slot: usize) {
        let shadow = &mut self.shadows[slot];
        shadow.rest = None;
        shadow.unknown = None;
        if shadow.recorded > 0 {
            shadow.recorded = 0;
            self.reverse.forget(slot);
        }
        if shadow.unflushed.is_some() {
            self.epoch = self.epoch.saturating_add(1);
            shadow.unflushed = Some(shadow::Unflushed::Walked(self.epoch));
        }
    }

    /// Clears nested frames in one shadow; the records of the leaves go with them.
    pub(super) fn clear_in(
        &mut self,
        slot: usize,
        rest: Rest,
        budget: &mut Budget,
        emptied: Emptied,
        skipped: &mut Skipped<'_>,
    ) -> Result<Tally, Stopped> {
        let Some((tables, mut edit)) =
            edit(&self.p2m, &mut *self.shadows, &mut self.reverse, slot, skipped)
        else {
            let (reads, leaves, tables) = (0, 0, 0);
            return Ok(Tally { reads, leaves, tables, reached: rest.run().last() });
        };
        let ended = stage2::clear(tables, rest, budget, emptied, &mut edit);
        let tally = ended.as_ref().map_or_else(|stopped| stopped.tally, |tally| *tally);
        self.counts.reads = self.counts.reads.saturating_add(tally.reads);
        ended
    }
}
