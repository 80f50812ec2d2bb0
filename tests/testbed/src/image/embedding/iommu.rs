//! The remapping units: found in firmware's table, brought up, asked for by device.
//!
//! Holding an [`Iommu`] tells you that translation is on: a device reaches nothing until
//! it is attached to a domain.

use arrayvec::ArrayVec;
use iommu_vtd::dmar::{Bridge, Dmar, Topology};
use iommu_vtd::spec::registers::{CAP, Capabilities, ECAP, ExtendedCapabilities};
use iommu_vtd::{Device, Mmio, QueueMemory, SourceId, Unit, UnitConfig, UnitState};
use spin::Once;
use testbed::address::PhysicalAddress;
use testbed::failure::{Context, Failure};
use testbed::pci::Function;
use testbed::{ensure, fail};

use super::{Lock, Memory};
use crate::mmio::Registers;
use crate::{memory, planted};

/// Units this image has room for.
const UNITS: usize = 4;
/// Records of faults have 16 bytes, the registers of IOTLB commands as well.
const RECORD: u64 = 16;

/// What each unit's lock guards. A state is large and stays where it is.
static STATES: [Lock<UnitState>; UNITS] = [const { Lock::new(UnitState::new()) }; UNITS];

/// All units. What flushes a domain refers to them for as long as there are domains.
static UNITS_UP: Once<ArrayVec<VtdUnit, UNITS>> = Once::new();

/// The lock of a unit.
pub(crate) type UnitLock = &'static Lock<UnitState>;
/// A remapping unit of this machine.
pub(crate) type VtdUnit = Unit<Memory, Registers, UnitLock>;

impl Mmio for Registers {
    fn read32(&self, offset: u32) -> u32 {
        Registers::read32(*self, offset.into())
    }

    fn read64(&self, offset: u32) -> u64 {
        planted::read(offset, Registers::read64(*self, offset.into()))
    }

    fn write32(&self, offset: u32, value: u32) {
        Registers::write32(*self, offset.into(), value);
    }

    fn write64(&self, offset: u32, value: u64) {
        let value = planted::write(*self, offset, value);
        Registers::write64(*self, offset.into(), value);
    }
}

/// All devices of this image are on bus 0: no bridge has to be passed.
struct BusZero;

impl Topology for BusZero {
    fn bridge(&self, _: u16, _: SourceId) -> Option<Bridge> {
        None
    }
}

/// Every remapping unit, with translation on.
pub(crate) struct Iommu {
    dmar: Dmar<'static>,
    bases: ArrayVec<u64, UNITS>,
    units: &'static [VtdUnit],
}

impl Iommu {
    /// Bring up every unit that `table`, the DMAR table, names.
    ///
    /// Commands go through queues if `queue`, else through registers.
    ///
    /// # Errors
    /// If the table is unsound, or a unit does not come up.
    pub(crate) fn bring_up(table: &'static [u8], queue: bool) -> Result<Self, Failure> {
        let dmar = Dmar::parse(table).context("DMAR")?;
        let (mut bases, mut units) = (ArrayVec::new(), ArrayVec::new());
        for (index, found) in dmar.units().enumerate() {
            let Some(state) = STATES.get(index) else { fail!("more than {UNITS} units") };
            let registers = registers(found.register_base())?;
            let queue = if queue { Some(queue_memory()?) } else { None };
            let config = UnitConfig { queue, timeout_us: 100_000 };
            let unit = Unit::new(Memory, registers, state, config);
            unit.bring_up(&Memory).context("bring-up")?;
            bases.push(found.register_base());
            units.push(unit);
        }
        ensure!(UNITS_UP.get().is_none(), "the units are up already");
        Ok(Self { dmar, bases, units: UNITS_UP.call_once(|| units) })
    }

    /// The units, as every call of a DMA domain wants them.
    pub(crate) const fn units(&self) -> &'static [VtdUnit] {
        self.units
    }

    /// The registers of a unit, for a look past its driver.
    ///
    /// # Errors
    /// If there is no such unit.
    pub(crate) fn registers(&self, unit: usize) -> Result<Registers, Failure> {
        registers(*self.bases.get(unit).context("a remapping unit")?)
    }

    /// The device of a PCI function, behind the unit that translates for it.
    ///
    /// # Errors
    /// If no unit does, or firmware wants the device to keep some memory: that would
    /// have to be mapped before the device is attached.
    pub(crate) fn device(&self, function: Function) -> Result<Device, Failure> {
        const SEGMENT: u16 = 0;
        let source = SourceId::new(function.requester_id());
        for region in self.dmar.reserved() {
            if region.scopes().any(|scope| scope.names(SEGMENT, source, &BusZero)) {
                fail!("firmware reserves {:?} for {function}", region.run());
            }
        }
        let unit = self.dmar.unit_for(SEGMENT, source, &BusZero);
        let base = unit.context("a unit for the device")?.register_base();
        let unit = self.bases.iter().position(|known| *known == base).context("its unit")?;
        Ok(Device { unit, source, physical_function: source, device_tlb: None })
    }
}

/// The registers at `base`: one page, or more where the unit says that they go on.
fn registers(base: u64) -> Result<Registers, Failure> {
    let first = Registers::map(PhysicalAddress::new(base), 4096)?;
    let capabilities = Capabilities::new(Mmio::read64(&first, CAP));
    let extended = ExtendedCapabilities::new(Mmio::read64(&first, ECAP));
    let faults =
        u64::from(capabilities.fault_offset()) + u64::from(capabilities.fault_records()) * RECORD;
    let end = faults.max(u64::from(extended.iotlb_offset()) + RECORD);
    Ok(Registers::map(PhysicalAddress::new(base), end.next_multiple_of(4096))?)
}

/// A ring of 256 descriptors and a page of status words.
fn queue_memory() -> Result<QueueMemory, Failure> {
    Ok(QueueMemory { ring: memory::allocate()?, order: 0, status: memory::allocate()? })
}
