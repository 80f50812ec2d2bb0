//! Edits in steps, while a nested guest refills what they unmap.

use super::*;

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
