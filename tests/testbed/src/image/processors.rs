//! All processors: how they start, get work, and are kicked.
//!
//! A further processor sleeps until it is given work ([`Processors::together`]) and
//! sleeps again after it. A *kick* is an interrupt that does nothing but be counted: it
//! ends a stay in a guest, and wakes a sleeper up.

// UNSAFETY: work that borrows is handed to another processor and always waited for.
#![expect(unsafe_code)]

use core::fmt;
use core::sync::atomic::{AtomicU8, AtomicU64, Ordering};
use core::time::Duration;

use flush::CpuSet;
use spin::{Mutex, Once};
use testbed::failure::{Context, Failure};
use testbed::{acpi, ensure, madt};

use crate::apic::{Apic, Message};
use crate::arch::traps::{self, Frame};
use crate::arch::{self, BOOT_PROCESSOR, PROCESSORS, Trampoline};
use crate::clock;
use crate::exit;
use crate::machine::Machine;
use crate::memory::Firmware;

/// The vector of a kick.
const KICK: u8 = 0xf0;
/// The vector of a spurious interrupt, which wants no acknowledgement.
const SPURIOUS: u8 = 0xff;

/// Work for one processor.
#[derive(Clone, Copy)]
pub(crate) struct Work<'w> {
    /// The processor.
    pub(crate) processor: usize,
    /// What it does, with interrupts off.
    pub(crate) action: &'w (dyn Fn() + Sync),
}

/// What one processor has been asked to do, and what was done to it.
struct Place {
    /// The identifier of its interrupt controller.
    apic: AtomicU8,
    state: AtomicU8,
    work: Mutex<Option<&'static (dyn Fn() + Sync)>>,
    kicks: AtomicU64,
}

/// Not started.
const ABSENT: u8 = 0;
/// Sleeps, or is about to.
const IDLE: u8 = 1;
/// Has work, begun or not.
const BUSY: u8 = 2;

static PLACES: [Place; PROCESSORS] = [const {
    Place {
        apic: AtomicU8::new(0),
        state: AtomicU8::new(ABSENT),
        work: Mutex::new(None),
        kicks: AtomicU64::new(0),
    }
}; PROCESSORS];

/// The controller, once this machine's processors have been started.
static APIC: Once<Apic> = Once::new();
/// Kicks sent by all processors.
static SENT: AtomicU64 = AtomicU64::new(0);

/// A processor cannot take work.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct NotIdle(pub(crate) usize);

impl fmt::Display for NotIdle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "processor {} is not there, or has work already", self.0)
    }
}

impl core::error::Error for NotIdle {}

/// The processors of this machine that were started.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Processors {
    count: usize,
}

impl Processors {
    /// Start all processors that firmware lists and this image has stacks for.
    ///
    /// # Errors
    /// If firmware lists none, or one does not answer.
    pub(crate) fn start(machine: &Machine) -> Result<Self, Failure> {
        let root = machine.boot.rsdp.context("ACPI root pointer")?;
        let listed = madt::processors(acpi::find(&Firmware, root, *b"APIC")?)?;
        let apic = *APIC.try_call_once(Apic::open)?;
        traps::install(KICK, kicked)?;
        traps::install(SPURIOUS, |_| {})?;
        apic.turn_on();
        let own = apic.id();
        PLACES[BOOT_PROCESSOR].apic.store(own, Ordering::SeqCst);
        let trampoline = Trampoline::place(&machine.boot, park)?;
        let mut count = 1;
        for id in listed.into_iter().filter(|id| *id != own) {
            if trampoline.lend(count) {
                wake(apic, id, count, &trampoline)?;
                count += 1;
            }
        }
        Ok(Self { count })
    }

    /// How many there are, the boot processor among them.
    pub(crate) const fn count(self) -> usize {
        self.count
    }

