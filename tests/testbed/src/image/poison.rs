//! Frames filled with a word that no device of this testbed writes.
//!
//! Whoever changed a frame shows in its words, allocated or not.

use core::sync::atomic::{AtomicU64, Ordering};

use flush::Mfn;
use testbed::failure::{Context, Failure};

use crate::memory::{self, Words};

/// The word.
pub(crate) const POISON: u64 = 0xdead_beef_0bad_f00d;

/// Fill a frame with poison.
///
/// # Errors
/// If it is not a managed frame.
pub(crate) fn fill(frame: Mfn) -> Result<&'static Words, Failure> {
    let words = memory::words(frame).context("words of a frame")?;
    for word in words {
        word.store(POISON, Ordering::Relaxed);
    }
    Ok(words)
}

/// Whether the word is as [`fill`] left it.
pub(crate) fn is_left(word: &AtomicU64) -> bool {
    word.load(Ordering::Relaxed) == POISON
}
