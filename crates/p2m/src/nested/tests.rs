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

/// Edits of canonical frame 5, or of a run with it in the middle.
#[track_caller]
fn check_edit(
    edit: impl for<'id> FnOnce(&mut Nested<'_, Ept, &Heap, Tlb>, &mut Skipped<'id>) -> bool,
    changed: Run,
) {
    with_guest(2, 64, |guest| {
        let (one, two) = (guest.pick(ONE), guest.pick(TWO));
        // Frames 3 to 7, each twice in one context and once in the other.
        for canonical in 3..=7 {
            guest.fill(&one, 0x100 + canonical, page(canonical));
            guest.fill(&one, 0x9_0000 + 0x200 * canonical, page(canonical));
            guest.fill(&two, 0x100 - canonical, page(canonical));
        }
        guest.check_records();
        let before = [guest.shows(&one), guest.shows(&two)];
        let (done, owed) = owed_by(|skipped| edit(&mut guest.nested, skipped));
        assert!(done);
        check_everything(&owed);
        for (shadow, mut before) in [&one, &two].into_iter().zip(before) {
            before.retain(|_, canonical| !changed.contains(gfn(*canonical)));
            assert_eq!(guest.shows(shadow), before);
        }
        let counts = guest.nested.counts();
        assert_eq!((counts.precise, counts.swept), (3 * changed.pages(), 0));
        guest.check_records();
    });
}

#[test]
fn a_canonical_change_unmaps_what_shows_it_in_every_shadow_and_nothing_else() {
    check_edit(
        |nested, skipped| nested.clear(gfn(5), expected(5), &mut unlimited(), skipped).is_ok(),
        run(5, 5),
    );
    check_edit(
        |nested, skipped| {
            let mfn = Mfn::new(0x77);
            nested
                .set(gfn(5), 0, mfn, RAM, &mut unlimited(), skipped)
                .is_ok_and(|was| was.is_some())
        },
        run(5, 5),
    );
    // The same page with fewer rights: nothing is displaced.
    check_edit(
        |nested, skipped| {
            let (mfn, kind) = (expected(5).mfn, PageKind::RamReadOnly);
            let set = nested.set(gfn(5), 0, mfn, kind, &mut unlimited(), skipped);
            set.is_ok_and(|was| was.is_none())
        },
        run(5, 5),
    );
    check_edit(
        |nested, skipped| {
            let rest = Rest::new(run(4, 6));
            nested.restrict(rest, Access::READ, &mut unlimited(), skipped).is_ok()
        },
        run(4, 6),
    );
    check_edit(
        |nested, skipped| {
            let rest = Rest::new(run(4, 6));
            let ended = nested.clear_range(rest, &mut unlimited(), Emptied::Keep, skipped, Unheld);
            ended.is_ok()
        },
        run(4, 6),
    );
}

#[test]
fn a_large_leaf_that_shows_a_changed_frame_goes_whole() {
    with_guest(1, 64, |guest| {
        let shadow = guest.pick(ONE);
        let large = Walked { canonical: gfn(1024 + 7), order: 18, access: Access::ALL };
        assert_eq!(guest.fill(&shadow, 0x4_0007, large), run(0x4_0000, 0x4_01ff));
        guest.fill(&shadow, 0x100, page(1536));
        let (cleared, owed) = guest.clear(1024 + 300, &mut unlimited());
        assert_eq!(cleared, Ok(()));
        check_everything(&owed);
        assert_eq!(guest.shows(&shadow), BTreeMap::from([(0x100, 1536)]));
        guest.check_records();
        // What the canonical leaf was split into is shown, and goes, page by page.
        guest.fill(&shadow, 0x4_0008, Walked { canonical: gfn(1024 + 8), ..large });
        guest.fill(&shadow, 0x4_0009, Walked { canonical: gfn(1024 + 9), ..large });
        assert_eq!(guest.clear(1024 + 8, &mut unlimited()).0, Ok(()));
        let left = BTreeMap::from([(0x100, 1536), (0x4_0009, 1024 + 9)]);
        assert_eq!(guest.shows(&shadow), left);
        guest.check_records();
    });
}

