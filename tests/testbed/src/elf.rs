//! ELF files of guests that are started by the PVH protocol.
//!
//! A [`Program`] has been checked as a whole: each of its segments lies inside the file
//! and below 4 GiB, no two overlap, and the entry is inside one of them. Nothing about
//! the file is trusted, so every number in it may be anything.
//!
//! Sources: the System V ABI, "Object Files" and "Program Loading" (both classes); Xen's
//! public header `elfnote.h` for the note.

use core::fmt;

use arrayvec::ArrayVec;

use crate::physical::{u16_at, u32_at, u64_at};

/// The most segments a program may have.
pub const SEGMENTS: usize = 32;
/// Guest-physical addresses of a program end here.
const LIMIT: u64 = 1 << 32;
/// Bytes that tell an ELF file from others.
const MAGIC: &[u8] = b"\x7fELF";

/// Program header types.
mod kind {
    pub(super) const LOAD: u32 = 1;
    pub(super) const NOTE: u32 = 4;
}

/// The section type of notes.
const SECTION_NOTE: u32 = 7;
/// `XEN_ELFNOTE_PHYS32_ENTRY`.
const PHYS32_ENTRY: u32 = 18;
/// The owner of that note.
const OWNER: &[u8] = b"Xen\0";

/// A program that can be put into a domain.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Program<'f> {
    /// What to load, in the file's order.
    pub segments: ArrayVec<Segment<'f>, SEGMENTS>,
    /// Where it starts, in 32-bit mode with paging off.
    pub entry: u32,
}

/// A stretch of guest memory that a program fills.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Segment<'f> {
    /// The guest-physical address of the first byte.
    pub start: u64,
    /// How many bytes it is, at least one. What `bytes` does not fill is zero.
    pub length: u64,
    /// The first bytes.
    pub bytes: &'f [u8],
}

impl Segment<'_> {
    /// The address after the last byte, at most 4 GiB.
    #[must_use]
    pub const fn end(&self) -> u64 {
        // Both were checked against the limit.
        self.start.saturating_add(self.length)
    }
}

/// What is wrong with a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ElfError {
    /// It does not begin as ELF files do.
    Magic,
    /// The class is neither 32 nor 64 bit.
    Class(u8),
    /// The byte order is not little-endian.
    ByteOrder(u8),
    /// The object type is not an executable.
    Type(u16),
    /// The machine is not x86 in either width.
    Machine(u16),
    /// The file ends inside its header or inside the table of program headers.
    Truncated,
    /// Program headers are smaller than their class demands.
    HeaderSize(u16),
    /// A segment's bytes are not all in the file.
    SegmentOutsideFile(u16),
    /// A segment has more bytes in the file than in memory.
    SegmentShrinks(u16),
    /// A segment does not end below 4 GiB.
    SegmentTooHigh(u16),
    /// Two segments want the same memory.
    Overlap(u16, u16),
    /// More than [`SEGMENTS`] segments.
    TooManySegments,
    /// Nothing to load.
    Empty,
    /// A table of notes is not all in the file, or a note leaves its table.
    Notes,
    /// There is no `PHYS32_ENTRY` note.
    NoEntry,
    /// The note's value is not 4 or 8 bytes long.
    EntrySize(u32),
    /// The entry is in no segment.
    EntryOutside(u64),
    /// The program does not fit into the domain.
    Memory {
        /// The address after its last byte.
        end: u64,
        /// The domain's memory, in bytes.
        memory: u64,
    },
}

impl fmt::Display for ElfError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Self::Magic => f.write_str("not an ELF file: it does not start with 7f 45 4c 46"),
            Self::Class(class) => write!(f, "ELF class {class}: expected 1 (32 bit) or 2 (64 bit)"),
            Self::ByteOrder(order) => {
                write!(f, "ELF byte order {order}: expected 1 (little-endian)")
            }
            Self::Type(kind) => {
                write!(f, "ELF type {kind}: expected 2 (executable) or 3 (position-independent)")
            }
            Self::Machine(machine) => {
                write!(f, "ELF machine {machine}: expected 3 (80386) or 62 (x86-64)")
            }
            Self::Truncated => f.write_str("the file ends inside its ELF or program headers"),
            Self::HeaderSize(size) => write!(f, "program headers of {size} bytes are too small"),
            Self::SegmentOutsideFile(index) => {
                write!(f, "program header {index}: its bytes are not all in the file")
            }
            Self::SegmentShrinks(index) => {
                write!(f, "program header {index}: more bytes in the file than in memory")
            }
            Self::SegmentTooHigh(index) => {
                write!(f, "program header {index}: it must end below 4 GiB")
            }
            Self::Overlap(first, second) => {
                write!(f, "program headers {first} and {second} want the same memory")
            }
            Self::TooManySegments => write!(f, "more than {SEGMENTS} segments to load"),
            Self::Empty => f.write_str("there is no segment to load"),
            Self::Notes => f.write_str("its notes do not hold together"),
            Self::NoEntry => f.write_str(
                "no PVH entry: expected a note of type 18 (PHYS32_ENTRY) with the owner Xen",
            ),
            Self::EntrySize(size) => {
                write!(f, "a PVH entry of {size} bytes: expected 4 or 8")
            }
            Self::EntryOutside(entry) => write!(f, "the PVH entry {entry:#x} is in no segment"),
            Self::Memory { end, memory } => {
                write!(f, "it ends at {end:#x}, but the domain has {memory:#x} bytes of memory")
            }
        }
    }
}

