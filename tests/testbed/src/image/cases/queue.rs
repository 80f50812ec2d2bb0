//! A queue that breaks: who is told, what is held, and how it goes on.

use flush::{Batch, Flush, Gfn, Mfn};
use gnttab::{Errno, Outcome, Rights, Status};
use iommu_vtd::{Reason, Request};
use p2m::PageKind;
use testbed::ensure;
use testbed::failure::{Context, Failure};

use super::story::count_landed;
use crate::devices::edu::Edu;
use crate::embedding::{Guest, Layout, PageInfo};
use crate::machine::Machine;
use crate::say;
use crate::world::{BACKEND, BYSTANDER, Grants, Manner, Operation, Overwritten, World};

/// What the recovery overwrites when it fails one submission of one command.
const ONE_SUBMISSION: Overwritten = Overwritten { iotlb_commands: 1, waits: 1 };

/// Clear a page of memory into a batch.
fn clear(guest: &Guest, gfn: Gfn, mfn: Mfn) -> Result<Batch<Mfn, 1>, Failure> {
    let mut batch = Batch::new(guest.id());
    let expected = p2m::Expected { mfn, kind: PageKind::RamReadWrite };
    let held =
        batch.hold(|skipped| guest.clear(gfn, expected, skipped).map(|cleared| (mfn, cleared)));
    held.context("clear")?;
    Ok(batch)
}

/// Flush a batch of one page, which comes out.
fn flush_well(guest: &Guest, mut batch: Batch<Mfn, 1>) -> Result<(), Failure> {
    let seat = guest.place()?.seat();
    let flushed = batch.flush(&seat.hardware());
    let mut flushed = flushed.map_err(|failed| failed.error).context("flush")?;
    ensure!(flushed.next_page().is_some(), "the page is lost");
    Ok(())
}

/// A bad descriptor under two submissions: the one it hits is refused and submitted again,
/// the other completes at once. Both are carried out, and nothing is lost.
pub(super) fn invalid_descriptor(machine: &Machine) -> Result<(), Failure> {
    const AT: Gfn = Gfn::new(0x4000);
    let world = World::new(machine, Layout::Separate)?;
    let (backend, bystander) = (world.guest(BACKEND)?, world.guest(BYSTANDER)?);
    let edu = Edu::open(0, u64::MAX)?;
    let device = world.hypervisor.iommu.device(edu.function())?;
    world.attach(bystander, device)?;
    let ours = world.hypervisor.populate(backend, AT, 0)?;
    let theirs = world.hypervisor.populate(bystander, AT, 0)?;
    ensure!(world.lands(AT, ours)?, "the controller does not reach its page");
    ensure!(World::edu_lands(&edu, AT, theirs)?, "the other device does not reach its page");

    let (first, second) = (clear(backend, AT, ours)?, clear(bystander, AT, theirs)?);
    ensure!(world.lands(AT, ours)?, "nothing was cached for the controller");
    ensure!(World::edu_lands(&edu, AT, theirs)?, "nothing was cached for the other device");
    world.plant_bad_descriptor()?;
    let (hit, other) = (backend.iotlb_alone(), bystander.iotlb_alone());
    let hit_token = hit.start(BACKEND, first.iotlb());
    let other_token = other.start(BYSTANDER, second.iotlb());
    let completed = other.wait(other_token);
    ensure!(completed.is_ok(), "the submission behind the bad one: {completed:?}");
    ensure!(!World::edu_lands(&edu, AT, theirs)?, "a completed flush left a stale entry");
    world.refused(device, Request::Write, AT, Reason::NotWritable)?;
    // The queue goes on, and the refused command was not carried out on the way.
    ensure!(world.lands(AT, ours)?, "a refused command was carried out after all");
    let recovered = hit.wait(hit_token);
    ensure!(recovered.is_ok(), "the submission it hit: {recovered:?}");
    world.is_kept_out(AT, ours)?;
    flush_well(backend, first)?;
    flush_well(bystander, second)?;
    let counters = world.counters();
    ensure!(counters.refused == 1, "{} submissions were refused", counters.refused);
    say!("@ invalid_descriptor refused=1 completed=1 retried=1");
    world.report_boot(ONE_SUBMISSION);
    Ok(())
}

/// A flush that fails inside the hypercall: every page is held until one completes, and a
/// completion that comes too late is nobody's.
pub(super) fn failed_flush(machine: &Machine) -> Result<(), Failure> {
    let world = World::new(machine, Layout::Separate)?;
    let backend = world.guest(BACKEND)?;
    let grants = Grants::new(32, Rights::ReadWrite)?;
    world.share(&grants)?;
    ensure!(count_landed(&world, &grants)? == 32, "the device does not reach the pages");

    let hung = world.hang_queue()?;
    let outcome = world.unmap(Operation::Unmap, &grants, grants.all(), &Manner::HONEST)?;
    ensure!(outcome == Outcome::Failed(Errno::Fault), "the call ended as {outcome:?}");
    for place in grants.all() {
        let status = world.unmap_status(place)?;
        ensure!(status == Status::Okay.value(), "unmap {place} has status {status}");
        ensure!(world.is_unmapped(grants.gfn(place))?, "grant {place} is still mapped");
        let in_use = world.in_use(place)?;
        ensure!(in_use == (true, true), "the granter sees {in_use:?} of a held page");
        let counts = PageInfo::of(world.granted_page(place)?).map(PageInfo::counts);
        ensure!(counts == Some((2, 1)), "a held page is counted {counts:?}");
    }
    let held = world.hypervisor.quarantined();
    ensure!(held == 32 && world.audit.given_up() == 0, "{held} pages are held");
    let stale = count_landed(&world, &grants)?;
    ensure!(stale == 32, "{stale} stale writes landed while the pages were held");

    hung.resume()?;
    let late = count_landed(&world, &grants)?;
    ensure!(late == 0, "{late} pages are in reach after the late completion");
    world.faults();
    let still = world.hypervisor.quarantined();
    ensure!(still == 32 && world.audit.given_up() == 0, "a late completion left {still} pages");

    let left =
        world.as_caller(backend, &Manner::HONEST, |caller| caller.hypervisor.retry(caller))?;
    ensure!(left == 0, "{left} batches are still in quarantine");
    ensure!(world.audit.given_up() == 32, "{} pages came out", world.audit.given_up());
    ensure!(world.audit.released_early() == 0, "pages were given up too early");
    for place in grants.all() {
        let page = world.take_back(place)?;
        world.is_kept_out(grants.gfn(place), page)?;
    }
    let leaked = flush::leaked_pages();
    ensure!(leaked == 0, "{leaked} pages were leaked");
    say!("@ failed_flush held={held} stale_while_held={stale} released_early=0 stale_after=0");
    world.report_boot(Overwritten::default());
    Ok(())
}
