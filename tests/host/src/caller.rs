//! The glue: one guest in one hypercall, as `gnttab` wants to see it.
//!
//! This is what an embedder writes to join p2m, IOMMU and grant tables.

use std::{
    cell::{Cell, RefCell},
    fmt, mem,
    sync::{Arc, atomic::AtomicU64},
};

use flush::{
    Account, DomainId, Failure, Flush, Gfn, Hardware, Iotlb, Mfn, Released, Skipped, TablePage, Tlb,
};
use gnttab::{
    Action, BATCH, ClearError, Crash, Domain, Expected, FlushFailure, GrantTable, GrantedFrame,
    GuestAddress, GuestFault, GuestWords, Inserted, Mapping, Maptrack, NotCopied, NotInserted,
    PageCopy, PageError, PageReference, Pin, RETRIES, Removed, Rights, VcpuId, Verdict,
};
use p2m::PageKind;
use stage2::Access;

use crate::{
    Guest, Hypervisor, Ram,
    hypervisor::lock,
    memory::{read_bytes, write_bytes, write_in_word},
    storage::{Grants, Handles},
};

/// What a test makes go wrong in a call, and what it counts.
#[derive(Debug, Default)]
pub struct Faults {
    /// Copies from and to the guest so far.
    pub copies: Cell<(u64, u64)>,
    /// Words of guest memory are lent where they can be, and not copied, unless a copy is to
    /// fail.
    pub lends: Cell<bool>,
    /// No copy from the guest can read the byte at this address.
    pub unreadable: Cell<Option<u64>>,
    /// The n-th copy from the guest (from 0) fails.
    pub fail_read: Cell<Option<u64>>,
    /// The n-th copy to the guest (from 0) fails.
    pub fail_write: Cell<Option<u64>>,
    /// Copies from page to page so far.
    pub page_copies: Cell<u64>,
    /// The n-th copy from page to page (from 0) fails.
    pub fail_page_copy: Cell<Option<u64>>,
    /// The n-th reference on a page (from 0) is refused.
    pub fail_page: Cell<Option<u64>>,
    /// References on pages asked for so far.
    pub pages: Cell<u64>,
    /// Preemption is wanted at every question.
    pub preempt: Cell<bool>,
    /// Policy forbids this.
    pub denied: Cell<Option<Action>>,
    /// What is said of a flush that failed.
    pub verdict: Cell<Option<Verdict>>,
    /// How often that was asked for.
    pub judged: Cell<u32>,
    /// What flushes of all calls came to.
    pub account: Account,
    /// What the caller was crashed for.
    pub crashes: RefCell<Vec<Crash>>,
}

impl Faults {
    fn read_fails(&self, address: GuestAddress, length: usize) -> bool {
        let (reads, writes) = self.copies.get();
        self.copies.set((reads + 1, writes));
        let ahead = |byte: u64| byte.checked_sub(address.0);
        self.fail_read.get() == Some(reads)
            || self.unreadable.get().and_then(ahead).is_some_and(|ahead| ahead < length as u64)
    }

    fn lends(&self) -> bool {
        let copies_may_fail = [&self.unreadable, &self.fail_read, &self.fail_write]
            .iter()
            .any(|failing| failing.get().is_some());
        self.lends.get() && !copies_may_fail
    }

    fn copy_fails(&self) -> bool {
        strikes(&self.page_copies, &self.fail_page_copy)
    }

    fn page_fails(&self) -> bool {
        strikes(&self.pages, &self.fail_page)
    }

    fn write_fails(&self) -> bool {
        let (reads, writes) = self.copies.get();
        self.copies.set((reads, writes + 1));
        self.fail_write.get() == Some(writes)
    }
}

/// Counts one more; whether it is the one that fails.
fn strikes(count: &Cell<u64>, at: &Cell<Option<u64>>) -> bool {
    let now = count.get();
    count.set(now + 1);
    at.get() == Some(now)
}

/// A batch whose flush failed.
pub(crate) type Failed<T, I> =
    Failure<Pin, BATCH, <T as Flush<Tlb>>::Error, <I as Flush<Iotlb>>::Error>;

/// One guest in one hypercall, on one vCPU.
pub struct Caller<'w, R: Ram, T: Flush<Tlb>, I: Flush<Iotlb>> {
    /// The hypervisor.
    pub hypervisor: &'w Hypervisor<R>,
    /// The guest that calls.
    pub guest: &'w Guest<R>,
    /// Its vCPU.
    pub vcpu: VcpuId,
    /// Flushes its CPUs.
    pub tlb: T,
    /// Flushes its devices.
    pub iotlb: I,
    /// What a test makes go wrong.
    pub faults: &'w Faults,
    /// Told of each page whose last mapping by this guest has ended, before it is freed.
    pub ended: &'w dyn Fn(Mfn),
    /// Told that bytes are about to move from page to page.
    pub copying: &'w dyn Fn(),
    /// Takes batches whose flush failed.
    pub failed: &'w RefCell<Vec<Failed<T, I>>>,
}