    /// Let other processors do `work`, do `meanwhile` here, and wait for all of them.
    ///
    /// There is no limit to the wait: what borrows must not come back before its work is
    /// over. Work that may not end by itself has to look at the clock.
    ///
    /// # Errors
    /// [`NotIdle`] if a processor is not there or has work; then nothing was begun by it,
    /// and what others had begun was waited for.
    pub(crate) fn together<A>(
        self,
        work: &[Work<'_>],
        meanwhile: impl FnOnce() -> A,
    ) -> Result<A, NotIdle> {
        // Waits when it is dropped. Nothing unwinds here, and it is not handed out, so it
        // is dropped in every case.
        let mut begun = Begun(CpuSet::new());
        for Work { processor, action } in work {
            let place = PLACES.get(*processor).ok_or(NotIdle(*processor))?;
            let mut slot = place.work.lock();
            let taken =
                place.state.compare_exchange(IDLE, BUSY, Ordering::SeqCst, Ordering::SeqCst);
            if taken.is_err() || !begun.0.insert(*processor) {
                return Err(NotIdle(*processor));
            }
            // SAFETY: the borrow outlives this call, which does not return before `begun`
            // was dropped, and that does not return while the processor is busy: its slot
            // is empty then, and it keeps no copy.
            let action = unsafe {
                core::mem::transmute::<&(dyn Fn() + Sync), &'static (dyn Fn() + Sync)>(*action)
            };
            *slot = Some(action);
            drop(slot);
            let mut sleeper = CpuSet::new();
            if sleeper.insert(*processor) {
                kick(&sleeper);
            }
        }
        Ok(meanwhile())
    }
}

/// Processors that have been given work.
struct Begun(CpuSet);

impl Drop for Begun {
    fn drop(&mut self) {
        for place in self.0.iter().filter_map(|processor| PLACES.get(processor)) {
            while place.state.load(Ordering::SeqCst) == BUSY {
                arch::take_interrupts();
            }
        }
    }
}

/// Start one processor, and wait until it says so.
fn wake(apic: Apic, id: u8, number: usize, trampoline: &Trampoline) -> Result<(), Failure> {
    let place = &PLACES[number];
    place.apic.store(id, Ordering::SeqCst);
    let is_there = || place.state.load(Ordering::SeqCst) != ABSENT;
    apic.send(id, Message::Initialise)?;
    // The time that a processor may take for its reset.
    clock::wait(Duration::from_millis(10), || false).ok();
    // The second one is for those that miss the first.
    for limit in [Duration::from_millis(100), Duration::from_secs(2)] {
        apic.send(id, Message::StartUp(trampoline.page()))?;
        if clock::wait(limit, is_there).is_ok() {
            break;
        }
    }
    ensure!(is_there(), "the processor with APIC identifier {id} does not start");
    Ok(())
}

/// What a further processor does for ever.
fn park(number: usize) -> ! {
    let Some(apic) = APIC.get() else {
        arch::stop();
    };
    apic.turn_on();
    let place = &PLACES[number];
    place.state.store(IDLE, Ordering::SeqCst);
    loop {
        // Taken out first: the lock is not held while it works.
        let work = place.work.lock().take();
        match work {
            Some(action) => {
                action();
                place.state.store(IDLE, Ordering::SeqCst);
            }
            // Interrupts are off since the look: a kick that came after it ends the sleep.
            None => arch::sleep(),
        }
    }
}

/// A kick arrived.
fn kicked(_: &mut Frame) {
    if let Some(place) = PLACES.get(arch::this_processor()) {
        place.kicks.fetch_add(1, Ordering::SeqCst);
    }
    if let Some(apic) = APIC.get() {
        apic.end();
    }
}

/// Interrupt each of `processors`, but not the one that runs this.
///
/// Nobody is waited for. A processor whose interrupts are off takes it later, a guest is
/// left at once.
pub(crate) fn kick(processors: &CpuSet) {
    let Some(apic) = APIC.get() else {
        // There is only this one.
        return;
    };
    for number in processors.iter().filter(|number| *number != arch::this_processor()) {
        let Some(place) = PLACES.get(number) else {
            continue;
        };
        let to = place.apic.load(Ordering::SeqCst);
        SENT.fetch_add(1, Ordering::SeqCst);
        if let Err(error) = apic.send(to, Message::Fixed(KICK)) {
            exit::failed(format_args!("kick of processor {number}: {error}"));
        }
    }
}

/// Kicks sent so far, by all processors to all.
pub(crate) fn kicks_sent() -> u64 {
    SENT.load(Ordering::SeqCst)
}

/// Kicks that arrived at a processor so far. Those that came while one was pending are
/// one with it.
pub(crate) fn kicks_taken(processor: usize) -> u64 {
    PLACES.get(processor).map_or(0, |place| place.kicks.load(Ordering::SeqCst))
}
