//! What the hypervisor keeps of one domain for the sake of Xen's interface.

use core::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use arrayvec::ArrayVec;
use flush::{Gfn, Mfn};
use iommu_vtd::Guarded;
use testbed::failure::Failure;
use testbed::xen::events::STORE_PORT;
use testbed::xen::parameters::Parameters;
use testbed::xen::ports::{Console, Source};
use testbed::xen::{Context, Errno, Shutdown, Width, ring, shared_info};
use testbed::{ensure, failure::Context as _};

use crate::embedding::{Guest, Hypervisor, Lock, PageInfo};
use crate::memory::{self, Words};
use crate::{arch, clock, serial};

/// Virtual processors of a domain at most.
pub(crate) const VCPUS: usize = 2;
/// Pages that a guest may touch where it has no memory.
const FILLED: usize = 64;

/// One virtual processor, as the domain's calls see it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Vcpu {
    /// It has no state yet.
    New,
    /// It has its first state and does not run.
    Ready(Context),
    /// It is to run from this state.
    Starting(Context),
    /// It runs.
    Up,
}

/// Pages that a domain shares with its console and its store.
#[derive(Clone, Copy, Debug)]
pub(super) struct Rings {
    /// Of the console.
    pub(super) console: Mfn,
    /// Of the store.
    pub(super) store: Mfn,
}

/// One domain.
pub(crate) struct Domain<'h> {
    /// The hypervisor.
    pub(super) hypervisor: &'h Hypervisor,
    /// Its tables, grants and handles.
    pub(crate) guest: &'h Guest,
    /// Bytes of memory it was started with.
    pub(super) memory: u64,
    /// Whether it was started first.
    pub(super) initial: bool,
    pub(super) parameters: Lock<Parameters>,
    pub(super) vcpus: ArrayVec<Lock<Vcpu>, VCPUS>,
    /// The page of shared information, and where the guest has it.
    pub(super) shared_info: Mfn,
    pub(super) shared_info_at: Lock<Option<Gfn>>,
    /// The pages that it shares with this side.
    rings: Rings,
    console: Lock<Console>,
    /// Its structures are those of 64-bit guests.
    wide: AtomicBool,
    /// It has to be told of an event.
    pub(super) upcall: AtomicBool,
    filled: AtomicUsize,
    end: Lock<Option<Shutdown>>,
}

impl<'h> Domain<'h> {
    /// A domain around `guest`, which has its memory, with `vcpus` virtual processors.
    ///
    /// # Errors
    /// If there is no memory for its pages, or there are too many processors.
    pub(super) fn new(
        hypervisor: &'h Hypervisor,
        guest: &'h Guest,
        memory: u64,
        initial: bool,
        vcpus: usize,
        rings: Rings,
    ) -> Result<Self, Failure> {
        ensure!((1..=VCPUS).contains(&vcpus), "{vcpus} virtual processors, not 1 to {VCPUS}");
        // The domain counts the pages it looks at itself, whatever its guest does to them.
        let shared_info = memory::allocate()?;
        for page in [rings.console, rings.store, shared_info] {
            let info = PageInfo::of(page).context("books of a page")?;
            info.take(false).context("a reference of the domain's")?;
        }
        shared_info::set_rate(words(shared_info), clock::kilohertz());
        Ok(Self {
            hypervisor,
            guest,
            memory,
            initial,
            parameters: Lock::new(Parameters::new()),
            vcpus: (0..vcpus)
                .map(|number| Lock::new(if number == 0 { Vcpu::Up } else { Vcpu::New }))
                .collect(),
            shared_info,
            shared_info_at: Lock::new(None),
            rings,
            console: Lock::new(Console::new()),
            wide: AtomicBool::new(true),
            upcall: AtomicBool::new(false),
            filled: AtomicUsize::new(0),
            end: Lock::new(None),
        })
    }

    /// Its number.
    pub(super) fn id(&self) -> u16 {
        self.guest.id().get()
    }

