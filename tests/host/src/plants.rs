//! Planted bugs: an embedder that lies about its flushes.
//!
//! [`Lying`] stands between a batch and its hardware, counts the requests, and does
//! what its [`FlushLie`] says. Hardware that lies is part of the model.

use std::cell::Cell;

use flush::{Cover, DomainId, Flush, Kind};

/// What an embedder claims falsely.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FlushLie {
    /// Nothing is started, and it is said to be done.
    Skip,
    /// It is started, and said to be done before it is.
    NoWait,
}

/// The lie of an honest embedder.
pub const HONEST: Option<FlushLie> = None;

/// A flusher that may lie, and counts.
#[derive(Debug)]
pub struct Lying<F> {
    inner: F,
    lie: Option<FlushLie>,
    requests: Cell<u64>,
}

/// What a lying flusher waits for.
#[derive(Debug)]
#[must_use = "wait for it"]
pub struct Claimed<T>(Option<T>);

impl<F> Lying<F> {
    /// `inner`, with a lie or none.
    pub fn new(inner: F, lie: Option<FlushLie>) -> Self {
        Self { inner, lie, requests: Cell::new(0) }
    }

    /// How many flushes were asked for.
    pub fn requests(&self) -> u64 {
        self.requests.get()
    }
}

impl<K: Kind, F: Flush<K>> Flush<K> for Lying<F> {
    type InFlight = Claimed<F::InFlight>;
    type Error = F::Error;

    fn start(&self, domain: DomainId, cover: &Cover) -> Self::InFlight {
        self.requests.set(self.requests.get() + 1);
        Claimed((self.lie != Some(FlushLie::Skip)).then(|| self.inner.start(domain, cover)))
    }

    fn wait(&self, in_flight: Self::InFlight) -> Result<(), Self::Error> {
        match in_flight.0 {
            Some(token) if self.lie.is_none() => self.inner.wait(token),
            Some(_) | None => Ok(()),
        }
    }
}
