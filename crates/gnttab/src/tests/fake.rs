//! A domain in plain memory, and hardware that counts and fails.
//!
//! [`World`] checks the rules of use while it runs: no lock is held during a flush or a
//! guest copy, no two tables are locked at once, and nothing is dropped while a cleared
//! entry is unflushed.

use core::cell::{Cell, RefCell};
use core::sync::atomic::{AtomicU16, AtomicU64, Ordering};
use std::{boxed::Box, collections::BTreeMap, rc::Rc, vec, vec::Vec};

use flush::{
    Batch, Cleared, Cover, DomainId, Flush, Gfn, Hardware, Held, Iotlb, Kind, Mfn, Released, Run,
    Skipped, TablePage, Tlb,
};
use zerocopy::{FromBytes, FromZeros, Immutable, IntoBytes};

use crate::abi::{MapGrantRef, UnmapAndReplace, UnmapGrantRef};
use crate::*;

pub(super) const CALLER: DomainId = DomainId::new(1);
pub(super) const GRANTER: DomainId = DomainId::new(2);
pub(super) const OTHER: DomainId = DomainId::new(3);

/// Flags of an entry that permits access, and the bits a test looks for.
pub(super) const PERMIT: u16 = 1;
pub(super) const READ_ONLY: u16 = 1 << 2;
pub(super) const READING: u16 = 1 << 3;
pub(super) const WRITING: u16 = 1 << 4;
/// Flags of a map request.
pub(super) const HOST: u32 = 1 << 1;
pub(super) const MAP_READ_ONLY: u32 = 1 << 2;

/// Where tests put arrays, and where they map grants.
pub(super) const ARRAY: u64 = 0x1000;
pub(super) const FIRST_GFN: u64 = 0x10_0000;
/// What status fields hold before a call.
pub(super) const POISON: i16 = 0x5a5a;

/// The grant frames of one domain.
#[derive(Default)]
pub(super) struct Grants {
    shared: Vec<Box<SharedPage>>,
    status: Vec<Box<StatusPage>>,
    active: Vec<Box<[ActiveEntry; ACTIVE_PER_PAGE]>>,
    pub(super) no_memory_after: Cell<Option<usize>>,
    pub(super) status_mapped: Cell<Option<usize>>,
    /// Status frames freed so far.
    pub(super) removed: Vec<usize>,
}

impl Grants {
    fn room(&self) -> Result<(), NoMemory> {
        match self.no_memory_after.get() {
            Some(0) => Err(NoMemory),
            Some(left) => {
                self.no_memory_after.set(Some(left - 1));
                Ok(())
            }
            None => Ok(()),
        }
    }
}

impl GrantStorage for Grants {
    fn shared(&self, page: usize) -> Option<&SharedPage> {
        self.shared.get(page).map(|page| &**page)
    }
    fn status(&self, page: usize) -> Option<&StatusPage> {
        self.status.get(page).map(|page| &**page)
    }
    fn active(&mut self, page: usize) -> Option<&mut [ActiveEntry; ACTIVE_PER_PAGE]> {
        self.active.get_mut(page).map(|page| &mut **page)
    }
    fn add_shared(&mut self, page: usize) -> Result<(), NoMemory> {
        if page == self.shared.len() {
            self.room()?;
            self.shared.push(Box::new([const { AtomicU64::new(0) }; 512]));
        }
        Ok(())
    }
    fn add_status(&mut self, page: usize) -> Result<(), NoMemory> {
        if page == self.status.len() {
            self.room()?;
            self.status.push(Box::new([const { AtomicU16::new(0) }; 2048]));
        }
        Ok(())
    }
    fn add_active(&mut self, page: usize) -> Result<(), NoMemory> {
        if page == self.active.len() {
            self.room()?;
            self.active.push(Box::new([ActiveEntry::IDLE; ACTIVE_PER_PAGE]));
        }
        Ok(())
    }
    fn frame(&self, frame: TableFrame) -> Option<Mfn> {
        match frame {
            TableFrame::Shared(page) => Some(Mfn::new(0x5000 + page as u64)),
            TableFrame::Status(page) => Some(Mfn::new(0x6000 + page as u64)),
        }
    }
    fn mapped_at(&self, frame: TableFrame) -> Option<Gfn> {
        match frame {
            // One frame that the guest has not mapped.
            TableFrame::Shared(2) => None,
            TableFrame::Shared(page) => Some(Gfn::new(0x7000 + page as u64)),
            TableFrame::Status(page) => Some(Gfn::new(0x8000 + page as u64)),
        }
    }
    fn status_mapped(&self, page: usize) -> bool {
        self.status_mapped.get() == Some(page)
    }
    fn remove_status(&mut self, page: usize) {
        assert!(page < self.status.len(), "a frame is freed that does not exist");
        self.removed.push(page);
        *self.status[page] = [const { AtomicU16::new(0) }; 2048];
    }
}

