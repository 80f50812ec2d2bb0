//! CPUs that come, go and do not answer while a batch is under way.
//!
//! Every CPU here keeps what it cached when it leaves a guest, and uses it when it is
//! back, unless it was made to forget.

use flush::{Cover, DomainId, Flush, Gfn, Hardware, Kind, Mfn};
use gnttab::{Errno, Outcome};
use host::{
    Layout, Setup, Taken, TakenBatch, World,
    world::{BACKEND, CALLING_CPU, FIRST_REFERENCE, FRONTEND, ModelFailed, OTHER_CPU},
};
use hwmodel::Failure;
use p2m::{PageKind, TlbError};

const LAYOUTS: [Layout; 2] = [Layout::Separate, Layout::Shared];
/// Where the backend has pages of its own.
const RAM: u64 = 0x40_0000;
const PAGES: u64 = 6;
const SECOND_CPU: usize = 2;
const THIRD_CPU: usize = 3;

/// When something happens in the life of a batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum When {
    /// Before this page is cleared; the first is 0.
    Before(u64),
    /// After all pages are cleared, before the flush.
    Cleared,
    /// After the flush of the CPUs was started.
    Started,
    /// After the flush, before the pages are freed.
    Flushed,
}

fn moments() -> impl Iterator<Item = When> {
    (0..PAGES).map(When::Before).chain([When::Cleared, When::Started, When::Flushed])
}

/// A flusher with something else going on between start and wait.
struct Between<'a, F> {
    inner: &'a F,
    action: &'a dyn Fn(),
}

impl<K: Kind, F: Flush<K>> Flush<K> for Between<'_, F> {
    type InFlight = F::InFlight;
    type Error = F::Error;

    fn start(&self, domain: DomainId, cover: &Cover) -> F::InFlight {
        let started = self.inner.start(domain, cover);
        (self.action)();
        started
    }

    fn wait(&self, in_flight: F::InFlight) -> Result<(), F::Error> {
        self.inner.wait(in_flight)
    }
}

fn pages(world: &World) -> Vec<(Gfn, Mfn)> {
    let gfns = (RAM..RAM + PAGES).map(Gfn::new);
    gfns.map(|gfn| (gfn, world.populate_block(BACKEND, gfn, 0))).collect()
}

/// Every CPU in the guest reads and writes every page that it can.
fn use_all(world: &World, pages: &[(Gfn, Mfn)]) -> usize {
    let cpus = [OTHER_CPU, SECOND_CPU, THIRD_CPU];
    let reaches = |cpu: usize| pages.iter().filter(move |(gfn, _)| world.cpu_reaches(cpu, *gfn));
    cpus.into_iter().map(|cpu| reaches(cpu).count()).sum()
}

/// Clears pages in one batch; at `when` the world moves on by `change`.
#[track_caller]
fn check(layout: Layout, when: When, change: fn(&World)) {
    let world = World::new(Setup { layout, ..Setup::default() });
    let pages = pages(&world);
    // Each CPU has everything cached, and only the usual one is still inside.
    for cpu in [SECOND_CPU, THIRD_CPU] {
        world.enter(BACKEND, cpu);
    }
    assert_eq!(use_all(&world, &pages), 3 * pages.len());
    for cpu in [SECOND_CPU, THIRD_CPU] {
        world.leave(cpu);
    }
    let at = |moment| {
        if moment == when {
            change(&world);
        }
        use_all(&world, &pages);
    };

    world.call_as(BACKEND, |caller| {
        let mut batch = TakenBatch::new(BACKEND);
        for (place, (gfn, mfn)) in (0..).zip(&pages) {
            at(When::Before(place));
            let expected = p2m::Expected { mfn: *mfn, kind: PageKind::RamReadWrite };
            let taken = Taken { mfn: *mfn, order: 0 };
            let held = batch.hold(|skipped| {
                Ok::<_, p2m::ClearError>((taken, caller.guest.clear(*gfn, expected, skipped)?))
            });
            held.expect("the page is cleared");
        }
        at(When::Cleared);
        let tlb = Between { inner: &caller.tlb, action: &|| at(When::Started) };
        let flushed = batch.flush(&Hardware { tlb: &tlb, iotlb: &caller.iotlb });
        let flushed = flushed.expect("the flush completes");
        at(When::Flushed);
        world.hypervisor.free(flushed);
        Outcome::Done
    });
    for cpu in [SECOND_CPU, THIRD_CPU] {
        world.leave(cpu);
        world.enter(BACKEND, cpu);
    }
    assert_eq!(use_all(&world, &pages), 0, "{layout:?}, {when:?}");
    let seen: Vec<_> = world.machine.witnesses().iter().map(ToString::to_string).collect();
    assert!(seen.is_empty(), "{layout:?}, {when:?}: {seen:#?}");
    assert_eq!(world.audit(), [], "{layout:?}, {when:?}");
    assert_eq!(world.machine.misuses(), []);
}

