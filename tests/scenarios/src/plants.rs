//! Planted bugs by name: hardware that lies, and an embedding that lies.
//!
//! A [`Plant`] is put into a world before the first step. A scenario with teeth fails
//! under at least one of them.

use host::{
    FlushLie, World,
    world::{BACKEND, OTHER_CPU},
};
use hwmodel::{CpuLie, Lie, UnitId};

/// What an embedding does wrong beside its flushes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Slip {
    /// It says that it wrote to the guest, and did not.
    LostWrite,
    /// It says that it counted a page, and did not.
    Uncounted,
    /// It says that it removed a mapping, and did not.
    EntryKept,
    /// It drops its reference on a page as soon as the mapping is gone.
    EarlyDrop,
    /// A CPU that runs a guest is not in that guest's books.
    Unseen,
    /// It flushes twice where it was asked once.
    Twice,
    /// It always lets the call go on, whatever waits.
    NoPreemption,
    /// It takes a granter's table when it has the maptrack.
    LockOrder,
    /// It looks a page up, and counts it only after it let the lock go.
    LookedUpBefore,
    /// It takes any flush of the same domain that ends for the one it waits for.
    AnothersDone,
}

/// A planted bug.
#[derive(Clone, Copy)]
pub struct Plant {
    /// Its name on the command line.
    pub name: &'static str,
    /// What is wrong.
    pub about: &'static str,
    /// Hardware is made slow, so that whoever does not wait is early.
    pub slow: bool,
    /// What the embedding does wrong.
    pub slip: Option<Slip>,
    /// Nothing but actors that take turns can show it.
    pub turns: bool,
    pub(crate) apply: fn(&World),
}

impl std::fmt::Debug for Plant {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("Plant").field(&self.name).finish()
    }
}

impl Plant {
    /// Whether it is all in a world: no part of it is in how scenarios call the library.
    #[must_use]
    pub const fn is_of_a_world(&self) -> bool {
        self.slip.is_none()
    }

    /// Plants it, as far as it [is in the world](Self::is_of_a_world).
    pub fn plant(&self, world: &World) {
        (self.apply)(world);
    }
}

const PLANT: Plant =
    Plant { name: "", about: "", slow: false, slip: None, turns: false, apply: |_| {} };

fn units_lie(world: &World, lie: Lie) {
    for unit in 0..world.units.len() {
        world.machine.set_lie(UnitId(unit), Some(lie));
    }
}

fn cpus_lie(world: &World, lie: CpuLie) {
    for cpu in 0..=crate::parse::LAST_CPU {
        world.machine.set_cpu_lie(cpu, Some(lie));
    }
}

/// No bug: hardware is slow, and that alone must break nothing.
pub const SLOW: Plant = Plant { name: "slow", slow: true, ..PLANT };

