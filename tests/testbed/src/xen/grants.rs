//! `grant_table_op`: the few structures that narrow guests lay out otherwise.
//!
//! The elements of map and unmap are alike in both widths. Those with an address or a
//! frame number in them are copied into the room of the view in the wide layout, and
//! what came of them is copied back.

use super::view::{ROOM, ROOM_BYTES, View};
use super::{Bytes, Domain, Errno, Fault, Width};
use crate::physical::u32_at;

/// Operations whose structures differ.
mod operation {
    pub(super) const SETUP_TABLE: u32 = 2;
    pub(super) const COPY: u32 = 5;
    pub(super) const GET_STATUS_FRAMES: u32 = 9;
}

/// `GNTST_bad_virt_addr`: the list could not be written.
const BAD_VIRTUAL_ADDRESS: i16 = -5;

/// Carry out one operation.
pub(super) fn run(memory: &View<'_, impl Domain>, command: u32, argument: u64, count: u32) -> i64 {
    let result = match (memory.width(), command) {
        (Width::Narrow, operation::SETUP_TABLE) if count == 1 => setup_table(memory, argument),
        (Width::Narrow, operation::GET_STATUS_FRAMES) if count == 1 => {
            get_status_frames(memory, argument)
        }
        (Width::Narrow, operation::COPY) if count <= i32::MAX as u32 => {
            copy(memory, argument, count)
        }
        (Width::Narrow | Width::Wide, _) => {
            Ok(memory.domain().grant_table_op(memory, command, argument, count))
        }
    };
    result.unwrap_or(Errno::Fault as i64)
}

/// `{dom: u16, nr_frames: u32, status: i16, frame_list: u32}`, the list one of 32-bit numbers.
fn setup_table(memory: &View<'_, impl Domain>, at: u64) -> Result<i64, Fault> {
    /// Bytes of the wide structure, and where the list begins.
    const LIST: u64 = 24;
    /// Numbers there is room for. No table has as many frames, so a longer list is
    /// refused by the operation.
    const NUMBERS: u64 = (ROOM_BYTES as u64 - LIST) / 8;
    let narrow: [u8; 16] = memory.array(at)?;
    let frames = u32_at(&narrow, 4).ok_or(Fault)?;
    let list = u32_at(&narrow, 12).ok_or(Fault)?;
    // Domain and count lie alike.
    memory.write(ROOM, narrow.get(..8).ok_or(Fault)?)?;
    memory.write_at(ROOM, 16, &(ROOM + LIST).to_le_bytes())?;
    let result = memory.domain().grant_table_op(memory, operation::SETUP_TABLE, ROOM, 1);
    if result != 0 {
        return Ok(result);
    }
    let mut status = i16::from_le_bytes(memory.array(ROOM + 8)?);
    if status == 0 {
        for index in 0..u64::from(frames).min(NUMBERS) {
            let number = u64::from_le_bytes(memory.array(ROOM + LIST + 8 * index)?);
            // "Nowhere" is all ones in both widths.
            let number = u32::try_from(number).unwrap_or(u32::MAX);
            let written = memory.write_at(u64::from(list), 4 * index, &number.to_le_bytes());
            if written.is_err() {
                status = BAD_VIRTUAL_ADDRESS;
                break;
            }
        }
    }
    memory.write_at(at, 8, &status.to_le_bytes())?;
    Ok(0)
}

/// `{nr_frames: u32, dom: u16, status: i16, frame_list: u32}`, the list one of 64-bit numbers.
fn get_status_frames(memory: &View<'_, impl Domain>, at: u64) -> Result<i64, Fault> {
    let narrow: [u8; 12] = memory.array(at)?;
    let list = u32_at(&narrow, 8).ok_or(Fault)?;
    memory.write(ROOM, narrow.get(..8).ok_or(Fault)?)?;
    memory.write_at(ROOM, 8, &u64::from(list).to_le_bytes())?;
    let result = memory.domain().grant_table_op(memory, operation::GET_STATUS_FRAMES, ROOM, 1);
    if result == 0 {
        let status: [u8; 2] = memory.array(ROOM + 6)?;
        memory.write_at(at, 6, &status)?;
    }
    Ok(result)
}

