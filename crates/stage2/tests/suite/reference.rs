//! Random edits against a map of frames, on a space small enough to look at whole.

use std::collections::BTreeMap;

use flush::{Gfn, Mfn, Run};
use proptest::prelude::*;
use stage2::{
    Access, Budget, Emptied, Leaf, Level, MapError, Over, Rest, Stop, clear, map, protect, split,
};

use crate::arena::{Arena, view};
use crate::log::Log;
use crate::plain::Plain;

#[derive(Clone, Debug)]
enum Edit {
    Map { gfn: u64, level: u8, mfn: u64, rights: u8 },
    Clear { first: u64, last: u64, free: bool },
    Protect { first: u64, last: u64, rights: u8 },
    Split { gfn: u64, to: u8 },
}

/// How little a walk gets before it has to come back.
#[derive(Clone, Copy, Debug)]
struct Ration {
    budget: u64,
    leaves: usize,
    tables: usize,
}

fn edits() -> impl Strategy<Value = Vec<Edit>> {
    let range = || (0u64..256, 0u64..80).prop_map(|(at, size)| (at, (at + size).min(255)));
    let edit = prop_oneof![
        4 => (0u64..256, 0u8..3, 0u64..64, 1u8..8).prop_map(|(gfn, level, mfn, rights)| {
            let unit = 1u64 << (2 * level);
            Edit::Map { gfn: gfn & !(unit - 1), level, mfn: mfn * unit, rights }
        }),
        2 => (range(), any::<bool>())
            .prop_map(|((first, last), free)| Edit::Clear { first, last, free }),
        2 => (range(), 1u8..8).prop_map(|((first, last), rights)| {
            Edit::Protect { first, last, rights }
        }),
        1 => (0u64..256, 0u8..2).prop_map(|(gfn, to)| Edit::Split { gfn, to }),
    ];
    proptest::collection::vec(edit, 1..40)
}

fn ration() -> impl Strategy<Value = Ration> {
    prop_oneof![
        Just(Ration { budget: u64::MAX, leaves: usize::MAX, tables: usize::MAX }),
        (1u64..9, 1usize..4, 1usize..3).prop_map(|(budget, leaves, tables)| Ration {
            budget,
            leaves,
            tables
        }),
    ]
}

/// What each frame shows and with which rights, and the order of the largest leaf that a
/// cache may show it through, if nothing was ever flushed.
type Model = BTreeMap<u64, (u64, u8, u8)>;

fn runs(first: u64, last: u64) -> Rest {
    Rest::new(Run::new(Gfn::new(first), Gfn::new(last)).unwrap())
}

/// Carries a walk through all of its stops.
fn finish(
    arena: &Arena,
    log: &mut Log,
    ration: Ration,
    mut rest: Rest,
    mut walk: impl FnMut(Rest, &mut Budget, &mut Log) -> Result<stage2::Tally, stage2::Stopped>,
) {
    for _ in 0..4000 {
        match walk(rest, &mut Budget::new(ration.budget), log) {
            Ok(_) => return,
            Err(stopped) => {
                assert!(matches!(stopped.stop, Stop::Budget | Stop::Full), "{stopped:?}");
                rest = stopped.rest;
                log.flush(arena, ration.leaves, ration.tables);
            }
        }
    }
    panic!("no progress at {rest:?}");
}

