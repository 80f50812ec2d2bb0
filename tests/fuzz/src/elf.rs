//! ELF files of guests: raw bytes, files built from parts, and files with damage.
//!
//! What is accepted lies inside the file and below 4 GiB, and no two segments overlap. A
//! [`Built`] file is laid out here from what the System V ABI says, so what has to be
//! read out of it is known.

use arbitrary::Arbitrary;
use testbed::elf::{ElfError, Program, SEGMENTS};

use crate::script::{Below, read, tell as told};

#[derive(Debug, Arbitrary)]
enum Input<'a> {
    Raw(&'a [u8]),
    /// Raw bytes behind the first bytes of a good file.
    Body {
        wide: bool,
        body: &'a [u8],
    },
    Built(Built),
    /// One segment of it begins inside of another, or right in front of it.
    Moved {
        built: Built,
        which: u8,
        onto: u8,
        before: u8,
    },
    Damaged(Built),
}

/// A file with segments one behind the other in memory, and a note at its end.
#[derive(Debug, Arbitrary)]
struct Built {
    wide: bool,
    parts: Vec<Part>,
    /// Bytes into the first segment.
    entry: u16,
    /// The note is in a section and in no segment.
    in_section: bool,
    wide_entry: bool,
}

#[derive(Debug, Arbitrary)]
struct Part {
    /// Bytes of memory free before it.
    gap: u16,
    bytes: Vec<u8>,
    /// Zeros behind the bytes; one at least.
    zeros: u16,
}

#[derive(Debug, Arbitrary)]
struct Damage {
    at: u16,
    with: u8,
    /// How many bytes, up to a whole word.
    count: Below<8>,
}

/// What a built file says of a segment.
struct Place {
    start: u64,
    length: u64,
    offset: usize,
    in_file: usize,
}

fn put(bytes: &mut [u8], at: usize, value: u64, width: usize) {
    bytes[at..at + width].copy_from_slice(&value.to_le_bytes()[..width]);
}

impl Built {
    fn places(&self) -> Vec<Place> {
        let (mut start, mut offset) = (0x10_0000, self.body_at());
        let place = |part: &Part| {
            let first = start + u64::from(part.gap);
            let in_file = part.bytes.len();
            let length = in_file as u64 + u64::from(part.zeros) + 1;
            let place = Place { start: first, length, offset, in_file };
            start = first + length;
            offset += in_file;
            place
        };
        self.parts.iter().map(place).collect()
    }

    /// Sizes of the file's header, of a program header and of a section header.
    const fn sizes(&self) -> (usize, usize, usize) {
        if self.wide { (64, 56, 64) } else { (52, 32, 40) }
    }

    fn body_at(&self) -> usize {
        let (header, program, section) = self.sizes();
        header + program * (self.parts.len() + 1) + section
    }

    fn entry(&self) -> Option<u64> {
        let first = self.places().into_iter().next()?;
        Some(first.start + u64::from(self.entry) % first.length)
    }

    fn bytes(&self) -> Vec<u8> {
        let (header, program, section) = self.sizes();
        let width = if self.wide { 8 } else { 4 };
        let mut file = head(self.wide);
        file.resize(self.body_at(), 0);
        let (table, sections) = (header, header + program * (self.parts.len() + 1));
        let (programs_at, sections_at) = if self.wide { (32, 40) } else { (28, 32) };
        put(&mut file, programs_at, table as u64, width);
        put(&mut file, sections_at, sections as u64, width);
        let counts = header - 10;
        let numbers = [program, self.parts.len() + 1, section, 1];
        for (place, number) in numbers.into_iter().enumerate() {
            put(&mut file, counts + 2 * place, number as u64, 2);
        }
        for (number, place) in self.places().iter().enumerate() {
            let at = table + program * number;
            let (offset, in_file) = (place.offset as u64, place.in_file as u64);
            self.put_header(&mut file, at, 1, [offset, place.start, in_file, place.length]);
        }
        for part in &self.parts {
            file.extend(&part.bytes);
        }
        let (note_at, note) = (file.len() as u64, self.note());
        file.extend(&note);
        let length = note.len() as u64;
        if self.in_section {
            let (offset_at, length_at) = if self.wide { (24, 32) } else { (16, 20) };
            put(&mut file, sections + 4, 7, 4);
            put(&mut file, sections + offset_at, note_at, width);
            put(&mut file, sections + length_at, length, width);
        } else {
            let at = table + program * self.parts.len();
            self.put_header(&mut file, at, 4, [note_at, 0, length, length]);
        }
        file
    }

    /// Says that a segment begins elsewhere.
    fn move_to(&self, file: &mut [u8], number: usize, start: u64) {
        let (header, program, _) = self.sizes();
        let (width, place) = if self.wide { (8, 24) } else { (4, 12) };
        put(file, header + program * number + place, start, width);
    }

    /// A program header: offset, physical address, bytes in the file and in memory.
    fn put_header(&self, file: &mut [u8], at: usize, kind: u64, fields: [u64; 4]) {
        let (width, places) = if self.wide { (8, [8, 24, 32, 40]) } else { (4, [4, 12, 16, 20]) };
        put(file, at, kind, 4);
        for (place, field) in places.into_iter().zip(fields) {
            put(file, at + place, field, width);
        }
    }

