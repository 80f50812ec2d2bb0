//! The firmware's DMAR table: which unit translates for which device.
//!
//! [`Dmar::parse`] accepts any bytes and looks at every length once. Holding a
//! [`Dmar`] means that all structures and scopes inside lie within the table, so
//! its iterators cannot fail. Firmware is not trusted further than that.

use flush::{Gfn, Run};

use crate::SourceId;
use crate::spec::dmar::{self as layout, atsr, drhd, rmrr, scope, structure};

mod path;
pub use path::{Bridge, Topology};

/// Why bytes are not a DMAR table, and where: offsets count from the table's first byte.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DmarError {
    /// Fewer bytes than a header, or than the header's length field says.
    Truncated {
        /// Bytes needed.
        needed: usize,
    },
    /// The signature is another one.
    Signature,
    /// The length field is below the size of a header.
    TableLength,
    /// The bytes of the table do not add up to 0.
    Checksum,
    /// A structure is shorter than its type demands, or reaches beyond the table.
    Structure {
        /// Where the structure starts.
        offset: usize,
    },
    /// A device scope has an impossible length, or reaches beyond its structure.
    Scope {
        /// Where the scope starts.
        offset: usize,
    },
    /// A path names a device above 31 or a function above 7: there is none.
    Path {
        /// Where the scope starts.
        offset: usize,
    },
    /// A unit's register base is zero or not a multiple of 4 KiB.
    RegisterBase {
        /// Where the structure starts.
        offset: usize,
    },
    /// A reserved region ends before it starts.
    Region {
        /// Where the structure starts.
        offset: usize,
    },
}

/// Reads `N` bytes at `offset`. `None` beyond the end.
fn bytes<const N: usize>(from: &[u8], offset: usize) -> Option<[u8; N]> {
    from.get(offset..)?.first_chunk::<N>().copied()
}

fn byte(from: &[u8], offset: usize) -> u8 {
    from.get(offset).copied().unwrap_or(0)
}

fn half(from: &[u8], offset: usize) -> u16 {
    bytes(from, offset).map_or(0, u16::from_le_bytes)
}

fn quad(from: &[u8], offset: usize) -> u64 {
    bytes(from, offset).map_or(0, u64::from_le_bytes)
}

/// A checked DMAR table.
#[derive(Clone, Copy, Debug)]
pub struct Dmar<'a> {
    table: &'a [u8],
}

impl<'a> Dmar<'a> {
    /// Checks the table that starts at the first of `bytes`; later bytes may follow it.
    ///
    /// # Errors
    ///
    /// [`DmarError`] says what is wrong and at which offset. Unknown structure types
    /// are not an error, they are passed over by their length (8.2).
    pub fn parse(from: &'a [u8]) -> Result<Self, DmarError> {
        let truncated = |needed| DmarError::Truncated { needed };
        let header: &[u8; layout::HEADER] = from.first_chunk().ok_or(truncated(layout::HEADER))?;
        if !header.starts_with(&layout::SIGNATURE) {
            return Err(DmarError::Signature);
        }
        let length = bytes(header, layout::LENGTH).map_or(0, u32::from_le_bytes) as usize;
        if length < layout::HEADER {
            return Err(DmarError::TableLength);
        }
        let table = from.get(..length).ok_or(truncated(length))?;
        if table.iter().fold(0_u8, |sum, byte| sum.wrapping_add(*byte)) != 0 {
            return Err(DmarError::Checksum);
        }
        let mut offset = layout::HEADER;
        while offset < table.len() {
            offset = check_structure(table, offset)?;
        }
        Ok(Self { table })
    }

    /// Width of host addresses DMA may reach, in bits, 1 to 256.
    #[must_use]
    pub fn host_address_width(&self) -> u16 {
        u16::from(byte(self.table, layout::HOST_ADDRESS_WIDTH)) + 1
    }

    /// Flag byte of the table: bit 0 interrupt remapping, bit 1 x2APIC opt-out,
    /// bit 2 platform opt-in (8.1).
    #[must_use]
    pub fn flags(&self) -> u8 {
        byte(self.table, layout::FLAGS)
    }

    /// Every structure, in the table's order.
    pub fn structures(&self) -> impl Iterator<Item = Structure<'a>> + use<'a> {
        let mut rest = self.table.get(layout::HEADER..).unwrap_or_default();
        core::iter::from_fn(move || {
            let (this, after) = rest.split_at_checked(usize::from(half(rest, 2)).max(1))?;
            rest = after;
            Some(Structure::read(this))
        })
    }

