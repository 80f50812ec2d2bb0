//! Every interleaving of combined flushes and of CPU sets, under the model checker.
//!
//! Built with `--cfg loom` only. A [`World`] holds one table entry for each caller, and
//! what hardware still caches of it. The code under test is the crate's own; only its
//! atomics are the model checker's. `docs/combining.md` says what is claimed.

extern crate std;

use core::sync::atomic::Ordering::{Relaxed, SeqCst};
use std::{
    sync::{Arc, Mutex, atomic::AtomicU64 as Ghost},
    vec::Vec,
};

use loom::{
    model::Builder,
    sync::atomic::AtomicU64,
    thread::{self, Thread},
};

use crate::{
    Batch, CombineError, Combiner, Cover, DomainId, Flush, FlushError, Flushed, Gfn, Iotlb, Kind,
    LiveCpus, Run, Tlb,
};

const DOMAIN: DomainId = DomainId::new(1);
/// An entry that is there, or a cached copy of it.
const PRESENT: u64 = 1;
/// A flush that passed by a CPU: it was not in the set.
const NOT_KICKED: u64 = 2;
const GONE: u64 = 0;

/// What is run in every interleaving.
#[derive(Clone, Copy)]
struct Scene {
    /// How many callers flush, each a page of its own, once.
    callers: usize,
    /// Whether the first of them then flushes one more.
    again: bool,
    /// How many of the first flushes fail.
    failing: u64,
    /// Whether devices have to forget as well.
    devices: bool,
    /// Whether a CPU enters the guest meanwhile.
    entering: bool,
    /// Interleavings with more forced switches of threads than this are left out.
    switches: Option<usize>,
}

impl Scene {
    /// Every caller's page, in the order of the callers, and the one more.
    fn pages(self) -> usize {
        self.callers + usize::from(self.again)
    }
}

/// The tables, the caches, and what the checker does not see: it only keeps the books.
struct World {
    scene: Scene,
    cpus: LiveCpus,
    entries: Vec<AtomicU64>,
    tlb: Vec<AtomicU64>,
    iotlb: Vec<AtomicU64>,
    /// Callers that hold a ticket, one bit each.
    waiting: Ghost,
    awake: Mutex<Awake>,
    flushes: Ghost,
    /// Whether every ticket was taken when the first flush ended.
    all_early: Ghost,
}

impl World {
    fn new(scene: Scene) -> Arc<Self> {
        let words = |value| (0..scene.pages()).map(|_| AtomicU64::new(value)).collect();
        Arc::new(Self {
            scene,
            cpus: LiveCpus::new(),
            entries: words(PRESENT),
            tlb: words(PRESENT),
            iotlb: words(if scene.devices { PRESENT } else { GONE }),
            waiting: Ghost::new(0),
            awake: Mutex::new(Awake::default()),
            flushes: Ghost::new(0),
            all_early: Ghost::new(0),
        })
    }
}

/// Who of three callers may spin.
///
/// Two that yield to each other for ever are an interleaving without an end. So a caller
/// sleeps while another one is awake, who leads, or can, and wakes all when it is done.
#[derive(Default)]
struct Awake {
    callers: Vec<usize>,
    asleep: Vec<(usize, Thread)>,
}

impl World {
    fn begin(&self, caller: usize) {
        self.awake.lock().expect("the books").callers.push(caller);
    }

    fn relax(&self, caller: usize) {
        self.waiting.fetch_or(1 << caller, SeqCst);
        let mut awake = self.awake.lock().expect("the books");
        if self.scene.callers == 2 || awake.callers == [caller] {
            drop(awake);
            thread::yield_now();
            return;
        }
        awake.callers.retain(|other| *other != caller);
        awake.asleep.push((caller, thread::current()));
        drop(awake);
        thread::park();
    }

    fn end(&self, caller: usize) {
        let mut awake = self.awake.lock().expect("the books");
        awake.callers.retain(|other| *other != caller);
        for (sleeper, thread) in std::mem::take(&mut awake.asleep) {
            awake.callers.push(sleeper);
            thread.unpark();
        }
    }
}

/// Hardware that caches again, at the start of a flush, whatever it still sees in the table.
struct Caches {
    world: Arc<World>,
    cells: fn(&World) -> &Vec<AtomicU64>,
    /// Counts the flushes, fails the first ones, and kicks CPUs.
    is_tlb: bool,
}

impl<K: Kind> Flush<K> for Caches {
    type InFlight = Vec<(usize, u64)>;
    type Error = ();