impl core::error::Error for ElfError {}

/// Where the fields of a class are.
#[derive(Clone, Copy)]
enum Class {
    Bits32,
    Bits64,
}

/// One program header.
struct Header {
    kind: u32,
    offset: u64,
    physical: u64,
    in_file: u64,
    in_memory: u64,
    alignment: u64,
}

impl Class {
    /// Bytes of the file's header.
    const fn file_header(self) -> usize {
        match self {
            Self::Bits32 => 52,
            Self::Bits64 => 64,
        }
    }

    /// Bytes of a program header.
    const fn program_header(self) -> u16 {
        match self {
            Self::Bits32 => 32,
            Self::Bits64 => 56,
        }
    }

    /// A field that is as wide as an address of this class.
    fn address(self, bytes: &[u8], at32: usize, at64: usize) -> Option<u64> {
        match self {
            Self::Bits32 => u32_at(bytes, at32).map(u64::from),
            Self::Bits64 => u64_at(bytes, at64),
        }
    }

    /// A 16-bit field of the file's header, 12 bytes further on in the wider class.
    fn short(self, bytes: &[u8], at32: usize) -> Option<u16> {
        match self {
            Self::Bits32 => u16_at(bytes, at32),
            Self::Bits64 => u16_at(bytes, at32.checked_add(12)?),
        }
    }

    /// Read a program header.
    fn header(self, bytes: &[u8]) -> Option<Header> {
        Some(Header {
            kind: u32_at(bytes, 0)?,
            offset: self.address(bytes, 4, 8)?,
            physical: self.address(bytes, 12, 24)?,
            in_file: self.address(bytes, 16, 32)?,
            in_memory: self.address(bytes, 20, 40)?,
            alignment: self.address(bytes, 28, 48)?,
        })
    }
}

/// The entry `index` of a table.
fn entry(file: &[u8], table: u64, size: u16, index: u16) -> Option<&[u8]> {
    let start = table.checked_add(u64::from(size).checked_mul(u64::from(index))?)?;
    part(file, start, u64::from(size))
}

/// `length` bytes of the file.
fn part(file: &[u8], start: u64, length: u64) -> Option<&[u8]> {
    let start = usize::try_from(start).ok()?;
    let end = start.checked_add(usize::try_from(length).ok()?)?;
    file.get(start..end)
}

impl<'f> Program<'f> {
    /// Check a file.
    ///
    /// # Errors
    /// [`ElfError`], which says what is wrong with it.
    pub fn parse(file: &'f [u8]) -> Result<Self, ElfError> {
        if !file.starts_with(MAGIC) {
            return Err(ElfError::Magic);
        }
        let byte = |at| file.get(at).copied().ok_or(ElfError::Truncated);
        let class = match byte(4)? {
            1 => Class::Bits32,
            2 => Class::Bits64,
            other => return Err(ElfError::Class(other)),
        };
        match byte(5)? {
            1 => {}
            other => return Err(ElfError::ByteOrder(other)),
        }
        if file.len() < class.file_header() {
            return Err(ElfError::Truncated);
        }
        match u16_at(file, 16).ok_or(ElfError::Truncated)? {
            2 | 3 => {}
            other => return Err(ElfError::Type(other)),
        }
        match u16_at(file, 18).ok_or(ElfError::Truncated)? {
            3 | 62 => {}
            other => return Err(ElfError::Machine(other)),
        }
        let table = class.address(file, 28, 32).ok_or(ElfError::Truncated)?;
        let size = class.short(file, 42).ok_or(ElfError::Truncated)?;
        let count = class.short(file, 44).ok_or(ElfError::Truncated)?;
        if count != 0 && size < class.program_header() {
            return Err(ElfError::HeaderSize(size));
        }

        let mut segments: ArrayVec<Segment<'f>, SEGMENTS> = ArrayVec::new();
        let mut origins: ArrayVec<u16, SEGMENTS> = ArrayVec::new();
        let mut start = None;
        for index in 0..count {
            let header = entry(file, table, size, index).and_then(|bytes| class.header(bytes));
            let header = header.ok_or(ElfError::Truncated)?;
            match header.kind {
                kind::LOAD if header.in_memory != 0 || header.in_file != 0 => {
                    let segment = segment(file, &header, index)?;
                    let clash = segments.iter().zip(&origins).find(|(other, _)| {
                        other.start < segment.end() && segment.start < other.end()
                    });
                    if let Some((_, origin)) = clash {
                        return Err(ElfError::Overlap(*origin, index));
                    }
                    let room = segments.try_push(segment).is_ok();
                    if !room || origins.try_push(index).is_err() {
                        return Err(ElfError::TooManySegments);
                    }
                }
                kind::NOTE if start.is_none() => {
                    let notes = part(file, header.offset, header.in_file).ok_or(ElfError::Notes)?;
                    start = search(notes, header.alignment)?;
                }
                _ => {}
            }
        }
        if segments.is_empty() {
            return Err(ElfError::Empty);
        }
        let entry = match start {
            Some(entry) => entry,
            None => in_sections(file, class)?.ok_or(ElfError::NoEntry)?,
        };
        let inside = |segment: &Segment<'_>| segment.start <= entry && entry < segment.end();
        if !segments.iter().any(inside) {
            return Err(ElfError::EntryOutside(entry));
        }
        let entry = u32::try_from(entry).map_err(|_| ElfError::EntryOutside(entry))?;
        Ok(Self { segments, entry })
    }

