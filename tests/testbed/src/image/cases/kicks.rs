//! Which processors a flush kicks: those inside, and each once

use core::cell::RefCell;
use core::time::Duration;

use flush::{Batch, CpuSet, Gfn, Hardware, Mfn};
use gnttab::Rights;
use iommu_vtd::Guarded as _;
use p2m::{AtNextEntry, Cpus, PageKind, TlbError, TlbFlush};
use testbed::failure::{Context as _, Failure};
use testbed::{ensure, fail};

use super::stage::{BATCH, PAGES, Stage, count_read, faulted, frames, just};
use crate::embedding::{Activity, Kicks};
use crate::guest::{Program, Runner, meanwhile};
use crate::machine::Machine;
use crate::world::{BACKEND, FRONTEND, Grants, Manner, Overwritten};
use crate::{clock, processors, say};

/// A processor enters the guest when a batch has cleared its entries and not flushed yet.
pub(super) fn enters(machine: &Machine) -> Result<(), Failure> {
    let stage = Stage::new(machine)?;
    let (world, backend) = (&stage.world, stage.world.guest(BACKEND)?);
    let grants = Grants::at(PAGES, BATCH.into(), Rights::ReadWrite)?;
    world.share(&grants)?;
    let frames = frames(world, &grants)?;
    let reader = stage.reader(0, BATCH)?;
    let late = stage.reads_its_code(1)?;
    late.hold_back(true);
    let kicked = meanwhile(stage.processors, &[(&reader, 1), (&late, 2)], || {
        let read = count_read(&reader, &frames, 100)?;
        ensure!(read == BATCH.into(), "the guest reads {read} pages");
        ensure!(backend.cpus().running() == just(1), "{:?} run", backend.cpus().running());
        let kicks = processors::kicks_sent();
        let entered = RefCell::new(Ok(()));
        let enter = || {
            late.hold_back(false);
            *entered.borrow_mut() = late.goes_on().and_then(|()| {
                let running = backend.cpus().running();
                ensure!(running.len() == 2 && running.contains(2), "{running:?} run");
                let read = count_read(&reader, &frames, 200)?;
                ensure!(read == BATCH.into(), "{read} pages were stale before the flush");
                Ok(())
            });
        };
        let manner = Manner { before_flush: &enter, ..Manner::HONEST };
        world.unmap_well(&grants, grants.all(), &manner)?;
        entered.into_inner()?;
        let kicks = processors::kicks_sent() - kicks;
        for place in grants.all() {
            world.take_back(place)?;
        }
        faulted(&reader, BATCH.into())?;
        late.goes_on()?;
        Ok(kicks)
    })?;
    ensure!(kicked == 2, "{kicked} kicks for two processors");
    // The flush and the fetch; after the flush it went on under another ASID.
    ensure!(late.interrupts() == 2, "{} stays ended with a kick", late.interrupts());
    let asid = late.vcpu.with(|vcpu| vcpu.tag().0);
    ensure!(asid == 2, "after one flush the guest runs under ASID {asid}");
    ensure!(world.audit.released_early() == 0, "a page was given up too early");
    say!("@ enters kicks={kicked} asid={asid}");
    world.report_boot(Overwritten::default());
    Ok(())
}

