//! Fault sweeps: everything that a world asks for is refused, one thing at a time.
//!
//! Each script runs once to count hardware operations, requests for memory and copies, and
//! then once for each with that one failing. Nothing stale is used, every frame and every
//! reference is mapped, held or free, and nothing panics; once hardware is repaired, what
//! was held is freed, the script runs again, and both domains end with nothing left.

mod marked;
mod nested;
mod scene;
mod scripts;

use std::thread;

use host::{CpuTables, Layout, Setup};
use hwmodel::{Failure, UnitConfig};

use scene::{Counts, Fault, LAYOUTS, Scene};

type Script = fn(&mut Scene);

/// One world that is swept.
#[derive(Clone, Copy)]
struct Row {
    name: &'static str,
    prepare: Script,
    act: Script,
    /// What it has to ask for, lest the sweep of it be empty.
    asks: fn(&Counts) -> [u64; 2],
    setup: fn() -> Setup,
}

fn plain() -> Setup {
    Setup { frames: 1280, ..Setup::default() }
}

/// Nothing of the tables is snooped, absence is cached, and the device has a TLB.
fn unfriendly() -> Setup {
    let unit = UnitConfig { caching_mode: true, coherent: false, ..UnitConfig::default() };
    Setup { unit, device_tlb: true, ..plain() }
}

fn registers() -> Setup {
    Setup { registers: true, ..plain() }
}

fn two_units() -> Setup {
    Setup { units: 2, ..plain() }
}

fn marked() -> Setup {
    Setup { cpus: CpuTables::MarkedEpt, ..plain() }
}

fn nested_paging() -> Setup {
    Setup { cpus: CpuTables::Npt, ..plain() }
}

fn operations(counts: &Counts) -> [u64; 2] {
    [counts.operations, counts.operations]
}

fn memory(counts: &Counts) -> [u64; 2] {
    [counts.operations, counts.allocations]
}

fn copies(counts: &Counts) -> [u64; 2] {
    [counts.page_copies, counts.references]
}

fn handles(counts: &Counts) -> [u64; 2] {
    [counts.operations, counts.handles as u64]
}

fn tables(counts: &Counts) -> [u64; 2] {
    [counts.allocations, counts.grants as u64]
}

fn calls(counts: &Counts) -> [u64; 2] {
    [counts.reads, counts.writes]
}

const fn row(
    name: &'static str,
    asks: fn(&Counts) -> [u64; 2],
    prepare: Script,
    act: Script,
) -> Row {
    Row { name, prepare, act, asks, setup: plain }
}

const ROWS: &[Row] = &[
    row("maps and unmaps", memory, scripts::grants, scripts::map_and_unmap),
    Row {
        setup: unfriendly,
        ..row("unfriendly hardware", memory, scripts::grants_over_memory, scripts::map_apart)
    },
    Row {
        setup: registers,
        ..row("registers", operations, scripts::grants_over_memory, scripts::map_over_memory)
    },
    Row {
        setup: two_units,
        ..row("two units", operations, scripts::grants_over_memory, scripts::map_over_memory)
    },
    Row {
        setup: marked,
        ..row("CPUs that mark", operations, scripts::grants_over_memory, scripts::map_over_memory)
    },
    Row {
        setup: nested_paging,
        ..row("CPUs with ASIDs", operations, scripts::grants_over_memory, scripts::map_over_memory)
    },
    row("maps over memory", operations, scripts::grants_over_memory, scripts::map_over_memory),
    row("a page that moves", calls, scripts::own_grants, scripts::move_by_grant),
    row("a new page of handles", handles, scripts::few_handles_left, scripts::many_handles),
    row("tables that grow", tables, scripts::nothing, scripts::grow_tables),
    row("changes of version", tables, scripts::grown, scripts::change_version),
    row("grants of version 2", copies, scripts::version_2, scripts::map_version_2),
    row("copies", copies, scripts::two_grants, scripts::copies),
    row("swaps", calls, scripts::grants_over_memory, scripts::swap),
    row("memory that comes", memory, scripts::nothing, scripts::populate),
    row("splits by pages", memory, scripts::block, scripts::split),
    row("splits by rights", memory, scripts::block, scripts::split_by_rights),
    row("splits by ranges", memory, scripts::block, scripts::split_by_range),
    row("a range of many tables", operations, scripts::sparse, scripts::clear_sparse),
    row("attach and detach", memory, scripts::second_device, scripts::attach_and_detach),
    Row {
        setup: unfriendly,
        ..row(
            "attach to the unfriendly",
            memory,
            scripts::second_device,
            scripts::attach_and_detach,
        )
    },
    row("the end of domains", operations, scripts::mapped, scripts::end),
];

