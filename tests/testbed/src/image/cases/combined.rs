//! Processors that give grants back at the same time: one flush serves many.
//!
//! Three processors make one hypercall each, for the same domain. The boot processor counts
//! as one that runs the domain, and does not leave until all three have asked: so the first
//! flush cannot end before that, however the emulator lets the processors take turns.

use core::sync::atomic::{AtomicU64, Ordering};
use core::time::Duration;

use flush::Mfn;
use gnttab::{Call, Outcome, Rights, Status};
use testbed::audit::{Audit, Lie, Watched};
use testbed::ensure;
use testbed::failure::{Context as _, Failure};

use super::stage::{PAGES, Stage};
use crate::embedding::{Activity, Caller, Guest, Hypervisor, PageInfo};
use crate::machine::Machine;
use crate::processors::{Processors, Work};
use crate::world::{BACKEND, Grants, Operation, Overwritten, World};
use crate::{arch, clock, say};

/// Processors that give back, those after the boot processor.
const CALLERS: usize = 3;
/// Grants of each in one hypercall.
const SHARE: u32 = 10;
/// How often all of them do.
const ROUNDS: usize = 6;
/// How long a processor waits for another one.
const PATIENCE: Duration = Duration::from_secs(1);

/// What one hypercall came to.
#[derive(Default)]
struct Report {
    done: AtomicU64,
    released: AtomicU64,
    early: AtomicU64,
}

/// One processor's part in a round.
struct Part<'h> {
    hypervisor: &'h Hypervisor,
    guest: &'h Guest,
    call: Call,
    /// How many flushes of the domain have begun when it is its turn.
    after: u64,
    report: Report,
}

impl Part<'_> {
    /// Give the grants back, once it is this processor's turn.
    fn run(&self) -> Result<(), Failure> {
        let Self { hypervisor, guest, call, after, report } = self;
        await_that(|| guest.flushes().flushes() >= *after).context("the flush before")?;
        let (seat, audit) = (guest.place()?.seat(), Audit::default());
        let watched = |flushes| Watched { inner: &seat, lie: Lie::None, flushes, before: &|| {} };
        let (tlb, iotlb) = (watched(&audit.tlb), watched(&audit.iotlb));
        let caller = Caller { hypervisor, guest, tlb, iotlb, memory: *guest, watcher: &audit };
        let outcome = call.run(&caller);
        report.done.store((outcome == Outcome::Done).into(), Ordering::SeqCst);
        report.released.store(audit.given_up(), Ordering::SeqCst);
        report.early.store(audit.released_early(), Ordering::SeqCst);
        Ok(())
    }
}

/// Wait for another processor, and take interrupts meanwhile.
fn await_that(condition: impl Fn() -> bool) -> Result<(), clock::TimedOut> {
    clock::wait(PATIENCE, || {
        arch::take_interrupts();
        condition()
    })
}

/// Three processors give back at once, round after round: two flushes each time, of two
/// submissions and one kick, and no page is released early or reached afterwards.
pub(super) fn flushes(machine: &Machine) -> Result<(), Failure> {
    let Stage { processors, world } = Stage::new(machine)?;
    ensure!(processors.count() > CALLERS, "{} processors (QEMU: -smp 4)", processors.count());
    let flushes = world.guest(BACKEND)?.flushes();
    let before = (flushes.tickets(), flushes.flushes());
    let mut sum = Activity::default();
    for number in 0..ROUNDS {
        let cost = round(processors, &world, number)?;
        let Activity { kicks, waits, tail_writes, .. } = cost;
        ensure!((waits, tail_writes) == (2, 2), "{cost:?} for {CALLERS} callers");
        // Only the first flush found the boot processor inside.
        ensure!(kicks == 1, "{kicks} kicks for {CALLERS} callers");
        sum.waits += waits;
        sum.iotlb_commands += cost.iotlb_commands;
    }
    ensure!(flush::leaked_pages() == 0, "{} pages were lost", flush::leaked_pages());
    // Every request of this domain: those of the rounds, and those for memory and maps.
    let asked = flushes.tickets() - before.0;
    let carried_out = flushes.flushes() - before.1;
    say!(
        "@ combined callers={CALLERS} rounds={ROUNDS} flushes={} iotlb_commands={} asked={asked} \
         carried_out={carried_out}",
        sum.waits,
        sum.iotlb_commands
    );
    world.report_boot(Overwritten::default());
    Ok(())
}

