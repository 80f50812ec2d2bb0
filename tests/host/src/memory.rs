//! Machine memory as the hypervisor uses it: tables, queues, shared pages.
//!
//! [`Ram`] is what a machine offers; [`Memory`] puts the crates' traits over it.

use std::{
    fmt,
    sync::{
        Arc,
        atomic::{AtomicU16, AtomicU64, Ordering},
    },
};

use flush::{DomainId, FreshTable, Mfn, TablePage};
use stage2::TableMemory;

/// The owner number of pages that belong to the hypervisor.
pub(crate) const HYPERVISOR: DomainId = DomainId::new(0x7fff);

/// Memory of a machine, by frame and word, and the clock that goes with it.
pub trait Ram {
    /// How many frames there are.
    fn frames(&self) -> u64;
    /// Reads word `index` of a frame.
    fn read(&self, mfn: Mfn, index: usize) -> u64;
    /// Reads words from `index` on, as bytes in memory order.
    #[inline]
    fn read_words(&self, mfn: Mfn, index: usize, words: &mut [[u8; 8]]) {
        for (offset, word) in words.iter_mut().enumerate() {
            *word = self.read(mfn, index + offset).to_le_bytes();
        }
    }
    /// Writes word `index` of a frame.
    fn write(&self, mfn: Mfn, index: usize, value: u64);
    /// Replaces a word in one step; visible to hardware on return.
    fn swap(&self, mfn: Mfn, index: usize, value: u64) -> u64;
    /// Replaces a word in one step if it is `current`; visible to hardware on return.
    ///
    /// # Errors
    /// The word as it was found.
    fn compare_exchange(&self, mfn: Mfn, index: usize, current: u64, new: u64) -> Result<(), u64>;
    /// The words of a frame, shared with a guest.
    fn words(&self, mfn: Mfn) -> Option<Arc<[AtomicU64; 512]>>;
    /// A zeroed frame for `owner`.
    fn allocate(&self, owner: DomainId) -> Option<Mfn>;
    /// Gives a frame back: the next allocation may return it.
    fn release(&self, mfn: Mfn);
    /// Monotonic time in microseconds; asking may let hardware proceed.
    fn now_us(&self) -> u64;
    /// Lets hardware proceed.
    fn relax(&self);
}

struct Inner<R> {
    ram: R,
    live: Vec<AtomicU16>,
    tables: AtomicU64,
    unlinked: AtomicU64,
    unlink_lies: AtomicU64,
}

/// Memory with the bookkeeping that tables need. Clones are the same memory.
pub struct Memory<R>(Arc<Inner<R>>);

impl<R> Clone for Memory<R> {
    fn clone(&self) -> Self {
        Self(Arc::clone(&self.0))
    }
}

impl<R> fmt::Debug for Memory<R> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Memory").finish_non_exhaustive()
    }
}

impl<R: Ram> Memory<R> {
    /// All memory of a machine.
    pub fn new(ram: R) -> Self {
        let live = (0..ram.frames()).map(|_| AtomicU16::new(0)).collect();
        Self(Arc::new(Inner {
            ram,
            live,
            tables: AtomicU64::new(0),
            unlinked: AtomicU64::new(0),
            unlink_lies: AtomicU64::new(0),
        }))
    }

    /// The machine.
    pub fn ram(&self) -> &R {
        &self.0.ram
    }

    /// How many table pages are in use, those that wait for a flush included.
    pub fn tables_in_use(&self) -> u64 {
        self.0.tables.load(Ordering::Relaxed)
    }

    /// Takes back a table page that nothing leads to any more.
    pub fn free_table(&self, table: FreshTable) {
        self.0.tables.fetch_sub(1, Ordering::Relaxed);
        self.0.ram.release(table.mfn());
    }

    /// Plants a bug: from now on a table page is freed as soon as it is unlinked.
    pub fn free_tables_at_unlink(&self) {
        self.0.unlink_lies.store(1, Ordering::Relaxed);
    }

    fn count(&self, table: Mfn) -> Option<&AtomicU16> {
        usize::try_from(table.get()).ok().and_then(|index| self.0.live.get(index))
    }
}

impl<R: Ram> TableMemory for Memory<R> {
    fn read(&self, table: Mfn, index: usize) -> u64 {
        self.0.ram.read(table, index)
    }

