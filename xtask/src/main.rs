//! The project's commands, run as `cargo xtask COMMAND`
//!
//! One module per command. What several of them share sits beside them: the
//! checkout and its child processes, the tools that may have to be installed,
//! the table of QEMU cases, and the rules the repository is held to.

mod arrows;
mod bench;
mod bochs;
mod cases;
mod checkout;
mod combining;
mod demo;
mod fuzz;
mod licences;
mod lint;
mod mutants;
mod planted;
mod policies;
mod progress;
mod qemu;
mod records;
mod replay;
mod simulate;
mod stats;
mod test;
mod tidy;
mod tools;
mod walks;

use std::process::ExitCode;

use anyhow::Result;
use clap::{Parser, Subcommand};

/// quiesce: grant-unmap batching for Rust type-1 hypervisors on x86.
#[derive(Parser)]
#[command(
    name = "cargo xtask",
    bin_name = "cargo xtask",
    after_help = "Start here:\n  \
        cargo xtask demo          what batching saves, and what skipping a flush costs\n  \
        cargo xtask test          every test, on the host and in QEMU\n  \
        cargo xtask qemu --list   the cases that boot in QEMU\n\n\
        QEMU, Bochs and valgrind are installed when they are missing and this user may\n\
        install packages; otherwise the command to run is printed."
)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Unmap N grants under three policies and print what each one cost
    Demo(demo::Arguments),
    /// Run every test: the workspace's own, then every case in QEMU
    Test(test::Arguments),
    /// Boot the testbed in QEMU behind an emulated VT-d, one case per boot
    Qemu(qemu::Arguments),
    /// Boot the testbed in Bochs, whose processors have VMX: guests under EPT, one case per boot
    Bochs(bochs::Arguments),
    /// Count the instructions an unmapped grant costs, or time whole-space unmaps
    Bench(bench::Arguments),
    /// Count what unmapping a whole space costs: walks, flushes, entries read
    Walks(walks::Arguments),
    /// Count what calls on the software model ask of hardware, and what batches avoid
    Stats(stats::Arguments),
    /// Predict throughput and flush cost as streams are added, next to what was published
    Simulate(simulate::Arguments),
    /// Play scenario files: flush bugs written down, on the model and in QEMU
    Replay(replay::Arguments),
    /// Throw random inputs at the crates, as long as one likes
    Fuzz(fuzz::Arguments),
    /// Break the crates in one place at a time, and see a test fail each time
    Mutants(mutants::Arguments),
    /// Check format, lints, documentation, dependency arrows, licences and repository rules
    Lint,
    /// Everything a change must pass: `test`, then `lint`
    Ci,
}

fn main() -> ExitCode {
    match run(Cli::parse().command) {
        Ok(code) => code,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(command: Command) -> Result<ExitCode> {
    match command {
        Command::Demo(arguments) => demo::run(&arguments)?,
        Command::Test(arguments) => test::run(&arguments)?,
        Command::Qemu(arguments) => return qemu::run(&arguments),
        Command::Bochs(arguments) => bochs::run(&arguments)?,
        Command::Bench(arguments) => bench::run(&arguments)?,
        Command::Walks(arguments) => walks::run(&arguments)?,
        Command::Stats(arguments) => stats::run(&arguments)?,
        Command::Simulate(arguments) => simulate::run(&arguments)?,
        Command::Replay(arguments) => replay::run(&arguments)?,
        Command::Fuzz(arguments) => fuzz::run(&arguments)?,
        Command::Mutants(arguments) => mutants::run(&arguments)?,
        Command::Lint => lint::run()?,
        Command::Ci => {
            test::run(&test::Arguments { repeat: 1, model: false })?;
            lint::run()?;
        }
    }
    Ok(ExitCode::SUCCESS)
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    #[test]
    fn the_command_line_is_well_formed() {
        Cli::command().debug_assert();
    }

    #[test]
    fn arguments_out_of_range_are_refused_with_the_range() {
        let message = |words: &[&str]| match Cli::try_parse_from(words) {
            Ok(_) => String::new(),
            Err(error) => error.to_string(),
        };
        assert!(message(&["xtask", "demo", "--grants", "0"]).contains("1..=10000"));
        assert!(message(&["xtask", "demo", "--grants", "10001"]).contains("1..=10000"));
        assert!(message(&["xtask", "test", "--repeat", "0"]).contains("1.."));
        assert_eq!(message(&["xtask", "test", "--model", "--repeat", "20"]), "");
        assert!(message(&["xtask", "simulate", "--cpus", "257"]).contains("1..=256"));
        assert!(message(&["xtask", "simulate", "--units", "0"]).contains("1..=16"));
        assert!(message(&["xtask", "fuzz", "--target", "dmr"]).contains("dmar"));
        assert!(message(&["xtask", "fuzz", "--minutes", "0"]).contains("1..=10000"));
        assert!(message(&["xtask", "mutants", "--table", "--only", "x"]).contains("--only"));
        assert_eq!(message(&["xtask", "mutants", "--table", "--json"]), "");
        assert!(message(&["xtask", "mutants", "--file", "crates/**"]).contains("--thorough"));
        assert!(message(&["xtask", "fuzz", "--replay", "file"]).contains("--target"));
        assert!(message(&["xtask", "qemu", "nvme-identfy"]).contains("nvme-identify"));
        let guest = |more: [&str; 2]| {
            let [option, value] = more;
            message(&["xtask", "qemu", "--guest", "file", option, value])
        };
        assert!(guest(["--memory", "1"]).contains("2..=1536"));
        assert!(guest(["--seconds", "0"]).contains("1..=86400"));
        assert!(guest(["--initial-domain", "boot"]).contains("cannot be used with"));
        assert!(message(&["xtask", "qemu", "--append", "words"]).contains("--guest"));
        assert_eq!(guest(["--append", "--words --of the=guest"]), "");
        assert_eq!(message(&["xtask", "demo", "--grants", "10000"]), "");
    }
}
