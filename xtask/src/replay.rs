//! Plays scenario files, on the software model and in QEMU
//!
//! `Arguments` says which files, on which hardware and with which planted bug. Every
//! file is run; the command fails if one of them did.

use std::path::PathBuf;

use anyhow::{Context, Result, bail};
use clap::{Args, ValueEnum, builder::PossibleValuesParser};
use scenarios::{
    Broken, Manner, Open,
    parse::{self, Script},
    plants::{self, PLANTS},
    qemu::{self, Program},
    sweep::{Harm, sweep},
};
use serde::Serialize;

use crate::cases::{CASES, Case, Processors};
use crate::planted;
use crate::progress::Steps;
use crate::qemu::{Testbed, Verdict};

/// What `cargo xtask replay` can be asked.
#[derive(Args)]
#[expect(clippy::struct_excessive_bools, reason = "each is a switch of the command line")]
pub(crate) struct Arguments {
    /// Scenario files, or folders with some
    #[arg(value_name = "PATH", required_unless_present_any = ["list_plants", "explain"])]
    paths: Vec<PathBuf>,
    /// What to run them on
    #[arg(long, value_enum, default_value_t = Hardware::Model)]
    hw: Hardware,
    /// What CPUs of the model walk in files that leave it open
    #[arg(long, value_enum, default_value_t = Cpus::Ept)]
    cpus: Cpus,
    /// The first seed for hardware and orders of steps at random
    #[arg(long, default_value_t = 0)]
    seed: u64,
    /// Print the results as JSON
    #[arg(long)]
    json: bool,
    /// Print what happened in each scenario, step by step
    #[arg(long)]
    trace: bool,
    /// Plant a bug
    #[arg(long, value_name = "NAME", value_parser = PossibleValuesParser::new(plant_names()))]
    plant: Option<String>,
    /// Print the planted bugs there are, and run nothing
    #[arg(long)]
    list_plants: bool,
    /// Print under which planted bugs each scenario fails
    #[arg(long)]
    table: bool,
    /// Let everything that can fail in each scenario fail, one after the other
    #[arg(long)]
    sweep: bool,
    /// Tell the story of one file in words, and run nothing else
    #[arg(long, value_name = "FILE")]
    explain: Option<PathBuf>,
}

/// What scenarios run on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Hardware {
    /// The software model, which keeps everything it may keep
    Model,
    /// QEMU's VT-d, with a real driver and device
    Qemu,
    /// One after the other
    Both,
}

/// What CPUs of the model walk.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Cpus {
    /// Intel's second-stage tables
    Ept,
    /// AMD's, with an ASID for each vCPU
    Npt,
    /// One after the other
    Both,
}

/// How one scenario ended on one sort of hardware.
#[derive(Clone, Debug, Serialize)]
struct Outcome {
    file: String,
    bug: Option<String>,
    hw: &'static str,
    result: &'static str,
    why: String,
    interleavings: u64,
}

#[derive(Serialize)]
struct Report<'a> {
    scenarios: &'a [Outcome],
}

fn plant_names() -> impl Iterator<Item = &'static str> {
    PLANTS.iter().map(|plant| plant.name)
}

