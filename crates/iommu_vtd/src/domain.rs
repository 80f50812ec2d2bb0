//! A DMA domain: one set of tables, and the devices translated with it.
//!
//! Holding a [`DmaDomain`] means holding a root table that no device uses unless the
//! domain's member list says so: a device is on the list before hardware can look at
//! the tables, and leaves it only after hardware has forgotten them.

use arrayvec::ArrayVec;
use flush::{DomainId, Mfn, plan::Recent};
use stage2::{Format, TableMemory, format::vtd::Vtd};

use crate::context::{Binding, ContextError};
use crate::spec::registers::ExtendedCapabilities;
use crate::spec::tables::TranslationType;
use crate::submit::CommandError;
use crate::unit::{Unit, UnitState};
use crate::{Block, Command, Guarded, Mmio, Platform, SourceId, Tag};

/// Devices one domain can have.
pub const MAX_DEVICES: usize = 64;
/// Units the devices of one domain can be behind.
pub const MAX_UNITS: usize = 16;

/// A requester, and the unit that translates for it: its place in the embedder's slice.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Device {
    /// Index into the slice of units that every call of the domain is given.
    pub unit: usize,
    /// The requester.
    pub source: SourceId,
    /// The physical function it belongs to: [`source`](Self::source) itself, unless that
    /// is a virtual function.
    pub physical_function: SourceId,
    /// Set if the device may use its own translation cache (ATS): how many
    /// invalidations it takes at a time, 1 to 32, from its ATS capability.
    pub device_tlb: Option<u8>,
}

impl Device {
    /// What makes the device's own cache forget `block`, if it has one.
    pub(crate) fn command(&self, unit: ExtendedCapabilities, block: Block) -> Option<Command> {
        let Self { unit: _, source, physical_function, device_tlb } = *self;
        let physical_function = unit.throttles_devices().then_some(physical_function);
        let max_pending = device_tlb?;
        Some(Command::DeviceTlb { source, physical_function, max_pending, block })
    }
}

/// The domain's tag on one unit.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Use {
    pub(crate) unit: usize,
    pub(crate) tag: Tag,
}

/// The devices of a domain, guarded by a lock of the embedder.
///
/// That lock may be held while a unit's is taken, never the other way round.
#[derive(Clone, Debug, Default)]
pub struct Members {
    pub(crate) devices: ArrayVec<Device, MAX_DEVICES>,
    pub(crate) uses: ArrayVec<Use, MAX_UNITS>,
}

impl Members {
    /// No device.
    #[must_use]
    pub const fn new() -> Self {
        Self { devices: ArrayVec::new_const(), uses: ArrayVec::new_const() }
    }

    fn tag(&self, unit: usize) -> Option<Tag> {
        self.uses.iter().find(|own| own.unit == unit).map(|own| own.tag)
    }

    fn place(&self, unit: usize, source: SourceId) -> Option<usize> {
        let same = |device: &Device| device.unit == unit && device.source == source;
        self.devices.iter().position(same)
    }

    /// Removes a device; the tag of its unit, if it was the last one there.
    fn remove(&mut self, unit: usize, source: SourceId) -> Option<Tag> {
        let place = self.place(unit, source)?;
        self.devices.swap_remove(place);
        if self.devices.iter().any(|device| device.unit == unit) {
            return None;
        }
        let place = self.uses.iter().position(|own| own.unit == unit)?;
        Some(self.uses.swap_remove(place).tag)
    }
}

/// Why a device was not attached. Unless it says otherwise, nothing changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AttachError {
    /// There is no such unit.
    NoUnit,
    /// The unit cannot walk tables of this depth, or not leaves of this size.
    Tables,
    /// A device TLB needs a unit that supports it and runs its queue.
    DeviceTlb,
    /// The device was declared gone.
    Gone,
    /// The device belongs to a domain, this one or another.
    Taken,
    /// The domain has no room for another device or unit.
    TooMany,
    /// The unit has no free tag.
    NoTag,
    /// The unit was not brought up.
    Down,
    /// No page for a context table.
    NoMemory,
    /// Hardware may not see the new entry. The device is detached again.
    Command(CommandError),
    /// As [`Command`](Self::Command), and hardware may not have forgotten the entry
    /// either: the device is still a member, and has to be detached.
    StillMember(CommandError),
}

/// Why a device was not detached.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DetachError {
    /// There is no such unit.
    NoUnit,
    /// The device is not one of this domain.
    NotMember,
    /// The device reaches no table any more, but may still use what is cached. It stays a
    /// member, and the domain's tag stays in use: call again.
    Command(CommandError),
}

/// Why a device was not moved between domains.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MoveError {
    /// It is still a member of the old domain.
    Detach(DetachError),
    /// It is a member of neither, or of the new one if the error says so.
    Attach(AttachError),
}

/// Tables for DMA, and the devices translated with them.
///
/// `G` is the embedder's lock around the member list. Attaching and detaching *one*
/// device is serialised by the embedder; different devices need no order.
#[derive(Debug)]
pub struct DmaDomain<G> {
    id: DomainId,
    format: Vtd,
    root: Mfn,
    members: G,
    /// What its devices' translations were flushed of last.
    pub(crate) recent: Recent,
}

impl<G: Guarded<Members>> DmaDomain<G> {
    /// A domain without devices, translated with the table tree at `root`.
    ///
    /// The tree is the domain's own, or (where the formats agree) the one its CPUs use.
    #[must_use]
    pub const fn new(id: DomainId, format: Vtd, root: Mfn, members: G) -> Self {
        Self { id, format, root, members, recent: Recent::new() }
    }

    /// The hypervisor's number of the domain.
    pub const fn id(&self) -> DomainId {
        self.id
    }

    /// The format of its tables.
    pub const fn format(&self) -> &Vtd {
        &self.format
    }

