//! The mutants, as data
//!
//! A row is one `Mutant`: where it is, what it breaks, and which test notices. The old text
//! has to occur once in its file, which a test checks, so that the list cannot rot.

mod flush;
mod gnttab;
mod p2m;
mod stage2;
mod vtd;

use super::{Killer, Mutant};

const FLUSH: &str = "crates/flush";
const STAGE2: &str = "crates/stage2";
const P2M: &str = "crates/p2m";
const VTD: &str = "crates/iommu_vtd";
const GNTTAB: &str = "crates/gnttab";
const HOST: &str = "tests/host";

/// Every mutant, one crate after the other.
pub(super) fn mutants() -> impl Iterator<Item = &'static Mutant> {
    let lists = [flush::MUTANTS, stage2::MUTANTS, p2m::MUTANTS, vtd::MUTANTS, gnttab::MUTANTS];
    lists.into_iter().flatten()
}

/// A test in a library.
const fn inside(folder: &'static str, test: &'static str) -> Killer {
    Killer { folder, target: None, test }
}

/// A test in a file of a package's `tests`.
const fn beside(folder: &'static str, target: &'static str, test: &'static str) -> Killer {
    Killer { folder, target: Some(target), test }
}
