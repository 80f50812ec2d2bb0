//! What a unit was told, in numbers an operator can read.
//!
//! [`Counters`] is a copy. What it is copied from is added to without a lock.

use core::sync::atomic::{AtomicU64, Ordering::Relaxed};

use crate::Command;

/// What a unit was told to do since it was brought up. Counters wrap at 2^64.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Counters {
    /// IOTLB invalidations of any granularity, through queue or registers.
    pub iotlb_commands: u64,
    /// Of these, invalidations of a whole domain or of everything.
    pub wide_commands: u64,
    /// Pages named by page-selective invalidations.
    pub pages_flushed: u64,
    /// Context-cache invalidations.
    pub context_commands: u64,
    /// Device-TLB invalidations.
    pub device_commands: u64,
    /// Wait descriptors written.
    pub waits: u64,
    /// Writes of the queue's tail register.
    pub tail_writes: u64,
    /// Invalidations carried out through the command registers.
    pub register_commands: u64,
    /// Write-buffer flushes.
    pub write_buffer_flushes: u64,
    /// Submissions hardware dropped because a device did not answer.
    pub aborted: u64,
    /// Submissions that hardware refused, and register commands that it refused or that
    /// had to be made wider.
    pub refused: u64,
    /// Submissions and register commands past their deadline.
    pub expired: u64,
    /// Requests submitted again, because of a device that did not answer or a refusal.
    pub retried: u64,
}

impl Counters {
    pub(crate) const NONE: Self = Self {
        iotlb_commands: 0,
        wide_commands: 0,
        pages_flushed: 0,
        context_commands: 0,
        device_commands: 0,
        waits: 0,
        tail_writes: 0,
        register_commands: 0,
        write_buffer_flushes: 0,
        aborted: 0,
        refused: 0,
        expired: 0,
        retried: 0,
    };

    /// Counts one command.
    pub(crate) fn count(&mut self, command: Command) {
        let counter = match command {
            Command::ContextGlobal | Command::ContextDevice { .. } => &mut self.context_commands,
            Command::DeviceTlb { .. } => &mut self.device_commands,
            Command::IotlbGlobal | Command::IotlbDomain { .. } => {
                add(&mut self.wide_commands, 1);
                &mut self.iotlb_commands
            }
            Command::IotlbPages { block, .. } => {
                add(&mut self.pages_flushed, block.pages());
                &mut self.iotlb_commands
            }
        };
        add(counter, 1);
    }
}

fn add(counter: &mut u64, more: u64) {
    *counter = counter.wrapping_add(more);
}

/// What [`Counters`] are copied from.
#[derive(Debug)]
pub(crate) struct Told {
    iotlb_commands: AtomicU64,
    wide_commands: AtomicU64,
    pages_flushed: AtomicU64,
    context_commands: AtomicU64,
    device_commands: AtomicU64,
    waits: AtomicU64,
    tail_writes: AtomicU64,
    register_commands: AtomicU64,
    write_buffer_flushes: AtomicU64,
    aborted: AtomicU64,
    refused: AtomicU64,
    expired: AtomicU64,
    retried: AtomicU64,
}

impl Told {
    pub(crate) const fn new() -> Self {
        Self {
            iotlb_commands: AtomicU64::new(0),
            wide_commands: AtomicU64::new(0),
            pages_flushed: AtomicU64::new(0),
            context_commands: AtomicU64::new(0),
            device_commands: AtomicU64::new(0),
            waits: AtomicU64::new(0),
            tail_writes: AtomicU64::new(0),
            register_commands: AtomicU64::new(0),
            write_buffer_flushes: AtomicU64::new(0),
            aborted: AtomicU64::new(0),
            refused: AtomicU64::new(0),
            expired: AtomicU64::new(0),
            retried: AtomicU64::new(0),
        }
    }

    /// Adds all of `more`.
    pub(crate) fn add(&self, more: &Counters) {
        let Counters {
            iotlb_commands,
            wide_commands,
            pages_flushed,
            context_commands,
            device_commands,
            waits,
            tail_writes,
            register_commands,
            write_buffer_flushes,
            aborted,
            refused,
            expired,
            retried,
        } = more;
        for (counter, more) in [
            (&self.iotlb_commands, iotlb_commands),
            (&self.wide_commands, wide_commands),
            (&self.pages_flushed, pages_flushed),
            (&self.context_commands, context_commands),
            (&self.device_commands, device_commands),
            (&self.waits, waits),
            (&self.tail_writes, tail_writes),
            (&self.register_commands, register_commands),
            (&self.write_buffer_flushes, write_buffer_flushes),
            (&self.aborted, aborted),
            (&self.refused, refused),
            (&self.expired, expired),
            (&self.retried, retried),
        ] {
            if *more != 0 {
                counter.fetch_add(*more, Relaxed);
            }
        }
    }

    pub(crate) fn read(&self) -> Counters {
        Counters {
            iotlb_commands: self.iotlb_commands.load(Relaxed),
            wide_commands: self.wide_commands.load(Relaxed),
            pages_flushed: self.pages_flushed.load(Relaxed),
            context_commands: self.context_commands.load(Relaxed),
            device_commands: self.device_commands.load(Relaxed),
            waits: self.waits.load(Relaxed),
            tail_writes: self.tail_writes.load(Relaxed),
            register_commands: self.register_commands.load(Relaxed),
            write_buffer_flushes: self.write_buffer_flushes.load(Relaxed),
            aborted: self.aborted.load(Relaxed),
            refused: self.refused.load(Relaxed),
            expired: self.expired.load(Relaxed),
            retried: self.retried.load(Relaxed),
        }
    }
}
