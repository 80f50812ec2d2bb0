//! The model's memory and registers, as the crates ask for them.
//!
//! [`ModelRam`] is where tables, queues and guests live; [`Registers`] are those of one
//! remapping unit.

use std::{
    fmt,
    sync::{
        Arc, Mutex,
        atomic::{AtomicU64, Ordering},
    },
};

use flush::{DomainId, Mfn};
use hwmodel::{Frame, Machine, Owner, UnitId};
use iommu_vtd::Mmio;

use crate::{
    Ram,
    hypervisor::lock,
    turns::{Point, point},
};

/// The model's memory.
pub struct ModelRam {
    pub(super) machine: Machine,
    pub(super) frames: u64,
    /// Units do not snoop the processors' caches.
    pub(super) write_back: bool,
    time: AtomicU64,
    pub(super) observer: Mutex<Option<Observer>>,
    /// Frames asked for so far, and which of these requests is refused.
    allocations: AtomicU64,
    refused: AtomicU64,
}

/// Called after each step of the hypervisor that hardware or a guest could see: an access
/// to memory, a turn of a wait. It must not use the world's memory itself, only the
/// machine, and what of the world can be shared.
pub type Observer = Box<dyn Fn() + Send>;

impl fmt::Debug for ModelRam {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ModelRam").finish_non_exhaustive()
    }
}

impl ModelRam {
    /// The first `frames` frames of a machine, as processors see them.
    pub fn new(machine: Machine, frames: u64) -> Self {
        Self {
            machine,
            frames,
            write_back: false,
            time: AtomicU64::new(0),
            observer: Mutex::default(),
            allocations: AtomicU64::new(0),
            refused: AtomicU64::new(0),
        }
    }

    /// How many frames were asked for so far, one by one.
    pub fn allocations(&self) -> u64 {
        self.allocations.load(Ordering::Relaxed)
    }

    /// Refuses the `n`-th request for a frame from now on, where 1 is the next; 0 refuses
    /// none.
    pub fn refuse_allocation(&self, n: u64) {
        let at = if n == 0 { 0 } else { self.allocations().saturating_add(n) };
        self.refused.store(at, Ordering::Relaxed);
    }

    fn address(mfn: Mfn, index: usize) -> u64 {
        (mfn.get() << 12) + 8 * index as u64
    }

    fn visible(&self, address: u64) {
        if self.write_back {
            self.machine.write_back(address);
        }
        self.observed();
        point(Point::Entry);
    }

    fn observed(&self) {
        if let Some(observer) = &*lock(&self.observer) {
            observer();
        }
    }
}

impl Ram for ModelRam {
    fn frames(&self) -> u64 {
        self.frames
    }

    fn read(&self, mfn: Mfn, index: usize) -> u64 {
        self.machine.read64(Self::address(mfn, index))
    }

    fn write(&self, mfn: Mfn, index: usize, value: u64) {
        self.machine.write64(Self::address(mfn, index), value);
        self.observed();
    }

    fn swap(&self, mfn: Mfn, index: usize, value: u64) -> u64 {
        let address = Self::address(mfn, index);
        let old = self.machine.swap64(address, value);
        self.visible(address);
        old
    }

    fn compare_exchange(&self, mfn: Mfn, index: usize, current: u64, new: u64) -> Result<(), u64> {
        let address = Self::address(mfn, index);
        self.machine.compare_exchange64(address, current, new)?;
        self.visible(address);
        Ok(())
    }

    fn words(&self, mfn: Mfn) -> Option<Arc<[AtomicU64; 512]>> {
        self.machine.words(Frame(mfn.get()))
    }

    fn allocate(&self, owner: DomainId) -> Option<Mfn> {
        let number = self.allocations.fetch_add(1, Ordering::Relaxed) + 1;
        if number == self.refused.load(Ordering::Relaxed) {
            return None;
        }
        let frame = self.machine.allocate_zeroed(Owner(u32::from(owner.get())))?;
        Some(Mfn::new(frame.0))
    }

    fn release(&self, mfn: Mfn) {
        self.machine.release(Frame(mfn.get()));
    }

    fn now_us(&self) -> u64 {
        self.time.load(Ordering::Relaxed)
    }

    fn relax(&self) {
        self.time.fetch_add(1, Ordering::Relaxed);
        self.machine.tick();
        self.observed();
        point(Point::Poll);
    }
}

/// The registers of a model unit.
#[derive(Clone)]
pub struct Registers {
    pub(super) machine: Machine,
    pub(super) unit: UnitId,
}

impl fmt::Debug for Registers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Registers").field("unit", &self.unit).finish_non_exhaustive()
    }
}

impl Mmio for Registers {
    fn read32(&self, offset: u32) -> u32 {
        self.machine.register_read32(self.unit, offset.into())
    }

    fn read64(&self, offset: u32) -> u64 {
        self.machine.register_read64(self.unit, offset.into())
    }

    fn write32(&self, offset: u32, value: u32) {
        self.machine.register_write32(self.unit, offset.into(), value);
        point(Point::Register);
    }

    fn write64(&self, offset: u32, value: u64) {
        self.machine.register_write64(self.unit, offset.into(), value);
        point(Point::Register);
    }
}
