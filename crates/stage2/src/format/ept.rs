//! EPT: the second-stage tables of Intel CPUs, also walked by VT-d where shared.
//!
//! After the Intel SDM, volume 3C, chapter "VMX Support for Address Translation". Editions
//! number it differently, so sections go by their titles here. Formats: the tables of
//! "EPT Translation Mechanism". Misconfigurations: "EPT Misconfigurations". What is
//! cached: "Creating and Using Cached Translation Information", by which neither an entry
//! that is not present nor a misconfigured one ever is.
//!
//! Mode-based execute control is assumed to be off: bit 10 is ignored.

use flush::Mfn;

use super::words::{Frames, MAX_PHYSICAL_BITS, below, flag, origin, software_word, tag};
use super::{Format, Geometry, Unencodable};
use crate::entry::{Access, Entry, Leaf, Level, MemoryType};

/// Bits 0 to 2: read, write, execute, in the order of [`Access::bits`].
const RIGHTS: u64 = 7;
/// Bit 0: without it, nothing but execution alone is possible.
const READ: u64 = 1;
/// Bits 3 to 5 of a leaf: the memory type.
const TYPE_SHIFT: u32 = 3;
/// Bits 3 to 6 of an entry that points at a table are reserved (bit 7 makes a leaf).
const TABLE_RESERVED: u64 = 0x78;
/// Bit 7 above level 0: the entry is a leaf.
const LARGE: u64 = 1 << 7;
/// Bit 8 of a leaf, if enabled in the EPTP: it was used.
const ACCESSED: u64 = 1 << 8;
/// Bit 9 of a leaf, if enabled in the EPTP: it was written through.
const DIRTY: u64 = 1 << 9;

/// How many levels an EPT has: the page-walk length in the EPTP.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EptLevels {
    /// 48-bit guest-physical addresses.
    Four,
    /// 57-bit guest-physical addresses.
    Five,
}

/// The EPT format, as far as this machine has it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ept {
    geometry: Geometry,
    largest: Level,
    execute_only: bool,
    frames: Frames,
}

impl Ept {
    /// Leaves up to 1 GiB, no execute-only leaves, 52-bit physical addresses.
    #[must_use]
    pub const fn new(levels: EptLevels) -> Self {
        let levels = match levels {
            EptLevels::Four => 4,
            EptLevels::Five => 5,
        };
        Self {
            geometry: Geometry::x86(levels),
            largest: Level::TWO,
            execute_only: false,
            frames: Frames::new(MAX_PHYSICAL_BITS),
        }
    }

    /// Limits leaves to `largest`: what bits 16 and 17 of `IA32_VMX_EPT_VPID_CAP` say.
    /// Above [`Level::TWO`] is taken as that.
    #[must_use]
    pub const fn with_largest_leaf(self, largest: Level) -> Self {
        let largest = if largest.get() > Level::TWO.get() { Level::TWO } else { largest };
        Self { largest, ..self }
    }

    /// The CPU knows execute-only leaves: bit 0 of `IA32_VMX_EPT_VPID_CAP`.
    #[must_use]
    pub const fn with_execute_only(self) -> Self {
        Self { execute_only: true, ..self }
    }

    /// The physical address width of the CPU; limited to `32..=52`.
    #[must_use]
    pub const fn with_physical_bits(self, bits: u8) -> Self {
        Self { frames: Frames::new(bits), ..self }
    }

    /// Whether a leaf can have these rights. None at all means not present; writing
    /// without reading is a misconfiguration, and so is executing alone where the CPU
    /// does not know it ("EPT Misconfigurations").
    const fn takes(&self, access: Access) -> bool {
        access.allows(Access::READ)
            || (access.bits() == Access::EXECUTE.bits() && self.execute_only)
    }
}

/// The type's number ("EPT and Memory Typing").
const fn type_word(memory: MemoryType) -> u64 {
    let number = match memory {
        MemoryType::Uncacheable => 0,
        MemoryType::WriteCombining => 1,
        MemoryType::WriteThrough => 4,
        MemoryType::WriteProtected => 5,
        MemoryType::WriteBack => 6,
    };
    number << TYPE_SHIFT
}

const fn memory_type(raw: u64) -> Option<MemoryType> {
    match (raw >> TYPE_SHIFT) & 7 {
        0 => Some(MemoryType::Uncacheable),
        1 => Some(MemoryType::WriteCombining),
        4 => Some(MemoryType::WriteThrough),
        5 => Some(MemoryType::WriteProtected),
        6 => Some(MemoryType::WriteBack),
        _ => None,
    }
}

impl Format for Ept {
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
        if let Some(table) = self.child(level, raw) {
            return Entry::Table(table);
        }
        let access = Access::from_bits((raw & RIGHTS) as u8);
        if !self.takes(access)
            || self.frames.beyond(raw)
            || (level != Level::PAGE && raw & LARGE == 0)
        {
            return Entry::Inert;
        }
        match memory_type(raw) {
            Some(memory) if level <= self.largest && raw & below(level) == 0 => Entry::Leaf(Leaf {
                mfn: self.frames.decode(raw),
                access,
                memory,
                tag: tag(raw),
                origin: origin(raw),
                accessed: raw & ACCESSED != 0,
                dirty: raw & DIRTY != 0,
            }),
            Some(_) | None => Entry::Inert,
        }
    }

    #[inline]
    fn child(&self, level: Level, raw: u64) -> Option<Mfn> {
        const KIND: u64 = LARGE | TABLE_RESERVED;
        const EXECUTE: u64 = Access::EXECUTE.bits() as u64;
        if level == Level::PAGE {
            return None;
        }
        // Whatever can be read; or executed alone, where that is possible.
        match self.frames.table(raw, KIND | READ, READ) {
            None if self.execute_only => self.frames.table(raw, KIND | RIGHTS, EXECUTE),
            table => table,
        }
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
        if !self.takes(leaf.access) {
            return Err(Unencodable::Access);
        }
        Ok(self.frames.encode(leaf.mfn, level)?
            | u64::from(leaf.access.bits())
            | type_word(leaf.memory)
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
        if !self.takes(access) {
            return Err(Unencodable::Access);
        }
        Ok((raw & !RIGHTS) | u64::from(access.bits()))
    }
}
