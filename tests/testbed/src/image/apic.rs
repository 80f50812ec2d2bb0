//! The local interrupt controller of the processor that runs this.
//!
//! Every processor finds its own [`Apic`] at the same address. Registers: AMD64 APM,
//! volume 2, chapter 16 (table 16-2), or Intel SDM volume 3, chapter "Advanced
//! Programmable Interrupt Controller".

use core::time::Duration;

use testbed::address::PhysicalAddress;

use crate::clock::{self, TimedOut};
use crate::mmio::{NotDeviceMemory, Registers};

/// The address at reset, which firmware leaves.
const BASE: PhysicalAddress = PhysicalAddress::new(0xfee0_0000);

/// Offset of the identifier, in bits 24 to 31.
const ID: u64 = 0x20;
/// Offset of the end-of-interrupt register.
const END: u64 = 0xb0;
/// Offset of the spurious-interrupt vector; bit 8 turns the controller on.
const SPURIOUS: u64 = 0xf0;
/// Offset of the low half of the interrupt command. Writing it sends.
const COMMAND: u64 = 0x300;
/// Offset of its high half: the destination in bits 24 to 31.
const DESTINATION: u64 = 0x310;

/// Bit 12 of the command: it has not been taken yet.
const PENDING: u32 = 1 << 12;
/// Bit 14 of the command: assert.
const ASSERT: u32 = 1 << 14;

/// What one processor sends another.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Message {
    /// An interrupt with this vector.
    Fixed(u8),
    /// Reset, and wait for a start-up.
    Initialise,
    /// Start at this page below 1 MiB.
    StartUp(u8),
}

/// The local controller.
#[derive(Clone, Copy)]
pub(crate) struct Apic(Registers);

impl Apic {
    /// The controller of whoever uses it.
    ///
    /// # Errors
    /// Never on a machine whose device memory is where it is.
    pub(crate) fn open() -> Result<Self, NotDeviceMemory> {
        Ok(Self(Registers::map(BASE, 0x1000)?))
    }

    /// Turn it on. Spurious interrupts arrive at vector 255.
    pub(crate) fn turn_on(self) {
        self.0.write32(SPURIOUS, 0x1ff);
    }

    /// The identifier by which others reach it.
    pub(crate) fn id(self) -> u8 {
        self.0.read32(ID).to_le_bytes()[3]
    }

    /// The interrupt that is being handled is over.
    pub(crate) fn end(self) {
        self.0.write32(END, 0);
    }

    /// Send a message to the processor with this identifier.
    ///
    /// # Errors
    /// [`TimedOut`] if the one before is never taken.
    pub(crate) fn send(self, to: u8, message: Message) -> Result<(), TimedOut> {
        let (Self(registers), limit) = (self, Duration::from_millis(100));
        clock::wait(limit, || registers.read32(COMMAND) & PENDING == 0)?;
        registers.write32(DESTINATION, u32::from(to) << 24);
        registers.write32(
            COMMAND,
            ASSERT
                | match message {
                    Message::Fixed(vector) => u32::from(vector),
                    Message::Initialise => 5 << 8,
                    Message::StartUp(page) => 6 << 8 | u32::from(page),
                },
        );
        Ok(())
    }
}
