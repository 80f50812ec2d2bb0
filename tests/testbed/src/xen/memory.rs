//! `memory_op`: where the hypervisor's pages go, and what memory there is.

use super::view::View;
use super::{Bytes, Domain, Errno, Special, Width, is_self};
use crate::physical::{u32_at, u64_at};
use crate::start_info;

/// Commands carry a cookie above these bits.
const COMMAND: u32 = 0x3f;
/// Bytes of one line of a memory map: address, length, type.
const LINE: u64 = 20;
/// Bytes of a page.
const PAGE: u64 = 4096;

/// Carry out one command.
pub(super) fn run(
    memory: &View<'_, impl Domain>,
    command: u32,
    argument: u64,
) -> Result<i64, Errno> {
    const CURRENT_RESERVATION: u32 = 3;
    const MAXIMUM_RESERVATION: u32 = 4;
    const ADD_TO_PHYSMAP: u32 = 7;
    const MEMORY_MAP: u32 = 9;
    const MAXIMUM_FRAME: u32 = 14;
    const REMOVE_FROM_PHYSMAP: u32 = 15;
    if command > COMMAND {
        return Err(Errno::NoSystemCall);
    }
    match command {
        CURRENT_RESERVATION | MAXIMUM_RESERVATION => {
            whose(memory, argument)?;
            Ok((memory.domain().memory() / PAGE).cast_signed())
        }
        MAXIMUM_FRAME => {
            whose(memory, argument)?;
            Ok(start_info::CONSOLE_PAGE.cast_signed())
        }
        ADD_TO_PHYSMAP => add_to_physmap(memory, argument),
        REMOVE_FROM_PHYSMAP => remove_from_physmap(memory, argument),
        MEMORY_MAP => memory_map(memory, argument),
        _ => Err(Errno::NoSystemCall),
    }
}

/// Check that the domain number at `at` means the caller.
fn whose(memory: &View<'_, impl Domain>, at: u64) -> Result<(), Errno> {
    let domain = u16::from_le_bytes(memory.array(at)?);
    if is_self(memory.domain(), domain) { Ok(()) } else { Err(Errno::NotPermitted) }
}

/// `xen_add_to_physmap`: `{domid: u16, size: u16, space: u32, idx: word, gpfn: word}`.
fn add_to_physmap(memory: &View<'_, impl Domain>, at: u64) -> Result<i64, Errno> {
    const SHARED_INFO: u32 = 0;
    const GRANT_TABLE: u32 = 1;
    /// In the index: a page of status words.
    const STATUS: u64 = 1 << 31;
    whose(memory, at)?;
    let mut bytes = [0; 24];
    let (index, gfn) = match memory.width() {
        Width::Wide => {
            memory.read(at, &mut bytes)?;
            (u64_at(&bytes, 8), u64_at(&bytes, 16))
        }
        Width::Narrow => {
            memory.read(at, bytes.get_mut(..16).unwrap_or_default())?;
            (u32_at(&bytes, 8).map(u64::from), u32_at(&bytes, 12).map(u64::from))
        }
    };
    let space = u32_at(&bytes, 4).unwrap_or(u32::MAX);
    let (index, gfn) = index.zip(gfn).ok_or(Errno::Invalid)?;
    let page = u32::try_from(index & !STATUS).map_err(|_| Errno::Invalid)?;
    let special = match space {
        SHARED_INFO if index == 0 => Special::SharedInfo,
        GRANT_TABLE if index & STATUS != 0 => Special::GrantStatus(page),
        GRANT_TABLE => Special::Grants(page),
        SHARED_INFO => return Err(Errno::Invalid),
        _ => return Err(Errno::NoSystemCall),
    };
    memory.domain().place(special, gfn)?;
    Ok(0)
}

/// `xen_remove_from_physmap`: `{domid: u16, gpfn: word}`.
fn remove_from_physmap(memory: &View<'_, impl Domain>, at: u64) -> Result<i64, Errno> {
    whose(memory, at)?;
    let gfn = match memory.width() {
        Width::Wide => {
            let bytes: [u8; 16] = memory.array(at)?;
            u64_at(&bytes, 8)
        }
        Width::Narrow => {
            let bytes: [u8; 8] = memory.array(at)?;
            u32_at(&bytes, 4).map(u64::from)
        }
    };
    memory.domain().remove(gfn.ok_or(Errno::Invalid)?)?;
    Ok(0)
}

