//! The glue: one domain in one hypercall, as the grant tables want to see it.
//!
//! A [`Caller`] is made for each hypercall, from the domain that makes it and the
//! flushers of its processors and devices. The crates know nothing of each other; the
//! implementation of [`Domain`] below is where they meet.

use flush::{
    Cleared, DomainId, Flush, Gfn, Hardware, Iotlb, Mfn, Released, Skipped, TablePage, Tlb,
};
use gnttab::{
    Action, ClearError, Crash, Domain, Expected, FlushFailure, GrantTable, GrantedFrame,
    GuestAddress, GuestFault, GuestWords, Inserted, Mapping, Maptrack, NotCopied, NotInserted,
    PageCopy, PageError, PageReference, Pin, Purpose, Removals, Removed, Rights, VcpuId,
};
use iommu_vtd::Guarded;
use p2m::PageKind;
use testbed::audit::Audit;
use testbed::words::{self, OutOfPage};
use testbed::xen::{Bytes, Fault};

use super::guest::{NotMapped, untouched};
use super::guest_memory::LentWords;
use super::page_info::PageInfo;
use super::storage::{Grants, Handles};
use super::{Guest, Hypervisor, Memory};
use crate::{memory, say};

/// Who wants to hear what becomes of pages. Tests do; `()` does not listen.
pub(crate) trait Watcher {
    /// The mapping of a page was taken out of every table; its flush is owed.
    fn cleared(&self, page: Mfn);
    /// The reference of a mapping that has ended is about to be dropped.
    fn given_up(&self, page: Mfn);
    /// Words of the caller's memory are lent, where they would have been copied.
    fn lent(&self) {}
}

impl Watcher for Audit {
    fn cleared(&self, page: Mfn) {
        Audit::cleared(self, page);
    }

    fn given_up(&self, page: Mfn) {
        self.give_up(page);
    }

    fn lent(&self) {
        Audit::lent(self);
    }
}

impl Watcher for () {
    fn cleared(&self, _: Mfn) {}
    fn given_up(&self, _: Mfn) {}
}

/// One domain in one hypercall.
pub(crate) struct Caller<'h, T, I, W = ()> {
    /// The hypervisor.
    pub(crate) hypervisor: &'h Hypervisor,
    /// The domain that calls.
    pub(crate) guest: &'h Guest,
    /// Flushes its processors.
    pub(crate) tlb: T,
    /// Flushes its devices.
    pub(crate) iotlb: I,
    /// Where the addresses it passes lead.
    pub(crate) memory: &'h dyn Bytes,
    /// Hears of pages.
    pub(crate) watcher: &'h W,
}

/// What a grant is in the p2m.
fn kind(rights: Rights) -> PageKind {
    match rights {
        Rights::Read => PageKind::GrantReadOnly,
        Rights::ReadWrite => PageKind::GrantReadWrite,
    }
}

