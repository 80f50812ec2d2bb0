//! What a processor that stays in its guest holds, and what makes it forget.
//!
//! Processors 1 and 2 are in the guest and use one page, over and over. Processor 0 takes
//! it away, or a right to it. The bits that a page holds tell when it was read: [`MAPPED`],
//! [`CLEARED`] and, once it is somebody else's, [`RELEASED`].

use core::sync::atomic::{AtomicBool, Ordering};
use core::time::Duration;

use flush::{Cover, CpuSet, DomainId, Flush, Gfn, Mfn, Run, Tlb};
use p2m::PageKind;
use spin::Mutex;
use stage2::Access;
use testbed::ensure;
use testbed::failure::{Context as _, Failure};
use testbed::vmx::{Rights, Violation};

use super::bench::{Bench, Done};
use crate::machine::Machine;
use crate::processors::{self, Processors, Work};
use crate::vmx::{BATCH, Command, Exit, Vcpu, VmxProcessor};
use crate::{clock, memory, say};

/// In the page while a table shows it.
const MAPPED: u64 = 1;
/// In the page when no table shows it any more, before its flush.
const CLEARED: u64 = 2;
/// In the page when it was released: whoever reads this reads another's memory.
const RELEASED: u64 = 4;

/// The processors that stay in the guest.
const INSIDE: [usize; 2] = [1, 2];
/// The first of the pages in which they tell what they see.
const MAIL: Gfn = Gfn::new(0x110);
/// A page of the guest.
const PAGE: Gfn = Gfn::new(0x300);
/// How long anything here may take.
const LIMIT: Duration = Duration::from_secs(5);

/// A flush that claims to be done and kicks nobody.
struct NoKick;

impl Flush<Tlb> for NoKick {
    type InFlight = ();
    type Error = core::convert::Infallible;

    fn start(&self, _: DomainId, _: &Cover) {}

    fn wait(&self, (): ()) -> Result<(), Self::Error> {
        Ok(())
    }
}

/// How a long stay in the guest ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Ended {
    /// The page was out of reach: the address, and what was wrong.
    Violation(u64, Violation),
    /// It was made to end.
    Stopped,
}

/// One processor in the guest.
struct Inside {
    /// Where it tells what it sees.
    mail: Mfn,
    outcome: Mutex<Option<Result<Ended, Failure>>>,
}

impl Inside {
    fn word(&self, index: usize) -> u64 {
        memory::words(self.mail).map_or(0, |words| words[index].load(Ordering::SeqCst))
    }

    /// What it read last.
    fn latest(&self) -> u64 {
        self.word(0) & 0xffff_ffff
    }

    /// How often it used the page.
    fn rounds(&self) -> u64 {
        self.word(0) >> 32
    }

    /// All bits that it ever read.
    fn seen(&self) -> u64 {
        self.word(1)
    }

    fn has_ended(&self) -> bool {
        self.outcome.lock().is_some()
    }
}

/// A machine with a guest that runs on two processors.
struct Scene {
    all: Processors,
    bench: Bench,
    inside: [Inside; 2],
}

impl Scene {
    fn new(machine: &Machine, processor: &VmxProcessor) -> Result<Self, Failure> {
        let all = Processors::start(machine)?;
        let bench = Bench::new(processor)?;
        let mut inside = [None, None];
        for (number, place) in (0..).zip(&mut inside) {
            let mail = bench.guest.populate(Gfn::new(MAIL.get() + number), 0)?;
            *place = Some(Inside { mail, outcome: Mutex::new(None) });
        }
        let [Some(one), Some(two)] = inside else { testbed::fail!("no mail") };
        Ok(Self { all, bench, inside: [one, two] })
    }

    /// Let both processors do `command` to `gfn` in the guest, and `meanwhile` here once they
    /// do. They are stopped after it unless they have ended by themselves.
    fn run<A>(
        &self,
        command: Command,
        gfn: Gfn,
        meanwhile: impl FnOnce() -> Result<A, Failure>,
    ) -> Result<(A, [Ended; 2]), Failure> {
        let stop = AtomicBool::new(false);
        for inside in &self.inside {
            *inside.outcome.lock() = None;
            memory::words(inside.mail).into_iter().flatten().for_each(|word| {
                word.store(0, Ordering::SeqCst);
            });
        }
        let stay = |place: usize| {
            let outcome = self.stay(command, gfn, place, &stop);
            if let Some(inside) = self.inside.get(place) {
                *inside.outcome.lock() = Some(outcome);
            }
        };
        let actions = (|| stay(0), || stay(1));
        let work = [
            Work { processor: INSIDE[0], action: &actions.0 },
            Work { processor: INSIDE[1], action: &actions.1 },
        ];
        let done = self.all.together(&work, || {
            let they_do = || self.inside.iter().all(|inside| inside.rounds() > 0);
            let done = clock::wait(LIMIT, || they_do() || self.have_ended())
                .context("the guest does not run")
                .and_then(|()| meanwhile());
            stop.store(true, Ordering::SeqCst);
            // The one that runs this is left out by itself.
            processors::kick(&CpuSet::first(3));
            done
        })?;
        let [one, two] = [0, 1].map(|place| self.inside[place].outcome.lock().take());
        // What they met comes first: it may be why the other side failed.
        let ended = [one.context("an outcome")??, two.context("an outcome")??];
        Ok((done?, ended))
    }

