//! Promises of the CPU side, on a machine whose other CPUs act when told to.

use core::cell::{Cell, RefCell};
use std::{
    boxed::Box,
    sync::atomic::{AtomicBool, AtomicU64, Ordering::SeqCst},
    thread,
    vec::Vec,
};

use flush::{Batch, Depth, Gfn, Hardware, NoIommu, Run};

use super::*;
use crate::{EnterError, testing::DOMAIN};

/// A machine whose clock ticks once a turn of a wait, and whose other CPUs act then.
struct Machine<'a> {
    this: usize,
    kicked: RefCell<Vec<Vec<usize>>>,
    turns: Cell<u32>,
    in_turn: Box<dyn Fn(u32) + 'a>,
}

const PATIENCE: u32 = 5;

impl<'a> Machine<'a> {
    fn new(this: usize, in_turn: impl Fn(u32) + 'a) -> Self {
        Self { this, kicked: RefCell::default(), turns: Cell::new(0), in_turn: Box::new(in_turn) }
    }

    fn idle(this: usize) -> Self {
        Self::new(this, |_| {})
    }
}

impl Cpus for Machine<'_> {
    type Deadline = u32;

    fn this_cpu(&self) -> usize {
        self.this
    }

    fn kick(&self, cpus: &CpuSet) {
        self.kicked.borrow_mut().push(cpus.iter().collect());
    }

    fn deadline(&self) -> u32 {
        self.turns.get() + PATIENCE
    }

    fn has_passed(&self, deadline: &u32) -> bool {
        self.turns.get() >= *deadline
    }

    fn relax(&self) {
        (self.in_turn)(self.turns.get());
        self.turns.set(self.turns.get() + 1);
    }
}

/// Counts what it was told to forget, and can refuse.
#[derive(Default)]
struct Local {
    done: Cell<u32>,
    broken: Cell<bool>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Broken;

impl Invalidate for Local {
    type Error = Broken;