impl<T: Flush<Tlb>, I: Flush<Iotlb>, W: Watcher> Domain for Caller<'_, T, I, W> {
    type Tlb = T;
    type Iotlb = I;
    type Grants = Grants;
    type Handles = Handles;

    fn id(&self) -> DomainId {
        self.guest.id()
    }

    fn vcpu(&self) -> VcpuId {
        VcpuId(0)
    }

    #[inline]
    fn clamp(&self, index: usize, length: usize) -> usize {
        // The difference borrows exactly if the index is in range: the sign bit of the
        // shift below spreads over the whole mask.
        let difference = index.wrapping_sub(length).cast_signed();
        index & (difference >> (usize::BITS - 1)).cast_unsigned()
    }

    fn copy_from_guest(&self, address: GuestAddress, bytes: &mut [u8]) -> Result<(), GuestFault> {
        self.memory.read(address.0, bytes).map_err(|Fault| GuestFault)
    }

    fn copy_to_guest(&self, address: GuestAddress, bytes: &[u8]) -> Result<(), GuestFault> {
        self.memory.write(address.0, bytes).map_err(|Fault| GuestFault)
    }

    fn with_guest_words<A>(
        &self,
        at: GuestAddress,
        count: usize,
        action: impl FnOnce(Option<GuestWords<'_>>) -> A,
    ) -> A {
        // The pages are counted until `action` is over, and no lock is held.
        let lent = LentWords::new(self.guest, self.memory, at.0, count);
        let words = lent.as_ref().and_then(LentWords::get);
        if words.is_some() {
            self.watcher.lent();
        }
        action(words)
    }

    fn with_granter<A>(
        &self,
        granter: DomainId,
        action: impl FnOnce(&mut GrantTable<Grants>) -> A,
    ) -> Option<A> {
        Some(self.hypervisor.guest(granter)?.grants.with(action))
    }

    fn with_maptrack<A>(&self, action: impl FnOnce(&mut Maptrack<Handles>) -> A) -> A {
        self.guest.handles.with(action)
    }

    // Every domain may map what it was granted.
    fn allows(&self, _: Action, _: DomainId) -> bool {
        true
    }

    fn crash(&self, reason: Crash) {
        say!("{:?} is to be ended: {reason:?}", self.guest.id());
    }

    // One processor, nothing else to run.
    fn preempt(&self) -> bool {
        false
    }

    fn get_page(
        &self,
        granter: DomainId,
        frame: GrantedFrame,
        rights: Rights,
    ) -> Result<PageReference, PageError> {
        let typed = rights == Rights::ReadWrite;
        let counted = |mfn| {
            let info = PageInfo::of(mfn).ok_or(PageError::NotRam)?;
            info.take(typed).map_err(|_| PageError::Refused)?;
            Ok(PageReference::taken(mfn, typed))
        };
        match frame {
            GrantedFrame::Pinned(mfn) => counted(mfn),
            GrantedFrame::Number(gfn) => {
                let granter = self.hypervisor.guest(granter).ok_or(PageError::NotRam)?;
                granter.with_mapping(gfn, |mapping| match mapping {
                    Some(p2m::Mapping { mfn, kind: Some(PageKind::RamReadWrite), .. }) => {
                        counted(mfn)
                    }
                    Some(p2m::Mapping { mfn, kind: Some(PageKind::RamReadOnly), .. }) if !typed => {
                        counted(mfn)
                    }
                    Some(_) | None => Err(PageError::NotRam),
                })
            }
        }
    }

    // `Released` is the proof that the flush is over: only now may the page be another's.
    fn put_page(&self, pin: Released<Pin>, wrote: bool) {
        let pin = pin.get();
        // A copy mapped nothing, so nobody waits for a flush of it.
        if !matches!(pin.grant(), Some(grant) if grant.purpose == Purpose::Copy) {
            self.watcher.given_up(pin.mfn());
        }
        let Some(info) = PageInfo::of(pin.mfn()) else { return };
        if wrote {
            info.mark_dirty();
        }
        if info.drop_one(pin.typed()) {
            // The allocator refuses what is not its own; such a frame goes nowhere.
            memory::release(pin.mfn()).ok();
        }
    }

    fn copy_page(&self, copy: &PageCopy) -> Result<(), NotCopied> {
        let PageCopy { from, to, length } = *copy;
        let source = memory::words(from.page).ok_or(NotCopied)?;
        let target = memory::words(to.page).ok_or(NotCopied)?;
        words::copy(source, from.first.into(), target, to.first.into(), length.into())
            .map_err(|OutOfPage| NotCopied)?;
        if let Some(info) = PageInfo::of(to.page) {
            info.mark_dirty();
        }
        Ok(())
    }

    fn put_table(&self, table: Released<TablePage>) {
        Memory::free_table(table.recycle());
    }

    fn insert<'id>(
        &self,
        mapping: &Mapping,
        skipped: &mut Skipped<'id>,
    ) -> Result<Inserted<'id>, NotInserted<'id>> {
        let Mapping { gfn, mfn, rights, granter: _, moved_from } = *mapping;
        let own = p2m::Expected { mfn, kind: PageKind::RamReadWrite };
        // A domain that maps its own grant moves the page: the old number loses it first.
        let moved = match moved_from {
            None => None,
            Some(from) => match self.guest.clear(from, own, skipped) {
                Ok(cleared) => Some((from, cleared)),
                Err(_) => return Err(NotInserted { cleared: untouched(skipped) }),
            },
        };
        let removed = |mfn, cleared| Removed { page: PageReference::taken(mfn, false), cleared };
        match self.guest.map(gfn, 0, mfn, kind(rights), skipped) {
            Ok(displaced) => Ok(Inserted {
                displaced: displaced.map(|(mfn, cleared)| removed(mfn, cleared)),
                moved: moved.map(|(_, cleared)| removed(mfn, cleared)),
            }),
            Err(NotMapped { cleared }) => {
                if let Some((from, _)) = moved {
                    // The tables for it are still there: this needs no memory.
                    self.guest.map(from, 0, mfn, own.kind, skipped).ok();
                }
                Err(NotInserted { cleared })
            }
        }
    }

    #[inline]
    fn clear<'id>(
        &self,
        gfn: Gfn,
        expected: Expected,
        skipped: &mut Skipped<'id>,
    ) -> Result<Cleared<'id>, ClearError> {
        let Expected { mfn, rights } = expected;
        let wanted = p2m::Expected { mfn, kind: kind(rights) };
        let cleared =
            self.guest.clear(gfn, wanted, skipped).map_err(|error| refusal(error, mfn))?;
        self.watcher.cleared(mfn);
        Ok(cleared)
    }

    #[inline]
    fn clear_all<'id>(
        &self,
        removals: &Removals,
        skipped: &mut Skipped<'id>,
        mut removed: impl FnMut(Result<Cleared<'id>, ClearError>),
    ) {
        let grants = removals.iter().map(|(gfn, Expected { mfn, rights })| {
            (gfn, p2m::Expected { mfn, kind: kind(rights) })
        });
        self.guest.clear_grants(grants, skipped, |mfn, cleared| {
            if cleared.is_ok() {
                self.watcher.cleared(mfn);
            }
            removed(cleared.map_err(|error| refusal(error, mfn)));
        });
    }

    fn forget<'id>(&self, skipped: &mut Skipped<'id>) -> Cleared<'id> {
        skipped.everything::<Tlb>();
        skipped.everything::<Iotlb>();
        untouched(skipped)
    }

    fn hardware(&self) -> Hardware<'_, T, I> {
        Hardware { tlb: &self.tlb, iotlb: &self.iotlb }
    }

    // Nothing is lost and nothing given away: the pages wait for a flush that completes.
    fn on_flush_failure(&self, failure: FlushFailure<Self>) {
        self.hypervisor.keep(failure.held);
    }
}

/// Why an entry was not removed, in the words of the grant tables.
fn refusal(error: p2m::ClearError, wanted: Mfn) -> ClearError {
    match error {
        p2m::ClearError::Unexpected(found) => match found.kind {
            Some(PageKind::GrantReadWrite | PageKind::GrantReadOnly) if found.mfn == wanted => {
                ClearError::OtherRights
            }
            Some(PageKind::GrantReadWrite | PageKind::GrantReadOnly) => ClearError::OtherFrame,
            Some(_) | None => ClearError::NotGrant,
        },
        p2m::ClearError::OutOfRange | p2m::ClearError::Absent => ClearError::NotGrant,
        p2m::ClearError::NoTable | p2m::ClearError::Unencodable(_) | p2m::ClearError::Contended => {
            ClearError::Failed
        }
    }
}
