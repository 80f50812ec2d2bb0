//! Reading scenario files: what is wrong with one is said with its line.
//!
//! A [`Script`] is a file that was found to make sense: every name it uses was introduced
//! before, every list fits, every number is in its range. [`collect`] finds the files.

use std::{
    collections::BTreeSet,
    fmt, fs, io,
    ops::Range,
    path::{Path, PathBuf},
};

use crate::format::{Action, Scenario, Step};

mod known;

use known::Known;

/// Actors that can take turns.
pub const ACTORS: usize = 4;
/// CPUs that run guests are 1 to this.
pub const LAST_CPU: usize = 3;

/// What is wrong with a file, and where.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Problem {
    /// The file.
    pub file: PathBuf,
    /// Line and column, from 1.
    pub place: Option<(usize, usize)>,
    /// What is wrong, and what was expected.
    pub text: String,
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.file.display())?;
        if let Some((line, column)) = self.place {
            write!(f, ":{line}:{column}")?;
        }
        write!(f, ": {}", self.text)
    }
}

impl std::error::Error for Problem {}

/// A step that makes sense.
#[derive(Clone, Debug)]
pub struct Played {
    /// Its line in the file.
    pub line: usize,
    /// Which actor does it, by place in [`Script::actors`].
    pub actor: Option<usize>,
    /// What it does.
    pub action: Action,
    /// Why.
    pub note: Option<String>,
}

/// A scenario that makes sense.
#[derive(Clone, Debug)]
pub struct Script {
    /// The file.
    pub file: PathBuf,
    /// What it says.
    pub scenario: Scenario,
    /// Names of its actors.
    pub actors: Vec<String>,
    /// Its steps, in order.
    pub steps: Vec<Played>,
}

/// Finds scenario files: those named, and all below the folders named, in order.
///
/// # Errors
/// If one is not there, or a folder has none.
pub fn collect(paths: &[PathBuf]) -> io::Result<Vec<PathBuf>> {
    let mut files = Vec::new();
    for path in paths {
        let before = files.len();
        below(path, &mut files)?;
        if files.len() == before {
            let text = format!("{}: no scenario file (*.toml) in this folder", path.display());
            return Err(io::Error::new(io::ErrorKind::NotFound, text));
        }
    }
    Ok(files)
}

fn below(path: &Path, files: &mut Vec<PathBuf>) -> io::Result<()> {
    let named =
        |error: io::Error| io::Error::new(error.kind(), format!("{}: {error}", path.display()));
    if !fs::metadata(path).map_err(named)?.is_dir() {
        files.push(path.to_owned());
        return Ok(());
    }
    let entries = fs::read_dir(path).map_err(named)?;
    let mut entries: Vec<PathBuf> =
        entries.map(|entry| entry.map(|entry| entry.path())).collect::<Result<_, _>>()?;
    entries.sort();
    for entry in entries {
        let is_toml = entry.extension().is_some_and(|extension| extension == "toml");
        let is_manifest = entry.file_name().is_some_and(|name| name == "Cargo.toml");
        if entry.is_dir() || (is_toml && !is_manifest) {
            below(&entry, files)?;
        }
    }
    Ok(())
}

/// Reads a file.
///
/// # Errors
/// If it cannot be read, or does not make sense.
pub fn load(file: &Path) -> Result<Script, Problem> {
    let text = fs::read_to_string(file).map_err(|error| Problem {
        file: file.to_owned(),
        place: None,
        text: format!("cannot be read: {error}"),
    })?;
    parse(file, &text)
}

/// Makes sense of a file's text.
///
/// # Errors
/// What is wrong, and where.
pub fn parse(file: &Path, text: &str) -> Result<Script, Problem> {
    let at = |span: Option<Range<usize>>, what: String| {
        let place = span.map(|span| place(text, span.start));
        Problem { file: file.to_owned(), place, text: what }
    };
    let scenario: Scenario = toml::from_str(text)
        .map_err(|error| at(error.span(), error.message().replace('\n', ", ")))?;
    check_frame(&scenario).map_err(|(span, what)| at(Some(span), what))?;
    let mut known = Known::new(&scenario);
    let mut actors = Vec::new();
    let mut steps = Vec::new();
    for step in &scenario.step {
        let fail = |what| at(Some(step.span()), what);
        let step_at = place(text, step.span().start).0;
        let step = step.get_ref();
        let action = only_action(step).map_err(fail)?;
        known.check(&action).map_err(fail)?;
        let actor = match &step.actor {
            None => None,
            Some(name) => Some(actor_place(&mut actors, name, &action).map_err(fail)?),
        };
        steps.push(Played { line: step_at, actor, action, note: step.note.clone() });
    }
    Ok(Script { file: file.to_owned(), scenario, actors, steps })
}

