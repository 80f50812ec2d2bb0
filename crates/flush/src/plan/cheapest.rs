//! The cheapest set of blocks over given pages, found in one pass.
//!
//! Blocks are nodes of a binary trie. Where two parts of a cover meet in a node, the
//! node is named as a whole if that is no dearer than what its two halves need; a
//! [`Forest`] holds the parts that are still to meet another one.

use arrayvec::ArrayVec;

use super::{BLOCKS, CostModel, LiveEntries, Nanoseconds};
use crate::Block;

/// Nodes that can be open at once: one for each order an addressable block can have.
const OPEN: usize = 54;

/// A node of the trie whose cheapest cover is known.
#[derive(Clone, Copy, Debug)]
struct Node {
    /// The smallest block around all that was seen of it.
    around: Block,
    /// The order of the block in which it meets the node before it.
    meets: u8,
    /// Pages of it that must be forgotten.
    changed: u64,
    /// The price of its cover.
    cost: Nanoseconds,
    /// Where its cover begins in the list of blocks.
    first: usize,
}

/// What was seen so far, and how to cover it.
struct Forest<'a> {
    max_order: u8,
    costs: &'a CostModel,
    live: &'a dyn LiveEntries,
    /// Each one lies above those before it, and meets the one before it in a smaller
    /// node than that one meets its own.
    open: ArrayVec<Node, OPEN>,
    blocks: ArrayVec<Block, BLOCKS>,
}

/// The cheapest cover of `seeds`: disjoint blocks in ascending order, each with the
/// number of its pages that must be forgotten.
///
/// The seeds are the smallest blocks considered. `None` if no room is left for a block.
pub(super) fn cheapest(
    seeds: impl Iterator<Item = (Block, u64)>,
    max_order: u8,
    costs: &CostModel,
    live: &dyn LiveEntries,
) -> Option<(ArrayVec<Block, BLOCKS>, Nanoseconds)> {
    let mut forest =
        Forest { max_order, costs, live, open: ArrayVec::new(), blocks: ArrayVec::new() };
    for (seed, changed) in seeds {
        forest.add(seed, changed)?;
    }
    while forest.open.len() > 1 {
        forest.join();
    }
    let cost = forest.open.first().map_or(Nanoseconds::default(), |root| root.cost);
    Some((forest.blocks, cost))
}

/// The order of the block in which two disjoint blocks meet: above the highest bit in
/// which their first pages differ, both agree.
const fn meeting(low: Block, high: Block) -> u8 {
    (u64::BITS - (low.base() ^ high.base()).leading_zeros()) as u8
}

impl Forest<'_> {
    fn price(&self, block: Block, changed: u64) -> Nanoseconds {
        let page = self.costs.page;
        if changed == block.pages() {
            return page;
        }
        page.plus(self.costs.refill.times(self.live.within(block.run(), changed)))
    }

    fn add(&mut self, seed: Block, changed: u64) -> Option<()> {
        let meets = self.open.last().map_or(0, |top| meeting(top.around, seed));
        while let [_, .., top] = self.open.as_slice()
            && top.meets < meets
        {
            self.join();
        }
        let cost = self.price(seed, changed);
        let first = self.blocks.len();
        self.open.try_push(Node { around: seed, meets, changed, cost, first }).ok()?;
        self.blocks.try_push(seed).ok()
    }

    /// Makes one node of the last two: both halves as they are, or the whole.
    fn join(&mut self) {
        let Some(high) = self.open.pop() else { return };
        let Some(low) = self.open.last().copied() else { return };
        let around = low.around.at_least(high.meets);
        let changed = low.changed.saturating_add(high.changed);
        let mut cost = low.cost.plus(high.cost);
        if around.order() <= self.max_order {
            let whole = self.price(around, changed);
            if whole <= cost {
                cost = whole;
                self.blocks.truncate(low.first);
                self.blocks.push(around);
            }
        }
        if let Some(node) = self.open.last_mut() {
            *node = Node { around, changed, cost, ..low };
        }
    }
}
