//! Devices that change hands, that lose their domain, and that fault together.

use flush::{Gfn, Mfn};
use iommu_vtd::{Fault, Reason, Request};
use testbed::ensure;
use testbed::failure::{Context, Failure};

use crate::devices::edu::Edu;
use crate::embedding::{Guest, Layout, Memory};
use crate::machine::Machine;
use crate::poison;
use crate::say;
use crate::world::{BACKEND, BYSTANDER, Overwritten, World};

/// A number at which two domains have different pages.
const BOTH: Gfn = Gfn::new(0x4000);
/// A number at which only the backend has a page.
const ONE: Gfn = Gfn::new(0x4001);
/// A number at which nobody has one.
const NONE: Gfn = Gfn::new(0x4002);

/// The controller writes at [`BOTH`]: into `own` and not into `other`.
fn writes_into(world: &World, own: Mfn, other: Mfn) -> Result<(), Failure> {
    let untouched = poison::fill(other)?;
    ensure!(world.lands(BOTH, own)?, "the device does not reach {own:?}");
    ensure!(untouched.iter().all(poison::is_left), "the device reached {other:?}");
    world.no_fault()
}

/// The controller goes from the backend to another domain, and back.
pub(super) fn reattach(machine: &Machine) -> Result<(), Failure> {
    let world = World::new(machine, Layout::Separate)?;
    let (backend, bystander) = (world.guest(BACKEND)?, world.guest(BYSTANDER)?);
    let ours = world.hypervisor.populate(backend, BOTH, 0)?;
    let only = world.hypervisor.populate(backend, ONE, 0)?;
    let theirs = world.hypervisor.populate(bystander, BOTH, 0)?;
    writes_into(&world, ours, theirs)?;
    ensure!(world.lands(ONE, only)?, "the device does not reach {only:?}");
    // Taking the entry away is not enough: two caches remember it.
    world.without_context(world.controller, || {
        ensure!(world.lands(ONE, only)?, "nothing was cached");
        Ok(())
    })?;

    let first_tag = world.tag(backend)?;
    hand_over(&world, backend, bystander)?;
    let other_tag = world.tag(bystander)?;
    writes_into(&world, theirs, ours)?;
    world.is_kept_out(ONE, only)?;
    ensure!(backend.dma().devices() == 0, "the backend still has a device");

    hand_over(&world, bystander, backend)?;
    let last_tag = world.tag(backend)?;
    writes_into(&world, ours, theirs)?;
    ensure!(world.lands(ONE, only)?, "the device does not reach {only:?} again");
    world.no_fault()?;
    say!("@ reattach tags={first_tag},{other_tag},{last_tag}");
    world.report_boot(Overwritten::default());
    Ok(())
}

/// Reset the controller, move it, and start it on queues of its new owner.
fn hand_over(world: &World, from: &Guest, to: &Guest) -> Result<(), Failure> {
    world.stop_controller()?;
    let units = world.hypervisor.iommu.units();
    from.dma().reattach(to.dma(), units, &Memory, world.controller).context("reattach")?;
    world.start_controller(to)
}

/// A detached device is blocked at once; its neighbour in the domain goes on.
pub(super) fn detach(machine: &Machine) -> Result<(), Failure> {
    let world = World::new(machine, Layout::Separate)?;
    let (backend, units) = (world.guest(BACKEND)?, world.hypervisor.iommu.units());
    let page = world.hypervisor.populate(backend, BOTH, 0)?;
    let edu = Edu::open(0, u64::MAX)?;
    let device = world.hypervisor.iommu.device(edu.function())?;
    ensure!(!World::edu_lands(&edu, BOTH, page)?, "a device of no domain reached memory");
    world.refused(device, Request::Write, BOTH, Reason::NotAttached)?;

    world.attach(backend, device)?;
    ensure!(World::edu_lands(&edu, BOTH, page)?, "an attached device is blocked");
    world.without_context(device, || {
        ensure!(World::edu_lands(&edu, BOTH, page)?, "nothing was cached");
        Ok(())
    })?;
    world.no_fault()?;
    backend.dma().detach(units, &Memory, device.unit, device.source).context("detach")?;
    ensure!(!World::edu_lands(&edu, BOTH, page)?, "a detached device reached memory");
    world.refused(device, Request::Write, BOTH, Reason::NotAttached)?;
    ensure!(world.lands(BOTH, page)?, "the other device of the domain is blocked");
    world.no_fault()?;

    let tag = world.tag(backend)?;
    let last = world.controller;
    backend.dma().detach(units, &Memory, last.unit, last.source).context("detach")?;
    let words = poison::fill(page)?;
    ensure!(world.write_page(BOTH).is_err(), "a blocked controller fetched a command");
    ensure!(words.iter().all(poison::is_left), "a blocked controller wrote memory");
    let (faults, _) = world.faults();
    let fault = faults.first().context("a fault of the controller")?;
    ensure!(
        fault.source == last.source && fault.reason == Reason::NotAttached,
        "the fault is {fault:x?}"
    );
    ensure!(backend.dma().tag(last.unit).is_none(), "number {tag} is still in use");
    say!("@ detach tag={tag} devices={}", backend.dma().devices());
    world.report_boot(Overwritten::default());
    Ok(())
}

/// Two devices fault: each is seen; together one is recorded and the loss of one reported.
pub(super) fn two_faults(machine: &Machine) -> Result<(), Failure> {
    let world = World::new(machine, Layout::Separate)?;
    let backend = world.guest(BACKEND)?;
    let edu = Edu::open(0, u64::MAX)?;
    let device = world.hypervisor.iommu.device(edu.function())?;
    world.attach(backend, device)?;
    let page = world.hypervisor.populate(backend, BOTH, 0)?;
    ensure!(world.lands(BOTH, page)?, "the controller is blocked");
    ensure!(World::edu_lands(&edu, BOTH, page)?, "the other device is blocked");
    world.no_fault()?;

    let controller_fault = Fault {
        source: world.controller.source,
        page: NONE.into(),
        request: Request::Write,
        reason: Reason::NotWritable,
    };
    world.write_page(NONE)?;
    world.refused(world.controller, Request::Write, NONE, Reason::NotWritable)?;
    ensure!(!World::edu_lands(&edu, NONE, page)?, "the write went elsewhere");
    world.refused(device, Request::Write, NONE, Reason::NotWritable)?;
    edu.read_memory(crate::world::address(NONE)?, 8)?;
    world.refused(device, Request::Read, NONE, Reason::NotReadable)?;

    // The unit has one record: the second device's fault is lost, and that is said.
    world.write_page(NONE)?;
    edu.read_memory(crate::world::address(NONE)?, 8)?;
    let (faults, summary) = world.faults();
    ensure!(*faults == [controller_fault], "the faults are {faults:x?}");
    ensure!(summary.records == 1 && summary.overflowed, "{summary:?}");
    // After that, recording goes on.
    world.no_fault()?;
    edu.read_memory(crate::world::address(NONE)?, 8)?;
    world.refused(device, Request::Read, NONE, Reason::NotReadable)?;
    say!("@ two_faults records={} overflowed={}", summary.records, summary.overflowed);
    world.report_boot(Overwritten::default());
    Ok(())
}
