//! What devices see of large leaves, of rights, and at the end of the space.

use flush::{Batch, Gfn, Mfn, Run};
use gnttab::Rights;
use iommu_vtd::{Reason, Request};
use stage2::{Access, Budget, Rest};
use testbed::ensure;
use testbed::failure::{Context, Failure};

use super::story::{Cost, count_landed, tell};
use crate::devices::edu::Edu;
use crate::embedding::{Layout, Memory};
use crate::machine::Machine;
use crate::say;
use crate::world::{BACKEND, Grants, Manner, Operation, Overwritten, World};

/// A page goes out of the middle of a cached 2 MiB leaf: all of the old leaf is flushed.
pub(super) fn large_leaf(machine: &Machine) -> Result<(), Failure> {
    const ORDER: u8 = 9;
    const LARGE: u64 = 0x8_0000;
    let world = World::new(machine, Layout::Separate)?;
    let backend = world.guest(BACKEND)?;
    let first = world.hypervisor.populate(backend, Gfn::new(LARGE), ORDER)?;
    let page = |place| (Gfn::new(LARGE + place), Mfn::new(first.get() + place));
    let leaf = |gfn: Gfn| backend.dma().lookup(&Memory, gfn.into()).map(|found| found.run.pages());
    ensure!(leaf(Gfn::new(LARGE)) == Some(512), "the devices' leaf is not of 2 MiB");
    for (gfn, mfn) in [page(0), page(5), page(6), page(511)] {
        ensure!(world.lands(gfn, mfn)?, "the device does not reach {gfn:?}");
    }
    world.no_fault()?;

    let before = world.counters();
    let (gone, _) = page(5);
    let freed = world.hypervisor.depopulate(backend, gone, |mfn| {
        ensure!(world.is_unmapped(gone)?, "the page is still mapped");
        ensure!(world.lands(gone, mfn)?, "the large leaf was not cached");
        Ok(())
    })?;
    let after = world.counters();
    let commands = after.iotlb_commands - before.iotlb_commands;
    let pages = after.pages_flushed - before.pages_flushed;
    ensure!((commands, pages) == (1, 512), "{commands} commands for {pages} pages");
    world.is_kept_out(gone, freed)?;
    for (gfn, mfn) in [page(0), page(4), page(6), page(511)] {
        ensure!(backend.lookup(gfn).is_some_and(|found| found.mfn == mfn), "{gfn:?} is lost");
        ensure!(leaf(gfn) == Some(1), "the leaf of {gfn:?} was not split");
        ensure!(world.lands(gfn, mfn)?, "the device lost {gfn:?}");
    }

    let other = world.hypervisor.populate(backend, gone, 0)?;
    ensure!(other != freed, "the freed frame came back at once");
    ensure!(world.lands(gone, other)?, "the device does not reach the new page");
    ensure!(!world.lands(gone, freed)?, "the device reaches the old page");
    world.no_fault()?;
    say!("@ large_leaf iotlb_commands={commands} pages_flushed={pages}");
    world.report_boot(Overwritten::default());
    Ok(())
}

/// A device reads through a read-only grant and cannot write through it.
pub(super) fn read_only(machine: &Machine) -> Result<(), Failure> {
    const COUNT: u64 = 4;
    let world = World::new(machine, Layout::Separate)?;
    // The same pages through writable grants first: the device can write at all.
    let writable = Grants::new(COUNT, Rights::ReadWrite)?;
    world.share(&writable)?;
    let landed = count_landed(&world, &writable)?;
    ensure!(landed == COUNT, "the device reaches {landed} writable pages");
    world.unmap_well(&writable, writable.all(), &Manner::HONEST)?;
    for place in writable.all() {
        world.take_back(place)?;
    }

    let grants = Grants::new(COUNT, Rights::Read)?;
    world.share(&grants)?;
    for place in grants.all() {
        let (gfn, page) = (grants.gfn(place), world.granted_page(place)?);
        let in_use = world.in_use(place)?;
        ensure!(in_use == (true, false), "a read-only mapping shows {in_use:?}");
        world.is_kept_out(gfn, page)?;
        world.read_page(gfn)?;
        world.no_fault()?;
        // With the translation cached the write is dropped; a fault is not recorded here.
        ensure!(!world.lands(gfn, page)?, "a write through a cached read-only grant landed");
        world.faults();
    }
    world.unmap_well(&grants, grants.all(), &Manner::HONEST)?;
    for place in grants.all() {
        let gfn = grants.gfn(place);
        world.read_page(gfn)?;
        world.refused(world.controller, Request::Read, gfn, Reason::NotReadable)?;
        world.take_back(place)?;
    }
    say!("@ read_only grants={COUNT} reads={COUNT} writes=0");
    world.report_boot(Overwritten::default());
    Ok(())
}

