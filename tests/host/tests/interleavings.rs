//! The model checker on what has atomics: it finds each weakening of the protocols.
//!
//! The interleavings are tests of the crates themselves, built with `--cfg loom`. They run
//! on a scratch copy and pass there. Then a [`Weakening`] changes one place, and one of
//! them must fail with the right complaint. `docs/combining.md` explains how flushes are
//! shared, `p2m::cpus` how CPUs are kicked, `gnttab::entry` how an entry is opened.

use std::{fs, io, path::Path};

use host::scratch::{Patch, Scratch};

/// One place of the protocol, made weaker.
struct Weakening {
    name: &'static str,
    file: &'static str,
    /// Occurs once in the file.
    text: &'static str,
    weaker: &'static str,
    /// The test that finds it, and its complaint.
    test: &'static str,
    complaint: &'static str,
}

const COMBINE: &str = "crates/flush/src/combine.rs";
const SEAT: &str = "crates/flush/src/combine/seat.rs";
const DESK: &str = "crates/flush/src/combine/desk.rs";
const CPUS: &str = "crates/flush/src/cpus.rs";
const ENTRY: &str = "crates/gnttab/src/entry.rs";
const GUEST: &str = "crates/p2m/src/cpus.rs";
const KICK: &str = "crates/p2m/src/tlb.rs";
const SWAP: &str = "crates/gnttab/src/swap.rs";

const TWO: &str = "two_callers_release_nothing_stale";
const FAILING: &str = "two_callers_whose_first_leader_fails_release_nothing_stale";
const FAILING_THREE: &str = "three_callers_whose_first_leader_fails_release_nothing_stale";
const THREE: &str = "three_callers_that_ask_early_need_at_most_two_flushes";
const AGAIN: &str = "a_caller_that_asks_again_releases_nothing_stale";
const ENTERING: &str = "a_cpu_that_enters_is_kicked_or_sees_the_change";
const SNAPSHOT: &str = "a_snapshot_has_the_cpu_or_the_cpu_sees_the_edit";

const REWRITTEN: &str = "version_1_never_opens_what_is_not_granted_at_that_instant";
const RESTLESS: &str = "version_1_gives_up_on_a_granter_that_does_not_rest";
const REVOKED_1: &str = "version_1_is_not_open_once_its_granter_has_revoked_it";
const REVOKED_2: &str = "version_2_is_not_open_once_its_granter_has_revoked_it";
const ENDED_1: &str = "version_1_ends_a_use_before_its_granter_sees_the_end";
const ENDED_2: &str = "version_2_ends_a_use_before_its_granter_sees_the_end";
const UNDONE: &str = "version_2_undoes_only_what_it_set";
const NEW_GRANT: &str = "an_opened_page_is_as_its_granter_left_it";
const ENTERS: &str = "a_cpu_that_enters_uses_no_page_after_its_release";
const ENTERS_AGAIN: &str = "a_cpu_that_enters_again_uses_no_page_after_its_release";
const TAGGED: &str = "a_vcpu_with_its_own_tag_uses_no_page_after_its_release";
const SWAPPED: &str = "a_swapped_grant_is_as_its_granter_left_it";
const SERVES: &str = "a_cpu_that_serves_uses_no_page_after_its_release";

const IN_USE: &str = "in use and revoked";
const END_OF_USE: &str = "a write of the holder comes after the end of its use";
const RELEASED: &str = "a page is used after its release";
const STALE: &str = "stale release";
const TOO_MANY: &str = "a flush too many";
const UNKICKED: &str = "an unkicked CPU keeps an old entry";

