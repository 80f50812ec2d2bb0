//! The embedder with somebody behind it who sees every call that the crate makes.
//!
//! [`Watched`] passes everything on to the embedder it wraps. Its [`Watcher`] is called
//! before and after, and may do what a guest can do at that moment.

use flush::{DomainId, Gfn, Hardware, Released, Skipped, TablePage};
use gnttab::{
    Action, ClearError, Crash, Domain, Expected, FlushFailure, GrantTable, GrantedFrame,
    GuestAddress, GuestFault, GuestWords, Inserted, Mapping, Maptrack, NotCopied, NotInserted,
    PageCopy, PageError, PageReference, Pin, Rights, VcpuId,
};

/// Who watches.
pub(crate) trait Watcher {
    /// The crate calls its embedder, or comes back from there.
    fn turn(&self);
    /// The crate is about to map something here.
    fn names(&self, gfn: Gfn);
}

/// An embedder that is watched.
pub(crate) struct Watched<'a, D, W> {
    pub(crate) domain: &'a D,
    pub(crate) watcher: &'a W,
}

impl<D, W: Watcher> Watched<'_, D, W> {
    fn around<R>(&self, call: impl FnOnce(&D) -> R) -> R {
        self.watcher.turn();
        let result = call(self.domain);
        self.watcher.turn();
        result
    }
}

impl<D: Domain, W: Watcher> Domain for Watched<'_, D, W> {
    type Tlb = D::Tlb;
    type Iotlb = D::Iotlb;
    type Grants = D::Grants;
    type Handles = D::Handles;

    fn id(&self) -> DomainId {
        self.around(D::id)
    }

    fn vcpu(&self) -> VcpuId {
        self.around(D::vcpu)
    }

    fn clamp(&self, index: usize, length: usize) -> usize {
        self.around(|domain| domain.clamp(index, length))
    }

    fn copy_from_guest(&self, address: GuestAddress, bytes: &mut [u8]) -> Result<(), GuestFault> {
        self.around(|domain| domain.copy_from_guest(address, bytes))
    }

    fn copy_to_guest(&self, address: GuestAddress, bytes: &[u8]) -> Result<(), GuestFault> {
        self.around(|domain| domain.copy_to_guest(address, bytes))
    }

    fn with_guest_words<R>(
        &self,
        at: GuestAddress,
        count: usize,
        action: impl FnOnce(Option<GuestWords<'_>>) -> R,
    ) -> R {
        self.domain.with_guest_words(at, count, action)
    }

    fn with_granter<R>(
        &self,
        granter: DomainId,
        action: impl FnOnce(&mut GrantTable<D::Grants>) -> R,
    ) -> Option<R> {
        // The lock keeps other hypercalls out, not the guest that owns the table.
        let locked = |table: &mut GrantTable<D::Grants>| {
            self.watcher.turn();
            let result = action(table);
            self.watcher.turn();
            result
        };
        self.around(|domain| domain.with_granter(granter, locked))
    }

    fn with_maptrack<R>(&self, action: impl FnOnce(&mut Maptrack<D::Handles>) -> R) -> R {
        self.around(|domain| domain.with_maptrack(action))
    }

    fn allows(&self, action: Action, subject: DomainId) -> bool {
        self.around(|domain| domain.allows(action, subject))
    }

    fn crash(&self, reason: Crash) {
        self.around(|domain| domain.crash(reason));
    }

    fn preempt(&self) -> bool {
        self.around(D::preempt)
    }

    fn get_page(
        &self,
        granter: DomainId,
        frame: GrantedFrame,
        rights: Rights,
    ) -> Result<PageReference, PageError> {
        self.around(|domain| domain.get_page(granter, frame, rights))
    }

    fn put_page(&self, pin: Released<Pin>, wrote: bool) {
        self.around(|domain| domain.put_page(pin, wrote));
    }

    fn copy_page(&self, copy: &PageCopy) -> Result<(), NotCopied> {
        self.around(|domain| domain.copy_page(copy))
    }

    fn put_table(&self, table: Released<TablePage>) {
        self.around(|domain| domain.put_table(table));
    }

    fn insert<'id>(
        &self,
        mapping: &Mapping,
        skipped: &mut Skipped<'id>,
    ) -> Result<Inserted<'id>, NotInserted<'id>> {
        self.watcher.names(mapping.gfn);
        mapping.moved_from.iter().for_each(|gfn| self.watcher.names(*gfn));
        self.around(|domain| domain.insert(mapping, skipped))
    }

    fn clear<'id>(
        &self,
        gfn: Gfn,
        expected: Expected,
        skipped: &mut Skipped<'id>,
    ) -> Result<flush::Cleared<'id>, ClearError> {
        self.around(|domain| domain.clear(gfn, expected, skipped))
    }

    fn forget<'id>(&self, skipped: &mut Skipped<'id>) -> flush::Cleared<'id> {
        self.around(|domain| domain.forget(skipped))
    }

    fn hardware(&self) -> Hardware<'_, D::Tlb, D::Iotlb> {
        self.watcher.turn();
        self.domain.hardware()
    }

    fn on_flush_failure(&self, failure: FlushFailure<Self>) {
        self.around(|domain| domain.on_flush_failure(failure));
    }
}
