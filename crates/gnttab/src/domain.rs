//! What the embedder provides: the calling domain, as this crate sees it.
//!
//! [`Domain`] is one guest in one hypercall on one vCPU. Its methods take `&self` and
//! take the embedder's locks inside. Locks nest in this order: a granter's table, the
//! caller's p2m, the page allocator, the maptrack. The methods say which of them may be
//! held when they are called; none is held while guest memory is copied or a flush is
//! waited for.

use flush::{
    Cleared, DomainId, Failure, Flush, Gfn, Hardware, Iotlb, Mfn, Released, Skipped, TablePage, Tlb,
};

use crate::{
    entry::Rights,
    maptrack::{Maptrack, MaptrackStorage, VcpuId},
    pin::{PageReference, Pin},
    table::{GrantStorage, GrantTable},
    together::Removals,
    words::GuestWords,
};

/// Elements that share one flush.
pub const BATCH: usize = 32;

/// How often a flush is tried again inside one hypercall, whatever the embedder answers.
///
/// Each retry may take as long as the deadlines of its hardware allow.
pub const RETRIES: u32 = 3;

/// What becomes of a batch whose flush failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// Flush again what is still owed, at once; after [`RETRIES`] as
    /// [`Quarantine`](Self::Quarantine).
    Retry,
    /// The embedder keeps the pages for a later flush; the call ends with a fault.
    Quarantine,
    /// As [`Quarantine`](Self::Quarantine), and the caller is [ended](Domain::crash): it
    /// does not see the result of the call.
    Crash,
}

/// A batch whose flush failed, as [`Domain::on_flush_failure`] gets it.
pub type FlushFailure<D> = Failure<
    Pin,
    BATCH,
    <<D as Domain>::Tlb as Flush<Tlb>>::Error,
    <<D as Domain>::Iotlb as Flush<Iotlb>>::Error,
>;

/// A byte address as the guest passes it in a hypercall; anything is possible.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct GuestAddress(pub u64);

impl GuestAddress {
    /// `bytes` further on, or `None` past the end of the address space.
    #[must_use]
    #[inline]
    pub const fn offset(self, bytes: u64) -> Option<Self> {
        match self.0.checked_add(bytes) {
            Some(address) => Some(Self(address)),
            None => None,
        }
    }
}

/// Guest memory could not be read or written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GuestFault;

/// The embedder had no page to give.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NoMemory;

/// What the caller wants to do with another domain's table, or its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Action {
    /// Map a page of the granter.
    Map,
    /// Unmap a page of the granter.
    Unmap,
    /// Copy from or to a page of the granter, whether granted to the caller or passed on.
    Copy,
    /// Size the table, or list its shared or status frames.
    Setup,
    /// Ask for the table's size or version.
    Query,
}

/// A defect of the calling domain, or of the embedder, that ends the caller.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Crash {
    /// A live handle names a granter that the embedder does not know.
    UnknownGranter {
        /// The domain the handle names.
        granter: DomainId,
    },
    /// A flush failed, and the embedder's verdict was [`Verdict::Crash`].
    FlushFailed,
}

/// A granted page, by what is known of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GrantedFrame {
    /// By number in the granter's space: nobody has pinned it, so look it up.
    Number(Gfn),
    /// The page itself: a pin is held on it, so it has a reference already.
    Pinned(Mfn),
}

/// Why there is no reference on a granted page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PageError {
    /// The page is being brought in; the guest should ask again.
    NotPresent,
    /// There is no RAM at that number.
    NotRam,
    /// The page takes no further reference, or not of that type.
    Refused,
}

/// Bytes of a page, from `first` on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PageBytes {
    /// Whose page it is.
    pub owner: DomainId,
    /// The page. It is referenced as long as the copy lasts.
    pub page: Mfn,
    /// The first byte in it, from 0.
    pub first: u16,
}

/// What [`Domain::copy_page`] has to move. Both ranges lie in their pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PageCopy {
    /// What is read.
    pub from: PageBytes,
    /// What is written: it may be the same page, and the two may overlap.
    pub to: PageBytes,
    /// Number of bytes, 0 to 4096.
    pub length: u16,
}

/// The embedder could not reach one of the pages; part of the bytes may be written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NotCopied;

/// A mapping to put into the caller's p2m (and its devices' tables).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mapping {
    /// Where, in the caller's space.
    pub gfn: Gfn,
    /// The page.
    pub mfn: Mfn,
    /// What the caller may do with it. It is never executable.
    pub rights: Rights,
    /// Whose page it is.
    pub granter: DomainId,
    /// For a domain that maps its own grant: the page's number, which it loses.
    ///
    /// The page moves: unless this is `gfn` itself, the entry at this number is removed
    /// in the same critical section. `None` if the page already moved.
    pub moved_from: Option<Gfn>,
}

