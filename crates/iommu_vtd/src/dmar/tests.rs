//! DMAR tables whole, cut, and with any byte wrong.

use super::*;

use std::vec::Vec;

/// Builds tables, good and bad, from structures.
fn table(structures: &[&[u8]]) -> Vec<u8> {
    let mut table = Vec::from(*b"DMAR");
    table.resize(layout::HEADER, 0);
    table[layout::HOST_ADDRESS_WIDTH] = 38;
    for structure in structures {
        table.extend_from_slice(structure);
    }
    let length = u32::try_from(table.len()).unwrap();
    table[4..8].copy_from_slice(&length.to_le_bytes());
    fix(table)
}

fn fix(mut table: Vec<u8>) -> Vec<u8> {
    let sum = table.iter().fold(0_u8, |sum, byte| sum.wrapping_add(*byte));
    table[9] = table[9].wrapping_sub(sum);
    table
}

fn structure(kind: u16, body: &[u8]) -> Vec<u8> {
    let mut bytes = Vec::from(kind.to_le_bytes());
    bytes.extend_from_slice(&u16::try_from(body.len() + 4).unwrap().to_le_bytes());
    bytes.extend_from_slice(body);
    bytes
}

fn drhd(flags: u8, base: u64, scopes: &[u8]) -> Vec<u8> {
    let mut body = Vec::from([flags, 0, 0, 0]);
    body.extend_from_slice(&base.to_le_bytes());
    body.extend_from_slice(scopes);
    structure(0, &body)
}

fn rmrr(base: u64, limit: u64, scopes: &[u8]) -> Vec<u8> {
    let mut body = Vec::from([0, 0, 0, 0]);
    body.extend_from_slice(&base.to_le_bytes());
    body.extend_from_slice(&limit.to_le_bytes());
    body.extend_from_slice(scopes);
    structure(1, &body)
}

/// An endpoint 0:2.0, and a bridge reached through two hops.
const ENDPOINT: [u8; 8] = [1, 8, 0, 0, 0, 0, 2, 0];
const BEHIND: [u8; 10] = [2, 10, 0, 0, 0, 0, 0x1c, 3, 1, 0];

struct Buses;

impl Topology for Buses {
    fn bridge(&self, segment: u16, source: SourceId) -> Option<Bridge> {
        match (segment, source.bus(), source.device_function()) {
            (0, 0, 0xe3) => Some(Bridge { secondary: 4, subordinate: 9 }),
            (0, 4, 8) => Some(Bridge { secondary: 5, subordinate: 7 }),
            _ => None,
        }
    }
}

fn sample() -> Vec<u8> {
    table(&[
        &drhd(0, 0xfed9_0000, &[ENDPOINT.as_slice(), &BEHIND].concat()),
        &structure(3, &[0; 16]),
        &rmrr(0x7b80_0000, 0x7fff_ffff, &ENDPOINT),
        &structure(2, &[1, 0, 0, 0]),
        &structure(0x99, &[]),
        &drhd(1, 0xfed9_1000, &[]),
    ])
}

#[test]
fn a_good_table_is_read_as_it_was_written() {
    let bytes = sample();
    let dmar = Dmar::parse(&bytes).unwrap();
    assert_eq!(dmar.host_address_width(), 39);
    assert_eq!(dmar.flags(), 0);
    assert_eq!(dmar.structures().count(), 6);
    let bases: Vec<_> =
        dmar.units().map(|unit| (unit.register_base(), unit.includes_all())).collect();
    assert_eq!(bases, [(0xfed9_0000, false), (0xfed9_1000, true)]);
    let scopes: Vec<_> = dmar.units().next().unwrap().scopes().collect();
    assert_eq!(scopes[0].kind(), ScopeKind::Endpoint);
    assert_eq!(scopes[0].direct(), Some(SourceId::at(0, 2, 0).unwrap()));
    assert_eq!((scopes[1].kind(), scopes[1].direct()), (ScopeKind::Bridge, None));
    assert_eq!(scopes[1].path().collect::<Vec<_>>(), [(0x1c, 3), (1, 0)]);
    let region = dmar.reserved().next().unwrap();
    assert_eq!(region.run(), Run::new(Gfn::new(0x7b800), Gfn::new(0x7ffff)).unwrap());
    assert!(dmar.ats().next().unwrap().all_ports());
}

