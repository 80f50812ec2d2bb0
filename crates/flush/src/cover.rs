//! What one kind of cache must forget: exact runs, or everything.
//!
//! A [`Cover`] only ever widens: whatever was recorded stays covered, through
//! overflow, merging and repetition. Up to 32 separate runs are kept exactly, which
//! is as many as a batch of 32 grants can need, each with the size of its leaves.

use arrayvec::ArrayVec;

use crate::{
    Gfn, Run,
    sorted::{MOST, sort},
};

/// How many separate runs a cover keeps exactly.
pub(crate) const RUNS: usize = MOST;

/// Fewer runs than this are compared with each other: buckets are not worth their while.
const FEW: usize = 12;

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
    /// These runs: at least one, sorted, none overlapping. Those that touch have leaves
    /// of different sizes.
    Runs(&'a [Run]),
    /// Every frame of the domain.
    Everything,
}

/// What one kind of cache must forget.
#[derive(Debug, PartialEq, Eq)]
pub struct Cover {
    runs: ArrayVec<Run, RUNS>,
    /// The order of the largest leaf of every run, as long as `orders` is empty.
    order: u8,
    /// The order of the largest leaf of each run, if they are not all the same.
    orders: ArrayVec<u8, RUNS>,
    everything: bool,
    depth: Depth,
    change: Change,
    /// What a run has to be like for [`note`](Self::note) to change nothing but the runs.
    alike: Manner,
    /// How many runs, from the first on, are in order. Those that were noted need not be until
    /// [`settle`](Self::settle).
    sorted: usize,
}

/// Order, depth and change of a run in one word; all zero stands for none.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Manner(u32);

impl Manner {
    pub(crate) const NONE: Self = Self(0);
    const TABLES: u32 = 1 << 8;
    const MODIFIED: u32 = 1 << 9;
    const SOME: u32 = 1 << 10;

    #[inline]
    pub(crate) const fn new(order: u8, depth: Depth, change: Change) -> Self {
        let depth = match depth {
            Depth::Leaves => 0,
            Depth::Tables => Self::TABLES,
        };
        let change = match change {
            Change::Added => 0,
            Change::Modified => Self::MODIFIED,
        };
        Self(Self::SOME | change | depth | order as u32)
    }

    const fn order(self) -> u8 {
        self.0 as u8
    }

    const fn depth(self) -> Depth {
        if self.0 & Self::TABLES != 0 { Depth::Tables } else { Depth::Leaves }
    }

    const fn change(self) -> Change {
        if self.0 & Self::MODIFIED != 0 { Change::Modified } else { Change::Added }
    }
}

impl Clone for Cover {
    fn clone(&self) -> Self {
        let mut clone = Self::new();
        clone.clone_from(self);
        clone
    }

    /// Copies as many runs as there are, and not all of the room for them.
    fn clone_from(&mut self, other: &Self) {
        let Self { runs, order, orders, everything, depth, change, alike, sorted } = other;
        self.runs.clear();
        self.runs.extend(runs.iter().copied());
        self.orders.clear();
        self.orders.extend(orders.iter().copied());
        (self.order, self.everything) = (*order, *everything);
        (self.depth, self.change) = (*depth, *change);
        (self.alike, self.sorted) = (*alike, *sorted);
    }
}

impl Default for Cover {
    fn default() -> Self {
        Self::NOTHING
    }
}

impl Cover {
    /// The cover of no frame.
    pub const NOTHING: Self = Self::new();

    /// [`NOTHING`](Self::NOTHING), made in place: a constant is copied with all of its room.
    #[inline]
    pub(crate) const fn new() -> Self {
        Self {
            runs: ArrayVec::new_const(),
            order: 0,
            orders: ArrayVec::new_const(),
            everything: false,
            depth: Depth::Leaves,
            change: Change::Added,
            alike: Manner::new(0, Depth::Leaves, Change::Added),
            sorted: 0,
        }
    }

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

