//! Counts of references on pages.
//!
//! [`PageCounts`] says who still holds a page: it is free when the last reference goes.

use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};

use flush::Mfn;

/// References on pages: how many mappings and owners count each.
#[derive(Debug)]
pub struct PageCounts(Vec<PageCount>);

/// The counts of one page.
#[derive(Debug, Default)]
struct PageCount {
    references: AtomicU32,
    writable: AtomicU32,
    dirty: AtomicU64,
    /// Its owner has lost it: every reference is a mapping's.
    lost: AtomicBool,
}

impl PageCounts {
    pub(super) fn new(frames: u64) -> Self {
        Self((0..frames).map(|_| PageCount::default()).collect())
    }

    #[inline]
    fn of(&self, mfn: Mfn) -> &PageCount {
        let index = usize::try_from(mfn.get()).expect("a frame of this machine");
        &self.0[index]
    }

    /// Takes a reference, and a writable type reference if `typed`.
    pub fn take(&self, mfn: Mfn, typed: bool) {
        let PageCount { references, writable, dirty: _, lost } = self.of(mfn);
        if references.fetch_add(1, Ordering::Relaxed) == 0 {
            lost.store(false, Ordering::Relaxed);
        }
        if typed {
            writable.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Drops what [`take`](Self::take) took; `true` if it was the last reference.
    ///
    /// # Panics
    /// If there was none: the crates dropped something twice.
    #[inline]
    pub fn drop_one(&self, mfn: Mfn, typed: bool) -> bool {
        let PageCount { references, writable, .. } = self.of(mfn);
        if typed {
            let before = writable.fetch_sub(1, Ordering::Relaxed);
            assert!(before > 0, "a type reference was dropped twice");
        }
        let before = references.fetch_sub(1, Ordering::Relaxed);
        assert!(before > 0, "a page reference was dropped twice");
        before == 1
    }

    /// Notes that the owner's own reference is about to be dropped.
    pub fn lose(&self, mfn: Mfn) {
        self.of(mfn).lost.store(true, Ordering::Relaxed);
    }

    /// Whether the owner's own reference is gone.
    pub fn is_lost(&self, mfn: Mfn) -> bool {
        self.of(mfn).lost.load(Ordering::Relaxed)
    }

    /// References and writable type references of a page.
    #[inline]
    pub fn get(&self, mfn: Mfn) -> (u32, u32) {
        let PageCount { references, writable, .. } = self.of(mfn);
        (references.load(Ordering::Relaxed), writable.load(Ordering::Relaxed))
    }

    /// Notes that a page may have been written.
    #[inline]
    pub fn mark_dirty(&self, mfn: Mfn) {
        if let Some(count) = usize::try_from(mfn.get()).ok().and_then(|at| self.0.get(at)) {
            count.dirty.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// How often a page was marked dirty.
    pub fn dirty(&self, mfn: Mfn) -> u64 {
        self.of(mfn).dirty.load(Ordering::Relaxed)
    }
}
