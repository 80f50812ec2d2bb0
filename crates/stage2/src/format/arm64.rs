//! Arm stage-2 tables: 4, 16 and 64 KiB granules, 48- and 52-bit addresses.
//!
//! After the Arm ARM, DDI 0487, issue M.b: descriptors D8.3.1.1 (tables), D8.3.1.2
//! (blocks and pages, table D8-53) and D8.3.1.3 (invalid); concatenated roots D8.2;
//! break-before-make D8.17.1. The manual counts levels from the root down, 3 being the
//! one of single pages; here that is level 0.
//!
//! What is cached: anything but an entry that gives a translation fault, an address size
//! fault or an access flag fault (D8.17). So an invalid descriptor, a reserved one (a
//! translation fault) and one beyond the physical width are never cached; all others may
//! be, and bits that the manual calls RES0 are taken as ignored.
//!
//! Assumed of the registers: `HCR_EL2.FWB`, `VTCR_EL2.HA`, `.HD`, `.HWU59` and
//! `.AssuredOnly` are 0; `VTCR_EL2.DS` is 1 for [`Arm64::wide`] with granules of 4 and
//! 16 KiB. The contiguous bit is never set. Without hardware marks every leaf counts as
//! accessed, and every writable one as dirty: they may be.

use flush::Mfn;

use super::words::{flag, origin_word};
use super::{Format, Geometry, Unencodable};
use crate::entry::{Access, Entry, Leaf, Level, MemoryType, Tag};

/// Bit 0: without it the rest is software's.
const VALID: u64 = 1;
/// Bit 1: a table above level 0, a page at level 0.
const TABLE_OR_PAGE: u64 = 1 << 1;
/// Bits 2 to 5: inner and outer cacheability.
const TYPE_SHIFT: u32 = 2;
/// Bit 6, S2AP\[0\].
const READ: u64 = 1 << 6;
/// Bit 7, S2AP\[1\].
const WRITE: u64 = 1 << 7;
/// Bits 8 and 9: inner shareable. Address bits instead where `VTCR_EL2.DS` is 1.
const INNER_SHAREABLE: u64 = 3 << 8;
/// Bit 10: no access flag fault.
const ACCESSED: u64 = 1 << 10;
/// Bits 53 and 54: 2 means that nothing executes, at EL1 or EL0.
const EXECUTE_FIELD: u64 = 3 << 53;
const NO_EXECUTE: u64 = 2 << 53;
/// Bits 55 to 58 are software's, bit 59 is ignored: three for the embedder's tag.
const TAG_SHIFT: u32 = 55;
/// And two for the level that a leaf was split from.
const ORIGIN_SHIFT: u32 = TAG_SHIFT + Tag::BITS;

/// How large a page is, and with it a table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Granule {
    /// 4 KiB.
    Kib4,
    /// 16 KiB.
    Kib16,
    /// 64 KiB.
    Kib64,
}

impl Granule {
    /// The lg2 of the page size in frames of 4 KiB.
    const fn order(self) -> u8 {
        match self {
            Self::Kib4 => 0,
            Self::Kib16 => 2,
            Self::Kib64 => 4,
        }
    }

    /// The highest level of a leaf. The manual's level 0 (512 GiB), level 1 (64 GiB) and
    /// level 1 (4 TiB) need the wide forms.
    const fn largest(self, wide: bool) -> Level {
        match (self, wide) {
            (Self::Kib4, true) => Level::THREE,
            (Self::Kib4, false) | (Self::Kib16 | Self::Kib64, true) => Level::TWO,
            (Self::Kib16 | Self::Kib64, false) => Level::ONE,
        }
    }
}

/// The stage-2 format, as far as this machine has it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Arm64 {
    geometry: Geometry,
    granule: Granule,
    largest: Level,
    /// 52-bit descriptors: FEAT_LPA with 64 KiB, FEAT_LPA2 with the others.
    wide: bool,
    /// The descriptor bits that hold the address from the page size up, but for the
    /// highest four or two of a wide one.
    low: u64,
    /// Those of the highest, and by how much they are below their place.
    high: u64,
    high_shift: u8,
    /// The address bits above the width of an output address.
    beyond: u64,
}

