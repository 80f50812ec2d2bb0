//! The invalidation queue: a ring of commands, and who waits for which of them.
//!
//! A [`Ticket`] stands for one submission: some commands and the wait behind them.
//! It ends exactly one way: done, aborted, failed, or past its deadline. The queue
//! itself never waits; every method runs under the unit's lock for a bounded time.

use flush::Mfn;

use crate::spec::descriptor::Descriptor;
use crate::spec::registers::{IQH, IQT};
use crate::{Mmio, Platform};

mod recover;

/// How many submissions may be in flight at a time, one status word each.
pub(crate) const SLOTS: usize = 64;

/// Commands of one submission at most; with its wait they fit the smallest ring.
pub(crate) const PIECE: usize = 64;

/// The status word nobody waits for: target of waits that took a bad command's place.
const SCRATCH: usize = SLOTS;

/// Written by software into the status word of a submission that hardware will not
/// complete any more, so that whoever polls it looks up how it ended.
const NUDGE: u64 = u64::MAX;

/// Descriptors in one page of the ring.
const PER_PAGE: u64 = 256;

/// Pages of memory for one unit's queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct QueueMemory {
    /// First page of the ring; naturally aligned to its 2^`order` pages.
    pub ring: Mfn,
    /// Binary logarithm of the ring's pages of 256 descriptors, 0 to 7 (11.4.9.3).
    pub order: u8,
    /// One page for status words, written by hardware.
    pub status: Mfn,
}

impl QueueMemory {
    const fn capacity(&self) -> u64 {
        PER_PAGE << self.order
    }

    /// Address of the status word of `slot`.
    const fn status_address(&self, slot: usize) -> u64 {
        (self.status.get() << 12) + 8 * slot as u64
    }

    /// Whether something was written into the status word of `ticket`: time to redeem it.
    pub(crate) fn looks_ended(&self, platform: &impl Platform, ticket: &Ticket) -> bool {
        platform.read(self.status, usize::from(ticket.slot)) != 0
    }
}

/// One submission in flight. It is spent by [`Queue::redeem`] or [`Queue::expire`].
#[derive(Debug)]
#[must_use = "a submission nobody waits for occupies its status word for ever"]
pub(crate) struct Ticket {
    slot: u8,
    data: u32,
}

#[cfg(test)]
impl Ticket {
    /// The status word of the submission.
    pub(crate) const fn word(&self) -> usize {
        self.slot as usize
    }
}

static_assertions::assert_not_impl_any!(Ticket: Clone, Copy);

/// How a submission ended that hardware did not complete.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Ended {
    /// A device did not answer in time, and hardware dropped every wait it had fetched.
    /// What the submission's commands did is unknown: submit again.
    Aborted,
    /// Hardware refused one of its commands.
    Failed,
}

/// Why nothing was submitted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Refused {
    /// The ring or the status words are in use; some will be free later.
    Full,
    /// The queue does not run.
    Stopped,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Slot {
    Free,
    /// Positions of the first command and of the wait; the data the wait writes.
    InFlight {
        first: u64,
        wait: u64,
        data: u32,
    },
    /// Past its deadline, yet still known to hardware: not to be used again before
    /// hardware has written it, or dropped it.
    Retired {
        first: u64,
        wait: u64,
        data: u32,
    },
    /// Over, and not yet redeemed.
    Over {
        data: u32,
        how: Ended,
    },
    /// Failed, not yet redeemed, and hardware may write the word all the same: it is
    /// retired next.
    Lost {
        data: u32,
    },
}

impl Slot {
    /// A word that a wait outside the ring may write; its positions match nothing.
    const fn retired(data: u32) -> Self {
        Self::Retired { first: u64::MAX, wait: u64::MAX, data }
    }
}

/// State of one ring. Positions count descriptors from the start and never wrap.
#[derive(Debug)]
pub(crate) struct Queue {
    running: bool,
    /// Position of the next descriptor to write.
    tail: u64,
    /// Position up to which hardware is known to have fetched.
    head: u64,
    last_data: u32,
    slots: [Slot; SLOTS],
}

/// What a queue works on: its memory, the unit's registers, the platform.
pub(crate) struct Port<'a, P, R> {
    pub(crate) memory: &'a QueueMemory,
    pub(crate) registers: &'a R,
    pub(crate) platform: &'a P,
}