/// Does what was asked.
pub(crate) fn run(arguments: &Arguments) -> Result<()> {
    if arguments.list_plants {
        let width = plant_names().map(str::len).max().unwrap_or(0);
        for plant in PLANTS {
            println!("{:width$}  {}", plant.name, plant.about);
        }
        return Ok(());
    }
    if let Some(file) = &arguments.explain {
        print!("{}", scenarios::explain(&parse::load(file)?));
        return Ok(());
    }
    let files = parse::collect(&arguments.paths)?;
    let scripts = load(&files)?;
    if arguments.table {
        return planted::print(&scripts, arguments.json);
    }
    if arguments.sweep {
        return sweep_all(&scripts);
    }
    let mut outcomes = Vec::new();
    if arguments.hw != Hardware::Qemu {
        outcomes.extend(on_model(arguments, &scripts));
    }
    if arguments.hw != Hardware::Model {
        outcomes.extend(in_qemu(arguments, &scripts)?);
    }
    if arguments.json {
        println!("{}", serde_json::to_string_pretty(&Report { scenarios: &outcomes })?);
    }
    let count = |result: &str| outcomes.iter().filter(|outcome| outcome.result == result).count();
    let failed = count("fail");
    if !arguments.json {
        println!(
            "\nscenarios: {} passed; {failed} failed; {} not shown",
            count("pass"),
            count("not-shown")
        );
    }
    if failed > 0 {
        bail!("{failed} of {} scenarios failed", outcomes.len());
    }
    Ok(())
}

/// Reads all files; says what is wrong with every one that makes no sense.
pub(crate) fn load(files: &[PathBuf]) -> Result<Vec<Script>> {
    let mut scripts = Vec::new();
    let mut problems = Vec::new();
    for file in files {
        match parse::load(file) {
            Ok(script) => scripts.push(script),
            Err(problem) => problems.push(problem.to_string()),
        }
    }
    if problems.is_empty() { Ok(scripts) } else { bail!("{}", problems.join("\n")) }
}

fn on_model(arguments: &Arguments, scripts: &[Script]) -> Vec<Outcome> {
    let plant = arguments.plant.as_deref().and_then(plants::named);
    let open = match arguments.cpus {
        Cpus::Ept => Open::Ept,
        Cpus::Npt => Open::Npt,
        Cpus::Both => Open::Both,
    };
    let manner = Manner { seed: arguments.seed, plant, once: false, open };
    let steps = Steps::new("replay", scripts.len());
    let mut outcomes = Vec::new();
    for script in scripts {
        let file = script.file.display().to_string();
        steps.begin(&file);
        let verdict = quietly(|| scenarios::run(script, manner));
        let (result, why) = match &verdict.broken {
            None => ("pass", String::new()),
            Some(broken) => ("fail", format!("line {}: {}", broken.line, broken.text)),
        };
        if !arguments.json {
            let (runs, (tlb, iotlb)) = (verdict.interleavings, verdict.flushes);
            let orders = orders(&verdict);
            steps.print(&format!(
                "{result} {file} (model, {runs} runs, {orders}, at most {tlb} + {iotlb} flushes)"
            ));
            if let Some(broken) = &verdict.broken {
                steps.print(&shown(broken));
            } else if arguments.trace {
                steps.print(&indented(&verdict.story));
            }
        }
        let bug = script.scenario.bug.clone();
        let interleavings = verdict.interleavings;
        outcomes.push(Outcome { file, bug, hw: "model", result, why, interleavings });
        steps.end();
    }
    outcomes
}

/// Which orders of the actors' steps were run.
fn orders(verdict: &scenarios::Verdict) -> String {
    match (verdict.complete, verdict.interruptions) {
        (true, _) => "all orders".to_owned(),
        (false, None) => "some orders".to_owned(),
        (false, Some(0)) => "all orders of whole steps, some others".to_owned(),
        (false, Some(1)) => "all orders with 1 interruption, some with more".to_owned(),
        (false, Some(most)) => format!("all orders with {most} interruptions, some with more"),
    }
}

