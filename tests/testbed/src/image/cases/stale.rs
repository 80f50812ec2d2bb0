//! Translations that processors keep while inside, and the flush that ends it
//!
//! Before the flush a guest sees what is written to the page behind an entry that is gone,
//! afterwards it must not. Both are shown, and what happens if the flush is planted away.

use core::cell::RefCell;
use core::sync::atomic::Ordering;

use flush::{Batch, Flush, Hardware, Mfn, Tlb};
use gnttab::Rights;
use p2m::PageKind;
use testbed::audit::{Lie, Watched};
use testbed::ensure;
use testbed::failure::{Context as _, Failure};

use super::stage::{
    BATCH, GRACE, PAGES, Stage, count_read, count_seen, faulted, frames, in_use, just, put, put_all,
};
use crate::embedding::Guest;
use crate::guest::{Program, Runner, meanwhile};
use crate::machine::Machine;
use crate::world::{BACKEND, Grants, Manner, Overwritten};
use crate::{clock, memory, processors, say};

/// A page whose entry is cleared is read for as long as nobody kicks the guest.
pub(super) fn shown(machine: &Machine) -> Result<(), Failure> {
    const READS: u32 = 50;
    let stage = Stage::new(machine)?;
    let (world, backend) = (&stage.world, stage.world.guest(BACKEND)?);
    let page = world.hypervisor.populate(backend, PAGES, 0)?;
    let reader = stage.reader(0, 1)?;
    let stale = meanwhile(stage.processors, &[(&reader, 1)], || {
        ensure!(count_read(&reader, &[page], 1)? == 1, "the guest does not read its page");
        ensure!(backend.cpus().running() == just(1), "{:?} run", backend.cpus().running());
        let mut stale = 0;
        world.hypervisor.depopulate(backend, PAGES, |page| {
            ensure!(backend.lookup(PAGES).is_none(), "the page is still mapped");
            for value in 2..2 + READS {
                stale += count_read(&reader, &[page], value)?;
            }
            Ok(())
        })?;
        // The page is free now, and the guest was made to notice.
        put(page, 1000)?;
        let error = faulted(&reader, 1)?;
        ensure!(!error.present() && !error.write(), "the fault has error {error:x?}");
        ensure!(count_seen(&reader, &[page], 1000)? == 0, "the guest read a free page");
        Ok(stale)
    })?;
    ensure!(stale == u64::from(READS), "{stale} of {READS} reads were stale");
    ensure!(reader.interrupts() == 1, "{} stays ended with a kick", reader.interrupts());
    let counts = backend.cpus().counts();
    ensure!((counts.kicks, counts.timeouts) == (1, 0), "the flush counted {counts:?}");
    ensure!(backend.cpus().may_hold(0) != backend.cpus().may_hold(1), "the sets are mixed up");
    say!("@ stale_cpu stale_before_flush={stale} stale_after_release=0 kicks={}", counts.kicks);
    world.report_boot(Overwritten::default());
    Ok(())
}

/// A batch of 32 grants that a guest reads all the time.
pub(super) fn batched(machine: &Machine) -> Result<(), Failure> {
    let stage = Stage::new(machine)?;
    let (world, backend) = (&stage.world, stage.world.guest(BACKEND)?);
    let grants = Grants::at(PAGES, BATCH.into(), Rights::ReadWrite)?;
    world.share(&grants)?;
    let frames = frames(world, &grants)?;
    let reader = stage.reader(0, BATCH)?;
    let stale = meanwhile(stage.processors, &[(&reader, 1)], || {
        let read = count_read(&reader, &frames, 100)?;
        ensure!(read == BATCH.into(), "the guest reads {read} pages");
        let kicks = processors::kicks_sent();
        let stale = RefCell::new(Ok(0));
        let look = || {
            *stale.borrow_mut() = count_read(&reader, &frames, 200).and_then(|stale| {
                ensure!(world.audit.given_up() == 0, "a page was given up before the flush");
                ensure!(processors::kicks_sent() == kicks, "somebody was kicked early");
                in_use(world, &grants, true)?;
                Ok(stale)
            });
        };
        let manner = Manner { before_flush: &look, ..Manner::HONEST };
        world.unmap_well(&grants, grants.all(), &manner)?;
        // From here on the pages are the frontend's alone.
        put_all(&frames, 300)?;
        in_use(world, &grants, false)?;
        let kicks = processors::kicks_sent() - kicks;
        ensure!(kicks == 1, "{kicks} kicks for one processor");
        for place in grants.all() {
            world.take_back(place)?;
        }
        let error = faulted(&reader, BATCH.into())?;
        ensure!(!error.present(), "the fault has error {error:x?}");
        let read = count_seen(&reader, &frames, 300)?;
        ensure!(read == 0, "the guest reads {read} free pages");
        stale.into_inner()
    })?;
    ensure!(stale == BATCH.into(), "{stale} pages were stale before the flush");
    let early = world.audit.released_early();
    ensure!(early == 0, "{early} pages were given up too early");
    let kicks = backend.cpus().counts().kicks;
    say!("@ stale_cpu stale_before_flush={stale} stale_after_release=0 kicks={kicks}");
    world.report_boot(Overwritten::default());
    Ok(())
}

