//! `cargo xtask stats`: what the flush counters say after calls on the model
//!
//! The figures are those an embedder reads while guests run. The command fails if the
//! hardware of the model counted something else.

use anyhow::{Result, ensure};
use clap::Args;
use comfy_table::{Cell, CellAlignment, Table, presets};
use host::stats::{self, Counted, Figures, Row};
use serde::Serialize;

/// What `cargo xtask stats` can be asked.
#[derive(Args)]
pub(crate) struct Arguments {
    /// Print one JSON object on standard output instead of a table
    #[arg(long)]
    json: bool,
}

/// One kind of call, as it is printed.
#[derive(Serialize)]
struct Line {
    name: &'static str,
    tlb: Kind,
    iotlb: Kind,
    commands: u64,
    wide_commands: u64,
    waits: u64,
    tail_writes: u64,
    pages_flushed: u64,
    over_flush: Option<f64>,
    retried_commands: u64,
    late_units: u64,
    cpus_kicked: u64,
    late_cpus: u64,
    batch_retries: u64,
    pages_in_quarantine: u64,
    tickets: u64,
    tickets_served_by_another: u64,
}

/// What was asked of one kind of hardware.
#[derive(Serialize)]
struct Kind {
    asked: u64,
    recorded: u64,
    issued: u64,
    completed: u64,
    failed: u64,
    avoided: u64,
    pages_changed: u64,
    batch_sizes: [u64; 7],
}

impl From<Counted> for Kind {
    fn from(counted: Counted) -> Self {
        let Counted { asked, recorded, issued, completed, failed, pages_changed, sizes } = counted;
        let avoided = counted.avoided();
        Self {
            asked,
            recorded,
            issued,
            completed,
            failed,
            avoided,
            pages_changed,
            batch_sizes: sizes,
        }
    }
}

impl From<&Row> for Line {
    fn from(row: &Row) -> Self {
        let over_flush = row.figures.over_flush();
        let Figures {
            tlb,
            iotlb,
            commands,
            wide_commands,
            waits,
            tail_writes,
            pages_flushed,
            retried_commands,
            late_units,
            kicks,
            late_cpus,
            retries,
            in_quarantine,
            tickets,
            shared,
        } = row.figures;
        Self {
            name: row.name,
            tlb: tlb.into(),
            iotlb: iotlb.into(),
            commands,
            wide_commands,
            waits,
            tail_writes,
            pages_flushed,
            over_flush,
            retried_commands,
            late_units,
            cpus_kicked: kicks,
            late_cpus,
            batch_retries: retries,
            pages_in_quarantine: in_quarantine,
            tickets,
            tickets_served_by_another: shared,
        }
    }
}

/// Runs the calls and prints what was counted.
///
/// # Errors
/// If the crates and the model counted differently.
pub(crate) fn run(arguments: &Arguments) -> Result<()> {
    let rows = stats::all();
    println!("{}", if arguments.json { json(&rows)? } else { table(&rows) });
    for row in &rows {
        ensure!(row.agrees(), "{}: the model counted otherwise: {row:?}", row.name);
    }
    Ok(())
}

fn json(rows: &[Row]) -> Result<String> {
    #[derive(Serialize)]
    struct Results {
        rows: Vec<Line>,
    }
    Ok(serde_json::to_string(&Results { rows: rows.iter().map(Line::from).collect() })?)
}

