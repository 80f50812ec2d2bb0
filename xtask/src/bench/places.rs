//! `cargo xtask bench --where`: in which functions an unmap spends instructions
//!
//! Each figure is of a function itself, with what the compiler put into it and without what
//! it calls. Together they are the row of the same name of `cargo xtask bench`.

use std::collections::BTreeMap;
use std::path::Path;

use anyhow::{Result, ensure};
use comfy_table::{Cell, CellAlignment, Table, presets};
use serde::Serialize;

use super::{MEASURED, PROGRAM, callgrind};
use crate::checkout;
use crate::progress::Steps;
use crate::records;

/// The hypercalls that are looked into.
const ROWS: [&str; 2] = ["unmap/32/contiguous", "unmap/32/random"];

/// One function.
#[derive(Debug, PartialEq, Serialize)]
struct Row {
    function: String,
    /// Instructions for each grant.
    contiguous: f64,
    random: f64,
}

/// Measures both hypercalls and prints a table, or one JSON object.
///
/// # Errors
/// If callgrind or the program fails.
pub(super) fn run(as_json: bool) -> Result<()> {
    let program = checkout::build_executable(PROGRAM)?;
    let steps = Steps::new("bench", ROWS.len());
    let [contiguous, random] = ROWS.map(|name| {
        steps.begin(name);
        let spent = measure(&program, name);
        steps.end();
        spent
    });
    drop(steps);
    let rows = rows(&contiguous?, &random?);
    if as_json {
        println!("{}", json(&rows)?);
    } else {
        println!("{}", table(&rows));
    }
    Ok(())
}

/// Instructions for each grant by function.
fn measure(program: &Path, name: &'static str) -> Result<BTreeMap<String, f64>> {
    let (functions, output) = callgrind::functions(program, &[name], MEASURED)?;
    let grants: u32 = records::only(&records::parse(&output), "unmap")?.get("grants")?;
    ensure!(grants > 0, "the program unmapped no grant for the row {name}");
    let each = |(name, spent): (String, u64)| (name, spent as f64 / f64::from(grants));
    Ok(functions.into_iter().map(each).collect())
}

/// The functions, those first that most is spent in.
fn rows(contiguous: &BTreeMap<String, f64>, random: &BTreeMap<String, f64>) -> Vec<Row> {
    let spent = |of: &BTreeMap<String, f64>, name: &str| of.get(name).copied().unwrap_or(0.0);
    let mut names: Vec<&String> = contiguous.keys().chain(random.keys()).collect();
    names.sort_unstable();
    names.dedup();
    let row = |name: &String| Row {
        function: name.clone(),
        contiguous: spent(contiguous, name),
        random: spent(random, name),
    };
    let mut rows: Vec<Row> = names.into_iter().map(row).collect();
    rows.sort_by(|one, other| other.random.total_cmp(&one.random));
    rows
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
    table.set_header(["function", "contiguous", "random"]);
    for row in rows {
        let figure =
            |figure: f64| Cell::new(format!("{figure:.1}")).set_alignment(CellAlignment::Right);
        table.add_row([Cell::new(&row.function), figure(row.contiguous), figure(row.random)]);
    }
    table.to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_function_of_either_hypercall_has_a_row_and_the_dearest_is_first() {
        let of = |figures: &[(&str, f64)]| {
            figures.iter().map(|(name, spent)| ((*name).to_owned(), *spent)).collect()
        };
        let rows = rows(&of(&[("a", 9.0), ("b", 1.0)]), &of(&[("b", 3.0), ("c", 2.0)]));
        let names: Vec<&str> = rows.iter().map(|row| row.function.as_str()).collect();
        assert_eq!(names, ["b", "c", "a"]);
        let json = json(&rows).expect("it can be said in JSON");
        assert!(json.starts_with(r#"{"rows":[{"function":"b","contiguous":1.0,"random":3.0}"#));
        assert!(table(&rows).contains("9.0"));
    }
}
