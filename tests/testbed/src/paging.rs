//! A guest's own page tables, walked to find what a linear address means.
//!
//! A [`Paging`] is a snapshot of the registers that choose the format. Pointers in a
//! hypercall are linear addresses; [`Paging::translate`] turns one into a guest-physical
//! address for an access at supervisor level. The caller then asks the p2m.
//!
//! Source: AMD64 Architecture Programmer's Manual, volume 2, chapter 5.

/// Guest-physical memory, as a page walk reads it.
pub trait Tables {
    /// The aligned 64-bit word at `address`, or `None` where there is no memory.
    fn word(&self, address: u64) -> Option<u64>;
}

/// What is to be done at a linear address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// Read.
    Read,
    /// Write: needs a writable page where the guest asks for write protection.
    Write,
}

/// The guest's page tables do not allow the access.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NotTranslated;

/// The control registers that decide how addresses are translated.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Paging {
    /// CR0.
    pub cr0: u64,
    /// CR3.
    pub cr3: u64,
    /// CR4.
    pub cr4: u64,
    /// The extended feature register.
    pub efer: u64,
}

/// Sections 3.1.1, 3.1.3 and 3.1.7: bits of the control registers.
mod register {
    pub(super) const CR0_WRITE_PROTECT: u64 = 1 << 16;
    pub(super) const CR0_PAGING: u64 = 1 << 31;
    pub(super) const CR4_LARGE_PAGES: u64 = 1 << 4;
    pub(super) const CR4_PHYSICAL_ADDRESS_EXTENSION: u64 = 1 << 5;
    pub(super) const CR4_FIVE_LEVELS: u64 = 1 << 12;
    pub(super) const EFER_LONG_MODE_ACTIVE: u64 = 1 << 10;
}

/// Section 5.4: bits of an entry.
mod entry {
    pub(super) const PRESENT: u64 = 1 << 0;
    pub(super) const WRITABLE: u64 = 1 << 1;
    pub(super) const LARGE: u64 = 1 << 7;
    /// Bits 51 to 12: the page or the next table.
    pub(super) const FRAME: u64 = 0x000f_ffff_ffff_f000;
}

/// The shape of one format.
struct Shape {
    /// Where the walk begins.
    root: u64,
    /// Tables between the root and a page.
    levels: u32,
    /// Address bits that one table translates.
    bits: u32,
    /// Bytes of an entry.
    width: u64,
    /// The first level, counted from 0 at the page, whose entries cannot be pages.
    too_large: u32,
}

impl Paging {
    /// Whether the guest runs in long mode, 64-bit or compatibility.
    #[must_use]
    pub const fn is_long(&self) -> bool {
        self.efer & register::EFER_LONG_MODE_ACTIVE != 0
    }

    /// The guest-physical address of `linear`.
    ///
    /// The result holds to the end of the 4 KiB page. Outside long mode only the low 32
    /// bits of `linear` count.
    ///
    /// # Errors
    /// [`NotTranslated`] where an entry is absent, forbids the write, or is not in
    /// memory, and for an address that is not canonical.
    pub fn translate(
        &self,
        tables: &impl Tables,
        linear: u64,
        access: Access,
    ) -> Result<u64, NotTranslated> {
        let linear = if self.is_long() { linear } else { linear & 0xffff_ffff };
        if self.cr0 & register::CR0_PAGING == 0 {
            return Ok(linear);
        }
        let shape = self.shape(linear).ok_or(NotTranslated)?;
        let mut table = shape.root;
        let mut writable = true;
        let mut level = shape.levels;
        while level > 0 {
            level -= 1;
            let shift = 12 + level * shape.bits;
            let index = (linear >> shift) & ((1 << shape.bits) - 1);
            let value = read(tables, table, index, shape.width).ok_or(NotTranslated)?;
            if value & entry::PRESENT == 0 {
                return Err(NotTranslated);
            }
            // The four entries at the top of the 32-bit extended format have no such bit.
            let top_of_extended = shape.levels == 3 && level == 2;
            writable &= top_of_extended || value & entry::WRITABLE != 0;
            let page = level == 0 || (value & entry::LARGE != 0 && self.has_large(&shape, level));
            if !page {
                table = value & entry::FRAME;
                continue;
            }
            let protected = self.cr0 & register::CR0_WRITE_PROTECT != 0;
            if access == Access::Write && protected && !writable {
                return Err(NotTranslated);
            }
            let inside = (1_u64 << shift) - 1;
            return Ok(base(&shape, level, value) & !inside | linear & inside);
        }
        Err(NotTranslated)
    }

