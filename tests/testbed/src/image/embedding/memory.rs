//! Physical memory as the crates see it: page tables, queues, and time.
//!
//! [`Memory`] holds nothing: it stands for all managed frames, and implements the traits
//! that `stage2` and `iommu_vtd` bring. A word of a frame that is not managed reads as 0
//! and takes no writes.

use core::sync::atomic::{AtomicU64, Ordering};

use flush::{FreshTable, Mfn};
use iommu_vtd::Platform;
use stage2::TableMemory;

use super::page_info::PageInfo;
use crate::{arch, clock, memory};

/// All managed memory.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Memory;

fn word(frame: Mfn, index: usize) -> Option<&'static AtomicU64> {
    memory::words(frame)?.get(index)
}

impl Memory {
    /// Take back a table page that nothing leads to any more.
    pub(crate) fn free_table(table: FreshTable) {
        // A frame that is not allocated cannot come back twice: the allocator refuses it,
        // and a table that is lost by this is no danger.
        memory::release(table.mfn()).ok();
    }
}

impl TableMemory for Memory {
    fn read(&self, table: Mfn, index: usize) -> u64 {
        word(table, index).map_or(0, |word| word.load(Ordering::Acquire))
    }

    // Written back at once: the unit of this machine does not look into the processor's
    // caches (`Unit::needs_write_back`).
    fn swap(&self, table: Mfn, index: usize, new: u64) -> u64 {
        word(table, index).map_or(0, |word| {
            let old = word.swap(new, Ordering::SeqCst);
            memory::write_back(word);
            old
        })
    }

    fn compare_exchange(
        &self,
        table: Mfn,
        index: usize,
        current: u64,
        new: u64,
    ) -> Result<(), u64> {
        let word = word(table, index).ok_or(0_u64)?;
        word.compare_exchange(current, new, Ordering::SeqCst, Ordering::SeqCst)?;
        memory::write_back(word);
        Ok(())
    }

    fn allocate(&self) -> Option<FreshTable> {
        let frame = memory::allocate().ok()?;
        PageInfo::of(frame)?.live.store(0, Ordering::Relaxed);
        // One word of each cache line: the zeros go to memory.
        memory::words(frame)?.iter().step_by(8).for_each(memory::write_back);
        Some(FreshTable::new(frame))
    }

    fn discard(&self, table: FreshTable) {
        Self::free_table(table);
    }

    fn live(&self, table: Mfn) -> u16 {
        PageInfo::of(table).map_or(0, |info| info.live.load(Ordering::Relaxed))
    }

    fn add_live(&self, table: Mfn, entries: u16) {
        if let Some(info) = PageInfo::of(table) {
            info.live.fetch_add(entries, Ordering::Relaxed);
        }
    }

    fn drop_live(&self, table: Mfn) -> u16 {
        PageInfo::of(table)
            .map_or(0, |info| info.live.fetch_sub(1, Ordering::Relaxed).saturating_sub(1))
    }
}

impl Platform for Memory {
    fn read(&self, page: Mfn, index: usize) -> u64 {
        TableMemory::read(self, page, index)
    }

    fn write(&self, page: Mfn, index: usize, value: u64) {
        if let Some(word) = word(page, index) {
            word.store(value, Ordering::Release);
        }
    }

    fn now_us(&self) -> u64 {
        // 2^64 microseconds do not pass.
        u64::try_from(clock::now().as_micros()).unwrap_or(u64::MAX)
    }

    fn relax(&self) {
        arch::take_interrupts();
    }
}
