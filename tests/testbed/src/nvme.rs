//! The NVMe registers and admin commands the testbed needs, as words.
//!
//! Source: NVM Express Base Specification 2.0, sections 3.1.3 (controller properties),
//! 3.3.3 (queue entries), 5.15 and 5.27 (features), 5.17 (Identify).

use crate::address::BusAddress;

/// Offsets of controller properties, in bytes.
pub mod register {
    /// Controller Capabilities (CAP), 64 bits.
    pub const CAPABILITIES: u64 = 0x00;
    /// Interrupt Mask Set (INTMS).
    pub const INTERRUPT_MASK_SET: u64 = 0x0c;
    /// Controller Configuration (CC).
    pub const CONFIGURATION: u64 = 0x14;
    /// Controller Status (CSTS).
    pub const STATUS: u64 = 0x1c;
    /// Admin Queue Attributes (AQA).
    pub const ADMIN_QUEUE_SIZES: u64 = 0x24;
    /// Admin Submission Queue Base Address (ASQ), 64 bits.
    pub const ADMIN_SUBMISSION_QUEUE: u64 = 0x28;
    /// Admin Completion Queue Base Address (ACQ), 64 bits.
    pub const ADMIN_COMPLETION_QUEUE: u64 = 0x30;
    /// The admin submission queue's tail doorbell; the completion queue's follows it.
    pub const DOORBELLS: u64 = 0x1000;
}

/// CC: enabled, 4 KiB pages, 64-byte submission and 16-byte completion entries.
pub const ENABLE: u32 = 1 | 6 << 16 | 4 << 20;
/// CSTS.RDY: the controller processes commands.
pub const READY: u32 = 1;
/// CSTS.CFS: the controller has failed and wants a reset.
pub const FATAL: u32 = 1 << 1;

/// Controller Capabilities.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Capabilities(pub u64);

impl Capabilities {
    /// The longest time a change of CC.EN may take (CAP.TO), in units of 500 ms.
    #[must_use]
    pub const fn timeout_units(self) -> u8 {
        (self.0 >> 24) as u8
    }

    /// The offset of the completion queue's head doorbell (CAP.DSTRD).
    #[must_use]
    pub const fn completion_doorbell(self) -> u64 {
        register::DOORBELLS + (4 << ((self.0 >> 32) & 0xf))
    }
}

/// An admin command whose data, if any, is named by one address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Command {
    /// Write the 4 KiB controller structure to the address, which is a frame's start.
    Identify(BusAddress),
    /// Write the 8 bytes of the Timestamp feature to the address.
    GetTimestamp(BusAddress),
    /// Read the 8 bytes of the Timestamp feature from the address.
    SetTimestamp(BusAddress),
}

impl Command {
    /// The submission queue entry, with `identifier` to find its completion by.
    #[must_use]
    pub const fn entry(self, identifier: u16) -> [u64; 8] {
        const TIMESTAMP: u64 = 0x0e;
        let (opcode, data, selector) = match self {
            Self::SetTimestamp(data) => (0x09, data, TIMESTAMP),
            Self::GetTimestamp(data) => (0x0a, data, TIMESTAMP),
            Self::Identify(data) => (0x06, data, 1),
        };
        let head = opcode | (identifier as u64) << 16;
        [head, 0, 0, data.get(), 0, selector, 0, 0]
    }

    /// The address and the number of bytes the controller reads or writes there.
    #[must_use]
    pub const fn data(self) -> (BusAddress, u64) {
        match self {
            Self::Identify(data) => (data, 4096),
            Self::GetTimestamp(data) | Self::SetTimestamp(data) => (data, 8),
        }
    }
}

/// A completion queue entry's second word.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Completion(pub u64);

impl Completion {
    /// The phase tag, which the controller inverts on each pass through the queue.
    #[must_use]
    pub const fn phase(self) -> bool {
        self.0 >> 48 & 1 != 0
    }

    /// The identifier of the command it completes.
    #[must_use]
    pub const fn identifier(self) -> u16 {
        (self.0 >> 32) as u16
    }

    /// Status code type (bits 8 to 10) and status code (bits 0 to 7); 0 is success.
    #[must_use]
    pub const fn status(self) -> u16 {
        (self.0 >> 49) as u16 & 0x7ff
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_command_entry_has_its_fields_where_the_controller_looks() {
        let at = BusAddress::new(0x1234_5000);
        let entry = Command::Identify(at).entry(0xabcd);
        assert_eq!(entry, [0xabcd_0006, 0, 0, 0x1234_5000, 0, 1, 0, 0]);
        assert_eq!(Command::SetTimestamp(at).entry(1)[0], 0x1_0009);
        assert_eq!(Command::GetTimestamp(at).entry(1)[0], 0x1_000a);
        assert_eq!(Command::GetTimestamp(at).entry(1)[5], 0x0e);
    }

    #[test]
    fn a_completion_is_taken_apart() {
        let completion = Completion(0x0409_1234_0000_0007);
        assert!(completion.phase());
        assert_eq!(completion.identifier(), 0x1234);
        assert_eq!(completion.status(), 0x204);
        assert!(!Completion(0xfffe_ffff_ffff_ffff).phase());
    }

    #[test]
    fn the_doorbell_stride_is_a_power_of_two_words() {
        assert_eq!(Capabilities(0).completion_doorbell(), 0x1004);
        assert_eq!(Capabilities(3 << 32 | 9 << 24).completion_doorbell(), 0x1020);
        assert_eq!(Capabilities(3 << 32 | 9 << 24).timeout_units(), 9);
    }
}
