//! The record of flushes not done, and the proofs that something is on it.
//!
//! A batch lends [`Skipped`] to an edit. The edit says what it cleared and gets a
//! [`Gone`] for each kind of cache; the halves join to [`Cleared`], which the batch
//! takes together with the page. The brand `'id` ties all three to one record, so
//! that a proof from one batch is worthless in another:
//!
//! ```compile_fail
//! use flush::*;
//! let domain = DomainId::new(1);
//! let (mut one, mut other) = (Batch::<(), 4>::new(domain), Batch::<(), 4>::new(domain));
//! one.hold(|skipped| {
//!     let cleared: Cleared<'_> = skipped.leaf::<Shared>(Run::single(Gfn::new(1)), 0).into();
//!     other.hold(|_| Ok::<_, ()>(((), cleared))) // recorded in `one`, held in `other`
//! });
//! ```

use core::marker::PhantomData;

use arrayvec::ArrayVec;

use crate::{Change, Depth, DomainId, Run, TablePage, block::Block, both::Both, cover::Manner};

/// How many unlinked table pages one batch can carry.
pub const TABLES: usize = 32;

/// Kind: the CPUs' second-stage translation caches.
#[derive(Debug)]
pub enum Tlb {}
/// Kind: the IOMMU's translation caches.
#[derive(Debug)]
pub enum Iotlb {}
/// Both kinds: an edit of one table that CPUs and devices walk.
#[derive(Debug)]
pub enum Shared {}

mod sealed {
    pub trait Sealed {}
    impl Sealed for super::Tlb {}
    impl Sealed for super::Iotlb {}
    impl Sealed for super::Shared {}
}

/// A kind of cache that is flushed by one implementation of [`Flush`](crate::Flush).
pub trait Kind: Records {}
impl Kind for Tlb {}
impl Kind for Iotlb {}

/// Which covers an edit of a table goes onto.
pub trait Records: sealed::Sealed {
    /// Whether CPUs walk the table.
    const TLB: bool;
    /// Whether devices walk the table.
    const IOTLB: bool;
}
impl Records for Tlb {
    const TLB: bool = true;
    const IOTLB: bool = false;
}
impl Records for Iotlb {
    const TLB: bool = false;
    const IOTLB: bool = true;
}
impl Records for Shared {
    const TLB: bool = true;
    const IOTLB: bool = true;
}

/// What a batch owes before it may give out anything.
///
/// In this order, so that a new one is made where it stays: with the room for tables before
/// what is set, all of it was copied.
#[derive(Debug)]
#[repr(C)]
pub(crate) struct Record {
    pub(crate) domain: DomainId,
    pub(crate) covers: Both,
    pub(crate) tables: ArrayVec<TablePage, TABLES>,
}

impl Record {
    #[inline]
    pub(crate) const fn new(domain: DomainId) -> Self {
        Self { domain, covers: Both::new(), tables: ArrayVec::new_const() }
    }

    #[inline]
    fn add<K: Records>(&mut self, run: Run, order: u8, depth: Depth, change: Change) {
        self.covers.add::<K>(run, Manner::new(order, depth, change));
    }
}

/// Invariant in `'id`: lifetimes of two records never unify.
type Brand<'id> = PhantomData<fn(&'id ()) -> &'id ()>;

/// The record of one batch, lent to one edit.
///
/// Holding it is the only way not to flush: what the edit clears goes on record here
/// and is flushed before the batch gives anything out.
#[derive(Debug)]
pub struct Skipped<'id> {
    record: &'id mut Record,
    brand: Brand<'id>,
}

impl<'id> Skipped<'id> {
    pub(crate) fn new(record: &'id mut Record) -> Self {
        Self { record, brand: PhantomData }
    }

    /// The domain whose translations the batch changes.
    #[must_use]
    pub fn domain(&self) -> DomainId {
        self.record.domain
    }

