//! Runs a guest that somebody brings, and ends as the guest did
//!
//! `GuestArguments` say which ELF file it is and what the domain is given. Its console
//! is all there is on standard output, byte for byte; a last line about how it
//! ended goes to standard error.

use std::fmt::Write as _;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{ExitCode, ExitStatus};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, ensure};
use clap::Args;
use testbed::elf::Program;
use testbed::start_info;

use super::{Testbed, machine, wait};
use crate::cases::{Case, Guest, Processors};
use crate::checkout;

/// What the hypervisor needs for itself, in MiB.
const OVERHEAD: u64 = 160;

/// A guest of one's own.
#[derive(Args)]
pub(super) struct GuestArguments {
    /// Run this PVH guest (an ELF file of 32 or 64 bits) and show its console.
    /// The status is 0 when it turns itself off, 1 when it asks for a reboot, 3 when it
    /// crashes, 124 when its time is over; 2 is for a file that is no guest, and 4 for
    /// whatever else went wrong
    #[arg(long, value_name = "FILE", conflicts_with_all = ["cases", "list"])]
    guest: Option<PathBuf>,
    /// The guest's command line
    #[arg(long, value_name = "WORDS", default_value = "", requires = "guest")]
    #[arg(allow_hyphen_values = true)]
    append: String,
    /// Tell the guest that it is the first domain: such guests look for no store
    #[arg(long, requires = "guest")]
    initial_domain: bool,
    /// How long the guest may run
    #[arg(long, value_name = "N", default_value_t = 60, requires = "guest")]
    #[arg(value_parser = clap::value_parser!(u64).range(1..=86_400))]
    seconds: u64,
    /// The guest's memory, in MiB
    #[arg(long, value_name = "MIB", default_value_t = 128, requires = "guest")]
    #[arg(value_parser = clap::value_parser!(u64).range(2..=1536))]
    memory: u64,
}

/// Why a guest was not run to its end.
enum Trouble {
    /// The file or the command line cannot be used.
    Usage(anyhow::Error),
    /// QEMU, or the hypervisor.
    Other(anyhow::Error),
}

/// Builds one of the project's own guests.
///
/// # Errors
/// If it does not build, or cannot be made a 32-bit object.
pub(super) fn build(guest: Guest, folder: &Path) -> Result<PathBuf> {
    let name = match guest {
        Guest::Guest => "--bin=quiesce-guest",
        Guest::Narrow => "--bin=quiesce-guest-narrow",
    };
    let built = checkout::build_executable(&[
        "--quiet",
        "--package=quiesce-guests",
        name,
        "--features=baremetal",
        "--profile=testbed",
    ])?;
    if guest == Guest::Guest {
        return Ok(built);
    }
    let object = folder.join("guest-narrow.elf");
    let mut command = checkout::command("objcopy");
    command.args(["-O", "elf32-i386"]).arg(built).arg(&object);
    let shown = checkout::line(&command);
    let status = command.status().with_context(|| {
        format!("cannot start `{shown}`: it comes with the linker, in the package binutils")
    })?;
    ensure!(status.success(), "`{shown}` ended with {status}");
    Ok(object)
}

/// Runs the guest that the arguments name, if they name one.
pub(super) fn run(arguments: &GuestArguments) -> Option<ExitCode> {
    let file = arguments.guest.as_ref()?;
    let (code, error) = match boot(arguments, file) {
        Ok(code) => return Some(ExitCode::from(code)),
        Err(Trouble::Usage(error)) => (2, error),
        Err(Trouble::Other(error)) => (4, error),
    };
    eprintln!("error: {error:#}");
    Some(ExitCode::from(code))
}

/// Checks the file as the hypervisor will.
fn check(arguments: &GuestArguments, bytes: &[u8]) -> Result<()> {
    let program = Program::parse(bytes)?;
    start_info::place(&program, arguments.memory << 20)?;
    let longest = start_info::COMMAND_LINE - 1;
    if arguments.append.len() > longest {
        return Err(anyhow!("a command line of more than {longest} bytes"));
    }
    Ok(())
}

