//! The machine: memory, processors, units and devices behind one lock
//!
//! A [`Machine`] is a handle; clones are the same machine. Every method takes `&self`, does one thing at one
//! moment ([`Op`]) and returns. Host methods (read, write, allocate, release) are what the hypervisor does.

use crate::audit;
use crate::counters::{Counters, CpuCounters};
use crate::cpu::{Cpu, Root};
use crate::decode::Limits;
use crate::failure::{Failure, Misuse, OperationKind};
use crate::policy::{Policy, Whim};
use crate::ram::{FrameInfo, FrameState, Ram, View};
use crate::types::{Frame, Op, Owner, Space};
use crate::vtd::Unit;
use crate::vtd::dma::Fabric;
use crate::witness::{Witness, WitnessKind};
use crate::world::World;
use std::collections::BTreeMap;
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, Mutex, PoisonError};

/// What a machine is made of.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct MachineConfig {
    /// Frames of RAM, from frame 0, which is never allocated.
    pub frames: u64,
    /// Processors.
    pub cpus: usize,
    /// What the hardware does where it may choose.
    pub policy: Policy,
    /// What the processors support.
    pub limits: Limits,
}

impl Default for MachineConfig {
    /// 4096 frames, 4 greedy processors with everything.
    fn default() -> Self {
        Self { frames: 4096, cpus: 4, policy: Policy::Greedy, limits: Limits::FULL }
    }
}

pub(crate) struct State {
    pub(crate) world: World,
    pub(crate) cpus: Vec<Cpu>,
    pub(crate) units: Vec<Unit>,
    pub(crate) fabric: Fabric,
    /// What each tag stands for now.
    pub(crate) spaces: BTreeMap<u64, Root>,
}

/// A handle to the machine. Cheap to clone, usable from any thread.
#[derive(Clone)]
pub struct Machine {
    state: Arc<Mutex<State>>,
}

impl Default for Machine {
    fn default() -> Self {
        Self::new(MachineConfig::default())
    }
}

impl Machine {
    /// Builds a machine without VT-d units; add them with [`Machine::add_unit`].
    #[must_use]
    pub fn new(config: MachineConfig) -> Self {
        let mut world =
            World::new(Ram::new(config.frames), config.limits, Whim::new(config.policy));
        world.counters.cpus = vec![CpuCounters::default(); config.cpus];
        Self {
            state: Arc::new(Mutex::new(State {
                world,
                cpus: (0..config.cpus).map(|_| Cpu::default()).collect(),
                units: Vec::new(),
                fabric: Fabric::default(),
                spaces: BTreeMap::new(),
            })),
        }
    }

