//! What came of a simulation, in the units people publish.
//!
//! [`Outcome`] counts from the moment all streams run. [`Fall`] compares what happens to
//! a row as streams are added with what was published.

use super::prices::{BITS_PER_PAGE, published};

/// What happened while all streams were running.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Outcome {
    /// How long that was, in nanoseconds.
    pub time: u64,
    /// Pages given back.
    pub pages: u64,
    /// Batches they were in.
    pub batches: u64,
    /// Flushes that were carried out, of both kinds at once.
    pub flushes: u64,
    /// How long the flush was busy, in nanoseconds.
    pub flushing: u64,
    /// How long streams stood between asking for a flush and its end, all together.
    pub waiting: u64,
    /// CPUs that were interrupted, over all flushes.
    pub interrupted: u64,
    /// Entries that were lost although nothing about them changed.
    pub refills: u64,
    /// Pages that the flushes named: those given back, and more where blocks are wider.
    pub named: u64,
}

impl Outcome {
    /// Gbit/s of full pages.
    #[must_use]
    pub fn gigabits(&self) -> f64 {
        self.pages as f64 * BITS_PER_PAGE / self.time as f64
    }

    /// How long the flush was busy for each page, in us.
    #[must_use]
    pub fn flush_us_per_page(&self) -> f64 {
        self.flushing as f64 / 1000.0 / self.pages as f64
    }

    /// How long a stream stood waiting for each page, in us.
    #[must_use]
    pub fn wait_us_per_page(&self) -> f64 {
        self.waiting as f64 / 1000.0 / self.pages as f64
    }

    /// How many CPUs one flush interrupted.
    #[must_use]
    pub fn interrupted_per_flush(&self) -> f64 {
        self.interrupted as f64 / self.flushes as f64
    }

    /// How many batches one flush served.
    #[must_use]
    pub fn batches_per_flush(&self) -> f64 {
        self.batches as f64 / self.flushes as f64
    }
}

/// How far a row falls from 1 to 16 streams, next to the published batched row.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Fall {
    /// Which part of its first figure the row has lost; below 0 if it rises.
    pub simulated: f64,
    /// The same, published.
    pub published: f64,
    /// The part of the published fall that the model puts down to flushing, from 0: all
    /// that changes with streams in the model is the competition for the flush.
    pub share: f64,
    /// The most it could be: all flushing at 16 streams, over what a page came to take
    /// longer, as if flushing had cost nothing with one stream.
    pub bound: f64,
}

impl Fall {
    /// Of a row that has `one` with one stream and `sixteen` with 16.
    #[must_use]
    pub fn between(one: &Outcome, sixteen: &Outcome) -> Self {
        let [first, .., last] = published::BATCHED;
        let fall = 1.0 - last / first;
        let simulated = 1.0 - sixteen.gigabits() / one.gigabits();
        let longer = (BITS_PER_PAGE / last - BITS_PER_PAGE / first) / 1000.0;
        Self {
            simulated,
            published: fall,
            share: simulated.max(0.0) / fall,
            bound: (sixteen.flush_us_per_page() / longer).min(1.0),
        }
    }
}
