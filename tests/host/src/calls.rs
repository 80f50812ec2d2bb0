//! Calls of any guest on the model, and what became of the pages they are about.
//!
//! A [`Shared`] is one grant that the backend has mapped; its [`Fate`] says whether the
//! page is still mapped, only held, or its granter's alone. [`GranterView`] looks at a
//! grant table the way its granter does, at any moment.

use std::sync::{
    Arc,
    atomic::{AtomicU64, Ordering},
};

use flush::{DomainId, Gfn, Mfn};
use gnttab::{
    GrantStorage, Status, TableFrame,
    abi::{CopyPlace, GrantCopy, MapGrantRef, UnmapGrantRef},
};
use zerocopy::{FromBytes, FromZeros, Immutable, IntoBytes};

use crate::{
    Ram, World,
    world::{ARGUMENTS, BACKEND, Ended, FIRST_REFERENCE, POISON, granted_gfn},
};

/// Numbers of the operations, as guests know them.
pub mod operation {
    /// Map grants.
    pub const MAP: u32 = 0;
    /// Give mappings back.
    pub const UNMAP: u32 = 1;
    /// Grow a table, and list its frames.
    pub const SETUP_TABLE: u32 = 2;
    /// Copy between grants and pages of the caller.
    pub const COPY: u32 = 5;
    /// Give mappings back and put something in their place.
    pub const REPLACE: u32 = 7;
    /// Choose the version of the caller's table.
    pub const SET_VERSION: u32 = 8;
    /// Let two entries of the caller's table change places.
    pub const SWAP: u32 = 11;
}

/// A grant of the frontend that the backend has mapped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shared {
    /// In the frontend's table.
    pub reference: u32,
    /// Where the backend has it.
    pub gfn: Gfn,
    /// The page.
    pub mfn: Mfn,
    /// The backend's name for the mapping.
    pub handle: u32,
    /// The backend cannot write.
    pub read_only: bool,
}

/// What has become of the page behind a [`Shared`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fate {
    /// The backend's tables show it, and it is counted.
    Mapped,
    /// No table shows it; it is counted and its granter sees it in use.
    Held,
    /// Nobody but its granter counts it.
    Back,
}

/// An element that maps `reference` of `granter` at `gfn`.
#[must_use]
pub fn map_request(granter: DomainId, reference: u32, gfn: Gfn, read_only: bool) -> MapGrantRef {
    let mut element = MapGrantRef::new_zeroed();
    element.host_addr = gfn.get() << 12;
    element.flags = 2 | u32::from(read_only) << 2;
    element.reference = reference;
    element.domain = granter.get();
    element.status = POISON;
    element
}

/// One side of a copy: what it names, and the first byte in that page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Side {
    /// A grant of a domain.
    Grant(DomainId, u32, u16),
    /// A frame number of the caller.
    Own(Gfn, u16),
}

impl Side {
    /// As an element has it, and whether it names a grant.
    fn place(self) -> (CopyPlace, bool) {
        /// How a guest names itself.
        const SELF: u16 = 0x7ff0;
        let (frame, domain, offset) = match self {
            Self::Grant(domain, reference, offset) => (reference.into(), domain.get(), offset),
            Self::Own(gfn, offset) => (gfn.get(), SELF, offset),
        };
        (CopyPlace { frame, domain, offset, padding: 0 }, matches!(self, Self::Grant(..)))
    }
}

/// An element that copies `length` bytes.
#[must_use]
pub fn copy_request(from: Side, to: Side, length: u16) -> GrantCopy {
    let ((source, read), (dest, written)) = (from.place(), to.place());
    let flags = u16::from(read) | u16::from(written) << 1;
    GrantCopy { source, dest, length, flags, status: POISON, padding: 0 }
}

/// An element that gives back what `handle` mapped at `gfn`.
#[must_use]
pub fn unmap_request(handle: u32, gfn: Gfn) -> UnmapGrantRef {
    let mut element = UnmapGrantRef::new_zeroed();
    element.host_addr = gfn.get() << 12;
    element.handle = handle;
    element.status = POISON;
    element
}