/// One round. What it cost, from the first hypercall to the last.
fn round(processors: Processors, world: &World, number: usize) -> Result<Activity, Failure> {
    let backend = world.guest(BACKEND)?;
    let grants = Grants::at(PAGES, u64::from(SHARE) * CALLERS as u64, Rights::ReadWrite)?;
    world.share(&grants)?;
    for place in grants.all() {
        let page = world.granted_page(place)?;
        ensure!(world.lands(grants.gfn(place), page)?, "the device does not reach grant {place}");
    }
    let request = |caller: usize| {
        let first = caller as u32 * SHARE;
        world.unmap_request(Operation::Unmap, &grants, first..first + SHARE)
    };
    let calls = [request(0)?, request(1)?, request(2)?];
    let flushes = backend.flushes();
    let (asked, begun) = (flushes.tickets(), flushes.flushes());
    let mut caller = 0..;
    let parts = calls.map(|call| {
        // Another one begins in each round, and the others ask while its flush is held up.
        let after = begun + u64::from(caller.next() != Some(number % CALLERS));
        let hypervisor = &world.hypervisor;
        Part { hypervisor, guest: backend, call, after, report: Report::default() }
    });
    let run = |caller: usize| {
        let part = &parts[caller];
        move || {
            // What went wrong shows in its report.
            part.run().ok();
        }
    };
    let actions = [run(0), run(1), run(2)];
    let work = [
        Work { processor: 1, action: &actions[0] },
        Work { processor: 2, action: &actions[1] },
        Work { processor: 3, action: &actions[2] },
    ];
    let this = arch::this_processor();
    backend.cpus().enter_tagged(this).context("a processor inside")?;
    let before = world.hypervisor.activity();
    let held_up = processors.together(&work, || {
        let all = asked + CALLERS as u64;
        let all_asked = await_that(|| flushes.tickets() == all);
        let state = (flushes.flushes() - begun, released(&parts));
        backend.cpus().leave(this);
        all_asked.map(|()| state)
    });
    let (first, early) = held_up?.context("three requests before the first flush ends")?;
    ensure!(first == 1, "{first} flushes had begun when all had asked");
    ensure!(early == 0, "{early} pages were released before the first flush ended");
    let mut cost = world.hypervisor.activity().since(before);
    // Those that brought the work.
    cost.kicks = cost.kicks.saturating_sub(CALLERS as u64);
    let carried_out = flushes.flushes() - begun;
    ensure!(carried_out == 2, "{carried_out} flushes for {CALLERS} callers");
    judge(world, &grants, &parts)?;
    Ok(cost)
}

/// How many pages were released up to now.
fn released(parts: &[Part<'_>]) -> u64 {
    parts.iter().map(|part| part.report.released.load(Ordering::SeqCst)).sum()
}

/// Every call is done, no page was released early, and the device reaches none any more.
fn judge(world: &World, grants: &Grants, parts: &[Part<'_>]) -> Result<(), Failure> {
    for part in parts {
        let Report { done, released, early } = &part.report;
        let end = [done, released, early].map(|count| count.load(Ordering::SeqCst));
        ensure!(end == [1, SHARE.into(), 0], "a call ended with {end:?}");
    }
    let mut stale = 0;
    for place in grants.all() {
        let status = world.unmap_status(place)?;
        ensure!(status == Status::Okay.value(), "unmap {place} has status {status}");
        let page: Mfn = world.granted_page(place)?;
        let counts = PageInfo::of(page).map(PageInfo::counts);
        ensure!(counts == Some((1, 0)), "{page:?} is counted {counts:?} times");
        stale += u64::from(world.lands(grants.gfn(place), page)?);
        world.take_back(place)?;
    }
    ensure!(stale == 0, "the device reaches {stale} pages that were given back");
    // Each write was refused instead.
    world.faults();
    Ok(())
}
