//! Every invariant names a test that exists
//!
//! `docs/invariants.md` holds a table `| number | invariant | tests |`, whose last
//! cell names what catches a breach, each as `` `file` :: `name` ``: a test function
//! in a Rust file, or, for `xtask/src/cases.rs`, a case that boots in QEMU.

use super::{File, Finding, Tree};
use crate::cases;

/// Where the invariants are written down.
pub(super) const DOCUMENT: &str = "docs/invariants.md";
/// The file whose names are QEMU cases.
const CASES: &str = "xtask/src/cases.rs";

/// Invariants that name no test, or one that does not exist.
pub(super) fn check(tree: &Tree) -> Vec<Finding> {
    let Some(document) = tree.file(DOCUMENT) else {
        return vec![Finding::new(DOCUMENT, 0, "is missing")];
    };
    let mut findings = Vec::new();
    let mut count = 0;
    for (number, line) in document.numbered_lines() {
        let cells: Vec<&str> = line.split('|').map(str::trim).collect();
        let [_, index, .., tests, _] = cells.as_slice() else {
            continue;
        };
        if index.is_empty() || !index.chars().all(|letter| letter.is_ascii_digit()) {
            continue;
        }
        count += 1;
        let named = names(tests);
        if named.is_empty() {
            findings.push(Finding::new(DOCUMENT, number, "names no `file` :: `test`"));
        }
        for (file, test) in named {
            if !exists(tree, file, test) {
                let what = format!("names `{file}` :: `{test}`, which does not exist");
                findings.push(Finding::new(DOCUMENT, number, what));
            }
        }
    }
    if count == 0 {
        findings.push(Finding::new(DOCUMENT, 0, "holds no table of invariants"));
    }
    findings
}

/// The pairs `` `file` :: `name` `` in one cell.
fn names(cell: &str) -> Vec<(&str, &str)> {
    let parts: Vec<&str> = cell.split('`').collect();
    let pair = |window: &[&'_ str]| window[1].trim() == "::";
    let windows = parts.windows(3).enumerate();
    windows
        .filter(|(position, window)| position % 2 == 1 && pair(window))
        .map(|(_, window)| (window[0], window[2]))
        .collect()
}

fn exists(tree: &Tree, file: &str, test: &str) -> bool {
    if file == CASES {
        return cases::CASES.iter().any(|case| case.name == test);
    }
    tree.file(file).is_some_and(|file| has_test(file, test))
}

/// Whether `file` has a function `name` under a `#[test]` attribute.
fn has_test(file: &File, name: &str) -> bool {
    let opening = format!("fn {name}(");
    let mut marked = false;
    for line in file.code.lines().map(str::trim) {
        if line.contains(&opening) {
            return marked || line.contains("#[test]");
        }
        if line.starts_with("#[test]") {
            marked = true;
        } else if !line.is_empty() && !line.starts_with("#[") {
            marked = false;
        }
    }
    false
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn document(text: &str, expected: usize) {
        let code = "#[test]\n#[track_caller]\nfn holds() {}\nfn helper() {}\n";
        let tree = Tree {
            files: vec![File::new(DOCUMENT, text.to_owned()), File::new("a/b.rs", code.to_owned())],
            top: Vec::new(),
        };
        assert_eq!(check(&tree).len(), expected, "{text}");
    }

    #[test]
    fn an_invariant_without_an_existing_test_is_found() {
        document("| 1 | x | `a/b.rs` :: `holds` |", 0);
        document("| 1 | x | `a/b.rs` :: `holds`, `xtask/src/cases.rs` :: `boot` |", 0);
        document("| 1 | with `code` | `a/b.rs` :: `holds` |\n| 2 | y | none |", 1);
        document("| 1 | x | `a/b.rs` :: `gone` |", 1);
        document("| 1 | x | `a/b.rs` :: `helper` |", 1);
        document("| 1 | x | `a/c.rs` :: `holds` |", 1);
        document("| 1 | x | `xtask/src/cases.rs` :: `no-such-case` |", 1);
        document("| number | invariant | test |\n|---|---|---|", 1);
    }

    #[test]
    fn a_missing_document_is_found() {
        let tree = Tree { files: Vec::new(), top: Vec::new() };
        assert_eq!(check(&tree).len(), 1);
    }
}
