//! Each rule on this checkout, and each rule on something that breaks it
//!
//! The first half holds the repository to its rules; the second shows that the
//! rules can fail.

use super::*;

#[track_caller]
fn holds(name: &str) {
    let tree = Tree::read(checkout::root()).expect("the checkout can be read");
    let (_, rule) = RULES.iter().find(|(rule, _)| *rule == name).expect("a rule");
    let findings: Vec<String> = rule(&tree).iter().map(ToString::to_string).collect();
    assert!(findings.is_empty(), "{name}:\n{}", findings.join("\n"));
}

macro_rules! on_this_checkout {
    ($($test:ident: $rule:literal,)*) => {
        $(#[test] fn $test() { holds($rule); })*

        #[test]
        fn every_rule_is_run_on_this_checkout() {
            let run = [$($rule),*];
            assert_eq!(RULES.iter().map(|(name, _)| *name).collect::<Vec<_>>(), run);
        }
    };
}

on_this_checkout! {
    a_module_opens_with_a_tagline: "a module opens with a tagline",
    a_file_stays_short: "a file stays short",
    unsafe_code_is_announced: "unsafe code is announced",
    library_crates_need_no_std_and_no_unsafe: "library crates need no std and no unsafe",
    packages_take_the_lints: "packages take the workspace's lints",
    no_machine_and_no_host_is_named: "no machine and no host is named",
    nothing_is_left_unfinished: "nothing is left unfinished",
    relative_links_lead_somewhere: "relative links lead somewhere",
    every_invariant_names_its_test: "every invariant names its test",
    the_top_level_holds_what_it_should: "the top level holds what it should",
}

#[track_caller]
fn planted(rule: fn(&File) -> Vec<Finding>, path: &str, text: &str, expected: usize) {
    let found = rule(&File::new(path, text.to_owned()));
    let shown: Vec<String> = found.iter().map(ToString::to_string).collect();
    assert_eq!(found.len(), expected, "{path}: {text}\n{shown:?}");
}

#[test]
fn a_bad_opening_is_found() {
    let long = "x".repeat(TAGLINE + 1);
    planted(taglines, "a.rs", "//! Short\n//!\n//! More\n", 0);
    planted(taglines, "a.rs", "//! Short\n\nfn a() {}\n", 0);
    planted(taglines, "a.rs", "// UNSAFETY: why\n//! Short\n", 0);
    planted(taglines, "a.rs", &format!("//! {long}\n"), 1);
    planted(taglines, "a.rs", "//! Short\n//! More\n", 1);
    planted(taglines, "a.rs", "fn a() {}\n//! Late\n", 1);
    planted(taglines, "a.rs", "", 1);
    planted(taglines, "a.md", "Text", 0);
    planted(taglines, "tests/misuse/cases/a.rs", "// What must not compile.\nfn main() {}", 0);
    planted(taglines, "tests/misuse/cases/a.rs", "fn main() {}", 1);
}

#[test]
fn a_long_file_is_found() {
    let long = "a;\n".repeat(CODE_LINES + 1);
    planted(lengths, "crates/a/src/lib.rs", &"a;\n".repeat(CODE_LINES), 0);
    planted(lengths, "crates/a/src/lib.rs", &long, 1);
    planted(lengths, "tests/host/src/lib.rs", &long, 1);
    planted(lengths, "tests/host/tests/promise.rs", &long, 0);
    planted(lengths, "crates/a/src/b/tests.rs", &long, 0);
    planted(lengths, "crates/a/src/b_tests.rs", &long, 0);
    planted(lengths, "crates/a/src/lib.rs", &"// a\n\n".repeat(1000), 0);
}

#[test]
fn unannounced_unsafe_code_is_found() {
    planted(unsafety, "a.rs", "unsafe { b() }", 1);
    planted(unsafety, "a.rs", "// UNSAFETY: why\nunsafe { b() }", 0);
    planted(unsafety, "a.rs", "// UNSAFETY: why\nb()", 1);
    planted(unsafety, "a.rs", "// unsafe\nlet a = \"unsafe\";", 0);
}

#[test]
fn a_missing_lints_table_is_found() {
    planted(lints, "a/Cargo.toml", "[package]\n", 1);
    planted(lints, "a/Cargo.toml", "[package]\n[lints]\nworkspace = true\n", 0);
    planted(lints, "Cargo.toml", "[workspace]\n", 0);
}

#[test]
fn a_machine_or_host_is_found() {
    let [temporary, .., host] = &*forbidden_places() else {
        panic!("no places");
    };
    planted(places, "a.md", &format!("see {temporary}x"), 1);
    planted(places, "a.md", &format!("see target{temporary}x"), 0);
    planted(places, "a.md", &format!("at {host}"), 1);
    planted(places, "a.md", &format!("at www.{host}"), 1);
    planted(places, "Cargo.lock", &format!("at {host}"), 0);
}

#[test]
fn unfinished_work_is_found() {
    planted(unfinished, "a.rs", concat!("to", "do!()"), 1);
    planted(unfinished, "a.rs", concat!("// FIX", "ME later"), 1);
    planted(unfinished, "a.rs", "let a = 1;", 0);
}

#[test]
fn a_wrong_top_level_is_found() {
    let mut top: Vec<String> = TOP_LEVEL.iter().map(|(name, _)| (*name).to_owned()).collect();
    top.push(".gitignore".to_owned());
    let mut tree = Tree { files: Vec::new(), top };
    assert_eq!(top_level(&tree).len(), 0);
    tree.top.push("notes".to_owned());
    assert_eq!(top_level(&tree).len(), 1);
    tree.top.retain(|name| name != "docs");
    assert_eq!(top_level(&tree).len(), 2);
}

#[test]
fn a_crate_root_without_its_attributes_is_found() {
    let roots = ["flush", "gnttab", "stage2"].map(|name| format!("crates/{name}/src/lib.rs"));
    let tree = |text: &str| Tree {
        files: roots.iter().map(|path| File::new(path, text.to_owned())).collect(),
        top: Vec::new(),
    };
    assert_eq!(crate_roots(&tree("#![no_std]\n#![forbid(unsafe_code)]\n")).len(), 0);
    assert_eq!(crate_roots(&tree("#![no_std]\n")).len(), 3);
    assert_eq!(crate_roots(&tree("// #![no_std]\n")).len(), 6);
}

#[test]
fn a_dead_link_is_found() {
    let tree =
        |text: &str| Tree { files: vec![File::new("README.md", text.to_owned())], top: Vec::new() };
    assert_eq!(links(&tree("[a](Cargo.toml) [b](https://x) [c](#part)")).len(), 0);
    assert_eq!(links(&tree("[a](no/such/file.md#part)")).len(), 1);
}
