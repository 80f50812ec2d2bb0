//! What each policy must cost, and where the two kinds of hardware must agree
//!
//! The demo uses contiguous frames that start at a multiple of 32, so every
//! figure but the waits follows from the number of grants.

use anyhow::{Result, bail};

use super::row::{Hardware, Policy, Row};

/// Grants that share one flush of each kind.
const BATCH: u64 = 32;
/// Fewer unflushed pages than this are all still cached by QEMU at the end: its IOTLB
/// holds 1024 entries and drops all of them to make room for one more.
const CACHED: u64 = 1000;

/// Checks every row, and the model's rows against QEMU's.
///
/// # Errors
/// If a figure is not what it must be; the message lists each one.
pub(super) fn check(rows: &[Row]) -> Result<()> {
    let mut wrong: Vec<String> = rows.iter().flat_map(broken).collect();
    for model in rows.iter().filter(|row| row.hardware == Hardware::Model) {
        let same = |row: &&Row| row.hardware == Hardware::Qemu && row.policy == model.policy;
        if let Some(qemu) = rows.iter().find(same) {
            wrong.extend(differences(model, qemu));
        }
    }
    if !wrong.is_empty() {
        bail!("the demo's figures are wrong:\n  {}", wrong.join("\n  "));
    }
    Ok(())
}

fn broken(row: &Row) -> Vec<String> {
    let grants = row.grants;
    let flushes = match row.policy {
        Policy::PerPage => grants,
        Policy::Batched => grants.div_ceil(BATCH),
        Policy::NoFlush => 0,
    };
    let (commands, flushed, lost) = match row.policy {
        Policy::PerPage => (grants, grants, 0),
        // Whole batches are aligned blocks already.
        Policy::Batched => {
            let (batches, rest) = (grants / BATCH, grants % BATCH);
            let (blocks, pages) = cheapest_blocks(rest);
            (batches + blocks, batches * BATCH + pages, 0)
        }
        Policy::NoFlush => (0, 0, grants),
    };
    let mut wrong = Vec::new();
    let mut demand = |name: &str, found: u64, expected: u64| {
        if found != expected {
            let (hardware, policy) = (row.hardware, row.policy.name());
            wrong.push(format!("{hardware:?}, {policy}: {name} is {found}, it must be {expected}"));
        }
    };
    demand("tlb_flushes", row.tlb_flushes, flushes);
    demand("iotlb_flushes", row.iotlb_flushes, flushes);
    demand("iotlb_commands", row.iotlb_commands, commands);
    demand("pages_changed", row.pages_changed, grants);
    demand("pages_flushed", row.pages_flushed, flushed);
    demand("released_early", row.released_early, lost);
    if row.hardware == Hardware::Qemu && lost > CACHED && row.stale_accesses > 0 {
        return wrong;
    }
    demand("stale_accesses", row.stale_accesses, lost);
    wrong
}

/// How many blocks make hardware forget the first `pages` pages of an aligned batch most
/// cheaply, and how many pages they name: a command costs as much as four pages more.
fn cheapest_blocks(pages: u64) -> (u64, u64) {
    if pages == 0 || pages.is_power_of_two() {
        return (pages.min(1), pages);
    }
    let block = pages.next_power_of_two();
    let (blocks, named) = cheapest_blocks(pages - block / 2);
    let (blocks, named) = (1 + blocks, block / 2 + named);
    if 4 + block <= 4 * blocks + named { (1, block) } else { (blocks, named) }
}

