//! Which CPUs may hold translations of a p2m, and how they are made to forget.
//!
//! [`GuestCpus`] belongs to one p2m. It knows which CPUs *run* the guest, which must
//! *invalidate before they enter* it again, and which flush each of them has seen.
//! [`TlbFlush`](crate::TlbFlush) flushes with it: it marks every CPU, and only those that run the guest
//! at that moment are kicked out of it and waited for.
//!
//! The order is what makes it work. The flush marks, fences, looks who runs. A CPU
//! joins the running ones, fences, looks at its mark, enters. Whoever fences second
//! sees the other: either the CPU is kicked, or it finds its mark and invalidates.
//! A mark is cleared by invalidating and by nothing else; leaving the guest does not
//! clear it, for tagged translations outlive an exit.

use core::{array, convert::Infallible, error, fmt, sync::atomic::Ordering};

use flush::{CpuSet, DomainId, LiveCpus};

use crate::sync::AtomicU64;

/// Makes the CPU that runs this forget the translations of one p2m.
pub trait Invalidate {
    /// Why it could not.
    type Error;

    /// Returns when this CPU uses no older translation of the p2m any more, whichever
    /// vCPU of the guest it runs.
    ///
    /// # Errors
    ///
    /// Anything may still be cached.
    fn invalidate(&self) -> Result<(), Self::Error>;
}

impl<V: Invalidate> Invalidate for &V {
    type Error = V::Error;

    fn invalidate(&self) -> Result<(), Self::Error> {
        (**self).invalidate()
    }
}

/// How many flushes a p2m had seen at some moment.
///
/// Who notes it at entry knows later whether there was a flush since.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Generation(u64);

impl Generation {
    /// Before the first: older than any that a p2m hands out.
    pub const NONE: Self = Self(0);
}

/// The CPUs of one p2m.
#[derive(Debug)]
pub struct GuestCpus {
    domain: DomainId,
    /// Between `enter` and `leave`.
    running: LiveCpus,
    /// Must invalidate before their next entry. A CPU outside may hold translations.
    marked: LiveCpus,
    /// Counts flushes. 64 bits are never used up.
    generation: AtomicU64,
    /// The newest generation that each CPU left the guest under.
    left_at: [AtomicU64; CpuSet::CAPACITY],
    pub(crate) counts: Counts,
}

/// What the flushes of a p2m did so far, for an operator to read.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct TlbCounts {
    /// Flushes carried out, those that had to kick nobody among them.
    pub flushes: u64,
    /// Requests that nothing had to be done for: entries were only added.
    pub added_only: u64,
    /// CPUs kicked, summed over all flushes.
    pub kicks: u64,
    /// Invalidations by a flushing CPU that was counted as running the guest.
    pub local: u64,
    /// Invalidations at entry.
    pub at_entry: u64,
    /// Flushes that gave up on a CPU.
    pub timeouts: u64,
}

#[derive(Debug, Default)]
pub(crate) struct Counts {
    pub(crate) flushes: AtomicU64,
    pub(crate) added_only: AtomicU64,
    pub(crate) kicks: AtomicU64,
    local: AtomicU64,
    at_entry: AtomicU64,
    pub(crate) timeouts: AtomicU64,
}

pub(crate) fn count(counter: &AtomicU64, more: u64) {
    counter.fetch_add(more, Ordering::Relaxed);
}

/// Why a CPU must not enter the guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EnterError<E> {
    /// Its number is [`CpuSet::CAPACITY`] or more, so it could not be kicked.
    UnknownCpu,
    /// It could not invalidate. It stays marked.
    Invalidate(E),
}

impl<E: fmt::Display> fmt::Display for EnterError<E> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::UnknownCpu => f.write_str("CPU number beyond the capacity of the CPU sets"),
            Self::Invalidate(error) => write!(f, "stale translations not invalidated: {error}"),
        }
    }
}

impl<E: error::Error> error::Error for EnterError<E> {}

impl GuestCpus {
    /// For a new p2m of `domain`: no CPU runs it, and every CPU is marked.
    ///
    /// The root page may have been another p2m's, and caches know a p2m by its root.
    #[must_use]
    pub fn new(domain: DomainId) -> Self {
        let marked = LiveCpus::new();
        marked.join_all(&all());
        Self {
            domain,
            running: LiveCpus::new(),
            marked,
            generation: AtomicU64::new(1),
            left_at: array::from_fn(|_| AtomicU64::new(0)),
            counts: Counts::default(),
        }
    }

    /// To be called before entering the guest, where one tag serves the whole p2m (EPT).
    ///
    /// Interrupts are off from before this call until the guest is entered, and a
    /// pending kick ends the stay there at once. After the stay comes
    /// [`leave`](Self::leave).
    ///
    /// # Errors
    ///
    /// The guest must not be entered then; the CPU does not count as running.
    pub fn enter<V: Invalidate>(
        &self,
        cpu: usize,
        local: &V,
    ) -> Result<Generation, EnterError<V::Error>> {
        if !self.running.join(cpu) {
            return Err(EnterError::UnknownCpu);
        }
        match self.obey(cpu, local, &self.counts.at_entry) {
            Ok(()) => Ok(self.generation()),
            Err(error) => {
                self.leave(cpu);
                Err(EnterError::Invalidate(error))
            }
        }
    }

