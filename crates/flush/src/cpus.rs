//! Sets of CPUs: the live ones that CPUs join and leave, and snapshots of them.
//!
//! A second-stage table has two live sets. CPUs that *run* the guest must be kicked.
//! CPUs that *may hold* translations must invalidate before they enter again; a CPU
//! leaves that set only by invalidating, since tagged entries survive an exit.
//!
//! The protocol between an editor and a CPU that enters: the editor changes the
//! table, fences, takes a snapshot; the CPU joins, fences, and only then loads the
//! root. Whichever fence comes first, either the snapshot has the CPU or the CPU
//! sees the changed table. Both fences are inside [`LiveCpus`].

use core::{fmt, sync::atomic::Ordering};

use bitvec::array::BitArray;

use crate::sync::{AtomicU64, array_of, const_constructor, fence};

const WORDS: usize = 4;

/// A snapshot of some CPUs, by number from 0 to [`CpuSet::CAPACITY`] - 1.
#[derive(Clone, Copy, Default, PartialEq, Eq)]
pub struct CpuSet(BitArray<[u64; WORDS]>);

impl CpuSet {
    /// How many CPUs a set can tell apart.
    pub const CAPACITY: usize = WORDS * 64;

    /// The set of no CPU.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// The set of the CPUs below `count`, at most [`Self::CAPACITY`] of them.
    #[must_use]
    pub fn first(count: usize) -> Self {
        let mut set = Self::new();
        set.0[..count.min(Self::CAPACITY)].fill(true);
        set
    }

    /// Adds a CPU; `false` if its number is too high.
    #[must_use]
    pub fn insert(&mut self, cpu: usize) -> bool {
        let known = cpu < Self::CAPACITY;
        if known {
            self.0.set(cpu, true);
        }
        known
    }

    /// Removes a CPU; one that is not in the set changes nothing.
    pub fn remove(&mut self, cpu: usize) {
        if cpu < Self::CAPACITY {
            self.0.set(cpu, false);
        }
    }

    /// Whether the CPU is in the set.
    #[must_use]
    pub fn contains(&self, cpu: usize) -> bool {
        self.0.get(cpu).is_some_and(|bit| *bit)
    }

    /// How many CPUs are in the set.
    #[must_use]
    pub fn len(&self) -> usize {
        self.0.count_ones()
    }

    /// Whether no CPU is in the set.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.0.not_any()
    }

    /// The CPUs, lowest first.
    pub fn iter(&self) -> impl Iterator<Item = usize> {
        self.0.iter_ones()
    }
}

impl fmt::Debug for CpuSet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_set().entries(self.iter()).finish()
    }
}

/// A set that CPUs join and leave while others look at it.
#[derive(Debug, Default)]
pub struct LiveCpus([AtomicU64; WORDS]);

impl LiveCpus {
    const_constructor! {
        /// The set of no CPU.
        #[must_use]
        pub const fn new() -> Self {
            Self(array_of!(AtomicU64::new(0)))
        }
    }

    fn place(&self, cpu: usize) -> Option<(&AtomicU64, u64)> {
        self.0.get(cpu / 64).map(|word| (word, 1 << (cpu % 64)))
    }

    /// Adds a CPU, and orders that before all it reads from now on.
    ///
    /// `false` if its number is too high: it must not enter.
    #[must_use]
    pub fn join(&self, cpu: usize) -> bool {
        let Some((word, bit)) = self.place(cpu) else { return false };
        word.fetch_or(bit, Ordering::SeqCst);
        fence(Ordering::SeqCst);
        true
    }

    /// Removes a CPU, after all it did before.
    pub fn leave(&self, cpu: usize) {
        self.test_and_clear(cpu);
    }

    /// Removes a CPU and says whether it was in the set.
    pub fn test_and_clear(&self, cpu: usize) -> bool {
        self.place(cpu).is_some_and(|(word, bit)| word.fetch_and(!bit, Ordering::SeqCst) & bit != 0)
    }

    /// Whether the CPU is in the set now.
    #[must_use]
    pub fn contains(&self, cpu: usize) -> bool {
        self.place(cpu).is_some_and(|(word, bit)| word.load(Ordering::SeqCst) & bit != 0)
    }

    /// Adds every CPU of `set`.
    pub fn join_all(&self, set: &CpuSet) {
        for (word, bits) in self.0.iter().zip(set.0.as_raw_slice()) {
            if *bits != 0 {
                word.fetch_or(*bits, Ordering::SeqCst);
            }
        }
    }

    /// The CPUs that are in the set, taken after all that the caller wrote before.
    #[must_use]
    pub fn snapshot(&self) -> CpuSet {
        fence(Ordering::SeqCst);
        let mut words = [0; WORDS];
        for (to, from) in words.iter_mut().zip(&self.0) {
            *to = from.load(Ordering::SeqCst);
        }
        CpuSet(BitArray::new(words))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    extern crate std;
    use std::vec::Vec;

    #[test]
    fn a_snapshot_holds_exactly_the_cpus_that_joined_and_did_not_leave() {
        let live = LiveCpus::new();
        for cpu in [0, 63, 64, 255] {
            assert!(live.join(cpu));
        }
        live.leave(64);
        assert!(live.test_and_clear(63));
        assert!(!live.test_and_clear(63));
        assert_eq!(live.snapshot().iter().collect::<Vec<_>>(), [0, 255]);
        live.join_all(&CpuSet::first(2));
        assert_eq!(live.snapshot().iter().collect::<Vec<_>>(), [0, 1, 255]);
        assert!(live.contains(1) && !live.contains(2));
    }

    #[test]
    fn cpu_numbers_past_the_capacity_are_refused_not_aliased() {
        let live = LiveCpus::new();
        assert!(!live.join(256));
        live.leave(usize::MAX);
        assert!(live.snapshot().is_empty());
        let mut set = CpuSet::new();
        assert!(!set.insert(256) && set.insert(255));
        set.remove(1000);
        assert!(!set.contains(256) && set.contains(255));
        assert_eq!(set.len(), 1);
        assert_eq!(CpuSet::first(1000).len(), CpuSet::CAPACITY);
    }
}