/// All of them.
pub const PLANTS: &[Plant] = &[
    Plant {
        name: "skip-tlb",
        about: "the embedding says that CPUs forgot, and told none",
        apply: |world| world.lies.set((Some(FlushLie::Skip), None)),
        ..PLANT
    },
    Plant {
        name: "skip-iotlb",
        about: "the embedding says that devices were flushed, and gave no command",
        apply: |world| world.lies.set((None, Some(FlushLie::Skip))),
        ..PLANT
    },
    Plant {
        name: "no-wait-tlb",
        about: "the embedding does not wait until the CPUs have left",
        apply: |world| world.lies.set((Some(FlushLie::NoWait), None)),
        ..PLANT
    },
    Plant {
        name: "no-wait-iotlb",
        about: "the embedding does not wait until the unit is done",
        slow: true,
        apply: |world| world.lies.set((None, Some(FlushLie::NoWait))),
        ..PLANT
    },
    Plant {
        name: "one-table",
        about: "the embedding edits the CPUs' table only",
        apply: |world| {
            world.hypervisor.guests.iter().for_each(host::Guest::forget_device_tables);
        },
        ..PLANT
    },
    Plant {
        name: "table-freed",
        about: "the embedding frees a table page as soon as it is unlinked",
        apply: |world| world.hypervisor.memory.free_tables_at_unlink(),
        ..PLANT
    },
    Plant {
        name: "lost-write",
        about: "the embedding loses what it writes to the guest",
        slip: Some(Slip::LostWrite),
        ..PLANT
    },
    Plant {
        name: "uncounted",
        about: "the embedding does not count the pages it maps",
        slip: Some(Slip::Uncounted),
        ..PLANT
    },
    Plant {
        name: "entry-kept",
        about: "the embedding leaves the entries it says it removed",
        slip: Some(Slip::EntryKept),
        ..PLANT
    },
    Plant {
        name: "early-drop",
        about: "the embedding drops page references before the flush",
        slip: Some(Slip::EarlyDrop),
        ..PLANT
    },
    Plant {
        name: "unseen-cpu",
        about: "CPUs that run a guest are not in its books",
        slip: Some(Slip::Unseen),
        ..PLANT
    },
    Plant {
        name: "flush-twice",
        about: "the embedding flushes twice where it was asked once",
        slip: Some(Slip::Twice),
        ..PLANT
    },
    Plant {
        name: "no-preemption",
        about: "the embedding never lets a call be left",
        slip: Some(Slip::NoPreemption),
        ..PLANT
    },
    Plant {
        name: "lock-order",
        about: "the embedding locks a granter's table when it holds the maptrack",
        slip: Some(Slip::LockOrder),
        turns: true,
        ..PLANT
    },
    Plant {
        name: "looked-up-before",
        about: "the embedding looks a page up, and counts it when the lock is gone",
        slip: Some(Slip::LookedUpBefore),
        turns: true,
        ..PLANT
    },
    Plant {
        name: "anothers-done",
        about: "the embedding takes a flush of the same domain that ends for its own",
        slow: true,
        slip: Some(Slip::AnothersDone),
        turns: true,
        ..PLANT
    },
    Plant {
        name: "ignore-iotlb",
        about: "units ignore IOTLB invalidations",
        apply: |world| units_lie(world, Lie::IgnoreIotlb),
        ..PLANT
    },
    Plant {
        name: "ignore-context",
        about: "units ignore context-cache invalidations",
        apply: |world| units_lie(world, Lie::IgnoreContext),
        ..PLANT
    },
    Plant {
        name: "ignore-device-tlb",
        about: "devices ignore device-TLB invalidations",
        apply: |world| units_lie(world, Lie::IgnoreDeviceTlb),
        ..PLANT
    },
    Plant {
        name: "wrong-domain",
        about: "units invalidate another domain id",
        apply: |world| units_lie(world, Lie::WrongDomain),
        ..PLANT
    },
    Plant {
        name: "smaller-mask",
        about: "units invalidate half of each block of pages",
        apply: |world| units_lie(world, Lie::SmallerMask),
        ..PLANT
    },
    Plant {
        name: "early-wait",
        about: "units complete waits before the commands ahead of them",
        slow: true,
        apply: |world| units_lie(world, Lie::EarlyWait),
        ..PLANT
    },
    Plant {
        name: "ignore-drain",
        about: "units do not drain DMA that is in flight",
        apply: |world| units_lie(world, Lie::IgnoreDrain),
        ..PLANT
    },
    Plant {
        name: "keep-walks",
        about: "units keep pointers to tables",
        apply: |world| units_lie(world, Lie::KeepWalks),
        ..PLANT
    },
    Plant {
        name: "lost-tlb-control",
        about: "the embedding enters guests by VMRUN and does not say what to flush",
        apply: World::forget_tlb_control,
        ..PLANT
    },
    Plant {
        name: "no-marks",
        about: "the embedding runs guests without accessed flags that it goes by",
        apply: |world| {
            world.without_marks.set(true);
            // CPU 1 is inside from the start.
            world.leave(OTHER_CPU);
            world.enter(BACKEND, OTHER_CPU);
        },
        ..PLANT
    },
    Plant {
        name: "cpu-ignore-invalidate",
        about: "CPUs ignore invalidations",
        apply: |world| cpus_lie(world, CpuLie::IgnoreInvalidate),
        ..PLANT
    },
    Plant {
        name: "cpu-keep-walks",
        about: "CPUs keep pointers to tables",
        apply: |world| cpus_lie(world, CpuLie::KeepWalks),
        ..PLANT
    },
    Plant {
        name: "cpu-cache-unmarked",
        about: "CPUs cache what they have not marked as accessed",
        apply: |world| cpus_lie(world, CpuLie::CacheUnmarked),
        ..PLANT
    },
    Plant {
        name: "cpu-keep-running",
        about: "a CPU that is kicked runs on",
        apply: |world| world.machine.set_cpu_lie(OTHER_CPU, Some(CpuLie::KeepRunning)),
        ..PLANT
    },
];

/// The plant of this name.
#[must_use]
pub fn named(name: &str) -> Option<&'static Plant> {
    PLANTS.iter().find(|plant| plant.name == name)
}