fn check_always(change: fn(&World)) {
    for layout in LAYOUTS {
        for when in moments() {
            check(layout, when, change);
        }
    }
}

#[test]
fn a_cpu_that_enters_at_any_moment_of_a_batch_uses_nothing_stale() {
    check_always(|world| world.enter(BACKEND, SECOND_CPU));
}

#[test]
fn a_cpu_that_leaves_at_any_moment_of_a_batch_uses_nothing_stale() {
    check_always(|world| world.leave(OTHER_CPU));
}

#[test]
fn a_vcpu_may_move_between_cpus_at_any_moment_of_a_batch() {
    check_always(|world| {
        world.leave(OTHER_CPU);
        world.enter(BACKEND, SECOND_CPU);
        world.leave(SECOND_CPU);
        world.enter(BACKEND, THIRD_CPU);
    });
    check_always(|world| {
        world.leave(OTHER_CPU);
        world.enter(FRONTEND, OTHER_CPU);
        world.leave(OTHER_CPU);
        world.enter(BACKEND, OTHER_CPU);
    });
}

#[test]
fn the_flushing_cpu_forgets_as_well_if_it_counts_as_running_the_guest() {
    for layout in LAYOUTS {
        let world = World::new(Setup { layout, ..Setup::default() });
        world.enter(BACKEND, CALLING_CPU);
        let gfn = Gfn::new(0x10_0000);
        let handle = world.share(&[gfn])[0].1;
        assert!(world.cpu_reaches(CALLING_CPU, gfn));
        let before = world.backend().cpus.counts();
        assert_eq!(world.unmap(&[(handle, gfn)]).outcome, Outcome::Done);
        let after = world.backend().cpus.counts();
        assert_eq!((after.kicks - before.kicks, after.local - before.local), (1, 1));
        world.take_back_all(1);
        assert!(!world.cpu_reaches(CALLING_CPU, gfn));
        assert_eq!(world.machine.witnesses(), []);
        assert_eq!(world.audit(), []);
    }
}

#[test]
fn only_cpus_that_run_the_guest_are_kicked() {
    let world = World::new(Setup::default());
    let gfn = Gfn::new(0x10_0000);
    for (cpu, guest) in [(SECOND_CPU, BACKEND), (THIRD_CPU, FRONTEND)] {
        world.enter(guest, cpu);
    }
    let handle = world.share(&[gfn])[0].1;
    assert!(world.cpu_reaches(SECOND_CPU, gfn));
    world.leave(SECOND_CPU);
    let ipis = || world.machine.counters().cpus.iter().map(|cpu| cpu.ipis).collect::<Vec<_>>();
    let before = ipis();
    assert_eq!(world.unmap(&[(handle, gfn)]).outcome, Outcome::Done);
    let kicked: Vec<_> = ipis().iter().zip(before).map(|(after, before)| after - before).collect();
    assert_eq!(kicked, [0, 1, 0, 0]);
    // The one that was outside forgets when it is back.
    world.take_back_all(1);
    world.enter(BACKEND, SECOND_CPU);
    assert!(!world.cpu_reaches(SECOND_CPU, gfn));
    assert_eq!(world.machine.witnesses(), []);
    assert_eq!(world.audit(), []);
}