/// The same, where the embedder says that it kicked and waited, and did not.
pub(super) fn no_kick(machine: &Machine) -> Result<(), Failure> {
    let stage = Stage::new(machine)?;
    let (world, backend) = (&stage.world, stage.world.guest(BACKEND)?);
    let grants = Grants::at(PAGES, BATCH.into(), Rights::ReadWrite)?;
    world.share(&grants)?;
    let frames = frames(world, &grants)?;
    let reader = stage.reader(0, BATCH)?;
    let stale = meanwhile(stage.processors, &[(&reader, 1)], || {
        let read = count_read(&reader, &frames, 100)?;
        ensure!(read == BATCH.into(), "the guest reads {read} pages");
        let manner = Manner { cpus: Lie::Skipped, ..Manner::HONEST };
        world.unmap_well(&grants, grants.all(), &manner)?;
        for place in grants.all() {
            ensure!(world.is_unmapped(grants.gfn(place))?, "grant {place} is still mapped");
            world.take_back(place)?;
        }
        let stale = count_read(&reader, &frames, 200)?;
        // The flush that was owed ends it.
        world.flush_everything(backend)?;
        let error = faulted(&reader, BATCH.into())?;
        ensure!(!error.present(), "the fault has error {error:x?}");
        ensure!(count_read(&reader, &frames, 300)? == 0, "the guest still reads free pages");
        Ok(stale)
    })?;
    let early = world.audit.released_early();
    ensure!(early == BATCH.into(), "{early} pages were given up too early");
    ensure!(stale == BATCH.into(), "the guest reads {stale} free pages");
    say!("@ damage stale_accesses={stale} released_early={early}");
    world.report_boot(Overwritten::default());
    Ok(())
}

/// Make the page at [`PAGES`] read-only, and flush with `tlb`; `edited` runs in between.
fn lower(
    backend: &Guest,
    tlb: &impl Flush<Tlb>,
    edited: impl FnOnce() -> Result<u64, Failure>,
) -> Result<u64, Failure> {
    let mfn = backend.lookup(PAGES).context("the page")?.mfn;
    let mut batch: Batch<(), 1> = Batch::new(backend.id());
    let edit = batch.edit_many(|skipped, _| {
        let was = backend.map(PAGES, 0, mfn, PageKind::RamReadOnly, skipped);
        was.is_ok_and(|displaced| displaced.is_none())
    });
    ensure!(edit, "the page cannot be made read-only");
    let stale = edited()?;
    let iotlb = backend.iotlb_alone();
    let flushed = batch.flush(&Hardware { tlb, iotlb: &iotlb });
    ensure!(flushed.is_ok(), "the flush failed");
    Ok(stale)
}

/// How many of ten rounds of the writer arrive in the page.
fn count_written(writer: &Runner<'_>, page: Mfn) -> Result<u64, Failure> {
    let words = memory::words(page).context("the words of a page")?;
    let mut landed = 0;
    for _ in 0..10 {
        put(page, 0)?;
        if writer.goes_on().is_err() {
            clock::wait(GRACE / 10, || false).ok();
        }
        landed += u64::from(words[0].load(Ordering::SeqCst) != 0);
    }
    Ok(landed)
}

/// Rights that are lowered: writes land until the flush, or for ever if it is left out.
pub(super) fn rights(machine: &Machine) -> Result<(), Failure> {
    let stage = Stage::new(machine)?;
    let (world, backend) = (&stage.world, stage.world.guest(BACKEND)?);
    let page = world.hypervisor.populate(backend, PAGES, 0)?;
    let writer = stage.runner(0, Program::Writer, [0, PAGES.get() << 12])?;
    let tlb = backend.tlb_alone();
    let stale = meanwhile(stage.processors, &[(&writer, 1)], || {
        ensure!(count_written(&writer, page)? == 10, "the guest does not write its page");
        let stale = lower(backend, &tlb, || count_written(&writer, page))?;
        let error = faulted(&writer, 1)?;
        ensure!(error.present() && error.write(), "the fault has error {error:x?}");
        ensure!(count_written(&writer, page)? == 0, "the guest writes a read-only page");
        Ok(stale)
    })?;
    ensure!(stale == 10, "{stale} of 10 writes landed before the flush");

    // The same with the flush planted away.
    give_back(backend, page)?;
    let lying =
        Watched { inner: tlb, lie: Lie::Skipped, flushes: &world.audit.tlb, before: &|| {} };
    let planted = meanwhile(stage.processors, &[(&writer, 1)], || {
        ensure!(count_written(&writer, page)? == 10, "the guest does not write its page again");
        lower(backend, &lying, || Ok(0))?;
        let planted = count_written(&writer, page)?;
        world.flush_everything(backend)?;
        let error = faulted(&writer, 1)?;
        ensure!(error.present() && error.write(), "the fault has error {error:x?}");
        Ok(planted)
    })?;
    ensure!(planted == 10, "{planted} of 10 writes landed without a flush");
    say!("@ rights stale_before_flush={stale} stale_after_flush=0 stale_without_flush={planted}");
    world.report_boot(Overwritten::default());
    Ok(())
}

/// Make the page at [`PAGES`] writable again.
fn give_back(backend: &Guest, page: Mfn) -> Result<(), Failure> {
    let mut batch: Batch<(), 1> = Batch::new(backend.id());
    let edit = batch.edit_many(|skipped, _| {
        backend.map(PAGES, 0, page, PageKind::RamReadWrite, skipped).is_ok()
    });
    ensure!(edit, "the page cannot be made writable");
    let seat = backend.place()?.seat();
    let flushed = batch.flush(&seat.hardware());
    ensure!(flushed.is_ok(), "the flush failed");
    Ok(())
}
