//! Firmware's DMAR table: raw bytes, tables that are good, and good ones made bad.
//!
//! A [`Table`] is built from parts, so what a parser has to read out of it is known. A
//! few bytes may be overwritten afterwards, with or without a checksum that fits: then
//! only the bounds, the ends of all walks and the place of an error are promised.

use arbitrary::{Arbitrary, Unstructured};
use iommu_vtd::{
    SourceId,
    dmar::{Bridge, Dmar, DmarError, Scope, Scopes, Structure, Topology},
};

use crate::script::Below;

#[derive(Debug, Arbitrary)]
enum Input<'a> {
    Raw(&'a [u8]),
    /// Raw bytes behind a header that fits them.
    Body(&'a [u8]),
    Built(Table),
    Damaged(Table, Vec<Damage>),
}

#[derive(Debug, Arbitrary)]
struct Table {
    width: u8,
    flags: u8,
    parts: Vec<Part>,
}

#[derive(Debug, Arbitrary)]
enum Part {
    Unit { all: bool, segment: u16, frame: Below<0x1000>, scopes: Vec<Place> },
    Reserved { segment: u16, first: u64, last: u64, scopes: Vec<Place> },
    Ats { all: bool, segment: u16, scopes: Vec<Place> },
    Other { kind: Below<60>, body: Vec<u8> },
}

#[derive(Debug, Arbitrary)]
struct Place {
    kind: Below<8>,
    number: u8,
    bus: u8,
    first: (Below<32>, Below<8>),
    more: Vec<(Below<32>, Below<8>)>,
}

#[derive(Debug, Arbitrary)]
struct Damage {
    at: u16,
    with: u8,
    /// The checksum is made to fit again.
    mended: bool,
}

const HEADER: usize = 48;

impl Place {
    fn path(&self) -> Vec<(u8, u8)> {
        let hops = std::iter::once(&self.first).chain(&self.more);
        hops.take(100).map(|(device, function)| (device.0 as u8, function.0 as u8)).collect()
    }

    fn bytes(&self) -> Vec<u8> {
        let path = self.path();
        let length = 6 + 2 * path.len();
        let mut bytes = vec![self.kind.0 as u8, length as u8, 0, 0, self.number, self.bus];
        bytes.extend(path.iter().flat_map(|(device, function)| [*device, *function]));
        bytes
    }

    #[track_caller]
    fn check(&self, scope: &Scope<'_>) {
        assert_eq!(scope.enumeration_id(), self.number);
        assert_eq!(scope.start_bus(), self.bus);
        assert_eq!(scope.path().collect::<Vec<_>>(), self.path());
        let direct = match self.path()[..] {
            [(device, function)] => SourceId::at(self.bus, device, function),
            _ => None,
        };
        assert_eq!(scope.direct(), direct);
    }
}

impl Part {
    fn bytes(&self) -> Vec<u8> {
        let (kind, mut body, scopes) = match self {
            Self::Unit { all, segment, frame, scopes } => {
                let mut body = vec![u8::from(*all), 0];
                body.extend(segment.to_le_bytes());
                body.extend((frame.0 << 12).to_le_bytes());
                (0, body, scopes.as_slice())
            }
            Self::Reserved { segment, first, last, scopes } => {
                let mut body = vec![0, 0];
                body.extend(segment.to_le_bytes());
                body.extend(first.to_le_bytes());
                body.extend(last.to_le_bytes());
                (1, body, scopes.as_slice())
            }
            Self::Ats { all, segment, scopes } => {
                let mut body = vec![u8::from(*all), 0];
                body.extend(segment.to_le_bytes());
                (2, body, scopes.as_slice())
            }
            Self::Other { kind, body } => (3 + kind.0 as u16, body.clone(), [].as_slice()),
        };
        body.extend(scopes.iter().flat_map(Place::bytes));
        let mut bytes = Vec::from(kind.to_le_bytes());
        bytes.extend((body.len() as u16 + 4).to_le_bytes());
        bytes.extend(body);
        bytes
    }

    /// What is wrong with it, where it starts at `offset`.
    fn error(&self, offset: usize) -> Option<DmarError> {
        match self {
            Self::Unit { frame: Below(0), .. } => Some(DmarError::RegisterBase { offset }),
            Self::Reserved { first, last, .. } if last < first => {
                Some(DmarError::Region { offset })
            }
            Self::Unit { .. } | Self::Reserved { .. } | Self::Ats { .. } | Self::Other { .. } => {
                None
            }
        }
    }

    #[track_caller]
    fn check(&self, read: &Structure<'_>) {
        match (self, read) {
            (Self::Unit { all, segment, frame, scopes }, Structure::Unit(unit)) => {
                let fields = (unit.includes_all(), unit.segment(), unit.register_base());
                assert_eq!(fields, (*all, *segment, frame.0 << 12));
                check_scopes(scopes, unit.scopes());
            }
            (Self::Reserved { segment, first, last, scopes }, Structure::Reserved(region)) => {
                let fields = (region.segment(), region.first_byte(), region.last_byte());
                assert_eq!(fields, (*segment, *first, *last));
                let run = (region.run().first().get(), region.run().last().get());
                assert_eq!(run, (first >> 12, last >> 12));
                check_scopes(scopes, region.scopes());
            }
            (Self::Ats { all, segment, scopes }, Structure::Ats(ports)) => {
                assert_eq!((ports.all_ports(), ports.segment()), (*all, *segment));
                check_scopes(scopes, ports.scopes());
            }
            (Self::Other { kind, body }, Structure::Other { kind: read, length }) => {
                assert_eq!((3 + kind.0, body.len() + 4), (u64::from(*read), usize::from(*length)));
            }
            (written, read) => panic!("{written:?} was read as {read:?}"),
        }
    }
}

#[track_caller]
fn check_scopes(written: &[Place], read: Scopes<'_>) {
    let read: Vec<Scope<'_>> = read.collect();
    assert_eq!(read.len(), written.len());
    written.iter().zip(&read).for_each(|(written, read)| written.check(read));
}

impl Table {
    fn bytes(&self) -> Vec<u8> {
        let mut table = vec![0; HEADER];
        table[36] = self.width;
        table[37] = self.flags;
        table.extend(self.parts.iter().flat_map(Part::bytes));
        seal(table)
    }

    fn error(&self) -> Option<DmarError> {
        let mut offset = HEADER;
        self.parts.iter().find_map(|part| {
            let error = part.error(offset);
            offset += part.bytes().len();
            error
        })
    }
}

/// Makes signature, length and checksum fit.
fn seal(mut table: Vec<u8>) -> Vec<u8> {
    table[..4].copy_from_slice(b"DMAR");
    let length = u32::try_from(table.len()).expect("an input is short");
    table[4..8].copy_from_slice(&length.to_le_bytes());
    mend(table)
}

fn mend(mut table: Vec<u8>) -> Vec<u8> {
    let sum = table.iter().fold(0_u8, |sum, byte| sum.wrapping_add(*byte));
    if let Some(checksum) = table.get_mut(9) {
        *checksum = checksum.wrapping_sub(sum);
    }
    table
}

/// Buses that lead anywhere, in circles too.
struct Buses;

impl Topology for Buses {
    fn bridge(&self, segment: u16, source: SourceId) -> Option<Bridge> {
        let [bus, function] = (source.get() ^ segment.rotate_left(3)).to_be_bytes();
        (function & 1 == 0).then_some(Bridge { secondary: function, subordinate: bus })
    }
}

/// What holds for any bytes. Returns whether they are a table.
#[track_caller]
fn check(bytes: &[u8]) -> bool {
    let dmar = match Dmar::parse(bytes) {
        Ok(dmar) => dmar,
        Err(error) => {
            check_place(error, bytes);
            return false;
        }
    };
    check_lengths(&dmar, bytes);
    // Every structure has four bytes at least, so this is an end to every walk.
    let most = bytes.len() / 4;
    assert!(dmar.structures().take(most + 1).count() <= most);
    assert_eq!(Dmar::parse(&[bytes, &[0xa5; 9]].concat()).map(|_| ()), Ok(()), "bytes behind it");
    let (mut units, mut regions, mut ports) = (0, 0, 0);
    for structure in dmar.structures() {
        let scopes = match structure {
            Structure::Unit(unit) => {
                assert!(unit.register_base() != 0 && unit.register_base() % 4096 == 0);
                units += 1;
                unit.scopes()
            }
            Structure::Reserved(region) => {
                assert!(region.first_byte() <= region.last_byte());
                regions += 1;
                region.scopes()
            }
            Structure::Ats(atsr) => {
                ports += 1;
                atsr.scopes()
            }
            Structure::Other { .. } => continue,
        };
        assert!(scopes.take(most + 1).map(|scope| check_scope(&scope)).count() <= most);
    }
    assert_eq!((dmar.units().count(), dmar.reserved().count()), (units, regions));
    assert_eq!(dmar.ats().count(), ports);
    for unit in dmar.units().take(4) {
        let segment = unit.segment();
        let named = unit.scopes().find_map(|scope| scope.resolve(segment, &Buses));
        for source in [named, SourceId::at(0, 2, 0)].into_iter().flatten() {
            let found = dmar.unit_for(segment, source, &Buses);
            assert!(found.is_none_or(|unit| unit.segment() == segment));
        }
    }
    true
}

/// The structures lie one behind the other up to the end of the table, and the scopes of
/// each up to its own.
#[track_caller]
fn check_lengths(dmar: &Dmar<'_>, bytes: &[u8]) {
    let half = |at: usize| u16::from_le_bytes([bytes[at], bytes[at + 1]]);
    let end = usize::from(half(4)) | usize::from(half(6)) << 16;
    let mut at = HEADER;
    for structure in dmar.structures() {
        let (kind, length) = (half(at), usize::from(half(at + 2)));
        let (known, scopes) = match structure {
            Structure::Unit(unit) => (0, Some((16, unit.scopes()))),
            Structure::Reserved(region) => (1, Some((24, region.scopes()))),
            Structure::Ats(ports) => (2, Some((8, ports.scopes()))),
            Structure::Other { kind, length: told } => {
                assert_eq!(usize::from(told), length);
                (kind, None)
            }
        };
        assert_eq!(known, kind);
        if let Some((head, scopes)) = scopes {
            let named: usize = scopes.map(|scope| 6 + 2 * scope.path().count()).sum();
            assert_eq!(head + named, length, "scopes of the structure at {at}");
        }
        at += length;
    }
    assert_eq!(at, end);
}

#[track_caller]
fn check_scope(scope: &Scope<'_>) {
    let hops = scope.path().take(200).count();
    assert!((1..=125).contains(&hops), "{hops} hops");
    assert!(scope.path().all(|(device, function)| device < 32 && function < 8));
}

/// An error names a place in the table, or how much of it is missing.
#[track_caller]
fn check_place(error: DmarError, bytes: &[u8]) {
    match error {
        DmarError::Truncated { needed } => assert!(needed > bytes.len()),
        DmarError::Structure { offset }
        | DmarError::Scope { offset }
        | DmarError::Path { offset }
        | DmarError::RegisterBase { offset }
        | DmarError::Region { offset } => {
            assert!((HEADER..bytes.len()).contains(&offset), "{error:?}");
        }
        DmarError::Signature | DmarError::TableLength | DmarError::Checksum => {}
    }
}

fn read(bytes: &[u8]) -> Option<Input<'_>> {
    Input::arbitrary(&mut Unstructured::new(bytes)).ok()
}

