//! An NVMe controller's admin queue: a DMA engine that needs no drive.
//!
//! Identify writes a whole frame, Get Features (timestamp) writes 8 bytes and Set
//! Features reads 8. The queues are reached by DMA too, so their bus addresses are
//! parameters. The controller may report success for a command whose data was refused
//! by an IOMMU: look at memory and at the fault record, not at the status.

use core::fmt;
use core::sync::atomic::{Ordering, fence};
use core::time::Duration;

use flush::Mfn;
use testbed::address::BusAddress;
use testbed::nvme::{Capabilities, Command, Completion, ENABLE, FATAL, READY, register};
use testbed::pci::Function;

use crate::clock;
use crate::memory::{self, Words};
use crate::mmio::Registers;
use crate::pci::{self, Class, RegistersError};

/// Entries of each queue. A frame holds 64 submission entries of 64 bytes.
const ENTRIES: u16 = 64;
/// The longest a command may take. QEMU needs about 20 us.
const COMMAND_LIMIT: Duration = Duration::from_secs(1);

/// The memory of the admin queues, as the processor and as the device see it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Queues {
    /// The frame of the submission queue.
    pub(crate) submission: Mfn,
    /// The frame of the completion queue.
    pub(crate) completion: Mfn,
    /// Where the device finds the submission queue; a frame's start.
    pub(crate) submission_bus: BusAddress,
    /// Where the device finds the completion queue; a frame's start.
    pub(crate) completion_bus: BusAddress,
}

/// Why the controller did not do what it was asked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum NvmeError {
    /// There is no such controller.
    Absent,
    /// Its registers cannot be reached.
    Registers(RegistersError),
    /// It did not become ready, or did not stop, in the time it names itself.
    NotReady,
    /// It reports a fatal state. It does so when it could not reach its queues.
    Fatal,
    /// A queue or data address does not suit the command, or a queue is no managed frame.
    Address(BusAddress),
    /// The queues are not running: never started, or given up after an error.
    Stopped,
    /// No completion came in time. The queues are given up: start them again.
    NoCompletion,
    /// A completion came for another command. The queues are given up.
    WrongCompletion(u16),
    /// The command failed with this status: type (bits 8 to 10) and code.
    Status(u16),
}

impl fmt::Display for NvmeError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Absent => f.write_str("no NVMe controller on bus 0"),
            Self::Registers(error) => write!(f, "NVMe: {error}"),
            Self::NotReady => f.write_str("NVMe: the controller changed no state in time"),
            Self::Fatal => f.write_str("NVMe: the controller is in its fatal state"),
            Self::Address(at) => write!(f, "NVMe: {at:?} does not suit the command"),
            Self::Stopped => f.write_str("NVMe: the queues are not running"),
            Self::NoCompletion => f.write_str("NVMe: no completion came"),
            Self::WrongCompletion(other) => write!(f, "NVMe: command {other:#x} completed"),
            Self::Status(status) => write!(f, "NVMe: status {status:#x}"),
        }
    }
}

impl core::error::Error for NvmeError {}

/// The running queues: where the next command goes, where the next completion comes.
struct Running {
    submission: &'static Words,
    completion: &'static Words,
    tail: u16,
    head: u16,
    phase: bool,
    identifier: u16,
}

/// A controller, reset or running.
pub(crate) struct Nvme {
    function: Function,
    registers: Registers,
    capabilities: Capabilities,
    running: Option<Running>,
}

impl Nvme {
    /// Find the `index`-th controller (from 0) and reset it.
    ///
    /// # Errors
    /// [`NvmeError::Absent`], [`NvmeError::Registers`] or [`NvmeError::NotReady`].
    pub(crate) fn open(index: usize) -> Result<Self, NvmeError> {
        let function =
            pci::find(index, |_, class| class == Class::NVME).ok_or(NvmeError::Absent)?;
        let registers = pci::registers(function, 0).map_err(NvmeError::Registers)?;
        pci::enable(function, false);
        let capabilities = Capabilities(registers.read64(register::CAPABILITIES));
        let mut controller = Self { function, registers, capabilities, running: None };
        controller.stop()?;
        Ok(controller)
    }

    /// The function it is, and so the requester identifier of its DMA.
    pub(crate) fn function(&self) -> Function {
        self.function
    }

    /// Reset the controller: after success it starts no more DMA.
    ///
    /// # Errors
    /// [`NvmeError::NotReady`] if it does not stop in time.
    pub(crate) fn stop(&mut self) -> Result<(), NvmeError> {
        self.running = None;
        self.registers.write32(register::CONFIGURATION, 0);
        self.wait_ready(false)?;
        pci::enable(self.function, false);
        Ok(())
    }

