//! The CPU side of a flush: mark every CPU, kick the running ones, wait for them.
//!
//! [`TlbFlush`] is one p2m, seen from the CPU that flushes. The embedder brings
//! [`Cpus`]: how to force a CPU out of the guest, and how long to wait for it.

use core::{error, fmt};

use flush::{Change, Cover, CpuSet, DomainId, Flush, Tlb};

use crate::cpus::{Generation, GuestCpus, Invalidate, count};

/// What the hypervisor has to offer for a flush on other CPUs.
///
/// The CPU that flushes must not be preempted between `start` and the end of `wait`.
pub trait Cpus {
    /// A point in time after which a kicked CPU is given up on.
    type Deadline;

    /// The number of the CPU that runs this.
    fn this_cpu(&self) -> usize;

    /// Makes each of `cpus` leave the guest soon, without waiting for it.
    ///
    /// An interrupt does: one that is still pending when its CPU enters the guest has
    /// to end the stay at once. A CPU that is not in a guest may ignore it.
    fn kick(&self, cpus: &CpuSet);

    /// The point in time up to which a flush that starts now may wait.
    fn deadline(&self) -> Self::Deadline;

    /// Whether the point in time has passed.
    fn has_passed(&self, deadline: &Self::Deadline) -> bool;

    /// Called in each turn of a wait: pause, and let flushes of other CPUs proceed.
    ///
    /// An embedder that flushes between [`GuestCpus::enter`] and [`GuestCpus::leave`]
    /// calls [`GuestCpus::serve`] from here, lest two CPUs wait for each other.
    fn relax(&self);
}

/// Flushes the CPUs of one p2m.
#[derive(Debug)]
pub struct TlbFlush<'a, C, V> {
    /// The CPUs of the p2m.
    pub guest: &'a GuestCpus,
    /// The hypervisor's means.
    pub machine: &'a C,
    /// Makes the flushing CPU itself forget, should it count as running the guest.
    pub local: &'a V,
}

/// A flush of the CPUs that was started.
#[derive(Debug)]
#[must_use = "the CPUs are only known to have forgotten once it was waited for"]
pub struct Kicked<D, E> {
    awaited: CpuSet,
    since: Generation,
    deadline: Option<D>,
    outcome: Result<(), TlbError<E>>,
}

/// Why CPUs are not known to have forgotten.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TlbError<E> {
    /// These CPUs ran the guest and did not leave it before the deadline.
    StillRunning(CpuSet),
    /// The flushing CPU itself could not invalidate. It stays marked.
    Local(E),
    /// The batch is for another domain than the [`GuestCpus`]. Nothing was flushed.
    OtherDomain(DomainId),
}

impl<E: fmt::Display> fmt::Display for TlbError<E> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::StillRunning(cpus) => write!(f, "CPUs {cpus:?} did not leave the guest in time"),
            Self::Local(error) => write!(f, "the flushing CPU did not invalidate: {error}"),
            Self::OtherDomain(domain) => write!(f, "the CPUs of another domain than {domain:?}"),
        }
    }
}

impl<E: error::Error> error::Error for TlbError<E> {}

impl<C: Cpus, V: Invalidate> Flush<Tlb> for TlbFlush<'_, C, V> {
    type InFlight = Kicked<C::Deadline, V::Error>;
    type Error = TlbError<V::Error>;

    fn start(&self, domain: DomainId, cover: &Cover) -> Self::InFlight {
        let guest = self.guest;
        let nobody = |outcome| Kicked {
            awaited: CpuSet::new(),
            since: guest.generation(),
            deadline: None,
            outcome,
        };
        if domain != guest.domain() {
            return nobody(Err(TlbError::OtherDomain(domain)));
        }
        // No CPU caches that something is absent: Intel SDM volume 3C, "Creating and Using
        // Cached Translation Information"; AMD APM volume 2, 5.4.1 and 5.5.3.
        if cover.change() == Change::Added {
            count(&guest.counts.added_only, 1);
            return nobody(Ok(()));
        }
        count(&guest.counts.flushes, 1);
        let (since, mut awaited) = guest.mark_all();
        let this = self.machine.this_cpu();
        let inside = awaited.contains(this);
        awaited.remove(this);
        let deadline = (!awaited.is_empty()).then(|| {
            count(&guest.counts.kicks, awaited.len() as u64);
            self.machine.kick(&awaited);
            self.machine.deadline()
        });
        // The others are on their way out meanwhile.
        let served = if inside { guest.serve(this, self.local) } else { Ok(()) };
        Kicked { awaited, since, deadline, outcome: served.map_err(TlbError::Local) }
    }

    fn wait(&self, in_flight: Self::InFlight) -> Result<(), Self::Error> {
        let Kicked { mut awaited, since, deadline, outcome } = in_flight;
        loop {
            // Asked before the look, so that a CPU that left in time is seen in time.
            let late = deadline.as_ref().is_some_and(|deadline| self.machine.has_passed(deadline));
            let asked = awaited;
            for cpu in asked.iter() {
                if self.guest.has_left(cpu, since) {
                    awaited.remove(cpu);
                }
            }
            if awaited.is_empty() {
                return outcome;
            }
            if late {
                count(&self.guest.counts.timeouts, 1);
                return Err(TlbError::StillRunning(awaited));
            }
            self.machine.relax();
        }
    }
}

/// For hardware whose tags belong to vCPUs: the flush happens at the next entry.
///
/// Every entry passes [`GuestCpus::enter_tagged`], which shows the vCPU that there was
/// a flush. A CPU that has not left the guest's books has no entry ahead, so flushing
/// from there fails.
#[derive(Clone, Copy, Debug)]
pub struct AtNextEntry;

/// The CPU flushes between `enter_tagged` and `leave`; it has to leave first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LeaveFirst;

impl fmt::Display for LeaveFirst {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a CPU with per-vCPU tags must leave the guest before it flushes")
    }
}

impl error::Error for LeaveFirst {}

impl Invalidate for AtNextEntry {
    type Error = LeaveFirst;

    fn invalidate(&self) -> Result<(), LeaveFirst> {
        Err(LeaveFirst)
    }
}

#[cfg(test)]
#[path = "tlb_tests.rs"]
mod tests;