#[test]
fn a_device_is_served_by_the_unit_that_names_it_or_by_the_one_for_all_others() {
    let bytes = sample();
    let dmar = Dmar::parse(&bytes).unwrap();
    #[track_caller]
    fn check(dmar: &Dmar<'_>, segment: u16, source: SourceId, base: Option<u64>) {
        let unit = dmar.unit_for(segment, source, &Buses);
        assert_eq!(unit.map(|unit| unit.register_base()), base);
    }
    check(&dmar, 0, SourceId::at(0, 2, 0).unwrap(), Some(0xfed9_0000));
    check(&dmar, 0, SourceId::at(0, 2, 1).unwrap(), Some(0xfed9_1000));
    // The bridge itself, the first and last bus below it, and the buses beside it.
    check(&dmar, 0, SourceId::at(4, 1, 0).unwrap(), Some(0xfed9_0000));
    check(&dmar, 0, SourceId::at(5, 0, 0).unwrap(), Some(0xfed9_0000));
    check(&dmar, 0, SourceId::at(7, 31, 7).unwrap(), Some(0xfed9_0000));
    check(&dmar, 0, SourceId::at(8, 0, 0).unwrap(), Some(0xfed9_1000));
    check(&dmar, 0, SourceId::at(4, 2, 0).unwrap(), Some(0xfed9_1000));
    check(&dmar, 1, SourceId::at(0, 2, 0).unwrap(), None);
}

#[test]
fn bad_tables_are_refused_with_the_offset_of_the_fault() {
    #[track_caller]
    fn check(bytes: &[u8], error: DmarError) {
        assert_eq!(Dmar::parse(bytes).unwrap_err(), error);
    }
    let good = sample();
    check(&[], DmarError::Truncated { needed: 48 });
    check(&good[..47], DmarError::Truncated { needed: 48 });
    check(&good[..good.len() - 1], DmarError::Truncated { needed: good.len() });
    let mut bytes = good.clone();
    bytes[0] = b'X';
    check(&bytes, DmarError::Signature);
    let mut bytes = good.clone();
    bytes[4..8].copy_from_slice(&47_u32.to_le_bytes());
    check(&bytes, DmarError::TableLength);
    let mut bytes = good.clone();
    bytes[50] ^= 1;
    check(&bytes, DmarError::Checksum);
    // Lengths of 0 and 3, one byte too long, and a header cut off.
    for length in [0_u16, 3, 17] {
        let mut bytes = table(&[&drhd(0, 0x1000, &[])]);
        bytes[50..52].copy_from_slice(&length.to_le_bytes());
        check(&fix(bytes), DmarError::Structure { offset: 48 });
    }
    check(&table(&[&[0, 0, 4]]), DmarError::Structure { offset: 48 });
    check(&table(&[&structure(0, &[0; 11])]), DmarError::Structure { offset: 48 });
    check(&table(&[&structure(1, &[0; 19])]), DmarError::Structure { offset: 48 });
    check(&table(&[&structure(2, &[0; 3])]), DmarError::Structure { offset: 48 });
    for scope in [&[1_u8, 6, 0, 0, 0, 0][..], &[1, 0], &[1, 9, 0, 0, 0, 0, 2, 0, 0], &[1]] {
        check(&table(&[&drhd(0, 0x1000, scope)]), DmarError::Scope { offset: 64 });
    }
    let long = [1, 10, 0, 0, 0, 0, 2, 0];
    check(
        &table(&[&drhd(0, 0x1000, &[&ENDPOINT[..], &long].concat())]),
        DmarError::Scope { offset: 72 },
    );
    // Devices and functions that do not exist, in either hop.
    for path in [[32, 0, 0, 0], [2, 8, 0, 0], [2, 0, 255, 0], [2, 0, 0, 9]] {
        let scope = [&[2, 10, 0, 0, 0, 0][..], &path].concat();
        check(&table(&[&drhd(0, 0x1000, &scope)]), DmarError::Path { offset: 64 });
    }
    check(&table(&[&drhd(0, 0, &[])]), DmarError::RegisterBase { offset: 48 });
    check(&table(&[&drhd(0, 0x1800, &[])]), DmarError::RegisterBase { offset: 48 });
    check(&table(&[&rmrr(0x2000, 0x1fff, &[])]), DmarError::Region { offset: 48 });
}

#[test]
fn any_bytes_give_a_table_or_an_error_and_never_an_endless_walk() {
    let good = sample();
    let mut state = 0x2545_f491_4f6c_dd1d_u64;
    let mut random = move || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state
    };
    let mut accepted = 0;
    for _ in 0..20_000 {
        let mut bytes = good.clone();
        for _ in 0..=random() % 4 {
            let at = usize::try_from(random()).unwrap() % bytes.len();
            bytes[at] = u8::try_from(random() & 0xff).unwrap();
        }
        bytes.truncate(usize::try_from(random()).unwrap() % (2 * bytes.len()));
        let bytes = if bytes.len() > 9 { fix(bytes) } else { bytes };
        let Ok(dmar) = Dmar::parse(&bytes) else { continue };
        accepted += 1;
        for structure in dmar.structures() {
            let scopes = match structure {
                Structure::Unit(unit) => unit.scopes(),
                Structure::Reserved(region) => region.scopes(),
                Structure::Ats(ports) => ports.scopes(),
                Structure::Other { .. } => continue,
            };
            assert!(scopes.count() <= bytes.len());
        }
        assert!(dmar.structures().count() <= bytes.len());
    }
    assert!(accepted > 1000, "the mutations must leave tables to walk: {accepted}");
}
