//! Memory that is all mapped, as a hypervisor's direct map is.
//!
//! [`Direct`] has every frame at hand by its number, with the count of entries in use and
//! the references beside it: one bound is checked, and nothing is looked up.

use std::{
    ops::Range,
    sync::atomic::{AtomicBool, AtomicU16, AtomicU64, Ordering},
};

use flush::{FreshTable, Mfn, TablePage};
use spin::mutex::SpinMutex;
use stage2::{Lent, TableMemory};

/// All frames of a machine, and what is known of each.
#[derive(Debug)]
pub(super) struct Direct {
    frames: Box<[[AtomicU64; 512]]>,
    pages: Box<[Page]>,
    free: SpinMutex<Vec<u64>>,
    unlinked: AtomicU64,
}

/// What the hypervisor knows of a frame.
#[derive(Debug, Default)]
struct Page {
    /// References, and from bit 32 on those of them that are of the writable type.
    references: AtomicU64,
    /// Entries in use, if it is a table.
    live: AtomicU16,
    dirty: AtomicBool,
}

impl Direct {
    /// `frames` zeroed frames; frame 0 is never handed out.
    pub(super) fn new(frames: u64) -> Self {
        Self {
            frames: (0..frames).map(|_| [const { AtomicU64::new(0) }; 512]).collect(),
            pages: (0..frames).map(|_| Page::default()).collect(),
            free: SpinMutex::new((1..frames).rev().collect()),
            unlinked: AtomicU64::new(0),
        }
    }

    /// The words of a frame, or `None` if there is no such frame.
    #[inline]
    pub(super) fn words(&self, mfn: Mfn) -> Option<&[AtomicU64; 512]> {
        self.frames.get(mfn.get() as usize)
    }

    #[inline]
    fn word(&self, mfn: Mfn, index: usize) -> Option<&AtomicU64> {
        self.words(mfn).map(|words| &words[index % 512])
    }

    #[inline]
    fn page(&self, mfn: Mfn) -> Option<&Page> {
        self.pages.get(mfn.get() as usize)
    }

    /// A frame of zeroes.
    pub(super) fn take(&self) -> Option<Mfn> {
        let mfn = Mfn::new(self.free.lock().pop()?);
        self.words(mfn)?.iter().for_each(|word| word.store(0, Ordering::Relaxed));
        self.page(mfn)?.live.store(0, Ordering::Relaxed);
        Some(mfn)
    }

    /// Gives a frame back.
    pub(super) fn give(&self, mfn: Mfn) {
        self.free.lock().push(mfn.get());
    }

    /// Counts a page once more, and as writable if `typed`.
    pub(super) fn count(&self, mfn: Mfn, typed: bool) {
        if let Some(page) = self.page(mfn) {
            page.references.fetch_add(one(typed), Ordering::Relaxed);
        }
    }

    /// Counts a page once less, and notes before that it may have been written if somebody
    /// `wrote`; one that nobody counts any more is free.
    ///
    /// # Panics
    /// If nobody counted it so.
    #[inline]
    pub(super) fn discount(&self, mfn: Mfn, typed: bool, wrote: bool) {
        let Some(page) = self.page(mfn) else { return };
        if wrote {
            page.dirty.store(true, Ordering::Relaxed);
        }
        let before = page.references.fetch_sub(one(typed), Ordering::AcqRel);
        let left = before.checked_sub(one(typed)).expect("a page reference was dropped twice");
        if left as u32 == 0 {
            self.give(mfn);
        }
    }

    /// References and writable type references of a page.
    pub(super) fn counts(&self, mfn: Mfn) -> (u32, u32) {
        let references = self.page(mfn).map_or(0, |page| page.references.load(Ordering::Relaxed));
        (references as u32, (references >> 32) as u32)
    }

    /// Notes that a page may have been written.
    #[inline]
    pub(super) fn mark_dirty(&self, mfn: Mfn) {
        if let Some(page) = self.page(mfn) {
            page.dirty.store(true, Ordering::Relaxed);
        }
    }
}

/// One reference as it is counted.
#[inline]
const fn one(typed: bool) -> u64 {
    1 | (typed as u64) << 32
}

impl TableMemory for &Direct {
    #[inline]
    fn read(&self, table: Mfn, index: usize) -> u64 {
        self.word(table, index).map_or(0, |word| word.load(Ordering::Acquire))
    }

    #[inline]
    fn first_in_use(&self, table: Mfn, entries: Range<usize>) -> Option<(usize, u64)> {
        let first = entries.start;
        let words = self.words(table).and_then(|words| words.get(entries))?;
        let words = words.iter().map(|word| word.load(Ordering::Acquire));
        words.zip(first..).find(|(word, _)| *word != 0).map(|(word, index)| (index, word))
    }

    #[inline]
    fn swap(&self, table: Mfn, index: usize, new: u64) -> u64 {
        self.word(table, index).map_or(0, |word| word.swap(new, Ordering::AcqRel))
    }

    #[inline]
    fn compare_exchange(
        &self,
        table: Mfn,
        index: usize,
        current: u64,
        new: u64,
    ) -> Result<(), u64> {
        let Some(word) = self.word(table, index) else { return Err(0) };
        word.compare_exchange(current, new, Ordering::AcqRel, Ordering::Acquire).map(|_| ())
    }

    /// The lock around the tree's edits is held: no other writer but hardware.
    #[inline]
    fn lend(&self, table: Mfn) -> Option<Lent<'_>> {
        Some(Lent { entries: self.words(table)?, live: &self.page(table)?.live })
    }

    fn allocate(&self) -> Option<FreshTable> {
        self.take().map(FreshTable::new)
    }

    fn discard(&self, table: FreshTable) {
        self.give(table.mfn());
    }

    fn unlink(&self, table: Mfn) -> TablePage {
        self.unlinked.fetch_add(1, Ordering::Relaxed);
        TablePage::unlinked(table)
    }

    #[inline]
    fn unlinked(&self) -> Option<u64> {
        Some(self.unlinked.load(Ordering::Relaxed))
    }

    #[inline]
    fn live(&self, table: Mfn) -> u16 {
        self.page(table).map_or(0, |page| page.live.load(Ordering::Relaxed))
    }

    #[inline]
    fn add_live(&self, table: Mfn, entries: u16) {
        if let Some(page) = self.page(table) {
            // The lock around the tree's edits is held: no other writer.
            let live = page.live.load(Ordering::Relaxed).saturating_add(entries);
            page.live.store(live, Ordering::Relaxed);
        }
    }

    #[inline]
    fn drop_live(&self, table: Mfn) -> u16 {
        self.drop_live_by(table, 1);
        self.live(table)
    }

    #[inline]
    fn drop_live_by(&self, table: Mfn, entries: u16) {
        if let Some(page) = self.page(table) {
            let left = page.live.load(Ordering::Relaxed).saturating_sub(entries);
            page.live.store(left, Ordering::Relaxed);
        }
    }
}
