//! Room for grant tables and handles in memory that is all mapped.

use flush::{Gfn, Mfn};
use gnttab::{
    ACTIVE_PER_PAGE, ActiveEntry, FreeList, GrantStorage, MAPTRACK_PER_PAGE, MaptrackEntry,
    MaptrackStorage, NoMemory, SharedPage, StatusPage, TableFrame, VcpuId,
};

use super::memory::Direct;

/// One domain's grant-table pages: a table of version 1, whose entries are in frames.
#[derive(Debug)]
pub(super) struct Grants<'m> {
    memory: &'m Direct,
    shared: Vec<(Mfn, &'m SharedPage)>,
    active: Vec<Box<[ActiveEntry; ACTIVE_PER_PAGE]>>,
}

impl<'m> Grants<'m> {
    pub(super) const fn new(memory: &'m Direct) -> Self {
        Self { memory, shared: Vec::new(), active: Vec::new() }
    }
}

impl GrantStorage for Grants<'_> {
    #[inline]
    fn shared(&self, page: usize) -> Option<&SharedPage> {
        self.shared.get(page).map(|(_, words)| *words)
    }

    fn status(&self, _: usize) -> Option<&StatusPage> {
        None
    }

    #[inline]
    fn active(&mut self, page: usize) -> Option<&mut [ActiveEntry; ACTIVE_PER_PAGE]> {
        self.active.get_mut(page).map(|entries| &mut **entries)
    }

    fn add_shared(&mut self, page: usize) -> Result<(), NoMemory> {
        if page == self.shared.len() {
            let mfn = self.memory.take().ok_or(NoMemory)?;
            self.shared.push((mfn, self.memory.words(mfn).ok_or(NoMemory)?));
        }
        Ok(())
    }

    fn add_status(&mut self, _: usize) -> Result<(), NoMemory> {
        Err(NoMemory)
    }

    fn add_active(&mut self, page: usize) -> Result<(), NoMemory> {
        if page == self.active.len() {
            self.active.push(Box::new([ActiveEntry::IDLE; ACTIVE_PER_PAGE]));
        }
        Ok(())
    }

    fn frame(&self, frame: TableFrame) -> Option<Mfn> {
        match frame {
            TableFrame::Shared(page) => self.shared.get(page).map(|(mfn, _)| *mfn),
            TableFrame::Status(_) => None,
        }
    }

    fn mapped_at(&self, _: TableFrame) -> Option<Gfn> {
        None
    }

    fn status_mapped(&self, _: usize) -> bool {
        false
    }

    fn remove_status(&mut self, _: usize) {}
}

/// The handles of a domain with one vCPU.
#[derive(Debug, Default)]
pub(super) struct Handles {
    pages: Vec<Box<[MaptrackEntry; MAPTRACK_PER_PAGE]>>,
    list: Option<FreeList>,
}

impl MaptrackStorage for Handles {
    #[inline]
    fn page(&mut self, page: usize) -> Option<&mut [MaptrackEntry; MAPTRACK_PER_PAGE]> {
        self.pages.get_mut(page).map(|entries| &mut **entries)
    }

    fn add_page(&mut self, page: usize) -> Result<(), NoMemory> {
        if page == self.pages.len() {
            self.pages.push(Box::new([MaptrackEntry::FREE; MAPTRACK_PER_PAGE]));
        }
        Ok(())
    }

    fn vcpus(&self) -> usize {
        1
    }

    #[inline]
    fn free_list(&mut self, vcpu: VcpuId) -> Option<&mut FreeList> {
        (vcpu == VcpuId(0)).then(|| self.list.get_or_insert(FreeList::EMPTY))
    }
}
