//! Commands to a unit's caches, before they take the form of queue or registers.
//!
//! A [`Command`] names what must be forgotten. It is encoded as a queue descriptor,
//! or as a value for the command registers where the queue is off.

use flush::Depth;

use crate::Block;
use crate::spec::descriptor::{self, Descriptor, granularity, kind};
use crate::spec::registers::{Capabilities, context_command, iotlb_command};

/// A requester id: bus in bits 8 to 15, device in 3 to 7, function in 0 to 2.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SourceId(u16);

impl SourceId {
    /// The requester with this 16-bit id.
    #[must_use]
    pub const fn new(id: u16) -> Self {
        Self(id)
    }

    /// The requester at this place. `None` for a `device` above 31 or a `function` above
    /// 7: there is none, and it must not be taken for another one.
    #[must_use]
    pub const fn at(bus: u8, device: u8, function: u8) -> Option<Self> {
        if device > 31 || function > 7 {
            return None;
        }
        Some(Self((bus as u16) << 8 | (device as u16) << 3 | function as u16))
    }

    /// The 16-bit id.
    #[must_use]
    pub const fn get(self) -> u16 {
        self.0
    }

    /// Bus number.
    #[must_use]
    pub const fn bus(self) -> u8 {
        (self.0 >> 8) as u8
    }

    /// Device and function in one byte, the index into a context table.
    #[must_use]
    pub const fn device_function(self) -> u8 {
        self.0 as u8
    }
}

/// A unit's own number of a domain: what the hardware's caches are tagged with.
///
/// Not the hypervisor's [`DomainId`](flush::DomainId): one domain has a tag on each
/// unit, and a tag is given to another domain later.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Tag(u16);

impl Tag {
    /// The tag that context entries which fault are cached under in caching mode (6.2.2).
    pub const RESERVED: Self = Self(0);

    /// The tag with this number.
    #[must_use]
    pub const fn new(number: u16) -> Self {
        Self(number)
    }

    /// The number.
    #[must_use]
    pub const fn get(self) -> u16 {
        self.0
    }
}

/// What an IOTLB invalidation is asked to drain, from what the unit offers (6.5.4).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Drain {
    /// Translated writes reach memory before the invalidation completes.
    pub writes: bool,
    /// Translated reads have been answered before the invalidation completes.
    pub reads: bool,
}

impl Drain {
    /// Everything the unit can drain.
    #[must_use]
    pub const fn offered(capabilities: Capabilities) -> Self {
        Self { writes: capabilities.drains_writes(), reads: capabilities.drains_reads() }
    }
}

/// Something a unit, or a device behind it, must forget.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Command {
    /// Every context entry.
    ContextGlobal,
    /// The context entry of one requester, cached under `tag`.
    ContextDevice {
        /// The tag of the entry *before* it changed.
        tag: Tag,
        /// The requester.
        source: SourceId,
    },
    /// Every translation.
    IotlbGlobal,
    /// Every translation of one tag.
    IotlbDomain {
        /// The tag.
        tag: Tag,
    },
    /// The translations of one block of one tag.
    IotlbPages {
        /// The tag.
        tag: Tag,
        /// The pages; its order is at most what the unit allows.
        block: Block,
        /// With [`Depth::Leaves`] cached table entries may stay.
        depth: Depth,
    },
    /// The translations of one block that a device keeps itself.
    DeviceTlb {
        /// The device.
        source: SourceId,
        /// The physical function that it is or belongs to, for a unit that throttles
        /// invalidations by that ([`ExtendedCapabilities::throttles_devices`]).
        ///
        /// [`ExtendedCapabilities::throttles_devices`]:
        ///     crate::spec::registers::ExtendedCapabilities::throttles_devices
        physical_function: Option<SourceId>,
        /// How many invalidations the device takes at a time, 1 to 32.
        max_pending: u8,
        /// The pages; [`Block::ALL`] for all.
        block: Block,
    },
}

/// The form a command takes in the register interface (11.4.6).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum RegisterForm {
    /// A value for the context command register.
    Context(u64),
    /// Values for the invalidate address register, if used, and the IOTLB invalidate register.
    Iotlb { address: Option<u64>, command: u64 },
    /// There is no such command.
    None,
}

/// Address, mask and hint as IOTLB descriptors and the address register have them.
const fn page_operand(block: Block, depth: Depth) -> u64 {
    let hint = match depth {
        Depth::Leaves => descriptor::HINT_LEAVES_ONLY,
        Depth::Tables => 0,
    };
    match block.address() {
        Some(address) => address | hint | (block.order() & 0x3f) as u64,
        // Not reached: such blocks are never planned as pages.
        None => hint,
    }
}

/// Address and size of a device-TLB invalidation: the lowest zero bit of the address
/// above bit 11 marks the size (6.5.2.5).
const fn device_operand(block: Block) -> u64 {
    const ALL: u64 = (u64::MAX >> 1 & !0xfff) | descriptor::DEVICE_SIZE;
    if block.order() == 0 {
        return match block.address() {
            Some(address) => address,
            None => ALL,
        };
    }
    if block.order() >= 52 {
        return ALL;
    }
    match block.address() {
        Some(address) => {
            let ones = (1_u64 << (block.order() - 1)) - 1;
            address | ones << 12 | descriptor::DEVICE_SIZE
        }
        None => ALL,
    }
}

