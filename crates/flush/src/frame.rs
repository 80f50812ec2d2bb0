//! Frame numbers, and inclusive runs of them.
//!
//! Every number here counts 4 KiB frames, whatever the page size of the table it
//! comes from. Any `u64` is a frame number; no operation wraps or panics.

use core::fmt;

macro_rules! frame_number {
    ($(#[$doc:meta])* $name:ident) => {
        $(#[$doc])*
        #[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
        #[repr(transparent)]
        pub struct $name(u64);

        impl $name {
            /// The frame with this number, in units of 4 KiB.
            #[must_use]
            #[inline]
            pub const fn new(number: u64) -> Self {
                Self(number)
            }

            /// The number, in units of 4 KiB.
            #[must_use]
            #[inline]
            pub const fn get(self) -> u64 {
                self.0
            }
        }

        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, concat!(stringify!($name), "({:#x})"), self.0)
            }
        }
    };
}

frame_number! {
    /// A guest frame number: what a guest calls a page, the input of its p2m.
    Gfn
}
frame_number! {
    /// A device frame number: what a device calls a page, the input of VT-d tables.
    Dfn
}
frame_number! {
    /// A machine frame number: a page of real memory.
    Mfn
}

impl From<Gfn> for Dfn {
    /// The devices of a translated domain see its guest frame numbers.
    #[inline]
    fn from(gfn: Gfn) -> Self {
        Self(gfn.0)
    }
}

impl From<Dfn> for Gfn {
    /// The devices of a translated domain see its guest frame numbers.
    #[inline]
    fn from(dfn: Dfn) -> Self {
        Self(dfn.0)
    }
}

/// The hypervisor's number of a domain (Xen's domid), not a tag of any hardware.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(transparent)]
pub struct DomainId(u16);

impl DomainId {
    /// The domain with this number.
    #[must_use]
    #[inline]
    pub const fn new(number: u16) -> Self {
        Self(number)
    }

    /// The number.
    #[must_use]
    #[inline]
    pub const fn get(self) -> u16 {
        self.0
    }
}

/// An inclusive run of guest frames: `first..=last`, never empty.
///
/// Inclusive, so that a run can end at the last frame of any space.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Run {
    first: Gfn,
    last: Gfn,
}

impl Run {
    /// Every frame there is.
    pub const ALL: Self = Self { first: Gfn(0), last: Gfn(u64::MAX) };

    /// The run `first..=last`, or `None` if `last` is below `first`.
    #[must_use]
    #[inline]
    pub const fn new(first: Gfn, last: Gfn) -> Option<Self> {
        if first.0 <= last.0 { Some(Self { first, last }) } else { None }
    }

    /// The run of one frame.
    #[must_use]
    #[inline]
    pub const fn single(frame: Gfn) -> Self {
        Self { first: frame, last: frame }
    }

    /// The naturally aligned block of 2^`order` frames that contains `frame`.
    ///
    /// Orders of 64 and above give [`Run::ALL`].
    #[must_use]
    #[inline]
    pub const fn block(frame: Gfn, order: u8) -> Self {
        let mask = match 1u64.checked_shl(order as u32) {
            Some(size) => size - 1,
            None => u64::MAX,
        };
        Self { first: Gfn(frame.0 & !mask), last: Gfn(frame.0 | mask) }
    }

    /// The lowest frame.
    #[must_use]
    #[inline]
    pub const fn first(self) -> Gfn {
        self.first
    }

    /// The highest frame.
    #[must_use]
    #[inline]
    pub const fn last(self) -> Gfn {
        self.last
    }

    /// How many frames; [`Run::ALL`] has one more than it can say and gives `u64::MAX`.
    #[must_use]
    #[inline]
    pub const fn pages(self) -> u64 {
        (self.last.0 - self.first.0).saturating_add(1)
    }

    /// Whether `frame` lies in the run.
    #[must_use]
    #[inline]
    pub const fn contains(self, frame: Gfn) -> bool {
        self.first.0 <= frame.0 && frame.0 <= self.last.0
    }

    /// Whether every frame of `other` lies in the run.
    #[must_use]
    #[inline]
    pub const fn covers(self, other: Self) -> bool {
        self.first.0 <= other.first.0 && other.last.0 <= self.last.0
    }

    /// Whether the runs overlap or are neighbours, so that their hull adds no frame.
    #[must_use]
    #[inline]
    pub const fn touches(self, other: Self) -> bool {
        self.first.0 <= other.last.0.saturating_add(1)
            && other.first.0 <= self.last.0.saturating_add(1)
    }

    /// Whether it is `other`, in one look at both ends.
    #[inline]
    pub(crate) const fn is(self, other: Self) -> bool {
        (self.first.0 ^ other.first.0) | (self.last.0 ^ other.last.0) == 0
    }

    /// Whether it ends before the frame that `next` begins behind, so that they do not touch.
    #[inline]
    pub(crate) const fn is_left_of(self, next: Self) -> bool {
        self.last.0 < next.first.0.saturating_sub(1)
    }

    /// Whether `next` begins where this one ends.
    #[inline]
    pub(crate) const fn is_right_before(self, next: Self) -> bool {
        // No run ends before the first frame.
        next.first.0 != 0 && self.last.0 == next.first.0.saturating_sub(1)
    }

    /// The run from here to the end of `next`, which comes after it.
    #[inline]
    pub(crate) const fn until(self, next: Self) -> Self {
        Self { first: self.first, last: next.last }
    }

    /// The smallest run that contains both.
    #[must_use]
    #[inline]
    pub fn hull(self, other: Self) -> Self {
        Self { first: self.first.min(other.first), last: self.last.max(other.last) }
    }
}

impl fmt::Debug for Run {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Run({:#x}..={:#x})", self.first.0, self.last.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn check_block(frame: u64, order: u8, first: u64, last: u64) {
        let block = Run::block(Gfn(frame), order);
        assert_eq!((block.first().get(), block.last().get()), (first, last));
    }

    #[test]
    fn a_block_is_aligned_and_contains_its_frame_at_every_order() {
        check_block(5, 0, 5, 5);
        check_block(5, 1, 4, 5);
        check_block(0x3ff, 9, 0x200, 0x3ff);
        check_block(u64::MAX, 18, u64::MAX - 0x3ffff, u64::MAX);
        check_block(7, 63, 0, u64::MAX >> 1);
        check_block(7, 64, 0, u64::MAX);
        check_block(7, 255, 0, u64::MAX);
    }

    #[test]
    fn runs_reach_the_last_frame_without_wrapping() {
        let top = Run::single(Gfn(u64::MAX));
        assert_eq!(top.pages(), 1);
        assert!(top.touches(Run::single(Gfn(u64::MAX - 1))));
        assert!(!top.touches(Run::single(Gfn(0))));
        assert_eq!(Run::ALL.pages(), u64::MAX);
        assert_eq!(Run::new(Gfn(2), Gfn(1)), None);
    }
}
