//! What the flush counters say of calls on the model, and what the model counted.
//!
//! A [`Row`] is one kind of call: what the crates counted while it ran, and beside it what
//! the hardware of the model saw. Whoever reads the counters of an embedder reads the same.

use std::collections::BTreeMap;

pub use flush::Counted;
use flush::Gfn;
use gnttab::Verdict;
use hwmodel::Failure;

use crate::{
    Setup, World, combining,
    workloads::{self, Leaf, Step, Workload},
    world::{FIRST_REFERENCE, OTHER_CPU, granted_gfn},
};

/// Pages that are unmapped of each workload at most.
pub const PAGES: usize = 2048;

/// Callers that flush one domain at once, in the row of that name.
pub const CALLERS: usize = 16;

/// What the crates counted while calls ran.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Figures {
    /// Flushes of CPUs.
    pub tlb: Counted,
    /// Flushes of devices.
    pub iotlb: Counted,
    /// IOTLB commands that units were told.
    pub commands: u64,
    /// Of these, commands for a whole domain or for everything.
    pub wide_commands: u64,
    /// Waits behind them.
    pub waits: u64,
    /// Writes of a queue's tail.
    pub tail_writes: u64,
    /// Pages that commands named; none for a wide one.
    pub pages_flushed: u64,
    /// Requests that a unit was told again.
    pub retried_commands: u64,
    /// Submissions that units did not finish in time.
    pub late_units: u64,
    /// Interrupts sent to CPUs that ran the guest: one for each.
    pub kicks: u64,
    /// Flushes that gave up on a CPU.
    pub late_cpus: u64,
    /// Batches that were flushed again in their call.
    pub retries: u64,
    /// Pages in quarantine at the end.
    pub in_quarantine: u64,
    /// Requests of callers that flushed at the same time.
    pub tickets: u64,
    /// Of these, requests that another caller's flush served.
    pub shared: u64,
}

impl Figures {
    /// Pages named for each page changed; `None` where that says nothing.
    #[must_use]
    pub fn over_flush(&self) -> Option<f64> {
        let pages = self.iotlb.pages_changed;
        (pages > 0 && self.wide_commands == 0).then(|| self.pages_flushed as f64 / pages as f64)
    }
}

/// What the hardware of the model counted meanwhile.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Seen {
    /// IOTLB commands carried out.
    pub commands: u64,
    /// Waits carried out.
    pub waits: u64,
    /// Writes of a queue's tail.
    pub tail_writes: u64,
    /// Pages named by the commands.
    pub pages_flushed: u64,
    /// Interrupts sent.
    pub interrupts: u64,
    /// Invalidations that CPUs carried out.
    pub invalidations: u64,
}

/// One kind of call.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Row {
    /// What was called.
    pub name: &'static str,
    /// What the crates counted.
    pub figures: Figures,
    /// What the model counted; `None` where no hardware is involved.
    pub seen: Option<Seen>,
}

impl Row {
    /// Whether the model saw all that the crates say they did. Not where hardware failed:
    /// then it is told more than it does.
    #[must_use]
    pub fn agrees(&self) -> bool {
        let Figures { commands, waits, tail_writes, pages_flushed, kicks, .. } = self.figures;
        self.seen.is_none_or(|seen| {
            let same = Seen {
                commands,
                waits,
                tail_writes,
                pages_flushed,
                interrupts: kicks,
                invalidations: seen.invalidations,
            };
            // The CPU that was kicked invalidates when it enters again.
            seen == same && seen.invalidations == kicks
        })
    }
}

/// A world, and what its counters said before.
struct Meters {
    world: World,
    figures: Figures,
    seen: Seen,
}

impl Meters {
    fn new() -> Self {
        let world = World::new(Setup { frames: 4 * PAGES as u64 + 16384, ..Setup::default() });
        Self { world, figures: Figures::default(), seen: Seen::default() }
    }

    fn read(&self) -> Figures {
        let totals = self.world.faults.account.read();
        let unit = self.world.units[0].counters();
        let cpus = self.world.backend().cpus.counts();
        Figures {
            tlb: totals.tlb,
            iotlb: totals.iotlb,
            commands: unit.iotlb_commands,
            wide_commands: unit.wide_commands,
            waits: unit.waits,
            tail_writes: unit.tail_writes,
            pages_flushed: unit.pages_flushed,
            retried_commands: unit.retried,
            late_units: unit.expired,
            kicks: cpus.kicks,
            late_cpus: cpus.timeouts,
            retries: totals.retries,
            in_quarantine: totals.in_quarantine,
            tickets: 0,
            shared: 0,
        }
    }

    fn look(&self) -> Seen {
        let counters = self.world.machine.counters();
        let unit = counters.units[0];
        Seen {
            commands: unit.iotlb_commands(),
            waits: unit.waits,
            tail_writes: unit.tail_writes,
            pages_flushed: unit.pages_flushed,
            interrupts: counters.cpus.iter().map(|cpu| cpu.ipis).sum(),
            invalidations: counters.cpus.iter().map(|cpu| cpu.invalidations).sum(),
        }
    }

    /// Adds to the figures what `calls` comes to.
    fn count(&mut self, calls: impl FnOnce(&World)) {
        let (figures, seen) = (self.read(), self.look());
        calls(&self.world);
        let (now, looked) = (self.read(), self.look());
        self.figures = added(&self.figures, &figures, &now);
        let add = |sum: u64, before: u64, after: u64| sum + after - before;
        let sum = self.seen;
        self.seen = Seen {
            commands: add(sum.commands, seen.commands, looked.commands),
            waits: add(sum.waits, seen.waits, looked.waits),
            tail_writes: add(sum.tail_writes, seen.tail_writes, looked.tail_writes),
            pages_flushed: add(sum.pages_flushed, seen.pages_flushed, looked.pages_flushed),
            interrupts: add(sum.interrupts, seen.interrupts, looked.interrupts),
            invalidations: add(sum.invalidations, seen.invalidations, looked.invalidations),
        };
    }

