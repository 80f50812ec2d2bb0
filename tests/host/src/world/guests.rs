//! What the guests of a [`World`] do: grant, map, use, give back, free.
//!
//! The frontend grants and takes back; the backend maps, touches and unmaps.

use std::sync::atomic::Ordering;

use flush::{Batch, DomainId, Gfn, Mfn};
use gnttab::{
    Domain, GrantStorage, GuestAddress, Outcome, Status, Version,
    abi::{MapGrantRef, UnmapGrantRef},
};
use hwmodel::{Access, Owner};
use zerocopy::{FromZeros, IntoBytes};

use super::{ARGUMENTS, BACKEND, Ended, FRONTEND, OTHER_CPU, World, device_behind};
use crate::{Ram, hypervisor::lock};

/// What guests do.
impl World {
    /// Writes guest memory, as the guest does.
    ///
    /// # Panics
    /// If nothing is mapped there.
    pub fn put(&self, id: DomainId, address: u64, bytes: &[u8]) {
        let guest = self.hypervisor.guest(id).expect("a guest of this world");
        let done = self.hypervisor.copy_to(guest, GuestAddress(address), bytes);
        done.expect("guest memory is mapped");
    }

    /// Reads guest memory, as the guest does.
    ///
    /// # Panics
    /// If nothing is mapped there.
    pub fn get(&self, id: DomainId, address: u64, bytes: &mut [u8]) {
        let guest = self.hypervisor.guest(id).expect("a guest of this world");
        let done = self.hypervisor.copy_from(guest, GuestAddress(address), bytes);
        done.expect("guest memory is mapped");
    }

    /// The frontend gives itself a page and grants it to the backend.
    ///
    /// # Panics
    /// If its table or the machine's memory is full.
    pub fn grant(&self, reference: u32, gfn: Gfn, read_only: bool) -> Mfn {
        let mfn = self.hypervisor.populate(self.frontend(), gfn);
        let flags: u64 = 1 | u64::from(read_only) << 2;
        let word = flags | u64::from(BACKEND.get()) << 16 | gfn.get() << 32;
        self.write_entry(reference, word);
        mfn
    }

    /// Writes a version 1 entry of the frontend's table, as the frontend does.
    ///
    /// # Panics
    /// If its table is full.
    pub fn write_entry(&self, reference: u32, word: u64) {
        let mut table = lock(&self.frontend().grants);
        let (page, place) = (reference as usize / 512, reference as usize % 512);
        if page >= table.frames() {
            table.grow(page + 1).expect("room in the table");
        }
        let page = table.storage().shared(page).expect("the table just grew");
        page[place].store(word, Ordering::SeqCst);
    }

    /// Writes a version 2 entry of a guest's table, as that guest does: the head, and the
    /// frame or the reference.
    ///
    /// # Panics
    /// If the table has no such entry.
    pub fn write_entry_v2(&self, id: DomainId, reference: u32, head: u64, frame: u64) {
        let table = lock(&self.hypervisor.guest(id).expect("a guest of this world").grants);
        assert_eq!(table.version(), Version::V2);
        let (page, place) = (reference as usize / 256, reference as usize % 256);
        let words = table.storage().shared(page).expect("a page of the table");
        words[2 * place + 1].store(frame, Ordering::SeqCst);
        words[2 * place].store(head, Ordering::SeqCst);
    }

    /// What a page holds.
    #[must_use]
    pub fn content(&self, mfn: Mfn) -> Vec<u8> {
        let ram = self.hypervisor.memory.ram();
        (0..512).flat_map(|index| ram.read(mfn, index).to_le_bytes()).collect()
    }

    /// Fills a page with bytes that tell their place, each `seed` its own.
    pub fn fill(&self, mfn: Mfn, seed: u8) -> Vec<u8> {
        let bytes: Vec<u8> = (0..4096_u32).map(|place| (place % 251) as u8 ^ seed).collect();
        for (index, word) in bytes.as_chunks().0.iter().enumerate() {
            self.hypervisor.memory.ram().write(mfn, index, u64::from_le_bytes(*word));
        }
        bytes
    }