/// Elements of `{source, dest: {ref or frame: u32, domid: u16, offset: u16}, len: u16,
/// flags: u16, status: i16}`.
fn copy(memory: &View<'_, impl Domain>, at: u64, count: u32) -> Result<i64, Fault> {
    const NARROW: u64 = 24;
    for index in 0..u64::from(count) {
        let at = at.checked_add(NARROW.checked_mul(index).ok_or(Fault)?).ok_or(Fault)?;
        let narrow: [u8; 24] = memory.array(at)?;
        let mut wide = [0; 40];
        for side in [0, 8] {
            let (from, to) = (side, 2 * side);
            wide[to..to + 4].copy_from_slice(&narrow[from..from + 4]);
            wide[to + 8..to + 12].copy_from_slice(&narrow[from + 4..from + 8]);
        }
        wide[32..36].copy_from_slice(&narrow[16..20]);
        memory.write(ROOM, &wide)?;
        let result = memory.domain().grant_table_op(memory, operation::COPY, ROOM, 1);
        if result != 0 {
            return Ok(result);
        }
        let status: [u8; 2] = memory.array(ROOM + 36)?;
        memory.write_at(at, 20, &status)?;
    }
    Ok(0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::physical::{u16_at, u64_at};
    use crate::xen::fake::Fake;
    use crate::xen::{Answer, Hypercall};

    const BASE: u64 = Fake::BASE;
    const LIST: u64 = Fake::BASE + 0x800;

    #[track_caller]
    fn call(domain: &Fake, width: Width, arguments: [u64; 3], expected: i64) {
        let [first, second, third] = arguments;
        let call = Hypercall { number: 20, arguments: [first, second, third, 0, 0], width };
        assert_eq!(call.run(domain), Answer::Value(expected));
    }

    fn wide<const N: usize>(memory: &dyn Bytes, at: u64) -> [u8; N] {
        let mut bytes = [0; N];
        memory.read(at, &mut bytes).expect("the structure is there");
        bytes
    }

    #[test]
    fn what_lies_alike_is_passed_on_as_it_is() {
        let domain = Fake { on_grants: |_, _, _, _| -22, ..Fake::new() };
        for command in [0, 1, 4, 6, 7, 8, 10, 11, 99, 2 | 1 << 12] {
            call(&domain, Width::Narrow, [command, BASE, 3], -22);
            assert_eq!(domain.grants.borrow_mut().pop(), Some((low(command), BASE, 3)));
        }
        for command in 0..13 {
            call(&domain, Width::Wide, [command, BASE, 1], -22);
            assert_eq!(domain.grants.borrow_mut().pop(), Some((low(command), BASE, 1)));
        }
    }

    fn low(command: u64) -> u32 {
        u32::try_from(command).expect("small")
    }

    /// Lists frames 0x100, 0x101, "nowhere", in the wide layout.
    fn list_three(memory: &dyn Bytes, command: u32, at: u64, count: u32) -> i64 {
        assert_eq!(count, 1);
        let (list, status) = match command {
            operation::SETUP_TABLE => {
                let request: [u8; 24] = wide(memory, at);
                assert_eq!((u16_at(&request, 0), u32_at(&request, 4)), (Some(7), Some(3)));
                (u64_at(&request, 16), 8)
            }
            _ => {
                let request: [u8; 16] = wide(memory, at);
                assert_eq!((u16_at(&request, 4), u32_at(&request, 0)), (Some(7), Some(3)));
                (u64_at(&request, 8), 6)
            }
        };
        let list = list.expect("a list");
        let mut result = 0_i16;
        for (place, number) in [0x100, 0x101, u64::MAX].into_iter().enumerate() {
            if memory.write(list + 8 * place as u64, &number.to_le_bytes()).is_err() {
                result = -5;
            }
        }
        memory.write(at + status, &result.to_le_bytes()).expect("the status is there");
        0
    }

    #[test]
    fn a_narrow_setup_gets_32_bit_numbers() {
        let domain = Fake { on_grants: list_three, ..Fake::new() };
        let request = |list: u64| {
            domain.put(BASE, &7_u16.to_le_bytes());
            domain.put(BASE + 4, &3_u32.to_le_bytes());
            domain.put(BASE + 8, &99_i16.to_le_bytes());
            domain.put(BASE + 12, &list.to_le_bytes()[..4]);
        };
        request(LIST);
        call(&domain, Width::Narrow, [2, BASE, 1], 0);
        assert_eq!(domain.get(BASE + 8, 2), [0, 0]);
        let list = domain.get(LIST, 16);
        let numbers: std::vec::Vec<_> = (0..4).map(|place| u32_at(&list, 4 * place)).collect();
        assert_eq!(numbers, [Some(0x100), Some(0x101), Some(u32::MAX), Some(0)]);
        request(0x1000);
        call(&domain, Width::Narrow, [2, BASE, 1], 0);
        assert_eq!(domain.get(BASE + 8, 2), (-5_i16).to_le_bytes());
        call(&domain, Width::Narrow, [2, 0x1000, 1], -14);
    }

    #[test]
    fn a_narrow_list_of_status_frames_has_64_bit_numbers() {
        let domain = Fake { on_grants: list_three, ..Fake::new() };
        domain.put(BASE, &3_u32.to_le_bytes());
        domain.put(BASE + 4, &7_u16.to_le_bytes());
        domain.put(BASE + 6, &99_i16.to_le_bytes());
        domain.put(BASE + 8, &LIST.to_le_bytes()[..4]);
        call(&domain, Width::Narrow, [9, BASE, 1], 0);
        assert_eq!(domain.get(BASE + 6, 2), [0, 0]);
        let list = domain.get(LIST, 24);
        assert_eq!((u64_at(&list, 0), u64_at(&list, 16)), (Some(0x100), Some(u64::MAX)));
    }

    /// Writes the sum of all fields of the wide element as its status.
    fn sum(memory: &dyn Bytes, command: u32, at: u64, count: u32) -> i64 {
        assert_eq!((command, count), (operation::COPY, 1));
        let element: [u8; 40] = wide(memory, at);
        let words = [u64_at(&element, 0), u64_at(&element, 16)];
        let shorts = [8, 10, 24, 26, 32, 34].map(|offset| u16_at(&element, offset));
        let words = words.into_iter().flatten().sum::<u64>();
        let shorts = shorts.into_iter().flatten().map(u64::from).sum::<u64>();
        let status = (words + shorts) as u16;
        memory.write(at + 36, &status.to_le_bytes()).expect("the status is there");
        0
    }

    #[test]
    fn every_narrow_copy_is_widened_and_gets_its_own_status() {
        let domain = Fake { on_grants: sum, ..Fake::new() };
        for index in 0..3_u64 {
            let at = BASE + 24 * index;
            let scale = u32::try_from(index).expect("small") + 1;
            for (offset, value) in [(0, 1000), (8, 2000)] {
                domain.put(at + offset, &(value * scale).to_le_bytes());
            }
            for (offset, value) in [(4, 1), (6, 2), (12, 4), (14, 8), (16, 16), (18, 32)] {
                domain.put(at + offset, &(value * scale as u16).to_le_bytes());
            }
        }
        call(&domain, Width::Narrow, [5, BASE, 3], 0);
        for index in 0..3_u16 {
            let status = domain.get(BASE + 24 * u64::from(index) + 20, 2);
            assert_eq!(u16_at(&status, 0), Some(3063 * (index + 1)), "element {index}");
        }
        let end = BASE + Fake::LENGTH - 24;
        call(&domain, Width::Narrow, [5, end, 2], -14);
        call(&domain, Width::Narrow, [5, BASE, 0], 0);
    }
}