/// Unmaps shared pages while the CPU in the guest never takes its interrupt.
fn unmap_on_a_deaf_cpu<'w>(
    world: &'w World,
    gfns: &[Gfn],
    shared: &[(Mfn, u32)],
) -> Vec<ModelFailed<'w>> {
    world.patience.set(20);
    let mappings: Vec<_> =
        shared.iter().zip(gfns).map(|((_, handle), gfn)| (*handle, *gfn)).collect();
    world.deaf.set(true);
    let ended = world.unmap(&mappings);
    assert_eq!(ended.outcome, Outcome::Failed(Errno::Fault));
    assert_eq!(ended.failed.len(), 1);
    let error = ended.failed[0].error;
    let Some(TlbError::StillRunning(cpus)) = error.tlb else {
        panic!("the CPU was not waited for: {error:?}");
    };
    assert_eq!(cpus.iter().collect::<Vec<_>>(), [OTHER_CPU]);
    assert_eq!(error.iotlb, None, "the devices did their part");
    ended.failed
}

/// Whether everything that the mappings hold is still held.
#[track_caller]
fn check_held(world: &World, gfns: &[Gfn], shared: &[(Mfn, u32)], held: bool) {
    for (reference, (gfn, (mfn, _))) in (FIRST_REFERENCE..).zip(gfns.iter().zip(shared)) {
        let pages = u32::from(held);
        assert_eq!(world.hypervisor.pages.get(*mfn), (1 + pages, pages), "{gfn:?}");
        assert_eq!(world.in_use(reference), (held, held), "{gfn:?}");
        assert!(!world.device_reaches(*gfn));
        assert_eq!(world.cpu_reaches(OTHER_CPU, *gfn), held, "stale as long as it is held");
    }
    assert_eq!(world.machine.witnesses(), []);
    assert_eq!(world.released_early.get(), 0);
}

#[test]
fn a_cpu_that_never_answers_keeps_every_page_held_until_it_does() {
    for layout in LAYOUTS {
        let world = World::new(Setup { layout, ..Setup::default() });
        let gfns: Vec<_> = (0..32).map(|page| Gfn::new(0x10_0000 + page)).collect();
        let shared = world.share(&gfns);
        let mut failed = unmap_on_a_deaf_cpu(&world, &gfns, &shared);
        check_held(&world, &gfns, &shared, true);

        // Trying again changes nothing as long as the CPU does not answer.
        for _ in 0..3 {
            failed = world.retry(BACKEND, failed);
            assert_eq!(failed.len(), 1);
            check_held(&world, &gfns, &shared, true);
        }
        assert_eq!(world.backend().cpus.counts().timeouts, 4);

        world.deaf.set(false);
        failed = world.retry(BACKEND, failed);
        assert!(failed.is_empty());
        check_held(&world, &gfns, &shared, false);
        world.take_back_all(32);
        assert_eq!(world.audit(), []);
        assert_eq!(world.machine.misuses(), []);
    }
}

#[test]
fn an_answer_that_comes_late_releases_nothing_by_itself() {
    let world = World::new(Setup::default());
    let gfns = [Gfn::new(0x10_0000), Gfn::new(0x10_0009)];
    let shared = world.share(&gfns);
    let failed = unmap_on_a_deaf_cpu(&world, &gfns, &shared);
    world.deaf.set(false);
    p2m::Cpus::relax(&world);
    assert!(!world.machine.ipi_pending(OTHER_CPU), "it answered");
    for (reference, (mfn, _)) in (FIRST_REFERENCE..).zip(&shared) {
        assert_eq!(world.hypervisor.pages.get(*mfn), (2, 1));
        assert_eq!(world.in_use(reference), (true, true));
    }
    assert!(world.retry(BACKEND, failed).is_empty());
    check_held(&world, &gfns, &shared, false);
}

#[test]
fn a_lost_interrupt_is_not_taken_for_an_answer() {
    // Whichever operation of the hardware is lost: the pages are held or free, never
    // reachable and free.
    let mut lost = 0;
    for operation in 1.. {
        let world = World::new(Setup::default());
        world.patience.set(20);
        let gfn = Gfn::new(0x10_0000);
        let (mfn, handle) = world.share(&[gfn])[0];
        world.machine.fail_operation(operation, Failure::Hang);
        let ended = world.unmap(&[(handle, gfn)]);
        let (references, _) = world.hypervisor.pages.get(mfn);
        if ended.outcome == Outcome::Done {
            assert_eq!(references, 1);
            break;
        }
        assert_eq!(references, 2, "operation {operation}");
        lost += usize::from(ended.failed[0].error.tlb.is_some());
        assert_eq!(world.machine.witnesses(), []);
        drop(ended);
    }
    assert_eq!(lost, 1, "the one interrupt");
}
