//! Whose turn it is: orders of the steps, those with few interruptions first.
//!
//! A run asks a [`Turns`] at each point where more than one actor could go on, and goes as
//! it is told. [`Search`] tells it all ways that interrupt nobody, then all that interrupt
//! somebody once, and so on: most bugs need very few. Where not all ways of one such number
//! fit into the bound, some are drawn; then come ways at random.

use std::{
    cell::{Cell, RefCell},
    rc::Rc,
};

/// What another way than the first costs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Cost {
    /// Nothing: somebody has to be chosen.
    Free,
    /// An actor is left in the middle of what it could go on with.
    Interrupts,
}

/// An answer, out of how many, and what another one would have cost.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Taken {
    choice: usize,
    count: usize,
    cost: Cost,
}

/// One way to go: the answers given, and how many there were to choose from.
#[derive(Clone, Debug, Default)]
pub(crate) struct Turns {
    planned: Vec<usize>,
    taken: RefCell<Vec<Taken>>,
    random: Option<Random>,
}

/// A way at random: beyond the plan an actor is interrupted once in so many points.
#[derive(Clone, Debug)]
struct Random {
    state: Draws,
    once_in: usize,
}

/// Numbers that look random, the same for the same seed.
#[derive(Clone, Debug)]
struct Draws(Cell<u64>);

impl Draws {
    fn new(seed: u64) -> Self {
        Self(Cell::new(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1))
    }

    /// A number below `bound`, which is not 0.
    fn below(&self, bound: usize) -> usize {
        let mut next = self.0.get();
        next ^= next << 13;
        next ^= next >> 7;
        next ^= next << 17;
        self.0.set(next);
        usize::try_from(next >> 33).unwrap_or(0) % bound
    }
}

impl Turns {
    /// As planned, and the first from then on.
    pub(crate) fn planned(planned: Vec<usize>) -> Self {
        Self { planned, ..Self::default() }
    }

    /// At random, the same for the same seed.
    pub(crate) fn random(seed: u64) -> Self {
        let state = Draws::new(seed);
        // A call has a handful of points, or hundreds: each should see a few turns.
        let once_in = 2 << state.below(6);
        Self { random: Some(Random { state, once_in }), ..Self::default() }
    }

    /// Which of `count` ways, of which the first is to go on as before.
    pub(crate) fn choose(&self, count: usize, cost: Cost) -> usize {
        if count < 2 {
            return 0;
        }
        let place = self.taken.borrow().len();
        let choice = match (self.planned.get(place), &self.random) {
            (Some(planned), _) => (*planned).min(count - 1),
            (None, None) => 0,
            (None, Some(Random { state, once_in })) => match cost {
                Cost::Free => state.below(count),
                Cost::Interrupts if state.below(*once_in) == 0 => state.below(count),
                Cost::Interrupts => 0,
            },
        };
        self.taken.borrow_mut().push(Taken { choice, count, cost });
        choice
    }

    /// The answers that were given.
    pub(crate) fn taken(&self) -> Vec<usize> {
        self.taken.borrow().iter().map(|taken| taken.choice).collect()
    }
}

/// A way that was not gone yet: as another one up to a place, and then otherwise.
#[derive(Clone, Debug)]
struct Branch {
    taken: Rc<[usize]>,
    place: usize,
    choice: usize,
}

impl Branch {
    fn plan(&self) -> Vec<usize> {
        let mut plan = self.taken[..self.place].to_vec();
        plan.push(self.choice);
        plan
    }
}

/// All ways, those with few interruptions first, up to a bound; then some at random.
#[derive(Debug)]
pub(crate) struct Search {
    /// Ways with as many interruptions as those that are gone now.
    open: Vec<Branch>,
    /// Ways with one more.
    later: Vec<Branch>,
    /// How many that is.
    interruptions: u32,
    draws: Draws,
    limit: u64,
    random: u64,
    seed: u64,
    /// Ways gone so far.
    pub(crate) runs: u64,
    /// Every way with at most so many interruptions was gone.
    pub(crate) within: Option<u32>,
    /// Every way was gone.
    pub(crate) complete: bool,
}

