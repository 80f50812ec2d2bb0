//! The embedding as a scenario scripts it: others may act wherever it is called.
//!
//! [`Scripted`] stands between the library and the guest of a [`host::World`]. Before
//! each call of the library it lets other actors go on, and it slips where it is told to.

use std::{
    cell::{Cell, RefCell},
    collections::BTreeMap,
};

use flush::{Cleared, Cover, DomainId, Flush, Gfn, Hardware, Kind, Released, Skipped, TablePage};
use gnttab::{
    Action, ClearError, Crash, Domain, Expected, FlushFailure, GrantTable, GrantedFrame,
    GuestAddress, GuestFault, GuestWords, Inserted, Mapping, Maptrack, NotCopied, NotInserted,
    PageCopy, PageError, PageReference, Pin, Rights, VcpuId,
};
use host::{
    PageCounts,
    turns::{Point, point},
    world::{FRONTEND, ModelCaller},
};

use crate::plants::Slip;

/// A flusher during which others may act.
pub(crate) struct Hooked<'a, F> {
    inner: &'a F,
    hook: &'a dyn Fn(),
    again: Option<&'a Cell<u64>>,
    /// Flushes that are done, if another one of the same domain counts as one's own.
    done: Option<&'a Done>,
}

/// How many flushes of each domain are done.
pub(crate) type Done = RefCell<BTreeMap<DomainId, u64>>;

/// A flush under way: whose, and how many of that domain's were done when it began.
pub(crate) struct Begun<T> {
    inner: T,
    domain: DomainId,
    before: u64,
}

fn count_of(done: &Done, domain: DomainId) -> u64 {
    done.borrow().get(&domain).copied().unwrap_or(0)
}

impl<K: Kind, F: Flush<K>> Flush<K> for Hooked<'_, F> {
    type InFlight = Begun<F::InFlight>;
    type Error = F::Error;

    fn start(&self, domain: DomainId, cover: &Cover) -> Self::InFlight {
        (self.hook)();
        if let Some(more) = self.again {
            more.set(more.get() + 1);
            // What becomes of it is of no interest: it is one too many.
            drop(self.inner.wait(self.inner.start(domain, cover)));
        }
        let before = self.done.map_or(0, |done| count_of(done, domain));
        Begun { inner: self.inner.start(domain, cover), domain, before }
    }

    fn wait(&self, in_flight: Self::InFlight) -> Result<(), Self::Error> {
        (self.hook)();
        let Begun { inner, domain, before } = in_flight;
        if self.done.is_some_and(|done| count_of(done, domain) > before) {
            // Whichever it is that was done.
            drop(inner);
            return Ok(());
        }
        let result = self.inner.wait(inner);
        if let Some(done) = self.done {
            *done.borrow_mut().entry(domain).or_default() += 1;
        }
        (self.hook)();
        result
    }
}

/// A guest in a hypercall of a scenario.
pub(crate) struct Scripted<'a, D: Domain> {
    inner: &'a D,
    hook: &'a dyn Fn(),
    vcpu: VcpuId,
    slip: Option<Slip>,
    drop_page: &'a dyn Fn(PageReference, bool),
    pages: &'a PageCounts,
    /// The lock of a granter's table is held.
    with_table: Cell<bool>,
    tlb: Hooked<'a, D::Tlb>,
    iotlb: Hooked<'a, D::Iotlb>,
}

/// What a [`Scripted`] embedding is made of.
pub(crate) struct Manner<'a> {
    /// Lets others act.
    pub(crate) hook: &'a dyn Fn(),
    /// The vCPU that calls.
    pub(crate) vcpu: u32,
    /// What the embedding does wrong.
    pub(crate) slip: Option<Slip>,
    /// Flushes that nobody asked for.
    pub(crate) extra: &'a Cell<u64>,
    /// Flushes of CPUs and of devices that are done.
    pub(crate) done: &'a [Done; 2],
}

impl<'a> Manner<'a> {
    /// Hardware of `caller` during whose flushes others may act.
    pub(crate) fn hardware<'w, D: Domain>(
        &'a self,
        caller: &'a D,
    ) -> (Hooked<'a, D::Tlb>, Hooked<'a, D::Iotlb>)
    where
        'w: 'a,
    {
        let Hardware { tlb, iotlb } = caller.hardware();
        let again = (self.slip == Some(Slip::Twice)).then_some(self.extra);
        let [of_cpus, of_devices] = self
            .done
            .each_ref()
            .map(|done| (self.slip == Some(Slip::AnothersDone)).then_some(done));
        (
            Hooked { inner: tlb, hook: self.hook, again, done: of_cpus },
            Hooked { inner: iotlb, hook: self.hook, again, done: of_devices },
        )
    }

    /// `caller`, scripted.
    pub(crate) fn scripted<'w>(
        &'a self,
        caller: &'a ModelCaller<'w>,
        drop_page: &'a dyn Fn(PageReference, bool),
    ) -> Scripted<'a, ModelCaller<'w>> {
        let (tlb, iotlb) = self.hardware(caller);
        Scripted {
            inner: caller,
            hook: self.hook,
            vcpu: VcpuId(self.vcpu),
            slip: self.slip,
            drop_page,
            pages: &caller.hypervisor.pages,
            with_table: Cell::new(false),
            tlb,
            iotlb,
        }
    }
}

