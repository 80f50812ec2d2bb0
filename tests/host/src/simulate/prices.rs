//! What each step takes: the published base row, and the cost model.
//!
//! [`Prices::calibrated`] reads two figures off that row: what a page takes with one
//! stream, and what it takes where more streams bring no more. The second is the flush,
//! since flushes are serialised; the difference is the rest. Nothing else is fitted.

use flush::plan::{CostModel, Plan};

use super::Machine;

/// The published table: Gbit/s received by the control domain from a guest.
pub mod published {
    /// How many streams each figure is for.
    pub const STREAMS: [u16; 5] = [1, 2, 4, 8, 16];
    /// Two flushes for each page.
    pub const BASE: [f64; 5] = [0.64, 0.81, 0.84, 0.83, 0.81];
    /// Two flushes for each 32 pages.
    pub const BATCHED: [f64; 5] = [3.11, 3.16, 2.69, 2.40, 2.23];
}

/// Bits of a page: each page is taken to be full.
pub(super) const BITS_PER_PAGE: f64 = 4096.0 * 8.0;

/// Interrupting one CPU and hearing back, published as 1 to 3 us.
const FIRST_CPU: u64 = 2_000;

/// Times in nanoseconds.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Prices {
    /// All but the flush, for each page.
    pub rest: u64,
    /// Both flushes of one page on [`Machine::PUBLISHED`].
    pub flush: u64,
    /// What units take.
    pub units: CostModel,
}

/// What a page takes at so many Gbit/s: bits by bits a nanosecond.
const fn nanoseconds(gigabits: f64) -> u64 {
    (BITS_PER_PAGE / gigabits) as u64
}

impl Prices {
    /// From the first figure of the base row and the mean of the other four.
    #[must_use]
    pub const fn calibrated() -> Self {
        let [one, two, four, eight, sixteen] = published::BASE;
        let flush = nanoseconds((two + four + eight + sixteen) / 4.0);
        Self { rest: nanoseconds(one) - flush, flush, units: CostModel::DEFAULT }
    }

    /// Telling one unit one command, and waiting for it.
    const fn unit(&self) -> u64 {
        self.units.page.get() + self.units.tail.get() + self.units.wait.get()
    }

    /// Interrupting every other CPU of the published machine.
    const fn kick_all(&self) -> u64 {
        self.flush.saturating_sub(Machine::PUBLISHED.units * self.unit())
    }

    /// Interrupting one CPU more, after the first.
    #[must_use]
    pub const fn further_cpu(&self) -> u64 {
        self.kick_all().saturating_sub(FIRST_CPU) / (Machine::PUBLISHED.cpus - 2)
    }

    /// Interrupting `cpus` others: the first, then the same for each further one.
    pub(super) fn kick(&self, cpus: u64) -> u64 {
        match cpus.checked_sub(1) {
            None => 0,
            Some(more) => FIRST_CPU.min(self.kick_all()) + more * self.further_cpu(),
        }
    }

    /// Carrying out `plan` on every unit of `machine`, and interrupting so many CPUs.
    pub(super) fn carry_out(
        &self,
        plan: &Plan,
        machine: Machine,
        interrupted: u64,
        overlap: bool,
    ) -> u64 {
        let command = match plan {
            Plan::Nothing => return 0,
            Plan::Blocks(_) => self.units.page,
            Plan::Domain => self.units.domain,
            Plan::Global => self.units.global,
        };
        let submissions = plan.submissions() as u64;
        let told =
            command.times(plan.commands() as u64).get() + self.units.tail.times(submissions).get();
        let waited = self.units.wait.times(submissions).get();
        let kicked = self.kick(interrupted);
        if overlap {
            machine.units * told + kicked.max(waited)
        } else {
            machine.units * (told + waited) + kicked
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_stream_and_the_plateau_of_the_base_row_separate_the_flush_from_the_rest() {
        let prices = Prices::calibrated();
        assert_eq!(prices.rest + prices.flush, 51_200);
        assert_eq!(prices.flush, 39_839);
    }

    #[test]
    fn one_command_on_the_published_machine_takes_what_was_calibrated() {
        let prices = Prices::calibrated();
        let flush = |machine: Machine, interrupted, overlap| {
            prices.carry_out(&Plan::Domain, machine, interrupted, overlap)
        };
        let published = flush(Machine::PUBLISHED, 95, false);
        assert!(prices.flush - published < 100, "{published}, rounded down");
        let sixteen = Machine::new(96, 16).expect("16 units are allowed");
        assert_eq!(flush(sixteen, 95, false) - published, 15 * 800);
        assert_eq!(flush(sixteen, 95, true) - published, 15 * 400 - 400);
        let few = flush(Machine::PUBLISHED, 15, false);
        assert_eq!(few, 800 + FIRST_CPU + 14 * 394);
        assert_eq!(prices.kick(0), 0);
    }

    #[test]
    fn a_plan_costs_what_its_commands_and_submissions_cost() {
        let prices = Prices::calibrated();
        let machine = Machine::new(1, 1).expect("one of each is allowed");
        let cost = |overlap| prices.carry_out(&Plan::Global, machine, 0, overlap);
        assert_eq!([cost(false), cost(true)], [800, 800]);
        let nothing = prices.carry_out(&Plan::Nothing, machine, 0, false);
        assert_eq!(nothing, 0);
    }
}
