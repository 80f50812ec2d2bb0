//! From a scope's path to the devices it names, through the buses of the machine.
//!
//! Bus numbers behind bridges are configured at run time, so a path can only be
//! followed with the help of [`Topology`], which the embedder reads from the bridges.

use super::{Dmar, HardwareUnit, Scope, ScopeKind};
use crate::SourceId;

/// Buses behind a PCI bridge, as its configuration space says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Bridge {
    /// The bus directly behind it.
    pub secondary: u8,
    /// The last bus behind it.
    pub subordinate: u8,
}

/// The buses of the machine.
pub trait Topology {
    /// The buses behind `source` of `segment`, or `None` if that is no bridge.
    fn bridge(&self, segment: u16, source: SourceId) -> Option<Bridge>;
}

impl Scope<'_> {
    /// The requester at the end of the path, or `None` if a hop is not a bridge.
    pub fn resolve(&self, segment: u16, topology: &impl Topology) -> Option<SourceId> {
        let mut bus = self.start_bus();
        let mut found = None;
        for (device, function) in self.path() {
            if let Some(bridge) = found {
                bus = topology.bridge(segment, bridge)?.secondary;
            }
            found = Some(SourceId::at(bus, device, function)?);
        }
        found
    }

    /// Whether the scope names `source`: as the endpoint itself, or as a device
    /// at or below the bridge.
    pub fn names(&self, segment: u16, source: SourceId, topology: &impl Topology) -> bool {
        let Some(end) = self.resolve(segment, topology) else { return false };
        match self.kind() {
            ScopeKind::Endpoint | ScopeKind::IoApic | ScopeKind::Hpet | ScopeKind::Namespace => {
                end == source
            }
            ScopeKind::Bridge => {
                let below = |bridge: Bridge| {
                    (bridge.secondary..=bridge.subordinate).contains(&source.bus())
                };
                end == source || topology.bridge(segment, end).is_some_and(below)
            }
            ScopeKind::Other(_) => false,
        }
    }
}

impl<'a> Dmar<'a> {
    /// The unit that translates for `source` of `segment`: one that names it, or else
    /// the segment's unit for all other devices.
    pub fn unit_for(
        &self,
        segment: u16,
        source: SourceId,
        topology: &impl Topology,
    ) -> Option<HardwareUnit<'a>> {
        let here = || self.units().filter(|unit| unit.segment() == segment);
        here()
            .find(|unit| unit.scopes().any(|scope| scope.names(segment, source, topology)))
            .or_else(|| here().find(HardwareUnit::includes_all))
    }
}
