//! Registers of devices, at physical addresses from 2 GiB to 4 GiB.
//!
//! A `Registers` is a window there. The boot page tables map that range uncached, and
//! neither the image nor any managed frame lies in it, so no Rust object does either.

// UNSAFETY: device registers are reached by volatile accesses to fixed addresses.
#![expect(unsafe_code)]

use core::fmt;
use core::sync::atomic::{Ordering, compiler_fence};

use testbed::address::PhysicalAddress;

/// The first byte of the device range.
const FIRST: u64 = 2 << 30;
/// The first byte after it.
const END: u64 = 4 << 30;

/// A window of device registers. Offsets are bytes from its start.
///
/// An access that is not naturally aligned or not wholly inside the window behaves like
/// one that no device answers: reads give all ones, writes are dropped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Registers {
    base: u64,
    length: u64,
}

/// Why a window was refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct NotDeviceMemory {
    /// The first byte asked for.
    pub(crate) address: PhysicalAddress,
    /// The number of bytes asked for.
    pub(crate) length: u64,
}

impl fmt::Display for NotDeviceMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { address, length } = self;
        write!(f, "{length:#x} bytes at {address:?} are not device memory")
    }
}

impl core::error::Error for NotDeviceMemory {}

impl Registers {
    /// The window of `length` bytes at `address`, which is a multiple of 8.
    ///
    /// # Errors
    /// [`NotDeviceMemory`] unless all of it lies between 2 GiB and 4 GiB.
    pub(crate) fn map(address: PhysicalAddress, length: u64) -> Result<Self, NotDeviceMemory> {
        let base = address.get();
        let end = base.checked_add(length);
        if base < FIRST || !base.is_multiple_of(8) || end.is_none_or(|end| end > END) {
            return Err(NotDeviceMemory { address, length });
        }
        Ok(Self { base, length })
    }

    /// Read the 32-bit register at `offset`.
    pub(crate) fn read32(self, offset: u64) -> u32 {
        let Some(at) = self.at(offset, 4) else {
            return u32::MAX;
        };
        // SAFETY: `at` checked that the access is aligned and inside a window that `map`
        // let through: mapped, uncached, and home to no Rust object.
        let value = unsafe { (at as *const u32).read_volatile() };
        // What a device reported must not be acted on before it was read.
        compiler_fence(Ordering::SeqCst);
        value
    }

    /// Read the 64-bit register at `offset` in one access.
    pub(crate) fn read64(self, offset: u64) -> u64 {
        let Some(at) = self.at(offset, 8) else {
            return u64::MAX;
        };
        // SAFETY: as in `read32`.
        let value = unsafe { (at as *const u64).read_volatile() };
        compiler_fence(Ordering::SeqCst);
        value
    }

    /// Write the 32-bit register at `offset`.
    pub(crate) fn write32(self, offset: u64, value: u32) {
        let Some(at) = self.at(offset, 4) else {
            return;
        };
        // A device that is told to look at memory must find what was stored before. The
        // processor keeps stores in order; only the compiler has to be told.
        compiler_fence(Ordering::SeqCst);
        // SAFETY: as in `read32`; what the device does to memory in answer is reached by
        // Rust through atomics alone (`crate::memory`).
        unsafe { (at as *mut u32).write_volatile(value) }
    }

    /// Write the 64-bit register at `offset` in one access.
    pub(crate) fn write64(self, offset: u64, value: u64) {
        let Some(at) = self.at(offset, 8) else {
            return;
        };
        compiler_fence(Ordering::SeqCst);
        // SAFETY: as in `write32`.
        unsafe { (at as *mut u64).write_volatile(value) }
    }

    /// The address of `bytes` bytes at `offset`, if aligned and inside.
    fn at(self, offset: u64, bytes: u64) -> Option<usize> {
        let end = offset.checked_add(bytes)?;
        if !offset.is_multiple_of(bytes) || end > self.length {
            return None;
        }
        usize::try_from(self.base.checked_add(offset)?).ok()
    }
}