    fn invalidate(&self) -> Result<(), Broken> {
        if self.broken.get() {
            return Err(Broken);
        }
        self.done.set(self.done.get() + 1);
        Ok(())
    }
}

fn one_page(change: Change) -> Cover {
    let mut cover = Cover::NOTHING;
    cover.record(Run::single(Gfn::new(5)), 0, Depth::Leaves, change);
    cover
}

fn run<V: Invalidate>(
    guest: &GuestCpus,
    machine: &Machine<'_>,
    local: &V,
) -> Result<(), TlbError<V::Error>> {
    let flush = TlbFlush { guest, machine, local };
    flush.wait(flush.start(DOMAIN, &one_page(Change::Modified)))
}

fn set(cpus: &[usize]) -> CpuSet {
    let mut set = CpuSet::new();
    for cpu in cpus {
        assert!(set.insert(*cpu));
    }
    set
}

/// A guest that every one of `inside` runs, and that every one of `outside` ran.
fn guest(inside: &[usize], outside: &[usize]) -> GuestCpus {
    let guest = GuestCpus::new(DOMAIN);
    for cpu in inside.iter().chain(outside) {
        guest.enter(*cpu, &Local::default()).expect("a known CPU");
    }
    for cpu in outside {
        guest.leave(*cpu);
    }
    guest
}

#[track_caller]
fn check_kicks(this: usize, inside: &[usize], outside: &[usize], kicks: &[&[usize]], local: u32) {
    let (guest, forgets) = (guest(inside, outside), Local::default());
    let others: Vec<usize> = inside.iter().copied().filter(|cpu| *cpu != this).collect();
    let machine = Machine::new(this, |_| others.iter().for_each(|cpu| guest.leave(*cpu)));
    assert_eq!(run(&guest, &machine, &forgets), Ok(()));
    assert_eq!(*machine.kicked.borrow(), kicks);
    assert_eq!(forgets.done.get(), local);
    let counts = guest.counts();
    assert_eq!((counts.flushes, counts.local), (1, u64::from(local)));
    assert_eq!(counts.kicks, kicks.iter().map(|cpus| cpus.len() as u64).sum::<u64>());
    // Whoever was there before the flush invalidates before it is there again.
    for cpu in others.iter().chain(outside) {
        assert!(!guest.may_hold(*cpu));
        let again = Local::default();
        guest.enter(*cpu, &again).expect("a known CPU");
        assert_eq!(again.done.get(), 1, "CPU {cpu}");
    }
}

#[test]
fn running_cpus_are_kicked_idle_ones_and_the_flushing_one_are_not() {
    check_kicks(0, &[], &[], &[], 0);
    check_kicks(0, &[], &[0, 1, 255], &[], 0);
    check_kicks(0, &[1, 3], &[2], &[&[1, 3]], 0);
    check_kicks(0, &[0], &[2], &[], 1);
    check_kicks(3, &[1, 3, 64, 255], &[0, 2], &[&[1, 64, 255]], 1);
    // A flushing CPU that the sets cannot hold is in none of them.
    check_kicks(256, &[1], &[], &[&[1]], 0);
    check_kicks(usize::MAX, &[255], &[], &[&[255]], 0);
}

#[test]
fn every_cpu_invalidates_before_its_first_entry_and_not_before_its_second() {
    let guest = GuestCpus::new(DOMAIN);
    for cpu in 0..CpuSet::CAPACITY {
        let local = Local::default();
        for _ in 0..2 {
            assert_eq!(guest.enter(cpu, &local).map(|_| ()), Ok(()));
            assert!(guest.may_hold(cpu));
            guest.leave(cpu);
        }
        assert_eq!(local.done.get(), 1);
        // Leaving does not make it forget.
        assert!(guest.may_hold(cpu));
    }
    assert_eq!(guest.counts().at_entry, 256);
}

#[test]
fn a_cpu_that_cannot_be_kicked_may_not_enter() {
    let guest = GuestCpus::new(DOMAIN);
    for cpu in [256, 257, usize::MAX] {
        assert_eq!(guest.enter(cpu, &Local::default()), Err(EnterError::UnknownCpu));
        assert_eq!(guest.enter_tagged(cpu), Err(EnterError::UnknownCpu));
        guest.leave(cpu);
        assert!(guest.running().is_empty());
        assert!(!guest.may_hold(cpu));
    }
}

#[test]
fn a_cpu_that_cannot_invalidate_does_not_enter_and_stays_marked() {
    let (guest, local) = (guest(&[], &[]), Local::default());
    local.broken.set(true);
    assert_eq!(guest.enter(4, &local), Err(EnterError::Invalidate(Broken)));
    assert!(guest.running().is_empty());
    assert!(!guest.may_hold(4));
    local.broken.set(false);
    assert!(guest.enter(4, &local).is_ok());
    assert_eq!(local.done.get(), 1);
}

#[test]
fn a_flush_waits_until_the_last_kicked_cpu_has_left() {
    let guest = guest(&[1, 2], &[]);
    let machine = Machine::new(0, |turn| match turn {
        1 => guest.leave(2),
        3 => guest.leave(1),
        _ => {}
    });
    assert_eq!(run(&guest, &machine, &Local::default()), Ok(()));
    assert_eq!(machine.turns.get(), 4);
}

#[test]
fn a_cpu_that_leaves_and_is_back_at_once_is_not_waited_for_again() {
    let guest = guest(&[1], &[]);
    let local = Local::default();
    let machine = Machine::new(0, |turn| {
        if turn == 0 {
            guest.leave(1);
            guest.enter(1, &local).expect("a known CPU");
        }
    });
    assert_eq!(run(&guest, &machine, &Local::default()), Ok(()));
    assert_eq!((machine.turns.get(), local.done.get()), (1, 1));
}

#[test]
fn an_old_acknowledgement_does_not_serve_a_new_flush() {
    let guest = guest(&[1], &[]);
    let back_at_once = Machine::new(0, |_| {
        guest.leave(1);
        guest.enter(1, &Local::default()).expect("a known CPU");
    });
    for _ in 0..3 {
        assert_eq!(run(&guest, &back_at_once, &Local::default()), Ok(()));
    }
    let stuck = Machine::idle(0);
    let failed = Err(TlbError::StillRunning(set(&[1])));
    assert_eq!(run(&guest, &stuck, &Local::default()), failed);
    assert_eq!(run(&guest, &stuck, &Local::default()), failed);
    assert_eq!(*stuck.kicked.borrow(), [[1], [1]]);
    assert_eq!(guest.counts().timeouts, 2);
    assert_eq!(run(&guest, &back_at_once, &Local::default()), Ok(()));
}

#[test]
fn the_error_names_exactly_the_cpus_that_stayed() {
    let guest = guest(&[1, 2, 200], &[3]);
    let machine = Machine::new(0, |_| guest.leave(2));
    let failed = Err(TlbError::StillRunning(set(&[1, 200])));
    assert_eq!(run(&guest, &machine, &Local::default()), failed);
    assert_eq!(machine.turns.get(), PATIENCE);
}

#[test]
fn a_cpu_that_left_before_the_last_look_is_in_time() {
    let guest = guest(&[1], &[]);
    let machine = Machine::new(0, |turn| {
        if turn == PATIENCE - 1 {
            guest.leave(1);
        }
    });
    assert_eq!(run(&guest, &machine, &Local::default()), Ok(()));
}

#[test]
fn a_cpu_that_enters_during_a_flush_invalidates_and_is_not_waited_for() {
    let guest = guest(&[1], &[2]);
    let (local, entering, machine) = (Local::default(), Local::default(), Machine::idle(0));
    let flush = TlbFlush { guest: &guest, machine: &machine, local: &local };
    let under_way = flush.start(DOMAIN, &one_page(Change::Modified));
    guest.enter(2, &entering).expect("a known CPU");
    assert_eq!(entering.done.get(), 1);
    guest.leave(1);
    assert_eq!(flush.wait(under_way), Ok(()));
    assert_eq!(machine.turns.get(), 0);
}

#[test]
fn added_entries_disturb_no_cpu() {
    let guest = guest(&[0, 1], &[2]);
    let (local, machine) = (Local::default(), Machine::idle(0));
    let flush = TlbFlush { guest: &guest, machine: &machine, local: &local };
    assert_eq!(flush.wait(flush.start(DOMAIN, &one_page(Change::Added))), Ok(()));
    assert!(machine.kicked.borrow().is_empty());
    assert!([0, 1, 2].into_iter().all(|cpu| guest.may_hold(cpu)));
    let counts = guest.counts();
    assert_eq!((counts.flushes, counts.added_only, counts.local), (0, 1, 0));
}

#[test]
fn a_batch_of_another_domain_is_refused() {
    let guest = guest(&[1], &[]);
    let (local, machine, other) = (Local::default(), Machine::idle(0), DomainId::new(8));
    let flush = TlbFlush { guest: &guest, machine: &machine, local: &local };
    let result = flush.wait(flush.start(other, &one_page(Change::Modified)));
    assert_eq!(result, Err(TlbError::OtherDomain(other)));
    assert!(machine.kicked.borrow().is_empty());
}

#[test]
fn a_flushing_cpu_that_cannot_invalidate_fails_the_flush_after_all_were_waited_for() {
    let (guest, local) = (guest(&[0, 1], &[]), Local::default());
    local.broken.set(true);
    let machine = Machine::new(0, |turn| {
        if turn == 2 {
            guest.leave(1);
        }
    });
    assert_eq!(run(&guest, &machine, &local), Err(TlbError::Local(Broken)));
    assert_eq!(machine.turns.get(), 3);
    assert!(!guest.may_hold(0), "it stays marked");
    local.broken.set(false);
    assert_eq!(run(&guest, &machine, &local), Ok(()));
    assert_eq!(local.done.get(), 1);
}

#[test]
fn two_cpus_that_flush_from_inside_do_not_wait_for_each_other() {
    let guest = guest(&[0, 1], &[]);
    let (first, second) = (Local::default(), Local::default());
    let idle = Machine::idle(1);
    let from_one = TlbFlush { guest: &guest, machine: &idle, local: &second };
    let theirs = from_one.start(DOMAIN, &one_page(Change::Modified));
    // CPU 1 waits too, and serves while it does.
    let machine = Machine::new(0, |_| assert_eq!(guest.serve(1, &second), Ok(())));
    assert_eq!(run(&guest, &machine, &first), Ok(()));
    assert_eq!(from_one.wait(theirs), Ok(()));
    assert_eq!((first.done.get(), second.done.get()), (1, 2));
}

/// Another CPU starts a flush while this one invalidates.
struct Overtaken<'a> {
    guest: &'a GuestCpus,
    second: Cell<Option<Generation>>,
}