/// The handles of the caller, with four vCPUs.
#[derive(Default)]
pub(super) struct Handles {
    pages: Vec<Box<[MaptrackEntry; MAPTRACK_PER_PAGE]>>,
    lists: [Option<FreeList>; 4],
}

impl MaptrackStorage for Handles {
    fn page(&mut self, page: usize) -> Option<&mut [MaptrackEntry; MAPTRACK_PER_PAGE]> {
        self.pages.get_mut(page).map(|page| &mut **page)
    }
    fn add_page(&mut self, _: usize) -> Result<(), NoMemory> {
        self.pages.push(Box::new([MaptrackEntry::FREE; MAPTRACK_PER_PAGE]));
        Ok(())
    }
    fn vcpus(&self) -> usize {
        self.lists.len()
    }
    fn free_list(&mut self, vcpu: VcpuId) -> Option<&mut FreeList> {
        let list = self.lists.get_mut(vcpu.0 as usize)?;
        Some(list.get_or_insert(FreeList::EMPTY))
    }
}

/// References on one page.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Counts {
    pub(super) references: i64,
    pub(super) types: i64,
    pub(super) dirty: bool,
}

/// What another vCPU does in the middle of a call.
pub(super) type OtherVcpu = Box<dyn Fn(&World)>;

/// Everything outside the crate.
pub(super) struct World {
    pub(super) tables: RefCell<BTreeMap<DomainId, GrantTable<Grants>>>,
    pub(super) maptrack: RefCell<Maptrack<Handles>>,
    pub(super) memory: RefCell<Vec<u8>>,
    pub(super) p2m: RefCell<BTreeMap<u64, Expected>>,
    /// RAM of granters, and of the caller: what a frame number shows.
    pub(super) ram: RefCell<BTreeMap<(DomainId, u64), Mfn>>,
    pub(super) counts: RefCell<BTreeMap<Mfn, Counts>>,
    /// What pages hold; zeroes where nothing was written.
    pub(super) bytes: RefCell<BTreeMap<Mfn, Vec<u8>>>,
    /// Copies of pages so far, and whether they fail.
    pub(super) copied: Cell<usize>,
    pub(super) copy_fails: Cell<bool>,
    /// Runs while the bytes of a copy move, as another vCPU would.
    pub(super) during_copy: RefCell<Option<OtherVcpu>>,
    /// Runs when guest memory is about to be written.
    pub(super) during_write: RefCell<Option<OtherVcpu>>,
    pub(super) vcpu: Cell<u32>,
    pub(super) typed: Cell<bool>,
    pub(super) insert_fails: Cell<bool>,
    pub(super) clear_fails: Cell<Option<ClearError>>,
    pub(super) page_error: Cell<Option<PageError>>,
    /// References on pages taken so far, and the one that is refused.
    pub(super) pages_taken: Cell<usize>,
    pub(super) page_fails: Cell<Option<(usize, PageError)>>,
    pub(super) denied: Cell<Option<Action>>,
    pub(super) preempt: Cell<bool>,
    pub(super) preempt_asked: Cell<usize>,
    /// Reads and writes of guest memory so far, the byte that cannot be read, and the write
    /// that faults.
    pub(super) reads: Cell<usize>,
    pub(super) read_fault: Cell<Option<usize>>,
    pub(super) writes: Cell<usize>,
    pub(super) write_fault: Cell<Option<usize>>,
    /// Flushes waited for: CPU, device; and the wait that fails, counting both.
    pub(super) flushes: Cell<(usize, usize)>,
    pub(super) flush_fails: Cell<Option<usize>>,
    /// How many flushes from that one on fail.
    pub(super) failures: Cell<usize>,
    /// What is said of failed flushes.
    pub(super) verdict: Cell<Verdict>,
    /// What was judged: the pages, and how often it had been tried again.
    pub(super) judged: RefCell<Vec<(usize, u32)>>,
    /// And which kinds had failed: CPUs, devices.
    pub(super) failed_kinds: RefCell<Vec<(bool, bool)>>,
    pub(super) covers: RefCell<Vec<Cover>>,
    pub(super) crashes: RefCell<Vec<Crash>>,
    pub(super) held: RefCell<Vec<Held<Pin, BATCH>>>,
    /// Entries cleared and not flushed.
    pub(super) unflushed: Cell<usize>,
    /// Shared entries that have to be in use while a flush is waited for.
    pub(super) busy_during_flush: RefCell<Vec<(DomainId, u32, u16)>>,
    /// Runs in the middle of each removal, as another vCPU would.
    pub(super) during_policy: RefCell<Option<OtherVcpu>>,
    /// Runs before an insertion changes anything, once.
    pub(super) during_insert: RefCell<Option<OtherVcpu>>,
    /// Whether words of guest memory are lent; the words of the chunk as it is lent, and how
    /// many of them are on a second page.
    pub(super) lends: Cell<bool>,
    /// Whether it lends a word too few, -1, or too many, 1.
    pub(super) lends_amiss: Cell<i8>,
    pub(super) lent: RefCell<Rc<[AtomicU64]>>,
    pub(super) second: Cell<usize>,
    /// How many mappings were removed together, each time.
    pub(super) together: RefCell<Vec<usize>>,
    /// After so many removals the embedder stops, against the rules.
    pub(super) answers: Cell<usize>,
}

