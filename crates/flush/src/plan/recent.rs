//! What a domain's caches forgot last, which is not worth keeping.
//!
//! A [`Recent`] remembers one run of pages: the last that hardware was told to forget, with
//! what it continued. Whoever gives pages back in ascending order makes the neighbours below
//! the next batch dead, and a planner that knows need not spare them.

use core::sync::atomic::{AtomicU64, Ordering::Relaxed};

use crate::{Change, Cover, Extent, Gfn, Run};

/// The pages of one domain that were flushed last and not mapped since.
///
/// It decides what a flush costs and never what it covers. CPUs that note at the same time
/// may leave a run that none of them meant: that wastes time until a page of it is mapped, or
/// pages apart from it go.
#[derive(Debug)]
pub struct Recent {
    first: AtomicU64,
    last: AtomicU64,
}

impl Default for Recent {
    fn default() -> Self {
        Self::new()
    }
}

impl Recent {
    /// None.
    #[must_use]
    pub const fn new() -> Self {
        Self { first: AtomicU64::new(u64::MAX), last: AtomicU64::new(0) }
    }

    /// Hardware was told of `cover`: its pages went, or were put where nothing was.
    pub fn note(&self, cover: &Cover) {
        let before = self.run();
        match (cover.extent(), cover.change()) {
            (Extent::Nothing, _) => {}
            (Extent::Everything, _) => self.set(None),
            (Extent::Runs(_), Change::Added) => self.set(self.apart_from(cover)),
            (Extent::Runs(runs), Change::Modified) => {
                let joined = |run: &Run| match before.filter(|before| before.touches(*run)) {
                    Some(before) => before.hull(*run),
                    None => *run,
                };
                self.set(runs.last().map(joined));
            }
        }
    }

    /// The run, if no page of `cover` is in it.
    pub(super) fn apart_from(&self, cover: &Cover) -> Option<Run> {
        let own = self.run()?;
        cover.runs().all(|(run, _)| common(own, run) == 0).then_some(own)
    }

    fn run(&self) -> Option<Run> {
        Run::new(Gfn::new(self.first.load(Relaxed)), Gfn::new(self.last.load(Relaxed)))
    }

    fn set(&self, run: Option<Run>) {
        let (first, last) = run.map_or((u64::MAX, 0), |run| (run.first().get(), run.last().get()));
        self.first.store(first, Relaxed);
        self.last.store(last, Relaxed);
    }
}

/// How many pages lie in both.
pub(super) fn common(one: Run, other: Run) -> u64 {
    let both = Run::new(one.first().max(other.first()), one.last().min(other.last()));
    both.map_or(0, Run::pages)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Depth;

    fn run(first: u64, last: u64) -> Run {
        Run::new(Gfn::new(first), Gfn::new(last)).unwrap()
    }

    fn cover(runs: &[(u64, u64)], change: Change) -> Cover {
        let mut cover = Cover::NOTHING;
        for (first, last) in runs {
            cover.record(run(*first, *last), 0, Depth::Leaves, change);
        }
        cover
    }

    #[test]
    fn the_last_run_is_kept_with_what_it_continues_until_a_page_of_it_is_mapped() {
        let recent = Recent::new();
        assert_eq!(recent.run(), None);
        let check = |runs: &[(u64, u64)], change, expected: Option<(u64, u64)>| {
            recent.note(&cover(runs, change));
            let expected = expected.map(|(first, last)| run(first, last));
            assert_eq!(recent.run(), expected, "after {runs:?}");
        };
        use Change::{Added, Modified};
        check(&[(40, 71)], Modified, Some((40, 71)));
        check(&[(72, 103)], Modified, Some((40, 103)));
        check(&[(300, 300)], Added, Some((40, 103)));
        check(&[], Modified, Some((40, 103)));
        check(&[(7, 7), (500, 503)], Modified, Some((500, 503)));
        check(&[(499, 499), (503, 503)], Added, None);
        check(&[(5, 5)], Modified, Some((5, 5)));
        let mut everything = Cover::NOTHING;
        everything.everything(Depth::Tables);
        recent.note(&everything);
        assert_eq!(recent.run(), None);
    }

    #[test]
    fn pages_in_both_runs_are_counted_at_either_end_of_the_space() {
        for (one, other, expected) in [
            ((0, 9), (9, 12), 1),
            ((0, 9), (10, 12), 0),
            ((3, 5), (0, u64::MAX), 3),
            ((u64::MAX, u64::MAX), (5, u64::MAX), 1),
        ] {
            let (one, other) = (run(one.0, one.1), run(other.0, other.1));
            assert_eq!([common(one, other), common(other, one)], [expected; 2]);
        }
    }
}
