//! Hypercalls that guests make themselves, from several processors at once.

use core::cell::Cell;
use core::time::Duration;

use flush::Gfn;
use gnttab::abi::{MapGrantRef, UnmapGrantRef};
use gnttab::{Call, GuestAddress, Outcome, Rights, Status};
use testbed::ensure;
use testbed::failure::{Context as _, Failure};
use zerocopy::{FromZeros, IntoBytes};

use super::stage::{BATCH, PAGES, Stage, frames, in_use, put_all};
use crate::embedding::{Caller, Guest, Hypervisor, PageInfo};
use crate::guest::{Program, Runner};
use crate::machine::Machine;
use crate::processors::Work;
use crate::world::{BACKEND, FRONTEND, Grants, Manner, Overwritten};
use crate::{arch, clock, say};

/// Grants of each virtual processor.
const SHARE: u32 = BATCH / 2;
/// Hypercalls of each: as many maps as unmaps.
const CALLS: u32 = 60;
/// Edits of the third at most: each is one command in the emulator's trace.
const EDITS: u64 = 2000;
/// The reference of the first grant.
const FIRST_REFERENCE: u32 = 8;
/// Where a virtual processor keeps its requests, one page each.
const REQUESTS: [Gfn; 2] = [Gfn::new(0x110), Gfn::new(0x111)];
/// A page that comes and goes meanwhile.
const ANOTHER: Gfn = Gfn::new(0x9_0000);

/// One virtual processor's part: its grants, and the handles that it has of them.
struct Part<'h> {
    hypervisor: &'h Hypervisor,
    guest: &'h Guest,
    place: usize,
    calls: Cell<u32>,
    handles: Cell<[u32; SHARE as usize]>,
}

impl Part<'_> {
    /// The next hypercall: maps and unmaps take turns. Whether there is another.
    fn call(&self) -> Result<bool, Failure> {
        let number = self.calls.get();
        if number == CALLS {
            return Ok(false);
        }
        if number.is_multiple_of(2) { self.map() } else { self.unmap() }?;
        self.calls.set(number + 1);
        Ok(true)
    }

    /// The references of its grants, and where it maps them, in bytes.
    fn grants(&self) -> impl Iterator<Item = (u32, u64)> {
        let first = self.place as u32 * SHARE;
        (first..first + SHARE)
            .map(|place| (FIRST_REFERENCE + place, (PAGES.get() + u64::from(place)) << 12))
    }

    fn map(&self) -> Result<(), Failure> {
        const HOST_MAP: u32 = 1 << 1;
        let mut elements: [MapGrantRef; SHARE as usize] = FromZeros::new_zeroed();
        for (element, (reference, address)) in elements.iter_mut().zip(self.grants()) {
            (element.host_addr, element.flags) = (address, HOST_MAP);
            (element.reference, element.domain) = (reference, FRONTEND.get());
        }
        self.make(0, elements.as_mut_bytes())?;
        for element in &elements {
            let status = element.status;
            ensure!(status == Status::Okay.value(), "a map has status {status}");
        }
        self.handles.set(elements.map(|element| element.handle));
        Ok(())
    }

    fn unmap(&self) -> Result<(), Failure> {
        let mut elements: [UnmapGrantRef; SHARE as usize] = FromZeros::new_zeroed();
        let handles = self.handles.get();
        for ((element, (_, address)), handle) in elements.iter_mut().zip(self.grants()).zip(handles)
        {
            (element.host_addr, element.handle) = (address, handle);
        }
        self.make(1, elements.as_mut_bytes())?;
        for element in &elements {
            let status = element.status;
            ensure!(status == Status::Okay.value(), "an unmap has status {status}");
        }
        Ok(())
    }

    /// Carry out one hypercall on an array, as the guest's memory has it before and after.
    fn make(&self, command: u32, elements: &mut [u8]) -> Result<(), Failure> {
        let Self { hypervisor, guest, .. } = *self;
        let argument = GuestAddress(REQUESTS[self.place].get() << 12);
        guest.write(argument, elements).context("requests")?;
        let seat = guest.place()?.seat();
        let (tlb, iotlb) = (&seat, &seat);
        let caller = Caller { hypervisor, guest, tlb, iotlb, memory: guest, watcher: &() };
        let outcome = Call { command, argument, count: SHARE }.run(&caller);
        ensure!(outcome == Outcome::Done, "operation {command} ended as {outcome:?}");
        guest.read(argument, elements).context("answers")
    }
}

