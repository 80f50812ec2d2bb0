//! Room for grant tables and handles, out of frames and of fixed pools.
//!
//! What guests see lives in frames of its own. What they must not reach (active
//! entries, handles) comes from pools in the image: there is no heap.

use core::cell::Cell;

use arrayvec::ArrayVec;
use flush::{Gfn, Mfn};
use gnttab::{
    ACTIVE_PER_PAGE, ActiveEntry, FreeList, GrantStorage, MAPTRACK_PER_PAGE, MaptrackEntry,
    MaptrackStorage, NoMemory, SharedPage, StatusPage, TableFrame, VcpuId,
};
use spin::mutex::{SpinMutex, SpinMutexGuard};

use super::page_info::PageInfo;
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

/// A frame that its guest sees.
struct Seen<T: 'static> {
    frame: Mfn,
    words: &'static T,
    /// Where the guest has it.
    at: Cell<Option<Gfn>>,
}

impl<T> Seen<T> {
    /// A new frame. The table counts it for ever, whatever the guest does with its own view.
    fn new(frame: Mfn, words: Option<&'static T>) -> Result<Self, NoMemory> {
        let words = words.ok_or(NoMemory)?;
        PageInfo::of(frame).and_then(|info| info.take(false).ok()).ok_or(NoMemory)?;
        Ok(Self { frame, words, at: Cell::new(None) })
    }
}

/// The pages of one domain's grant table.
pub(crate) struct Grants {
    shared: ArrayVec<Seen<SharedPage>, GRANT_FRAMES>,
    status: ArrayVec<Seen<StatusPage>, STATUS_FRAMES>,
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

    /// Note where the guest has a frame; where it had it before.
    pub(crate) fn note(&self, frame: TableFrame, at: Option<Gfn>) -> Option<Gfn> {
        self.place(frame)?.replace(at)
    }

    /// Whatever the guest had at this number, it has no more.
    pub(crate) fn lost(&self, gfn: Gfn) {
        let shared = self.shared.iter().map(|seen| &seen.at);
        let status = self.status.iter().map(|seen| &seen.at);
        for at in shared.chain(status).filter(|at| at.get() == Some(gfn)) {
            at.set(None);
        }
    }

    fn place(&self, frame: TableFrame) -> Option<&Cell<Option<Gfn>>> {
        Some(match frame {
            TableFrame::Shared(page) => &self.shared.get(page)?.at,
            TableFrame::Status(page) => &self.status.get(page)?.at,
        })
    }
}

/// The frames of status words stay taken: see [`memory::allocate_statuses`]. So do the pages
/// of the pools.
impl Drop for Grants {
    fn drop(&mut self) {
        for Seen { frame, .. } in &self.shared {
            if PageInfo::of(*frame).is_some_and(|info| info.drop_one(false)) {
                // The allocator refuses what is not its own; such a frame goes nowhere.
                memory::release(*frame).ok();
            }
        }
    }
}

impl GrantStorage for Grants {
    fn shared(&self, page: usize) -> Option<&SharedPage> {
        self.shared.get(page).map(|seen| seen.words)
    }

    fn status(&self, page: usize) -> Option<&StatusPage> {
        self.status.get(page).map(|seen| seen.words)
    }

    fn active(&mut self, page: usize) -> Option<&mut ActivePage> {
        self.active.get_mut(page).map(|entries| &mut **entries)
    }

    fn add_shared(&mut self, page: usize) -> Result<(), NoMemory> {
        if page < self.shared.len() {
            return Ok(());
        }
        if self.shared.is_full() {
            return Err(NoMemory);
        }
        let frame = memory::allocate().map_err(|_| NoMemory)?;
        self.shared.push(Seen::new(frame, memory::words(frame))?);
        Ok(())
    }

    fn add_status(&mut self, page: usize) -> Result<(), NoMemory> {
        if page < self.status.len() {
            return Ok(());
        }
        if self.status.is_full() {
            return Err(NoMemory);
        }
        let frame = memory::allocate_statuses().map_err(|_| NoMemory)?;
        self.status.push(Seen::new(frame, memory::statuses(frame))?);
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
            TableFrame::Shared(page) => self.shared.get(page).map(|seen| seen.frame),
            TableFrame::Status(page) => self.status.get(page).map(|seen| seen.frame),
        }
    }

    fn mapped_at(&self, frame: TableFrame) -> Option<Gfn> {
        self.place(frame)?.get()
    }

    fn status_mapped(&self, page: usize) -> bool {
        self.mapped_at(TableFrame::Status(page)).is_some()
    }

    // Kept, and used again when the table has status words again: a frame of 16-bit words
    // cannot become one of 64-bit words.
    fn remove_status(&mut self, page: usize) {
        if let Some(seen) = self.status.get(page) {
            for word in seen.words {
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
