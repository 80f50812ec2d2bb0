//! The model checker on `flush`: it finds each weakening of the protocol.
//!
//! The interleavings are tests of the crate itself, built with `--cfg loom`. They run on
//! a scratch copy and pass there. Then a [`Weakening`] changes one place, and one of them
//! must fail with the right complaint. `docs/combining.md` explains the protocol.

use std::{
    fs, io,
    path::{Path, PathBuf},
    process::Command,
};

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

const COMBINE: &str = "flush/src/combine.rs";
const SEAT: &str = "flush/src/combine/seat.rs";
const CPUS: &str = "flush/src/cpus.rs";

const TWO: &str = "two_callers_release_nothing_stale";
const FAILING: &str = "two_callers_whose_first_leader_fails_release_nothing_stale";
const THREE: &str = "three_callers_that_ask_early_need_at_most_two_flushes";
const ENTERING: &str = "a_cpu_that_enters_is_kicked_or_sees_the_change";
const SNAPSHOT: &str = "a_snapshot_has_the_cpu_or_the_cpu_sees_the_edit";

const STALE: &str = "stale release";
const TOO_MANY: &str = "a flush too many";
const UNKICKED: &str = "an unkicked CPU keeps an old entry";

const WEAKENINGS: &[Weakening] = &[
    Weakening {
        name: "the cover comes after the ticket",
        file: SEAT,
        text: "side.slots.publish(cover);\n        side.stage.set(Stage::Published);",
        weaker: "let ticket = self.combiner.requested.fetch_add(1, Ordering::Release) + 1;
                 side.slots.publish(cover);
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
        text: "desk.tlb.add_to(tlb);",
        weaker: "desk.tlb.add_to(tlb); desk.tlb.withdraw();",
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
];

/// A copy of the crate, kept between runs so that only what changed is built again.
struct Scratch {
    tree: PathBuf,
    target: PathBuf,
}

impl Scratch {
    fn new() -> io::Result<Self> {
        let workspace = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
        let home = Path::new(env!("CARGO_TARGET_TMPDIR")).join("interleavings");
        let (tree, target) = (home.join("tree"), home.join("target"));
        copy_folder(&workspace.join("crates/flush"), &tree.join("flush"))?;
        write(&tree.join("Cargo.lock"), &fs::read(workspace.join("Cargo.lock"))?)?;
        let manifest = fs::read_to_string(workspace.join("Cargo.toml"))?;
        let manifest = only_flush(&manifest).ok_or(io::ErrorKind::InvalidData)?;
        write(&tree.join("Cargo.toml"), manifest.as_bytes())?;
        Ok(Self { tree, target })
    }

    /// Runs the interleavings whose name holds `test`: whether they pass, and what they print.
    fn test(&self, test: &str) -> io::Result<(bool, String)> {
        let cargo = std::env::var_os("CARGO").unwrap_or_else(|| env!("CARGO").into());
        let output = Command::new(cargo)
            .current_dir(&self.tree)
            .args(["test", "--offline", "--quiet", "--release", "--package", "quiesce-flush"])
            .args(["--lib", "--", "--nocapture", test])
            .env("CARGO_TARGET_DIR", &self.target)
            .env("CARGO_PROFILE_RELEASE_INCREMENTAL", "true")
            .env("CARGO_PROFILE_RELEASE_OPT_LEVEL", "1")
            .env("CARGO_TERM_COLOR", "never")
            .env("RUST_BACKTRACE", "0")
            .env_remove("CARGO_ENCODED_RUSTFLAGS")
            .env("RUSTFLAGS", "--cfg loom")
            .output()?;
        let mut text = String::from_utf8_lossy(&output.stdout).into_owned();
        text += &String::from_utf8_lossy(&output.stderr);
        Ok((output.status.success(), text))
    }

    /// Runs one test with one place weaker, which is whole again afterwards.
    #[track_caller]
    fn check(&self, weakening: &Weakening) {
        let Weakening { name, file, text, weaker, test, complaint } = weakening;
        let path = self.tree.join(file);
        let whole = fs::read_to_string(&path).expect("the file is there");
        let matches = whole.matches(text).count();
        assert_eq!(matches, 1, "{name}: the place in {file} has changed");
        fs::write(&path, whole.replace(text, weaker)).expect("the copy is ours");
        let tested = self.test(test);
        fs::write(&path, whole).expect("the copy is ours");
        let (passed, printed) = tested.expect("cargo runs");
        assert!(!passed, "{name}: not noticed");
        assert!(printed.contains(complaint), "{name}: without `{complaint}`:\n{printed}");
        println!("weakened | {name:<44} | {complaint}");
    }
}

/// Writes only what differs, so that cargo sees no change where there is none.
fn write(to: &Path, bytes: &[u8]) -> io::Result<()> {
    if fs::read(to).is_ok_and(|old| old == bytes) {
        return Ok(());
    }
    if let Some(parent) = to.parent() {
        fs::create_dir_all(parent)?;
    }
    fs::write(to, bytes)
}

/// Copies a folder without its ordinary tests, which the model checker would only compile.
fn copy_folder(from: &Path, to: &Path) -> io::Result<()> {
    for entry in fs::read_dir(from)? {
        let entry = entry?;
        let (path, copy) = (entry.path(), to.join(entry.file_name()));
        if path.is_dir() {
            copy_folder(&path, &copy)?;
        } else {
            let text = fs::read_to_string(&path)?;
            write(&copy, text.replace("#[cfg(test)]", "#[cfg(any())]").as_bytes())?;
        }
    }
    Ok(())
}

/// The workspace's manifest with no other member than `flush`.
fn only_flush(manifest: &str) -> Option<String> {
    let (before, list) = manifest.split_once("members = [")?;
    let (_, after) = list.split_once(']')?;
    Some(format!("{before}members = [\"flush\"]{after}"))
}

#[test]
fn the_protocol_holds_in_every_interleaving_and_each_weakening_is_found() {
    let scratch = Scratch::new().expect("the sources are copied");
    let (passed, text) = scratch.test("interleavings").expect("cargo runs");
    assert!(passed, "without any weakening:\n{text}");
    for line in text.lines().filter(|line| line.contains("interleavings | ")) {
        println!("{line}");
    }
    for weakening in WEAKENINGS {
        scratch.check(weakening);
    }
}
