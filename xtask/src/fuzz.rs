//! `cargo xtask fuzz`: random inputs against the crates, for as long as one likes
//!
//! A target is searched by a process of its own, two at a time. What breaks a promise is
//! written to a file, as small as it would get, and as a scenario beside it where it is a
//! story; the commands that play both again are printed.

use std::collections::VecDeque;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::sync::{Mutex, PoisonError};
use std::thread;
use std::time::{SystemTime, UNIX_EPOCH};

use anyhow::{Context, Result, bail};
use clap::Args;
use clap::builder::PossibleValuesParser;
use comfy_table::{Cell, CellAlignment, Table, presets};
use scenarios::plants::PLANTS;
use serde::Serialize;

use crate::checkout;
use crate::records;

/// The targets; a test of `quiesce-fuzz` checks that there are no others.
const TARGETS: &[&str] = &["dmar", "hypercall", "granter", "operations", "scenario", "elf"];

/// How many targets are searched at once.
const AT_ONCE: usize = 2;

const PROGRAM: &[&str] = &["--package=quiesce-fuzz", "--bin=fuzz_search", "--profile=fuzz"];

/// What `cargo xtask fuzz` can be asked.
#[derive(Args)]
pub(crate) struct Arguments {
    /// How long each target is searched
    #[arg(long, value_name = "N", default_value_t = 1,
        value_parser = clap::value_parser!(u64).range(1..=10_000))]
    minutes: u64,
    /// Search only this target
    #[arg(long, value_name = "T", value_parser = PossibleValuesParser::new(TARGETS))]
    target: Option<String>,
    /// Plant a bug, which the search should find (see `replay --list-plants`)
    #[arg(long, value_name = "NAME", requires = "target",
        value_parser = PossibleValuesParser::new(plant_names()))]
    plant: Option<String>,
    /// Decides the inputs; by default other ones each time
    #[arg(long, value_name = "S")]
    seed: Option<u64>,
    /// Print one JSON object on standard output instead of a table
    #[arg(long)]
    json: bool,
    /// Tell the story of an input and play it, instead of a search
    #[arg(long, value_name = "FILE", requires = "target",
        conflicts_with_all = ["minutes", "seed", "json"])]
    replay: Option<PathBuf>,
}

/// How the search of one target ended.
#[derive(Clone, Debug, Serialize)]
struct Row {
    target: &'static str,
    executions: u64,
    crashes: u64,
    minutes: u64,
    /// The command that plays what was found again.
    #[serde(skip_serializing_if = "Option::is_none")]
    replay: Option<String>,
    /// The one that plays it as a scenario.
    #[serde(skip_serializing_if = "Option::is_none")]
    scenario: Option<String>,
}

/// Planted bugs that stories can be played with: those that are all in their world.
fn plant_names() -> impl Iterator<Item = &'static str> {
    PLANTS.iter().filter(|plant| plant.is_of_a_world()).map(|plant| plant.name)
}

/// Searches, or plays one input again.
///
/// # Errors
/// If anything was found, or the input still breaks a promise.
pub(crate) fn run(arguments: &Arguments) -> Result<()> {
    let program = checkout::build_executable(PROGRAM)?;
    if let (Some(file), Some(target)) = (&arguments.replay, &arguments.target) {
        return replay(&program, target, file, arguments.plant.as_deref());
    }
    let seed = match arguments.seed {
        Some(seed) => seed,
        None => SystemTime::now().duration_since(UNIX_EPOCH)?.as_secs(),
    };
    let chosen = |target: &&&str| arguments.target.as_ref().is_none_or(|only| only == **target);
    let targets: VecDeque<&str> = TARGETS.iter().filter(chosen).copied().collect();
    let folder = checkout::output_folder("fuzz-crashes")?;
    let plant = arguments.plant.as_deref();
    let search = |target| {
        let crash = folder.join(format!("{target}-{seed}.bin"));
        search(&program, target, arguments.minutes, seed, &crash, plant)
    };
    let rows = side_by_side(targets, search)?;
    if arguments.json {
        println!("{}", json(&rows)?);
    } else {
        println!("seed {seed}\n{}", table(&rows));
    }
    let found: Vec<&str> = rows
        .iter()
        .flat_map(|row| [&row.replay, &row.scenario])
        .filter_map(Option::as_deref)
        .collect();
    if !found.is_empty() {
        bail!("promises are broken; play it again with\n  {}", found.join("\n  "));
    }
    Ok(())
}

