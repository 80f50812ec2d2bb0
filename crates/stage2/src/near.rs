//! Pages of one tree that are cleared one after the other, all under one lock.
//!
//! [`Near`] knows the way to the last page, from which it is not far to the next one. [`Shown`]
//! is an entry that shows what it should: looked at, and not changed yet, so that a page that
//! is in two tables can be looked at in both before it goes from either.

use core::{
    marker::PhantomData,
    sync::atomic::{AtomicU16, AtomicU64, Ordering},
};

use flush::{Cleared, Gfn, Gone, Iotlb, Mfn, Records, Run, Shared, Skipped, Tlb};

use crate::entry::{Leaf, Level};
use crate::format::Format;
use crate::memory::{Lent, TableMemory};
use crate::page::{PageError, clear_page};
use crate::path::{NOWHERE, Path};
use crate::tree::Tables;

/// Pages of one tree that are cleared one after the other, all under one lock.
///
/// A path that was kept from pages before leads to the first one, each page to the next.
#[derive(Debug)]
pub struct Near<'p, 'a, F, M> {
    tables: Tables<'a, F, M>,
    path: &'p mut Path,
    /// The block that the table below serves, or [`NOWHERE`].
    block: u64,
    lent: Lent<'a>,
}

/// What the words of some pages are mostly like: all but the frame and the marks of hardware.
#[derive(Clone, Copy, Debug)]
pub struct Likely {
    leaf: Leaf,
    /// The bits of the word that are not to vary.
    same: u64,
    /// What they are.
    word: u64,
}

impl Likely {
    /// Words of leaves like this one; none, if the format has no such leaf. A format that does
    /// not say which bits [vary](Format::varying) has those alone that show the same frame.
    #[must_use]
    #[inline]
    pub fn new(format: &impl Format, leaf: Leaf) -> Self {
        // It never was part of a larger one, so its order is that of a page.
        let leaf = Leaf { origin: Level::PAGE, ..leaf };
        let same = !format.varying();
        match format.leaf(Level::PAGE, leaf) {
            Ok(word) => Self { leaf, same, word: word & same },
            // No word is like that.
            Err(_) => Self { leaf, same: 0, word: 1 },
        }
    }

    /// Whether the word is one of them, and shows this frame.
    #[inline]
    fn is(&self, format: &impl Format, raw: u64, mfn: Mfn) -> bool {
        raw & self.same == self.word && format.like(raw, self.leaf).mfn == mfn
    }
}

impl<'p, 'a, F: Format, M: TableMemory> Near<'p, 'a, F, M> {
    /// Begins at the page that `path` leads to.
    ///
    /// As long as this value exists, the lock of the tree's edits is held and nothing else
    /// edits the tree.
    #[inline]
    pub fn new(tables: Tables<'a, F, M>, path: &'p mut Path) -> Self {
        tables.renew(path);
        static NONE: AtomicU16 = AtomicU16::new(0);
        Self { tables, path, block: NOWHERE, lent: Lent { entries: &[], live: &NONE } }
    }

