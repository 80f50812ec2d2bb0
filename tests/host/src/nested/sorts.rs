//! Formats of tables that CPUs of the model walk, nested guests among them.
//!
//! [`Walks`] tells how deep such a tree is, and what register a CPU finds its root by.

use std::fmt;

use flush::Mfn;
use hwmodel::Root;
use p2m::hardware::vmx::{AccessedDirty, Eptp};
use stage2::{
    Format,
    format::{
        ept::{Ept, EptLevels},
        npt::{Npt, NptLevels},
    },
};

/// Formats that CPUs of the model walk, for a guest and for its nested guests.
pub trait Walks: Format + fmt::Debug {
    /// With four levels.
    fn four_levels() -> Self;

    /// What a CPU is given to walk a table from here.
    fn root(root: Mfn) -> Root;
}

impl Walks for Ept {
    fn four_levels() -> Self {
        Self::new(EptLevels::Four)
    }

    fn root(root: Mfn) -> Root {
        let eptp = Eptp::new(root, 4, AccessedDirty::On).expect("a root as hardware has it");
        Root::from_eptp(eptp.bits())
    }
}

impl Walks for Npt {
    fn four_levels() -> Self {
        Self::new(NptLevels::Four)
    }

    /// Under an ASID of its own, which nothing else of the world has.
    fn root(root: Mfn) -> Root {
        let asid = u32::try_from(root.get()).expect("a frame of this small machine");
        Root::nested(asid, root.get() << 12)
    }
}
