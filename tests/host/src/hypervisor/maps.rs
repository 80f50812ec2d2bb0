//! What a domain's processors walk, where devices have tables of their own.
//!
//! A [`CpuMap`] is the p2m of one domain in the format of the processors there are.

use std::ops::ControlFlow;

use flush::{Gfn, Gone, Mfn, Run, Skipped, Tlb};
use p2m::{ClearError, Displaced, Expected, Mapping, MarkedP2m, P2m, PageKind, SetError, Teardown};
use stage2::{
    Access, Budget, Emptied, Entry, Format, Found, Leaf, Level, Rest, Sink, Stopped, Tally,
    format::{
        ept::{Ept, EptLevels},
        npt::{Npt, NptLevels},
    },
    visit,
};

use crate::{Memory, Ram};

/// What processors walk, and how they tell one domain's translations from another's.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum CpuTables {
    /// EPT, without accessed and dirty flags; the root is the tag.
    #[default]
    Ept,
    /// EPT with accessed and dirty flags: a grant that nobody used is cleared for nothing.
    MarkedEpt,
    /// NPT; each vCPU has an ASID.
    Npt,
}

impl CpuTables {
    /// Every frame number that tables of this sort serve.
    pub(super) fn space(self) -> Rest {
        Rest::new(match self {
            Self::Ept | Self::MarkedEpt => ept(Level::TWO).geometry().space(),
            Self::Npt => npt(Level::TWO).geometry().space(),
        })
    }

    /// Looks at every leaf below `root` in a range, until told to stop.
    pub(super) fn visit<R: Ram>(
        self,
        memory: &Memory<R>,
        root: Mfn,
        rest: Rest,
        look: impl FnMut(Run, Leaf) -> ControlFlow<()>,
    ) -> Result<Tally, Stopped> {
        match self {
            Self::Ept | Self::MarkedEpt => leaves(&ept(Level::TWO), memory, root, rest, look),
            Self::Npt => leaves(&npt(Level::TWO), memory, root, rest, look),
        }
    }
}

fn leaves<F: Format, R: Ram>(
    format: &F,
    memory: &Memory<R>,
    root: Mfn,
    rest: Rest,
    mut look: impl FnMut(Run, Leaf) -> ControlFlow<()>,
) -> Result<Tally, Stopped> {
    let looks = |found: Found| match found.entry {
        Entry::Leaf(leaf) => look(found.run, leaf),
        Entry::Table(_) | Entry::Inert | Entry::Empty => ControlFlow::Continue(()),
    };
    visit(stage2::Tables { format, memory, root }, rest, &mut Budget::UNLIMITED.clone(), looks)
}

/// The p2m of a domain whose devices have tables of their own.
pub(crate) enum CpuMap<R> {
    Ept(P2m<Ept, Memory<R>, Tlb>),
    Marked(MarkedP2m<Memory<R>>),
    Npt(P2m<Npt, Memory<R>, Tlb>),
}

/// The EPT format that every EPT here has, with leaves up to `largest`.
pub(super) fn ept(largest: Level) -> Ept {
    Ept::new(EptLevels::Four).with_largest_leaf(largest)
}

fn npt(largest: Level) -> Npt {
    Npt::new(NptLevels::Four).with_largest_leaf(largest)
}

/// Does the same with whichever map it is.
macro_rules! each {
    ($map:expr, $inner:ident => $action:expr) => {
        match $map {
            CpuMap::Ept($inner) => $action,
            CpuMap::Marked($inner) => $action,
            CpuMap::Npt($inner) => $action,
        }
    };
}

impl<R: Ram> CpuMap<R> {
    /// # Panics
    /// If there is no memory for a root.
    pub(super) fn new(tables: CpuTables, largest: Level, memory: Memory<R>) -> Self {
        let root = "memory for a root";
        match tables {
            CpuTables::Ept => Self::Ept(P2m::new(ept(largest), memory).expect(root)),
            CpuTables::MarkedEpt => Self::Marked(MarkedP2m::new(ept(largest), memory).expect(root)),
            CpuTables::Npt => Self::Npt(P2m::new(npt(largest), memory).expect(root)),
        }
    }

    pub(super) fn kind(&self) -> CpuTables {
        match self {
            Self::Ept(_) => CpuTables::Ept,
            Self::Marked(_) => CpuTables::MarkedEpt,
            Self::Npt(_) => CpuTables::Npt,
        }
    }

    pub(super) fn root(&self) -> Mfn {
        each!(self, map => map.root())
    }

    pub(super) fn get(&self, gfn: Gfn) -> Option<Mapping> {
        each!(self, map => map.get(gfn))
    }

    pub(super) fn set<'id>(
        &mut self,
        gfn: Gfn,
        order: u8,
        mfn: Mfn,
        kind: PageKind,
        skipped: &mut Skipped<'id>,
    ) -> Result<Option<Displaced<'id, Tlb>>, SetError> {
        each!(self, map => map.set(gfn, order, mfn, kind, skipped))
    }

    #[inline]
    pub(super) fn clear<'id>(
        &mut self,
        gfn: Gfn,
        expected: Expected,
        skipped: &mut Skipped<'id>,
    ) -> Result<Gone<'id, Tlb>, ClearError> {
        match self {
            Self::Ept(map) => map.clear(gfn, expected, skipped),
            Self::Marked(map) => map.clear_grant(gfn, expected, skipped),
            Self::Npt(map) => map.clear(gfn, expected, skipped),
        }
    }

    pub(super) fn restrict(
        &mut self,
        rest: Rest,
        allowed: Access,
        budget: &mut Budget,
        skipped: &mut Skipped<'_>,
    ) -> Result<Tally, Stopped> {
        each!(self, map => map.restrict(rest, allowed, budget, skipped))
    }

    pub(super) fn clear_range<'id>(
        &mut self,
        rest: Rest,
        budget: &mut Budget,
        emptied: Emptied,
        skipped: &mut Skipped<'id>,
        sink: impl Sink<'id, Tlb>,
    ) -> Result<Tally, Stopped> {
        each!(self, map => map.clear_range(rest, budget, emptied, skipped, sink))
    }

    pub(super) fn teardown(self) -> CpuEnd<R> {
        match self {
            Self::Ept(map) => CpuEnd::Ept(map.teardown()),
            Self::Marked(map) => CpuEnd::Ept(map.teardown()),
            Self::Npt(map) => CpuEnd::Npt(map.teardown()),
        }
    }
}

/// The end of a [`CpuMap`].
pub(super) enum CpuEnd<R> {
    Ept(Teardown<Ept, Memory<R>, Tlb>),
    Npt(Teardown<Npt, Memory<R>, Tlb>),
}

impl<R: Ram> CpuEnd<R> {
    pub(super) fn is_done(&self) -> bool {
        match self {
            Self::Ept(end) => end.is_done(),
            Self::Npt(end) => end.is_done(),
        }
    }

    pub(super) fn step<'id>(
        &mut self,
        budget: &mut Budget,
        skipped: &mut Skipped<'id>,
        sink: impl Sink<'id, Tlb>,
    ) -> Result<(), Stopped> {
        match self {
            Self::Ept(end) => end.step(budget, skipped, sink),
            Self::Npt(end) => end.step(budget, skipped, sink),
        }
    }
}