    /// The order of the largest leaf of any run, as log2 of 4 KiB frames; 0 if there
    /// are no runs.
    #[must_use]
    pub fn order(&self) -> u8 {
        self.orders.iter().copied().max().unwrap_or(self.order)
    }

    /// The runs, each with the order of its largest leaf; none of nothing and of everything.
    ///
    /// An invalidation smaller than a cached leaf need not drop it (VT-d 6.5.2.3).
    pub fn runs(&self) -> impl DoubleEndedIterator<Item = (Run, u8)> + Clone {
        let order = |at: usize| self.orders.get(at).copied().unwrap_or(self.order);
        self.runs.iter().enumerate().map(move |(at, run)| (*run, order(at)))
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
        self.settle();
        self.depth = self.depth.max(depth);
        self.change = self.change.max(change);
        if order != self.order || !self.orders.is_empty() {
            self.insert_unlike(run, order);
        } else {
            // Grants are mostly given back in ascending order: try the end first.
            match self.runs.last_mut() {
                Some(last) if last.is_right_before(run) => *last = last.until(run),
                Some(_) | None => self.insert(run),
            }
        }
        self.compare();
    }

    /// As [`record`](Self::record), for a run that may come to its place later: before the
    /// cover is looked at, it has to be [settled](Self::settle).
    #[inline]
    pub(crate) fn note(&mut self, run: Run, manner: Manner) {
        if self.alike == manner {
            let in_order = match self.runs.last_mut() {
                Some(last) if last.is_right_before(run) => {
                    *last = last.until(run);
                    return;
                }
                Some(last) => last.last() < run.first(),
                None => true,
            };
            let count = self.runs.len();
            if self.runs.try_push(run).is_ok() {
                if in_order && self.sorted == count {
                    self.sorted = self.runs.len();
                }
                return;
            }
        }
        self.add(run, manner);
    }

    /// As [`record`](Self::record).
    #[inline(never)]
    pub(crate) fn add(&mut self, run: Run, manner: Manner) {
        if self.is_nothing() {
            self.begin(run, manner);
        } else {
            self.record(run, manner.order(), manner.depth(), manner.change());
        }
    }

    /// As [`record`](Self::record), where nothing was recorded yet.
    fn begin(&mut self, run: Run, manner: Manner) {
        (self.order, self.depth, self.change) = (manner.order(), manner.depth(), manner.change());
        (self.alike, self.sorted) = (manner, 1);
        self.runs.extend([run]);
    }

    /// Puts the runs that were noted in their places. It is as if each had been
    /// [recorded](Self::record) when it was noted.
    #[inline]
    pub(crate) fn settle(&mut self) {
        if self.sorted != self.runs.len() {
            self.order_noted();
        }
    }

    /// Runs are noted out of order only while their leaves are alike. One alone is inserted.
    #[inline(never)]
    fn order_noted(&mut self) {
        if self.runs.len() - self.sorted == 1
            && let Some(last) = self.runs.pop()
        {
            self.insert(last);
            self.sorted = self.runs.len();
        } else {
            self.sort();
        }
    }

    /// Sorts all, and joins those that touch.
    #[inline(never)]
    fn sort(&mut self) {
        if self.runs.len() < FEW || !self.sort_pages() {
            self.runs.sort_unstable_by_key(|run| run.first());
            self.join();
        }
        self.sorted = self.runs.len();
    }

