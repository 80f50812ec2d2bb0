//! One flush of each kind for every 32 elements, and none for nothing.

use flush::Gfn;
use gnttab::{
    Outcome,
    abi::{UnmapAndReplace, UnmapGrantRef},
};
use host::{
    Layout, Setup, World,
    calls::{Fate, Shared, operation, unmap_request, unmap_requests},
    world::{BACKEND, DEVICE, Flushes, OTHER_CPU},
};
use hwmodel::UnitCounters;
use zerocopy::{FromBytes, FromZeros, Immutable, IntoBytes};

const FIRST: u64 = 0x10_0000;
const LAYOUTS: [Layout; 2] = [Layout::Separate, Layout::Shared];

/// What one call cost.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Cost {
    /// Requests to flush CPUs, and to flush devices.
    flushes: (u64, u64),
    /// IOTLB commands that the unit carried out.
    commands: u64,
    /// Pages named by them.
    pages: u64,
    /// Waits it carried out, and writes of its tail register.
    submissions: (u64, u64),
    /// Interrupts sent to the CPU in the guest, and its invalidations.
    kicks: (u64, u64),
}

impl Cost {
    /// One call with its flushes on hardware that has something to forget.
    const fn usual(flushes: u64, commands: u64, pages: u64) -> Self {
        let each = (flushes, flushes);
        Self { flushes: each, commands, pages, submissions: each, kicks: each }
    }

    /// What `call` costs on `world`.
    fn of(world: &World, call: impl FnOnce() -> Flushes) -> Self {
        let counters = || {
            let counters = world.machine.counters();
            let unit: UnitCounters = counters.units[0];
            (unit, counters.cpus[OTHER_CPU])
        };
        let (unit, cpu) = counters();
        let flushes = call();
        let (unit_after, cpu_after) = counters();
        Self {
            flushes: (flushes.tlb, flushes.iotlb),
            commands: unit_after.iotlb_commands() - unit.iotlb_commands(),
            pages: unit_after.pages_flushed - unit.pages_flushed,
            submissions: (unit_after.waits - unit.waits, unit_after.tail_writes - unit.tail_writes),
            kicks: (cpu_after.ipis - cpu.ipis, cpu_after.invalidations - cpu.invalidations),
        }
    }
}

fn world(layout: Layout) -> World {
    World::new(Setup { layout, ..Setup::default() })
}

/// Every layout of tables, with arguments that are copied and with some that are lent.
fn worlds() -> impl Iterator<Item = (Layout, World)> {
    let lent = LAYOUTS.map(|layout| {
        let world = world(layout);
        world.faults.lends.set(true);
        (layout, world)
    });
    LAYOUTS.map(|layout| (layout, world(layout))).into_iter().chain(lent)
}

/// How a case calls, and in which order.
#[derive(Clone, Copy, Debug)]
enum How {
    Up,
    Down,
    Replace,
}

#[track_caller]
fn check(how: How, first: u64, stride: u64, count: u32, expected: Cost) {
    for (layout, world) in worlds() {
        let grants = world.share_at(first, stride, count);
        let mut order = grants.clone();
        let copies = world.faults.copies.get();
        let cost = Cost::of(&world, || match how {
            How::Up => unmap_all(&world, &unmap_requests(&order)),
            How::Down => {
                order.reverse();
                unmap_all(&world, &unmap_requests(&order))
            }
            How::Replace => {
                let elements: Vec<_> = order.iter().map(|grant| replace(grant, 0)).collect();
                let mut elements = elements;
                let ended = world.call_on(BACKEND, operation::REPLACE, &mut elements);
                assert_eq!(ended.outcome, Outcome::Done);
                assert!(elements.iter().all(|element| element.status == 0));
                ended.flushes
            }
        });
        assert_eq!(cost, expected, "{layout:?} {how:?} {count} grants every {stride} frames");
        assert_eq!(world.faults.copies.get() == copies, world.faults.lends.get());
        world.check_fates(&grants, |_| Fate::Back);
        world.take_back_and_try(&grants, OTHER_CPU);
    }
}

fn unmap_all(world: &World, elements: &[UnmapGrantRef]) -> Flushes {
    let mut elements = elements.to_vec();
    let ended = world.call_on(BACKEND, operation::UNMAP, &mut elements);
    assert_eq!(ended.outcome, Outcome::Done);
    assert!(elements.iter().all(|element| element.status == 0));
    ended.flushes
}

fn replace(grant: &Shared, new_addr: u64) -> UnmapAndReplace {
    let mut element = UnmapAndReplace::new_zeroed();
    element.host_addr = grant.gfn.get() << 12;
    element.handle = grant.handle;
    element.new_addr = new_addr;
    element
}

#[test]
fn contiguous_frames_cost_one_flush_of_each_kind_and_one_command_per_thirty_two() {
    for (count, flushes, pages) in
        [(1, 1, 1), (31, 1, 32), (32, 1, 32), (33, 2, 33), (64, 2, 64), (65, 3, 65), (100, 4, 100)]
    {
        check(How::Up, FIRST, 1, count, Cost::usual(flushes, flushes, pages));
    }
    check(How::Down, FIRST, 1, 32, Cost::usual(1, 1, 32));
    check(How::Down, FIRST, 1, 64, Cost::usual(2, 2, 64));
    // The second half of one aligned block and the first of the next: two commands are
    // cheaper than one that takes 32 other pages along.
    check(How::Up, FIRST + 16, 1, 32, Cost::usual(1, 2, 32));
}

