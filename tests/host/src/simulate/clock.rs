//! Virtual time: what happens next, and what varies.
//!
//! [`Clock`] hands out events in the order of their times, equal times in the order in
//! which they were set. [`vary`] spreads a length of time by half either way.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

/// Events to come, and the time it is, in nanoseconds.
#[derive(Debug)]
pub(super) struct Clock<E> {
    now: u64,
    set: u64,
    events: BinaryHeap<Reverse<(u64, u64, E)>>,
}

impl<E: Ord> Clock<E> {
    pub(super) const fn new() -> Self {
        Self { now: 0, set: 0, events: BinaryHeap::new() }
    }

    pub(super) const fn now(&self) -> u64 {
        self.now
    }

    /// `event` happens at `time`, or now if that has passed.
    pub(super) fn at(&mut self, time: u64, event: E) {
        self.set += 1;
        self.events.push(Reverse((time.max(self.now), self.set, event)));
    }

    /// Goes on to the next event.
    pub(super) fn next(&mut self) -> Option<E> {
        let Reverse((time, _, event)) = self.events.pop()?;
        self.now = time;
        Some(event)
    }
}

const SEED: u64 = 0x7175_6965_7363_6521;

/// A number for the place `(stream, step)`, the same in each run.
fn drawn(stream: usize, step: u64) -> u64 {
    let place = SEED ^ ((stream as u64) << 40) ^ step;
    let mixed = (place ^ (place >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    mixed ^ (mixed >> 31)
}

/// From half of `time` to one and a half times as much, `time` on average.
pub(super) fn vary(time: u64, stream: usize, step: u64) -> u64 {
    time / 2 + below(time, stream, step)
}

/// A time below `end`, or 0.
pub(super) fn below(end: u64, stream: usize, step: u64) -> u64 {
    drawn(stream, step).checked_rem(end).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn events_come_in_order_of_time_and_then_of_setting() {
        let mut clock = Clock::new();
        for (time, event) in [(5, 'c'), (3, 'b'), (5, 'a'), (1, 'd')] {
            clock.at(time, event);
        }
        let mut order = Vec::new();
        while let Some(event) = clock.next() {
            order.push((clock.now(), event));
        }
        assert_eq!(order, [(1, 'd'), (3, 'b'), (5, 'c'), (5, 'a')]);
    }

    #[test]
    fn what_varies_stays_within_half_and_keeps_its_mean() {
        let drawn: Vec<u64> = (0..10_000).map(|step| vary(1000, 3, step)).collect();
        assert!(drawn.iter().all(|time| (500..1500).contains(time)));
        let mean = drawn.iter().sum::<u64>() / 10_000;
        assert!((990..1010).contains(&mean), "{mean}");
    }
}
