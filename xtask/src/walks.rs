//! `cargo xtask walks`: what unmapping a whole space costs, before and after
//!
//! A `Row` is one format, width, chunk size and layout of mappings. The counts
//! are made by running the walks, in a program of their own that is built for
//! speed; it fails where a count differs from the closed form of
//! `docs/walks.md`.

pub(crate) mod print;
mod time;

use std::io;
use std::path::Path;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

use anyhow::{Context, Result, anyhow, bail};
use clap::Args;
use serde::Serialize;

use crate::checkout;
use crate::progress::Steps;
use crate::records::{self, Record};

pub(crate) use time::run as time;

/// What `cargo xtask walks` can be asked.
#[derive(Args)]
pub(crate) struct Arguments {
    /// Print one JSON object on standard output instead of a table
    #[arg(long)]
    json: bool,
    /// Only cases whose name begins like this, such as `arm64/4K/48` or `ept`
    #[arg(value_name = "PREFIX")]
    prefix: Option<String>,
}

/// The program that runs the walks.
const PROGRAM: &[&str] = &["--package=quiesce-host", "--bin=range_walks", "--profile=measure"];

/// One line of the table.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
struct Row {
    format: String,
    granule: String,
    bits: u8,
    chunk: String,
    layout: String,
    /// Walks of the loop that makes one for each chunk.
    walks_before: u64,
    /// Walks of the loop that resumes where a walk stopped.
    walks_after: u64,
    /// Flushes if each of the walks before is followed by one.
    flushes_unconditional: u64,
    /// Flushes if only a walk that cleared something is.
    flushes_conditional: u64,
    /// Entries read by the one walk without chunks.
    entries_read: u64,
    /// Whether the walks before are too many to run.
    computed: bool,
}

/// A comparison that is no line of the table.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
struct Special {
    name: String,
    before: u64,
    after: u64,
    unit: String,
}

/// Everything that was counted, in the order of the program's list.
#[derive(Debug, Default, PartialEq, Eq, Serialize)]
struct Results {
    rows: Vec<Row>,
    specials: Vec<Special>,
}

/// Runs every case and prints the counts.
pub(crate) fn run(arguments: &Arguments) -> Result<()> {
    let program = checkout::build_executable(PROGRAM)?;
    let list = output(&program, &["list"])?;
    let names = names(&records::parse(&list), arguments.prefix.as_deref())?;
    let results = results(&count(&program, &names)?)?;
    if arguments.json {
        println!("{}", serde_json::to_string(&results)?);
    } else {
        println!("{}", print::table(&results));
    }
    Ok(())
}

/// The names in `list` that begin with `prefix`.
fn names(list: &[Record], prefix: Option<&str>) -> Result<Vec<String>> {
    let counted = list.iter().filter(|record| record.kind != "pair");
    let all = counted.map(|record| record.get::<String>("name")).collect::<Result<Vec<_>>>()?;
    let Some(prefix) = prefix else { return Ok(all) };
    let some: Vec<_> = all.iter().filter(|name| name.starts_with(prefix)).cloned().collect();
    if some.is_empty() {
        bail!("no case begins with `{prefix}`; the names are:\n  {}", all.join("\n  "));
    }
    Ok(some)
}

/// Counts each case in a process of its own, as many at once as there are CPUs.
fn count(program: &Path, names: &[String]) -> Result<Vec<Record>> {
    let steps = Steps::new("walks", names.len());
    let next = AtomicUsize::new(0);
    let counted = Mutex::new(Vec::new());
    let work = || {
        while let Some((place, name)) = take(&next, names) {
            steps.begin(name);
            let line = output(program, &["count", name]);
            steps.end();
            let failed = line.is_err();
            let counted = counted.lock();
            counted.map_err(|_| anyhow!("another case failed"))?.push((place, line));
            if failed {
                break;
            }
        }
        Ok::<_, anyhow::Error>(())
    };
    let workers = thread::available_parallelism().map_or(1, usize::from);
    thread::scope(|scope| {
        let threads: Vec<_> = (0..workers).map(|_| scope.spawn(work)).collect();
        threads.into_iter().try_for_each(|thread| {
            thread.join().unwrap_or_else(|_| Err(anyhow!("a worker of `walks` failed")))
        })
    })?;
    drop(steps);
    let mut counted = counted.into_inner().map_err(|_| anyhow!("a worker of `walks` failed"))?;
    counted.sort_by_key(|(place, _)| *place);
    let lines = counted.into_iter().map(|(_, line)| line).collect::<Result<Vec<_>>>()?;
    Ok(records::parse(&lines.concat()))
}

fn take<'n>(next: &AtomicUsize, names: &'n [String]) -> Option<(usize, &'n String)> {
    let place = next.fetch_add(1, Ordering::Relaxed);
    names.get(place).map(|name| (place, name))
}

/// What the program prints.
pub(crate) fn output(program: &Path, arguments: &[&str]) -> Result<String> {
    let mut command = checkout::command(program);
    command.args(arguments).stderr(io::stderr());
    let shown = checkout::line(&command);
    let output = command.output().with_context(|| format!("cannot start `{shown}`"))?;
    if !output.status.success() {
        bail!("`{shown}` ended with {}; its message is above", output.status);
    }
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

fn results(records: &[Record]) -> Result<Results> {
    let mut results = Results::default();
    for record in records {
        match record.kind.as_str() {
            "row" => results.rows.push(Row {
                format: record.get("format")?,
                granule: record.get("granule")?,
                bits: record.get("bits")?,
                chunk: record.get("chunk")?,
                layout: record.get("layout")?,
                walks_before: record.get("walks_before")?,
                walks_after: record.get("walks_after")?,
                flushes_unconditional: record.get("flushes_unconditional")?,
                flushes_conditional: record.get("flushes_conditional")?,
                entries_read: record.get("entries_read")?,
                computed: record.get("computed")?,
            }),
            "special" => results.specials.push(Special {
                name: record.get("name")?,
                before: record.get("before")?,
                after: record.get("after")?,
                unit: record.get("unit")?,
            }),
            other => bail!("the program printed a line of the unknown kind `{other}`"),
        }
    }
    Ok(results)
}

#[cfg(test)]
mod tests;