    /// Every remapping unit, in the table's order.
    pub fn units(&self) -> impl Iterator<Item = HardwareUnit<'a>> + use<'a> {
        self.structures().filter_map(|structure| match structure {
            Structure::Unit(unit) => Some(unit),
            Structure::Reserved(_) | Structure::Ats(_) | Structure::Other { .. } => None,
        })
    }

    /// Every reserved memory region.
    pub fn reserved(&self) -> impl Iterator<Item = ReservedRegion<'a>> + use<'a> {
        self.structures().filter_map(|structure| match structure {
            Structure::Reserved(region) => Some(region),
            Structure::Unit(_) | Structure::Ats(_) | Structure::Other { .. } => None,
        })
    }

    /// Every root port ATS structure.
    pub fn ats(&self) -> impl Iterator<Item = AtsPorts<'a>> + use<'a> {
        self.structures().filter_map(|structure| match structure {
            Structure::Ats(ports) => Some(ports),
            Structure::Unit(_) | Structure::Reserved(_) | Structure::Other { .. } => None,
        })
    }
}

/// Checks one structure and returns the offset of the next one.
fn check_structure(table: &[u8], offset: usize) -> Result<usize, DmarError> {
    let wrong = DmarError::Structure { offset };
    let rest = table.get(offset..).ok_or(wrong)?;
    let length = usize::from(bytes(rest, 2).map(u16::from_le_bytes).ok_or(wrong)?);
    let this = rest.get(..length).ok_or(wrong)?;
    let scopes = match half(this, 0) {
        structure::DRHD => Some(drhd::SCOPES),
        structure::RMRR => Some(rmrr::SCOPES),
        structure::ATSR => Some(atsr::SCOPES),
        _ => None,
    };
    if length < scopes.unwrap_or(structure::HEADER) {
        return Err(wrong);
    }
    match Structure::read(this) {
        Structure::Unit(unit) if unit.register_base() == 0 || unit.register_base() & 0xfff != 0 => {
            return Err(DmarError::RegisterBase { offset });
        }
        Structure::Reserved(region) if region.last_byte() < region.first_byte() => {
            return Err(DmarError::Region { offset });
        }
        Structure::Unit(_)
        | Structure::Reserved(_)
        | Structure::Ats(_)
        | Structure::Other { .. } => {}
    }
    if let Some(mut at) = scopes {
        while at < length {
            let wrong = DmarError::Scope { offset: offset + at };
            let size = usize::from(*this.get(at + scope::LENGTH).ok_or(wrong)?);
            // A path has at least one element, of two bytes each (8.3.1).
            if size < scope::PATH + 2 || size % 2 != 0 || size > length - at {
                return Err(wrong);
            }
            let path = this.get(at + scope::PATH..at + size).unwrap_or_default();
            if path.chunks_exact(2).any(|hop| SourceId::at(0, byte(hop, 0), byte(hop, 1)).is_none())
            {
                return Err(DmarError::Path { offset: offset + at });
            }
            at += size;
        }
    }
    Ok(offset + length)
}

/// One remapping structure (8.2).
#[derive(Clone, Copy, Debug)]
pub enum Structure<'a> {
    /// A remapping unit (DRHD).
    Unit(HardwareUnit<'a>),
    /// A reserved memory region (RMRR).
    Reserved(ReservedRegion<'a>),
    /// Root ports with ATS (ATSR).
    Ats(AtsPorts<'a>),
    /// Any other type, known only by its number and length.
    Other {
        /// The type.
        kind: u16,
        /// Length in bytes.
        length: u16,
    },
}

impl<'a> Structure<'a> {
    fn read(this: &'a [u8]) -> Self {
        match half(this, 0) {
            structure::DRHD => Self::Unit(HardwareUnit(this)),
            structure::RMRR => Self::Reserved(ReservedRegion(this)),
            structure::ATSR => Self::Ats(AtsPorts(this)),
            kind => Self::Other { kind, length: half(this, 2) },
        }
    }
}

/// A remapping unit and the devices it translates for (DRHD, 8.3).
#[derive(Clone, Copy, Debug)]
pub struct HardwareUnit<'a>(&'a [u8]);

impl<'a> HardwareUnit<'a> {
    /// Whether it translates for every device of the segment that no other unit names.
    #[must_use]
    pub fn includes_all(&self) -> bool {
        byte(self.0, drhd::FLAGS) & drhd::INCLUDE_ALL != 0
    }

    /// PCI segment.
    #[must_use]
    pub fn segment(&self) -> u16 {
        half(self.0, drhd::SEGMENT)
    }

    /// Physical address of the registers: a multiple of 4 KiB, not 0.
    #[must_use]
    pub fn register_base(&self) -> u64 {
        quad(self.0, drhd::BASE)
    }

    /// The devices it names.
    #[must_use]
    pub fn scopes(&self) -> Scopes<'a> {
        Scopes(self.0.get(drhd::SCOPES..).unwrap_or_default())
    }
}

