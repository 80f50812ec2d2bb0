//! Between driver and unit: what the unit seems to be, and what it is told.
//!
//! The unit of the emulator is honest and has one set of properties. Here it can be said to
//! have fewer, as real ones do, and its commands can be spoilt on their way, as if it lied.

use core::sync::atomic::{AtomicU8, AtomicU64, Ordering};

use flush::Mfn;
use iommu_vtd::spec::descriptor::{DOMAIN_LOW, GRANULARITY_LOW, granularity, kind};
use iommu_vtd::spec::registers::{CAP, ECAP, ExtendedCapabilities, IQA, IQT, iotlb_command};

use crate::memory;
use crate::mmio::Registers;

/// What a unit does wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum UnitLie {
    /// Nothing.
    None = 0,
    /// It ignores IOTLB invalidations.
    IgnoreIotlb = 1,
    /// It ignores context-cache invalidations.
    IgnoreContext = 2,
    /// It invalidates another domain id.
    WrongDomain = 3,
    /// It invalidates half of each block of pages.
    SmallerMask = 4,
}

/// A field of the capability register that a unit is to show, instead of its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Property {
    /// The largest block of a page-selective invalidation, as a power of two of pages.
    MaxAddressMask,
    /// Page-selective invalidations: 0 for no.
    PageSelective,
    /// Bits of a domain id: 4 to 16, even.
    DomainIdBits,
    /// Width of a device's address, in bits.
    AddressBits,
    /// Leaves of 2 MiB and 1 GiB: 0 for no.
    LargeLeaves,
    /// A buffer for stores to tables, which has to be flushed: 0 for no.
    WriteBuffer,
    /// Invalidations are asked to drain writes: 0 for no.
    DrainWrites,
    /// Invalidations are asked to drain reads: 0 for no.
    DrainReads,
}

impl Property {
    /// The lowest bit of its field, the width, and what is there for a value (11.4.2).
    const fn field(self, value: u64) -> (u32, u32, u64) {
        match self {
            Self::MaxAddressMask => (48, 6, value),
            Self::PageSelective => (39, 1, value),
            Self::DomainIdBits => (0, 3, value.saturating_sub(4) / 2),
            Self::AddressBits => (16, 6, value.saturating_sub(1)),
            Self::LargeLeaves => (34, 4, value),
            Self::WriteBuffer => (4, 1, value),
            Self::DrainWrites => (54, 1, value),
            Self::DrainReads => (55, 1, value),
        }
    }
}

static LIE: AtomicU8 = AtomicU8::new(UnitLie::None as u8);
/// Bits of the capability register that are the unit's own.
static OWN: AtomicU64 = AtomicU64::new(u64::MAX);
/// What the others show.
static SHOWN: AtomicU64 = AtomicU64::new(0);
/// The tail that was written last, in bytes.
static TAIL: AtomicU64 = AtomicU64::new(0);

/// Let units lie from now on. Before they are brought up, or never.
pub(crate) fn lie(lie: UnitLie) {
    LIE.store(lie as u8, Ordering::SeqCst);
}

/// Let units show a property. Before they are brought up.
pub(crate) fn show(property: Property, value: u64) {
    let (low, width, bits) = property.field(value);
    let mask = ((1 << width) - 1) << low;
    OWN.fetch_and(!mask, Ordering::SeqCst);
    SHOWN.fetch_and(!mask, Ordering::SeqCst);
    SHOWN.fetch_or(bits << low & mask, Ordering::SeqCst);
}

/// What is read from a register of a unit, of which hardware says `value`.
pub(crate) fn read(offset: u32, value: u64) -> u64 {
    if offset != CAP {
        return value;
    }
    value & OWN.load(Ordering::SeqCst) | SHOWN.load(Ordering::SeqCst)
}

/// What is written to a register of a unit where the driver says `value`. Commands that
/// this submits are spoilt before.
pub(crate) fn write(registers: Registers, offset: u32, value: u64) -> u64 {
    let lie = LIE.load(Ordering::SeqCst);
    if offset == IQA {
        TAIL.store(0, Ordering::SeqCst);
    } else if offset == IQT {
        let from = TAIL.swap(value, Ordering::SeqCst);
        if lie != UnitLie::None as u8 {
            spoil_queue(registers, lie, from, value);
        }
    } else if lie == UnitLie::IgnoreIotlb as u8 || lie == UnitLie::WrongDomain as u8 {
        let extended = ExtendedCapabilities::new(registers.read64(ECAP.into()));
        if offset == extended.iotlb_offset() + 8 && value & iotlb_command::INVALIDATE != 0 {
            // A register that reports an end must have begun something.
            return value ^ ANOTHER << iotlb_command::DOMAIN_LOW;
        }
    }
    value
}

/// What makes one domain id of this testbed another that nobody has.
const ANOTHER: u64 = 0x100;

fn spoil_queue(registers: Registers, lie: u8, from: u64, to: u64) {
    const SLOT: u64 = 16;
    const RING: u64 = 4096;
    let Some(ring) = memory::words(Mfn::new(registers.read64(IQA.into()) >> 12)) else { return };
    let mut at = from % RING;
    while at != to % RING {
        let slot = (at / 8) as usize;
        if let (Some(low), Some(high)) = (ring.get(slot), ring.get(slot + 1)) {
            let command = (low.load(Ordering::SeqCst), high.load(Ordering::SeqCst));
            let (spoilt_low, spoilt_high) = spoil(lie, command.0, command.1);
            low.store(spoilt_low, Ordering::SeqCst);
            high.store(spoilt_high, Ordering::SeqCst);
        }
        at = (at + SLOT) % RING;
    }
}

/// One command as a unit that lies carries it out.
const fn spoil(lie: u8, low: u64, high: u64) -> (u64, u64) {
    /// An interrupt entry cache invalidation (6.5.2.7): there is no remapping of interrupts.
    const NOTHING: (u64, u64) = (4, 0);
    /// Address mask of a page-selective invalidation (6.5.2.3).
    const MASK: u64 = 0x3f;
    const IGNORE_IOTLB: u8 = UnitLie::IgnoreIotlb as u8;
    const IGNORE_CONTEXT: u8 = UnitLie::IgnoreContext as u8;
    const WRONG_DOMAIN: u8 = UnitLie::WrongDomain as u8;
    const SMALLER_MASK: u8 = UnitLie::SmallerMask as u8;
    let narrow = low >> GRANULARITY_LOW & 3 == granularity::NARROW;
    match (lie, low & 0xf) {
        (IGNORE_IOTLB, kind::IOTLB) | (IGNORE_CONTEXT, kind::CONTEXT) => NOTHING,
        (WRONG_DOMAIN, kind::IOTLB) => (low ^ ANOTHER << DOMAIN_LOW, high),
        (SMALLER_MASK, kind::IOTLB) if narrow && high & MASK != 0 => (low, high - 1),
        _ => (low, high),
    }
}
