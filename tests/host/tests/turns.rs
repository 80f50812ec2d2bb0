//! Whoever lets vCPUs take turns is told of each point where another one could act.

use std::cell::RefCell;

use host::{
    Layout, Setup, World,
    turns::{Others, Point, tell},
    world::OTHER_CPU,
};

thread_local! {
    static POINTS: RefCell<Vec<Point>> = const { RefCell::new(Vec::new()) };
}

#[test]
fn edits_registers_and_turns_of_a_wait_are_told_of_and_nothing_is_once_nobody_asks() {
    for (layout, entries) in [(Layout::Separate, 2), (Layout::Shared, 1)] {
        let world = World::new(Setup { layout, ..Setup::default() });
        let grants = world.share_at(0x10_0000, 1, 1);
        let others = Others {
            point: |point| POINTS.with_borrow_mut(|points| points.push(point)),
            wait: |_| unreachable!("one vCPU waits for no other"),
        };
        assert!(tell(Some(others)).is_none());
        world.give_back(&grants);
        assert!(tell(None).is_some());
        let points = POINTS.take();
        let count = |wanted| points.iter().filter(|point| **point == wanted).count();
        assert_eq!(count(Point::Entry), entries, "{layout:?}: {points:?}");
        assert_eq!(count(Point::Register), 1, "{layout:?}: the tail of the queue");
        assert!(count(Point::Poll) > 1, "{layout:?}: for CPUs and for the unit");
        assert_eq!(points.last(), Some(&Point::Poll), "{layout:?}: {points:?}");
        world.take_back_and_try(&grants, OTHER_CPU);
        assert!(POINTS.take().is_empty());
    }
}
