//! A processor that runs a guest when told, whose guest does as it is told.
//!
//! A [`Seat`] is one processor. An [`Occupant`] is a virtual processor for it whose program
//! stays inside and makes single accesses on request: what it has cached it keeps, for as
//! long as nothing makes it leave.

use core::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use core::time::Duration;

use flush::{CpuSet, Gfn, Mfn};
use gnttab::GuestAddress;
use iommu_vtd::Guarded;
use p2m::GuestCpus;
use testbed::ensure;
use testbed::failure::{Context as _, Failure};
use testbed::svm::{Exit, Mode};

use super::Program;
use crate::embedding::{Guest, Hypervisor, Lock};
use crate::memory::{self, Words};
use crate::svm::{NotRun, Vcpu, turn_on};
use crate::{arch, clock, processors};

/// How long one access, entry or exit may take.
const PATIENCE: Duration = Duration::from_secs(5);
/// No domain has this number.
const NOBODY: u32 = u32::MAX;

/// Words of the page through which a program is told.
mod word {
    pub(super) const ASKED: usize = 0;
    pub(super) const DONE: usize = 1;
    pub(super) const ADDRESS: usize = 2;
    pub(super) const WRITE: usize = 3;
    pub(super) const VALUE: usize = 4;
    pub(super) const REFUSED: usize = 5;
}

/// What a program is to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Access {
    /// Read a word.
    Read,
    /// Write this word.
    Write(u64),
}

/// What came of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Reached {
    /// It was made; for a read, the word.
    Memory(u64),
    /// The nested tables did not allow it, or the processor runs no guest.
    Nothing,
}

/// A virtual processor of one domain, for one seat.
pub(crate) struct Occupant<'g> {
    /// The number of the processor that runs it.
    processor: usize,
    guest: &'g Guest,
    /// Books that nobody looks into, for a processor that is in no guest's books.
    unseen: GuestCpus,
    vcpu: Lock<Vcpu>,
    entry: u64,
    told: &'static Words,
}

impl<'g> Occupant<'g> {
    /// A virtual processor of `guest` for this processor. Its code, its mailbox and its own tables take
    /// `3 + reach.len()` pages of the guest's memory from `at` on, below 1 GiB.
    ///
    /// It can reach the first GiB, and each GiB of a half of the address space (512 GiB)
    /// that has one of the frame numbers of `reach` in it.
    ///
    /// # Errors
    /// If memory is short, or something is there already.
    pub(crate) fn new(
        hypervisor: &Hypervisor,
        guest: &'g Guest,
        processor: usize,
        at: Gfn,
        reach: &[Gfn],
    ) -> Result<Self, Failure> {
        let page = |place: u64| -> Result<(u64, Mfn), Failure> {
            let gfn = Gfn::new(at.get() + place);
            Ok((gfn.get() << 12, hypervisor.populate(guest, gfn, 0)?))
        };
        let ((entry, _), (mailbox, told), (cr3, top)) = (page(0)?, page(1)?, page(2)?);
        guest.write(GuestAddress(entry), Program::Told.code()).context("the code of a guest")?;
        let top = memory::words(top).context("a guest's table")?;
        let mut place = 3;
        for gfn in core::iter::once(&at).chain(reach) {
            // Accessed and dirty are set, so that the processor caches the right to write.
            const TABLE: u64 = 0x27;
            const LARGE: u64 = 0xe7;
            let half = gfn.get() >> 27 & 0x1ff;
            let entry = top.get(half as usize).context("an entry of a guest's table")?;
            if entry.load(Ordering::Relaxed) != 0 {
                continue;
            }
            let (address, table) = page(place)?;
            place += 1;
            for (gib, word) in (0..).zip(memory::words(table).context("a guest's table")?) {
                word.store(half << 39 | gib << 30 | LARGE, Ordering::Relaxed);
            }
            entry.store(address | TABLE, Ordering::SeqCst);
        }
        let mut vcpu = guest.vcpu(Mode::Long { cr3 }, entry)?;
        vcpu.context.registers.rdi = mailbox;
        Ok(Self {
            processor,
            guest,
            unseen: GuestCpus::new(guest.id()),
            vcpu: Lock::new(vcpu),
            entry,
            told: memory::words(told).context("a guest's mailbox")?,
        })
    }

