//! `cargo xtask bench --peers`: the same work on the page tables of other crates
//!
//! A `Row` is one piece of work done by one crate, with its cost beside this
//! project's in the same run. Every crate is asked for what its interface offers; what
//! that leaves out is said in `docs/walks.md`, and nothing is held to the ratios.

use anyhow::{Context, Result, ensure};
use serde::Serialize;

use super::callgrind;
use crate::checkout;
use crate::progress::Steps;
use crate::records::{self, Record};
use crate::walks::{output, print};

/// The program that does the work.
const PROGRAM: &[&str] = &["--package=quiesce-benches", "--bench=peers", "--profile=measure"];

/// The function that holds nothing but the work, in callgrind's pattern language.
const MEASURED: &str = "*peers::work::measured*";

/// The name that this project has among its peers.
const OURS: &str = "quiesce";

/// One piece of work, done by one crate.
#[derive(Debug, PartialEq, Serialize)]
struct Row {
    work: String,
    name: String,
    instructions_per_page: f64,
    ns_per_page: f64,
    /// Its instructions for each of this project's.
    instructions_ratio: f64,
    /// Its time for each of this project's.
    time_ratio: f64,
}

/// Counts and times every piece of work by every crate and prints the rows.
pub(super) fn run(as_json: bool) -> Result<()> {
    let program = checkout::build_executable(PROGRAM)?;
    let list = records::parse(&output(&program, &["list"])?);
    let steps = Steps::new("bench", list.len());
    let mut rows = Vec::new();
    for line in &list {
        let name: String = line.get("name")?;
        steps.begin(&name);
        let times = records::parse(&output(&program, &["time", &name])?);
        let (instructions, printed) = callgrind::count(&program, &["count", &name], MEASURED)?;
        let counts = records::parse(&printed);
        let counts = records::only(&counts, "peer")?;
        rows.push(row(counts, records::only(&times, "time")?, instructions)?);
        steps.end();
    }
    drop(steps);
    compare(&mut rows)?;
    if as_json {
        println!("{}", json(&rows)?);
    } else {
        println!("{}", table(&rows));
    }
    Ok(())
}

fn row(counts: &Record, time: &Record, instructions: u64) -> Result<Row> {
    let (pages, ns) = (counts.get::<u64>("pages")?, time.get::<f64>("ns")?);
    ensure!(pages > 0, "work on no page has no cost for each");
    // All are far below 2^53.
    let each = |figure: f64| figure / pages as f64;
    Ok(Row {
        work: counts.get("work")?,
        name: counts.get("name")?,
        instructions_per_page: each(instructions as f64),
        ns_per_page: each(ns),
        instructions_ratio: 1.0,
        time_ratio: 1.0,
    })
}

/// Sets the ratios: every row against this project's row of the same work.
fn compare(rows: &mut [Row]) -> Result<()> {
    let ours = |row: &&Row| row.name == OURS;
    let cost = |row: &Row| (row.work.clone(), row.instructions_per_page, row.ns_per_page);
    let ours: Vec<_> = rows.iter().filter(ours).map(cost).collect();
    for row in rows {
        let same = ours.iter().find(|(work, _, _)| *work == row.work);
        let (_, instructions, ns) =
            same.with_context(|| format!("{OURS} has no row for {}", row.work))?;
        row.instructions_ratio = row.instructions_per_page / instructions.max(f64::MIN_POSITIVE);
        row.time_ratio = row.ns_per_page / ns.max(f64::MIN_POSITIVE);
    }
    Ok(())
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
        "work/pages/layout",
        "crate",
        "instructions\na page",
        "ratio",
        "ns a\npage",
        "ratio",
    ]);
    let mut last = "";
    for row in rows {
        let work = if row.work == last { "" } else { &row.work };
        last = &row.work;
        let figures = [
            format!("{:.1}", row.instructions_per_page),
            format!("{:.2}", row.instructions_ratio),
            format!("{:.1}", row.ns_per_page),
            format!("{:.2}", row.time_ratio),
        ];
        let cells = figures.iter().map(|figure| print::right(figure));
        let words = [work, row.name.as_str()].map(comfy_table::Cell::new);
        table.add_row(words.into_iter().chain(cells));
    }
    format!("{table}\n{LEGEND}")
}

const LEGEND: &str = "\
A ratio is the crate's cost divided by this project's. Only this project keeps a record of what to\n\
flush, holds the pages until then and counts entries. docs/walks.md says what each one does.";

#[cfg(test)]
mod tests {
    use super::*;

    fn example() -> Result<Vec<Row>> {
        let printed = "@ peer work=unmap/32/contiguous name=quiesce pages=32\n\
            @ peer work=unmap/32/contiguous name=x86_64 pages=32\n@ time ns=640\n@ time ns=320\n";
        let records = records::parse(printed);
        let mut rows =
            vec![row(&records[0], &records[2], 3200)?, row(&records[1], &records[3], 6400)?];
        compare(&mut rows)?;
        Ok(rows)
    }

    #[test]
    fn every_crate_is_set_against_this_project_in_the_same_work() {
        let rows = example().expect("both rows are there");
        assert_eq!((rows[0].instructions_ratio, rows[0].time_ratio), (1.0, 1.0));
        assert_eq!((rows[1].instructions_ratio, rows[1].time_ratio), (2.0, 0.5));
        let printed = json(&rows[1..]).expect("rows can be written");
        let expected = "{\"rows\":[{\"work\":\"unmap/32/contiguous\",\"name\":\"x86_64\",\
            \"instructions_per_page\":200.0,\"ns_per_page\":10.0,\"instructions_ratio\":2.0,\
            \"time_ratio\":0.5}]}";
        assert_eq!(printed, expected);
    }

    #[test]
    fn work_that_this_project_did_not_do_is_an_error() {
        let mut rows = example().expect("both rows are there");
        rows.remove(0);
        assert!(compare(&mut rows).is_err());
    }

    #[test]
    fn the_table_names_a_work_once() {
        let printed = table(&example().expect("both rows are there"));
        assert_eq!(printed.matches("unmap/32/contiguous").count(), 1, "{printed}");
        assert!(printed.contains("200.0") && printed.contains("0.50"), "{printed}");
    }
}
