//! `cargo xtask bench --testbed`: what giving grants back costs two guests in QEMU
//!
//! A `Row` is one manner of giving back and one size of batch. The program fails if
//! batching does not save the interrupts and waits that it must. Its ticks are the
//! emulator's, and nothing is held to them.

use anyhow::{Context, Result, ensure};
use comfy_table::{Cell, CellAlignment, Table, presets};
use serde::Serialize;

use crate::cases::CASES;
use crate::qemu::{Testbed, Verdict};
use crate::records::Record;

/// The case that gives the rows.
const CASE: &str = "guest-bench";
/// The manner that the others are compared with.
const BASE: &str = "per-page";
/// How much less a batch of 8 or more must cost in interrupts and waits.
const SAVED: f64 = 4.0;

/// What one manner costs for one size of batch.
#[derive(Clone, Debug, PartialEq, Serialize)]
struct Row {
    policy: String,
    batch: u64,
    pages: u64,
    ticks: u64,
    ipis: u64,
    exits: u64,
    iotlb_commands: u64,
    waits: u64,
}

impl Row {
    fn read(record: &Record) -> Result<Self> {
        Ok(Self {
            policy: record.get("policy")?,
            batch: record.get("batch")?,
            pages: record.get("pages")?,
            ticks: record.get("ticks")?,
            ipis: record.get("ipis")?,
            exits: record.get("exits")?,
            iotlb_commands: record.get("iotlb_commands")?,
            waits: record.get("waits")?,
        })
    }

    /// Interrupts and waits for each page.
    fn stops(&self) -> f64 {
        per_page(self.ipis + self.waits, self.pages)
    }
}

fn per_page(count: u64, pages: u64) -> f64 {
    // Counts of a bench are far below 2^53.
    count as f64 / pages as f64
}

/// Boots the two guests and prints the rows.
pub(super) fn run(as_json: bool) -> Result<()> {
    let case = CASES.iter().find(|case| case.name == CASE).context("the case of the bench")?;
    let boot = Testbed::prepare()?.boot(case, case.words)?;
    ensure!(boot.verdict == Verdict::Passed, "{}", boot.explain(case));
    let records = boot.records.iter().filter(|record| record.kind == "row");
    let rows = records.map(Row::read).collect::<Result<Vec<_>>>()?;
    if as_json {
        println!("{}", json(&rows)?);
    } else {
        println!("{}", table(&rows)?);
    }
    check(&rows)
}

/// The row that `row` is compared with.
fn base<'r>(rows: &'r [Row], row: &Row) -> Result<&'r Row> {
    let same = |other: &&Row| other.policy == BASE && other.batch == row.batch;
    rows.iter().find(same).with_context(|| format!("no row {BASE} for batches of {}", row.batch))
}

/// Fails unless batches cost what they must.
fn check(rows: &[Row]) -> Result<()> {
    ensure!(rows.iter().any(|row| row.batch == 32), "no row has batches of 32");
    for row in rows {
        let name = format!("{}, batches of {}", row.policy, row.batch);
        ensure!(row.pages > 0 && row.ipis > 0, "{name}: no page, or no interrupt");
        let ratio = base(rows, row)?.stops() / row.stops();
        ensure!(
            row.policy == BASE || row.batch < 8 || ratio >= SAVED,
            "{name}: interrupts and waits are only {ratio:.1} times fewer than {BASE}'s"
        );
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

fn table(rows: &[Row]) -> Result<String> {
    let mut table = Table::new();
    table.load_style(presets::UTF8_FULL_CONDENSED);
    table.set_header([
        "policy",
        "batch",
        "pages",
        "IPIs/page",
        "exits/page",
        "IOTLB commands/page",
        "waits/page",
        "IPIs + waits, fewer by",
        "pages/10^6 ticks",
        "ticks, fewer by",
    ]);
    for row in rows {
        let base = base(rows, row)?;
        let figures = [
            row.batch.to_string(),
            row.pages.to_string(),
            format!("{:.3}", per_page(row.ipis, row.pages)),
            format!("{:.3}", per_page(row.exits, row.pages)),
            format!("{:.3}", per_page(row.iotlb_commands, row.pages)),
            format!("{:.3}", per_page(row.waits, row.pages)),
            format!("{:.1}", base.stops() / row.stops()),
            format!("{:.1}", 1e6 / per_page(row.ticks, row.pages)),
            format!("{:.1}", per_page(base.ticks, base.pages) / per_page(row.ticks, row.pages)),
        ];
        let figures = figures.map(|figure| Cell::new(figure).set_alignment(CellAlignment::Right));
        table.add_row([Cell::new(&row.policy)].into_iter().chain(figures));
    }
    Ok(table.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(policy: &str, batch: u64, ipis: u64, waits: u64) -> Row {
        Row {
            policy: policy.to_owned(),
            batch,
            pages: 512,
            ticks: 1000,
            ipis,
            exits: 3,
            iotlb_commands: waits,
            waits,
        }
    }

    #[track_caller]
    fn holds(batched: Row, expected: bool) {
        let rows = [row(BASE, 32, 512, 512), batched];
        assert_eq!(check(&rows).is_ok(), expected, "{rows:?}");
    }

    #[test]
    fn a_batch_that_saves_too_little_or_interrupts_nobody_fails() {
        holds(row("batched", 32, 16, 16), true);
        holds(row("batched", 32, 128, 128), true);
        holds(row("batched", 32, 129, 128), false);
        holds(row("batched", 32, 0, 16), false);
        holds(row("planned", 8, 16, 16), false);
        assert!(check(&[row(BASE, 8, 512, 512)]).is_err(), "nothing of 32");
    }

    #[test]
    fn the_json_object_has_the_promised_keys() {
        let expected = "{\"rows\":[{\"policy\":\"batched\",\"batch\":32,\"pages\":512,\
            \"ticks\":1000,\"ipis\":16,\"exits\":3,\"iotlb_commands\":16,\"waits\":16}]}";
        assert_eq!(json(&[row("batched", 32, 16, 16)]).ok().as_deref(), Some(expected));
    }
}
