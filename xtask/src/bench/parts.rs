//! `cargo xtask bench --parts`: what each part of a batch costs, one by one
//!
//! A `Row` is one part of the work (record, plan, submit, release) on a number of pages,
//! with hardware that does nothing. Walks of tables are not in it: the whole hypercall is
//! what `cargo xtask bench` counts.

use anyhow::{Result, ensure};
use serde::Serialize;

use super::callgrind;
use crate::checkout;
use crate::progress::Steps;
use crate::records;
use crate::walks::{output, print};

/// The program that runs the parts.
const PROGRAM: &[&str] = &["--package=quiesce-host", "--bin=parts_cost", "--profile=measure"];

/// The function that holds nothing but the part, in callgrind's pattern language.
const MEASURED: &str = "*parts_cost::measured*";

/// One part of the work.
#[derive(Debug, PartialEq, Serialize)]
struct Row {
    name: String,
    pages: u64,
    instructions: u64,
    instructions_per_page: f64,
}

/// Counts every part and prints the rows.
pub(super) fn run(as_json: bool) -> Result<()> {
    let program = checkout::build_executable(PROGRAM)?;
    let list = records::parse(&output(&program, &["list"])?);
    let steps = Steps::new("bench", list.len());
    let mut rows = Vec::new();
    for line in &list {
        let name: String = line.get("name")?;
        steps.begin(&name);
        let (instructions, printed) = callgrind::count(&program, &["count", &name], MEASURED)?;
        let counts = records::parse(&printed);
        let pages = records::only(&counts, "part")?.get("pages")?;
        rows.push(row(name, pages, instructions)?);
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

fn row(name: String, pages: u64, instructions: u64) -> Result<Row> {
    ensure!(pages > 0, "work on no page has no cost for each");
    // Both are far below 2^53.
    let instructions_per_page = instructions as f64 / pages as f64;
    Ok(Row { name, pages, instructions, instructions_per_page })
}

fn json(rows: &[Row]) -> Result<String> {
    #[derive(Serialize)]
    struct Results<'a> {
        rows: &'a [Row],
    }
    Ok(serde_json::to_string(&Results { rows })?)
}

fn table(rows: &[Row]) -> String {
    let mut table = print::new(["part/pages/frames", "instructions", "for each\npage"]);
    for row in rows {
        let each = format!("{:.1}", row.instructions_per_page);
        let figures = [print::grouped(row.instructions), each];
        let cells = figures.iter().map(|figure| print::right(figure));
        table.add_row(std::iter::once(comfy_table::Cell::new(&row.name)).chain(cells));
    }
    format!("{table}\n{LEGEND}")
}

const LEGEND: &str = "\
Hardware does nothing, and no table is walked. combine is submit through a combiner that nobody\n\
else uses at the time. cpus-only is record, submit and release together, of a domain that no device\n\
belongs to. More than 32 separate frames become fewer, wider runs.";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_part_becomes_a_row_with_its_cost_for_each_page() {
        let rows = [row("record/32/random".to_owned(), 32, 1600).expect("a row")];
        let expected = "{\"rows\":[{\"name\":\"record/32/random\",\"pages\":32,\
            \"instructions\":1600,\"instructions_per_page\":50.0}]}";
        assert_eq!(json(&rows).expect("rows can be written"), expected);
        let printed = table(&rows);
        assert!(printed.contains("1,600") && printed.contains("50.0"), "{printed}");
        assert!(row("record/0/random".to_owned(), 0, 1).is_err());
    }
}