/// Says which run it was, if that one panics.
struct Say(String);

impl Drop for Say {
    fn drop(&mut self) {
        if thread::panicking() {
            eprintln!("in the sweep of {}", self.0);
        }
    }
}

/// Runs a script with something failing; what it asked for.
fn run(row: &Row, setup: Setup, fault: Option<Fault>, quarantine: bool) -> Counts {
    let _say = Say(format!("`{}`, {:?}, {fault:?}", row.name, setup.layout));
    let mut scene = Scene::new(setup, quarantine);
    (row.prepare)(&mut scene);
    if fault.is_none() {
        scene.check();
    }
    let before = scene.totals();
    scene.arm(fault);
    (row.act)(&mut scene);
    let counts = if fault.is_none() { scene.counts(before) } else { Counts::default() };
    scene.check();
    if scene.is_held() {
        // Perhaps hardware is still broken.
        scene.settle();
        scene.check();
    }
    scene.disarm();
    assert!(scene.settle(), "held with repaired hardware");
    scene.check();
    if scene.is_over() {
        return counts;
    }
    (row.act)(&mut scene);
    assert!(scene.settle(), "held although nothing fails");
    scene.check();
    scene.end();
    scene.check();
    counts
}

/// Everything that can fail.
fn faults(counts: Counts) -> Vec<Fault> {
    let Counts { operations, allocations, reads, writes, page_copies, references, handles, grants } =
        counts;
    let mut faults = vec![Fault::Preemption];
    for failure in [Failure::Hang, Failure::QueueError, Failure::TimeOut] {
        faults.extend((1..=operations).map(|n| Fault::Operation(n, failure)));
    }
    faults.extend((1..=allocations).map(Fault::Allocation));
    faults.extend((0..reads).map(Fault::Read));
    faults.extend((0..writes).map(Fault::Write));
    faults.extend((0..page_copies).map(Fault::PageCopy));
    faults.extend((0..references).map(Fault::Reference));
    faults.extend((0..handles).map(Fault::Handles));
    faults.extend((0..grants).map(Fault::Grants));
    faults
}

/// Sweeps one world in both layouts.
fn sweep(row: &Row) {
    let cpus = (row.setup)().cpus;
    // VT-d walks no other tables of CPUs.
    let fits = |layout: &Layout| *layout == Layout::Separate || cpus == CpuTables::Ept;
    for layout in LAYOUTS.into_iter().filter(fits) {
        let setup = Setup { layout, ..(row.setup)() };
        let counts = run(row, setup, None, false);
        assert!((row.asks)(&counts).iter().all(|count| *count > 0), "{}: {counts:?}", row.name);
        let faults = faults(counts);
        println!("sweep | {:<26} | {layout:?} | {} faults | {counts:?}", row.name, faults.len());
        for (place, fault) in faults.into_iter().enumerate() {
            run(row, setup, Some(fault), place % 2 == 1);
        }
    }
}

#[test]
fn whatever_fails_in_a_world_nothing_stale_is_used_and_no_page_is_lost() {
    let (first, second) = ROWS.split_at(ROWS.len() / 2);
    thread::scope(|scope| {
        scope.spawn(|| first.iter().for_each(sweep));
        second.iter().for_each(sweep);
    });
}
