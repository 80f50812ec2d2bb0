//! What flushing may cost with 16 streams, and under which assumptions it holds
//!
//! How many CPUs of a stream are in the domain at a time is not published, and neither is
//! what CPUs do that wait for their turn. A [`Held`] is one answer to both.

use anyhow::{Context, Result};
use host::simulate::{Machine, Prices, Rest, Scene, System, run};
use host::workloads::Workload;
use serde::Serialize;

use super::{MOST, TRAFFIC};

/// The most that flushing may cost, in us a page.
const AIM: f64 = 0.6;

/// What CPUs may do that have no part in flushing.
const WAYS: [(Rest, &str); 3] = [
    (Rest::OneServer, "one server"),
    (Rest::OneServerAsleep, "one server, who waits sleeps"),
    (Rest::PerStream, "one server per stream"),
];

/// The fewest and the most CPUs of a stream: its own, and the one of the program it serves,
/// which is never or always in the domain.
const BOUNDS: [u16; 2] = [1, 2];

/// What flushing costs with 16 streams when all is done, against the most it may.
#[derive(Serialize)]
pub(super) struct Held {
    pub(super) rest: &'static str,
    pub(super) cpus_per_stream: u16,
    pub(super) flush_us_per_page: f64,
    pub(super) aim: f64,
    pub(super) holds: bool,
    pub(super) cpus_per_flush: f64,
    pub(super) batches_per_flush: f64,
    /// What interrupting one CPU more takes, and the most it may take for the aim to hold.
    pub(super) further_cpu_us: f64,
    pub(super) further_cpu_us_at_most: f64,
}

/// Every way, with the fewest, the most and the `chosen` number of CPUs for each stream.
pub(super) fn all(all: &[Workload], machine: Machine, chosen: u16) -> Result<Vec<Held>> {
    let workload = all.iter().find(|one| one.name == TRAFFIC).context("there is no traffic")?;
    let chosen = (!BOUNDS.contains(&chosen)).then_some(chosen);
    let numbers = || BOUNDS.into_iter().chain(chosen);
    let each = |(rest, name)| numbers().map(move |cpus| one(workload, machine, rest, name, cpus));
    Ok(WAYS.into_iter().flat_map(each).collect())
}

fn one(workload: &Workload, machine: Machine, rest: Rest, name: &'static str, cpus: u16) -> Held {
    let prices = Prices::calibrated();
    let system = System::PLANNED_COMBINED;
    let scene =
        Scene { workload, streams: MOST, cpus_per_stream: cpus, machine, rest, system, prices };
    let outcome = run(&scene);
    let cost = outcome.flush_us_per_page();
    let further_cpu_us = prices.further_cpu() as f64 / 1000.0;
    let cpus_per_flush = outcome.interrupted_per_flush();
    // What is left over for each flush, or missing, shared by the CPUs after the first.
    let left = (AIM - cost) * outcome.pages as f64 / outcome.flushes as f64;
    Held {
        rest: name,
        cpus_per_stream: cpus,
        flush_us_per_page: cost,
        aim: AIM,
        holds: cost <= AIM,
        cpus_per_flush,
        batches_per_flush: outcome.batches_per_flush(),
        further_cpu_us,
        further_cpu_us_at_most: further_cpu_us + left / (cpus_per_flush - 1.0).max(1.0),
    }
}
