//! From a cover to commands: which blocks to name, or the whole domain.
//!
//! A [`Planner`] turns a [`Cover`] into a [`Plan`] for hardware with given [`Limits`].
//! Whatever the policy, a plan makes hardware forget all that the cover names: a policy
//! decides what that costs. [`Policy::Planned`] is the cheapest of them under the
//! planner's own prices; the others are there to be compared with.

mod cheapest;
mod cost;
mod front;
mod recent;
mod statistics;

use arrayvec::ArrayVec;

use crate::{Block, Cover, Extent, Gfn, Run, cover::RUNS};
use cost::Assumed;
pub use cost::{CostModel, LiveEntries, Nanoseconds};
use front::Front;
pub use recent::Recent;
pub use statistics::{Figures, SIZES, Statistics};

/// Commands that share one wait: no more are handed to hardware at once.
pub const SUBMISSION: usize = 64;

/// The most commands of one plan; what needs more flushes the domain.
pub const COMMANDS: usize = 1024;

/// The most blocks the planner chooses on its own: two for each run of a cover.
const BLOCKS: usize = 2 * RUNS;

/// Frame numbers that can be named have so many bits: 4 KiB frames of 64-bit addresses.
const FRAME_BITS: u32 = 52;

/// How a cover becomes commands.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Policy {
    /// Every leaf with a command and a wait of its own: no batching at all.
    PerPage,
    /// One block around everything, from the first page to the last.
    Hull,
    /// One block around each run, each with a wait of its own: a range is gathered
    /// until the next page does not continue it.
    Gather,
    /// The fewest blocks that hold no other page.
    Exact,
    /// At most two blocks for each run, of less than twice its pages.
    TwoBlock,
    /// The cheapest blocks there are, or the domain if that is cheaper.
    #[default]
    Planned,
}

impl Policy {
    /// All of them, the simplest first.
    pub const ALL: [Self; 6] =
        [Self::PerPage, Self::Hull, Self::Gather, Self::Exact, Self::TwoBlock, Self::Planned];

    /// Its name in tables: lower case, words joined by a hyphen.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::PerPage => "per-page",
            Self::Hull => "hull",
            Self::Gather => "gather",
            Self::Exact => "exact",
            Self::TwoBlock => "two-block",
            Self::Planned => "planned",
        }
    }

    /// Whether each block is waited for on its own.
    const fn waits_for_each(self) -> bool {
        match self {
            Self::PerPage | Self::Gather => true,
            Self::Hull | Self::Exact | Self::TwoBlock | Self::Planned => false,
        }
    }
}

/// What hardware can be told.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// It can be told to forget single blocks.
    pub page_selective: bool,
    /// The order of the largest block, as log2 of 4 KiB pages.
    pub max_order: u8,
}

/// What to tell hardware.
#[derive(Clone, Debug)]
#[expect(clippy::large_enum_variant, reason = "no heap; it lives on the stack, and briefly")]
pub enum Plan {
    /// Nothing has to be forgotten.
    Nothing,
    /// These blocks; at least one, at most [`COMMANDS`].
    Blocks(Blocks),
    /// All of the domain.
    Domain,
    /// All of every domain.
    Global,
}

impl Plan {
    /// How many commands it takes.
    #[must_use]
    pub fn commands(&self) -> usize {
        match self {
            Self::Nothing => 0,
            Self::Blocks(blocks) => blocks.clone().count(),
            Self::Domain | Self::Global => 1,
        }
    }

    /// How many submissions it takes: each has a wait and a tail write of its own.
    #[must_use]
    pub fn submissions(&self) -> usize {
        match self {
            Self::Blocks(blocks) if blocks.waits_for_each() => self.commands(),
            Self::Nothing | Self::Blocks(_) | Self::Domain | Self::Global => {
                self.commands().div_ceil(SUBMISSION)
            }
        }
    }
}

/// The blocks of a plan, in ascending order of their first pages.
///
/// They may overlap where runs lie close together, save for those of [`Policy::Exact`].
#[derive(Clone, Debug)]
pub struct Blocks {
    source: Source,
    waits_for_each: bool,
}

#[derive(Clone, Debug)]
#[expect(clippy::large_enum_variant, reason = "no heap; both live on the stack, and briefly")]
enum Source {
    Chosen(arrayvec::IntoIter<Block, BLOCKS>),
    Fronts {
        /// What is left of the first run, and the runs behind it, with their orders.
        runs: arrayvec::IntoIter<(Run, u8), RUNS>,
        current: Option<(Run, u8)>,
        front: Front,
        max_order: u8,
    },
}

impl Blocks {
    fn chosen(blocks: ArrayVec<Block, BLOCKS>) -> Self {
        Self { source: Source::Chosen(blocks.into_iter()), waits_for_each: false }
    }

