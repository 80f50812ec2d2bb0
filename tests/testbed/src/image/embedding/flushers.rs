//! What flushes one domain: processors and devices, for all who ask at once.
//!
//! A [`GuestFlushes`] is the combiner of a domain, which owns both. Whoever edits its tables
//! takes a [`GuestSeat`] and flushes with it: one flush serves all who asked before it
//! began. No lock is held while a flush is waited for, and a processor that waits takes
//! interrupts, since the one that flushes may have kicked it.

use core::time::Duration;

use flush::plan::{Planner, Policy};
use flush::{Combiner, Cover, DomainId, Flush, Iotlb, Place, Seat, Tlb};
use gnttab::BATCH;
use iommu_vtd::{DmaDomain, DmaFlush, DmaFlushError, DmaInFlight, Guarded as _, Members};
use p2m::{AtNextEntry, GuestCpus, Kicked, LeaveFirst, TlbError, TlbFlush};

use super::iommu::{UnitLock, VtdUnit};
use super::{Kicks, Lock, Memory};
use crate::arch::{PROCESSORS, take_interrupts};
use crate::mmio::Registers;

/// Seats of a domain: one for each processor's hypercall, and one for an edit of the
/// hypervisor's own in the middle of it.
pub(super) const SEATS: usize = 2 * PROCESSORS;

/// Flushes a guest's processors.
pub(crate) type GuestTlb<'h> = TlbFlush<'h, Kicks, AtNextEntry>;
/// Flushes a guest's devices.
pub(crate) type GuestDma<'h> = DmaFlush<'h, Memory, Registers, UnitLock, Lock<Members>>;
/// Flushes both, for all who ask.
pub(crate) type GuestFlushes = Combiner<GuestProcessors, GuestDevices, SEATS, BATCH>;
/// The place of one who asks.
pub(crate) type GuestSeat<'g> = Seat<'g, GuestProcessors, GuestDevices, fn(), SEATS, BATCH>;

/// The right to take a [`GuestSeat`].
pub(crate) struct GuestPlace<'g>(pub(super) Place<'g, GuestProcessors, GuestDevices, SEATS, BATCH>);

impl<'g> GuestPlace<'g> {
    /// The seat, made where it stays.
    #[inline]
    pub(crate) fn seat(self) -> GuestSeat<'g> {
        self.0.seat(take_interrupts)
    }
}

/// The processors of a domain.
pub(crate) struct GuestProcessors(pub(super) GuestCpus);

impl GuestProcessors {
    /// What flushes them, for this caller alone.
    pub(super) const fn alone(&self) -> GuestTlb<'_> {
        TlbFlush { guest: &self.0, machine: &Kicks, local: &AtNextEntry }
    }
}

// The set of processors is looked up when a flush starts, by the one that carries it out.
impl Flush<Tlb> for GuestProcessors {
    type InFlight = Kicked<Duration, LeaveFirst>;
    type Error = TlbError<LeaveFirst>;

    fn start(&self, domain: DomainId, cover: &Cover) -> Self::InFlight {
        self.alone().start(domain, cover)
    }

    fn wait(&self, in_flight: Self::InFlight) -> Result<(), Self::Error> {
        self.alone().wait(in_flight)
    }
}

/// The devices of a domain, the tables they walk, and how commands for them are chosen.
pub(crate) struct GuestDevices {
    pub(super) dma: DmaDomain<Lock<Members>>,
    units: &'static [VtdUnit],
    policy: Lock<Policy>,
}

impl GuestDevices {
    /// Those of `dma`, behind `units`.
    pub(super) fn new(dma: DmaDomain<Lock<Members>>, units: &'static [VtdUnit]) -> Self {
        Self { dma, units, policy: Lock::new(Policy::Planned) }
    }

    /// What flushes them, for this caller alone.
    pub(super) fn alone(&self) -> GuestDma<'_> {
        let policy = self.policy.with(|policy| *policy);
        DmaFlush::new(self.units, &self.dma).with_planner(Planner::new(policy))
    }

    /// Choose commands like this from now on.
    pub(super) fn plan_by(&self, policy: Policy) {
        self.policy.with(|own| *own = policy);
    }
}

impl Flush<Iotlb> for GuestDevices {
    type InFlight = DmaInFlight;
    type Error = DmaFlushError;

    fn start(&self, domain: DomainId, cover: &Cover) -> Self::InFlight {
        self.alone().start(domain, cover)
    }

    fn wait(&self, in_flight: Self::InFlight) -> Result<(), Self::Error> {
        self.alone().wait(in_flight)
    }
}
