//! What the two guests do: grant, map, give back, take back.
//!
//! They have no code of their own yet, so the testbed acts in their place: it writes
//! their memory as they would and makes their hypercalls.

use core::ops::Range;
use core::sync::atomic::{AtomicU64, Ordering};

use flush::{Gfn, Mfn};
use gnttab::abi::{MapGrantRef, UnmapAndReplace, UnmapGrantRef};
use gnttab::{Call, GrantStorage, GuestAddress, Outcome, Rights, Status, Version};
use iommu_vtd::Guarded;
use testbed::ensure;
use testbed::failure::{Context, Failure};
use zerocopy::{FromBytes, FromZeros, Immutable, IntoBytes};

use super::{BACKEND, FRONTEND, Manner, World};

pub(crate) mod scripted;

/// Grants of one kind at most.
pub(crate) const MOST: u32 = 10_000;
/// References below are reserved.
const FIRST_REFERENCE: u32 = 8;
/// Where the frontend has the pages it grants, by reference.
const GRANTED: u64 = 0x1000;
/// Where the backend maps them: the first is a multiple of 32.
const MAPPED: Gfn = Gfn::new(0x10_0000);
/// Where the backend keeps its map requests, whose answers hold the handles.
///
/// Its last eight bits, and those of [`UNMAPS`], are no mapping's among the first 64: a
/// unit may forget more than it was told to, and a flush for a page here must not hide
/// that one for a mapping was left out.
const MAPS: Gfn = Gfn::new(0x140);
/// Where it writes its unmap requests.
const UNMAPS: Gfn = Gfn::new(0x290);
/// Written into a status before a call.
const NO_STATUS: i16 = 0x5a5a;

/// The two ways to give a mapping back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Operation {
    /// `unmap_grant_ref`.
    Unmap,
    /// `unmap_and_replace`, with this new address.
    Replace(u64),
}

/// Grants of the frontend, and where the backend maps them.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Grants {
    count: u32,
    first: Gfn,
    rights: Rights,
}

impl Grants {
    /// `count` grants, to be mapped in a row from a multiple of 32 on.
    ///
    /// # Errors
    /// If that is none, or more than [`MOST`].
    pub(crate) fn new(count: u64, rights: Rights) -> Result<Self, Failure> {
        Self::at(MAPPED, count, rights)
    }

    /// `count` grants, to be mapped in a row from `first` on.
    ///
    /// # Errors
    /// As [`new`](Self::new).
    pub(crate) fn at(first: Gfn, count: u64, rights: Rights) -> Result<Self, Failure> {
        let count = u32::try_from(count).ok().filter(|count| (1..=MOST).contains(count));
        let count = count.context("a number of grants from 1 to 10000")?;
        Ok(Self { count, first, rights })
    }

    /// The places of all of them.
    pub(crate) fn all(&self) -> Range<u32> {
        0..self.count
    }

    /// How many there are.
    pub(crate) fn len(&self) -> u64 {
        u64::from(self.count)
    }

    /// Where the backend maps one.
    pub(crate) fn gfn(&self, place: u32) -> Gfn {
        Gfn::new(self.first.get().saturating_add(u64::from(place)))
    }

    /// Where the frontend has one.
    fn granted(place: u32) -> Gfn {
        Gfn::new(GRANTED + u64::from(Self::reference(place)))
    }

    fn reference(place: u32) -> u32 {
        FIRST_REFERENCE + place
    }
}

impl World {
    /// The frontend grants pages to the backend, which maps them in one hypercall.
    ///
    /// # Errors
    /// If memory or the table is full, or the backend is refused a mapping.
    pub(crate) fn share(&self, grants: &Grants) -> Result<(), Failure> {
        let frontend = self.guest(FRONTEND)?;
        for place in grants.all() {
            let gfn = Grants::granted(place);
            self.hypervisor.populate(frontend, gfn, 0)?;
            let read_only = u64::from(grants.rights == Rights::Read);
            let entry = 1 | read_only << 2 | u64::from(BACKEND.get()) << 16 | gfn.get() << 32;
            self.entry(place, |word| word.store(entry, Ordering::SeqCst))?;
            // The pages for it are there before the unmap is measured.
            self.put(UNMAPS, place, &UnmapGrantRef::new_zeroed())?;
        }
        self.map(grants)
    }

