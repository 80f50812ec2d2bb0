//! The end of a domain that never had an IOMMU.
//!
//! Symptom: its grants could never be released. Cause: the teardown itself recorded a
//! flush for devices, which `NoIommu` rightly refuses. Cure: the embedder says what there
//! is to forget.

use flush::{Cleared, DomainId, Gfn, Hardware, NoIommu, Released, Skipped, TablePage, Tlb};

use super::fake::*;
use crate::{
    Action, ClearError, Crash, Domain, Expected, FlushFailure, GrantTable, GrantedFrame,
    GuestAddress, GuestFault, Inserted, Mapping, Maptrack, NotCopied, NotInserted, Outcome,
    PageCopy, PageError, PageReference, Pin, Rights, Teardown, VcpuId, release_all,
};

/// A world whose caller has CPUs only.
struct Without(World);

impl Domain for Without {
    type Tlb = World;
    type Iotlb = NoIommu;
    type Grants = Grants;
    type Handles = Handles;
    fn id(&self) -> DomainId {
        self.0.id()
    }
    fn vcpu(&self) -> VcpuId {
        self.0.vcpu()
    }
    fn clamp(&self, index: usize, length: usize) -> usize {
        self.0.clamp(index, length)
    }
    fn copy_from_guest(&self, at: GuestAddress, bytes: &mut [u8]) -> Result<(), GuestFault> {
        self.0.copy_from_guest(at, bytes)
    }
    fn copy_to_guest(&self, at: GuestAddress, bytes: &[u8]) -> Result<(), GuestFault> {
        self.0.copy_to_guest(at, bytes)
    }
    fn with_granter<R>(
        &self,
        granter: DomainId,
        action: impl FnOnce(&mut GrantTable<Grants>) -> R,
    ) -> Option<R> {
        self.0.with_granter(granter, action)
    }
    fn with_maptrack<R>(&self, action: impl FnOnce(&mut Maptrack<Handles>) -> R) -> R {
        self.0.with_maptrack(action)
    }
    fn allows(&self, action: Action, subject: DomainId) -> bool {
        self.0.allows(action, subject)
    }
    fn crash(&self, reason: Crash) {
        self.0.crash(reason);
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
        self.0.get_page(granter, frame, rights)
    }
    fn put_page(&self, pin: Released<Pin>, wrote: bool) {
        self.0.put_page(pin, wrote);
    }
    fn copy_page(&self, copy: &PageCopy) -> Result<(), NotCopied> {
        self.0.copy_page(copy)
    }
    fn put_table(&self, table: Released<TablePage>) {
        self.0.put_table(table);
    }
    fn insert<'id>(
        &self,
        mapping: &Mapping,
        skipped: &mut Skipped<'id>,
    ) -> Result<Inserted<'id>, NotInserted<'id>> {
        self.0.insert(mapping, skipped)
    }
    fn clear<'id>(
        &self,
        gfn: Gfn,
        expected: Expected,
        skipped: &mut Skipped<'id>,
    ) -> Result<Cleared<'id>, ClearError> {
        self.0.clear(gfn, expected, skipped)
    }
    fn forget<'id>(&self, skipped: &mut Skipped<'id>) -> Cleared<'id> {
        skipped.everything::<Tlb>();
        skipped.absent::<Tlb>().with(&NoIommu.gone(skipped))
    }
    fn hardware(&self) -> Hardware<'_, World, NoIommu> {
        Hardware { tlb: &self.0, iotlb: &NoIommu }
    }
    fn on_flush_failure(&self, failure: FlushFailure<Self>) {
        panic!("{:?}", failure.error);
    }
}

#[test]
fn a_dying_domain_without_an_iommu_gives_back_its_grants() {
    let world = Without(World::new());
    world.0.write(ARRAY, &[request(0)]);
    let map = crate::Call { command: 0, argument: GuestAddress(ARRAY), count: 1 };
    assert_eq!(map.run(&world), Outcome::Done);
    assert_eq!(release_all(&world, 0), Teardown::Done);
    assert_eq!(world.0.count(GRANTER, 0).references, 0);
}
