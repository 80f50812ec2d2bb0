//! The start information that a PVH guest is given.
//!
//! Also where everything of a new domain lies: its memory, the pages it shares with its
//! console and its store, and the start information itself, which is written behind the
//! program. [`crate::pvh`] reads what is written here.
//!
//! Source: Xen's public headers `arch-x86/hvm/start_info.h` and `xen.h` (flags).

use crate::elf::{ElfError, Program};

/// Bytes of a page.
const PAGE: u64 = 4096;
/// The first word of the structure.
const MAGIC: u32 = 0x336e_c578;
/// The version that has a memory map.
const VERSION: u32 = 1;
/// Bytes of the structure.
const HEAD: usize = 56;
/// Bytes of one line of the memory map.
const LINE: usize = 24;
/// Memory map types: ordinary memory, and what must be left alone.
const RAM: u32 = 1;
const RESERVED: u32 = 2;

/// `SIF_INITDOMAIN`: the domain that is started first, without a store to talk to.
const INITIAL_DOMAIN: u32 = 1 << 1;

/// The page of the local interrupt controller.
pub const APIC_PAGE: u64 = 0xfee00;
/// The page that the store's ring lies in.
pub const STORE_PAGE: u64 = 0xfeffc;
/// The page that the console's ring lies in.
pub const CONSOLE_PAGE: u64 = 0xfefff;
/// The first and the last page that the memory map reserves.
const SPECIAL: (u64, u64) = (0xfeff8, 0xfefff);

/// The longest command line, in bytes, with its zero byte.
pub const COMMAND_LINE: usize = 2048;
/// Bytes of the start information with everything it points to.
pub const BYTES: usize = 4096;

/// One line of the memory map.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Region {
    /// The first byte.
    pub start: u64,
    /// How many bytes.
    pub length: u64,
    /// Whether it is memory.
    pub usable: bool,
}

/// The memory map of a domain with `memory` bytes.
#[must_use]
pub const fn regions(memory: u64) -> [Region; 3] {
    let (first, last) = SPECIAL;
    [
        Region { start: 0, length: memory, usable: true },
        Region { start: APIC_PAGE * PAGE, length: PAGE, usable: false },
        Region { start: first * PAGE, length: (last - first + 1) * PAGE, usable: false },
    ]
}

/// Where a program's start information goes: into the page behind it.
///
/// # Errors
/// [`ElfError::Memory`] if `memory` bytes are too few for both.
pub fn place(program: &Program<'_>, memory: u64) -> Result<u32, ElfError> {
    let error = ElfError::Memory { end: program.end(), memory };
    let start = program.end().next_multiple_of(PAGE);
    let padding = start.saturating_sub(program.end());
    program.fits(memory, padding.saturating_add(BYTES as u64))?;
    u32::try_from(start).map_err(|_| error)
}

/// A command line longer than [`COMMAND_LINE`] allows, or with a zero byte in it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BadCommandLine;

/// The start information that begins at `at`, with everything it points to.
///
/// # Errors
/// [`BadCommandLine`].
pub fn build(
    at: u32,
    memory: u64,
    command_line: &str,
    initial_domain: bool,
) -> Result<[u8; BYTES], BadCommandLine> {
    const MAP: usize = 64;
    const WORDS: usize = BYTES - COMMAND_LINE;
    let mut page = [0; BYTES];
    let address = |offset: usize| u64::from(at).saturating_add(offset as u64);
    let flags = if initial_domain { INITIAL_DOMAIN } else { 0 };
    let map = regions(memory);

    put(&mut page, 0, &MAGIC.to_le_bytes());
    put(&mut page, 4, &VERSION.to_le_bytes());
    put(&mut page, 8, &flags.to_le_bytes());
    put(&mut page, 24, &address(WORDS).to_le_bytes());
    put(&mut page, 40, &address(MAP).to_le_bytes());
    put(&mut page, 48, &(map.len() as u32).to_le_bytes());
    for (index, region) in map.iter().enumerate() {
        let line = MAP + index * LINE;
        let kind = if region.usable { RAM } else { RESERVED };
        put(&mut page, line, &region.start.to_le_bytes());
        put(&mut page, line + 8, &region.length.to_le_bytes());
        put(&mut page, line + 16, &kind.to_le_bytes());
    }
    let words = command_line.as_bytes();
    if words.len() >= COMMAND_LINE || words.contains(&0) {
        return Err(BadCommandLine);
    }
    put(&mut page, WORDS, words);
    Ok(page)
}

const _: () = assert!(HEAD <= 64 && 64 + 3 * LINE <= BYTES - COMMAND_LINE);

/// Copy `bytes` to `offset`, where there is room for them.
fn put(page: &mut [u8; BYTES], offset: usize, bytes: &[u8]) {
    for (to, from) in page.iter_mut().skip(offset).zip(bytes) {
        *to = *from;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::address::{Extent, PhysicalAddress};
    use crate::boot_info::Loader;
    use crate::elf::Segment;
    use crate::physical::Physical as _;
    use crate::physical::fake::Memory;
    use crate::pvh;

    const AT: u32 = 0x20_0000;
    const MEMORY: u64 = 128 << 20;

    fn built(words: &str, initial: bool) -> Memory {
        let mut memory = Memory::new(AT.into(), BYTES);
        memory.put(AT.into(), &build(AT, MEMORY, words, initial).expect("short words"));
        memory
    }

    #[test]
    fn a_reader_of_the_protocol_finds_memory_and_command_line() {
        let memory = built("test=1 console", false);
        let info = pvh::parse(&&memory, PhysicalAddress::new(AT.into())).expect("sound");
        assert_eq!(info.loader, Loader::Pvh);
        assert_eq!(info.command_line.get("test"), Some("1"));
        assert_eq!(info.rsdp, None);
        assert!(info.modules.is_empty());
        let ram = Extent { start: PhysicalAddress::new(0), length: MEMORY };
        let usable = info.regions.iter().filter(|region| region.usable);
        assert_eq!(usable.map(|region| region.extent).collect::<std::vec::Vec<_>>(), [ram]);
    }

    #[test]
    fn the_flags_name_the_initial_domain_and_nothing_else() {
        for (initial, flags) in [(false, 0_u32), (true, 2)] {
            let memory = built("", initial);
            let bytes = (&memory).bytes(PhysicalAddress::new(u64::from(AT) + 8), 4);
            assert_eq!(bytes, Some(flags.to_le_bytes().as_slice()));
        }
    }

    #[test]
    fn a_command_line_that_does_not_fit_is_refused() {
        let long = "x".repeat(COMMAND_LINE);
        assert_eq!(build(AT, MEMORY, &long, false).err(), Some(BadCommandLine));
        assert!(build(AT, MEMORY, &long[1..], false).is_ok());
        assert_eq!(build(AT, MEMORY, "a\0b", false).err(), Some(BadCommandLine));
    }

    #[test]
    fn the_start_information_lies_in_the_page_behind_the_program() {
        let program = |length| Program {
            segments: [Segment { start: 0x10_0000, length, bytes: &[] }].into_iter().collect(),
            entry: 0x10_0000,
        };
        assert_eq!(place(&program(0x1000), MEMORY), Ok(0x10_1000));
        assert_eq!(place(&program(0x1001), MEMORY), Ok(0x10_2000));
        assert_eq!(place(&program(0x1001), 0x10_3000), Ok(0x10_2000));
        let error = ElfError::Memory { end: 0x10_1001, memory: 0x10_2fff };
        assert_eq!(place(&program(0x1001), 0x10_2fff), Err(error));
    }
}