    /// The backend maps the grants in one hypercall.
    ///
    /// # Errors
    /// If it is refused one.
    pub(crate) fn map(&self, grants: &Grants) -> Result<(), Failure> {
        const HOST_MAP: u32 = 1 << 1;
        const READ_ONLY: u32 = 1 << 2;
        let read_only = if grants.rights == Rights::Read { READ_ONLY } else { 0 };
        for place in grants.all() {
            let mut element = MapGrantRef::new_zeroed();
            element.host_addr = grants.gfn(place).get() << 12;
            element.flags = HOST_MAP | read_only;
            element.reference = Grants::reference(place);
            element.domain = FRONTEND.get();
            element.status = NO_STATUS;
            self.put(MAPS, place, &element)?;
        }
        const MAP: u32 = 0;
        let call = self.request(MAP, MAPS, size_of::<MapGrantRef>(), grants.all());
        let outcome = self.call(self.guest(BACKEND)?, call, &Manner::HONEST)?;
        ensure!(outcome == Outcome::Done, "the map ended as {outcome:?}");
        for place in grants.all() {
            let MapGrantRef { status, .. } = self.get(MAPS, place)?;
            ensure!(status == Status::Okay.value(), "map {place} has status {status}");
        }
        Ok(())
    }

    /// The backend gives the mappings at `places` back in one hypercall.
    ///
    /// # Errors
    /// If it cannot be made; how it ended is the caller's to judge.
    pub(crate) fn unmap(
        &self,
        operation: Operation,
        grants: &Grants,
        places: Range<u32>,
        manner: &Manner<'_>,
    ) -> Result<Outcome, Failure> {
        let call = self.unmap_request(operation, grants, places)?;
        self.call(self.guest(BACKEND)?, call, manner)
    }

    /// The hypercall with which the backend gives the mappings at `places` back; its
    /// elements are in the backend's memory.
    ///
    /// # Errors
    /// If there is no memory for them.
    pub(crate) fn unmap_request(
        &self,
        operation: Operation,
        grants: &Grants,
        places: Range<u32>,
    ) -> Result<Call, Failure> {
        for place in places.clone() {
            let MapGrantRef { handle, .. } = self.get(MAPS, place)?;
            let host_addr = grants.gfn(place).get() << 12;
            match operation {
                Operation::Unmap => {
                    let mut element = UnmapGrantRef::new_zeroed();
                    (element.host_addr, element.handle) = (host_addr, handle);
                    element.status = NO_STATUS;
                    self.put(UNMAPS, place, &element)?;
                }
                Operation::Replace(new_addr) => {
                    let mut element = UnmapAndReplace::new_zeroed();
                    (element.host_addr, element.handle) = (host_addr, handle);
                    (element.new_addr, element.status) = (new_addr, NO_STATUS);
                    self.put(UNMAPS, place, &element)?;
                }
            }
        }
        const UNMAP: u32 = 1;
        const REPLACE: u32 = 7;
        let command = match operation {
            Operation::Unmap => UNMAP,
            Operation::Replace(_) => REPLACE,
        };
        // Elements of both operations have one size, and the status in one place.
        Ok(self.request(command, UNMAPS, size_of::<UnmapGrantRef>(), places))
    }

    /// As [`unmap`](Self::unmap), and all of it must go well.
    ///
    /// # Errors
    /// If the call or one of its elements does not.
    pub(crate) fn unmap_well(
        &self,
        grants: &Grants,
        places: Range<u32>,
        manner: &Manner<'_>,
    ) -> Result<(), Failure> {
        let outcome = self.unmap(Operation::Unmap, grants, places.clone(), manner)?;
        ensure!(outcome == Outcome::Done, "the unmap ended as {outcome:?}");
        for place in places {
            let status = self.unmap_status(place)?;
            ensure!(status == Status::Okay.value(), "unmap {place} has status {status}");
        }
        Ok(())
    }

    /// The status of an element of the last unmap.
    ///
    /// # Errors
    /// If the backend has no such element.
    pub(crate) fn unmap_status(&self, place: u32) -> Result<i16, Failure> {
        Ok(self.get::<UnmapGrantRef>(UNMAPS, place)?.status)
    }

