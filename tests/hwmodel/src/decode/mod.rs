//! The model's own reading of second-stage entries
//!
//! [`decode`] turns one 64-bit entry into what the hardware makes of it. Level 0 is the level that only has
//! 4 KiB leaves; the manuals' names for the levels are in the file of each format.

mod ept;
mod npt;
mod vtd;

use crate::types::{Frame, Rights};

/// A table format.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum Format {
    /// Intel extended page tables.
    Ept,
    /// AMD nested page tables (long mode).
    Npt,
    /// Intel VT-d second-stage tables.
    Vtd,
}

/// What the hardware at hand supports; it decides which bits are reserved.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Limits {
    /// Width of host physical addresses in bits, 32..=52.
    pub physical_bits: u8,
    /// Leaves of 2 MiB.
    pub large_2m: bool,
    /// Leaves of 1 GiB.
    pub large_1g: bool,
    /// EPT: leaves that can only be executed.
    pub execute_only: bool,
    /// VT-d: the snoop bit (ECAP.SC) exists.
    pub snoop: bool,
    /// VT-d: the transient-mapping bit (with ECAP.DT) exists.
    pub transient: bool,
}

impl Limits {
    /// A processor with everything, 46 physical address bits.
    pub const FULL: Self = Self {
        physical_bits: 46,
        large_2m: true,
        large_1g: true,
        execute_only: true,
        snoop: true,
        transient: true,
    };

    /// May a leaf at `level` exist?
    const fn leaf_at(self, level: u8) -> bool {
        match level {
            0 => true,
            1 => self.large_2m,
            2 => self.large_1g,
            _ => false,
        }
    }

    /// Address bits of an entry that lie above the physical width.
    const fn beyond_width(self) -> u64 {
        let width = if self.physical_bits > 52 { 52 } else { self.physical_bits };
        ADDRESS & !((1 << width) - 1)
    }
}

/// What the hardware makes of an entry.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Decoded {
    /// Not present: translates nothing, and says so.
    NotPresent,
    /// Points to the table one level down.
    Table {
        /// The table's frame.
        frame: Frame,
        /// What everything below may allow at most.
        rights: Rights,
    },
    /// Maps 2^order pages.
    Leaf {
        /// The first frame.
        frame: Frame,
        /// 0, 9 or 18.
        order: u8,
        /// What it allows.
        rights: Rights,
    },
    /// Present with a combination the manual forbids.
    Reserved,
}

/// Bits 12 to 51.
const ADDRESS: u64 = 0x000f_ffff_ffff_f000;

/// Bits `first..=last`, `last` below 64.
const fn bits(first: u32, last: u32) -> u64 {
    (u64::MAX >> (63 - last)) & (u64::MAX << first)
}

/// Reads one entry of a table at `level`.
#[must_use]
pub fn decode(format: Format, limits: Limits, level: u8, raw: u64) -> Decoded {
    match format {
        Format::Ept => ept::decode(limits, level, raw),
        Format::Npt => npt::decode(limits, level, raw),
        Format::Vtd => vtd::decode(limits, level, raw),
    }
}

/// The accessed and dirty bits of `format`, where the hardware of this model sets them.
pub(crate) const fn accessed_dirty(format: Format) -> Option<(u64, u64)> {
    match format {
        Format::Ept => Some((1 << 8, 1 << 9)),
        Format::Npt => Some((1 << 5, 1 << 6)),
        Format::Vtd => None,
    }
}

/// Leaf of `level`; address bits below its size are the caller's business.
const fn leaf(level: u8, raw: u64, rights: Rights) -> Decoded {
    let order = 9 * level;
    let frame = ((raw & ADDRESS) >> 12) & (u64::MAX << order);
    Decoded::Leaf { frame: Frame(frame), order, rights }
}

const fn table(raw: u64, rights: Rights) -> Decoded {
    Decoded::Table { frame: Frame((raw & ADDRESS) >> 12), rights }
}