impl Arm64 {
    /// Tables for `input_bits` wide guest-physical addresses, `32..=48`, with output
    /// addresses of 48 bits.
    ///
    /// As few levels as there can be, at least two: the root is then up to 16
    /// concatenated pages, aligned to their size. `None` for another width.
    #[must_use]
    pub const fn new(granule: Granule, input_bits: u8) -> Option<Self> {
        Self::build(granule, input_bits, false)
    }

    /// The same with the descriptors of FEAT_LPA (64 KiB) or FEAT_LPA2 (4 and 16 KiB):
    /// input addresses of `32..=52` bits, output addresses of 52.
    #[must_use]
    pub const fn wide(granule: Granule, input_bits: u8) -> Option<Self> {
        Self::build(granule, input_bits, true)
    }

    const fn build(granule: Granule, input_bits: u8, wide: bool) -> Option<Self> {
        let width = if wide { 52 } else { 48 };
        if input_bits < 32 || input_bits > width {
            return None;
        }
        let page_bits = 12 + granule.order();
        let index_bits = page_bits - 3;
        // The fewest whose root has at most `index_bits + 4` bits.
        let levels = (input_bits - 8) / index_bits;
        let levels = if levels < 2 { 2 } else { levels };
        let root_bits = input_bits - page_bits - (levels - 1) * index_bits;
        let Some(geometry) = Geometry::new(granule.order(), index_bits, levels, root_bits) else {
            return None;
        };
        let largest = granule.largest(wide);
        // Address bits 51 to 48 in bits 15 to 12, or 51 and 50 in bits 9 and 8.
        let (end, high, high_shift) = match (wide, granule) {
            (false, _) => (48, 0, 0),
            (true, Granule::Kib64) => (48, 0xf << 12, 36),
            (true, Granule::Kib4 | Granule::Kib16) => (50, 3 << 8, 42),
        };
        let low = (1 << end) - (1 << page_bits);
        let beyond = u64::MAX << width;
        Some(Self { geometry, granule, largest, wide, low, high, high_shift, beyond })
    }

    /// Limits leaves to `largest`, or to what the granule has if that is less.
    #[must_use]
    pub const fn with_largest_leaf(self, largest: Level) -> Self {
        let most = self.granule.largest(self.wide);
        let largest = if largest.get() > most.get() { most } else { largest };
        Self { largest, ..self }
    }

    /// The physical address width of the CPU, `ID_AA64MMFR0_EL1.PARange`; limited to
    /// `32..=48`, or to 52 with the wide descriptors.
    #[must_use]
    pub const fn with_physical_bits(self, bits: u8) -> Self {
        let most = if self.wide { 52 } else { 48 };
        let bits = if bits < 32 {
            32
        } else if bits > most {
            most
        } else {
            bits
        };
        Self { beyond: u64::MAX << bits, ..self }
    }

    /// Whether bits 8 and 9 of a descriptor belong to the address.
    const fn shares_by_register(&self) -> bool {
        self.wide && !matches!(self.granule, Granule::Kib64)
    }

    /// The address bits of a descriptor for `mfn`, which is aligned to 2^`order` frames.
    fn encode(&self, mfn: Mfn, order: u8) -> Result<u64, Unencodable> {
        let address = mfn.get().checked_mul(1 << 12).ok_or(Unencodable::Frame)?;
        let inside = ((1 << order) - 1) << 12;
        if address & (self.beyond | inside) != 0 {
            return Err(Unencodable::Frame);
        }
        Ok(address & self.low | address >> self.high_shift & self.high)
    }

    /// The address in a descriptor, aligned to the page size; `None` beyond the physical
    /// width.
    #[inline]
    fn decode_frame(&self, raw: u64) -> Option<Mfn> {
        let address = raw & self.low | (raw & self.high) << self.high_shift;
        if address & self.beyond == 0 { Some(Mfn::new(address >> 12)) } else { None }
    }
}

/// Outer and inner cacheability, stage 2 without FWB (D8.6). Device memory keeps order
/// and gathers nothing, but may acknowledge a write early.
const fn type_word(memory: MemoryType) -> Result<u64, Unencodable> {
    let number = match memory {
        MemoryType::Uncacheable => 0b0001,
        MemoryType::WriteCombining => 0b0101,
        MemoryType::WriteThrough => 0b1010,
        MemoryType::WriteBack => 0b1111,
        MemoryType::WriteProtected => return Err(Unencodable::Memory),
    };
    Ok(number << TYPE_SHIFT)
}