/// Unmap elements for these grants.
#[must_use]
pub fn unmap_requests(grants: &[Shared]) -> Vec<UnmapGrantRef> {
    grants.iter().map(|grant| unmap_request(grant.handle, grant.gfn)).collect()
}

/// The in-use bits of a version 1 table, as its granter sees them.
#[derive(Clone)]
pub struct GranterView(Vec<Arc<[AtomicU64; 512]>>);

impl GranterView {
    /// Whether the bits for reading and for writing are set.
    ///
    /// # Panics
    /// If the table had no such reference when the view was taken.
    #[must_use]
    pub fn in_use(&self, reference: u32) -> (bool, bool) {
        let word = &self.0[reference as usize / 512][reference as usize % 512];
        let flags = word.load(Ordering::SeqCst);
        (flags & 1 << 3 != 0, flags & 1 << 4 != 0)
    }
}

impl World {
    /// Makes a call of a guest over elements; they are as the call left them on return.
    ///
    /// # Panics
    /// If they do not fit where guests keep arguments.
    pub fn call_on<T: FromBytes + IntoBytes + Immutable>(
        &self,
        id: DomainId,
        operation: u32,
        elements: &mut [T],
    ) -> Ended<'_> {
        let base = ARGUMENTS.get() << 12;
        let count = u32::try_from(elements.len()).expect("few elements");
        self.put(id, base, elements.as_bytes());
        let ended = self.call(id, operation, base, count);
        self.get(id, base, elements.as_mut_bytes());
        ended
    }

    /// [Shares](World::share) `count` pages at `first` and every `stride` frames on.
    pub fn share_at(&self, first: u64, stride: u64, count: u32) -> Vec<Shared> {
        let gfns: Vec<Gfn> =
            (0..u64::from(count)).map(|place| Gfn::new(first + place * stride)).collect();
        let shared = self.share(&gfns);
        (FIRST_REFERENCE..)
            .zip(gfns)
            .zip(shared)
            .map(|((reference, gfn), (mfn, handle))| Shared {
                reference,
                gfn,
                mfn,
                handle,
                read_only: false,
            })
            .collect()
    }

    /// The backend maps a grant of the frontend once more.
    ///
    /// # Panics
    /// If it cannot.
    pub fn share_again(&self, reference: u32, gfn: Gfn, read_only: bool) -> Shared {
        let (status, handle) = self.map(&[(reference, gfn)], read_only)[0];
        assert_eq!(status, Status::Okay.value(), "map of {reference} at {gfn:?}");
        let mfn = self.backend().lookup(gfn).expect("it was just mapped").mfn;
        Shared { reference, gfn, mfn, handle, read_only }
    }

    /// The backend copies in one hypercall; the statuses as it left them.
    pub fn copy(&self, mut elements: Vec<GrantCopy>) -> (Ended<'_>, Vec<i16>) {
        let ended = self.call_on(BACKEND, operation::COPY, &mut elements);
        (ended, elements.iter().map(|element| element.status).collect())
    }

    /// Unmaps grants in one hypercall; their statuses as it left them.
    pub fn give_back(&self, grants: &[Shared]) -> (Ended<'_>, Vec<i16>) {
        let mut elements = unmap_requests(grants);
        let ended = self.call_on(BACKEND, operation::UNMAP, &mut elements);
        (ended, elements.iter().map(|element| element.status).collect())
    }

    /// What has become of a grant that was mapped once.
    ///
    /// # Panics
    /// If its counts, its in-use bits and the tables contradict each other.
    #[track_caller]
    #[must_use]
    pub fn fate(&self, grant: &Shared) -> Fate {
        let mapped = self.backend().lookup(grant.gfn).is_some_and(|found| found.mfn == grant.mfn);
        let counts = self.hypervisor.pages.get(grant.mfn);
        let in_use = self.in_use(grant.reference);
        let writable = !grant.read_only;
        let taken = (2, u32::from(writable));
        match (mapped, counts, in_use) {
            (true, counts, (true, writing)) if (counts, writing) == (taken, writable) => {
                Fate::Mapped
            }
            (false, counts, (true, writing)) if (counts, writing) == (taken, writable) => {
                Fate::Held
            }
            (false, (1, 0), (false, false)) => Fate::Back,
            other => panic!("{grant:?}: mapped, counts, in use: {other:?}"),
        }
    }

    /// Checks what has become of each of `grants`, by place.
    ///
    /// # Panics
    /// If it is something else.
    #[track_caller]
    pub fn check_fates(&self, grants: &[Shared], expected: impl Fn(usize) -> Fate) {
        for (place, grant) in grants.iter().enumerate() {
            assert_eq!(self.fate(grant), expected(place), "grant {place}");
        }
    }

    /// The frontend takes these pages back; then CPU and device try each once more.
    ///
    /// # Panics
    /// If somebody else still counts one, or if hardware reaches one.
    #[track_caller]
    pub fn take_back_and_try(&self, grants: &[Shared], cpu: usize) {
        for grant in grants {
            self.take_back(grant.reference, granted_gfn(grant.reference));
        }
        for grant in grants {
            assert!(!self.device_reaches(grant.gfn), "device, {grant:?}");
            assert!(!self.cpu_reaches(cpu, grant.gfn), "CPU, {grant:?}");
        }
        self.check_clean();
    }

    /// Checks that nothing wrong was seen, and that no cache holds what it must not.
    ///
    /// # Panics
    /// With what is wrong.
    #[track_caller]
    pub fn check_clean(&self) {
        self.check_unharmed();
        assert_eq!(self.audit(), []);
    }

    /// Checks that nothing wrong was seen so far; caches may still hold what is held.
    ///
    /// # Panics
    /// With what is wrong.
    #[track_caller]
    pub fn check_unharmed(&self) {
        assert_eq!(self.machine.witnesses(), []);
        assert_eq!(self.machine.misuses(), []);
        assert_eq!(self.released_early.get(), 0, "released early");
    }

    /// The frontend's table as the frontend sees it.
    ///
    /// # Panics
    /// If the table has a frame that is not memory.
    #[must_use]
    pub fn granter_view(&self) -> GranterView {
        let table = self.frontend().grants();
        let frames = (0..table.frames()).map(|page| {
            let mfn = table.storage().frame(TableFrame::Shared(page)).expect("a frame of it");
            self.hypervisor.memory.ram().words(mfn).expect("memory")
        });
        GranterView(frames.collect())
    }

    /// Checks that every handle of the backend but `live` can be had again: mapping so
    /// many grants needs no further page of handles.
    ///
    /// # Panics
    /// If a handle was lost.
    #[track_caller]
    pub fn check_handles_free(&self, live: u32) {
        const LAST: u32 = FIRST_REFERENCE + 400;
        let before = self.backend().handles();
        let free = u32::try_from(before).expect("few handles") - live;
        // One page mapped read-only again and again, 128 times from each reference.
        let mut handles = Vec::new();
        for (group, part) in (0..free).collect::<Vec<_>>().chunks(128).enumerate() {
            let reference = LAST + u32::try_from(group).expect("few groups");
            self.grant(reference, granted_gfn(reference), true);
            let grants: Vec<_> = part
                .iter()
                .map(|place| (reference, Gfn::new(0x80_0000 + u64::from(*place))))
                .collect();
            for ((_, gfn), (status, handle)) in grants.iter().zip(self.map(&grants, true)) {
                assert_eq!(status, 0, "handle {handle}");
                handles.push((handle, *gfn));
            }
        }
        assert_eq!(self.backend().handles(), before, "a handle was lost");
        let mut distinct: Vec<u32> = handles.iter().map(|(handle, _)| *handle).collect();
        distinct.sort_unstable();
        distinct.dedup();
        assert_eq!(distinct.len(), handles.len(), "a handle was given out twice");
        let ended = self.unmap(&handles);
        assert_eq!(ended.outcome, gnttab::Outcome::Done);
        for reference in LAST..LAST + free.div_ceil(128) {
            self.take_back(reference, granted_gfn(reference));
        }
    }
}