/// Grants that the hypervisor took rights from can be given back, like any others.
pub(super) fn restricted(machine: &Machine) -> Result<(), Failure> {
    const COUNT: u64 = 4;
    let world = World::new(machine, Layout::Separate)?;
    let grants = Grants::new(COUNT, Rights::ReadWrite)?;
    world.share(&grants)?;
    let landed = count_landed(&world, &grants)?;
    ensure!(landed == COUNT, "the device reaches {landed} writable pages");

    let backend = world.guest(BACKEND)?;
    let last = Gfn::new(grants.gfn(0).get() + COUNT - 1);
    let rest = Rest::new(Run::new(grants.gfn(0), last).context("a run of grants")?);
    let mut batch: Batch<(), 1> = Batch::new(BACKEND);
    let taken = batch.edit_many(|skipped, _| {
        backend.restrict(rest, Access::READ, &mut Budget::UNLIMITED.clone(), skipped)
    });
    ensure!(taken.is_ok(), "rights were not taken: {taken:?}");
    let seat = backend.place()?.seat();
    ensure!(batch.flush(&seat.hardware()).is_ok(), "the flush failed");
    drop(seat);
    for place in grants.all() {
        // A reading is cached, and after it a write is dropped: a fault need not be recorded.
        let (gfn, page) = (grants.gfn(place), world.granted_page(place)?);
        world.read_page(gfn)?;
        ensure!(!world.lands(gfn, page)?, "a write landed in {gfn:?}");
        world.faults();
    }

    world.unmap_well(&grants, grants.all(), &Manner::HONEST)?;
    for place in grants.all() {
        ensure!(world.in_use(place)? == (false, false), "grant {place} is still in use");
        let gfn = grants.gfn(place);
        ensure!(backend.lookup(gfn).is_none(), "{gfn:?} is still mapped");
        world.read_page(gfn)?;
        world.refused(world.controller, Request::Read, gfn, Reason::NotReadable)?;
        world.take_back(place)?;
    }
    say!("@ restricted grants={COUNT} writes=0 reads=0");
    world.report_boot(Overwritten::default());
    Ok(())
}

/// The last three pages of the 48-bit space, to the last byte.
pub(super) fn top_of_space(machine: &Machine) -> Result<(), Failure> {
    const END: u64 = 1 << 36;
    let world = World::new(machine, Layout::Separate)?;
    let backend = world.guest(BACKEND)?;
    let edu = Edu::open(0, machine.command_line().number("edu-mask", u64::MAX)?)?;
    let device = world.hypervisor.iommu.device(edu.function())?;
    world.attach(backend, device)?;

    let grants = Grants::at(Gfn::new(END - 3), 3, Rights::ReadWrite)?;
    // Three pages up to a boundary fit into one block of four.
    tell(&world, &grants, Operation::Unmap, &Cost { commands: 1, pages: 4 })?;

    world.share(&grants)?;
    let (last, page) = (grants.gfn(2), world.granted_page(2)?);
    ensure!(World::edu_lands(&edu, last, page)?, "the last 8 bytes are out of reach");
    world.unmap_well(&grants, grants.all(), &Manner::HONEST)?;
    ensure!(!World::edu_lands(&edu, last, page)?, "the last 8 bytes are still in reach");
    world.refused(device, Request::Write, last, Reason::NotWritable)?;

    let past = backend.dma().lookup(&Memory, Gfn::new(END).into());
    ensure!(past.is_none(), "there is something past the end");
    let top = u64::MAX.checked_shr(16).context("the last byte")?;
    say!("@ top_of_space last_byte={top:#x}");
    world.report_boot(Overwritten::default());
    Ok(())
}