impl World {
    /// A caller with 1024 handles, and two granters with 512 read-write grants each.
    pub(super) fn new() -> Self {
        Self::with_handles(4)
    }

    pub(super) fn with_handles(pages: usize) -> Self {
        let world = Self {
            tables: RefCell::default(),
            maptrack: RefCell::new(Maptrack::new(Handles::default(), pages)),
            memory: RefCell::new(vec![0; 0x10000]),
            p2m: RefCell::default(),
            ram: RefCell::default(),
            counts: RefCell::default(),
            bytes: RefCell::default(),
            copied: Cell::new(0),
            copy_fails: Cell::new(false),
            during_copy: RefCell::new(None),
            during_write: RefCell::new(None),
            vcpu: Cell::new(0),
            typed: Cell::new(true),
            insert_fails: Cell::new(false),
            clear_fails: Cell::new(None),
            page_error: Cell::new(None),
            pages_taken: Cell::new(0),
            page_fails: Cell::new(None),
            denied: Cell::new(None),
            preempt: Cell::new(false),
            preempt_asked: Cell::new(0),
            reads: Cell::new(0),
            read_fault: Cell::new(None),
            writes: Cell::new(0),
            write_fault: Cell::new(None),
            flushes: Cell::new((0, 0)),
            flush_fails: Cell::new(None),
            failures: Cell::new(1),
            verdict: Cell::new(Verdict::Quarantine),
            judged: RefCell::default(),
            failed_kinds: RefCell::default(),
            covers: RefCell::default(),
            crashes: RefCell::default(),
            held: RefCell::default(),
            unflushed: Cell::new(0),
            busy_during_flush: RefCell::default(),
            during_policy: RefCell::new(None),
            during_insert: RefCell::new(None),
            lends: Cell::new(false),
            lends_amiss: Cell::new(0),
            lent: RefCell::new(Rc::new([])),
            second: Cell::new(0),
            together: RefCell::default(),
            answers: Cell::new(usize::MAX),
        };
        for domain in [CALLER, GRANTER, OTHER] {
            let table = GrantTable::new(domain, Grants::default(), 1, 4).unwrap();
            world.tables.borrow_mut().insert(domain, table);
            for frame in 0..512 {
                let mfn = Mfn::new(u64::from(domain.get()) << 20 | frame);
                world.ram.borrow_mut().insert((domain, frame), mfn);
                if domain != CALLER {
                    world.grant(domain, frame as u32, PERMIT, CALLER);
                }
            }
        }
        world
    }

