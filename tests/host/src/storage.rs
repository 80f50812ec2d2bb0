//! Room for grant tables and handles, out of the machine's memory and the heap.

use std::{
    cell::Cell,
    collections::BTreeSet,
    sync::{
        Arc,
        atomic::{AtomicU16, AtomicU64},
    },
};

use flush::{DomainId, Gfn, Mfn};
use gnttab::{
    ACTIVE_PER_PAGE, ActiveEntry, FreeList, GrantStorage, MAPTRACK_PER_PAGE, MaptrackEntry,
    MaptrackStorage, NoMemory, SharedPage, StatusPage, TableFrame, VcpuId,
};

use crate::{Memory, Ram};

/// One domain's grant-table pages.
pub struct Grants<R> {
    memory: Memory<R>,
    owner: DomainId,
    shared: Vec<(Mfn, Arc<[AtomicU64; 512]>)>,
    status: Vec<(Mfn, Box<StatusPage>)>,
    active: Vec<Box<[ActiveEntry; ACTIVE_PER_PAGE]>>,
    /// Status frames that the guest has mapped, as a test says.
    pub mapped_status: BTreeSet<usize>,
    /// How many more pages may be added, of all sorts.
    pub pages_left: Cell<usize>,
}

impl<R: Ram> Grants<R> {
    /// No page yet.
    pub fn new(memory: Memory<R>, owner: DomainId) -> Self {
        Self {
            memory,
            owner,
            shared: Vec::new(),
            status: Vec::new(),
            active: Vec::new(),
            mapped_status: BTreeSet::new(),
            pages_left: Cell::new(usize::MAX),
        }
    }

    /// A page of entries as the guest itself has it: it asks no lock.
    pub fn as_guest(&self, page: usize) -> Option<Arc<SharedPage>> {
        self.shared.get(page).map(|(_, words)| Arc::clone(words))
    }

    fn page(&mut self) -> Result<Mfn, NoMemory> {
        self.room()?;
        self.memory.ram().allocate(self.owner).ok_or(NoMemory)
    }

    /// The frames of the table, of both sorts.
    pub(crate) fn frames(&self) -> impl Iterator<Item = Mfn> {
        let shared = self.shared.iter().map(|(mfn, _)| *mfn);
        shared.chain(self.status.iter().map(|(mfn, _)| *mfn))
    }

    /// Frees the frames of a table that is no more.
    pub(crate) fn give_back(&self) {
        self.frames().for_each(|mfn| self.memory.ram().release(mfn));
    }

    fn room(&mut self) -> Result<(), NoMemory> {
        take_one(&self.pages_left)
    }
}

impl<R: Ram> GrantStorage for Grants<R> {
    fn shared(&self, page: usize) -> Option<&SharedPage> {
        self.shared.get(page).map(|(_, words)| &**words)
    }

    fn status(&self, page: usize) -> Option<&StatusPage> {
        self.status.get(page).map(|(_, words)| &**words)
    }

    fn active(&mut self, page: usize) -> Option<&mut [ActiveEntry; ACTIVE_PER_PAGE]> {
        self.active.get_mut(page).map(|entries| &mut **entries)
    }

    fn add_shared(&mut self, page: usize) -> Result<(), NoMemory> {
        if page < self.shared.len() {
            return Ok(());
        }
        let mfn = self.page()?;
        let words = self.memory.ram().words(mfn).ok_or(NoMemory)?;
        self.shared.push((mfn, words));
        Ok(())
    }

    fn add_status(&mut self, page: usize) -> Result<(), NoMemory> {
        if page < self.status.len() {
            return Ok(());
        }
        let mfn = self.page()?;
        self.status.push((mfn, Box::new([const { AtomicU16::new(0) }; 2048])));
        Ok(())
    }

    fn add_active(&mut self, page: usize) -> Result<(), NoMemory> {
        if page < self.active.len() {
            return Ok(());
        }
        self.room()?;
        self.active.push(Box::new([ActiveEntry::IDLE; ACTIVE_PER_PAGE]));
        Ok(())
    }

    fn frame(&self, frame: TableFrame) -> Option<Mfn> {
        match frame {
            TableFrame::Shared(page) => self.shared.get(page).map(|(mfn, _)| *mfn),
            TableFrame::Status(page) => self.status.get(page).map(|(mfn, _)| *mfn),
        }
    }

    fn mapped_at(&self, frame: TableFrame) -> Option<Gfn> {
        // The guests here see the frames of their tables by machine number.
        self.frame(frame).map(|mfn| Gfn::new(mfn.get()))
    }

    fn status_mapped(&self, page: usize) -> bool {
        self.mapped_status.contains(&page)
    }

    fn remove_status(&mut self, page: usize) {
        if page < self.status.len() {
            let (mfn, _) = self.status.remove(page);
            self.memory.ram().release(mfn);
        }
    }
}

/// One page less may be added.
fn take_one(left: &Cell<usize>) -> Result<(), NoMemory> {
    left.set(left.get().checked_sub(1).ok_or(NoMemory)?);
    Ok(())
}

/// One domain's handles.
pub struct Handles {
    pages: Vec<Box<[MaptrackEntry; MAPTRACK_PER_PAGE]>>,
    lists: Vec<FreeList>,
    /// How many more pages may be added.
    pub pages_left: Cell<usize>,
}

impl Handles {
    /// No handle yet, for this many vCPUs.
    pub fn new(vcpus: usize) -> Self {
        Self {
            pages: Vec::new(),
            lists: vec![FreeList::EMPTY; vcpus],
            pages_left: Cell::new(usize::MAX),
        }
    }
}

impl MaptrackStorage for Handles {
    fn page(&mut self, page: usize) -> Option<&mut [MaptrackEntry; MAPTRACK_PER_PAGE]> {
        self.pages.get_mut(page).map(|entries| &mut **entries)
    }

    fn add_page(&mut self, page: usize) -> Result<(), NoMemory> {
        if page == self.pages.len() {
            take_one(&self.pages_left)?;
            self.pages.push(Box::new([MaptrackEntry::FREE; MAPTRACK_PER_PAGE]));
        }
        Ok(())
    }

    fn vcpus(&self) -> usize {
        self.lists.len()
    }

    fn free_list(&mut self, vcpu: VcpuId) -> Option<&mut FreeList> {
        usize::try_from(vcpu.0).ok().and_then(|index| self.lists.get_mut(index))
    }
}
