//! Handles: what a domain has mapped, and which handles are free.
//!
//! [`Maptrack`] belongs to the domain that maps. A handle is reserved before a map,
//! committed when the mapping exists, and freed exactly once. Each vCPU has a list of
//! free handles of its own, first in first out, so that a handle just freed is the
//! last to come back: a guest that unmaps twice finds it free, not reused.

use crate::{
    domain::NoMemory,
    pin::{Holding, Pin},
};

/// Entries in one page of storage.
pub const MAPTRACK_PER_PAGE: usize = 256;

/// Ends a free list.
const END: u32 = u32::MAX;

/// A virtual CPU of the domain, from 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct VcpuId(pub u32);

/// One handle's entry.
///
/// Embedders only provide room for it: a new page is full of [`MaptrackEntry::FREE`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub struct MaptrackEntry {
    /// What the mapping holds; nothing if the handle stands for none.
    holding: Holding,
    owner: VcpuId,
    next: u32,
}

impl MaptrackEntry {
    /// An entry that is on no list and maps nothing.
    pub const FREE: Self = Self { holding: Holding::NOTHING, owner: VcpuId(0), next: END };

    /// What the mapping holds.
    #[inline]
    pub(crate) const fn holding(&self) -> Holding {
        self.holding
    }

    /// Takes the handle whose entry this is for an unmap, as [`Maptrack::take`] does.
    ///
    /// Its entry was [found](Maptrack::find) under the lock of the granter's table, and was
    /// not taken.
    #[inline]
    pub(crate) const fn take(&mut self, handle: u32) -> Taken {
        self.holding = self.holding.taken();
        Taken { handle, owner: self.owner }
    }
}

/// A handle that is taken for an unmap, and whose free list it will come back to.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Taken {
    pub(crate) handle: u32,
    owner: VcpuId,
}

const _: () = assert!(size_of::<[MaptrackEntry; MAPTRACK_PER_PAGE]>() == 4096);

/// The free handles of one vCPU: the two ends of a list through the entries.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FreeList {
    head: u32,
    tail: u32,
}

impl FreeList {
    /// No handle. Every vCPU starts with it.
    pub const EMPTY: Self = Self { head: END, tail: END };
}

/// Room for handles, which the embedder owns and adds page by page.
pub trait MaptrackStorage {
    /// Page `page` of entries, if it was added.
    fn page(&mut self, page: usize) -> Option<&mut [MaptrackEntry; MAPTRACK_PER_PAGE]>;

    /// Adds page `page`, full of [`MaptrackEntry::FREE`].
    ///
    /// # Errors
    /// [`NoMemory`]; then nothing changed.
    fn add_page(&mut self, page: usize) -> Result<(), NoMemory>;

    /// How many vCPUs the domain can have.
    fn vcpus(&self) -> usize;

    /// The free list of a vCPU, if there is such a vCPU.
    fn free_list(&mut self, vcpu: VcpuId) -> Option<&mut FreeList>;
}

/// A handle taken from a free list, with nothing behind it yet.
#[derive(Debug)]
#[must_use = "dropping it loses a handle; commit or cancel it"]
pub(crate) struct Reservation(u32);

/// The handles of one domain.
#[derive(Debug)]
pub struct Maptrack<S> {
    storage: S,
    handles: usize,
    maximum_pages: usize,
}

impl<S: MaptrackStorage> Maptrack<S> {
    /// No handles yet; at most `maximum_pages` pages of [`MAPTRACK_PER_PAGE`] each.
    ///
    /// More than 2^24 pages cannot be named by a 32-bit handle and are not used.
    pub fn new(storage: S, maximum_pages: usize) -> Self {
        /// Keeps the last handle below the list's end mark.
        const NAMEABLE: usize = (END as usize) / MAPTRACK_PER_PAGE;
        Self { storage, handles: 0, maximum_pages: maximum_pages.min(NAMEABLE) }
    }

    /// How many handles exist, free or not.
    #[must_use]
    #[inline]
    pub fn handles(&self) -> usize {
        self.handles
    }

    /// The embedder's storage.
    pub fn storage(&self) -> &S {
        &self.storage
    }

    /// Takes a free handle: from the vCPU's own list, a new page, or another vCPU.
    pub(crate) fn reserve(&mut self, vcpu: VcpuId) -> Option<Reservation> {
        let handle = match self.pop(vcpu) {
            Some(handle) => handle,
            None => match self.grow(vcpu) {
                Ok(()) => self.pop(vcpu)?,
                Err(NoMemory) => self.steal(vcpu)?,
            },
        };
        Some(Reservation(handle))
    }

    /// Puts a mapping behind a reserved handle.
    ///
    /// From then on the entry stands for the pin: whoever frees it makes the pin again.
    pub(crate) fn commit(&mut self, reservation: Reservation, pin: Pin) -> u32 {
        let Reservation(handle) = reservation;
        if let Some(entry) = self.entry(handle) {
            entry.holding = pin.into_stored();
        }
        handle
    }

    /// Gives a reserved handle back.
    pub(crate) fn cancel(&mut self, reservation: Reservation) {
        self.push(reservation.0);
    }

    /// The entry of a handle that maps something, or is being unmapped.
    ///
    /// `clamp` is the embedder's, for a handle that was found in range.
    #[inline]
    pub(crate) fn live(
        &mut self,
        handle: u32,
        clamp: impl Fn(usize, usize) -> usize,
    ) -> Option<MaptrackEntry> {
        let entry = self.find(handle, clamp).filter(|entry| entry.holding.is_granted())?;
        Some(MaptrackEntry { holding: entry.holding.put_back(), ..*entry })
    }

