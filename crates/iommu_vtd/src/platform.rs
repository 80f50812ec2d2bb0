//! What the embedding hypervisor supplies: registers, memory, time, a lock.
//!
//! Four small traits. All methods take `&self`; a unit is shared between CPUs and
//! holds no lock while it waits.

use flush::Mfn;

/// The register page of one remapping unit.
///
/// Accesses are volatile, uncached, in program order, and ordered after earlier
/// stores to memory. `offset` is a multiple of the access size. Fault records and
/// IOTLB registers may lie beyond the first page: they start below 16 KiB and end
/// below 20 KiB (11.4, 11.4.2, 11.4.3).
pub trait Mmio {
    /// Reads a 32-bit register.
    fn read32(&self, offset: u32) -> u32;
    /// Reads a 64-bit register.
    fn read64(&self, offset: u32) -> u64;
    /// Writes a 32-bit register.
    fn write32(&self, offset: u32, value: u32);
    /// Writes a 64-bit register.
    fn write64(&self, offset: u32, value: u64);
}

/// The memory of invalidation queues, and time.
///
/// One value may serve all units. Queue pages and the status page are ordinary
/// write-back memory: hardware always snoops its accesses to them (11.4.3).
pub trait Platform {
    /// Reads the 64-bit word `index` (0 to 511) of `page`, as hardware last wrote it.
    ///
    /// An acquire load: what hardware did before its status write is seen after it.
    fn read(&self, page: Mfn, index: usize) -> u64;

    /// Writes the 64-bit word `index` (0 to 511) of `page`.
    ///
    /// A release store: it is visible to hardware before a later register write.
    fn write(&self, page: Mfn, index: usize, value: u64);

    /// Monotonic time, in microseconds from any start.
    fn now_us(&self) -> u64;

    /// Called between two polls: pauses, and serves interprocessor requests of CPUs
    /// that may in turn be waiting for this one.
    fn relax(&self);
}

/// A lock of the embedder around a `T`.
///
/// Closures run for a bounded, short time, never wait, and never take another lock
/// of this crate from inside a unit's. A lock that an interrupt handler may take as
/// well has to be interrupt-safe.
pub trait Guarded<T> {
    /// Runs `f` with exclusive access.
    fn with<R>(&self, f: impl FnOnce(&mut T) -> R) -> R;
}

impl<T, G: Guarded<T>> Guarded<T> for &G {
    fn with<R>(&self, f: impl FnOnce(&mut T) -> R) -> R {
        (**self).with(f)
    }
}

impl<P: Platform> Platform for &P {
    fn read(&self, page: Mfn, index: usize) -> u64 {
        (**self).read(page, index)
    }

    fn write(&self, page: Mfn, index: usize, value: u64) {
        (**self).write(page, index, value);
    }

    fn now_us(&self) -> u64 {
        (**self).now_us()
    }

    fn relax(&self) {
        (**self).relax();
    }
}

impl<M: Mmio> Mmio for &M {
    fn read32(&self, offset: u32) -> u32 {
        (**self).read32(offset)
    }

    fn read64(&self, offset: u32) -> u64 {
        (**self).read64(offset)
    }

    fn write32(&self, offset: u32, value: u32) {
        (**self).write32(offset, value);
    }

    fn write64(&self, offset: u32, value: u64) {
        (**self).write64(offset, value);
    }
}
