//! Names of PCI functions, and the meaning of their base address registers.
//!
//! Layout: PCI Local Bus Specification 3.0, sections 3.2.2.3.2 (configuration
//! mechanism) and 6.2.5.1 (base addresses).

use core::fmt;

use crate::address::PhysicalAddress;

/// One function on bus 0.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Function {
    device: u8,
    function: u8,
}

impl Function {
    /// The function with this device (0 to 31) and function number (0 to 7).
    #[must_use]
    pub const fn new(device: u8, function: u8) -> Option<Self> {
        if device < 32 && function < 8 { Some(Self { device, function }) } else { None }
    }

    /// The identifier its requests carry, by which an IOMMU tells devices apart.
    #[must_use]
    pub const fn requester_id(self) -> u16 {
        (self.device as u16) << 3 | self.function as u16
    }

    /// The device number, 0 to 31.
    #[must_use]
    pub const fn device(self) -> u8 {
        self.device
    }

    /// The function number within the device, 0 to 7.
    #[must_use]
    pub const fn function(self) -> u8 {
        self.function
    }

    /// What to write to the address port to reach the configuration word at `offset`.
    ///
    /// The two low bits of `offset` are dropped.
    #[must_use]
    pub const fn configuration_address(self, offset: u8) -> u32 {
        1 << 31 | (self.requester_id() as u32) << 8 | (offset & 0xfc) as u32
    }
}

impl fmt::Display for Function {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "00:{:02x}.{}", self.device, self.function)
    }
}

impl fmt::Debug for Function {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Function({self})")
    }
}

/// Where a base address register places a device's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Bar {
    /// The first byte.
    pub address: PhysicalAddress,
    /// How many bytes, a power of two.
    pub length: u64,
}

/// Why a base address register names no memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BarError {
    /// There is no such register, or half of a 64-bit one is missing.
    Missing,
    /// It places I/O ports.
    Ports,
    /// Firmware gave it no address.
    Unset,
}

impl fmt::Display for BarError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Missing => "the base address register is missing",
            Self::Ports => "the base address register is for ports",
            Self::Unset => "firmware set no base address",
        })
    }
}

impl core::error::Error for BarError {}

/// Whether a base address register takes two words.
#[must_use]
pub const fn is_wide(low: u32) -> bool {
    low & 0b111 == 0b100
}

/// Decode a base address register from its words, before and after writing all ones.
///
/// Each pair is `(low, high)`; for a 32-bit register the high words are ignored.
///
/// # Errors
/// [`BarError`] if it does not place memory.
pub const fn bar(value: (u32, u32), probe: (u32, u32)) -> Result<Bar, BarError> {
    if value.0 & 1 != 0 {
        return Err(BarError::Ports);
    }
    let mut address = (value.0 & !0xf) as u64;
    let mut mask = (probe.0 & !0xf) as u64;
    if is_wide(value.0) {
        address |= (value.1 as u64) << 32;
        mask |= (probe.1 as u64) << 32;
    }
    if mask == 0 {
        return Err(BarError::Missing);
    }
    if address == 0 {
        return Err(BarError::Unset);
    }
    Ok(Bar { address: PhysicalAddress::new(address), length: 1 << mask.trailing_zeros() })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn check(value: (u32, u32), probe: (u32, u32), expected: Result<(u64, u64), BarError>) {
        let found = bar(value, probe).map(|bar| (bar.address.get(), bar.length));
        assert_eq!(found, expected);
    }

    #[test]
    fn a_register_gives_its_address_and_length_or_says_why_not() {
        let ones = u32::MAX;
        check((0xfeb0_0000, 9), (0xfff0_0000, 9), Ok((0xfeb0_0000, 0x10_0000)));
        check((0xfeb0_000c, 1), (0xffff_c00c, ones), Ok((0x1_feb0_0000, 0x4000)));
        check((0x0000_0004, 1), (0x0000_0004, ones), Ok((0x1_0000_0000, 0x1_0000_0000)));
        check((0xc001, 0), (0xffff_ffe1, 0), Err(BarError::Ports));
        check((0, 0), (0, 0), Err(BarError::Missing));
        check((0, 0), (0xffff_f000, 0), Err(BarError::Unset));
    }

    #[test]
    fn a_function_has_one_requester_id_and_configuration_address() {
        let function = Function::new(31, 7).expect("in range");
        assert_eq!(function.requester_id(), 0xff);
        assert_eq!(function.configuration_address(0x13), 0x8000_ff10);
        assert_eq!(Function::new(32, 0), None);
        assert_eq!(Function::new(0, 8), None);
    }
}
