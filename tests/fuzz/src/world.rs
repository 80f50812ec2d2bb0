//! The two guests that the targets play with, and what must always be true of them.
//!
//! [`Start`] says what hardware there is. [`Books`] counts, from the guests' tables alone,
//! how many references each page has to have, and compares that with what is counted.

use std::{
    cell::RefCell,
    collections::{BTreeMap, BTreeSet},
};

use arbitrary::Arbitrary;
use flush::{DomainId, Gfn, Mfn};
use gnttab::{Outcome, Teardown, release_all};
use host::{
    Guest, Layout, Setup, World,
    world::{BACKEND, FRONTEND, ModelFailed, ModelRam, OTHER_CPU, device_behind},
};
use hwmodel::{Access, Failure, Policy, UnitConfig};
use p2m::PageKind;
use scenarios::plants::Plant;

use crate::{
    sheet::{Sheet, keys, number},
    watched::Watcher,
};

/// The hardware of a run.
#[derive(Clone, Copy, Debug, Arbitrary)]
pub(crate) struct Start {
    /// Devices walk the CPUs' tables.
    shared: bool,
    /// The unit is told by its registers.
    registers: bool,
    /// The device has a TLB of its own.
    device_tlb: bool,
    caching_mode: bool,
    /// The unit reads memory past the CPUs' caches.
    incoherent: bool,
    /// Only whole domains can be flushed.
    no_pages: bool,
    small_mask: bool,
    /// Hardware that evicts and fetches at random, not only when it must.
    policy: Option<u8>,
}

impl Start {
    /// A world of so many frames, with whatever bug is planted.
    pub(crate) fn world(self, frames: u64, manner: &Manner) -> World {
        let mut unit = UnitConfig {
            caching_mode: self.caching_mode,
            coherent: !self.incoherent,
            page_selective: !self.no_pages,
            ..UnitConfig::default()
        };
        if self.small_mask {
            unit.max_address_mask = 3;
        }
        if manner.plant.is_some_and(|plant| plant.slow) {
            unit.latency = SLOW;
        }
        manner.sheet.frame("machine", self.machine(frames));
        manner.sheet.frame(
            "unit",
            keys! {
                page_selective: unit.page_selective,
                max_address_mask: unit.max_address_mask,
                caching_mode: unit.caching_mode,
                coherent: unit.coherent,
            },
        );
        let world = World::new(Setup {
            layout: if self.shared { Layout::Shared } else { Layout::Separate },
            unit,
            registers: self.registers,
            // Only the queue can tell a device's own TLB anything.
            device_tlb: self.device_tlb && !self.registers,
            policy: self.policy.map_or(Policy::Greedy, |seed| Policy::Random(u64::from(seed) + 1)),
            frames,
            ..Setup::default()
        });
        if let Some(plant) = manner.plant {
            plant.plant(&world);
        }
        world
    }

    fn machine(self, frames: u64) -> toml::Table {
        keys! {
            tables: if self.shared { "shared" } else { "separate" },
            frames: number(frames),
            device_tlb: self.device_tlb && !self.registers,
            registers: self.registers,
        }
    }

    /// The seed with which a scenario is played on the same hardware, if that is at random.
    pub(crate) fn seed(self) -> u64 {
        self.policy.map_or(0, u64::from)
    }
}

/// Ticks until a command is carried out on hardware that is slow, so that whoever does not
/// wait is early.
const SLOW: u32 = 50;

/// How a story is played.
#[derive(Clone, Debug, Default)]
pub(crate) struct Manner {
    /// With this bug planted.
    pub(crate) plant: Option<&'static Plant>,
    /// Written down here.
    pub(crate) sheet: Sheet,
}

/// One of the two guests.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Arbitrary)]
pub(crate) enum Who {
    Front,
    Back,
}

impl Who {
    pub(crate) const ALL: [Self; 2] = [Self::Front, Self::Back];

    pub(crate) fn other(self) -> Self {
        match self {
            Self::Front => Self::Back,
            Self::Back => Self::Front,
        }
    }

    pub(crate) fn id(self) -> DomainId {
        match self {
            Self::Front => FRONTEND,
            Self::Back => BACKEND,
        }
    }

    pub(crate) fn guest(self, world: &World) -> &Guest<ModelRam> {
        match self {
            Self::Front => world.frontend(),
            Self::Back => world.backend(),
        }
    }
}

