//! Planted bugs, each beside its honest twin: the model sees every one of them.
//!
//! A [`Plant`] is hardware or an embedder that lies, and a scenario in which the lie
//! does harm. The same scenario without the lie leaves nothing stale behind.

use flush::{Batch, Gfn, Mfn, Run};
use gnttab::{Domain, Outcome};
use host::{
    FlushLie, Layout, Setup, World,
    world::{BACKEND, DEVICE, OTHER_CPU},
};
use hwmodel::{CpuLie, Lie, Policy, Space, UnitConfig, UnitId, WitnessKind};
use iommu_vtd::Device;
use stage2::Access;

/// A bug, and how it shows.
struct Plant {
    name: &'static str,
    /// What the honest twin does where the other one lies.
    honest: fn(&World),
    planted: fn(&World),
    /// Calls one of the two at the right moment.
    scenario: fn(&World, fn(&World)),
    expected: WitnessKind,
    setup: fn() -> Setup,
    /// The table layouts in which there is such a bug.
    layouts: &'static [Layout],
}

const BOTH: &[Layout] = &[Layout::Separate, Layout::Shared];

const PLANT: Plant = Plant {
    name: "",
    honest: |_| {},
    planted: |_| {},
    scenario: unmap,
    expected: WitnessKind::ReleasedFrame,
    setup: Setup::default,
    layouts: BOTH,
};

/// Hardware so slow that whoever does not wait is early.
fn slow() -> Setup {
    Setup { unit: UnitConfig { latency: 50, ..UnitConfig::default() }, ..Setup::default() }
}

fn with_device_tlb() -> Setup {
    Setup { device_tlb: true, ..Setup::default() }
}

const PLANTS: &[Plant] = &[
    Plant {
        name: "embedder: CPU flush skipped",
        planted: |world| world.lies.set((Some(FlushLie::Skip), None)),
        ..PLANT
    },
    Plant {
        name: "embedder: IOTLB flush skipped",
        planted: |world| world.lies.set((None, Some(FlushLie::Skip))),
        ..PLANT
    },
    Plant {
        name: "embedder: release before the CPUs left",
        planted: |world| world.lies.set((Some(FlushLie::NoWait), None)),
        ..PLANT
    },
    Plant {
        name: "embedder: release before the wait",
        planted: |world| world.lies.set((None, Some(FlushLie::NoWait))),
        setup: slow,
        ..PLANT
    },
    Plant {
        name: "embedder: CPU missing from the set",
        honest: |world| world.enter(BACKEND, UNSEEN_CPU),
        planted: |world| world.enter_unseen(BACKEND, UNSEEN_CPU),
        scenario: unmap_with_a_second_cpu,
        ..PLANT
    },
    Plant {
        name: "embedder: only one of two tables edited",
        planted: |world| world.backend().forget_device_tables(),
        layouts: &[Layout::Separate],
        ..PLANT
    },
    Plant {
        name: "embedder: table page freed at unlink",
        planted: |world| world.hypervisor.memory.free_tables_at_unlink(),
        scenario: clear_range,
        expected: WitnessKind::ReleasedTable,
        ..PLANT
    },
    Plant {
        name: "embedder: rights lowered, CPUs not flushed",
        planted: |world| world.lies.set((Some(FlushLie::Skip), None)),
        scenario: lower_rights,
        expected: WitnessKind::MoreRights,
        ..PLANT
    },
    Plant {
        name: "embedder: rights lowered, devices not flushed",
        planted: |world| world.lies.set((None, Some(FlushLie::Skip))),
        scenario: lower_rights,
        expected: WitnessKind::MoreRights,
        ..PLANT
    },
    Plant {
        name: "unit: IOTLB invalidation ignored",
        planted: |world| unit_lies(world, Lie::IgnoreIotlb),
        ..PLANT
    },
    Plant {
        name: "unit: wrong domain id",
        planted: |world| unit_lies(world, Lie::WrongDomain),
        ..PLANT
    },
    Plant {
        name: "unit: mask one too small",
        planted: |world| unit_lies(world, Lie::SmallerMask),
        ..PLANT
    },
    Plant {
        name: "unit: wait completed early",
        planted: |world| unit_lies(world, Lie::EarlyWait),
        setup: slow,
        ..PLANT
    },
    Plant {
        name: "unit: drain bits ignored",
        planted: |world| unit_lies(world, Lie::IgnoreDrain),
        scenario: unmap_with_dma_in_flight,
        ..PLANT
    },
    Plant {
        name: "unit: walk cache kept",
        planted: |world| unit_lies(world, Lie::KeepWalks),
        scenario: clear_range,
        expected: WitnessKind::ReleasedTable,
        ..PLANT
    },
    Plant {
        name: "unit: device-TLB invalidation ignored",
        planted: |world| unit_lies(world, Lie::IgnoreDeviceTlb),
        setup: with_device_tlb,
        ..PLANT
    },
    Plant {
        name: "unit: context invalidation ignored at detach",
        planted: |world| unit_lies(world, Lie::IgnoreContext),
        scenario: detach,
        ..PLANT
    },
    Plant {
        name: "unit: context invalidation ignored at re-attach",
        planted: |world| unit_lies(world, Lie::IgnoreContext),
        scenario: reattach,
        ..PLANT
    },
    Plant {
        name: "CPU: invalidation ignored",
        planted: |world| world.machine.set_cpu_lie(OTHER_CPU, Some(CpuLie::IgnoreInvalidate)),
        ..PLANT
    },
    Plant {
        name: "CPU: walk cache kept",
        planted: |world| world.machine.set_cpu_lie(OTHER_CPU, Some(CpuLie::KeepWalks)),
        scenario: clear_range,
        expected: WitnessKind::ReleasedTable,
        ..PLANT
    },
    Plant {
        name: "CPU: kicked, and runs on",
        planted: |world| world.machine.set_cpu_lie(OTHER_CPU, Some(CpuLie::KeepRunning)),
        scenario: unmap_and_stay_out,
        ..PLANT
    },
];