/// The IOTLB figures in which one policy differs between model and QEMU.
fn differences(model: &Row, qemu: &Row) -> Vec<String> {
    let figures = [
        ("iotlb_flushes", model.iotlb_flushes, qemu.iotlb_flushes),
        ("iotlb_commands", model.iotlb_commands, qemu.iotlb_commands),
        ("waits", model.waits, qemu.waits),
        ("pages_flushed", model.pages_flushed, qemu.pages_flushed),
    ];
    let different = figures.iter().filter(|(_, model, qemu)| model != qemu);
    let policy = model.policy.name();
    different
        .map(|(name, model, qemu)| {
            format!("{policy}: {name} is {model} on the model, {qemu} in QEMU")
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(hardware: Hardware, policy: Policy, grants: u64) -> Row {
        let (flushes, flushed, lost) = match policy {
            Policy::PerPage => (grants, grants, 0),
            Policy::Batched => (grants.div_ceil(32), grants, 0),
            Policy::NoFlush => (0, 0, grants),
        };
        Row {
            hardware,
            policy,
            grants,
            tlb_flushes: flushes,
            iotlb_flushes: flushes,
            iotlb_commands: flushes,
            waits: flushes,
            pages_changed: grants,
            pages_flushed: flushed,
            stale_accesses: lost,
            released_early: lost,
        }
    }

    #[track_caller]
    fn finds(change: impl Fn(&mut Row), policy: Policy, grants: u64, expected: bool) {
        let mut row = row(Hardware::Qemu, policy, grants);
        change(&mut row);
        assert_eq!(check(&[row]).is_err(), expected);
    }

    #[test]
    fn right_figures_pass() {
        for policy in Policy::ALL {
            finds(|_| {}, policy, 32, false);
            finds(|_| {}, policy, 1, false);
            finds(|_| {}, policy, 64, false);
        }
        // 100 grants end in a batch of 4; 7 grants are flushed as a block of 8.
        finds(|_| {}, Policy::Batched, 100, false);
        finds(|row| row.pages_flushed = 8, Policy::Batched, 7, false);
        // Rounding 9 grants up to 16 pages is dearer than a second command.
        finds(|row| row.iotlb_commands = 2, Policy::Batched, 9, false);
        finds(|row| row.pages_flushed = 16, Policy::Batched, 9, true);
    }

    #[test]
    fn a_partial_batch_is_named_by_the_cheapest_blocks() {
        for (pages, expected) in [
            (0, (0, 0)),
            (1, (1, 1)),
            (3, (1, 4)),
            (5, (1, 8)),
            (9, (2, 9)),
            (10, (2, 10)),
            (11, (1, 16)),
            (12, (1, 16)),
            (17, (2, 17)),
            (21, (2, 24)),
            (31, (1, 32)),
        ] {
            assert_eq!(cheapest_blocks(pages), expected, "{pages}");
        }
    }

    #[test]
    fn each_wrong_figure_is_found() {
        for policy in Policy::ALL {
            finds(|row| row.tlb_flushes += 1, policy, 32, true);
            finds(|row| row.iotlb_flushes += 1, policy, 32, true);
            finds(|row| row.iotlb_commands += 1, policy, 32, true);
            finds(|row| row.pages_changed -= 1, policy, 32, true);
            finds(|row| row.pages_flushed += 1, policy, 32, true);
            finds(|row| row.stale_accesses += 1, policy, 32, true);
            finds(|row| row.released_early += 1, policy, 32, true);
        }
        finds(|_| {}, Policy::Batched, 7, true);
        finds(|row| row.stale_accesses = 31, Policy::NoFlush, 32, true);
    }

    #[test]
    fn only_qemu_may_forget_entries_and_only_beyond_its_capacity() {
        finds(|row| row.stale_accesses = 500, Policy::NoFlush, 5000, false);
        finds(|row| row.stale_accesses = 0, Policy::NoFlush, 5000, true);
        finds(|row| row.stale_accesses = 500, Policy::PerPage, 5000, true);
        let mut model = row(Hardware::Model, Policy::NoFlush, 5000);
        model.stale_accesses = 500;
        assert!(check(&[model]).is_err());
    }

    #[test]
    fn model_and_qemu_must_agree_on_the_iotlb_figures() {
        let model = row(Hardware::Model, Policy::Batched, 32);
        let mut qemu = row(Hardware::Qemu, Policy::Batched, 32);
        assert!(check(&[model.clone(), qemu.clone()]).is_ok());
        qemu.waits += 1;
        assert!(check(&[model, qemu]).is_err());
    }
}
