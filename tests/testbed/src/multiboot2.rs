//! The boot information of the Multiboot2 specification 2.0, section 3.6.
//!
//! A list of tags, each aligned to 8 bytes. Tags this image has no use for are skipped.

use core::ops::ControlFlow;

use arrayvec::ArrayVec;

use crate::address::{Extent, PhysicalAddress};
use crate::boot_info::{BootInfo, BootInfoError, COMMAND_LINE, Loader, Region, push};
use crate::command_line::CommandLine;
use crate::physical::{Physical, u32_at, u64_at};

/// What the loader leaves in EAX.
pub const MAGIC: u32 = 0x36d7_6289;
/// The largest information block that is read, in bytes.
const LIMIT: u32 = 1 << 20;

/// Section 3.6.2 and on: the tags that are used.
mod tag {
    pub(super) const END: u32 = 0;
    pub(super) const COMMAND_LINE: u32 = 1;
    pub(super) const MODULE: u32 = 3;
    pub(super) const MEMORY_MAP: u32 = 6;
    pub(super) const RSDP_1: u32 = 14;
    pub(super) const RSDP_2: u32 = 15;
}

/// Section 3.6.8: ordinary memory.
const RAM: u32 = 1;

/// Read the boot information at `at`.
///
/// # Errors
/// [`BootInfoError`] if a tag does not fit the block, there is no memory map, or a list
/// is longer than its bound.
pub fn parse<'m>(
    memory: &impl Physical<'m>,
    at: PhysicalAddress,
) -> Result<BootInfo<'m>, BootInfoError> {
    let unreadable = BootInfoError::Unreadable(at);
    let total = memory.bytes(at, 8).and_then(|head| u32_at(head, 0));
    let total = total.filter(|total| *total <= LIMIT).ok_or(unreadable)?;
    let length = usize::try_from(total).map_err(|_| unreadable)?;
    let block = memory.bytes(at, length).ok_or(unreadable)?;

    let mut info = BootInfo {
        loader: Loader::Multiboot2,
        command_line: CommandLine::new(""),
        regions: ArrayVec::new(),
        rsdp: None,
        modules: ArrayVec::new(),
        occupied: ArrayVec::new(),
    };
    let whole = Extent { start: at, length: u64::from(total) };
    push(&mut info.occupied, whole)?;

    let mut offset = 8_usize;
    loop {
        let kind = u32_at(block, offset).ok_or(unreadable)?;
        let size = offset.checked_add(4).and_then(|at| u32_at(block, at)).ok_or(unreadable)?;
        let size = usize::try_from(size).map_err(|_| unreadable)?;
        let end = offset.checked_add(size).ok_or(unreadable)?;
        let body = offset.checked_add(8).and_then(|from| block.get(from..end)).ok_or(unreadable)?;
        let body_at = u64::try_from(offset)
            .ok()
            .and_then(|offset| at.checked_add(offset)?.checked_add(8))
            .ok_or(unreadable)?;
        if take(&mut info, kind, body, body_at, unreadable)?.is_break() {
            break;
        }
        offset = end.checked_next_multiple_of(8).ok_or(unreadable)?;
    }
    if info.regions.is_empty() {
        return Err(BootInfoError::NoMemoryMap);
    }
    Ok(info)
}

/// Use one tag; break at the end tag.
fn take<'m>(
    info: &mut BootInfo<'m>,
    kind: u32,
    body: &'m [u8],
    body_at: PhysicalAddress,
    unreadable: BootInfoError,
) -> Result<ControlFlow<()>, BootInfoError> {
    match kind {
        tag::END => return Ok(ControlFlow::Break(())),
        tag::COMMAND_LINE => {
            let length = body.iter().position(|byte| *byte == 0);
            let length = length.filter(|length| *length < COMMAND_LINE);
            let words = length.and_then(|length| core::str::from_utf8(body.get(..length)?).ok());
            info.command_line = CommandLine::new(words.ok_or(BootInfoError::CommandLine)?);
        }
        tag::MODULE => {
            let start = u32_at(body, 0).ok_or(unreadable)?;
            let end = u32_at(body, 4).ok_or(unreadable)?;
            let length = end.checked_sub(start).ok_or(unreadable)?;
            let module =
                Extent { start: PhysicalAddress::new(u64::from(start)), length: u64::from(length) };
            push(&mut info.modules, module)?;
            push(&mut info.occupied, module)?;
        }
        tag::MEMORY_MAP => {
            let size = u32_at(body, 0).and_then(|size| usize::try_from(size).ok());
            let size = size.filter(|size| *size >= 20).ok_or(unreadable)?;
            let entries = body.get(8..).ok_or(unreadable)?;
            for entry in entries.chunks_exact(size) {
                let extent = Extent {
                    start: PhysicalAddress::new(u64_at(entry, 0).ok_or(unreadable)?),
                    length: u64_at(entry, 8).ok_or(unreadable)?,
                };
                let usable = u32_at(entry, 16).ok_or(unreadable)? == RAM;
                push(&mut info.regions, Region { extent, usable })?;
            }
        }
        // A copy of the root pointer is in the tag itself; the newer one wins.
        tag::RSDP_1 if info.rsdp.is_none() => info.rsdp = Some(body_at),
        tag::RSDP_2 => info.rsdp = Some(body_at),
        _ => {}
    }
    Ok(ControlFlow::Continue(()))
}

