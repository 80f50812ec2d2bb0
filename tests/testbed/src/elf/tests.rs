//! Files as linkers make them, damaged files, and files of random bytes.

use std::string::ToString;
use std::vec;
use std::vec::Vec;

use proptest::prelude::*;

use super::*;

const TEXT: &[u8] = b"\x90\x90\xf4";

/// A file of one class with program headers `(type, address, bytes, bytes in memory, alignment)`.
fn file(wide: bool, headers: &[(u32, u64, &[u8], u64, u64)]) -> Vec<u8> {
    let (head, each) = if wide { (64, 56) } else { (52, 32) };
    let mut file = vec![0; head];
    file[..4].copy_from_slice(MAGIC);
    file[4] = if wide { 2 } else { 1 };
    file[5] = 1;
    file[6] = 1;
    file[16] = 2;
    file[18] = if wide { 62 } else { 3 };
    let put = |file: &mut Vec<u8>, at: usize, value: u64, width: usize| {
        file[at..at + width].copy_from_slice(&value.to_le_bytes()[..width]);
    };
    let (width, table) = if wide { (8, 32) } else { (4, 28) };
    put(&mut file, table, head as u64, width);
    let shift = if wide { 12 } else { 0 };
    put(&mut file, 42 + shift, each as u64, 2);
    put(&mut file, 44 + shift, headers.len() as u64, 2);
    file.resize(head + each * headers.len(), 0);
    for (index, (kind, address, bytes, memory, alignment)) in headers.iter().enumerate() {
        let offset = file.len() as u64;
        file.extend(*bytes);
        let at = head + each * index;
        put(&mut file, at, u64::from(*kind), 4);
        let fields: [(usize, usize, u64); 5] = [
            (4, 8, offset),
            (12, 24, *address),
            (16, 32, bytes.len() as u64),
            (20, 40, *memory),
            (28, 48, *alignment),
        ];
        for (narrow, broad, value) in fields {
            put(&mut file, at + if wide { broad } else { narrow }, value, width);
        }
    }
    file
}

/// A note, padded to `alignment`.
fn note(owner: &[u8], kind: u32, value: &[u8], alignment: usize) -> Vec<u8> {
    let mut note = Vec::new();
    note.extend(u32::try_from(owner.len()).expect("small").to_le_bytes());
    note.extend(u32::try_from(value.len()).expect("small").to_le_bytes());
    note.extend(kind.to_le_bytes());
    note.extend(owner);
    note.resize(note.len().next_multiple_of(alignment), 0);
    note.extend(value);
    note.resize(note.len().next_multiple_of(alignment), 0);
    note
}

fn entry_note(entry: u32) -> Vec<u8> {
    note(OWNER, PHYS32_ENTRY, &entry.to_le_bytes(), 4)
}

/// A file with the program at 1 MiB and these notes.
fn with_notes(wide: bool, notes: &[u8], alignment: u64) -> Vec<u8> {
    let text = (kind::LOAD, 0x10_0000, TEXT, 0x2000, 4096);
    file(wide, &[text, (kind::NOTE, 0, notes, notes.len() as u64, alignment)])
}

#[track_caller]
fn starts_at(file: &[u8], expected: u32) {
    assert_eq!(Program::parse(file).map(|program| program.entry), Ok(expected));
}

#[track_caller]
fn refused(file: &[u8], expected: ElfError) {
    assert_eq!(Program::parse(file).err(), Some(expected));
    assert!(!expected.to_string().contains('\n'));
}

#[test]
fn both_classes_are_loaded_where_their_physical_addresses_say() {
    for wide in [false, true] {
        let file = with_notes(wide, &entry_note(0x10_0001), 4);
        let program = Program::parse(&file).expect("sound");
        assert_eq!(program.entry, 0x10_0001);
        let text = Segment { start: 0x10_0000, length: 0x2000, bytes: TEXT };
        assert_eq!(program.segments.as_slice(), [text]);
        assert_eq!(program.end(), 0x10_2000);
    }
}

