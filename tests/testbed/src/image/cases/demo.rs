//! The main job: unmap grants under three policies, with a device that tries again.

use flush::Gfn;
use gnttab::Rights;
use testbed::audit::Lie;
use testbed::ensure;
use testbed::failure::Failure;

use crate::embedding::Layout;
use crate::machine::Machine;
use crate::say;
use crate::world::{BACKEND, Grants, Manner, Overwritten, World};

/// When flushes happen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Policy {
    /// One hypercall, and so one flush of each kind, for every page.
    PerPage,
    /// One hypercall for all pages, and one flush of each kind for every 32.
    Batched,
    /// The planted bug: the embedder says that it flushed, and did not.
    NoFlush,
}

impl Policy {
    const fn name(self) -> &'static str {
        match self {
            Self::PerPage => "per-page",
            Self::Batched => "batched",
            Self::NoFlush => "no-flush",
        }
    }
}

/// One hypercall for each page.
pub(super) fn per_page(machine: &Machine) -> Result<(), Failure> {
    run(machine, Policy::PerPage)
}

/// One hypercall for all pages.
pub(super) fn batched(machine: &Machine) -> Result<(), Failure> {
    run(machine, Policy::Batched)
}

/// One hypercall for all pages, whose flushes are a lie.
pub(super) fn no_flush(machine: &Machine) -> Result<(), Failure> {
    run(machine, Policy::NoFlush)
}

/// What is counted around the unmap.
struct Counts {
    tlb_flushes: u64,
    iotlb_flushes: u64,
    iotlb_commands: u64,
    waits: u64,
    pages_flushed: u64,
    given_up: u64,
}

impl Counts {
    fn of(world: &World) -> Self {
        let unit = world.counters();
        Self {
            tlb_flushes: world.audit.tlb.carried_out(),
            iotlb_flushes: world.audit.iotlb.carried_out(),
            iotlb_commands: unit.iotlb_commands,
            waits: unit.waits,
            pages_flushed: unit.pages_flushed,
            given_up: world.audit.given_up(),
        }
    }
}

fn run(machine: &Machine, policy: Policy) -> Result<(), Failure> {
    let line = machine.command_line();
    let wanted = line.get("policy").unwrap_or(policy.name());
    ensure!(wanted == policy.name(), "policy={wanted} is another case");
    let grants = Grants::new(line.number("grants", 32)?, Rights::ReadWrite)?;

    let world = World::new(machine, Layout::Separate)?;
    world.share(&grants)?;
    for place in grants.all() {
        let page = world.granted_page(place)?;
        ensure!(world.lands(grants.gfn(place), page)?, "the device does not reach grant {place}");
    }
    world.no_fault()?;

    let before = Counts::of(&world);
    match policy {
        Policy::PerPage => {
            for place in grants.all() {
                world.unmap_well(&grants, place..place + 1, &Manner::HONEST)?;
            }
        }
        Policy::Batched => world.unmap_well(&grants, grants.all(), &Manner::HONEST)?,
        Policy::NoFlush => {
            world.unmap_well(&grants, grants.all(), &Manner::lying(Lie::Skipped))?;
        }
    }
    let after = Counts::of(&world);
    let pages_changed = count(&grants, |gfn, _| world.is_unmapped(gfn))?;
    ensure!(after.given_up - before.given_up == pages_changed, "pages are still held");

    // The owner frees its pages, and the device tries again.
    let stale_accesses = count(&grants, |gfn, place| {
        let page = world.take_back(place)?;
        match policy {
            Policy::PerPage | Policy::Batched => world.is_kept_out(gfn, page).map(|()| false),
            Policy::NoFlush => world.lands(gfn, page),
        }
    })?;
    let released_early = world.audit.released_early();
    let expected = if policy == Policy::NoFlush { grants.len() } else { 0 };
    ensure!(released_early == expected, "{released_early} pages were given up too early");
    say!(
        "@ demo policy={} grants={} tlb_flushes={} iotlb_flushes={} iotlb_commands={} waits={} \
         pages_changed={pages_changed} pages_flushed={} stale_accesses={stale_accesses} \
         released_early={released_early}",
        policy.name(),
        grants.len(),
        after.tlb_flushes - before.tlb_flushes,
        after.iotlb_flushes - before.iotlb_flushes,
        after.iotlb_commands - before.iotlb_commands,
        after.waits - before.waits,
        after.pages_flushed - before.pages_flushed
    );
    world.report_boot(Overwritten::default());
    let kicks = world.guest(BACKEND)?.cpus().counts().kicks;
    ensure!(kicks == 0, "{kicks} processors were kicked, and there is no other");
    Ok(())
}

/// For how many grants `holds` is true.
fn count(
    grants: &Grants,
    holds: impl Fn(Gfn, u32) -> Result<bool, Failure>,
) -> Result<u64, Failure> {
    let mut counted = 0;
    for place in grants.all() {
        counted += u64::from(holds(grants.gfn(place), place)?);
    }
    Ok(counted)
}
