//! Domains that pause and end, in the middle of a batch too

use core::cell::RefCell;

use flush::{DomainId, Gfn, Mfn};
use gnttab::{Outcome, Rights};
use iommu_vtd::Guarded as _;
use testbed::ensure;
use testbed::failure::{Context as _, Failure};
use testbed::svm::Exit;

use super::stage::{BATCH, PAGES, Stage, count_read, frames, in_use, just};
use crate::embedding::{Guest, Layout, PageInfo};
use crate::guest::{Program, Runner, meanwhile};
use crate::machine::Machine;
use crate::svm::NotRun;
use crate::world::{BACKEND, FRONTEND, Grants, Manner, Operation, Overwritten, World};
use crate::{memory, say};

/// The number of frames that a large block of memory has, as an order.
const LARGE: u8 = 9;

/// A domain of its own: created, run, paused, run again, ended, removed.
pub(super) fn whole(machine: &Machine) -> Result<(), Failure> {
    const ID: DomainId = DomainId::new(9);
    let Stage { processors, mut world } = Stage::new(machine)?;
    let before = memory::free_frames();
    let guest = Guest::new(ID, Layout::Separate, &world.hypervisor.iommu)?;
    world.hypervisor.add(guest)?;
    live(&world, processors, ID)?;
    ensure!(world.hypervisor.remove(ID).is_err(), "a domain went that has not ended");
    let guest = world.guest(ID)?;
    world.hypervisor.end(guest, &[])?;
    ensure!(guest.lookup(PAGES).is_none(), "a domain that has ended has memory");
    ensure!(world.hypervisor.remove(DomainId::new(8)).is_err(), "a domain that is not there went");
    world.hypervisor.remove(ID)?;
    ensure!(world.guest(ID).is_err(), "the domain is still there");
    let after = memory::free_frames();
    ensure!(after == before, "{before} frames were free before the domain, {after} are after it");
    say!("@ life free_frames={after}");
    world.report_boot(Overwritten::default());
    Ok(())
}

/// It runs, and only while it may.
fn live(
    world: &World,
    processors: crate::processors::Processors,
    id: DomainId,
) -> Result<(), Failure> {
    let guest = world.guest(id)?;
    world.hypervisor.populate(guest, PAGES, LARGE)?;
    let registers = [1, PAGES.get() << 12];
    let at = Gfn::new(0x100);
    let reader = Runner::new(&world.hypervisor, guest, Program::Reader, at, registers)?;
    meanwhile(processors, &[(&reader, 1)], || {
        reader.goes_on()?;
        ensure!(guest.cpus().running() == just(1), "{:?} run", guest.cpus().running());
        guest.pause()?;
        ensure!(guest.cpus().running().is_empty(), "{:?} run", guest.cpus().running());
        ensure!(reader.end()? == Err(NotRun::Paused), "it ended with {:x?}", reader.end()?);
        Ok(())
    })?;
    // Another's processor is refused as well.
    let other = reader.vcpu.with(|vcpu| world.guest(FRONTEND).map(|other| other.run(vcpu)))?;
    ensure!(other == Err(NotRun::OtherGuest(id)), "another domain ran it: {other:x?}");
    guest.resume();
    meanwhile(processors, &[(&reader, 2)], || reader.goes_on())
}

/// The frames of a batch, each with this many references, and writable ones among them.
fn counted(frames: &[Mfn], expected: (u16, u16)) -> Result<(), Failure> {
    for frame in frames {
        let counts = PageInfo::of(*frame).context("books of a frame")?.counts();
        ensure!(counts == expected, "{frame:?} is counted {counts:?} times, not {expected:?}");
    }
    Ok(())
}

