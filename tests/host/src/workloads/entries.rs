//! Which entries a unit holds that a device goes on using: what a flush can lose.
//!
//! [`Entries`] are the leaves used last, up to the size of a unit's cache, that are still
//! mapped. Between two batches the device uses all of them again, so that what a flush
//! took is back before the next one: each policy then finds the same entries.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use flush::{Gfn, Run, plan::LiveEntries};

use super::Leaf;

/// The entries that are in use.
#[derive(Debug)]
pub struct Entries {
    capacity: usize,
    /// First page to order and age.
    held: BTreeMap<u64, (u8, u64)>,
    /// First pages and ages, oldest first; only those that `held` confirms count.
    ages: VecDeque<(u64, u64)>,
    clock: u64,
}

impl Entries {
    /// None, with room for `capacity`.
    #[must_use]
    pub const fn new(capacity: usize) -> Self {
        Self { capacity, held: BTreeMap::new(), ages: VecDeque::new(), clock: 0 }
    }

    /// The device uses `leaf`; the entry used longest ago makes room.
    pub fn touch(&mut self, leaf: Leaf) {
        self.clock += 1;
        self.held.insert(leaf.first.get(), (leaf.order, self.clock));
        self.ages.push_back((leaf.first.get(), self.clock));
        while self.held.len() > self.capacity {
            let Some((first, age)) = self.ages.pop_front() else { break };
            if self.held.get(&first).is_some_and(|(_, own)| *own == age) {
                self.held.remove(&first);
            }
        }
    }

    /// `leaf` is not mapped any more.
    pub fn forget(&mut self, leaf: Leaf) {
        let gone: Vec<u64> = self.in_run(leaf.run()).collect();
        for first in gone {
            self.held.remove(&first);
        }
    }

    /// First pages of the entries that map a page of `run`.
    fn in_run(&self, run: Run) -> impl Iterator<Item = u64> {
        let (first, last) = (run.first(), run.last());
        // One that begins before the run may reach into it.
        let below = self.held.range(..first.get()).next_back();
        let reaches = |(start, (order, _)): &(&u64, &(u8, u64))| {
            Run::block(Gfn::new(**start), *order).contains(first)
        };
        let inside = self.held.range(first.get()..=last.get());
        below.filter(reaches).into_iter().chain(inside).map(|(start, _)| *start)
    }

    /// Adds the first pages of the entries that a flush of `run` takes.
    pub fn lose(&self, run: Run, lost: &mut BTreeSet<u64>) {
        lost.extend(self.in_run(run));
    }
}

impl LiveEntries for Entries {
    /// What changed is not held any more, so it needs no subtracting.
    fn within(&self, run: Run, _changed: u64) -> u64 {
        if run == Run::ALL { self.held.len() as u64 } else { self.in_run(run).count() as u64 }
    }

    fn of_unit(&self) -> u64 {
        self.held.len() as u64
    }
}
