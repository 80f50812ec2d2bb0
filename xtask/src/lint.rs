//! `cargo xtask lint`: what a change must satisfy besides its tests
//!
//! Every check runs even if an earlier one failed, and each is printed by name;
//! none is left out because a tool is missing.

use std::process::Command;
use std::time::Instant;

use anyhow::{Result, bail};

use crate::progress::Steps;
use crate::{arrows, checkout, licences, tidy};

/// One named check.
struct Check {
    name: &'static str,
    run: fn() -> Result<()>,
}

const CHECKS: &[Check] = &[
    Check {
        name: "format",
        run: || output_of(checkout::cargo().args(["fmt", "--all", "--check"])),
    },
    Check { name: "dependency arrows", run: arrows::check },
    Check { name: "licences and sources", run: licences::check },
    Check { name: "repository rules", run: tidy::check },
    Check {
        name: "clippy, workspace",
        run: || {
            let words = "clippy --workspace --all-targets -- -D warnings";
            output_of(checkout::cargo().args(words.split(' ')))
        },
    },
    Check {
        name: "clippy, bare-metal image and guests",
        run: || {
            let words = "clippy -p quiesce-testbed -p quiesce-guests --bins \
                --features quiesce-testbed/baremetal,quiesce-guests/baremetal \
                --profile testbed -- -D warnings";
            output_of(checkout::cargo().args(words.split_whitespace()))
        },
    },
    Check {
        name: "documentation",
        run: || {
            let mut doc = checkout::cargo();
            doc.args(["doc", "--workspace", "--no-deps"]);
            output_of(doc.env("RUSTDOCFLAGS", "-D warnings"))
        },
    },
];

/// Runs every check.
///
/// # Errors
/// If one of them failed: which, and what it said, is on standard error.
pub(crate) fn run() -> Result<()> {
    let steps = Steps::new("lint", CHECKS.len());
    let mut failed = Vec::new();
    for check in CHECKS {
        steps.begin(check.name);
        let started = Instant::now();
        let outcome = (check.run)();
        let seconds = started.elapsed().as_secs_f32();
        match outcome {
            Ok(()) => steps.print(&format!("lint {} ... ok ({seconds:.1} s)", check.name)),
            Err(error) => {
                steps.print(&format!("lint {} ... FAILED ({seconds:.1} s)\n{error:#}", check.name));
                failed.push(check.name);
            }
        }
        steps.end();
    }
    drop(steps);
    if !failed.is_empty() {
        bail!("lint failed: {}", failed.join(", "));
    }
    Ok(())
}

/// Runs `command`; its output matters only if it fails.
fn output_of(command: &mut Command) -> Result<()> {
    let shown = checkout::line(command);
    let output = command.output()?;
    if !output.status.success() {
        bail!(
            "`{shown}` failed:\n{}{}",
            String::from_utf8_lossy(&output.stdout),
            String::from_utf8_lossy(&output.stderr)
        );
    }
    Ok(())
}
