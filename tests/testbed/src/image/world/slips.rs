//! A guest in a hypercall that does not go well, and an embedding that does wrong.
//!
//! [`Slipping`] stands between the library and a guest. Copies fail, policy says no, the
//! call is to be left: whatever [`Faults`] say. And it makes the one mistake of its [`Slip`].

use core::cell::Cell;

use flush::{
    Cleared, Cover, DomainId, Flush, Gfn, Hardware, Kind, Mfn, Released, Skipped, TablePage,
};
use gnttab::{
    Action, ClearError, Crash, Domain, Expected, FlushFailure, GrantTable, GrantedFrame,
    GuestAddress, GuestFault, GuestWords, Inserted, Mapping, Maptrack, NotCopied, NotInserted,
    PageCopy, PageError, PageReference, Pin, Removals, Rights, VcpuId,
};

use crate::embedding::PageInfo;
use crate::memory;

/// What goes wrong in a call, through nobody's mistake.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Faults {
    /// The element at this place of the array cannot be read.
    pub(crate) read: Option<u64>,
    /// This copy to the guest fails, counted from 0 since the faults were set.
    pub(crate) write: Option<u64>,
    /// The call is to be left whenever the library asks.
    pub(crate) preempt: bool,
    /// Policy forbids to unmap.
    pub(crate) deny_unmap: bool,
}

/// What an embedding does wrong beside its flushes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Slip {
    /// It says that it wrote to the guest, and did not.
    LostWrite,
    /// It says that it counted a page, and did not.
    Uncounted,
    /// It says that it removed a mapping, and did not.
    EntryKept,
    /// It drops its reference on a page as soon as the mapping is gone.
    EarlyDrop,
    /// It flushes twice where it was asked once.
    Twice,
    /// It always lets the call go on, whatever waits.
    NoPreemption,
}

/// What goes wrong in the calls to come, and how far it has come with that.
#[derive(Debug, Default)]
pub(crate) struct Mischief {
    /// Through nobody's mistake.
    pub(crate) faults: Faults,
    /// Through the embedding's.
    pub(crate) slip: Option<Slip>,
    /// Copies to the guest since the faults were set.
    pub(crate) written: Cell<u64>,
}

/// A flusher that may flush once more than it is asked to.
pub(crate) struct Repeated<'a, F> {
    inner: &'a F,
    again: bool,
}

impl<K: Kind, F: Flush<K>> Flush<K> for Repeated<'_, F> {
    type InFlight = F::InFlight;
    type Error = F::Error;

    fn start(&self, domain: DomainId, cover: &Cover) -> Self::InFlight {
        if self.again {
            // What becomes of it is of no interest: it is one too many.
            drop(self.inner.wait(self.inner.start(domain, cover)));
        }
        self.inner.start(domain, cover)
    }

    fn wait(&self, in_flight: Self::InFlight) -> Result<(), Self::Error> {
        self.inner.wait(in_flight)
    }
}

/// A guest in a hypercall.
pub(crate) struct Slipping<'a, D: Domain> {
    inner: &'a D,
    faults: Faults,
    slip: Option<Slip>,
    written: &'a Cell<u64>,
    /// Where the array of the call is, and the size of an element.
    array: (u64, u64),
    tlb: Repeated<'a, D::Tlb>,
    iotlb: Repeated<'a, D::Iotlb>,
}

impl<'a, D: Domain> Slipping<'a, D> {
    /// `inner`, with this mischief in a call on the array at an address, of elements of a
    /// size in bytes.
    pub(crate) fn new(inner: &'a D, mischief: &'a Mischief, array: (u64, u64)) -> Self {
        let Hardware { tlb, iotlb } = inner.hardware();
        let Mischief { faults, slip, written } = mischief;
        let again = *slip == Some(Slip::Twice);
        let (tlb, iotlb) = (Repeated { inner: tlb, again }, Repeated { inner: iotlb, again });
        Self { inner, faults: *faults, slip: *slip, written, array, tlb, iotlb }
    }
}

impl<'a, D: Domain> Domain for Slipping<'a, D> {
    type Tlb = Repeated<'a, D::Tlb>;
    type Iotlb = Repeated<'a, D::Iotlb>;
    type Grants = D::Grants;
    type Handles = D::Handles;

    fn id(&self) -> DomainId {
        self.inner.id()
    }

    fn vcpu(&self) -> VcpuId {
        self.inner.vcpu()
    }

    fn clamp(&self, index: usize, length: usize) -> usize {
        self.inner.clamp(index, length)
    }

    fn copy_from_guest(&self, address: GuestAddress, bytes: &mut [u8]) -> Result<(), GuestFault> {
        let (array, size) = self.array;
        let bad = self.faults.read.and_then(|place| array.checked_add(place.checked_mul(size)?));
        let length = bytes.len() as u64;
        if bad.is_some_and(|bad| (address.0..address.0.saturating_add(length)).contains(&bad)) {
            return Err(GuestFault);
        }
        self.inner.copy_from_guest(address, bytes)
    }

