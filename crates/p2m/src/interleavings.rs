//! Every interleaving of a flush and a CPU that enters the guest, under loom.
//!
//! Built with `--cfg loom` only, of a copy of the sources in which the sets of CPUs have the
//! model checker's atomics too. `cpus_tests.rs` tries longer stories step by step; here
//! memory is as weak as the language allows.

extern crate std;

use core::{
    convert::Infallible,
    sync::atomic::Ordering::{Relaxed, SeqCst},
};
use std::sync::{Arc, atomic::AtomicU64 as Ghost};

use flush::{Change, Cover, CpuSet, Depth, DomainId, Flush, Gfn, Run};
use loom::{
    cell::Cell,
    model::Builder,
    sync::atomic::{AtomicBool, AtomicU64},
    thread,
};

use crate::{Cpus, Generation, GuestCpus, Invalidate, TlbFlush};

const DOMAIN: DomainId = DomainId::new(1);
/// The CPU that flushes, and the one that enters.
const EDITOR: usize = 0;
const CPU: usize = 1;
/// What an entry shows, before and after.
const OLD: u64 = 1;
const NEW: u64 = 2;

/// The p2m's one entry, its CPUs, and whether the old page is somebody else's.
struct World {
    guest: GuestCpus,
    entry: AtomicU64,
    kicked: AtomicBool,
    released: Ghost,
}

/// What a CPU caches of the entry; nothing is 0.
struct Cached(Cell<u64>);

impl Invalidate for Cached {
    type Error = Infallible;

    fn invalidate(&self) -> Result<(), Infallible> {
        self.0.set(0);
        Ok(())
    }
}

struct Machine<'w>(&'w World);

impl Cpus for Machine<'_> {
    type Deadline = ();

    fn this_cpu(&self) -> usize {
        EDITOR
    }

    fn kick(&self, cpus: &CpuSet) {
        assert!(cpus.contains(CPU));
        self.0.kicked.store(true, SeqCst);
    }

    fn deadline(&self) {}

    fn has_passed(&self, (): &()) -> bool {
        false
    }

    fn relax(&self) {
        thread::yield_now();
    }
}

/// Changes the entry, flushes, and gives the old page away.
fn edit(world: &World) {
    world.entry.store(NEW, Relaxed);
    let nothing = Cached(Cell::new(0));
    let flush = TlbFlush { guest: &world.guest, machine: &Machine(world), local: &nothing };
    let mut cover = Cover::NOTHING;
    cover.record(Run::single(Gfn::new(1)), 0, Depth::Leaves, Change::Modified);
    assert_eq!(flush.wait(flush.start(DOMAIN, &cover)), Ok(()));
    world.released.store(1, SeqCst);
}

/// The guest uses its page, by way of the cache.
fn access(world: &World, cached: &Cached) {
    if cached.0.get() == 0 {
        cached.0.set(world.entry.load(Relaxed));
    }
    let released = world.released.load(SeqCst) == 1;
    assert!(!(released && cached.0.get() == OLD), "a page is used after its release");
}

/// Stays in the guest once, or serves flushes in the middle of the stay.
fn stay(world: &World, cached: &Cached, serves: bool) {
    assert!(world.guest.enter(CPU, cached).is_ok());
    access(world, cached);
    if serves {
        assert_eq!(world.guest.serve(CPU, cached), Ok(()));
        access(world, cached);
    }
    thread::yield_now();
    // The kick would end the stay here at the latest; a guest may also leave by itself.
    if !world.kicked.load(SeqCst) {
        access(world, cached);
    }
    world.guest.leave(CPU);
}

/// Stays in the guest as a vCPU with a tag of its own, which it flushes if there was a
/// flush since its last stay.
fn stay_tagged(world: &World, cached: &Cached, last: &mut Option<Generation>) {
    let Ok(now) = world.guest.enter_tagged(CPU) else { panic!("the CPU is known") };
    if last.replace(now) != Some(now) {
        assert_eq!(cached.invalidate(), Ok(()));
    }
    access(world, cached);
    thread::yield_now();
    if !world.kicked.load(SeqCst) {
        access(world, cached);
    }
    world.guest.leave(CPU);
}

/// What the CPU that is not the editor does.
type Stays = fn(&World, &Cached);

#[track_caller]
fn check(name: &str, stays: Stays) {
    let runs = Arc::new(Ghost::new(0));
    let counted = runs.clone();
    let mut builder = Builder::new();
    builder.preemption_bound = builder.preemption_bound.or(Some(5));
    builder.max_branches = 20_000;
    builder.check(move || {
        counted.fetch_add(1, SeqCst);
        let world = Arc::new(World {
            guest: GuestCpus::new(DOMAIN),
            entry: AtomicU64::new(OLD),
            kicked: AtomicBool::new(false),
            released: Ghost::new(0),
        });
        let cpu = {
            let world = world.clone();
            thread::spawn(move || {
                stays(&world, &Cached(Cell::new(0)));
            })
        };
        edit(&world);
        cpu.join().expect("the CPU");
    });
    std::println!("interleavings | {name:<40} | {}", runs.load(SeqCst));
}

#[test]
fn a_cpu_that_enters_uses_no_page_after_its_release() {
    check("a flush and a CPU that enters", |world, cached| stay(world, cached, false));
}

#[test]
fn a_cpu_that_enters_again_uses_no_page_after_its_release() {
    check("a flush and a CPU that enters twice", |world, cached| {
        (0..2).for_each(|_| stay(world, cached, false));
    });
}

#[test]
fn a_cpu_that_serves_uses_no_page_after_its_release() {
    check("a flush and a CPU that serves", |world, cached| stay(world, cached, true));
}

#[test]
fn a_vcpu_with_its_own_tag_uses_no_page_after_its_release() {
    check("a flush and a vCPU with its own tag", |world, cached| {
        let mut last = None;
        (0..2).for_each(|_| stay_tagged(world, cached, &mut last));
    });
}