/// How hardware fails.
#[derive(Clone, Copy, Debug, Arbitrary)]
pub(crate) enum Fails {
    Hang,
    QueueError,
    TimeOut,
    CompletionError,
}

impl From<Fails> for Failure {
    fn from(fails: Fails) -> Self {
        match fails {
            Fails::Hang => Self::Hang,
            Fails::QueueError => Self::QueueError,
            Fails::TimeOut => Self::TimeOut,
            Fails::CompletionError => Self::CompletionError,
        }
    }
}

/// The pages that guests began with, and all places where one of them may be mapped.
#[derive(Debug, Default)]
pub(crate) struct Books {
    pub(crate) pages: BTreeSet<Mfn>,
    pub(crate) places: RefCell<BTreeSet<Gfn>>,
}

impl Watcher for Books {
    fn turn(&self) {}

    fn names(&self, gfn: Gfn) {
        self.places.borrow_mut().insert(gfn);
    }
}

impl Books {
    /// References and type references that the guests' tables account for.
    fn shown(&self, world: &World) -> BTreeMap<Mfn, (u32, u32)> {
        let mut shown: BTreeMap<Mfn, (u32, u32)> = BTreeMap::new();
        for who in Who::ALL {
            for gfn in &*self.places.borrow() {
                let Some(mapping) = who.guest(world).lookup(*gfn) else { continue };
                let typed = mapping.kind == Some(PageKind::GrantReadWrite);
                let counts = shown.entry(mapping.mfn).or_default();
                counts.0 += 1;
                counts.1 += u32::from(typed);
            }
        }
        shown
    }

    /// Checks that each page has the references of its entries, those of pages that a
    /// failed flush holds apart.
    #[track_caller]
    pub(crate) fn check(&self, world: &World, failed: &[ModelFailed<'_>]) {
        let shown = self.shown(world);
        for mfn in &self.pages {
            let counted = world.hypervisor.pages.get(*mfn);
            let entries = shown.get(mfn).copied().unwrap_or_default();
            if failed.is_empty() {
                assert_eq!(counted, entries, "references on {mfn:?}, and its entries");
            } else {
                let enough = counted.0 >= entries.0 && counted.1 >= entries.1;
                assert!(enough, "{mfn:?} has {entries:?} entries and {counted:?} references");
            }
        }
        world.check_unharmed();
    }
}

/// The backend's CPU and device use whatever they reach at a place: read, write; read, write.
///
/// A fault is no harm: what is used that must not be is the model's to say.
pub(crate) fn touch(world: &World, gfn: Gfn) -> [bool; 4] {
    let (address, machine) = (gfn.get() << 12, &world.machine);
    [
        machine.access(OTHER_CPU, address, Access::Read).is_ok(),
        machine.access(OTHER_CPU, address, Access::Write).is_ok(),
        machine.dma_read64(device_behind(0).get(), address).is_ok(),
        machine.dma_write64(device_behind(0).get(), address, 1).is_ok(),
    ]
}

/// Ends both guests' mappings: nothing is in use afterwards.
#[track_caller]
pub(crate) fn end_of(world: &World) {
    world.leave(OTHER_CPU);
    let memory = &world.hypervisor.memory;
    for unit in 0..world.units.len() {
        let source = device_behind(unit);
        world.backend().dma.detach(&world.units, memory, unit, source).expect("it detaches");
    }
    for who in Who::ALL {
        let ended = world.call_as(who.id(), |caller| {
            assert_eq!(release_all(caller, 0), Teardown::Done, "{who:?}");
            Outcome::Done
        });
        assert!(ended.failed.is_empty(), "{who:?}");
    }
    for who in Who::ALL {
        assert_eq!(who.guest(world).grants().pinned(), 0, "{who:?}");
    }
    world.check_unharmed();
}

impl Books {
    /// After [`end_of`]: a page is counted by its owner alone, if that still has it.
    #[track_caller]
    pub(crate) fn check_end(&self, world: &World) {
        let mut ram: BTreeMap<Mfn, u32> = BTreeMap::new();
        for who in Who::ALL {
            for gfn in &*self.places.borrow() {
                if let Some(found) = who.guest(world).lookup(*gfn)
                    && found.kind == Some(PageKind::RamReadWrite)
                {
                    *ram.entry(found.mfn).or_default() += 1;
                }
            }
        }
        for mfn in &self.pages {
            let owned = ram.get(mfn).copied().unwrap_or_default();
            assert_eq!(world.hypervisor.pages.get(*mfn), (owned, 0), "{mfn:?} in the end");
        }
    }
}
