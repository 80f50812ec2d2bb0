//! `cargo xtask bench --walks`: how long a whole-space unmap takes
//!
//! Each pair runs in one process, over the same memory, and flushes hardware that
//! does nothing: what differs is the walks. The ratios are shown beside the one that
//! was published; times depend on the machine, so nothing is held to them.

use anyhow::Result;
use serde::Serialize;

use super::{PROGRAM, output, print};
use crate::checkout;
use crate::progress::Steps;
use crate::records;

/// The pairs that are timed: chunks against chunks, as published, and against one walk
/// that is bounded by the entries it reads.
const PAIRS: [&str; 4] =
    ["empty", "top-chunk-511", "empty-entries-bounded", "top-chunk-511-entries-bounded"];

/// Unmaps of which the shortest counts; after, twenty times as many.
const ROUNDS: &str = "151";

/// Before and after, as published: milliseconds of one whole-space unmap on arm64 with
/// 4 KiB pages and 48 bits.
const PUBLISHED: (f64, f64) = (905.8, 4.06);

/// One pair, timed.
#[derive(Debug, PartialEq, Serialize)]
struct Row {
    name: &'static str,
    before_ns: u64,
    after_ns: u64,
    ratio: f64,
}

/// Times every pair and prints the rows.
pub(crate) fn run(as_json: bool) -> Result<()> {
    let program = checkout::build_executable(PROGRAM)?;
    let steps = Steps::new("bench", PAIRS.len());
    let mut rows = Vec::new();
    for name in PAIRS {
        steps.begin(name);
        rows.push(row(name, &output(&program, &["time", name, ROUNDS])?)?);
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

fn row(name: &'static str, printed: &str) -> Result<Row> {
    let records = records::parse(printed);
    let record = records::only(&records, "time")?;
    let (before_ns, after_ns) = (record.get::<u64>("before_ns")?, record.get::<u64>("after_ns")?);
    // Both are far below 2^53.
    let ratio = before_ns as f64 / (after_ns as f64).max(1.0);
    Ok(Row { name, before_ns, after_ns, ratio })
}

fn json(rows: &[Row]) -> Result<String> {
    #[derive(Serialize)]
    struct Results<'a> {
        rows: &'a [Row],
    }
    Ok(serde_json::to_string(&Results { rows })?)
}

fn table(rows: &[Row]) -> String {
    let mut table = print::new(["arm64 4K 48-bit", "before", "after", "ratio"]);
    for row in rows {
        let micro = |nanoseconds: u64| format!("{:.2} us", nanoseconds as f64 / 1000.0);
        let figures = [micro(row.before_ns), micro(row.after_ns), format!("{:.0}x", row.ratio)];
        let cells = figures.iter().map(|figure| print::right(figure));
        table.add_row(std::iter::once(comfy_table::Cell::new(row.name)).chain(cells));
    }
    let (before, after) = PUBLISHED;
    format!(
        "{table}\n\
         Published, with real flushes, the mean of many: {before} ms to {after} ms, {:.0}x.",
        before / after
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_timed_line_becomes_a_row_with_the_promised_keys() {
        let row = row("empty", "@ time name=empty before_ns=1000 after_ns=4\n").expect("a row");
        assert_eq!((row.before_ns, row.after_ns), (1000, 4));
        let printed = json(&[row]).expect("rows can be written");
        let expected = "{\"rows\":[{\"name\":\"empty\",\"before_ns\":1000,\"after_ns\":4,\
            \"ratio\":250.0}]}";
        assert_eq!(printed, expected);
    }

    #[test]
    fn the_published_ratio_stands_beside_the_measured_one() {
        let rows = [Row { name: "empty", before_ns: 10_000, after_ns: 10, ratio: 1000.0 }];
        let printed = table(&rows);
        assert!(printed.contains("1000x") && printed.contains("223x"), "{printed}");
    }
}