impl Invalidate for Overtaken<'_> {
    type Error = Broken;

    fn invalidate(&self) -> Result<(), Broken> {
        let (since, running) = self.guest.mark_all();
        assert!(running.contains(0));
        self.second.set(Some(since));
        Ok(())
    }
}

#[test]
fn serving_one_flush_does_not_answer_for_the_next() {
    let guest = guest(&[0], &[]);
    let (first, _) = guest.mark_all();
    let local = Overtaken { guest: &guest, second: Cell::new(None) };
    assert_eq!(guest.serve(0, &local), Ok(()));
    let second = local.second.get().expect("CPU 0 was marked");
    assert!(guest.has_left(0, first));
    assert!(!guest.has_left(0, second));
    guest.leave(0);
    assert!(guest.has_left(0, second));
}

#[test]
fn with_tags_per_vcpu_a_flush_is_seen_by_every_later_entry() {
    let guest = GuestCpus::new(DOMAIN);
    let before = guest.enter_tagged(0).expect("a known CPU");
    // There is no entry between this flush and the end of the stay.
    let machine = Machine::idle(0);
    let failed = Err(TlbError::Local(LeaveFirst));
    assert_eq!(run(&guest, &machine, &AtNextEntry), failed);
    guest.leave(0);
    assert_eq!(run(&guest, &machine, &AtNextEntry), Ok(()));
    let after = guest.enter_tagged(0).expect("a known CPU");
    assert!(before < after);
    assert_eq!(after, guest.generation());
    guest.leave(0);
    // The second vCPU on the same CPU sees it as well.
    assert_eq!(guest.enter_tagged(0), Ok(after));
}