    /// The width of its structures.
    pub(super) fn width(&self) -> Width {
        if self.wide.load(Ordering::Relaxed) { Width::Wide } else { Width::Narrow }
    }

    /// The guest shows how wide it is when it asks for its hypercall page.
    pub(super) fn set_width(&self, wide: bool) {
        self.wide.store(wide, Ordering::Relaxed);
    }

    /// Show what the guest writes, if this is the way it writes by.
    pub(super) fn print(&self, source: Source, text: &[u8]) {
        if self.console.with(|console| console.shows(source)) {
            serial::raw(text);
        }
    }

    /// A byte for a port.
    pub(super) fn write_port(&self, port: u16, value: u8) {
        if let Some(byte) = self.console.with(|console| console.write(port, value)) {
            serial::raw(&[byte]);
        }
    }

    /// Take what the guest has put into its rings; whether it has to be told of a reply.
    pub(super) fn serve_rings(&self) -> bool {
        let Rings { console, store } = self.rings;
        ring::drain(words(console), |text| self.print(Source::Ring, text));
        ring::answer(words(store), self.id()) && self.raise(STORE_PORT)
    }

    /// Make an event pending; whether the guest has to be told.
    pub(super) fn raise(&self, port: u32) -> bool {
        self.told(shared_info::raise(words(self.shared_info), self.width(), port))
    }

    /// Hold an event back no longer; whether the guest has to be told.
    pub(super) fn unmask(&self, port: u32) -> bool {
        self.told(shared_info::unmask(words(self.shared_info), self.width(), port))
    }

    fn told(&self, told: bool) -> bool {
        if told {
            self.upcall.store(true, Ordering::SeqCst);
        }
        told
    }

    /// Whether it has events that it has not taken.
    pub(super) fn has_events(&self) -> bool {
        shared_info::is_pending(words(self.shared_info))
    }

    /// Put a page of ones where the guest has no memory. What it writes there is lost on
    /// nobody else.
    ///
    /// # Errors
    /// If it has had many of them, or memory is short.
    pub(super) fn fill(&self, gfn: Gfn) -> Result<(), Failure> {
        let filled = self.filled.fetch_add(1, Ordering::Relaxed);
        ensure!(filled < FILLED, "it touched {FILLED} pages where it has no memory");
        let page = self.hypervisor.populate(self.guest, gfn, 0)?;
        for word in words(page) {
            word.store(u64::MAX, Ordering::Relaxed);
        }
        Ok(())
    }

    /// How many processors run it at the moment.
    pub(super) fn running(&self) -> usize {
        self.guest.cpus().running().iter().count()
    }

    /// Wait until as many processors run it again, which others of its own may prevent.
    ///
    /// On a real machine a processor that was kicked is back in the guest within a
    /// microsecond. An emulator that runs one processor at a time has to be given the turn.
    pub(super) fn wait_for(&self, running: usize) {
        const TURNS: usize = 100;
        for _ in 0..TURNS {
            if self.running() >= running {
                return;
            }
            arch::take_interrupts();
        }
    }

    /// How it ended, if it did.
    pub(crate) fn ended(&self) -> Option<Shutdown> {
        self.end.with(|end| *end)
    }

    /// End it. The first end counts.
    pub(super) fn finish(&self, how: Shutdown) {
        self.end.with(|end| *end = end.or(Some(how)));
    }

    /// Look after a virtual processor of its own.
    ///
    /// # Errors
    /// [`Errno::NoEntry`] if it has no such processor.
    pub(super) fn vcpu(&self, number: u32) -> Result<&Lock<Vcpu>, Errno> {
        let number = usize::try_from(number).map_err(|_| Errno::NoEntry)?;
        self.vcpus.get(number).ok_or(Errno::NoEntry)
    }
}

/// The words of a page that the hypervisor allocated.
fn words(page: Mfn) -> &'static Words {
    static NOWHERE: Words = [const { core::sync::atomic::AtomicU64::new(0) }; 512];
    memory::words(page).unwrap_or(&NOWHERE)
}
