//! Steps about a domain's own memory.

use super::{Lowered, Lowering, Placed, attempt};
use crate::{
    format::{Allowed, Attempt, Clear, MovePage, Populate, Restrict, SwapPage},
    values::Count,
};

impl Lowering {
    fn place(&mut self, name: &str, by: u64, gfn: u64) {
        let placed = Placed { page: name.to_owned(), gfn, by, number: None };
        self.mappings.insert(name.to_owned(), placed);
    }

    /// In how many steps a range was walked.
    fn steps(&mut self, steps: Option<Count>) {
        if let Some(steps) = steps {
            self.emit("steps", &[steps.min, steps.max]);
        }
    }

    pub(super) fn populate(&mut self, populate: &Populate) -> Lowered {
        let by = self.domain(&populate.by);
        let stride = populate.stride.unwrap_or(1 << populate.order);
        for (place, name) in populate.pages.0.iter().enumerate() {
            let gfn = populate.at.wrapping_add(stride.wrapping_mul(place as u64));
            let number = self.number(name)?;
            if populate.result != Attempt::Refused {
                self.place(name, by, gfn);
            }
            let order = populate.order.into();
            self.emit("populate", &[number, by, gfn, order, attempt(populate.result)]);
        }
        self.asked(populate.tlb, populate.iotlb);
        Ok(())
    }

    pub(super) fn clear(&mut self, clear: &Clear) -> Lowered {
        let by = self.domain(&clear.by);
        let (first, count) = (clear.first, clear.count);
        self.emit("clear", &[by, first, count, clear.budget, attempt(clear.result)]);
        self.steps(clear.steps);
        self.asked(clear.tlb, clear.iotlb);
        Ok(())
    }

    pub(super) fn restrict(&mut self, restrict: &Restrict) -> Lowered {
        let write = match restrict.allow {
            Allowed::Read => 0,
            Allowed::ReadWrite => 1,
        };
        let by = self.domain(&restrict.by);
        self.emit("restrict", &[by, restrict.first, restrict.count, write, restrict.budget]);
        self.steps(restrict.steps);
        self.asked(restrict.tlb, restrict.iotlb);
        Ok(())
    }

    pub(super) fn swap_page(&mut self, swap: &SwapPage) -> Lowered {
        let (by, page) = (self.domain(&swap.by), self.number(&swap.page)?);
        self.place(&swap.page, by, swap.at);
        self.emit("swap-page", &[by, swap.at, page]);
        self.asked(swap.tlb, swap.iotlb);
        Ok(())
    }

    pub(super) fn move_page(&mut self, page: &MovePage) -> Lowered {
        let by = self.domain(&page.by);
        for placed in self.mappings.values_mut() {
            if placed.by == by && placed.gfn == page.from && placed.number.is_none() {
                placed.gfn = page.to;
            }
        }
        self.emit("move-page", &[by, page.from, page.to]);
        self.asked(page.tlb, page.iotlb);
        Ok(())
    }
}