#[cfg(test)]
mod tests {
    use std::vec::Vec;

    use super::*;
    use crate::physical::fake::Memory;

    const AT: u64 = 0x9000;

    /// A block of these tags, closed by an end tag unless `open`.
    fn block(tags: &[(u32, &[u8])], open: bool) -> Memory {
        let mut bytes: Vec<u8> = [0; 8].into();
        let end: (u32, &[u8]) = (tag::END, &[]);
        for (kind, body) in tags.iter().chain(if open { None } else { Some(&end) }) {
            bytes.extend(kind.to_le_bytes());
            let size = u32::try_from(body.len() + 8).expect("small");
            bytes.extend(size.to_le_bytes());
            bytes.extend(*body);
            bytes.resize(bytes.len().next_multiple_of(8), 0);
        }
        let total = u32::try_from(bytes.len()).expect("small");
        bytes[..4].copy_from_slice(&total.to_le_bytes());
        let mut memory = Memory::new(AT, bytes.len());
        memory.put(AT, &bytes);
        memory
    }

    fn map() -> Vec<u8> {
        let mut body = Vec::new();
        body.extend(24_u32.to_le_bytes());
        body.extend(0_u32.to_le_bytes());
        for (start, length, kind) in [(0_u64, 0x9_f000_u64, 1_u64), (0x10_0000, 0x100_0000, 3)] {
            body.extend(start.to_le_bytes());
            body.extend(length.to_le_bytes());
            body.extend(kind.to_le_bytes());
        }
        body
    }

    #[track_caller]
    fn refused(tags: &[(u32, &[u8])], open: bool, expected: BootInfoError) {
        let memory = block(tags, open);
        assert_eq!(parse(&&memory, PhysicalAddress::new(AT)).err(), Some(expected));
    }

    #[test]
    fn the_used_tags_are_read_and_the_others_skipped() {
        let map = map();
        let module = [0, 0, 0x80, 0, 5, 0, 0x80, 0, b'm', 0];
        let memory = block(
            &[(1, b"case=acpi\0"), (99, b"abc"), (3, &module), (6, &map), (14, &[1; 20])],
            false,
        );
        let info = parse(&&memory, PhysicalAddress::new(AT)).expect("sound");
        assert_eq!(info.loader, Loader::Multiboot2);
        assert_eq!(info.command_line.get("case"), Some("acpi"));
        let module = Extent { start: PhysicalAddress::new(0x80_0000), length: 5 };
        assert_eq!(info.modules.as_slice(), [module]);
        assert_eq!(info.regions.len(), 2);
        assert!(info.regions[0].usable && !info.regions[1].usable);
        let rsdp = info.rsdp.expect("a copy");
        assert_eq!((&memory).bytes(rsdp, 20), Some([1; 20].as_slice()));
        assert_eq!(info.occupied.len(), 2, "the block and the module");
    }

    #[test]
    fn the_newer_root_pointer_wins_in_either_order() {
        let map = map();
        for tags in [
            [(6, map.as_slice()), (14, [1; 20].as_slice()), (15, [2; 36].as_slice())],
            [(6, map.as_slice()), (15, [2; 36].as_slice()), (14, [1; 20].as_slice())],
        ] {
            let memory = block(&tags, false);
            let info = parse(&&memory, PhysicalAddress::new(AT)).expect("sound");
            let rsdp = info.rsdp.expect("a copy");
            assert_eq!((&memory).bytes(rsdp, 1), Some([2].as_slice()));
        }
    }

    #[test]
    fn a_damaged_block_is_refused() {
        let map = map();
        let unreadable = BootInfoError::Unreadable(PhysicalAddress::new(AT));
        refused(&[], false, BootInfoError::NoMemoryMap);
        refused(&[(6, &map)], true, unreadable);
        refused(&[(6, &map[..7])], false, unreadable);
        refused(&[(6, &[0; 32])], false, unreadable);
        refused(&[(3, &[9, 0, 0, 0, 8, 0, 0, 0])], false, unreadable);
        refused(&[(1, b"no zero byte")], false, BootInfoError::CommandLine);
        refused(&[(1, b"\xff\0")], false, BootInfoError::CommandLine);
    }

    #[test]
    fn a_tag_smaller_than_its_head_does_not_loop() {
        let mut memory = block(&[(99, &[0; 8])], false);
        for size in [0_u32, 7, u32::MAX] {
            memory.put(AT + 12, &size.to_le_bytes());
            let result = parse(&&memory, PhysicalAddress::new(AT));
            assert_eq!(
                result.err(),
                Some(BootInfoError::Unreadable(PhysicalAddress::new(AT))),
                "size {size}"
            );
        }
    }
}
