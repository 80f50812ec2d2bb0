//! `cargo xtask simulate`: throughput and flush cost as streams are added
//!
//! A model in virtual time, see [`host::simulate`]. It is calibrated on the published row
//! without batching and says what the others should be; `docs/simulation.md` lists what
//! it assumes.

mod held;
mod print;

use std::cell::RefCell;
use std::panic::resume_unwind;
use std::thread;

use anyhow::{Context, Result};
use clap::Args;
use host::simulate::{Fall, Machine, Outcome, Prices, Rest, Scene, System, published, run as one};
use host::workloads::{self, Workload};
use serde::Serialize;

use held::Held;

#[derive(Args)]
pub(crate) struct Arguments {
    /// Print one JSON object instead of tables
    #[arg(long)]
    json: bool,
    /// CPUs of the machine; the published one had 96
    #[arg(long, default_value_t = 96, value_parser = clap::value_parser!(u16).range(1..=256))]
    cpus: u16,
    /// Remapping units that are flushed
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..=16))]
    units: u16,
    /// CPUs in the domain for each stream: its own, and those of the programs it serves
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..=16))]
    cpus_per_stream: u16,
}

/// The traffic of the rows: slots of network queues, given back in any order.
const TRAFFIC: &str = "W1";
/// Traffic that is predicted beside it, with 16 streams.
const OTHERS: [&str; 3] = ["W1", "W3", "W7"];
/// The most streams of the published table.
const MOST: u16 = 16;

const STATIONS: [(Rest, &str); 2] =
    [(Rest::OneServer, "one server"), (Rest::PerStream, "one server per stream")];

/// From what was published to all that is done here, a step at a time.
const STEPS: [(&str, System); 7] = [
    ("base", System::BASE),
    ("batched", System::BATCHED),
    ("+ planned blocks", System::PLANNED),
    ("+ started together", System::OVERLAPPED),
    ("+ combining", System::COMBINED),
    ("+ running CPUs only", System::PLANNED_COMBINED),
    ("all but combining", System::UNCOMBINED),
];

/// Microseconds for each page, under three systems.
#[derive(Serialize)]
struct Each {
    base: f64,
    batched: f64,
    planned_combined: f64,
}

/// Gbit/s under three systems, next to what was published.
#[derive(Serialize)]
struct Row {
    streams: u16,
    base: f64,
    published_base: f64,
    batched: f64,
    published_batched: f64,
    planned_combined: f64,
    /// How long the serialised flush was busy.
    flush_us_per_page: Each,
    /// How long streams stood waiting for it.
    wait_us_per_page: Each,
}

/// One system, workload and station with 16 streams.
#[derive(Serialize)]
struct Step {
    system: &'static str,
    workload: &'static str,
    gigabits: f64,
    flush_us_per_page: f64,
    wait_us_per_page: f64,
    batches_per_flush: f64,
    pages_per_batch: f64,
    refills_per_page: f64,
}

/// How much of the published fall from 1 to 16 streams is flushing.
#[derive(Serialize)]
struct Falls {
    published: f64,
    batched: OwnFall,
    planned_combined: OwnFall,
}

#[derive(Serialize)]
struct OwnFall {
    /// Of the row itself; below 0 if it rises.
    simulated: f64,
    /// Part of the published fall.
    share: f64,
    /// The most that part could be.
    bound: f64,
}

/// What one way of serving the rest predicts.
#[derive(Serialize)]
struct Prediction {
    rest: &'static str,
    rows: Vec<Row>,
    fall: Falls,
    steps: Vec<Step>,
    workloads: Vec<Step>,
}

#[derive(Serialize)]
struct Calibration {
    flush_us: f64,
    rest_us: f64,
    cpus: u16,
    units: u16,
    cpus_per_stream: u16,
}

#[derive(Serialize)]
struct Results {
    /// The rest as one server.
    rows: Vec<Row>,
    /// How the rest of the page is served in `rows`.
    rest: &'static str,
    fall: Falls,
    steps: Vec<Step>,
    workloads: Vec<Step>,
    per_stream: Prediction,
    held: Vec<Held>,
    calibration: Calibration,
}

/// Runs every scene and prints what came of it.
///
/// # Errors
/// If the numbers cannot be written as JSON.
pub(crate) fn run(arguments: &Arguments) -> Result<()> {
    let results = simulate(arguments)?;
    println!(
        "{}",
        if arguments.json { serde_json::to_string(&results)? } else { print::text(&results) }
    );
    Ok(())
}