impl<P: Platform, R: Mmio> Port<'_, P, R> {
    fn write(&self, position: u64, descriptor: Descriptor) {
        let index = position % self.memory.capacity();
        let page = Mfn::new(self.memory.ring.get() + index / PER_PAGE);
        let word = 2 * (index % PER_PAGE) as usize;
        self.platform.write(page, word, descriptor.low);
        self.platform.write(page, word + 1, descriptor.high);
    }

    fn write_tail(&self, position: u64) {
        self.registers.write64(IQT, (position % self.memory.capacity()) << 4);
    }

    fn status(&self, slot: usize) -> u64 {
        self.platform.read(self.memory.status, slot)
    }

    fn set_status(&self, slot: usize, value: u64) {
        self.platform.write(self.memory.status, slot, value);
    }

    fn scratch_wait(&self) -> Descriptor {
        Descriptor::wait(self.memory.status_address(SCRATCH), 1)
    }
}

impl Queue {
    pub(crate) const fn new() -> Self {
        Self { running: false, tail: 0, head: 0, last_data: 0, slots: [Slot::Free; SLOTS] }
    }

    /// Goes back to an empty ring, after the status register showed the queue as off
    /// (11.4.4.2). It takes submissions again once it [runs](Self::run).
    ///
    /// Submissions of an earlier life fail. Their status words are free again: hardware
    /// that has turned its queue off carries no wait out any more. One that did would
    /// write data that no submission of this life waits for, which costs that one its
    /// deadline and makes none succeed.
    pub(crate) fn reset<P: Platform, R: Mmio>(&mut self, port: &Port<'_, P, R>) {
        for (index, slot) in self.slots.iter_mut().enumerate() {
            match *slot {
                Slot::InFlight { data, .. } | Slot::Lost { data } => {
                    *slot = Slot::Over { data, how: Ended::Failed };
                    port.set_status(index, NUDGE);
                }
                Slot::Retired { .. } => *slot = Slot::Free,
                Slot::Free | Slot::Over { .. } => {}
            }
        }
        self.running = false;
        (self.tail, self.head) = (0, 0);
    }

    /// Takes submissions: hardware has the queue on, at the start of the ring.
    pub(crate) fn run(&mut self) {
        self.running = true;
    }

    /// Takes no more submissions.
    pub(crate) fn stop(&mut self) {
        self.running = false;
    }

    /// Whether hardware has fetched everything and nobody waits for anything.
    pub(crate) fn is_idle<P: Platform, R: Mmio>(&mut self, port: &Port<'_, P, R>) -> bool {
        self.update_head(port);
        self.head == self.tail
            && self.slots.iter().all(|slot| !matches!(slot, Slot::InFlight { .. }))
    }

    /// Hands `commands` (at most [`PIECE`]) and one wait to hardware, with one tail write.
    pub(crate) fn submit<P: Platform, R: Mmio>(
        &mut self,
        port: &Port<'_, P, R>,
        commands: &[Descriptor],
    ) -> Result<Ticket, Refused> {
        if !self.running {
            return Err(Refused::Stopped);
        }
        let needed = commands.len() as u64 + 1;
        // One descriptor stays unused: a full ring would look empty (6.5.2).
        if self.room(port) < needed {
            self.update_head(port);
            if self.room(port) < needed {
                return Err(Refused::Full);
            }
        }
        let slot = self.free_slot(port).ok_or(Refused::Full)?;
        // 0 means "not yet", all ones is the nudge's low half.
        self.last_data = if self.last_data >= u32::MAX - 1 { 1 } else { self.last_data + 1 };
        let (first, data) = (self.tail, self.last_data);
        port.set_status(slot, 0);
        let mut position = first;
        for command in commands {
            port.write(position, *command);
            position += 1;
        }
        port.write(position, Descriptor::wait(port.memory.status_address(slot), data));
        self.tail = position + 1;
        if let Some(entry) = self.slots.get_mut(slot) {
            *entry = Slot::InFlight { first, wait: position, data };
        }
        port.write_tail(self.tail);
        Ok(Ticket { slot: slot as u8, data })
    }

