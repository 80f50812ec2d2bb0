//! `x86_64`: its mapper over an offset of zero.
//!
//! It unmaps single pages and hands a flush back for each, which is left out here as a
//! batching caller would; it frees tables that are empty.

// UNSAFETY: the mapper trusts its caller with memory, so the calls are unsafe. The tables
// are frames of this program, at their own addresses, and no hardware walks them.
#![expect(unsafe_code)]

use x86_64::structures::paging::mapper::CleanUp;
use x86_64::structures::paging::{
    FrameAllocator, FrameDeallocator, Mapper, OffsetPageTable, Page, PageTable, PageTableFlags,
    PhysFrame, Size4KiB, Translate,
};
use x86_64::{PhysAddr, VirtAddr};

use crate::frames::Frame;
use crate::work::Table;

/// Gives out frames at their own addresses.
struct Frames;

// SAFETY: what the pool gives out is a page that nobody else uses.
unsafe impl FrameAllocator<Size4KiB> for Frames {
    fn allocate_frame(&mut self) -> Option<PhysFrame> {
        let table = Frame::take()?.address();
        Some(PhysFrame::containing_address(PhysAddr::new(table as u64)))
    }
}

impl FrameDeallocator<Size4KiB> for Frames {
    unsafe fn deallocate_frame(&mut self, frame: PhysFrame) {
        Frame::at(frame.start_address().as_u64() as usize).give();
    }
}

/// Its table, known by the root.
pub(crate) struct X86(*mut PageTable);

fn page(frame: u64) -> Page<Size4KiB> {
    Page::containing_address(VirtAddr::new(frame << 12))
}

impl X86 {
    fn mapper(&self) -> OffsetPageTable<'_> {
        // SAFETY: the root is a frame of this value's own, of the size and alignment of
        // a table. Every frame it leads to is one too, at its own address: the offset is
        // zero. There is one mapper at a time, because each is gone before a method returns.
        unsafe { OffsetPageTable::new(&mut *self.0, VirtAddr::new(0)) }
    }
}

impl Table for X86 {
    const NAME: &'static str = "x86_64";

    fn new() -> Self {
        let root = Frame::take().expect("frames do not run out");
        root.zero();
        Self(std::ptr::with_exposed_provenance_mut(root.address()))
    }

    fn map(&mut self, pages: &[u64]) {
        let flags = PageTableFlags::PRESENT | PageTableFlags::WRITABLE;
        let mut mapper = self.mapper();
        for frame in pages {
            let shown = PhysFrame::containing_address(PhysAddr::new(frame << 12));
            // SAFETY: no hardware walks this table, so nobody sees the frame through it.
            let mapped = unsafe { mapper.map_to(page(*frame), shown, flags, &mut Frames) };
            mapped.expect("nothing is mapped there").ignore();
        }
    }

    fn unmap(&mut self, pages: &[u64]) {
        let mut mapper = self.mapper();
        for frame in pages {
            let (shown, flush) = mapper.unmap(page(*frame)).expect("a page is mapped there");
            std::hint::black_box(shown);
            flush.ignore();
        }
    }

    fn shown(&self, frame: u64) -> Option<u64> {
        let address = self.mapper().translate_addr(VirtAddr::new(frame << 12))?;
        Some(address.as_u64() >> 12)
    }

    fn take_down(mut self, pages: &[u64]) {
        self.unmap(pages);
        // SAFETY: all tables are this value's own, and no hardware walks them.
        unsafe { self.mapper().clean_up(&mut Frames) };
        Frame::at(self.0.expose_provenance()).give();
    }
}