/// A virtual processor moves to another processor and back, with a flush in between.
pub(super) fn moves(machine: &Machine) -> Result<(), Failure> {
    let stage = Stage::new(machine)?;
    let (world, backend) = (&stage.world, stage.world.guest(BACKEND)?);
    let old = world.hypervisor.populate(backend, PAGES, 0)?;
    let reader = stage.reader(0, 1)?;
    let asid = || reader.vcpu.with(|vcpu| vcpu.tag().0);
    let reads = |page, value| {
        ensure!(count_read(&reader, &[page], value)? == 1, "the guest does not read {page:?}");
        Ok(())
    };
    meanwhile(stage.processors, &[(&reader, 1)], || reads(old, 1))?;
    ensure!(backend.cpus().running().is_empty(), "{:?} run", backend.cpus().running());
    ensure!(backend.cpus().may_hold(1), "processor 1 has forgotten by leaving");
    let first = asid();
    let kicks = meanwhile(stage.processors, &[(&reader, 2)], || {
        reads(old, 2)?;
        ensure!(backend.cpus().running() == just(2), "{:?} run", backend.cpus().running());
        let kicks = processors::kicks_sent();
        world.hypervisor.depopulate(backend, PAGES, |page| reads(page, 3))?;
        faulted(&reader, 1)?;
        Ok(processors::kicks_sent() - kicks)
    })?;
    ensure!(kicks == 1, "{kicks} kicks, and the guest ran on one processor");
    ensure!(!backend.cpus().may_hold(1), "processor 1 may enter without a flush");

    let new = world.hypervisor.populate(backend, PAGES, 0)?;
    ensure!(new != old, "the freed frame came back at once");
    let stale = meanwhile(stage.processors, &[(&reader, 1)], || {
        reads(new, 10)?;
        count_read(&reader, &[old], 20)
    })?;
    ensure!(stale == 0, "the guest reads the freed page");
    let last = asid();
    ensure!(first != last, "back on processor 1 the guest runs under ASID {first} again");
    say!("@ moves kicks={kicks} asids_on_1={first},{last}");
    world.report_boot(Overwritten::default());
    Ok(())
}

/// Two processors run the guest: 32 grants cost each one kick, and the unit one submission.
pub(super) fn one_kick(machine: &Machine) -> Result<(), Failure> {
    let stage = Stage::new(machine)?;
    let (world, backend) = (&stage.world, stage.world.guest(BACKEND)?);
    let grants = Grants::at(PAGES, BATCH.into(), Rights::ReadWrite)?;
    let (one, two) = (stage.reads_its_code(0)?, stage.reads_its_code(1)?);
    let cost = |calls: &[core::ops::Range<u32>]| {
        world.share(&grants)?;
        let before = (world.hypervisor.activity(), backend.cpus().counts());
        for call in calls {
            // Both are inside when it begins.
            one.goes_on()?;
            two.goes_on()?;
            world.unmap_well(&grants, call.clone(), &Manner::HONEST)?;
        }
        let cost = world.hypervisor.activity().since(before.0);
        let counts = backend.cpus().counts();
        for place in grants.all() {
            world.take_back(place)?;
        }
        let flushes = counts.flushes - before.1.flushes;
        ensure!(flushes == calls.len() as u64, "{flushes} flushes of processors");
        let kicks = counts.kicks - before.1.kicks;
        ensure!(kicks == cost.kicks, "the crate counted {kicks} kicks of {}", cost.kicks);
        Ok::<_, Failure>(cost)
    };
    let both = [(&one, 1), (&two, 2)];
    let (batched, single) = meanwhile(stage.processors, &both, || {
        let single = core::array::from_fn::<_, 32, _>(|place| place as u32..place as u32 + 1);
        Ok((cost(&[grants.all()])?, cost(&single)?))
    })?;
    let once = Activity { kicks: 2, exits: 2, iotlb_commands: 1, waits: 1, tail_writes: 1 };
    ensure!(batched == once, "32 grants in one call cost {batched:?}");
    let often = Activity { kicks: 64, exits: 64, iotlb_commands: 32, waits: 32, tail_writes: 32 };
    ensure!(single == often, "32 grants in 32 calls cost {single:?}");
    ensure!(world.audit.released_early() == 0, "a page was given up too early");
    for (policy, cost) in [("per-page", single), ("batched", batched)] {
        let Activity { kicks, exits, iotlb_commands, waits, tail_writes } = cost;
        say!(
            "@ cost policy={policy} pages={BATCH} kicks={kicks} exits={exits} \
             iotlb_commands={iotlb_commands} waits={waits} tail_writes={tail_writes}"
        );
    }
    world.report_boot(Overwritten::default());
    Ok(())
}