#[test]
fn a_leaf_is_as_large_and_allows_as_much_as_both_tables_say() {
    with_guest(1, 64, |guest| {
        let shadow = guest.pick(ONE);
        let walked = |canonical, order, access| Walked { canonical: gfn(canonical), order, access };
        // Cut by the guest's leaf, by the canonical one, by blocks that do not line up.
        let cases = [
            (0x1000, walked(1024, 0, Access::ALL), 0),
            (0x2000, walked(512, 9, Access::ALL), 0),
            (0x3000, walked(1024, 9, Access::READ), 9),
            (0x4001, walked(1024, 9, Access::ALL), 0),
            (0x5123, walked(1536 + 0x123, 9, Access::READ_WRITE), 9),
        ];
        for (nested, walked, order) in cases {
            assert_eq!(guest.fill(&shadow, nested, walked), Run::block(gfn(nested), order));
            let root = guest.nested.root(&shadow).expect("open");
            let tables = Tables { root, ..guest.nested.p2m.tables() };
            let (leaf, mfn) = stage2::lookup(tables, gfn(nested))
                .and_then(|found| found.leaf_at(gfn(nested)))
                .expect("just filled");
            assert_eq!((leaf.access, mfn.get() - BASE), (walked.access, walked.canonical.get()));
        }
        // What the canonical map does not allow, no shadow does.
        let (lowered, _) = owed_by(|skipped| {
            let rest = Rest::new(run(30, 30));
            guest.nested.restrict(rest, Access::READ, &mut unlimited(), skipped).is_ok()
        });
        assert!(lowered);
        guest.fill(&shadow, 0x8000, page(30));
        let root = guest.nested.root(&shadow).expect("open");
        let found = stage2::lookup(Tables { root, ..guest.nested.p2m.tables() }, gfn(0x8000));
        let leaf = found.and_then(|found| found.leaf_at(gfn(0x8000)));
        assert_eq!(leaf.map(|(leaf, _)| leaf.access), Some(Access::READ));
        // Between small leaves a large one is filled small; over a large one the old goes.
        guest.fill(&shadow, 0x6000, page(9));
        let large = walked(1024 + 1, 9, Access::ALL);
        assert_eq!(guest.fill(&shadow, 0x6001, large), run(0x6001, 0x6001));
        let (filled, owed) = guest.try_fill(&shadow, 0x3005, page(17));
        assert_eq!(filled, Ok(run(0x3005, 0x3005)));
        check_everything(&owed);
        // The same again changes nothing and owes nothing.
        let fills = guest.nested.counts().fills;
        let (filled, owed) = guest.try_fill(&shadow, 0x3005, page(17));
        assert_eq!(filled, Ok(run(0x3005, 0x3005)));
        assert!(owed.tlb.is_nothing());
        assert_eq!(guest.nested.counts().fills, fills);
        guest.check_records();

        let refused = [
            (0x7000, page(4096), FillError::NotMapped),
            (1 << 36, page(1), FillError::OutOfRange),
            (
                0x7000,
                walked(1, 0, Access::NONE),
                FillError::Unencodable(stage2::Unencodable::Access),
            ),
        ];
        for (nested, walked, error) in refused {
            assert_eq!(guest.try_fill(&shadow, nested, walked).0, Err(error));
        }
        guest.check_records();
    });
}

#[test]
fn a_fill_that_fails_leaves_no_record() {
    with_guest(1, 64, |guest| {
        let shadow = guest.pick(ONE);
        guest.heap.stock.set(1);
        assert_eq!(guest.try_fill(&shadow, 0x100, page(1)).0, Err(FillError::NoTable));
        assert_eq!(guest.nested.reverse.records().count(), 0);
        guest.check_records();
    });
}

#[test]
fn without_room_for_a_record_the_whole_shadow_goes_once_it_may_show_a_change() {
    with_guest(2, 3, |guest| {
        let (one, two) = (guest.pick(ONE), guest.pick(TWO));
        guest.fill(&two, 0x100, page(100));
        for canonical in [10, 11, 20, 30] {
            guest.fill(&one, 0x200 + canonical, page(canonical));
        }
        assert_eq!(guest.nested.counts().unrecorded, 2);
        guest.check_records();

        // Frame 10 is known and 50 is not shown: both are outside what is unknown.
        for canonical in [10, 50] {
            assert_eq!(guest.clear(canonical, &mut unlimited()).0, Ok(()));
        }
        assert_eq!(guest.shows(&one).len(), 3);
        assert_eq!(guest.nested.counts().unknown, 0);

        // Frame 25 is not shown either, but that is not known.
        assert_eq!(guest.clear(25, &mut unlimited()).0, Ok(()));
        assert_eq!(guest.shows(&one).len(), 0);
        assert_eq!(guest.shows(&two).len(), 1);
        let NestedCounts { precise, swept, unknown, .. } = guest.nested.counts();
        assert_eq!((precise, swept, unknown), (1, 3, 1));
        guest.check_records();

        // All is known again, and the shadow is open.
        guest.fill(&one, 0x200, page(20));
        assert_eq!(guest.nested.counts().unrecorded, 2);
        assert_eq!(guest.clear(26, &mut unlimited()).0, Ok(()));
        assert_eq!(guest.shows(&one).len(), 1);
        guest.check_records();
    });
}

