//! Shadow tables of nested guests, and precise unmaps through a reverse map.
//!
//! A guest that is a hypervisor itself gives its own guests tables that hardware cannot
//! walk, because they lead to the guest's frames. [`Nested`] is the physical map of such
//! a guest together with its *shadow tables*, which join both steps:
//!
//! ```text
//! nested frame --(the guest's own table)--> canonical frame --(P2m)--> machine frame
//!      \_____________________ a Shadow, filled on demand ________________/
//! ```
//!
//! - [`fill`](Nested::fill) installs one shadow leaf, and a record in the reverse map
//!   before it. *Each shadow leaf has a record, or its canonical frames are among the
//!   unknown ones of its shadow.*
//! - [`clear`](Nested::clear) and the other edits of the canonical map unmap what shows
//!   a frame first, and the frame itself then. They are the only way to a
//!   [`Gone`] for a page of this guest, so no page is held by a batch while
//!   a shadow still shows it. A shadow that may show it without a record is unmapped
//!   whole.
//! - An edit whose budget ends goes on with the next call. Until then no fill shows what
//!   it has unmapped ([`FillError::Barred`]), so no guest can hold it off by faulting.
//! - [`begin_flush`](Nested::begin_flush) and [`flush_step`](Nested::flush_step) carry
//!   out what the guest asks for with INVEPT: they unmap shadows whole, and end in one
//!   flush of everything the guest's CPUs hold, also if nothing was mapped.
//! - [`pick`](Nested::pick) finds the shadow of a context, or recycles one. It cannot be
//!   used before it was unmapped and flushed; any vCPU may do that
//!   ([`prepare`](Nested::prepare), then [`open`](Nested::open)).
//!
//! CPUs run the nested guest as part of the guest: they enter through its
//! [`GuestCpus`](crate::GuestCpus), and its [`Invalidate`](crate::Invalidate) makes them
//! forget every root of the guest, the shadows' as well (INVEPT of type 2, or a new ASID
//! for each of a vCPU's contexts). A nested frame has no canonical number, so what a
//! shadow loses goes on record as [everything](flush::Skipped::everything) of the CPUs.
//! From the first shadow on, so does every canonical edit: what showed the frame may
//! have been unmapped by another vCPU whose batch is not flushed yet.
//!
//! The embedder keeps a `Nested` behind the lock of the p2m. This is the way to a proof:
//!
//! ```
//! # use p2m::{Expected, nested::Nested};
//! # use flush::{Gfn, Gone, Skipped, Tlb};
//! # use stage2::{Budget, Format, TableMemory};
//! fn clear<'id, F: Format, M: TableMemory>(
//!     guest: &mut Nested<'_, F, M, Tlb>,
//!     gfn: Gfn,
//!     expected: Expected,
//!     skipped: &mut Skipped<'id>,
//! ) -> Gone<'id, Tlb> {
//!     guest.clear(gfn, expected, &mut Budget::new(4096), skipped).unwrap()
//! }
//! ```
//!
//! and there is none past the shadows:
//!
//! ```compile_fail,E0596
//! # use p2m::{Expected, nested::Nested};
//! # use flush::{Gfn, Gone, Skipped, Tlb};
//! # use stage2::{Format, TableMemory};
//! fn clear<'id, F: Format, M: TableMemory>(
//!     guest: &mut Nested<'_, F, M, Tlb>,
//!     gfn: Gfn,
//!     expected: Expected,
//!     skipped: &mut Skipped<'id>,
//! ) -> Gone<'id, Tlb> {
//!     guest.p2m().clear(gfn, expected, skipped).unwrap()
//! }
//! ```

use core::fmt;

use flush::{Gfn, Gone, Mfn, Run, Skipped, Tlb};
use stage2::{Budget, Format, Stop, TableMemory, Tables};

use crate::{
    error::{ClearError, SetError},
    kind::PageKind,
    record::Walkers,
    table::{Displaced, Expected, P2m},
};
use bars::Bars;
use edit::ShadowEdit;
use reverse::Reverse;

