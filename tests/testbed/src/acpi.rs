//! Finding one ACPI table from the root pointer.
//!
//! A table this gives out has the signature asked for, lies whole in readable memory
//! and its bytes add up to zero. Layouts: ACPI 6.5, sections 5.2.5 (RSDP), 5.2.6
//! (header), 5.2.7 (RSDT) and 5.2.8 (XSDT).

use core::fmt;

use crate::address::PhysicalAddress;
use crate::physical::{Physical, u32_at, u64_at};

/// A table's signature.
pub type Signature = [u8; 4];

/// Bytes of the root pointer of revision 0, all covered by its first checksum.
const RSDP_0: usize = 20;
/// Bytes of a table header.
const HEADER: usize = 36;
/// The longest table that is read, in bytes.
const LIMIT: usize = 1 << 20;

/// Why no table was found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AcpiError {
    /// There is no root pointer at this address.
    NoRoot(PhysicalAddress),
    /// Memory at this address may not be read, or a length there makes no sense.
    Unreadable(PhysicalAddress),
    /// The structure at this address does not add up to zero.
    Checksum(PhysicalAddress),
    /// The table at this address is not the root table it should be.
    Signature(PhysicalAddress),
    /// The root table lists no table with this signature.
    NotListed(Signature),
}

impl fmt::Display for AcpiError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NoRoot(at) => write!(f, "no ACPI root pointer at {at:?}"),
            Self::Unreadable(at) => write!(f, "ACPI table at {at:?} is unreadable"),
            Self::Checksum(at) => write!(f, "ACPI table at {at:?} has a wrong checksum"),
            Self::Signature(at) => write!(f, "ACPI root table at {at:?} has a wrong signature"),
            Self::NotListed(name) => write!(f, "no ACPI table {}", name.escape_ascii()),
        }
    }
}

impl core::error::Error for AcpiError {}

/// The first table with this signature, header included.
///
/// A root pointer of revision 2 or later leads through the XSDT if it names one, any
/// other through the RSDT.
///
/// # Errors
/// [`AcpiError`] if a structure on the way is damaged, or the table is not listed. A
/// damaged table that was not asked for is passed over.
pub fn find<'m>(
    memory: &impl Physical<'m>,
    rsdp: PhysicalAddress,
    signature: Signature,
) -> Result<&'m [u8], AcpiError> {
    let (root, entry_bytes) = root(memory, rsdp)?;
    let entries = root.get(HEADER..).unwrap_or(&[]);
    for entry in entries.chunks_exact(entry_bytes) {
        let address = match entry_bytes {
            4 => u32_at(entry, 0).map(u64::from),
            _ => u64_at(entry, 0),
        };
        let Some(at) = address.map(PhysicalAddress::new) else {
            continue;
        };
        if memory.bytes(at, 4) == Some(&signature) {
            return table(memory, at);
        }
    }
    Err(AcpiError::NotListed(signature))
}

/// The root table, and the bytes of each of its entries.
fn root<'m>(
    memory: &impl Physical<'m>,
    rsdp: PhysicalAddress,
) -> Result<(&'m [u8], usize), AcpiError> {
    let head = memory.bytes(rsdp, RSDP_0).ok_or(AcpiError::Unreadable(rsdp))?;
    if !head.starts_with(b"RSD PTR ") {
        return Err(AcpiError::NoRoot(rsdp));
    }
    if !adds_up(head) {
        return Err(AcpiError::Checksum(rsdp));
    }
    let unreadable = AcpiError::Unreadable(rsdp);
    let revision = *head.get(15).ok_or(unreadable)?;
    if revision >= 2 {
        let length = memory.bytes(rsdp, 24).and_then(|head| u32_at(head, 20));
        let length = length.and_then(|length| usize::try_from(length).ok());
        let length = length.filter(|length| (HEADER..=LIMIT).contains(length));
        let whole = length.and_then(|length| memory.bytes(rsdp, length)).ok_or(unreadable)?;
        if !adds_up(whole) {
            return Err(AcpiError::Checksum(rsdp));
        }
        let xsdt = u64_at(whole, 24).ok_or(unreadable)?;
        if xsdt != 0 {
            return Ok((root_table(memory, xsdt, b"XSDT")?, 8));
        }
    }
    let rsdt = u32_at(head, 16).ok_or(unreadable)?;
    Ok((root_table(memory, u64::from(rsdt), b"RSDT")?, 4))
}

/// The table at `at`, which must have this signature.
fn root_table<'m>(
    memory: &impl Physical<'m>,
    at: u64,
    signature: &Signature,
) -> Result<&'m [u8], AcpiError> {
    let at = PhysicalAddress::new(at);
    let found = table(memory, at)?;
    if found.starts_with(signature) { Ok(found) } else { Err(AcpiError::Signature(at)) }
}

/// The whole table at `at`, its checksum checked.
fn table<'m>(memory: &impl Physical<'m>, at: PhysicalAddress) -> Result<&'m [u8], AcpiError> {
    let length = memory.bytes(at, HEADER).and_then(|head| u32_at(head, 4));
    let length = length.and_then(|length| usize::try_from(length).ok());
    let length = length.filter(|length| (HEADER..=LIMIT).contains(length));
    let whole = length.and_then(|length| memory.bytes(at, length));
    let whole = whole.ok_or(AcpiError::Unreadable(at))?;
    if adds_up(whole) { Ok(whole) } else { Err(AcpiError::Checksum(at)) }
}

