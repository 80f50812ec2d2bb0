//! Each target for a few seconds, with the same inputs every time.
//!
//! `cargo xtask fuzz` searches for longer and with other inputs.

use std::{
    collections::BTreeSet,
    fs,
    path::{Path, PathBuf},
    time::Duration,
};

use fuzz::{Limit, Search, TARGETS, Target};

/// Decides the inputs.
const SEED: u64 = 1;

#[track_caller]
fn check(name: &str) {
    let target = Target::named(name).expect("a target of that name");
    let searched = target.search(Search {
        seed: SEED,
        limit: Limit::Executions(target.quick),
        shrinking: Duration::from_secs(20),
        plant: None,
    });
    println!("fuzz | {name:<12} | {} inputs", searched.executions);
    if let Some(crash) = searched.crash {
        let file = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("{name}.bin"));
        let written = fs::write(&file, &crash.input);
        written.unwrap_or_else(|error| panic!("cannot write {}: {error}", file.display()));
        let again = format!("cargo xtask fuzz --target {name} --replay {}", file.display());
        panic!("{}\n{}\nplay it again: {again}", crash.message, target.tell(&crash.input));
    }
    assert_eq!(searched.executions, target.quick);
}

#[test]
fn no_dmar_table_harms_its_reader() {
    check("dmar");
}

#[test]
fn no_hypercall_leaves_anything_stale_or_the_books_unbalanced() {
    check("hypercall");
}

#[test]
fn no_granter_gains_by_rewriting_its_entries() {
    check("granter");
}

#[test]
fn every_operation_does_what_the_reference_says() {
    check("operations");
}

#[test]
fn no_scenario_file_is_refused_without_its_name_and_line() {
    check("scenario");
}

#[test]
fn no_elf_file_harms_its_reader() {
    check("elf");
}

/// Inputs that a search found while something was wrong with what it searched.
#[test]
fn what_once_broke_a_promise_breaks_none() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("regressions");
    for target in TARGETS {
        let Ok(files) = fs::read_dir(folder.join(target.name)) else { continue };
        let files = files.map(|file| file.expect("the folder is read").path());
        let files: BTreeSet<PathBuf> = files.collect();
        for file in files {
            println!("again | {:<12} | {}", target.name, file.display());
            let input = fs::read(&file).expect("the file is read");
            match file.extension().and_then(|extension| extension.to_str()) {
                Some("bin") => target.play(&input, None),
                Some("toml") => {
                    let text = String::from_utf8(input).expect("it is text");
                    target.play_text(&text).expect("it is a target of texts");
                }
                _ => panic!("{}: expected *.bin or *.toml", file.display()),
            }
        }
    }
}

#[test]
fn every_target_is_tried_here() {
    let source = include_str!("quick.rs");
    for target in TARGETS {
        let call = format!("check(\"{}\")", target.name);
        assert!(source.contains(&call), "{} has no test here", target.name);
    }
}
