//! Instructions inside one function of a program, as callgrind counts them
//!
//! The count is the same on a busy machine and on an idle one.

use std::collections::BTreeMap;
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
    let (profile, output) = profile(program, arguments, function)?;
    Ok((total(&profile).context("callgrind's profile holds no total")?, output))
}

/// As [`count`], for each function that instructions were spent in, by its name: without those
/// that it calls.
///
/// # Errors
/// As [`count`].
pub(super) fn functions(
    program: &Path,
    arguments: &[&str],
    function: &str,
) -> Result<(BTreeMap<String, u64>, String)> {
    let (profile, output) = profile(program, arguments, function)?;
    Ok((by_function(&profile), output))
}

/// Runs `program` under callgrind. Returns the profile and what the program printed.
fn profile(program: &Path, arguments: &[&str], function: &str) -> Result<(String, String)> {
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
    Ok((text, String::from_utf8_lossy(&output.stdout).into_owned()))
}

/// What was spent in each function itself.
fn by_function(profile: &str) -> BTreeMap<String, u64> {
    let (mut names, mut spent) = (BTreeMap::new(), BTreeMap::new());
    let (mut current, mut of_callee) = (String::new(), false);
    for line in profile.lines() {
        if let Some(name) = line.strip_prefix("fn=").or_else(|| line.strip_prefix("cfn=")) {
            // Names are numbered, and written once.
            let (number, name) = name.split_once(' ').unwrap_or((name, ""));
            let known: &mut String = names.entry(number.to_owned()).or_default();
            if !name.is_empty() {
                name.clone_into(known);
            }
            if line.starts_with("fn=") {
                known.clone_into(&mut current);
            }
        } else if line.starts_with("calls=") {
            of_callee = true;
        } else if let Some((_, cost)) = line.split_once(' ').filter(|(at, _)| is_position(at))
            && !std::mem::take(&mut of_callee)
        {
            let cost: u64 = cost.parse().unwrap_or(0);
            *spent.entry(current.clone()).or_default() += cost;
        }
    }
    spent
}

/// Whether a line of costs may begin with it: a line number, perhaps from the last one on.
fn is_position(word: &str) -> bool {
    word == "*" || word.trim_start_matches(['+', '-']).parse::<u64>().is_ok()
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
    fn a_profile_tells_what_each_function_spent_itself() {
        let profile = "fn=(1) one\n10 5\n+2 1\ncfn=(2) other\ncalls=1 0\n* 100\n\nfn=(2)\n0 90\n\
                       fn=(1)\n-3 4\ntotals: 100\n";
        let expected = [("one".to_owned(), 10), ("other".to_owned(), 90)];
        assert_eq!(by_function(profile), BTreeMap::from(expected));
    }

    #[test]
    fn a_profile_gives_its_total() {
        assert_eq!(total("events: Ir\nfn=(1)\n1 2\ntotals: 12345\n"), Some(12345));
        assert_eq!(total("summary: 77\n"), Some(77));
        assert_eq!(total("events: Ir\n"), None);
        assert_eq!(total("totals: many\n"), None);
    }
}