    /// The root of its tables.
    pub const fn root(&self) -> Mfn {
        self.root
    }

    /// How many devices it has, those included whose detach has not completed.
    pub fn devices(&self) -> usize {
        self.members.with(|members| members.devices.len())
    }

    /// Its tag on `unit`, while it has a device there.
    pub fn tag(&self, unit: usize) -> Option<Tag> {
        self.members.with(|members| members.tag(unit))
    }

    pub(crate) fn members(&self) -> Members {
        self.members.with(|members| members.clone())
    }

    /// Lets `device` use the domain's tables.
    ///
    /// It may belong to no domain: see [`reattach`](Self::reattach).
    ///
    /// # Errors
    ///
    /// See [`AttachError`].
    pub fn attach<P: Platform, R: Mmio, L: Guarded<UnitState>>(
        &self,
        units: &[Unit<P, R, L>],
        memory: &impl TableMemory,
        device: Device,
    ) -> Result<(), AttachError> {
        let unit = units.get(device.unit).ok_or(AttachError::NoUnit)?;
        let levels = self.format.geometry().levels();
        let largest = self.format.geometry().order(self.format.largest_leaf());
        let capabilities = unit.capabilities();
        if !capabilities.walks(levels) || largest > capabilities.largest_leaf_order() {
            return Err(AttachError::Tables);
        }
        let offered = unit.uses_queue() && unit.extended_capabilities().device_tlb();
        let translation = match device.device_tlb {
            None => TranslationType::Untranslated,
            Some(1..=32) if offered => TranslationType::WithDeviceTlb,
            Some(_) => return Err(AttachError::DeviceTlb),
        };
        let (translating, gone) =
            unit.locked(|state| (state.translating, state.gone.contains(&device.source)));
        if !translating {
            return Err(AttachError::Down);
        }
        if gone {
            return Err(AttachError::Gone);
        }
        let tag = self.members.with(|members| self.enter(members, unit, device))?;
        let source = device.source;
        let binding = Binding { source, tag, root: self.root, levels, translation };
        let error = match unit.bind(memory, binding) {
            Ok(()) => return Ok(()),
            Err(ContextError::Down) => AttachError::Down,
            Err(ContextError::NoMemory) => AttachError::NoMemory,
            Err(ContextError::Taken) => AttachError::Taken,
            Err(ContextError::Command(error)) => {
                // Hardware may already use the entry.
                if let Err(again) = unit.unbind(memory, &device, tag) {
                    return Err(AttachError::StillMember(again));
                }
                AttachError::Command(error)
            }
        };
        self.leave(unit, device.unit, source);
        Err(error)
    }

    /// Takes the domain's tables from the device, and waits until nothing of them is cached
    /// for it: not-present entry, context cache, IOTLB by the domain's tag, device TLB.
    ///
    /// Afterwards the device is blocked. A device that is [gone](Unit::device_gone) gets
    /// no command of its own. One with a device TLB cannot be detached from a unit that
    /// is shut down, unless it is gone: bring the unit up first.
    ///
    /// # Errors
    ///
    /// See [`DetachError`].
    pub fn detach<P: Platform, R: Mmio, L: Guarded<UnitState>>(
        &self,
        units: &[Unit<P, R, L>],
        memory: &impl TableMemory,
        unit_index: usize,
        source: SourceId,
    ) -> Result<(), DetachError> {
        let unit = units.get(unit_index).ok_or(DetachError::NoUnit)?;
        let (tag, device) = self
            .members
            .with(|members| {
                let device = *members.devices.get(members.place(unit_index, source)?)?;
                Some((members.tag(unit_index)?, device))
            })
            .ok_or(DetachError::NotMember)?;
        unit.unbind(memory, &device, tag).map_err(DetachError::Command)?;
        self.leave(unit, unit_index, source);
        Ok(())
    }

    /// Moves `device` from `self` to `to`. In between it is blocked.
    ///
    /// # Errors
    ///
    /// See [`MoveError`].
    pub fn reattach<P: Platform, R: Mmio, L: Guarded<UnitState>>(
        &self,
        to: &Self,
        units: &[Unit<P, R, L>],
        memory: &impl TableMemory,
        device: Device,
    ) -> Result<(), MoveError> {
        self.detach(units, memory, device.unit, device.source).map_err(MoveError::Detach)?;
        to.attach(units, memory, device).map_err(MoveError::Attach)
    }

    /// Puts the device on the list. From here on a flush of the domain covers it.
    fn enter<P: Platform, R: Mmio, L: Guarded<UnitState>>(
        &self,
        members: &mut Members,
        unit: &Unit<P, R, L>,
        device: Device,
    ) -> Result<Tag, AttachError> {
        if members.place(device.unit, device.source).is_some() {
            return Err(AttachError::Taken);
        }
        if members.devices.is_full() {
            return Err(AttachError::TooMany);
        }
        let tag = match members.tag(device.unit) {
            Some(tag) => tag,
            None if members.uses.is_full() => return Err(AttachError::TooMany),
            None => {
                let taken = unit.locked(|state| state.tags.take(self.id));
                let tag = taken.ok_or(AttachError::NoTag)?;
                members.uses.push(Use { unit: device.unit, tag });
                tag
            }
        };
        members.devices.push(device);
        Ok(tag)
    }

    /// Takes a device off the list, and gives the tag back with the last one on its unit.
    fn leave<P: Platform, R: Mmio, L: Guarded<UnitState>>(
        &self,
        unit: &Unit<P, R, L>,
        unit_index: usize,
        source: SourceId,
    ) {
        self.members.with(|members| {
            if let Some(tag) = members.remove(unit_index, source) {
                unit.locked(|state| state.tags.give_back(tag));
            }
        });
    }
}