impl<'a, D: Domain> Domain for Scripted<'a, D> {
    type Tlb = Hooked<'a, D::Tlb>;
    type Iotlb = Hooked<'a, D::Iotlb>;
    type Grants = D::Grants;
    type Handles = D::Handles;

    fn id(&self) -> DomainId {
        self.inner.id()
    }

    fn vcpu(&self) -> VcpuId {
        self.vcpu
    }

    fn clamp(&self, index: usize, length: usize) -> usize {
        self.inner.clamp(index, length)
    }

    fn copy_from_guest(&self, address: GuestAddress, bytes: &mut [u8]) -> Result<(), GuestFault> {
        (self.hook)();
        self.inner.copy_from_guest(address, bytes)
    }

    fn copy_to_guest(&self, address: GuestAddress, bytes: &[u8]) -> Result<(), GuestFault> {
        (self.hook)();
        if self.slip == Some(Slip::LostWrite) {
            return Ok(());
        }
        self.inner.copy_to_guest(address, bytes)
    }

    fn with_guest_words<R>(
        &self,
        at: GuestAddress,
        count: usize,
        action: impl FnOnce(Option<GuestWords<'_>>) -> R,
    ) -> R {
        // Only what is copied can get lost.
        if self.slip == Some(Slip::LostWrite) {
            return action(None);
        }
        self.inner.with_guest_words(at, count, action)
    }

    fn with_granter<R>(
        &self,
        granter: DomainId,
        action: impl FnOnce(&mut GrantTable<Self::Grants>) -> R,
    ) -> Option<R> {
        (self.hook)();
        self.with_table.set(true);
        let result = self.inner.with_granter(granter, action);
        self.with_table.set(false);
        result
    }

    fn with_maptrack<R>(&self, action: impl FnOnce(&mut Maptrack<Self::Handles>) -> R) -> R {
        (self.hook)();
        self.inner.with_maptrack(|maptrack| {
            // With a table's lock in hand this would be no more than a lock too many.
            if self.slip == Some(Slip::LockOrder) && !self.with_table.get() {
                point(Point::Gap);
                self.inner.with_granter(FRONTEND, |_| ());
            }
            action(maptrack)
        })
    }

    fn allows(&self, action: Action, subject: DomainId) -> bool {
        (self.hook)();
        self.inner.allows(action, subject)
    }

    fn crash(&self, reason: Crash) {
        self.inner.crash(reason);
    }

    fn preempt(&self) -> bool {
        (self.hook)();
        self.slip != Some(Slip::NoPreemption) && self.inner.preempt()
    }

    fn get_page(
        &self,
        granter: DomainId,
        frame: GrantedFrame,
        rights: Rights,
    ) -> Result<PageReference, PageError> {
        (self.hook)();
        let page = self.inner.get_page(granter, frame, rights)?;
        if self.slip == Some(Slip::Uncounted) {
            (self.drop_page)(PageReference::taken(page.mfn(), page.typed()), page.typed());
        }
        if self.slip == Some(Slip::LookedUpBefore) {
            // As if the page had been found and not counted yet.
            let is_free = self.pages.drop_one(page.mfn(), page.typed());
            debug_assert!(!is_free, "its owner counts it");
            point(Point::Gap);
            self.pages.take(page.mfn(), page.typed());
        }
        Ok(page)
    }

    fn put_page(&self, pin: Released<Pin>, wrote: bool) {
        (self.hook)();
        if self.slip == Some(Slip::EarlyDrop) {
            return;
        }
        self.inner.put_page(pin, wrote);
    }

    fn copy_page(&self, copy: &PageCopy) -> Result<(), NotCopied> {
        (self.hook)();
        self.inner.copy_page(copy)
    }

    fn put_table(&self, table: Released<TablePage>) {
        (self.hook)();
        self.inner.put_table(table);
    }

    fn insert<'id>(
        &self,
        mapping: &Mapping,
        skipped: &mut Skipped<'id>,
    ) -> Result<Inserted<'id>, NotInserted<'id>> {
        (self.hook)();
        self.inner.insert(mapping, skipped)
    }

    fn clear<'id>(
        &self,
        gfn: Gfn,
        expected: Expected,
        skipped: &mut Skipped<'id>,
    ) -> Result<Cleared<'id>, ClearError> {
        (self.hook)();
        if self.slip == Some(Slip::EntryKept) {
            let cpus = skipped.absent::<flush::Tlb>();
            return Ok(cpus.with(&skipped.absent::<flush::Iotlb>()));
        }
        let cleared = self.inner.clear(gfn, expected, skipped)?;
        if self.slip == Some(Slip::EarlyDrop) {
            let typed = expected.rights == Rights::ReadWrite;
            (self.drop_page)(PageReference::taken(expected.mfn, typed), typed);
        }
        Ok(cleared)
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