/// The weaker of outer and inner, where they differ.
const fn memory_type(raw: u64) -> MemoryType {
    let (outer, inner) = ((raw >> (TYPE_SHIFT + 2)) & 3, (raw >> TYPE_SHIFT) & 3);
    match if outer < inner { outer } else { inner } {
        _ if outer == 0 => MemoryType::Uncacheable,
        3 => MemoryType::WriteBack,
        2 => MemoryType::WriteThrough,
        _ => MemoryType::WriteCombining,
    }
}

const fn access_word(access: Access) -> Result<u64, Unencodable> {
    if access.bits() == 0 {
        return Err(Unencodable::Access);
    }
    Ok(flag(access.allows(Access::READ), READ)
        | flag(access.allows(Access::WRITE), WRITE)
        | flag(!access.allows(Access::EXECUTE), NO_EXECUTE))
}

fn access(raw: u64) -> Access {
    let part = |set, access| if set { access } else { Access::NONE };
    part(raw & READ != 0, Access::READ)
        | part(raw & WRITE != 0, Access::WRITE)
        | part(raw & EXECUTE_FIELD != NO_EXECUTE, Access::EXECUTE)
}

impl Format for Arm64 {
    #[inline]
    fn geometry(&self) -> Geometry {
        self.geometry
    }

    fn largest_leaf(&self) -> Level {
        if self.largest > self.geometry.top() { self.geometry.top() } else { self.largest }
    }

    #[inline]
    fn decode(&self, level: Level, raw: u64) -> Entry {
        if raw == 0 {
            return Entry::Empty;
        }
        if let Some(table) = self.child(level, raw) {
            return Entry::Table(table);
        }
        let page = raw & TABLE_OR_PAGE != 0;
        if raw & VALID == 0 || page != (level == Level::PAGE) || level > self.largest {
            return Entry::Inert;
        }
        let inside = (1 << self.geometry.order(level)) - 1;
        match self.decode_frame(raw) {
            Some(mfn) => Entry::Leaf(Leaf {
                mfn: Mfn::new(mfn.get() & !inside),
                access: access(raw),
                memory: memory_type(raw),
                tag: Tag::from_low_bits(raw >> TAG_SHIFT),
                origin: Level::from_low_bits(raw >> ORIGIN_SHIFT),
                accessed: raw & ACCESSED != 0,
                dirty: raw & WRITE != 0,
            }),
            None => Entry::Inert,
        }
    }

    #[inline]
    fn child(&self, level: Level, raw: u64) -> Option<Mfn> {
        const TABLE: u64 = VALID | TABLE_OR_PAGE;
        if level == Level::PAGE || raw & TABLE != TABLE {
            return None;
        }
        self.decode_frame(raw)
    }

    fn leaf(&self, level: Level, leaf: Leaf) -> Result<u64, Unencodable> {
        if level > self.largest_leaf() {
            return Err(Unencodable::Level);
        }
        Ok(self.encode(leaf.mfn, self.geometry.order(level))?
            | access_word(leaf.access)?
            | type_word(leaf.memory)?
            | flag(!self.shares_by_register(), INNER_SHAREABLE)
            | flag(level == Level::PAGE, TABLE_OR_PAGE)
            | VALID
            | ACCESSED
            | u64::from(leaf.tag.get()) << TAG_SHIFT
            | origin_word(leaf.origin, ORIGIN_SHIFT)?)
    }

    fn table(&self, level: Level, table: Mfn) -> Result<u64, Unencodable> {
        if level == Level::PAGE || level > self.geometry.top() {
            return Err(Unencodable::Level);
        }
        Ok(self.encode(table, self.granule.order())? | VALID | TABLE_OR_PAGE)
    }

    fn with_access(&self, _: Level, raw: u64, access: Access) -> Result<u64, Unencodable> {
        Ok((raw & !(READ | WRITE | EXECUTE_FIELD)) | access_word(access)?)
    }

    fn break_before_make(&self) -> bool {
        true
    }
}
