//! `cargo xtask bench --teardown`: what taking a whole table down costs
//!
//! A `Row` is one width, number of mappings and distance between them. Counts are
//! exact, and the program fails where they differ from the closed form; instructions
//! are callgrind's; times depend on the machine and nothing is held to them.

use anyhow::{Result, ensure};
use serde::Serialize;

use super::callgrind;
use crate::checkout;
use crate::progress::Steps;
use crate::records::{self, Record};
use crate::walks::{output, print};

/// The program that takes tables down.
const PROGRAM: &[&str] = &["--package=quiesce-host", "--bin=teardown_cost", "--profile=measure"];

/// The function that holds nothing but the teardown, in callgrind's pattern language.
const MEASURED: &str = "*teardown_cost::measured*";

/// Teardowns of which the shortest counts.
const ROUNDS: &str = "10";

/// One table, taken down.
#[derive(Debug, PartialEq, Serialize)]
struct Row {
    name: String,
    bits: u8,
    mappings: u64,
    entries_read: u64,
    tables_freed: u64,
    /// Walks of a loop that makes one for each GiB of the space.
    chunks: u64,
    instructions: u64,
    instructions_per_mapping: f64,
    ns: u64,
    ns_per_mapping: f64,
}

/// Counts and times every table and prints the rows.
pub(super) fn run(as_json: bool) -> Result<()> {
    let program = checkout::build_executable(PROGRAM)?;
    let list = records::parse(&output(&program, &["list"])?);
    let steps = Steps::new("bench", list.len());
    let mut rows = Vec::new();
    for line in &list {
        let name: String = line.get("name")?;
        steps.begin(&name);
        let times = records::parse(&output(&program, &["time", &name, ROUNDS])?);
        let (instructions, printed) = callgrind::count(&program, &["count", &name], MEASURED)?;
        let counts = records::parse(&printed);
        let counts = records::only(&counts, "teardown")?;
        rows.push(row(counts, records::only(&times, "time")?, instructions)?);
        steps.end();
    }
    drop(steps);
    if as_json {
        println!("{}", json(&rows)?);
    } else {
        println!("{}", table(&rows));
    }
    Ok(())
}

fn row(counts: &Record, time: &Record, instructions: u64) -> Result<Row> {
    let (mappings, ns) = (counts.get::<u64>("mappings")?, time.get::<u64>("ns")?);
    ensure!(mappings > 0, "a table without a mapping has no cost for each");
    // All are far below 2^53.
    let each = |figure: u64| figure as f64 / mappings as f64;
    Ok(Row {
        name: counts.get("name")?,
        bits: counts.get("bits")?,
        mappings,
        entries_read: counts.get("entries_read")?,
        tables_freed: counts.get("tables_freed")?,
        chunks: counts.get("chunks")?,
        instructions,
        instructions_per_mapping: each(instructions),
        ns,
        ns_per_mapping: each(ns),
    })
}

fn json(rows: &[Row]) -> Result<String> {
    #[derive(Serialize)]
    struct Results<'a> {
        rows: &'a [Row],
    }
    Ok(serde_json::to_string(&Results { rows })?)
}

fn table(rows: &[Row]) -> String {
    let mut table = print::new([
        "bits/spread/mappings",
        "entries\nread",
        "tables\nfreed",
        "instructions\na mapping",
        "ns a\nmapping",
        "time",
        "walks, one\na GiB",
    ]);
    for row in rows {
        let figures = [
            print::grouped(row.entries_read),
            print::grouped(row.tables_freed),
            format!("{:.1}", row.instructions_per_mapping),
            format!("{:.1}", row.ns_per_mapping),
            format!("{:.1} us", row.ns as f64 / 1000.0),
            print::grouped(row.chunks),
        ];
        let cells = figures.iter().map(|figure| print::right(figure));
        table.add_row(std::iter::once(comfy_table::Cell::new(&row.name)).chain(cells));
    }
    format!("{table}\n{LEGEND}")
}

const LEGEND: &str = "\
together: page after page. apart: one in each 2 MiB, so that each has a table of its own. The last\n\
column is what a loop of one walk for each GiB would make, whatever is mapped. docs/walks.md\n\
explains the figures.";

#[cfg(test)]
mod tests {
    use super::*;

    fn example() -> Row {
        let counts = "@ teardown name=48/together/16 bits=48 mappings=16 entries_read=2048 \
            tables_freed=4 chunks=262144\n@ time name=48/together/16 ns=4000\n";
        let records = records::parse(counts);
        row(&records[0], &records[1], 8000).expect("a row")
    }

    #[test]
    fn a_teardown_becomes_a_row_with_its_cost_for_each_mapping() {
        let expected = "{\"rows\":[{\"name\":\"48/together/16\",\"bits\":48,\"mappings\":16,\
            \"entries_read\":2048,\"tables_freed\":4,\"chunks\":262144,\"instructions\":8000,\
            \"instructions_per_mapping\":500.0,\"ns\":4000,\"ns_per_mapping\":250.0}]}";
        assert_eq!(json(&[example()]).expect("rows can be written"), expected);
    }

    #[test]
    fn the_table_shows_counts_and_costs() {
        let printed = table(&[example()]);
        for figure in ["2,048", "500.0", "250.0", "4.0 us", "262,144"] {
            assert!(printed.contains(figure), "{figure} is missing in {printed}");
        }
    }
}