    fn row(self, name: &'static str) -> Row {
        Row { name, figures: self.figures, seen: Some(self.seen) }
    }
}

/// `sum` and what came between `before` and `after`.
fn added(sum: &Figures, before: &Figures, after: &Figures) -> Figures {
    let add = |sum: u64, before: u64, after: u64| sum + after - before;
    let kind = |sum: &Counted, before: &Counted, after: &Counted| {
        let new = after.since(before);
        let mut sizes = sum.sizes;
        sizes.iter_mut().zip(new.sizes).for_each(|(size, new)| *size += new);
        Counted {
            asked: sum.asked + new.asked,
            recorded: sum.recorded + new.recorded,
            issued: sum.issued + new.issued,
            completed: sum.completed + new.completed,
            failed: sum.failed + new.failed,
            pages_changed: sum.pages_changed + new.pages_changed,
            sizes,
        }
    };
    Figures {
        tlb: kind(&sum.tlb, &before.tlb, &after.tlb),
        iotlb: kind(&sum.iotlb, &before.iotlb, &after.iotlb),
        commands: add(sum.commands, before.commands, after.commands),
        wide_commands: add(sum.wide_commands, before.wide_commands, after.wide_commands),
        waits: add(sum.waits, before.waits, after.waits),
        tail_writes: add(sum.tail_writes, before.tail_writes, after.tail_writes),
        pages_flushed: add(sum.pages_flushed, before.pages_flushed, after.pages_flushed),
        retried_commands: add(
            sum.retried_commands,
            before.retried_commands,
            after.retried_commands,
        ),
        late_units: add(sum.late_units, before.late_units, after.late_units),
        kicks: add(sum.kicks, before.kicks, after.kicks),
        late_cpus: add(sum.late_cpus, before.late_cpus, after.late_cpus),
        retries: add(sum.retries, before.retries, after.retries),
        // Not a sum: what is there now.
        in_quarantine: after.in_quarantine,
        tickets: sum.tickets,
        shared: sum.shared,
    }
}

/// 32 pages, each unmapped by a call of its own, or all by one.
fn demo(name: &'static str, per_call: usize) -> Row {
    let mut meters = Meters::new();
    let grants = meters.world.share_at(0x10_0000, 1, 32);
    for part in grants.chunks(per_call) {
        meters.count(|world| assert_done(world.give_back(part).0.outcome));
    }
    meters.row(name)
}

fn assert_done(outcome: gnttab::Outcome) {
    assert_eq!(outcome, gnttab::Outcome::Done, "the call ends well");
}

/// The unmaps of a workload, in its order, until [`PAGES`] pages were unmapped. Each page
/// is a grant; large leaves are left out.
fn workload(workload: &Workload) -> Row {
    let mut meters = Meters::new();
    let mut references: BTreeMap<u64, u32> = BTreeMap::new();
    let mut left = PAGES;
    for step in &workload.steps {
        let Step::Unmap(leaves) = step else { continue };
        let pages = leaves.iter().filter(|leaf| leaf.order == 0).map(|leaf: &Leaf| leaf.first);
        let pages: Vec<Gfn> = pages.take(left).collect();
        if pages.is_empty() {
            continue;
        }
        left -= pages.len();
        let world = &meters.world;
        let mut grants = Vec::new();
        for gfn in &pages {
            let next = FIRST_REFERENCE + u32::try_from(references.len()).expect("few pages");
            let reference = *references.entry(gfn.get()).or_insert_with(|| {
                world.grant(next, granted_gfn(next), false);
                next
            });
            grants.push((reference, *gfn));
        }
        let mapped = world.map(&grants, false);
        let mappings: Vec<(u32, Gfn)> =
            mapped.into_iter().map(|(_, handle)| handle).zip(pages.iter().copied()).collect();
        pages.iter().for_each(|gfn| world.touch(*gfn));
        meters.count(|world| assert_done(world.unmap(&mappings).outcome));
    }
    meters.row(workload.name)
}

/// A call during which a device's answer gets lost once, and one during which the queue
/// hangs, in both of which the embedder asks for retries.
fn failing() -> Row {
    let mut meters = Meters::new();
    meters.world.faults.verdict.set(Some(Verdict::Retry));
    for (failure, survives) in [(Failure::TimeOut, true), (Failure::Hang, false)] {
        let grants = meters.world.share_at(0x10_0000, 1, 32);
        meters.count(|world| {
            // The second operation is the command.
            world.machine.fail_operation(2, failure);
            assert_eq!(world.give_back(&grants).0.failed.is_empty(), survives, "{failure:?}");
        });
        if survives {
            meters.world.take_back_and_try(&grants, OTHER_CPU);
        }
    }
    Row { seen: None, ..meters.row("failing") }
}

/// Many callers that flush at once.
fn at_once() -> Row {
    let flushes = combining::flushes(CALLERS).unwrap_or_default();
    let tickets = CALLERS as u64;
    let figures = Figures { tickets, shared: tickets - flushes, ..Figures::default() };
    Row { name: "at once", figures, seen: None }
}

/// The calls of the demo, the workloads, failing hardware, and callers at once.
///
/// # Panics
/// If a call does not end as it must: that is a defect of the project.
#[must_use]
pub fn all() -> Vec<Row> {
    let mut rows = vec![demo("per page", 1), demo("batched", 32)];
    rows.extend(workloads::all().iter().map(workload));
    rows.extend([failing(), at_once()]);
    rows
}
