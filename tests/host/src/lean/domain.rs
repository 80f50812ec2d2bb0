//! The lean glue: one guest in one hypercall, as `gnttab` wants to see it.

use std::sync::atomic::{AtomicU64, Ordering};

use flush::{Cleared, DomainId, Gfn, Hardware, Iotlb, Mfn, Released, Skipped, TablePage, Tlb};
use gnttab::{
    Action, ClearError, Crash, Domain, Expected, FlushFailure, GrantTable, GrantedFrame,
    GuestAddress, GuestFault, GuestWords, Inserted, Mapping, Maptrack, NotCopied, NotInserted,
    PageCopy, PageError, PageReference, Pin, Removals, Rights, VcpuId,
};
use p2m::PageKind;

use super::{
    Guest, Lean,
    storage::{Grants, Handles},
};
use crate::Null;

/// The caller in a hypercall.
pub(super) struct Caller<'l, 'm> {
    pub(super) lean: &'l Lean<'m>,
    pub(super) guest: &'l Guest<'m>,
}

#[inline]
const fn kind(rights: Rights) -> PageKind {
    match rights {
        Rights::Read => PageKind::GrantReadOnly,
        Rights::ReadWrite => PageKind::GrantReadWrite,
    }
}

impl<'l> Caller<'l, '_> {
    /// The words of the caller's page at `gfn`.
    #[inline]
    fn words(&self, gfn: Gfn) -> Result<&'l [AtomicU64; 512], GuestFault> {
        let mfn = self.guest.space.lock().cpu.get(gfn).ok_or(GuestFault)?.mfn;
        self.lean.memory.words(mfn).ok_or(GuestFault)
    }

    /// Runs `part` on each word that `length` bytes from `at` on lie in, with where they
    /// are among the bytes and in the word.
    #[inline]
    fn each_word(
        &self,
        at: GuestAddress,
        length: usize,
        mut part: impl FnMut(&AtomicU64, usize, usize, usize),
    ) -> Result<(), GuestFault> {
        let GuestAddress(at) = at;
        at.checked_add(length as u64).ok_or(GuestFault)?;
        let mut done = 0;
        while done < length {
            let here = at + done as u64;
            let (offset, before) = ((here & 0xfff) as usize, done);
            let page = self.words(Gfn::new(here >> 12))?;
            let count = (length - done).min(4096 - offset);
            each_word_of(page, offset, count, |word, at, from, count| {
                part(word, before + at, from, count);
            });
            done += count;
        }
        Ok(())
    }

    /// The caller's page at `gfn` with a reference on it, if it is RAM that the caller may
    /// write.
    #[inline]
    fn hold(&self, gfn: Gfn) -> Option<(Mfn, &'l [AtomicU64; 512])> {
        let mut space = self.guest.space.lock();
        let mfn = match space.last {
            Some((last, mfn)) if last == gfn => mfn,
            Some(_) | None => {
                let mapping = space.cpu.get(gfn)?;
                let is_ram = mapping.kind == Some(PageKind::RamReadWrite);
                is_ram.then(|| space.last = Some((gfn, mapping.mfn)))?;
                mapping.mfn
            }
        };
        let words = self.lean.memory.words(mfn)?;
        self.lean.memory.count(mfn, false);
        Some((mfn, words))
    }

    #[inline]
    pub(super) fn read(&self, at: GuestAddress, bytes: &mut [u8]) -> Result<(), GuestFault> {
        self.each_word(at, bytes.len(), |word, done, from, count| {
            load(word, from, &mut bytes[done..done + count]);
        })
    }

    #[inline]
    pub(super) fn write(&self, at: GuestAddress, bytes: &[u8]) -> Result<(), GuestFault> {
        self.each_word(at, bytes.len(), |word, done, from, count| {
            store(word, from, &bytes[done..done + count]);
        })
    }
}

/// Runs `part` on each word of a page that bytes from `offset` on lie in, with where they
/// are among the bytes and in the word.
#[inline]
fn each_word_of(
    page: &[AtomicU64; 512],
    offset: usize,
    length: usize,
    mut part: impl FnMut(&AtomicU64, usize, usize, usize),
) {
    let mut done = 0;
    while done < length {
        let at = offset + done;
        let count = (8 - at % 8).min(length - done);
        part(&page[at / 8], done, at % 8, count);
        done += count;
    }
}

#[inline]
fn load(word: &AtomicU64, from: usize, bytes: &mut [u8]) {
    let word = word.load(Ordering::Relaxed).to_le_bytes();
    bytes.copy_from_slice(&word[from..from + bytes.len()]);
}