    /// The address after the last byte of the program.
    #[must_use]
    pub fn end(&self) -> u64 {
        self.segments.iter().map(Segment::end).max().unwrap_or(0)
    }

    /// Check that it fits into `memory` bytes, with `further` bytes after it.
    ///
    /// # Errors
    /// [`ElfError::Memory`].
    pub fn fits(&self, memory: u64, further: u64) -> Result<(), ElfError> {
        let end = self.end();
        match end.checked_add(further) {
            Some(needed) if needed <= memory => Ok(()),
            Some(_) | None => Err(ElfError::Memory { end, memory }),
        }
    }
}

/// The segment that a program header describes.
fn segment<'f>(file: &'f [u8], header: &Header, index: u16) -> Result<Segment<'f>, ElfError> {
    if header.in_file > header.in_memory {
        return Err(ElfError::SegmentShrinks(index));
    }
    let bytes = part(file, header.offset, header.in_file);
    let bytes = bytes.ok_or(ElfError::SegmentOutsideFile(index))?;
    let end = header.physical.checked_add(header.in_memory);
    if end.is_none_or(|end| end > LIMIT) {
        return Err(ElfError::SegmentTooHigh(index));
    }
    Ok(Segment { start: header.physical, length: header.in_memory, bytes })
}

/// Look for the entry in the sections: some files list their notes only there.
fn in_sections(file: &[u8], class: Class) -> Result<Option<u64>, ElfError> {
    let field = |at32, at64| class.address(file, at32, at64).ok_or(ElfError::Truncated);
    let table = field(32, 40)?;
    let size = class.short(file, 46).ok_or(ElfError::Truncated)?;
    let count = class.short(file, 48).ok_or(ElfError::Truncated)?;
    for index in 0..count {
        // A program need not have sections, so a table that is cut off is no error.
        let Some(section) = entry(file, table, size, index) else { break };
        if u32_at(section, 4) != Some(SECTION_NOTE) {
            continue;
        }
        let offset = class.address(section, 16, 24);
        let length = class.address(section, 20, 32);
        let alignment = class.address(section, 32, 48);
        let notes = offset.zip(length).and_then(|(offset, length)| part(file, offset, length));
        let found = search(notes.ok_or(ElfError::Notes)?, alignment.unwrap_or(0))?;
        if found.is_some() {
            return Ok(found);
        }
    }
    Ok(None)
}

/// Look for the entry in a table of notes.
///
/// A table that says 8 may still pad its notes to 4, as most tools do.
fn search(notes: &[u8], alignment: u64) -> Result<Option<u64>, ElfError> {
    if alignment == 8
        && let Ok(Some(entry)) = walk(notes, 8)
    {
        return Ok(Some(entry));
    }
    match walk(notes, 4) {
        // Eight was right, and there is no such note.
        Err(ElfError::Notes) if alignment == 8 => Ok(None),
        other => other,
    }
}

/// Go through notes that are padded to `alignment` bytes.
fn walk(notes: &[u8], alignment: usize) -> Result<Option<u64>, ElfError> {
    let mut at = 0_usize;
    while at < notes.len() {
        let note = notes.get(at..).ok_or(ElfError::Notes)?;
        let word = |offset| u32_at(note, offset).ok_or(ElfError::Notes);
        let (name_size, value_size, kind) = (word(0)?, word(4)?, word(8)?);
        let padded = |start: usize, size: u32| {
            let end = start.checked_add(usize::try_from(size).ok()?)?;
            Some((end, end.checked_next_multiple_of(alignment)?))
        };
        let (name_end, value_start) = padded(12, name_size).ok_or(ElfError::Notes)?;
        let (value_end, next) = padded(value_start, value_size).ok_or(ElfError::Notes)?;
        let name = note.get(12..name_end).ok_or(ElfError::Notes)?;
        let value = note.get(value_start..value_end).ok_or(ElfError::Notes)?;
        if kind == PHYS32_ENTRY && name == OWNER {
            return match value_size {
                4 => Ok(u32_at(value, 0).map(u64::from)),
                8 => Ok(u64_at(value, 0)),
                other => Err(ElfError::EntrySize(other)),
            };
        }
        at = at.checked_add(next).ok_or(ElfError::Notes)?;
    }
    Ok(None)
}

#[cfg(test)]
mod tests;