    /// Writes an entry as the granter does: reference `r` grants its frame `r`.
    pub(super) fn grant(&self, granter: DomainId, reference: u32, flags: u16, to: DomainId) {
        let head = u64::from(flags) | u64::from(to.get()) << 16;
        let frame = u64::from(reference);
        let tables = self.tables.borrow();
        let table = &tables[&granter];
        let index = reference as usize;
        match table.version() {
            Version::V1 => {
                let page = table.storage().shared(index / 512).unwrap();
                page[index % 512].store(head | frame << 32, Ordering::SeqCst);
            }
            Version::V2 => {
                let page = table.storage().shared(index / 256).unwrap();
                page[index % 256 * 2 + 1].store(frame, Ordering::SeqCst);
                page[index % 256 * 2].store(head, Ordering::SeqCst);
            }
        }
    }

    /// Writes a version 2 entry: flags and grantee, what lies beside them, and the frame
    /// or the reference.
    pub(super) fn grant_v2(
        &self,
        granter: DomainId,
        reference: u32,
        (flags, to): (u16, DomainId),
        (third, fourth): (u16, u16),
        frame: u64,
    ) {
        let tables = self.tables.borrow();
        assert_eq!(tables[&granter].version(), Version::V2);
        let index = reference as usize;
        let page = tables[&granter].storage().shared(index / 256).unwrap();
        let high = u64::from(third) << 32 | u64::from(fourth) << 48;
        page[index % 256 * 2 + 1].store(frame, Ordering::SeqCst);
        let head = u64::from(flags) | u64::from(to.get()) << 16 | high;
        page[index % 256 * 2].store(head, Ordering::SeqCst);
    }

    /// The page of a domain's frame in a new world.
    pub(super) fn page(domain: DomainId, frame: u64) -> Mfn {
        Mfn::new(u64::from(domain.get()) << 20 | frame)
    }

    /// What a page holds.
    pub(super) fn content(&self, page: Mfn) -> Vec<u8> {
        self.bytes.borrow().get(&page).cloned().unwrap_or_else(|| vec![0; 4096])
    }

    /// In-use bits as the granter sees them.
    pub(super) fn in_use(&self, granter: DomainId, reference: u32) -> u16 {
        let tables = self.tables.borrow();
        let table = &tables[&granter];
        let index = reference as usize;
        let flags = match table.version() {
            Version::V1 => table.storage().shared(index / 512).unwrap()[index % 512]
                .load(Ordering::SeqCst) as u16,
            Version::V2 => {
                table.storage().status(index / 2048).unwrap()[index % 2048].load(Ordering::SeqCst)
            }
        };
        flags & (READING | WRITING)
    }

    pub(super) fn set_version(&self, granter: DomainId, version: Version) {
        self.tables.borrow_mut().get_mut(&granter).unwrap().set_version(version).unwrap();
        if granter != CALLER {
            for reference in 0..256 {
                self.grant(granter, reference, PERMIT, CALLER);
            }
        }
    }

    pub(super) fn pinned(&self, granter: DomainId) -> usize {
        self.tables.borrow()[&granter].pinned()
    }

    pub(super) fn count(&self, granter: DomainId, frame: u64) -> Counts {
        let mfn = Mfn::new(u64::from(granter.get()) << 20 | frame);
        self.counts.borrow().get(&mfn).copied().unwrap_or_default()
    }

    pub(super) fn write<T: IntoBytes + Immutable>(&self, at: u64, things: &[T]) {
        let bytes = things.as_bytes();
        self.memory.borrow_mut()[at as usize..][..bytes.len()].copy_from_slice(bytes);
    }

    pub(super) fn read<T: FromBytes + Clone>(&self, at: u64, count: usize) -> Vec<T> {
        let memory = self.memory.borrow();
        (0..count)
            .map(|index| {
                let from = at as usize + index * size_of::<T>();
                T::read_from_bytes(&memory[from..from + size_of::<T>()]).unwrap()
            })
            .collect()
    }

    pub(super) fn call(&self, command: u32, count: u32) -> Outcome {
        Call { command, argument: GuestAddress(ARRAY), count }.run(self)
    }

    /// Maps `requests` in one call that must succeed.
    #[track_caller]
    pub(super) fn map(&self, requests: &[MapGrantRef]) -> Vec<MapGrantRef> {
        self.write(ARRAY, requests);
        assert_eq!(self.call(0, requests.len() as u32), Outcome::Done);
        self.read(ARRAY, requests.len())
    }

    /// Maps one and tells its status.
    #[track_caller]
    pub(super) fn map_one(&self, request: MapGrantRef) -> MapGrantRef {
        self.map(&[request])[0]
    }

