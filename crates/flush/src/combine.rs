//! One flush for many callers: the leader flushes for all who asked before.
//!
//! Many CPUs may flush one domain at once. A [`Combiner`] belongs to the domain and
//! owns its hardware. Each caller has a [`Seat`], which stands in for the hardware of a
//! batch: [`Batch::flush`](crate::Batch::flush) publishes its covers there and takes a
//! ticket. One of the callers becomes the leader, reads what all tickets so far ask
//! for, and flushes once of each kind; the others wait, serving their own interrupts,
//! and hold no lock meanwhile. A ticket is served only by a flush that began after it
//! was taken.
//!
//! If all of K tickets are taken before the first flush ends, at most two flushes
//! happen. Callers that come one after another need one each.

mod desk;
mod error;
mod seat;
mod slots;

use core::sync::atomic::Ordering;

pub use error::{CombineError, Refused};
pub use seat::{Asked, Place, Seat};

use crate::{
    Cover, DomainId, Flush, Iotlb, Tlb,
    sync::{AtomicBool, AtomicU64, array_of, const_constructor},
};
use desk::Desk;

const WORDS: usize = 4;
const BITS: usize = u64::BITS as usize;

/// The flushes of one domain, combined over up to `SEATS` callers at a time.
///
/// Each seat publishes up to `SLOTS` aligned blocks of each kind; what needs more
/// becomes everything. 32 are enough for a batch of 32 single frames. A seat takes
/// 16 bytes a slot, and up to 64 more.
#[derive(Debug)]
pub struct Combiner<T, I, const SEATS: usize, const SLOTS: usize = 32> {
    domain: DomainId,
    tlb: T,
    iotlb: I,
    /// How many tickets were taken; they are numbered from 1.
    requested: AtomicU64,
    /// Whether somebody leads.
    leading: AtomicBool,
    on_cpus: Settled,
    on_units: Settled,
    flushes: AtomicU64,
    /// Which seats have something published, so that a leader need not look at all.
    pending: [AtomicU64; WORDS],
    desks: [Desk<SLOTS>; SEATS],
}

impl<T, I, const SEATS: usize, const SLOTS: usize> Combiner<T, I, SEATS, SLOTS> {
    const_constructor! {
        /// A combiner that flushes `domain` with `tlb` and `iotlb`.
        ///
        /// Whoever leads flushes for the others too, from the CPU it runs on. So both
        /// must look up the CPUs and units when a flush starts, not earlier.
        #[must_use]
        pub const fn new(domain: DomainId, tlb: T, iotlb: I) -> Self {
            const { assert!(SEATS <= WORDS * BITS, "at most 256 seats") };
            const { assert!(SLOTS > 0, "a seat needs a slot to ask for anything") };
            Self {
                domain,
                tlb,
                iotlb,
                requested: AtomicU64::new(0),
                leading: AtomicBool::new(false),
                on_cpus: Settled::new(),
                on_units: Settled::new(),
                flushes: AtomicU64::new(0),
                pending: array_of!(AtomicU64::new(0)),
                desks: array_of!(Desk::new()),
            }
        }
    }

    /// The domain whose translations are flushed.
    #[must_use]
    pub fn domain(&self) -> DomainId {
        self.domain
    }

    /// What flushes the CPUs, and whatever else it knows of them.
    #[must_use]
    pub const fn tlb(&self) -> &T {
        &self.tlb
    }

    /// What flushes the devices, and whatever else it knows of them.
    #[must_use]
    pub const fn iotlb(&self) -> &I {
        &self.iotlb
    }

    /// Both, for a domain that has ended: nobody has a seat any more.
    #[must_use]
    pub fn into_hardware(self) -> (T, I) {
        (self.tlb, self.iotlb)
    }

    /// How many tickets were taken since the start: requests, each of one batch.
    #[must_use]
    pub fn tickets(&self) -> u64 {
        self.requested.load(Ordering::Relaxed)
    }

    /// How many flushes were carried out since the start, failed ones included.
    ///
    /// Both kinds that one leader flushes count as one.
    #[must_use]
    pub fn flushes(&self) -> u64 {
        self.flushes.load(Ordering::Relaxed)
    }

    /// Takes the right to the seat `number`, from 0 to `SEATS` - 1, until it is dropped.
    ///
    /// `None` if there is no such seat or somebody has it. [`Place::seat`] makes the seat,
    /// which is large, where it stays.
    pub fn place(&self, number: usize) -> Option<Place<'_, T, I, SEATS, SLOTS>> {
        Place::take(self, number)
    }

    /// Which seats but the leader's own have something published, read after the tickets
    /// were counted.
    fn others(&self, leader: usize) -> [u64; WORDS] {
        let mut seats = [0; WORDS];
        for (seats, word) in seats.iter_mut().zip(&self.pending) {
            *seats = word.load(Ordering::Relaxed);
        }
        if let Some(seats) = seats.get_mut(leader / BITS) {
            *seats &= !(1 << (leader % BITS));
        }
        seats
    }

    /// Adds what these seats ask for and no leader served yet.
    fn collect(&self, seats: [u64; WORDS], tlb: &mut Cover, iotlb: &mut Cover) {
        // Only leaders write these, and this is the one there is.
        let on_cpus = self.on_cpus.completed.load(Ordering::Relaxed);
        let on_units = self.on_units.completed.load(Ordering::Relaxed);
        for (mut seats, desks) in seats.into_iter().zip(self.desks.chunks(BITS)) {
            while let Some(desk) = desks.get(seats.trailing_zeros() as usize) {
                seats &= seats - 1;
                desk.tlb.add_to(tlb, on_cpus);
                desk.iotlb.add_to(iotlb, on_units);
            }
        }
    }
}

