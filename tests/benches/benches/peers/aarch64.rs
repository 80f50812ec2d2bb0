//! `aarch64-paging`: its mapping for stage 2.
//!
//! It maps ranges; a page that stands alone is a range of one. It does not flush while the
//! table is not active.

// UNSAFETY: the crate trusts its caller to give a table back once.
#![expect(unsafe_code)]

use std::ptr::NonNull;

use aarch64_paging::Mapping;
use aarch64_paging::descriptor::{Descriptor, PhysicalAddress, Stage2Attributes};
use aarch64_paging::paging::{Constraints, MemoryRegion, PageTable, Stage2, Translation};

use crate::frames::Frame;
use crate::work::Table;

const READ_WRITE: Stage2Attributes = Stage2Attributes::VALID
    .union(Stage2Attributes::MEMATTR_NORMAL_INNER_WB)
    .union(Stage2Attributes::MEMATTR_NORMAL_OUTER_WB)
    .union(Stage2Attributes::S2AP_ACCESS_RW)
    .union(Stage2Attributes::SH_INNER)
    .union(Stage2Attributes::ACCESS_FLAG);

/// Gives out frames at their own addresses.
struct Frames;

impl Translation<Stage2Attributes> for Frames {
    fn allocate_table(&mut self) -> (NonNull<PageTable<Stage2Attributes>>, PhysicalAddress) {
        let frame = Frame::take().expect("frames do not run out");
        frame.zero();
        let address = PhysicalAddress(frame.address());
        (self.physical_to_virtual(address), address)
    }

    unsafe fn deallocate_table(&mut self, table: NonNull<PageTable<Stage2Attributes>>) {
        Frame::at(table.as_ptr().expose_provenance()).give();
    }

    fn physical_to_virtual(&self, frame: PhysicalAddress) -> NonNull<PageTable<Stage2Attributes>> {
        let table = std::ptr::with_exposed_provenance_mut(frame.0);
        NonNull::new(table).expect("no frame is at address 0")
    }
}

/// Its table, from level 0: four levels.
pub(crate) struct Aarch64(Mapping<Frames, Stage2>);

fn region(page: u64) -> MemoryRegion {
    let start = (page as usize) << 12;
    MemoryRegion::new(start, start + 0x1000)
}

/// Pages that follow each other.
fn range(pages: &[u64]) -> MemoryRegion {
    let start = pages.first().map_or(0, |page| (*page as usize) << 12);
    MemoryRegion::new(start, start + (pages.len() << 12))
}

impl Table for Aarch64 {
    const NAME: &'static str = "aarch64-paging";

    fn new() -> Self {
        Self(Mapping::new(Frames, 0, Stage2))
    }

    fn map(&mut self, pages: &[u64]) {
        for page in pages {
            let region = region(*page);
            let frame = PhysicalAddress(region.start().0);
            let mapped = self.0.map_range(&region, frame, READ_WRITE, Constraints::empty());
            mapped.expect("nothing is mapped there");
        }
    }

    fn unmap(&mut self, pages: &[u64]) {
        for page in pages {
            let (nothing, nowhere) = (Stage2Attributes::empty(), PhysicalAddress(0));
            let region = region(*page);
            let unmapped = self.0.map_range(&region, nowhere, nothing, Constraints::empty());
            unmapped.expect("a page is mapped there");
        }
    }

    fn map_range(&mut self, pages: &[u64]) {
        let region = range(pages);
        let frame = PhysicalAddress(region.start().0);
        let mapped = self.0.map_range(&region, frame, READ_WRITE, Constraints::NO_BLOCK_MAPPINGS);
        mapped.expect("nothing is mapped there");
    }

    fn unmap_range(&mut self, pages: &[u64]) {
        let (nothing, nowhere) = (Stage2Attributes::empty(), PhysicalAddress(0));
        let region = range(pages);
        let unmapped = self.0.map_range(&region, nowhere, nothing, Constraints::NO_BLOCK_MAPPINGS);
        unmapped.expect("pages are mapped there");
    }

    fn shown(&self, page: u64) -> Option<u64> {
        let mut shown = None;
        let mut look = |_: &MemoryRegion, entry: &Descriptor<Stage2Attributes>, _: usize| {
            shown = entry.is_valid().then(|| entry.output_address().0 as u64 >> 12);
            Ok(())
        };
        self.0.walk_range(&region(page), &mut look).expect("inside the space");
        shown
    }

    fn take_down(self, _: &[u64]) {
        drop(self.0);
    }
}