    fn start(&self, domain: DomainId, cover: &Cover) -> Self::InFlight {
        assert_eq!(domain, DOMAIN);
        let world = &*self.world;
        let kicked = !self.is_tlb || !world.scene.entering || world.cpus.snapshot().contains(0);
        let forgotten = if kicked { GONE } else { NOT_KICKED };
        let covered =
            |page: &usize| cover.covers(Run::single(Gfn::new(*page as u64)), crate::Depth::Leaves);
        (0..world.scene.pages())
            .filter(covered)
            .filter(|page| world.entries[*page].load(Relaxed) == GONE)
            .map(|page| (page, forgotten))
            .collect()
    }

    fn wait(&self, in_flight: Self::InFlight) -> Result<(), ()> {
        let world = &*self.world;
        if self.is_tlb {
            let earlier = world.flushes.fetch_add(1, SeqCst);
            if earlier == 0 {
                let missing =
                    world.scene.callers - world.waiting.load(SeqCst).count_ones() as usize;
                // The leader has a ticket too, and does not wait for anybody.
                world.all_early.store(u64::from(missing <= 1), SeqCst);
            }
            if earlier < world.scene.failing {
                return Err(());
            }
        }
        for (page, forgotten) in in_flight {
            (self.cells)(world)[page].store(forgotten, Relaxed);
        }
        Ok(())
    }
}

type Combined = Combiner<Caches, Caches, 3, 1>;

fn combiner(world: &Arc<World>) -> Arc<Combined> {
    let tlb = Caches { world: world.clone(), cells: |world| &world.tlb, is_tlb: true };
    let iotlb = Caches { world: world.clone(), cells: |world| &world.iotlb, is_tlb: false };
    Arc::new(Combiner::new(DOMAIN, tlb, iotlb))
}

/// Unmaps one page and releases it: what the CPU's cache then holds of it.
fn unmap(combiner: &Combined, world: &World, caller: usize, page: usize) -> u64 {
    let seat = combiner.seat(caller, || world.relax(caller)).expect("the seat is free");
    let mut batch = Batch::<usize, 1>::new(DOMAIN);
    batch
        .hold(|skipped| {
            world.entries[page].store(GONE, Relaxed);
            let run = Run::single(Gfn::new(page as u64));
            let device = match world.scene.devices {
                true => skipped.leaf::<Iotlb>(run, 0),
                false => skipped.absent(),
            };
            Ok::<_, ()>((page, skipped.leaf::<Tlb>(run, 0).with(&device)))
        })
        .expect("there is room");
    let hardware = seat.hardware();
    let check = |mut flushed: Flushed<'_, usize, 1>| {
        let page = *flushed.next_page().expect("the page was held").get();
        assert_ne!(world.iotlb[page].load(Relaxed), PRESENT, "stale release: device");
        let cached = world.tlb[page].load(Relaxed);
        assert_ne!(cached, PRESENT, "stale release: CPU");
        cached
    };
    world.begin(caller);
    let mut result = batch.flush(&hardware).map(check);
    let mut tries = 0;
    while let Err(failure) = &mut result {
        // Whoever waits is woken, as if the failing caller went away for good.
        world.end(caller);
        let FlushError { tlb, iotlb } = failure.error;
        assert!(matches!(tlb, Some(CombineError::Led(()) | CombineError::Joined)));
        assert_eq!(iotlb, None);
        assert!(tries < world.scene.failing, "more failures than there were");
        tries += 1;
        world.begin(caller);
        match failure.held.retry(&hardware).map(check) {
            Ok(cached) => result = Ok(cached),
            Err(error) => failure.error = error,
        }
    }
    world.end(caller);
    match result {
        Ok(cached) => cached,
        Err(failure) => panic!("{:?}", failure.error),
    }
}

/// Enters the guest: joins the set, then uses whatever the table says.
fn enter(world: &World) -> Vec<u64> {
    assert!(world.cpus.join(0));
    world.entries.iter().map(|entry| entry.load(Relaxed)).collect()
}

