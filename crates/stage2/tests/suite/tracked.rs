//! Tracked mappings against a sorted map, and the loop over them.

use std::collections::BTreeMap;
use std::ops::ControlFlow;

use flush::{Gfn, Run};
use proptest::prelude::*;
use stage2::{
    Budget, Chunk, Halt, Pace, Refused, Rest, Slot, Stops, Sweep, SweepStopped, Tracked, chunked,
};

fn run(first: u64, last: u64) -> Run {
    Run::new(Gfn::new(first), Gfn::new(last)).unwrap()
}

type Small = Tracked<u64, [Slot<u64>; 24]>;

fn small() -> Small {
    Tracked::new([Slot::VACANT; 24])
}

fn contents<S: AsRef<[Slot<u64>]> + AsMut<[Slot<u64>]>>(tree: &Tracked<u64, S>) -> Vec<(Run, u64)> {
    let mut all = Vec::new();
    let mut at = Some(Gfn::new(0));
    while let Some((run, value)) = at.and_then(|at| tree.first_from(at)) {
        all.push((run, *value));
        at = run.last().get().checked_add(1).map(Gfn::new);
    }
    all
}

/// Every value that fails to be released is odd.
fn even_only(_: Run, value: u64) -> Result<(), u64> {
    if value.is_multiple_of(2) { Ok(()) } else { Err(value) }
}

#[test]
fn the_next_mapping_is_one_past_the_range_or_none() {
    let mut tree = small();
    for (first, last) in [(10, 19), (20, 20), (30, 39), (u64::MAX - 1, u64::MAX)] {
        tree.insert(run(first, last), 0).unwrap();
    }
    let next = |first, last| tree.next_past(run(first, last)).map(Gfn::get);
    assert_eq!(next(0, 9), Some(10));
    assert_eq!(next(0, 10), Some(20)); // not the one that it cuts
    assert_eq!(next(0, 19), Some(20));
    assert_eq!(next(12, 12), Some(20));
    assert_eq!(next(0, 20), Some(30));
    assert_eq!(next(39, 100), Some(u64::MAX - 1));
    assert_eq!(next(0, u64::MAX - 1), None);
    assert_eq!(next(0, u64::MAX), None);
    assert_eq!(small().next_past(run(0, 0)), None);
}

#[test]
fn an_overlap_or_a_lack_of_slots_is_refused_with_the_value() {
    let mut tree: Tracked<u64, [Slot<u64>; 2]> = Tracked::new([Slot::VACANT; 2]);
    tree.insert(run(10, 19), 1).unwrap();
    for (first, last) in [(0, 10), (10, 19), (12, 13), (19, 30), (0, u64::MAX)] {
        let refused = tree.insert(run(first, last), 7);
        assert_eq!(refused, Err(Refused::Overlaps(7, run(10, 19))));
    }
    tree.insert(run(20, 20), 2).unwrap();
    assert_eq!(tree.insert(run(0, 0), 7), Err(Refused::Full(7)));
    assert_eq!(tree.remove(Gfn::new(15)), Some((run(10, 19), 1)));
    assert_eq!(tree.remove(Gfn::new(15)), None);
    tree.insert(run(0, 0), 7).unwrap();
    assert_eq!(contents(&tree), [(run(0, 0), 7), (run(20, 20), 2)]);
}

#[test]
fn a_failed_release_stays_and_the_sweep_ends() {
    let mut tree = small();
    for (index, first) in [0u64, 10, 20, 30, 40].into_iter().enumerate() {
        tree.insert(run(first, first + 9), index as u64).unwrap();
    }
    let swept = tree.release(Rest::new(run(5, 34)), &mut Budget::UNLIMITED.clone(), even_only);
    assert_eq!(swept, Ok(Sweep { released: 2, failed: 2, next: Some(Gfn::new(40)) }));
    let left = [(run(10, 19), 1), (run(30, 39), 3), (run(40, 49), 4)];
    assert_eq!(contents(&tree), left);
    // Nothing but failures: again an answer, and none of them.
    let swept = tree.release(Rest::new(run(0, 39)), &mut Budget::UNLIMITED.clone(), even_only);
    assert_eq!(swept.unwrap().reached(), Gfn::new(39));
    let all = Rest::new(Run::ALL);
    let swept = tree.release(all, &mut Budget::UNLIMITED.clone(), even_only).unwrap();
    assert_eq!((swept.released, swept.failed, swept.next), (1, 2, None));
    assert_eq!(swept.reached(), Gfn::new(u64::MAX));
}

