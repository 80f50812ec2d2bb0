//! Atomics: the real ones, or the model checker's when the tests ask for it.
//!
//! Whatever several CPUs write is built from here, so that `--cfg loom` checks the
//! code that ships and not a copy of it.

#[cfg(not(all(test, loom)))]
pub(crate) use core::sync::atomic::{AtomicBool, AtomicU64, fence};
#[cfg(all(test, loom))]
pub(crate) use loom::sync::atomic::{AtomicBool, AtomicU64, fence};

/// An array of equal parts, in a constant wherever the parts can be.
macro_rules! array_of {
    ($make:expr) => {{
        #[cfg(not(all(test, loom)))]
        let array = [const { $make }; _];
        #[cfg(all(test, loom))]
        let array = core::array::from_fn(|_| $make);
        array
    }};
}

/// A constructor that is `const`, save where the model checker's atomics forbid it.
macro_rules! const_constructor {
    ($(#[$note:meta])* $visible:vis const fn $($rest:tt)*) => {
        $(#[$note])*
        #[cfg(not(all(test, loom)))]
        $visible const fn $($rest)*

        $(#[$note])*
        #[cfg(all(test, loom))]
        $visible fn $($rest)*
    };
}

pub(crate) use {array_of, const_constructor};
