//! What else gives pages back: windows, channels, toolstacks, balloons.
//!
//! Windows and channels are grants mapped by programs; a toolstack maps pages of the
//! domains it builds or saves; a balloon gives up pages of the domain's own memory.

use std::collections::BTreeSet;

use flush::Gfn;

use super::{
    Leaf, Step, Steps, Workload,
    frames::{Choices, FIRST, Pool, SECTION},
};

/// W4: windows of a few sizes, each on fresh numbers; a resized one is mapped anew before
/// the old one goes, in two parts.
pub(super) fn windows() -> Workload {
    const SIZES: [usize; 4] = [1000, 1000, 2025, 8100];
    let mut choices = Choices::seeded(0x5754);
    let mut pool = Pool::default();
    let mut steps = Steps::default();
    let open = |steps: &mut Steps, pool: &mut Pool, choices: &mut Choices| {
        let pages = pool.take(choices.one_of(&SIZES));
        steps.map(&pages);
        pages
    };
    let mut windows: Vec<Vec<u64>> =
        (0..12).map(|_| open(&mut steps, &mut pool, &mut choices)).collect();
    for _ in 0..16 {
        let place = choices.below(windows.len());
        let new = open(&mut steps, &mut pool, &mut choices);
        let old = std::mem::replace(&mut windows[place], new);
        let (first, second) = old.split_at(choices.below(old.len()));
        steps.unmap(first);
        steps.unmap(second);
        pool.give_back(old);
    }
    for window in &windows {
        steps.unmap(window);
    }
    Workload { name: "W4", about: "windows, resized and closed", steps: steps.0 }
}

/// W5: short-lived channels of a control page and two buffers of very different sizes.
pub(super) fn channels() -> Workload {
    const BUFFERS: [usize; 12] = [0, 0, 0, 0, 1, 1, 1, 2, 2, 4, 16, 256];
    let mut choices = Choices::seeded(0x5755);
    let mut pool = Pool::default();
    let mut steps = Steps::default();
    let mut open: Vec<Vec<u64>> = Vec::new();
    for _ in 0..600 {
        let mut channel = pool.take(1);
        for _ in 0..2 {
            channel.extend(pool.take(choices.one_of(&BUFFERS)));
        }
        steps.map(&channel);
        open.push(channel);
        if open.len() > 40 {
            let channel = open.swap_remove(choices.below(open.len()));
            steps.unmap(&channel);
            pool.give_back(channel);
        }
    }
    for channel in &open {
        steps.unmap(channel);
    }
    Workload { name: "W5", about: "channels of a few pages", steps: steps.0 }
}

/// W7: arrays of foreign pages: 1024 descending, 1024 in no order, and every third page of
/// three sections, where other users have the rest.
pub(super) fn foreign_frames() -> Workload {
    const ARRAY: usize = 1024;
    let mut choices = Choices::seeded(0x5757);
    let mut steps = Steps::default();
    let descending: Vec<u64> = (FIRST..FIRST + ARRAY as u64).rev().collect();
    steps.map(&descending);
    steps.unmap(&descending);
    let mut shuffled = descending;
    choices.shuffle(&mut shuffled);
    steps.map(&shuffled);
    steps.unmap(&shuffled);
    let thirds: Vec<u64> = (FIRST..FIRST + 3 * SECTION).step_by(3).collect();
    for array in thirds.chunks(ARRAY) {
        let others = array.iter().flat_map(|page| [page + 1, page + 2]).step_by(5);
        steps.map(&others.collect::<Vec<u64>>());
        steps.map(array);
        steps.unmap(array);
    }
    Workload { name: "W7", about: "arrays of foreign pages", steps: steps.0 }
}

/// A domain's memory in large leaves, and the pages that left it.
struct Memory {
    /// Numbers of the leaves that are still whole.
    whole: BTreeSet<u64>,
    steps: Steps,
}

const LEAF_ORDER: u8 = 9;

impl Memory {
    /// One page leaves, and the device uses its neighbours. What is on record is the page,
    /// or all of the large leaf that has to be split for it.
    fn remove(&mut self, page: u64) -> Leaf {
        let leaf = page >> LEAF_ORDER;
        if self.whole.remove(&leaf) {
            Leaf { first: Gfn::new(leaf << LEAF_ORDER), order: LEAF_ORDER }
        } else {
            Leaf::page(page)
        }
    }

    /// A balloon driver gives up `pages` in one call.
    fn inflate(&mut self, pages: &[u64]) {
        for batch in pages.chunks(super::BATCH) {
            let gone = batch.iter().map(|page| self.remove(*page)).collect();
            self.steps.0.push(Step::Unmap(gone));
            let left: BTreeSet<u64> = pages.iter().copied().collect();
            let around = batch.iter().flat_map(|page| [page - 1, page + 1]);
            let neighbours: Vec<u64> = around.filter(|page| !left.contains(page)).collect();
            self.steps.map(&neighbours);
        }
    }
}

/// W8: a balloon that takes 512 pages out of 64 large leaves, then all of one leaf, and
/// goes up and down over the same pages, with devices writing to the pages beside them.
pub(super) fn balloon() -> Workload {
    const LEAVES: u64 = 64;
    const PAGES: usize = 512;
    let mut choices = Choices::seeded(0x5758);
    let first = 0x1_0000_u64 >> LEAF_ORDER;
    let mut memory =
        Memory { whole: (first..first + LEAVES + 2).collect(), steps: Steps::default() };
    let leaves = memory.whole.iter();
    let leaves = leaves.map(|n| Leaf { first: Gfn::new(n << LEAF_ORDER), order: LEAF_ORDER });
    memory.steps.0.push(Step::Use(leaves.collect()));

    let base = (first << LEAF_ORDER) + 1;
    let mut scattered: Vec<u64> = (base..base + (LEAVES << LEAF_ORDER) - 2).collect();
    choices.shuffle(&mut scattered);
    scattered.truncate(PAGES);
    memory.inflate(&scattered);
    let one_leaf: Vec<u64> = ((first + LEAVES) << LEAF_ORDER..).take(PAGES).collect();
    memory.inflate(&one_leaf);
    for _ in 0..8 {
        // What went comes back, in pages, and is used.
        memory.steps.map(&scattered);
        choices.shuffle(&mut scattered);
        memory.inflate(&scattered);
    }
    Workload { name: "W8", about: "balloon, with devices beside it", steps: memory.steps.0 }
}
