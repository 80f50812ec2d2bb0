//! Whose turn it is: every order of the actors' steps, one after the other.
//!
//! A run asks a [`Turns`] at each point where more than one actor could go on, and goes as
//! it is told. [`Search`] tells it all ways there are, up to a bound, then ways at random.

use std::cell::{Cell, RefCell};

/// One way to go: the answers given, and how many there were to choose from.
#[derive(Clone, Debug, Default)]
pub(crate) struct Turns {
    planned: Vec<usize>,
    taken: RefCell<Vec<(usize, usize)>>,
    /// Beyond the plan: always the first, or at random from here.
    random: Option<Cell<u64>>,
}

impl Turns {
    /// As planned, and the first from then on.
    pub(crate) fn planned(planned: Vec<usize>) -> Self {
        Self { planned, ..Self::default() }
    }

    /// At random, the same for the same seed.
    pub(crate) fn random(seed: u64) -> Self {
        let state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
        Self { random: Some(Cell::new(state)), ..Self::default() }
    }

    /// Which of `count` ways, of which the first is to go on as before.
    pub(crate) fn choose(&self, count: usize) -> usize {
        if count < 2 {
            return 0;
        }
        let place = self.taken.borrow().len();
        let choice = match (self.planned.get(place), &self.random) {
            (Some(planned), _) => (*planned).min(count - 1),
            (None, None) => 0,
            (None, Some(state)) => {
                let mut next = state.get();
                next ^= next << 13;
                next ^= next >> 7;
                next ^= next << 17;
                state.set(next);
                // Mostly on: a run with a turn at each point would be all turns at the start.
                let drawn = usize::try_from(next >> 33).unwrap_or(0);
                if drawn.is_multiple_of(4) { (drawn / 4) % count } else { 0 }
            }
        };
        self.taken.borrow_mut().push((choice, count));
        choice
    }

    /// The answers that were given.
    pub(crate) fn taken(&self) -> Vec<usize> {
        self.taken.borrow().iter().map(|(choice, _)| *choice).collect()
    }

    /// The plan of the next way, if there is one.
    fn next(&self) -> Option<Vec<usize>> {
        let taken = self.taken.borrow();
        let last = taken.iter().rposition(|(choice, count)| choice + 1 < *count)?;
        let mut planned: Vec<usize> = taken[..=last].iter().map(|(choice, _)| *choice).collect();
        planned[last] += 1;
        Some(planned)
    }
}

/// All ways, up to a bound, then some at random.
#[derive(Debug)]
pub(crate) struct Search {
    next: Option<Vec<usize>>,
    limit: u64,
    random: u64,
    seed: u64,
    /// Ways gone so far.
    pub(crate) runs: u64,
    /// Every way was gone.
    pub(crate) complete: bool,
}

impl Search {
    pub(crate) fn new(limit: u64, random: u64, seed: u64) -> Self {
        Self { next: Some(Vec::new()), limit, random, seed, runs: 0, complete: false }
    }

    /// The next way to go.
    pub(crate) fn next(&mut self) -> Option<Turns> {
        if let Some(planned) = self.next.take().filter(|_| self.runs < self.limit) {
            self.runs += 1;
            return Some(Turns::planned(planned));
        }
        if self.complete || self.random == 0 {
            return None;
        }
        self.random -= 1;
        self.runs += 1;
        self.seed = self.seed.wrapping_add(1);
        Some(Turns::random(self.seed))
    }

    /// Notes how a way went, to find the next one.
    pub(crate) fn went(&mut self, turns: &Turns) {
        if turns.random.is_none() {
            self.next = turns.next();
            self.complete = self.next.is_none();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// All ways through choices of these sizes.
    fn ways(sizes: &[usize], limit: u64, random: u64) -> (Vec<Vec<usize>>, bool) {
        let mut search = Search::new(limit, random, 1);
        let mut ways = Vec::new();
        while let Some(turns) = search.next() {
            for size in sizes {
                turns.choose(*size);
            }
            ways.push(turns.taken());
            search.went(&turns);
        }
        (ways, search.complete)
    }

    #[test]
    fn every_way_is_gone_once() {
        let (found, complete) = ways(&[2, 1, 3], 100, 7);
        let expected = vec![vec![0, 0], vec![0, 1], vec![0, 2], vec![1, 0], vec![1, 1], vec![1, 2]];
        assert_eq!((found, complete), (expected, true));
    }

    #[test]
    fn beyond_the_bound_ways_are_random_and_the_same_each_time() {
        let (found, complete) = ways(&[2; 20], 10, 5);
        assert_eq!((found.len(), complete), (15, false));
        assert_eq!(ways(&[2; 20], 10, 5).0, found);
    }
}