fn boot(arguments: &GuestArguments, file: &Path) -> Result<u8, Trouble> {
    let named = || format!("GUEST {}", file.display());
    let bytes = fs::read(file).with_context(named).map_err(Trouble::Usage)?;
    check(arguments, &bytes).with_context(named).map_err(Trouble::Usage)?;
    let file = fs::canonicalize(file).with_context(named).map_err(Trouble::Usage)?;
    let (ended, took) = start(arguments, &file).map_err(Trouble::Other)?;
    let (code, how) = judge(ended).map_err(Trouble::Other)?;
    eprintln!("{}: {how} after {:.1} s", named(), took.as_secs_f64());
    Ok(code)
}

/// Boots the hypervisor with the guest; its end, `None` when the time is over, and how long
/// it took, which building is no part of.
fn start(arguments: &GuestArguments, file: &Path) -> Result<(Option<ExitStatus>, Duration)> {
    let testbed = Testbed::prepare()?;
    let trace = testbed.folder.join("guest.trace");
    File::create(&trace).with_context(|| format!("cannot write {}", trace.display()))?;
    let machine_of = Case {
        processors: Processors::OneWithGuests,
        memory: arguments.memory + OVERHEAD,
        ..Case::new("guest", "a guest of one's own")
    };
    let mut words = format!("case=guest memory={}", arguments.memory);
    if arguments.initial_domain {
        words.push_str(" initial=1");
    }
    write!(words, " -- {}", arguments.append)?;
    let mut command = machine(&testbed.image, &trace, &machine_of);
    command.arg("-initrd").arg(file).arg("-append").arg(words);
    let started = Instant::now();
    let ended = wait(&mut command, Duration::from_secs(arguments.seconds))?;
    Ok((ended, started.elapsed()))
}

/// The status to end with, and what happened, from QEMU's: value * 2 + 1.
fn judge(ended: Option<ExitStatus>) -> Result<(u8, &'static str)> {
    const OFF: i32 = 65;
    const REBOOT: i32 = 67;
    const CRASH: i32 = 71;
    let Some(status) = ended else { return Ok((124, "its time was over")) };
    match status.code() {
        Some(OFF) => Ok((0, "it turned itself off")),
        Some(REBOOT) => Ok((1, "it asked for a reboot")),
        Some(CRASH) => Ok((3, "it crashed")),
        Some(super::FAILED) => Err(anyhow!("the hypervisor failed; its last line says why")),
        _ => Err(anyhow!("QEMU ended with {status}, which is no verdict")),
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::process::ExitStatusExt;

    use super::*;

    #[track_caller]
    fn ends(qemu: Option<i32>, expected: Option<u8>) {
        let status = qemu.map(|code| ExitStatus::from_raw(code << 8));
        assert_eq!(judge(status).ok().map(|(code, _)| code), expected, "{qemu:?}");
    }

    #[test]
    fn each_end_of_a_guest_has_a_status_of_its_own() {
        ends(Some(65), Some(0));
        ends(Some(67), Some(1));
        ends(Some(71), Some(3));
        ends(None, Some(124));
        for other in [0, 1, 33, 35, 69] {
            ends(Some(other), None);
        }
    }

    fn arguments(append: &str) -> GuestArguments {
        GuestArguments {
            guest: None,
            append: append.to_owned(),
            initial_domain: false,
            seconds: 1,
            memory: 2,
        }
    }

    #[test]
    fn a_file_that_is_no_guest_is_refused_before_anything_starts() {
        let error = check(&arguments(""), b"#!/bin/sh").expect_err("a script");
        assert!(error.to_string().contains("not an ELF file"), "{error}");
        let missing = boot(&arguments(""), Path::new("no/such/file"));
        assert!(matches!(missing, Err(Trouble::Usage(_))));
    }
}
