//! Eight ways in which guests give mappings back, and what each flush policy costs.
//!
//! A [`Workload`] is a list of [`Step`]s drawn from a fixed seed: pages are mapped, used by
//! a device and unmapped, in the sizes and orders that are publicly known of the drivers.
//! [`compare`] plans each batch of it under every policy of [`flush::plan`].

mod backends;
mod compare;
mod entries;
mod frames;
mod guests;

pub use compare::{BATCH, Cost, MODEL, Row, compare, compare_all};
pub use entries::Entries;

use flush::{Gfn, Run};

/// One entry of a device's table: 2^order pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Leaf {
    /// The first page.
    pub first: Gfn,
    /// log2 of its 4 KiB pages.
    pub order: u8,
}

impl Leaf {
    /// One page of 4 KiB.
    #[must_use]
    pub const fn page(number: u64) -> Self {
        Self { first: Gfn::new(number), order: 0 }
    }

    /// Its pages.
    #[must_use]
    pub const fn run(self) -> Run {
        Run::block(self.first, self.order)
    }
}

/// What happens to a device's table.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Step {
    /// These are mapped, if they were not, and the device uses them from now on.
    Use(Vec<Leaf>),
    /// One call takes these away, in this order; it flushes after each 32.
    Unmap(Vec<Leaf>),
}

/// A way in which guests map and unmap.
#[derive(Clone, Debug)]
pub struct Workload {
    /// Its short name, from W1 to W8.
    pub name: &'static str,
    /// What it stands for.
    pub about: &'static str,
    /// What happens, in order.
    pub steps: Vec<Step>,
}

/// All eight, the same in each run.
#[must_use]
pub fn all() -> Vec<Workload> {
    vec![
        backends::network(),
        backends::persistent_disk(),
        backends::disk(),
        guests::windows(),
        guests::channels(),
        backends::copying_disk(),
        guests::foreign_frames(),
        guests::balloon(),
    ]
}

/// The steps of a workload while they are drawn.
#[derive(Debug, Default)]
struct Steps(Vec<Step>);

impl Steps {
    fn map(&mut self, pages: &[u64]) {
        self.0.push(Step::Use(pages.iter().copied().map(Leaf::page).collect()));
    }

    fn unmap(&mut self, pages: &[u64]) {
        if !pages.is_empty() {
            self.0.push(Step::Unmap(pages.iter().copied().map(Leaf::page).collect()));
        }
    }
}