impl Search {
    pub(crate) fn new(limit: u64, random: u64, seed: u64) -> Self {
        Self {
            open: Vec::new(),
            later: Vec::new(),
            interruptions: 0,
            draws: Draws::new(seed),
            limit,
            random,
            seed,
            runs: 0,
            within: None,
            complete: false,
        }
    }

    /// The next way to go.
    pub(crate) fn next(&mut self) -> Option<Turns> {
        if self.complete {
            return None;
        }
        if self.runs < self.limit {
            let plan = if self.runs == 0 { Vec::new() } else { self.draw()?.plan() };
            self.runs += 1;
            return Some(Turns::planned(plan));
        }
        if self.random == 0 {
            return None;
        }
        self.random -= 1;
        self.runs += 1;
        self.seed = self.seed.wrapping_add(1);
        Some(Turns::random(self.seed))
    }

    /// One of the ways that are open; any of them, since not all may be gone.
    fn draw(&mut self) -> Option<Branch> {
        (!self.open.is_empty()).then(|| self.open.swap_remove(self.draws.below(self.open.len())))
    }

    /// Notes how a way went, to find those that branch off from it.
    pub(crate) fn went(&mut self, turns: &Turns) {
        if turns.random.is_some() {
            return;
        }
        let taken: Rc<[usize]> = turns.taken().into();
        for (place, asked) in turns.taken.borrow().iter().enumerate().skip(turns.planned.len()) {
            let side = match asked.cost {
                Cost::Free => &mut self.open,
                Cost::Interrupts => &mut self.later,
            };
            let branch = |choice| Branch { taken: Rc::clone(&taken), place, choice };
            side.extend((1..asked.count).map(branch));
        }
        while self.open.is_empty() && !self.complete {
            self.within = Some(self.interruptions);
            self.interruptions += 1;
            self.open = std::mem::take(&mut self.later);
            self.complete = self.open.is_empty();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// All ways through choices of these sizes.
    fn ways(sizes: &[(usize, Cost)], limit: u64, random: u64) -> (Vec<Vec<usize>>, Search) {
        let mut search = Search::new(limit, random, 1);
        let mut ways = Vec::new();
        while let Some(turns) = search.next() {
            for (size, cost) in sizes {
                turns.choose(*size, *cost);
            }
            ways.push(turns.taken());
            search.went(&turns);
        }
        (ways, search)
    }

    #[test]
    fn every_way_is_gone_once_and_the_quiet_ones_first() {
        let sizes = [(2, Cost::Interrupts), (1, Cost::Free), (3, Cost::Interrupts)];
        let (found, search) = ways(&sizes, 100, 7);
        assert!(search.complete);
        assert_eq!(search.within, Some(2));
        let interrupts = |way: &Vec<usize>| way.iter().filter(|choice| **choice != 0).count();
        assert!(found.is_sorted_by_key(interrupts), "{found:?}");
        let mut found = found;
        found.sort();
        let expected = [[0, 0], [0, 1], [0, 2], [1, 0], [1, 1], [1, 2]];
        assert_eq!(found, expected);
    }

    #[test]
    fn what_costs_nothing_comes_before_what_interrupts() {
        let sizes = [(2, Cost::Interrupts), (3, Cost::Free)];
        let (found, search) = ways(&sizes, 3, 0);
        assert!(found.iter().all(|way| way[0] == 0), "{found:?}");
        assert_eq!((search.within, search.complete), (Some(0), false));
    }

    #[test]
    fn beyond_the_bound_ways_are_random_and_the_same_each_time() {
        let sizes = [(2, Cost::Interrupts); 20];
        let (found, search) = ways(&sizes, 10, 5);
        assert_eq!((found.len(), search.complete, search.within), (15, false, Some(0)));
        assert_eq!(ways(&sizes, 10, 5).0, found);
    }
}