    /// As another vCPU maps one, with its array somewhere else.
    #[track_caller]
    pub(super) fn map_at(&self, address: u64, request: MapGrantRef) -> MapGrantRef {
        self.write(address, &[request]);
        let call = Call { command: 0, argument: GuestAddress(address), count: 1 };
        assert_eq!(call.run(self), Outcome::Done);
        self.read(address, 1)[0]
    }

    /// Maps references `0..count` of the granter, and writes the array that unmaps them.
    #[track_caller]
    pub(super) fn map_and_prepare(&self, count: u32) -> Vec<UnmapGrantRef> {
        let requests: Vec<_> = (0..count).map(request).collect();
        let mapped = self.map(&requests);
        assert!(mapped.iter().all(|element| element.status == 0), "{mapped:?}");
        let unmaps: Vec<_> = mapped.iter().map(unmap_of).collect();
        self.write(ARRAY, &unmaps);
        self.reads.set(0);
        self.writes.set(0);
        self.flushes.set((0, 0));
        unmaps
    }

    /// Unmaps in one call that must succeed, and tells the statuses.
    #[track_caller]
    pub(super) fn unmap(&self, requests: &[UnmapGrantRef]) -> Vec<i16> {
        self.write(ARRAY, requests);
        assert_eq!(self.call(1, requests.len() as u32), Outcome::Done);
        self.statuses(requests.len())
    }

    pub(super) fn replace(&self, request: UnmapAndReplace) -> i16 {
        self.write(ARRAY, &[request]);
        assert_eq!(self.call(7, 1), Outcome::Done);
        self.statuses(1)[0]
    }

    pub(super) fn statuses(&self, count: usize) -> Vec<i16> {
        self.read::<UnmapGrantRef>(ARRAY, count).iter().map(|element| element.status).collect()
    }

    /// Nothing is mapped, counted, pinned, marked in use, held or owed.
    #[track_caller]
    pub(super) fn assert_clean(&self) {
        assert!(self.p2m.borrow().is_empty(), "mappings left");
        for (mfn, counts) in self.counts.borrow().iter() {
            assert_eq!((counts.references, counts.types), (0, 0), "references on {mfn:?}");
        }
        for granter in [CALLER, GRANTER, OTHER] {
            assert_eq!(self.pinned(granter), 0, "pins of {granter:?}");
            let references = self.tables.borrow()[&granter].references() as u32;
            for reference in 0..references {
                assert_eq!(self.in_use(granter, reference), 0, "{granter:?}: {reference}");
            }
        }
        assert_eq!(self.unflushed.get(), 0);
        assert!(self.held.borrow().is_empty());
    }

    /// Whether every handle can be had exactly once.
    #[track_caller]
    pub(super) fn assert_handles_free(&self, handles: usize) {
        let requests: Vec<_> = (0..handles as u32)
            .map(|index| MapGrantRef {
                host_addr: request(index).host_addr,
                ..request(index % 256)
            })
            .collect();
        let mut mapped = Vec::new();
        for piece in requests.chunks(32) {
            mapped.extend(self.map(piece));
        }
        let mut seen: Vec<_> = mapped
            .iter()
            .inspect(|element| assert_eq!(element.status, 0))
            .map(|element| element.handle)
            .collect();
        seen.sort_unstable();
        seen.dedup();
        assert_eq!(seen.len(), handles);
        for piece in mapped.chunks(32) {
            let unmaps: Vec<_> = piece.iter().map(unmap_of).collect();
            assert!(self.unmap(&unmaps).iter().all(|status| *status == 0));
        }
    }

    fn no_locks(&self) {
        assert!(self.tables.try_borrow_mut().is_ok(), "a table is locked");
        assert!(self.maptrack.try_borrow_mut().is_ok(), "the maptrack is locked");
    }

    fn take(&self, mfn: Mfn, rights: Rights) -> PageReference {
        let mut counts = self.counts.borrow_mut();
        let count = counts.entry(mfn).or_default();
        count.references += 1;
        let typed = rights == Rights::ReadWrite && self.typed.get();
        count.types += i64::from(typed);
        PageReference::taken(mfn, typed)
    }

    fn gone<'id>(&self, skipped: &mut Skipped<'id>, gfn: Gfn) -> Cleared<'id> {
        self.unflushed.set(self.unflushed.get() + 1);
        let cpus = skipped.leaf::<Tlb>(Run::single(gfn), 0);
        let devices = skipped.leaf::<Iotlb>(Run::single(gfn), 0);
        cpus.with(&devices)
    }
}

