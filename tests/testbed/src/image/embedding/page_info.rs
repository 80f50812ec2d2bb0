//! What the hypervisor knows of each frame: who counts it, and its use as a table.
//!
//! A frame is given back to the allocator when its last reference is dropped. The
//! counts of a page table are edited under the lock of its tree.

use core::sync::atomic::{AtomicBool, AtomicU16, Ordering};

use flush::Mfn;

use crate::memory::FRAME_LIMIT;

/// The books of one frame.
pub(crate) struct PageInfo {
    /// Owners and mappings.
    references: AtomicU16,
    /// Of these, the writable ones.
    writable: AtomicU16,
    /// A writable mapping has ended.
    dirty: AtomicBool,
    /// Entries in use, if the frame is a page table.
    pub(crate) live: AtomicU16,
}

static BOOKS: [PageInfo; FRAME_LIMIT] = [const { PageInfo::new() }; FRAME_LIMIT];

/// A counter is at its limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct TooMany;

impl PageInfo {
    const fn new() -> Self {
        Self {
            references: AtomicU16::new(0),
            writable: AtomicU16::new(0),
            dirty: AtomicBool::new(false),
            live: AtomicU16::new(0),
        }
    }

    /// The books of `frame`, if memory can have such a frame.
    pub(crate) fn of(frame: Mfn) -> Option<&'static Self> {
        BOOKS.get(usize::try_from(frame.get()).ok()?)
    }

    /// Take a reference, and a writable type reference if `typed`.
    ///
    /// # Errors
    /// [`TooMany`]; then none is taken.
    pub(crate) fn take(&self, typed: bool) -> Result<(), TooMany> {
        add(&self.references)?;
        if typed && add(&self.writable).is_err() {
            subtract(&self.references);
            return Err(TooMany);
        }
        Ok(())
    }

    /// Drop what [`take`](Self::take) took; whether it was the last reference.
    pub(crate) fn drop_one(&self, typed: bool) -> bool {
        if typed {
            subtract(&self.writable);
        }
        subtract(&self.references) == 0
    }

    /// Note that the page may have been written.
    pub(crate) fn mark_dirty(&self) {
        self.dirty.store(true, Ordering::Relaxed);
    }

    /// References, and those of them that are writable.
    pub(crate) fn counts(&self) -> (u16, u16) {
        (self.references.load(Ordering::Relaxed), self.writable.load(Ordering::Relaxed))
    }

    /// Take the dirty mark away; whether there was one.
    pub(crate) fn take_dirty(&self) -> bool {
        self.dirty.swap(false, Ordering::Relaxed)
    }
}

fn add(counter: &AtomicU16) -> Result<(), TooMany> {
    let more = counter.fetch_update(Ordering::AcqRel, Ordering::Relaxed, |now| now.checked_add(1));
    more.map(|_| ()).map_err(|_| TooMany)
}

/// What is left. Going below zero means that something was dropped twice: such a page may
/// be in two places at once, so nothing goes on from there.
fn subtract(counter: &AtomicU16) -> u16 {
    let before = counter.fetch_sub(1, Ordering::AcqRel);
    assert!(before != 0, "a reference was dropped twice");
    before - 1
}