const GRANTS: u32 = 32;
/// Where the backend maps grants: a multiple of 32.
const FIRST: u64 = 0x10_0000;
/// Where it has RAM whose tables hold nothing else.
const RAM: u64 = 0x40_0000;
/// Frames that one table of the lowest level serves.
const TABLE_SPAN: u64 = 512;
const UNSEEN_CPU: usize = 2;

fn unit_lies(world: &World, lie: Lie) {
    world.machine.set_lie(UnitId(0), Some(lie));
}

fn gfns() -> Vec<Gfn> {
    (FIRST..).take(GRANTS as usize).map(Gfn::new).collect()
}

/// Whatever may still reach a page tries to; says how often that worked.
fn try_all(world: &World, gfns: &[Gfn]) -> usize {
    let mut reached = 0;
    for gfn in gfns {
        for cpu in [OTHER_CPU, UNSEEN_CPU] {
            reached += usize::from(world.cpu_reaches(cpu, *gfn));
        }
        reached += usize::from(world.device_reaches(*gfn));
    }
    reached
}

/// The backend gives everything back, the frontend frees it, and everybody tries again.
fn give_back(world: &World, gfns: &[Gfn], handles: Vec<u32>) {
    let mappings: Vec<_> = handles.into_iter().zip(gfns.iter().copied()).collect();
    let ended = world.unmap(&mappings);
    assert_eq!(ended.outcome, Outcome::Done);
    assert_eq!(world.statuses(mappings.len()), vec![0; mappings.len()]);
    world.take_back_all(GRANTS);
    try_all(world, gfns);
}

fn share(world: &World, gfns: &[Gfn]) -> Vec<u32> {
    world.share(gfns).into_iter().map(|(_, handle)| handle).collect()
}

fn unmap(world: &World, twist: fn(&World)) {
    let gfns = gfns();
    let handles = share(world, &gfns);
    twist(world);
    give_back(world, &gfns, handles);
}

fn unmap_and_stay_out(world: &World, twist: fn(&World)) {
    world.stay_out.set(true);
    unmap(world, twist);
}

fn unmap_with_a_second_cpu(world: &World, twist: fn(&World)) {
    let gfns = gfns();
    let handles = share(world, &gfns);
    twist(world);
    for gfn in &gfns {
        assert!(world.cpu_reaches(UNSEEN_CPU, *gfn));
    }
    give_back(world, &gfns, handles);
}

fn unmap_with_dma_in_flight(world: &World, twist: fn(&World)) {
    let gfns = gfns();
    let handles = share(world, &gfns);
    let begin = |gfn: &Gfn| {
        let begun = world.machine.dma_begin_write(DEVICE.get(), gfn.get() << 12, &[7; 8]);
        begun.expect("the page is mapped")
    };
    let tickets: Vec<_> = gfns.iter().map(begin).collect();
    twist(world);
    give_back(world, &gfns, handles);
    for ticket in tickets {
        world.machine.dma_finish(ticket).expect("it was in flight");
    }
}

/// Pages of RAM, each with tables of its own.
fn sparse_ram(world: &World) -> Vec<Gfn> {
    let gfns: Vec<_> = (0..4).map(|page| Gfn::new(RAM + TABLE_SPAN * page)).collect();
    for gfn in &gfns {
        world.populate_block(BACKEND, *gfn, 0);
        world.touch(*gfn);
    }
    gfns
}

fn clear(world: &World, run: Run, edited: impl Fn()) {
    let ended = world.call_as(BACKEND, |caller| {
        caller.clear_range(run, |_| edited()).expect("the flush completes");
        Outcome::Done
    });
    assert_eq!(ended.outcome, Outcome::Done);
}

