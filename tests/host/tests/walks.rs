//! Unmapping a whole space costs the published walks, and reads tables once.

use host::walks::{Case, Layout, MOST_WALKS, Special};
use stage2::Pace;

/// Runs a case as far as a debug build can: more walks than this are left to the command
/// `cargo xtask walks`, which runs up to 2^27.
const QUICK: u64 = 1 << 19;

#[track_caller]
fn check(name: &str, before: u64, after: u64) {
    let case = Case::named(name).unwrap_or_else(|| panic!("no case is called {name}"));
    let (closed, closed_after) = case.expected();
    assert_eq!(closed, before, "{name}");
    assert!(closed_after.is_none_or(|closed| closed == after), "{name}: {closed_after:?}");
    assert_eq!(case.is_computed(), before > MOST_WALKS);
    let (walks, flushes) = case.walks(Pace::Resume).unwrap();
    assert_eq!(walks, after, "{name}");
    if before <= QUICK {
        assert_eq!(case.walks(Pace::EveryChunk), Ok((before, flushes)), "{name}");
    }
    if case.layout == Layout::Empty {
        assert_eq!(flushes, 0, "{name}");
    }
}

#[test]
fn an_empty_space_costs_the_published_walks_for_every_format_and_width() {
    check("arm64/4K/40/1G/empty", 1 << 10, 1024);
    check("arm64/4K/43/1G/empty", 1 << 13, 8192);
    check("arm64/4K/44/1G/empty", 1 << 14, 32);
    check("arm64/4K/48/1G/empty", 262_144, 512);
    check("arm64/4K/52/1G/empty", 1 << 22, 8192);
    check("arm64/16K/48/32M/empty", 1 << 23, 4096);
    check("arm64/16K/52/32M/empty", 1 << 27, 32);
    check("arm64/64K/46/512M/empty", 1 << 17, 131_072);
    check("arm64/64K/48/512M/empty", 1 << 19, 64);
    check("arm64/64K/52/512M/empty", 1 << 23, 1024);
    for format in ["ept", "npt", "vtd"] {
        check(&format!("{format}/4K/48/1G/empty"), 1 << 18, 512);
        check(&format!("{format}/4K/48/2M/empty"), 1 << 27, 512);
    }
    check("ept/4K/57/1G/empty", 1 << 27, 512);
    check("ept/4K/57/2M/empty", 1 << 36, 512);
}

#[test]
fn what_is_mapped_costs_the_published_walks() {
    for format in ["arm64", "ept", "npt", "vtd"] {
        check(&format!("{format}/4K/48/1G/one-page"), 1 << 18, 513);
        check(&format!("{format}/4K/48/1G/full-region"), 1 << 18, 1023);
        check(&format!("{format}/4K/48/1G/top-chunk-21"), 1 << 18, 534);
        check(&format!("{format}/4K/48/1G/top-chunk-33"), 1 << 18, 546);
        check(&format!("{format}/4K/48/1G/top-chunk-34"), 1 << 18, 547);
        check(&format!("{format}/4K/48/1G/top-chunk-511"), 1 << 18, 1023);
    }
    check("arm64/16K/52/32M/one-page", 1 << 27, 33);
    check("ept/4K/48/2M/one-page", 1 << 27, 513);
    check("ept/4K/48/2M/full-region", 1 << 27, 262_655);
    check("ept/4K/57/1G/full-region", 1 << 27, 1024);
}

#[test]
fn an_adversary_makes_chunks_useless_and_the_walk_without_them_reads_each_table_once() {
    for format in ["arm64", "ept", "npt", "vtd"] {
        check(&format!("{format}/4K/48/1G/adversarial"), 1 << 18, 1 << 18);
    }
    check("arm64/4K/40/1G/adversarial", 1 << 10, 1 << 10);
    check("arm64/4K/43/1G/adversarial", 1 << 13, 1 << 13);
    check("arm64/4K/44/1G/adversarial", 1 << 14, 1 << 14);
    check("arm64/64K/48/512M/adversarial", 1 << 19, 1 << 19);
    // Two levels between: whole entries of the upper one are stepped over.
    check("arm64/16K/52/32M/adversarial", 1 << 27, 32 * (2047 + 2048));
    check("ept/4K/48/2M/adversarial", 1 << 27, 512 * (511 + 512));
    check("ept/4K/57/1G/adversarial", 1 << 27, 512 * (511 + 512));
    check("ept/4K/57/2M/adversarial", 1 << 36, 512 * (2 * 511 + 512));
    for name in ["arm64/4K/48/1G/adversarial", "ept/4K/48/1G/adversarial"] {
        let case = Case::named(name).unwrap();
        assert_eq!(case.entries_read(), Ok(512 + 512 * 3 * 512));
    }
    let empty = Case::named("ept/4K/48/1G/empty").unwrap();
    assert_eq!(empty.entries_read(), Ok(512));
}

#[test]
fn only_walks_that_found_something_are_followed_by_a_flush() {
    let flushes = |name: &str| Case::named(name).unwrap().measure().unwrap();
    let one = flushes("arm64/4K/48/1G/one-page");
    assert_eq!((one.flushes_unconditional, one.flushes_conditional), (262_144, 1));
    let full = flushes("arm64/4K/48/1G/full-region");
    assert_eq!((full.flushes_unconditional, full.flushes_conditional), (262_144, 512));
    let empty = flushes("arm64/4K/48/1G/empty");
    assert_eq!((empty.flushes_unconditional, empty.flushes_conditional), (262_144, 0));
}

#[test]
fn a_special_run_of_each_loop_comes_to_its_published_figure() {
    for special in Special::ALL {
        assert_eq!(special.after(), Ok(special.expected().1), "{}", special.name());
    }
}

#[test]
fn every_table_of_the_list_is_measured_with_every_layout() {
    let names: Vec<_> = Case::all().iter().map(Case::name).collect();
    for name in names.iter().filter(|name| name.ends_with("/empty")) {
        for layout in ["one-page", "full-region", "adversarial"] {
            let other = name.replace("empty", layout);
            assert!(names.contains(&other), "{other}");
        }
    }
}

#[test]
fn every_case_has_a_name_of_its_own() {
    let mut names: Vec<_> = Case::all().iter().map(Case::name).collect();
    names.extend(Special::ALL.map(|special| special.name().to_owned()));
    let count = names.len();
    names.sort();
    names.dedup();
    assert_eq!(names.len(), count);
}
