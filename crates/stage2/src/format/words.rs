//! What the x86 formats share: 512 words a page, the frame in bits 12 to 51.

use flush::Mfn;

use super::Unencodable;
use crate::entry::{Leaf, Level, Tag};

/// Where the x86 formats keep the embedder's tag: hardware ignores bits 52 to 56.
const TAG_SHIFT: u32 = 52;

/// Above it, the level that a leaf was split from.
const ORIGIN_SHIFT: u32 = TAG_SHIFT + Tag::BITS;

/// The widest physical address any of the manuals allows.
pub(super) const MAX_PHYSICAL_BITS: u8 = 52;

/// The frame bits of a word, and which of them this machine has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Frames {
    /// Every frame bit up to the physical width.
    valid: u64,
    /// The frame bits above it, which must be zero.
    beyond: u64,
}

/// Bits 12 to 51.
const FIELD: u64 = ((1 << MAX_PHYSICAL_BITS) - 1) & !0xfff;

impl Frames {
    /// `bits` wide physical addresses; more than 52 or less than 32 are taken as that.
    pub(super) const fn new(bits: u8) -> Self {
        let bits = if bits > MAX_PHYSICAL_BITS {
            MAX_PHYSICAL_BITS
        } else if bits < 32 {
            32
        } else {
            bits
        };
        let valid = ((1 << bits) - 1) & !0xfff;
        Self { valid, beyond: FIELD & !valid }
    }

    /// The address bits of a word whose leaf or table spans `level`.
    #[inline]
    pub(super) fn encode(self, mfn: Mfn, level: Level) -> Result<u64, Unencodable> {
        let number = mfn.get();
        if number > self.valid >> 12 || (number << 12) & below(level) != 0 {
            return Err(Unencodable::Frame);
        }
        Ok(number << 12)
    }

    /// The frame in a word.
    #[inline]
    pub(super) const fn decode(self, raw: u64) -> Mfn {
        Mfn::new((raw & self.valid) >> 12)
    }

    /// The bits of the frame in a word.
    #[inline]
    pub(super) const fn bits(self) -> u64 {
        self.valid
    }

    /// The frame in the word of a leaf at `level`, whatever its low bits are used for.
    #[inline]
    pub(super) const fn decode_leaf(self, raw: u64, level: Level) -> Mfn {
        Mfn::new((raw & self.valid & !below(level)) >> 12)
    }

    /// Whether the word names a frame that this machine cannot have.
    #[inline]
    pub(super) const fn beyond(self, raw: u64) -> bool {
        raw & self.beyond != 0
    }

    /// The table in a word, if the bits of `mask` are as in `value` and the frame is one
    /// that this machine can have.
    #[inline]
    pub(super) const fn table(self, raw: u64, mask: u64, value: u64) -> Option<Mfn> {
        if raw & (mask | self.beyond) == value { Some(self.decode(raw)) } else { None }
    }
}

/// The frame bits that a leaf at `level` must leave zero.
#[inline]
pub(super) const fn below(level: Level) -> u64 {
    match level {
        Level::PAGE => 0,
        _ => ((1 << (12 + 9 * level.get())) - 1) & !0xfff,
    }
}

/// The tag in a word.
#[inline]
pub(super) const fn tag(raw: u64) -> Tag {
    Tag::from_low_bits(raw >> TAG_SHIFT)
}

/// The level that the leaf in a word was split from.
#[inline]
pub(super) const fn origin(raw: u64) -> Level {
    Level::from_low_bits(raw >> ORIGIN_SHIFT)
}

/// The bits of a leaf's word that only software looks at.
#[inline]
pub(super) const fn software_word(leaf: &Leaf) -> Result<u64, Unencodable> {
    match origin_word(leaf.origin, ORIGIN_SHIFT) {
        Ok(origin) => Ok((leaf.tag.get() as u64) << TAG_SHIFT | origin),
        Err(error) => Err(error),
    }
}

/// The two bits for an origin, at `shift`. No format has leaves above level 3.
#[inline]
pub(super) const fn origin_word(origin: Level, shift: u32) -> Result<u64, Unencodable> {
    if origin.get() > Level::THREE.get() {
        return Err(Unencodable::Level);
    }
    Ok((origin.get() as u64) << shift)
}

/// `bit` if `set`.
#[inline]
pub(super) const fn flag(set: bool, bit: u64) -> u64 {
    if set { bit } else { 0 }
}