    /// As [`enter`](Self::enter), where every vCPU has a tag of its own (NPT's ASIDs).
    ///
    /// The generation tells a vCPU whether there was a flush since its last stay: then
    /// its tag must be flushed or replaced. A mark for the whole CPU would not do, for
    /// the first vCPU to enter would clear it for the others.
    ///
    /// # Errors
    ///
    /// [`EnterError::UnknownCpu`], as for [`enter`](Self::enter).
    pub fn enter_tagged(&self, cpu: usize) -> Result<Generation, EnterError<Infallible>> {
        if !self.running.join(cpu) {
            return Err(EnterError::UnknownCpu);
        }
        self.marked.leave(cpu);
        Ok(self.generation())
    }

    /// To be called after leaving the guest, before interrupts are on again.
    pub fn leave(&self, cpu: usize) {
        // Who finds this CPU running waits for a note from after that, so it comes last.
        self.running.leave(cpu);
        self.note(cpu, self.generation());
    }

    /// Lets flushes of others proceed while this CPU is in the hypervisor, between
    /// [`enter`](Self::enter) and [`leave`](Self::leave).
    ///
    /// Not with [`enter_tagged`](Self::enter_tagged), where a CPU that does not leave
    /// has nothing to offer.
    ///
    /// # Errors
    ///
    /// The CPU could not invalidate; it stays marked and whoever waits goes on waiting.
    pub fn serve<V: Invalidate>(&self, cpu: usize, local: &V) -> Result<(), V::Error> {
        // Loaded before the look at the mark: a flush that starts in between is not
        // served, and its kick ends the next stay.
        let seen = self.generation();
        self.obey(cpu, local, &self.counts.local)?;
        self.note(cpu, seen);
        Ok(())
    }

    /// The domain whose p2m it is.
    #[must_use]
    pub fn domain(&self) -> DomainId {
        self.domain
    }

    /// How many flushes there were up to now.
    #[must_use]
    #[inline]
    pub fn generation(&self) -> Generation {
        Generation(self.generation.load(Ordering::SeqCst))
    }

    /// The CPUs that run the guest now.
    #[must_use]
    pub fn running(&self) -> CpuSet {
        self.running.snapshot()
    }

    /// Whether the CPU may hold translations that it could use without invalidating.
    #[must_use]
    pub fn may_hold(&self, cpu: usize) -> bool {
        cpu < CpuSet::CAPACITY && !self.marked.contains(cpu)
    }

    /// What was done so far.
    #[must_use]
    pub fn counts(&self) -> TlbCounts {
        let Counts { flushes, added_only, kicks, local, at_entry, timeouts } = &self.counts;
        let load = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        TlbCounts {
            flushes: load(flushes),
            added_only: load(added_only),
            kicks: load(kicks),
            local: load(local),
            at_entry: load(at_entry),
            timeouts: load(timeouts),
        }
    }

    /// Invalidates if the CPU, which runs this, is marked.
    fn obey<V: Invalidate>(
        &self,
        cpu: usize,
        local: &V,
        counter: &AtomicU64,
    ) -> Result<(), V::Error> {
        // Cleared before the invalidation: a mark set meanwhile is for a later one.
        if !self.marked.test_and_clear(cpu) {
            return Ok(());
        }
        count(counter, 1);
        local.invalidate().inspect_err(|_| self.mark(cpu))
    }

    /// Marks one CPU again that did not invalidate.
    fn mark(&self, cpu: usize) {
        let mut one = CpuSet::new();
        if one.insert(cpu) {
            self.marked.join_all(&one);
        }
    }

    /// The CPU uses nothing older than `seen`, or looks at its mark before it does.
    fn note(&self, cpu: usize, seen: Generation) {
        if let Some(left_at) = self.left_at.get(cpu) {
            // The largest counts: an interrupt may have noted a newer one in between.
            left_at.fetch_max(seen.0, Ordering::SeqCst);
        }
    }

    /// Marks every CPU, and only then looks which of them run: from here on, entering
    /// means invalidating, and those in the set may be inside without.
    pub(crate) fn mark_all(&self) -> (Generation, CpuSet) {
        self.marked.join_all(&all());
        // Marks come first: who notes the new generation is to find its mark.
        let since = self.generation.fetch_add(1, Ordering::SeqCst).saturating_add(1);
        (Generation(since), self.running.snapshot())
    }

    /// Whether a CPU that ran at `mark_all` has been in the hypervisor since.
    pub(crate) fn has_left(&self, cpu: usize, since: Generation) -> bool {
        self.left_at.get(cpu).is_some_and(|left| left.load(Ordering::SeqCst) >= since.0)
    }
}

fn all() -> CpuSet {
    CpuSet::first(CpuSet::CAPACITY)
}

#[cfg(test)]
#[path = "cpus_tests.rs"]
mod tests;
