//! One result of the demo, and the two ways to print a set of them
//!
//! The fields of a `Row` are the columns of the table and the keys of the JSON
//! output; other programs read those, so a name is not changed lightly.

use anyhow::Result;
use comfy_table::{Cell, CellAlignment, Table, presets};
use serde::Serialize;

/// When the flushes of an unmap happen.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(super) enum Policy {
    /// A flush of each kind for every page.
    PerPage,
    /// One flush of each kind for up to 32 pages.
    Batched,
    /// No flush at all: a planted bug.
    NoFlush,
}

impl Policy {
    /// Every policy, in the order in which they are printed.
    pub(super) const ALL: [Self; 3] = [Self::PerPage, Self::Batched, Self::NoFlush];

    /// The name on the command line and in results.
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::PerPage => "per-page",
            Self::Batched => "batched",
            Self::NoFlush => "no-flush",
        }
    }
}

/// What carried the unmap out.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(super) enum Hardware {
    /// The software model.
    Model,
    /// QEMU.
    Qemu,
}

/// What one policy cost on one kind of hardware.
#[derive(Clone, Debug, Serialize)]
pub(super) struct Row {
    /// What carried it out.
    pub(super) hardware: Hardware,
    /// When its flushes happened.
    pub(super) policy: Policy,
    /// Grants unmapped.
    pub(super) grants: u64,
    /// Requests to flush the CPU side that were carried out.
    pub(super) tlb_flushes: u64,
    /// Requests to flush the device side that were carried out.
    pub(super) iotlb_flushes: u64,
    /// IOTLB invalidation descriptors.
    pub(super) iotlb_commands: u64,
    /// VT-d wait descriptors.
    pub(super) waits: u64,
    /// Pages whose mapping changed.
    pub(super) pages_changed: u64,
    /// Pages that IOTLB commands covered.
    pub(super) pages_flushed: u64,
    /// Device accesses that reached a page after its release.
    pub(super) stale_accesses: u64,
    /// Pages given up before their flush completed.
    pub(super) released_early: u64,
}

impl Row {
    fn figures(&self) -> [(&'static str, u64); 8] {
        [
            ("CPU TLB flushes", self.tlb_flushes),
            ("IOTLB flushes", self.iotlb_flushes),
            ("IOTLB commands", self.iotlb_commands),
            ("VT-d waits", self.waits),
            ("pages changed", self.pages_changed),
            ("pages flushed", self.pages_flushed),
            ("stale device accesses", self.stale_accesses),
            ("pages released early", self.released_early),
        ]
    }

    fn title(&self) -> String {
        let hardware = match self.hardware {
            Hardware::Model => "model",
            Hardware::Qemu => "QEMU",
        };
        format!("{}\n{hardware}", self.policy.name())
    }
}

/// One object that holds every row.
pub(super) fn json(rows: &[Row]) -> Result<String> {
    #[derive(Serialize)]
    struct Results<'a> {
        results: &'a [Row],
    }
    Ok(serde_json::to_string(&Results { results: rows })?)
}

/// A table with one column for each row of results, and what to see in it.
pub(super) fn table(rows: &[Row], grants: u32) -> String {
    let mut table = Table::new();
    table.load_style(presets::UTF8_FULL_CONDENSED);
    let titles = rows.iter().map(|row| right(&row.title()));
    table.set_header(std::iter::once(Cell::new(format!("{grants} grants"))).chain(titles));
    let names = rows.first().map(Row::figures).into_iter().flatten();
    for (line, (name, _)) in names.enumerate() {
        let figures = rows.iter().filter_map(|row| row.figures().get(line).copied());
        let cells = figures.map(|(_, figure)| right(&figure.to_string()));
        table.add_row(std::iter::once(Cell::new(name)).chain(cells));
    }
    format!(
        "{table}\n\
         per-page flushes for every page, batched once for up to 32. no-flush is a planted bug:\n\
         it releases pages that the device can still reach, and each of its accesses is counted."
    )
}

fn right(text: &str) -> Cell {
    Cell::new(text).set_alignment(CellAlignment::Right)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rows() -> Vec<Row> {
        let row = |hardware, policy| Row {
            hardware,
            policy,
            grants: 32,
            tlb_flushes: 1,
            iotlb_flushes: 2,
            iotlb_commands: 3,
            waits: 4,
            pages_changed: 5,
            pages_flushed: 6,
            stale_accesses: 7,
            released_early: 8,
        };
        vec![row(Hardware::Model, Policy::PerPage), row(Hardware::Qemu, Policy::NoFlush)]
    }

    #[test]
    fn the_json_object_has_the_promised_keys() {
        let first = "{\"results\":[{\"hardware\":\"model\",\"policy\":\"per-page\",\"grants\":32,\
            \"tlb_flushes\":1,\"iotlb_flushes\":2,\"iotlb_commands\":3,\"waits\":4,\
            \"pages_changed\":5,\"pages_flushed\":6,\"stale_accesses\":7,\"released_early\":8},";
        let printed = json(&rows()).expect("rows can be written");
        assert!(printed.starts_with(first), "{printed}");
        assert!(printed.contains("\"hardware\":\"qemu\",\"policy\":\"no-flush\""));
        assert_eq!(printed.lines().count(), 1);
    }

    #[test]
    fn the_table_has_a_column_for_each_result() {
        let printed = table(&rows(), 32);
        let line = |name: &str| printed.lines().find(|line| line.contains(name)).map(str::to_owned);
        assert!(line("32 grants").is_some_and(|line| line.contains("per-page")));
        let stale = line("stale device accesses").expect("a line of figures");
        assert_eq!(stale.matches('7').count(), 2);
    }

    #[test]
    fn a_policy_is_written_as_it_is_named() {
        for policy in Policy::ALL {
            let written = serde_json::to_string(&policy).expect("a policy can be written");
            assert_eq!(written, format!("\"{}\"", policy.name()));
        }
    }
}
