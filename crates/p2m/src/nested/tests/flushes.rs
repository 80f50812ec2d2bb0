//! A flush of a whole nested space, in steps of any size.

use super::*;

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