#[test]
fn the_entry_note_is_found_in_every_form_that_tools_write() {
    let narrow = 0x10_0000_u32.to_le_bytes();
    let broad = 0x10_0000_u64.to_le_bytes();
    let other = |alignment| note(b"GNU\0", 18, &[1, 2, 3], alignment);
    let join = |first: Vec<u8>, second: Vec<u8>| [first, second].concat();
    for wide in [false, true] {
        for alignment in [0, 1, 4, 8] {
            for value in [&narrow[..], &broad[..]] {
                let plain = note(OWNER, PHYS32_ENTRY, value, 4);
                starts_at(&with_notes(wide, &plain, alignment), 0x10_0000);
                let second = join(other(4), plain);
                starts_at(&with_notes(wide, &second, alignment), 0x10_0000);
            }
        }
        let padded = join(other(8), note(OWNER, PHYS32_ENTRY, &broad, 8));
        starts_at(&with_notes(wide, &padded, 8), 0x10_0000);
        let late = join(note(OWNER, 5, b"guest\0", 4), note(OWNER, PHYS32_ENTRY, &narrow, 4));
        starts_at(&with_notes(wide, &late, 4), 0x10_0000);
    }
}

#[test]
fn a_file_with_notes_in_sections_only_is_accepted() {
    let notes = entry_note(0x10_0000);
    for wide in [false, true] {
        let mut file = file(wide, &[(kind::LOAD, 0x10_0000, TEXT, 0x1000, 4096)]);
        let at = file.len();
        file.extend(&notes);
        let (size, offset, length) = if wide { (64, 24, 32) } else { (40, 16, 20) };
        let table = file.len();
        file.resize(table + size, 0);
        file[table + 4] = 7;
        file[table + offset..][..4]
            .copy_from_slice(&u32::try_from(at).expect("small").to_le_bytes());
        file[table + length] = u8::try_from(notes.len()).expect("small");
        let (field, shift) = if wide { (40, 12) } else { (32, 0) };
        file[field..field + 4].copy_from_slice(&u32::try_from(table).expect("small").to_le_bytes());
        file[46 + shift] = u8::try_from(size).expect("small");
        file[48 + shift] = 1;
        starts_at(&file, 0x10_0000);
    }
}

#[test]
fn a_file_that_is_no_guest_says_what_it_is() {
    let good = with_notes(true, &entry_note(0x10_0000), 4);
    let changed = |at: usize, byte: u8| {
        let mut file = good.clone();
        file[at] = byte;
        file
    };
    refused(b"", ElfError::Magic);
    refused(b"#!/bin/sh\n", ElfError::Magic);
    refused(&good[..5], ElfError::Truncated);
    refused(&good[..63], ElfError::Truncated);
    refused(&good[..100], ElfError::Truncated);
    refused(&changed(4, 3), ElfError::Class(3));
    refused(&changed(5, 2), ElfError::ByteOrder(2));
    refused(&changed(16, 1), ElfError::Type(1));
    refused(&changed(18, 183), ElfError::Machine(183));
    refused(&changed(54, 55), ElfError::HeaderSize(55));
    refused(&changed(35, 1), ElfError::Truncated);
}

#[test]
fn a_program_header_that_cannot_be_loaded_is_named() {
    let notes = entry_note(0x10_0000);
    let notes = (kind::NOTE, 0, notes.as_slice(), 0, 4);
    let load = |start, memory| (kind::LOAD, start, TEXT, memory, 0);
    refused(&file(true, &[notes, load(0x10_0000, 2)]), ElfError::SegmentShrinks(1));
    refused(&file(true, &[load((1 << 32) - 2, 3)]), ElfError::SegmentTooHigh(0));
    refused(&file(true, &[load(u64::MAX, 3)]), ElfError::SegmentTooHigh(0));
    refused(&file(true, &[load(0x1000, u64::MAX)]), ElfError::SegmentTooHigh(0));
    refused(&file(true, &[]), ElfError::Empty);
    refused(&file(true, &[notes]), ElfError::Empty);
    refused(
        &file(true, &[load(0x2000, 0x1000), notes, load(0x1000, 0x1001)]),
        ElfError::Overlap(0, 2),
    );
    refused(&vec_of(33), ElfError::TooManySegments);
    let mut cut = file(true, &[notes, load(0x10_0000, 3)]);
    cut.pop();
    refused(&cut, ElfError::SegmentOutsideFile(1));
    starts_at(&file(true, &[load(0x10_0000, 0x1000), notes, load(0x10_1000, 3)]), 0x10_0000);
}

