//! One caller's place at a combiner; to a batch it is the hardware.

use core::{
    cell::{Cell, Ref, RefCell},
    fmt,
    sync::atomic::Ordering,
};

use super::{
    BITS, CombineError, Combiner, Lead, Own, Refused, Settled,
    desk::{Desk, Request},
};
use crate::{Cover, DomainId, Flush, Hardware, Iotlb, Tlb};

/// How many tickets one wait takes when flushes that others led fail.
///
/// The next one is mostly led by the caller itself, which then learns the reason.
const TICKETS: usize = 2;

/// The right to one of a [`Combiner`]'s seats, until it is dropped or the seat is.
///
/// It is three words, while a [`Seat`] keeps what it asks for. So whether there is one is found
/// out by passing places around, and the seat is made where it stays.
#[must_use = "take the seat"]
pub struct Place<'c, T, I, const SEATS: usize, const SLOTS: usize> {
    combiner: &'c Combiner<T, I, SEATS, SLOTS>,
    number: usize,
    desk: &'c Desk<SLOTS>,
}

impl<'c, T, I, const SEATS: usize, const SLOTS: usize> Place<'c, T, I, SEATS, SLOTS> {
    /// `None` if there is no such place, or somebody has it.
    pub(super) fn take(combiner: &'c Combiner<T, I, SEATS, SLOTS>, number: usize) -> Option<Self> {
        let desk = combiner.desks.get(number)?;
        let taken = desk.taken.swap(true, Ordering::Acquire);
        // Made only if it was free: dropping one frees it.
        (!taken).then(|| Self { combiner, number, desk })
    }
}

impl<'c, T: Flush<Tlb>, I: Flush<Iotlb>, const SEATS: usize, const SLOTS: usize>
    Place<'c, T, I, SEATS, SLOTS>
{
    /// The seat. `relax` is as for [`Combiner::seat`].
    #[inline]
    pub fn seat<R: Fn()>(self, relax: R) -> Seat<'c, T, I, R, SEATS, SLOTS> {
        let (combiner, desk) = (self.combiner, self.desk);
        Seat {
            place: self,
            relax,
            tlb: Side::new(&desk.tlb, &combiner.on_cpus),
            iotlb: Side::new(&desk.iotlb, &combiner.on_units),
        }
    }
}

impl<T, I, const SEATS: usize, const SLOTS: usize> Drop for Place<'_, T, I, SEATS, SLOTS> {
    fn drop(&mut self) {
        self.desk.taken.store(false, Ordering::Release);
    }
}

impl<T, I, const SEATS: usize, const SLOTS: usize> fmt::Debug for Place<'_, T, I, SEATS, SLOTS> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Place").field("number", &self.number).finish_non_exhaustive()
    }
}

/// One caller's place at a [`Combiner`], used in the place of the hardware.
///
/// It belongs to one CPU at a time, and a thread that has one may not be interrupted
/// by another flush of the same domain: the interrupted one may be the leader, for
/// which the other would wait for ever.
#[must_use = "hand its `hardware` to a batch"]
pub struct Seat<'c, T, I, R, const SEATS: usize, const SLOTS: usize>
where
    T: Flush<Tlb>,
    I: Flush<Iotlb>,
{
    relax: R,
    tlb: Side<'c, T::Error, SLOTS>,
    iotlb: Side<'c, I::Error, SLOTS>,
    place: Place<'c, T, I, SEATS, SLOTS>,
}

/// What a seat asks of one kind of hardware.
struct Side<'c, E, const SLOTS: usize> {
    request: &'c Request<SLOTS>,
    /// What is published, exactly, for when this seat leads; nothing while it is idle. No
    /// code of others runs while it is written.
    own: RefCell<Cover>,
    settled: &'c Settled,
    stage: Cell<Stage>,
    /// The error of a flush that this seat led, until it is handed out.
    led: Cell<Option<E>>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    /// Nothing is asked for.
    Idle,
    /// The cover is published.
    Published,
    /// The cover is published, and whoever counts this ticket reads it.
    Ticket(u64),
}

