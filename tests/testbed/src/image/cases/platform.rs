//! The platform: the clock, firmware's tables, device registers.

use core::time::Duration;

use testbed::address::PhysicalAddress;
use testbed::ensure;
use testbed::failure::Failure;

use crate::clock;
use crate::machine::Machine;
use crate::mmio::Registers;
use crate::say;

/// The clock moves on, and a wait ends at its limit and not before.
pub(super) fn clock(_: &Machine) -> Result<(), Failure> {
    let start = clock::now();
    let limit = Duration::from_millis(20);
    ensure!(clock::wait(limit, || false).is_err(), "a wait for nothing ended well");
    let passed = clock::now().saturating_sub(start);
    ensure!(passed > limit && passed < Duration::from_secs(5), "20 ms took {passed:?}");
    ensure!(clock::wait(Duration::ZERO, || true).is_ok(), "a condition that holds was missed");
    Ok(())
}

/// The DMAR table is there, and as long as it says.
pub(super) fn acpi(machine: &Machine) -> Result<(), Failure> {
    let table = machine.dmar()?;
    ensure!(table.starts_with(b"DMAR"), "another table was found");
    ensure!(table.len() > 48, "the table has {} bytes", table.len());
    say!("@ dmar_bytes={} host_address_width={}", table.len(), u32::from(table[36]) + 1);
    Ok(())
}

/// The registers of the first VT-d unit answer, and a window has edges.
pub(super) fn registers(_: &Machine) -> Result<(), Failure> {
    let start = PhysicalAddress::new(0xfed9_0000);
    let unit = Registers::map(start, 0x1000)?;
    let (version, capabilities) = (unit.read32(0), unit.read64(8));
    say!("@ vtd_version={version:#x} cap={capabilities:#x} ecap={:#x}", unit.read64(0x10));
    ensure!(version != 0 && version != u32::MAX, "the version reads as {version:#x}");
    let halves = u64::from(unit.read32(12)) << 32 | u64::from(unit.read32(8));
    ensure!(halves == capabilities, "two reads of 32 bits gave {halves:#x}");

    // The first register that is writable and has no effect: the fault event's data.
    unit.write32(0x3c, 0x1234);
    ensure!(unit.read32(0x3c) == 0x1234, "a write was lost");

    let short = Registers::map(start, 0x10)?;
    ensure!(short.read32(0xc) != u32::MAX, "the last word is outside");
    for offset in [1, 2, 0x0d, 0x10, 0x1000, u64::MAX - 3, u64::MAX] {
        ensure!(short.read32(offset) == u32::MAX, "32 bits at {offset:#x} were answered");
    }
    for offset in [1, 4, 9, 0xc, 0x10, u64::MAX - 7] {
        ensure!(short.read64(offset) == u64::MAX, "64 bits at {offset:#x} were answered");
    }
    short.write32(0x3c, 0);
    short.write64(0x38, 0);
    ensure!(unit.read32(0x3c) == 0x1234, "a write past the window went through");

    for (address, length) in [
        (0x10_0000, 8),
        ((2 << 30) - 8, 16),
        (0xfed9_0004, 4),
        ((4 << 30) - 8, 16),
        (4 << 30, 8),
        (u64::MAX - 7, 16),
    ] {
        let window = Registers::map(PhysicalAddress::new(address), length);
        ensure!(window.is_err(), "{length} bytes at {address:#x} passed for registers");
    }
    Ok(())
}
