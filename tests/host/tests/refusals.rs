//! Memory that runs out at any request: a call fails, and nothing is stale or lost.
//!
//! Each script asks for frames, one after the other. It runs once with each request
//! refused, and then once more in the same world with all the memory there is.

use flush::Gfn;
use gnttab::Outcome;
use host::{
    Layout, Setup, World,
    calls::{Fate, Shared, map_request, operation},
    world::{BACKEND, DEVICE, FIRST_REFERENCE, FRONTEND, OTHER_CPU, granted_gfn},
};
use hwmodel::{UnitConfig, UnitId};
use iommu_vtd::{Device, SourceId};

const FIRST: u64 = 0x10_0000;
/// How many sets of tables a domain has.
const SETS: [(Layout, u64); 2] = [(Layout::Separate, 2), (Layout::Shared, 1)];
/// On a bus of its own, so that its context needs a table of its own.
const OTHER_DEVICE: SourceId = SourceId::new(0x7 << 8);

/// A part of a test that asks for memory: whether it got all it needs. The world is as
/// before when it returns.
type Script = fn(&World) -> bool;

/// Refuses each request for a frame of `script` in turn, in a fresh world each time.
///
/// Returns how many there were.
#[track_caller]
fn check(setup: Setup, prepare: fn(&World), script: Script) -> u64 {
    for n in 1.. {
        assert!(n < 200, "the script never asks for fewer frames");
        let world = World::new(setup);
        prepare(&world);
        let ram = world.hypervisor.memory.ram();
        let before = ram.allocations();
        ram.refuse_allocation(n);
        let done = script(&world);
        let reached = ram.allocations() - before >= n;
        ram.refuse_allocation(0);
        assert_eq!(done, !reached, "request {n}");
        world.check_clean();
        assert_eq!(world.frontend().grants().pinned(), 0, "request {n}");
        // What was made before the refusal serves the next attempt, which makes no more
        // tables than an attempt that nothing disturbed.
        assert!(script(&world), "after request {n} was refused");
        world.check_clean();
        let tables = world.hypervisor.memory.tables_in_use();
        let undisturbed = World::new(setup);
        prepare(&undisturbed);
        assert!(script(&undisturbed));
        assert_eq!(tables, undisturbed.hypervisor.memory.tables_in_use(), "request {n}");
        world.check_handles_free(0);
        if !reached {
            return n - 1;
        }
    }
    unreachable!("the loop has no end")
}

/// The frontend grants pages for scripts to map.
fn grants(world: &World) {
    for reference in FIRST_REFERENCE..FIRST_REFERENCE + 4 {
        world.grant(reference, granted_gfn(reference), false);
    }
}

/// Maps the grants at `gfns`, uses those that are mapped, and gives them back.
fn map_and_give_back(world: &World, gfns: impl Iterator<Item = u64>) -> bool {
    let mut elements: Vec<_> = (FIRST_REFERENCE..FIRST_REFERENCE + 4)
        .zip(gfns)
        .map(|(reference, gfn)| map_request(FRONTEND, reference, Gfn::new(gfn), false))
        .collect();
    let ended = world.call_on(BACKEND, operation::MAP, &mut elements);
    assert_eq!((ended.outcome, ended.failed.len()), (Outcome::Done, 0));
    let mut mapped = Vec::new();
    for element in &elements {
        let gfn = Gfn::new(element.host_addr >> 12);
        if element.status == 0 {
            let mfn = world.backend().lookup(gfn).expect("it was just mapped").mfn;
            let (reference, handle) = (element.reference, element.handle);
            mapped.push(Shared { reference, gfn, mfn, handle, read_only: false });
            world.touch(gfn);
        } else {
            assert_eq!(element.handle, u32::MAX, "{gfn:?}");
            assert_eq!(world.backend().lookup(gfn), None, "{gfn:?}");
            assert_eq!(world.in_use(element.reference), (false, false), "{gfn:?}");
            assert!(!world.device_reaches(gfn) && !world.cpu_reaches(OTHER_CPU, gfn), "{gfn:?}");
        }
    }
    let (ended, statuses) = world.give_back(&mapped);
    assert_eq!((ended.outcome, statuses), (Outcome::Done, vec![0; mapped.len()]));
    world.check_fates(&mapped, |_| Fate::Back);
    for grant in &mapped {
        assert!(!world.device_reaches(grant.gfn) && !world.cpu_reaches(OTHER_CPU, grant.gfn));
    }
    mapped.len() == elements.len()
}

