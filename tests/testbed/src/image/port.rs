//! The I/O ports the testbed uses, and no others.
//!
//! A `Port` names a device of the PC platform; reading or writing it is safe because
//! the list leaves out every port through which a device could be told to use memory.

// UNSAFETY: `in` and `out` are instructions without a safe form.
#![expect(unsafe_code)]

use x86_64::instructions::port;

/// One I/O port.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Port(u16);

impl Port {
    /// Interrupt mask of the first interrupt controller.
    pub(crate) const PIC1_MASK: Self = Self(0x21);
    /// Channel 2 of the interval timer.
    pub(crate) const TIMER_2: Self = Self(0x42);
    /// Command register of the interval timer.
    pub(crate) const TIMER_COMMAND: Self = Self(0x43);
    /// Gate and output of timer channel 2.
    pub(crate) const SPEAKER: Self = Self(0x61);
    /// Interrupt mask of the second interrupt controller.
    pub(crate) const PIC2_MASK: Self = Self(0xa1);
    /// QEMU's `isa-debug-exit`.
    pub(crate) const DEBUG_EXIT: Self = Self(0xf4);
    /// COM1: data, or the low divisor byte.
    pub(crate) const SERIAL_DATA: Self = Self(0x3f8);
    /// COM1: interrupts, or the high divisor byte.
    pub(crate) const SERIAL_INTERRUPTS: Self = Self(0x3f9);
    /// COM1: queues.
    pub(crate) const SERIAL_QUEUES: Self = Self(0x3fa);
    /// COM1: frame format.
    pub(crate) const SERIAL_FORMAT: Self = Self(0x3fb);
    /// COM1: line state.
    pub(crate) const SERIAL_STATE: Self = Self(0x3fd);
    /// PCI configuration address, 32 bits.
    pub(crate) const PCI_ADDRESS: Self = Self(0xcf8);
    /// PCI configuration data, 32 bits.
    pub(crate) const PCI_DATA: Self = Self(0xcfc);
    /// Bochs ends when the eight letters of `Shutdown` are written here.
    pub(crate) const SHUTDOWN: Self = Self(0x8900);

    /// Read one byte.
    pub(crate) fn read8(self) -> u8 {
        // SAFETY: the port is one of those above; none of them changes memory.
        unsafe { port::PortReadOnly::new(self.0).read() }
    }

    /// Write one byte.
    pub(crate) fn write8(self, value: u8) {
        // SAFETY: the port is one of those above; none of them changes memory.
        unsafe { port::PortWriteOnly::new(self.0).write(value) }
    }

    /// Read four bytes.
    pub(crate) fn read32(self) -> u32 {
        // SAFETY: the port is one of those above; none of them changes memory.
        unsafe { port::PortReadOnly::new(self.0).read() }
    }

    /// Write four bytes.
    pub(crate) fn write32(self, value: u32) {
        // SAFETY: the port is one of those above. The PCI ports can let a device start DMA;
        // `crate::pci` offers that only for devices whose drivers take addresses from cases,
        // and memory a device may reach is used through atomics alone (`crate::memory`).
        unsafe { port::PortWriteOnly::new(self.0).write(value) }
    }
}
