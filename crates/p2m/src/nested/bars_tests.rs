//! Bars against a list of frames.

use super::*;

fn run(first: u64, last: u64) -> Run {
    Run::new(Gfn::new(first), Gfn::new(last)).expect("in order")
}

/// A step: put with the first frame that may be shown, or lift.
enum Step {
    Put(u64, u64, Option<u64>),
    Lift(u64, u64),
}
use Step::{Lift, Put};

/// The frames below 20 that are barred after `steps`, and where a search of all starts.
#[track_caller]
fn check(steps: &[Step], barred: &[u64], search: (Run, Option<u64>)) {
    let mut bars = Bars::default();
    for step in steps {
        match *step {
            Put(first, last, from) => bars.put(run(first, last), from.map(Gfn::new)),
            Lift(first, last) => bars.lift(run(first, last)),
        }
    }
    for frame in 0..20 {
        assert_eq!(bars.touch(run(frame, frame)), barred.contains(&frame), "frame {frame}");
    }
    assert_eq!(bars.shown_from(search.0), search.1.map(Gfn::new));
}

#[test]
fn a_bar_holds_exactly_the_frames_of_edits_under_way() {
    check(&[], &[], (run(3, 5), Some(3)));
    check(&[Put(3, 5, Some(4))], &[3, 4, 5], (run(3, 5), Some(4)));
    check(&[Put(3, 5, None)], &[3, 4, 5], (run(3, 5), None));
    check(&[Put(3, 5, None)], &[3, 4, 5], (run(3, 9), Some(6)));
    check(&[Put(3, 5, Some(4))], &[3, 4, 5], (run(2, 5), Some(2)));
    // Edits that overlap are one bar, and each takes its own frames off.
    let both = [Put(3, 5, Some(4)), Put(5, 8, Some(7))];
    check(&both, &[3, 4, 5, 6, 7, 8], (run(3, 8), Some(4)));
    check(&[Put(5, 8, None), Put(3, 5, None)], &[3, 4, 5, 6, 7, 8], (run(3, 8), Some(6)));
    check(&[Put(3, 5, None), Put(5, 8, None), Lift(3, 5)], &[6, 7, 8], (run(6, 8), Some(6)));
    check(&[Put(3, 8, Some(4)), Lift(0, 5)], &[6, 7, 8], (run(6, 8), Some(6)));
    check(&[Put(3, 8, Some(7)), Lift(6, 8)], &[3, 4, 5], (run(3, 5), None));
    check(&[Put(3, 8, Some(7)), Lift(5, 6)], &[3, 4, 5, 6, 7, 8], (run(3, 8), Some(7)));
    check(&[Put(3, 8, Some(7)), Lift(2, 9)], &[], (run(3, 8), Some(3)));
    check(&[Put(3, 5, None), Put(3, 5, Some(3)), Lift(3, 5)], &[], (run(3, 5), Some(3)));
}

#[test]
fn the_oldest_edit_goes_without_where_there_are_too_many() {
    let puts = [0, 2, 4, 6, 8, 10, 12, 14, 0, 16].map(|at| Put(at, at, None));
    // Frame 0 was tried again, so 2 is the oldest.
    check(&puts, &[0, 4, 6, 8, 10, 12, 14, 16], (run(2, 2), Some(2)));
}

#[test]
fn the_last_frames_of_the_space_are_barred() {
    let mut bars = Bars::default();
    let top = run(u64::MAX - 2, u64::MAX);
    bars.put(top, None);
    bars.put(run(u64::MAX - 1, u64::MAX), None);
    assert_eq!((bars.touch(top), bars.shown_from(top)), (true, None));
    bars.lift(top);
    assert!(!bars.touch(top));
}
