//! Bugs in the crates themselves, on a scratch copy: the model sees them as well.
//!
//! A [`Patch`] breaks one line of a copy of the sources. The honest twins of the planted
//! bugs, or the honest runs of nested guests, built against that copy, must then fail
//! with a witness, and pass without it.

use std::{
    fs, io,
    path::{Path, PathBuf},
    process::Command,
};

/// One line of the crates, and what breaks it.
struct Patch {
    name: &'static str,
    file: &'static str,
    /// Occurs once in the file.
    line: &'static str,
    broken: &'static str,
    /// What the broken copy's failure names.
    witness: &'static str,
    /// What is run.
    honest: Honest,
}

/// A test of an honest embedder.
#[derive(Clone, Copy)]
struct Honest {
    file: &'static str,
    test: &'static str,
    /// In the text of its failures, and not in that of a failed build.
    says: &'static str,
}

const TWINS: Honest =
    Honest { file: "planted", test: "honest_twins_leave_nothing_stale", says: "honest twin of" };
const NESTED: Honest = Honest {
    file: "nested",
    test: "honest_nested_runs_leave_nothing_stale",
    says: "honest nested run of",
};

const PATCHES: &[Patch] = &[
    Patch {
        name: "devices are not waited for",
        file: "crates/flush/src/batch.rs",
        line: "iotlb: on_units.and_then(|token| units.wait(token).err()),",
        broken: "iotlb: on_units.and_then(|_| None),",
        witness: "ReleasedFrame",
        honest: TWINS,
    },
    Patch {
        name: "a table page is freed at once",
        file: "crates/stage2/src/clear.rs",
        line: "self.record.table(parent.span, memory.unlink(child)).map_err(|_leaked| Stop::Full)",
        broken: "memory.discard(flush::FreshTable::new(child)); Ok(())",
        witness: "ReleasedTable",
        honest: TWINS,
    },
    Patch {
        name: "lowered rights are not recorded",
        file: "crates/p2m/src/record.rs",
        line: "self.replaced = Some(self.skipped.leaf::<K>(run, order));",
        broken: "self.replaced = Some(self.skipped.absent::<K>());",
        witness: "MoreRights",
        honest: TWINS,
    },
    Patch {
        name: "the mask is one too small",
        file: "crates/iommu_vtd/src/command.rs",
        line: "Some(address) => address | hint | (block.order() & 0x3f) as u64,",
        broken: "Some(address) => address | hint | (block.order().saturating_sub(1) & 0x3f) as u64,",
        witness: "ReleasedFrame",
        honest: TWINS,
    },
    Patch {
        name: "nothing is drained",
        file: "crates/iommu_vtd/src/command.rs",
        line: "Self { writes: capabilities.drains_writes(), reads: capabilities.drains_reads() }",
        broken: "{ let _ = capabilities; Self { writes: false, reads: false } }",
        witness: "InFlight",
        honest: TWINS,
    },
    Patch {
        name: "the domain id is another's",
        file: "crates/iommu_vtd/src/flush.rs",
        line: "Command::IotlbPages { tag: own.tag, block, depth }",
        broken: "Command::IotlbPages { tag: crate::Tag::new(own.tag.get() ^ 1), block, depth }",
        witness: "ReleasedFrame",
        honest: TWINS,
    },
    Patch {
        name: "a shadow's record goes at once",
        file: "crates/p2m/src/nested/fill.rs",
        line: "        if mapped.is_err() {",
        broken: "        if mapped.is_err() || shown.order == 0 {",
        witness: "ReleasedFrame",
        honest: NESTED,
    },
    Patch {
        name: "a shadow's mark goes mid-walk",
        file: "crates/p2m/src/nested/flushing.rs",
        line: "slot_of(shadow) {\n            self.walk(slot, budget, emptied, skipped)?;",
        broken: "slot_of(shadow) {\n            budget.clone_from(&Budget::new(100));\n            \
                 if self.walk(slot, budget, emptied, skipped).is_err() { self.walked(slot); }",
        witness: "which nothing allows",
        honest: NESTED,
    },
    Patch {
        name: "a shadow is used without unmap",
        file: "crates/p2m/src/nested/shadow.rs",
        line: "self.rest.is_none() && self.unflushed.is_none()",
        broken: "true",
        witness: "which nothing allows",
        honest: NESTED,
    },
];

/// What of the workspace is copied.
const COPIED: [&str; 3] = ["crates", "tests/host", "tests/hwmodel"];

/// A copy of the sources, kept between runs so that only what changed is built again.
struct Scratch {
    tree: PathBuf,
    target: PathBuf,
}