impl<R: Ram, T: Flush<Tlb>, I: Flush<Iotlb>> fmt::Debug for Caller<'_, R, T, I> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Caller").field("guest", &self.guest).finish_non_exhaustive()
    }
}

fn kind(rights: Rights) -> PageKind {
    match rights {
        Rights::Read => PageKind::GrantReadOnly,
        Rights::ReadWrite => PageKind::GrantReadWrite,
    }
}

impl<R: Ram, T: Flush<Tlb>, I: Flush<Iotlb>> Caller<'_, R, T, I> {
    fn count_page(&self, mfn: Mfn, typed: bool) -> PageReference {
        self.hypervisor.pages.take(mfn, typed);
        PageReference::taken(mfn, typed)
    }
}

impl<R: Ram, T: Flush<Tlb>, I: Flush<Iotlb>> Domain for Caller<'_, R, T, I> {
    type Tlb = T;
    type Iotlb = I;
    type Grants = Grants<R>;
    type Handles = Handles;

    fn id(&self) -> DomainId {
        self.guest.id
    }

    fn vcpu(&self) -> VcpuId {
        self.vcpu
    }

    #[inline]
    fn clamp(&self, index: usize, length: usize) -> usize {
        // All ones where index is below length, else zero.
        index & (((index as isize).wrapping_sub(length as isize)) >> (usize::BITS - 1)) as usize
    }

    #[inline(always)]
    fn copy_from_guest(&self, address: GuestAddress, bytes: &mut [u8]) -> Result<(), GuestFault> {
        if self.faults.read_fails(address, bytes.len()) {
            return Err(GuestFault);
        }
        self.hypervisor.copy_from(self.guest, address, bytes)
    }

    #[inline(always)]
    fn copy_to_guest(&self, address: GuestAddress, bytes: &[u8]) -> Result<(), GuestFault> {
        if self.faults.write_fails() {
            return Err(GuestFault);
        }
        self.hypervisor.copy_to(self.guest, address, bytes)
    }

    fn with_guest_words<A>(
        &self,
        at: GuestAddress,
        count: usize,
        action: impl FnOnce(Option<GuestWords<'_>>) -> A,
    ) -> A {
        if !self.faults.lends() {
            return action(None);
        }
        let (gfn, index) = (at.0 >> 12, (at.0 & 0xfff) as usize / 8);
        let here = count.min(512 - index);
        let first = self.hypervisor.hold(self.guest, Gfn::new(gfn));
        let second = (here < count).then(|| self.hypervisor.hold(self.guest, Gfn::new(gfn + 1)));
        let second = second.flatten();
        let result = match (&first, &second) {
            (Some((_, first)), Some((_, second))) if here < count => {
                action(Some(GuestWords::new(&first[index..], &second[..count - here])))
            }
            (Some((_, first)), None) if here == count => {
                action(Some(GuestWords::new(&first[index..index + count], &[])))
            }
            _ => action(None),
        };
        for (mfn, _) in [first, second].into_iter().flatten() {
            self.hypervisor.pages.mark_dirty(mfn);
            if self.hypervisor.pages.drop_one(mfn, false) {
                self.hypervisor.memory.ram().release(mfn);
            }
        }
        result
    }

    fn with_granter<A>(
        &self,
        granter: DomainId,
        action: impl FnOnce(&mut GrantTable<Self::Grants>) -> A,
    ) -> Option<A> {
        let granter = self.hypervisor.guest(granter)?;
        Some(action(&mut lock(&granter.grants)))
    }

    fn with_maptrack<A>(&self, action: impl FnOnce(&mut Maptrack<Self::Handles>) -> A) -> A {
        action(&mut lock(&self.guest.handles))
    }

    fn allows(&self, action: Action, _: DomainId) -> bool {
        self.faults.denied.get() != Some(action)
    }

    fn crash(&self, reason: Crash) {
        self.faults.crashes.borrow_mut().push(reason);
    }

    fn preempt(&self) -> bool {
        self.faults.preempt.get()
    }

    fn get_page(
        &self,
        granter: DomainId,
        frame: GrantedFrame,
        rights: Rights,
    ) -> Result<PageReference, PageError> {
        if self.faults.page_fails() {
            return Err(PageError::Refused);
        }
        let typed = rights == Rights::ReadWrite;
        match frame {
            GrantedFrame::Pinned(mfn) => Ok(self.count_page(mfn, typed)),
            GrantedFrame::Number(gfn) => {
                let granter = self.hypervisor.guest(granter).ok_or(PageError::NotRam)?;
                // Once the lock is gone the page may be free, or somebody else's.
                granter.with_lookup(gfn, |found| {
                    let mapping = found.ok_or(PageError::NotRam)?;
                    match mapping.kind {
                        Some(PageKind::RamReadWrite) => Ok(self.count_page(mapping.mfn, typed)),
                        Some(PageKind::RamReadOnly) if !typed => {
                            Ok(self.count_page(mapping.mfn, typed))
                        }
                        Some(_) | None => Err(PageError::NotRam),
                    }
                })
            }
        }
    }

    #[inline(always)]
    fn put_page(&self, pin: Released<Pin>, wrote: bool) {
        let pin = pin.get();
        let pages = &self.hypervisor.pages;
        if wrote {
            pages.mark_dirty(pin.mfn());
        }
        if pin.grant().is_none() {
            pages.lose(pin.mfn());
        }
        // The granter counts its own page once; every mapping counts it once more.
        let owned = pin.grant().is_some_and(|grant| grant.granter != self.guest.id);
        if pages.get(pin.mfn()).0 <= 1 + u32::from(owned) {
            (self.ended)(pin.mfn());
        }
        if pages.drop_one(pin.mfn(), pin.typed()) {
            self.hypervisor.memory.ram().release(pin.mfn());
        }
    }

    fn copy_page(&self, copy: &PageCopy) -> Result<(), NotCopied> {
        (self.copying)();
        if self.faults.copy_fails() {
            return Err(NotCopied);
        }
        let PageCopy { from, to, length } = *copy;
        let mut bytes = [0; 4096];
        let bytes = bytes.get_mut(..length.into()).ok_or(NotCopied)?;
        let ram = self.hypervisor.memory.ram();
        read_bytes(ram, from.page, from.first.into(), bytes);
        write_bytes(ram, to.page, to.first.into(), bytes);
        self.hypervisor.pages.mark_dirty(to.page);
        Ok(())
    }

    fn put_table(&self, table: Released<TablePage>) {
        self.hypervisor.memory.free_table(table.recycle());
    }

    fn insert<'id>(
        &self,
        mapping: &Mapping,
        skipped: &mut Skipped<'id>,
    ) -> Result<Inserted<'id>, NotInserted<'id>> {
        let Mapping { gfn, mfn, rights, granter: _, moved_from } = *mapping;
        let ram = p2m::Expected { mfn, kind: PageKind::RamReadWrite };
        let moved = match moved_from {
            None => None,
            Some(from) => match self.guest.clear(from, ram, skipped) {
                Ok(cleared) => Some((from, cleared)),
                Err(_) => return Err(untouched(skipped)),
            },
        };
        let removed = |mfn, cleared| Removed { page: PageReference::taken(mfn, false), cleared };
        match self.guest.map(gfn, mfn, kind(rights), skipped) {
            Ok(was) => Ok(Inserted {
                displaced: was.map(|(mfn, cleared)| removed(mfn, cleared)),
                moved: moved.map(|(_, cleared)| removed(mfn, cleared)),
            }),
            Err(_) => {
                if let Some((from, _)) = moved {
                    // The tables for it are still there, so this has room.
                    drop(self.guest.map(from, mfn, ram.kind, skipped));
                }
                Err(untouched(skipped))
            }
        }
    }

    #[inline]
    fn clear<'id>(
        &self,
        gfn: Gfn,
        expected: Expected,
        skipped: &mut Skipped<'id>,
    ) -> Result<flush::Cleared<'id>, ClearError> {
        let Expected { mfn, rights } = expected;
        self.guest.clear(gfn, p2m::Expected { mfn, kind: kind(rights) }, skipped).map_err(|error| {
            match error {
                p2m::ClearError::Unexpected(found) => match found.kind {
                    Some(PageKind::GrantReadWrite | PageKind::GrantReadOnly) => {
                        if found.mfn == mfn {
                            ClearError::OtherRights
                        } else {
                            ClearError::OtherFrame
                        }
                    }
                    Some(_) | None => ClearError::NotGrant,
                },
                p2m::ClearError::OutOfRange | p2m::ClearError::Absent => ClearError::NotGrant,
                p2m::ClearError::NoTable
                | p2m::ClearError::Unencodable(_)
                | p2m::ClearError::Contended => ClearError::Failed,
            }
        })
    }

    fn forget<'id>(&self, skipped: &mut Skipped<'id>) -> flush::Cleared<'id> {
        skipped.everything::<Tlb>();
        skipped.everything::<Iotlb>();
        untouched(skipped).cleared
    }

    fn hardware(&self) -> Hardware<'_, T, I> {
        Hardware { tlb: &self.tlb, iotlb: &self.iotlb }
    }

    fn judge(&self, _: &FlushFailure<Self>, retries: u32) -> Verdict {
        self.faults.judged.set(self.faults.judged.get() + 1);
        let verdict = self.faults.verdict.get().unwrap_or(Verdict::Quarantine);
        if verdict == Verdict::Retry && retries < RETRIES {
            self.faults.account.retried();
        }
        verdict
    }

    fn on_flush_failure(&self, failure: FlushFailure<Self>) {
        self.faults.account.kept(failure.held.len());
        self.failed.borrow_mut().push(failure);
    }
}