/// Memory that some devices must always reach one to one (RMRR, 8.4).
#[derive(Clone, Copy, Debug)]
pub struct ReservedRegion<'a>(&'a [u8]);

impl<'a> ReservedRegion<'a> {
    /// PCI segment.
    #[must_use]
    pub fn segment(&self) -> u16 {
        half(self.0, rmrr::SEGMENT)
    }

    /// Address of the first byte.
    #[must_use]
    pub fn first_byte(&self) -> u64 {
        quad(self.0, rmrr::BASE)
    }

    /// Address of the last byte, not below the first.
    #[must_use]
    pub fn last_byte(&self) -> u64 {
        quad(self.0, rmrr::LIMIT)
    }

    /// The frames the region touches, rounded outwards: device frame = machine frame.
    #[must_use]
    pub fn run(&self) -> Run {
        let (first, last) = (self.first_byte() >> 12, self.last_byte() >> 12);
        Run::single(Gfn::new(first)).hull(Run::single(Gfn::new(last)))
    }

    /// The devices that need the region.
    #[must_use]
    pub fn scopes(&self) -> Scopes<'a> {
        Scopes(self.0.get(rmrr::SCOPES..).unwrap_or_default())
    }
}

/// Root ports below which devices may use ATS (ATSR, 8.5).
#[derive(Clone, Copy, Debug)]
pub struct AtsPorts<'a>(&'a [u8]);

impl<'a> AtsPorts<'a> {
    /// Whether all root ports of the segment support ATS; the scopes then say nothing.
    #[must_use]
    pub fn all_ports(&self) -> bool {
        byte(self.0, atsr::FLAGS) & atsr::ALL_PORTS != 0
    }

    /// PCI segment.
    #[must_use]
    pub fn segment(&self) -> u16 {
        half(self.0, atsr::SEGMENT)
    }

    /// The root ports.
    #[must_use]
    pub fn scopes(&self) -> Scopes<'a> {
        Scopes(self.0.get(atsr::SCOPES..).unwrap_or_default())
    }
}

/// What a device scope names (8.3.1).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ScopeKind {
    /// One PCI endpoint.
    Endpoint,
    /// A PCI bridge and every device below it.
    Bridge,
    /// An I/O APIC.
    IoApic,
    /// A message-capable HPET.
    Hpet,
    /// A device of the ACPI namespace.
    Namespace,
    /// A type this crate does not know.
    Other(u8),
}

/// A device named by its path through bridges (8.3.1).
#[derive(Clone, Copy, Debug)]
pub struct Scope<'a>(&'a [u8]);

impl Scope<'_> {
    /// What it names.
    #[must_use]
    pub fn kind(&self) -> ScopeKind {
        match byte(self.0, scope::KIND) {
            1 => ScopeKind::Endpoint,
            2 => ScopeKind::Bridge,
            3 => ScopeKind::IoApic,
            4 => ScopeKind::Hpet,
            5 => ScopeKind::Namespace,
            other => ScopeKind::Other(other),
        }
    }

    /// Number of the I/O APIC, HPET or namespace device; no meaning otherwise.
    #[must_use]
    pub fn enumeration_id(&self) -> u8 {
        byte(self.0, scope::ENUMERATION)
    }

    /// Bus on which the path starts.
    #[must_use]
    pub fn start_bus(&self) -> u8 {
        byte(self.0, scope::START_BUS)
    }

    /// The path: device and function of each hop, at least one.
    pub fn path(&self) -> impl Iterator<Item = (u8, u8)> {
        let path = self.0.get(scope::PATH..).unwrap_or_default();
        path.chunks_exact(2).map(|hop| (byte(hop, 0), byte(hop, 1)))
    }

    /// The requester the path names when no bridge has to be passed.
    #[must_use]
    pub fn direct(&self) -> Option<SourceId> {
        let mut path = self.path();
        let (device, function) = path.next()?;
        match path.next() {
            None => SourceId::at(self.start_bus(), device, function),
            Some(_) => None,
        }
    }
}

/// The device scopes of one structure.
#[derive(Clone, Copy, Debug)]
pub struct Scopes<'a>(&'a [u8]);

impl<'a> Iterator for Scopes<'a> {
    type Item = Scope<'a>;

    fn next(&mut self) -> Option<Scope<'a>> {
        let size = usize::from(byte(self.0, scope::LENGTH)).max(1);
        let (this, after) = self.0.split_at_checked(size)?;
        self.0 = after;
        Some(Scope(this))
    }
}

#[cfg(test)]
mod tests;
