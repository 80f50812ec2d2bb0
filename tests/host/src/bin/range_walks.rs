//! Counts or times whole-space unmaps, one case for each call.
//!
//! `list` prints the names of all cases and timed pairs; `count NAME` prints `@ row ..`
//! or `@ special ..`; `time PAIR ROUNDS` prints `@ time ..`. `cargo xtask walks` and
//! `cargo xtask bench --walks` read these lines.

use std::{env, process::ExitCode};

use host::walks::{Case, Pair, Special};

const USAGE: &str = "usage: range_walks list | count NAME | time PAIR ROUNDS";

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
    let cases = Case::all().into_iter().map(|case| format!("@ case name={}", case.name()));
    let specials = Special::ALL.map(|special| format!("@ special name={}", special.name()));
    let pairs = Pair::ALL.map(|pair| format!("@ pair name={}", pair.name()));
    cases.chain(specials).chain(pairs).collect::<Vec<_>>().join("\n")
}

fn count(name: &str) -> Result<String, String> {
    if let Some(special) = Special::ALL.into_iter().find(|special| special.name() == name) {
        let (before, after) = special.measure()?;
        check(name, (before, Some(after)), (special.expected().0, Some(special.expected().1)))?;
        let unit = special.unit();
        return Ok(format!("@ special name={name} before={before} after={after} unit={unit}"));
    }
    let case = Case::named(name).ok_or_else(|| format!("no case is called {name}"))?;
    let counts = case.measure()?;
    let expected = case.expected();
    check(name, (counts.walks_before, expected.1.map(|_| counts.walks_after)), expected)?;
    Ok(format!(
        "@ row format={} granule={} bits={} chunk={} layout={} walks_before={} walks_after={} \
         flushes_unconditional={} flushes_conditional={} entries_read={} computed={}",
        case.format(),
        case.granule(),
        case.bits(),
        case.chunk(),
        case.layout.name(),
        counts.walks_before,
        counts.walks_after,
        counts.flushes_unconditional,
        counts.flushes_conditional,
        counts.entries_read,
        counts.computed,
    ))
}

type Figures = (u64, Option<u64>);

fn check(name: &str, counted: Figures, expected: Figures) -> Result<(), String> {
    if counted == expected {
        return Ok(());
    }
    Err(format!("{name}: counted {counted:?}, the closed form says {expected:?}"))
}

fn time(name: &str, rounds: &str) -> Result<String, String> {
    let pair = Pair::ALL.into_iter().find(|pair| pair.name() == name);
    let pair = pair.ok_or_else(|| format!("no pair is called {name}; see `list`"))?;
    let rounds = rounds.parse().map_err(|_| format!("{rounds} is no number of rounds"))?;
    let times = pair.time(rounds)?;
    Ok(format!("@ time name={name} before_ns={} after_ns={}", times.before, times.after))
}
