//! Getting commands to hardware, and waiting for them: through queue or registers.
//!
//! [`Started`] stands for commands under way. Waiting holds no lock; every wait ends
//! by the unit's deadline, and success means that hardware has finished.

use arrayvec::ArrayVec;

use crate::command::RegisterForm;
use crate::queue::{Ended, PIECE, QueueMemory, Refused, Ticket};
use crate::spec::descriptor::Descriptor;
use crate::spec::registers::{
    CCMD, FSTS, GSTS, context_command, fault_status, global, iotlb_command,
};
use crate::unit::{Unit, UnitState};
use crate::{Command, Counters, Guarded, Mmio, Platform};

/// Submissions one flush may have in flight on a unit before it waits for its oldest.
const PIECES: usize = 4;

/// How often commands are submitted again after a device's time-out took them along.
pub(crate) const RETRIES: usize = 2;

/// Polls of a status word between two looks at the unit's error bits.
const POLLS_PER_LOOK: u32 = 16;

/// Why commands are not known to have been carried out. What they name may still be cached.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CommandError {
    /// Hardware did not finish in time. It may still do so, unnoticed.
    Deadline,
    /// A device did not answer, and retries ended the same way.
    DeviceTimeOut,
    /// Hardware refused a command.
    Refused,
    /// The queue does not run.
    Stopped,
    /// There is no such command without a queue.
    NeedsQueue,
}

/// Who uses the command registers (global command, context command, IOTLB).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Claim {
    /// Nobody.
    Free,
    /// A CPU that is waiting for its command.
    Held,
    /// A CPU gave up waiting; free again once the registers are seen to be idle.
    Stuck,
}

/// Commands under way on one unit; spent by [`Unit::finish`].
#[derive(Debug)]
#[must_use = "commands nobody waits for keep their status word for ever"]
pub(crate) struct Started {
    tickets: ArrayVec<Ticket, PIECES>,
    error: Option<CommandError>,
}

impl Started {
    /// Something that is over already.
    pub(crate) fn ended(result: Result<(), CommandError>) -> Self {
        Self { tickets: ArrayVec::new(), error: result.err() }
    }
}

/// Collects the commands of one request and submits them in as few pieces as possible.
pub(crate) struct Submitter<'u, P, R, L> {
    unit: &'u Unit<P, R, L>,
    buffer: ArrayVec<Descriptor, PIECE>,
    /// What is in the buffer.
    counted: Counters,
    started: Started,
}

impl<P: Platform, R: Mmio, L: Guarded<UnitState>> Submitter<'_, P, R, L> {
    /// Adds a command behind those pushed before.
    pub(crate) fn push(&mut self, command: Command) {
        let Some(memory) = self.unit.queue else {
            let result = self.unit.execute(command);
            self.note(result);
            return;
        };
        if self.buffer.is_full() {
            self.send(&memory);
        }
        self.counted.count(command);
        self.buffer.push(command.descriptor(self.unit.drain()));
    }

    /// Submits what was pushed so far: what is pushed next gets a wait of its own.
    pub(crate) fn submit(&mut self) {
        if let Some(memory) = self.unit.queue
            && !self.buffer.is_empty()
        {
            self.send(&memory);
        }
    }

    /// Makes the whole request fail if `result` is an error.
    pub(crate) fn note(&mut self, result: Result<(), CommandError>) {
        if let Err(error) = result {
            self.started.error.get_or_insert(error);
        }
    }

    /// Submits what is collected, waiting for room if there is none.
    ///
    /// Once hardware was too late for a piece the request has failed: the others would only
    /// wait for the same.
    fn send(&mut self, memory: &QueueMemory) {
        if self.started.error == Some(CommandError::Deadline) {
            self.buffer.clear();
            self.counted = Counters::NONE;
            return;
        }
        let unit = self.unit;
        if self.started.tickets.is_full()
            && let Some(oldest) = self.started.tickets.pop_at(0)
        {
            let result = unit.wait_for(memory, oldest);
            self.note(result);
        }
        let deadline = unit.deadline();
        loop {
            let submitted =
                unit.locked(|state| state.queue.submit(&unit.port(memory), &self.buffer));
            match submitted {
                Ok(ticket) => {
                    unit.told.add(&Counters { waits: 1, tail_writes: 1, ..self.counted });
                    self.started.tickets.push(ticket);
                    break;
                }
                Err(Refused::Stopped) => {
                    self.note(Err(CommandError::Stopped));
                    break;
                }
                Err(Refused::Full) if unit.platform.now_us() > deadline => {
                    unit.told.add(&Counters { expired: 1, ..Counters::NONE });
                    self.note(Err(CommandError::Deadline));
                    break;
                }
                Err(Refused::Full) => {
                    unit.look_for_errors(memory);
                    unit.platform.relax();
                }
            }
        }
        self.buffer.clear();
        self.counted = Counters::NONE;
    }

    /// Submits the rest.
    pub(crate) fn close(mut self) -> Started {
        self.submit();
        self.started
    }
}

