//! Promises of shadow tables: nothing stale, nothing early, nothing lost.

use std::{collections::BTreeMap, vec, vec::Vec};

use flush::{Batch, Extent, Flush, Hardware, HoldError, NoIommu, Released, TablePage};
use stage2::{
    Access, Emptied, Entry, Rest, Stopped, Unheld,
    format::ept::{Ept, EptLevels},
};

use super::{
    reverse::Shown,
    shadow::{PickError, Unflushed},
    *,
};
use crate::testing::{DOMAIN, Heap, Owed, edit as owed_by};

mod changes;
mod edits;
mod flushes;
mod shadows;

const EPT: Ept = Ept::new(EptLevels::Four);
const ONE: Context = Context(0x1_001e);
const TWO: Context = Context(0x2_001e);
const RAM: PageKind = PageKind::RamReadWrite;
/// Canonical frame `n` is machine frame `n` and this.
const BASE: u64 = 0x10_0000;

/// CPUs that forget, or fail to, as told.
struct Cpus {
    fail: bool,
}

impl Flush<Tlb> for Cpus {
    type InFlight = ();
    type Error = ();

    fn start(&self, _: flush::DomainId, _: &flush::Cover) {}

    fn wait(&self, (): ()) -> Result<(), ()> {
        if self.fail { Err(()) } else { Ok(()) }
    }
}

struct Guest<'s> {
    nested: Nested<'s, Ept, &'s Heap, Tlb>,
    heap: &'s Heap,
}

fn unlimited() -> Budget {
    Budget::UNLIMITED
}

fn gfn(number: u64) -> Gfn {
    Gfn::new(number)
}

fn expected(number: u64) -> Expected {
    Expected { mfn: Mfn::new(number + BASE), kind: RAM }
}

fn run(first: u64, last: u64) -> Run {
    Run::new(gfn(first), gfn(last)).expect("in order")
}

fn page(canonical: u64) -> Walked {
    Walked { canonical: gfn(canonical), order: 0, access: Access::ALL }
}

/// A guest with canonical frames `0..1024` in pages and `1024..2048` in two large leaves.
fn with_guest(shadows: usize, records: usize, test: impl FnOnce(&mut Guest<'_>)) {
    let heap = Heap::new(400);
    let mut shadows: Vec<_> = (0..shadows).map(|_| Shadow::VACANT).collect();
    let mut entries = vec![ReverseEntry::EMPTY; records];
    let p2m = P2m::new(EPT, &heap).expect("a root");
    let mut nested = Nested::new(p2m, &mut shadows, &mut entries, 0x5eed);
    for (first, order) in (0..1024).map(|number| (number, 0)).chain([(1024, 9), (1536, 9)]) {
        let mfn = Mfn::new(first + BASE);
        let (set, _) = owed_by(|skipped| {
            let budget = &mut unlimited();
            nested.set(gfn(first), order, mfn, RAM, budget, skipped).map(|was| was.is_none())
        });
        assert_eq!(set, Ok(true));
    }
    test(&mut Guest { nested, heap: &heap });
}

impl Guest<'_> {
    /// Picks a shadow and opens it.
    fn pick(&mut self, context: Context) -> InUse {
        let shadow = self.nested.pick(context).expect("a shadow");
        self.prepare(&shadow);
        shadow
    }

    fn prepare(&mut self, shadow: &InUse) {
        let mut batch: Batch<Wiped, 1> = Batch::new(DOMAIN);
        let budget = &mut unlimited();
        let held =
            batch.hold(|skipped| self.nested.prepare(shadow, budget, Emptied::Keep, skipped));
        held.expect("nothing stops it");
        self.open(&mut batch);
    }

    /// Flushes and opens; returns how many tables came out.
    fn open<const N: usize>(&mut self, batch: &mut Batch<Wiped, N>) -> usize {
        let hardware = Hardware { tlb: &Cpus { fail: false }, iotlb: &NoIommu };
        let mut flushed = batch.flush(&hardware).expect("these CPUs do not fail");
        while let Some(wiped) = flushed.next_page() {
            self.nested.open(wiped);
        }
        let mut tables = 0;
        while let Some(table) = flushed.next_table() {
            self.heap.free(Released::<TablePage>::recycle(table).mfn());
            tables += 1;
        }
        tables
    }

    #[track_caller]
    fn fill(&mut self, shadow: &InUse, nested: u64, walked: Walked) -> Run {
        let (filled, owed) = self.try_fill(shadow, nested, walked);
        assert!(owed.iotlb.is_nothing());
        filled.expect("filled")
    }

    fn try_fill(
        &mut self,
        shadow: &InUse,
        nested: u64,
        walked: Walked,
    ) -> (Result<Run, FillError>, Owed) {
        let ticket = self.nested.ticket(shadow);
        owed_by(|skipped| self.nested.fill(shadow, ticket, gfn(nested), walked, skipped))
    }

    /// What a shadow shows: nested frame to canonical frame, by leaf.
    fn shows(&self, shadow: &InUse) -> BTreeMap<u64, u64> {
        let mut found = BTreeMap::new();
        let Some(root) = self.nested.shadows[shadow.slot].root else { return found };
        let tables = Tables { root, ..self.nested.p2m.tables() };
        let whole = Rest::new(EPT.geometry().space());
        let seen = stage2::visit(tables, whole, &mut unlimited(), |at| {
            let Entry::Leaf(leaf) = at.entry else { panic!("only leaves") };
            found.insert(at.run.first().get(), leaf.mfn.get() - BASE);
            core::ops::ControlFlow::Continue(())
        });
        assert!(seen.is_ok());
        found
    }

    /// Each leaf has its record, or is among the unknown; each record has its leaf.
    #[track_caller]
    fn check_records(&self) {
        let records: Vec<Shown> = self.nested.reverse.records().collect();
        for (slot, shadow) in self.nested.shadows.iter().enumerate() {
            let guest = self.nested.p2m.root();
            let shown = self.shows(&InUse { slot, guest });
            let own: Vec<_> = records.iter().filter(|record| record.shadow == slot).collect();
            assert_eq!(shadow.recorded, own.len() as u64);
            for record in &own {
                assert_eq!(shown.get(&record.nested.get()), Some(&record.canonical.get()));
            }
            for (nested, canonical) in shown {
                let known = own.iter().any(|record| record.nested.get() == nested);
                let unknown = shadow.unknown.is_some_and(|run| run.contains(gfn(canonical)));
                assert!(known || unknown, "{nested:#x} shows {canonical:#x} unrecorded");
            }
        }
    }

    fn clear(
        &mut self,
        number: u64,
        budget: &mut Budget,
    ) -> (Result<(), Refused<ClearError>>, Owed) {
        owed_by(|skipped| {
            self.nested.clear(gfn(number), expected(number), budget, skipped).map(drop)
        })
    }
}

#[track_caller]
fn check_everything(owed: &Owed) {
    assert_eq!(owed.tlb.extent(), Extent::Everything);
    assert!(owed.iotlb.is_nothing());
}