/// Releases all of 2^36 frames in chunks; returns walks and failures.
fn loop_over(tree: &mut Small, pace: Pace) -> (u64, u64) {
    struct State<'t>(&'t mut Small, u64);
    let walk = |state: &mut State<'_>, rest| {
        let swept = state.0.release(rest, &mut Budget::UNLIMITED.clone(), even_only)?;
        state.1 += swept.failed;
        Ok::<_, SweepStopped>(swept.reached())
    };
    let go_on = |_: &mut State<'_>, _| ControlFlow::Continue(());
    let mut state = State(tree, 0);
    let all = Rest::new(Run::block(Gfn::new(0), 36));
    let walks = chunked(all, Chunk::new(24), pace, &mut state, walk, go_on).unwrap();
    (walks, state.1)
}

#[test]
fn the_loop_jumps_from_mapping_to_mapping_and_ends_despite_failures() {
    // One walk for each chunk would try the mapping across the border twice.
    for (pace, walks, failures) in [(Pace::Resume, 3, 3), (Pace::EveryChunk, 4096, 4)] {
        let mut tree = small();
        // Two in one chunk, one across a border, one at the end; odd ones fail.
        tree.insert(run(5, 6), 1).unwrap();
        tree.insert(run(9, 9), 2).unwrap();
        tree.insert(run((7 << 24) - 2, (7 << 24) + 1), 3).unwrap();
        tree.insert(run((1 << 36) - 1, (1 << 36) - 1), 5).unwrap();
        assert_eq!(loop_over(&mut tree, pace), (walks, failures));
        assert_eq!(tree.len(), 3);
    }
    assert_eq!(loop_over(&mut small(), Pace::Resume), (1, 0));
}

#[test]
fn a_sweep_of_any_budget_ends_like_a_whole_one() {
    let filled = || {
        let mut tree = small();
        for index in 0..20 {
            tree.insert(run(index * 10, index * 10 + 4), index * index).unwrap();
        }
        tree
    };
    let mut whole = filled();
    let over = Rest::new(run(12, 171));
    let swept = whole.release(over, &mut Budget::UNLIMITED.clone(), even_only).unwrap();
    for budget in 1..20 {
        let (mut tree, mut rest) = (filled(), over);
        let (mut released, mut failed, mut calls) = (0, 0, 0);
        let last = loop {
            calls += 1;
            assert!(calls < 50, "no progress at {rest:?}");
            match tree.release(rest, &mut Budget::new(budget), even_only) {
                Ok(sweep) => break sweep,
                Err(stopped) => {
                    assert!(stopped.rest.run().first() > rest.run().first());
                    assert_eq!(stopped.at(), stopped.rest.run().first());
                    (released, failed) = (released + stopped.released, failed + stopped.failed);
                    rest = stopped.rest;
                }
            }
        };
        let total = (released + last.released, failed + last.failed, last.next);
        assert_eq!(total, (swept.released, swept.failed, swept.next));
        assert_eq!(contents(&tree), contents(&whole));
    }
    let mut tree = filled();
    let none = tree.release(over, &mut Budget::new(0), even_only);
    assert_eq!(none, Err(SweepStopped { rest: over, released: 0, failed: 0 }));
    // The loop hands such a stop on.
    let walk = |tree: &mut Small, rest| {
        tree.release(rest, &mut Budget::new(1), even_only).map(|sweep| sweep.reached())
    };
    let go_on = |_: &mut Small, _| ControlFlow::Continue(());
    let result = chunked(over, Chunk::new(64), Pace::Resume, &mut tree, walk, go_on);
    let halted = result.unwrap_err();
    assert!(matches!(halted.halt, Halt::Walk(_)));
    assert_eq!(halted.rest.run(), run(15, 171));
}

