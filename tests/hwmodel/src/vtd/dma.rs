//! Devices, their own TLBs, and DMA that is on its way
//!
//! A DMA is translated when it begins and reaches memory when it finishes; whatever happens in between does not
//! change where it goes. [`DmaTicket`] is one that has begun. An invalidation that drains makes it land first.

use super::Unit;
use super::fault::FaultReason;
use super::registers::GSTS_TES;
use super::translate::{Granted, Refused};
use crate::cache::{Leaf, Leaves, Origin, Source, block_of, span};
use crate::machine::State;
use crate::types::{Access, Frame, Rights, Space, UnitId};
use crate::witness::Actor;
use crate::world::{Use, World};
use std::collections::BTreeMap;

/// Why a DMA did not happen.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum DmaError {
    /// No such device.
    NoDevice,
    /// The unit refused it.
    Fault(FaultReason),
    /// It was translated to something that is not RAM.
    OutsideRam,
    /// A DMA that is begun separately must stay within one page and not be empty.
    CrossesPage,
    /// The ticket was finished before, or the device is gone.
    NotInFlight,
}

/// A DMA that has been translated and has not been finished.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct DmaTicket(pub(super) u64);

/// A DMA that has reached memory.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct Finished {
    /// An invalidation had made it land before it was finished.
    pub drained: bool,
    /// What was read, or written.
    pub data: Vec<u8>,
}

pub(super) struct Device {
    pub(super) unit: UnitId,
    /// It has a TLB of its own.
    pub(super) ats: bool,
    /// It answers device-TLB invalidations.
    pub(super) answers: bool,
    pub(super) tlb: Leaves,
}

/// A DMA on its way.
pub(crate) struct Flight {
    pub(crate) unit: UnitId,
    pub(crate) sid: u16,
    pub(crate) did: u16,
    pub(crate) iova: u64,
    pub(crate) from_device_tlb: bool,
    pub(crate) frame: Frame,
    pub(crate) space: Option<Space>,
    pub(crate) rights: Rights,
    pub(crate) origin: Origin,
    access: Access,
    pub(super) data: Vec<u8>,
    pub(crate) landed: bool,
}

/// Which DMA an invalidation waits for.
#[derive(Clone, Copy, Debug)]
pub(super) struct Drain {
    pub(super) writes: bool,
    pub(super) reads: bool,
}

/// Devices and their traffic.
#[derive(Default)]
pub(crate) struct Fabric {
    pub(super) devices: BTreeMap<u16, Device>,
    pub(crate) flights: BTreeMap<u64, Flight>,
    next: u64,
}

impl Flight {
    pub(crate) fn as_use(&self, actor: Actor) -> Use {
        Use {
            actor,
            space: self.space,
            address: self.iova,
            frame: self.frame,
            access: Some(self.access),
            rights: self.rights,
            origin: self.origin,
        }
    }

    /// Reaches memory, once.
    pub(super) fn land(&mut self, world: &mut World, actor: Actor) {
        if self.landed {
            return;
        }
        self.landed = true;
        world.judge_access(&self.as_use(actor));
        let address = self.frame.address() | (self.iova & 0xfff);
        match self.access {
            Access::Write => {
                world.ram.write_bytes(address, &self.data);
            }
            Access::Read | Access::Execute => {
                world.ram.read_bytes(address, &mut self.data);
            }
        }
    }
}

impl Fabric {
    /// Would this device answer a device-TLB invalidation sent by this unit?
    pub(super) fn answers(&self, unit: UnitId, sid: u16) -> bool {
        self.devices
            .get(&sid)
            .is_some_and(|device| device.unit == unit && device.ats && device.answers)
    }

    pub(super) fn is_behind(&self, unit: UnitId, sid: u16) -> bool {
        self.devices.get(&sid).is_some_and(|device| device.unit == unit)
    }

    pub(crate) fn behind(&self, unit: UnitId) -> Vec<u16> {
        self.devices.iter().filter(|(_, device)| device.unit == unit).map(|(sid, _)| *sid).collect()
    }

    pub(crate) fn tlbs(&self) -> impl Iterator<Item = (u16, UnitId, &Leaves)> {
        self.devices.iter().map(|(sid, device)| (*sid, device.unit, &device.tlb))
    }

    pub(crate) fn tlb_mut(&mut self, sid: u16) -> Option<&mut Leaves> {
        self.devices.get_mut(&sid).map(|device| &mut device.tlb)
    }

    /// Makes the DMA that is named land now; how many did.
    pub(super) fn drain(
        &mut self,
        world: &mut World,
        drain: Drain,
        named: impl Fn(&Flight) -> bool,
    ) -> u64 {
        let mut landed = 0_u64;
        for flight in self.flights.values_mut() {
            let asked = if flight.access == Access::Write { drain.writes } else { drain.reads };
            if asked && !flight.landed && named(flight) {
                let actor = Actor::InFlight(flight.sid);
                flight.land(world, actor);
                landed = landed.saturating_add(1);
            }
        }
        landed
    }

    /// Drops a device's own entries that overlap `first..=last`; the pages it will want again.
    pub(super) fn drop_device_entries(&mut self, sid: u16, first: u64, last: u64) -> Vec<u64> {
        let Some(device) = self.devices.get_mut(&sid) else {
            return Vec::new();
        };
        let overlaps = |order: u8, block: u64| {
            let (from, to) = span(order, block);
            from <= last && first <= to
        };
        let wanted = device
            .tlb
            .iter()
            .filter(|((_, order, block), _)| overlaps(*order, *block))
            .map(|((_, order, block), _)| span(*order, *block).0)
            .collect();
        device.tlb.drop_where(|(_, order, block), _| overlaps(*order, *block));
        wanted
    }
}