fn simulate(arguments: &Arguments) -> Result<Results> {
    let machine = Machine::new(arguments.cpus, arguments.units).context("no such machine")?;
    let all = workloads::all();
    let [one_server, per_stream] = thread::scope(|scope| {
        let all = &all;
        let cpus_per_stream = arguments.cpus_per_stream;
        let predict = move |(rest, name)| {
            let known = RefCell::default();
            let simulator = Simulator { all, machine, cpus_per_stream, rest, known };
            simulator.predict(name)
        };
        let running = STATIONS.map(|station| scope.spawn(move || predict(station)));
        running.map(|thread| thread.join().unwrap_or_else(|panic| resume_unwind(panic)))
    });
    let Prediction { rest, rows, fall, steps, workloads } = one_server?;
    let prices = Prices::calibrated();
    Ok(Results {
        rows,
        rest,
        fall,
        steps,
        workloads,
        per_stream: per_stream?,
        held: held::all(&all, machine, arguments.cpus_per_stream)?,
        calibration: Calibration {
            flush_us: prices.flush as f64 / 1000.0,
            rest_us: prices.rest as f64 / 1000.0,
            cpus: arguments.cpus,
            units: arguments.units,
            cpus_per_stream: arguments.cpus_per_stream,
        },
    })
}

/// Workload, streams, system, and what came of it.
type Known = (&'static str, u16, System, Outcome);

struct Simulator<'a> {
    all: &'a [Workload],
    machine: Machine,
    cpus_per_stream: u16,
    rest: Rest,
    /// What was simulated already.
    known: RefCell<Vec<Known>>,
}

impl Simulator<'_> {
    fn outcome(&self, workload: &str, streams: u16, system: System) -> Result<Outcome> {
        let same = |known: &&Known| (known.0, known.1, known.2) == (workload, streams, system);
        if let Some((.., outcome)) = self.known.borrow().iter().find(same) {
            return Ok(*outcome);
        }
        let workload = self.all.iter().find(|one| one.name == workload);
        let workload = workload.context("there is no such workload")?;
        let Self { machine, cpus_per_stream, rest, .. } = *self;
        let prices = Prices::calibrated();
        let scene = Scene { workload, streams, cpus_per_stream, machine, rest, system, prices };
        let outcome = one(&scene);
        self.known.borrow_mut().push((workload.name, streams, system, outcome));
        Ok(outcome)
    }

    fn predict(&self, rest: &'static str) -> Result<Prediction> {
        let rows = (0..published::STREAMS.len())
            .map(|place| self.row(place))
            .collect::<Result<Vec<_>>>()?;
        let fall = |system| -> Result<Fall> {
            let one = self.outcome(TRAFFIC, 1, system)?;
            Ok(Fall::between(&one, &self.outcome(TRAFFIC, MOST, system)?))
        };
        let batched = fall(System::BATCHED)?;
        let combined = fall(System::PLANNED_COMBINED)?;
        let steps = STEPS.map(|(name, system)| self.step(name, TRAFFIC, system));
        let systems = [("batched", System::BATCHED), ("all of it", System::PLANNED_COMBINED)];
        let workloads = OTHERS
            .iter()
            .flat_map(|workload| systems.map(|(name, system)| self.step(name, workload, system)));
        Ok(Prediction {
            rest,
            rows,
            fall: Falls {
                published: batched.published,
                batched: batched.into(),
                planned_combined: combined.into(),
            },
            steps: steps.into_iter().collect::<Result<_>>()?,
            workloads: workloads.collect::<Result<_>>()?,
        })
    }

    fn row(&self, place: usize) -> Result<Row> {
        let streams = published::STREAMS[place];
        let outcome = |system| self.outcome(TRAFFIC, streams, system);
        let base = outcome(System::BASE)?;
        let batched = outcome(System::BATCHED)?;
        let combined = outcome(System::PLANNED_COMBINED)?;
        let each = |figure: fn(&Outcome) -> f64| Each {
            base: figure(&base),
            batched: figure(&batched),
            planned_combined: figure(&combined),
        };
        Ok(Row {
            streams,
            base: base.gigabits(),
            published_base: published::BASE[place],
            batched: batched.gigabits(),
            published_batched: published::BATCHED[place],
            planned_combined: combined.gigabits(),
            flush_us_per_page: each(Outcome::flush_us_per_page),
            wait_us_per_page: each(Outcome::wait_us_per_page),
        })
    }

    fn step(&self, name: &'static str, workload: &'static str, system: System) -> Result<Step> {
        let outcome = self.outcome(workload, MOST, system)?;
        Ok(Step {
            system: name,
            workload,
            gigabits: outcome.gigabits(),
            flush_us_per_page: outcome.flush_us_per_page(),
            wait_us_per_page: outcome.wait_us_per_page(),
            batches_per_flush: outcome.batches_per_flush(),
            pages_per_batch: outcome.pages as f64 / outcome.batches as f64,
            refills_per_page: outcome.refills as f64 / outcome.pages as f64,
        })
    }
}

impl From<Fall> for OwnFall {
    fn from(fall: Fall) -> Self {
        Self { simulated: fall.simulated, share: fall.share, bound: fall.bound }
    }
}

#[cfg(test)]
mod tests;
