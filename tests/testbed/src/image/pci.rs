//! Configuration space of bus 0, by ports; used by the boot processor only.
//!
//! Holding a [`Function`] from [`find`] tells you that a device answered there.

use core::fmt;

use testbed::pci::{BarError, Function, bar, is_wide};

use crate::mmio::{NotDeviceMemory, Registers};
use crate::port::Port;

/// Vendor and device number of a function.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Identity {
    /// Who made it.
    pub(crate) vendor: u16,
    /// Which one it is.
    pub(crate) device: u16,
}

/// Class, subclass and programming interface of a function.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Class(pub(crate) u32);

impl Class {
    /// An NVM Express controller.
    pub(crate) const NVME: Self = Self(0x01_08_02);
}

/// Why a device's registers cannot be reached.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum RegistersError {
    /// The base address register is of no use.
    Bar(BarError),
    /// It names no device memory.
    Outside(NotDeviceMemory),
}

impl fmt::Display for RegistersError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Bar(error) => error.fmt(f),
            Self::Outside(error) => error.fmt(f),
        }
    }
}

impl core::error::Error for RegistersError {}

/// Every function of bus 0 that answers.
pub(crate) fn functions() -> impl Iterator<Item = Function> {
    (0..32).flat_map(|device| {
        let many = Function::new(device, 0)
            .is_some_and(|first| is_present(first) && read32(first, 0x0c) & 0x80_0000 != 0);
        let count = if many { 8 } else { 1 };
        (0..count)
            .filter_map(move |function| Function::new(device, function))
            .filter(|found| is_present(*found))
    })
}

/// The `index`-th function (from 0) for which `wanted` is true.
pub(crate) fn find(index: usize, wanted: impl Fn(Identity, Class) -> bool) -> Option<Function> {
    functions().filter(|found| wanted(identity(*found), class(*found))).nth(index)
}

/// Vendor and device number.
pub(crate) fn identity(function: Function) -> Identity {
    let [low, high, device_low, device_high] = read32(function, 0).to_le_bytes();
    Identity {
        vendor: u16::from_le_bytes([low, high]),
        device: u16::from_le_bytes([device_low, device_high]),
    }
}

/// Class, subclass and programming interface.
pub(crate) fn class(function: Function) -> Class {
    Class(read32(function, 8) >> 8)
}

/// Let the function answer at its base addresses, and start DMA if `bus_master`.
pub(crate) fn enable(function: Function, bus_master: bool) {
    const MEMORY: u32 = 1 << 1;
    const BUS_MASTER: u32 = 1 << 2;
    // The upper half is write-one-to-clear status: zeros leave it alone.
    let command = read32(function, 4) & 0xffff & !BUS_MASTER | MEMORY;
    write32(function, 4, command | if bus_master { BUS_MASTER } else { 0 });
}

/// The registers at base address `index`, 0 to 5.
///
/// # Errors
/// [`RegistersError`] if there are none, or they lie outside 2 GiB to 4 GiB.
pub(crate) fn registers(function: Function, index: u8) -> Result<Registers, RegistersError> {
    let missing = RegistersError::Bar(BarError::Missing);
    let low = match index {
        0..=5 => 0x10 + 4 * index,
        _ => return Err(missing),
    };
    let high = (index < 5).then_some(low + 4);
    let value = (read32(function, low), high.map_or(0, |high| read32(function, high)));
    let high = match (is_wide(value.0), high) {
        (true, None) => return Err(missing),
        (true, high) => high,
        (false, _) => None,
    };
    // While all ones are in the register the function must not answer anywhere.
    let command = read32(function, 4) & 0xffff;
    write32(function, 4, command & !0b111);
    let probe_low = probe(function, low, value.0);
    let probe_high = high.map_or(0, |high| probe(function, high, value.1));
    write32(function, 4, command);
    let found = bar(value, (probe_low, probe_high)).map_err(RegistersError::Bar)?;
    Registers::map(found.address, found.length).map_err(RegistersError::Outside)
}

/// What the register at `offset` holds after all ones; `value` is put back.
fn probe(function: Function, offset: u8, value: u32) -> u32 {
    write32(function, offset, u32::MAX);
    let probe = read32(function, offset);
    write32(function, offset, value);
    probe
}

fn is_present(function: Function) -> bool {
    identity(function).vendor != 0xffff
}

fn read32(function: Function, offset: u8) -> u32 {
    Port::PCI_ADDRESS.write32(function.configuration_address(offset));
    Port::PCI_DATA.read32()
}

fn write32(function: Function, offset: u8, value: u32) {
    Port::PCI_ADDRESS.write32(function.configuration_address(offset));
    Port::PCI_DATA.write32(value);
}
