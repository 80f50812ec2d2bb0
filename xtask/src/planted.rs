//! Which scenario fails under which planted bug
//!
//! [`print()`] plays every scenario with every plant, for `cargo xtask replay --table` and
//! `cargo xtask mutants --table`. A scenario that no plant breaks shows nothing.

use anyhow::{Result, ensure};
use comfy_table::{Table, presets};
use scenarios::{
    parse::Script,
    table::{self, Row},
};
use serde::Serialize;

use crate::progress::Steps;
use crate::replay::quietly;

#[derive(Serialize)]
struct Report<'a> {
    scenarios: Vec<Line<'a>>,
}

#[derive(Serialize)]
struct Line<'a> {
    scenario: &'a str,
    fails_under: &'a [&'static str],
}

/// Prints the table, or one JSON object with the same content.
///
/// # Errors
/// If no plant breaks one of the scenarios.
pub(crate) fn print(scripts: &[Script], as_json: bool) -> Result<()> {
    let steps = Steps::new("plants", scripts.len());
    let play = |script: &Script| {
        steps.begin(&script.file.display().to_string());
        let row = quietly(|| table::row(script));
        steps.end();
        row
    };
    let rows: Vec<Row> = scripts.iter().map(play).collect();
    drop(steps);
    println!("{}", if as_json { json(&rows)? } else { markdown(&rows) });
    let blind = blind(&rows);
    ensure!(blind.is_empty(), "no planted bug breaks {}", blind.join(", "));
    Ok(())
}

fn markdown(rows: &[Row]) -> String {
    let mut table = Table::new();
    table.load_style(presets::ASCII_MARKDOWN);
    table.set_header(["scenario", "fails under"]);
    for Row { name, caught_by } in rows {
        table.add_row([name.clone(), caught_by.join(", ")]);
    }
    table.to_string()
}

fn json(rows: &[Row]) -> Result<String> {
    let lines = rows.iter().map(|row| Line { scenario: &row.name, fails_under: &row.caught_by });
    Ok(serde_json::to_string(&Report { scenarios: lines.collect() })?)
}

/// The scenarios that none of the plants with teeth breaks.
fn blind(rows: &[Row]) -> Vec<&str> {
    let blind =
        rows.iter().filter(|row| !row.caught_by.iter().any(|plant| table::has_teeth(plant)));
    blind.map(|row| row.name.as_str()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rows() -> [Row; 2] {
        [("seen", vec!["skip-iotlb", "flush-twice"]), ("bound-only", vec!["flush-twice"])]
            .map(|(name, caught_by)| Row { name: name.to_owned(), caught_by })
    }

    #[test]
    fn the_json_object_has_the_promised_keys() {
        let expected = "{\"scenarios\":[\
            {\"scenario\":\"seen\",\"fails_under\":[\"skip-iotlb\",\"flush-twice\"]},\
            {\"scenario\":\"bound-only\",\"fails_under\":[\"flush-twice\"]}]}";
        assert_eq!(json(&rows()).ok().as_deref(), Some(expected));
    }

    #[test]
    fn the_table_has_a_row_for_each_scenario() {
        let table = markdown(&rows());
        assert!(table.contains("| seen       | skip-iotlb, flush-twice |"), "{table}");
        assert_eq!(table.lines().count(), 4, "{table}");
    }

    #[test]
    fn a_scenario_that_only_a_flush_too_many_breaks_is_blind() {
        assert_eq!(blind(&rows()), ["bound-only"]);
    }
}
