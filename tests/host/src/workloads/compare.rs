//! What each policy would tell a unit for the same batches.
//!
//! A [`Row`] adds up one policy's plans for one workload. All policies see the same
//! batches and the same entries in use, so their rows can be compared.

use std::collections::BTreeSet;

use flush::{
    Change, Cover, Depth, Run,
    plan::{CostModel, Limits, Plan, Planner, Policy, Recent},
};

use super::{Entries, Leaf, Step, Workload};

/// Pages that share one flush.
pub const BATCH: usize = 32;

/// What the unit can be told.
const LIMITS: Limits = Limits { page_selective: true, max_order: 18 };

/// The unit of a [`Cost`]: 0.2 us, about what one command takes.
const NANOSECONDS_PER_UNIT: u64 = 200;

/// The prices, in units of 0.2 us. Commands have one price, whatever they name.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Cost {
    /// Of one command.
    pub command: f64,
    /// Of waiting for one submission.
    pub wait: f64,
    /// Of one write of the queue's tail.
    pub tail: f64,
    /// Of one entry that is looked up again.
    pub refill: f64,
}

/// The prices that [`compare`] uses: those of [`CostModel::DEFAULT`].
pub const MODEL: Cost = {
    let CostModel { page, domain, global, wait, tail, refill, live_entries: _ } =
        CostModel::DEFAULT;
    assert!(page.get() == domain.get() && page.get() == global.get());
    const fn units(nanoseconds: u64) -> f64 {
        nanoseconds as f64 / NANOSECONDS_PER_UNIT as f64
    }
    Cost {
        command: units(page.get()),
        wait: units(wait.get()),
        tail: units(tail.get()),
        refill: units(refill.get()),
    }
};

/// What one policy cost on one workload.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Row {
    /// The workload.
    pub workload: &'static str,
    /// The policy.
    pub policy: Policy,
    /// The planner knew which entries are in use.
    pub informed: bool,
    /// Batches that were flushed.
    pub batches: u64,
    /// Commands.
    pub commands: u64,
    /// Waits.
    pub waits: u64,
    /// Writes of the queue's tail.
    pub tail_writes: u64,
    /// Pages whose translation changed or went.
    pub pages_changed: u64,
    /// Pages that the commands named. A command for the domain counts what it takes: the
    /// pages changed, and an entry in use as one.
    pub pages_flushed: u64,
    /// Entries in use that went although nothing about them changed.
    pub refills: u64,
}

impl Row {
    /// The price of all of it, in units of 0.2 us.
    #[must_use]
    pub fn cost(&self) -> f64 {
        self.commands as f64 * MODEL.command
            + self.waits as f64 * MODEL.wait
            + self.tail_writes as f64 * MODEL.tail
            + self.refills as f64 * MODEL.refill
    }

    /// Adds `plan` for `cover`; `lost` gathers the entries it takes.
    fn add(&mut self, plan: &Plan, cover: &Cover, entries: &Entries, lost: &mut BTreeSet<u64>) {
        self.commands += plan.commands() as u64;
        self.waits += plan.submissions() as u64;
        self.tail_writes += plan.submissions() as u64;
        match plan {
            Plan::Nothing => {}
            Plan::Blocks(blocks) => {
                for block in blocks.clone() {
                    self.pages_flushed += block.pages();
                    entries.lose(block.run(), lost);
                }
            }
            Plan::Domain | Plan::Global => {
                let before = lost.len();
                entries.lose(Run::ALL, lost);
                self.pages_flushed += cover.pages() + (lost.len() - before) as u64;
            }
        }
    }
}

fn record(cover: &mut Cover, leaf: Leaf, change: Change) {
    cover.record(leaf.run(), leaf.order, Depth::Leaves, change);
}

fn cover(batch: &[Leaf], change: Change) -> Cover {
    let mut cover = Cover::NOTHING;
    batch.iter().for_each(|leaf| record(&mut cover, *leaf, change));
    cover
}

/// The covers that are flushed on their own where pages are gathered one after another,
/// for as long as the next one continues the range.
fn gathered(batch: &[Leaf]) -> Vec<Cover> {
    let mut covers: Vec<Cover> = Vec::new();
    let mut range: Option<Run> = None;
    for leaf in batch {
        match (range.filter(|range| range.touches(leaf.run())), covers.last_mut()) {
            (Some(own), Some(cover)) => {
                record(cover, *leaf, Change::Modified);
                range = Some(own.hull(leaf.run()));
            }
            _ => {
                let mut cover = Cover::NOTHING;
                record(&mut cover, *leaf, Change::Modified);
                covers.push(cover);
                range = Some(leaf.run());
            }
        }
    }
    covers
}

/// Runs `workload` under every policy. The planner has two rows: the first knows which
/// entries are in use; the second, `informed: false`, has the defaults, and remembers what
/// went last as a flusher of devices does.
#[must_use]
pub fn compare(workload: &Workload) -> Vec<Row> {
    let row = |policy, informed| Row {
        workload: workload.name,
        policy,
        informed,
        batches: 0,
        commands: 0,
        waits: 0,
        tail_writes: 0,
        pages_changed: 0,
        pages_flushed: 0,
        refills: 0,
    };
    let mut rows: Vec<Row> = Policy::ALL.map(|policy| row(policy, true)).into();
    rows.push(row(Policy::Planned, false));
    let mut entries = Entries::new(CostModel::DEFAULT.live_entries as usize);
    let recent = Recent::new();
    for step in &workload.steps {
        match step {
            Step::Use(leaves) => {
                for batch in leaves.chunks(BATCH) {
                    batch.iter().for_each(|leaf| entries.touch(*leaf));
                    recent.note(&cover(batch, Change::Added));
                }
            }
            Step::Unmap(leaves) => {
                for batch in leaves.chunks(BATCH) {
                    batch.iter().for_each(|leaf| entries.forget(*leaf));
                    rows.iter_mut().for_each(|row| flush_batch(row, batch, &entries, &recent));
                    recent.note(&cover(batch, Change::Modified));
                }
            }
        }
    }
    rows
}

fn flush_batch(row: &mut Row, batch: &[Leaf], entries: &Entries, recent: &Recent) {
    let whole = cover(batch, Change::Modified);
    let planner = Planner::new(row.policy);
    let planner =
        if row.informed { planner.with_live(entries) } else { planner.with_recent(recent) };
    let covers = if row.policy == Policy::Gather { gathered(batch) } else { vec![whole.clone()] };
    let mut lost = BTreeSet::new();
    row.batches += 1;
    row.pages_changed += whole.pages();
    for cover in covers {
        row.add(&planner.plan(&cover, LIMITS), &cover, entries, &mut lost);
    }
    row.refills += lost.len() as u64;
}

/// The rows of all eight workloads.
#[must_use]
pub fn compare_all() -> Vec<Row> {
    super::all().iter().flat_map(compare).collect()
}