    /// The entry of a handle that exists, to take it if it is live.
    #[inline]
    pub(crate) fn find(
        &mut self,
        handle: u32,
        clamp: impl Fn(usize, usize) -> usize,
    ) -> Option<&mut MaptrackEntry> {
        let handles = self.handles();
        let index = usize::try_from(handle).ok().filter(|index| *index < handles)?;
        let index = clamp(index, handles);
        let page = self.storage.page(index / MAPTRACK_PER_PAGE)?;
        Some(&mut page[index % MAPTRACK_PER_PAGE])
    }

    /// Takes a handle for an unmap, if it still stands for what was seen.
    ///
    /// The lock of the granter's table is held: of two unmaps of one handle, the second one
    /// comes here when the first has [put it back](Self::put_back) or is done with it.
    #[inline]
    pub(crate) fn take(&mut self, handle: u32, seen: MaptrackEntry) -> bool {
        match self.entry(handle) {
            Some(entry) if *entry == seen => {
                entry.holding = entry.holding.taken();
                true
            }
            Some(_) | None => false,
        }
    }

    /// Gives a taken handle back to the mapping, which stays.
    #[inline]
    pub(crate) fn put_back(&mut self, handle: u32) {
        if let Some(entry) = self.entry(handle) {
            entry.holding = entry.holding.put_back();
        }
    }

    /// Frees the handle of a mapping that is gone.
    ///
    /// Freeing one that is free changes nothing.
    #[inline]
    pub(crate) fn free(&mut self, handle: u32) {
        let Some(entry) = self.entry(handle).filter(|entry| entry.holding.is_granted()) else {
            return;
        };
        entry.holding = Holding::NOTHING;
        let owner = entry.owner;
        self.append((handle, handle), owner);
    }

    /// Frees handles that were taken, in this order, as [`free`](Self::free) does.
    #[inline]
    pub(crate) fn free_all<T>(&mut self, of: &[T], taken: impl Fn(&T) -> Taken) {
        let mut rest = of;
        while let Some((head, others)) = rest.split_first() {
            // Those that follow each other mostly come to the same list: they are linked, and
            // appended at once.
            let Taken { handle: first, owner } = taken(head);
            let mut last = first;
            rest = others;
            while let Some((one, others)) = rest.split_first() {
                let next = taken(one);
                if next.owner != owner {
                    break;
                }
                self.link(last, next.handle);
                (last, rest) = (next.handle, others);
            }
            self.link(last, END);
            self.append((first, last), owner);
        }
    }

    /// Makes a handle stand for nothing, with `next` behind it.
    #[inline]
    fn link(&mut self, handle: u32, next: u32) {
        if let Some(entry) = self.entry(handle) {
            (entry.holding, entry.next) = (Holding::NOTHING, next);
        }
    }

    #[inline]
    fn entry(&mut self, handle: u32) -> Option<&mut MaptrackEntry> {
        let index = usize::try_from(handle).ok()?;
        let page = self.storage.page(index / MAPTRACK_PER_PAGE)?;
        Some(&mut page[index % MAPTRACK_PER_PAGE])
    }

    /// The oldest free handle of a vCPU.
    fn pop(&mut self, vcpu: VcpuId) -> Option<u32> {
        let head = self.storage.free_list(vcpu)?.head;
        if head == END {
            return None;
        }
        let entry = self.entry(head)?;
        let next = core::mem::replace(&mut entry.next, END);
        let list = self.storage.free_list(vcpu)?;
        list.head = next;
        if next == END {
            list.tail = END;
        }
        Some(head)
    }

    /// Puts a free handle at the end of its owner's list.
    fn push(&mut self, handle: u32) {
        if let Some(entry) = self.entry(handle) {
            let owner = entry.owner;
            self.append((handle, handle), owner);
        }
    }

    /// Puts handles, linked from the first to the last and on no list, at the end of the list
    /// of `owner`.
    #[inline]
    fn append(&mut self, (first, last): (u32, u32), owner: VcpuId) {
        let Some(list) = self.storage.free_list(owner) else { return };
        let tail = core::mem::replace(&mut list.tail, last);
        if tail == END {
            list.head = first;
        } else if let Some(before) = self.entry(tail) {
            before.next = first;
        }
    }

    /// Adds a page of handles and gives them to `vcpu`.
    fn grow(&mut self, vcpu: VcpuId) -> Result<(), NoMemory> {
        let (first, page) = (self.handles, self.handles / MAPTRACK_PER_PAGE);
        if page >= self.maximum_pages || self.storage.free_list(vcpu).is_none() {
            return Err(NoMemory);
        }
        self.storage.add_page(page)?;
        self.handles = first.saturating_add(MAPTRACK_PER_PAGE);
        for handle in (first..self.handles).filter_map(|handle| u32::try_from(handle).ok()) {
            if let Some(entry) = self.entry(handle) {
                *entry = MaptrackEntry { owner: vcpu, ..MaptrackEntry::FREE };
            }
            self.push(handle);
        }
        Ok(())
    }

    /// Takes the oldest free handle of any other vCPU. It stays with the taker.
    fn steal(&mut self, vcpu: VcpuId) -> Option<u32> {
        self.storage.free_list(vcpu)?;
        let vcpus = u32::try_from(self.storage.vcpus()).unwrap_or(u32::MAX);
        let handle = (0..vcpus).find_map(|other| self.pop(VcpuId(other)))?;
        self.entry(handle)?.owner = vcpu;
        Some(handle)
    }
}