#[test]
fn a_page_stays_held_until_the_last_cpu_left() {
    let guest = guest(&[1], &[]);
    let (local, stuck) = (Local::default(), Machine::idle(0));
    let mut batch: Batch<&str, 4> = Batch::new(DOMAIN);
    let held = batch.hold(|skipped| {
        let gone = skipped.leaf::<Tlb>(Run::single(Gfn::new(5)), 0);
        Ok::<_, ()>(("the page", gone.with(&NoIommu.gone(skipped))))
    });
    assert_eq!(held, Ok(()));
    let tlb = TlbFlush { guest: &guest, machine: &stuck, local: &local };
    let hardware = Hardware { tlb: &tlb, iotlb: &NoIommu };
    let mut failure = batch.flush(&hardware).expect_err("CPU 1 is still inside");
    assert_eq!(failure.error.tlb, Some(TlbError::StillRunning(set(&[1]))));
    assert!(failure.held.retry(&hardware).is_err());
    guest.leave(1);
    let mut flushed = failure.held.retry(&hardware).expect("nobody runs the guest");
    assert_eq!(flushed.next_page().map(|page| *page.get()), Some("the page"));
}

/// A CPU of the threads below: it has a cache, and an interrupt line.
struct Cached<'a> {
    cache: Cell<Option<u64>>,
    interrupt: &'a AtomicBool,
}

impl Invalidate for Cached<'_> {
    type Error = core::convert::Infallible;

    fn invalidate(&self) -> Result<(), Self::Error> {
        self.cache.set(None);
        Ok(())
    }
}

impl Cached<'_> {
    /// Enters, uses the page through the cache until interrupted, leaves; `false` if it
    /// used one that was given away.
    fn stay(&self, cpu: usize, guest: &GuestCpus, table: &AtomicU64, released: &AtomicU64) -> bool {
        // An interrupt before the entry is taken in the hypervisor.
        self.interrupt.swap(false, SeqCst);
        guest.enter(cpu, self).expect("a known CPU");
        let mut fine = true;
        for _ in 0..100 {
            if self.interrupt.load(SeqCst) {
                break;
            }
            let given_away = released.load(SeqCst);
            let page = self.cache.get().unwrap_or_else(|| table.load(SeqCst));
            self.cache.set(Some(page));
            fine &= page >= given_away;
            thread::yield_now();
        }
        guest.leave(cpu);
        fine
    }
}

struct Threads<'a>(&'a [AtomicBool]);

impl Cpus for Threads<'_> {
    type Deadline = ();

    fn this_cpu(&self) -> usize {
        self.0.len()
    }

    fn kick(&self, cpus: &CpuSet) {
        cpus.iter().for_each(|cpu| self.0[cpu].store(true, SeqCst));
    }

    fn deadline(&self) {}

    fn has_passed(&self, (): &()) -> bool {
        false
    }

    fn relax(&self) {
        thread::yield_now();
    }
}

#[test]
fn threads_never_use_a_page_after_its_flush() {
    const FLUSHES: u64 = 10_000;
    let guest = GuestCpus::new(DOMAIN);
    let interrupts = [const { AtomicBool::new(false) }; 3];
    let (table, released) = (AtomicU64::new(0), AtomicU64::new(0));
    thread::scope(|scope| {
        let cpus: Vec<_> = (0..3)
            .map(|cpu| {
                let (guest, table, released) = (&guest, &table, &released);
                let interrupt = &interrupts[cpu];
                scope.spawn(move || {
                    let this = Cached { cache: Cell::new(None), interrupt };
                    let mut fine = true;
                    while released.load(SeqCst) < FLUSHES {
                        fine &= this.stay(cpu, guest, table, released);
                    }
                    fine
                })
            })
            .collect();
        let (machine, local) = (Threads(&interrupts), Local::default());
        let flush = TlbFlush { guest: &guest, machine: &machine, local: &local };
        for page in 1..=FLUSHES {
            table.store(page, SeqCst);
            assert_eq!(flush.wait(flush.start(DOMAIN, &one_page(Change::Modified))), Ok(()));
            released.store(page, SeqCst);
        }
        for cpu in cpus {
            assert!(cpu.join().expect("no panic"));
        }
    });
    assert_eq!(guest.counts().flushes, FLUSHES);
}
