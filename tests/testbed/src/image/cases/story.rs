//! One batch, end to end: the device reaches pages until the flush, not after.
//!
//! [`tell`] is the story that most cases of the IOMMU are a variation of. Both halves of
//! each claim are shown: what must stop working is seen to work first.

use core::cell::{Cell, RefCell};

use gnttab::{Outcome, Rights, Status};
use iommu_vtd::Counters;
use testbed::ensure;
use testbed::failure::Failure;

use crate::embedding::{Layout, PageInfo};
use crate::machine::Machine;
use crate::say;
use crate::world::{BACKEND, Grants, Manner, Operation, Overwritten, World};

/// Grants of a batch.
const BATCH: u64 = 32;

/// What an unmap must cost the unit.
pub(super) struct Cost {
    /// IOTLB commands.
    pub(super) commands: u64,
    /// Pages that they name.
    pub(super) pages: u64,
}

/// Grant, map, write by device, unmap with `operation`, write again, take back, write again.
///
/// # Errors
/// If anything of it does not go as it must.
pub(super) fn tell(
    world: &World,
    grants: &Grants,
    operation: Operation,
    cost: &Cost,
) -> Result<(), Failure> {
    world.share(grants)?;
    let written = count_landed(world, grants)?;
    world.no_fault()?;
    ensure!(written == grants.len(), "the device reaches {written} pages");
    for place in grants.all() {
        let in_use = world.in_use(place)?;
        ensure!(in_use == (true, true), "grant {place} shows {in_use:?} while it is mapped");
    }

    // In the middle of the hypercall, when every entry is gone and nothing is flushed.
    let stale = RefCell::new(Ok(0));
    let before = Cell::new(world.counters());
    let (given_up, lent) = (world.audit.given_up(), world.audit.times_lent());
    let look = || {
        before.set(world.counters());
        *stale.borrow_mut() = count_landed(world, grants).and_then(|landed| {
            ensure!(world.audit.given_up() == given_up, "a page was given up before the flush");
            let in_use = world.in_use(0)?;
            ensure!(in_use == (true, true), "the granter sees {in_use:?} before the flush");
            Ok(landed)
        });
    };
    let manner = Manner { before_flush: &look, ..Manner::HONEST };
    let outcome = world.unmap(operation, grants, grants.all(), &manner)?;
    ensure!(outcome == Outcome::Done, "the unmap ended as {outcome:?}");
    let lent = world.audit.times_lent() - lent;
    let together = u64::from(world.beside.get() == 0);
    ensure!(lent == together, "arguments were lent {lent} times, not {together}");
    let (before, after) = (before.get(), world.counters());
    let stale = stale.into_inner()?;
    ensure!(stale == grants.len(), "{stale} stale writes landed before the flush");
    world.no_fault()?;
    let commands = after.iotlb_commands - before.iotlb_commands;
    let pages = after.pages_flushed - before.pages_flushed;
    let expected = (cost.commands, cost.pages);
    ensure!(
        (commands, pages) == expected,
        "{commands} commands for {pages} pages, not {expected:?}"
    );

    for place in grants.all() {
        let status = world.unmap_status(place)?;
        ensure!(status == Status::Okay.value(), "unmap {place} has status {status}");
        let page = world.granted_page(place)?;
        let info = PageInfo::of(page);
        let counts = info.map(PageInfo::counts);
        ensure!(counts == Some((1, 0)), "{page:?} is counted {counts:?} times after the unmap");
        ensure!(info.is_some_and(PageInfo::take_dirty), "{page:?} was written and is not dirty");
        world.is_kept_out(grants.gfn(place), page)?;
        let freed = world.take_back(place)?;
        world.is_kept_out(grants.gfn(place), freed)?;
    }
    ensure!(world.audit.released_early() == 0, "pages were given up too early");
    say!(
        "@ story written={written} lent={lent} stale_before_flush={stale} stale_after_flush=0 faults={} \
         iotlb_commands={commands} pages_flushed={pages}",
        2 * grants.len()
    );
    Ok(())
}

/// How many grants the device can write to, wherever they are mapped.
pub(super) fn count_landed(world: &World, grants: &Grants) -> Result<u64, Failure> {
    let mut landed = 0;
    for place in grants.all() {
        landed += u64::from(world.lands(grants.gfn(place), world.granted_page(place)?)?);
    }
    Ok(landed)
}

/// Map the grants once more; the commands for it, and the pages they name.
fn share_again(world: &World, grants: &Grants) -> Result<(u64, u64), Failure> {
    let before = world.counters();
    world.share(grants)?;
    let after = world.counters();
    let landed = count_landed(world, grants)?;
    ensure!(landed == grants.len(), "the device reaches {landed} pages mapped again");
    world.no_fault()?;
    let commands = after.iotlb_commands - before.iotlb_commands;
    Ok((commands, after.pages_flushed - before.pages_flushed))
}

const ONE_BLOCK: Cost = Cost { commands: 1, pages: BATCH };