#[test]
fn a_map_that_is_refused_memory_at_any_request_leaves_nothing_behind() {
    // For each of four places three tables below the root, in each set: none is shared.
    for (layout, sets) in SETS {
        let setup = Setup { layout, ..Setup::default() };
        let apart = |world: &World| map_and_give_back(world, (1..).map(|place| place << 27));
        assert_eq!(check(setup, grants, apart), 4 * 3 * sets, "{layout:?}");
    }
}

#[test]
fn a_map_next_to_others_is_refused_no_more_than_it_asks_for() {
    for (layout, sets) in SETS {
        for caching_mode in [false, true] {
            let unit = UnitConfig { caching_mode, ..UnitConfig::default() };
            let setup = Setup { layout, unit, ..Setup::default() };
            let near = |world: &World| map_and_give_back(world, FIRST..);
            // The guest has other memory below the same table of the next level.
            assert_eq!(check(setup, grants, near), 2 * sets, "{layout:?}");
        }
    }
}

/// Gives a second device to the backend, lets it write, and takes it away.
fn attach_and_detach(world: &World) -> bool {
    let guest = world.backend();
    let source = OTHER_DEVICE;
    let device = Device { unit: 0, source, physical_function: source, device_tlb: None };
    let memory = &world.hypervisor.memory;
    let reaches = || world.machine.dma_write64(source.get(), FIRST << 12, 5).is_ok();
    let attached = guest.dma.attach(&world.units, memory, device);
    if attached.is_ok() {
        assert!(reaches());
        guest.dma.detach(&world.units, memory, 0, source).expect("it was just attached");
    }
    assert!(!reaches());
    attached.is_ok()
}

fn second_device(world: &World) {
    world.machine.add_device(UnitId(0), OTHER_DEVICE.get(), false);
    world.populate_block(BACKEND, Gfn::new(FIRST), 0);
}

#[test]
fn an_attach_that_is_refused_memory_leaves_the_device_with_nobody() {
    assert_ne!(DEVICE.get() >> 8, OTHER_DEVICE.get() >> 8, "on another bus");
    for (layout, _) in SETS {
        for caching_mode in [false, true] {
            let unit = UnitConfig { caching_mode, ..UnitConfig::default() };
            let setup = Setup { layout, unit, ..Setup::default() };
            // The context table of that bus.
            assert_eq!(check(setup, second_device, attach_and_detach), 1, "{layout:?}");
        }
    }
}

/// The frontend's table gets version 2, with its status words, and version 1 again.
fn change_version(world: &World) -> bool {
    let mut version = [2_u32];
    let there = world.call_on(FRONTEND, operation::SET_VERSION, &mut version).outcome;
    assert_eq!(version, [if there == Outcome::Done { 2 } else { 1 }]);
    if there == Outcome::Done {
        let back = world.call_on(FRONTEND, operation::SET_VERSION, &mut [1_u32]);
        assert_eq!(back.outcome, Outcome::Done);
    }
    there == Outcome::Done
}

#[test]
fn a_table_that_is_refused_status_words_keeps_its_version() {
    for (layout, _) in SETS {
        let setup = Setup { layout, ..Setup::default() };
        assert_eq!(check(setup, |_| {}, change_version), 1, "{layout:?}");
    }
}