    /// As [`sort`](Self::sort), if every run is a single page. If not, it does nothing.
    #[inline]
    fn sort_pages(&mut self) -> bool {
        let base = self.runs.first().map_or(0, |run| run.first().get());
        let (mut unlike, mut wide) = (0, 0);
        for run in &self.runs {
            let (first, last) = (run.first().get(), run.last().get());
            (unlike, wide) = (unlike | (first ^ base), wide | (first ^ last));
        }
        if wide != 0 {
            return false;
        }
        let mut sorted = [0; MOST + 1];
        sort(self.runs.iter().map(|run| run.first().get()), unlike, &mut sorted);
        let mut near = false;
        for (run, pair) in self.runs.iter_mut().zip(sorted.windows(2)) {
            let &[before, frame] = pair else { break };
            *run = Run::single(Gfn::new(frame));
            near |= frame - before <= 1;
        }
        if near {
            self.join();
        }
        true
    }

    /// Makes one of those that touch, of runs that begin in order.
    fn join(&mut self) {
        let mut end = 0;
        for at in 1..self.runs.len() {
            let (last, run) = (self.runs[end], self.runs[at]);
            if last.is_left_of(run) {
                end += 1;
                self.runs[end] = run;
            } else {
                self.runs[end] = last.hull(run);
            }
        }
        self.runs.truncate(end + 1);
    }

    /// Sets what a run has to be like to be noted.
    #[inline]
    fn compare(&mut self) {
        let plain = self.orders.is_empty() && !self.everything;
        let alike = Manner::new(self.order, self.depth, self.change);
        self.alike = if plain { alike } else { Manner::NONE };
        self.sorted = self.runs.len();
    }

    /// Adds every frame of the domain, with [`Change::Modified`].
    pub fn everything(&mut self, depth: Depth) {
        self.depth = self.depth.max(depth);
        self.change = Change::Modified;
        self.everything = true;
        self.runs.clear();
        self.order = 0;
        self.orders.clear();
        (self.alike, self.sorted) = (Manner::NONE, 0);
    }

    /// Forgets what was recorded, once hardware has forgotten it.
    pub(crate) fn clear(&mut self) {
        self.runs.clear();
        self.order = 0;
        self.orders.clear();
        self.everything = false;
        self.depth = Depth::Leaves;
        self.change = Change::Added;
        self.compare();
    }

    /// Adds all that `other` covers.
    pub fn merge(&mut self, other: &Self) {
        let Self { runs: _, order: _, orders: _, everything, depth, change, alike: _, sorted: _ } =
            other;
        if *everything {
            self.everything(*depth);
        }
        for (run, order) in other.runs() {
            self.record(run, order, *depth, *change);
        }
    }

    /// Adds a run with leaves like those of all runs before it.
    #[inline(never)]
    fn insert(&mut self, run: Run) {
        if self.everything {
            return;
        }
        if self.runs.last().is_none_or(|last| last.last() < run.first() && !last.touches(run))
            && self.runs.try_push(run).is_ok()
        {
            return;
        }
        // All runs before `at` begin before the new one, and none after it does.
        let before = |own: &Run| own.first() <= run.first();
        let at = self.runs.partition_point(before);
        // No two of them touch, so of those before it only the last one can touch it.
        let below = at.checked_sub(1).filter(|low| self.runs[*low].touches(run));
        let touched = self.runs[at..].iter().take_while(|own| own.touches(run)).count();
        let (start, end) = (below.unwrap_or(at), at.saturating_add(touched));
        if start < end {
            let melted = &self.runs[start..end];
            let hull = melted.iter().fold(run, |hull, own| hull.hull(*own));
            self.runs[start] = hull;
            if end - start > 1 {
                self.runs.drain(start + 1..end);
            }
        } else if self.runs.try_insert(at, run).is_err() {
            self.insert_unlike(run, self.order);
        }
    }