#[inline]
fn store(word: &AtomicU64, from: usize, bytes: &[u8]) {
    let mut whole = word.load(Ordering::Relaxed).to_le_bytes();
    whole[from..from + bytes.len()].copy_from_slice(bytes);
    word.store(u64::from_le_bytes(whole), Ordering::Relaxed);
}

impl<'m> Domain for Caller<'_, 'm> {
    type Tlb = Null;
    type Iotlb = Null;
    type Grants = Grants<'m>;
    type Handles = Handles;

    #[inline]
    fn id(&self) -> DomainId {
        Lean::CALLER
    }

    fn vcpu(&self) -> VcpuId {
        VcpuId(0)
    }

    #[inline]
    fn clamp(&self, index: usize, length: usize) -> usize {
        // All ones where index is below length, else zero.
        index & (((index as isize).wrapping_sub(length as isize)) >> (usize::BITS - 1)) as usize
    }

    #[inline]
    fn copy_from_guest(&self, address: GuestAddress, bytes: &mut [u8]) -> Result<(), GuestFault> {
        // Arguments mostly are whole words in one page.
        let (offset, words) = ((address.0 & 0xfff) as usize, bytes.as_chunks_mut::<8>().0.len());
        if offset.is_multiple_of(8) && words * 8 == bytes.len() && offset + words * 8 <= 4096 {
            let page = self.words(Gfn::new(address.0 >> 12))?;
            let page = page.get(offset / 8..offset / 8 + words).ok_or(GuestFault)?;
            for (bytes, word) in bytes.as_chunks_mut::<8>().0.iter_mut().zip(page) {
                *bytes = word.load(Ordering::Relaxed).to_le_bytes();
            }
            return Ok(());
        }
        self.read(address, bytes)
    }

    #[inline]
    fn copy_to_guest(&self, address: GuestAddress, bytes: &[u8]) -> Result<(), GuestFault> {
        if let Some(status) = bytes.as_array::<2>()
            && address.0.is_multiple_of(2)
        {
            let (index, shift) = ((address.0 & 0xfff) as usize / 8, address.0 % 8 * 8);
            let word = &self.words(Gfn::new(address.0 >> 12))?[index];
            let others = word.load(Ordering::Relaxed) & !(0xffff << shift);
            let status = u64::from(u16::from_le_bytes(*status)) << shift;
            word.store(others | status, Ordering::Relaxed);
            return Ok(());
        }
        self.write(address, bytes)
    }

    #[inline]
    fn with_guest_words<R>(
        &self,
        at: GuestAddress,
        count: usize,
        action: impl FnOnce(Option<GuestWords<'_>>) -> R,
    ) -> R {
        let (gfn, index) = (at.0 >> 12, (at.0 & 0xfff) as usize / 8);
        let first = self.hold(Gfn::new(gfn));
        let beyond = (index + count).checked_sub(512).filter(|beyond| *beyond > 0);
        // No address has a frame number that another one cannot follow.
        let second = beyond.and_then(|_| self.hold(Gfn::new(gfn + 1)));
        let words = match (&first, &second, beyond) {
            (Some((_, first)), _, None) => {
                first.get(index..index + count).map(|first| GuestWords::new(first, &[]))
            }
            (Some((_, first)), Some((_, second)), Some(beyond)) => {
                let (first, second) = (first.get(index..), second.get(..beyond));
                first.zip(second).map(|(first, second)| GuestWords::new(first, second))
            }
            (None, _, _) | (_, None, Some(_)) => None,
        };
        let result = action(words);
        for (mfn, _) in [first, second].into_iter().flatten() {
            self.lean.memory.discount(mfn, false, false);
        }
        result
    }

    #[inline]
    fn with_granter<R>(
        &self,
        granter: DomainId,
        action: impl FnOnce(&mut GrantTable<Self::Grants>) -> R,
    ) -> Option<R> {
        let granter = self.lean.guests.get(usize::from(granter.get()))?;
        Some(action(&mut granter.grants.lock()))
    }

    #[inline]
    fn with_maptrack<R>(&self, action: impl FnOnce(&mut Maptrack<Self::Handles>) -> R) -> R {
        action(&mut self.guest.handles.lock())
    }

    #[inline]
    fn allows(&self, _: Action, subject: DomainId) -> bool {
        subject == Lean::GRANTER
    }

    fn crash(&self, reason: Crash) {
        panic!("the caller did nothing wrong: {reason:?}");
    }

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
        let mfn = match frame {
            GrantedFrame::Pinned(mfn) => mfn,
            GrantedFrame::Number(gfn) => {
                let granter = self.lean.guest(granter).ok_or(PageError::NotRam)?;
                let mapping = granter.space.lock().cpu.get(gfn).ok_or(PageError::NotRam)?;
                let ram = mapping.kind == Some(PageKind::RamReadWrite);
                if ram { mapping.mfn } else { return Err(PageError::NotRam) }
            }
        };
        self.lean.memory.count(mfn, typed);
        Ok(PageReference::taken(mfn, typed))
    }

    #[inline]
    fn put_page(&self, pin: Released<Pin>, wrote: bool) {
        let pin = pin.get();
        self.lean.memory.discount(pin.mfn(), pin.typed(), wrote);
    }

    fn copy_page(&self, copy: &PageCopy) -> Result<(), NotCopied> {
        let PageCopy { from, to, length } = *copy;
        let mut bytes = [0; 4096];
        let bytes = bytes.get_mut(..length.into()).ok_or(NotCopied)?;
        let words = |mfn| self.lean.memory.words(mfn).ok_or(NotCopied);
        let (source, target) = (words(from.page)?, words(to.page)?);
        each_word_of(source, from.first.into(), bytes.len(), |word, done, from, count| {
            load(word, from, &mut bytes[done..done + count]);
        });
        each_word_of(target, to.first.into(), bytes.len(), |word, done, from, count| {
            store(word, from, &bytes[done..done + count]);
        });
        self.lean.memory.mark_dirty(to.page);
        Ok(())
    }

    fn put_table(&self, table: Released<TablePage>) {
        self.lean.memory.give(table.recycle().mfn());
    }

    fn insert<'id>(
        &self,
        mapping: &Mapping,
        skipped: &mut Skipped<'id>,
    ) -> Result<Inserted<'id>, NotInserted<'id>> {
        let Mapping { gfn, mfn, rights, granter: _, moved_from } = *mapping;
        let entry = (mfn, kind(rights));
        let mapped = match moved_from {
            None => self.guest.map(self.lean.memory, gfn, entry, skipped),
            // The caller grants nothing here.
            Some(_) => None,
        };
        match mapped {
            Some(()) => Ok(Inserted::default()),
            None => {
                let cpu = skipped.absent::<Tlb>();
                Err(NotInserted { cleared: cpu.with(&skipped.absent::<Iotlb>()) })
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
        let page = (gfn, p2m::Expected { mfn, kind: kind(rights) }, ());
        let mut result = Err(ClearError::Failed);
        self.guest.clear(self.lean.memory, [page].into_iter(), skipped, |(), cleared| {
            result = cleared.map_err(|error| refusal(error, mfn));
        });
        result
    }

    #[inline]
    fn clear_all<'id>(
        &self,
        removals: &Removals,
        skipped: &mut Skipped<'id>,
        mut removed: impl FnMut(Result<Cleared<'id>, ClearError>),
    ) {
        let pages = removals.iter().map(|(gfn, Expected { mfn, rights })| {
            (gfn, p2m::Expected { mfn, kind: kind(rights) }, mfn)
        });
        self.guest.clear(self.lean.memory, pages, skipped, |mfn, cleared| {
            removed(cleared.map_err(|error| refusal(error, mfn)));
        });
    }

    fn forget<'id>(&self, skipped: &mut Skipped<'id>) -> Cleared<'id> {
        skipped.everything::<Tlb>();
        skipped.everything::<Iotlb>();
        let cpu = skipped.absent::<Tlb>();
        cpu.with(&skipped.absent::<Iotlb>())
    }

    #[inline]
    fn hardware(&self) -> Hardware<'_, Null, Null> {
        Hardware { tlb: &Null, iotlb: &Null }
    }

    fn on_flush_failure(&self, failure: FlushFailure<Self>) {
        let flush::FlushError { tlb, iotlb } = failure.error;
        match (tlb, iotlb) {
            (Some(never), _) | (None, Some(never)) => match never {},
            (None, None) => {}
        }
    }
}

/// Why the entry stays.
#[cold]
fn refusal(error: p2m::ClearError, mfn: Mfn) -> ClearError {
    match error {
        p2m::ClearError::Unexpected(found) => match found.kind {
            Some(PageKind::GrantReadWrite | PageKind::GrantReadOnly) if found.mfn == mfn => {
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
