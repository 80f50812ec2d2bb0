//! `cargo xtask mutants`: break one place of the crates at a time, see a test fail
//!
//! A `Mutant` removes or weakens one flush, wait, record, bound, order or rounding, in
//! a scratch copy of the sources. Only the test that is said to notice it runs. One that
//! nobody notices is a survivor; one that does not build, or never ends, is an error in
//! the list, not a success.

mod list;
mod report;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use cargo_metadata::Message;
use clap::Args;
use host::scratch::{Patch, Scratch};
use scenarios::parse;

use crate::checkout;
use crate::planted;
use crate::progress::Steps;
use crate::qemu;
use crate::replay;
use list::mutants;

/// What `cargo xtask mutants` can be asked.
#[derive(Args)]
#[expect(clippy::struct_excessive_bools, reason = "each is a switch of the command line")]
pub(crate) struct Arguments {
    /// Print one JSON object on standard output instead of a table
    #[arg(long)]
    json: bool,
    /// Run only the mutants whose names hold this
    #[arg(long, value_name = "NAME")]
    only: Option<String>,
    /// Say which mutants there are, and run none
    #[arg(long, conflicts_with_all = ["json", "markdown", "thorough"])]
    list: bool,
    /// Print the table of docs/testing.md, and run none
    #[arg(long, conflicts_with_all = ["json", "only", "thorough"])]
    markdown: bool,
    /// Print which scenario fails under which planted bug instead, as `replay --table` does
    #[arg(long, conflicts_with_all = ["list", "markdown", "only", "thorough"])]
    table: bool,
    /// Run cargo-mutants on the crates instead, which takes hours
    #[arg(long, conflicts_with_all = ["json", "only"])]
    thorough: bool,
    /// Let cargo-mutants look at these files alone
    #[arg(long, value_name = "GLOB", requires = "thorough", default_value = "crates/**")]
    file: Vec<String>,
}

/// One place of the crates, broken.
#[derive(Clone, Copy, Debug)]
struct Mutant {
    name: &'static str,
    file: &'static str,
    /// Occurs once in the file.
    old: &'static str,
    new: &'static str,
    /// The row of docs/invariants.md that is breached.
    invariant: u8,
    killer: Killer,
}

/// The test that notices.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Killer {
    /// The package's folder, from the workspace's root.
    folder: &'static str,
    /// A file below `tests`, or nothing for the tests inside the library.
    target: Option<&'static str>,
    /// Its path in there.
    test: &'static str,
}

/// How a mutant ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum End {
    Killed,
    Survived,
}

/// How long a test may take that needs seconds.
const LIMIT: Duration = Duration::from_secs(150);

/// What of the workspace is copied.
const COPIED: [&str; 3] = ["crates", "tests/host", "tests/hwmodel"];

/// The scenarios of the repository.
const CORPUS: &str = "tests/scenarios/corpus";

/// Runs the mutants, or says what they are.
///
/// # Errors
/// If one survives, or the list has an error.
pub(crate) fn run(arguments: &Arguments) -> Result<()> {
    if arguments.thorough {
        return thorough(&arguments.file);
    }
    if arguments.table {
        let files = parse::collect(&[checkout::root().join(CORPUS)])?;
        return planted::print(&replay::load(&files)?, arguments.json);
    }
    if arguments.markdown {
        print!("{}", report::markdown(mutants()));
        return Ok(());
    }
    let named =
        |mutant: &&Mutant| arguments.only.as_ref().is_none_or(|part| mutant.name.contains(part));
    let chosen: Vec<&Mutant> = mutants().filter(named).collect();
    ensure!(
        !chosen.is_empty(),
        "no mutant's name holds `{}`; --list says which there are",
        arguments.only.as_deref().unwrap_or_default()
    );
    if arguments.list {
        println!("{}", report::names(&chosen));
        return Ok(());
    }
    let home = checkout::output_folder("mutants")?;
    // One test of a package is quicker to run than to optimise.
    let plain = |file: &str, text: String| match file {
        "Cargo.toml" => text.replace("opt-level = 2", "opt-level = 0"),
        _ => text,
    };
    let scratch =
        Scratch::new(checkout::root(), &home, &COPIED, plain).context("cannot copy the sources")?;
    whole(&scratch, &chosen)?;
    let steps = Steps::new("mutants", chosen.len());
    let mut ends = Vec::new();
    for mutant in &chosen {
        steps.begin(mutant.name);
        let started = Instant::now();
        let end = play(&scratch, mutant).with_context(|| format!("the mutant {}", mutant.name))?;
        if !arguments.json {
            let seconds = started.elapsed().as_secs_f32();
            steps.print(&report::line(mutant, end, seconds));
        }
        ends.push((*mutant, end));
        steps.end();
    }
    drop(steps);
    if arguments.json {
        println!("{}", report::json(&ends)?);
    }
    let survivors = report::survivors(&ends);
    let killed = ends.len() - survivors.len();
    if !arguments.json {
        println!("{killed} of {} mutants were killed", ends.len());
    }
    ensure!(survivors.is_empty(), "mutants survived: {}", survivors.join(", "));
    Ok(())
}

/// Checks that every killer passes where nothing is broken.
fn whole(scratch: &Scratch, chosen: &[&Mutant]) -> Result<()> {
    let mut killers: Vec<Killer> = chosen.iter().map(|mutant| mutant.killer).collect();
    killers.sort_unstable();
    killers.dedup();
    for same in killers.chunk_by(|one, next| (one.folder, one.target) == (next.folder, next.target))
    {
        let Some(first) = same.first() else { continue };
        let program = build(scratch, first)?;
        let tests: Vec<&str> = same.iter().map(|killer| killer.test).collect();
        let status = test(scratch, &program, first, &tests)?;
        ensure!(status.success(), "tests of {} fail where nothing is broken", first.folder);
    }
    Ok(())
}