impl Unit {
    /// Answers a device's request for a translation and puts it into the device's TLB.
    pub(super) fn prefetch_for_device(
        &mut self,
        world: &mut World,
        fabric: &mut Fabric,
        sid: u16,
        page: u64,
    ) {
        if self.gsts & GSTS_TES == 0 {
            return;
        }
        if let Ok(granted) = self.translate(world, sid, page << 12, Access::Read, true) {
            fabric.keep(sid, page, &granted);
        }
    }

    fn refuse(&mut self, sid: u16, iova: u64, access: Access, refused: Refused) -> DmaError {
        self.counters.faults = self.counters.faults.saturating_add(1);
        if !refused.quiet {
            self.record_fault(sid, iova, refused.reason, access != Access::Write);
        }
        DmaError::Fault(refused.reason)
    }
}

impl Fabric {
    fn keep(&mut self, sid: u16, page: u64, granted: &Granted) {
        let Some(device) = self.devices.get_mut(&sid) else {
            return;
        };
        let within = page & ((1_u64 << granted.order) - 1);
        let leaf = Leaf {
            frame: Frame(granted.frame.0.saturating_sub(within)),
            rights: granted.rights,
            present: true,
            origin: granted.origin,
            source: Some(Source { sid, did: granted.did }),
            dirty: false,
        };
        // A device knows no domains: whatever it asked for last is its only space.
        let key = (0, granted.order, block_of(page, granted.order));
        device.tlb.insert(key, leaf);
    }
}

impl State {
    /// Translates a device's access, through its own TLB if it has one. True: it came through the device TLB.
    fn device_translate(
        &mut self,
        sid: u16,
        iova: u64,
        access: Access,
    ) -> Result<(Granted, UnitId, bool), DmaError> {
        let page = iova >> 12;
        let device = self.fabric.devices.get_mut(&sid).ok_or(DmaError::NoDevice)?;
        let id = device.unit;
        let unit = self.units.get_mut(id.0).ok_or(DmaError::NoDevice)?;
        if device.ats {
            if self.world.whim.chance(4) {
                device.tlb.evict(self.world.whim.below(device.tlb.len()));
            }
            if let Some((key, leaf)) = device.tlb.find(0, page)
                && leaf.rights.allows(access)
            {
                let within = page & ((1_u64 << key.1) - 1);
                let granted = Granted {
                    frame: leaf.frame.plus(within),
                    rights: leaf.rights,
                    order: key.1,
                    did: leaf.source.map_or(0, |source| source.did),
                    space: leaf.source.map(|source| Space::Device { unit: id, did: source.did }),
                    origin: leaf.origin,
                };
                // A translated request passes only where the context entry lets it.
                return match unit.admits_translated(&mut self.world, sid) {
                    Ok(()) => Ok((granted, id, true)),
                    Err(refused) => Err(unit.refuse(sid, iova, access, refused)),
                };
            }
            if unit.translates() {
                match unit.translate(&mut self.world, sid, iova, access, true) {
                    Ok(granted) => {
                        self.fabric.keep(sid, page, &granted);
                        return Ok((granted, id, true));
                    }
                    // The context does not allow device TLBs: the device falls back to plain requests.
                    Err(Refused { reason: FaultReason::TranslationRequestBlocked, .. }) => {}
                    Err(refused) => {
                        // A translation request is answered with "no", not with a fault record.
                        unit.counters.faults = unit.counters.faults.saturating_add(1);
                        return Err(DmaError::Fault(refused.reason));
                    }
                }
            }
        }
        match unit.translate(&mut self.world, sid, iova, access, false) {
            Ok(granted) => Ok((granted, id, false)),
            Err(refused) => Err(unit.refuse(sid, iova, access, refused)),
        }
    }

    fn begin(
        &mut self,
        sid: u16,
        iova: u64,
        access: Access,
        data: Vec<u8>,
    ) -> Result<Flight, DmaError> {
        if data.is_empty() || (iova & 0xfff).saturating_add(data.len() as u64) > 0x1000 {
            return Err(DmaError::CrossesPage);
        }
        let (granted, unit, from_device_tlb) = self.device_translate(sid, iova, access)?;
        if self.world.ram.info(granted.frame).is_none() {
            return Err(DmaError::OutsideRam);
        }
        Ok(Flight {
            unit,
            sid,
            did: granted.did,
            iova,
            from_device_tlb,
            frame: granted.frame,
            space: granted.space,
            rights: granted.rights,
            origin: granted.origin,
            access,
            data,
            landed: false,
        })
    }

    pub(super) fn at_once(
        &mut self,
        sid: u16,
        iova: u64,
        access: Access,
        data: Vec<u8>,
    ) -> Result<Vec<u8>, DmaError> {
        let mut flight = self.begin(sid, iova, access, data)?;
        let actor = if flight.from_device_tlb {
            Actor::DeviceTlb(sid)
        } else {
            Actor::Unit(flight.unit, sid)
        };
        flight.land(&mut self.world, actor);
        Ok(flight.data)
    }

    pub(super) fn launch(
        &mut self,
        sid: u16,
        iova: u64,
        access: Access,
        data: Vec<u8>,
    ) -> Result<DmaTicket, DmaError> {
        let flight = self.begin(sid, iova, access, data)?;
        let number = self.fabric.next;
        self.fabric.next = number.saturating_add(1);
        self.fabric.flights.insert(number, flight);
        Ok(DmaTicket(number))
    }
}
