//! `page_table_multiarch`: its x86 table.
//!
//! Its cursor notes the pages to flush, and flushes only on bare metal. It has no way to
//! free tables but dropping all of them.

use memory_addr::{PhysAddr, VirtAddr};
use page_table_multiarch::x86_64::X64PageTable;
use page_table_multiarch::{MappingFlags, PageSize, PagingHandler};

use crate::frames::Frame;
use crate::work::Table;

/// Gives out frames at their own addresses.
struct Frames;

impl PagingHandler for Frames {
    fn alloc_frames(count: usize, _: usize) -> Option<PhysAddr> {
        if count == 1 { Some(PhysAddr::from_usize(Frame::take()?.address())) } else { None }
    }

    fn dealloc_frames(frame: PhysAddr, _: usize) {
        Frame::at(frame.as_usize()).give();
    }

    fn phys_to_virt(frame: PhysAddr) -> VirtAddr {
        VirtAddr::from_usize(frame.as_usize())
    }
}

/// Its table.
pub(crate) struct Multiarch(X64PageTable<Frames>);

fn address(page: u64) -> VirtAddr {
    VirtAddr::from_usize((page as usize) << 12)
}

impl Table for Multiarch {
    const NAME: &'static str = "page_table_multiarch";

    fn new() -> Self {
        Self(X64PageTable::try_new().expect("frames do not run out"))
    }

    fn map(&mut self, pages: &[u64]) {
        let mut cursor = self.0.cursor();
        for page in pages {
            let shown = PhysAddr::from_usize((*page as usize) << 12);
            let flags = MappingFlags::READ | MappingFlags::WRITE;
            let mapped = cursor.map(address(*page), shown, PageSize::Size4K, flags);
            mapped.expect("nothing is mapped there");
        }
    }

    fn unmap(&mut self, pages: &[u64]) {
        let mut cursor = self.0.cursor();
        for page in pages {
            let shown = cursor.unmap(address(*page)).expect("a page is mapped there");
            std::hint::black_box(shown);
        }
    }

    fn shown(&self, page: u64) -> Option<u64> {
        let (frame, _, _) = self.0.query(address(page)).ok()?;
        Some(frame.as_usize() as u64 >> 12)
    }

    fn take_down(self, _: &[u64]) {
        drop(self.0);
    }
}