mod bars;
mod close;
mod edit;
mod fill;
mod flushing;
mod ranges;
mod reverse;
mod shadow;
mod unmap;

pub use close::CloseError;
pub use fill::{FillError, Walked};
pub use flushing::{EmulatedFlush, Scope, Wiped};
pub use reverse::ReverseEntry;
pub use shadow::{Context, InUse, PickError, Shadow, Ticket};

/// The physical map of a guest that has nested guests, and their shadow tables.
///
/// Shadows have the format of the canonical map and take their tables from its memory.
#[derive(Debug)]
pub struct Nested<'s, F, M, K = Tlb> {
    p2m: P2m<F, M, K>,
    shadows: &'s mut [Shadow],
    reverse: Reverse<'s>,
    /// The number of the last whole-space unmap that ended.
    epoch: u64,
    /// Counts picks.
    clock: u64,
    /// Whether there ever was a shadow.
    shadowed: bool,
    /// What edits under way keep out of the shadows.
    bars: Bars,
    counts: NestedCounts,
}

/// What the shadows of a guest did so far, for an operator to read.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct NestedCounts {
    /// Leaves installed.
    pub fills: u64,
    /// Leaves that the reverse map had no room for.
    pub unrecorded: u64,
    /// Leaves unmapped one by one, because their canonical frames changed.
    pub precise: u64,
    /// Leaves unmapped with their whole shadow.
    pub swept: u64,
    /// Whole shadows unmapped because they might have shown a changed frame.
    pub unknown: u64,
    /// Shadows recycled for another context.
    pub recycled: u64,
    /// Table entries read by all of these unmaps.
    pub reads: u64,
    /// Places of the reverse map looked at in search of what shows a changed frame.
    pub searched: u64,
}

/// Why an edit of the canonical map was refused. It changed nothing canonical.
#[derive(Debug, PartialEq, Eq)]
pub enum Refused<E> {
    /// What shows the frames could not be unmapped now. Shadows unmapped so far stay so,
    /// and nested guests fault on them. After [`Stop::Budget`] no fill shows the frames
    /// until the edit was tried again and passed, or was
    /// [given up](Nested::give_up).
    Shadows(Stop),
    /// The canonical map refused.
    Canonical(E),
}

impl<E: fmt::Display> fmt::Display for Refused<E> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Shadows(stop) => write!(f, "shadow tables not unmapped: {stop}"),
            Self::Canonical(error) => error.fmt(f),
        }
    }
}

impl<E: core::error::Error> core::error::Error for Refused<E> {}

impl<'s, F: Format, M: TableMemory, K: Walkers> Nested<'s, F, M, K> {
    /// Wraps the map of a guest that may have nested guests from now on.
    ///
    /// There are as many shadows as `shadows`, and as many of their leaves are found
    /// again one by one as there are `entries`. `seed` is random, another one each time, and not known to the
    /// guest.
    pub fn new(
        p2m: P2m<F, M, K>,
        shadows: &'s mut [Shadow],
        entries: &'s mut [ReverseEntry],
        seed: u64,
    ) -> Self {
        shadows.fill_with(|| Shadow::VACANT);
        let counts = NestedCounts::default();
        let reverse = Reverse::new(entries, seed);
        let bars = Bars::default();
        Self { p2m, shadows, reverse, epoch: 0, clock: 0, shadowed: false, bars, counts }
    }

    /// The canonical map, for reading.
    #[must_use]
    pub fn p2m(&self) -> &P2m<F, M, K> {
        &self.p2m
    }

    /// What the shadows did so far.
    #[must_use]
    pub fn counts(&self) -> NestedCounts {
        self.counts
    }