/// A file with so many segments.
fn vec_of(count: u64) -> Vec<u8> {
    let headers: Vec<(u32, u64, &[u8], u64, u64)> =
        (0..count).map(|index| (kind::LOAD, index * 4096, TEXT, 3, 0)).collect();
    file(true, &headers)
}

#[test]
fn an_entry_that_cannot_be_used_is_refused() {
    let value = 0x10_0000_u32.to_le_bytes();
    refused(&with_notes(true, &[], 4), ElfError::NoEntry);
    refused(&with_notes(true, &note(b"GNU\0", 18, &value, 4), 4), ElfError::NoEntry);
    refused(&with_notes(true, &note(OWNER, 1, &value, 4), 4), ElfError::NoEntry);
    refused(&with_notes(true, &note(OWNER, 18, &value[..3], 4), 4), ElfError::EntrySize(3));
    refused(&with_notes(true, &entry_note(0xf_ffff), 4), ElfError::EntryOutside(0xf_ffff));
    refused(&with_notes(true, &entry_note(0x10_2000), 4), ElfError::EntryOutside(0x10_2000));
    refused(&with_notes(true, &[1, 2, 3], 4), ElfError::Notes);
    let mut long = entry_note(0x10_0000);
    long[0] = 0xff;
    refused(&with_notes(true, &long, 4), ElfError::Notes);
}

#[test]
fn a_program_larger_than_its_domain_is_refused_with_both_sizes() {
    let file = with_notes(false, &entry_note(0x10_0000), 4);
    let program = Program::parse(&file).expect("sound");
    assert_eq!(program.fits(0x10_3000, 0x1000), Ok(()));
    let error = program.fits(0x10_2fff, 0x1000).expect_err("too large");
    assert_eq!(error, ElfError::Memory { end: 0x10_2000, memory: 0x10_2fff });
    assert!(program.fits(u64::MAX, u64::MAX).is_err());
}

/// What must hold for every file that is accepted.
fn check_accepted(file: &[u8]) -> Result<(), TestCaseError> {
    if let Ok(program) = Program::parse(file) {
        prop_assert!(!program.segments.is_empty());
        for (place, segment) in program.segments.iter().enumerate() {
            prop_assert!(segment.length >= segment.bytes.len() as u64);
            prop_assert!(segment.start < segment.end() && segment.end() <= LIMIT);
            for other in &program.segments[..place] {
                prop_assert!(other.end() <= segment.start || segment.end() <= other.start);
            }
        }
        let entry = u64::from(program.entry);
        let inside = |segment: &Segment<'_>| (segment.start..segment.end()).contains(&entry);
        prop_assert!(program.segments.iter().any(inside));
    }
    Ok(())
}

proptest! {
    #[test]
    fn random_bytes_never_panic(bytes in proptest::collection::vec(any::<u8>(), 0..300)) {
        check_accepted(&bytes)?;
        let mut dressed = [MAGIC, &[1, 1]].concat();
        dressed.extend(bytes);
        check_accepted(&dressed)?;
    }

    #[test]
    fn a_damaged_file_never_panics_and_is_sound_if_accepted(
        wide: bool,
        damage in proptest::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..8),
        cut in any::<prop::sample::Index>(),
    ) {
        let mut file = with_notes(wide, &entry_note(0x10_0000), 8);
        for (place, byte) in damage {
            let place = place.index(file.len());
            file[place] = byte;
        }
        check_accepted(&file)?;
        check_accepted(&file[..cut.index(file.len())])?;
    }
}