    /// One stay in the guest.
    fn run(&self, seen: bool) -> Result<Exit, NotRun> {
        self.vcpu.with(
            |vcpu| {
                if seen { self.guest.run(vcpu) } else { vcpu.run(&self.unseen, || true) }
            },
        )
    }

    /// The access it was told to make is refused: it goes on with the next one.
    fn refuse(&self) {
        self.told[word::REFUSED].store(1, Ordering::SeqCst);
        let asked = self.told[word::ASKED].load(Ordering::SeqCst);
        self.told[word::DONE].store(asked, Ordering::SeqCst);
        self.vcpu.with(|vcpu| vcpu.context.vmcb.save.rip = self.entry);
    }

    fn is_told(&self, gpa: u64) -> bool {
        let pending = self.told[word::ASKED].load(Ordering::SeqCst)
            != self.told[word::DONE].load(Ordering::SeqCst);
        // The upper half of linear addresses is that of physical ones, with the sign spread.
        let address = self.told[word::ADDRESS].load(Ordering::SeqCst) & PHYSICAL;
        pending && gpa >> 12 == address >> 12
    }
}

/// Bits of a guest-physical address that a program can reach.
const PHYSICAL: u64 = (1 << 48) - 1;

/// One processor, outside or inside.
pub(crate) struct Seat<'g> {
    number: usize,
    occupants: &'g [Occupant<'g>],
    /// The domain that it is to run.
    wanted: AtomicU32,
    inside: AtomicBool,
    /// It stays outside once it was kicked.
    pub(crate) stays_out: AtomicBool,
    /// What it runs is in its domain's books.
    pub(crate) seen: AtomicBool,
    stop: AtomicBool,
    requests: AtomicU64,
    ended: Lock<Option<Result<Exit, NotRun>>>,
}

