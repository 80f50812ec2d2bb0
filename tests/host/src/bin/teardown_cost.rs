//! Takes one table down, counted or timed.
//!
//! `list` prints the names of all lines; `count NAME` prints `@ teardown ..`, with only
//! the teardown inside `measured`; `time NAME ROUNDS` prints `@ time ..`. `cargo xtask
//! bench --teardown` reads these lines.

use std::{env, hint::black_box, process::ExitCode};

use host::teardown::{Cost, Standing, Teardown};

const USAGE: &str = "usage: teardown_cost list | count NAME | time NAME ROUNDS";

fn main() -> ExitCode {
    let arguments: Vec<String> = env::args().skip(1).collect();
    let words: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let lines = match words[..] {
        ["list"] => Ok(list()),
        ["count", name] => count(name),
        ["time", name, rounds] => time(name, rounds),
        _ => Err(USAGE.to_owned()),
    };
    match lines {
        Ok(lines) => {
            println!("{lines}");
            ExitCode::SUCCESS
        }
        Err(error) => {
            eprintln!("{error}");
            ExitCode::FAILURE
        }
    }
}

fn list() -> String {
    let lines = Teardown::all().into_iter().map(|line| format!("@ line name={}", line.name()));
    lines.collect::<Vec<_>>().join("\n")
}

fn named(name: &str) -> Result<Teardown, String> {
    Teardown::named(name).ok_or_else(|| format!("no line is called {name}"))
}

fn count(name: &str) -> Result<String, String> {
    let line = named(name)?;
    let mut standing = line.prepare()?;
    let cost = measured(black_box(&mut standing))?;
    standing.settle()?;
    let expected = line.expected();
    if cost != expected {
        return Err(format!("{name}: counted {cost:?}, the closed form says {expected:?}"));
    }
    Ok(format!(
        "@ teardown name={name} bits={} mappings={} entries_read={} tables_freed={} chunks={}",
        line.bits(),
        line.mappings,
        cost.entries_read,
        cost.tables_freed,
        line.chunks(),
    ))
}

/// Holds nothing but the teardown: what instructions are counted of.
#[inline(never)]
fn measured(standing: &mut Standing) -> Result<Cost, String> {
    standing.take_down()
}

fn time(name: &str, rounds: &str) -> Result<String, String> {
    let rounds = rounds.parse().map_err(|_| USAGE)?;
    Ok(format!("@ time name={name} ns={}", named(name)?.shortest(rounds)?))
}
