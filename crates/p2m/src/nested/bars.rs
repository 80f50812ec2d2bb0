//! Frames that an unfinished edit keeps shadows from showing anew.
//!
//! An edit that stops on its budget leaves a bar behind in [`Bars`]: *nothing shows a
//! frame of a bar anew*, so what was unmapped stays so until the edit goes on, however
//! fast the guest faults.

use flush::{Gfn, Run};

/// How many edits may be under way at once; one more makes the oldest go without.
const BARS: usize = 8;

/// The frames of an edit that was stopped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Bar {
    run: Run,
    /// Nothing shows a frame before this one; `None`: nor any other of the run.
    shown_from: Option<Gfn>,
}

/// The frames of all edits that were stopped, the latest last.
#[derive(Debug, Default)]
pub(crate) struct Bars([Option<Bar>; BARS]);

impl Bars {
    /// Whether some frame of `run` is barred.
    pub(crate) fn touch(&self, run: Run) -> bool {
        self.0.iter().flatten().any(|bar| overlap(bar.run, run))
    }

    /// Where a search for what shows `run` has to start; `None` if nothing does.
    pub(crate) fn shown_from(&self, run: Run) -> Option<Gfn> {
        let mut bars = self.0.iter().flatten();
        match bars.find(|bar| bar.run.contains(run.first())) {
            Some(Bar { shown_from: Some(from), .. }) => {
                Some(run.first().max(*from)).filter(|from| *from <= run.last())
            }
            Some(Bar { run: own, shown_from: None }) if own.last() < run.last() => next(own.last()),
            Some(_) => None,
            None => Some(run.first()),
        }
    }

    /// Bars `run`, of which nothing before `shown_from` is shown any more.
    pub(crate) fn put(&mut self, run: Run, shown_from: Option<Gfn>) {
        let new = Bar { run, shown_from };
        // Bars that overlap become one, which has no frame that neither had.
        let same = |bar: &&Bar| overlap(bar.run, run);
        let others = |bar: &&Bar| !overlap(bar.run, run);
        let old = self.0.iter().flatten();
        let new = old.clone().filter(same).fold(new, |new, old| new.and(*old));
        let excess = old.clone().filter(others).count().saturating_sub(BARS - 1);
        let all = old.filter(others).skip(excess).copied().chain([new]);
        let mut bars = [None; BARS];
        for (slot, bar) in bars.iter_mut().zip(all) {
            *slot = Some(bar);
        }
        self.0 = bars;
    }

    /// The edit of `run` is over. A bar around it stays, for that is another edit's.
    pub(crate) fn lift(&mut self, run: Run) {
        for slot in &mut self.0 {
            *slot = slot.and_then(|bar| bar.without(run));
        }
    }
}

impl Bar {
    fn and(self, other: Self) -> Self {
        let run = self.run.hull(other.run);
        // What is known of one that begins later says nothing of the frames before.
        let known = |bar: &Self| bar.run.first() == run.first();
        let ends = [self, other].map(|bar| if known(&bar) { bar.end() } else { Some(run.first()) });
        let [one, two] = ends;
        let shown_from = one.zip(two).map(|(one, two)| one.max(two));
        Self { run, shown_from: shown_from.filter(|from| *from <= run.last()) }
    }

    /// The first frame that may be shown, in the run or right after it.
    fn end(&self) -> Option<Gfn> {
        self.shown_from.or(next(self.run.last()))
    }

    fn without(self, run: Run) -> Option<Self> {
        let own = self.run;
        if !overlap(own, run) {
            return Some(self);
        }
        let rest = match (run.first() <= own.first(), own.last() <= run.last()) {
            (true, true) => None,
            (true, false) => next(run.last()).and_then(|first| Run::new(first, own.last())),
            (false, true) => {
                let last = run.first().get().checked_sub(1).map(Gfn::new);
                last.and_then(|last| Run::new(own.first(), last))
            }
            (false, false) => Some(own),
        }?;
        let shown_from = self.shown_from.map(|from| from.max(rest.first()));
        Some(Self { run: rest, shown_from: shown_from.filter(|from| *from <= rest.last()) })
    }
}

/// The frame after this one.
pub(crate) fn next(gfn: Gfn) -> Option<Gfn> {
    gfn.get().checked_add(1).map(Gfn::new)
}

/// Whether two runs have a frame in common.
pub(crate) fn overlap(one: Run, other: Run) -> bool {
    one.first() <= other.last() && other.first() <= one.last()
}

#[cfg(test)]
#[path = "bars_tests.rs"]
mod tests;