#[test]
fn scattered_frames_cost_one_flush_of_each_kind_and_one_command_a_frame() {
    for (count, flushes) in [(1, 1), (31, 1), (32, 1), (33, 2), (64, 2), (65, 3), (100, 4)] {
        let each = u64::from(count);
        check(How::Up, FIRST + 5, 33, count, Cost::usual(flushes, each, each));
    }
    check(How::Down, FIRST, 0x300, 33, Cost::usual(2, 33, 33));
}

#[test]
fn replacing_by_nothing_batches_like_an_unmap() {
    check(How::Replace, FIRST, 1, 32, Cost::usual(1, 1, 32));
    check(How::Replace, FIRST, 1, 33, Cost::usual(2, 2, 33));
    check(How::Replace, FIRST + 5, 33, 40, Cost::usual(2, 40, 40));
}

/// Calls with elements made from 40 grants; none of them may cost or change anything.
#[track_caller]
fn check_nothing<T: FromBytes + IntoBytes + Immutable>(
    operation: u32,
    make: impl Fn(&[Shared]) -> Vec<T>,
    status: impl Fn(&T) -> i16,
    expected: i16,
) {
    for (layout, world) in worlds() {
        let grants = world.share_at(FIRST, 1, 40);
        let mut elements = make(&grants);
        let before = world.machine.counters().operations;
        let cost = Cost::of(&world, || {
            let ended = world.call_on(BACKEND, operation, &mut elements);
            assert_eq!(ended.outcome, Outcome::Done);
            ended.flushes
        });
        assert_eq!(cost, Cost::default(), "{layout:?}");
        assert_eq!(world.machine.counters().operations, before, "hardware was asked for something");
        assert!(elements.iter().all(|element| status(element) == expected));
        world.check_fates(&grants, |_| Fate::Mapped);
        world.check_clean();
    }
}

#[test]
fn a_call_that_clears_nothing_flushes_nothing() {
    let unmaps = |make: fn(&Shared) -> UnmapGrantRef, expected| {
        let all = move |grants: &[Shared]| grants.iter().map(make).collect();
        check_nothing(operation::UNMAP, all, |element: &UnmapGrantRef| element.status, expected);
    };
    // No element at all.
    check_nothing(operation::UNMAP, |_| Vec::new(), |_: &UnmapGrantRef| 0, 0);
    // Handles that were never given out.
    unmaps(|grant| unmap_request(grant.handle + 0x1000, grant.gfn), -4);
    // Nothing asked for: the address is zero.
    unmaps(|grant| unmap_request(grant.handle, Gfn::new(0)), 0);
    // The neighbour's frame, and frames where nothing is.
    unmaps(|grant| unmap_request(grant.handle, Gfn::new(grant.gfn.get() ^ 1)), -1);
    unmaps(|grant| unmap_request(grant.handle, Gfn::new(grant.gfn.get() + 0x1000)), -1);
    // Frames beyond the space, and the backend's own memory.
    unmaps(|grant| unmap_request(grant.handle, Gfn::new(1 << 50 | grant.gfn.get())), -1);
    unmaps(|grant| unmap_request(grant.handle, host::world::ARGUMENTS), -1);
}

#[test]
fn replacing_by_something_is_refused_and_flushes_nothing() {
    for new_addr in [1, 0x1000, u64::MAX] {
        check_nothing(
            operation::REPLACE,
            move |grants| grants.iter().map(|grant| replace(grant, new_addr)).collect(),
            |element: &UnmapAndReplace| element.status,
            -1,
        );
    }
}

#[test]
fn one_good_element_among_bad_ones_costs_one_flush_for_its_chunk_alone() {
    for layout in LAYOUTS {
        for good in [0, 31, 32, 69] {
            let world = world(layout);
            let grants = world.share_at(FIRST, 1, 1);
            let mut elements = vec![unmap_request(u32::MAX, Gfn::new(FIRST)); 70];
            elements[good] = unmap_request(grants[0].handle, grants[0].gfn);
            let cost = Cost::of(&world, || {
                let ended = world.call_on(BACKEND, operation::UNMAP, &mut elements);
                assert_eq!(ended.outcome, Outcome::Done);
                ended.flushes
            });
            assert_eq!(cost, Cost::usual(1, 1, 1), "{layout:?}, the good one at {good}");
            for (place, element) in elements.iter().enumerate() {
                assert_eq!(element.status, if place == good { 0 } else { -4 });
            }
            world.take_back_and_try(&grants, OTHER_CPU);
        }
    }
}

#[test]
fn without_a_device_or_a_cpu_the_request_counts_and_costs_nothing() {
    for layout in LAYOUTS {
        for (device, cpu) in [(false, true), (true, false), (false, false)] {
            let world = world(layout);
            let grants = world.share_at(FIRST, 1, 40);
            if !device {
                let memory = &world.hypervisor.memory;
                let detached = world.backend().dma.detach(&world.units, memory, 0, DEVICE);
                assert_eq!(detached, Ok(()));
            }
            if !cpu {
                world.leave(OTHER_CPU);
            }
            let cost = Cost::of(&world, || unmap_all(&world, &unmap_requests(&grants)));
            let usual = Cost::usual(2, 2, 40);
            let nobody = Cost::default();
            let (units, cpus) =
                (if device { usual } else { nobody }, if cpu { usual } else { nobody });
            let expected = Cost { flushes: usual.flushes, kicks: cpus.kicks, ..units };
            assert_eq!(cost, expected, "{layout:?}, device {device}, CPU {cpu}");
            if !cpu {
                // What it cached before is still there, and must not be used.
                world.enter(BACKEND, OTHER_CPU);
            }
            world.take_back_and_try(&grants, OTHER_CPU);
        }
    }
}
