//! Reading memory that firmware and the boot loader filled in.
//!
//! A `Physical` gives out bytes that nothing changes any more, or refuses; parsers
//! written over it run on the host against ordinary slices.

use crate::address::PhysicalAddress;

/// Memory that is read by physical address and no longer written by anyone.
pub trait Physical<'m> {
    /// The `length` bytes at `address`, or `None` if any of them may not be read.
    fn bytes(&self, address: PhysicalAddress, length: usize) -> Option<&'m [u8]>;
}

/// The little-endian 16-bit number at `offset`, or `None` past the end.
#[must_use]
pub fn u16_at(bytes: &[u8], offset: usize) -> Option<u16> {
    let end = offset.checked_add(2)?;
    let field = bytes.get(offset..end)?.try_into().ok()?;
    Some(u16::from_le_bytes(field))
}

/// The little-endian 32-bit number at `offset`, or `None` past the end.
#[must_use]
pub fn u32_at(bytes: &[u8], offset: usize) -> Option<u32> {
    let end = offset.checked_add(4)?;
    let field = bytes.get(offset..end)?.try_into().ok()?;
    Some(u32::from_le_bytes(field))
}

/// The little-endian 64-bit number at `offset`, or `None` past the end.
#[must_use]
pub fn u64_at(bytes: &[u8], offset: usize) -> Option<u64> {
    let end = offset.checked_add(8)?;
    let field = bytes.get(offset..end)?.try_into().ok()?;
    Some(u64::from_le_bytes(field))
}

/// The text at `address` up to its zero byte, which must come within `limit` bytes.
///
/// `None` if there is no such byte, memory may not be read, or it is not UTF-8.
#[must_use]
pub fn text<'m>(
    memory: &impl Physical<'m>,
    address: PhysicalAddress,
    limit: usize,
) -> Option<&'m str> {
    for length in 0..limit {
        let here = address.checked_add(u64::try_from(length).ok()?)?;
        if memory.bytes(here, 1)? == [0] {
            return core::str::from_utf8(memory.bytes(address, length)?).ok();
        }
    }
    None
}

#[cfg(test)]
pub(crate) mod fake {
    //! A small stretch of memory for the tests of the parsers.

    use std::vec;
    use std::vec::Vec;

    use super::{Physical, PhysicalAddress};

    /// Bytes from `base` on; everything else may not be read.
    pub(crate) struct Memory {
        base: u64,
        bytes: Vec<u8>,
    }

    impl Memory {
        pub(crate) fn new(base: u64, length: usize) -> Self {
            Self { base, bytes: vec![0; length] }
        }

        /// Overwrite the bytes at `address`.
        #[track_caller]
        pub(crate) fn put(&mut self, address: u64, bytes: &[u8]) {
            let start = usize::try_from(address - self.base).expect("inside the memory");
            self.bytes[start..start + bytes.len()].copy_from_slice(bytes);
        }

        /// Make the `length` bytes at `start` add up to zero by their byte at `fix`.
        #[track_caller]
        pub(crate) fn balance(&mut self, start: u64, length: usize, fix: u64) {
            self.put(fix, &[0]);
            let first = usize::try_from(start - self.base).expect("inside the memory");
            let sum = self.bytes[first..first + length]
                .iter()
                .fold(0_u8, |sum, byte| sum.wrapping_add(*byte));
            self.put(fix, &[sum.wrapping_neg()]);
        }
    }

    impl<'m> Physical<'m> for &'m Memory {
        fn bytes(&self, address: PhysicalAddress, length: usize) -> Option<&'m [u8]> {
            let start = usize::try_from(address.get().checked_sub(self.base)?).ok()?;
            self.bytes.get(start..start.checked_add(length)?)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::fake::Memory;
    use super::*;

    #[test]
    fn a_text_ends_at_its_zero_byte_and_nowhere_else() {
        let mut memory = Memory::new(0x1000, 16);
        memory.put(0x1000, b"case=boot\0");
        memory.put(0x100c, b"\xffab");
        let at = |address, limit| text(&&memory, PhysicalAddress::new(address), limit);
        assert_eq!(at(0x1000, 64), Some("case=boot"));
        assert_eq!(at(0x1009, 64), Some(""));
        assert_eq!(at(0x1000, 9), None, "no zero byte within the limit");
        assert_eq!(at(0x100c, 64), None, "not UTF-8");
        assert_eq!(at(0x1010, 64), None, "past the end of memory");
    }

    #[test]
    fn a_number_past_the_end_is_none() {
        let bytes = [1, 2, 3, 4, 5, 6, 7, 8];
        assert_eq!(u16_at(&bytes, 6), Some(0x0807));
        assert_eq!(u16_at(&bytes, 7), None);
        assert_eq!(u32_at(&bytes, 4), Some(0x0807_0605));
        assert_eq!(u32_at(&bytes, 5), None);
        assert_eq!(u64_at(&bytes, 0), Some(0x0807_0605_0403_0201));
        assert_eq!(u64_at(&bytes, usize::MAX), None);
    }
}
