//! QEMU's `edu` device: DMA between memory and a buffer of its own.
//!
//! A transfer takes 100 ms of virtual time. One of exactly 4096 bytes ends the emulator,
//! so 4095 is the most this driver passes on. The device cuts addresses to its
//! `dma_mask` (28 bits unless given) without a word, so the driver is told the mask and
//! refuses what would be cut.

use core::fmt;
use core::time::Duration;

use testbed::address::BusAddress;
use testbed::pci::Function;

use crate::clock;
use crate::mmio::Registers;
use crate::pci::{self, Identity, RegistersError};

/// The most bytes of one transfer.
pub(crate) const MOST: u16 = 4095;
/// The device's number for the start of its own buffer.
const BUFFER: u64 = 0x4_0000;
/// The longest a transfer may take.
const LIMIT: Duration = Duration::from_secs(5);

/// Register offsets, in bytes.
mod register {
    pub(super) const IDENTITY: u64 = 0x00;
    pub(super) const LIVENESS: u64 = 0x04;
    pub(super) const SOURCE: u64 = 0x80;
    pub(super) const TARGET: u64 = 0x88;
    pub(super) const LENGTH: u64 = 0x90;
    pub(super) const COMMAND: u64 = 0x98;
}

/// Command: start, and busy while it reads as set.
const START: u64 = 1;
/// Command: from the device to memory.
const TO_MEMORY: u64 = 1 << 1;

/// Why a transfer was not made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum EduError {
    /// There is no such device.
    Absent,
    /// Its registers cannot be reached.
    Registers(RegistersError),
    /// It does not answer as an edu device does.
    Dead,
    /// No transfer has this many bytes.
    Length(u16),
    /// The device would cut this address to its mask.
    Masked(BusAddress),
    /// The transfer did not end in time; it may still be going on.
    Busy,
}

impl fmt::Display for EduError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Absent => f.write_str("no edu device on bus 0"),
            Self::Registers(error) => write!(f, "edu: {error}"),
            Self::Dead => f.write_str("edu: the device does not answer"),
            Self::Length(length) => write!(f, "edu: no transfer has {length} bytes"),
            Self::Masked(at) => write!(f, "edu: {at:?} is outside the DMA mask"),
            Self::Busy => f.write_str("edu: the transfer does not end"),
        }
    }
}

impl core::error::Error for EduError {}

/// An edu device.
pub(crate) struct Edu {
    function: Function,
    registers: Registers,
    mask: u64,
}

impl Edu {
    /// Find the `index`-th device (from 0). `mask` is what `dma_mask=` gave it.
    ///
    /// # Errors
    /// [`EduError::Absent`], [`EduError::Registers`] or [`EduError::Dead`].
    pub(crate) fn open(index: usize, mask: u64) -> Result<Self, EduError> {
        const EDU: Identity = Identity { vendor: 0x1234, device: 0x11e8 };
        let function = pci::find(index, |identity, _| identity == EDU).ok_or(EduError::Absent)?;
        let registers = pci::registers(function, 0).map_err(EduError::Registers)?;
        pci::enable(function, true);
        // The low byte names the device, and the liveness register inverts what it is given.
        registers.write32(register::LIVENESS, 0x1234_5678);
        let alive = registers.read32(register::IDENTITY) & 0xff == 0xed
            && registers.read32(register::LIVENESS) == !0x1234_5678;
        if !alive {
            return Err(EduError::Dead);
        }
        Ok(Self { function, registers, mask })
    }

    /// The function it is, and so the requester identifier of its DMA.
    pub(crate) fn function(&self) -> Function {
        self.function
    }

    /// Let the device read `length` bytes of memory, 1 to 4095, into its buffer.
    ///
    /// # Errors
    /// [`EduError`]; after [`EduError::Busy`] the device may still read.
    pub(crate) fn read_memory(&self, from: BusAddress, length: u16) -> Result<(), EduError> {
        self.check(from, length)?;
        self.transfer(from.get(), BUFFER, length, START)
    }

    /// Let the device write the first `length` bytes of its buffer, 1 to 4095, to memory.
    ///
    /// # Errors
    /// [`EduError`]; after [`EduError::Busy`] the device may still write.
    pub(crate) fn write_memory(&self, to: BusAddress, length: u16) -> Result<(), EduError> {
        self.check(to, length)?;
        self.transfer(BUFFER, to.get(), length, START | TO_MEMORY)
    }

    /// Refuse what the device would cut, or what would end the emulator.
    fn check(&self, at: BusAddress, length: u16) -> Result<(), EduError> {
        if length == 0 || length > MOST {
            return Err(EduError::Length(length));
        }
        let last = at.checked_add(u64::from(length - 1)).ok_or(EduError::Masked(at))?;
        if at.get() & !self.mask != 0 || last.get() & !self.mask != 0 {
            return Err(EduError::Masked(at));
        }
        Ok(())
    }

    fn transfer(&self, from: u64, to: u64, length: u16, command: u64) -> Result<(), EduError> {
        self.idle()?;
        self.registers.write64(register::SOURCE, from);
        self.registers.write64(register::TARGET, to);
        self.registers.write64(register::LENGTH, u64::from(length));
        self.registers.write64(register::COMMAND, command);
        self.idle()
    }

    /// Wait until no transfer is going on.
    fn idle(&self) -> Result<(), EduError> {
        let ended = || self.registers.read64(register::COMMAND) & START == 0;
        clock::wait(LIMIT, ended).map_err(|_| EduError::Busy)
    }
}
