//! What the hypervisor knows of a grant in use: frame, holder, pins.
//!
//! An [`ActiveEntry`] exists for every reference of a table, in pages of
//! [`ACTIVE_PER_PAGE`]. The guest cannot reach it: while the grant is mapped, the frame
//! written here is the truth, whatever the granter does to the shared entry. A copy that
//! finds it unmapped reads the shared entry and holds its page by itself.

use flush::{DomainId, Mfn};

/// Active entries in one page of storage.
pub const ACTIVE_PER_PAGE: usize = 256;

/// What a pin is for; each use has a counter of its own, at this bit.
///
/// Reading is 8 bits above writing, and a copy 16 above a mapping.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Use(u32);

impl Use {
    /// The use whose counter is at this bit: 0, 8, 16 or 24.
    #[inline]
    pub(crate) const fn at(bit: u32) -> Self {
        Self(bit & 24)
    }

    const fn shift(self) -> u32 {
        self.0
    }
}

/// Four counters of 8 bits: host write, host read, copy write, copy read.
///
/// A translated caller's devices follow its CPU mappings, so they need no counters. Each
/// counts to 128. Copies count apart: only a mapping makes the active entry's frame the
/// truth.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Pins(u32);

/// Counters that allow writing: host write and copy write.
const WRITABLE: u32 = 0x00ff_00ff;
/// Counters of mappings.
const MAPPED: u32 = 0xffff;
/// The bit of a counter that refuses further pins.
const REFUSED: u32 = 0x80;

impl Pins {
    /// One more, or `None` when 128 are held.
    pub(crate) const fn add(self, pin: Use) -> Option<Self> {
        if self.0 & (REFUSED << pin.shift()) != 0 {
            return None;
        }
        match self.0.checked_add(1 << pin.shift()) {
            Some(sum) => Some(Self(sum)),
            None => None,
        }
    }

    /// Whether there is this one and no other.
    #[inline]
    pub(crate) const fn is_last(self, pin: Use) -> bool {
        self.0 == 1 << pin.shift()
    }

    /// One less; a counter of 0 stays 0.
    #[inline]
    pub(crate) const fn remove(self, pin: Use) -> Self {
        if self.count(pin) == 0 { self } else { Self(self.0 - (1 << pin.shift())) }
    }

    pub(crate) const fn count(self, pin: Use) -> u8 {
        (self.0 >> pin.shift()) as u8
    }

    pub(crate) const fn is_empty(self) -> bool {
        self.0 == 0
    }

    /// Whether any holder may write.
    pub(crate) const fn writable(self) -> bool {
        self.0 & WRITABLE != 0
    }

    /// Whether there is a mapping.
    pub(crate) const fn mapped(self) -> bool {
        self.0 & MAPPED != 0
    }

    /// Whether there is a mapping that may write.
    pub(crate) const fn mapped_writable(self) -> bool {
        self.0 & MAPPED & WRITABLE != 0
    }
}

/// The hypervisor's own record of one grant reference.
///
/// Embedders only provide room for it: a new page is full of [`ActiveEntry::IDLE`].
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct ActiveEntry {
    pub(crate) mfn: Mfn,
    pub(crate) pins: Pins,
    pub(crate) holder: DomainId,
    /// The page of a domain's own grant has left its number, for as long as it is mapped.
    pub(crate) moved: bool,
}

impl ActiveEntry {
    /// A grant that nobody uses.
    pub const IDLE: Self =
        Self { mfn: Mfn::new(0), pins: Pins(0), holder: DomainId::new(0), moved: false };
}

const _: () = assert!(size_of::<[ActiveEntry; ACTIVE_PER_PAGE]>() == 4096);
