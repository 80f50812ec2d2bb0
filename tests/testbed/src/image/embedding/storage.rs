//! Room for grant tables and handles, out of frames and of fixed pools.
//!
//! What guests see lives in frames of its own. What they must not reach (active
//! entries, handles) comes from pools in the image: there is no heap.

use arrayvec::ArrayVec;
use flush::{Gfn, Mfn};
use gnttab::{
    ACTIVE_PER_PAGE, ActiveEntry, FreeList, GrantStorage, MAPTRACK_PER_PAGE, MaptrackEntry,
    MaptrackStorage, NoMemory, SharedPage, StatusPage, TableFrame, VcpuId,
};
use spin::mutex::{SpinMutex, SpinMutexGuard};

use crate::memory;

/// Shared frames of one table at most: 512 grants each.
pub(crate) const GRANT_FRAMES: usize = 32;
/// Pages of active entries at most: two for each shared frame.
const ACTIVE_PAGES: usize = 2 * GRANT_FRAMES;
/// Status frames of one table at most: 2048 words each.
const STATUS_FRAMES: usize = 8;
/// Pages of handles of one domain at most: 256 handles each.
pub(crate) const HANDLE_PAGES: usize = 48;

type ActivePage = [ActiveEntry; ACTIVE_PER_PAGE];
type HandlePage = [MaptrackEntry; MAPTRACK_PER_PAGE];

static ACTIVE_POOL: [SpinMutex<ActivePage>; ACTIVE_PAGES + 8] =
    [const { SpinMutex::new([ActiveEntry::IDLE; ACTIVE_PER_PAGE]) }; ACTIVE_PAGES + 8];
static HANDLE_POOL: [SpinMutex<HandlePage>; HANDLE_PAGES + 4] =
    [const { SpinMutex::new([MaptrackEntry::FREE; MAPTRACK_PER_PAGE]) }; HANDLE_PAGES + 4];

/// Take a page out of a pool for good: it stays locked, so nobody takes it again.
fn take<T>(pool: &'static [SpinMutex<T>]) -> Result<&'static mut T, NoMemory> {
    pool.iter().find_map(SpinMutex::try_lock).map(SpinMutexGuard::leak).ok_or(NoMemory)
}

/// The pages of one domain's grant table.
pub(crate) struct Grants {
    shared: ArrayVec<(Mfn, &'static SharedPage), GRANT_FRAMES>,
    status: ArrayVec<(Mfn, &'static StatusPage), STATUS_FRAMES>,
    active: ArrayVec<&'static mut ActivePage, ACTIVE_PAGES>,
}

impl Grants {
    /// No page yet.
    pub(crate) const fn new() -> Self {
        Self {
            shared: ArrayVec::new_const(),
            status: ArrayVec::new_const(),
            active: ArrayVec::new_const(),
        }
    }
}

/// The frames of status words stay taken: see [`memory::allocate_statuses`]. So do the pages
/// of the pools.
impl Drop for Grants {
    fn drop(&mut self) {
        for (frame, _) in &self.shared {
            // The allocator refuses what is not its own; such a frame goes nowhere.
            memory::release(*frame).ok();
        }
    }
}

impl GrantStorage for Grants {
    fn shared(&self, page: usize) -> Option<&SharedPage> {
        self.shared.get(page).map(|(_, words)| *words)
    }

    fn status(&self, page: usize) -> Option<&StatusPage> {
        self.status.get(page).map(|(_, words)| *words)
    }

    fn active(&mut self, page: usize) -> Option<&mut ActivePage> {
        self.active.get_mut(page).map(|entries| &mut **entries)
    }

    fn add_shared(&mut self, page: usize) -> Result<(), NoMemory> {
        if page < self.shared.len() {
            return Ok(());
        }
        let frame = memory::allocate().map_err(|_| NoMemory)?;
        let words = memory::words(frame).ok_or(NoMemory)?;
        self.shared.try_push((frame, words)).map_err(|_| {
            memory::release(frame).ok();
            NoMemory
        })
    }

    fn add_status(&mut self, page: usize) -> Result<(), NoMemory> {
        if page < self.status.len() {
            return Ok(());
        }
        if self.status.is_full() {
            return Err(NoMemory);
        }
        let frame = memory::allocate_statuses().map_err(|_| NoMemory)?;
        let words = memory::statuses(frame).ok_or(NoMemory)?;
        self.status.push((frame, words));
        Ok(())
    }

    fn add_active(&mut self, page: usize) -> Result<(), NoMemory> {
        if page < self.active.len() {
            return Ok(());
        }
        if self.active.is_full() {
            return Err(NoMemory);
        }
        self.active.push(take(&ACTIVE_POOL)?);
        Ok(())
    }

    fn frame(&self, frame: TableFrame) -> Option<Mfn> {
        match frame {
            TableFrame::Shared(page) => self.shared.get(page).map(|(frame, _)| *frame),
            TableFrame::Status(page) => self.status.get(page).map(|(frame, _)| *frame),
        }
    }

    // The guests of this image write their tables through the hypervisor.
    fn mapped_at(&self, _: TableFrame) -> Option<Gfn> {
        None
    }

    fn status_mapped(&self, _: usize) -> bool {
        false
    }

    // Kept, and used again when the table has status words again: a frame of 16-bit words
    // cannot become one of 64-bit words.
    fn remove_status(&mut self, page: usize) {
        if let Some((_, words)) = self.status.get(page) {
            for word in *words {
                word.store(0, core::sync::atomic::Ordering::SeqCst);
            }
        }
    }
}

/// The handles of one domain with a single vCPU.
pub(crate) struct Handles {
    pages: ArrayVec<&'static mut HandlePage, HANDLE_PAGES>,
    free: FreeList,
}

impl Handles {
    /// No handle yet.
    pub(crate) const fn new() -> Self {
        Self { pages: ArrayVec::new_const(), free: FreeList::EMPTY }
    }
}

impl MaptrackStorage for Handles {
    fn page(&mut self, page: usize) -> Option<&mut HandlePage> {
        self.pages.get_mut(page).map(|entries| &mut **entries)
    }

    fn add_page(&mut self, page: usize) -> Result<(), NoMemory> {
        if page < self.pages.len() {
            return Ok(());
        }
        if self.pages.is_full() {
            return Err(NoMemory);
        }
        self.pages.push(take(&HANDLE_POOL)?);
        Ok(())
    }

    fn vcpus(&self) -> usize {
        1
    }

    fn free_list(&mut self, vcpu: VcpuId) -> Option<&mut FreeList> {
        (vcpu == VcpuId(0)).then_some(&mut self.free)
    }
}
