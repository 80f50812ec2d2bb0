//! Linear owners of pages, and the proof that one may be given away.
//!
//! [`Released<T>`] is the proof. [`FreshTable`] and [`TablePage`] are the two ends of
//! a page-table page's life: before any hardware saw it, and after it was unlinked.

use crate::Mfn;

/// A table page that no hardware can reach: it may be linked, or freed directly.
///
/// Its words are zero when it comes from an allocator of tables, and anything when it
/// was [recycled](Released::recycle).
#[derive(Debug, PartialEq, Eq)]
#[must_use = "dropping it leaks the page; give it back to its allocator"]
pub struct FreshTable(Mfn);

impl FreshTable {
    /// Takes ownership of a page that is in no table, and in nobody else's hands.
    ///
    /// The caller answers for that: the allocator is the one place to call this.
    pub const fn new(mfn: Mfn) -> Self {
        Self(mfn)
    }

    /// The page.
    #[must_use]
    pub const fn mfn(&self) -> Mfn {
        self.0
    }
}

/// A table page that was unlinked and may still be walked by hardware.
///
/// It belongs into the record of the edit that unlinked it, and comes out of the
/// flushed batch as `Released<TablePage>`.
#[derive(Debug, PartialEq, Eq)]
#[must_use = "dropping it leaks the page; put it on the record of the edit"]
pub struct TablePage(Mfn);

impl TablePage {
    /// Takes ownership of a page whose parent entry was just cleared.
    ///
    /// `TableMemory::unlink` is the one place to call this.
    pub const fn unlinked(mfn: Mfn) -> Self {
        Self(mfn)
    }

    /// The page.
    #[must_use]
    pub const fn mfn(&self) -> Mfn {
        self.0
    }
}

/// A thing whose batch was flushed: nothing cached leads to it any more.
///
/// Only [`Flushed`](crate::Flushed) makes one. Functions that give a page away take
/// it by value and look inside with [`get`](Self::get).
#[derive(Debug)]
#[must_use = "dropping it leaks what it owns; hand it to the function that releases it"]
pub struct Released<T>(T);

impl<T> Released<T> {
    pub(crate) const fn new(thing: T) -> Self {
        Self(thing)
    }

    /// What was released.
    #[must_use]
    #[inline]
    pub const fn get(&self) -> &T {
        &self.0
    }
}

impl Released<TablePage> {
    /// Turns the page back into one that hardware does not know.
    ///
    /// The caller still has to zero its words before linking it.
    pub fn recycle(self) -> FreshTable {
        FreshTable(self.0.0)
    }
}

static_assertions::assert_not_impl_any!(FreshTable: Clone, Copy, Default);
static_assertions::assert_not_impl_any!(TablePage: Clone, Copy, Default);
static_assertions::assert_not_impl_any!(Released<u8>: Clone, Copy, Default, From<u8>);