/// The proof for a page that never got an entry.
fn untouched<'id>(skipped: &mut Skipped<'id>) -> NotInserted<'id> {
    let cpus = skipped.absent::<Tlb>();
    NotInserted { cleared: cpus.with(&skipped.absent::<Iotlb>()) }
}

impl<R: Ram> Hypervisor<R> {
    /// The words of a guest's page, with a reference on it, if it is the guest's own RAM and
    /// the guest may write it.
    fn hold(&self, guest: &Guest<R>, gfn: Gfn) -> Option<(Mfn, Arc<[AtomicU64; 512]>)> {
        // Once the lock is gone the page may be free, or somebody else's.
        guest.with_lookup(gfn, |found| {
            let mapping = found.filter(|found| found.kind == Some(PageKind::RamReadWrite))?;
            let words = self.memory.ram().words(mapping.mfn)?;
            self.pages.take(mapping.mfn, false);
            Some((mapping.mfn, words))
        })
    }

    /// Runs `page` on each page of guest memory that `length` bytes from `address` on lie
    /// in, with the offset of the first byte there and how many there are. Each page is
    /// translated once.
    #[inline(always)]
    fn each_page(
        &self,
        guest: &Guest<R>,
        address: GuestAddress,
        length: usize,
        needed: Access,
        mut page: impl FnMut(&R, Mfn, usize, usize),
    ) -> Result<(), GuestFault> {
        let (mut at, mut left) = (address.0, length);
        at.checked_add(left as u64).ok_or(GuestFault)?;
        while left > 0 {
            let mfn = guest.translate(Gfn::new(at >> 12), needed).ok_or(GuestFault)?;
            let offset = (at & 0xfff) as usize;
            let here = left.min(4096 - offset);
            page(self.memory.ram(), mfn, offset, here);
            at += here as u64;
            left -= here;
        }
        Ok(())
    }

