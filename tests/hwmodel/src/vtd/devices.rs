//! The machine's units and devices, as tests drive them
//!
//! A device is known by its source id and sits behind one unit; what it reads and writes goes through that
//! unit's caches and, if it has one, its own TLB.

use super::Unit;
use super::command::Command;
use super::config::UnitConfig;
use super::dma::{Device, DmaError, DmaTicket, Finished};
use crate::cache::Leaves;
use crate::failure::Lie;
use crate::machine::Machine;
use crate::types::{Access, UnitId};
use crate::witness::Actor;

/// Splits `length` bytes at `iova` at page boundaries: offset and length of each piece.
fn pieces(iova: u64, length: usize) -> Vec<(usize, usize)> {
    let mut pieces = Vec::new();
    let mut done = 0_usize;
    while done < length {
        let at = iova.saturating_add(done as u64);
        let room = 0x1000 - (at & 0xfff) as usize;
        let size = room.min(length - done);
        pieces.push((done, size));
        done = done.saturating_add(size);
    }
    pieces
}

/// VT-d units and devices. Methods that take a unit panic for one that the machine does not have.
impl Machine {
    /// Adds a unit, with translation off.
    pub fn add_unit(&self, config: UnitConfig) -> UnitId {
        self.with(|state| {
            let id = UnitId(state.units.len());
            state.world.ram.track_lines |= !config.coherent;
            state.world.ram.track_buffer |= config.write_buffer;
            state.units.push(Unit::new(id, config));
            id
        })
    }

    /// Adds a device behind a unit, or moves one there, with nothing in its TLB. With `ats` it has a TLB.
    pub fn add_device(&self, unit: UnitId, sid: u16, ats: bool) {
        self.with(|state| {
            state.world.step();
            state
                .fabric
                .devices
                .insert(sid, Device { unit, ats, answers: true, tlb: Leaves::default() });
        });
    }

    /// Whether a device answers device-TLB invalidations; one that does not makes them time out.
    pub fn set_device_answers(&self, sid: u16, answers: bool) {
        self.with(|state| {
            if let Some(device) = state.fabric.devices.get_mut(&sid) {
                device.answers = answers;
            }
        });
    }

    /// Unplugs a device: its TLB and its DMA in flight are gone, and it answers nothing.
    pub fn remove_device(&self, sid: u16) {
        self.with(|state| {
            state.world.step();
            state.fabric.devices.remove(&sid);
            state.fabric.flights.retain(|_, flight| flight.sid != sid);
        });
    }

    /// Plants or removes a bug in a unit.
    pub fn set_lie(&self, unit: UnitId, lie: Option<Lie>) {
        self.with(|state| state.units[unit.0].lie = lie);
    }

    /// Invalidation commands and waits the unit has carried out, register ones included, oldest first.
    #[must_use]
    pub fn commands(&self, unit: UnitId) -> Vec<Command> {
        self.with(|state| state.units[unit.0].log.clone())
    }

    /// A device reads bytes; a read of several pages stops at the first page that is refused.
    ///
    /// # Errors
    /// See [`DmaError`]; pages before the refused one have been read.
    pub fn dma_read(&self, sid: u16, iova: u64, bytes: &mut [u8]) -> Result<(), DmaError> {
        for (offset, size) in pieces(iova, bytes.len()) {
            let at = iova.saturating_add(offset as u64);
            let data = self.with(|state| {
                state.world.step();
                state.at_once(sid, at, Access::Read, vec![0; size])
            })?;
            if let Some(target) = bytes.get_mut(offset..offset.saturating_add(size)) {
                target.copy_from_slice(&data);
            }
        }
        Ok(())
    }

    /// A device writes bytes; a write of several pages stops at the first page that is refused.
    ///
    /// # Errors
    /// See [`DmaError`]; pages before the refused one have been written.
    pub fn dma_write(&self, sid: u16, iova: u64, bytes: &[u8]) -> Result<(), DmaError> {
        for (offset, size) in pieces(iova, bytes.len()) {
            let at = iova.saturating_add(offset as u64);
            let piece = bytes.get(offset..offset.saturating_add(size)).unwrap_or_default();
            self.with(|state| {
                state.world.step();
                state.at_once(sid, at, Access::Write, piece.to_vec())
            })?;
        }
        Ok(())
    }

    /// A device reads 8 bytes at a multiple of 8 (the low bits are ignored).
    ///
    /// # Errors
    /// See [`DmaError`].
    pub fn dma_read64(&self, sid: u16, iova: u64) -> Result<u64, DmaError> {
        let mut bytes = [0; 8];
        self.dma_read(sid, iova & !7, &mut bytes)?;
        Ok(u64::from_le_bytes(bytes))
    }

    /// A device writes 8 bytes at a multiple of 8 (the low bits are ignored).
    ///
    /// # Errors
    /// See [`DmaError`].
    pub fn dma_write64(&self, sid: u16, iova: u64, value: u64) -> Result<(), DmaError> {
        self.dma_write(sid, iova & !7, &value.to_le_bytes())
    }

    /// Begins a write within one page: it is translated now, and reaches memory when it is finished or drained.
    ///
    /// # Errors
    /// See [`DmaError`].
    pub fn dma_begin_write(
        &self,
        sid: u16,
        iova: u64,
        bytes: &[u8],
    ) -> Result<DmaTicket, DmaError> {
        self.with(|state| {
            state.world.step();
            state.launch(sid, iova, Access::Write, bytes.to_vec())
        })
    }

    /// Begins a read within one page, as [`Machine::dma_begin_write`].
    ///
    /// # Errors
    /// See [`DmaError`].
    pub fn dma_begin_read(
        &self,
        sid: u16,
        iova: u64,
        length: usize,
    ) -> Result<DmaTicket, DmaError> {
        self.with(|state| {
            state.world.step();
            state.launch(sid, iova, Access::Read, vec![0; length.min(0x1001)])
        })
    }

    /// Finishes a DMA: it reaches memory now unless it was drained before.
    ///
    /// # Errors
    /// [`DmaError::NotInFlight`].
    pub fn dma_finish(&self, ticket: DmaTicket) -> Result<Finished, DmaError> {
        self.with(|state| {
            state.world.step();
            let mut flight = state.fabric.flights.remove(&ticket.0).ok_or(DmaError::NotInFlight)?;
            let drained = flight.landed;
            let actor = Actor::InFlight(flight.sid);
            flight.land(&mut state.world, actor);
            Ok(Finished { drained, data: flight.data })
        })
    }
}
