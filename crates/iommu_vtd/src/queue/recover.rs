//! What errors do to the queue: who is affected, and how hardware goes on.
//!
//! Any waiter may find an error bit first. It settles every submission concerned under
//! the unit's lock, so that each ends exactly one way whoever looks.

use super::{Ended, NUDGE, Port, Queue, Slot};
use crate::spec::registers::{FSTS, fault_status};
use crate::{Mmio, Platform};

/// What a recovery wrote.
pub(crate) struct Rewritten {
    /// Wait descriptors, in the place of commands that are not to be executed.
    pub(crate) waits: u64,
    /// Tail writes.
    pub(crate) tails: u64,
}

impl Queue {
    /// Looks at the unit's error bits, settles who is affected, and restarts hardware.
    pub(crate) fn recover<P: Platform, R: Mmio>(&mut self, port: &Port<'_, P, R>) -> Rewritten {
        let mut rewritten = Rewritten { waits: 0, tails: 0 };
        let errors = port.registers.read32(FSTS) & fault_status::INVALIDATION;
        if errors == 0 {
            return rewritten;
        }
        // Hardware fetches nothing while an error is set, so the head stands still.
        self.update_head(port);
        if errors & fault_status::TIME_OUT != 0 {
            rewritten.waits += self.abort_fetched(port);
        }
        if errors & fault_status::QUEUE_ERROR != 0 {
            rewritten.waits += self.fail_at_head(port);
        }
        // A completion error (an answer nobody asked for) aborts nothing by itself.
        port.registers.write32(FSTS, errors);
        port.write_tail(self.tail);
        rewritten.tails = 1;
        rewritten
    }

    /// After a time-out hardware completes none of the waits it has fetched (6.5.2.11).
    ///
    /// A submission of which it has fetched only a part may owe its time-out to that
    /// part, and its wait would still complete: what is left of it becomes waits on the
    /// scratch word while fetching stands still. Later submissions are not concerned.
    ///
    /// Returns how many such waits it wrote.
    fn abort_fetched<P: Platform, R: Mmio>(&mut self, port: &Port<'_, P, R>) -> u64 {
        let head = self.head;
        let mut rest = head;
        for (index, slot) in self.slots.iter_mut().enumerate() {
            let (first, wait) = match *slot {
                Slot::InFlight { data, .. } if port.status(index) == u64::from(data) => continue,
                Slot::InFlight { first, wait, .. } | Slot::Retired { first, wait, .. } => {
                    (first, wait)
                }
                Slot::Free | Slot::Over { .. } | Slot::Lost { .. } => continue,
            };
            if first >= head {
                continue;
            }
            // Submissions do not overlap: at most one reaches from below the head to it.
            rest = rest.max(wait.saturating_add(1));
            *slot = match *slot {
                Slot::InFlight { data, .. } => {
                    port.set_status(index, NUDGE);
                    Slot::Over { data, how: Ended::Aborted }
                }
                Slot::Retired { .. } | Slot::Free | Slot::Over { .. } | Slot::Lost { .. } => {
                    Slot::Free
                }
            };
        }
        self.disarm(port, head, rest)
    }

    /// Makes the descriptors from `from` to before `to` waits that nobody looks at.
    fn disarm<P: Platform, R: Mmio>(&self, port: &Port<'_, P, R>, from: u64, to: u64) -> u64 {
        let to = to.min(self.tail);
        for position in from..to {
            port.write(position, port.scratch_wait());
        }
        to.saturating_sub(from)
    }

    /// Hardware refuses the descriptor at the head and has stopped there (6.5.2.11).
    ///
    /// It and the rest of its submission, the wait included, become waits that write
    /// the scratch word: before the error is cleared, so that the submission's own
    /// wait can not report success.
    ///
    /// Returns how many such waits it wrote.
    fn fail_at_head<P: Platform, R: Mmio>(&mut self, port: &Port<'_, P, R>) -> u64 {
        let head = self.head;
        if head == self.tail {
            // No descriptor of ours: the queue itself is broken. Waits that were fetched
            // may or may not still be carried out.
            self.running = false;
            for (index, slot) in self.slots.iter_mut().enumerate() {
                if let Slot::InFlight { data, .. } = *slot
                    && port.status(index) != u64::from(data)
                {
                    *slot = Slot::Lost { data };
                    port.set_status(index, NUDGE);
                }
            }
            return 0;
        }
        let mut last = head;
        for (index, slot) in self.slots.iter_mut().enumerate() {
            match *slot {
                Slot::InFlight { first, wait, data } if first <= head && head <= wait => {
                    last = wait;
                    *slot = Slot::Over { data, how: Ended::Failed };
                    port.set_status(index, NUDGE);
                }
                Slot::Retired { first, wait, .. } if first <= head && head <= wait => {
                    last = wait;
                    *slot = Slot::Free;
                }
                Slot::InFlight { .. }
                | Slot::Retired { .. }
                | Slot::Free
                | Slot::Over { .. }
                | Slot::Lost { .. } => {}
            }
        }
        self.disarm(port, head, last.saturating_add(1))
    }
}