    /// Reads guest memory, word by word.
    ///
    /// # Errors
    /// [`GuestFault`] where nothing is mapped.
    #[inline(always)]
    pub fn copy_from(
        &self,
        guest: &Guest<R>,
        address: GuestAddress,
        bytes: &mut [u8],
    ) -> Result<(), GuestFault> {
        let length = bytes.len();
        let mut rest = bytes;
        self.each_page(guest, address, length, Access::READ, |ram, mfn, offset, here| {
            let (part, left) = mem::take(&mut rest).split_at_mut(here);
            rest = left;
            read_bytes(ram, mfn, offset, part);
        })
    }

    /// Writes guest memory, word by word.
    ///
    /// # Errors
    /// [`GuestFault`] where nothing is mapped, or nothing that the guest itself may write.
    #[inline(always)]
    pub fn copy_to(
        &self,
        guest: &Guest<R>,
        address: GuestAddress,
        bytes: &[u8],
    ) -> Result<(), GuestFault> {
        let offset = (address.0 & 0xfff) as usize;
        if (1..=8 - offset % 8).contains(&bytes.len()) {
            // A status.
            let gfn = Gfn::new(address.0 >> 12);
            let mfn = guest.translate(gfn, Access::WRITE).ok_or(GuestFault)?;
            write_in_word(self.memory.ram(), mfn, offset, bytes);
            return Ok(());
        }
        self.copy_words(guest, address, bytes)
    }

    /// As [`copy_to`](Self::copy_to), for more than a part of one word.
    #[inline(never)]
    fn copy_words(
        &self,
        guest: &Guest<R>,
        address: GuestAddress,
        bytes: &[u8],
    ) -> Result<(), GuestFault> {
        let mut rest = bytes;
        self.each_page(guest, address, bytes.len(), Access::WRITE, |ram, mfn, offset, here| {
            let (part, left) = rest.split_at(here);
            rest = left;
            write_bytes(ram, mfn, offset, part);
        })
    }
}
