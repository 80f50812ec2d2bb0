//! Byte addresses: of memory as the processor sees it, and as a device sees it.
//!
//! Holding a `PhysicalAddress` tells you nothing about what is there; holding a
//! `BusAddress` tells you that a device may be given it, and that an IOMMU may stand
//! between it and memory.

use core::fmt;

use flush::{Dfn, Mfn};

/// Bytes in a frame.
pub const FRAME_BYTES: u64 = 4096;

/// A byte address of real memory or of a device's registers.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PhysicalAddress(u64);

impl PhysicalAddress {
    /// The address of this byte.
    #[must_use]
    pub const fn new(byte: u64) -> Self {
        Self(byte)
    }

    /// The byte's number.
    #[must_use]
    pub const fn get(self) -> u64 {
        self.0
    }

    /// The address `bytes` further on, or `None` past the end of the space.
    #[must_use]
    pub fn checked_add(self, bytes: u64) -> Option<Self> {
        self.0.checked_add(bytes).map(Self)
    }

    /// The frame this byte lies in.
    #[must_use]
    pub const fn frame(self) -> Mfn {
        Mfn::new(self.0 / FRAME_BYTES)
    }

    /// The first byte of a frame, or `None` if a byte address cannot name it.
    #[must_use]
    pub fn of_frame(frame: Mfn) -> Option<Self> {
        frame.get().checked_mul(FRAME_BYTES).map(Self)
    }
}

impl fmt::Debug for PhysicalAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "PhysicalAddress({:#x})", self.0)
    }
}

/// A byte address as a device puts it on the bus, before any IOMMU.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct BusAddress(u64);

impl BusAddress {
    /// The address of this byte on the bus.
    #[must_use]
    pub const fn new(byte: u64) -> Self {
        Self(byte)
    }

    /// The byte's number.
    #[must_use]
    pub const fn get(self) -> u64 {
        self.0
    }

    /// The address `bytes` further on, or `None` past the end of the space.
    #[must_use]
    pub fn checked_add(self, bytes: u64) -> Option<Self> {
        self.0.checked_add(bytes).map(Self)
    }

    /// The device frame this byte lies in: the input of the IOMMU's tables.
    #[must_use]
    pub const fn frame(self) -> Dfn {
        Dfn::new(self.0 / FRAME_BYTES)
    }

    /// The distance from the start of its frame, in bytes, `0..4096`.
    #[must_use]
    pub const fn offset(self) -> u64 {
        self.0 % FRAME_BYTES
    }

    /// The first byte of a device frame, or `None` if a byte address cannot name it.
    #[must_use]
    pub fn of_frame(frame: Dfn) -> Option<Self> {
        frame.get().checked_mul(FRAME_BYTES).map(Self)
    }

    /// The first byte of real memory's frame, for a device that no IOMMU translates.
    ///
    /// `None` if a byte address cannot name it.
    #[must_use]
    pub fn untranslated(frame: Mfn) -> Option<Self> {
        frame.get().checked_mul(FRAME_BYTES).map(Self)
    }
}

impl fmt::Debug for BusAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "BusAddress({:#x})", self.0)
    }
}

/// A stretch of physical memory: a first byte and a length, which may be zero.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Extent {
    /// The first byte.
    pub start: PhysicalAddress,
    /// How many bytes.
    pub length: u64,
}

/// Frames `first..=last`.
pub type FrameRange = (Mfn, Mfn);

impl Extent {
    /// The last byte, or `None` if there is none or the extent leaves the space.
    fn last(self) -> Option<u64> {
        self.start.0.checked_add(self.length.checked_sub(1)?)
    }

    /// The frames that lie wholly inside: what may be used if the extent is usable.
    #[must_use]
    pub fn frames_inside(self) -> Option<FrameRange> {
        let first = self.start.0.div_ceil(FRAME_BYTES);
        let after = match self.last()?.checked_add(1) {
            Some(end) => end / FRAME_BYTES,
            None => u64::MAX / FRAME_BYTES + 1,
        };
        let last = after.checked_sub(1)?;
        (first <= last).then_some((Mfn::new(first), Mfn::new(last)))
    }

    /// The frames that share a byte with it: what must be left alone if it is in use.
    #[must_use]
    pub fn frames_touched(self) -> Option<FrameRange> {
        let last = self.last()? / FRAME_BYTES;
        Some((self.start.frame(), Mfn::new(last)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The frames inside and the frames touched of one extent, as plain numbers.
    #[track_caller]
    fn check(start: u64, length: u64, inside: Option<(u64, u64)>, touched: Option<(u64, u64)>) {
        let extent = Extent { start: PhysicalAddress::new(start), length };
        let numbers = |range: Option<FrameRange>| range.map(|(a, b)| (a.get(), b.get()));
        assert_eq!(numbers(extent.frames_inside()), inside, "inside");
        assert_eq!(numbers(extent.frames_touched()), touched, "touched");
    }

    #[test]
    fn usable_memory_rounds_inward_and_memory_in_use_rounds_outward() {
        check(0, 0, None, None);
        check(0, 1, None, Some((0, 0)));
        check(0, 4096, Some((0, 0)), Some((0, 0)));
        check(1, 4096, None, Some((0, 1)));
        check(1, 8191, Some((1, 1)), Some((0, 1)));
        check(4095, 4098, Some((1, 1)), Some((0, 2)));
        check(0x1000, 0x3000, Some((1, 3)), Some((1, 3)));
    }

    #[test]
    fn an_extent_at_the_top_of_the_space_neither_wraps_nor_panics() {
        let top = u64::MAX / FRAME_BYTES;
        check(u64::MAX - 4095, 4096, Some((top, top)), Some((top, top)));
        check(u64::MAX, 1, None, Some((top, top)));
        check(u64::MAX, 2, None, None);
        check(1, u64::MAX, Some((1, top)), Some((0, top)));
        check(2, u64::MAX, None, None);
    }

    #[test]
    fn a_frame_that_no_byte_address_can_name_is_refused() {
        assert_eq!(BusAddress::of_frame(Dfn::new(1 << 52)), None);
        assert_eq!(BusAddress::untranslated(Mfn::new(1 << 52)), None);
        assert_eq!(PhysicalAddress::of_frame(Mfn::new(1 << 52)), None);
        let top = BusAddress::of_frame(Dfn::new((1 << 52) - 1)).map(BusAddress::get);
        assert_eq!(top, Some(u64::MAX - 4095));
    }
}
