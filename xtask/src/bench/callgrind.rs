//! Instructions inside one function of a program, as callgrind counts them
//!
//! The count is the same on a busy machine and on an idle one.

use std::fs;
use std::io;
use std::path::Path;

use anyhow::{Context, Result, bail, ensure};

use crate::checkout;
use crate::tools::Tool;

/// Runs `program` under callgrind and counts the instructions spent inside `function`,
/// a pattern as callgrind takes it, with everything that it calls.
///
/// Returns the count and what the program printed.
///
/// # Errors
/// If callgrind or the program fails, or `function` was never entered.
pub(super) fn count(program: &Path, arguments: &[&str], function: &str) -> Result<(u64, String)> {
    let profile = checkout::output_folder("bench")?.join("callgrind.out");
    let mut command = checkout::command(Tool::Valgrind.program());
    command
        .args(["--tool=callgrind", "--quiet"])
        .arg(format!("--callgrind-out-file={}", profile.display()))
        .arg(format!("--toggle-collect={function}"))
        .arg(program)
        .args(arguments)
        .stderr(io::stderr());
    let shown = checkout::line(&command);
    let output = command.output().with_context(|| format!("cannot start `{shown}`"))?;
    if !output.status.success() {
        bail!("`{shown}` ended with {}", output.status);
    }
    let text = fs::read_to_string(&profile)
        .with_context(|| format!("callgrind left no {}", profile.display()))?;
    let instructions = total(&text).context("callgrind's profile holds no total")?;
    ensure!(
        instructions > 0,
        "`{function}` was never entered: is it still there, and not inlined?"
    );
    Ok((instructions, String::from_utf8_lossy(&output.stdout).into_owned()))
}

/// The instructions that a callgrind profile accounts for.
fn total(profile: &str) -> Option<u64> {
    let value = |key: &str| profile.lines().find_map(|line| line.strip_prefix(key));
    let figure = value("totals:").or_else(|| value("summary:"))?;
    figure.split_whitespace().next()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_profile_gives_its_total() {
        assert_eq!(total("events: Ir\nfn=(1)\n1 2\ntotals: 12345\n"), Some(12345));
        assert_eq!(total("summary: 77\n"), Some(77));
        assert_eq!(total("events: Ir\n"), None);
        assert_eq!(total("totals: many\n"), None);
    }
}
