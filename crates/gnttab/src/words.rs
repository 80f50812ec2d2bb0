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

    /// Writes statuses to elements of so many words, at a byte offset in each that two
    /// divides, and nothing beside them.
    #[inline]
    pub(crate) fn write_statuses(&self, statuses: &[Status], words: usize, offset: usize) {
        let (index, shift) = (offset / 8, offset % 8 * 8);
        let mut statuses = statuses.iter();
        let elements = self.first.chunks_exact(words);
        let begun = elements.remainder().len();
        for (element, status) in elements.zip(&mut statuses) {
            if let Some(word) = element.get(index) {
                write_status(word, shift, *status);
            }
        }
        // The first of these may have begun on the first page.
        let places = (index..).step_by(words);
        for (place, status) in places.zip(statuses) {
            let word = match place.checked_sub(begun) {
                None => self.first.get((self.first.len() - begun).saturating_add(place)),
                Some(place) => self.second.get(place),
            };
            if let Some(word) = word {
                write_status(word, shift, *status);
            }
        }
    }
}

/// Writes a status to a word from the bit `shift` on.
#[inline]
fn write_status(word: &AtomicU64, shift: usize, status: Status) {
    let was = (word.load(Ordering::Relaxed) >> shift) as u16;
    let differ = was ^ status.value().cast_unsigned();
    // What the guest writes beside the status meanwhile stays. A guest that writes to the
    // status itself may find anything there.
    if differ != 0 {
        word.fetch_xor(u64::from(differ) << shift, Ordering::Relaxed);
    }
}