/// The story as it is usually told: through the queue, with tables of the devices' own.
pub(super) fn flushed(machine: &Machine) -> Result<(), Failure> {
    let world = World::new(machine, Layout::Separate)?;
    let unit = world.unit();
    ensure!(unit.uses_queue(), "this case is for the queue");
    let grants = Grants::new(BATCH, Rights::ReadWrite)?;
    tell(&world, &grants, Operation::Unmap, &ONE_BLOCK)?;
    // The tables are there now: nothing that a unit without caching mode could know.
    let flushed = share_again(&world, &grants)?;
    ensure!(flushed == (0, 0), "mapping took (commands, pages) = {flushed:?}");
    world.report_boot(Overwritten::default());
    Ok(())
}

/// The story with arguments that cannot be lent: one page after the other is cleared, and
/// all of them wait for one flush.
pub(super) fn copied(machine: &Machine) -> Result<(), Failure> {
    let world = World::new(machine, Layout::Separate)?;
    world.beside.set(4);
    tell(&world, &Grants::new(BATCH, Rights::ReadWrite)?, Operation::Unmap, &ONE_BLOCK)?;
    world.report_boot(Overwritten::default());
    Ok(())
}

/// The same through the registers: no descriptor is written.
pub(super) fn registers(machine: &Machine) -> Result<(), Failure> {
    let world = World::new(machine, Layout::Separate)?;
    ensure!(!world.unit().uses_queue(), "this case needs iommu=registers");
    // QEMU's invalidate address register cannot be read back, so pages are not trusted to
    // it: the whole domain is flushed.
    let cost = Cost { commands: 1, pages: 0 };
    tell(&world, &Grants::new(BATCH, Rights::ReadWrite)?, Operation::Unmap, &cost)?;
    let Counters { waits, tail_writes, register_commands, iotlb_commands, .. } = world.counters();
    ensure!((waits, tail_writes) == (0, 0), "{waits} waits and {tail_writes} tail writes");
    ensure!(register_commands > iotlb_commands, "no context command went through registers");
    say!("@ registers commands={register_commands} waits={waits}");
    world.report_boot(Overwritten::default());
    Ok(())
}

/// A unit that may cache what is absent: mapping flushes as well, and number 0 is not used.
pub(super) fn caching_mode(machine: &Machine) -> Result<(), Failure> {
    let world = World::new(machine, Layout::Separate)?;
    ensure!(world.unit().capabilities().caching_mode(), "this case needs caching-mode=on");
    let grants = Grants::new(BATCH, Rights::ReadWrite)?;
    let page = crate::memory::allocate()?;
    for place in grants.all() {
        world.is_kept_out(grants.gfn(place), page)?;
    }
    tell(&world, &grants, Operation::Unmap, &ONE_BLOCK)?;
    // The device has looked every page up in vain since then.
    let flushed = share_again(&world, &grants)?;
    ensure!(flushed == (1, BATCH), "mapping took (commands, pages) = {flushed:?}");
    let tag = world.tag(world.guest(BACKEND)?)?;
    say!("@ caching_mode tag={tag} pages_flushed_by_map={}", flushed.1);
    world.report_boot(Overwritten::default());
    Ok(())
}

/// The story with `unmap_and_replace`, which refuses to put anything in the page's place.
pub(super) fn replace(machine: &Machine) -> Result<(), Failure> {
    let world = World::new(machine, Layout::Separate)?;
    let grants = Grants::new(BATCH, Rights::ReadWrite)?;
    world.share(&grants)?;
    let before = world.counters();
    let refused = Operation::Replace(0x5000);
    let outcome = world.unmap(refused, &grants, grants.all(), &Manner::HONEST)?;
    ensure!(outcome == Outcome::Done, "the call ended as {outcome:?}");
    for place in grants.all() {
        let status = world.unmap_status(place)?;
        ensure!(status == Status::GeneralError.value(), "replacing {place} has status {status}");
    }
    ensure!(world.counters() == before, "a refused call was flushed");
    let landed = count_landed(&world, &grants)?;
    ensure!(landed == BATCH, "a refused call left {landed} pages within reach");
    world.unmap_well(&grants, grants.all(), &Manner::HONEST)?;
    for place in grants.all() {
        world.take_back(place)?;
    }
    tell(&world, &grants, Operation::Replace(0), &ONE_BLOCK)?;
    world.report_boot(Overwritten::default());
    Ok(())
}

/// The story where devices and processors walk one tree, in the extended-page-table format.
pub(super) fn shared_tables(machine: &Machine) -> Result<(), Failure> {
    let world = World::new(machine, Layout::Shared)?;
    let backend = world.guest(BACKEND)?;
    ensure!(backend.is_shared(), "devices have tables of their own");
    tell(&world, &Grants::new(BATCH, Rights::ReadWrite)?, Operation::Unmap, &ONE_BLOCK)?;
    world.report_boot(Overwritten::default());
    Ok(())
}
