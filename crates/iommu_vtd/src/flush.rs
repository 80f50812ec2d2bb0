//! Making devices forget: the IOTLB side of a batch's flush.
//!
//! A [`DmaFlush`] starts every unit that has a device of the domain before it waits for
//! any. Which devices there are is looked up when the flush starts, after the tables
//! were changed: a device attached later has never seen the old entries.

use arrayvec::ArrayVec;
use flush::{Change, Cover, Depth, DomainId, Extent, Flush, Iotlb};

use crate::domain::{DmaDomain, MAX_UNITS, Members, Use};
use crate::plan::{Plan, block_for, plan};
use crate::submit::{CommandError, RETRIES, Started, Submitter};
use crate::unit::{Unit, UnitState};
use crate::{Block, Command, Guarded, Mmio, Platform};

/// Why a flush is not known to have completed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DmaFlushError {
    /// The batch belongs to another domain than this flusher.
    OtherDomain,
    /// A unit of the domain is not in the slice of units.
    NoUnit {
        /// Its index.
        unit: usize,
    },
    /// The first unit whose commands did not complete; all were waited for.
    Command {
        /// Its index in the slice of units.
        unit: usize,
        /// What happened.
        error: CommandError,
    },
}

/// Flushes the translations of one domain from all units and devices that have them.
#[derive(Debug)]
pub struct DmaFlush<'a, P, R, L, G> {
    units: &'a [Unit<P, R, L>],
    domain: &'a DmaDomain<G>,
}

/// A flush of one domain under way.
#[derive(Debug)]
#[must_use = "the flush is over when it was waited for"]
pub struct DmaInFlight {
    units: ArrayVec<(Use, Started), MAX_UNITS>,
    error: Option<DmaFlushError>,
}

impl<'a, P: Platform, R: Mmio, L: Guarded<UnitState>, G: Guarded<Members>>
    DmaFlush<'a, P, R, L, G>
{
    /// The flusher of `domain`, whose devices are behind `units`: the slice its devices
    /// were attached with.
    #[must_use]
    pub const fn new(units: &'a [Unit<P, R, L>], domain: &'a DmaDomain<G>) -> Self {
        Self { units, domain }
    }

    /// Starts what one unit has to do; `None` if that is nothing.
    fn start_unit(&self, own: Use, members: &Members, cover: &Cover) -> Option<Started> {
        let unit = self.units.get(own.unit)?;
        let capabilities = unit.capabilities();
        if cover.change() == Change::Added && !capabilities.caching_mode() {
            // Nothing can be cached of what was not there; but the change itself may sit
            // in a write buffer that the table walk does not see.
            if !capabilities.needs_write_buffer_flush() {
                return None;
            }
            return Some(Started::ended(unit.flush_write_buffers()));
        }
        let mut submitter = unit.open();
        match plan(cover, capabilities) {
            Plan::Nothing => return None,
            Plan::Domain => submitter.push(Command::IotlbDomain { tag: own.tag }),
            Plan::Blocks { runs, order } => {
                for run in runs {
                    let block = block_for(*run, order);
                    let depth = cover.depth();
                    submitter.push(Command::IotlbPages { tag: own.tag, block, depth });
                }
            }
        }
        push_devices(unit, &mut submitter, own, members, cover);
        Some(submitter.close())
    }

    /// Waits for one unit, and asks again for what a device's time-out took along: wider,
    /// because the single commands are not known any more.
    fn finish_unit(&self, own: Use, started: Started) -> Result<(), CommandError> {
        let unit = self.units.get(own.unit).ok_or(CommandError::Stopped)?;
        let mut end = unit.finish(started);
        for _ in 0..RETRIES {
            if end != Err(CommandError::DeviceTimeOut) {
                break;
            }
            let mut everything = Cover::NOTHING;
            everything.everything(Depth::Tables);
            let mut submitter = unit.open();
            submitter.push(Command::IotlbDomain { tag: own.tag });
            push_devices(unit, &mut submitter, own, &self.domain.members(), &everything);
            end = unit.finish(submitter.close());
        }
        end
    }
}

/// The device-TLB commands of one unit: behind its IOTLB commands, which hardware
/// completes first (6.5.2.12), and through the unit the devices are behind.
fn push_devices<P: Platform, R: Mmio, L: Guarded<UnitState>>(
    unit: &Unit<P, R, L>,
    submitter: &mut Submitter<'_, P, R, L>,
    own: Use,
    members: &Members,
    cover: &Cover,
) {
    for device in members.devices.iter().filter(|device| device.unit == own.unit) {
        let source = device.source;
        let Some(max_pending) = device.device_tlb else { continue };
        if !unit.reaches_device(source) {
            continue;
        }
        match cover.extent() {
            Extent::Nothing => {}
            Extent::Everything => {
                submitter.push(Command::DeviceTlb { source, max_pending, block: Block::ALL });
            }
            Extent::Runs(runs) => {
                for run in runs {
                    let block = block_for(*run, cover.order());
                    submitter.push(Command::DeviceTlb { source, max_pending, block });
                }
            }
        }
    }
}

impl<P: Platform, R: Mmio, L: Guarded<UnitState>, G: Guarded<Members>> Flush<Iotlb>
    for DmaFlush<'_, P, R, L, G>
{
    type InFlight = DmaInFlight;
    type Error = DmaFlushError;

    fn start(&self, domain: DomainId, cover: &Cover) -> DmaInFlight {
        let mut in_flight = DmaInFlight { units: ArrayVec::new(), error: None };
        if domain != self.domain.id() {
            in_flight.error = Some(DmaFlushError::OtherDomain);
            return in_flight;
        }
        if cover.is_nothing() {
            return in_flight;
        }
        let members = self.domain.members();
        for own in &members.uses {
            if own.unit >= self.units.len() {
                in_flight.error.get_or_insert(DmaFlushError::NoUnit { unit: own.unit });
            } else if let Some(started) = self.start_unit(*own, &members, cover) {
                in_flight.units.push((*own, started));
            }
        }
        in_flight
    }

    fn wait(&self, in_flight: DmaInFlight) -> Result<(), DmaFlushError> {
        let DmaInFlight { units, mut error } = in_flight;
        for (own, started) in units {
            if let Err(failed) = self.finish_unit(own, started) {
                error.get_or_insert(DmaFlushError::Command { unit: own.unit, error: failed });
            }
        }
        error.map_or(Ok(()), Err)
    }
}