    /// The roots of all shadows that have tables: what an
    /// [`Invalidate`](crate::Invalidate) makes a CPU forget besides the canonical root.
    pub fn roots(&self) -> impl Iterator<Item = Mfn> + '_ {
        self.shadows.iter().filter_map(|shadow| shadow.root)
    }

    /// As [`P2m::set`]; what showed the frames is unmapped first.
    ///
    /// Each leaf in shadow tables costs one of the budget, and so do each 512 frames.
    ///
    /// # Errors
    ///
    /// See [`Refused`].
    pub fn set<'id>(
        &mut self,
        gfn: Gfn,
        order: u8,
        mfn: Mfn,
        kind: PageKind,
        budget: &mut Budget,
        skipped: &mut Skipped<'id>,
    ) -> Result<Option<Displaced<'id, K>>, Refused<SetError>> {
        let run = Run::block(gfn, order);
        if self.shadowed {
            // What can never pass is not worth a search of that many frames.
            let format = self.p2m.tables().format;
            let geometry = format.geometry();
            if order > geometry.order(format.largest_leaf()) {
                return Err(Refused::Canonical(SetError::Order(order)));
            }
            if !geometry.space().covers(run) {
                return Err(Refused::Canonical(SetError::OutOfRange));
            }
        }
        self.unmap_shadows(run, budget, skipped)?;
        self.bars.lift(run);
        let shown = |p2m: &P2m<F, M, K>| p2m.get(gfn).map(|was| (was.mfn, was.kind, was.access));
        let was = shown(&self.p2m);
        let displaced = self.p2m.set(gfn, order, mfn, kind, skipped).map_err(Refused::Canonical)?;
        // A page that only changes its kind is not displaced, and may have lost rights.
        if was.is_some() && was != shown(&self.p2m) {
            self.note(skipped);
        }
        Ok(displaced)
    }

    /// As [`P2m::clear`]; what showed the frame is unmapped first.
    ///
    /// Its leaves in shadow tables cost one of the budget each. Their tables are kept,
    /// so that no room for table pages is needed. They are unmapped also where the
    /// canonical map then refuses.
    ///
    /// # Errors
    ///
    /// See [`Refused`].
    #[inline]
    pub fn clear<'id>(
        &mut self,
        gfn: Gfn,
        expected: Expected,
        budget: &mut Budget,
        skipped: &mut Skipped<'id>,
    ) -> Result<Gone<'id, K>, Refused<ClearError>> {
        self.unmap_shadows(Run::single(gfn), budget, skipped)?;
        self.bars.lift(Run::single(gfn));
        let gone = self.p2m.clear(gfn, expected, skipped).map_err(Refused::Canonical)?;
        self.note(skipped);
        Ok(gone)
    }

    /// Ends an edit that was refused with [`Stop::Budget`] and will not be tried again:
    /// from now on nested guests may reach the frames of `run` anew.
    ///
    /// It harms no other edit than by making it search again, and goes without saying
    /// where the edit was refused by the canonical map, or passed.
    pub fn give_up(&mut self, run: Run) {
        self.bars.lift(run);
    }

    /// Canonical frames were changed: CPUs may hold translations of nested frames that
    /// were unmapped on the record of a batch that is not flushed yet.
    fn note(&self, skipped: &mut Skipped<'_>) {
        if self.shadowed {
            skipped.everything::<Tlb>();
        }
    }
}

/// The tables of a shadow, and an edit of them. `None` while it has none.
fn edit<'e, 's, 'id, F: Format, M: TableMemory, K: Walkers>(
    p2m: &'e P2m<F, M, K>,
    shadows: &'e mut [Shadow],
    reverse: &'e mut Reverse<'s>,
    slot: usize,
    skipped: &'e mut Skipped<'id>,
) -> Option<(Tables<'e, F, M>, ShadowEdit<'e, 's, 'id>)> {
    let shadow = shadows.get_mut(slot)?;
    let tables = Tables { root: shadow.root?, ..p2m.tables() };
    let recorded = &mut shadow.recorded;
    Some((tables, ShadowEdit { skipped, reverse, shadow: slot, recorded }))
}

#[cfg(test)]
mod tests;
