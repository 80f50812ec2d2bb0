//! The start information of Xen's PVH boot protocol, version 1.
//!
//! Source: Xen's public header `arch-x86/hvm/start_info.h` (layout of
//! `hvm_start_info`, `hvm_modlist_entry`, `hvm_memmap_table_entry`).

use arrayvec::ArrayVec;

use crate::address::{Extent, PhysicalAddress};
use crate::boot_info::{BootInfo, BootInfoError, COMMAND_LINE, Loader, Region, push};
use crate::command_line::CommandLine;
use crate::physical::{Physical, text, u32_at, u64_at};

/// The first word of the structure.
const MAGIC: u32 = 0x336e_c578;
/// Bytes of the structure from version 1 on, which added the memory map.
const START_INFO: usize = 56;
/// Bytes of one module list entry: address, size, command line, reserved.
const MODULE: usize = 32;
/// Bytes of one memory map entry: address, size, type, reserved.
const REGION: usize = 24;
/// The memory map type of ordinary memory.
const RAM: u32 = 1;

/// Read the start information at `at`.
///
/// # Errors
/// [`BootInfoError`] if anything it points to cannot be read, it is older than version 1
/// or has no memory map, or a list is longer than its bound.
pub fn parse<'m>(
    memory: &impl Physical<'m>,
    at: PhysicalAddress,
) -> Result<BootInfo<'m>, BootInfoError> {
    let unreadable = BootInfoError::Unreadable(at);
    let head = memory.bytes(at, START_INFO).ok_or(unreadable)?;
    let word = |offset| u32_at(head, offset).ok_or(unreadable);
    let address = |offset| {
        let value = u64_at(head, offset).ok_or(unreadable)?;
        Ok(PhysicalAddress::new(value))
    };
    if word(0)? != MAGIC {
        return Err(BootInfoError::Magic(at));
    }
    let (version, module_count) = (word(4)?, word(12)?);
    let (module_list, command_line) = (address(16)?, address(24)?);
    let (rsdp, map, region_count) = (address(32)?, address(40)?, word(48)?);
    if version < 1 || region_count == 0 {
        return Err(BootInfoError::NoMemoryMap);
    }

    let mut info = BootInfo {
        loader: Loader::Pvh,
        command_line: CommandLine::new(""),
        regions: ArrayVec::new(),
        rsdp: (rsdp.get() != 0).then_some(rsdp),
        modules: ArrayVec::new(),
        occupied: ArrayVec::new(),
    };
    keep(&mut info, at, START_INFO)?;

    if command_line.get() != 0 {
        let words = text(memory, command_line, COMMAND_LINE).ok_or(BootInfoError::CommandLine)?;
        info.command_line = CommandLine::new(words);
        keep(&mut info, command_line, words.len().saturating_add(1))?;
    }

    let entries = list(memory, map, region_count, REGION)?;
    for entry in entries.chunks_exact(REGION) {
        let extent = extent(entry).ok_or(BootInfoError::Unreadable(map))?;
        let kind = u32_at(entry, 16).ok_or(BootInfoError::Unreadable(map))?;
        let usable = kind == RAM;
        push(&mut info.regions, Region { extent, usable })?;
    }
    keep(&mut info, map, entries.len())?;

    if module_count != 0 {
        let entries = list(memory, module_list, module_count, MODULE)?;
        for entry in entries.chunks_exact(MODULE) {
            let module = extent(entry).ok_or(BootInfoError::Unreadable(module_list))?;
            push(&mut info.modules, module)?;
            push(&mut info.occupied, module)?;
        }
        keep(&mut info, module_list, entries.len())?;
    }
    Ok(info)
}

/// All bytes of a list of `count` entries of `size` bytes.
fn list<'m>(
    memory: &impl Physical<'m>,
    at: PhysicalAddress,
    count: u32,
    size: usize,
) -> Result<&'m [u8], BootInfoError> {
    usize::try_from(count)
        .ok()
        .and_then(|count| count.checked_mul(size))
        .and_then(|length| memory.bytes(at, length))
        .ok_or(BootInfoError::Unreadable(at))
}

/// The extent that the first two fields of a list entry describe.
fn extent(entry: &[u8]) -> Option<Extent> {
    Some(Extent { start: PhysicalAddress::new(u64_at(entry, 0)?), length: u64_at(entry, 8)? })
}