impl<T: Flush<Tlb>, I: Flush<Iotlb>, const SEATS: usize, const SLOTS: usize>
    Combiner<T, I, SEATS, SLOTS>
{
    /// Takes the seat `number`, from 0 to `SEATS` - 1, until it is dropped.
    ///
    /// `None` if there is no such seat or somebody has it. Give each CPU its own
    /// number. `relax` runs again and again while another one's flush is awaited; it
    /// must serve this CPU's flush interrupts, since the leader may be waiting for them.
    #[inline]
    pub fn seat<R: Fn()>(
        &self,
        number: usize,
        relax: R,
    ) -> Option<Seat<'_, T, I, R, SEATS, SLOTS>> {
        Some(self.place(number)?.seat(relax))
    }

    /// Flushes all that was asked for, and says how far each kind got and why not.
    ///
    /// Only the leader calls it. What it asks for itself it knows: only what the others do
    /// has to be read.
    fn lead(
        &self,
        own: &Own<'_>,
        tlb_failed: impl FnOnce(T::Error),
        iotlb_failed: impl FnOnce(I::Error),
    ) {
        // Not a load: that might miss tickets that were taken long ago, and each of them
        // would need one more flush.
        let through = self.requested.fetch_add(0, Ordering::Acquire);
        let others = self.others(own.number);
        if others == [0; WORDS] {
            return self.flush_both(through, (own.tlb, own.iotlb), tlb_failed, iotlb_failed);
        }
        let (mut tlb, mut iotlb) = (own.tlb.clone(), own.iotlb.clone());
        self.collect(others, &mut tlb, &mut iotlb);
        self.flush_both(through, (&tlb, &iotlb), tlb_failed, iotlb_failed);
    }

    /// Flushes for all tickets up to `through`.
    fn flush_both(
        &self,
        through: u64,
        (tlb, iotlb): (&Cover, &Cover),
        tlb_failed: impl FnOnce(T::Error),
        iotlb_failed: impl FnOnce(I::Error),
    ) {
        let Self { domain, tlb: cpus, iotlb: units, .. } = self;
        self.flushes.fetch_add(1, Ordering::Relaxed);
        // Devices first: their units work while the CPUs are being kicked.
        let on_units = (!iotlb.is_nothing()).then(|| units.start(*domain, iotlb));
        let on_cpus = (!tlb.is_nothing()).then(|| cpus.start(*domain, tlb));
        match on_cpus.map_or(Ok(()), |token| cpus.wait(token)) {
            Ok(()) => self.on_cpus.complete(through),
            Err(error) => {
                tlb_failed(error);
                self.on_cpus.fail(through);
            }
        }
        match on_units.map_or(Ok(()), |token| units.wait(token)) {
            Ok(()) => self.on_units.complete(through),
            Err(error) => {
                iotlb_failed(error);
                self.on_units.fail(through);
            }
        }
    }
}

/// What the leader itself asks for, as it keeps it besides its slots.
struct Own<'o> {
    /// Its seat.
    number: usize,
    tlb: &'o Cover,
    iotlb: &'o Cover,
}

/// How far one kind got: the last ticket whose flush completed, and that failed.
///
/// Both only grow: one leads at a time, and counts at least as many tickets as the one
/// before. A ticket that is at most `completed` was covered even if an earlier flush
/// failed for it, because its owner leaves the cover in place until redeeming it. That
/// flush began after the ticket was taken, so later ones need not cover it again.
#[derive(Debug)]
struct Settled {
    completed: AtomicU64,
    failed: AtomicU64,
}

impl Settled {
    const_constructor! {
        const fn new() -> Self {
            Self { completed: AtomicU64::new(0), failed: AtomicU64::new(0) }
        }
    }

    fn complete(&self, through: u64) {
        self.completed.store(through, Ordering::Release);
    }

    fn fail(&self, through: u64) {
        self.failed.store(through, Ordering::Release);
    }

    /// How a ticket ended: `None` if it did not, `false` if its flush failed.
    fn outcome(&self, ticket: u64) -> Option<bool> {
        if self.completed.load(Ordering::Acquire) >= ticket {
            Some(true)
        } else if self.failed.load(Ordering::Acquire) >= ticket {
            Some(false)
        } else {
            None
        }
    }
}

/// The right to flush for all, given up when dropped.
struct Lead<'a>(&'a AtomicBool);

impl<'a> Lead<'a> {
    /// `None` if somebody leads.
    fn take(leading: &'a AtomicBool) -> Option<Self> {
        // Looked at before it is written, so that many who wait do not fight for the line.
        if leading.load(Ordering::Relaxed) {
            return None;
        }
        let won = leading.compare_exchange(false, true, Ordering::Acquire, Ordering::Relaxed);
        won.is_ok().then(|| Self(leading))
    }
}

impl Drop for Lead<'_> {
    fn drop(&mut self) {
        self.0.store(false, Ordering::Release);
    }
}

#[cfg(test)]
#[path = "combine_tests.rs"]
mod tests;