/// Gives each worker the next target until there is none; rows come in the targets' order.
fn side_by_side(
    targets: VecDeque<&'static str>,
    search: impl Fn(&'static str) -> Result<Row> + Sync,
) -> Result<Vec<Row>> {
    let order: Vec<&str> = targets.iter().copied().collect();
    let (queue, done) = (Mutex::new(targets), Mutex::new(Vec::new()));
    let next = || queue.lock().unwrap_or_else(PoisonError::into_inner).pop_front();
    thread::scope(|scope| {
        for _ in 0..AT_ONCE {
            scope.spawn(|| {
                while let Some(target) = next() {
                    let row = search(target);
                    done.lock().unwrap_or_else(PoisonError::into_inner).push(row);
                }
            });
        }
    });
    let done = done.into_inner().unwrap_or_else(PoisonError::into_inner);
    let mut rows = done.into_iter().collect::<Result<Vec<Row>>>()?;
    rows.sort_by_key(|row| order.iter().position(|target| *target == row.target));
    Ok(rows)
}

fn search(
    program: &Path,
    target: &'static str,
    minutes: u64,
    seed: u64,
    crash: &Path,
    plant: Option<&str>,
) -> Result<Row> {
    let child = checkout::command(program)
        .args([target, "--seconds", &(minutes * 60).to_string(), "--seed", &seed.to_string()])
        .arg("--crash")
        .arg(crash)
        .args(plant.map(|name| format!("--plant={name}")))
        .stdout(Stdio::piped())
        .spawn()
        .context("cannot start the search")?;
    let output = child.wait_with_output()?;
    let text = String::from_utf8_lossy(&output.stdout);
    let records = records::parse(&text);
    let record = records::only(&records, "fuzz")
        .with_context(|| format!("the search of {target} ended with {}", output.status))?;
    let (executions, crashes) = (record.get("executions")?, record.get("crashes")?);
    let replay = (crashes > 0).then(|| {
        let story = text.lines().filter(|line| !line.starts_with("@ "));
        story.for_each(|line| eprintln!("{target}: {line}"));
        let plant = plant.map(planted).unwrap_or_default();
        format!("cargo xtask fuzz --target {target} --replay {}{plant}", crash.display())
    });
    let scenario = match records::only(&records, "scenario") {
        Ok(shown) => Some(scenario(&crash.with_extension("toml"), shown.get("seed")?, plant)),
        // It is bytes, or the story says why it does not fail as a scenario.
        Err(_) => None,
    };
    Ok(Row { target, executions, crashes, minutes, replay, scenario })
}

fn scenario(file: &Path, seed: u64, plant: Option<&str>) -> String {
    let seed = if seed == 0 { String::new() } else { format!(" --seed {seed}") };
    let plant = plant.map(planted).unwrap_or_default();
    format!("cargo xtask replay {}{seed}{plant}", file.display())
}

/// The words that plant a bug, at the end of a command.
fn planted(name: &str) -> String {
    format!(" --plant {name}")
}

fn replay(program: &Path, target: &str, file: &Path, plant: Option<&str>) -> Result<()> {
    let file = std::path::absolute(file)?;
    let status = checkout::command(program)
        .args([target, "--replay"])
        .arg(&file)
        .args(plant.map(|name| format!("--plant={name}")))
        .status()
        .context("cannot start the search")?;
    if !status.success() {
        bail!("{} breaks a promise of {target}, as is said above", file.display());
    }
    Ok(())
}

fn json(rows: &[Row]) -> Result<String> {
    #[derive(Serialize)]
    struct Results<'a> {
        targets: &'a [Row],
    }
    Ok(serde_json::to_string(&Results { targets: rows })?)
}

fn table(rows: &[Row]) -> String {
    let mut table = Table::new();
    table.load_style(presets::UTF8_FULL_CONDENSED);
    table.set_header(["target", "minutes", "executions", "crashes"]);
    for row in rows {
        let right = |figure: u64| Cell::new(figure).set_alignment(CellAlignment::Right);
        let figures = [row.minutes, row.executions, row.crashes].map(right);
        table.add_row(std::iter::once(Cell::new(row.target)).chain(figures));
    }
    table.to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(target: &'static str) -> Row {
        Row { target, executions: 7, crashes: 0, minutes: 1, replay: None, scenario: None }
    }

    #[test]
    fn the_targets_are_those_of_the_package() {
        let path = checkout::root().join("tests/fuzz/src/lib.rs");
        let source = std::fs::read_to_string(path).unwrap_or_default();
        let named = source.matches("        name: \"").count();
        assert_eq!(named, TARGETS.len());
        for target in TARGETS {
            assert!(source.contains(&format!("        name: \"{target}\",")), "{target}");
        }
    }

    #[test]
    fn every_target_is_searched_once_and_reported_in_order() {
        let rows = side_by_side(TARGETS.iter().copied().collect(), |target| Ok(row(target)));
        let Ok(rows) = rows else { panic!("{:?}", rows.err()) };
        let names: Vec<&str> = rows.iter().map(|row| row.target).collect();
        assert_eq!(names, TARGETS);
        let broken = side_by_side(TARGETS.iter().copied().collect(), |target| {
            if target == "granter" { bail!("it cannot start") } else { Ok(row(target)) }
        });
        assert!(broken.is_err());
    }

    #[test]
    fn a_scenario_is_played_with_what_it_was_found_with() {
        let file = Path::new("found.toml");
        assert_eq!(scenario(file, 0, None), "cargo xtask replay found.toml");
        let expected = "cargo xtask replay found.toml --seed 3 --plant skip-tlb";
        assert_eq!(scenario(file, 3, Some("skip-tlb")), expected);
    }

    #[test]
    fn the_json_object_has_the_promised_keys() {
        let expected = "{\"targets\":[{\"target\":\"dmar\",\"executions\":7,\"crashes\":0,\
            \"minutes\":1}]}";
        assert_eq!(json(&[row("dmar")]).ok().as_deref(), Some(expected));
    }
}
