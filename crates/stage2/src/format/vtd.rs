//! VT-d second-stage tables, where a DMA domain has its own.
//!
//! After the Intel VT-d specification, revision 5.10, section 9.8, as legacy mode uses
//! them. Such a table knows reads and writes only, and no memory types: what a leaf
//! allows is a mix of [`Access::READ`] and [`Access::WRITE`], writing alone included,
//! and every leaf says [`MemoryType::WriteBack`].
//!
//! An entry that is not present, or that uses a reserved bit, is not cached unless the
//! unit runs in caching mode (6.1, 6.2.4.1, 6.2.5); that mode is why [`Record::added`] exists.
//!
//! [`Record::added`]: crate::Record::added

use flush::Mfn;

use super::words::{Frames, MAX_PHYSICAL_BITS, below, flag, origin, software_word, tag};
use super::{Format, Geometry, Unencodable};
use crate::entry::{Access, Entry, Leaf, Level, MemoryType};

/// Bits 0 and 1: read, write, in the order of [`Access::bits`]. Neither: not present.
const RIGHTS: u64 = 3;
/// Bit 7 above level 0: the entry is a leaf.
const LARGE: u64 = 1 << 7;
/// Bit 8 of a leaf, where accessed and dirty bits are enabled: it was used.
const ACCESSED: u64 = 1 << 8;
/// Bit 9 of a leaf, where accessed and dirty bits are enabled: it was written through.
const DIRTY: u64 = 1 << 9;

/// How many levels a second-stage table has: a bit of CAP.SAGAW (11.4.2).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum VtdLevels {
    /// 39-bit device addresses.
    Three,
    /// 48-bit device addresses.
    Four,
    /// 57-bit device addresses.
    Five,
}

/// The second-stage format, as far as the units of a domain have it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Vtd {
    geometry: Geometry,
    largest: Level,
    frames: Frames,
}

impl Vtd {
    /// Leaves up to 1 GiB, 52-bit physical addresses.
    #[must_use]
    pub const fn new(levels: VtdLevels) -> Self {
        let levels = match levels {
            VtdLevels::Three => 3,
            VtdLevels::Four => 4,
            VtdLevels::Five => 5,
        };
        Self {
            geometry: Geometry::x86(levels),
            largest: Level::TWO,
            frames: Frames::new(MAX_PHYSICAL_BITS),
        }
    }

    /// Limits leaves to `largest`: what CAP.SSLPS says (11.4.2). Above [`Level::TWO`] is
    /// taken as that.
    #[must_use]
    pub const fn with_largest_leaf(self, largest: Level) -> Self {
        let largest = if largest.get() > Level::TWO.get() { Level::TWO } else { largest };
        Self { largest, ..self }
    }

    /// The host address width of the DMAR table; limited to `32..=52`.
    #[must_use]
    pub const fn with_physical_bits(self, bits: u8) -> Self {
        Self { frames: Frames::new(bits), ..self }
    }
}

const fn access_word(access: Access) -> Result<u64, Unencodable> {
    if access.bits() == 0 || access.allows(Access::EXECUTE) {
        return Err(Unencodable::Access);
    }
    Ok(access.bits() as u64)
}

impl Format for Vtd {
    #[inline]
    fn geometry(&self) -> Geometry {
        self.geometry.known_x86()
    }

    fn largest_leaf(&self) -> Level {
        self.largest
    }

    #[inline]
    fn decode(&self, level: Level, raw: u64) -> Entry {
        if raw == 0 {
            return Entry::Empty;
        }
        if raw & RIGHTS == 0 || self.frames.beyond(raw) {
            return Entry::Inert;
        }
        if let Some(table) = self.child(level, raw) {
            return Entry::Table(table);
        }
        if level > self.largest || raw & below(level) != 0 {
            return Entry::Inert;
        }
        Entry::Leaf(Leaf {
            mfn: self.frames.decode(raw),
            access: Access::from_bits((raw & RIGHTS) as u8),
            memory: MemoryType::WriteBack,
            tag: tag(raw),
            origin: origin(raw),
            accessed: raw & ACCESSED != 0,
            dirty: raw & DIRTY != 0,
        })
    }

    #[inline]
    fn child(&self, level: Level, raw: u64) -> Option<Mfn> {
        if level == Level::PAGE || raw & RIGHTS == 0 {
            return None;
        }
        self.frames.table(raw, LARGE, 0)
    }

    #[inline]
    fn varying(&self) -> u64 {
        self.frames.bits() | ACCESSED | DIRTY
    }

    #[inline]
    fn like(&self, raw: u64, leaf: Leaf) -> Leaf {
        let (accessed, dirty) = (raw & ACCESSED != 0, raw & DIRTY != 0);
        Leaf { mfn: self.frames.decode(raw), accessed, dirty, ..leaf }
    }

    #[inline]
    fn leaf(&self, level: Level, leaf: Leaf) -> Result<u64, Unencodable> {
        if level > self.largest {
            return Err(Unencodable::Level);
        }
        if leaf.memory != MemoryType::WriteBack {
            return Err(Unencodable::Memory);
        }
        Ok(self.frames.encode(leaf.mfn, level)?
            | access_word(leaf.access)?
            | flag(level != Level::PAGE, LARGE)
            | flag(leaf.accessed, ACCESSED)
            | flag(leaf.dirty, DIRTY)
            | software_word(&leaf)?)
    }

    fn table(&self, level: Level, table: Mfn) -> Result<u64, Unencodable> {
        if level == Level::PAGE || level > self.geometry.top() {
            return Err(Unencodable::Level);
        }
        Ok(self.frames.encode(table, Level::PAGE)? | RIGHTS)
    }

    fn with_access(&self, _: Level, raw: u64, access: Access) -> Result<u64, Unencodable> {
        Ok((raw & !RIGHTS) | access_word(access)?)
    }
}