/// Whether the bytes add up to zero modulo 256.
fn adds_up(bytes: &[u8]) -> bool {
    bytes.iter().fold(0_u8, |sum, byte| sum.wrapping_add(*byte)) == 0
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::physical::fake::Memory;

    const RSDP: u64 = 0x1000;
    const RSDT: u64 = 0x1100;
    const XSDT: u64 = 0x1200;
    const OTHER: u64 = 0x1300;
    const DMAR: u64 = 0x1400;

    fn put_table(memory: &mut Memory, at: u64, signature: &[u8], body: &[u8]) {
        let length = HEADER + body.len();
        memory.put(at, signature);
        memory.put(at + 4, &u32::try_from(length).expect("small").to_le_bytes());
        memory.put(at + 36, body);
        memory.balance(at, length, at + 9);
    }

    fn balance_root(memory: &mut Memory, revision: u8) {
        memory.put(RSDP + 15, &[revision]);
        memory.balance(RSDP, 20, RSDP + 8);
        memory.balance(RSDP, 36, RSDP + 32);
    }

    /// Both root tables list one other table; only the XSDT lists DMAR if `in_xsdt`.
    fn memory(revision: u8, in_xsdt: bool) -> Memory {
        let mut memory = Memory::new(RSDP, 0x600);
        put_table(&mut memory, DMAR, b"DMAR", &[47, 0, 0, 0]);
        put_table(&mut memory, OTHER, b"FACP", &[1]);
        let (last4, last8) = if in_xsdt { (OTHER, DMAR) } else { (DMAR, OTHER) };
        let four = |at: u64| u32::try_from(at).expect("low").to_le_bytes();
        put_table(&mut memory, RSDT, b"RSDT", &[four(OTHER), four(last4)].concat());
        let body = [OTHER.to_le_bytes(), last8.to_le_bytes()].concat();
        put_table(&mut memory, XSDT, b"XSDT", &body);
        memory.put(RSDP, b"RSD PTR ");
        memory.put(RSDP + 16, &four(RSDT));
        memory.put(RSDP + 20, &36_u32.to_le_bytes());
        memory.put(RSDP + 24, &XSDT.to_le_bytes());
        balance_root(&mut memory, revision);
        memory
    }

    fn dmar(memory: &Memory) -> Result<usize, AcpiError> {
        find(&memory, PhysicalAddress::new(RSDP), *b"DMAR").map(<[u8]>::len)
    }

    #[test]
    fn the_revision_chooses_the_root_table() {
        let missing = Err(AcpiError::NotListed(*b"DMAR"));
        assert_eq!(dmar(&memory(0, false)), Ok(40));
        assert_eq!(dmar(&memory(0, true)), missing);
        assert_eq!(dmar(&memory(2, true)), Ok(40));
        assert_eq!(dmar(&memory(2, false)), missing);
    }

    #[test]
    fn a_root_without_an_xsdt_falls_back_to_the_rsdt() {
        let mut memory = memory(2, false);
        memory.put(RSDP + 24, &[0; 8]);
        balance_root(&mut memory, 2);
        assert_eq!(dmar(&memory), Ok(40));
    }

    /// One byte of a revision 2 root changed to 0x5a, and the error it must give.
    #[track_caller]
    fn check(address: u64, expected: AcpiError) {
        let mut memory = memory(2, true);
        memory.put(address, &[0x5a]);
        assert_eq!(dmar(&memory), Err(expected));
    }

    #[test]
    fn each_damaged_structure_is_named() {
        let at = PhysicalAddress::new;
        check(RSDP, AcpiError::NoRoot(at(RSDP)));
        check(RSDP + 10, AcpiError::Checksum(at(RSDP)));
        check(RSDP + 34, AcpiError::Checksum(at(RSDP)));
        check(RSDP + 23, AcpiError::Unreadable(at(RSDP)));
        check(XSDT + 12, AcpiError::Checksum(at(XSDT)));
        check(XSDT + 7, AcpiError::Unreadable(at(XSDT)));
        check(DMAR + 36, AcpiError::Checksum(at(DMAR)));
        check(DMAR + 7, AcpiError::Unreadable(at(DMAR)));
    }

    #[test]
    fn a_root_of_revision_0_has_one_checksum_and_it_counts() {
        let mut memory = memory(0, false);
        memory.put(RSDP + 34, &[0x5a]);
        assert_eq!(dmar(&memory), Ok(40), "past the end of revision 0");
        memory.put(RSDP + 10, &[0x5a]);
        let expected = AcpiError::Checksum(PhysicalAddress::new(RSDP));
        assert_eq!(dmar(&memory), Err(expected));
    }

    #[test]
    fn a_root_table_with_another_signature_is_refused() {
        let mut memory = memory(2, true);
        memory.put(RSDP + 24, &DMAR.to_le_bytes());
        balance_root(&mut memory, 2);
        let expected = AcpiError::Signature(PhysicalAddress::new(DMAR));
        assert_eq!(dmar(&memory), Err(expected));
    }

    #[test]
    fn a_length_below_the_header_is_refused() {
        let mut memory = memory(2, true);
        memory.put(DMAR + 4, &35_u32.to_le_bytes());
        assert_eq!(dmar(&memory), Err(AcpiError::Unreadable(PhysicalAddress::new(DMAR))));
    }

    #[test]
    fn a_damaged_table_that_was_not_asked_for_is_passed_over() {
        let mut memory = memory(2, true);
        memory.put(OTHER + 36, &[99]);
        assert_eq!(dmar(&memory), Ok(40));
    }
}