/// Clears RAM together with its tables. Neighbours that were never mapped are tried
/// through what is cached of the tables, before the flush and after it.
fn clear_range(world: &World, twist: fn(&World)) {
    let gfns = sparse_ram(world);
    let neighbours: Vec<_> = gfns.iter().map(|gfn| Gfn::new(gfn.get() + 7)).collect();
    twist(world);
    let last = Gfn::new(RAM + 4 * TABLE_SPAN - 1);
    let device_tries = || {
        let reached = neighbours.iter().filter(|gfn| world.device_reaches(**gfn)).count();
        assert_eq!(reached, 0, "nothing was ever mapped there");
    };
    clear(world, Run::new(gfns[0], last).expect("a range"), device_tries);
    try_all(world, &neighbours);
    try_all(world, &gfns);
}

/// Write access is taken away; then everybody writes.
fn lower_rights(world: &World, twist: fn(&World)) {
    let run = Run::block(Gfn::new(RAM), 2);
    let gfns: Vec<_> = (RAM..RAM + 4).map(Gfn::new).collect();
    for gfn in &gfns {
        world.populate_block(BACKEND, *gfn, 0);
        world.touch(*gfn);
    }
    twist(world);
    world.call_as(BACKEND, |caller| {
        let mut batch: Batch<Mfn, 1> = Batch::new(BACKEND);
        batch
            .edit_many(|skipped, _| caller.guest.restrict(run, Access::READ, skipped))
            .expect("the rights are taken");
        drop(batch.flush(&caller.hardware()).expect("the flush completes"));
        Outcome::Done
    });
    let tag = world.backend().dma.tag(0).expect("a device is attached").get();
    let cpu = Space::Cpu(world.backend().cpu_root().get() << 12);
    for space in [cpu, Space::Device { unit: UnitId(0), did: tag }] {
        world.machine.settled(space, RAM, RAM + 3);
    }
    try_all(world, &gfns);
}

fn detach(world: &World, twist: fn(&World)) {
    leave_the_backend(world, twist, || {
        let memory = &world.hypervisor.memory;
        let detached = world.backend().dma.detach(&world.units, memory, 0, DEVICE);
        detached.expect("the device is detached");
    });
}

fn reattach(world: &World, twist: fn(&World)) {
    leave_the_backend(world, twist, || {
        let memory = &world.hypervisor.memory;
        let device =
            Device { unit: 0, source: DEVICE, physical_function: DEVICE, device_tlb: None };
        let (from, to) = (&world.backend().dma, &world.frontend().dma);
        from.reattach(to, &world.units, memory, device).expect("the device is moved");
    });
}

/// The device leaves the backend, which then frees a page. No device has to be told.
fn leave_the_backend(world: &World, twist: fn(&World), leave: impl FnOnce()) {
    let gfns = sparse_ram(world);
    twist(world);
    leave();
    try_all(world, &gfns);
    for gfn in &gfns {
        clear(world, Run::single(*gfn), || {});
    }
    try_all(world, &gfns);
}

fn world(plant: &Plant, layout: Layout, policy: Policy) -> World {
    World::new(Setup { layout, policy, ..(plant.setup)() })
}

/// How many witnesses of the expected kind the planted bug leaves.
#[track_caller]
fn check_planted(plant: &Plant, layout: Layout) -> usize {
    let world = world(plant, layout, Policy::Greedy);
    (plant.scenario)(&world, plant.planted);
    let count = world.machine.count(plant.expected);
    let seen = world.machine.witnesses();
    assert!(count > 0, "{} ({layout:?}) was not seen; witnesses: {seen:?}", plant.name);
    count
}

#[track_caller]
fn check_honest(plant: &Plant, layout: Layout, policy: Policy) {
    let world = world(plant, layout, policy);
    (plant.scenario)(&world, plant.honest);
    let mut seen = world.machine.witnesses();
    seen.extend(world.audit());
    let seen: Vec<String> = seen.iter().map(ToString::to_string).collect();
    let name = plant.name;
    assert!(seen.is_empty(), "honest twin of {name} ({layout:?}, {policy:?}): {seen:#?}");
    assert_eq!(world.machine.misuses(), [], "honest twin of {name} ({layout:?}, {policy:?})");
    assert_eq!(world.released_early.get(), 0, "honest twin of {name} ({layout:?}, {policy:?})");
}

#[test]
fn every_planted_bug_is_witnessed() {
    let mut table = String::new();
    for plant in PLANTS {
        for layout in plant.layouts {
            let count = check_planted(plant, *layout);
            let layout = format!("{layout:?}").to_lowercase();
            let (name, kind) = (plant.name, format!("{:?}", plant.expected));
            table += &format!("planted | {name:<47} | {layout:<8} | {kind:<13} | {count}\n");
        }
    }
    print!("{table}");
}

#[test]
fn honest_twins_leave_nothing_stale() {
    for plant in PLANTS {
        for layout in plant.layouts {
            check_honest(plant, *layout, Policy::Greedy);
        }
    }
}

#[test]
fn honest_twins_leave_nothing_stale_on_hardware_that_acts_at_random() {
    for (seed, plant) in (1..).zip(PLANTS) {
        for layout in plant.layouts {
            check_honest(plant, *layout, Policy::Random(seed));
        }
    }
}