    /// How `ticket` ended, or the ticket back while it is in flight.
    pub(crate) fn redeem<P: Platform, R: Mmio>(
        &mut self,
        port: &Port<'_, P, R>,
        ticket: Ticket,
    ) -> Result<Result<(), Ended>, Ticket> {
        let slot = usize::from(ticket.slot);
        let status = port.status(slot);
        let Some(entry) = self.slots.get_mut(slot) else { return Ok(Err(Ended::Failed)) };
        let end = match *entry {
            Slot::InFlight { data, .. } if data == ticket.data => {
                if status != u64::from(data) {
                    return Err(ticket);
                }
                Ok(())
            }
            Slot::Over { data, how } if data == ticket.data => Err(how),
            Slot::Lost { data } if data == ticket.data => {
                *entry = Slot::retired(data);
                return Ok(Err(Ended::Failed));
            }
            // Not reached: only the ticket itself moves its slot on.
            Slot::Free
            | Slot::InFlight { .. }
            | Slot::Retired { .. }
            | Slot::Over { .. }
            | Slot::Lost { .. } => return Ok(Err(Ended::Failed)),
        };
        *entry = Slot::Free;
        Ok(end)
    }

    /// Gives up on `ticket`: how it ended after all, or `None`, and then its status word
    /// stays out of use until hardware is done with it.
    pub(crate) fn expire<P: Platform, R: Mmio>(
        &mut self,
        port: &Port<'_, P, R>,
        ticket: Ticket,
    ) -> Option<Result<(), Ended>> {
        match self.redeem(port, ticket) {
            Ok(end) => Some(end),
            Err(ticket) => {
                let entry = self.slots.get_mut(usize::from(ticket.slot));
                if let Some(entry) = entry
                    && let Slot::InFlight { first, wait, data } = *entry
                {
                    *entry = Slot::Retired { first, wait, data };
                }
                None
            }
        }
    }

    /// Goes to `position` of a ring that is idle there.
    #[cfg(test)]
    pub(crate) fn place(&mut self, position: u64) {
        (self.tail, self.head) = (position, position);
    }

    /// How many status words could be used now.
    #[cfg(test)]
    pub(crate) fn free_words<P: Platform, R: Mmio>(&self, port: &Port<'_, P, R>) -> usize {
        let slots = self.slots.iter().enumerate();
        let free = slots.filter(|(index, slot)| match slot {
            Slot::Free => true,
            Slot::Retired { data, .. } => port.status(*index) == u64::from(*data),
            Slot::InFlight { .. } | Slot::Over { .. } | Slot::Lost { .. } => false,
        });
        free.count()
    }

    #[cfg(test)]
    pub(crate) fn set_last_data(&mut self, data: u32) {
        self.last_data = data;
    }

    fn room<P, R>(&self, port: &Port<'_, P, R>) -> u64 {
        (port.memory.capacity() - 1).saturating_sub(self.tail.saturating_sub(self.head))
    }

    /// Reads how far hardware has fetched. What is fetched may be overwritten (6.5.2).
    fn update_head<P: Platform, R: Mmio>(&mut self, port: &Port<'_, P, R>) {
        let capacity = port.memory.capacity();
        let index = (port.registers.read64(IQH) >> 4) % capacity;
        let behind = (self.tail % capacity + capacity - index) % capacity;
        // A head that moves backwards is no head; keep what was known.
        if let Some(head) = self.tail.checked_sub(behind)
            && head >= self.head
        {
            self.head = head;
        }
    }

    fn free_slot<P: Platform, R: Mmio>(&mut self, port: &Port<'_, P, R>) -> Option<usize> {
        if let Some(free) = self.slots.iter().position(|slot| *slot == Slot::Free) {
            return Some(free);
        }
        // A late completion: hardware has let go of the word, and nobody waits for it.
        let late = self.slots.iter().enumerate().position(|(index, slot)| match *slot {
            Slot::Retired { data, .. } => port.status(index) == u64::from(data),
            Slot::Free | Slot::InFlight { .. } | Slot::Over { .. } | Slot::Lost { .. } => false,
        })?;
        if let Some(slot) = self.slots.get_mut(late) {
            *slot = Slot::Free;
        }
        Some(late)
    }
}
