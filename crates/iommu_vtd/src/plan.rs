//! Which invalidations make a unit forget a cover.
//!
//! [`plan`] is the one place that decides between pages and the whole domain.

use flush::{Cover, Extent, Run};

use crate::Block;
use crate::spec::registers::Capabilities;

/// What to ask a unit for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Plan<'a> {
    /// Nothing has to be forgotten.
    Nothing,
    /// One block around each run, none smaller than 2^`order` pages.
    Blocks {
        /// The runs.
        runs: &'a [Run],
        /// The smallest order that is sure to drop the largest leaf concerned.
        order: u8,
    },
    /// Every translation of the domain.
    Domain,
}

/// The block that makes a cache forget `run`, where leaves have up to 2^`order` pages.
pub(crate) const fn block_for(run: Run, order: u8) -> Block {
    Block::around(run).at_least(order)
}

/// Chooses: one page-selective invalidation for each run if the unit can name all their
/// blocks, else the domain.
pub(crate) fn plan(cover: &Cover, capabilities: Capabilities) -> Plan<'_> {
    let runs = match cover.extent() {
        Extent::Nothing => return Plan::Nothing,
        Extent::Everything => return Plan::Domain,
        Extent::Runs(runs) => runs,
    };
    let order = cover.order();
    let nameable = |run: &Run| {
        let block = block_for(*run, order);
        block.order() <= capabilities.max_address_mask() && block.address().is_some()
    };
    if capabilities.page_selective() && runs.iter().all(nameable) {
        Plan::Blocks { runs, order }
    } else {
        Plan::Domain
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use flush::{Change, Depth, Gfn};

    fn unit(page_selective: bool, mask: u64) -> Capabilities {
        Capabilities::new(u64::from(page_selective) << 39 | mask << 48)
    }

    fn cover(runs: &[(u64, u64)], order: u8) -> Cover {
        let mut cover = Cover::NOTHING;
        for (first, last) in runs {
            let run = Run::new(Gfn::new(*first), Gfn::new(*last)).unwrap();
            cover.record(run, order, Depth::Leaves, Change::Modified);
        }
        cover
    }

    #[track_caller]
    fn check(runs: &[(u64, u64)], order: u8, capabilities: Capabilities, pages: bool) {
        let cover = cover(runs, order);
        match plan(&cover, capabilities) {
            Plan::Blocks { runs: planned, order: least } => {
                assert!(pages, "{runs:?} needs the domain");
                assert_eq!((planned.len(), least), (runs.len(), order));
            }
            Plan::Domain => assert!(!pages, "{runs:?} can be named"),
            Plan::Nothing => panic!("{runs:?} is something"),
        }
    }

    #[test]
    fn pages_are_named_as_long_as_every_block_is_within_the_mask() {
        // (first, last, order of the block around them)
        let runs: [(u64, u64, u64); 5] =
            [(5, 5, 0), (3, 4, 3), (32, 63, 5), (0x1ff, 0x200, 10), (0x3ffff, 0x40000, 19)];
        for mask in [0, 9, 18] {
            for (first, last, order) in runs {
                check(&[(first, last)], 0, unit(true, mask), order <= mask);
                check(&[(first, last)], 0, unit(false, mask), false);
            }
            for leaf in [0, 9, 18] {
                check(&[(0, 0)], leaf, unit(true, mask), u64::from(leaf) <= mask);
            }
        }
        check(&[(5, 5), (9, 9), (0x1ff, 0x200)], 0, unit(true, 9), false);
        check(&[(5, 5), (9, 9), (0x1ff, 0x1ff)], 0, unit(true, 9), true);
    }

    #[test]
    fn the_top_of_the_space_is_named_exactly_and_addresses_beyond_64_bits_are_not() {
        let top = (1 << 52) - 1;
        check(&[(top, top)], 0, unit(true, 18), true);
        check(&[(top - 511, top)], 9, unit(true, 18), true);
        check(&[(1 << 52, 1 << 52)], 0, unit(true, 18), false);
        check(&[(0, u64::MAX)], 0, unit(true, 63), false);
    }

    #[test]
    fn nothing_needs_nothing_and_everything_needs_the_domain() {
        assert_eq!(plan(&Cover::NOTHING, unit(true, 18)), Plan::Nothing);
        let mut cover = Cover::NOTHING;
        cover.everything(Depth::Tables);
        assert_eq!(plan(&cover, unit(true, 18)), Plan::Domain);
    }
}
