//! A format for tests: any geometry, any leaf, with or without break-before-make.
//!
//! Bit 0 valid, bit 1 table, bits 2-4 rights, 5 accessed, 6 dirty, 7-9 tag, 10-11 origin,
//! frame from bit 12. With 4 entries a table, a whole space fits into a loop.

use flush::Mfn;
use stage2::{Access, Entry, Format, Geometry, Leaf, Level, MemoryType, Tag, Unencodable};

pub(crate) const ACCESSED: u64 = 1 << 5;
pub(crate) const DIRTY: u64 = 1 << 6;

#[derive(Clone, Copy, Debug)]
pub(crate) struct Plain {
    pub(crate) geometry: Geometry,
    pub(crate) largest: Level,
    pub(crate) breaks: bool,
}

impl Plain {
    /// Four levels of 4 entries: 256 frames, leaves of 1, 4 and 16.
    pub(crate) fn small() -> Self {
        Self::new(0, 2, 4, 2)
    }

    pub(crate) fn new(page_order: u8, index_bits: u8, levels: u8, root_bits: u8) -> Self {
        let geometry = Geometry::new(page_order, index_bits, levels, root_bits).unwrap();
        Self { geometry, largest: Level::TWO.min(geometry.top()), breaks: false }
    }

    pub(crate) fn breaking(self) -> Self {
        Self { breaks: true, ..self }
    }

    fn misaligned(&self, level: Level, mfn: Mfn) -> bool {
        mfn.get() & ((1 << self.geometry.order(level)) - 1) != 0
    }
}

impl Format for Plain {
    fn geometry(&self) -> Geometry {
        self.geometry
    }

    fn largest_leaf(&self) -> Level {
        self.largest
    }

    fn decode(&self, level: Level, raw: u64) -> Entry {
        let mfn = Mfn::new(raw >> 12);
        match (raw, raw & 1, raw & 2) {
            (0, _, _) => Entry::Empty,
            (_, 1, 2) if level != Level::PAGE => Entry::Table(mfn),
            (_, 1, 0) if level <= self.largest => Entry::Leaf(Leaf {
                mfn,
                access: Access::from_bits((raw >> 2) as u8),
                memory: MemoryType::WriteBack,
                tag: Tag::from_low_bits(raw >> 7),
                origin: Level::new((raw >> 10 & 3) as u8).unwrap(),
                accessed: raw & ACCESSED != 0,
                dirty: raw & DIRTY != 0,
            }),
            _ => Entry::Inert,
        }
    }

    fn leaf(&self, level: Level, leaf: Leaf) -> Result<u64, Unencodable> {
        if level > self.largest {
            return Err(Unencodable::Level);
        }
        if leaf.access == Access::NONE {
            return Err(Unencodable::Access);
        }
        if self.misaligned(level, leaf.mfn) {
            return Err(Unencodable::Frame);
        }
        Ok((leaf.mfn.get() << 12)
            | 1
            | u64::from(leaf.access.bits()) << 2
            | if leaf.accessed { ACCESSED } else { 0 }
            | if leaf.dirty { DIRTY } else { 0 }
            | u64::from(leaf.tag.get()) << 7
            | u64::from(leaf.origin.get()) << 10)
    }

    fn table(&self, level: Level, table: Mfn) -> Result<u64, Unencodable> {
        if level == Level::PAGE { Err(Unencodable::Level) } else { Ok(table.get() << 12 | 3) }
    }

    fn with_access(&self, _: Level, raw: u64, access: Access) -> Result<u64, Unencodable> {
        if access == Access::NONE {
            return Err(Unencodable::Access);
        }
        Ok((raw & !0x1c) | u64::from(access.bits()) << 2)
    }

    fn break_before_make(&self) -> bool {
        self.breaks
    }
}