    /// Checks that no copy holds anything: no entry of `id` is pinned or in use.
    ///
    /// # Panics
    /// With the entry that is.
    #[track_caller]
    pub fn check_idle(&self, id: DomainId) {
        let table = lock(&self.hypervisor.guest(id).expect("a guest of this world").grants);
        assert_eq!(table.pinned(), 0, "{id:?}");
        let in_use = |flags: u16| flags & 0b1_1000 != 0;
        for page in 0..table.frames() {
            let words = table.storage().shared(page).expect("a page of the table");
            for (place, word) in words.iter().enumerate() {
                let used = in_use(word.load(Ordering::SeqCst) as u16);
                assert!(table.version() == Version::V2 || !used, "{id:?}: {place}");
            }
        }
        for page in 0..table.status_frames() {
            let words = table.storage().status(page).expect("a page of the table");
            for (place, word) in words.iter().enumerate() {
                assert!(!in_use(word.load(Ordering::SeqCst)), "{id:?}: {place}");
            }
        }
    }

    /// The in-use bits of a version 1 entry, as the frontend sees them: reading, writing.
    ///
    /// # Panics
    /// If the table has no such reference.
    pub fn in_use(&self, reference: u32) -> (bool, bool) {
        let table = lock(&self.frontend().grants);
        let (page, place) = (reference as usize / 512, reference as usize % 512);
        let page = table.storage().shared(page).expect("a page of the table");
        let word = page[place].load(Ordering::SeqCst);
        (word & 1 << 3 != 0, word & 1 << 4 != 0)
    }

    /// The backend maps grants of the frontend at the given frames, in one hypercall.
    ///
    /// Returns status and handle of each.
    ///
    /// # Panics
    /// If the call as a whole does not end well.
    pub fn map(&self, grants: &[(u32, Gfn)], read_only: bool) -> Vec<(i16, u32)> {
        let size = size_of::<MapGrantRef>() as u64;
        let base = ARGUMENTS.get() << 12;
        for (place, (reference, gfn)) in grants.iter().enumerate() {
            let mut element = MapGrantRef::new_zeroed();
            element.host_addr = gfn.get() << 12;
            element.flags = 2 | u32::from(read_only) << 2;
            element.reference = *reference;
            element.domain = FRONTEND.get();
            element.status = POISON;
            self.put(BACKEND, base + place as u64 * size, element.as_bytes());
        }
        let count = u32::try_from(grants.len()).expect("few grants");
        let ended = self.call(BACKEND, 0, base, count);
        assert_eq!(ended.outcome, Outcome::Done);
        (0..grants.len() as u64)
            .map(|place| {
                let mut element = MapGrantRef::new_zeroed();
                self.get(BACKEND, base + place * size, element.as_mut_bytes());
                (element.status, element.handle)
            })
            .collect()
    }

    /// Puts the arguments of an unmap into the backend's memory, statuses poisoned.
    pub fn put_unmaps(&self, mappings: &[(u32, Gfn)]) -> u64 {
        let base = ARGUMENTS.get() << 12;
        for (place, (handle, gfn)) in mappings.iter().enumerate() {
            let mut element = UnmapGrantRef::new_zeroed();
            element.host_addr = gfn.get() << 12;
            element.handle = *handle;
            element.status = POISON;
            let at = base + (place * size_of::<UnmapGrantRef>()) as u64;
            self.put(BACKEND, at, element.as_bytes());
        }
        base
    }

    /// The statuses of an unmap's first `count` elements.
    #[must_use]
    pub fn statuses(&self, count: usize) -> Vec<i16> {
        let base = ARGUMENTS.get() << 12;
        (0..count)
            .map(|place| {
                let mut element = UnmapGrantRef::new_zeroed();
                let at = base + (place * size_of::<UnmapGrantRef>()) as u64;
                self.get(BACKEND, at, element.as_mut_bytes());
                element.status
            })
            .collect()
    }