    fn swap(&self, table: Mfn, index: usize, new: u64) -> u64 {
        self.0.ram.swap(table, index, new)
    }

    fn compare_exchange(
        &self,
        table: Mfn,
        index: usize,
        current: u64,
        new: u64,
    ) -> Result<(), u64> {
        self.0.ram.compare_exchange(table, index, current, new)
    }

    fn allocate(&self) -> Option<FreshTable> {
        let mfn = self.0.ram.allocate(HYPERVISOR)?;
        self.0.tables.fetch_add(1, Ordering::Relaxed);
        if let Some(count) = self.count(mfn) {
            count.store(0, Ordering::Relaxed);
        }
        Some(FreshTable::new(mfn))
    }

    fn discard(&self, table: FreshTable) {
        self.free_table(table);
    }

    fn unlink(&self, table: Mfn) -> TablePage {
        self.0.unlinked.fetch_add(1, Ordering::Relaxed);
        if self.0.unlink_lies.load(Ordering::Relaxed) != 0 {
            self.0.ram.release(table);
        }
        TablePage::unlinked(table)
    }

    fn unlinked(&self) -> Option<u64> {
        Some(self.0.unlinked.load(Ordering::Relaxed))
    }

    fn live(&self, table: Mfn) -> u16 {
        self.count(table).map_or(0, |count| count.load(Ordering::Relaxed))
    }

    fn add_live(&self, table: Mfn, entries: u16) {
        if let Some(count) = self.count(table) {
            // The lock around the tree's edits is held: no other writer.
            count.store(count.load(Ordering::Relaxed) + entries, Ordering::Relaxed);
        }
    }

    fn drop_live(&self, table: Mfn) -> u16 {
        self.count(table).map_or(0, |count| {
            let left = count.load(Ordering::Relaxed) - 1;
            count.store(left, Ordering::Relaxed);
            left
        })
    }
}

impl<R: Ram> iommu_vtd::Platform for Memory<R> {
    fn read(&self, page: Mfn, index: usize) -> u64 {
        self.0.ram.read(page, index)
    }

    fn write(&self, page: Mfn, index: usize, value: u64) {
        self.0.ram.write(page, index, value);
    }

    fn now_us(&self) -> u64 {
        self.0.ram.now_us()
    }

    fn relax(&self) {
        self.0.ram.relax();
    }
}

/// Reads bytes of a frame, word by word.
#[inline(always)]
pub(crate) fn read_bytes<R: Ram>(ram: &R, mfn: Mfn, mut offset: usize, mut bytes: &mut [u8]) {
    while !bytes.is_empty() {
        let start = offset % 8;
        let count = if start == 0 && bytes.len() >= 8 {
            let words = bytes.as_chunks_mut().0;
            ram.read_words(mfn, offset / 8, words);
            words.len() * 8
        } else {
            let count = bytes.len().min(8 - start);
            let word = ram.read(mfn, offset / 8).to_le_bytes();
            bytes[..count].copy_from_slice(&word[start..start + count]);
            count
        };
        (bytes, offset) = (&mut bytes[count..], offset + count);
    }
}

/// Writes bytes of a frame, word by word.
pub(crate) fn write_bytes<R: Ram>(ram: &R, mfn: Mfn, mut offset: usize, mut bytes: &[u8]) {
    while !bytes.is_empty() {
        let (source, left) = bytes.split_at(bytes.len().min(8 - offset % 8));
        write_in_word(ram, mfn, offset, source);
        (bytes, offset) = (left, offset + source.len());
    }
}

/// Writes bytes that lie in one word of a frame.
#[inline]
pub(crate) fn write_in_word<R: Ram>(ram: &R, mfn: Mfn, offset: usize, bytes: &[u8]) {
    let word = match bytes.as_array() {
        Some(whole) => *whole,
        None => {
            let mut word = ram.read(mfn, offset / 8).to_le_bytes();
            let target = &mut word[offset % 8..offset % 8 + bytes.len()];
            match (target.as_mut_array::<2>(), bytes.as_array()) {
                (Some(target), Some(bytes)) => *target = *bytes,
                _ => target.copy_from_slice(bytes),
            }
            word
        }
    };
    ram.write(mfn, offset / 8, u64::from_le_bytes(word));
}