impl Scratch {
    fn new() -> io::Result<Self> {
        let workspace = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
        let home = Path::new(env!("CARGO_TARGET_TMPDIR")).join("patched");
        let (tree, target) = (home.join("tree"), home.join("target"));
        for folder in COPIED {
            copy_folder(&workspace.join(folder), &tree.join(folder))?;
        }
        copy_file(&workspace.join("Cargo.lock"), &tree.join("Cargo.lock"))?;
        let manifest = fs::read_to_string(workspace.join("Cargo.toml"))?;
        let manifest = only_copied_members(&manifest).ok_or(io::ErrorKind::InvalidData)?;
        write(&tree.join("Cargo.toml"), manifest.as_bytes())?;
        // The test that is run needs none of the packages that other tests use.
        let manifest = fs::read_to_string(workspace.join("tests/host/Cargo.toml"))?;
        let host = tree.join("tests/host/Cargo.toml");
        write(&host, without_section(&manifest, "[dev-dependencies]").as_bytes())?;
        Ok(Self { tree, target })
    }

    /// Runs a test on the copy: whether it passes, and what it prints.
    fn test(&self, honest: Honest) -> io::Result<(bool, String)> {
        let cargo = std::env::var_os("CARGO").unwrap_or_else(|| env!("CARGO").into());
        let output = Command::new(cargo)
            .current_dir(&self.tree)
            .args(["test", "--offline", "--quiet", "--package", "quiesce-host"])
            .args(["--test", honest.file, "--", "--exact", honest.test])
            .env("CARGO_TARGET_DIR", &self.target)
            .env("CARGO_PROFILE_DEV_DEBUG", "0")
            .env("CARGO_TERM_COLOR", "never")
            .env("RUST_BACKTRACE", "0")
            .output()?;
        let mut text = String::from_utf8_lossy(&output.stdout).into_owned();
        text += &String::from_utf8_lossy(&output.stderr);
        Ok((output.status.success(), text))
    }

    /// Runs them with one line broken, which is whole again afterwards.
    #[track_caller]
    fn check(&self, patch: &Patch) {
        let file = self.tree.join(patch.file);
        let whole = fs::read_to_string(&file).expect("the file is there");
        let name = patch.name;
        let matches = whole.matches(patch.line).count();
        assert_eq!(matches, 1, "{name}: the line of {} to break has changed", patch.file);
        fs::write(&file, whole.replace(patch.line, patch.broken)).expect("the copy is ours");
        let tested = self.test(patch.honest);
        fs::write(&file, whole).expect("the copy is ours");
        let (passed, text) = tested.expect("cargo runs");
        assert!(!passed, "{name}: not noticed");
        assert!(text.contains(patch.honest.says), "{name}: not built:\n{text}");
        assert!(text.contains(patch.witness), "{name}: without {}:\n{text}", patch.witness);
        let kind = patch.witness;
        println!("patched | {name:<32} | {:<32} | {kind}", patch.file);
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

fn copy_file(from: &Path, to: &Path) -> io::Result<()> {
    write(to, &fs::read(from)?)
}

/// Makes `to` what `from` is. Manifests of the copy are written later.
fn copy_folder(from: &Path, to: &Path) -> io::Result<()> {
    fs::create_dir_all(to)?;
    for entry in fs::read_dir(to)? {
        let path = entry?.path();
        let gone = path.file_name().is_none_or(|name| !from.join(name).exists());
        match (gone, path.is_dir()) {
            (true, true) => fs::remove_dir_all(path)?,
            (true, false) => fs::remove_file(path)?,
            (false, _) => {}
        }
    }
    for entry in fs::read_dir(from)? {
        let entry = entry?;
        let (path, copy) = (entry.path(), to.join(entry.file_name()));
        if path.is_dir() {
            copy_folder(&path, &copy)?;
        } else {
            copy_file(&path, &copy)?;
        }
    }
    Ok(())
}

/// The workspace's manifest with no other members than those copied.
fn only_copied_members(manifest: &str) -> Option<String> {
    let (before, list) = manifest.split_once("members = [")?;
    let (_, after) = list.split_once(']')?;
    Some(format!("{before}members = [\"crates/*\", \"tests/*\"]{after}"))
}

fn without_section(manifest: &str, header: &str) -> String {
    let mut inside = false;
    let kept = manifest.lines().filter(|line| {
        if line.starts_with('[') {
            inside = *line == header;
        }
        !inside
    });
    kept.map(|line| format!("{line}\n")).collect()
}

#[test]
fn every_patch_that_breaks_the_crates_is_witnessed() {
    let scratch = Scratch::new().expect("the sources are copied");
    for honest in [TWINS, NESTED] {
        let (passed, text) = scratch.test(honest).expect("cargo runs");
        assert!(passed, "the copy fails without any patch:\n{text}");
    }
    for patch in PATCHES {
        scratch.check(patch);
    }
}
