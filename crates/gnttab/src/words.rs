//! Arguments that stay where they are: words of guest memory, lent for one chunk.
//!
//! Holding [`GuestWords`] says that reading and writing them cannot fail. The guest may
//! rewrite them at any moment, so each is read once, and only a status is ever written.

use core::sync::atomic::Ordering;

use crate::{abi::Status, sync::AtomicU64};

/// Consecutive words of guest memory, on one page or on two.
///
/// See [`Domain::with_guest_words`](crate::Domain::with_guest_words).
#[derive(Clone, Copy, Debug)]
pub struct GuestWords<'a> {
    first: &'a [AtomicU64],
    second: &'a [AtomicU64],
}

impl<'a> GuestWords<'a> {
    /// The words of `first`, followed by those of `second`, which is empty if all of them are
    /// on one page.
    #[must_use]
    #[inline]
    pub const fn new(first: &'a [AtomicU64], second: &'a [AtomicU64]) -> Self {
        Self { first, second }
    }

    /// Whether there are `count` words.
    #[inline]
    pub(crate) const fn has(&self, count: usize) -> bool {
        self.first.len().saturating_add(self.second.len()) == count
    }

    /// Reads the words, each of them once, into `copy`.
    #[inline]
    pub(crate) fn read(&self, copy: &mut [u64]) {
        let (front, back) = copy.split_at_mut(self.first.len().min(copy.len()));
        for (copies, words) in [(front, self.first), (back, self.second)] {
            for (copy, word) in copies.iter_mut().zip(words) {
                *copy = word.load(Ordering::Relaxed);
            }
        }
    }

    /// Writes a status at a byte offset that two divides, and nothing beside it.
    #[inline]
    pub(crate) fn write_status(&self, offset: usize, status: Status) {
        let (index, shift) = (offset / 8, offset % 8 * 8);
        let beyond = index.saturating_sub(self.first.len());
        let Some(word) = self.first.get(index).or_else(|| self.second.get(beyond)) else { return };
        let was = (word.load(Ordering::Relaxed) >> shift) as u16;
        let differ = was ^ status.value().cast_unsigned();
        // What the guest writes beside the status meanwhile stays. A guest that writes to the
        // status itself may find anything there.
        if differ != 0 {
            word.fetch_xor(u64::from(differ) << shift, Ordering::Relaxed);
        }
    }
}
