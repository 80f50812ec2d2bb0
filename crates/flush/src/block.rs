//! Rounding a run of pages to the block that one invalidation can name.
//!
//! IOMMUs name 2^n pages, naturally aligned (VT-d 6.5.2.3). A [`Block`] is such a
//! block; [`Block::around`] finds the smallest one over a run.

use crate::{Gfn, Run};

/// A naturally aligned block of 2^order pages of 4 KiB.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Block {
    base: u64,
    order: u8,
}

impl Block {
    /// Every page there is: what no page-selective command can name.
    pub const ALL: Self = Self { base: 0, order: 64 };

    /// The smallest block that contains every page of `run`.
    ///
    /// The first bit in which the ends differ decides: below it the block is free,
    /// above it both ends agree. Rounding the length up instead would miss a run
    /// that lies across a boundary, such as pages 3 and 4.
    #[must_use]
    pub const fn around(run: Run) -> Self {
        let (first, last) = (run.first().get(), run.last().get());
        let order = (u64::BITS - (first ^ last).leading_zeros()) as u8;
        Self { base: first, order: 0 }.at_least(order)
    }

    /// The block, or the smallest one around it of at least `order`.
    ///
    /// A cached large leaf is only sure to go when the invalidation is as large as
    /// the leaf (VT-d 6.5.2.3, 6.5.3.2). Orders of 64 and above give [`Block::ALL`].
    #[must_use]
    pub const fn at_least(self, order: u8) -> Self {
        if order <= self.order {
            return self;
        }
        match u64::MAX.checked_shl(order as u32) {
            Some(mask) => Self { base: self.base & mask, order },
            None => Self::ALL,
        }
    }

    /// The largest block that begins where `run` does and ends within it, of at most
    /// `max_order`.
    #[must_use]
    pub const fn within(run: Run, max_order: u8) -> Self {
        let first = run.first().get();
        let order = min(first.trailing_zeros(), run.pages().ilog2());
        Self { base: first, order: min(order, max_order as u32) as u8 }
    }

    /// The pages.
    #[must_use]
    pub const fn run(self) -> Run {
        Run::block(Gfn::new(self.base), self.order)
    }

    /// Number of the first page, in units of 4 KiB.
    #[must_use]
    pub const fn base(self) -> u64 {
        self.base
    }

    /// Binary logarithm of the number of pages, at most 64.
    #[must_use]
    pub const fn order(self) -> u8 {
        self.order
    }

    /// Number of pages; `u64::MAX` for [`Block::ALL`], which has one more.
    #[must_use]
    pub const fn pages(self) -> u64 {
        match 1_u64.checked_shl(self.order as u32) {
            Some(pages) => pages,
            None => u64::MAX,
        }
    }

    /// Address of the first byte, or `None` when it does not fit 64 bits.
    #[must_use]
    pub const fn address(self) -> Option<u64> {
        if self.base >> 52 == 0 { Some(self.base << 12) } else { None }
    }
}

const fn min(one: u32, other: u32) -> u32 {
    if one < other { one } else { other }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The smallest aligned block by trying every order from 0.
    fn brute_force(first: u64, last: u64) -> (u64, u8) {
        for order in 0..64 {
            let base = (first >> order) << order;
            if last - base < 1 << order {
                return (base, order);
            }
        }
        (0, 64)
    }

    #[track_caller]
    fn check(first: u64, last: u64) {
        let run = Run::new(Gfn::new(first), Gfn::new(last)).unwrap();
        let block = Block::around(run);
        assert_eq!(
            (block.base(), block.order()),
            brute_force(first, last),
            "{first:#x}..={last:#x}"
        );
    }

    #[test]
    fn every_small_run_gets_its_smallest_aligned_block() {
        for first in 0..1024 {
            for count in 1..=600 {
                check(first, first + count - 1);
            }
        }
    }

    #[test]
    fn runs_around_every_power_of_two_up_to_the_width_are_rounded_exactly() {
        for exponent in 0..64 {
            let middle = 1_u64 << exponent;
            for below in 0..40 {
                for above in 0..40 {
                    let Some(first) = middle.checked_sub(below) else { continue };
                    let Some(last) = middle.checked_add(above) else { continue };
                    check(first, last);
                }
            }
        }
        check(0, u64::MAX);
        check(1, u64::MAX);
        check(u64::MAX, u64::MAX);
        check(u64::MAX - 40, u64::MAX);
        // The last page of 39-, 48- and 57-bit spaces, and their last 2 MiB.
        for width in [39, 48, 57] {
            let last = (1_u64 << (width - 12)) - 1;
            check(last, last);
            check(last - 511, last);
            check(0, last);
        }
    }

    #[test]
    fn the_block_at_the_front_of_a_run_is_the_largest_inside_it() {
        for first in 0..70_u64 {
            for count in 1..=70 {
                for max in 0..8 {
                    let run = Run::new(Gfn::new(first), Gfn::new(first + count - 1)).unwrap();
                    let block = Block::within(run, max);
                    let fits = |order: &u8| first % (1 << order) == 0 && 1 << order <= count;
                    let largest = (0..=max).filter(fits).max().unwrap();
                    assert_eq!((block.base(), block.order()), (first, largest));
                    assert!(run.covers(block.run()));
                }
            }
        }
    }

    #[test]
    fn known_runs_have_known_orders() {
        for (first, count, order) in
            [(3, 2, 3), (0x1ff, 2, 10), (0x3ffff, 2, 19), (0x7fff, 33, 16), (0, 1, 0), (32, 32, 5)]
        {
            let run = Run::new(Gfn::new(first), Gfn::new(first + count - 1)).unwrap();
            assert_eq!(Block::around(run).order(), order, "{first:#x} + {count}");
        }
    }

    #[test]
    fn a_minimum_order_widens_and_never_narrows() {
        let page = Block::around(Run::single(Gfn::new(0x12345)));
        assert_eq!(page.at_least(9), Block { base: 0x12200, order: 9 });
        assert_eq!(page.at_least(18), Block { base: 0, order: 18 });
        assert_eq!(page.at_least(9).at_least(3), page.at_least(9));
        assert_eq!(page.at_least(64), Block::ALL);
        assert_eq!(page.at_least(255), Block::ALL);
        assert_eq!(Block::ALL.pages(), u64::MAX);
        assert_eq!(Block::around(Run::single(Gfn::new(1 << 52))).address(), None);
        assert_eq!(page.address(), Some(0x1234_5000));
    }
}