    /// Adds a run whose leaves are of another size, or for which there is no room.
    #[cold]
    fn insert_unlike(&mut self, mut run: Run, mut order: u8) {
        if self.everything {
            return;
        }
        if self.orders.is_empty() {
            self.orders.extend(self.runs.iter().map(|_| self.order));
        }
        // Every run from `start` to before `end` shares a frame with the new one and melts
        // into it.
        let mut start = self.runs.partition_point(|own| own.last() < run.first());
        let mut end = start;
        while let Some(own) = self.runs.get(end).filter(|own| own.first() <= run.last()) {
            run = run.hull(*own);
            order = order.max(self.orders[end]);
            end += 1;
        }
        // So do the neighbours on either side, if their leaves are as large: a page beside
        // a large leaf must not be rounded up to the size of that leaf.
        if start > 0 && self.orders[start - 1] == order && self.runs[start - 1].touches(run) {
            start -= 1;
            run = run.hull(self.runs[start]);
        }
        if end < self.runs.len() && self.orders[end] == order && self.runs[end].touches(run) {
            run = run.hull(self.runs[end]);
            end += 1;
        }
        if end > start {
            self.runs.drain(start + 1..end);
            self.orders.drain(start + 1..end);
            (self.runs[start], self.orders[start]) = (run, order);
        } else if self.runs.try_insert(start, run).is_ok() {
            self.orders.insert(start, order);
        } else {
            self.widen(start, run, order);
        }
        // Equal covers are kept in equal form.
        if let Some(first) = self.orders.first().copied()
            && self.orders.iter().all(|order| *order == first)
        {
            self.order = first;
            self.orders.clear();
        }
    }

