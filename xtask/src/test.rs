//! `cargo xtask test`: the workspace's tests on the host, then every case in QEMU
//!
//! A test that did not run counts as a failure: an ignored one, one that cargo
//! filtered out, and a QEMU case that could not boot. Without QEMU, which has to be
//! asked for, the total says so.

use std::io::{BufRead, BufReader, IsTerminal};
use std::process::Stdio;

use anyhow::{Context, Result, bail, ensure};
use clap::Args;

use crate::cases::{self, Case};
use crate::checkout;
use crate::qemu::{self, Testbed};

/// What `cargo xtask test` can be asked.
#[derive(Args)]
pub(crate) struct Arguments {
    /// Run everything this many times, to find a test that fails only now and then
    #[arg(long, default_value_t = 1, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) repeat: u32,
    /// Run the tests on the host alone, without QEMU
    #[arg(long)]
    pub(crate) model: bool,
}

/// Tests counted by how they ended.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Summary {
    passed: u64,
    failed: u64,
    not_run: u64,
}

/// Runs everything, as often as asked.
pub(crate) fn run(arguments: &Arguments) -> Result<()> {
    // Before anything else: better to learn at once that QEMU is missing than after the host tests.
    let testbed = if arguments.model { None } else { Some(Testbed::prepare()?) };
    if arguments.repeat == 1 {
        return once(testbed.as_ref());
    }
    let mut broken = Vec::new();
    for round in 1..=arguments.repeat {
        println!("\nround {round} of {}", arguments.repeat);
        if let Err(error) = once(testbed.as_ref()) {
            eprintln!("{error:#}");
            broken.push(round.to_string());
        }
    }
    if !broken.is_empty() {
        bail!("failed in round(s) {} of {}", broken.join(", "), arguments.repeat);
    }
    Ok(())
}

/// Runs the tests on the host and, given a testbed, every case in QEMU.
fn once(testbed: Option<&Testbed>) -> Result<()> {
    let (mut summary, compiled) = host_tests()?;
    let mut places = "on the host";
    if let Some(testbed) = testbed {
        let cases: Vec<&Case> = cases::ordinary().collect();
        let tally = qemu::run_cases(testbed, &cases)?;
        summary.passed += tally.passed;
        summary.failed += tally.failed;
        places = "host and QEMU";
    }
    println!(
        "\ntotal, {places}: {} passed; {} failed; {} not run",
        summary.passed, summary.failed, summary.not_run
    );
    ensure!(summary.failed == 0, "{} tests failed; they are named above", summary.failed);
    ensure!(summary.not_run == 0, "{} tests did not run, which is a failure", summary.not_run);
    ensure!(compiled, "`cargo test` failed outside a test; its messages are above");
    Ok(())
}

/// Runs `cargo test`, passing its output on; also returns whether cargo was content.
fn host_tests() -> Result<(Summary, bool)> {
    let colour = if std::io::stdout().is_terminal() { "--color=always" } else { "--color=never" };
    let mut command = checkout::cargo();
    command.args(["test", "--workspace", "--no-fail-fast", colour, "--", colour]);
    let mut child = command.stdout(Stdio::piped()).spawn().context("cannot start `cargo test`")?;
    let output = child.stdout.take().context("cargo's output was not captured")?;
    let mut summary = Summary::default();
    for line in BufReader::new(output).split(b'\n') {
        let line = String::from_utf8_lossy(&line?).into_owned();
        println!("{line}");
        summary.add(&line);
    }
    Ok((summary, child.wait()?.success()))
}

impl Summary {
    /// Adds the figures of a `test result:` line; any other line changes nothing.
    fn add(&mut self, line: &str) {
        let Some((_, figures)) = line.split_once("test result: ") else {
            return;
        };
        for part in figures.split(';') {
            // The first part also holds the verdict: the figure is the word before the last.
            let mut words = part.split_whitespace().rev();
            let (name, count) = match (words.next(), words.next()) {
                (Some("out"), Some("filtered")) => ("filtered", words.next()),
                (Some(name), count) => (name, count),
                (None, _) => continue,
            };
            let count: u64 = count.and_then(|count| count.parse().ok()).unwrap_or(0);
            match name {
                "passed" => self.passed += count,
                "failed" => self.failed += count,
                "ignored" | "filtered" => self.not_run += count,
                _ => {}
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn adds(line: &str, passed: u64, failed: u64, not_run: u64) {
        let mut summary = Summary::default();
        summary.add(line);
        let expected = Summary { passed, failed, not_run };
        assert_eq!(summary, expected, "{line}");
    }

    #[test]
    fn a_test_that_did_not_run_is_counted() {
        let tail = "0 measured; 0 filtered out; finished in 0.00s";
        adds(&format!("test result: ok. 5 passed; 0 failed; 0 ignored; {tail}"), 5, 0, 0);
        adds(&format!("test result: FAILED. 5 passed; 2 failed; 1 ignored; {tail}"), 5, 2, 1);
        adds(
            &format!("test result: \x1b[32mok\x1b[0m. 7 passed; 0 failed; 0 ignored; {tail}"),
            7,
            0,
            0,
        );
        adds(
            "test result: ok. 1 passed; 0 failed; 0 ignored; 0 measured; 3 filtered out; finished in 0s",
            1,
            0,
            3,
        );
        adds("test a::b ... ok", 0, 0, 0);
    }
}