    /// On one of the two processors: be in the guest until the page is out of reach.
    fn stay(
        &self,
        command: Command,
        gfn: Gfn,
        place: usize,
        stop: &AtomicBool,
    ) -> Result<Ended, Failure> {
        let processor = VmxProcessor::turn_on()?;
        let vcpu: &mut Vcpu<'_> = &mut self.bench.vcpu(&processor)?;
        // The kick that brought this work may still be pending.
        let begin = |vcpu: &mut Vcpu<'_>| loop {
            let exit = vcpu.run(&self.bench.guest.cpus)?;
            if exit != Exit::Interrupt || stop.load(Ordering::SeqCst) {
                return Ok::<_, Failure>(exit);
            }
        };
        let exit = begin(vcpu)?;
        ensure!(exit == Exit::Call, "the guest does not ask what to do: {exit:?}");
        let mail = (MAIL.get() + place as u64) << 12;
        vcpu.answer(command, gfn.get() << 12, MAPPED as u32, mail)?;
        match begin(vcpu)? {
            Exit::Violation { at, linear: _, what } => Ok(Ended::Violation(at, what)),
            Exit::Interrupt => Ok(Ended::Stopped),
            exit @ (Exit::Identify
            | Exit::Halt
            | Exit::Call
            | Exit::Exception(_)
            | Exit::Shutdown
            | Exit::Refused
            | Exit::Other(_)) => testbed::fail!("{command:?} ended with {exit:?}"),
        }
    }

    fn have_ended(&self) -> bool {
        self.inside.iter().all(Inside::has_ended)
    }

    /// Until both have read `bit` from the page.
    fn wait_until_read(&self, bit: u64) -> Result<(), Failure> {
        clock::wait(LIMIT, || self.inside.iter().all(|inside| inside.latest() == bit))
            .context("what is read does not change")
    }

    /// Until both use the page again, or are out.
    fn wait_for_rounds(&self) -> Result<(), Failure> {
        let before = [0, 1].map(|place| self.inside[place].rounds());
        let another = |(inside, before): (&Inside, &u64)| {
            // The round under way may have begun earlier, the one after it has not.
            inside.has_ended() || inside.rounds() > before + 1
        };
        clock::wait(LIMIT, || self.inside.iter().zip(&before).all(another))
            .context("the guest hangs")
    }

    /// Both are out of the guest, since `gfn` allows them `allowed` and they wanted `access`.
    fn were_refused(
        ended: [Ended; 2],
        gfn: Gfn,
        access: Rights,
        allowed: Rights,
    ) -> Result<(), Failure> {
        for (number, ended) in INSIDE.iter().zip(ended) {
            let Ended::Violation(at, what) = ended else {
                testbed::fail!("processor {number} ended with {ended:?}");
            };
            ensure!(
                at == gfn.get() << 12 && what.access == access && what.allowed == allowed,
                "processor {number} was refused {what:?} at {at:#x}"
            );
        }
        Ok(())
    }
}

/// Change the first word of a page.
fn put(page: Mfn, bits: u64) -> Result<(), Failure> {
    memory::words(page).context("a page")?[0].store(bits, Ordering::SeqCst);
    Ok(())
}

/// Take the page at `gfn` from under both processors, with a flush by `tlb`. What each
/// read of it in the end.
///
/// `before` runs between the edit and the flush.
fn take_away<T: Flush<Tlb, Error: core::fmt::Debug>>(
    scene: &Scene,
    gfn: Gfn,
    tlb: &T,
    before: impl FnOnce(Mfn) -> Result<(), Failure>,
) -> Result<([u64; 2], [Ended; 2]), Failure> {
    let page = scene.bench.guest.lookup(gfn).context("a page")?.mfn;
    put(page, MAPPED)?;
    let ((), ended) = scene.run(Command::Watch, gfn, || {
        scene.wait_until_read(MAPPED)?;
        let taken = scene.bench.guest.take(gfn, tlb, before)?;
        ensure!(taken == page, "{taken:?} was taken instead of {page:?}");
        put(page, RELEASED)?;
        scene.wait_for_rounds()
    })?;
    memory::release(page)?;
    Ok(([0, 1].map(|place| scene.inside[place].seen()), ended))
}