impl<P: Platform, R: Mmio, L: Guarded<UnitState>> Unit<P, R, L> {
    /// Opens a request.
    pub(crate) fn open(&self) -> Submitter<'_, P, R, L> {
        Submitter {
            unit: self,
            buffer: ArrayVec::new(),
            counted: Counters::NONE,
            started: Started::ended(Ok(())),
        }
    }

    /// Waits until everything in `started` has ended.
    pub(crate) fn finish(&self, started: Started) -> Result<(), CommandError> {
        let Started { tickets, mut error } = started;
        if let Some(memory) = &self.queue {
            for ticket in tickets {
                if let Err(other) = self.wait_for(memory, ticket) {
                    error.get_or_insert(other);
                }
            }
        }
        error.map_or(Ok(()), Err)
    }

    /// Submits what `fill` pushes and waits; again if a device's time-out took it along.
    pub(crate) fn run(
        &self,
        fill: impl Fn(&mut Submitter<'_, P, R, L>),
    ) -> Result<(), CommandError> {
        let mut left = RETRIES;
        loop {
            let mut submitter = self.open();
            fill(&mut submitter);
            match self.finish(submitter.close()) {
                Err(CommandError::DeviceTimeOut) if left > 0 => {
                    left -= 1;
                    self.told.add(&Counters { retried: 1, ..Counters::NONE });
                }
                end => return end,
            }
        }
    }

    fn wait_for(&self, memory: &QueueMemory, ticket: Ticket) -> Result<(), CommandError> {
        let port = self.port(memory);
        let deadline = self.deadline();
        let mut ticket = ticket;
        let mut polls = 0_u32;
        loop {
            if memory.looks_ended(&self.platform, &ticket) {
                match self.locked(|state| state.queue.redeem(&port, ticket)) {
                    Ok(end) => return self.settle(end),
                    Err(back) => ticket = back,
                }
            }
            if polls.is_multiple_of(POLLS_PER_LOOK) {
                self.look_for_errors(memory);
            }
            polls = polls.wrapping_add(1);
            if self.platform.now_us() > deadline {
                break;
            }
            self.platform.relax();
        }
        match self.locked(|state| state.queue.expire(&port, ticket)) {
            Some(end) => self.settle(end),
            None => {
                self.told.add(&Counters { expired: 1, ..Counters::NONE });
                Err(CommandError::Deadline)
            }
        }
    }

    fn settle(&self, end: Result<(), Ended>) -> Result<(), CommandError> {
        let Err(how) = end else { return Ok(()) };
        let (counted, error) = match how {
            Ended::Aborted => {
                (Counters { aborted: 1, ..Counters::NONE }, CommandError::DeviceTimeOut)
            }
            Ended::Failed => (Counters { refused: 1, ..Counters::NONE }, CommandError::Refused),
        };
        self.told.add(&counted);
        Err(error)
    }

    /// Any waiter may find an error bit first: it settles all submissions concerned.
    fn look_for_errors(&self, memory: &QueueMemory) {
        if self.registers.read32(FSTS) & fault_status::INVALIDATION != 0 {
            let port = self.port(memory);
            let rewritten = self.locked(|state| state.queue.recover(&port));
            let (waits, tail_writes) = (rewritten.waits, rewritten.tails);
            self.told.add(&Counters { waits, tail_writes, ..Counters::NONE });
        }
    }

    /// Carries out one command through the registers, wider where hardware refuses it.
    pub(crate) fn execute(&self, command: Command) -> Result<(), CommandError> {
        let mut command = command;
        loop {
            match self.execute_as_is(command) {
                Err(CommandError::Refused) => {
                    self.told.add(&Counters { refused: 1, ..Counters::NONE });
                    command = command.wider().ok_or(CommandError::Refused)?;
                }
                end => return end,
            }
        }
    }

    fn execute_as_is(&self, command: Command) -> Result<(), CommandError> {
        let form = command.registers(self.drain());
        if form == RegisterForm::None {
            return Err(CommandError::NeedsQueue);
        }
        self.claim()?;
        let base = self.extended_capabilities().iotlb_offset();
        let (done, performed) = match form {
            RegisterForm::Context(value) => {
                let (busy, asked) = (context_command::INVALIDATE, context_command::GRANULARITY);
                let (done, result) = self.carry_out(command, CCMD, value, (busy, asked));
                (done, context_command::performed(result))
            }
            RegisterForm::Iotlb { address, command: value } => {
                if self.takes_address(base, address) {
                    let (busy, asked) = (iotlb_command::INVALIDATE, iotlb_command::GRANULARITY);
                    let (done, result) = self.carry_out(command, base + 8, value, (busy, asked));
                    (done, iotlb_command::performed(result))
                } else {
                    (true, 0)
                }
            }
            RegisterForm::None => (true, 0),
        };
        self.release(done);
        match (done, performed) {
            (false, _) => {
                self.told.add(&Counters { expired: 1, ..Counters::NONE });
                Err(CommandError::Deadline)
            }
            (true, 0) => Err(CommandError::Refused),
            (true, _) => Ok(()),
        }
    }

    /// Writes the invalidate address register, if the command needs it; says whether it
    /// holds the address now.
    ///
    /// The manual leaves open what a read returns (11.4.6.4). Where that is not the
    /// address, pages are not flushed this way: one wrong address would leave stale
    /// entries behind, and nothing would tell.
    fn takes_address(&self, register: u32, address: Option<u64>) -> bool {
        let Some(address) = address else { return true };
        self.registers.write64(register, address);
        self.registers.read64(register) == address
    }

    /// Writes `value`, which stands for `command`, and polls until its busy bit clears.
    /// Returns whether it was carried out, and the register's last value.
    ///
    /// The register keeps the result of the command before. It is emptied first, so that
    /// an old result is not taken for the new one's: the command was taken when the
    /// granularity it asked for can be read back. `bits` are the busy bit and those.
    fn carry_out(
        &self,
        command: Command,
        register: u32,
        value: u64,
        bits: (u64, u64),
    ) -> (bool, u64) {
        let (busy, asked) = bits;
        let read = || self.registers.read64(register);
        self.registers.write64(register, 0);
        if read() & (busy | asked) != 0 {
            return (false, 0);
        }
        let mut counted = Counters { register_commands: 1, ..Counters::NONE };
        counted.count(command);
        self.told.add(&counted);
        self.registers.write64(register, value);
        let done = self.poll(|| read() & busy == 0);
        let result = read();
        (done && result & asked == value & asked, result)
    }

    /// Flushes the unit's write buffers: for a unit that asks for it, where no
    /// invalidation does it on the way (6.8).
    pub(crate) fn flush_write_buffers(&self) -> Result<(), CommandError> {
        let result = self.pulse_global(global::WRITE_BUFFER, 0);
        self.told.add(&Counters { write_buffer_flushes: 1, ..Counters::NONE });
        result.map_err(|_| CommandError::Deadline)
    }

    /// Takes the command registers, waiting for whoever has them.
    pub(crate) fn claim(&self) -> Result<(), CommandError> {
        let taken = self.poll(|| {
            self.locked(|state| {
                let free = match state.claim {
                    Claim::Free => true,
                    Claim::Held => false,
                    Claim::Stuck => self.registers_idle(),
                };
                if free {
                    state.claim = Claim::Held;
                }
                free
            })
        });
        if taken { Ok(()) } else { Err(CommandError::Deadline) }
    }

    /// Gives the command registers back; `done` says that the command in them finished.
    pub(crate) fn release(&self, done: bool) {
        self.locked(|state| state.claim = if done { Claim::Free } else { Claim::Stuck });
    }

    fn registers_idle(&self) -> bool {
        let iotlb = self.extended_capabilities().iotlb_offset() + 8;
        self.registers.read32(GSTS) & global::WRITE_BUFFER == 0
            && self.registers.read64(CCMD) & context_command::INVALIDATE == 0
            && self.registers.read64(iotlb) & iotlb_command::INVALIDATE == 0
    }
}