/// The processors take turns: most flushes find guests inside, and cut their stays short.
pub(super) fn from_two(machine: &Machine) -> Result<(), Failure> {
    let cut_short = from_both(machine)?;
    ensure!(cut_short > 10, "only {cut_short} stays were cut short");
    Ok(())
}

/// The processors run at the same time: they meet at locks, and in the middle of edits.
pub(super) fn in_parallel(machine: &Machine) -> Result<(), Failure> {
    from_both(machine).map(drop)
}

/// Two virtual processors map, read and unmap their grants, each on a processor of its own,
/// while a third processor takes memory from them and gives it back.
///
/// How many processors were kicked out of the guest.
fn from_both(machine: &Machine) -> Result<u64, Failure> {
    let stage = Stage::new(machine)?;
    let (world, backend) = (&stage.world, stage.world.guest(BACKEND)?);
    let hypervisor = &world.hypervisor;
    let grants = Grants::at(PAGES, BATCH.into(), Rights::ReadWrite)?;
    world.share(&grants)?;
    let frames = frames(world, &grants)?;
    world.unmap_well(&grants, grants.all(), &Manner::HONEST)?;
    put_all(&frames, 1000)?;
    for page in REQUESTS {
        hypervisor.populate(backend, page, 0)?;
    }
    let before = (backend.cpus().counts(), hypervisor.activity());
    let runner = |place: usize| {
        let first = (PAGES.get() + place as u64 * u64::from(SHARE)) << 12;
        stage.runner(place, Program::Caller, [SHARE.into(), first])
    };
    let runners = [runner(0)?, runner(1)?];
    let asked = backend.flushes().tickets();
    let serve = |place: usize| {
        let (hypervisor, runners) = (&world.hypervisor, &runners);
        move || serve(hypervisor, backend, &runners[place], place)
    };
    let (one, two) = (serve(0), serve(1));
    let work = [Work { processor: 1, action: &one }, Work { processor: 2, action: &two }];
    let edits = stage.processors.together(&work, || {
        let mut edits: u64 = 0;
        while !runners.iter().all(|runner| runner.report.rounds() == CALLS / 2) {
            ensure!(clock::now() < Duration::from_secs(25), "the guests do not come to an end");
            if edits < EDITS {
                hypervisor.populate(backend, ANOTHER, 0)?;
                hypervisor.depopulate(backend, ANOTHER, |_| Ok(()))?;
                edits += 1;
            }
            arch::take_interrupts();
        }
        Ok::<_, Failure>(edits)
    })??;
    in_use(world, &grants, false)?;
    for ((frame, value), place) in frames.iter().zip(1000..).zip(grants.all()) {
        let info = PageInfo::of(*frame).context("books of a frame")?;
        ensure!(info.counts() == (1, 0), "{frame:?} is counted {:?} times", info.counts());
        let runner = &runners[(place / SHARE) as usize];
        let seen = runner.report.latest((place % SHARE) as usize);
        ensure!(seen == value, "the guest read {seen} in grant {place}, not {value}");
    }
    world.no_fault()?;
    let counts = backend.cpus().counts();
    let flushes = counts.flushes - before.0.flushes;
    ensure!(counts.timeouts == 0, "{} flushes gave up", counts.timeouts);
    // Each hypercall, each page that was given and taken away. Some share a flush.
    let asked = backend.flushes().tickets() - asked;
    ensure!(asked == 2 * (u64::from(CALLS) + edits), "{asked} requests for {edits} edits");
    ensure!(flushes <= asked, "{flushes} flushes for {asked} requests");
    ensure!(flush::leaked_pages() == 0, "{} pages were lost", flush::leaked_pages());
    let cost = hypervisor.activity().since(before.1);
    say!(
        "@ calls per_processor={CALLS} edits={edits} asked={asked} flushes={flushes} kicks={}",
        cost.kicks
    );
    world.report_boot(Overwritten::default());
    Ok(counts.kicks)
}

/// Run one virtual processor to its last hypercall.
fn serve(hypervisor: &Hypervisor, guest: &Guest, runner: &Runner<'_>, place: usize) {
    let part = Part {
        hypervisor,
        guest,
        place,
        calls: Cell::new(0),
        handles: Cell::new([0; SHARE as usize]),
    };
    runner.serve(|| part.call());
}