/// Without a flush the page stays in reach; a kick and INVEPT end that.
fn show_and_end(scene: &Scene, processor: &VmxProcessor, gfn: Gfn) -> Result<(), Failure> {
    let local = scene.bench.guest.local(processor)?;
    let (seen, ended) = take_away(scene, gfn, &scene.bench.guest.tlb(&local), |page| {
        ensure!(scene.bench.guest.lookup(gfn).is_none(), "{gfn:?} is still mapped");
        put(page, CLEARED)?;
        scene.wait_until_read(CLEARED)
    })?;
    ensure!(seen == [MAPPED | CLEARED; 2], "the processors read {seen:?}");
    Scene::were_refused(ended, gfn, Rights::READ, Rights::NONE)
}

/// One page.
pub(super) fn shown(machine: &Machine) -> Result<(), Failure> {
    let processor = VmxProcessor::turn_on()?;
    let scene = Scene::new(machine, &processor)?;
    scene.bench.guest.populate(PAGE, 0)?;
    show_and_end(&scene, &processor, PAGE)?;
    let counts = scene.bench.guest.cpus.counts();
    ensure!((counts.flushes, counts.kicks, counts.at_entry) == (1, 2, 4), "{counts:?}");
    say!("@ ept_stale before_flush=2 after_flush=0 kicks=2 invept={}", counts.at_entry);
    Ok(())
}

/// One page of a 2 MiB leaf, and one of a 1 GiB leaf.
pub(super) fn large(machine: &Machine) -> Result<(), Failure> {
    let processor = VmxProcessor::turn_on()?;
    let scene = Scene::new(machine, &processor)?;
    let mut count = 0;
    for (start, order, first) in super::large_leaves(&scene.bench)? {
        let [_, frame, _] = super::places(first, order)?;
        let gfn = Gfn::new(start.get() + frame.get() - first.get());
        show_and_end(&scene, &processor, gfn)?;
        count += 1;
    }
    say!("@ ept_stale_large leaves={count}");
    Ok(())
}

/// Both processors use one page after another, each of which is taken away by `tlb`. How
/// many reads came after a release; all other things must be as they should.
fn many<T: Flush<Tlb, Error: core::fmt::Debug>>(
    scene: &Scene,
    rounds: u64,
    tlb: &T,
) -> Result<u64, Failure> {
    let mut stale = 0;
    for _ in 0..rounds {
        scene.bench.guest.populate(PAGE, 0)?;
        let (seen, ended) = take_away(scene, PAGE, tlb, |_| Ok(()))?;
        let late = seen.iter().filter(|seen| **seen & RELEASED != 0).count();
        stale += late as u64;
        if late == 0 {
            Scene::were_refused(ended, PAGE, Rights::READ, Rights::NONE)?;
        }
    }
    Ok(stale)
}

/// No read after the release, in many rounds.
pub(super) fn flushed(machine: &Machine) -> Result<(), Failure> {
    const ROUNDS: u64 = 500;
    let processor = VmxProcessor::turn_on()?;
    let scene = Scene::new(machine, &processor)?;
    let local = scene.bench.guest.local(&processor)?;
    let stale = many(&scene, ROUNDS, &scene.bench.guest.tlb(&local))?;
    ensure!(stale == 0, "{stale} reads came after the release");
    let counts = scene.bench.guest.cpus.counts();
    // One for what ran there before, then one a flush, on each processor.
    let expected = (ROUNDS, 2 * ROUNDS, 2 + 2 * ROUNDS);
    ensure!((counts.flushes, counts.kicks, counts.at_entry) == expected, "{counts:?}");
    say!("@ ept_flushed rounds={ROUNDS} stale=0 kicks={} invept={}", counts.kicks, counts.at_entry);
    Ok(())
}