#[test]
fn nothing_canonical_changes_before_all_that_shows_it_is_gone() {
    for (records, budget) in [(64, 1), (0, 150)] {
        with_guest(1, records, |guest| {
            let shadow = guest.pick(ONE);
            for nested in 0..6 {
                guest.fill(&shadow, 0x300 * nested, page(5));
            }
            let mut stops = 0;
            loop {
                let (cleared, owed) = guest.clear(5, &mut Budget::new(budget));
                guest.check_records();
                if cleared == Ok(()) {
                    check_everything(&owed);
                    break;
                }
                assert_eq!(cleared, Err(Refused::Shadows(Stop::Budget)));
                assert!(guest.nested.p2m().get(gfn(5)).is_some());
                stops += 1;
                // Half unmapped: nothing comes back into the part that is done.
                let filled = guest.try_fill(&shadow, 0x9_0000, page(5)).0;
                let open = guest.nested.root(&shadow).is_some();
                let refused = if open { FillError::Barred } else { FillError::Pending };
                assert_eq!(filled, Err(refused));
            }
            assert!(stops >= 5);
            assert_eq!(guest.shows(&shadow).len(), 0);
            assert_eq!(guest.nested.p2m().get(gfn(5)), None);
        });
    }
}

#[test]
fn a_record_without_a_leaf_goes_with_the_change_or_with_its_shadow() {
    with_guest(1, 64, |guest| {
        let shadow = guest.pick(ONE);
        let stray = |nested| Shown { shadow: 0, order: 0, nested: gfn(nested), canonical: gfn(5) };
        for nested in [0x100, 0x200] {
            assert!(guest.nested.reverse.insert(stray(nested)));
            guest.nested.shadows[0].recorded += 1;
        }
        assert_eq!(guest.clear(5, &mut unlimited()).0, Ok(()));
        guest.check_records();

        assert!(guest.nested.reverse.insert(stray(0x300)));
        guest.nested.shadows[0].recorded += 1;
        let flush = guest.nested.begin_flush(Scope::Context(ONE));
        let mut batch: Batch<Wiped, 1> = Batch::new(DOMAIN);
        let held = batch.hold(|skipped| {
            guest.nested.flush_step(&flush, &mut unlimited(), Emptied::Free, skipped)
        });
        assert_eq!(held, Ok(()));
        guest.open(&mut batch);
        guest.check_records();
        assert!(guest.nested.root(&shadow).is_some());
    });
}

#[test]
fn a_guest_without_shadows_owes_exactly_what_it_changed() {
    with_guest(1, 4, |guest| {
        let (cleared, owed) = guest.clear(5, &mut Budget::new(0));
        assert_eq!(cleared, Ok(()));
        assert_eq!(owed.tlb.extent(), Extent::Runs(&[run(5, 5)]));
        // From the first shadow on it is everything, as long as there are shadows or not.
        let shadow = guest.pick(ONE);
        guest.nested.leave(shadow);
        check_everything(&guest.clear(6, &mut unlimited()).1);
        let read_only = |guest: &mut Guest<'_>| {
            let (mfn, kind) = (expected(8).mfn, PageKind::RamReadOnly);
            let set = |skipped: &mut Skipped<'_>| {
                guest.nested.set(gfn(8), 0, mfn, kind, &mut unlimited(), skipped).map(drop)
            };
            let (set, owed) = owed_by(set);
            assert_eq!(set, Ok(()));
            owed
        };
        check_everything(&read_only(guest));
        assert!(read_only(guest).tlb.is_nothing(), "nothing changes");
        let (restricted, owed) = owed_by(|skipped| {
            let rest = Rest::new(run(20, 21));
            guest.nested.restrict(rest, Access::READ, &mut unlimited(), skipped).is_ok()
        });
        assert!(restricted);
        check_everything(&owed);
        let (closed, _) = owed_by(|skipped| guest.nested.close(&mut unlimited(), skipped));
        assert_eq!(closed, Ok(()));
        check_everything(&guest.clear(7, &mut unlimited()).1);
        let (refused, owed) = guest.clear(7, &mut unlimited());
        assert_eq!(refused, Err(Refused::Canonical(ClearError::Absent)));
        assert!(owed.tlb.is_nothing());
    });
}

#[test]
fn a_flush_of_nothing_is_one_flush_of_everything() {
    for (shadows, scope) in [
        (0, Scope::AllContexts),
        (2, Scope::AllContexts),
        (0, Scope::Context(ONE)),
        (2, Scope::Context(ONE)),
        (2, Scope::Context(TWO)),
    ] {
        with_guest(2, 4, |guest| {
            for context in [ONE, TWO].into_iter().take(shadows) {
                let shadow = guest.pick(context);
                guest.nested.leave(shadow);
            }
            let flush = guest.nested.begin_flush(scope);
            let mut batch: Batch<Wiped, 1> = Batch::new(DOMAIN);
            let budget = &mut Budget::new(512 * shadows as u64);
            let held = batch
                .hold(|skipped| guest.nested.flush_step(&flush, budget, Emptied::Free, skipped));
            assert_eq!(held, Ok(()), "an empty root is all there is to read");
            assert_eq!(batch.tlb().extent(), Extent::Everything);
            assert!(batch.iotlb().is_nothing());
            let hardware = Hardware { tlb: &Cpus { fail: false }, iotlb: &NoIommu };
            let mut flushed = batch.flush(&hardware).expect("these CPUs do not fail");
            assert!(flushed.report().tlb);
            let wiped = flushed.next_page().expect("the end of the flush");
            let marked = if scope == Scope::AllContexts { shadows } else { shadows / 2 };
            assert_eq!(guest.nested.open(wiped), marked);
        });
    }
}