    pub(crate) fn with<R>(&self, act: impl FnOnce(&mut State) -> R) -> R {
        // A test that panicked while holding the lock has said what it had to say.
        act(&mut self.state.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

/// Memory, as the host uses it.
impl Machine {
    /// Gives a free frame to `owner`: the one released last. Its content is left as it is.
    #[must_use]
    pub fn allocate(&self, owner: Owner) -> Option<Frame> {
        self.with(|state| {
            state.world.step();
            state.world.ram.allocate(owner)
        })
    }

    /// As [`Machine::allocate`], filled with zeros: for tables.
    #[must_use]
    pub fn allocate_zeroed(&self, owner: Owner) -> Option<Frame> {
        self.with(|state| {
            state.world.step();
            let frame = state.world.ram.allocate(owner)?;
            state.world.ram.zero(frame);
            Some(frame)
        })
    }

    /// Gives `owner` 2^order free frames that start at a multiple of 2^order.
    #[must_use]
    pub fn allocate_block(&self, owner: Owner, order: u8) -> Option<Frame> {
        self.with(|state| {
            state.world.step();
            state.world.ram.allocate_block(owner, order)
        })
    }

    /// Marks a frame as given up but kept back until a flush has completed.
    pub fn hold(&self, frame: Frame) {
        self.with(|state| {
            state.world.step();
            if let Err(misuse) = state.world.ram.hold(frame) {
                state.world.misuse(misuse);
            }
        });
    }

    /// Frees a frame: a new generation, filled with poison, first in line to be allocated again.
    pub fn release(&self, frame: Frame) {
        self.with(|state| {
            let op = state.world.step();
            if let Err(misuse) = state.world.ram.release(frame, op) {
                state.world.misuse(misuse);
            }
        });
    }

    /// Hands a frame straight to another owner: a new generation, content kept.
    pub fn give(&self, frame: Frame, owner: Owner) {
        self.with(|state| {
            let op = state.world.step();
            if let Err(misuse) = state.world.ram.give(frame, owner, op) {
                state.world.misuse(misuse);
            }
        });
    }

    /// Ends one space's use of a frame that others go on using, as the last unmap of a grant does: from now on
    /// a translation of it in `space` is stale unless its entry is written after this.
    pub fn revoke(&self, frame: Frame, space: Space) {
        self.revoke_where(frame, space, None);
    }

    /// As [`Machine::revoke`], for one input page only: the space still uses the frame elsewhere.
    pub fn revoke_page(&self, frame: Frame, space: Space, page: u64) {
        self.revoke_where(frame, space, Some(page));
    }

    fn revoke_where(&self, frame: Frame, space: Space, page: Option<u64>) {
        self.with(|state| {
            let op = state.world.step();
            if let Err(misuse) = state.world.ram.revoke(frame, space, page, op) {
                state.world.misuse(misuse);
            }
        });
    }

    /// What is known about a frame; `None` outside RAM.
    #[must_use]
    pub fn frame(&self, frame: Frame) -> Option<FrameInfo> {
        self.with(|state| state.world.ram.info(frame))
    }

    /// Every frame that is not free, in order.
    #[must_use]
    pub fn frames_in_use(&self) -> Vec<Frame> {
        self.with(|state| state.world.ram.in_use().collect())
    }

    /// The frame's words, to be used in place (shared grant pages). Stores through them are not tracked: the
    /// history of a witness does not know them and units that do not snoop see them at once. `None` outside RAM.
    #[must_use]
    pub fn words(&self, frame: Frame) -> Option<Arc<[AtomicU64; 512]>> {
        self.with(|state| state.world.ram.words(frame))
    }

    /// A host load. All ones, and a [`Misuse`], outside RAM.
    #[must_use]
    pub fn read64(&self, address: u64) -> u64 {
        self.with(|state| {
            state.world.step();
            state.check_host(address, 8);
            state.world.ram.read(address, View::Coherent).unwrap_or(u64::MAX)
        })
    }

    /// A host load of half a word. All ones, and a [`Misuse`], outside RAM.
    #[must_use]
    pub fn read32(&self, address: u64) -> u32 {
        self.with(|state| {
            state.world.step();
            state.check_host(address, 4);
            let mut bytes = [0xff; 4];
            state.world.ram.read_bytes(address & !3, &mut bytes);
            u32::from_le_bytes(bytes)
        })
    }

    /// A host store. Dropped, with a [`Misuse`], outside RAM.
    pub fn write64(&self, address: u64, value: u64) {
        // The old word is of no interest here.
        let _old: u64 = self.swap64(address, value);
    }

    /// A host store of half a word. Dropped, with a [`Misuse`], outside RAM.
    pub fn write32(&self, address: u64, value: u32) {
        self.with(|state| {
            state.world.step();
            state.check_host(address, 4);
            state.world.ram.write_bytes(address & !3, &value.to_le_bytes());
        });
    }

    /// A host exchange: stores `value`, gives the old word. All ones, and a [`Misuse`], outside RAM.
    #[must_use]
    pub fn swap64(&self, address: u64, value: u64) -> u64 {
        self.with(|state| {
            let op = state.world.step();
            state.check_host(address, 8);
            let old = state.world.ram.host_store(address & !7, value, op);
            if old.is_some_and(|old| old != value) {
                let changes = &mut state.world.counters.host_changes;
                *changes = changes.saturating_add(1);
            }
            old.unwrap_or(u64::MAX)
        })
    }

    /// A host compare-exchange.
    ///
    /// # Errors
    /// The word found, if it was not `expected`; all ones, and a [`Misuse`], outside RAM.
    pub fn compare_exchange64(&self, address: u64, expected: u64, value: u64) -> Result<u64, u64> {
        self.with(|state| {
            let op = state.world.step();
            state.check_host(address, 8);
            state
                .world
                .ram
                .host_compare_exchange(address & !7, expected, value, op)
                .unwrap_or(Err(u64::MAX))
        })
    }

    /// A host load of bytes within one frame. False outside RAM.
    pub fn read_bytes(&self, address: u64, bytes: &mut [u8]) -> bool {
        self.with(|state| {
            state.world.step();
            state.world.ram.read_bytes(address, bytes)
        })
    }

    /// A host store of bytes within one frame. False outside RAM.
    pub fn write_bytes(&self, address: u64, bytes: &[u8]) -> bool {
        self.with(|state| {
            state.world.step();
            state.world.ram.write_bytes(address, bytes)
        })
    }

    /// Looks at a word without counting as a host access, free frames included. `None` outside RAM.
    #[must_use]
    pub fn peek64(&self, address: u64) -> Option<u64> {
        self.with(|state| state.world.ram.read(address, View::Coherent))
    }

    /// Writes the 64-byte cache line around `address` back, so that a unit that does not snoop sees it.
    pub fn write_back(&self, address: u64) {
        self.with(|state| {
            state.world.step();
            state.world.ram.write_back(address);
            let count = &mut state.world.counters.write_backs;
            *count = count.saturating_add(1);
        });
    }
}

impl State {
    fn check_host(&mut self, address: u64, size: u64) {
        let frame = Frame::containing(address);
        if address & (size - 1) != 0 {
            self.world.misuse(Misuse::Unaligned(address));
        }
        match self.world.ram.info(frame) {
            None => self.world.misuse(Misuse::OutsideRam(address)),
            Some(info) if info.state == FrameState::Free => {
                self.world.misuse(Misuse::FreeFrame(frame));
            }
            Some(_) => {}
        }
    }
}

/// Time, judgement and books.
impl Machine {
    /// Lets hardware work go on everywhere: call it in every loop that waits.
    pub fn tick(&self) {
        self.with(|state| {
            state.world.step();
            let State { world, units, fabric, .. } = state;
            for unit in units.iter_mut() {
                unit.tick(world, fabric);
            }
            if state.world.whim.chance(8) {
                state.speculate();
            }
        });
    }

    /// Everything walks what it can reach right now and caches it, as prefetchers may at any time.
    pub fn speculate(&self) {
        self.with(|state| {
            state.world.step();
            state.speculate();
        });
    }

    /// The present moment.
    #[must_use]
    pub fn now(&self) -> Op {
        self.with(|state| state.world.now())
    }

    /// Everything wrong seen so far, oldest first.
    #[must_use]
    pub fn witnesses(&self) -> Vec<Witness> {
        self.with(|state| state.world.witnesses.clone())
    }

    /// As [`Machine::witnesses`], and forgets them.
    #[must_use]
    pub fn take_witnesses(&self) -> Vec<Witness> {
        self.with(|state| std::mem::take(&mut state.world.witnesses))
    }

    /// How many witnesses of one kind there are.
    #[must_use]
    pub fn count(&self, kind: WitnessKind) -> usize {
        self.with(|state| {
            state.world.witnesses.iter().filter(|witness| witness.kind == kind).count()
        })
    }

    /// Looks through all caches and DMA in flight for what must not be there: references to frames and tables
    /// given away (always wrong), and entries that allow more than the tables do for frames that are not held
    /// (wrong once the operation that changed the tables has returned; which of the two the kind says).
    /// Records nothing.
    #[must_use]
    pub fn audit(&self) -> Vec<Witness> {
        self.with(|state| audit::everything(state))
    }

    /// Declares that the tables of `space` for input pages `first..=last` are final and flushed: entries there
    /// that allow more are recorded as witnesses now, and each later use of one is a witness too. Returns how
    /// many there are.
    pub fn settled(&self, space: Space, first: u64, last: u64) -> usize {
        self.with(|state| {
            state.world.step();
            audit::settle(state, space, first, last)
        })
    }

    /// What the code under test did that it must not do, apart from staleness.
    #[must_use]
    pub fn misuses(&self) -> Vec<Misuse> {
        self.with(|state| state.world.misuses.clone())
    }

    /// As [`Machine::misuses`], and forgets them.
    #[must_use]
    pub fn take_misuses(&self) -> Vec<Misuse> {
        self.with(|state| std::mem::take(&mut state.world.misuses))
    }

    /// Counts so far.
    #[must_use]
    pub fn counters(&self) -> Counters {
        self.with(|state| {
            let mut counters = state.world.counters.clone();
            counters.units = state.units.iter().map(|unit| unit.counters).collect();
            counters
        })
    }

    /// Hardware operations of one kind so far.
    #[must_use]
    pub fn operations_of(&self, kind: OperationKind) -> u64 {
        self.with(|state| state.world.operations_of(kind))
    }

    /// Makes the `n`-th hardware operation from now fail (1 is the next; 0 counts as 1). Several can be armed.
    pub fn fail_operation(&self, n: u64, failure: Failure) {
        self.with(|state| state.world.fail(n, failure));
    }

    /// Disarms what has not failed yet and lets hung units and interrupt lines go on.
    pub fn repair(&self) {
        self.with(|state| {
            state.world.clear_failures();
            for unit in &mut state.units {
                unit.repair();
            }
            for cpu in &mut state.cpus {
                cpu.repair();
            }
        });
    }
}
