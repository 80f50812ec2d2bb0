//! One remapping unit: bring-up, its shared state, and the way to shut it down.
//!
//! A [`Unit`] is shared by reference between CPUs. Its state sits behind the
//! embedder's lock, which is held for ring writes and never while waiting.

use arrayvec::ArrayVec;
use flush::{DomainId, Mfn};
use stage2::TableMemory;

use crate::counters::Told;
use crate::queue::{Port, Queue, QueueMemory};
use crate::spec::registers::{
    CAP, Capabilities, ECAP, ExtendedCapabilities, FECTL, FECTL_MASK, FSTS, GCMD, GSTS, IQA, IQT,
    RTADDR, fault_status, global,
};
use crate::submit::{Claim, CommandError};
use crate::tags::TagPool;
use crate::{Command, Counters, Drain, Guarded, Mmio, Platform, SourceId, Tag};

/// Devices a unit can remember as gone.
const GONE: usize = 32;

/// How a unit is set up.
#[derive(Clone, Copy, Debug)]
pub struct UnitConfig {
    /// Memory for the invalidation queue. With `None`, or on a unit without one, the
    /// command registers are used, and no device may use a device TLB.
    pub queue: Option<QueueMemory>,
    /// How long hardware may take for one operation, in microseconds.
    pub timeout_us: u64,
}

/// The state of a unit that its lock guards. It starts empty and is never moved out.
#[derive(Debug)]
pub struct UnitState {
    pub(crate) queue: Queue,
    pub(crate) claim: Claim,
    pub(crate) tags: TagPool,
    pub(crate) root: Option<Mfn>,
    pub(crate) translating: bool,
    pub(crate) gone: ArrayVec<SourceId, GONE>,
}

impl UnitState {
    /// The state of a unit that was never brought up.
    #[must_use]
    pub const fn new() -> Self {
        Self {
            queue: Queue::new(),
            claim: Claim::Free,
            tags: TagPool::new(),
            root: None,
            translating: false,
            gone: ArrayVec::new_const(),
        }
    }
}

impl Default for UnitState {
    fn default() -> Self {
        Self::new()
    }
}

/// Why a unit could not be brought up or shut down.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BringUpError {
    /// No page for the root table.
    NoMemory,
    /// The queue's ring is larger than 2^7 pages, or not aligned to its size.
    QueueMemory,
    /// A register did not take its value, or an operation of the global command register
    /// did not finish in time.
    Stuck,
    /// The initial invalidation did not complete.
    Invalidation(CommandError),
}

/// The list of devices that are gone is full.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TooManyGone;

/// Whether a device can be sent device-TLB commands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Reach {
    /// It can.
    Commands,
    /// It was declared gone.
    Gone,
    /// Its unit does not translate, and hands on no such command (4.3).
    Down,
}

/// One remapping unit (a DRHD of the DMAR table).
///
/// `P` is memory and time, `R` its registers, and `L` the embedder's lock around its
/// state: the innermost lock, taken for ring writes and bookkeeping only.
#[derive(Debug)]
pub struct Unit<P, R, L> {
    pub(crate) platform: P,
    pub(crate) registers: R,
    state: L,
    capabilities: Capabilities,
    extended: ExtendedCapabilities,
    pub(crate) queue: Option<QueueMemory>,
    pub(crate) timeout_us: u64,
    /// What it was told, for [`counters`](Self::counters).
    pub(crate) told: Told,
}

impl<P: Platform, R: Mmio, L: Guarded<UnitState>> Unit<P, R, L> {
    /// Reads what the unit can do. Nothing is written before [`bring_up`](Self::bring_up).
    pub fn new(platform: P, registers: R, state: L, config: UnitConfig) -> Self {
        let capabilities = Capabilities::new(registers.read64(CAP));
        let extended = ExtendedCapabilities::new(registers.read64(ECAP));
        let queue = config.queue.filter(|_| extended.queue());
        let timeout_us = config.timeout_us;
        let told = Told::new();
        Self { platform, registers, state, capabilities, extended, queue, timeout_us, told }
    }

    /// What the unit can do.
    pub const fn capabilities(&self) -> Capabilities {
        self.capabilities
    }

    /// What else the unit can do.
    pub const fn extended_capabilities(&self) -> ExtendedCapabilities {
        self.extended
    }

    /// Whether commands go through the queue, not the registers.
    pub const fn uses_queue(&self) -> bool {
        self.queue.is_some()
    }

