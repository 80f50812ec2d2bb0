//! Streams at two stations: the rest, and one flush at a time.
//!
//! A [`Simulation`] moves streams from one to the other. A stream keeps its CPU from the
//! start of a batch until its flush has ended; a stream without a CPU waits for one.

use std::collections::{BTreeSet, VecDeque};

use flush::{
    Change, Cover, Depth, Gfn, Run,
    plan::{Limits, Plan, Planner},
};

use super::{
    Kick, Outcome, Rest, Scene,
    clock::{Clock, below, vary},
};
use crate::workloads::{Entries, Leaf, Step};

/// What units can be told.
const LIMITS: Limits = Limits { page_selective: true, max_order: 18 };

/// After so many pages, figures do not change any more.
const ENOUGH: u64 = 100_000;

/// Streams start within this time of each other.
const STAGGER: u64 = 5_000_000;

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Event {
    /// A stream goes on as soon as it has a CPU.
    Ready(usize),
    /// The rest of its batch is done; it needs a flush.
    Rested(usize),
    /// The flush under way has ended.
    Flushed,
}

#[derive(Debug)]
struct Stream<'a> {
    /// Its frame numbers lie this far above those of the first one.
    offset: u64,
    steps: &'a [Step],
    /// What is left of the call it is in.
    call: &'a [Leaf],
    batch: &'a [Leaf],
    batches: u64,
    /// Refills it has to wait for, in nanoseconds.
    owed: u64,
    asked: u64,
}

impl<'a> Stream<'a> {
    fn moved(&self, leaf: Leaf) -> Leaf {
        Leaf { first: Gfn::new(leaf.first.get() + self.offset), ..leaf }
    }

    /// Goes on to the next batch, using what is mapped on the way; `None` at the end.
    fn advance(&mut self, most: usize, entries: &mut Entries) -> Option<&'a [Leaf]> {
        while self.call.is_empty() {
            let (step, rest) = self.steps.split_first()?;
            self.steps = rest;
            match step {
                Step::Use(leaves) => {
                    leaves.iter().for_each(|leaf| entries.touch(self.moved(*leaf)));
                }
                Step::Unmap(leaves) => self.call = leaves,
            }
        }
        (self.batch, self.call) = self.call.split_at(most.clamp(1, self.call.len()));
        self.batches += 1;
        Some(self.batch)
    }

    fn pages(&self) -> u64 {
        self.batch.iter().map(|leaf| leaf.run().pages()).sum()
    }
}

/// One run of a scene.
#[derive(Debug)]
pub(super) struct Simulation<'a> {
    scene: &'a Scene<'a>,
    clock: Clock<Event>,
    streams: Vec<Stream<'a>>,
    entries: Entries,
    free_cpus: u64,
    /// Streams in the rest of a batch: the CPUs of the others that have some are in the
    /// hypervisor with their first.
    resting: u64,
    ready: VecDeque<usize>,
    /// When the one server of the rest has done all it was given.
    rest_free: u64,
    asking: VecDeque<usize>,
    served: Vec<usize>,
    flush_began: u64,
    /// From when on what happens counts.
    begin: u64,
    outcome: Outcome,
}

/// How many frame numbers lie between the first and the last of `steps`, and no less.
fn span(steps: &[Step]) -> u64 {
    let leaves = steps.iter().flat_map(|step| match step {
        Step::Use(leaves) | Step::Unmap(leaves) => leaves,
    });
    let hull = leaves.map(|leaf| leaf.run()).reduce(Run::hull);
    hull.map_or(0, Run::pages)
}

impl<'a> Simulation<'a> {
    pub(super) fn new(scene: &'a Scene<'a>) -> Self {
        let span = span(&scene.workload.steps);
        let streams: Vec<_> = (0..scene.streams.max(1))
            .map(|number| Stream {
                offset: u64::from(number) * span,
                steps: &scene.workload.steps,
                call: &[],
                batch: &[],
                batches: 0,
                owed: 0,
                asked: 0,
            })
            .collect();
        let mut clock = Clock::new();
        let mut begin = 0;
        for stream in 0..streams.len() {
            let start = below(STAGGER, stream, u64::MAX);
            begin = begin.max(start);
            clock.at(start, Event::Ready(stream));
        }
        Self {
            scene,
            clock,
            streams,
            entries: Entries::new(scene.prices.units.live_entries as usize),
            free_cpus: scene.machine.cpus,
            resting: 0,
            ready: VecDeque::new(),
            rest_free: 0,
            asking: VecDeque::new(),
            served: Vec::new(),
            flush_began: 0,
            begin,
            outcome: Outcome::default(),
        }
    }

    pub(super) fn finish(mut self) -> Outcome {
        while let Some(event) = self.clock.next() {
            match event {
                Event::Ready(stream) => self.ready.push_back(stream),
                Event::Rested(stream) => {
                    self.resting -= 1;
                    self.ask(stream);
                }
                Event::Flushed => self.flushed(),
            }
            if !self.dispatch() || self.outcome.pages >= ENOUGH {
                break;
            }
        }
        self.outcome.time = self.clock.now().saturating_sub(self.begin);
        self.outcome
    }

