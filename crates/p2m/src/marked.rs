//! A p2m whose CPUs mark what they use: a grant nobody touched needs no CPU flush.
//!
//! A [`MarkedP2m`] is a [`P2m`] with one more way to clear a page. Choosing the type is
//! choosing the option; a `P2m` never looks at accessed flags.
//!
//! Why it is safe against a walk at the same time: a CPU caches a leaf only after it has
//! set the accessed flag, in one locked update of the entry that fails if the entry has
//! changed. The exchange that clears the entry is such an update as well, so one of them
//! comes first. Either the walk did, and the exchange returns the flag: the leaf goes on
//! record. Or the exchange did, and the walk finds nothing there.

use core::ops::Deref;

use flush::{Gfn, Gone, Mfn, Skipped, Tlb};
use stage2::{
    Access, Budget, Emptied, Format, Rest, Sink, Stopped, TableMemory, Tally, format::ept::Ept,
};

use crate::{
    error::{ClearError, NewError, SetError},
    hardware::vmx::{AccessedDirty, Eptp},
    kind::PageKind,
    table::{Displaced, Expected, P2m},
    teardown::Teardown,
};

/// The physical map of a guest that every CPU runs with accessed flags enabled.
///
/// What the type cannot see is the EPTP that CPUs load: it has to be [`eptp`](Self::eptp)
/// on each of them, from the first entry on. Its tables are walked by CPUs alone, so
/// nothing about devices changes: what their own tables lose is flushed as ever.
///
/// A guest with shadow tables does not get one: what runs on a shadow leaf marks that leaf
/// and not the one here.
#[derive(Debug)]
pub struct MarkedP2m<M>(P2m<Ept, M>);

impl<M: TableMemory> MarkedP2m<M> {
    /// An empty map, as [`P2m::new`] makes it. The CPUs have accessed and dirty flags: bit
    /// 21 of IA32_VMX_EPT_VPID_CAP.
    ///
    /// # Errors
    ///
    /// See [`NewError`].
    pub fn new(format: Ept, memory: M) -> Result<Self, NewError> {
        P2m::new(format, memory).map(Self)
    }

    /// What every CPU loads to run the guest. `None` for a root beyond 52 bits of address.
    #[must_use]
    pub fn eptp(&self) -> Option<Eptp> {
        let levels = self.tables().format.geometry().top().get().saturating_add(1);
        Eptp::new(self.root(), levels, AccessedDirty::On)
    }

    /// As [`P2m::clear`]; if no CPU ever used a grant's mapping, nothing goes on record.
    ///
    /// For pages of other kinds it is the same as `clear`. A grant's page is held for each
    /// of its mappings until that one is gone from every cache, so an older mapping of the
    /// same page does not matter here; memory of the guest's own is not counted like that.
    ///
    /// # Errors
    ///
    /// See [`ClearError`].
    pub fn clear_grant<'id>(
        &mut self,
        gfn: Gfn,
        expected: Expected,
        skipped: &mut Skipped<'id>,
    ) -> Result<Gone<'id, Tlb>, ClearError> {
        let Expected { mfn, kind } = expected;
        match kind {
            PageKind::GrantReadWrite | PageKind::GrantReadOnly => {
                stage2::clear_marked_page(self.0.tables(), gfn, skipped, |leaf| {
                    leaf.mfn == mfn && leaf.tag == kind.tag()
                })
                .map(|(_, gone)| gone)
                .map_err(|error| ClearError::single(error, gfn))
            }
            PageKind::RamReadWrite
            | PageKind::RamReadOnly
            | PageKind::LogDirty
            | PageKind::Foreign
            | PageKind::MmioDirect => self.0.clear(gfn, expected, skipped),
        }
    }

    /// As [`P2m::set`]. What is put there is not marked, unless it is over a marked mapping
    /// of the same page.
    ///
    /// # Errors
    ///
    /// As there.
    pub fn set<'id>(
        &mut self,
        gfn: Gfn,
        order: u8,
        mfn: Mfn,
        kind: PageKind,
        skipped: &mut Skipped<'id>,
    ) -> Result<Option<Displaced<'id, Tlb>>, SetError> {
        self.0.set(gfn, order, mfn, kind, skipped)
    }

    /// As [`P2m::clear`], marks or not.
    ///
    /// # Errors
    ///
    /// As there.
    pub fn clear<'id>(
        &mut self,
        gfn: Gfn,
        expected: Expected,
        skipped: &mut Skipped<'id>,
    ) -> Result<Gone<'id, Tlb>, ClearError> {
        self.0.clear(gfn, expected, skipped)
    }

    /// As [`P2m::restrict`]. Marks stay.
    ///
    /// # Errors
    ///
    /// As there.
    pub fn restrict(
        &mut self,
        rest: Rest,
        allowed: Access,
        budget: &mut Budget,
        skipped: &mut Skipped<'_>,
    ) -> Result<Tally, Stopped> {
        self.0.restrict(rest, allowed, budget, skipped)
    }

    /// As [`P2m::clear_range`], marks or not.
    ///
    /// # Errors
    ///
    /// As there.
    pub fn clear_range<'id>(
        &mut self,
        rest: Rest,
        budget: &mut Budget,
        emptied: Emptied,
        skipped: &mut Skipped<'id>,
        sink: impl Sink<'id, Tlb>,
    ) -> Result<Tally, Stopped> {
        self.0.clear_range(rest, budget, emptied, skipped, sink)
    }

    /// The end of the map: see [`P2m::teardown`].
    pub fn teardown(self) -> Teardown<Ept, M, Tlb> {
        self.0.teardown()
    }
}

/// For reading. There is no way to change the map inside: another one, which ran without
/// marks, could be put in its place.
impl<M> Deref for MarkedP2m<M> {
    type Target = P2m<Ept, M>;

    fn deref(&self) -> &Self::Target {
        &self.0
    }
}
