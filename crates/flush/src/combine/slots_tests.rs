//! What is read from slots is what was published, or wider.

use super::*;
use crate::cover::RUNS;

extern crate std;
use std::{collections::BTreeSet, vec::Vec};

fn run(first: u64, last: u64) -> Run {
    Run::new(Gfn::new(first), Gfn::new(last)).unwrap()
}

fn cover(runs: &[(u64, u64)]) -> Cover {
    let mut cover = Cover::NOTHING;
    for (first, last) in runs {
        cover.record(run(*first, *last), 0, Depth::Leaves, Change::Modified);
    }
    cover
}

fn published<const SLOTS: usize>(slots: &Slots<SLOTS>, cover: &Cover) -> Cover {
    slots.publish(cover);
    let mut read = Cover::NOTHING;
    slots.add_to(&mut read);
    read
}

#[track_caller]
fn exact<const SLOTS: usize>(runs: &[(u64, u64)]) {
    let cover = cover(runs);
    assert_eq!(published(&Slots::<SLOTS>::new(), &cover), cover);
}

#[track_caller]
fn widened<const SLOTS: usize>(runs: &[(u64, u64)]) {
    let read = published(&Slots::<SLOTS>::new(), &cover(runs));
    assert_eq!(read.extent(), Extent::Everything);
}

#[test]
fn a_cover_that_fits_is_read_as_it_was_published() {
    exact::<1>(&[]);
    exact::<1>(&[(0, 0)]);
    exact::<1>(&[(64, 95)]);
    exact::<2>(&[(3, 4)]);
    exact::<8>(&[(1, 30)]);
    exact::<1>(&[((1 << FRAME_BITS) - 1, (1 << FRAME_BITS) - 1)]);
    exact::<1>(&[(1 << (FRAME_BITS - 1), (1 << FRAME_BITS) - 1)]);
    let top = (1 << FRAME_BITS) - 1;
    exact::<64>(&[(1, top)]);
}

#[test]
fn a_cover_that_does_not_fit_becomes_everything() {
    widened::<1>(&[(3, 4)]);
    widened::<7>(&[(1, 30)]);
    widened::<32>(&[(1 << FRAME_BITS, 1 << FRAME_BITS)]);
    widened::<32>(&[(0, (1 << FRAME_BITS) - 1)]);
    widened::<32>(&[(5, 5), (0, u64::MAX)]);
    widened::<32>(&[(u64::MAX, u64::MAX)]);
}

#[test]
fn thirty_two_single_frames_fit_in_thirty_two_slots() {
    let scattered: Vec<_> = (0..RUNS as u64).map(|n| (n * 1001 + 7, n * 1001 + 7)).collect();
    exact::<32>(&scattered);
    for first in 0..64 {
        exact::<32>(&[(first, first + 31)]);
    }
}

#[test]
fn blocks_are_aligned_apart_and_exactly_the_run() {
    for first in 0..40 {
        for last in first..40 {
            let mut seen = BTreeSet::new();
            for block in blocks(run(first, last)) {
                assert_eq!(block.base() % block.pages(), 0);
                let frames = block.base()..block.base() + block.pages();
                assert!(frames.into_iter().all(|frame| seen.insert(frame)));
            }
            assert_eq!(seen, (first..=last).collect());
        }
    }
}

#[test]
fn depth_change_and_leaf_order_travel_with_every_block() {
    for depth in [Depth::Leaves, Depth::Tables] {
        for change in [Change::Added, Change::Modified] {
            for order in [0, 9, 18, 63] {
                let mut cover = Cover::NOTHING;
                cover.record(run(0x200, 0x400), order, depth, change);
                assert_eq!(published(&Slots::<32>::new(), &cover), cover);
            }
        }
    }
    let mut mixed = cover(&[(1, 1), (7, 9)]);
    mixed.record(run(0x200, 0x3ff), 9, Depth::Leaves, Change::Modified);
    mixed.record(run(0x400, 0x400), 0, Depth::Leaves, Change::Modified);
    assert_eq!(published(&Slots::<32>::new(), &mixed), mixed);

    let mut absurd = Cover::NOTHING;
    absurd.record(run(1, 1), 64, Depth::Tables, Change::Modified);
    let read = published(&Slots::<32>::new(), &absurd);
    assert_eq!((read.extent(), read.depth()), (Extent::Everything, Depth::Tables));
}

#[test]
fn a_shorter_cover_leaves_nothing_of_a_longer_one() {
    let slots = Slots::<4>::new();
    published(&slots, &cover(&[(1, 1), (3, 3), (5, 5), (7, 7)]));
    let one = cover(&[(9, 9)]);
    assert_eq!(published(&slots, &one), one);
    assert!(published(&slots, &Cover::NOTHING).is_nothing());
}