/// Thirty-two pages: page by page, and in one batch.
pub(super) fn batched(machine: &Machine) -> Result<(), Failure> {
    let processor = VmxProcessor::turn_on()?;
    let scene = Scene::new(machine, &processor)?;
    let guest = &scene.bench.guest;
    let local = guest.local(&processor)?;
    let tlb = guest.tlb(&local);
    let run = Run::block(PAGE, BATCH.ilog2() as u8);
    ensure!(run.pages() == BATCH as u64, "{BATCH} pages are no block");
    let each = || (run.first().get()..=run.last().get()).map(Gfn::new);
    let mut costs = [(0, 0); 2];
    for (batched, cost) in [false, true].into_iter().zip(&mut costs) {
        for gfn in each() {
            guest.populate(gfn, 0)?;
        }
        // The page that goes last is in use until then.
        let used = guest.lookup(run.last()).context("a page")?.mfn;
        put(used, MAPPED)?;
        let before = guest.cpus.counts();
        let release = |page| {
            put(page, RELEASED)?;
            Ok(memory::release(page)?)
        };
        let ((), ended) = scene.run(Command::Watch, run.last(), || {
            scene.wait_until_read(MAPPED)?;
            if batched {
                guest.take_all(run, &tlb, || Ok(()), release)?;
            } else {
                for gfn in each() {
                    // Both are back inside, so that this flush has somebody to kick.
                    scene.wait_for_rounds()?;
                    release(guest.take(gfn, &tlb, |_| Ok(()))?)?;
                }
            }
            scene.wait_for_rounds()
        })?;
        Scene::were_refused(ended, run.last(), Rights::READ, Rights::NONE)?;
        let seen = [0, 1].map(|place| scene.inside[place].seen());
        ensure!(seen == [MAPPED; 2], "the processors read {seen:?}");
        let after = guest.cpus.counts();
        *cost = (after.kicks - before.kicks, after.at_entry - before.at_entry);
    }
    let vcpu = &mut scene.bench.vcpu(&processor)?;
    for gfn in each() {
        let done = scene.bench.ask(vcpu, Command::Read, gfn.get() << 12)?;
        ensure!(matches!(done, Done::Violation { .. }), "{gfn:?} is in reach: {done:?}");
    }
    let [per_page, batch] = costs;
    // Two more at first, for what ran there before.
    let pages = BATCH as u64;
    ensure!(per_page == (2 * pages, 2 * pages + 2), "page by page: {per_page:?}");
    ensure!(batch == (2, 2), "in one batch: {batch:?}");
    say!(
        "@ ept_batch pages={pages} processors=2 kicks_one_by_one={} invept_one_by_one={} \
        kicks_batched={} invept_batched={}",
        per_page.0,
        per_page.1 - 2,
        batch.0,
        batch.1
    );
    Ok(())
}

/// A planted bug: the flush kicks nobody, and both processors read what is another's.
pub(super) fn no_kick(machine: &Machine) -> Result<(), Failure> {
    let processor = VmxProcessor::turn_on()?;
    let scene = Scene::new(machine, &processor)?;
    let stale = many(&scene, 1, &NoKick)?;
    ensure!(stale == 2, "{stale} processors read the page after its release, not both");
    say!("@ ept_no_kick stale={stale}");
    Ok(())
}

/// The check of [`flushed`] with that bug: it has to fail.
pub(super) fn no_kick_is_found(machine: &Machine) -> Result<(), Failure> {
    let processor = VmxProcessor::turn_on()?;
    let scene = Scene::new(machine, &processor)?;
    let stale = many(&scene, 1, &NoKick)?;
    ensure!(stale == 0, "{stale} reads came after the release");
    Ok(())
}

/// The right to write is taken: writes land until the flush, and not after it.
pub(super) fn rights(machine: &Machine) -> Result<(), Failure> {
    let processor = VmxProcessor::turn_on()?;
    let scene = Scene::new(machine, &processor)?;
    let local = scene.bench.guest.local(&processor)?;
    let tlb = scene.bench.guest.tlb(&local);
    let page = memory::allocate()?;
    scene.bench.guest.show(PAGE, 0, page, PageKind::RamReadWrite)?;
    let words = memory::words(page).context("a page")?;
    let rewritten = || {
        words[0].store(0, Ordering::SeqCst);
        clock::wait(LIMIT, || words[0].load(Ordering::SeqCst) == MAPPED)
            .context("writes do not land")
    };
    let ((), ended) = scene.run(Command::Fill, PAGE, || {
        rewritten()?;
        scene.bench.guest.restrict(Run::single(PAGE), Access::READ, &tlb, rewritten)?;
        words[0].store(0, Ordering::SeqCst);
        scene.wait_for_rounds()
    })?;
    Scene::were_refused(ended, PAGE, Rights::WRITE, Rights::READ)?;
    ensure!(words[0].load(Ordering::SeqCst) == 0, "a write landed after the flush");
    say!("@ ept_rights landed_before=1 landed_after=0");
    Ok(())
}
