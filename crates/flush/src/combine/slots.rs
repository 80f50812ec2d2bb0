//! A cover where other CPUs can read it: one aligned block in each word.
//!
//! [`Slots`] belong to one participant, who alone writes them. A word says all there
//! is to say about its block, so a reader never sees half of one. A cover that does
//! not fit becomes everything.

use core::sync::atomic::Ordering::Relaxed;

use crate::{
    Block, Change, Cover, Depth, Extent, Gfn, Run,
    sync::{AtomicU64, array_of, const_constructor},
};

/// The word after the last block.
const END: u64 = 0;

// A word, from bit 0: depth, change, order of the largest leaf, block.
const TABLES: u64 = 1 << 0;
const MODIFIED: u64 = 1 << 1;
const LEAF_SHIFT: u32 = 2;
const LEAF_MASK: u64 = 0x3f;
const BLOCK_SHIFT: u32 = 8;

/// Frames at or above 2^`FRAME_BITS` cannot be told apart; they become everything.
///
/// A block of 2^n frames is its first frame, shifted up by one, with bit n set below
/// it: the lowest set bit is the order. No block is 0.
const FRAME_BITS: u32 = u64::BITS - BLOCK_SHIFT - 1;

/// The block that stands for every frame, those that cannot be told apart included.
const EVERYTHING: u64 = 1 << FRAME_BITS;

/// What one participant wants forgotten by caches of one kind.
#[derive(Debug)]
pub(super) struct Slots<const SLOTS: usize>([AtomicU64; SLOTS]);

impl<const SLOTS: usize> Slots<SLOTS> {
    const_constructor! {
        pub(super) const fn new() -> Self {
            Self(array_of!(AtomicU64::new(END)))
        }
    }

    /// Shows `cover` to whoever reads after the ticket that is taken next.
    pub(super) fn publish(&self, cover: &Cover) {
        let flags = flags(cover);
        let mut slots = self.0.iter();
        let mut put = |block: u64, leaf: u64| {
            let slot = slots.next();
            if let Some(slot) = slot {
                slot.store(block << BLOCK_SHIFT | leaf << LEAF_SHIFT | flags, Relaxed);
            }
            slot.is_some()
        };
        let exact = cover.extent() != Extent::Everything
            && cover.runs().all(|(run, order)| {
                let leaf = u64::from(order);
                is_addressable(run)
                    && leaf <= LEAF_MASK
                    && blocks(run).all(|block| put(packed(block), leaf))
            });
        if !exact {
            slots = self.0.iter();
            if let Some(slot) = slots.next() {
                slot.store(EVERYTHING << BLOCK_SHIFT | flags, Relaxed);
            }
        }
        if let Some(slot) = slots.next() {
            slot.store(END, Relaxed);
        }
    }

    /// Adds to `cover` all that is asked for.
    ///
    /// The words of a ticket that was taken before and is not redeemed are complete;
    /// those of any other may be mixed, and then ask for too much or for what no one
    /// waits for.
    pub(super) fn add_to(&self, cover: &mut Cover) {
        for slot in &self.0 {
            let word = slot.load(Relaxed);
            let block = word >> BLOCK_SHIFT;
            if block == 0 {
                break;
            }
            let depth = if word & TABLES != 0 { Depth::Tables } else { Depth::Leaves };
            let change = if word & MODIFIED != 0 { Change::Modified } else { Change::Added };
            if block == EVERYTHING {
                cover.everything(depth);
            } else {
                let order = block.trailing_zeros() as u8;
                let first = Gfn::new((block & (block - 1)) >> 1);
                let leaf = (word >> LEAF_SHIFT & LEAF_MASK) as u8;
                cover.record(Run::block(first, order), leaf, depth, change);
            }
        }
    }
}

fn flags(cover: &Cover) -> u64 {
    let depth = match cover.depth() {
        Depth::Leaves => 0,
        Depth::Tables => TABLES,
    };
    let change = match cover.change() {
        Change::Added => 0,
        Change::Modified => MODIFIED,
    };
    depth | change
}

fn is_addressable(run: Run) -> bool {
    run.last().get() >> FRAME_BITS == 0
}

/// The fewest aligned blocks that are exactly `run`, which is addressable.
///
/// A run of n frames has at most n of them, so a batch of 32 single frames fits in
/// 32 slots, however it is scattered.
fn blocks(run: Run) -> impl Iterator<Item = Block> {
    let mut rest = Some(run);
    core::iter::from_fn(move || {
        let block = Block::within(rest?, FRAME_BITS as u8);
        rest = Run::new(Gfn::new(block.run().last().get() + 1), run.last());
        Some(block)
    })
}

/// The block in one word, the order as the lowest set bit.
fn packed(block: Block) -> u64 {
    block.base() << 1 | 1 << block.order()
}

#[cfg(test)]
#[path = "slots_tests.rs"]
mod tests;