/// Note that the information refers to these bytes.
fn keep(
    info: &mut BootInfo<'_>,
    start: PhysicalAddress,
    length: usize,
) -> Result<(), BootInfoError> {
    let length = u64::try_from(length).map_err(|_| BootInfoError::TooMany)?;
    push(&mut info.occupied, Extent { start, length })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::physical::fake::Memory;

    const INFO: u64 = 0x1000;
    const MAP: u64 = 0x1100;
    const LIST: u64 = 0x1400;
    const WORDS: u64 = 0x1300;

    /// Start information with two regions, one module and a command line.
    fn memory() -> Memory {
        let mut memory = Memory::new(INFO, 0x1000);
        memory.put(INFO, &MAGIC.to_le_bytes());
        memory.put(INFO + 4, &1_u32.to_le_bytes());
        memory.put(INFO + 12, &1_u32.to_le_bytes());
        memory.put(INFO + 16, &LIST.to_le_bytes());
        memory.put(INFO + 24, &WORDS.to_le_bytes());
        memory.put(INFO + 32, &0xf_5000_u64.to_le_bytes());
        memory.put(INFO + 40, &MAP.to_le_bytes());
        memory.put(INFO + 48, &2_u32.to_le_bytes());
        memory.put(WORDS, b"case=boot\0");
        for (index, (start, length, kind)) in
            [(0_u64, 0x9_fc00_u64, 1_u32), (0xf_0000, 0x1_0000, 2)].into_iter().enumerate()
        {
            let entry = MAP + 24 * u64::try_from(index).expect("small");
            memory.put(entry, &start.to_le_bytes());
            memory.put(entry + 8, &length.to_le_bytes());
            memory.put(entry + 16, &kind.to_le_bytes());
        }
        memory.put(LIST, &0x80_0000_u64.to_le_bytes());
        memory.put(LIST + 8, &77_u64.to_le_bytes());
        memory
    }

    /// One damaged field, and the error it must give.
    #[track_caller]
    fn check(address: u64, bytes: &[u8], expected: BootInfoError) {
        let mut memory = memory();
        memory.put(address, bytes);
        let result = parse(&&memory, PhysicalAddress::new(INFO));
        assert_eq!(result.err(), Some(expected));
    }

    #[test]
    fn every_part_of_a_sound_structure_is_read() {
        let memory = memory();
        let info = parse(&&memory, PhysicalAddress::new(INFO)).expect("sound");
        assert_eq!(info.loader, Loader::Pvh);
        assert_eq!(info.command_line.get("case"), Some("boot"));
        assert_eq!(info.rsdp, Some(PhysicalAddress::new(0xf_5000)));
        let usable: std::vec::Vec<_> = info.regions.iter().map(|region| region.usable).collect();
        assert_eq!(usable, [true, false]);
        assert_eq!(info.regions[1].extent.start, PhysicalAddress::new(0xf_0000));
        let module = Extent { start: PhysicalAddress::new(0x80_0000), length: 77 };
        assert_eq!(info.modules.as_slice(), [module]);
    }

    #[test]
    fn everything_it_refers_to_is_listed_as_occupied() {
        let memory = memory();
        let info = parse(&&memory, PhysicalAddress::new(INFO)).expect("sound");
        let kept: std::vec::Vec<_> =
            info.occupied.iter().map(|extent| (extent.start.get(), extent.length)).collect();
        assert_eq!(kept, [(INFO, 56), (WORDS, 10), (MAP, 48), (0x80_0000, 77), (LIST, 32)]);
    }

    #[test]
    fn each_damaged_field_gives_its_own_error() {
        let unreadable = |at| BootInfoError::Unreadable(PhysicalAddress::new(at));
        check(INFO, &[0], BootInfoError::Magic(PhysicalAddress::new(INFO)));
        check(INFO + 4, &0_u32.to_le_bytes(), BootInfoError::NoMemoryMap);
        check(INFO + 48, &0_u32.to_le_bytes(), BootInfoError::NoMemoryMap);
        check(INFO + 48, &65_u32.to_le_bytes(), BootInfoError::TooMany);
        check(INFO + 48, &u32::MAX.to_le_bytes(), unreadable(MAP));
        check(INFO + 40, &0x10_u64.to_le_bytes(), unreadable(0x10));
        check(INFO + 16, &0x10_u64.to_le_bytes(), unreadable(0x10));
        check(INFO + 12, &9_u32.to_le_bytes(), BootInfoError::TooMany);
        check(INFO + 24, &u64::MAX.to_le_bytes(), BootInfoError::CommandLine);
        check(WORDS, &[0xff], BootInfoError::CommandLine);
    }

    #[test]
    fn a_structure_out_of_reach_is_an_error() {
        let memory = memory();
        for at in [0, INFO + 0x1000 - 55, u64::MAX] {
            let at = PhysicalAddress::new(at);
            assert_eq!(parse(&&memory, at).err(), Some(BootInfoError::Unreadable(at)));
        }
    }
}