/// Asks to map the granter's `reference` read-write at its own place.
pub(super) fn request(reference: u32) -> MapGrantRef {
    MapGrantRef {
        host_addr: (FIRST_GFN + u64::from(reference)) << 12,
        flags: HOST,
        reference,
        domain: GRANTER.get(),
        status: POISON,
        ..MapGrantRef::new_zeroed()
    }
}

/// What gives a mapping back.
pub(super) fn unmap_of(mapped: &MapGrantRef) -> UnmapGrantRef {
    UnmapGrantRef {
        host_addr: mapped.host_addr,
        handle: mapped.handle,
        status: POISON,
        ..UnmapGrantRef::new_zeroed()
    }
}

/// Where the last byte of an element is, for one that cannot be read.
pub(super) fn byte_of<T>(position: usize) -> Option<usize> {
    Some(ARRAY as usize + (position + 1) * size_of::<T>() - 1)
}

fn strikes(count: &Cell<usize>, at: &Cell<Option<usize>>) -> bool {
    let now = count.get();
    count.set(now + 1);
    at.get() == Some(now)
}

impl<K: Kind> Flush<K> for World {
    type InFlight = bool;
    type Error = &'static str;

    fn start(&self, domain: DomainId, cover: &Cover) -> bool {
        self.no_locks();
        assert_eq!(domain, CALLER);
        self.covers.borrow_mut().push(cover.clone());
        let (cpus, devices) = self.flushes.get();
        let from = self.flush_fails.get();
        let failures = self.failures.get();
        let fails = from.is_some_and(|from| (from..from + failures).contains(&(cpus + devices)));
        self.flushes.set(if K::TLB { (cpus + 1, devices) } else { (cpus, devices + 1) });
        fails
    }

    fn wait(&self, fails: bool) -> Result<(), &'static str> {
        self.no_locks();
        for (granter, reference, bits) in self.busy_during_flush.borrow().iter() {
            let seen = self.in_use(*granter, *reference);
            assert_eq!(seen, *bits, "{granter:?}: {reference} during the flush");
            let count = self.count(*granter, u64::from(*reference));
            assert!(count.references > 0, "{reference} was dropped before the flush");
            assert!(!count.dirty, "{reference} was marked dirty before the flush");
        }
        if fails {
            return Err("flush failed");
        }
        if K::TLB {
            self.unflushed.set(0);
        }
        Ok(())
    }
}

impl Domain for World {
    type Tlb = Self;
    type Iotlb = Self;
    type Grants = Grants;
    type Handles = Handles;

