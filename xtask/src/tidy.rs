//! The rules this repository holds itself to, as tests
//!
//! A `Rule` looks at the whole `Tree` of files and returns what breaks it. Each
//! rule is run on the checkout by a test of its own and by `cargo xtask lint`.

mod invariants;
mod source;

use std::fmt;
use std::fs;
use std::path::Path;

use anyhow::{Context, Result, bail};

use crate::checkout;
use source::{code_lines, code_only, has_word};

/// The most characters the first line of a module's documentation may have.
const TAGLINE: usize = 80;
/// The most lines of code a file may have, tests apart.
const CODE_LINES: usize = 400;

/// Files that may be longer than [`CODE_LINES`], each with the reason.
const LONG_FILES: &[(&str, &str)] = &[];

/// Every entry the top level may have, dotfiles apart; `true` if it must be there.
const TOP_LEVEL: &[(&str, bool)] = &[
    ("CHANGELOG.md", true),
    ("Cargo.lock", true),
    ("Cargo.toml", true),
    ("LICENSE-APACHE", true),
    ("LICENSE-MIT", true),
    ("README.md", true),
    ("crates", true),
    ("deny.toml", true),
    ("docs", true),
    ("rust-toolchain.toml", true),
    ("target", false),
    ("tests", true),
    ("xtask", true),
];

/// Programs that must not compile: no modules, so a plain comment may open them.
const MISUSE: &str = "tests/misuse/cases/";

/// Crate roots that must forbid unsafe code altogether.
const WITHOUT_UNSAFE: &[&str] =
    &["crates/flush/src/lib.rs", "crates/gnttab/src/lib.rs", "crates/stage2/src/lib.rs"];

/// Checks one property of the tree.
type Rule = fn(&Tree) -> Vec<Finding>;

const RULES: &[(&str, Rule)] = &[
    ("a module opens with a tagline", |tree| tree.each(taglines)),
    ("a file stays short", |tree| tree.each(lengths)),
    ("unsafe code is announced", |tree| tree.each(unsafety)),
    ("library crates need no std and no unsafe", crate_roots),
    ("packages take the workspace's lints", |tree| tree.each(lints)),
    ("no machine and no host is named", |tree| tree.each(places)),
    ("nothing is left unfinished", |tree| tree.each(unfinished)),
    ("relative links lead somewhere", links),
    ("every invariant names its test", invariants::check),
    ("the top level holds what it should", top_level),
];

/// Checks every rule.
///
/// # Errors
/// If the tree cannot be read or breaks a rule; the message lists each breach.
pub(crate) fn check() -> Result<()> {
    let tree = Tree::read(checkout::root())?;
    let mut broken = String::new();
    for (name, rule) in RULES {
        let findings = rule(&tree);
        if !findings.is_empty() {
            broken.push_str(&format!("\n  {name}:"));
        }
        for finding in findings {
            broken.push_str(&format!("\n    {finding}"));
        }
    }
    if !broken.is_empty() {
        bail!("repository rules are broken (xtask/src/tidy.rs explains them):{broken}");
    }
    Ok(())
}

/// One breach of a rule.
struct Finding {
    path: String,
    /// Counted from 1; 0 for the whole file.
    line: usize,
    what: String,
}

impl Finding {
    fn new(path: &str, line: usize, what: impl Into<String>) -> Self {
        Self { path: path.to_owned(), line, what: what.into() }
    }
}

impl fmt::Display for Finding {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.line {
            0 => write!(formatter, "{}: {}", self.path, self.what),
            line => write!(formatter, "{}:{line}: {}", self.path, self.what),
        }
    }
}

/// One text file of the checkout.
struct File {
    /// Relative to the root, with slashes.
    path: String,
    text: String,
    /// The text without comments and literals, if this is Rust; otherwise empty.
    code: String,
}

impl File {
    fn new(path: &str, text: String) -> Self {
        let code = if path.ends_with(".rs") { code_only(&text) } else { String::new() };
        Self { path: path.to_owned(), text, code }
    }

    fn is_rust(&self) -> bool {
        self.path.ends_with(".rs")
    }

    fn numbered_lines(&self) -> impl Iterator<Item = (usize, &str)> {
        (1..).zip(self.text.lines())
    }