    /// Whether the embedder's table memory must write changed entries back from the
    /// processor's caches before this unit can see them.
    pub const fn needs_write_back(&self) -> bool {
        !self.extended.coherent()
    }

    /// What the unit was told to do so far. It takes no lock, so that what another CPU is
    /// doing at the moment may be counted in part.
    pub fn counters(&self) -> Counters {
        self.told.read()
    }

    /// The domain whose translations are cached under `tag`.
    pub fn owner(&self, tag: Tag) -> Option<DomainId> {
        self.locked(|state| state.tags.owner(tag))
    }

    pub(crate) fn locked<T>(&self, f: impl FnOnce(&mut UnitState) -> T) -> T {
        self.state.with(f)
    }

    pub(crate) fn port<'a>(&'a self, memory: &'a QueueMemory) -> Port<'a, P, R> {
        Port { memory, registers: &self.registers, platform: &self.platform }
    }

    pub(crate) const fn drain(&self) -> Drain {
        Drain::offered(self.capabilities)
    }

    pub(crate) fn deadline(&self) -> u64 {
        self.platform.now_us().saturating_add(self.timeout_us)
    }

    /// Turns translation on: from here on every device of the unit is blocked until
    /// it is attached to a domain.
    ///
    /// What firmware left running is turned off first. Order: root table, queue,
    /// global invalidation of both caches, translation (6.6, 6.5.2, 11.4.4.1).
    ///
    /// On a unit that is up it starts a queue that has stopped again: translation stays
    /// on, so that attached devices reach nothing but their tables meanwhile.
    /// Submissions under way end in an error.
    ///
    /// # Errors
    ///
    /// After an error translation is in the state it was in, or off if it was not on by
    /// this function; it may be tried again. A root table that hardware was told of
    /// stays with the unit.
    pub fn bring_up(&self, tables: &impl TableMemory) -> Result<(), BringUpError> {
        if let Some(memory) = &self.queue {
            let pages = 1_u64.checked_shl(u32::from(memory.order)).unwrap_or(0);
            if memory.order > 7 || memory.ring.get() & pages.wrapping_sub(1) != 0 {
                return Err(BringUpError::QueueMemory);
            }
        }
        let root = match self.locked(|state| state.root) {
            Some(root) => root,
            None => {
                let root = tables.link(tables.allocate().ok_or(BringUpError::NoMemory)?);
                self.locked(|state| state.root = Some(root));
                root
            }
        };
        self.registers.write32(FECTL, FECTL_MASK);
        let on = self.registers.read32(GSTS) & global::TRANSLATION != 0;
        if on && self.locked(|state| state.translating) {
            return self.restart();
        }
        self.set_global(global::TRANSLATION, false)?;
        self.set_global(global::QUEUE, false)?;
        self.locked(|state| {
            state.translating = false;
            state.queue.stop();
            state.tags.set_limit(self.capabilities.domain_ids());
        });
        self.forget_faults();
        let stale = fault_status::OVERFLOW | fault_status::INVALIDATION;
        self.registers.write32(FSTS, stale);

        self.write_checked(RTADDR, root.get() << 12)?;
        self.pulse_global(global::ROOT_POINTER, global::ROOT_POINTER)?;
        self.start_queue()?;
        self.forget_everything()?;
        self.set_global(global::TRANSLATION, true)?;
        self.locked(|state| state.translating = true);
        Ok(())
    }

    /// Starts the queue again below translation that stays on.
    fn restart(&self) -> Result<(), BringUpError> {
        if self.queue.is_some() {
            self.locked(|state| state.queue.stop());
            self.set_global(global::QUEUE, false)?;
            self.registers.write32(FSTS, fault_status::INVALIDATION);
            self.start_queue()?;
        }
        self.forget_everything()
    }

    /// Turns the queue on, if there is one. It is off.
    fn start_queue(&self) -> Result<(), BringUpError> {
        let Some(memory) = &self.queue else { return Ok(()) };
        self.locked(|state| state.queue.reset(&self.port(memory)));
        self.write_checked(IQT, 0)?;
        let address = memory.ring.get() << 12 | u64::from(memory.order);
        self.registers.write64(IQA, address);
        self.set_global(global::QUEUE, true)?;
        // Checked only now: QEMU shows the address once the queue is on, not before.
        if self.registers.read64(IQA) != address {
            return Err(BringUpError::Stuck);
        }
        // Not before: another CPU's submission would move the tail between these steps.
        self.locked(|state| state.queue.run());
        Ok(())
    }

