//! The main job on the model: unmap N grants under three policies.

use flush::Gfn;
use hwmodel::{Machine, WitnessKind};

use crate::{FlushLie, Setup, World, world::Flushes};

/// When flushes happen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Policy {
    /// One hypercall, and so one flush of each kind, for every page.
    PerPage,
    /// One hypercall for all pages, and one flush of each kind for every 32.
    Batched,
    /// The planted bug: the embedder says that it flushed, and did not.
    NoFlush,
}

/// What one policy cost, and what it let through.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Row {
    /// Flushes of CPUs that were carried out.
    pub tlb_flushes: u64,
    /// Flushes of devices that were carried out.
    pub iotlb_flushes: u64,
    /// IOTLB invalidation commands that the unit executed.
    pub iotlb_commands: u64,
    /// Wait descriptors that the unit executed.
    pub waits: u64,
    /// Pages whose translation was removed.
    pub pages_changed: u64,
    /// Pages that the commands named.
    pub pages_flushed: u64,
    /// Device writes that reached a page after its release.
    pub stale_accesses: u64,
    /// Pages given up while hardware could still reach them.
    pub released_early: u64,
}

/// Where the backend maps the first grant: a multiple of 32 frames.
const FIRST: u64 = 0x10_0000;

/// Unmaps `grants` grants, then lets the device write to each page once more.
///
/// # Panics
/// If the backend cannot map or unmap: that is a defect of the project.
#[must_use]
pub fn run(policy: Policy, grants: u32) -> Row {
    let setup = Setup { frames: 8192 + 2 * u64::from(grants), ..Setup::default() };
    let world = World::new(setup);
    let gfns: Vec<Gfn> = (FIRST..).take(grants as usize).map(Gfn::new).collect();
    let shared = world.share(&gfns);
    let mappings: Vec<(u32, Gfn)> =
        shared.iter().zip(&gfns).map(|((_, handle), gfn)| (*handle, *gfn)).collect();
    if policy == Policy::NoFlush {
        world.lies.set((Some(FlushLie::Skip), Some(FlushLie::Skip)));
    }

    let before = counters(&world.machine);
    let mut flushes = Flushes::default();
    let calls = match policy {
        Policy::PerPage => mappings.chunks(1),
        Policy::Batched | Policy::NoFlush => mappings.chunks(mappings.len()),
    };
    for call in calls {
        let ended = world.unmap(call);
        assert_eq!(ended.outcome, gnttab::Outcome::Done);
        assert!(world.statuses(call.len()).iter().all(|status| *status == 0));
        if policy != Policy::NoFlush {
            flushes.tlb += ended.flushes.tlb;
            flushes.iotlb += ended.flushes.iotlb;
        }
    }
    let after = counters(&world.machine);

    // The owner frees its pages, and the device tries again.
    world.take_back_all(grants);
    let reached = gfns.iter().filter(|gfn| world.device_reaches(**gfn)).count() as u64;
    let stale_accesses = world.machine.count(WitnessKind::ReleasedFrame) as u64;
    assert_eq!(stale_accesses, reached, "the model saw every access that got through");
    Row {
        tlb_flushes: flushes.tlb,
        iotlb_flushes: flushes.iotlb,
        iotlb_commands: after.iotlb_commands() - before.iotlb_commands(),
        waits: after.waits - before.waits,
        pages_changed: gfns.iter().filter(|gfn| world.backend().lookup(**gfn).is_none()).count()
            as u64,
        pages_flushed: after.pages_flushed - before.pages_flushed,
        stale_accesses,
        released_early: world.released_early.get(),
    }
}

fn counters(machine: &Machine) -> hwmodel::UnitCounters {
    machine.counters().units.first().copied().unwrap_or_default()
}