/// One counter: its name, and how it reads in a line.
type Counter = (&'static str, fn(&Line) -> String);

const COUNTERS: [Counter; 30] = [
    ("CPUs: flushes asked for", |line| line.tlb.asked.to_string()),
    ("CPUs: issued", |line| line.tlb.issued.to_string()),
    ("CPUs: avoided", |line| line.tlb.avoided.to_string()),
    ("CPUs kicked, an interrupt each", |line| line.cpus_kicked.to_string()),
    ("CPUs late", |line| line.late_cpus.to_string()),
    ("devices: flushes asked for", |line| line.iotlb.asked.to_string()),
    ("devices: runs recorded", |line| line.iotlb.recorded.to_string()),
    ("devices: issued", |line| line.iotlb.issued.to_string()),
    ("devices: avoided", |line| line.iotlb.avoided.to_string()),
    ("devices: failed", |line| line.iotlb.failed.to_string()),
    ("batches of 1 leaf", |line| size(line, 0)),
    ("of 2", |line| size(line, 1)),
    ("of 3 or 4", |line| size(line, 2)),
    ("of 5 to 8", |line| size(line, 3)),
    ("of 9 to 16", |line| size(line, 4)),
    ("of 17 to 32", |line| size(line, 5)),
    ("of more", |line| size(line, 6)),
    ("commands", |line| line.commands.to_string()),
    ("for a whole domain", |line| line.wide_commands.to_string()),
    ("waits", |line| line.waits.to_string()),
    ("tail writes", |line| line.tail_writes.to_string()),
    ("pages changed", |line| line.iotlb.pages_changed.to_string()),
    ("pages flushed", |line| line.pages_flushed.to_string()),
    ("flushed for each changed", |line| {
        line.over_flush.map_or_else(|| "-".to_owned(), |ratio| format!("{ratio:.2}"))
    }),
    ("commands told again", |line| line.retried_commands.to_string()),
    ("units late", |line| line.late_units.to_string()),
    ("batches flushed again", |line| line.batch_retries.to_string()),
    ("pages in quarantine", |line| line.pages_in_quarantine.to_string()),
    ("tickets", |line| line.tickets.to_string()),
    ("served by another's flush", |line| line.tickets_served_by_another.to_string()),
];

fn size(line: &Line, class: usize) -> String {
    line.iotlb.batch_sizes.get(class).copied().unwrap_or_default().to_string()
}

fn table(rows: &[Row]) -> String {
    let lines: Vec<Line> = rows.iter().map(Line::from).collect();
    let mut table = Table::new();
    table.load_style(presets::UTF8_FULL_CONDENSED);
    table.set_header(["counter"].into_iter().chain(lines.iter().map(|line| line.name)));
    for (name, read) in COUNTERS {
        let figures =
            lines.iter().map(|line| Cell::new(read(line)).set_alignment(CellAlignment::Right));
        table.add_row([Cell::new(name)].into_iter().chain(figures));
    }
    format!(
        "{table}\n\
         per page, batched: 32 grants. W1 to W8: the workloads of `bench --policies`, each page a\n\
         grant, up to {} pages; large leaves are left out. failing: a device's answer is lost, then a\n\
         queue hangs. at once: {} callers. Where hardware is involved and works, the model's own\n\
         counters say the same.",
        stats::PAGES,
        stats::CALLERS,
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row() -> Row {
        let tlb = Counted {
            asked: 32,
            completed: 1,
            issued: 1,
            sizes: [0, 0, 0, 0, 0, 1, 0],
            ..Counted::default()
        };
        let figures =
            Figures { tlb, iotlb: tlb, waits: 7, tickets: 16, shared: 14, ..Figures::default() };
        Row { name: "batched", figures, seen: None }
    }

    #[test]
    fn the_json_object_has_every_counter_of_every_row() {
        let printed = json(&[row()]).expect("it serializes");
        let printed: serde_json::Value = serde_json::from_str(&printed).expect("it parses");
        let row = &printed["rows"][0];
        assert_eq!(row["name"], "batched");
        assert_eq!((&row["tlb"]["avoided"], &row["waits"]), (&31.into(), &7.into()));
        assert_eq!(row["tickets_served_by_another"], 14);
        assert_eq!(row["over_flush"], serde_json::Value::Null);
    }

    #[test]
    fn the_table_has_a_line_for_every_counter() {
        let text = table(&[row()]);
        for word in
            ["avoided", "batched", "of 17 to 32", "served by another", "pages in quarantine"]
        {
            assert!(text.contains(word), "{word} is missing from\n{text}");
        }
    }

    #[test]
    fn a_model_that_counted_otherwise_is_noticed() {
        let mut row = row();
        assert!(row.agrees(), "no hardware, nothing to compare");
        row.seen = Some(stats::Seen::default());
        assert!(!row.agrees());
        row.seen = Some(stats::Seen { waits: 7, ..stats::Seen::default() });
        assert!(row.agrees());
    }
}