    /// Makes room for `run`, which belongs at `at`, by closing the smallest gap.
    fn widen(&mut self, at: usize, run: Run, order: u8) {
        // Frames added by making one run of two: those between, and what rounding small
        // leaves up to the size of the large ones can add at the end.
        let gap = |low: (Run, u8), high: (Run, u8)| {
            let rounding = if low.1 == high.1 {
                0
            } else {
                Run::block(low.0.first(), low.1.max(high.1)).pages()
            };
            (high.0.first().get() - low.0.last().get()).saturating_add(rounding)
        };
        let own = |at: usize| Some((*self.runs.get(at)?, *self.orders.get(at)?));
        let between = |low: usize, high: usize| Some((gap(own(low)?, own(high)?), low));
        let below = at.checked_sub(1).and_then(|low| Some((gap(own(low)?, (run, order)), low)));
        let above = own(at).map(|high| (gap((run, order), high), at));
        let inside = (1..self.runs.len())
            // The pair around the new run is no longer a pair of neighbours.
            .filter(|high| *high != at)
            .filter_map(|high| between(high - 1, high))
            .min();
        let beside = [below, above].into_iter().flatten().min();
        match (inside, beside) {
            (Some((gap, low)), Some((nearest, _))) if gap < nearest => {
                let (high, large) = (self.runs.remove(low + 1), self.orders.remove(low + 1));
                self.runs[low] = self.runs[low].hull(high);
                self.orders[low] = self.orders[low].max(large);
                let at = if low < at { at - 1 } else { at };
                self.runs.insert(at, run);
                self.orders.insert(at, order);
            }
            (_, Some((_, own))) => {
                self.runs[own] = self.runs[own].hull(run);
                self.orders[own] = self.orders[own].max(order);
            }
            (_, None) => self.everything(self.depth),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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

    /// Runs that touch, overlap and lie apart, of pages mostly, so many that room ends.
    #[test]
    fn what_is_noted_ends_like_what_is_recorded_wherever_it_is_settled() {
        let mut state = 0x9e37_79b9_7f4a_7c15_u64;
        let mut next = move || {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            state
        };
        for _ in 0..2000 {
            let (mut noted, mut recorded) = (Cover::NOTHING, Cover::NOTHING);
            let (spread, pages) = ([20, 100, 4000][next() as usize % 3], next() % 2 == 0);
            for _ in 0..next() % 80 {
                let first = next() % spread;
                let wide = !pages && next() % 4 == 0;
                let run = run(first, first + if wide { next() % 4 } else { 0 });
                let order = if next() % 200 == 0 { 9 } else { 0 };
                let depth = if next() % 100 == 0 { Depth::Tables } else { Depth::Leaves };
                let change = if next() % 50 == 0 { Change::Added } else { Change::Modified };
                noted.note(run, Manner::new(order, depth, change));
                recorded.record(run, order, depth, change);
                match next() % 40 {
                    0 => noted.settle(),
                    1 => noted = noted.clone(),
                    2 if next() % 40 == 0 => {
                        noted.everything(Depth::Leaves);
                        recorded.everything(Depth::Leaves);
                    }
                    _ => {}
                }
                assert!(!noted.is_nothing());
            }
            noted.settle();
            assert_eq!(noted, recorded);
        }
    }

    #[track_caller]
    fn check_orders(inserted: &[(u64, u64, u8)], expected: &[(u64, u64, u8)]) {
        let mut cover = Cover::NOTHING;
        for &(first, last, order) in inserted {
            cover.record(run(first, last), order, Depth::Leaves, Change::Modified);
        }
        let runs: Vec<_> =
            cover.runs().map(|(run, order)| (run.first().get(), run.last().get(), order)).collect();
        assert_eq!(runs, expected);
        assert_eq!(cover.order(), expected.iter().map(|run| run.2).max().unwrap_or(0));
    }

    #[test]
    fn a_page_beside_a_large_leaf_keeps_its_own_size_and_a_page_inside_is_part_of_it() {
        let large = (512, 1023, 9);
        check_orders(
            &[(511, 511, 0), large, (1024, 1024, 0)],
            &[(511, 511, 0), large, (1024, 1024, 0)],
        );
        check_orders(
            &[large, (1024, 1024, 0), (511, 511, 0)],
            &[(511, 511, 0), large, (1024, 1024, 0)],
        );
        check_orders(&[large, (1024, 1535, 9)], &[(512, 1535, 9)]);
        check_orders(&[(1024, 1535, 9), large], &[(512, 1535, 9)]);
        check_orders(&[large, (600, 600, 0)], &[large]);
        check_orders(&[(600, 600, 0), (700, 701, 0), large], &[large]);
        check_orders(&[large, (1536, 2047, 9), (1024, 1535, 9)], &[(512, 2047, 9)]);
        check_orders(
            &[large, (1536, 2047, 9), (1024, 1535, 0)],
            &[large, (1024, 1535, 0), (1536, 2047, 9)],
        );
        // A table's span holds large leaves: its ends are aligned at least as far.
        check_orders(&[large, (0, 0x3ffff, 0)], &[(0, 0x3ffff, 9)]);
    }

    #[test]
    fn closing_a_gap_keeps_the_larger_leaf_and_prefers_runs_of_like_leaves() {
        let mut cover = Cover::NOTHING;
        let mut record = |first, last, order| {
            cover.record(run(first, last), order, Depth::Leaves, Change::Modified);
        };
        record(512, 1023, 9);
        record(1024, 1024, 0);
        for index in 1..=30 {
            record(index * 10_000, index * 10_000, 0);
        }
        record(300_050, 300_050, 0);
        let runs: Vec<_> = cover.runs().collect();
        assert_eq!(runs.len(), RUNS);
        assert_eq!(runs[..2], [(run(512, 1023), 9), (run(1024, 1024), 0)], "still apart");
        assert_eq!(runs[31], (run(300_000, 300_050), 0));
    }

    #[test]
    fn runs_of_unlike_leaves_become_one_of_the_larger_where_nothing_else_is_near() {
        let mut cover = Cover::NOTHING;
        let mut record = |first, last, order| {
            cover.record(run(first, last), order, Depth::Leaves, Change::Modified);
        };
        record(500, 500, 0);
        record(512, 1023, 9);
        (1..=31).for_each(|index| record(index * 10_000, index * 10_000, 0));
        let first = cover.runs().next();
        assert_eq!((first, cover.runs().count()), (Some((run(500, 1023), 9)), RUNS));
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
