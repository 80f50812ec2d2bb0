//! NPT: the second-stage tables of AMD CPUs, ordinary long-mode tables.
//!
//! After the AMD64 APM, volume 2 (24593), revision 3.44: formats in 5.3 and 5.4, nested
//! paging in 15.25. The nested walk counts as a user access, so every entry has U set
//! (15.25.5). There is no way to refuse reads, and memory types go through the host's PAT
//! (7.8), which is taken to hold its reset value: no write-combining, no write-protected.
//! EFER.NXE is taken to be set in the host: without it bit 63 is reserved (5.4.1).
//!
//! A present word that faults in every walk (a reserved bit, or U clear) decodes to a
//! leaf without rights, because the manual does not say that it is never cached.

use flush::Mfn;

use super::words::{Frames, MAX_PHYSICAL_BITS, below, flag, origin, software_word, tag};
use super::{Format, Geometry, Unencodable};
use crate::entry::{Access, Entry, Leaf, Level, MemoryType};

/// Bit 0: the entry is used at all.
const PRESENT: u64 = 1;
/// Bit 1: writes are allowed.
const WRITE: u64 = 1 << 1;
/// Bit 2: user accesses are allowed, which a nested walk is.
const USER: u64 = 1 << 2;
/// Bit 3: PAT index, low bit.
const PWT: u64 = 1 << 3;
/// Bit 4: PAT index, middle bit.
const PCD: u64 = 1 << 4;
/// Bit 5: it was used.
const ACCESSED: u64 = 1 << 5;
/// Bit 6 of a leaf: it was written through.
const DIRTY: u64 = 1 << 6;
/// Bit 7 above level 0: the entry is a leaf. (At level 0 it is the PAT's high bit.)
const LARGE: u64 = 1 << 7;
/// Bit 12 of a large leaf: the PAT's high bit, not part of the frame.
const LARGE_PAT: u64 = 1 << 12;
/// Bit 63: no instruction fetches.
const NO_EXECUTE: u64 = 1 << 63;

/// How many levels an NPT has: the host's paging mode (15.25.3).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NptLevels {
    /// 48-bit guest-physical addresses.
    Four,
    /// 57-bit guest-physical addresses, with `CR4.LA57` in the host.
    Five,
}

/// The NPT format, as far as this machine has it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Npt {
    geometry: Geometry,
    largest: Level,
    frames: Frames,
}

impl Npt {
    /// Leaves up to 1 GiB, 52-bit physical addresses.
    #[must_use]
    pub const fn new(levels: NptLevels) -> Self {
        let levels = match levels {
            NptLevels::Four => 4,
            NptLevels::Five => 5,
        };
        Self {
            geometry: Geometry::x86(levels),
            largest: Level::TWO,
            frames: Frames::new(MAX_PHYSICAL_BITS),
        }
    }

    /// Limits leaves to `largest`; above [`Level::TWO`] is taken as that.
    #[must_use]
    pub const fn with_largest_leaf(self, largest: Level) -> Self {
        let largest = if largest.get() > Level::TWO.get() { Level::TWO } else { largest };
        Self { largest, ..self }
    }

    /// The physical address width of the CPU; limited to `32..=52`.
    #[must_use]
    pub const fn with_physical_bits(self, bits: u8) -> Self {
        Self { frames: Frames::new(bits), ..self }
    }
}

/// The bits for a memory type, under the reset value of the PAT.
const fn type_word(memory: MemoryType) -> Result<u64, Unencodable> {
    match memory {
        MemoryType::WriteBack => Ok(0),
        MemoryType::WriteThrough => Ok(PWT),
        MemoryType::Uncacheable => Ok(PCD | PWT),
        MemoryType::WriteCombining | MemoryType::WriteProtected => Err(Unencodable::Memory),
    }
}

/// The type of a leaf; the PAT's upper half repeats the lower one.
const fn memory_type(raw: u64) -> MemoryType {
    match (raw & PCD != 0, raw & PWT != 0) {
        (false, false) => MemoryType::WriteBack,
        (false, true) => MemoryType::WriteThrough,
        (true, _) => MemoryType::Uncacheable,
    }
}

const fn access_word(access: Access) -> Result<u64, Unencodable> {
    if !access.allows(Access::READ) {
        return Err(Unencodable::Access);
    }
    Ok(flag(access.allows(Access::WRITE), WRITE)
        | flag(!access.allows(Access::EXECUTE), NO_EXECUTE))
}

impl Npt {
    /// Whether a present word of a leaf at `level` faults in every walk.
    const fn faults(&self, level: Level, raw: u64) -> bool {
        raw & USER == 0
            || self.frames.beyond(raw)
            || level.get() > self.largest.get()
            || raw & below(level) & !LARGE_PAT != 0
    }
}

impl Format for Npt {
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
        if raw & PRESENT == 0 {
            return Entry::Inert;
        }
        if let Some(table) = self.child(level, raw) {
            return Entry::Table(table);
        }
        let access = if self.faults(level, raw) {
            Access::NONE
        } else {
            let write = if raw & WRITE != 0 { Access::WRITE } else { Access::NONE };
            let execute = if raw & NO_EXECUTE == 0 { Access::EXECUTE } else { Access::NONE };
            Access::READ | write | execute
        };
        Entry::Leaf(Leaf {
            mfn: self.frames.decode_leaf(raw, level),
            access,
            memory: memory_type(raw),
            tag: tag(raw),
            origin: origin(raw),
            accessed: raw & ACCESSED != 0,
            dirty: raw & DIRTY != 0,
        })
    }

    #[inline]
    fn child(&self, level: Level, raw: u64) -> Option<Mfn> {
        if level == Level::PAGE {
            return None;
        }
        self.frames.table(raw, PRESENT | LARGE, PRESENT)
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
        Ok(self.frames.encode(leaf.mfn, level)?
            | access_word(leaf.access)?
            | type_word(leaf.memory)?
            | PRESENT
            | USER
            | flag(level != Level::PAGE, LARGE)
            | flag(leaf.accessed, ACCESSED)
            | flag(leaf.dirty, DIRTY)
            | software_word(&leaf)?)
    }

    fn table(&self, level: Level, table: Mfn) -> Result<u64, Unencodable> {
        if level == Level::PAGE || level > self.geometry.top() {
            return Err(Unencodable::Level);
        }
        Ok(self.frames.encode(table, Level::PAGE)? | PRESENT | WRITE | USER)
    }

    fn with_access(&self, _: Level, raw: u64, access: Access) -> Result<u64, Unencodable> {
        Ok((raw & !(WRITE | NO_EXECUTE)) | access_word(access)?)
    }
}
