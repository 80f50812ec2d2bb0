//! Planted bugs: an embedder that lies about its flushes. The damage must be seen.

use gnttab::Rights;
use testbed::audit::Lie;
use testbed::ensure;
use testbed::failure::Failure;

use super::story::count_landed;
use crate::devices::edu::Edu;
use crate::embedding::Layout;
use crate::machine::Machine;
use crate::say;
use crate::world::{BACKEND, BYSTANDER, Grants, Manner, Overwritten, World};

/// The embedder says that it flushed, and did not.
pub(super) fn skipped(machine: &Machine) -> Result<(), Failure> {
    let world = World::new(machine, Layout::Separate)?;
    damage(&world, Lie::Skipped, 0)
}

/// The embedder flushes another domain, with exactly the commands that were needed.
pub(super) fn wrong_domain(machine: &Machine) -> Result<(), Failure> {
    let world = World::new(machine, Layout::Separate)?;
    let edu = Edu::open(0, u64::MAX)?;
    let device = world.hypervisor.iommu.device(edu.function())?;
    world.attach(world.guest(BYSTANDER)?, device)?;
    damage(&world, Lie::Misdirected(BYSTANDER), 1)
}

/// Every page is given up too early, and the device reaches every one of them.
fn damage(world: &World, lie: Lie, commands: u64) -> Result<(), Failure> {
    const COUNT: u64 = 32;
    let grants = Grants::new(COUNT, Rights::ReadWrite)?;
    world.share(&grants)?;
    ensure!(count_landed(world, &grants)? == COUNT, "the device does not reach the pages");
    let before = world.counters().iotlb_commands;
    world.unmap_well(&grants, grants.all(), &Manner::lying(lie))?;
    let given = world.counters().iotlb_commands - before;
    ensure!(given == commands, "{given} commands were given");
    let early = world.audit.released_early();
    ensure!(early == COUNT, "{early} pages were given up too early");
    let mut stale = 0;
    for place in grants.all() {
        let gfn = grants.gfn(place);
        ensure!(world.is_unmapped(gfn)?, "grant {place} is still mapped");
        let page = world.take_back(place)?;
        stale += u64::from(world.lands(gfn, page)?);
    }
    ensure!(stale == COUNT, "the device reaches {stale} freed pages");
    world.no_fault()?;
    // The flush that was owed ends it.
    world.flush_everything(world.guest(BACKEND)?)?;
    for place in grants.all() {
        world.write_page(grants.gfn(place))?;
        let (faults, _) = world.faults();
        ensure!(faults.len() == 1, "the device reaches grant {place} after all");
    }
    say!("@ damage stale_accesses={stale} released_early={early} iotlb_commands={given}");
    world.report_boot(Overwritten::default());
    Ok(())
}
