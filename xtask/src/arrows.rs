//! Which package may depend on which, as data
//!
//! A `Row` is everything one package may name under `[dependencies]` or
//! `[build-dependencies]`. An arrow that is not in the table is a design change:
//! the table is where it is proposed. Development dependencies are free, but
//! what is under `crates/` never sees what is under `tests/`, not even there.

use anyhow::{Result, bail};
use cargo_metadata::{DependencyKind, Package};

use crate::checkout;

/// What one package may depend on.
struct Row {
    package: &'static str,
    /// Packages of this workspace.
    ours: &'static [&'static str],
    /// Packages of others.
    others: &'static [&'static str],
}

const FLUSH: &str = "quiesce-flush";
const STAGE2: &str = "quiesce-stage2";
const P2M: &str = "quiesce-p2m";
const VTD: &str = "quiesce-iommu-vtd";
const GNTTAB: &str = "quiesce-gnttab";
const HWMODEL: &str = "quiesce-hwmodel";
const HOST: &str = "quiesce-host";
const TESTBED: &str = "quiesce-testbed";
const SCENARIOS: &str = "quiesce-scenarios";

const ROWS: &[Row] = &[
    Row { package: FLUSH, ours: &[], others: &["arrayvec", "bitvec", "static_assertions"] },
    Row { package: STAGE2, ours: &[FLUSH], others: &["arrayvec", "static_assertions"] },
    Row {
        package: P2M,
        ours: &[STAGE2, FLUSH],
        others: &["arrayvec", "static_assertions", "x86_64"],
    },
    Row { package: VTD, ours: &[STAGE2, FLUSH], others: &["arrayvec", "static_assertions"] },
    Row {
        package: GNTTAB,
        ours: &[FLUSH],
        others: &["arrayvec", "bitvec", "static_assertions", "zerocopy"],
    },
    // An oracle shares no code with what it checks.
    Row { package: HWMODEL, ours: &[], others: &[] },
    Row {
        package: HOST,
        ours: &[FLUSH, STAGE2, P2M, VTD, GNTTAB, HWMODEL],
        others: &["spin", "zerocopy"],
    },
    Row {
        package: SCENARIOS,
        ours: &[FLUSH, STAGE2, P2M, VTD, GNTTAB, HWMODEL, HOST],
        others: &["corosensei", "serde", "toml", "zerocopy"],
    },
    Row {
        package: TESTBED,
        ours: &[FLUSH, STAGE2, P2M, VTD, GNTTAB],
        others: &["arrayvec", "spin", "static_assertions", "x86_64", "zerocopy"],
    },
    // Written against Xen's interface and nothing else: they are what tries it.
    Row { package: "quiesce-guests", ours: &[], others: &[] },
    Row {
        package: "quiesce-fuzz",
        ours: &[FLUSH, STAGE2, P2M, VTD, GNTTAB, HWMODEL, HOST, SCENARIOS, TESTBED],
        others: &["arbitrary", "bolero", "bolero-engine", "clap", "rand", "toml", "zerocopy"],
    },
    // Only development dependencies, so that no test builds them.
    Row { package: "quiesce-benches", ours: &[], others: &[] },
    Row { package: "quiesce-misuse", ours: &[FLUSH, STAGE2, P2M, VTD, GNTTAB], others: &[] },
    Row {
        package: "xtask",
        ours: &[HOST, SCENARIOS, TESTBED],
        others: &[
            "anyhow",
            "cargo_metadata",
            "clap",
            "comfy-table",
            "indicatif",
            "serde",
            "serde_json",
            "toml",
        ],
    },
];