    /// CPUs that a stream takes while it runs.
    fn cpus_each(&self) -> u64 {
        u64::from(self.scene.cpus_per_stream).clamp(1, self.scene.machine.cpus)
    }

    /// CPUs in the domain. One that asks for a flush has left it to do so, and stays out
    /// until it is served; the others of its stream go on.
    fn inside(&self) -> u64 {
        let each = self.cpus_each();
        let flushing = (self.scene.machine.cpus - self.free_cpus) / each - self.resting;
        let awake = match self.scene.rest {
            Rest::OneServer | Rest::PerStream => self.resting,
            Rest::OneServerAsleep => self.resting.min(1),
        };
        awake * each + flushing * (each - 1)
    }

    /// Gives free CPUs to streams that want one; `false` if one has nothing more to do.
    fn dispatch(&mut self) -> bool {
        let each = self.cpus_each();
        while self.free_cpus >= each
            && let Some(number) = self.ready.pop_front()
        {
            let stream = &mut self.streams[number];
            if stream.advance(self.scene.system.batch, &mut self.entries).is_none() {
                return false;
            }
            self.free_cpus -= each;
            self.resting += 1;
            let work = self.scene.prices.rest * stream.pages();
            let time = vary(work, number, stream.batches) + std::mem::take(&mut stream.owed);
            let end = match self.scene.rest {
                Rest::PerStream => self.clock.now() + time,
                Rest::OneServer | Rest::OneServerAsleep => {
                    self.rest_free = self.rest_free.max(self.clock.now()) + time;
                    self.rest_free
                }
            };
            self.clock.at(end, Event::Rested(number));
        }
        true
    }

    fn ask(&mut self, number: usize) {
        let stream = &mut self.streams[number];
        stream.asked = self.clock.now();
        for leaf in stream.batch {
            self.entries.forget(stream.moved(*leaf));
        }
        self.asking.push_back(number);
        self.start_flush();
    }

    /// Begins a flush, if somebody asks for one and none is under way.
    fn start_flush(&mut self) {
        let Scene { system, machine, prices, .. } = self.scene;
        if !self.served.is_empty() {
            return;
        }
        let most = if system.combining { self.asking.len() } else { 1 };
        self.served = self.asking.drain(..most.min(self.asking.len())).collect();
        let Some(leader) = self.served.first() else { return };
        let mut whole = Cover::NOTHING;
        for number in &self.served {
            let stream = &self.streams[*number];
            let mut cover = Cover::NOTHING;
            for leaf in stream.batch {
                let run = stream.moved(*leaf).run();
                cover.record(run, leaf.order, Depth::Leaves, Change::Modified);
            }
            whole.merge(&cover);
        }
        let planner = Planner::new(system.policy).with_costs(prices.units).with_live(&self.entries);
        let plan = planner.plan(&whole, LIMITS);
        let lost = lost(&plan, &self.entries);
        let named = match &plan {
            Plan::Blocks(blocks) => blocks.clone().map(|block| block.pages()).sum(),
            Plan::Nothing | Plan::Domain | Plan::Global => whole.pages(),
        };
        let interrupted = match system.kick {
            Kick::Every => machine.cpus - 1,
            Kick::Running => self.inside(),
        };
        let time = prices.carry_out(&plan, *machine, interrupted, system.overlap);
        self.streams[*leader].owed += prices.units.refill.times(lost).get();
        self.flush_began = self.clock.now();
        if self.flush_began >= self.begin {
            self.outcome.refills += lost;
            self.outcome.interrupted += interrupted;
            self.outcome.named += named;
        }
        self.clock.at(self.flush_began + time, Event::Flushed);
    }

    fn flushed(&mut self) {
        let now = self.clock.now();
        let counts = now > self.begin;
        if counts {
            self.outcome.flushes += 1;
            self.outcome.flushing += now - self.flush_began.max(self.begin);
        }
        for number in std::mem::take(&mut self.served) {
            let stream = &self.streams[number];
            if counts {
                self.outcome.batches += 1;
                self.outcome.pages += stream.pages();
                self.outcome.waiting += now - stream.asked.max(self.begin);
            }
            self.free_cpus += self.cpus_each();
            self.ready.push_back(number);
        }
        self.start_flush();
    }
}

/// How many entries in use go with `plan`.
fn lost(plan: &Plan, entries: &Entries) -> u64 {
    let mut lost = BTreeSet::new();
    match plan {
        Plan::Nothing => {}
        Plan::Blocks(blocks) => {
            blocks.clone().for_each(|block| entries.lose(block.run(), &mut lost));
        }
        Plan::Domain | Plan::Global => entries.lose(Run::ALL, &mut lost),
    }
    lost.len() as u64
}
