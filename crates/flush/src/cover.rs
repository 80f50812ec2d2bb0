//! What one kind of cache must forget: exact runs, or everything.
//!
//! A [`Cover`] only ever widens: whatever was recorded stays covered, through
//! overflow, merging and repetition. Up to 32 separate runs are kept exactly, which
//! is as many as a batch of 32 grants can need.

use arrayvec::ArrayVec;

use crate::Run;

/// How many separate runs a cover keeps exactly.
pub(crate) const RUNS: usize = 32;

/// How deep a cache must forget.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Depth {
    /// Final translations only: no table entry of the runs changed.
    Leaves,
    /// Cached table entries (walk caches) as well.
    Tables,
}

/// What happened to the entries, as far as the need for a flush goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Change {
    /// Every entry was not present before: only hardware that caches absence minds.
    Added,
    /// At least one present entry changed or went.
    Modified,
}

/// The frames of a [`Cover`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Extent<'a> {
    /// No frame.
    Nothing,
    /// These runs: sorted, apart from one another, at least one.
    Runs(&'a [Run]),
    /// Every frame of the domain.
    Everything,
}

/// What one kind of cache must forget.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Cover {
    runs: ArrayVec<Run, RUNS>,
    everything: bool,
    depth: Depth,
    change: Change,
    order: u8,
}

impl Default for Cover {
    fn default() -> Self {
        Self::NOTHING
    }
}

impl Cover {
    /// The cover of no frame.
    pub const NOTHING: Self = Self {
        runs: ArrayVec::new_const(),
        everything: false,
        depth: Depth::Leaves,
        change: Change::Added,
        order: 0,
    };

    /// Whether nothing has to be forgotten.
    #[must_use]
    #[inline]
    pub fn is_nothing(&self) -> bool {
        self.runs.is_empty() && !self.everything
    }