    /// Sections 5.2 and 5.3: the format in force, or `None` for an address it does not have.
    fn shape(&self, linear: u64) -> Option<Shape> {
        let extended = self.cr4 & register::CR4_PHYSICAL_ADDRESS_EXTENSION != 0;
        if self.is_long() {
            let five = self.cr4 & register::CR4_FIVE_LEVELS != 0;
            let levels = if five { 5 } else { 4 };
            let unused = 64 - (12 + 9 * levels);
            let extended = (linear << unused).cast_signed() >> unused;
            let canonical = extended.cast_unsigned() == linear;
            let root = self.cr3 & entry::FRAME;
            canonical.then_some(Shape { root, levels, bits: 9, width: 8, too_large: 3 })
        } else if extended {
            // Four entries, 32-byte aligned, below 4 GiB.
            let root = self.cr3 & 0xffff_ffe0;
            Some(Shape { root, levels: 3, bits: 9, width: 8, too_large: 2 })
        } else {
            let root = self.cr3 & 0xffff_f000;
            Some(Shape { root, levels: 2, bits: 10, width: 4, too_large: 2 })
        }
    }

    /// Whether an entry of `level` may be a page.
    const fn has_large(&self, shape: &Shape, level: u32) -> bool {
        let enabled = shape.width == 8 || self.cr4 & register::CR4_LARGE_PAGES != 0;
        enabled && level < shape.too_large
    }
}

/// The first byte of the page that an entry of `level` names.
const fn base(shape: &Shape, level: u32, value: u64) -> u64 {
    if shape.width == 8 {
        return value & entry::FRAME;
    }
    // Section 5.2.2: bits 39 to 32 of a 4 MiB page are in bits 20 to 13 of its entry.
    let high = if level == 0 { 0 } else { (value >> 13 & 0xff) << 32 };
    value & 0xffff_f000 | high
}