fn run(scene: Scene) {
    let world = World::new(scene);
    let combiner = combiner(&world);
    let entering = scene.entering.then(|| {
        let world = world.clone();
        thread::spawn(move || enter(&world))
    });
    let callers: Vec<_> = (1..scene.callers)
        .map(|caller| {
            let (combiner, world) = (combiner.clone(), world.clone());
            thread::spawn(move || unmap(&combiner, &world, caller, caller))
        })
        .collect();
    let mut seen = std::vec![unmap(&combiner, &world, 0, 0)];
    let again = scene.again.then(|| unmap(&combiner, &world, 0, scene.callers));
    seen.extend(callers.into_iter().map(|caller| caller.join().expect("a caller")));
    seen.extend(again);
    if let Some(entering) = entering {
        let used = entering.join().expect("the CPU");
        for (seen, used) in seen.into_iter().zip(used) {
            assert!(seen != NOT_KICKED || used == GONE, "an unkicked CPU keeps an old entry");
        }
    }
    // One that turns out to have nothing to do counts too.
    let flushes = combiner.flushes();
    let early = world.all_early.load(SeqCst) == 1 && scene.failing == 0 && !scene.again;
    let most = if early { 2 } else { scene.pages() as u64 * (1 + scene.failing) };
    assert!(flushes <= most, "a flush too many");
}

#[track_caller]
fn check(name: &str, scene: Scene) {
    let runs = Arc::new(Ghost::new(0));
    let mut builder = Builder::new();
    // LOOM_MAX_PREEMPTIONS, where it is set, goes deeper.
    builder.preemption_bound = builder.preemption_bound.or(scene.switches);
    // Callers that wait spin, and each turn is a branch.
    builder.max_branches = 20_000;
    let counted = runs.clone();
    builder.check(move || {
        counted.fetch_add(1, SeqCst);
        run(scene);
    });
    std::println!("interleavings | {name:<40} | {}", runs.load(SeqCst));
}

#[test]
fn two_callers_release_nothing_stale() {
    let scene = Scene {
        callers: 2,
        again: false,
        failing: 0,
        devices: false,
        entering: false,
        switches: None,
    };
    check("two callers", scene);
}

#[test]
fn two_callers_of_both_kinds_release_nothing_stale() {
    let scene = Scene {
        callers: 2,
        again: false,
        failing: 0,
        devices: true,
        entering: false,
        switches: Some(3),
    };
    check("two callers, CPUs and devices", scene);
}

#[test]
fn two_callers_whose_first_leader_fails_release_nothing_stale() {
    let scene = Scene {
        callers: 2,
        again: false,
        failing: 1,
        devices: true,
        entering: false,
        switches: Some(2),
    };
    check("two callers, a failing leader", scene);
}

#[test]
fn three_callers_that_ask_early_need_at_most_two_flushes() {
    let scene = Scene {
        callers: 3,
        again: false,
        failing: 0,
        devices: false,
        entering: false,
        switches: Some(2),
    };
    check("three callers", scene);
}

#[test]
fn three_callers_whose_first_leader_fails_release_nothing_stale() {
    let scene = Scene {
        callers: 3,
        again: false,
        failing: 1,
        devices: false,
        entering: false,
        switches: Some(1),
    };
    check("three callers, a failing leader", scene);
}

#[test]
fn a_caller_that_asks_again_releases_nothing_stale() {
    let scene = Scene {
        callers: 2,
        again: true,
        failing: 0,
        devices: false,
        entering: false,
        switches: Some(3),
    };
    check("two callers, one of them twice", scene);
}

#[test]
fn a_caller_that_asks_again_after_a_failure_releases_nothing_stale() {
    let scene = Scene {
        callers: 2,
        again: true,
        failing: 1,
        devices: false,
        entering: false,
        switches: Some(2),
    };
    check("two callers, one of them twice, a failing leader", scene);
}

#[test]
fn a_cpu_that_enters_is_kicked_or_sees_the_change() {
    let scene = Scene {
        callers: 2,
        again: false,
        failing: 0,
        devices: false,
        entering: true,
        switches: Some(2),
    };
    check("two callers and a CPU that enters", scene);
}

#[test]
fn a_snapshot_has_the_cpu_or_the_cpu_sees_the_edit() {
    let runs = Arc::new(Ghost::new(0));
    let counted = runs.clone();
    loom::model(move || {
        counted.fetch_add(1, SeqCst);
        let world = World::new(Scene {
            callers: 1,
            again: false,
            failing: 0,
            devices: false,
            entering: true,
            switches: None,
        });
        let cpu = {
            let world = world.clone();
            thread::spawn(move || enter(&world))
        };
        world.entries[0].store(GONE, Relaxed);
        let kicked = world.cpus.snapshot().contains(0);
        let used = cpu.join().expect("the CPU");
        assert!(kicked || used == [GONE], "an unkicked CPU keeps an old entry");
    });
    std::println!("interleavings | {:<40} | {}", "an editor and a CPU", runs.load(SeqCst));
}