impl<'g> Seat<'g> {
    /// The processor of this number, which runs nothing and can run its own of these.
    pub(crate) const fn new(number: usize, occupants: &'g [Occupant<'g>]) -> Self {
        Self {
            number,
            occupants,
            wanted: AtomicU32::new(NOBODY),
            inside: AtomicBool::new(false),
            stays_out: AtomicBool::new(false),
            seen: AtomicBool::new(true),
            stop: AtomicBool::new(false),
            requests: AtomicU64::new(0),
            ended: Lock::new(None),
        }
    }

    /// What the processor does until [`stop`](Self::stop): it runs whom it is told.
    pub(crate) fn serve(&self) {
        if turn_on().is_err() {
            self.ended.with(|ended| *ended = Some(Err(NotRun::NotOn)));
            return;
        }
        while !self.stop.load(Ordering::SeqCst) {
            let Some(occupant) = self.occupant() else {
                self.inside.store(false, Ordering::SeqCst);
                arch::take_interrupts();
                continue;
            };
            self.inside.store(true, Ordering::SeqCst);
            match occupant.run(self.seen.load(Ordering::SeqCst)) {
                Ok(Exit::Interrupt) => {
                    if self.stays_out.load(Ordering::SeqCst) {
                        self.wanted.store(NOBODY, Ordering::SeqCst);
                    }
                }
                Ok(Exit::NestedFault { gpa, .. }) if occupant.is_told(gpa) => occupant.refuse(),
                Err(NotRun::Paused) => self.wanted.store(NOBODY, Ordering::SeqCst),
                other => {
                    self.ended.with(|ended| *ended = Some(other));
                    self.wanted.store(NOBODY, Ordering::SeqCst);
                }
            }
        }
        self.inside.store(false, Ordering::SeqCst);
    }

    /// Let the processor end what it does here.
    pub(crate) fn stop(&self) {
        self.stop.store(true, Ordering::SeqCst);
    }

    fn occupant(&self) -> Option<&'g Occupant<'g>> {
        let wanted = self.wanted.load(Ordering::SeqCst);
        self.occupants.iter().find(|occupant| {
            let domain = u32::from(occupant.guest.id().get());
            occupant.processor == self.number && domain == wanted
        })
    }

    /// Let it run `guest`, and wait until it answers from inside. A guest that it runs
    /// already is left first, by a kick.
    ///
    /// # Errors
    /// If it has no such occupant, or does not answer.
    pub(crate) fn enter(&self, guest: &Guest) -> Result<(), Failure> {
        self.leave()?;
        self.wanted.store(guest.id().get().into(), Ordering::SeqCst);
        let occupant = self.occupant().context("a virtual processor for this one")?;
        // A request that does nothing: the program reads its own code.
        let answer = self.ask(occupant, occupant.entry, Access::Read)?;
        let number = self.number;
        ensure!(answer != Reached::Nothing, "processor {number} cannot enter {:?}", guest.id());
        Ok(())
    }

    /// Make it leave the guest it runs, if any.
    ///
    /// # Errors
    /// If it does not.
    pub(crate) fn leave(&self) -> Result<(), Failure> {
        self.wanted.store(NOBODY, Ordering::SeqCst);
        if self.inside.load(Ordering::SeqCst) {
            let mut set = CpuSet::new();
            ensure!(set.insert(self.number), "processor {} has no place in a set", self.number);
            processors::kick(&set);
        }
        wait(|| !self.inside.load(Ordering::SeqCst)).context("a processor to leave its guest")?;
        self.sound()
    }

    /// Let the guest it runs make one access to `gfn`, `offset` bytes from its start.
    ///
    /// # Errors
    /// If the guest ends instead, or does not answer.
    pub(crate) fn access(&self, gfn: Gfn, offset: u64, access: Access) -> Result<Reached, Failure> {
        let Some(occupant) = self.occupant() else { return Ok(Reached::Nothing) };
        const SIGN: u64 = 1 << 47;
        let address = (gfn.get() << 12 | offset) & PHYSICAL;
        let linear = if address & SIGN == 0 { address } else { address | !PHYSICAL };
        self.ask(occupant, linear, access)
    }

    fn ask(
        &self,
        occupant: &Occupant<'_>,
        linear: u64,
        access: Access,
    ) -> Result<Reached, Failure> {
        let number = self.requests.fetch_add(1, Ordering::SeqCst) + 1;
        let (write, value) = match access {
            Access::Read => (0, 0),
            Access::Write(value) => (1, value),
        };
        let told = occupant.told;
        told[word::ADDRESS].store(linear, Ordering::SeqCst);
        told[word::WRITE].store(write, Ordering::SeqCst);
        told[word::VALUE].store(value, Ordering::SeqCst);
        told[word::REFUSED].store(0, Ordering::SeqCst);
        told[word::ASKED].store(number, Ordering::SeqCst);
        let answered =
            wait(|| told[word::DONE].load(Ordering::SeqCst) == number || self.occupant().is_none());
        answered.context("an answer of a guest")?;
        self.sound()?;
        if told[word::DONE].load(Ordering::SeqCst) != number
            || told[word::REFUSED].load(Ordering::SeqCst) != 0
        {
            return Ok(Reached::Nothing);
        }
        Ok(Reached::Memory(told[word::VALUE].load(Ordering::SeqCst)))
    }

    /// Nothing has ended a guest that should not.
    fn sound(&self) -> Result<(), Failure> {
        let ended = self.ended.with(|ended| *ended);
        ensure!(ended.is_none(), "a guest ended with {ended:x?}");
        Ok(())
    }
}

/// Poll until `condition` is true, taking kicks meanwhile.
fn wait(mut condition: impl FnMut() -> bool) -> Result<(), clock::TimedOut> {
    clock::wait(PATIENCE, || {
        arch::take_interrupts();
        condition()
    })
}