/// What an entry has to be for its removal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Expected {
    /// The page it shows.
    pub mfn: Mfn,
    /// Exactly the rights it gives.
    pub rights: Rights,
}

/// A page whose former entry is gone, with the reference to drop after the flush.
#[derive(Debug)]
#[must_use = "the page has to wait for the flush in the batch"]
pub struct Removed<'id> {
    /// The reference that the entry held, or one taken for the occasion.
    pub page: PageReference,
    /// Proof that the entry is gone and on record.
    pub cleared: Cleared<'id>,
}

/// What a successful insertion took away.
#[derive(Debug, Default)]
#[must_use = "pages in it have to wait for the flush"]
pub struct Inserted<'id> {
    /// RAM that was mapped at the number before.
    pub displaced: Option<Removed<'id>>,
    /// The entry at [`Mapping::moved_from`].
    pub moved: Option<Removed<'id>>,
}

/// An insertion that failed and left nothing behind.
#[derive(Debug)]
#[must_use = "the page has to wait for the flush"]
pub struct NotInserted<'id> {
    /// Proof that no table shows the page; what was put in and taken out is on record.
    pub cleared: Cleared<'id>,
}

/// Why an entry was not removed. It is as it was.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ClearError {
    /// Not a grant mapping, or nothing there.
    NotGrant,
    /// A grant mapping of another page.
    OtherFrame,
    /// A mapping of the page with other rights.
    OtherRights,
    /// The tables could not be changed.
    Failed,
}

/// The calling domain, on the vCPU that makes the call.
pub trait Domain: Sized {
    /// Flushes the CPUs' translations of the caller.
    type Tlb: Flush<Tlb>;
    /// Flushes its devices' translations.
    type Iotlb: Flush<Iotlb>;
    /// Room for grant tables.
    type Grants: GrantStorage;
    /// Room for handles.
    type Handles: MaptrackStorage;

    /// The caller.
    fn id(&self) -> DomainId;

    /// Its vCPU that makes the call.
    fn vcpu(&self) -> VcpuId;

    /// Keeps speculation within bounds: `index` where it is below `length`, and
    /// something below `length` on a mispredicted path. Must be branch-free.
    fn clamp(&self, index: usize, length: usize) -> usize;

    /// Reads guest memory at `address`. No lock is held.
    ///
    /// # Errors
    /// [`GuestFault`], also where the bytes would run past the end of the space.
    fn copy_from_guest(&self, address: GuestAddress, bytes: &mut [u8]) -> Result<(), GuestFault>;

    /// Writes guest memory at `address`. No lock is held.
    ///
    /// The guest chooses the address: what it may not write itself, such as a page that
    /// was granted to it for reading, is not written for it either.
    ///
    /// # Errors
    /// As [`copy_from_guest`](Self::copy_from_guest); part of it may have been written.
    fn copy_to_guest(&self, address: GuestAddress, bytes: &[u8]) -> Result<(), GuestFault>;