#[test]
fn the_tree_stays_flat_whatever_the_order_of_insertion() {
    const COUNT: u64 = 4096;
    let orders: [fn(u64) -> u64; 3] = [
        |index| index,
        |index| COUNT - 1 - index,
        |index| index.wrapping_mul(2_654_435_761) % COUNT,
    ];
    for order in orders {
        let mut tree: Tracked<u64, Vec<Slot<u64>>> = Tracked::new(vec![Slot::VACANT; 4096]);
        for index in 0..COUNT {
            tree.insert(Run::single(Gfn::new(order(index))), index).unwrap();
        }
        // 1.45 x 12
        assert!(tree.height() <= 17, "height {}", tree.height());
        for index in 0..COUNT / 8 * 7 {
            tree.remove(Gfn::new(order(index))).unwrap();
        }
        assert_eq!(tree.len() as u64, COUNT / 8);
        assert!(tree.height() <= 13, "height {}", tree.height());
    }
}

#[derive(Clone, Debug)]
enum Edit {
    Insert(u64, u64),
    Remove(u64),
    Release(u64, u64, u64),
}

fn edits() -> impl Strategy<Value = Vec<Edit>> {
    let edit = prop_oneof![
        6 => (0u64..200, 0u64..8).prop_map(|(at, size)| Edit::Insert(at, size)),
        3 => (0u64..210).prop_map(Edit::Remove),
        1 => (0u64..200, 0u64..60, 1u64..20)
            .prop_map(|(at, size, budget)| Edit::Release(at, size, budget)),
    ];
    proptest::collection::vec(edit, 1..120)
}

/// First frame to last frame and value.
type Model = BTreeMap<u64, (u64, u64)>;

fn overlapping(model: &Model, first: u64, last: u64) -> Vec<u64> {
    let inside = model.iter().filter(|(from, (to, _))| **from <= last && *to >= first);
    inside.map(|(from, _)| *from).collect()
}

fn apply(
    tree: &mut Small,
    model: &mut Model,
    edit: &Edit,
    value: u64,
) -> Result<(), TestCaseError> {
    match *edit {
        Edit::Insert(first, size) => {
            let last = first + size;
            let expected = match overlapping(model, first, last).first() {
                Some(from) => Err(Refused::Overlaps(value, run(*from, model[from].0))),
                None if model.len() == 24 => Err(Refused::Full(value)),
                None => {
                    model.insert(first, (last, value));
                    Ok(())
                }
            };
            prop_assert_eq!(tree.insert(run(first, last), value), expected);
        }
        Edit::Remove(gfn) => {
            let found = overlapping(model, gfn, gfn).pop();
            let expected = found
                .and_then(|from| Some((from, model.remove(&from)?)))
                .map(|(from, (last, value))| (run(from, last), value));
            prop_assert_eq!(tree.remove(Gfn::new(gfn)), expected);
        }
        Edit::Release(first, size, budget) => {
            let last = first + size;
            let mut rest = Rest::new(run(first, last));
            let mut seen = Vec::new();
            let next = loop {
                let release = |run: Run, value| {
                    seen.push(run.first().get());
                    even_only(run, value)
                };
                match tree.release(rest, &mut Budget::new(budget), release) {
                    Ok(sweep) => break sweep.next,
                    Err(stopped) => rest = stopped.rest,
                }
            };
            // Each once, in order.
            prop_assert_eq!(&seen, &overlapping(model, first, last));
            for from in seen {
                if model[&from].1.is_multiple_of(2) {
                    model.remove(&from);
                }
            }
            let past = model.range(last + 1..).next().map(|(from, _)| Gfn::new(*from));
            prop_assert_eq!(next, past);
        }
    }
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn tracked_mappings_agree_with_a_sorted_map(edits in edits()) {
        let (mut tree, mut model) = (small(), Model::new());
        for (value, edit) in edits.iter().enumerate() {
            apply(&mut tree, &mut model, edit, value as u64)?;
            let expected: Vec<_> =
                model.iter().map(|(from, (last, value))| (run(*from, *last), *value)).collect();
            prop_assert_eq!(contents(&tree), expected);
            prop_assert_eq!(tree.len(), model.len());
            prop_assert_eq!(tree.is_empty(), model.is_empty());
            // 1.45 x lg2(24 + 2)
            prop_assert!(tree.height() <= 6);
            for gfn in (0..210).step_by(7) {
                let found = tree.get(Gfn::new(gfn)).map(|(run, _)| run.first().get());
                prop_assert_eq!(found, overlapping(&model, gfn, gfn).pop());
            }
        }
    }
}