const fn context_register(granularity: u64) -> u64 {
    context_command::INVALIDATE | granularity << context_command::GRANULARITY_LOW
}

const fn iotlb_register(granularity: u64, tag: Tag, drain: Drain) -> u64 {
    let writes = if drain.writes { iotlb_command::DRAIN_WRITES } else { 0 };
    let reads = if drain.reads { iotlb_command::DRAIN_READS } else { 0 };
    iotlb_command::INVALIDATE
        | granularity << iotlb_command::GRANULARITY_LOW
        | writes
        | reads
        | (tag.get() as u64) << iotlb_command::DOMAIN_LOW
}

impl Command {
    /// The command as a queue descriptor (6.5.2.1, 6.5.2.3, 6.5.2.5).
    #[must_use]
    pub const fn descriptor(self, drain: Drain) -> Descriptor {
        let drains = if drain.writes { descriptor::DRAIN_WRITES } else { 0 }
            | if drain.reads { descriptor::DRAIN_READS } else { 0 };
        let (kind, granularity, tag) = match self {
            Self::ContextGlobal => (kind::CONTEXT, granularity::GLOBAL, Tag(0)),
            Self::ContextDevice { tag, .. } => (kind::CONTEXT, granularity::NARROW, tag),
            Self::IotlbGlobal => (kind::IOTLB | drains, granularity::GLOBAL, Tag(0)),
            Self::IotlbDomain { tag } => (kind::IOTLB | drains, granularity::DOMAIN, tag),
            Self::IotlbPages { tag, .. } => (kind::IOTLB | drains, granularity::NARROW, tag),
            Self::DeviceTlb { physical_function, max_pending, .. } => {
                let pending = ((max_pending & 0x1f) as u64) << descriptor::MAX_PENDING_LOW;
                let function = match physical_function {
                    Some(source) => descriptor::physical_function(source.get()),
                    None => 0,
                };
                (kind::DEVICE_TLB | pending | function, 0, Tag(0))
            }
        };
        let (source, high) = match self {
            Self::ContextGlobal | Self::IotlbGlobal | Self::IotlbDomain { .. } => (0, 0),
            Self::ContextDevice { source, .. } => (source.get(), 0),
            Self::IotlbPages { block, depth, .. } => (0, page_operand(block, depth)),
            Self::DeviceTlb { source, block, .. } => (source.get(), device_operand(block)),
        };
        let low = kind
            | granularity << descriptor::GRANULARITY_LOW
            | (tag.get() as u64) << descriptor::DOMAIN_LOW
            | (source as u64) << descriptor::SOURCE_LOW;
        Descriptor { low, high }
    }

    /// The command as register values (11.4.6).
    pub(crate) const fn registers(self, drain: Drain) -> RegisterForm {
        match self {
            Self::ContextGlobal => RegisterForm::Context(context_register(granularity::GLOBAL)),
            Self::ContextDevice { tag, source } => RegisterForm::Context(
                context_register(granularity::NARROW)
                    | (source.get() as u64) << context_command::SOURCE_LOW
                    | tag.get() as u64,
            ),
            Self::IotlbGlobal => RegisterForm::Iotlb {
                address: None,
                command: iotlb_register(granularity::GLOBAL, Tag(0), drain),
            },
            Self::IotlbDomain { tag } => RegisterForm::Iotlb {
                address: None,
                command: iotlb_register(granularity::DOMAIN, tag, drain),
            },
            Self::IotlbPages { tag, block, depth } => RegisterForm::Iotlb {
                address: Some(page_operand(block, depth)),
                command: iotlb_register(granularity::NARROW, tag, drain),
            },
            Self::DeviceTlb { .. } => RegisterForm::None,
        }
    }

