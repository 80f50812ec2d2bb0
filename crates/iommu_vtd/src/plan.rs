//! What a unit, and a device's own cache, can be told to forget in one command.
//!
//! The decision is [`flush::plan`]'s; here are the limits that VT-d puts on it.

use flush::plan::{Limits, SUBMISSION};

use crate::queue::PIECE;
use crate::spec::registers::Capabilities;

// What a plan takes to share a wait does share one.
const _: () = assert!(PIECE == SUBMISSION);

/// The blocks that page-selective commands of a unit can name (6.5.2.3, 11.4.2).
pub(crate) const fn unit_limits(capabilities: Capabilities) -> Limits {
    Limits {
        page_selective: capabilities.page_selective(),
        max_order: capabilities.max_address_mask(),
    }
}

/// The blocks that device-TLB commands can name: any, up to half of all pages (6.5.2.5).
pub(crate) const DEVICE_LIMITS: Limits = Limits { page_selective: true, max_order: 51 };

#[cfg(test)]
mod tests {
    use super::*;
    use flush::plan::{Plan, Planner, Policy};
    use flush::{Change, Cover, Depth, Gfn, Run};

    fn unit(page_selective: bool, mask: u64) -> Capabilities {
        Capabilities::new(u64::from(page_selective) << 39 | mask << 48)
    }

    #[track_caller]
    fn check(runs: &[(u64, u64)], order: u8, capabilities: Capabilities, pages: bool) {
        let mut cover = Cover::NOTHING;
        for (first, last) in runs {
            let run = Run::new(Gfn::new(*first), Gfn::new(*last)).unwrap();
            cover.record(run, order, Depth::Leaves, Change::Modified);
        }
        match Planner::new(Policy::Gather).plan(&cover, unit_limits(capabilities)) {
            Plan::Blocks(blocks) => {
                assert!(pages, "{runs:?} needs the domain");
                assert_eq!(blocks.count(), runs.len());
            }
            Plan::Domain => assert!(!pages, "{runs:?} can be named"),
            plan @ (Plan::Nothing | Plan::Global) => panic!("{plan:?} for {runs:?}"),
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
}