    /// The page behind a grant, while the frontend has it.
    ///
    /// # Errors
    /// If it has not.
    pub(crate) fn granted_page(&self, place: u32) -> Result<Mfn, Failure> {
        let mapping = self.guest(FRONTEND)?.lookup(Grants::granted(place));
        Ok(mapping.context("a granted page")?.mfn)
    }

    /// Whether the frontend sees a grant in use, for reading and for writing.
    ///
    /// # Errors
    /// If its table has no such entry.
    pub(crate) fn in_use(&self, place: u32) -> Result<(bool, bool), Failure> {
        let word = self.entry(place, |word| word.load(Ordering::SeqCst))?;
        Ok((word & 1 << 3 != 0, word & 1 << 4 != 0))
    }

    /// The frontend revokes a grant and frees its page. Returns the page.
    ///
    /// # Errors
    /// If the grant is in use, or somebody else counts the page.
    pub(crate) fn take_back(&self, place: u32) -> Result<Mfn, Failure> {
        let in_use = self.in_use(place)?;
        ensure!(in_use == (false, false), "grant {place} is in use: {in_use:?}");
        self.entry(place, |word| word.store(0, Ordering::SeqCst))?;
        self.hypervisor.depopulate(self.guest(FRONTEND)?, Grants::granted(place), |_| Ok(()))
    }

    /// Whether the backend has the page in neither table.
    ///
    /// # Errors
    /// If there is no backend.
    pub(crate) fn is_unmapped(&self, gfn: Gfn) -> Result<bool, Failure> {
        let backend = self.guest(BACKEND)?;
        Ok(backend.lookup(gfn).is_none() && backend.device_lookup(gfn).is_none())
    }

    /// Reach the frontend's shared entry of a grant, as the frontend does.
    fn entry<A>(&self, place: u32, action: impl Fn(&AtomicU64) -> A) -> Result<A, Failure> {
        let reference = Grants::reference(place) as usize;
        let (page, index) =
            (reference / Version::V1.per_page(), reference % Version::V1.per_page());
        let reached = self.guest(FRONTEND)?.grants.with(|table| {
            if page >= table.frames() {
                table.grow(page + 1).ok()?;
            }
            table.storage().shared(page)?.get(index).map(&action)
        });
        reached.context("an entry of the frontend's table")
    }

    /// Write an element of an array in the backend's memory, which grows as needed.
    fn put<E: IntoBytes + Immutable>(
        &self,
        array: Gfn,
        place: u32,
        element: &E,
    ) -> Result<(), Failure> {
        let backend = self.guest(BACKEND)?;
        let start = self.element_at(array, place, size_of::<E>());
        let last = start + size_of::<E>() as u64 - 1;
        for gfn in (start >> 12..=last >> 12).map(Gfn::new) {
            if backend.lookup(gfn).is_none() {
                self.hypervisor.populate(backend, gfn, 0)?;
            }
        }
        backend.write(GuestAddress(start), element.as_bytes()).context("backend memory")
    }

    /// Read an element of an array in the backend's memory.
    fn get<E: FromBytes + FromZeros + IntoBytes>(
        &self,
        array: Gfn,
        place: u32,
    ) -> Result<E, Failure> {
        let mut element = E::new_zeroed();
        let start = self.element_at(array, place, size_of::<E>());
        let read = self.guest(BACKEND)?.read(GuestAddress(start), element.as_mut_bytes());
        read.context("backend memory")?;
        Ok(element)
    }

    /// The address of an element of an array.
    fn element_at(&self, array: Gfn, place: u32, size: usize) -> u64 {
        let beside = if array == UNMAPS { self.beside.get() } else { 0 };
        (array.get() << 12) + beside + u64::from(place) * size as u64
    }

    /// A hypercall on the elements at `places` of an array.
    fn request(&self, command: u32, array: Gfn, size: usize, places: Range<u32>) -> Call {
        let argument = GuestAddress(self.element_at(array, places.start, size));
        Call { command, argument, count: places.end.saturating_sub(places.start) }
    }
}
