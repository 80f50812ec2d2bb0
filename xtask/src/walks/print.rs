//! The counts as a table for people
//!
//! Lines of the same format, width and chunk stand together.

use comfy_table::{Cell, CellAlignment, Table, presets};

use super::{Results, Row, Special};

/// Both tables, and how to read them.
pub(super) fn table(results: &Results) -> String {
    let mut parts = Vec::new();
    if !results.rows.is_empty() {
        parts.push(rows(&results.rows));
        parts.push(LEGEND.to_owned());
    }
    if !results.specials.is_empty() {
        parts.push(specials(&results.specials));
    }
    parts.join("\n")
}

const LEGEND: &str = "\
before: one walk for each chunk, and a flush behind each. after: a walk goes on where the one\n\
before it stopped, and is followed by a flush if it cleared something. entries read: one walk\n\
over the whole space, without chunks, as this project does it. ~ computed, too many to run.\n\
docs/walks.md explains the layouts.";

fn rows(rows: &[Row]) -> String {
    let mut table = new([
        "tables",
        "chunk",
        "layout",
        "walks\nbefore",
        "walks\nafter",
        "flushes\nbefore",
        "flushes\nafter",
        "entries\nread",
    ]);
    let mut last = None;
    for row in rows {
        let group = (format!("{} {} {}-bit", row.format, row.granule, row.bits), row.chunk.clone());
        let (tables, chunk) = match &last {
            Some(last) if *last == group => (String::new(), String::new()),
            _ => group.clone(),
        };
        last = Some(group);
        let before = |figure| match row.computed {
            true => format!("~{}", grouped(figure)),
            false => grouped(figure),
        };
        let figures = [
            before(row.walks_before),
            grouped(row.walks_after),
            before(row.flushes_unconditional),
            grouped(row.flushes_conditional),
            grouped(row.entries_read),
        ];
        let words = [tables, chunk, row.layout.clone()].map(Cell::new);
        table.add_row(words.into_iter().chain(figures.iter().map(|figure| right(figure))));
    }
    table.to_string()
}

fn specials(specials: &[Special]) -> String {
    let mut table = new(["comparison", "before", "after", "of"]);
    for special in specials {
        table.add_row([
            Cell::new(&special.name),
            right(&grouped(special.before)),
            right(&grouped(special.after)),
            Cell::new(&special.unit),
        ]);
    }
    table.to_string()
}

/// A table with this header.
pub(crate) fn new<const N: usize>(header: [&str; N]) -> Table {
    let mut table = Table::new();
    table.load_style(presets::UTF8_FULL_CONDENSED);
    table.set_header(header);
    table
}

/// A cell for a figure.
pub(crate) fn right(text: &str) -> Cell {
    Cell::new(text).set_alignment(CellAlignment::Right)
}

/// A number with a comma between groups of three digits.
pub(crate) fn grouped(number: u64) -> String {
    let digits = number.to_string();
    let mut text = String::new();
    for (place, digit) in digits.chars().enumerate() {
        if place > 0 && (digits.len() - place).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}