    /// The next wider command that includes this one, if there is one.
    #[must_use]
    pub const fn wider(self) -> Option<Self> {
        match self {
            Self::ContextDevice { .. } => Some(Self::ContextGlobal),
            Self::IotlbPages { tag, .. } => Some(Self::IotlbDomain { tag }),
            Self::IotlbDomain { .. } => Some(Self::IotlbGlobal),
            Self::ContextGlobal | Self::IotlbGlobal | Self::DeviceTlb { .. } => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use flush::{Gfn, Run};

    const DRAIN: Drain = Drain { writes: true, reads: true };
    const DRY: Drain = Drain { writes: false, reads: false };

    fn block(first: u64, last: u64) -> Block {
        Block::around(Run::new(Gfn::new(first), Gfn::new(last)).unwrap())
    }

    #[track_caller]
    fn check(command: Command, drain: Drain, low: u64, high: u64) {
        assert_eq!(command.descriptor(drain), Descriptor { low, high }, "{command:?}");
    }

    #[test]
    fn commands_encode_to_the_descriptors_of_the_manual() {
        let (tag, source) = (Tag::new(0x1234), SourceId::at(3, 4, 5).unwrap());
        check(Command::ContextGlobal, DRAIN, 0x11, 0);
        check(Command::ContextDevice { tag, source }, DRAIN, 0x0325_1234_0031, 0);
        check(Command::IotlbGlobal, DRAIN, 0xd2, 0);
        check(Command::IotlbGlobal, DRY, 0x12, 0);
        check(Command::IotlbDomain { tag }, DRAIN, 0x1234_00e2, 0);
        let writes = Drain { writes: true, reads: false };
        check(Command::IotlbDomain { tag }, writes, 0x1234_0062, 0);
        let pages = |depth| Command::IotlbPages { tag, block: block(0x25, 0x3a), depth };
        check(pages(Depth::Leaves), DRAIN, 0x1234_00f2, 0x2_0045);
        check(pages(Depth::Tables), DRAIN, 0x1234_00f2, 0x2_0005);
    }

    #[test]
    fn device_blocks_mark_their_size_with_the_lowest_zero_bit() {
        let source = SourceId::at(1, 0, 0).unwrap();
        let command = |block, max_pending| Command::DeviceTlb {
            source,
            physical_function: None,
            max_pending,
            block,
        };
        check(command(block(7, 7), 1), DRAIN, 0x0100_0001_0003, 0x7000);
        check(command(block(6, 7), 32), DRAIN, 0x0100_0000_0003, 0x6001);
        check(command(block(8, 11), 31), DRAIN, 0x0100_001f_0003, 0x9001);
        check(command(block(0x200, 0x3ff), 1), DRAIN, 0x0100_0001_0003, 0x2f_f001);
        check(command(Block::ALL, 1), DRAIN, 0x0100_0001_0003, 0x7fff_ffff_ffff_f001);
        check(command(block(0, (1 << 52) - 1), 1), DRAIN, 0x0100_0001_0003, 0x7fff_ffff_ffff_f001);
        check(command(block(0, (1 << 51) - 1), 1), DRAIN, 0x0100_0001_0003, 0x3fff_ffff_ffff_f001);
    }

    /// Symptom: a unit that throttles device-TLB invalidations counted those of every
    /// device as the ones of function 0 of device 0. Cause: the field for the physical
    /// function stayed 0. Cure: it is filled in where the unit looks at it.
    #[test]
    fn the_physical_function_is_split_over_two_fields() {
        let command = |function| Command::DeviceTlb {
            source: SourceId::new(0x0108),
            physical_function: Some(SourceId::new(function)),
            max_pending: 1,
            block: block(7, 7),
        };
        check(command(0x0100), DRAIN, 0x0100_0108_0001_0003, 0x7000);
        check(command(0xabcd), DRAIN, 0xabc0_0108_0001_d003, 0x7000);
        check(command(0xffff), DRAIN, 0xfff0_0108_0001_f003, 0x7000);
    }

    /// Symptom: a path of the firmware with device 34 named device 2. Cause: the upper
    /// bits were dropped. Cure: such a place has no requester.
    #[test]
    fn a_place_beyond_the_fields_is_no_requester() {
        assert_eq!(SourceId::at(5, 31, 7), Some(SourceId::new(0x5ff)));
        for (device, function) in [(32, 0), (34, 0), (0, 8), (255, 255)] {
            assert_eq!(SourceId::at(0, device, function), None);
        }
    }

    #[test]
    fn commands_encode_to_the_registers_of_the_manual() {
        let (tag, source) = (Tag::new(0x1234), SourceId::at(3, 4, 5).unwrap());
        let check = |command: Command, drain, form| assert_eq!(command.registers(drain), form);
        let iotlb = |address, command| RegisterForm::Iotlb { address, command };
        check(Command::ContextGlobal, DRAIN, RegisterForm::Context(0xa000_0000_0000_0000));
        check(
            Command::ContextDevice { tag, source },
            DRAIN,
            RegisterForm::Context(0xe000_0000_0325_1234),
        );
        check(Command::IotlbGlobal, DRAIN, iotlb(None, 0x9003_0000_0000_0000));
        check(Command::IotlbDomain { tag }, DRY, iotlb(None, 0xa000_1234_0000_0000));
        check(
            Command::IotlbPages { tag, block: block(3, 4), depth: Depth::Leaves },
            DRAIN,
            iotlb(Some(0x43), 0xb003_1234_0000_0000),
        );
        let device = Command::DeviceTlb {
            source,
            physical_function: None,
            max_pending: 1,
            block: Block::ALL,
        };
        check(device, DRAIN, RegisterForm::None);
    }

    #[test]
    fn a_wait_writes_its_status_and_raises_no_interrupt() {
        assert_eq!(
            Descriptor::wait(0x1_2345_6783, 0xdead_beef),
            Descriptor { low: 0xdead_beef_0000_0025, high: 0x1_2345_6780 }
        );
    }
}
