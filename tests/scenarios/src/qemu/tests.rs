//! What files become, line by line.

use std::path::Path;

use super::{Boot, PLANTS, Program, lower};
use crate::{parse::parse, plants};

fn program(text: &str) -> Result<Program, String> {
    let text = format!("title = 't'\nbound = {{ tlb = 9, iotlb = 9 }}\n{text}");
    let script = parse(Path::new("some.toml"), &text).expect("it makes sense");
    lower(&script)
}

fn boots(text: &str) -> Result<Vec<Boot>, String> {
    program(text).map(|program| program.boots)
}

/// The lines of the steps, where devices have tables of their own.
#[track_caller]
fn becomes(text: &str, expected: &[&str]) {
    let boots = boots(text).expect("it can be shown");
    let lines: Vec<&str> = boots[0].text.lines().collect();
    for line in expected {
        assert!(lines.contains(line), "no `{line}` in {lines:#?}");
    }
}

#[track_caller]
fn is_not_shown(text: &str, expected: &str) {
    let why = boots(text).expect_err("it cannot be shown");
    assert!(why.contains(expected), "{why}");
}

const ACCESS: &str = "[[step]]
    populate = { pages = 'p', at = 0x400000 }
    [[step]]
    access = { by = ['cpu1', 'dev0'], mappings = 'p', reaches = 'same' }";

#[test]
fn a_processor_that_accesses_memory_runs_a_guest_from_the_beginning() {
    becomes(ACCESS, &["0 cpu 1 2", "0 enter 1 2", "5 reaches 0x1 0x400000 0x0 0x1"]);
}

#[test]
fn a_place_far_up_is_in_reach_of_the_guest() {
    let far = ACCESS.replace("0x400000", "0xfffffffff");
    becomes(&far, &["0 cpu 1 2 0xff8000000"]);
}

#[test]
fn where_one_tree_serves_all_no_processor_runs_a_guest() {
    let boots = boots(ACCESS).expect("it can be shown");
    let guests: Vec<bool> = boots.iter().map(|boot| boot.guests).collect();
    assert_eq!(guests, [true, false]);
    assert!(!boots[1].text.contains("reaches 0x1 "), "{}", boots[1].text);
}

#[test]
fn what_a_unit_lacks_is_said_to_the_testbed() {
    let unit = "unit = { page_selective = false, domain_id_bits = 4 }\n";
    let boots = boots(&format!("{unit}{ACCESS}")).expect("it can be shown");
    assert_eq!(boots[0].words, "tables=separate page_selective=0 domain_id_bits=4");
}

#[test]
fn a_status_is_its_sixteen_bits() {
    let text = "[[step]]
        grant = { pages = 'a' }
        [[step]]
        map = { pages = 'a', at = 0x1000000000, status = -1, outcome = 'done' }";
    becomes(text, &["5 map 0x0 0x0 0x1000000000 0x0 0xffff 0x2", "5 call-map 0x2 0x0"]);
}

#[test]
fn a_call_that_may_end_in_any_way_has_any_status() {
    let text = "[[step]]
        grant = { pages = 'a' }
        [[step]]
        map = { pages = 'a', at = 0x100000, outcome = 'any' }";
    becomes(text, &["5 map 0x0 0x0 0x100000 0x0 0x8000 0x2", "5 call-map 0x2 0x5"]);
}

#[test]
fn what_qemu_has_not_is_not_shown() {
    is_not_shown(&format!("unit = {{ count = 2 }}\n{ACCESS}"), "QEMU has one unit");
    is_not_shown(&format!("machine = {{ levels = 5 }}\n{ACCESS}"), "five levels");
    is_not_shown(&format!("machine = {{ device_tlb = true }}\n{ACCESS}"), "no TLB of their own");
    let fails = "[[step]]\nfail = { operation = 1, how = 'time-out' }";
    is_not_shown(&format!("{ACCESS}\n{fails}"), "line 7: fail: QEMU's unit raises neither");
    let deaf = "machine = { tables = 'shared' }\n[[step]]\nfaults = { deaf = true }";
    is_not_shown(deaf, "line 4: faults: no processor of QEMU walks");
}

#[test]
fn each_plant_of_the_testbed_is_one_of_the_model_too() {
    for name in PLANTS {
        assert!(plants::named(name).is_some(), "{name}");
    }
}

#[test]
fn what_the_testbed_says_is_told_with_the_names_of_the_file() {
    let program = program(ACCESS).expect("it can be shown");
    let said = "line 5: processor 1 at Gfn(0x400000) wrote to page 0; page 7, expected";
    let told = "line 5: `cpu1` at Gfn(0x400000) wrote to `p`; page 7, expected";
    assert_eq!(program.in_words(said), told);
    assert_eq!(program.in_words("device 0, "), "`dev0`, ");
    assert_eq!(program.in_words("page"), "page");
}

#[test]
fn a_workload_uses_names_again() {
    let workload = "machine = { tables = 'separate' }
        [[step]]
        workload = { name = 'W6', steps = 40 }";
    let boots = boots(workload).expect("it can be shown");
    let named = boots[0]
        .text
        .lines()
        .filter_map(|line| line.split(' ').nth(2).filter(|_| line.contains(" grant ")));
    let (all, different): (Vec<&str>, std::collections::BTreeSet<&str>) =
        (named.clone().collect(), named.collect());
    assert!(different.len() < all.len(), "{} names for {} grants", different.len(), all.len());
    for word in ["use", "touch", "begin"] {
        let is_there = |line: &str| line.split(' ').nth(1) == Some(word);
        assert!(boots[0].text.lines().any(is_there), "no `{word}`");
    }
}
