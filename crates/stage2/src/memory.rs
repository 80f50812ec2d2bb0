//! The memory that tables live in, as the walker sees it.
//!
//! An embedder implements [`TableMemory`] once, over its direct map. Everything the
//! walker does to memory goes through it, so a test can count, delay or refuse.

use core::{
    ops::Range,
    sync::atomic::{AtomicU16, AtomicU64, Ordering},
};

use flush::{FreshTable, Mfn, TablePage};

/// Whether anybody looks at what hardware had marked in leaves that go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Marks {
    /// No mark that is set until a leaf is gone may be missed.
    Wanted,
    /// [`accessed`](crate::Leaf::accessed) and [`dirty`](crate::Leaf::dirty) of a leaf that goes
    /// may miss one that is set as it goes.
    Unwanted,
}

/// A table that [`TableMemory::lend`] lends to whoever holds the lock of the tree's edits.
#[derive(Clone, Copy, Debug)]
pub struct Lent<'m> {
    /// Its entries.
    pub entries: &'m [AtomicU64],
    /// How many of them are not zero: what [`TableMemory::live`] says.
    pub live: &'m AtomicU16,
}

impl<'m> Lent<'m> {
    /// So many entries from `index` on.
    #[inline]
    fn part(self, index: usize, count: usize) -> Option<&'m [AtomicU64]> {
        self.entries.get(index..)?.get(..count)
    }
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
///
/// Because of that lock nobody but hardware writes an entry during an edit. The edits provided
/// here are made of the required ones, in atomic steps, unless the table is
/// [lent](Self::lend): then they take what suffices.
///
/// | edit | what hardware may write meanwhile | what suffices |
/// |---|---|---|
/// | [`swap`](Self::swap), [`compare_exchange`](Self::compare_exchange) | marks | one atomic step |
/// | [`take_out`](Self::take_out), marks wanted | marks | one atomic step an entry |
/// | [`take_out`](Self::take_out), none wanted | marks that nobody looks at | a load, then a store |
/// | [`Near::clear`](crate::Near::clear) | marks that nobody looks at | a load, then a store |
/// | [`put_in`](Self::put_in) | nothing: it marks no entry that is zero | a load, then a store |
/// | [`fill`](Self::fill) | nothing: it does not see the page | a store |
///
/// Each store is one of a whole word. Hardware sets its marks by an atomic step on the word
/// that it walked by: where that comes first, the store wipes the mark out, and where the store
/// does, the step finds another word and leaves it alone. Who has entries that are written
/// without the lock lends nothing.
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

    /// Empties the entries from `index` on, all in the page; `taken` becomes what they were.
    /// A flush that begins after the return must find the hardware walker reading zero.
    ///
    /// Where `marks` are wanted, `taken` must not miss one that hardware sets meanwhile; where
    /// they are not, memory may look first and then store zero, in two steps.
    #[inline]
    fn take_out(&self, table: Mfn, index: usize, taken: &mut [u64], marks: Marks) {
        let lent = if marks == Marks::Unwanted { self.lend(table) } else { None };
        if let Some(entries) = lent.and_then(|lent| lent.part(index, taken.len())) {
            for (taken, entry) in taken.iter_mut().zip(entries) {
                *taken = entry.load(Ordering::Relaxed);
                entry.store(0, Ordering::Release);
            }
        } else {
            for (taken, index) in taken.iter_mut().zip(index..) {
                *taken = self.swap(table, index, 0);
            }
        }
    }

    /// Puts `words`, none of them zero, into the entries from `index` on, all in the page, and
    /// stops before the first entry that is not zero. Returns how many it put in; the hardware
    /// walker sees those on return.
    ///
    /// Nobody changes an entry that is zero meanwhile, nor does hardware. So memory may look
    /// first and then store, in two steps.
    #[inline]
    fn put_in(&self, table: Mfn, index: usize, words: &[u64]) -> usize {
        if let Some(entries) = self.lend(table).and_then(|lent| lent.part(index, words.len())) {
            let mut count = 0;
            for (entry, word) in entries.iter().zip(words) {
                if entry.load(Ordering::Relaxed) != 0 {
                    break;
                }
                entry.store(*word, Ordering::Release);
                count += 1;
            }
            count
        } else {
            let put = |(word, index): (&u64, usize)| self.compare_exchange(table, index, 0, *word);
            words.iter().zip(index..).take_while(|place| put(*place).is_ok()).count()
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

    /// A table as it is, linked or fresh, for memory in which an entry may be changed by a look
    /// at it and a store after that: two steps, where an exchange costs more.
    ///
    /// Nobody but hardware changes such an entry meanwhile, and hardware sets marks alone, that
    /// nobody wants of a page that goes. The hardware walker must see the store, at the latest
    /// when a flush begins that comes after it. Memory that has more to do than a store lends
    /// nothing.
    #[inline]
    fn lend(&self, _table: Mfn) -> Option<Lent<'_>> {
        None
    }

    /// A page for a table, or `None` if there is none to be had now.
    ///
    /// Its words are zero, the hardware walker sees them as zero, and its live count
    /// is zero.
    fn allocate(&self) -> Option<FreshTable>;

    /// Writes `words` into the entries of a fresh page from `index` on, all in the page. The
    /// hardware walker sees them on return, should the page be linked.
    ///
    /// Nobody else sees a fresh page, so memory may just store.
    #[inline]
    fn fill(&self, table: &FreshTable, index: usize, words: &[u64]) {
        let lent = self.lend(table.mfn());
        if let Some(entries) = lent.and_then(|lent| lent.part(index, words.len())) {
            for (entry, word) in entries.iter().zip(words) {
                entry.store(*word, Ordering::Release);
            }
        } else {
            for (word, index) in words.iter().zip(index..) {
                self.swap(table.mfn(), index, *word);
            }
        }
    }

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