/// Makes one edit on both sides.
fn apply(
    arena: &Arena,
    format: &Plain,
    model: &mut Model,
    log: &mut Log,
    edit: &Edit,
    ration: Ration,
) {
    let tables = arena.tables(format);
    match *edit {
        Edit::Map { gfn, level, mfn, rights } => {
            let leaf = Leaf::new(Mfn::new(mfn), Access::from_bits(rights));
            let frames = gfn..gfn + (1 << (2 * level));
            let level = Level::new(level).unwrap();
            match map(tables, Gfn::new(gfn), level, leaf, Over::Vacant, log) {
                Ok(None) => {
                    for (offset, frame) in frames.enumerate() {
                        let order = 2 * level.get();
                        let old = model.insert(frame, (mfn + offset as u64, rights, order));
                        assert_eq!(old, None, "frame {frame} was overwritten");
                    }
                }
                Ok(Some(old)) => panic!("replaced {old:?}"),
                Err(MapError::Occupied(found)) => {
                    // Kept empty tables two levels deep also count as occupied.
                    let mapped = model.range(frames).next().is_some();
                    assert!(mapped || found.level == Level::TWO, "{found:?}");
                }
                Err(error) => panic!("{error:?}"),
            }
        }
        Edit::Clear { first, last, free } => {
            let emptied = if free { Emptied::Free } else { Emptied::Keep };
            finish(arena, log, ration, runs(first, last), |rest, budget, log| {
                clear(tables, rest, budget, emptied, log)
            });
            model.retain(|frame, _| !(first..=last).contains(frame));
        }
        Edit::Protect { first, last, rights } => {
            let access = Access::from_bits(rights);
            finish(arena, log, ration, runs(first, last), |rest, budget, log| {
                protect(tables, rest, budget, log, |_| access)
            });
            for (_, (_, old, _)) in model.range_mut(first..=last) {
                *old = rights;
            }
        }
        Edit::Split { gfn, to } => {
            let result = split(tables, Gfn::new(gfn), Level::new(to).unwrap(), log);
            assert_eq!(result.is_ok(), model.contains_key(&gfn));
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn tables_agree_with_a_map_of_frames_and_every_change_is_on_record(
        edits in edits(),
        ration in ration(),
    ) {
        let format = Plain::small();
        let arena = Arena::new(&format);
        let mut model = Model::new();
        for edit in &edits {
            let before = model.clone();
            let mut log = Log::with_room(ration.leaves, ration.tables);
            apply(&arena, &format, &mut model, &mut log, edit, ration);
            for (frame, seen) in view(arena.tables(&format)).into_iter().enumerate() {
                let expected = model.get(&(frame as u64)).map(|(mfn, rights, _)| (*mfn, *rights));
                prop_assert_eq!(seen, expected, "frame {}", frame);
            }
            // What was valid and changed is covered; what was not valid is not removed.
            for (frame, old) in &before {
                if model.get(frame) != Some(old) {
                    // Large enough for whatever any batch before may have left cached.
                    let order = log.order_of(Gfn::new(*frame));
                    prop_assert!(order >= Some(old.2), "frame {} recorded as {:?}", frame, order);
                }
            }
            for run in log.leaf_runs() {
                prop_assert!(before.contains_key(&run.first().get()));
            }
            log.flush(&arena, 0, 0);
            arena.check(&format, 0);
        }
    }

    #[test]
    fn rations_change_neither_the_end_nor_what_is_removed(
        edits in edits(),
        first in 0u64..256,
        size in 0u64..256,
        free: bool,
        ration in ration(),
    ) {
        let plenty = Ration { budget: u64::MAX, leaves: usize::MAX, tables: usize::MAX };
        let format = Plain::small();
        let [one, other] = [plenty, ration].map(|ration| {
            let arena = Arena::new(&format);
            let mut model = Model::new();
            for edit in &edits {
                let mut log = Log::with_room(usize::MAX, usize::MAX);
                apply(&arena, &format, &mut model, &mut log, edit, plenty);
                log.flush(&arena, 0, 0);
            }
            let mut log = Log::with_room(ration.leaves, ration.tables);
            let edit = Edit::Clear { first, last: (first + size).min(255), free };
            apply(&arena, &format, &mut model, &mut log, &edit, ration);
            log.flush(&arena, 0, 0);
            arena.check(&format, 0);
            (view(arena.tables(&format)), log.removals(), arena.linked())
        });
        prop_assert_eq!(one, other);
    }
}
