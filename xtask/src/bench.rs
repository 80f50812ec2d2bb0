//! `cargo xtask bench`: instructions for each unmapped grant, under callgrind
//!
//! Instruction counts are the same on a busy machine and on an idle one, so they
//! can be compared from one change to the next. A `Row` is one batch size and one
//! layout of frames; only the hypercall itself is counted, guest copies included.

use std::fs;
use std::io;
use std::path::Path;

use anyhow::{Context, Result, bail, ensure};
use clap::Args;
use comfy_table::{Cell, CellAlignment, Table, presets};
use serde::Serialize;

use crate::checkout;
use crate::combining;
use crate::policies;
use crate::progress::Steps;
use crate::records;
use crate::tools::{self, Tool};
use crate::walks;

/// What `cargo xtask bench` can be asked.
#[derive(Args)]
pub(crate) struct Arguments {
    /// Print one JSON object on standard output instead of a table
    #[arg(long)]
    json: bool,
    /// Time whole-space unmaps instead, before and after, with a flush that does nothing
    #[arg(long)]
    walks: bool,
    /// Compare flush policies on eight workloads instead
    #[arg(long, conflicts_with = "walks")]
    policies: bool,
    /// Count the flushes that many callers at once need instead
    #[arg(long, conflicts_with_all = ["walks", "policies"])]
    combining: bool,
}

/// The program that is measured: it takes a row's name, prints `@ unmap grants=N` for the grants
/// it unmapped inside the measured function, and ends.
const PROGRAM: &[&str] = &["--package=quiesce-host", "--bin=unmap_cost", "--profile=measure"];

/// The function that holds nothing but the hypercall, in callgrind's pattern language.
const MEASURED: &str = "*unmap_cost::measured*";

/// The rows: hypercall, grants in one call, layout of their frames.
const ROWS: &[&str] =
    &["unmap/1/contiguous", "unmap/1/random", "unmap/32/contiguous", "unmap/32/random"];

/// One measured figure.
#[derive(Serialize)]
struct Row {
    name: &'static str,
    instructions_per_grant: f64,
}

/// Measures every row and prints them.
pub(crate) fn run(arguments: &Arguments) -> Result<()> {
    if arguments.combining {
        return combining::run(arguments.json);
    }
    if arguments.walks {
        return walks::time(arguments.json);
    }
    if arguments.policies {
        return policies::compare(arguments.json);
    }
    tools::ensure(Tool::Valgrind)?;
    let program = checkout::build_executable(PROGRAM)?;
    let steps = Steps::new("bench", ROWS.len());
    let mut rows = Vec::new();
    for name in ROWS {
        steps.begin(name);
        rows.push(measure(&program, name)?);
        steps.end();
    }
    drop(steps);
    if arguments.json {
        println!("{}", json(&rows)?);
    } else {
        println!("{}", table(&rows));
    }
    Ok(())
}

fn measure(program: &Path, name: &'static str) -> Result<Row> {
    let (instructions, output) = callgrind(program, &[name], MEASURED)?;
    let grants: u32 = records::only(&records::parse(&output), "unmap")?.get("grants")?;
    ensure!(grants > 0, "the program unmapped no grant for the row {name}");
    let instructions = u32::try_from(instructions)
        .with_context(|| format!("{name}: {instructions} instructions are too many to divide"))?;
    Ok(Row { name, instructions_per_grant: f64::from(instructions) / f64::from(grants) })
}

/// Runs `program` under callgrind and counts the instructions spent inside `function`,
/// a pattern as callgrind takes it, with everything that it calls.
///
/// Returns the count and what the program printed.
///
/// # Errors
/// If callgrind or the program fails, or `function` was never entered.
fn callgrind(program: &Path, arguments: &[&str], function: &str) -> Result<(u64, String)> {
    let profile = checkout::output_folder("bench")?.join("callgrind.out");
    let mut command = checkout::command(Tool::Valgrind.program());
    command
        .args(["--tool=callgrind", "--quiet"])
        .arg(format!("--callgrind-out-file={}", profile.display()))
        .arg(format!("--toggle-collect={function}"))
        .arg(program)
        .args(arguments)
        .stderr(io::stderr());
    let shown = checkout::line(&command);
    let output = command.output().with_context(|| format!("cannot start `{shown}`"))?;
    if !output.status.success() {
        bail!("`{shown}` ended with {}", output.status);
    }
    let text = fs::read_to_string(&profile)
        .with_context(|| format!("callgrind left no {}", profile.display()))?;
    let instructions = total(&text).context("callgrind's profile holds no total")?;
    ensure!(
        instructions > 0,
        "`{function}` was never entered: is it still there, and not inlined?"
    );
    Ok((instructions, String::from_utf8_lossy(&output.stdout).into_owned()))
}

/// The instructions that a callgrind profile accounts for.
fn total(profile: &str) -> Option<u64> {
    let value = |key: &str| profile.lines().find_map(|line| line.strip_prefix(key));
    let figure = value("totals:").or_else(|| value("summary:"))?;
    figure.split_whitespace().next()?.parse().ok()
}

fn json(rows: &[Row]) -> Result<String> {
    #[derive(Serialize)]
    struct Results<'a> {
        rows: &'a [Row],
    }
    Ok(serde_json::to_string(&Results { rows })?)
}

fn table(rows: &[Row]) -> String {
    let mut table = Table::new();
    table.load_style(presets::UTF8_FULL_CONDENSED);
    table.set_header(["hypercall/grants/frames", "instructions per grant"]);
    for row in rows {
        let figure = format!("{:.1}", row.instructions_per_grant);
        let figure = Cell::new(figure).set_alignment(CellAlignment::Right);
        table.add_row([Cell::new(row.name), figure]);
    }
    table.to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_profile_gives_its_total() {
        assert_eq!(total("events: Ir\nfn=(1)\n1 2\ntotals: 12345\n"), Some(12345));
        assert_eq!(total("summary: 77\n"), Some(77));
        assert_eq!(total("events: Ir\n"), None);
        assert_eq!(total("totals: many\n"), None);
    }

    #[test]
    fn the_json_object_has_the_promised_keys() {
        let rows = [Row { name: "unmap/32/contiguous", instructions_per_grant: 201.5 }];
        let expected =
            "{\"rows\":[{\"name\":\"unmap/32/contiguous\",\"instructions_per_grant\":201.5}]}";
        assert_eq!(json(&rows).ok().as_deref(), Some(expected));
        assert!(table(&rows).contains("201.5"));
    }
}