    /// The frames.
    #[must_use]
    pub fn extent(&self) -> Extent<'_> {
        if self.everything {
            Extent::Everything
        } else if self.runs.is_empty() {
            Extent::Nothing
        } else {
            Extent::Runs(&self.runs)
        }
    }

    /// The deepest depth recorded.
    #[must_use]
    pub fn depth(&self) -> Depth {
        self.depth
    }

    /// The widest change recorded.
    #[must_use]
    pub fn change(&self) -> Change {
        self.change
    }

    /// The order of the largest leaf recorded, as log2 of 4 KiB frames.
    ///
    /// An invalidation smaller than a cached leaf need not drop it (VT-d 6.5.2.3).
    #[must_use]
    pub fn order(&self) -> u8 {
        self.order
    }

    /// How many frames; `u64::MAX` for everything.
    #[must_use]
    pub fn pages(&self) -> u64 {
        match self.extent() {
            Extent::Nothing => 0,
            Extent::Runs(runs) => runs.iter().fold(0, |sum, run| sum.saturating_add(run.pages())),
            Extent::Everything => u64::MAX,
        }
    }

    /// Whether the cover makes a cache forget `run` to `depth`.
    #[must_use]
    pub fn covers(&self, run: Run, depth: Depth) -> bool {
        !self.is_nothing()
            && self.depth >= depth
            && (self.everything || self.runs.iter().any(|own| own.covers(run)))
    }

    /// Adds a run whose largest leaf has 2^`order` frames.
    #[inline]
    pub fn record(&mut self, run: Run, order: u8, depth: Depth, change: Change) {
        self.order = self.order.max(order);
        self.depth = self.depth.max(depth);
        self.change = self.change.max(change);
        if !self.everything {
            self.insert(run);
        }
    }

    /// Adds every frame of the domain, with [`Change::Modified`].
    pub fn everything(&mut self, depth: Depth) {
        self.depth = self.depth.max(depth);
        self.change = Change::Modified;
        self.everything = true;
        self.runs.clear();
    }

    /// Forgets what was recorded, once hardware has forgotten it.
    pub(crate) fn clear(&mut self) {
        self.runs.clear();
        self.everything = false;
        self.depth = Depth::Leaves;
        self.change = Change::Added;
        self.order = 0;
    }

    /// Adds all that `other` covers.
    pub fn merge(&mut self, other: &Self) {
        let Self { runs, everything, depth, change, order } = other;
        if *everything {
            self.everything(*depth);
        }
        for run in runs {
            self.record(*run, *order, *depth, *change);
        }
    }

    #[inline]
    fn insert(&mut self, run: Run) {
        // Grants are mostly given back in ascending order: try the end first.
        let room = !self.runs.is_full();
        match self.runs.last_mut() {
            Some(last) if last.first() <= run.first() && last.touches(run) => {
                *last = last.hull(run);
            }
            Some(last) if run.first() <= last.last() || !room => self.insert_anywhere(run),
            None | Some(_) => self.runs.push(run),
        }
    }

    fn insert_anywhere(&mut self, mut run: Run) {
        // All runs from `start` to before `end` touch the new one and melt into it.
        let start = self.runs.partition_point(|own| own.last() < run.first() && !own.touches(run));
        let mut end = start;
        while let Some(own) = self.runs.get(end).filter(|own| own.touches(run)) {
            run = run.hull(*own);
            end += 1;
        }
        if end > start {
            self.runs.drain(start + 1..end);
            self.runs[start] = run;
        } else if self.runs.try_insert(start, run).is_err() {
            self.widen(start, run);
        }
    }

    /// Makes room for `run`, which belongs at `at`, by closing the smallest gap.
    #[cold]
    fn widen(&mut self, at: usize, run: Run) {
        // Gaps between stored neighbours, and between the new run and its two.
        let gap = |low: &Run, high: &Run| high.first().get() - low.last().get();
        let below = at.checked_sub(1).map(|below| gap(&self.runs[below], &run));
        let above = self.runs.get(at).map(|above| gap(&run, above));
        let inside = self
            .runs
            .windows(2)
            .enumerate()
            // The pair around the new run is no longer a pair of neighbours.
            .filter(|(low, _)| low + 1 != at)
            .map(|(low, pair)| (gap(&pair[0], &pair[1]), low))
            .min();
        let beside = [below.map(|gap| (gap, at.wrapping_sub(1))), above.map(|gap| (gap, at))]
            .into_iter()
            .flatten()
            .min();
        match (inside, beside) {
            (Some((gap, low)), Some((nearest, _))) if gap < nearest => {
                let high = self.runs.remove(low + 1);
                self.runs[low] = self.runs[low].hull(high);
                let at = if low < at { at - 1 } else { at };
                self.runs.insert(at, run);
            }
            (_, Some((_, own))) => self.runs[own] = self.runs[own].hull(run),
            (_, None) => self.everything = true,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Gfn;

    extern crate std;
    use std::{collections::BTreeSet, vec::Vec};

    fn run(first: u64, last: u64) -> Run {
        Run::new(Gfn::new(first), Gfn::new(last)).unwrap()
    }

    #[track_caller]
    fn check(inserted: &[(u64, u64)], expected: &[(u64, u64)]) {
        let mut cover = Cover::NOTHING;
        for &(first, last) in inserted {
            cover.record(run(first, last), 0, Depth::Leaves, Change::Modified);
        }
        let expected: Vec<Run> = expected.iter().map(|&(first, last)| run(first, last)).collect();
        assert_eq!(cover.extent(), Extent::Runs(&expected));
    }

    #[test]
    fn touching_runs_merge_and_others_stay_exact() {
        check(&[(1, 1), (2, 2), (3, 3)], &[(1, 3)]);
        check(&[(3, 3), (2, 2), (1, 1)], &[(1, 3)]);
        check(&[(1, 1), (3, 3), (2, 2)], &[(1, 3)]);
        check(&[(1, 1), (5, 5), (3, 3)], &[(1, 1), (3, 3), (5, 5)]);
        check(&[(1, 1), (5, 5), (9, 9), (0, 8)], &[(0, 9)]);
        check(&[(4, 9), (5, 6)], &[(4, 9)]);
        check(&[(0, 1), (10, 11), (4, 5), (2, 3)], &[(0, 5), (10, 11)]);
        check(&[(u64::MAX, u64::MAX), (0, 0)], &[(0, 0), (u64::MAX, u64::MAX)]);
        check(&[(5, 5), (0, u64::MAX)], &[(0, u64::MAX)]);
    }

    #[test]
    fn thirty_two_scattered_runs_are_exact_and_the_next_closes_the_smallest_gap() {
        // Frames 0, 10, 20 .. with the gap between 150 and 153 the smallest.
        let mut cover = Cover::NOTHING;
        for index in (0..31).chain([100]) {
            let frame = if index == 100 { 153 } else { index * 10 };
            cover.record(Run::single(Gfn::new(frame)), 0, Depth::Leaves, Change::Modified);
        }
        assert_eq!(cover.pages(), 32);
        cover.record(Run::single(Gfn::new(1000)), 0, Depth::Leaves, Change::Modified);
        assert_eq!(cover.pages(), 35, "150..=153 became one run");
        cover.record(Run::single(Gfn::new(1002)), 0, Depth::Leaves, Change::Modified);
        assert_eq!(cover.pages(), 37, "1000..=1002 became one run");
        let Extent::Runs(runs) = cover.extent() else { panic!("still runs") };
        assert_eq!(runs.len(), RUNS);
        assert!(runs.windows(2).all(|pair| !pair[0].touches(pair[1])));
    }

    #[test]
    fn a_cover_never_forgets_a_frame() {
        // Pseudo-random runs against a set of frames, far beyond the room for runs.
        let mut state = 0x9e37_79b9_7f4a_7c15u64;
        let mut next = move || {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            state
        };
        for _ in 0..400 {
            let mut cover = Cover::NOTHING;
            let mut frames = BTreeSet::new();
            for count in 0..80 {
                let first = next() % 1500;
                let last = first + next() % 4;
                cover.record(run(first, last), 0, Depth::Leaves, Change::Modified);
                frames.extend(first..=last);
                let Extent::Runs(runs) = cover.extent() else { panic!("still runs") };
                assert!(
                    runs.windows(2).all(|pair| {
                        pair[0].last() < pair[1].first() && !pair[0].touches(pair[1])
                    })
                );
                assert!(
                    frames.iter().all(|frame| runs.iter().any(|r| r.contains(Gfn::new(*frame))))
                );
                if count < 32 {
                    assert_eq!(cover.pages(), frames.len() as u64, "exact while it fits");
                }
            }
        }
    }

    #[test]
    fn depth_change_and_order_only_widen_and_everything_absorbs() {
        let mut cover = Cover::NOTHING;
        cover.record(run(0, 511), 9, Depth::Tables, Change::Modified);
        cover.record(run(9, 9), 0, Depth::Leaves, Change::Added);
        assert_eq!(
            (cover.order(), cover.depth(), cover.change()),
            (9, Depth::Tables, Change::Modified)
        );
        cover.everything(Depth::Leaves);
        cover.record(run(1, 1), 0, Depth::Leaves, Change::Added);
        assert_eq!(cover.extent(), Extent::Everything);
        assert!(cover.covers(Run::ALL, Depth::Tables));

        let mut merged = Cover::NOTHING;
        merged.merge(&cover);
        assert_eq!(merged.extent(), Extent::Everything);
        assert_eq!(merged.depth(), Depth::Tables);
        merged.merge(&Cover::NOTHING);
        assert_eq!(merged.change(), Change::Modified);
        assert!(Cover::NOTHING.is_nothing() && !Cover::NOTHING.covers(run(0, 0), Depth::Leaves));
    }
}