/// `xen_memory_map`: `{nr_entries: u32, buffer: word}`.
fn memory_map(memory: &View<'_, impl Domain>, at: u64) -> Result<i64, Errno> {
    const RAM: u32 = 1;
    const RESERVED: u32 = 2;
    let (room, mut buffer) = match memory.width() {
        Width::Wide => {
            let bytes: [u8; 16] = memory.array(at)?;
            (u32_at(&bytes, 0), u64_at(&bytes, 8))
        }
        Width::Narrow => {
            let bytes: [u8; 8] = memory.array(at)?;
            (u32_at(&bytes, 0), u32_at(&bytes, 4).map(u64::from))
        }
    };
    let room = room.unwrap_or(0);
    let mut written = 0_u32;
    for region in start_info::regions(memory.domain().memory()) {
        if written >= room {
            break;
        }
        let at = buffer.ok_or(Errno::Fault)?;
        let kind = if region.usable { RAM } else { RESERVED };
        memory.write_at(at, 0, &region.start.to_le_bytes())?;
        memory.write_at(at, 8, &region.length.to_le_bytes())?;
        memory.write_at(at, 16, &kind.to_le_bytes())?;
        buffer = at.checked_add(LINE);
        written += 1;
    }
    memory.write(at, &written.to_le_bytes())?;
    Ok(0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::xen::fake::Fake;
    use crate::xen::{Answer, Hypercall};

    const BASE: u64 = Fake::BASE;
    const SELF: u16 = 0x7ff0;

    #[track_caller]
    fn call(domain: &Fake, width: Width, command: u64, expected: i64) {
        let call = Hypercall { number: 12, arguments: [command, BASE, 0, 0, 0], width };
        assert_eq!(call.run(domain), Answer::Value(expected), "{width:?}");
    }

    /// Write a structure: bytes, then words of the width.
    fn put(domain: &Fake, width: Width, head: &[u8], words: &[u64]) {
        domain.put(BASE, head);
        let mut at = BASE + head.len() as u64;
        for word in words {
            let bytes = word.to_le_bytes();
            match width {
                Width::Wide => domain.put(at, &bytes),
                Width::Narrow => domain.put(at, &bytes[..4]),
            }
            at += if width == Width::Wide { 8 } else { 4 };
        }
    }

    fn head(domain: u16, space: u32) -> std::vec::Vec<u8> {
        [&domain.to_le_bytes()[..], &[0, 0], &space.to_le_bytes()].concat()
    }

    #[track_caller]
    fn placed(space: u32, index: u64, expected: Result<Special, i64>) {
        for width in [Width::Wide, Width::Narrow] {
            for owner in [SELF, Fake::ID] {
                let domain = Fake::new();
                put(&domain, width, &head(owner, space), &[index, 0x123]);
                call(&domain, width, 7, expected.err().unwrap_or(0));
                let wanted: std::vec::Vec<_> =
                    expected.into_iter().map(|special| (special, 0x123)).collect();
                assert_eq!(*domain.placed.borrow(), wanted, "{width:?}");
            }
        }
    }

    #[test]
    fn each_space_places_its_page_in_both_widths() {
        placed(0, 0, Ok(Special::SharedInfo));
        placed(0, 1, Err(-22));
        placed(1, 0, Ok(Special::Grants(0)));
        placed(1, 7, Ok(Special::Grants(7)));
        placed(1, 1 << 31, Ok(Special::GrantStatus(0)));
        placed(1, 1 << 31 | 3, Ok(Special::GrantStatus(3)));
        for space in [2, 3, 4, 5, 99] {
            placed(space, 0, Err(-38));
        }
    }

    #[test]
    fn another_domain_is_not_touched() {
        let domain = Fake::new();
        put(&domain, Width::Wide, &head(Fake::OTHER, 0), &[0, 1]);
        for command in [3, 4, 7, 14, 15] {
            call(&domain, Width::Wide, command, -1);
        }
        assert!(domain.placed.borrow().is_empty() && domain.removed.borrow().is_empty());
    }

    #[test]
    fn a_removed_number_is_read_in_both_widths() {
        let domain = Fake::new();
        put(&domain, Width::Wide, &[0xf0, 0x7f, 0, 0, 0, 0, 0, 0], &[0x77]);
        call(&domain, Width::Wide, 15, 0);
        put(&domain, Width::Narrow, &[0xf0, 0x7f, 0, 0], &[0x78]);
        call(&domain, Width::Narrow, 15, 0);
        assert_eq!(*domain.removed.borrow(), [0x77, 0x78]);
    }

    #[test]
    fn the_memory_map_is_cut_to_the_room_there_is() {
        for width in [Width::Wide, Width::Narrow] {
            for room in 0..5_u32 {
                let domain = Fake::new();
                let count = room.to_le_bytes();
                let padded = [count, [0; 4]].concat();
                let head = if width == Width::Wide { &padded[..] } else { &count[..] };
                put(&domain, width, head, &[BASE + 0x100]);
                call(&domain, width, 9, 0);
                let written = u32_at(&domain.get(BASE, 4), 0).expect("four bytes");
                assert_eq!(written, room.min(3));
                let map = domain.get(BASE + 0x100, 5 * LINE);
                assert!(map[(written as usize) * 20..].iter().all(|byte| *byte == 0));
                if written > 0 {
                    assert_eq!(u64_at(&map, 8), Some(128 << 20));
                    assert_eq!(u32_at(&map, 16), Some(1));
                }
            }
        }
    }

    #[test]
    fn sizes_are_told_in_pages() {
        let domain = Fake::new();
        domain.put(BASE, &SELF.to_le_bytes());
        call(&domain, Width::Wide, 3, 32768);
        call(&domain, Width::Narrow, 4, 32768);
        call(&domain, Width::Wide, 14, 0xfefff);
        call(&domain, Width::Wide, 7 | 1 << 6, -38);
    }
}