    fn note(&self) -> Vec<u8> {
        let entry = self.entry().unwrap_or(0).to_le_bytes();
        let value = if self.wide_entry { &entry[..] } else { &entry[..4] };
        let words = [4, value.len() as u32, 18];
        let mut note: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
        note.extend(b"Xen\0");
        note.extend(value);
        note
    }
}

/// The header of a file, without its tables.
fn head(wide: bool) -> Vec<u8> {
    let mut head = vec![0; if wide { 64 } else { 52 }];
    head[..7].copy_from_slice(&[0x7f, b'E', b'L', b'F', 1 + u8::from(wide), 1, 1]);
    put(&mut head, 16, 2, 2);
    put(&mut head, 18, if wide { 62 } else { 3 }, 2);
    head
}

/// What holds for any bytes.
#[track_caller]
fn check(file: &[u8]) {
    let program = match Program::parse(file) {
        Ok(program) => program,
        Err(error) => return assert!(!error.to_string().is_empty()),
    };
    assert!((1..=SEGMENTS).contains(&program.segments.len()));
    let whole = file.as_ptr_range();
    for (number, segment) in program.segments.iter().enumerate() {
        let bytes = segment.bytes.as_ptr_range();
        assert!(whole.start <= bytes.start && bytes.end <= whole.end, "segment {number}");
        assert!(segment.length >= 1 && segment.bytes.len() as u64 <= segment.length);
        let end = segment.start.checked_add(segment.length);
        assert!(end.is_some_and(|end| end <= 1 << 32), "segment {number}");
        assert_eq!(end, Some(segment.end()));
        for other in &program.segments[..number] {
            let apart = segment.end() <= other.start || other.end() <= segment.start;
            assert!(apart, "segment {number} overlaps another");
        }
    }
    let entry = u64::from(program.entry);
    let inside = program.segments.iter().any(|part| (part.start..part.end()).contains(&entry));
    assert!(inside, "the entry {entry:#x} is in no segment");
    let end = program.segments.iter().map(|segment| segment.start + segment.length).max();
    assert_eq!(Some(program.end()), end);
    assert_eq!(program.fits(program.end(), 0), Ok(()));
    assert!(program.fits(program.end() - 1, 0).is_err());
    assert!(program.fits(u64::MAX, u64::MAX).is_err());
}

#[track_caller]
fn check_built(built: &Built) {
    let file = built.bytes();
    check(&file);
    let program = match (Program::parse(&file), built.parts.len()) {
        (Ok(program), 1..=SEGMENTS) => program,
        (Err(ElfError::Empty), 0) => return,
        (Err(ElfError::TooManySegments), more) if more > SEGMENTS => return,
        (result, parts) => panic!("{parts} parts were read as {result:?}"),
    };
    assert_eq!(Some(u64::from(program.entry)), built.entry());
    assert_eq!(program.segments.len(), built.parts.len());
    let written = built.parts.iter().zip(built.places());
    for ((part, place), segment) in written.zip(&program.segments) {
        let read = (segment.start, segment.length, segment.bytes);
        assert_eq!(read, (place.start, place.length, part.bytes.as_slice()));
    }
}

pub(crate) fn play(bytes: &[u8]) {
    match read::<Input<'_>, Damage>(bytes) {
        None => {}
        Some((Input::Raw(raw), _)) => check(raw),
        Some((Input::Body { wide, body }, _)) => check(&[&head(wide), body].concat()),
        Some((Input::Built(built), _)) => check_built(&built),
        Some((Input::Moved { built, which, onto, before }, _)) => {
            let (mut file, places) = (built.bytes(), built.places());
            let place = |place: u8| usize::from(place) % places.len().max(1);
            if let Some(onto) = places.get(place(onto)) {
                let start = onto.start + onto.length / 2;
                built.move_to(&mut file, place(which), start - u64::from(before));
            }
            check(&file);
        }
        Some((Input::Damaged(built), damage)) => {
            let mut file = built.bytes();
            for Damage { at, with, count } in damage {
                let at = usize::from(at) % file.len();
                file.iter_mut().skip(at).take(count.0 as usize + 1).for_each(|byte| *byte = with);
            }
            check(&file);
        }
    }
}

pub(crate) fn tell(bytes: &[u8]) -> String {
    read::<Input<'_>, Damage>(bytes).map_or(String::new(), |(input, damage)| told(&input, &damage))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_that_is_built_is_read_as_it_was_written() {
        let part = |gap, length| Part { gap, bytes: vec![0xa5; length], zeros: 3 };
        for case in 0..8 {
            let (wide, in_section, wide_entry) = (case & 1 != 0, case & 2 != 0, case & 4 != 0);
            for parts in [0, 1, 3, SEGMENTS, SEGMENTS + 1] {
                let parts = (0..parts).map(|number| part(number as u16, number)).collect();
                check_built(&Built { wide, parts, entry: 7, in_section, wide_entry });
            }
        }
    }
}