pub(crate) fn play(bytes: &[u8]) {
    match read(bytes) {
        None => {}
        Some(Input::Raw(raw)) => {
            check(raw);
        }
        Some(Input::Body(body)) => {
            check(&seal([&[0; HEADER], body].concat()));
        }
        Some(Input::Built(table)) => {
            let bytes = table.bytes();
            assert_eq!(check(&bytes), table.error().is_none());
            let dmar = match Dmar::parse(&bytes) {
                Ok(dmar) => dmar,
                Err(error) => return assert_eq!(Some(error), table.error()),
            };
            assert_eq!(dmar.host_address_width(), u16::from(table.width) + 1);
            assert_eq!(dmar.flags(), table.flags);
            assert_eq!(dmar.structures().count(), table.parts.len());
            for (written, read) in table.parts.iter().zip(dmar.structures()) {
                written.check(&read);
            }
        }
        Some(Input::Damaged(table, damage)) => {
            let mut bytes = table.bytes();
            for Damage { at, with, mended } in damage {
                let at = usize::from(at) % bytes.len();
                bytes[at] = with;
                if mended {
                    bytes = mend(bytes);
                }
            }
            check(&bytes);
        }
    }
}

pub(crate) fn tell(bytes: &[u8]) -> String {
    format!("{:#?}\n", read(bytes))
}