/// A flush that a seat was asked for, and will have somebody carry out.
#[derive(Debug)]
#[must_use = "only waiting for it makes anybody flush"]
pub struct Asked(Result<(), Refused>);

impl<'c, T, I, R, const SEATS: usize, const SLOTS: usize> Seat<'c, T, I, R, SEATS, SLOTS>
where
    T: Flush<Tlb>,
    I: Flush<Iotlb>,
    R: Fn(),
{
    /// What a batch flushes with.
    #[must_use]
    pub fn hardware(&self) -> Hardware<'_, Self, Self> {
        Hardware { tlb: self, iotlb: self }
    }

    fn ask<E>(&self, side: &Side<'c, E, SLOTS>, domain: DomainId, cover: &Cover) -> Asked {
        if domain != self.place.combiner.domain {
            return Asked(Err(Refused::OtherDomain));
        }
        if side.stage.get() != Stage::Idle {
            return Asked(Err(Refused::InFlight));
        }
        let was_idle = self.is_idle();
        // A flush led for others may have failed while this side had nothing to redeem.
        side.led.set(None);
        side.own.borrow_mut().clone_from(cover);
        side.request.publish(cover);
        side.stage.set(Stage::Published);
        if was_idle && let Some((word, bit)) = self.place() {
            word.fetch_or(bit, Ordering::Relaxed);
        }
        Asked(Ok(()))
    }

    fn redeem<E>(&self, side: &Side<'c, E, SLOTS>, asked: Asked) -> Result<(), CombineError<E>> {
        asked.0.map_err(CombineError::Refused)?;
        let mut result = Err(CombineError::Refused(Refused::NotAsked));
        for _ in 0..TICKETS {
            let Some(ticket) = self.ticket(side) else { break };
            result = if self.is_served(side.settled, ticket) {
                Ok(())
            } else {
                // What failed is never completed later: another try has a ticket of its own.
                side.stage.set(Stage::Published);
                Err(side.led.take().map_or(CombineError::Joined, CombineError::Led))
            };
            if !matches!(result, Err(CombineError::Joined)) {
                break;
            }
        }
        self.withdraw(side);
        result
    }

    /// The ticket of `side`, taken now if there is none; `None` if nothing is published.
    fn ticket<E>(&self, side: &Side<'c, E, SLOTS>) -> Option<u64> {
        match side.stage.get() {
            Stage::Idle => None,
            Stage::Ticket(ticket) => Some(ticket),
            Stage::Published => {
                self.tlb.await_ticket();
                self.iotlb.await_ticket();
                // 64 bits of tickets do not run out.
                let ticket = self.place.combiner.requested.fetch_add(1, Ordering::Release) + 1;
                self.tlb.cover_with(ticket);
                self.iotlb.cover_with(ticket);
                Some(ticket)
            }
        }
    }

    /// Waits until the flush of `ticket` ended, or carries it out; `false` if it failed.
    fn is_served(&self, settled: &Settled, ticket: u64) -> bool {
        loop {
            if let Some(outcome) = settled.outcome(ticket) {
                return outcome;
            }
            match Lead::take(&self.place.combiner.leading) {
                None => (self.relax)(),
                Some(lead) => {
                    // Whoever led before may have served this ticket since the look above.
                    if settled.outcome(ticket).is_none() {
                        let (tlb, iotlb) = (self.tlb.own(), self.iotlb.own());
                        self.place.combiner.lead(
                            &Own { number: self.place.number, tlb: &tlb, iotlb: &iotlb },
                            |error| self.tlb.led.set(Some(error)),
                            |error| self.iotlb.led.set(Some(error)),
                        );
                    }
                    drop(lead);
                }
            }
        }
    }
}

