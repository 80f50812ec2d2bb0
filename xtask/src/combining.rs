//! `cargo xtask bench --combining`: flushes that many callers at once need
//!
//! Each caller is a thread with a batch of its own, and all of them ask before the first
//! flush ends. The figures are counts, not times, so a busy machine gives the same.

use anyhow::{Context, Result, ensure};
use comfy_table::{Cell, CellAlignment, Table, presets};
use host::combining::flushes;
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

#[derive(Serialize)]
struct Results {
    rows: Vec<Row>,
}

/// Counts the flushes of every row and prints them.
///
/// # Errors
/// If any row needs more than two.
pub(crate) fn run(json: bool) -> Result<()> {
    let results = Results { rows: CALLERS.into_iter().map(measure).collect::<Result<_>>()? };
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

fn table(results: &Results) -> String {
    let mut table = Table::new();
    table.load_style(presets::UTF8_FULL_CONDENSED);
    table.set_header(["callers at once", "flushes", "without combining"]);
    for Row { callers, flushes } in &results.rows {
        let right = |figure: String| Cell::new(figure).set_alignment(CellAlignment::Right);
        table.add_row([
            right(callers.to_string()),
            right(flushes.to_string()),
            right(callers.to_string()),
        ]);
    }
    table.to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_row_needs_at_most_two_flushes_and_the_json_has_the_promised_keys() {
        let rows: Result<Vec<Row>> = CALLERS.into_iter().map(measure).collect();
        let Ok(rows) = rows else { panic!("{:?}", rows.err()) };
        let json = serde_json::to_string(&Results { rows }).unwrap_or_default();
        assert!(json.starts_with("{\"rows\":[{\"callers\":1,\"flushes\":1},{\"callers\":2,"));
    }
}