/// Checks every package of the workspace against the table.
///
/// # Errors
/// If an arrow is not in the table, or a package is in only one of the two.
pub(crate) fn check() -> Result<()> {
    let metadata = checkout::packages()?;
    let mut wrong = Vec::new();
    for package in metadata.workspace_packages() {
        let dependencies = package.dependencies.iter();
        let named = dependencies.map(|dependency| (dependency.name.as_str(), dependency.kind));
        wrong.extend(strangers(&package.name, named));
    }
    for row in ROWS {
        let known = |package: &&Package| *package.name == row.package;
        if !metadata.workspace_packages().iter().any(known) {
            wrong.push(format!("{} is in the table but not in the workspace", row.package));
        }
    }
    if !wrong.is_empty() {
        bail!(
            "dependency arrows that xtask/src/arrows.rs does not allow:\n  {}",
            wrong.join("\n  ")
        );
    }
    Ok(())
}

/// The dependencies of `package` that the table does not allow.
fn strangers<'a>(
    package: &str,
    dependencies: impl IntoIterator<Item = (&'a str, DependencyKind)>,
) -> Vec<String> {
    let Some(row) = ROWS.iter().find(|row| row.package == package) else {
        return vec![format!("{package} has no row in the table")];
    };
    let allowed = |target: &str, kind| match kind {
        DependencyKind::Development => {
            !is_below_crates(package) || is_below_crates(target) || !is_ours(target)
        }
        DependencyKind::Normal | DependencyKind::Build | DependencyKind::Unknown => {
            row.ours.contains(&target) || row.others.contains(&target)
        }
    };
    let all = dependencies.into_iter();
    all.filter(|(target, kind)| !allowed(target, *kind))
        .map(|(target, kind)| format!("{package} -> {target} ({kind})"))
        .collect()
}

fn is_ours(package: &str) -> bool {
    ROWS.iter().any(|row| row.package == package)
}

fn is_below_crates(package: &str) -> bool {
    [FLUSH, STAGE2, P2M, VTD, GNTTAB].contains(&package)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_workspace_follows_the_arrows() {
        if let Err(error) = check() {
            panic!("{error:#}");
        }
    }

    #[test]
    fn siblings_never_see_each_other() {
        for row in ROWS.iter().filter(|row| [P2M, VTD, GNTTAB].contains(&row.package)) {
            for sibling in [P2M, VTD, GNTTAB] {
                assert!(!row.ours.contains(&sibling), "{} -> {sibling}", row.package);
            }
        }
    }

    #[test]
    fn the_table_has_no_cycle() {
        fn depth(package: &str, left: usize) {
            assert!(left > 0, "a cycle through {package}");
            for row in ROWS.iter().filter(|row| row.package == package) {
                row.ours.iter().for_each(|next| depth(next, left - 1));
            }
        }
        ROWS.iter().for_each(|row| depth(row.package, ROWS.len()));
    }

    #[track_caller]
    fn planted(package: &str, dependency: &str, kind: DependencyKind, caught: bool) {
        assert_eq!(strangers(package, []), Vec::<String>::new());
        let found = strangers(package, [(dependency, kind)]);
        assert_eq!(!found.is_empty(), caught, "{package} -> {dependency}");
    }

    #[test]
    fn a_forbidden_arrow_is_found() {
        planted(GNTTAB, P2M, DependencyKind::Normal, true);
        planted(P2M, VTD, DependencyKind::Normal, true);
        planted(HWMODEL, FLUSH, DependencyKind::Normal, true);
        planted(FLUSH, "log", DependencyKind::Normal, true);
        planted(FLUSH, "cc", DependencyKind::Build, true);
        planted(VTD, HWMODEL, DependencyKind::Development, true);
        planted(VTD, "proptest", DependencyKind::Development, false);
        planted(VTD, GNTTAB, DependencyKind::Development, false);
        planted(P2M, STAGE2, DependencyKind::Normal, false);
        planted("quiesce-misuse", "trybuild", DependencyKind::Development, false);
    }

    #[test]
    fn a_package_without_a_row_is_found() {
        assert_eq!(strangers("quiesce-new", []).len(), 1);
    }
}