fn place(text: &str, offset: usize) -> (usize, usize) {
    let before = text.get(..offset).unwrap_or(text);
    let line = before.matches('\n').count() + 1;
    let column = before.chars().rev().take_while(|character| *character != '\n').count() + 1;
    (line, column)
}

fn only_action(step: &Step) -> Result<Action, String> {
    let mut actions = step.actions();
    match (actions.pop(), actions.first()) {
        (Some(only), None) => Ok(only),
        (None, _) => Err(format!(
            "a step does nothing; expected one of {}",
            crate::format::ACTIONS.join(", ")
        )),
        (Some(second), Some(first)) => Err(format!(
            "a step does more than one thing: `{}` and `{}`; begin a [[step]] for each",
            first.name(),
            second.name()
        )),
    }
}

fn actor_place(actors: &mut Vec<String>, name: &str, action: &Action) -> Result<usize, String> {
    if matches!(action, Action::Destroy(_) | Action::Workload(_)) {
        return Err(format!("`{}` cannot be a step of an actor", action.name()));
    }
    if let Some(place) = actors.iter().position(|known| known == name) {
        return Ok(place);
    }
    if actors.len() == ACTORS {
        return Err(format!("`{name}` is one actor too many; expected at most {ACTORS}"));
    }
    actors.push(name.to_owned());
    Ok(actors.len() - 1)
}

type Wrong = (Range<usize>, String);

fn check_frame(scenario: &Scenario) -> Result<(), Wrong> {
    let start = scenario.bound.span();
    let fail = |what: String| Err((start.clone(), what));
    if let Some(bug) = &scenario.bug
        && !is_numbered(bug, 'B')
    {
        return fail(format!("bug `{bug}` is no report; expected such as `B02`"));
    }
    if let Some(kind) = scenario.kinds.iter().find(|kind| !is_numbered(kind, 'F')) {
        return fail(format!("kind `{kind}` is no kind of fault; expected such as `F02`"));
    }
    let (machine, unit) = (&scenario.machine, &scenario.unit);
    let ranges: [(&str, u64, u64, u64); 11] = [
        ("machine.levels", machine.levels.into(), 3, 5),
        ("machine.frames", machine.frames, 512, 65_536),
        ("machine.asids", machine.asids.unwrap_or(8).into(), 2, 256),
        ("machine.handle_pages", machine.handle_pages as u64, 1, 1024),
        ("unit.count", unit.count as u64, 1, 4),
        ("unit.max_address_mask", unit.max_address_mask.into(), 0, 63),
        ("unit.domain_id_bits", unit.domain_id_bits.into(), 4, 16),
        ("unit.address_bits", unit.address_bits.into(), 30, 57),
        ("unit.latency", unit.latency.into(), 1, 100),
        ("unit.fault_records", unit.fault_records.into(), 1, 256),
        ("unit.ring", unit.ring.into(), 0, 7),
    ];
    for (key, value, least, most) in ranges {
        if !(least..=most).contains(&value) {
            return fail(format!("{key} is {value}; expected {least} to {most}"));
        }
    }
    if let Some(why) = crate::machines::impossible(machine) {
        return fail(why.to_owned());
    }
    let mut names = BTreeSet::from(["front", "back"]);
    for domain in &scenario.domain {
        if !names.insert(&domain.get_ref().name) {
            return Err((domain.span(), format!("`{}` exists already", domain.get_ref().name)));
        }
    }
    for device in &scenario.device {
        let (span, device) = (device.span(), device.get_ref());
        if device.unit >= unit.count {
            let what = format!("device `{}` is behind unit {}", device.name, device.unit);
            return Err((span, format!("{what}; expected 0 to {}", unit.count - 1)));
        }
        if !names.insert(&device.name) || is_first_device(&device.name).is_some() {
            return Err((span, format!("`{}` exists already", device.name)));
        }
    }
    Ok(())
}

fn is_numbered(text: &str, letter: char) -> bool {
    let digits = text.strip_prefix(letter);
    digits.is_some_and(|digits| {
        digits.len() == 2 && digits.chars().all(|digit| digit.is_ascii_digit())
    })
}

/// The unit of a device called `dev0`, `dev1` and so on.
pub(crate) fn is_first_device(name: &str) -> Option<usize> {
    name.strip_prefix("dev")?.parse().ok()
}

/// The CPU called `cpu1` and so on.
pub(crate) fn is_cpu(name: &str) -> Option<usize> {
    name.strip_prefix("cpu")?.parse().ok()
}
