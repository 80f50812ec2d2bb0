//! What a unit was told, in numbers an operator can read.
//!
//! [`Counters`] is a copy taken under the unit's lock: its fields fit each other.

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
    };

    /// Adds all of `other`.
    pub(crate) fn merge(&mut self, other: &Self) {
        let Self {
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
        } = other;
        for (counter, more) in [
            (&mut self.iotlb_commands, iotlb_commands),
            (&mut self.wide_commands, wide_commands),
            (&mut self.pages_flushed, pages_flushed),
            (&mut self.context_commands, context_commands),
            (&mut self.device_commands, device_commands),
            (&mut self.waits, waits),
            (&mut self.tail_writes, tail_writes),
            (&mut self.register_commands, register_commands),
            (&mut self.write_buffer_flushes, write_buffer_flushes),
            (&mut self.aborted, aborted),
            (&mut self.refused, refused),
            (&mut self.expired, expired),
        ] {
            add(counter, *more);
        }
    }

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

pub(crate) fn add(counter: &mut u64, more: u64) {
    *counter = counter.wrapping_add(more);
}
