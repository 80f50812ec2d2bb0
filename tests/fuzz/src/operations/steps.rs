//! What a guest and its hypervisor may do, and where they do it.
//!
//! A [`Step`] names grants, pages and runs of them so that most steps meet what earlier
//! ones left: there are few grants, and low pages are more likely than others.

use std::collections::BTreeSet;

use arbitrary::Arbitrary;

use super::{BLOCK, GRANTS, RAM};
use crate::script::Below;

#[derive(Debug, Arbitrary)]
pub(super) enum Step {
    Map(Vec<Mapping>),
    /// As many as need more than one flush.
    MapAll {
        read_only: bool,
    },
    Unmap {
        first: Below<GRANTS>,
        count: Below<5>,
    },
    UnmapAll,
    Populate {
        page: Page,
    },
    PopulateBlock {
        second: bool,
    },
    Clear {
        from: Page,
        pages: Length,
    },
    Restrict {
        from: Page,
        pages: Length,
    },
    Move(Home),
    Enter,
    Leave,
    Use(Below<GRANTS>),
    UseRam(Page),
    Speculate,
}

#[derive(Debug, Arbitrary)]
pub(super) struct Mapping {
    pub(super) grant: Below<GRANTS>,
    pub(super) at: Below<GRANTS>,
    pub(super) read_only: bool,
}

#[derive(Clone, Copy, Debug, Arbitrary)]
pub(super) enum Page {
    Low(Below<8>),
    Any(Below<1024>),
}

#[derive(Debug, Arbitrary)]
pub(super) enum Length {
    One,
    Few(Below<40>),
    Many(Below<1024>),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Arbitrary)]
pub(super) enum Home {
    Nobody,
    Front,
    Back,
}

impl Page {
    pub(super) fn gfn(self) -> u64 {
        RAM + match self {
            Self::Low(page) => page.0,
            Self::Any(page) => page.0,
        }
    }
}

impl Length {
    pub(super) fn run(&self, from: Page) -> (u64, u64) {
        let pages = match self {
            Self::One => 1,
            Self::Few(pages) => pages.0 + 1,
            Self::Many(pages) => pages.0 + 1,
        };
        (from.gfn(), (from.gfn() + pages - 1).min(RAM + 2 * BLOCK - 1))
    }
}

/// Grants that a story maps.
pub(super) fn used(steps: &[Step]) -> BTreeSet<u64> {
    let of = |step: &Step| match step {
        Step::Map(mappings) => mappings.iter().map(|mapping| mapping.grant.0).collect(),
        Step::MapAll { .. } => (0..GRANTS).collect::<Vec<_>>(),
        Step::Unmap { .. }
        | Step::UnmapAll
        | Step::Populate { .. }
        | Step::PopulateBlock { .. }
        | Step::Clear { .. }
        | Step::Restrict { .. }
        | Step::Move(_)
        | Step::Enter
        | Step::Leave
        | Step::Use(_)
        | Step::UseRam(_)
        | Step::Speculate => Vec::new(),
    };
    steps.iter().flat_map(of).collect()
}
