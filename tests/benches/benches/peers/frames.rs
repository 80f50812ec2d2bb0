//! Frames for tables: the same ones for every crate.
//!
//! A frame that is given back is the next one to be taken, so that no crate pays for the
//! heap or for a page fault, and each one zeroes a frame once, when it gets it.

// UNSAFETY: a frame is filled with zeroes in one go, as the other crates do.
#![expect(unsafe_code)]

use std::cell::RefCell;
use std::sync::atomic::AtomicU64;

/// How many there are: more than the tables of one round need.
pub(crate) const FRAMES: usize = 1024;

/// One page of memory, aligned as one.
#[repr(C, align(4096))]
pub(crate) struct Frame(pub(crate) [AtomicU64; 512]);

/// All frames, and which of them are free.
struct Pool {
    all: &'static [Frame],
    free: RefCell<Vec<usize>>,
}

thread_local! {
    static POOL: Pool = Pool {
        all: Vec::leak((0..FRAMES).map(|_| Frame([const { AtomicU64::new(0) }; 512])).collect()),
        free: RefCell::new((0..FRAMES).rev().collect()),
    };
}

/// All frames of this thread, by their numbers.
pub(crate) fn all() -> &'static [Frame] {
    POOL.with(|pool| pool.all)
}

/// How many frames are taken.
pub(crate) fn taken() -> usize {
    POOL.with(|pool| pool.all.len() - pool.free.borrow().len())
}

/// The number of a frame with anything in it.
#[inline]
pub(crate) fn take() -> Option<usize> {
    POOL.with(|pool| pool.free.borrow_mut().pop())
}

/// Gives a frame back.
#[inline]
pub(crate) fn give(number: usize) {
    POOL.with(|pool| pool.free.borrow_mut().push(number));
}

impl Frame {
    /// A frame with anything in it.
    pub(crate) fn take() -> Option<&'static Self> {
        POOL.with(|pool| pool.all.get(pool.free.borrow_mut().pop()?))
    }

    /// The frame at this address.
    pub(crate) fn at(address: usize) -> &'static Self {
        let frames = all();
        let first = frames.as_ptr().expose_provenance();
        &frames[address.wrapping_sub(first) / size_of::<Self>()]
    }

    /// Gives a frame back.
    pub(crate) fn give(&'static self) {
        let first = all().as_ptr().expose_provenance();
        give((self.address() - first) / size_of::<Self>());
    }

    /// Where it is.
    pub(crate) fn address(&'static self) -> usize {
        std::ptr::from_ref(self).expose_provenance()
    }

    /// Makes it a frame of zeroes.
    #[inline]
    pub(crate) fn zero(&self) {
        // SAFETY: atomics may be written through a shared reference, and zero bytes are
        // valid ones. Only this thread has the frame, and no other access goes on meanwhile.
        unsafe { self.0.as_ptr().cast_mut().write_bytes(0, self.0.len()) };
    }
}