/// Fills two contexts over many tables, flushes `scope` in steps of `budget` entries.
#[track_caller]
fn check_flush(scope: Scope, pages: u64, budget: u64, emptied: Emptied) {
    with_guest(2, 256, |guest| {
        let users = [guest.pick(ONE), guest.pick(TWO)];
        let empty = guest.heap.pages();
        for (shadow, offset) in users.iter().zip([0, 7]) {
            for number in 0..pages {
                guest.fill(shadow, (number << 18) + offset, page(number));
            }
        }
        let filled = guest.heap.pages() - empty;
        let stale: Vec<_> = users.iter().map(|shadow| guest.nested.ticket(shadow)).collect();
        let flush = guest.nested.begin_flush(scope);
        let mut batch: Batch<Wiped, 2> = Batch::new(DOMAIN);
        let (mut steps, mut tables) = (0, 0);
        loop {
            steps += 1;
            let held = batch.hold(|skipped| {
                guest.nested.flush_step(&flush, &mut Budget::new(budget), emptied, skipped)
            });
            match held {
                Ok(()) => break,
                Err(HoldError::Edit(Stop::Full)) => tables += guest.open(&mut batch),
                Err(HoldError::Edit(Stop::Budget)) => {
                    let pending = guest.try_fill(&users[0], 5, page(5)).0;
                    assert_eq!(pending, Err(FillError::Pending));
                    if steps % 997 == 0 {
                        guest.check_records();
                    }
                }
                Err(other) => panic!("{other:?}"),
            }
        }
        assert!(guest.nested.root(&users[0]).is_none(), "not before the flush");
        tables += guest.open(&mut batch);
        guest.check_records();
        let gone = if scope == Scope::AllContexts { 2 } else { 1 };
        for (number, shadow) in users.iter().enumerate() {
            let left = if number < gone { 0 } else { pages as usize };
            assert_eq!(guest.shows(shadow).len(), left);
            assert!(guest.nested.root(shadow).is_some());
            // What was read before the flush was asked for is not believed any more.
            let (again, _) = owed_by(|skipped| {
                guest.nested.fill(shadow, stale[number], gfn(1), page(1), skipped)
            });
            let refused = if number < gone { Some(FillError::Stale) } else { None };
            assert_eq!(again.err(), refused);
        }
        let freed = if emptied == Emptied::Free { gone * filled / 2 } else { 0 };
        assert_eq!(tables, freed);
        assert!(steps > 1 || budget > 40_000);
    });
}

#[test]
fn a_flush_in_steps_of_any_size_ends_the_same() {
    for scope in [Scope::Context(ONE), Scope::AllContexts] {
        for emptied in [Emptied::Keep, Emptied::Free] {
            for budget in [1000, 4097, u64::MAX] {
                check_flush(scope, 45, budget, emptied);
            }
        }
        check_flush(scope, 3, 1, Emptied::Free);
    }
}

#[test]
fn a_recycled_shadow_shows_nothing_and_opens_after_its_flush_whoever_helps() {
    with_guest(1, 64, |guest| {
        let first = guest.pick(ONE);
        for number in 0..8 {
            guest.fill(&first, number << 9, page(number));
        }
        assert_eq!(guest.nested.pick(TWO), Err(PickError::AllInUse));
        guest.nested.leave(first);

        // Two vCPUs of the new context find it marked.
        let one = guest.nested.pick(TWO).expect("nobody uses it");
        let other = guest.nested.pick(TWO).expect("the same one");
        assert_eq!(guest.nested.counts().recycled, 1);
        assert_eq!((guest.nested.root(&one), guest.nested.root(&other)), (None, None));
        let mut batches = [Batch::<Wiped, 1>::new(DOMAIN), Batch::new(DOMAIN)];
        // They take turns, a few entries each, until both are told that all is done.
        let mut done = [false, false];
        let mut turns = 0;
        while done != [true, true] {
            let turn = turns % 2;
            turns += 1;
            if done[turn] {
                continue;
            }
            let budget = &mut Budget::new(300);
            let shadow = [&one, &other][turn];
            let held = batches[turn]
                .hold(|skipped| guest.nested.prepare(shadow, budget, Emptied::Keep, skipped));
            done[turn] = held == Ok(());
            assert_eq!(guest.nested.root(shadow), None, "not flushed");
            assert_eq!(guest.try_fill(shadow, 1, page(1)).0, Err(FillError::Pending));
        }
        assert!(turns > 4);
        assert_eq!(guest.shows(&one).len(), 0);
        guest.check_records();

        // The flush of the first fails: the mark stays.
        let [mut failing, mut working] = batches;
        let hardware = Hardware { tlb: &Cpus { fail: true }, iotlb: &NoIommu };
        let failure = failing.flush(&hardware).expect_err("these CPUs fail");
        assert_eq!(guest.nested.root(&one), None);
        // The second batch covers what the first unmapped.
        guest.open(&mut working);
        assert!(guest.nested.root(&one).is_some());
        assert_eq!(guest.nested.root(&one), guest.nested.root(&other));
        // A late end of the first finds nothing to do.
        let mut held = failure.held;
        let hardware = Hardware { tlb: &Cpus { fail: false }, iotlb: &NoIommu };
        let mut flushed = held.retry(&hardware).expect("they work again");
        let wiped = flushed.next_page().expect("held");
        assert_eq!(guest.nested.open(wiped), 0);
        guest.fill(&other, 1, page(1));
    });
}