/// The domain that unmaps ends when everything of its batch is cleared and nothing flushed.
pub(super) fn ends_in_batch(machine: &Machine) -> Result<(), Failure> {
    /// Grants that are mapped and not part of the batch.
    const MORE: u32 = 8;
    let Stage { processors, mut world } = Stage::new(machine)?;
    let stage = &world;
    let backend = stage.guest(BACKEND)?;
    let grants = Grants::at(PAGES, (BATCH + MORE).into(), Rights::ReadWrite)?;
    stage.share(&grants)?;
    let batch = frames(stage, &grants)?;
    let registers = [u64::from(BATCH), PAGES.get() << 12];
    let at = Gfn::new(0x100);
    let reader = Runner::new(&stage.hypervisor, backend, Program::Reader, at, registers)?;
    meanwhile(processors, &[(&reader, 1)], || {
        ensure!(count_read(&reader, &batch, 1)? == BATCH.into(), "the guest does not read");
        let ended = RefCell::new(Ok(()));
        let end = || {
            *ended.borrow_mut() = (|| {
                let stale = count_read(&reader, &batch, 100)?;
                ensure!(stale == BATCH.into(), "{stale} pages were stale before the flush");
                stage.stop_controller()?;
                stage.hypervisor.end(backend, &[stage.controller])?;
                // Nothing runs it, its other handles are gone, and the batch has its pages.
                ensure!(reader.end()? == Err(NotRun::Paused), "{:x?}", reader.end()?);
                ensure!(backend.cpus().running().is_empty(), "{:?} run", backend.cpus().running());
                for place in grants.all() {
                    let found = stage.in_use(place)?;
                    let held = place < BATCH;
                    ensure!(found == (held, held), "grant {place} shows {found:?}");
                }
                counted(&batch, (2, 1))
            })();
        };
        let manner = Manner { before_flush: &end, ..Manner::HONEST };
        let outcome = stage.unmap(Operation::Unmap, &grants, 0..BATCH, &manner)?;
        ended.into_inner()?;
        ensure!(outcome == Outcome::Done, "the unmap ended as {outcome:?}");
        Ok(())
    })?;
    in_use(stage, &grants, false)?;
    counted(&batch, (1, 0))?;
    for place in grants.all() {
        stage.take_back(place)?;
    }
    ensure!(reader.vcpu.with(|vcpu| backend.run(vcpu)) == Err(NotRun::Paused), "it runs again");
    let early = stage.audit.released_early();
    ensure!(early == 0, "{early} pages were given up too early");
    world.hypervisor.remove(BACKEND)?;
    say!("@ ends_in_batch held={BATCH} released={} released_early={early}", BATCH + MORE);
    world.report_boot(Overwritten::default());
    Ok(())
}

/// The domain that granted ends there: its pages are the backend's until the flush.
pub(super) fn granter_ends(machine: &Machine) -> Result<(), Failure> {
    let Stage { processors, mut world } = Stage::new(machine)?;
    let stage = &world;
    let (backend, frontend) = (stage.guest(BACKEND)?, stage.guest(FRONTEND)?);
    let grants = Grants::at(PAGES, BATCH.into(), Rights::ReadWrite)?;
    stage.share(&grants)?;
    let batch = frames(stage, &grants)?;
    let registers = [u64::from(BATCH), PAGES.get() << 12];
    let at = Gfn::new(0x100);
    let reader = Runner::new(&stage.hypervisor, backend, Program::Reader, at, registers)?;
    meanwhile(processors, &[(&reader, 1)], || {
        ensure!(count_read(&reader, &batch, 1)? == BATCH.into(), "the guest does not read");
        let ended = RefCell::new(Ok(()));
        let end = || {
            *ended.borrow_mut() = stage.hypervisor.end(frontend, &[]).and_then(|()| {
                counted(&batch, (1, 1))?;
                let stale = count_read(&reader, &batch, 100)?;
                ensure!(stale == BATCH.into(), "{stale} pages were stale before the flush");
                in_use(stage, &grants, true)
            });
        };
        let manner = Manner { before_flush: &end, ..Manner::HONEST };
        stage.unmap_well(&grants, grants.all(), &manner)?;
        ended.into_inner()?;
        counted(&batch, (0, 0))?;
        // All of them are free now, and the guest is out of reach of them.
        let exit = reader.exit()?;
        ensure!(matches!(exit, Exit::NestedFault { .. }), "the guest ended with {exit:x?}");
        ensure!(count_read(&reader, &batch, 200)? == 0, "the guest reads free pages");
        Ok(())
    })?;
    in_use(stage, &grants, false)?;
    let early = stage.audit.released_early();
    ensure!(early == 0, "{early} pages were given up too early");
    world.hypervisor.remove(FRONTEND)?;
    say!("@ granter_ends released={BATCH} released_early={early}");
    world.report_boot(Overwritten::default());
    Ok(())
}
