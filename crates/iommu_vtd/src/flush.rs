//! Making devices forget: the IOTLB side of a batch's flush.
//!
//! A [`DmaFlush`] starts every unit that has a device of the domain before it waits for
//! any. Which devices there are is looked up when the flush starts, after the tables
//! were changed: a device attached later has never seen the old entries.

use arrayvec::ArrayVec;
use flush::plan::{Plan, Planner, Policy, Statistics};
use flush::{Change, Cover, Depth, DomainId, Flush, Iotlb};

use crate::domain::{DmaDomain, MAX_UNITS, Members, Use};
use crate::plan::{DEVICE_LIMITS, unit_limits};
use crate::submit::{CommandError, RETRIES, Started, Submitter};
use crate::unit::{Reach, Unit, UnitState};
use crate::{Block, Command, Counters, Guarded, Mmio, Platform, SourceId};

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
    /// A device with a device TLB was declared gone and is still a member: what it keeps
    /// works until it is detached. Detach it, then retry.
    Gone {
        /// The index of its unit in the slice of units.
        unit: usize,
        /// The device.
        source: SourceId,
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
    planner: Planner<'a>,
    statistics: Option<&'a Statistics>,
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
    /// were attached with. It plans with the default prices.
    #[must_use]
    pub const fn new(units: &'a [Unit<P, R, L>], domain: &'a DmaDomain<G>) -> Self {
        Self { units, domain, planner: Planner::new(Policy::Planned), statistics: None }
    }

    /// The same with `planner` choosing the commands: its policy, its prices and what it
    /// knows of entries in use.
    #[must_use]
    pub const fn with_planner(self, planner: Planner<'a>) -> Self {
        Self { planner, ..self }
    }

    /// The same, adding what is planned for each unit to `statistics`.
    #[must_use]
    pub const fn with_statistics(self, statistics: &'a Statistics) -> Self {
        Self { statistics: Some(statistics), ..self }
    }

    /// Starts what one unit has to do; `None` if that is nothing. What cannot be done goes
    /// to `error`.
    fn start_unit(
        &self,
        own: Use,
        members: &Members,
        cover: &Cover,
        error: &mut Option<DmaFlushError>,
    ) -> Option<Started> {
        let unit = self.units.get(own.unit)?;
        let capabilities = unit.capabilities();
        let only_leaves_added = cover.change() == Change::Added && cover.depth() == Depth::Leaves;
        if only_leaves_added && !capabilities.caching_mode() {
            // Nothing can be cached of what was not there; but the change itself may sit
            // in a write buffer that the table walk does not see. A new table is another
            // matter: the one that was there before may be cached, if the batch that
            // freed it is not flushed yet.
            if !capabilities.needs_write_buffer_flush() {
                return None;
            }
            return Some(Started::ended(unit.flush_write_buffers()));
        }
        let mut submitter = unit.open();
        let planner = self.planner.with_recent(&self.domain.recent);
        let plan = planner.plan(cover, unit_limits(capabilities));
        if let Some(statistics) = self.statistics {
            statistics.add(&plan.figures(cover));
        }
        match &plan {
            Plan::Nothing => return None,
            Plan::Domain => submitter.push(Command::IotlbDomain { tag: own.tag }),
            Plan::Global => submitter.push(Command::IotlbGlobal),
            Plan::Blocks(blocks) => {
                // A large leaf may be new where a missing table is still cached (6.1).
                let depth = match capabilities.caching_mode() && cover.order() > 0 {
                    true => Depth::Tables,
                    false => cover.depth(),
                };
                let waits_for_each = blocks.waits_for_each();
                for block in blocks.clone() {
                    submitter.push(Command::IotlbPages { tag: own.tag, block, depth });
                    if waits_for_each {
                        submitter.submit();
                    }
                }
            }
        }
        self.push_devices(unit, &mut submitter, own, members, cover, error);
        Some(submitter.close())
    }

    /// Waits for one unit, and asks again where that may help: for what a device's
    /// time-out took along, and once after a refusal. Wider, because the single commands
    /// are not known any more, and because pages may be what was refused.
    fn finish_unit(&self, own: Use, started: Started) -> Result<(), DmaFlushError> {
        let Use { unit: index, tag } = own;
        let unit = self.units.get(index).ok_or(DmaFlushError::NoUnit { unit: index })?;
        let mut end = unit.finish(started);
        // The registers widen by themselves.
        let mut widens = unit.uses_queue();
        for _ in 0..RETRIES {
            let again = match end {
                Err(CommandError::DeviceTimeOut) => true,
                Err(CommandError::Refused) => core::mem::take(&mut widens),
                Ok(())
                | Err(CommandError::Deadline | CommandError::Stopped | CommandError::NeedsQueue) => {
                    false
                }
            };
            if !again {
                break;
            }
            unit.told.add(&Counters { retried: 1, ..Counters::NONE });
            let mut everything = Cover::NOTHING;
            everything.everything(Depth::Tables);
            let mut submitter = unit.open();
            submitter.push(Command::IotlbDomain { tag });
            let (members, mut gone) = (self.domain.members(), None);
            self.push_devices(unit, &mut submitter, own, &members, &everything, &mut gone);
            end = unit.finish(submitter.close());
            if let Some(gone) = gone {
                return Err(gone);
            }
        }
        end.map_err(|error| DmaFlushError::Command { unit: index, error })
    }

    /// The device-TLB commands of one unit: behind its IOTLB commands, which hardware
    /// completes first (6.5.2.12), and through the unit the devices are behind.
    ///
    /// They are planned apart: a device can be told blocks that its unit cannot. One that
    /// cannot be told at all fails the flush; the others are told nevertheless.
    fn push_devices(
        &self,
        unit: &Unit<P, R, L>,
        submitter: &mut Submitter<'_, P, R, L>,
        own: Use,
        members: &Members,
        cover: &Cover,
        error: &mut Option<DmaFlushError>,
    ) {
        let extended = unit.extended_capabilities();
        let mut planned = None;
        for device in members.devices.iter().filter(|device| device.unit == own.unit) {
            let source = device.source;
            if device.device_tlb.is_none() {
                continue;
            }
            match unit.reach(source) {
                Reach::Commands => {}
                Reach::Gone => {
                    error.get_or_insert(DmaFlushError::Gone { unit: own.unit, source });
                    continue;
                }
                Reach::Down => {
                    submitter.note(Err(CommandError::Stopped));
                    continue;
                }
            }
            let mut push = |block| {
                if let Some(command) = device.command(extended, block) {
                    submitter.push(command);
                }
            };
            match planned.get_or_insert_with(|| self.planner.plan(cover, DEVICE_LIMITS)) {
                Plan::Nothing => {}
                Plan::Domain | Plan::Global => push(Block::ALL),
                Plan::Blocks(blocks) => blocks.clone().for_each(push),
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
            } else if let Some(started) =
                self.start_unit(*own, &members, cover, &mut in_flight.error)
            {
                in_flight.units.push((*own, started));
            }
        }
        self.domain.recent.note(cover);
        in_flight
    }

    fn wait(&self, in_flight: DmaInFlight) -> Result<(), DmaFlushError> {
        let DmaInFlight { units, mut error } = in_flight;
        for (own, started) in units {
            if let Err(failed) = self.finish_unit(own, started) {
                error.get_or_insert(failed);
            }
        }
        error.map_or(Ok(()), Err)
    }
}