    fn fronts(runs: ArrayVec<(Run, u8), RUNS>, front: Front, max_order: u8) -> Self {
        let mut runs = runs.into_iter();
        let current = runs.next();
        Self { source: Source::Fronts { runs, current, front, max_order }, waits_for_each: false }
    }

    /// Whether each block is to be submitted and waited for on its own.
    #[must_use]
    pub fn waits_for_each(&self) -> bool {
        self.waits_for_each
    }
}

impl Iterator for Blocks {
    type Item = Block;

    fn next(&mut self) -> Option<Block> {
        match &mut self.source {
            Source::Chosen(blocks) => blocks.next(),
            Source::Fronts { runs, current, front, max_order } => {
                let (run, order) = (*current)?;
                let block = front(run, order, *max_order);
                let behind = block.run().last().get().checked_add(1);
                let rest = behind.and_then(|first| Run::new(Gfn::new(first), run.last()));
                *current = rest.map(|rest| (rest, order)).or_else(|| runs.next());
                Some(block)
            }
        }
    }
}

/// Decides how a cover is flushed.
#[derive(Clone, Copy, Debug, Default)]
pub struct Planner<'a> {
    policy: Policy,
    costs: CostModel,
    live: Option<&'a dyn LiveEntries>,
    recent: Option<&'a Recent>,
}

impl<'a> Planner<'a> {
    /// A planner with this policy and the default prices.
    #[must_use]
    pub const fn new(policy: Policy) -> Self {
        Self { policy, costs: CostModel::DEFAULT, live: None, recent: None }
    }

    /// The same with these prices.
    #[must_use]
    pub const fn with_costs(self, costs: CostModel) -> Self {
        Self { costs, ..self }
    }

    /// The same, asking `live` which entries are worth keeping.
    #[must_use]
    pub const fn with_live(self, live: &'a dyn LiveEntries) -> Self {
        Self { live: Some(live), ..self }
    }

    /// The same, not sparing what `recent` says is gone, unless somebody was asked with
    /// [`with_live`](Self::with_live).
    #[must_use]
    pub const fn with_recent(self, recent: &'a Recent) -> Self {
        Self { recent: Some(recent), ..self }
    }

    /// Its policy.
    #[must_use]
    pub const fn policy(&self) -> Policy {
        self.policy
    }

    /// What to tell hardware with these limits, so that it forgets `cover`.
    ///
    /// Equal arguments give equal plans. The time it takes is bounded: the orders times
    /// the runs of a cover, or [`COMMANDS`], whichever is more.
    #[must_use]
    pub fn plan(&self, cover: &Cover, limits: Limits) -> Plan {
        match cover.extent() {
            Extent::Nothing => return Plan::Nothing,
            Extent::Everything => return self.wide(cover).0,
            Extent::Runs(_) => {}
        }
        let top = cover.runs().next_back().map_or(0, |(run, _)| run.last().get());
        if !limits.page_selective || cover.order() > limits.max_order || top >> FRAME_BITS != 0 {
            return self.wide(cover).0;
        }
        let simple = |front, runs| named(Blocks::fronts(runs, front, limits.max_order), limits);
        let blocks = match self.policy {
            Policy::PerPage => simple(front::leaf, cover.runs().collect()),
            Policy::Hull => simple(front::around, hull(cover)),
            Policy::Gather => simple(front::around, ranges(cover)),
            Policy::Exact => simple(front::exact, ranges(cover)),
            Policy::TwoBlock => simple(front::two_block, ranges(cover)),
            Policy::Planned => return self.cheapest(cover, limits),
        };
        let waits_for_each = self.policy.waits_for_each();
        blocks.map_or(Plan::Domain, |blocks| Plan::Blocks(Blocks { waits_for_each, ..blocks }))
    }

    /// What carrying out `plan` costs, if it is a plan for `cover`.
    #[must_use]
    pub fn estimate(&self, cover: &Cover, plan: &Plan) -> Nanoseconds {
        let costs = &self.costs;
        let submission = costs.wait.plus(costs.tail);
        let commands = match plan {
            Plan::Nothing => Nanoseconds::default(),
            Plan::Blocks(blocks) => blocks.clone().fold(Nanoseconds::default(), |sum, block| {
                let lost = self.lost(cover, block.run(), changed_within(cover, block));
                sum.plus(costs.page).plus(lost)
            }),
            Plan::Domain => costs.domain.plus(self.lost(cover, Run::ALL, cover.pages())),
            Plan::Global => {
                let lost = self.with_knowledge(cover, |live| live.of_unit());
                costs.global.plus(costs.refill.times(lost))
            }
        };
        commands.plus(submission.times(plan.submissions() as u64))
    }