    fn finding(&self, line: usize, what: impl Into<String>) -> Finding {
        Finding::new(&self.path, line, what)
    }
}

/// Every text file of the checkout, and the names at its top level.
struct Tree {
    files: Vec<File>,
    top: Vec<String>,
}

impl Tree {
    fn read(root: &Path) -> Result<Self> {
        let mut files = Vec::new();
        let mut top = Vec::new();
        let mut folders = vec![String::new()];
        while let Some(folder) = folders.pop() {
            let path = root.join(&folder);
            let entries =
                fs::read_dir(&path).with_context(|| format!("cannot list {}", path.display()))?;
            for entry in entries {
                let entry = entry?;
                let name = entry.file_name().to_string_lossy().into_owned();
                if folder.is_empty() {
                    top.push(name.clone());
                }
                let relative = Path::new(&folder).join(&name).display().to_string();
                if entry.file_type()?.is_dir() {
                    if name != ".git" && name != "target" {
                        folders.push(relative);
                    }
                } else if let Ok(text) = fs::read_to_string(entry.path()) {
                    files.push(File::new(&relative, text));
                }
            }
        }
        files.sort_by(|left, right| left.path.cmp(&right.path));
        Ok(Self { files, top })
    }

    fn file(&self, path: &str) -> Option<&File> {
        self.files.iter().find(|file| file.path == path)
    }

    fn each(&self, rule: fn(&File) -> Vec<Finding>) -> Vec<Finding> {
        self.files.iter().flat_map(rule).collect()
    }
}

/// A Rust file begins with one short line of documentation, then an empty one.
fn taglines(file: &File) -> Vec<Finding> {
    if !file.is_rust() {
        return Vec::new();
    }
    if file.path.starts_with(MISUSE) {
        let opens = file.text.starts_with("// ") || file.text.starts_with("//! ");
        let bare = || file.finding(1, "does not open by saying what must not compile");
        return if opens { Vec::new() } else { vec![bare()] };
    }
    let is_comment = |line: &str| line.starts_with("//") && !line.starts_with("//!");
    let skipped = |line: &str| line.is_empty() || is_comment(line);
    let mut lines = file.numbered_lines().skip_while(|(_, line)| skipped(line));
    let Some((number, line)) = lines.next() else {
        return vec![file.finding(0, "is empty")];
    };
    let Some(tagline) = line.strip_prefix("//! ") else {
        return vec![file.finding(number, "does not open with a `//!` tagline")];
    };
    let mut findings = Vec::new();
    let length = tagline.chars().count();
    if length > TAGLINE {
        let what = format!("its tagline has {length} characters, {TAGLINE} are allowed");
        findings.push(file.finding(number, what));
    }
    if let Some((number, line)) = lines.next()
        && line.starts_with("//! ")
    {
        findings.push(file.finding(number, "its tagline is not followed by an empty line"));
    }
    findings
}

fn lengths(file: &File) -> Vec<Finding> {
    let is_test = |part: &str| {
        matches!(part, "tests.rs" | "benches" | "examples") || part.ends_with("_tests.rs")
    };
    let folders: Vec<&str> = file.path.split('/').collect();
    // `tests/host/tests/...` is a test; `tests/host/src/...` is code.
    let below_package_tests = folders.iter().skip(1).any(|part| *part == "tests");
    let excepted = LONG_FILES.iter().any(|(path, _)| *path == file.path);
    if !file.is_rust() || excepted || below_package_tests || folders.into_iter().any(is_test) {
        return Vec::new();
    }
    let lines = code_lines(&file.text);
    if lines <= CODE_LINES {
        return Vec::new();
    }
    let what = format!("has {lines} lines of code, {CODE_LINES} are allowed: split it");
    vec![file.finding(0, what)]
}

fn unsafety(file: &File) -> Vec<Finding> {
    let announced = file.text.lines().any(|line| line.starts_with("// UNSAFETY:"));
    match (has_word(&file.code, "unsafe"), announced) {
        (true, false) => vec![file.finding(0, "has unsafe code but no `// UNSAFETY:` line")],
        (false, true) => vec![file.finding(0, "has a `// UNSAFETY:` line but no unsafe code")],
        (true, true) | (false, false) => Vec::new(),
    }
}

