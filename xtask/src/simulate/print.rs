//! The results as tables, each under a line that says what it shows
//!
//! An error is the simulated figure against the published one.

use comfy_table::{Cell, CellAlignment, Table, presets};

use super::{Falls, Held, Results, Row, Step};

pub(super) fn text(results: &Results) -> String {
    let calibration = &results.calibration;
    let head = format!(
        "Calibrated on the published base row alone: a page takes {:.2} us of the one flush at \
         a time\nand {:.2} us of the rest. Machine: {} CPUs, {} unit(s); published: 96 CPUs, and \
         1 unit is assumed.\n\
         CPUs in the domain for each stream: {}. Assumptions: docs/simulation.md\n",
        calibration.flush_us,
        calibration.rest_us,
        calibration.cpus,
        calibration.units,
        calibration.cpus_per_stream,
    );
    let Results { rest, rows, fall, steps, workloads, per_stream, held, calibration: _ } = results;
    let stations = [
        station(rest, rows, fall, steps, workloads),
        station(
            per_stream.rest,
            &per_stream.rows,
            &per_stream.fall,
            &per_stream.steps,
            &per_stream.workloads,
        ),
    ];
    format!("{head}\n{}\n\n{}", stations.join("\n\n"), table_of_held(held))
}

fn station(rest: &str, rows: &[Row], fall: &Falls, steps: &[Step], workloads: &[Step]) -> String {
    let percent = |part: f64| format!("{:.0} %", 100.0 * part);
    let moved = |part: f64| match part > 0.0 {
        true => format!("falls by {}", percent(part)),
        false => format!("does not fall ({:+.0} %)", -100.0 * part),
    };
    let fall = [("batched", &fall.batched), ("planned and combined", &fall.planned_combined)].map(
        |(name, own)| {
            format!(
                "  {name}: {}; flushing's share {}, and {} at the very most\n",
                moved(own.simulated),
                percent(own.share),
                percent(own.bound),
            )
        },
    );
    format!(
        "== The rest: {rest}. The flush: one at a time. Gbit/s, and us a page ==\n{}\n\
         Published, the batched row falls by 28 % from 1 to 16 streams. Here\n{}\n\
         What each step brings with 16 streams\n{}\n\n\
         Other traffic with 16 streams\n{}",
        table_of_rows(rows),
        fall.concat(),
        table_of_steps(steps),
        table_of_steps(workloads),
    )
}

fn table_of<const N: usize>(header: [&str; N], names: usize, rows: Vec<[String; N]>) -> Table {
    let mut table = Table::new();
    table.load_style(presets::UTF8_FULL_CONDENSED);
    table.set_header(header);
    for row in rows {
        table.add_row(row.into_iter().enumerate().map(|(place, text)| {
            let alignment = if place < names { CellAlignment::Left } else { CellAlignment::Right };
            Cell::new(text).set_alignment(alignment)
        }));
    }
    table
}

fn table_of_rows(rows: &[Row]) -> Table {
    let error =
        |simulated: f64, published: f64| format!("{:+.1} %", 100.0 * (simulated / published - 1.0));
    let header = [
        "streams",
        "base",
        "published",
        "error",
        "batched",
        "published",
        "error",
        "planned, combined",
        "flush: base",
        "batched",
        "planned, combined",
    ];
    let line = |row: &Row| {
        [
            row.streams.to_string(),
            format!("{:.2}", row.base),
            format!("{:.2}", row.published_base),
            error(row.base, row.published_base),
            format!("{:.2}", row.batched),
            format!("{:.2}", row.published_batched),
            error(row.batched, row.published_batched),
            format!("{:.2}", row.planned_combined),
            format!("{:.2}", row.flush_us_per_page.base),
            format!("{:.2}", row.flush_us_per_page.batched),
            format!("{:.2}", row.flush_us_per_page.planned_combined),
        ]
    };
    table_of(header, 0, rows.iter().map(line).collect())
}

fn table_of_steps(steps: &[Step]) -> Table {
    let header = [
        "traffic",
        "system",
        "Gbit/s",
        "flush, us a page",
        "waiting, us a page",
        "batches a flush",
        "pages a batch",
        "refills a page",
    ];
    let line = |step: &Step| {
        [
            step.workload.to_owned(),
            step.system.to_owned(),
            format!("{:.2}", step.gigabits),
            format!("{:.2}", step.flush_us_per_page),
            format!("{:.2}", step.wait_us_per_page),
            format!("{:.2}", step.batches_per_flush),
            format!("{:.1}", step.pages_per_batch),
            format!("{:.2}", step.refills_per_page),
        ]
    };
    table_of(header, 2, steps.iter().map(line).collect())
}

fn table_of_held(held: &[Held]) -> String {
    let header = [
        "the rest",
        "CPUs a stream",
        "flush, us a page",
        "at most 0.6",
        "batches a flush",
        "CPUs a flush",
        "a further CPU, us",
        "it may take",
    ];
    let line = |held: &Held| {
        [
            held.rest.to_owned(),
            held.cpus_per_stream.to_string(),
            format!("{:.2}", held.flush_us_per_page),
            if held.holds { "yes" } else { "no" }.to_owned(),
            format!("{:.2}", held.batches_per_flush),
            format!("{:.1}", held.cpus_per_flush),
            format!("{:.3}", held.further_cpu_us),
            format!("{:.3}", held.further_cpu_us_at_most),
        ]
    };
    format!(
        "== All of it with 16 streams, by the CPUs of each stream that are in the domain ==\n{}",
        table_of(header, 1, held.iter().map(line).collect())
    )
}