    fn id(&self) -> DomainId {
        CALLER
    }
    fn vcpu(&self) -> VcpuId {
        VcpuId(self.vcpu.get())
    }
    fn clamp(&self, index: usize, length: usize) -> usize {
        assert!(index < length, "{index} was not checked against {length}");
        index
    }
    fn copy_from_guest(&self, address: GuestAddress, bytes: &mut [u8]) -> Result<(), GuestFault> {
        self.no_locks();
        let memory = self.memory.borrow();
        let from = usize::try_from(address.0).map_err(|_| GuestFault)?;
        let guest = memory.get(from..).and_then(|tail| tail.get(..bytes.len()));
        self.reads.set(self.reads.get() + 1);
        let read = from..from.saturating_add(bytes.len());
        let unreadable = self.read_fault.get().is_some_and(|byte| read.contains(&byte));
        bytes.copy_from_slice(guest.filter(|_| !unreadable).ok_or(GuestFault)?);
        Ok(())
    }
    fn copy_to_guest(&self, address: GuestAddress, bytes: &[u8]) -> Result<(), GuestFault> {
        self.no_locks();
        if let Some(action) = self.during_write.take() {
            action(self);
        }
        let mut memory = self.memory.borrow_mut();
        let from = usize::try_from(address.0).map_err(|_| GuestFault)?;
        let guest = memory.get_mut(from..).and_then(|tail| tail.get_mut(..bytes.len()));
        let guest =
            guest.filter(|_| !strikes(&self.writes, &self.write_fault)).ok_or(GuestFault)?;
        guest.copy_from_slice(bytes);
        Ok(())
    }
    fn with_guest_words<R>(
        &self,
        at: GuestAddress,
        count: usize,
        action: impl FnOnce(Option<GuestWords<'_>>) -> R,
    ) -> R {
        self.no_locks();
        assert!(at.0.is_multiple_of(8) && count <= 3 * BATCH, "{count} words at {at:?}");
        let from = usize::try_from(at.0).unwrap_or(usize::MAX);
        let bytes = from..from.saturating_add(count * 8);
        let words: Option<Rc<[AtomicU64]>> = self.memory.borrow().get(bytes.clone()).map(|bytes| {
            let (words, _) = bytes.as_chunks::<8>();
            words.iter().map(|word| AtomicU64::new(u64::from_le_bytes(*word))).collect()
        });
        let Some(words) = words.filter(|_| self.lends.get()) else { return action(None) };
        *self.lent.borrow_mut() = words.clone();
        let (first, second) = words.split_at(count.saturating_sub(self.second.get()));
        let lent = match self.lends_amiss.get() {
            0 => GuestWords::new(first, second),
            ..0 => GuestWords::new(&words[1..], &[]),
            1.. => GuestWords::new(&words, &words[..1]),
        };
        let result = action(Some(lent));
        self.no_locks();
        if self.lends_amiss.get() != 0 {
            // Statuses were written to memory itself.
            return result;
        }
        let mut memory = self.memory.borrow_mut();
        for (bytes, word) in memory[bytes].as_chunks_mut::<8>().0.iter_mut().zip(&*words) {
            *bytes = word.load(Ordering::Relaxed).to_le_bytes();
        }
        result
    }
    fn with_granter<R>(
        &self,
        granter: DomainId,
        action: impl FnOnce(&mut GrantTable<Grants>) -> R,
    ) -> Option<R> {
        // The lock is on all tables: taking two at once panics here.
        self.tables.borrow_mut().get_mut(&granter).map(action)
    }
    fn with_maptrack<R>(&self, action: impl FnOnce(&mut Maptrack<Handles>) -> R) -> R {
        action(&mut self.maptrack.borrow_mut())
    }
    fn allows(&self, action: Action, _: DomainId) -> bool {
        self.no_locks();
        if let Some(action) = self.during_policy.take() {
            action(self);
        }
        self.denied.get() != Some(action)
    }
    fn crash(&self, reason: Crash) {
        self.crashes.borrow_mut().push(reason);
    }
    fn preempt(&self) -> bool {
        assert_eq!(self.unflushed.get(), 0, "preempted with a flush owed");
        self.preempt_asked.set(self.preempt_asked.get() + 1);
        self.preempt.get()
    }
    fn get_page(
        &self,
        granter: DomainId,
        frame: GrantedFrame,
        rights: Rights,
    ) -> Result<PageReference, PageError> {
        if let Some(error) = self.page_error.get() {
            return Err(error);
        }
        let number = self.pages_taken.get();
        self.pages_taken.set(number + 1);
        if let Some((at, error)) = self.page_fails.get()
            && at == number
        {
            return Err(error);
        }
        let mfn = match frame {
            GrantedFrame::Pinned(mfn) => mfn,
            GrantedFrame::Number(gfn) => {
                *self.ram.borrow().get(&(granter, gfn.get())).ok_or(PageError::NotRam)?
            }
        };
        Ok(self.take(mfn, rights))
    }
    fn put_page(&self, pin: Released<Pin>, wrote: bool) {
        assert_eq!(self.unflushed.get(), 0, "dropped with a flush owed");
        let pin = pin.get();
        let mut counts = self.counts.borrow_mut();
        let count = counts.get_mut(&pin.mfn()).unwrap();
        count.dirty |= wrote;
        count.references -= 1;
        count.types -= i64::from(pin.typed());
        assert!(count.references >= 0 && count.types >= 0, "dropped twice");
    }
    fn copy_page(&self, copy: &PageCopy) -> Result<(), NotCopied> {
        self.no_locks();
        let PageCopy { from, to, length } = *copy;
        for PageBytes { owner, page, first: _ } in [from, to] {
            assert_eq!(page.get() >> 20, owner.get().into(), "{page:?} is not of {owner:?}");
            let count = self.counts.borrow().get(&page).copied().unwrap_or_default();
            assert!(count.references > 0, "{page:?} is copied without a reference");
        }
        self.copied.set(self.copied.get() + 1);
        if let Some(action) = self.during_copy.take() {
            action(self);
        }
        if self.copy_fails.get() {
            return Err(NotCopied);
        }
        let length = usize::from(length);
        let (first, target) = (usize::from(from.first), usize::from(to.first));
        let moved = self.content(from.page)[first..first + length].to_vec();
        let mut written = self.content(to.page);
        written[target..target + length].copy_from_slice(&moved);
        self.bytes.borrow_mut().insert(to.page, written);
        self.counts.borrow_mut().get_mut(&to.page).unwrap().dirty = true;
        Ok(())
    }
    fn put_table(&self, _: Released<TablePage>) {}
    fn insert<'id>(
        &self,
        mapping: &Mapping,
        skipped: &mut Skipped<'id>,
    ) -> Result<Inserted<'id>, NotInserted<'id>> {
        self.no_locks();
        if let Some(action) = self.during_insert.take() {
            action(self);
        }
        let gfn = mapping.gfn;
        let occupied = self.p2m.borrow().contains_key(&gfn.get());
        if self.insert_fails.get() || occupied {
            // As if the second of two tables refused: what the first showed is on record.
            return Err(NotInserted { cleared: self.gone(skipped, gfn) });
        }
        let mut inserted = Inserted::default();
        if let Some(mfn) = self.ram.borrow_mut().remove(&(CALLER, gfn.get())) {
            let page = self.take(mfn, Rights::Read);
            inserted.displaced = Some(Removed { page, cleared: self.gone(skipped, gfn) });
        }
        if let Some(old) = mapping.moved_from.filter(|old| *old != gfn) {
            let mfn = self.ram.borrow_mut().remove(&(CALLER, old.get())).unwrap();
            let page = self.take(mfn, Rights::Read);
            inserted.moved = Some(Removed { page, cleared: self.gone(skipped, old) });
        }
        let entry = Expected { mfn: mapping.mfn, rights: mapping.rights };
        self.p2m.borrow_mut().insert(gfn.get(), entry);
        Ok(inserted)
    }
    fn clear<'id>(
        &self,
        gfn: Gfn,
        expected: Expected,
        skipped: &mut Skipped<'id>,
    ) -> Result<Cleared<'id>, ClearError> {
        if let Some(error) = self.clear_fails.get() {
            return Err(error);
        }
        let entry = self.p2m.borrow().get(&gfn.get()).copied().ok_or(ClearError::NotGrant)?;
        if entry.mfn != expected.mfn {
            return Err(ClearError::OtherFrame);
        }
        if entry.rights != expected.rights {
            return Err(ClearError::OtherRights);
        }
        self.p2m.borrow_mut().remove(&gfn.get());
        Ok(self.gone(skipped, gfn))
    }
    fn clear_all<'id>(
        &self,
        removals: &Removals,
        skipped: &mut Skipped<'id>,
        mut removed: impl FnMut(Result<Cleared<'id>, ClearError>),
    ) {
        assert!(self.tables.try_borrow_mut().is_err(), "no table is locked");
        assert!(self.maptrack.try_borrow_mut().is_ok(), "the maptrack is locked");
        self.together.borrow_mut().push(removals.iter().len());
        let answers = self.answers.get();
        for (gfn, expected) in removals.iter().take(answers) {
            removed(self.clear(gfn, expected, skipped));
        }
    }
    fn forget<'id>(&self, skipped: &mut Skipped<'id>) -> Cleared<'id> {
        skipped.everything::<Tlb>();
        skipped.everything::<Iotlb>();
        let cpus = skipped.absent::<Tlb>();
        cpus.with(&skipped.absent::<Iotlb>())
    }
    fn hardware(&self) -> Hardware<'_, Self, Self> {
        Hardware { tlb: self, iotlb: self }
    }
    fn judge(&self, failure: &FlushFailure<Self>, retries: u32) -> Verdict {
        self.no_locks();
        assert!(failure.error.tlb.is_some() || failure.error.iotlb.is_some());
        self.judged.borrow_mut().push((failure.held.len(), retries));
        let failed = (failure.error.tlb.is_some(), failure.error.iotlb.is_some());
        self.failed_kinds.borrow_mut().push(failed);
        self.verdict.get()
    }
    fn on_flush_failure(&self, failure: FlushFailure<Self>) {
        assert!(failure.error.tlb.is_some() || failure.error.iotlb.is_some());
        self.held.borrow_mut().push(failure.held);
    }
}

const _: () = assert!(size_of::<Batch<Pin, BATCH>>() <= 4096);