fn crate_roots(tree: &Tree) -> Vec<Finding> {
    let mut findings = Vec::new();
    let mut demand = |path: &str, attribute: &str| {
        let has = |file: &File| file.code.lines().any(|line| line == attribute);
        if !tree.file(path).is_some_and(has) {
            findings.push(Finding::new(path, 0, format!("lacks `{attribute}`")));
        }
    };
    for path in WITHOUT_UNSAFE {
        demand(path, "#![forbid(unsafe_code)]");
    }
    let is_root = |path: &str| path.starts_with("crates/") && path.ends_with("/src/lib.rs");
    for file in tree.files.iter().filter(|file| is_root(&file.path)) {
        demand(&file.path, "#![no_std]");
    }
    findings
}

fn lints(file: &File) -> Vec<Finding> {
    let is_package = file.path.ends_with("/Cargo.toml") && file.text.contains("[package]");
    if !is_package || file.text.contains("[lints]\nworkspace = true") {
        return Vec::new();
    }
    vec![file.finding(0, "lacks `[lints] workspace = true`")]
}

/// Folders of a machine and hosts of registries, put together here so that this file may name them.
fn forbidden_places() -> Vec<String> {
    let folders = ["tmp", "work", "root", "home"].map(|name| format!("/{name}/"));
    let hosts =
        [("crates", "io"), ("docs", "rs"), ("pypi", "org"), ("npmjs", "com"), ("debian", "org")];
    let hosts = hosts.map(|(name, end)| format!("{name}.{end}"));
    folders.into_iter().chain(hosts).collect()
}

fn places(file: &File) -> Vec<Finding> {
    if file.path == "Cargo.lock" {
        return Vec::new();
    }
    let forbidden = forbidden_places();
    let mut findings = Vec::new();
    for (number, line) in file.numbered_lines() {
        for place in &forbidden {
            // A folder below another is not the machine's: only a path's start counts.
            let starts = |at: usize| {
                let before = line.get(..at).and_then(|part| part.chars().next_back());
                let joins = |letter: char| letter.is_alphanumeric() || "_-./}".contains(letter);
                !place.starts_with('/') || !before.is_some_and(joins)
            };
            if line.match_indices(place.as_str()).any(|(at, _)| starts(at)) {
                findings.push(file.finding(number, format!("names {place}")));
            }
        }
    }
    findings
}

fn unfinished(file: &File) -> Vec<Finding> {
    let macros = ["todo", "unimplemented"].map(|name| format!("{name}!"));
    let marks = [concat!("TO", "DO"), concat!("FIX", "ME"), concat!("HA", "CK")];
    let mut findings = Vec::new();
    for (number, (line, code)) in (1..).zip(file.text.lines().zip(file.code.lines())) {
        let found = macros.iter().any(|name| code.contains(name.as_str()))
            || marks.iter().any(|mark| has_word(line, mark));
        if found {
            findings.push(file.finding(number, "is marked as unfinished"));
        }
    }
    findings
}

/// Links of a document to other files of the checkout.
fn links(tree: &Tree) -> Vec<Finding> {
    let mut findings = Vec::new();
    for file in tree.files.iter().filter(|file| file.path.ends_with(".md")) {
        let folder = Path::new(&file.path).parent().unwrap_or(Path::new(""));
        for (number, line) in file.numbered_lines() {
            for part in line.split("](").skip(1) {
                let target = part.split([')', '#', ' ']).next().unwrap_or_default();
                let outside = target.is_empty() || target.contains("://");
                if !outside && !checkout::root().join(folder).join(target).exists() {
                    findings
                        .push(file.finding(number, format!("links to {target}: nothing there")));
                }
            }
        }
    }
    findings
}

fn top_level(tree: &Tree) -> Vec<Finding> {
    let mut findings = Vec::new();
    for name in tree.top.iter().filter(|name| !name.starts_with('.')) {
        if !TOP_LEVEL.iter().any(|(allowed, _)| allowed == name) {
            findings.push(Finding::new(name, 0, "does not belong at the top level"));
        }
    }
    for (name, needed) in TOP_LEVEL {
        if *needed && !tree.top.iter().any(|present| present == name) {
            findings.push(Finding::new(name, 0, "is missing"));
        }
    }
    findings
}

#[cfg(test)]
mod tests;