fn play(scratch: &Scratch, mutant: &Mutant) -> Result<End> {
    let Mutant { file, old, new, killer, .. } = *mutant;
    scratch.patched(&Patch { file, old, new }, |scratch| {
        let program = build(scratch, &killer)?;
        let status = test(scratch, &program, &killer, &[killer.test])?;
        Ok(if status.success() { End::Survived } else { End::Killed })
    })?
}

/// Builds the tests of a killer's package.
///
/// # Errors
/// If they do not build: that is not how a mutant is to be noticed.
fn build(scratch: &Scratch, killer: &Killer) -> Result<PathBuf> {
    let mut command = scratch.cargo();
    command.args(["test", "--quiet", "--no-run", "--message-format=json-render-diagnostics"]);
    command.arg("--manifest-path").arg(scratch.tree().join(killer.folder).join("Cargo.toml"));
    match killer.target {
        None => command.arg("--lib"),
        Some(target) => command.args(["--test", target]),
    };
    let output = command.output().context("cannot start cargo")?;
    if !output.status.success() {
        bail!("it does not build:\n{}", String::from_utf8_lossy(&output.stderr));
    }
    for message in Message::parse_stream(output.stdout.as_slice()) {
        if let Message::CompilerArtifact(artifact) = message?
            && artifact.profile.test
            && let Some(executable) = artifact.executable
        {
            return Ok(executable.into_std_path_buf());
        }
    }
    bail!("cargo built no tests of {}", killer.folder)
}

/// Runs tests by their paths.
///
/// # Errors
/// If they take too long, or are not there.
fn test(scratch: &Scratch, program: &Path, of: &Killer, tests: &[&str]) -> Result<ExitStatus> {
    let printed = scratch.tree().join("printed.txt");
    let mut command = Command::new(program);
    command
        .args(["--exact"])
        .args(tests)
        .current_dir(scratch.tree().join(of.folder))
        .env("RUST_BACKTRACE", "0")
        .stdin(Stdio::null())
        .stdout(fs::File::create(&printed)?)
        .stderr(Stdio::null());
    let Some(status) = qemu::wait(&mut command, LIMIT)? else {
        bail!("{} does not end", tests.join(", "));
    };
    let text = fs::read_to_string(&printed).unwrap_or_default();
    let ran = format!("running {} test", tests.len());
    ensure!(text.contains(&ran), "{} has not all of: {}", of.folder, tests.join(", "));
    Ok(status)
}

/// Everything that cargo-mutants thinks of, for whoever has the time.
fn thorough(files: &[String]) -> Result<()> {
    let mut probe = checkout::cargo();
    let there = probe.args(["mutants", "--version"]).stdout(Stdio::null()).stderr(Stdio::null());
    ensure!(
        there.status().is_ok_and(|status| status.success()),
        "cargo-mutants is not installed; install it with\n  cargo install --locked cargo-mutants"
    );
    let mut command = checkout::cargo();
    command.args(["mutants", "--jobs", "2", "--output"]);
    command.arg(checkout::output_folder("mutants-thorough")?);
    command.args(files.iter().flat_map(|file| ["--file", file]));
    // Its two jobs must not build in one place.
    command.env_remove("CARGO_TARGET_DIR");
    let status = command.status()?;
    ensure!(status.success(), "cargo-mutants ended with {status}; what survived is above");
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn every_mutant_still_finds_its_place() {
        for Mutant { name, file, old, new, .. } in mutants() {
            let text = fs::read_to_string(checkout::root().join(file)).unwrap_or_default();
            if let Err(error) = (Patch { file, old, new }).apply(&text) {
                panic!("{name}: {file}: {error}");
            }
            assert_ne!(old, new, "{name}");
            assert!(file.starts_with("crates/"), "{name} breaks {file}");
        }
    }

    /// Whether a file below `folder` has a test of that name.
    fn has_test(folder: &Path, name: &str) -> bool {
        let entries = fs::read_dir(folder).into_iter().flatten().flatten();
        entries.map(|entry| entry.path()).any(|path| {
            if path.is_dir() {
                return has_test(&path, name);
            }
            let text = fs::read_to_string(path).unwrap_or_default();
            text.contains(&format!("fn {name}("))
        })
    }

    #[test]
    fn every_killer_is_a_test_of_its_package() {
        for Mutant { name, killer, .. } in mutants() {
            let test = killer.test.rsplit("::").next().unwrap_or_default();
            let folder = checkout::root().join(killer.folder);
            assert!(has_test(&folder, test), "{name}: {} has no test {test}", killer.folder);
        }
    }

    #[test]
    fn there_are_enough_mutants_and_no_two_have_one_name() {
        let names: BTreeSet<&str> = mutants().map(|mutant| mutant.name).collect();
        assert_eq!(names.len(), mutants().count());
        assert!(names.len() >= 30);
    }

    #[test]
    fn each_breaches_an_invariant_that_is_written_down() {
        let text = fs::read_to_string(checkout::root().join("docs/invariants.md"));
        let text = text.unwrap_or_default();
        for Mutant { name, invariant, .. } in mutants() {
            assert!(text.contains(&format!("\n| {invariant} |")), "{name}: row {invariant}");
        }
    }

    #[test]
    fn the_document_has_the_table_of_today() {
        let text = fs::read_to_string(checkout::root().join("docs/testing.md"));
        let table = report::markdown(mutants());
        let current = text.is_ok_and(|text| text.contains(&table));
        assert!(current, "put what `cargo xtask mutants --markdown` prints into docs/testing.md");
    }
}