const WEAKENINGS: &[Weakening] = &[
    Weakening {
        name: "the cover comes after the ticket",
        file: SEAT,
        text: "side.request.publish(cover);\n        side.stage.set(Stage::Published);",
        weaker: "let ticket = self.place.combiner.requested.fetch_add(1, Ordering::Release) + 1;
                 side.request.publish(cover);
                 side.request.took(ticket);
                 side.stage.set(Stage::Ticket(ticket));",
        test: TWO,
        complaint: STALE,
    },
    Weakening {
        name: "the ticket is relaxed",
        file: SEAT,
        text: "requested.fetch_add(1, Ordering::Release)",
        weaker: "requested.fetch_add(1, Ordering::Relaxed)",
        test: TWO,
        complaint: STALE,
    },
    Weakening {
        name: "becoming leader is relaxed",
        file: COMBINE,
        text: "compare_exchange(false, true, Ordering::Acquire, Ordering::Relaxed)",
        weaker: "compare_exchange(false, true, Ordering::Relaxed, Ordering::Relaxed)",
        test: THREE,
        complaint: TOO_MANY,
    },
    Weakening {
        name: "giving up the lead is relaxed",
        file: COMBINE,
        text: "self.0.store(false, Ordering::Release)",
        weaker: "self.0.store(false, Ordering::Relaxed)",
        test: THREE,
        complaint: TOO_MANY,
    },
    Weakening {
        name: "no second look",
        file: SEAT,
        text: "if settled.outcome(ticket).is_none() {",
        weaker: "if true {",
        test: THREE,
        complaint: TOO_MANY,
    },
    Weakening {
        name: "tickets are counted by a load",
        file: COMBINE,
        text: "self.requested.fetch_add(0, Ordering::Acquire)",
        weaker: "self.requested.load(Ordering::Acquire)",
        test: THREE,
        complaint: TOO_MANY,
    },
    Weakening {
        name: "tickets are counted relaxed",
        file: COMBINE,
        text: "self.requested.fetch_add(0, Ordering::Acquire)",
        weaker: "self.requested.fetch_add(0, Ordering::Relaxed)",
        test: TWO,
        complaint: STALE,
    },
    Weakening {
        name: "covers are read before tickets are counted",
        file: COMBINE,
        text: "let through = self.requested.fetch_add(0, Ordering::Acquire);
        let others = self.others(own.number);",
        weaker: "let others = self.others(own.number);
        let through = self.requested.fetch_add(0, Ordering::Acquire);",
        test: TWO,
        complaint: STALE,
    },
    Weakening {
        name: "completion is published relaxed",
        file: COMBINE,
        text: "self.completed.store(through, Ordering::Release)",
        weaker: "self.completed.store(through, Ordering::Relaxed)",
        test: TWO,
        complaint: STALE,
    },
    Weakening {
        name: "completion is looked at relaxed",
        file: COMBINE,
        text: "self.completed.load(Ordering::Acquire)",
        weaker: "self.completed.load(Ordering::Relaxed)",
        test: TWO,
        complaint: STALE,
    },
    Weakening {
        name: "later tickets are completed too",
        file: COMBINE,
        text: "Ok(()) => self.on_cpus.complete(through),",
        weaker: "Ok(()) => self.on_cpus.complete(self.requested.load(Ordering::Acquire)),",
        test: TWO,
        complaint: STALE,
    },
    Weakening {
        name: "a failed flush completes its tickets",
        file: COMBINE,
        text: "self.on_cpus.fail(through);",
        weaker: "self.on_cpus.complete(through);",
        test: FAILING,
        complaint: STALE,
    },
    Weakening {
        name: "the leader clears what it read",
        file: COMBINE,
        text: "desk.tlb.add_to(tlb, on_cpus);",
        weaker: "desk.tlb.add_to(tlb, on_cpus); desk.tlb.publish(&Cover::NOTHING);",
        test: THREE,
        complaint: STALE,
    },
    Weakening {
        name: "the leader clears the seats it saw",
        file: COMBINE,
        text: "*seats = word.load(Ordering::Relaxed);",
        weaker: "*seats = word.swap(0, Ordering::Relaxed);",
        test: THREE,
        complaint: STALE,
    },
    Weakening {
        name: "nothing says that a ticket is being taken",
        file: DESK,
        text: "self.ticket.store(TAKING, Relaxed);",
        weaker: "",
        test: TWO,
        complaint: STALE,
    },
    Weakening {
        name: "that a ticket is being taken is said after it",
        file: SEAT,
        text: "self.tlb.await_ticket();
                self.iotlb.await_ticket();
                // 64 bits of tickets do not run out.
                let ticket = self.place.combiner.requested.fetch_add(1, Ordering::Release) + 1;",
        weaker: "let ticket = self.place.combiner.requested.fetch_add(1, Ordering::Release) + 1;
                self.tlb.await_ticket();
                self.iotlb.await_ticket();",
        test: TWO,
        complaint: STALE,
    },
    Weakening {
        name: "a ticket that is being taken is left out",
        file: DESK,
        text: "const TAKING: u64 = u64::MAX;",
        weaker: "const TAKING: u64 = 0;",
        test: TWO,
        complaint: STALE,
    },
    Weakening {
        name: "covers of a flush that failed are left out",
        file: COMBINE,
        text: "let on_cpus = self.on_cpus.completed.load(Ordering::Relaxed);",
        weaker: "let on_cpus = self.on_cpus.completed.load(Ordering::Relaxed)
            .max(self.on_cpus.failed.load(Ordering::Relaxed));",
        test: FAILING_THREE,
        complaint: STALE,
    },
    Weakening {
        name: "covers of CPUs are left out once devices are done",
        file: COMBINE,
        text: "let on_cpus = self.on_cpus.completed.load(Ordering::Relaxed);",
        weaker: "let on_cpus = self.on_units.completed.load(Ordering::Relaxed);",
        test: FAILING_THREE,
        complaint: STALE,
    },
    Weakening {
        name: "an old ticket stands for the next one",
        file: DESK,
        text: "self.ticket.store(TAKING, Relaxed);",
        weaker: "if self.ticket.load(Relaxed) == 0 { self.ticket.store(TAKING, Relaxed); }",
        test: AGAIN,
        complaint: STALE,
    },
    Weakening {
        name: "no fence after joining",
        file: CPUS,
        text: "fence(Ordering::SeqCst);\n        true",
        weaker: "true",
        test: SNAPSHOT,
        complaint: UNKICKED,
    },
    Weakening {
        name: "no fence before the snapshot",
        file: CPUS,
        text: "fence(Ordering::SeqCst);\n        let mut words",
        weaker: "let mut words",
        test: ENTERING,
        complaint: UNKICKED,
    },
    Weakening {
        name: "an entry is not exchanged but stored",
        file: ENTRY,
        text: "self.compare_exchange(expected, new, Ordering::SeqCst, Ordering::Acquire).map(|_| ())",
        weaker: "let now = self.load(Ordering::Acquire);
                 if now != expected { return Err(now); }
                 self.store(new, Ordering::SeqCst);
                 Ok(())",
        test: REVOKED_1,
        complaint: IN_USE,
    },
    Weakening {
        name: "an entry is checked before the first try only",
        file: ENTRY,
        text: "for _ in 0..TRIES {
        let target = check(seen, || seen >> 32, caller, rights, Sorts::Pages)?;",
        weaker: "check(seen, || seen >> 32, caller, rights, Sorts::Pages)?;
                 for _ in 0..TRIES {
                     let target =
                         Target::Page { frame: Gfn::new(seen >> 32), window: Window::PAGE };",
        test: REWRITTEN,
        complaint: "a frame that was granted to somebody else",
    },
    Weakening {
        name: "one try more",
        file: ENTRY,
        text: "for _ in 0..TRIES {",
        weaker: "for _ in 0..=TRIES {",
        test: RESTLESS,
        complaint: "a try too many",
    },
    Weakening {
        name: "a use of version 1 ends relaxed",
        file: ENTRY,
        text: "word.fetch_and(!u64::from(bits), Ordering::SeqCst);",
        weaker: "word.fetch_and(!u64::from(bits), Ordering::Relaxed);",
        test: ENDED_1,
        complaint: END_OF_USE,
    },
    Weakening {
        name: "a use of version 2 ends relaxed",
        file: ENTRY,
        text: "status.fetch_and(!bits, Ordering::SeqCst);",
        weaker: "status.fetch_and(!bits, Ordering::Relaxed);",
        test: ENDED_2,
        complaint: END_OF_USE,
    },
    Weakening {
        name: "no second look at an entry",
        file: ENTRY,
        text: "check(head.load(), || frame.load(), caller, rights, sorts) else {",
        weaker: "check(u64::from(caller.get()) << 16 | 1, || frame.load(), caller, rights, sorts)
                 else {",
        test: REVOKED_2,
        complaint: IN_USE,
    },
    Weakening {
        name: "no fence before the second look at an entry",
        file: ENTRY,
        text: "    fence(Ordering::SeqCst);\n",
        weaker: "    let _ = fence;\n",
        test: REVOKED_2,
        complaint: IN_USE,
    },
    Weakening {
        name: "a refused use leaves its bits",
        file: ENTRY,
        text: "status.fetch_and(!newly_set, Ordering::SeqCst);",
        weaker: "",
        test: REVOKED_2,
        complaint: "in-use bits without a use",
    },
    Weakening {
        name: "a refused use takes the bits of another",
        file: ENTRY,
        text: "status.fetch_and(!newly_set, Ordering::SeqCst);",
        weaker: "status.fetch_and(!bits, Ordering::SeqCst);",
        test: UNDONE,
        complaint: "the reader's bit, and no other",
    },
    Weakening {
        name: "the frame is read before the entry",
        file: ENTRY,
        text: "check(head.load(), || 0, caller, rights, sorts)?;\n    let bits",
        weaker: "struct Early(u64);
                 impl Early { fn load(&self) -> u64 { self.0 } }
                 let frame = &Early(frame.load());
                 check(head.load(), || 0, caller, rights, sorts)?;
                 let bits",
        test: NEW_GRANT,
        complaint: "the frame is older than the grant",
    },
    Weakening {
        name: "CPUs are not marked",
        file: GUEST,
        text: "self.marked.join_all(&all());\n        // Marks",
        weaker: "// Marks",
        test: ENTERS_AGAIN,
        complaint: RELEASED,
    },
    Weakening {
        name: "a CPU looks at its mark before it joins",
        file: GUEST,
        text: "if !self.running.join(cpu) {
            return Err(EnterError::UnknownCpu);
        }
        match self.obey(cpu, local, &self.counts.at_entry) {",
        weaker: "let obeyed = self.obey(cpu, local, &self.counts.at_entry);
                 if !self.running.join(cpu) {
                     return Err(EnterError::UnknownCpu);
                 }
                 match obeyed {",
        test: ENTERS_AGAIN,
        complaint: RELEASED,
    },
    Weakening {
        name: "who runs is sampled before CPUs are marked",
        file: GUEST,
        text: "self.marked.join_all(&all());\n        // Marks",
        weaker: "let early = self.running.snapshot();
                 self.marked.join_all(&all());
                 if early.is_empty() {
                     let since = self.generation.fetch_add(1, Ordering::SeqCst) + 1;
                     return (Generation(since), early);
                 }
                 // Marks",
        test: ENTERS_AGAIN,
        complaint: RELEASED,
    },
    Weakening {
        name: "a CPU notes that it left before it has",
        file: GUEST,
        text: "self.running.leave(cpu);\n        self.note(cpu, self.generation());",
        weaker: "self.note(cpu, self.generation());\n        self.running.leave(cpu);",
        test: ENTERS_AGAIN,
        complaint: "Model exceeded maximum number of branches",
    },
    Weakening {
        name: "a CPU that serves notes what it did not see",
        file: GUEST,
        text: "let seen = self.generation();\n        self.obey(cpu, local, &self.counts.local)?;",
        weaker: "self.obey(cpu, local, &self.counts.local)?;\n        let seen = self.generation();",
        test: SERVES,
        complaint: RELEASED,
    },
    Weakening {
        name: "no CPU is waited for",
        file: KICK,
        text: "if self.guest.has_left(cpu, since) {",
        weaker: "if true {",
        test: ENTERS,
        complaint: RELEASED,
    },
    Weakening {
        name: "an old note of a CPU serves",
        file: GUEST,
        text: "left.load(Ordering::SeqCst) >= since.0)",
        weaker: "left.load(Ordering::SeqCst) + 1 >= since.0)",
        test: ENTERS_AGAIN,
        complaint: RELEASED,
    },
    Weakening {
        name: "a vCPU with its own tag looks before it joins",
        file: GUEST,
        text: "if !self.running.join(cpu) {
            return Err(EnterError::UnknownCpu);
        }
        self.marked.leave(cpu);
        Ok(self.generation())",
        weaker: "let early = self.generation();
                 if !self.running.join(cpu) {
                     return Err(EnterError::UnknownCpu);
                 }
                 self.marked.leave(cpu);
                 Ok(early)",
        test: TAGGED,
        complaint: RELEASED,
    },
    Weakening {
        name: "a swap reads the first entry relaxed",
        file: SWAP,
        text: "fn swap_word(one: &AtomicU64, other: &AtomicU64) {
    let was = other.swap(one.load(Ordering::Acquire), Ordering::SeqCst);",
        weaker: "fn swap_word(one: &AtomicU64, other: &AtomicU64) {
    let was = other.swap(one.load(Ordering::Relaxed), Ordering::SeqCst);",
        test: SWAPPED,
        complaint: "the page is older than the grant",
    },
    Weakening {
        name: "a swap reads the second entry relaxed",
        file: SWAP,
        text: "fn swap_word(one: &AtomicU64, other: &AtomicU64) {
    let was = other.swap(one.load(Ordering::Acquire), Ordering::SeqCst);",
        weaker: "fn swap_word(one: &AtomicU64, other: &AtomicU64) {
    let was = other.swap(one.load(Ordering::Acquire), Ordering::Release);",
        test: SWAPPED,
        complaint: "the page is older than the grant",
    },
];

/// Files in which atomics order something, and how each is covered.
const ORDERED: &[(&str, &str)] = &[
    ("crates/flush/src/batch.rs", "a flush after the stores to its entries: a fence of both"),
    ("crates/flush/src/combine.rs", "interleavings"),
    ("crates/flush/src/combine/seat.rs", "interleavings"),
    ("crates/flush/src/cpus.rs", "interleavings"),
    ("crates/gnttab/src/entry.rs", "interleavings"),
    ("crates/gnttab/src/swap.rs", "interleavings"),
    ("crates/gnttab/src/frames.rs", "a change of version: the lock of a table with nothing pinned"),
    (
        "crates/stage2/src/memory.rs",
        "a table before the entry that links it: hardware, under the lock of edits",
    ),
    ("crates/p2m/src/cpus.rs", "interleavings"),
];

/// The crates that have atomics, and what they need.
const COPIED: [&str; 4] = ["crates/flush", "crates/stage2", "crates/p2m", "crates/gnttab"];
/// Those of them with interleavings of their own.
const CHECKED: [&str; 3] = ["flush", "p2m", "gnttab"];

/// A copy without ordinary tests, which the model checker would only compile.
///
/// The sets of CPUs that other crates use have the checker's atomics there too.
fn copy() -> io::Result<Scratch> {
    let workspace = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let home = Path::new(env!("CARGO_TARGET_TMPDIR")).join("interleavings");
    Scratch::new(&workspace, &home, &COPIED, |file, text| match file {
        "crates/flush/src/sync.rs" => text.replace("all(test, loom)", "loom"),
        "crates/flush/Cargo.toml" => {
            text.replace("'cfg(loom)'.dev-dependencies", "'cfg(loom)'.dependencies")
        }
        _ => text.replace("#[cfg(test)]", "#[cfg(any())]"),
    })
}

/// Runs a crate's interleavings whose name holds `test`: whether they pass, and what they
/// print.
fn run(scratch: &Scratch, name: &str, test: &str) -> io::Result<(bool, String)> {
    let output = scratch
        .cargo()
        .args(["test", "--quiet", "--release", "--package"])
        .arg(format!("quiesce-{name}"))
        .args(["--lib", "--", "--nocapture", test])
        .env("CARGO_PROFILE_RELEASE_INCREMENTAL", "true")
        .env("CARGO_PROFILE_RELEASE_OPT_LEVEL", "1")
        .env_remove("CARGO_ENCODED_RUSTFLAGS")
        .env("RUSTFLAGS", "--cfg loom")
        .output()?;
    let mut text = String::from_utf8_lossy(&output.stdout).into_owned();
    text += &String::from_utf8_lossy(&output.stderr);
    Ok((output.status.success(), text))
}

/// Runs one test with one place weaker.
#[track_caller]
fn check(scratch: &Scratch, weakening: &Weakening) {
    let Weakening { name, file, text, weaker, test, complaint } = *weakening;
    let patch = Patch { file, old: text, new: weaker };
    let of = file.split('/').nth(1).expect("a path below crates");
    let (passed, printed) = match scratch.patched(&patch, |scratch| run(scratch, of, test)) {
        Ok(tested) => tested.expect("cargo runs"),
        Err(error) => panic!("{name}: {file}: {error}"),
    };
    assert!(!passed, "{name}: not noticed");
    assert!(printed.contains(complaint), "{name}: without `{complaint}`:\n{printed}");
    println!("weakened | {name:<46} | {complaint}");
}

#[test]
fn the_protocol_holds_in_every_interleaving_and_each_weakening_is_found() {
    let scratch = copy().expect("the sources are copied");
    for name in CHECKED {
        let (passed, text) = run(&scratch, name, "interleavings").expect("cargo runs");
        assert!(passed, "without any weakening:\n{text}");
        let told: Vec<_> = text.lines().filter(|line| line.contains("interleavings | ")).collect();
        assert!(!told.is_empty(), "{name} has no interleavings:\n{text}");
        told.iter().for_each(|line| println!("{line}"));
    }
    for weakening in WEAKENINGS {
        check(&scratch, weakening);
    }
}

/// All other atomics are relaxed, and count: locks and what hardware guarantees do the rest.
#[test]
fn every_file_whose_atomics_order_something_is_known() {
    let workspace = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let mut found = Vec::new();
    let mut folders = vec![workspace.join("crates")];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(folder).expect("a folder of the crates") {
            let path = entry.expect("the folder is read").path();
            let name = path.file_name().and_then(|name| name.to_str()).expect("a name");
            let is_test =
                ["tests", "interleavings.rs"].contains(&name) || name.ends_with("_tests.rs");
            if is_test {
                continue;
            }
            if path.is_dir() {
                folders.push(path);
            } else if name.ends_with(".rs") {
                let text = fs::read_to_string(&path).expect("a source file");
                let orders = ["Acquire", "Release)", "Release,", "AcqRel", "SeqCst"];
                if orders.iter().any(|order| text.contains(order)) {
                    let file = path.strip_prefix(&workspace).expect("a file of the workspace");
                    found.push(file.display().to_string());
                }
            }
        }
    }
    found.sort();
    let mut known: Vec<&str> = ORDERED.iter().map(|(file, _)| *file).collect();
    known.sort_unstable();
    assert_eq!(found, known, "each needs interleavings, or a reason");
}
