//! Frames for tables, the same for every crate.
//!
//! A frame that is given back is kept for the next one, so that no crate pays for the
//! heap or for a page fault, and each one zeroes a frame once, when it gets it.

use std::cell::RefCell;
use std::sync::atomic::AtomicU64;

/// One page of memory, aligned as one.
#[repr(C, align(4096))]
pub(crate) struct Frame(pub(crate) [AtomicU64; 512]);

thread_local! {
    static FREE: RefCell<Vec<Box<Frame>>> = const { RefCell::new(Vec::new()) };
}

impl Frame {
    /// A frame with anything in it.
    pub(crate) fn take() -> Box<Self> {
        let used = FREE.with_borrow_mut(Vec::pop);
        used.unwrap_or_else(|| Box::new(Self([const { AtomicU64::new(0) }; 512])))
    }

    /// A frame of zeroes.
    pub(crate) fn take_zeroed() -> Box<Self> {
        let mut frame = Self::take();
        frame.0 = [const { AtomicU64::new(0) }; 512];
        frame
    }

    /// Gives a frame back.
    pub(crate) fn give(frame: Box<Self>) {
        FREE.with_borrow_mut(|free| free.push(frame));
    }
}
