//! `cargo xtask bench --combining`: flushes that many callers at once need
//!
//! Each caller is a thread with a batch of its own, and all of them ask before the first
//! flush ends. The figures are counts, not times, so a busy machine gives the same. A second
//! table is of callers that ask again and again: how many pages their flushes name.

use anyhow::{Context, Result, ensure};
use comfy_table::{Cell, CellAlignment, Table, presets};
use host::combining::{GoingOn, flushes, going_on};
use serde::Serialize;

/// How many callers flush at once.
const CALLERS: [usize; 6] = [1, 2, 4, 8, 16, 32];

/// The most flushes they may need: the one under way, and one for all who came later.
const MOST: u64 = 2;

#[derive(Serialize)]
struct Row {
    callers: usize,
    flushes: u64,
}

/// Callers that go on, one page after the other.
#[derive(Serialize)]
struct Again {
    callers: usize,
    pages: u64,
    pages_flushed: u64,
}

#[derive(Serialize)]
struct Results {
    rows: Vec<Row>,
    going_on: Vec<Again>,
}

/// Counts the flushes of every row and prints them.
///
/// # Errors
/// If any row needs more than two.
pub(crate) fn run(json: bool) -> Result<()> {
    let rows = CALLERS.into_iter().map(measure).collect::<Result<_>>()?;
    let going_on = CALLERS.into_iter().map(go_on).collect::<Result<_>>()?;
    let results = Results { rows, going_on };
    if json {
        println!("{}", serde_json::to_string(&results)?);
    } else {
        println!("{}", table(&results));
    }
    Ok(())
}

fn measure(callers: usize) -> Result<Row> {
    let flushes = flushes(callers).with_context(|| format!("{callers} callers are too many"))?;
    ensure!(
        (1..=MOST).contains(&flushes),
        "{callers} callers needed {flushes} flushes; at most {MOST} were promised"
    );
    Ok(Row { callers, flushes })
}

fn go_on(callers: usize) -> Result<Again> {
    let GoingOn { pages, named } =
        going_on(callers).with_context(|| format!("{callers} callers are too many"))?;
    Ok(Again { callers, pages, pages_flushed: named })
}

fn table(results: &Results) -> String {
    let rows = results.rows.iter().map(|Row { callers, flushes }| {
        [callers.to_string(), flushes.to_string(), callers.to_string()]
    });
    let going_on = results.going_on.iter().map(|Again { callers, pages, pages_flushed }| {
        // Both are far below 2^53.
        let each = *pages_flushed as f64 / *pages as f64;
        [callers.to_string(), pages.to_string(), format!("{each:.2}")]
    });
    let once = filled(["callers at once", "flushes", "without combining"], rows);
    let again = filled(["callers that go on", "pages", "flushed for each"], going_on);
    format!("{once}\n\n{again}")
}

fn filled(header: [&str; 3], rows: impl Iterator<Item = [String; 3]>) -> Table {
    let mut table = Table::new();
    table.load_style(presets::UTF8_FULL_CONDENSED);
    table.set_header(header);
    for row in rows {
        table.add_row(row.map(|cell| Cell::new(cell).set_alignment(CellAlignment::Right)));
    }
    table
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_row_needs_at_most_two_flushes_and_the_json_has_the_promised_keys() {
        let rows: Result<Vec<Row>> = CALLERS.into_iter().map(measure).collect();
        let Ok(rows) = rows else { panic!("{:?}", rows.err()) };
        let going_on = vec![Again { callers: 2, pages: 8, pages_flushed: 9 }];
        let results = Results { rows, going_on };
        assert!(table(&results).contains(" 1.12 "));
        let json = serde_json::to_string(&results).unwrap_or_default();
        assert!(json.starts_with("{\"rows\":[{\"callers\":1,\"flushes\":1},{\"callers\":2,"));
        let last = "\"going_on\":[{\"callers\":2,\"pages\":8,\"pages_flushed\":9}]}";
        assert!(json.ends_with(last), "{json}");
    }
}
