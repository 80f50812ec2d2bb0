//! The memory that tables live in, as the walker sees it.
//!
//! An embedder implements [`TableMemory`] once, over its direct map. Everything the
//! walker does to memory goes through it, so a test can count, delay or refuse.

use core::{
    ops::Range,
    sync::atomic::{AtomicU16, AtomicU64},
};

use flush::{FreshTable, Mfn, TablePage};

/// A table that [`TableMemory::lend`] lends to whoever holds the lock of the tree's edits.
#[derive(Clone, Copy, Debug)]
pub struct Lent<'m> {
    /// Its entries.
    pub entries: &'m [AtomicU64],
    /// How many of them are not zero: what [`TableMemory::live`] says.
    pub live: &'m AtomicU16,
}

/// Access to table pages, and to how many entries of each are in use.
///
/// Methods take `&self`: hardware changes entries behind the walker anyway. *Edits of
/// one table tree are serialised by the embedder* (its p2m lock, or the DMA domain's),
/// and a reader holds that lock shared, so that no table is freed below it.
///
/// `table` is always a page the tree links, or a fresh one being filled; `index` is
/// below the number of entries of such a page. An implementation that is handed
/// anything else may answer 0 and do nothing; it must not touch other memory.
pub trait TableMemory {
    /// The entry as it is now.
    fn read(&self, table: Mfn, index: usize) -> u64;

    /// The first of these entries that is not zero, by its index and word.
    ///
    /// What a walk spends most of its reads on. Memory that can lend a page as a slice
    /// does better here than one [`read`](Self::read) for each entry; each up to the one
    /// returned counts as read.
    fn first_in_use(&self, table: Mfn, entries: Range<usize>) -> Option<(usize, u64)> {
        entries.map(|index| (index, self.read(table, index))).find(|(_, raw)| *raw != 0)
    }

    /// Replaces the entry in one atomic step and returns the old one.
    ///
    /// On return the hardware walker sees the new value: a unit that does not snoop
    /// CPU caches needs its write-back here.
    fn swap(&self, table: Mfn, index: usize, new: u64) -> u64;

    /// Empties the entries from `index` on, each in one atomic step, as [`swap`](Self::swap)
    /// does; `taken` becomes what they were. They are all in the page.
    fn take_out(&self, table: Mfn, index: usize, taken: &mut [u64]) {
        for (taken, index) in taken.iter_mut().zip(index..) {
            *taken = self.swap(table, index, 0);
        }
    }

    /// Replaces the entry in one atomic step if it still is `current`; visible to the
    /// hardware walker on return, as with [`swap`](Self::swap).
    ///
    /// # Errors
    ///
    /// The entry as it was found; nothing was changed. It must not fail while the
    /// entry equals `current`.
    fn compare_exchange(&self, table: Mfn, index: usize, current: u64, new: u64)
    -> Result<(), u64>;

    /// A table as it is, for memory in which an entry may be emptied by a look at it and a store
    /// of zero after that: two steps, where an exchange costs more.
    ///
    /// Nobody but hardware changes such an entry meanwhile, and hardware sets marks alone, that
    /// nobody wants of a page that goes. A flush that begins after the store must find the
    /// hardware walker reading zero. Memory that has more to do than a store lends nothing.
    #[inline]
    fn lend(&self, _table: Mfn) -> Option<Lent<'_>> {
        None
    }

    /// A page for a table, or `None` if there is none to be had now.
    ///
    /// Its words are zero, the hardware walker sees them as zero, and its live count
    /// is zero.
    fn allocate(&self) -> Option<FreshTable>;

    /// Takes back a page from [`allocate`](Self::allocate) that no hardware can reach: it
    /// was never linked, or only in an [`Unwalked`](crate::Unwalked) tree.
    ///
    /// Its words may have been written.
    fn discard(&self, table: FreshTable);

    /// An entry of the tree points at `table` now: the tree owns it.
    fn link(&self, table: FreshTable) -> Mfn {
        table.mfn()
    }

    /// No entry of the tree points at `table` any more; hardware may still walk it.
    ///
    /// The walker puts the page on the record of its edit.
    fn unlink(&self, table: Mfn) -> TablePage {
        TablePage::unlinked(table)
    }

    /// How many tables were [unlinked](Self::unlink) so far, of any tree, or `None` for a
    /// memory that does not count them.
    ///
    /// A [`Path`](crate::Path) trusts it: the number must have grown when `unlink` returns,
    /// as whoever holds the lock of the tree's edits sees it.
    fn unlinked(&self) -> Option<u64> {
        None
    }

    /// How many entries of the page are not zero.
    fn live(&self, table: Mfn) -> u16;

    /// Adds to the count of entries that are not zero.
    fn add_live(&self, table: Mfn, entries: u16);

    /// One entry less is in use; returns how many still are.
    fn drop_live(&self, table: Mfn) -> u16;

    /// So many entries less are in use.
    fn drop_live_by(&self, table: Mfn, entries: u16) {
        for _ in 0..entries {
            self.drop_live(table);
        }
    }
}