    /// Lends `count` words of guest memory from `at` on, which eight divides, to `action`; or
    /// nothing, and then every access is a copy. No lock is held, and `action` takes locks.
    ///
    /// As long as `action` runs, the pages stay in memory, and the guest may read and write
    /// them: writing a status cannot fail. Hold a reference on each of them, not a lock.
    /// Lend only the caller's own writable RAM; words that are written may have to be noted
    /// as dirty afterwards. At most [`BATCH`] elements of a call are lent at a time, which
    /// lie in two pages at most.
    ///
    /// With the words the elements of a chunk are unmapped together, and locks are taken once
    /// for many of them: see [`clear_all`](Self::clear_all).
    #[inline]
    fn with_guest_words<R>(
        &self,
        _at: GuestAddress,
        _count: usize,
        action: impl FnOnce(Option<GuestWords<'_>>) -> R,
    ) -> R {
        action(None)
    }

    /// Runs `action` with the lock of that domain's grant table; `None` if there is no
    /// such domain, and then `action` did not run.
    ///
    /// A destroyed granter has to be found here as long as its grants are in use. No
    /// other table's lock is held.
    fn with_granter<R>(
        &self,
        granter: DomainId,
        action: impl FnOnce(&mut GrantTable<Self::Grants>) -> R,
    ) -> Option<R>;

    /// Runs `action` with the lock of the caller's maptrack, the innermost of all.
    fn with_maptrack<R>(&self, action: impl FnOnce(&mut Maptrack<Self::Handles>) -> R) -> R;

    /// Whether policy lets the caller do this to `subject`. No lock is held.
    fn allows(&self, action: Action, subject: DomainId) -> bool;

    /// Ends the caller. The operation still runs to its end.
    fn crash(&self, reason: Crash);

    /// Whether the call should be left for something more urgent, to continue later.
    fn preempt(&self) -> bool;

    /// Takes a reference on a page of `granter`, and for write access a writable type
    /// reference if the granter's pages have types. The granter's table is locked, unless
    /// the caller copies from or to a page of its own: then no lock is held.
    ///
    /// Only RAM of `granter` itself counts: what it has mapped of others does not. A look-up
    /// takes the lock of the granter's p2m inside, and the reference has to be taken before
    /// that lock is gone: after it the page may be free, or another's. For
    /// [`GrantedFrame::Pinned`] the reference has to be on that very page.
    ///
    /// # Errors
    /// [`PageError`], with no reference taken.
    fn get_page(
        &self,
        granter: DomainId,
        frame: GrantedFrame,
        rights: Rights,
    ) -> Result<PageReference, PageError>;

    /// Drops the reference on [`Pin::mfn`], and if it is [`Pin::typed`] the one on its
    /// writable type. The granter's table is locked, if there is a granter and it still exists.
    ///
    /// If the caller `wrote`, note first that the page may have been written, for the granter of
    /// [`Pin::grant`]. It comes after the flush: a write through a stale translation is not
    /// lost. Both are one call so that what is known of the page is looked up once.
    fn put_page(&self, pin: Released<Pin>, wrote: bool);

    /// Moves bytes from one page to another, through the hypervisor's own mapping of
    /// memory. No lock is held.
    ///
    /// References on both pages are held, for writing on `to`, whose owner may want to
    /// know that it was written: note that here. No translation of the caller may be made
    /// for it, and nothing of it may be in use any more on return: no flush follows. Guests
    /// and devices may write to either page at the same time. Where the ranges overlap, what
    /// ends up in the common bytes is not defined.
    ///
    /// # Errors
    /// [`NotCopied`], with nothing written outside of `to`.
    fn copy_page(&self, copy: &PageCopy) -> Result<(), NotCopied>;

    /// Frees a page-table page that an edit unlinked. No lock is held.
    fn put_table(&self, table: Released<TablePage>);

    /// Maps a granted page. No lock is held.
    ///
    /// Refuses to replace a grant, foreign or MMIO entry. Whatever it changes goes on
    /// record in `skipped`.
    ///
    /// # Errors
    /// [`NotInserted`], with everything undone.
    fn insert<'id>(
        &self,
        mapping: &Mapping,
        skipped: &mut Skipped<'id>,
    ) -> Result<Inserted<'id>, NotInserted<'id>>;

    /// Removes the mapping at `gfn` from every table, if it is a grant mapping as
    /// expected; the old entry decides what goes on record. The granter's table is
    /// locked.
    ///
    /// # Errors
    /// [`ClearError`], with every table as it was.
    fn clear<'id>(
        &self,
        gfn: Gfn,
        expected: Expected,
        skipped: &mut Skipped<'id>,
    ) -> Result<Cleared<'id>, ClearError>;

    /// Removes several mappings of one granter, each as [`clear`](Self::clear) does, in their
    /// order, and tells `removed` of each in that order. The granter's table is locked.
    ///
    /// This is the place to take the lock of the caller's p2m once for all of them. `removed`
    /// takes no lock and calls nothing of the embedder.
    #[inline]
    fn clear_all<'id>(
        &self,
        removals: &Removals,
        skipped: &mut Skipped<'id>,
        mut removed: impl FnMut(Result<Cleared<'id>, ClearError>),
    ) {
        for (gfn, expected) in removals.iter() {
            removed(self.clear(gfn, expected, skipped));
        }
    }

    /// Puts everything that the dying caller's CPUs and devices may have cached on record,
    /// for [`release_all`](crate::release_all). No lock is held.
    ///
    /// None of its vCPUs can run again, and its devices are detached: after that flush
    /// nothing reaches its pages, though the tables still show them. Record with
    /// [`Skipped::everything`] for each table there is; a domain that never had an IOMMU
    /// says so with [`NoIommu::gone`](flush::NoIommu::gone).
    fn forget<'id>(&self, skipped: &mut Skipped<'id>) -> Cleared<'id>;

    /// What flushes the caller's translations. No lock is held during a flush.
    fn hardware(&self) -> Hardware<'_, Self::Tlb, Self::Iotlb>;

    /// Says what becomes of a batch whose flush has failed, for the first time or after that
    /// many retries. No lock is held; every page of it is still counted.
    ///
    /// This is the moment to repair: to declare a device gone and detach it, or to start a
    /// queue again, and then to say [`Verdict::Retry`].
    fn judge(&self, _failure: &FlushFailure<Self>, _retries: u32) -> Verdict {
        Verdict::Quarantine
    }

    /// Takes over the pages of a flush that failed and is not tried again in this call,
    /// for a [`Quarantine`](flush::Quarantine). No lock is held.
    ///
    /// What a later flush frees ends in [`give_out`](crate::give_out), or in
    /// [`release`](crate::release) and [`put_table`](Self::put_table).
    fn on_flush_failure(&self, failure: FlushFailure<Self>);
}