    /// The tree.
    #[must_use]
    #[inline]
    pub const fn tables(&self) -> Tables<'a, F, M> {
        self.tables
    }

    /// As [`clear_page`], for a page that is mostly as `likely` says and shows `mfn`. Where it
    /// is and does, `expected` is not asked, and must accept it.
    ///
    /// # Errors
    ///
    /// As [`clear_page`].
    #[inline(always)]
    pub fn clear<'id, K: Records>(
        &mut self,
        gfn: Gfn,
        mfn: Mfn,
        skipped: &mut Skipped<'id>,
        likely: &Likely,
        expected: impl FnMut(&Leaf) -> bool,
    ) -> Result<Gone<'id, K>, PageError> {
        match self.clear_likely(gfn, mfn, skipped, likely) {
            Some(gone) => Ok(gone),
            None => clear_page(self.tables, gfn, skipped, expected).map(|(_, gone)| gone),
        }
    }

    #[inline(always)]
    fn clear_likely<'id, K: Records>(
        &mut self,
        gfn: Gfn,
        mfn: Mfn,
        skipped: &mut Skipped<'id>,
        likely: &Likely,
    ) -> Option<Gone<'id, K>> {
        if let Some(shown) = self.shown(gfn, mfn, likely) {
            return Some(shown.clear(skipped));
        }
        let Tables { format, memory, root: _ } = self.tables;
        if self.tables.block(gfn) == self.block {
            return None;
        }
        let (table, index) = self.tables.find_page(gfn, self.path)?;
        let raw = memory.read(table, index);
        if !likely.is(format, raw, mfn) {
            return None;
        }
        memory.compare_exchange(table, index, raw, 0).ok()?;
        memory.drop_live_by(table, 1);
        let order = format.geometry().page_order();
        Some(skipped.leaf(Run::block(gfn, order), order))
    }

    /// The entry of the page at `gfn`, if it is as `likely` says up to the marks of hardware,
    /// and shows `mfn`. Nothing is changed.
    ///
    /// `None` says nothing about the page: [`clear`](Self::clear) looks harder.
    #[inline(always)]
    pub fn shown<K: Records>(
        &mut self,
        gfn: Gfn,
        mfn: Mfn,
        likely: &Likely,
    ) -> Option<Shown<'_, K>> {
        let Tables { format, memory, root: _ } = self.tables;
        let block = self.tables.block(gfn);
        if block != self.block {
            let (table, _) = self.tables.find_page(gfn, self.path)?;
            self.lent = memory.lend(table)?;
            self.block = block;
        }
        let order = format.geometry().page_order();
        let Lent { entries, live } = self.lent;
        let entry = entries.get(format.geometry().index(order, gfn))?;
        let shown =
            Shown { entry, live, span: Run::block(gfn, order), order, walkers: PhantomData };
        likely.is(format, entry.load(Ordering::Relaxed), mfn).then_some(shown)
    }
}

/// An entry that shows what it should, under the lock of its tree.
///
/// Nothing was changed yet: it can be dropped. As long as it exists, no other page is looked at.
#[derive(Debug)]
#[must_use = "the page is still mapped"]
pub struct Shown<'a, K> {
    entry: &'a AtomicU64,
    live: &'a AtomicU16,
    span: Run,
    order: u8,
    walkers: PhantomData<fn() -> K>,
}

impl<K: Records> Shown<'_, K> {
    /// Clears it, and records that.
    #[inline(always)]
    pub fn clear<'id>(self, skipped: &mut Skipped<'id>) -> Gone<'id, K> {
        let gone = skipped.leaf::<K>(self.span, self.order);
        self.empty();
        gone
    }

    /// Only together with a record of it: nothing comes between the two.
    #[inline(always)]
    fn empty(self) {
        self.entry.store(0, Ordering::Relaxed);
        let live = self.live.load(Ordering::Relaxed);
        self.live.store(live.saturating_sub(1), Ordering::Relaxed);
    }
}

impl Shown<'_, Tlb> {
    /// Clears a page of the CPUs' table and of the devices', and records it once for both.
    #[inline(always)]
    pub fn clear_with<'id>(
        self,
        device: Shown<'_, Iotlb>,
        skipped: &mut Skipped<'id>,
    ) -> Cleared<'id> {
        if (self.span, self.order) != (device.span, device.order) {
            let cpu = self.clear(skipped);
            return cpu.with(&device.clear(skipped));
        }
        let (span, order) = (self.span, self.order);
        device.empty();
        self.empty();
        skipped.leaf::<Shared>(span, order).into()
    }
}

/// As [`Near::clear`], for one page. `likely` is the leaf that is mostly there.
///
/// # Errors
///
/// As [`clear_page`].
#[inline(always)]
pub fn clear_page_near<'id, K: Records, F: Format, M: TableMemory>(
    tables: Tables<'_, F, M>,
    path: &mut Path,
    gfn: Gfn,
    skipped: &mut Skipped<'id>,
    likely: Leaf,
    expected: impl FnMut(&Leaf) -> bool,
) -> Result<Gone<'id, K>, PageError> {
    let like = Likely::new(tables.format, likely);
    Near::new(tables, path).clear(gfn, likely.mfn, skipped, &like, expected)
}