#[test]
fn a_walk_that_ended_before_an_unmap_began_does_not_open_it() {
    with_guest(1, 64, |guest| {
        let shadow = guest.pick(ONE);
        let old = guest.nested.begin_flush(Scope::AllContexts);
        let mut early: Batch<Wiped, 1> = Batch::new(DOMAIN);
        let held = early.hold(|skipped| {
            guest.nested.flush_step(&old, &mut unlimited(), Emptied::Free, skipped)
        });
        assert_eq!(held, Ok(()));
        // Another vCPU opens it meanwhile, fills it, and the guest flushes once more.
        guest.prepare(&shadow);
        guest.fill(&shadow, 1, page(1));
        let new = guest.nested.begin_flush(Scope::AllContexts);
        guest.open(&mut early);
        assert_eq!(guest.nested.root(&shadow), None);
        assert_eq!(guest.nested.shadows[0].unflushed, Some(Unflushed::Walking));
        let mut late: Batch<Wiped, 1> = Batch::new(DOMAIN);
        let held = late.hold(|skipped| {
            guest.nested.flush_step(&new, &mut unlimited(), Emptied::Free, skipped)
        });
        assert_eq!(held, Ok(()));
        guest.open(&mut late);
        assert!(guest.nested.root(&shadow).is_some());
        assert_eq!(guest.shows(&shadow).len(), 0);
    });
}

#[test]
fn a_table_that_was_empty_before_owes_everything_when_it_goes() {
    with_guest(1, 64, |guest| {
        let shadow = guest.pick(ONE);
        guest.fill(&shadow, 0, page(5));
        assert_eq!(guest.clear(5, &mut unlimited()).0, Ok(()));
        let flush = guest.nested.begin_flush(Scope::AllContexts);
        let mut batch: Batch<Wiped, 1> = Batch::new(DOMAIN);
        // As far as the end of the lowest table, and no further.
        let held = batch.hold(|skipped| {
            guest.nested.flush_step(&flush, &mut Budget::new(600), Emptied::Free, skipped)
        });
        assert_eq!(held, Err(HoldError::Edit(Stop::Budget)));
        assert_eq!(batch.tlb().extent(), Extent::Everything);
        assert_eq!(guest.open(&mut batch), 1);
    });
}

#[test]
fn a_root_that_may_have_been_anothers_is_used_only_after_a_flush() {
    with_guest(1, 64, |guest| {
        let shadow = guest.nested.pick(ONE).expect("vacant");
        assert_eq!(guest.nested.root(&shadow), None);
        assert_eq!(guest.try_fill(&shadow, 1, page(1)).0, Err(FillError::Pending));
        guest.prepare(&shadow);
        assert_eq!(guest.nested.root(&shadow), guest.nested.roots().next());
    });
}

#[test]
fn the_shadow_picked_longest_ago_is_recycled() {
    with_guest(2, 64, |guest| {
        for context in [ONE, TWO, ONE] {
            let shadow = guest.pick(context);
            guest.nested.leave(shadow);
        }
        let third = guest.pick(Context(3));
        let one = guest.pick(ONE);
        assert_eq!(guest.nested.counts().recycled, 1, "context one was still there");
        assert_eq!(guest.nested.pick(TWO), Err(PickError::AllInUse));
        guest.nested.leave(third);
        guest.nested.leave(one);
        guest.heap.stock.set(0);
        assert!(guest.nested.pick(TWO).is_ok());
    });
    with_guest(1, 64, |guest| {
        guest.heap.stock.set(0);
        assert_eq!(guest.nested.pick(TWO), Err(PickError::NoTable));
    });
}