    fn copy_to_guest(&self, address: GuestAddress, bytes: &[u8]) -> Result<(), GuestFault> {
        let number = self.written.replace(self.written.get().saturating_add(1));
        if self.faults.write == Some(number) {
            return Err(GuestFault);
        }
        if self.slip == Some(Slip::LostWrite) {
            return Ok(());
        }
        self.inner.copy_to_guest(address, bytes)
    }

    // Only what is copied can fail, or get lost.
    fn with_guest_words<R>(
        &self,
        at: GuestAddress,
        count: usize,
        action: impl FnOnce(Option<GuestWords<'_>>) -> R,
    ) -> R {
        let Faults { read, write, preempt: _, deny_unmap: _ } = self.faults;
        if read.is_some() || write.is_some() || self.slip == Some(Slip::LostWrite) {
            return action(None);
        }
        self.inner.with_guest_words(at, count, action)
    }

    fn with_granter<R>(
        &self,
        granter: DomainId,
        action: impl FnOnce(&mut GrantTable<Self::Grants>) -> R,
    ) -> Option<R> {
        self.inner.with_granter(granter, action)
    }

    fn with_maptrack<R>(&self, action: impl FnOnce(&mut Maptrack<Self::Handles>) -> R) -> R {
        self.inner.with_maptrack(action)
    }

    fn allows(&self, action: Action, subject: DomainId) -> bool {
        !(self.faults.deny_unmap && action == Action::Unmap) && self.inner.allows(action, subject)
    }

    fn crash(&self, reason: Crash) {
        self.inner.crash(reason);
    }

    fn preempt(&self) -> bool {
        self.slip != Some(Slip::NoPreemption) && (self.faults.preempt || self.inner.preempt())
    }

    fn get_page(
        &self,
        granter: DomainId,
        frame: GrantedFrame,
        rights: Rights,
    ) -> Result<PageReference, PageError> {
        let page = self.inner.get_page(granter, frame, rights)?;
        if self.slip == Some(Slip::Uncounted) {
            drop_one(page.mfn(), page.typed());
        }
        Ok(page)
    }

    fn put_page(&self, pin: Released<Pin>, wrote: bool) {
        // What was never counted, or is dropped already, cannot be dropped.
        if !matches!(self.slip, Some(Slip::Uncounted | Slip::EarlyDrop)) {
            self.inner.put_page(pin, wrote);
        }
    }

    fn copy_page(&self, copy: &PageCopy) -> Result<(), NotCopied> {
        self.inner.copy_page(copy)
    }

    fn put_table(&self, table: Released<TablePage>) {
        self.inner.put_table(table);
    }

    fn insert<'id>(
        &self,
        mapping: &Mapping,
        skipped: &mut Skipped<'id>,
    ) -> Result<Inserted<'id>, NotInserted<'id>> {
        self.inner.insert(mapping, skipped)
    }

    fn clear<'id>(
        &self,
        gfn: Gfn,
        expected: Expected,
        skipped: &mut Skipped<'id>,
    ) -> Result<Cleared<'id>, ClearError> {
        if self.slip == Some(Slip::EntryKept) {
            let cpus = skipped.absent::<flush::Tlb>();
            return Ok(cpus.with(&skipped.absent::<flush::Iotlb>()));
        }
        let cleared = self.inner.clear(gfn, expected, skipped)?;
        if self.slip == Some(Slip::EarlyDrop) {
            drop_one(expected.mfn, expected.rights == Rights::ReadWrite);
        }
        Ok(cleared)
    }

    fn clear_all<'id>(
        &self,
        removals: &Removals,
        skipped: &mut Skipped<'id>,
        mut removed: impl FnMut(Result<Cleared<'id>, ClearError>),
    ) {
        if self.slip == Some(Slip::EntryKept) {
            for _ in removals.iter() {
                let cpus = skipped.absent::<flush::Tlb>();
                removed(Ok(cpus.with(&skipped.absent::<flush::Iotlb>())));
            }
            return;
        }
        let mut each = removals.iter();
        self.inner.clear_all(removals, skipped, |result| {
            let gone = each.next().filter(|_| result.is_ok());
            if let (Some(Slip::EarlyDrop), Some((_, expected))) = (self.slip, gone) {
                drop_one(expected.mfn, expected.rights == Rights::ReadWrite);
            }
            removed(result);
        });
    }

    fn forget<'id>(&self, skipped: &mut Skipped<'id>) -> Cleared<'id> {
        self.inner.forget(skipped)
    }

    fn hardware(&self) -> Hardware<'_, Self::Tlb, Self::Iotlb> {
        Hardware { tlb: &self.tlb, iotlb: &self.iotlb }
    }

    fn on_flush_failure(&self, failure: FlushFailure<Self>) {
        self.inner.on_flush_failure(failure);
    }
}

/// Drop a reference, and free the page if it was the last one.
fn drop_one(page: Mfn, typed: bool) {
    if PageInfo::of(page).is_some_and(|info| info.drop_one(typed)) {
        // The allocator refuses what is not its own; such a frame goes nowhere.
        memory::release(page).ok();
    }
}