    /// The backend gives mappings back in one hypercall.
    pub fn unmap(&self, mappings: &[(u32, Gfn)]) -> Ended<'_> {
        let base = self.put_unmaps(mappings);
        self.call(BACKEND, 1, base, u32::try_from(mappings.len()).expect("few grants"))
    }

    /// Grants `gfns.len()` pages and maps them at `gfns`; then the backend's CPU and its
    /// device write to each, so that every cache holds them.
    ///
    /// Returns each page with its handle.
    ///
    /// # Panics
    /// If anything of that fails.
    pub fn share(&self, gfns: &[Gfn]) -> Vec<(Mfn, u32)> {
        let references: Vec<u32> = (FIRST_REFERENCE..).take(gfns.len()).collect();
        let pages: Vec<Mfn> = references
            .iter()
            .map(|reference| self.grant(*reference, granted_gfn(*reference), false))
            .collect();
        let grants: Vec<_> = references.into_iter().zip(gfns.iter().copied()).collect();
        let mapped: Vec<_> =
            grants.chunks(1024).flat_map(|grants| self.map(grants, false)).collect();
        for (gfn, (status, _)) in gfns.iter().zip(&mapped) {
            assert_eq!(*status, Status::Okay.value(), "map at {gfn:?}");
            self.touch(*gfn);
        }
        pages.into_iter().zip(mapped).map(|(mfn, (_, handle))| (mfn, handle)).collect()
    }

    /// The backend's CPU and its device write to a page.
    ///
    /// # Panics
    /// If one of them cannot.
    pub fn touch(&self, gfn: Gfn) {
        let address = gfn.get() << 12;
        self.machine.cpu_write64(OTHER_CPU, address, 1).expect("the CPU reaches the page");
        for unit in 0..self.units.len() {
            let device = device_behind(unit).get();
            self.machine.dma_write64(device, address, 2).expect("the device reaches the page");
        }
    }

    /// The frontend takes back a page it granted: revokes the entry and frees the page.
    ///
    /// # Panics
    /// If the page is still counted by somebody else.
    pub fn take_back(&self, reference: u32, gfn: Gfn) {
        self.write_entry(reference, 0);
        let guest = self.frontend();
        let mfn = guest.lookup(gfn).expect("the page is there").mfn;
        let expected = p2m::Expected { mfn, kind: p2m::PageKind::RamReadWrite };
        let mut batch: Batch<Mfn, 1> = Batch::new(FRONTEND);
        let held = batch
            .hold(|skipped| Ok::<_, p2m::ClearError>((mfn, guest.clear(gfn, expected, skipped)?)));
        held.expect("the page is cleared");
        // No CPU runs the frontend and it has no device.
        let nobody = flush::Hardware { tlb: &crate::Null, iotlb: &crate::Null };
        let mut flushed = batch.flush(&nobody).expect("this cannot fail");
        let page = flushed.next_page().expect("one page was held");
        assert!(self.hypervisor.pages.drop_one(*page.get(), false), "{mfn:?} is still counted");
        self.hypervisor.memory.ram().release(*page.get());
    }

    /// The frontend takes back the first `count` pages it [shared](Self::share).
    ///
    /// # Panics
    /// As [`take_back`](Self::take_back).
    pub fn take_back_all(&self, count: u32) {
        for reference in FIRST_REFERENCE..FIRST_REFERENCE + count {
            self.take_back(reference, granted_gfn(reference));
        }
    }

    /// Whether a device reaches memory at a frame of the backend. Each of them tries.
    #[must_use]
    pub fn device_reaches(&self, gfn: Gfn) -> bool {
        let reaches = |unit: &usize| {
            let device = device_behind(*unit).get();
            self.machine.dma_write64(device, gfn.get() << 12, 3).is_ok()
        };
        (0..self.units.len()).filter(reaches).count() > 0
    }

    /// Gives a guest an aligned block of 2^`order` frames of RAM, where nothing was; the
    /// order is that of a leaf: 0, 9 or 18.
    ///
    /// # Panics
    /// If there is no such block of memory, or the number is taken.
    pub fn populate_block(&self, id: DomainId, gfn: Gfn, order: u8) -> Mfn {
        let block = self.machine.allocate_block(Owner(u32::from(id.get())), order);
        let first = Mfn::new(block.expect("a block of memory").0);
        for offset in 0..1 << order {
            self.hypervisor.pages.take(Mfn::new(first.get() + offset), false);
        }
        self.call_as(id, |caller| {
            let mut batch: Batch<(), 1> = Batch::new(id);
            let kind = p2m::PageKind::RamReadWrite;
            let mapped = batch
                .edit_many(|skipped, _| caller.guest.map_block(gfn, order, first, kind, skipped));
            mapped.expect("the block is mapped");
            drop(batch.flush(&caller.hardware()).expect("the flush completes"));
            Outcome::Done
        });
        first
    }

    /// Whether a CPU that runs the backend reaches memory at a frame.
    #[must_use]
    pub fn cpu_reaches(&self, cpu: usize, gfn: Gfn) -> bool {
        self.machine.access(cpu, gfn.get() << 12, Access::Write).is_ok()
    }
}

/// References below are reserved.
pub const FIRST_REFERENCE: u32 = 8;

/// Where the frontend has the page it grants with this reference.
#[must_use]
pub fn granted_gfn(reference: u32) -> Gfn {
    Gfn::new(0x1000 + u64::from(reference))
}

/// What statuses are set to before a call.
pub const POISON: i16 = 0x5a5a;