/// Entry `index` of `table`.
fn read(tables: &impl Tables, table: u64, index: u64, width: u64) -> Option<u64> {
    let address = table.checked_add(index.checked_mul(width)?)?;
    let word = tables.word(address & !7)?;
    if width == 8 {
        return Some(word);
    }
    Some(if address & 4 == 0 { word & 0xffff_ffff } else { word >> 32 })
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use proptest::prelude::*;

    use super::*;

    const PAGING: u64 = register::CR0_PAGING | 1;
    const PROTECTED: u64 = PAGING | register::CR0_WRITE_PROTECT;
    const LONG: u64 = register::EFER_LONG_MODE_ACTIVE | 1 << 8;
    const PAE: u64 = register::CR4_PHYSICAL_ADDRESS_EXTENSION;
    const PSE: u64 = register::CR4_LARGE_PAGES;
    const FIVE: u64 = register::CR4_FIVE_LEVELS;
    /// Present and writable.
    const RW: u64 = 3;
    const READ_ONLY: u64 = 1;

    /// Memory of 64-bit words; absent words are zero, pages from `END` on are not there.
    struct Words(BTreeMap<u64, u64>);
    const END: u64 = 1 << 32;

    impl Tables for Words {
        fn word(&self, address: u64) -> Option<u64> {
            assert_eq!(address % 8, 0, "a walk reads whole words");
            (address < END).then(|| self.0.get(&address).copied().unwrap_or(0))
        }
    }

    fn words(entries: &[(u64, u64)]) -> Words {
        Words(entries.iter().copied().collect())
    }

    #[track_caller]
    fn check(paging: Paging, entries: &[(u64, u64)], linear: u64, expected: Option<u64>) {
        for access in [Access::Read, Access::Write] {
            let found = paging.translate(&words(entries), linear, access);
            assert_eq!(found.ok(), expected, "{access:?} at {linear:#x}");
        }
    }

    const fn long(cr4: u64) -> Paging {
        Paging { cr0: PROTECTED, cr3: 0x1018, cr4: PAE | cr4, efer: LONG }
    }

    #[test]
    fn with_paging_off_a_linear_address_is_physical_and_has_32_bits() {
        check(Paging { cr0: 1, ..Paging::default() }, &[], 0x1_2345_6789, Some(0x2345_6789));
    }

    #[test]
    fn four_levels_lead_to_small_and_large_pages() {
        let tables = [
            (0x1000 + 8 * 511, 0x2000 | RW),
            (0x2000 + 8 * 2, 0x3000 | RW),
            (0x2000 + 8 * 3, 0xc000_0000 | RW | entry::LARGE),
            (0x3000 + 8 * 4, 0x4000 | RW),
            (0x3000 + 8 * 5, 0x60_0000 | RW | entry::LARGE),
            (0x4000 + 8 * 6, 0x7_0000 | RW | 1 << 63 | 1 << 7),
        ];
        let top = 0xffff_ff80_0000_0000 + (2 << 30);
        check(long(0), &tables, top + (4 << 21) + (6 << 12) + 5, Some(0x7_0005));
        check(long(0), &tables, top + (5 << 21) + 0x1_2345, Some(0x61_2345));
        check(long(0), &tables, top + (1 << 30) + 0x1234_5678, Some(0xd234_5678));
        check(long(0), &tables, top + (6 << 21), None);
        check(long(0), &tables, 0x0000_ff80_0000_0000, None);
    }

    #[test]
    fn the_fifth_level_is_walked_when_it_is_on() {
        let tables = [
            (0x1000 + 8, 0x2000 | RW),
            (0x2000, 0x3000 | RW),
            (0x3000, 0x4000 | RW),
            (0x4000, 0x20_0000 | RW | entry::LARGE),
        ];
        check(long(FIVE), &tables, (1 << 48) + 9, Some(0x20_0009));
        check(long(0), &tables, (1 << 48) + 9, None);
    }

    #[test]
    fn an_address_that_is_not_canonical_is_not_walked() {
        let tables = [(0x1000, 0x2000 | RW), (0x2000, 0x8000_0000 | RW | entry::LARGE)];
        check(long(0), &tables, 9, Some(0x8000_0009));
        check(long(0), &tables, (1 << 48) + 9, None);
        check(long(0), &tables, (0xffff << 48) + 9, None);
    }

    #[test]
    fn the_extended_32_bit_format_starts_at_four_entries() {
        let paging = Paging { cr0: PROTECTED, cr3: 0x1060, cr4: PAE, efer: 0 };
        // The top entries carry no rights.
        let tables = [
            (0x1060 + 8 * 3, 0x2000 | entry::PRESENT),
            (0x2000 + 8 * 511, 0x3000 | RW),
            (0x2000 + 8 * 510, 0x1_0020_0000 | RW | entry::LARGE),
            (0x3000 + 8 * 511, 0x5000 | RW),
        ];
        check(paging, &tables, 0xffff_fabc, Some(0x5abc));
        check(paging, &tables, 0x7_ffff_fabc, Some(0x5abc));
        check(paging, &tables, 0xffc0_0004, Some(0x1_0020_0004));
        check(paging, &tables, 0x8000_0000, None);
    }

    #[test]
    fn the_old_32_bit_format_has_4_mib_pages_where_they_are_on() {
        let paging = |cr4| Paging { cr0: PROTECTED, cr3: 0x1000, cr4, efer: 0 };
        let large = 0x0080_0000 | 0x2000 | RW | entry::LARGE;
        let tables =
            [(0x1000, (large << 32) | 0x2000 | RW), (0x2000, 0x5000 | RW | (0x6000 | RW) << 32)];
        check(paging(PSE), &tables, 0x123, Some(0x5123));
        check(paging(PSE), &tables, 0x1123, Some(0x6123));
        check(paging(PSE), &tables, 0x40_0000 + 0x12_3456, Some(0x1_0092_3456));
        // Without them the bit means nothing, and there is no table at that address.
        check(paging(0), &tables, 0x40_0000 + 0x12_3456, None);
    }

    #[test]
    fn a_write_needs_every_level_writable_if_protection_is_on() {
        let tables = |broken: usize| {
            let mut tables = [
                (0x1000, 0x2000 | RW),
                (0x2000, 0x3000 | RW),
                (0x3000, 0x4000 | RW),
                (0x4000, 0x5000 | RW),
            ];
            if let Some((_, entry)) = tables.get_mut(broken) {
                *entry = *entry & !RW | READ_ONLY;
            }
            tables
        };
        check(long(0), &tables(9), 0, Some(0x5000));
        for broken in 0..4 {
            let memory = words(&tables(broken));
            assert_eq!(long(0).translate(&memory, 0, Access::Read), Ok(0x5000));
            assert_eq!(long(0).translate(&memory, 0, Access::Write), Err(NotTranslated));
            let unprotected = Paging { cr0: PAGING, ..long(0) };
            assert_eq!(unprotected.translate(&memory, 0, Access::Write), Ok(0x5000));
        }
    }

    #[test]
    fn a_table_outside_memory_translates_nothing() {
        let high = Paging { cr3: 1 << 40, ..long(0) };
        check(high, &[], 0, None);
        check(long(0), &[(0x1000, 1 << 40 | RW)], 0, None);
    }

    proptest! {
        #[test]
        fn no_registers_and_no_tables_make_a_walk_panic(
            (cr0, cr3, cr4, efer) in any::<(u64, u64, u64, u64)>(),
            linear: u64,
            filler: u64,
        ) {
            struct Same(u64);
            impl Tables for Same {
                fn word(&self, _: u64) -> Option<u64> {
                    Some(self.0)
                }
            }
            let paging = Paging { cr0, cr3, cr4, efer };
            for access in [Access::Read, Access::Write] {
                if let Ok(address) = paging.translate(&Same(filler), linear, access) {
                    prop_assert_eq!(address & 0xfff, linear & 0xfff);
                }
            }
        }
    }
}