/// Two domains run, and one of them is flushed: the other stays in its guest.
pub(super) fn bystander(machine: &Machine) -> Result<(), Failure> {
    let stage = Stage::new(machine)?;
    let (world, backend) = (&stage.world, stage.world.guest(BACKEND)?);
    let frontend = world.guest(FRONTEND)?;
    let grants = Grants::at(PAGES, BATCH.into(), Rights::ReadWrite)?;
    world.share(&grants)?;
    let own = stage.reads_its_code(0)?;
    let at = Gfn::new(0x100);
    let registers = [1, at.get() << 12];
    let other = Runner::new(&world.hypervisor, frontend, Program::Reader, at, registers)?;
    let (kicks, left) = meanwhile(stage.processors, &[(&own, 1), (&other, 2)], || {
        own.goes_on()?;
        other.goes_on()?;
        let sets = (backend.cpus().running(), frontend.cpus().running());
        ensure!(sets == (just(1), just(2)), "{sets:?} run");
        let kicks = processors::kicks_sent();
        world.unmap_well(&grants, grants.all(), &Manner::HONEST)?;
        own.goes_on()?;
        other.goes_on()?;
        Ok((processors::kicks_sent() - kicks, (own.interrupts(), other.interrupts())))
    })?;
    ensure!((kicks, left) == (1, (1, 0)), "{kicks} kicks, stays ended by one: {left:?}");
    say!("@ bystander kicks={kicks} stays_ended={} and_of_the_other={}", left.0, left.1);
    world.report_boot(Overwritten::default());
    Ok(())
}

/// Kicks that do not arrive.
struct LostKicks;

impl Cpus for LostKicks {
    type Deadline = Duration;

    fn this_cpu(&self) -> usize {
        Kicks.this_cpu()
    }

    fn kick(&self, _: &CpuSet) {}

    fn deadline(&self) -> Duration {
        clock::now().saturating_add(Duration::from_millis(50))
    }

    fn has_passed(&self, deadline: &Duration) -> bool {
        Kicks.has_passed(deadline)
    }

    fn relax(&self) {
        Kicks.relax();
    }
}

/// A kick that gets lost: the flush fails, and the page stays held while the guest reads it.
pub(super) fn lost_kick(machine: &Machine) -> Result<(), Failure> {
    let stage = Stage::new(machine)?;
    let (world, backend) = (&stage.world, stage.world.guest(BACKEND)?);
    let page = world.hypervisor.populate(backend, PAGES, 0)?;
    let reader = stage.reader(0, 1)?;
    let stale = meanwhile(stage.processors, &[(&reader, 1)], || {
        ensure!(count_read(&reader, &[page], 1)? == 1, "the guest does not read its page");
        let expected = p2m::Expected { mfn: page, kind: PageKind::RamReadWrite };
        let mut batch: Batch<Mfn, 1> = Batch::new(backend.id());
        let edit = batch
            .hold(|skipped| backend.clear(PAGES, expected, skipped).map(|cleared| (page, cleared)));
        edit.context("the page")?;
        let iotlb = backend.iotlb_alone();
        let lost = TlbFlush { guest: backend.cpus(), machine: &LostKicks, local: &AtNextEntry };
        let flushed = batch.flush(&Hardware { tlb: &lost, iotlb: &iotlb });
        let Err(failed) = flushed else { fail!("the flush did without the processor") };
        let still = TlbError::StillRunning(just(1));
        ensure!(failed.error.tlb == Some(still), "the flush failed with {:?}", failed.error);
        let mut held = failed.held;
        ensure!(held.len() == 1, "{} pages are held", held.len());
        let stale = count_read(&reader, &[page], 2)?;
        let tlb = backend.tlb_alone();
        let flushed = held.retry(&Hardware { tlb: &tlb, iotlb: &iotlb });
        let released = flushed.context("the second flush")?.next_page().is_some();
        ensure!(released, "the second flush gave nothing out");
        faulted(&reader, 1)?;
        ensure!(count_read(&reader, &[page], 3)? == 0, "the guest read a free page");
        Ok(stale)
    })?;
    ensure!(stale == 1, "the guest could not read a page that was held");
    let timeouts = backend.cpus().counts().timeouts;
    ensure!(timeouts == 1, "{timeouts} flushes gave up");
    say!("@ lost_kick held=1 stale_while_held={stale} stale_after_release=0");
    world.report_boot(Overwritten::default());
    Ok(())
}
