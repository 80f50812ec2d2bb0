//! Sequences: what hardware is told, in which order, and how waiting ends.

mod attach;
mod bring_up;
mod fake;
mod faults;
mod flushes;
mod queue;
mod ring;
mod tables;

use flush::{DomainId, Mfn};
use stage2::format::vtd::{Vtd, VtdLevels};

use crate::{Device, DmaDomain, Members, SourceId, Unit, UnitConfig, UnitState};
use fake::{Fake, Lock};

type TestUnit<'f> = Unit<&'f Fake, &'f Fake, Lock<UnitState>>;
type TestDomain = DmaDomain<Lock<Members>>;

fn unit(fake: &Fake, config: UnitConfig) -> TestUnit<'_> {
    Unit::new(fake, fake, Lock::new(UnitState::new()), config)
}

/// A unit that is up, with an empty log.
fn unit_up(fake: &Fake, config: UnitConfig) -> TestUnit<'_> {
    let unit = unit(fake, config);
    unit.bring_up(fake).unwrap();
    fake.log();
    unit
}

fn domain(number: u16) -> TestDomain {
    let root = Mfn::new(0x5000 + u64::from(number));
    DmaDomain::new(
        DomainId::new(number),
        Vtd::new(VtdLevels::Four),
        root,
        Lock::new(Members::new()),
    )
}

/// A device without a device TLB behind unit 0.
fn plain(bus: u8) -> Device {
    Device { device_tlb: None, ..caching(0, bus, 1) }
}

/// A device with a device TLB that takes `pending` invalidations at a time.
fn caching(unit: usize, bus: u8, pending: u8) -> Device {
    let source = SourceId::at(bus, 0, 0).unwrap();
    Device { unit, source, physical_function: source, device_tlb: Some(pending) }
}
