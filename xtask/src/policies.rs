//! `cargo xtask bench --policies`: what each flush policy costs on eight workloads
//!
//! A row of [`host::workloads`] in numbers, and its price. Prices are in units of
//! 0.2 us; the price of a row can be computed from its other figures.

use anyhow::Result;
use comfy_table::{Cell, CellAlignment, Table, presets};
use host::workloads::{self, MODEL};
use serde::Serialize;

/// One policy on one workload.
#[derive(Serialize)]
struct Row {
    workload: &'static str,
    policy: &'static str,
    batches: u64,
    commands: u64,
    waits: u64,
    tail_writes: u64,
    pages_changed: u64,
    pages_flushed: u64,
    refills: u64,
    cost: f64,
}

impl From<&workloads::Row> for Row {
    fn from(row: &workloads::Row) -> Self {
        Self {
            workload: row.workload,
            policy: row.policy.name(),
            batches: row.batches,
            commands: row.commands,
            waits: row.waits,
            tail_writes: row.tail_writes,
            pages_changed: row.pages_changed,
            pages_flushed: row.pages_flushed,
            refills: row.refills,
            cost: row.cost(),
        }
    }
}

/// Prints the rows, as one JSON object or as a table.
pub(crate) fn compare(as_json: bool) -> Result<()> {
    let rows = workloads::compare_all();
    println!("{}", if as_json { json(&rows)? } else { table(&rows) });
    Ok(())
}

fn json(rows: &[workloads::Row]) -> Result<String> {
    #[derive(Serialize)]
    struct Model {
        command: f64,
        wait: f64,
        tail: f64,
        refill: f64,
    }
    #[derive(Serialize)]
    struct Results {
        rows: Vec<Row>,
        /// The planner once more, without knowledge of the entries in use.
        uninformed: Vec<Row>,
        model: Model,
    }
    let of = |informed| rows.iter().filter(move |row| row.informed == informed).map(Row::from);
    let workloads::Cost { command, wait, tail, refill } = MODEL;
    Ok(serde_json::to_string(&Results {
        rows: of(true).collect(),
        uninformed: of(false).collect(),
        model: Model { command, wait, tail, refill },
    })?)
}

fn table(rows: &[workloads::Row]) -> String {
    let mut table = Table::new();
    table.load_style(presets::UTF8_FULL_CONDENSED);
    table.set_header([
        "workload",
        "policy",
        "batches",
        "commands",
        "waits",
        "pages changed",
        "pages flushed",
        "ratio",
        "refills",
        "cost",
    ]);
    for row in rows {
        let policy = match row.informed {
            true => row.policy.name().to_owned(),
            false => format!("{}, uninformed", row.policy.name()),
        };
        let ratio = row.pages_flushed as f64 / row.pages_changed as f64;
        let figures = [
            row.batches.to_string(),
            row.commands.to_string(),
            row.waits.to_string(),
            row.pages_changed.to_string(),
            row.pages_flushed.to_string(),
            format!("{ratio:.2}"),
            row.refills.to_string(),
            format!("{:.0}", row.cost()),
        ];
        let right = |figure| Cell::new(figure).set_alignment(CellAlignment::Right);
        let names = [Cell::new(row.workload), Cell::new(policy)];
        table.add_row(names.into_iter().chain(figures.map(right)));
    }
    let about = workloads::all().into_iter().map(|w| format!("{}: {}\n", w.name, w.about));
    let about: String = about.collect();
    let workloads::Cost { command, wait, tail, refill } = MODEL;
    format!(
        "{table}\n{about}\
         cost = {command} x commands + {wait} x waits + {tail} x tail writes (one for each wait) \
         + {refill} x refills, in units of 0.2 us\n\
         planned knows which entries are in use; uninformed, it takes half of a block's other pages to be,\n\
         and none of the run that went last"
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_json_object_has_the_promised_keys_and_each_cost_follows_from_its_row() {
        let printed = json(&workloads::compare(&workloads::all()[1])).expect("it serializes");
        let printed: serde_json::Value = serde_json::from_str(&printed).expect("it parses");
        let number = |value: &serde_json::Value, key: &str| {
            value[key].as_f64().unwrap_or_else(|| panic!("no number {key} in {value}"))
        };
        let model = |key| number(&printed["model"], key);
        let rows = |key: &str| printed[key].as_array().cloned().unwrap_or_default();
        let policies: Vec<_> = rows("rows").iter().map(|row| row["policy"].clone()).collect();
        assert_eq!(policies, ["per-page", "hull", "gather", "exact", "two-block", "planned"]);
        assert_eq!(rows("uninformed").len(), 1);
        for row in rows("rows").iter().chain(&rows("uninformed")) {
            assert_eq!(row["workload"], "W2");
            let cost = number(row, "commands") * model("command")
                + number(row, "waits") * model("wait")
                + number(row, "tail_writes") * model("tail")
                + number(row, "refills") * model("refill");
            assert!((cost - number(row, "cost")).abs() < 1e-6, "{row}");
            assert!(number(row, "batches") > 0.0 && number(row, "pages_changed") > 0.0);
            assert!(number(row, "pages_flushed") >= number(row, "pages_changed"));
        }
    }

    #[test]
    fn the_table_names_every_policy_and_the_prices() {
        let text = table(&workloads::compare(&workloads::all()[1]));
        for word in ["per-page", "two-block", "planned, uninformed", "0.25 x refills", "W8: "] {
            assert!(text.contains(word), "{word} is missing from\n{text}");
        }
    }
}