    fn with_knowledge<T>(&self, cover: &Cover, ask: impl FnOnce(&dyn LiveEntries) -> T) -> T {
        match self.live {
            Some(live) => ask(live),
            None => {
                let gone = self.recent.and_then(|recent| recent.apart_from(cover));
                ask(&Assumed { entries: self.costs.live_entries, gone })
            }
        }
    }

    /// The price of what goes with `run` although nobody asked for it.
    fn lost(&self, cover: &Cover, run: Run, changed: u64) -> Nanoseconds {
        self.costs.refill.times(self.with_knowledge(cover, |live| live.within(run, changed)))
    }

    /// The command that names no pages, and its price: the cheaper of the two where the
    /// policy is to choose.
    fn wide(&self, cover: &Cover) -> (Plan, Nanoseconds) {
        let domain = self.estimate(cover, &Plan::Domain);
        let global = self.estimate(cover, &Plan::Global);
        if self.policy == Policy::Planned && global < domain {
            (Plan::Global, global)
        } else {
            (Plan::Domain, domain)
        }
    }

    fn cheapest(&self, cover: &Cover, limits: Limits) -> Plan {
        let max_order = limits.max_order;
        let (wide, wide_cost) = self.wide(cover);
        let choose = |seeds: &mut dyn Iterator<Item = (Block, u64)>| {
            self.with_knowledge(cover, |live| {
                cheapest::cheapest(seeds, max_order, &self.costs, live)
            })
        };
        let ranges = ranges(cover);
        // A run that needs no rounding is changed in every page.
        let rounded = cover.order() > 0;
        let exact = Blocks::fronts(ranges.clone(), front::exact, max_order);
        let mut seeds = exact.clone().map(|block| {
            (block, if rounded { changed_within(cover, block) } else { block.pages() })
        });
        if let Some((blocks, cost)) = choose(&mut seeds) {
            let submission = self.costs.wait.plus(self.costs.tail);
            return if wide_cost < cost.plus(submission) {
                wide
            } else {
                Plan::Blocks(Blocks::chosen(blocks))
            };
        }
        // Too many pieces to keep: the best of what needs fewer, and of what needs no list.
        let halves = Blocks::fronts(ranges, front::two_block, max_order);
        let coarse = disjoint(halves.clone()).and_then(|blocks| {
            choose(&mut blocks.into_iter().map(|block| (block, changed_within(cover, block))))
        });
        let coarse = coarse.map(|(blocks, _)| Blocks::chosen(blocks));
        let candidates = [coarse, named(halves, limits), named(exact, limits)];
        candidates.into_iter().flatten().map(Plan::Blocks).fold(wide, |best, plan| {
            if self.estimate(cover, &plan) < self.estimate(cover, &best) { plan } else { best }
        })
    }
}

/// The blocks, if hardware with these limits can be told all of them.
fn named(blocks: Blocks, limits: Limits) -> Option<Blocks> {
    let mut rest = blocks.clone();
    let nameable = |block: Block| block.order() <= limits.max_order && block.address().is_some();
    let all = rest.by_ref().take(COMMANDS).all(nameable);
    (all && rest.next().is_none()).then_some(blocks)
}

/// The runs of a cover, rounded to the leaves they hold part of, and joined where they
/// overlap then. Every leaf lies in one of them.
fn ranges(cover: &Cover) -> ArrayVec<(Run, u8), RUNS> {
    let mut ranges: ArrayVec<(Run, u8), RUNS> = ArrayVec::new();
    for (run, order) in cover.runs() {
        let mut run = if order == 0 {
            run
        } else {
            Run::block(run.first(), order).hull(Run::block(run.last(), order))
        };
        while let Some((below, _)) = ranges.last().copied()
            && below.last() >= run.first()
        {
            run = run.hull(below);
            ranges.pop();
        }
        ranges.push((run, 0));
    }
    ranges
}

/// The one run from the first page of a cover to its last.
fn hull(cover: &Cover) -> ArrayVec<(Run, u8), RUNS> {
    let runs = ranges(cover).into_iter().map(|(run, _)| run);
    runs.reduce(Run::hull).map(|run| (run, 0)).into_iter().collect()
}

/// How many pages of `block` are on record.
fn changed_within(cover: &Cover, block: Block) -> u64 {
    let pages = cover.runs().map(|(run, _)| recent::common(run, block.run()));
    pages.fold(0, u64::saturating_add)
}

/// The blocks without those that lie in others; `None` if there are too many.
fn disjoint(blocks: Blocks) -> Option<ArrayVec<Block, BLOCKS>> {
    let mut apart: ArrayVec<Block, BLOCKS> = ArrayVec::new();
    for block in blocks {
        if apart.last().is_some_and(|below| below.run().covers(block.run())) {
            continue;
        }
        while apart.last().is_some_and(|below| block.run().covers(below.run())) {
            apart.pop();
        }
        apart.try_push(block).ok()?;
    }
    Some(apart)
}

#[cfg(test)]
mod tests;
