//! Shadows: picked, recycled, opened after their flush, and closed.

use super::*;

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
