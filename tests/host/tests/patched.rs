//! Bugs in the crates themselves, on a scratch copy: the model sees them as well.
//!
//! A [`Patch`] breaks one line of a copy of the sources. The honest twins of the planted
//! bugs, or the honest runs of nested guests, built against that copy, must then fail
//! with a witness, and pass without it.

use std::{io, path::Path};

use host::scratch::{self, Scratch};

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

fn copy() -> io::Result<Scratch> {
    let workspace = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let home = Path::new(env!("CARGO_TARGET_TMPDIR")).join("patched");
    // The test that is run needs none of the packages that other tests use.
    Scratch::new(&workspace, &home, &COPIED, |file, text| match file {
        "tests/host/Cargo.toml" => without_section(&text, "[dev-dependencies]"),
        _ => text,
    })
}

/// Runs a test on the copy: whether it passes, and what it prints.
fn test(scratch: &Scratch, honest: Honest) -> io::Result<(bool, String)> {
    let output = scratch
        .cargo()
        .args(["test", "--quiet", "--package", "quiesce-host"])
        .args(["--test", honest.file, "--", "--exact", honest.test])
        .output()?;
    let mut text = String::from_utf8_lossy(&output.stdout).into_owned();
    text += &String::from_utf8_lossy(&output.stderr);
    Ok((output.status.success(), text))
}

/// Runs it with one line broken.
#[track_caller]
fn check(scratch: &Scratch, patch: &Patch) {
    let Patch { name, file, line, broken, witness, honest } = *patch;
    let place = scratch::Patch { file, old: line, new: broken };
    let tested = scratch.patched(&place, |scratch| test(scratch, honest));
    let (passed, text) = match tested {
        Ok(tested) => tested.expect("cargo runs"),
        Err(error) => panic!("{name}: {file}: {error}"),
    };
    assert!(!passed, "{name}: not noticed");
    assert!(text.contains(honest.says), "{name}: not built:\n{text}");
    assert!(text.contains(witness), "{name}: without {witness}:\n{text}");
    println!("patched | {name:<32} | {file:<32} | {witness}");
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
    let scratch = copy().expect("the sources are copied");
    for honest in [TWINS, NESTED] {
        let (passed, text) = test(&scratch, honest).expect("cargo runs");
        assert!(passed, "the copy fails without any patch:\n{text}");
    }
    for patch in PATCHES {
        check(&scratch, patch);
    }
}