#[test]
fn a_shadow_of_another_guest_is_refused() {
    with_guest(1, 4, |guest| {
        let own = guest.pick(ONE);
        let alien = InUse { slot: own.slot, guest: Mfn::new(1) };
        assert_eq!(guest.nested.root(&alien), None);
        let ticket = guest.nested.ticket(&alien);
        let (filled, _) =
            owed_by(|skipped| guest.nested.fill(&alien, ticket, gfn(1), page(1), skipped));
        assert_eq!(filled, Err(FillError::Stale));
        guest.nested.leave(alien);
        assert_eq!(guest.nested.shadows[0].users, 1);
        guest.nested.leave(own);
    });
}

#[test]
fn closing_returns_every_table_once_in_any_steps() {
    for budget in [1, 700, u64::MAX] {
        with_guest(2, 16, |guest| {
            let canonical = guest.heap.pages();
            for context in [ONE, TWO] {
                let shadow = guest.pick(context);
                for number in 0..20 {
                    guest.fill(&shadow, number << 18, page(number));
                }
                let (closed, _) = owed_by(|skipped| guest.nested.close(&mut unlimited(), skipped));
                assert_eq!(closed, Err(CloseError::InUse));
                guest.nested.leave(shadow);
            }
            // A flush that was left half done kept the tables that it emptied.
            let flush = guest.nested.begin_flush(Scope::AllContexts);
            let (stopped, _) = owed_by(|skipped| {
                let budget = &mut Budget::new(3000);
                guest.nested.flush_step(&flush, budget, Emptied::Keep, skipped).map(drop)
            });
            assert_eq!(stopped, Err(Stop::Budget));
            let shadows = guest.heap.pages() - canonical;
            let mut batch: Batch<Wiped, 1> = Batch::new(DOMAIN);
            let mut tables = 0;
            loop {
                let ended = batch
                    .edit_many(|skipped, _| guest.nested.close(&mut Budget::new(budget), skipped));
                match ended {
                    Ok(()) => break,
                    Err(CloseError::Stopped(Stop::Budget)) => {}
                    Err(CloseError::Stopped(Stop::Full)) => tables += guest.open(&mut batch),
                    Err(other) => panic!("{other:?}"),
                }
            }
            tables += guest.open(&mut batch);
            assert_eq!((tables, guest.heap.pages()), (shadows, canonical));
            assert_eq!(guest.nested.reverse.records().count(), 0);
            assert_eq!(guest.nested.roots().count(), 0);
        });
    }
}

/// Symptom: a fresh shadow opened without a flush. Cause: a proof of the guest's earlier
/// shadows counted from the same start. Cure: the seed tells them apart.
#[test]
fn a_proof_of_earlier_shadows_opens_none_of_the_later_ones() {
    let heap = Heap::new(400);
    let mut storage = [Shadow::VACANT];
    let mut entries = vec![ReverseEntry::EMPTY; 4];
    let p2m = P2m::<_, _, Tlb>::new(EPT, &heap).expect("a root");
    let mut nested = Nested::new(p2m, &mut storage, &mut entries, 1);
    let mut old: Batch<Wiped, 1> = Batch::new(DOMAIN);
    let shadow = nested.pick(ONE).expect("vacant");
    let held =
        old.hold(|skipped| nested.prepare(&shadow, &mut unlimited(), Emptied::Keep, skipped));
    assert_eq!(held, Ok(()));
    let hardware = Hardware { tlb: &Cpus { fail: false }, iotlb: &NoIommu };
    let mut flushed = old.flush(&hardware).expect("works");
    nested.leave(shadow);
    let (closed, _) = owed_by(|skipped| nested.close(&mut unlimited(), skipped));
    assert_eq!(closed, Ok(()));
    let p2m = nested.into_p2m().ok().expect("closed");
    let mut again = [Shadow::VACANT];
    let mut more = vec![ReverseEntry::EMPTY; 4];
    let mut nested = Nested::new(p2m, &mut again, &mut more, 2);
    let shadow = nested.pick(ONE).expect("vacant");
    nested.open(flushed.next_page().expect("held"));
    assert_eq!(nested.root(&shadow), None, "opened by a flush from before it was there");
}

