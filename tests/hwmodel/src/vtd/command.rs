//! Invalidation commands: what 16 bytes of a queue mean
//!
//! [`Command`] is the meaning; [`parse`] reads a descriptor and refuses everything the manual reserves
//! (VT-d specification, section 6.5.2 "queued invalidation interface", one subsection per descriptor).

use super::config::UnitConfig;

/// How much an invalidation covers.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Granularity {
    /// Everything.
    Global,
    /// One domain id.
    Domain,
    /// A block of pages of one domain (IOTLB), or one device of one domain (context cache).
    Selective,
}

/// A command as the unit understands it.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Command {
    /// Context-cache invalidation.
    Context {
        /// How much.
        granularity: Granularity,
        /// Domain id, for all but global.
        did: u16,
        /// Source id, for selective.
        sid: u16,
        /// How many low function bits of the source id to ignore: 0..=3.
        function_mask: u8,
    },
    /// IOTLB invalidation.
    Iotlb {
        /// How much.
        granularity: Granularity,
        /// Domain id, for all but global.
        did: u16,
        /// First page named; low bits below the mask are ignored by the hardware.
        page: u64,
        /// log2 of the pages, for selective.
        address_mask: u8,
        /// Invalidation hint: the paging-structure caches may stay.
        hint: bool,
        /// Drain writes first.
        drain_writes: bool,
        /// Drain reads first.
        drain_reads: bool,
    },
    /// Device-TLB invalidation.
    DeviceTlb {
        /// The device.
        sid: u16,
        /// First page.
        page: u64,
        /// log2 of the pages; 52 and up is everything.
        order: u8,
    },
    /// Interrupt-entry-cache invalidation; the model has no such cache.
    Interrupt,
    /// Wait.
    Wait {
        /// Where to write which status, if asked for.
        status: Option<(u64, u32)>,
        /// Raise the completion interrupt.
        interrupt: bool,
        /// Hold later commands back until earlier ones are done; the model always does.
        fence: bool,
    },
}

/// The descriptor is not one the manual allows.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Bad;

const fn field(word: u64, first: u32, last: u32) -> u64 {
    (word >> first) & (u64::MAX >> (63 - (last - first)))
}

fn granularity(value: u64) -> Result<Granularity, Bad> {
    match value {
        1 => Ok(Granularity::Global),
        2 => Ok(Granularity::Domain),
        3 => Ok(Granularity::Selective),
        _ => Err(Bad),
    }
}

/// Reads the two words of a descriptor.
pub(crate) fn parse(config: &UnitConfig, low: u64, high: u64) -> Result<Command, Bad> {
    // The type's upper bits (9 to 11) are zero for every type known here.
    if field(low, 9, 11) != 0 {
        return Err(Bad);
    }
    match field(low, 0, 3) {
        1 => context(low, high),
        2 => iotlb(config, low, high),
        3 if config.device_tlb => device_tlb(low, high),
        4 => Ok(Command::Interrupt),
        5 => wait(low, high),
        _ => Err(Bad),
    }
}

fn context(low: u64, high: u64) -> Result<Command, Bad> {
    let reserved = field(low, 6, 8) | field(low, 12, 15) | field(low, 50, 63) | high;
    if reserved != 0 {
        return Err(Bad);
    }
    Ok(Command::Context {
        granularity: granularity(field(low, 4, 5))?,
        did: field(low, 16, 31) as u16,
        sid: field(low, 32, 47) as u16,
        function_mask: field(low, 48, 49) as u8,
    })
}

fn iotlb(config: &UnitConfig, low: u64, high: u64) -> Result<Command, Bad> {
    let reserved = field(low, 8, 8) | field(low, 12, 15) | field(low, 32, 63) | field(high, 7, 11);
    let granularity = granularity(field(low, 4, 5))?;
    let address_mask = field(high, 0, 5) as u8;
    let selective = granularity == Granularity::Selective;
    if reserved != 0
        || (selective && (!config.page_selective || address_mask > config.max_address_mask))
    {
        return Err(Bad);
    }
    Ok(Command::Iotlb {
        granularity,
        did: field(low, 16, 31) as u16,
        page: field(high, 12, 63),
        address_mask,
        hint: field(high, 6, 6) != 0,
        drain_writes: field(low, 6, 6) != 0,
        drain_reads: field(low, 7, 7) != 0,
    })
}

fn device_tlb(low: u64, high: u64) -> Result<Command, Bad> {
    let reserved = field(low, 4, 8) | field(low, 21, 31) | field(low, 48, 51) | field(high, 1, 11);
    if reserved != 0 {
        return Err(Bad);
    }
    let page = field(high, 12, 63);
    // With the size bit, the lowest zero bit of the page number ends the block: 0 there means 2 pages.
    let order =
        if high & 1 == 0 { 0 } else { (page.trailing_ones() as u8).saturating_add(1).min(52) };
    Ok(Command::DeviceTlb {
        sid: field(low, 32, 47) as u16,
        page: if order >= 52 { 0 } else { page & (u64::MAX << order) },
        order,
    })
}

fn wait(low: u64, high: u64) -> Result<Command, Bad> {
    if field(low, 8, 8) | field(low, 12, 31) | field(high, 0, 1) != 0 {
        return Err(Bad);
    }
    let status = (field(low, 5, 5) != 0).then(|| (high, field(low, 32, 63) as u32));
    Ok(Command::Wait { status, interrupt: field(low, 4, 4) != 0, fence: field(low, 6, 6) != 0 })
}
