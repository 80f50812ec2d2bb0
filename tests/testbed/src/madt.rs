//! The processors of the machine, from the ACPI interrupt table (MADT)
//!
//! [`processors`] gives the local APIC identifiers of those that can be started. Layout:
//! ACPI 6.5, sections 5.2.12 and 5.2.12.2.

use core::fmt;

use arrayvec::ArrayVec;

/// Processors of one machine at most; further ones are left alone.
pub const PROCESSORS: usize = 8;
/// Bytes before the first entry.
const HEADER: usize = 44;

/// The table does not hold together, at this offset in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BadEntry(pub usize);

impl fmt::Display for BadEntry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "the MADT has an entry of impossible length at offset {:#x}", self.0)
    }
}

impl core::error::Error for BadEntry {}

/// The local APIC identifiers of the processors that are enabled, in the table's order.
///
/// `table` is the whole table, header included.
///
/// # Errors
/// [`BadEntry`] if an entry has no length, or reaches past the end.
pub fn processors(table: &[u8]) -> Result<ArrayVec<u8, PROCESSORS>, BadEntry> {
    const LOCAL_APIC: u8 = 0;
    const ENABLED: u8 = 1;
    let mut found = ArrayVec::new();
    let mut offset = HEADER;
    while offset < table.len() {
        let rest = table.get(offset..).unwrap_or(&[]);
        let length = rest.get(1).map_or(0, |length| usize::from(*length));
        let entry = rest.get(..length).filter(|entry| entry.len() >= 2);
        let entry = entry.ok_or(BadEntry(offset))?;
        if let [LOCAL_APIC, 8, _, id, flags, ..] = entry
            && flags & ENABLED != 0
        {
            // Processors past the room are left alone, as the constant says.
            found.try_push(*id).ok();
        }
        offset = offset.checked_add(length).ok_or(BadEntry(offset))?;
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use std::vec::Vec;

    use super::*;

    #[track_caller]
    fn check(entries: &[&[u8]], expected: Result<&[u8], BadEntry>) {
        let mut table = Vec::from([0; HEADER]);
        table.extend(entries.concat());
        let found = processors(&table);
        assert_eq!(found.as_ref().map(|found| &found[..]).map_err(|error| *error), expected);
    }

    const IO_APIC: &[u8] = &[1, 12, 0, 0, 0, 0, 0xc0, 0xfe, 0, 0, 0, 0];

    #[test]
    fn enabled_processors_are_found_among_other_entries() {
        let entry = |id, flags| [0, 8, id, id, flags, 0, 0, 0];
        check(&[], Ok(&[]));
        check(&[&entry(0, 1), IO_APIC, &entry(2, 0), &entry(4, 1)], Ok(&[0, 4]));
        let many: Vec<_> = (0..20).map(|id| entry(id, 1)).collect();
        let many: Vec<&[u8]> = many.iter().map(|entry| &entry[..]).collect();
        check(&many, Ok(&[0, 1, 2, 3, 4, 5, 6, 7]));
    }

    #[test]
    fn an_entry_without_an_end_is_refused() {
        check(&[IO_APIC, &[0, 0, 0, 0]], Err(BadEntry(HEADER + 12)));
        check(&[&[0, 8, 0]], Err(BadEntry(HEADER)));
        check(&[&[5]], Err(BadEntry(HEADER)));
        assert_eq!(processors(&[0; 10]).map(|found| found.len()), Ok(0));
    }
}
