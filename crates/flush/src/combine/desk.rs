//! What one seat writes and leaders read.
//!
//! A [`Request`] is a cover with the ticket it waits for. From the ticket a leader sees
//! whether the cover was flushed already and its owner only has not looked yet.

use core::sync::atomic::Ordering::Relaxed;

use super::slots::Slots;
use crate::{
    Cover,
    sync::{AtomicBool, AtomicU64, const_constructor},
};

/// A ticket is being taken: a leader may have counted it before its number is here. It is
/// above all tickets, so none that was completed.
const TAKING: u64 = u64::MAX;

/// A seat's side of the combiner; a cache line of its own.
#[derive(Debug)]
#[repr(align(64))]
pub(super) struct Desk<const SLOTS: usize> {
    pub(super) taken: AtomicBool,
    pub(super) tlb: Request<SLOTS>,
    pub(super) iotlb: Request<SLOTS>,
}

impl<const SLOTS: usize> Desk<SLOTS> {
    const_constructor! {
        pub(super) const fn new() -> Self {
            Self { taken: AtomicBool::new(false), tlb: Request::new(), iotlb: Request::new() }
        }
    }
}

/// What one seat asks of hardware of one kind; only its owner writes it.
#[derive(Debug)]
pub(super) struct Request<const SLOTS: usize> {
    /// [`TAKING`], or the last ticket, or 0, which is none. Until that is redeemed, the cover
    /// that it is for stays in its slots.
    ticket: AtomicU64,
    cover: Slots<SLOTS>,
}

impl<const SLOTS: usize> Request<SLOTS> {
    const_constructor! {
        const fn new() -> Self {
            Self { ticket: AtomicU64::new(0), cover: Slots::new() }
        }
    }

    /// Shows `cover` to whoever counts the ticket that is taken next.
    pub(super) fn publish(&self, cover: &Cover) {
        self.cover.publish(cover);
    }

    /// The next ticket is for this cover too. Whoever counts it sees at least this.
    pub(super) fn take_next(&self) {
        self.ticket.store(TAKING, Relaxed);
    }

    /// The ticket is this one.
    pub(super) fn took(&self, ticket: u64) {
        self.ticket.store(ticket, Relaxed);
    }

    /// Adds to `cover` what is asked for, if tickets up to `completed` were served before.
    ///
    /// Whoever counted a ticket finds it here, or [`TAKING`], unless it was redeemed. So all
    /// that is left out of what was counted are covers that were flushed since their ticket
    /// was taken.
    pub(super) fn add_to(&self, cover: &mut Cover, completed: u64) {
        if self.ticket.load(Relaxed) > completed {
            self.cover.add_to(cover);
        }
    }
}