    /// A valid leaf of 2^`order` frames was cleared or changed; `run` is all it mapped.
    #[inline]
    pub fn leaf<K: Records>(&mut self, run: Run, order: u8) -> Gone<'id, K> {
        self.record.add::<K>(run, order, Depth::Leaves, Change::Modified);
        Gone::new()
    }

    /// Valid leaves of 2^`order` frames each were cleared, over all of `run`: a proof for each.
    ///
    /// They are on record when this returns, however many of the proofs are taken.
    #[inline]
    pub fn leaves<K: Records>(
        &mut self,
        run: Run,
        order: u8,
    ) -> impl Iterator<Item = Gone<'id, K>> + use<'id, K> {
        self.record.add::<K>(run, order, Depth::Leaves, Change::Modified);
        let leaves = run.pages().checked_shr(u32::from(order)).unwrap_or(0).max(1);
        (0..leaves).map(|_| Gone::new())
    }

    /// The entry was looked at, and held nothing that a cache could hold.
    #[inline]
    pub fn absent<K: Records>(&mut self) -> Gone<'id, K> {
        Gone::new()
    }

    /// Present leaves were put where nothing was. `run` is what they map: where it is as
    /// large as a large leaf, hardware that caches absence may have taken that for a missing
    /// table, so the order goes on record.
    #[inline]
    pub fn added<K: Records>(&mut self, run: Run) {
        /// Of the smallest large leaf in tables that devices walk.
        const LARGE: u8 = 9;
        let block = Block::around(run);
        let is_large = block.order() >= LARGE && block.run() == run;
        let order = if is_large { block.order() } else { 0 };
        self.record.add::<K>(run, order, Depth::Leaves, Change::Added);
    }

    /// A table was linked over `run`, where nothing was present.
    #[inline]
    pub fn linked<K: Records>(&mut self, run: Run) {
        self.record.add::<K>(run, 0, Depth::Tables, Change::Added);
    }

    /// A table entry over `run` changed or went: walk caches must forget it too.
    pub fn retabled<K: Records>(&mut self, run: Run) {
        self.record.add::<K>(run, 0, Depth::Tables, Change::Modified);
    }

    /// Every translation of the domain must be forgotten, walk caches included.
    pub fn everything<K: Records>(&mut self) {
        self.record.covers.everything::<K>(Depth::Tables);
    }

    /// A table page that mapped `run` was unlinked: it waits for the flush too.
    ///
    /// # Errors
    /// Gives the page back, with nothing recorded, when [`tables_left`](Self::tables_left)
    /// is 0. The parent entry is cleared by then, so look before unlinking.
    pub fn table<K: Records>(&mut self, run: Run, page: TablePage) -> Result<(), TablePage> {
        self.record.tables.try_push(page).map_err(arrayvec::CapacityError::element)?;
        self.retabled::<K>(run);
        Ok(())
    }

    /// How many more table pages the batch can carry.
    #[must_use]
    pub fn tables_left(&self) -> usize {
        self.record.tables.remaining_capacity()
    }
}

/// One kind's half of a proof: its entry is gone, and what it owes is on record.
#[derive(Debug)]
#[must_use = "without it the page cannot be held by its batch"]
pub struct Gone<'id, K: Records> {
    brand: Brand<'id>,
    kind: PhantomData<K>,
}

impl<K: Records> Gone<'_, K> {
    #[inline]
    fn new() -> Self {
        Self { brand: PhantomData, kind: PhantomData }
    }
}

impl<'id> Gone<'id, Tlb> {
    /// Joins both halves.
    ///
    /// The device's half is borrowed, because one device range may serve many pages.
    #[inline]
    pub fn with(self, _iotlb: &Gone<'id, Iotlb>) -> Cleared<'id> {
        Cleared { brand: PhantomData }
    }
}

/// Proof that no table maps the page any more, and that all flushes are on record.
#[derive(Debug)]
#[must_use = "hand it to the batch together with the page"]
pub struct Cleared<'id> {
    brand: Brand<'id>,
}

impl<'id> From<Gone<'id, Shared>> for Cleared<'id> {
    #[inline]
    fn from(_: Gone<'id, Shared>) -> Self {
        Self { brand: PhantomData }
    }
}

static_assertions::assert_not_impl_any!(Skipped<'static>: Clone, Copy, Default);
static_assertions::assert_not_impl_any!(Gone<'static, Tlb>: Clone, Copy, Default);
static_assertions::assert_not_impl_any!(Cleared<'static>: Clone, Copy, Default);