/// Boots the testbed with each scenario, once for each layout of tables.
fn in_qemu(arguments: &Arguments, scripts: &[Script]) -> Result<Vec<Outcome>> {
    let plant = arguments.plant.as_deref();
    let testbed = Testbed::prepare()?;
    let steps = Steps::new("qemu", scripts.len());
    let mut outcomes = Vec::new();
    for script in scripts {
        let file = script.file.display().to_string();
        steps.begin(&file);
        let (result, why) = match (plant, qemu::lower(script)) {
            (Some(plant), _) if !qemu::has_plant(plant) => {
                ("not-shown", format!("the testbed cannot plant `{plant}`"))
            }
            (_, Err(why)) => ("not-shown", why),
            (plant, Ok(program)) => boot(&testbed, &program, plant)?,
        };
        if !arguments.json {
            let reason = if why.is_empty() { String::new() } else { format!("\n    {why}") };
            steps.print(&format!("{result} {file} (QEMU){reason}"));
        }
        let bug = script.scenario.bug.clone();
        outcomes.push(Outcome { file, bug, hw: "qemu", result, why, interleavings: 1 });
        steps.end();
    }
    Ok(outcomes)
}

/// Boots one scenario; the result, and why, or what was not shown of it.
fn boot(
    testbed: &Testbed,
    program: &Program,
    plant: Option<&str>,
) -> Result<(&'static str, String)> {
    let found = CASES.iter().find(|case| case.name == "scenario");
    let case = found.context("the testbed has no case `scenario`")?;
    let iommu = if program.caching_mode { "caching-mode=on" } else { case.iommu };
    for qemu::Boot { text, words, guests } in &program.boots {
        let processors = if *guests { case.processors } else { Processors::One };
        let case = Case { iommu, processors, ..*case };
        let words = format!("{words} plant={}", plant.unwrap_or("none"));
        let boot = testbed.boot_with(&case, &words, Some(text))?;
        let counted = if plant.is_none() { boot.miscounted() } else { None };
        if boot.verdict != Verdict::Passed || counted.is_some() {
            let failed = boot.serial.lines().find_map(|line| line.strip_prefix("FAIL scenario: "));
            let why = failed.map(|why| program.in_words(why));
            let why = why.unwrap_or_else(|| boot.explain(&case));
            return Ok(("fail", format!("{words}: {why}")));
        }
    }
    let unshown = &program.unshown;
    let why = if unshown.is_empty() { String::new() } else { unshown.join("; ") };
    Ok(("pass", if why.is_empty() { why } else { format!("not shown: {why}") }))
}

/// Runs without the message of a panic, which is part of the verdict.
pub(crate) fn quietly<T>(action: impl FnOnce() -> T) -> T {
    let usual = std::panic::take_hook();
    std::panic::set_hook(Box::new(|_| {}));
    let result = action();
    std::panic::set_hook(usual);
    result
}

fn indented(lines: &[String]) -> String {
    lines.iter().map(|line| format!("    {line}")).collect::<Vec<_>>().join("\n")
}

/// A broken expectation with what led to it.
fn shown(broken: &Broken) -> String {
    let mut text = format!("  line {} ({}): {}", broken.line, broken.machine, broken.text);
    if !broken.order.is_empty() {
        text += &format!("\n  in this order:\n{}", indented(&broken.order));
    }
    if !broken.story.is_empty() {
        text += &format!("\n  after:\n{}", indented(&broken.story));
    }
    text
}

/// Sweeps faults over each scenario; fails if one of them does harm.
fn sweep_all(scripts: &[Script]) -> Result<()> {
    let steps = Steps::new("sweep", scripts.len());
    let (mut runs, mut harmed) = (0, 0);
    for script in scripts {
        let file = script.file.display().to_string();
        steps.begin(&file);
        let swept = quietly(|| sweep(script, u64::MAX));
        runs += swept.runs;
        harmed += swept.harm.len();
        let word = if swept.harm.is_empty() { "ok" } else { "HARM" };
        steps.print(&format!("{word} {file} ({} faults)", swept.runs));
        for harm in &swept.harm {
            let Harm { fault, machine, line, text } = harm;
            steps.print(&format!("    {fault} ({machine}), line {line}: {text}"));
        }
        steps.end();
    }
    drop(steps);
    println!("\nsweep: {runs} faults, {harmed} did harm");
    if harmed > 0 { bail!("{harmed} of {runs} faults did harm") } else { Ok(()) }
}
