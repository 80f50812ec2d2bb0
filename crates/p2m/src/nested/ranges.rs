//! Edits of many canonical frames, a piece at a time.
//!
//! A piece is what one canonical leaf or gap spans, at least 512 frames where the range
//! has them. What shows it is unmapped and then it is edited, before the next piece is
//! looked at: so an edit that stops has done all that lies before its rest, and nested
//! guests are kept from no more than one piece at a time.

use flush::{Gfn, Gone, Run, Skipped};
use stage2::{
    Access, Budget, Emptied, Entry, Format, Leaf, Marks, Rest, Sink, Stop, Stopped, TableMemory,
    Tally,
};

use super::{
    Nested,
    bars::next,
    unmap::{piece, spend},
};
use crate::{record::Walkers, table::P2m};

/// The sink of a whole range, lent to the edit of one piece.
struct Lent<'l, S>(&'l mut S);

impl<'id, K: Walkers, S: Sink<'id, K>> Sink<'id, K> for Lent<'_, S> {
    fn left(&self) -> usize {
        self.0.left()
    }

    #[inline]
    fn marks(&self) -> Marks {
        self.0.marks()
    }

    fn take(&mut self, run: Run, leaf: Leaf, gone: Gone<'id, K>) {
        self.0.take(run, leaf, gone);
    }
}

impl<F: Format, M: TableMemory, K: Walkers> Nested<'_, F, M, K> {
    /// As [`P2m::restrict`]; what showed the frames is unmapped first, and comes back
    /// with the new rights.
    ///
    /// Costs one of the budget for each 512 frames and each leaf in shadow tables,
    /// besides what the canonical map reads. The tally counts canonical entries alone.
    ///
    /// # Errors
    ///
    /// As [`P2m::restrict`]; the rights before the rest are changed. After
    /// [`Stop::Budget`] no fill shows the next frames of the rest until an edit of them
    /// went on, or was [given up](Self::give_up).
    pub fn restrict(
        &mut self,
        rest: Rest,
        allowed: Access,
        budget: &mut Budget,
        skipped: &mut Skipped<'_>,
    ) -> Result<Tally, Stopped> {
        self.in_pieces(rest, budget, skipped, |p2m, rest, budget, skipped| {
            p2m.restrict(rest, allowed, budget, skipped)
        })
    }

    /// As [`P2m::clear_range`]; what showed the frames is unmapped first.
    ///
    /// Costs as much as [`restrict`](Self::restrict) does.
    ///
    /// # Errors
    ///
    /// As [`P2m::clear_range`]; what lies before the rest is cleared. After
    /// [`Stop::Budget`] as [`restrict`](Self::restrict).
    pub fn clear_range<'id>(
        &mut self,
        rest: Rest,
        budget: &mut Budget,
        emptied: Emptied,
        skipped: &mut Skipped<'id>,
        mut sink: impl Sink<'id, K>,
    ) -> Result<Tally, Stopped> {
        self.in_pieces(rest, budget, skipped, |p2m, rest, budget, skipped| {
            p2m.clear_range(rest, budget, emptied, skipped, Lent(&mut sink))
        })
    }

    fn in_pieces<'id>(
        &mut self,
        rest: Rest,
        budget: &mut Budget,
        skipped: &mut Skipped<'id>,
        mut edit: impl FnMut(
            &mut P2m<F, M, K>,
            Rest,
            &mut Budget,
            &mut Skipped<'id>,
        ) -> Result<Tally, Stopped>,
    ) -> Result<Tally, Stopped> {
        let run = rest.run();
        // What is refused as a whole is refused before its first piece.
        if !self.shadowed || !self.is_whole(run) {
            return edit(&mut self.p2m, rest, budget, skipped);
        }
        let (mut first, last) = (run.first(), run.last());
        let mut sum = Tally { reads: 0, leaves: 0, tables: 0, reached: first };
        loop {
            if budget.left() == 0 {
                return Err(stopped(first, last, Stop::Budget, sum));
            }
            let (piece, shown) = self.piece_at(first, last);
            if shown && let Err(stop) = self.unmap_showing(piece, budget, skipped) {
                return Err(stopped(first, last, stop, sum));
            }
            let ended = edit(&mut self.p2m, Rest::new(piece), budget, skipped);
            let tally = ended.as_ref().map_or_else(|stopped| stopped.tally, |tally| *tally);
            sum = add(sum, tally);
            if tally.leaves > 0 {
                self.note(skipped);
            }
            self.bars.lift(piece);
            if let Err(Stopped { rest, stop, .. }) = ended {
                if stop == Stop::Budget {
                    // Nothing of it is shown, and nothing will be.
                    self.bars.put(rest.run(), None);
                }
                return Err(stopped(rest.run().first(), last, stop, sum));
            }
            spend(budget);
            match next(piece.last()).filter(|next| *next <= last) {
                Some(next) => first = next,
                None => return Ok(sum),
            }
        }
    }

    /// Whether the canonical map has all frames of `run`, in whole pages.
    fn is_whole(&self, run: Run) -> bool {
        let geometry = self.p2m.tables().format.geometry();
        let page = |gfn: Gfn| geometry.span(stage2::Level::PAGE, gfn);
        geometry.space().covers(run)
            && page(run.first()).first() == run.first()
            && page(run.last()).last() == run.last()
    }

    /// What to edit next, and whether a shadow can show any of it.
    ///
    /// A canonical leaf is not split for the sake of a piece. Nothing shows an empty span:
    /// it never was mapped, or what showed it went before the mapping did.
    fn piece_at(&self, first: Gfn, last: Gfn) -> (Run, bool) {
        let small = piece(first, last);
        let Some(found) = stage2::lookup(self.p2m.tables(), first) else { return (small, true) };
        let large = Run::new(first, found.run.last().min(last)).unwrap_or(small);
        if large.last() < small.last() {
            return (small, true);
        }
        (large, found.entry != Entry::Empty)
    }
}

fn stopped(first: Gfn, last: Gfn, stop: Stop, tally: Tally) -> Stopped {
    let rest = Run::new(first, last).unwrap_or(Run::single(last));
    Stopped { rest: Rest::new(rest), stop, tally }
}

fn add(sum: Tally, tally: Tally) -> Tally {
    Tally {
        reads: sum.reads.saturating_add(tally.reads),
        leaves: sum.leaves.saturating_add(tally.leaves),
        tables: sum.tables.saturating_add(tally.tables),
        reached: tally.reached,
    }
}