/// What an edit is to be done to, and how.
type Edit = fn(&mut Guest<'_>, Run, &mut Budget) -> Result<(), Option<Run>>;

/// Clears each frame; what is left is the caller's to remember.
fn clear_first(guest: &mut Guest<'_>, run: Run, budget: &mut Budget) -> Result<(), Option<Run>> {
    match guest.clear(run.first().get(), budget).0 {
        Ok(()) if run.first() == run.last() => Ok(()),
        Ok(()) => Err(Run::new(gfn(run.first().get() + 1), run.last())),
        Err(Refused::Shadows(Stop::Budget)) => Err(Some(run)),
        Err(other) => panic!("{other:?}"),
    }
}

fn stopped(result: Result<(), Stopped>) -> Result<(), Option<Run>> {
    result.map_err(|stopped| {
        assert_eq!(stopped.stop, Stop::Budget);
        Some(stopped.rest.run())
    })
}

fn clear_all(guest: &mut Guest<'_>, run: Run, budget: &mut Budget) -> Result<(), Option<Run>> {
    let (ended, _) = owed_by(|skipped| {
        let rest = Rest::new(run);
        guest.nested.clear_range(rest, budget, Emptied::Free, skipped, Unheld).map(drop)
    });
    stopped(ended)
}

fn restrict_all(guest: &mut Guest<'_>, run: Run, budget: &mut Budget) -> Result<(), Option<Run>> {
    let (ended, _) = owed_by(|skipped| {
        guest.nested.restrict(Rest::new(run), Access::READ, budget, skipped).map(drop)
    });
    stopped(ended)
}

/// Edits `run` in steps of `budget`, while the guest refills all it can between them.
/// Returns the number of steps.
#[track_caller]
fn check_refilled(records: usize, budget: u64, changed: Run, edit: Edit) -> u32 {
    let mut steps = 0;
    with_guest(2, records, |guest| {
        let users = [guest.pick(ONE), guest.pick(TWO)];
        let mut rest = changed;
        loop {
            for shadow in &users {
                for number in 0..24 {
                    // Frames of both sides of the range, and of the next piece.
                    let walked = page([3, 4, 5, 6, 7, 515][number as usize % 6]);
                    drop(guest.try_fill(shadow, 0x100 + 0x200 * number, walked));
                }
            }
            if steps % 16 == 0 {
                guest.check_records();
            }
            steps += 1;
            assert!(steps < 5000, "no progress, {rest:?} is left");
            match edit(guest, rest, &mut Budget::new(budget)) {
                Ok(()) => break,
                Err(left) => rest = left.expect("something is left"),
            }
        }
        guest.check_records();
        // Afterwards nothing is kept from the guest.
        for canonical in [3, 7] {
            let filled = guest.try_fill(&users[0], 0x9_0000 + canonical, page(canonical)).0;
            assert!(matches!(filled, Ok(_) | Err(FillError::NotMapped | FillError::Pending)));
        }
        assert!(guest.nested.bars.shown_from(changed).is_some_and(|at| at == changed.first()));
    });
    steps
}

/// Symptom: an edit with a small budget never ended while a nested guest went on faulting.
/// Cause: between two calls a fill put back what the first had unmapped. Cure: no fill
/// shows the frames of an edit that is under way.
#[test]
fn a_guest_that_refills_holds_off_no_edit() {
    for records in [0, 7, 64] {
        for budget in [1, 3] {
            for (changed, edit) in [
                (run(5, 5), clear_first as Edit),
                (run(4, 6), clear_first),
                (run(4, 6), clear_all),
                (run(500, 530), clear_all),
                (run(4, 6), restrict_all),
                (run(500, 1600), restrict_all),
            ] {
                let budget = if records < 64 { 400 * budget } else { budget };
                check_refilled(records, budget, changed, edit);
            }
        }
    }
}

#[test]
fn what_is_given_up_is_filled_again() {
    with_guest(1, 64, |guest| {
        let shadow = guest.pick(ONE);
        for nested in 0..3 {
            guest.fill(&shadow, nested, page(5));
        }
        let refused = Err(Refused::Shadows(Stop::Budget));
        assert_eq!(guest.clear(5, &mut Budget::new(1)).0, refused);
        assert_eq!(guest.try_fill(&shadow, 9, page(5)).0, Err(FillError::Barred));
        guest.fill(&shadow, 9, page(6));
        // An edit of another frame is no end of this one.
        assert_eq!(guest.clear(7, &mut unlimited()).0, Ok(()));
        assert_eq!(guest.try_fill(&shadow, 9, page(5)).0, Err(FillError::Barred));
        guest.nested.give_up(run(5, 5));
        guest.fill(&shadow, 9, page(5));
        guest.check_records();
    });
}

#[test]
fn beside_a_barred_frame_a_large_leaf_is_filled_small() {
    with_guest(1, 64, |guest| {
        let shadow = guest.pick(ONE);
        for nested in 0..3 {
            guest.fill(&shadow, nested, page(1024 + 8));
        }
        let refused = Err(Refused::Shadows(Stop::Budget));
        assert_eq!(guest.clear(1024 + 8, &mut Budget::new(1)).0, refused);
        let large =
            |offset: u64| Walked { canonical: gfn(1024 + offset), order: 9, access: Access::ALL };
        assert_eq!(guest.fill(&shadow, 0x4_0009, large(9)), run(0x4_0009, 0x4_0009));
        assert_eq!(guest.try_fill(&shadow, 0x4_0008, large(8)).0, Err(FillError::Barred));
        guest.check_records();
    });
}

/// How much of the reverse map one of the budget may make an edit look at: a piece of 512
/// frames at the smallest order, a block for each larger one, and the record of another
/// frame in each bucket that a full map has on average, twice over.
const LOOKS: u64 = 2048;

#[track_caller]
fn check_bounded(entries: usize, changed: Run, budget: u64, edit: Edit) {
    with_guest(1, entries, |guest| {
        let shadow = guest.pick(ONE);
        for number in 0..1000 {
            drop(guest.try_fill(&shadow, 7 * number, page(number)));
        }
        // One leaf of many pieces, which is edited at once.
        let (set, _) = owed_by(|skipped| {
            let (mfn, budget) = (Mfn::new(BASE + (1 << 18)), &mut unlimited());
            guest.nested.set(gfn(1 << 18), 18, mfn, RAM, budget, skipped).map(drop)
        });
        assert_eq!(set, Ok(()));
        drop(guest.try_fill(&shadow, 0x1_0000, page((1 << 19) - 1)));
        let (mut rest, mut calls) = (Some(changed), 0);
        while let Some(run) = rest {
            let before = guest.nested.counts();
            rest = edit(guest, run, &mut Budget::new(budget)).err().flatten();
            let searched = guest.nested.counts().searched - before.searched;
            assert!(searched <= LOOKS * budget, "{searched} for {budget} in {run:?}");
            let reads = guest.nested.counts().reads - before.reads;
            assert!(reads <= 8 * budget, "{reads} read for {budget} in {run:?}");
            calls += 1;
            assert!(calls < 20_000, "no progress in {run:?}");
        }
        guest.check_records();
    });
}

/// Symptom: an edit with a budget of 1 held the lock for 50 ms. Cause: it searched the
/// reverse map for every frame of its range, and that cost nothing. Cure: it goes in
/// pieces, each of which costs one.
#[test]
fn a_budget_bounds_how_much_a_call_looks_at() {
    for entries in [100, 600, 1 << 14] {
        for budget in [1, 5, 100] {
            check_bounded(entries, run(0, 0x8_ffff), budget, clear_all);
            check_bounded(entries, run(3, 0x8_ffff), budget, restrict_all);
            check_bounded(entries, run(1030, 1600), budget, restrict_all);
        }
    }
}

#[test]
fn a_large_page_is_set_in_steps_and_not_split_by_a_range() {
    with_guest(1, 1 << 12, |guest| {
        const HUGE: u64 = 1 << 18;
        let shadow = guest.pick(ONE);
        let set = |guest: &mut Guest<'_>, kind, budget| {
            let set = owed_by(|skipped| {
                let budget = &mut Budget::new(budget);
                let mfn = Mfn::new(BASE + HUGE);
                guest.nested.set(gfn(HUGE), 18, mfn, kind, budget, skipped).map(drop)
            });
            set.0
        };
        let mut steps = 0;
        while set(guest, RAM, 1) == Err(Refused::Shadows(Stop::Budget)) {
            steps += 1;
            assert!(steps < 600, "no progress");
        }
        assert_eq!(steps, 511, "a piece each, and the last is free");
        for number in 0..20 {
            guest.fill(&shadow, number, page(HUGE + 0x1000 * number));
        }
        let before = guest.heap.pages();
        let mut rest = Some(run(HUGE, 2 * HUGE - 1));
        let mut steps = 0;
        while let Some(run) = rest {
            rest = restrict_all(guest, run, &mut Budget::new(7)).err().flatten();
            // The guest fills what it can, but not what the edit has unmapped.
            let filled = guest.try_fill(&shadow, 100, page(HUGE)).0;
            assert_eq!(filled == Err(FillError::Barred), rest.is_some());
            steps += 1;
            assert!(steps < 200, "no progress");
        }
        assert_eq!(guest.heap.pages(), before, "no table for a split");
        let was = guest.nested.p2m().get(gfn(HUGE)).expect("mapped");
        assert_eq!((was.run.pages(), was.access), (HUGE, Access::READ));
        // What can never be is refused at once.
        let refused = owed_by(|skipped| {
            let (mfn, budget) = (Mfn::new(0), &mut Budget::new(1));
            guest.nested.set(gfn(0), 63, mfn, RAM, budget, skipped).map(drop)
        });
        assert_eq!(refused.0, Err(Refused::Canonical(SetError::Order(63))));
        let beyond = Rest::new(run(0, 1 << 36));
        let (refused, _) = owed_by(|skipped| {
            guest.nested.restrict(beyond, Access::READ, &mut unlimited(), skipped)
        });
        let refused = refused.expect_err("beyond the space");
        assert_eq!((refused.stop, refused.tally.leaves), (Stop::OutOfRange, 0));
    });
}