    /// Reset the controller and start it on empty queues.
    ///
    /// The queues' frames belong to the device until the next `stop` or `start`.
    ///
    /// # Errors
    /// [`NvmeError`] if an address does not suit, or the controller does not start.
    pub(crate) fn start(&mut self, queues: Queues) -> Result<(), NvmeError> {
        self.stop()?;
        let view = |frame, bus: BusAddress| {
            let whole = (bus.offset() == 0).then(|| memory::words(frame)).flatten();
            whole.ok_or(NvmeError::Address(bus))
        };
        let submission = view(queues.submission, queues.submission_bus)?;
        let completion = view(queues.completion, queues.completion_bus)?;
        for word in submission.iter().chain(completion) {
            word.store(0, Ordering::Relaxed);
        }
        pci::enable(self.function, true);
        let size = u32::from(ENTRIES - 1);
        let registers = self.registers;
        registers.write32(register::INTERRUPT_MASK_SET, u32::MAX);
        registers.write32(register::ADMIN_QUEUE_SIZES, size << 16 | size);
        registers.write64(register::ADMIN_SUBMISSION_QUEUE, queues.submission_bus.get());
        registers.write64(register::ADMIN_COMPLETION_QUEUE, queues.completion_bus.get());
        registers.write32(register::CONFIGURATION, ENABLE);
        self.wait_ready(true)?;
        self.running =
            Some(Running { submission, completion, tail: 0, head: 0, phase: true, identifier: 0 });
        Ok(())
    }

    /// Run one command and wait for its completion.
    ///
    /// # Errors
    /// [`NvmeError::Address`] if the data would cross a frame, or is not aligned to 4
    /// bytes; nothing was submitted then. [`NvmeError::Status`] if the controller refused
    /// the command. After any other error the queues are given up and the device may
    /// still be working on the command: `stop` it before its memory is used again.
    pub(crate) fn run(&mut self, command: Command) -> Result<(), NvmeError> {
        let (data, length) = command.data();
        if !data.offset().is_multiple_of(4) || data.offset() + length > 4096 {
            return Err(NvmeError::Address(data));
        }
        let mut queues = self.running.take().ok_or(NvmeError::Stopped)?;
        queues.identifier = next_identifier(queues.identifier);
        let slot = usize::from(queues.tail) * 8;
        let entry = command.entry(queues.identifier);
        for (word, value) in queues.submission.iter().skip(slot).zip(entry) {
            word.store(value, Ordering::Relaxed);
        }
        queues.tail = next(queues.tail);
        fence(Ordering::SeqCst);
        self.registers.write32(register::DOORBELLS, u32::from(queues.tail));

        let answer = usize::from(queues.head) * 2 + 1;
        let word = queues.completion.get(answer).ok_or(NvmeError::Stopped)?;
        let mut completion = Completion(0);
        let came = clock::wait(COMMAND_LIMIT, || {
            completion = Completion(word.load(Ordering::Acquire));
            completion.phase() == queues.phase
        });
        if came.is_err() {
            return Err(self.fatal_or(NvmeError::NoCompletion));
        }
        fence(Ordering::SeqCst);
        if completion.identifier() != queues.identifier {
            return Err(NvmeError::WrongCompletion(completion.identifier()));
        }
        queues.head = next(queues.head);
        if queues.head == 0 {
            queues.phase = !queues.phase;
        }
        let doorbell = self.capabilities.completion_doorbell();
        self.registers.write32(doorbell, u32::from(queues.head));
        self.running = Some(queues);
        match completion.status() {
            0 => Ok(()),
            status => Err(NvmeError::Status(status)),
        }
    }

    /// Wait until the controller is ready, or has stopped.
    fn wait_ready(&self, ready: bool) -> Result<(), NvmeError> {
        let units = u32::from(self.capabilities.timeout_units()).max(1);
        let limit = Duration::from_millis(500).saturating_mul(units);
        let mut status = 0;
        let reached = clock::wait(limit, || {
            status = self.registers.read32(register::STATUS);
            (status & READY != 0) == ready || ready && status & FATAL != 0
        });
        if ready && status & FATAL != 0 {
            return Err(NvmeError::Fatal);
        }
        reached.map_err(|_| NvmeError::NotReady)
    }

    /// The fatal state if the controller is in it, or else `error`.
    fn fatal_or(&self, error: NvmeError) -> NvmeError {
        if self.registers.read32(register::STATUS) & FATAL != 0 { NvmeError::Fatal } else { error }
    }
}

/// The queue slot after this one.
const fn next(slot: u16) -> u16 {
    (slot + 1) % ENTRIES
}

/// The identifier after this one. 0xffff is left out: it is reserved.
const fn next_identifier(identifier: u16) -> u16 {
    (identifier + 1) % 0xffff
}