impl<'c, T, I, R, const SEATS: usize, const SLOTS: usize> Seat<'c, T, I, R, SEATS, SLOTS>
where
    T: Flush<Tlb>,
    I: Flush<Iotlb>,
{
    /// Stops asking; only the owner does, and only after its ticket ended.
    fn withdraw<E>(&self, side: &Side<'c, E, SLOTS>) {
        if side.stage.replace(Stage::Idle) == Stage::Idle {
            return;
        }
        side.own.borrow_mut().clear();
        if self.is_idle()
            && let Some((word, bit)) = self.place()
        {
            word.fetch_and(!bit, Ordering::Relaxed);
        }
    }

    fn is_idle(&self) -> bool {
        self.tlb.stage.get() == Stage::Idle && self.iotlb.stage.get() == Stage::Idle
    }

    /// Where it is told that this seat has something published.
    fn place(&self) -> Option<(&'c crate::sync::AtomicU64, u64)> {
        let word = self.place.combiner.pending.get(self.place.number / BITS)?;
        Some((word, 1 << (self.place.number % BITS)))
    }
}

impl<T, I, R, const SEATS: usize, const SLOTS: usize> Drop for Seat<'_, T, I, R, SEATS, SLOTS>
where
    T: Flush<Tlb>,
    I: Flush<Iotlb>,
{
    fn drop(&mut self) {
        self.withdraw(&self.tlb);
        self.withdraw(&self.iotlb);
    }
}

impl<T, I, R, const SEATS: usize, const SLOTS: usize> fmt::Debug for Seat<'_, T, I, R, SEATS, SLOTS>
where
    T: Flush<Tlb>,
    I: Flush<Iotlb>,
{
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut seat = f.debug_struct("Seat");
        seat.field("number", &self.place.number);
        seat.field("tlb", &self.tlb.stage.get()).field("iotlb", &self.iotlb.stage.get());
        seat.finish_non_exhaustive()
    }
}

impl<'c, E, const SLOTS: usize> Side<'c, E, SLOTS> {
    fn new(request: &'c Request<SLOTS>, settled: &'c Settled) -> Self {
        Self {
            request,
            own: RefCell::new(Cover::new()),
            settled,
            stage: Cell::new(Stage::Idle),
            led: Cell::new(None),
        }
    }

    /// What this side asks for itself and nobody flushed yet.
    fn own(&self) -> Ref<'_, Cover> {
        if let Stage::Ticket(ticket) = self.stage.get()
            && self.settled.outcome(ticket) == Some(true)
        {
            self.own.borrow_mut().clear();
        }
        self.own.borrow()
    }

    /// The ticket taken next covers what is published.
    fn await_ticket(&self) {
        if self.stage.get() == Stage::Published {
            self.request.take_next();
        }
    }

    /// A ticket just taken covers whatever was published before it.
    fn cover_with(&self, ticket: u64) {
        if self.stage.get() == Stage::Published {
            self.request.took(ticket);
            self.stage.set(Stage::Ticket(ticket));
        }
    }
}

impl<T, I, R, const SEATS: usize, const SLOTS: usize> Flush<Tlb> for Seat<'_, T, I, R, SEATS, SLOTS>
where
    T: Flush<Tlb>,
    I: Flush<Iotlb>,
    R: Fn(),
{
    type InFlight = Asked;
    type Error = CombineError<T::Error>;

    fn start(&self, domain: DomainId, cover: &Cover) -> Asked {
        self.ask(&self.tlb, domain, cover)
    }

    fn wait(&self, in_flight: Asked) -> Result<(), Self::Error> {
        self.redeem(&self.tlb, in_flight)
    }
}

impl<T, I, R, const SEATS: usize, const SLOTS: usize> Flush<Iotlb>
    for Seat<'_, T, I, R, SEATS, SLOTS>
where
    T: Flush<Tlb>,
    I: Flush<Iotlb>,
    R: Fn(),
{
    type InFlight = Asked;
    type Error = CombineError<I::Error>;

    fn start(&self, domain: DomainId, cover: &Cover) -> Asked {
        self.ask(&self.iotlb, domain, cover)
    }

    fn wait(&self, in_flight: Asked) -> Result<(), Self::Error> {
        self.redeem(&self.iotlb, in_flight)
    }
}
