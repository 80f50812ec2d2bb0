//! The simple policies: which block each of them takes off the front of a run.
//!
//! A [`Front`] names a block that holds the first page of a run. What of the run lies
//! behind the block is the next run.

use crate::{Block, Gfn, Run};

/// The next block for a run with leaves of up to 2^`order` pages, on hardware that names
/// at most 2^`max_order` pages at once.
///
/// All but [`leaf`] are given runs that are [rounded](super::ranges) to their leaves.
pub(super) type Front = fn(run: Run, order: u8, max_order: u8) -> Block;

/// One leaf.
pub(super) fn leaf(run: Run, order: u8, _: u8) -> Block {
    Block::around(Run::single(run.first())).at_least(order)
}

/// The smallest block around all of it.
pub(super) fn around(run: Run, _: u8, _: u8) -> Block {
    Block::around(run)
}

/// The largest block inside it.
pub(super) fn exact(run: Run, _: u8, max_order: u8) -> Block {
    Block::within(run, max_order)
}

/// All of it in one block if that is less than twice the run, else the part below the
/// boundary that makes the block large.
///
/// Below and above that boundary the parts end, and begin, at a multiple of any power
/// of two that matters, so that each has a block of less than twice its length.
pub(super) fn two_block(run: Run, _: u8, max_order: u8) -> Block {
    let around = Block::around(run);
    let small = around.pages() < run.pages().saturating_mul(2);
    if around.order() == 0 || small && around.order() <= max_order {
        return around;
    }
    let below_boundary = around.base() | (around.pages() / 2 - 1);
    let below = Run::new(run.first(), Gfn::new(below_boundary)).unwrap_or(run);
    let block = Block::around(below);
    if block.order() <= max_order {
        block
    } else {
        Block::around(Run::single(run.first())).at_least(max_order)
    }
}
