//! A canonical change: what goes with it, what is recorded, what stays.

use super::*;

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
