//! The reverse map against a plain list, in every size of storage.

use std::{vec, vec::Vec};

use super::*;

/// A source of numbers that look random and are the same each time.
struct Numbers(u64);

impl Numbers {
    fn below(&mut self, limit: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % limit
    }
}

fn shown(numbers: &mut Numbers) -> Shown {
    let order = [0, 0, 9, 18][numbers.below(4) as usize];
    Shown {
        shadow: numbers.below(3) as usize,
        order,
        nested: Gfn::new(numbers.below(6) << order),
        canonical: Gfn::new(numbers.below(6) << order),
    }
}

fn key(shown: &Shown) -> (usize, u8, Gfn) {
    (shown.shadow, shown.order, shown.nested)
}

/// Takes all that overlap `run` out of the map, one after the other.
fn drain(reverse: &mut Reverse<'_>, run: Run) -> Vec<Shown> {
    let (mut search, mut found) = (Search::new(run), Vec::new());
    while let Some(shown) = reverse.next(&mut search) {
        assert!(reverse.remove(shown.shadow, shown.order, shown.nested));
        found.push(shown);
    }
    found
}

fn sorted(mut list: Vec<Shown>) -> Vec<Shown> {
    list.sort_by_key(key);
    list
}

fn overlaps(shown: &Shown, run: Run) -> bool {
    let own = shown.canonical_run();
    own.first() <= run.last() && run.first() <= own.last()
}

#[track_caller]
fn check(room: usize, seed: u64) {
    let mut storage = vec![ReverseEntry::EMPTY; room];
    let mut reverse = Reverse::new(&mut storage, seed);
    let mut numbers = Numbers(seed | 1);
    let mut model: Vec<Shown> = Vec::new();
    for _ in 0..600 {
        match numbers.below(20) {
            0 => {
                let shadow = numbers.below(3) as usize;
                reverse.forget(shadow);
                model.retain(|own| own.shadow != shadow);
            }
            1 => {
                let reach = [3, 12, 21][numbers.below(3) as usize];
                let first = numbers.below(1 << reach);
                let length = [1, 10, 20][numbers.below(3) as usize];
                let last = first + numbers.below(1 << length);
                let run = Run::new(Gfn::new(first), Gfn::new(last)).expect("in order");
                let (expected, rest) = model.iter().partition(|own| overlaps(own, run));
                model = rest;
                assert_eq!(sorted(drain(&mut reverse, run)), sorted(expected), "{run:?}");
            }
            2..8 => {
                let wanted = shown(&mut numbers);
                let before = model.len();
                model.retain(|own| key(own) != key(&wanted));
                let (shadow, order, nested) = key(&wanted);
                assert_eq!(reverse.remove(shadow, order, nested), model.len() < before);
            }
            _ => {
                let new = shown(&mut numbers);
                if model.iter().any(|own| key(own) == key(&new)) {
                    continue;
                }
                let inserted = reverse.insert(new);
                assert_eq!(inserted, model.len() < room, "room is all that counts");
                if inserted {
                    model.push(new);
                }
            }
        }
        assert_eq!(sorted(reverse.records().collect()), sorted(model.clone()));
    }
    let all = sorted(drain(&mut reverse, Run::ALL));
    assert_eq!(all, sorted(model), "nothing is lost");
}

#[test]
fn every_record_is_found_from_both_sides_until_it_is_dropped() {
    for room in [0, 1, 2, 7, 64, 1000] {
        for seed in 1..20 {
            check(room, seed);
        }
    }
}

#[test]
fn the_last_frames_of_the_space_are_found() {
    let mut storage = [ReverseEntry::EMPTY; 4];
    let mut reverse = Reverse::new(&mut storage, 3);
    let top =
        Shown { shadow: 0, order: 0, nested: Gfn::new(u64::MAX), canonical: Gfn::new(u64::MAX) };
    assert!(reverse.insert(top));
    let run = Run::new(Gfn::new(u64::MAX - 2), Gfn::new(u64::MAX)).expect("in order");
    assert_eq!(drain(&mut reverse, run), [top]);
    // An order that no frame number has is refused like a lack of room.
    assert!(!reverse.insert(Shown { order: 64, ..top }));
}

/// Symptom: one changed frame cost as many looks as another frame had records. Cause: a
/// bucket held each of them. Cure: it holds one for each frame.
#[test]
fn a_frame_shown_many_times_is_no_burden_to_others() {
    for seed in 0..8 {
        let mut storage = vec![ReverseEntry::EMPTY; 1024];
        let mut reverse = Reverse::new(&mut storage, seed);
        let (busy, all) = (Gfn::new(3), Run::block(Gfn::new(512), 9));
        for nested in 0..1024 {
            let nested = Gfn::new(nested);
            assert!(reverse.insert(Shown { shadow: 0, order: 0, nested, canonical: busy }));
        }
        // Twice as many frames as buckets: some have that of the busy one.
        let mut looks = 0;
        for number in 0..4 {
            let piece = Run::block(Gfn::new(all.first().get() << number), 9);
            let mut search = Search::new(piece);
            assert_eq!(reverse.next(&mut search), None);
            looks += search.looks();
        }
        assert!((2048..2080).contains(&looks), "{looks} looks for 2048 frames");
        assert_eq!(drain(&mut reverse, Run::single(busy)).len(), 1024);
    }
}
