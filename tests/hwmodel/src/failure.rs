//! Hardware that fails, hardware that lies, and software that misuses it
//!
//! A [`Failure`] is honest: the hardware says or shows that something went wrong. A [`Lie`] is a planted bug:
//! the hardware reports success for something it did not do. A [`Misuse`] is the other side's fault.

use crate::types::Frame;

/// The kinds of hardware operation that are counted and can be made to fail.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum OperationKind {
    /// A write to a unit's register.
    RegisterWrite,
    /// An invalidation descriptor fetched from a queue, other than a wait.
    Command,
    /// A wait descriptor fetched from a queue.
    Wait,
    /// A processor taking an inter-processor interrupt.
    IpiAcknowledge,
    /// A processor invalidating its cached translations.
    Invalidate,
}

/// How an operation fails.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Failure {
    /// It is accepted and never ends. A register write is lost; a command blocks the queue behind it.
    Hang,
    /// A command or wait raises the queue error with the head left on it. Elsewhere as [`Failure::Hang`].
    QueueError,
    /// A command or wait ends in the time-out error: waits in the unit are dropped, the queue stops until the
    /// error is cleared. Elsewhere as [`Failure::Hang`].
    TimeOut,
    /// A command raises the completion error and is carried out. Elsewhere nothing happens.
    CompletionError,
}

/// A bug planted in a VT-d unit.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Lie {
    /// IOTLB invalidations complete and do nothing.
    IgnoreIotlb,
    /// Context-cache invalidations complete and do nothing.
    IgnoreContext,
    /// Device-TLB invalidations complete and do nothing.
    IgnoreDeviceTlb,
    /// Page-selective invalidations use an address mask one smaller.
    SmallerMask,
    /// IOTLB invalidations act on the domain id with its lowest bit inverted.
    WrongDomain,
    /// Waits write their status when they are fetched, before the commands ahead of them are carried out.
    EarlyWait,
    /// Drain bits are ignored.
    IgnoreDrain,
    /// Every IOTLB invalidation keeps the paging-structure caches, as if the hint said so.
    KeepWalks,
}

/// A bug planted in a processor.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum CpuLie {
    /// Invalidations succeed and do nothing.
    IgnoreInvalidate,
    /// Invalidations drop leaf translations and keep pointers to tables.
    KeepWalks,
    /// Interrupts are acknowledged while the guest goes on running.
    KeepRunning,
    /// Translations are cached without a mark in the tables, though marks are enabled.
    CacheUnmarked,
}

/// Something the code under test must not do to hardware or memory, apart from staleness.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Misuse {
    /// The host accessed an address that is not RAM.
    OutsideRam(u64),
    /// The host accessed a word or half word that is not aligned.
    Unaligned(u64),
    /// The host accessed a frame that nobody owns.
    FreeFrame(Frame),
    /// A free frame was released, held or given to somebody.
    NotOwned(Frame),
    /// GCMD was written while an earlier command had not shown up in GSTS.
    CommandWhilePending,
    /// GCMD changed more than one bit at a time.
    SeveralCommands(u32),
    /// IOTLB or CCMD asked for an invalidation while the queue was on; it never ends.
    RegisterInvalidationWithQueue,
    /// IOTLB or CCMD was written while an invalidation asked for through it was pending.
    RegisterInvalidationPending,
    /// IQA was written while the queue was on.
    QueueMovedWhileOn,
    /// IQT points beyond the ring, or not at a descriptor.
    BadTail(u64),
    /// A wait asked for an interrupt and a status write at once.
    WaitWithBoth,
    /// A device-TLB invalidation was sent while translation was off.
    DeviceTlbWhileOff,
    /// A present context entry uses domain id 0 on a unit in caching mode.
    DomainZero,
    /// A device-TLB invalidation names a device that is not behind this unit.
    WrongUnit(u16),
}
