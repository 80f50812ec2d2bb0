//! `cargo xtask bench`: instructions for each unmapped grant, under callgrind
//!
//! Instruction counts are the same on a busy machine and on an idle one, so they
//! can be compared from one change to the next. A `Row` is one batch size and one
//! layout of frames; only the hypercall itself is counted, guest copies included.

mod callgrind;
mod parts;
mod peers;
mod places;
mod teardown;
mod testbed;

use std::path::Path;

use anyhow::{Context, Result, ensure};
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
    /// Take whole tables down instead, by the number of mappings and by the width
    #[arg(long, conflicts_with_all = ["walks", "policies", "combining"])]
    teardown: bool,
    /// Do the same work on the page tables of other crates instead, side by side
    #[arg(long, conflicts_with_all = ["walks", "policies", "combining", "teardown"])]
    peers: bool,
    /// Let two guests give grants back in QEMU instead, in three manners
    #[arg(long, conflicts_with_all = ["walks", "policies", "combining", "teardown", "peers"])]
    testbed: bool,
    /// Count the parts of a batch one by one instead: record, plan, submit, release
    #[arg(long, conflicts_with_all =
        ["walks", "policies", "combining", "teardown", "peers", "testbed"])]
    parts: bool,
    /// Tell in which functions the instructions of an unmap are spent instead
    #[arg(long = "where", conflicts_with_all =
        ["walks", "policies", "combining", "teardown", "peers", "testbed", "parts"])]
    places: bool,
}

/// The program that is measured: it takes a row's name, prints `@ unmap grants=N` for the grants
/// it unmapped inside the measured function, and ends.
const PROGRAM: &[&str] = &["--package=quiesce-host", "--bin=unmap_cost", "--profile=measure"];

/// The function that holds nothing but the hypercall, in callgrind's pattern language.
const MEASURED: &str = "*unmap_cost::measured*";

/// The rows: hypercall, grants in one call, layout of their frames; in the lean embedding,
/// or in the one with standard locks that tests use.
const ROWS: &[&str] = &[
    "unmap/1/contiguous",
    "unmap/1/random",
    "unmap/8/contiguous",
    "unmap/8/random",
    "unmap/32/contiguous",
    "unmap/32/random",
    "unmap/256/contiguous",
    "unmap/256/random",
    "unmap/32/contiguous/standard",
    "unmap/32/random/standard",
];

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
    if arguments.testbed {
        return testbed::run(arguments.json);
    }
    tools::ensure(Tool::Valgrind)?;
    if arguments.teardown {
        return teardown::run(arguments.json);
    }
    if arguments.peers {
        return peers::run(arguments.json);
    }
    if arguments.parts {
        return parts::run(arguments.json);
    }
    if arguments.places {
        return places::run(arguments.json);
    }
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
    let (instructions, output) = callgrind::count(program, &[name], MEASURED)?;
    let grants: u32 = records::only(&records::parse(&output), "unmap")?.get("grants")?;
    ensure!(grants > 0, "the program unmapped no grant for the row {name}");
    let instructions = u32::try_from(instructions)
        .with_context(|| format!("{name}: {instructions} instructions are too many to divide"))?;
    Ok(Row { name, instructions_per_grant: f64::from(instructions) / f64::from(grants) })
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
    fn the_json_object_has_the_promised_keys() {
        let rows = [Row { name: "unmap/32/contiguous", instructions_per_grant: 201.5 }];
        let expected =
            "{\"rows\":[{\"name\":\"unmap/32/contiguous\",\"instructions_per_grant\":201.5}]}";
        assert_eq!(json(&rows).ok().as_deref(), Some(expected));
        assert!(table(&rows).contains("201.5"));
    }
}