    /// Invalidates both caches of the unit.
    fn forget_everything(&self) -> Result<(), BringUpError> {
        self.run(|submitter| {
            submitter.push(Command::ContextGlobal);
            submitter.push(Command::IotlbGlobal);
        })
        .map_err(BringUpError::Invalidation)
    }

    /// Turns translation off: devices then reach all of memory, as before bring-up.
    ///
    /// All devices should be detached and quiet. Caches are invalidated first. Flushes of
    /// a domain that still has a device here fail from now on.
    ///
    /// # Errors
    ///
    /// The unit is left as far as it got; calling again continues. A queue that has
    /// stopped by an error has to be [started again](Self::bring_up) first.
    pub fn shut_down(&self) -> Result<(), BringUpError> {
        if self.locked(|state| state.translating) {
            self.forget_everything()?;
            self.locked(|state| state.translating = false);
        }
        self.set_global(global::TRANSLATION, false)?;
        let Some(memory) = &self.queue else { return Ok(()) };
        self.locked(|state| state.queue.stop());
        if !self.poll(|| self.locked(|state| state.queue.is_idle(&self.port(memory)))) {
            return Err(BringUpError::Stuck);
        }
        self.set_global(global::QUEUE, false)
    }

    /// Remembers that `source` is gone (unplugged, or does not answer any more).
    ///
    /// It gets no more device-TLB commands, and is not attached again before
    /// [`device_returned`](Self::device_returned). While it has a device TLB and is still
    /// a member of a domain, flushes of that domain fail with
    /// [`DmaFlushError::Gone`](crate::DmaFlushError::Gone): what it caches works until
    /// its context entry is gone too. [Detach](crate::DmaDomain::detach) it, then retry.
    ///
    /// # Errors
    ///
    /// [`TooManyGone`]: the unit remembers 32 of them.
    pub fn device_gone(&self, source: SourceId) -> Result<(), TooManyGone> {
        self.locked(|state| {
            if state.gone.contains(&source) {
                return Ok(());
            }
            state.gone.try_push(source).map_err(|_| TooManyGone)
        })
    }

    /// The device was reset with ATS off, or replaced: its own cache is empty.
    pub fn device_returned(&self, source: SourceId) {
        self.locked(|state| state.gone.retain(|gone| *gone != source));
    }

    /// Whether `source` is to be sent device-TLB commands.
    pub(crate) fn reach(&self, source: SourceId) -> Reach {
        self.locked(|state| {
            if state.gone.contains(&source) {
                Reach::Gone
            } else if state.translating {
                Reach::Commands
            } else {
                Reach::Down
            }
        })
    }

    /// Writes a register that the steps after it rely on, and reads it back.
    fn write_checked(&self, offset: u32, value: u64) -> Result<(), BringUpError> {
        self.registers.write64(offset, value);
        if self.registers.read64(offset) == value { Ok(()) } else { Err(BringUpError::Stuck) }
    }

    /// Sets or clears an enable bit of the global command register and waits for it.
    fn set_global(&self, bit: u32, on: bool) -> Result<(), BringUpError> {
        if (self.registers.read32(GSTS) & bit != 0) == on {
            return Ok(());
        }
        self.claim().map_err(|_| BringUpError::Stuck)?;
        let kept = self.registers.read32(GSTS) & global::KEEP & !bit;
        self.registers.write32(GCMD, if on { kept | bit } else { kept });
        let done = self.poll(|| (self.registers.read32(GSTS) & bit != 0) == on);
        self.release(done);
        if done { Ok(()) } else { Err(BringUpError::Stuck) }
    }

    /// Sets a one-shot bit of the global command register and waits until the status
    /// register's `bit` reads as `expected`.
    pub(crate) fn pulse_global(&self, bit: u32, expected: u32) -> Result<(), BringUpError> {
        self.claim().map_err(|_| BringUpError::Stuck)?;
        let kept = self.registers.read32(GSTS) & global::KEEP;
        self.registers.write32(GCMD, kept | bit);
        let done = self.poll(|| self.registers.read32(GSTS) & bit == expected);
        self.release(done);
        if done { Ok(()) } else { Err(BringUpError::Stuck) }
    }

    /// Polls until `done`, at most until the deadline; says whether it was.
    pub(crate) fn poll(&self, mut done: impl FnMut() -> bool) -> bool {
        let deadline = self.deadline();
        loop {
            if done() {
                return true;
            }
            if self.platform.now_us() > deadline {
                return false;
            }
            self.platform.relax();
        }
    }
}
