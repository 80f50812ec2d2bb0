//! A scenario file in the testbed: its steps, carried out one by one.
//!
//! The runner passes them as the first boot module (`testbed::scenario`). Options:
//! `tables=separate` or `tables=shared`, `levels=3`, `handle_pages=N`, properties of the unit
//! ([`setup`]), and `plant=NAME` for a planted bug.

use arrayvec::ArrayVec;
use flush::{DomainId, Gfn, Mfn};
use gnttab::Call;
use iommu_vtd::Counters;
use spin::mutex::{SpinMutex, SpinMutexGuard};
use testbed::failure::{Context, Failure};
use testbed::scenario::{self, BUILT_IN, Line, NAMES};
use testbed::{ensure, fail};

use crate::devices::edu::Edu;
use crate::guest::{Occupant, Seat};
use crate::machine::Machine;
use crate::processors::{self, Processors, Work};
use crate::say;
use crate::world::scripted::Scripted;
use crate::world::{Hung, Manner, Mischief, Overwritten, World};

mod access;
mod calls;
mod check;
mod grants;
mod hardware;
mod memory;
mod setup;

use setup::Plant;

/// Elements of one call.
const ELEMENTS: usize = 512;
/// Processors that can run guests.
const SEATS: usize = 3;
/// Virtual processors: one for each domain that a processor runs.
const OCCUPANTS: usize = 4;
/// Grants of one page.
const GRANTS: usize = 4;

/// A page that has a name.
#[derive(Clone, Debug)]
struct Page {
    frame: Mfn,
    /// Where its owner has it.
    gfn: Gfn,
    order: u8,
    owner: DomainId,
    /// Its grants, by table and reference.
    grants: ArrayVec<(DomainId, u32), GRANTS>,
}

impl Page {
    /// The frame of it that is at `gfn`, or its first.
    fn at(&self, gfn: Gfn) -> Mfn {
        let offset = gfn.get().wrapping_sub(self.gfn.get());
        let inside = offset < 1 << self.order;
        Mfn::new(self.frame.get() + if inside { offset } else { 0 })
    }
}

/// A mapping that has a name.
#[derive(Clone, Copy, Debug)]
struct Mapped {
    page: usize,
    by: DomainId,
    gfn: Gfn,
    handle: u32,
    /// The granter and the reference.
    grant: (DomainId, u32),
}

/// An element of a call.
#[derive(Clone, Copy, Debug)]
struct Element {
    /// What its status must be.
    status: Option<i16>,
    /// What a map makes, under this name.
    made: Option<(usize, Mapped)>,
    /// Pages whose entries change places.
    swapped: Option<((DomainId, u32), (DomainId, u32))>,
}

/// A call that was left.
struct Left {
    by: DomainId,
    operation: Scripted,
    rest: Call,
    elements: usize,
}

/// Where counts began.
#[derive(Clone, Copy, Default)]
struct Marked {
    counters: Counters,
    kicks: u64,
}

/// What the names of a scenario stand for. Too large for a stack.
struct Books {
    pages: [Option<Page>; NAMES],
    mappings: [Option<Mapped>; NAMES],
    /// Elements of the call to come.
    elements: ArrayVec<Element, ELEMENTS>,
    /// Where pages are to be written to next, and their names.
    used: ArrayVec<(Gfn, usize), ELEMENTS>,
}

static BOOKS: SpinMutex<Books> = SpinMutex::new(Books {
    pages: [const { None }; NAMES],
    mappings: [const { None }; NAMES],
    elements: ArrayVec::new_const(),
    used: ArrayVec::new_const(),
});

struct Played<'w> {
    world: &'w World,
    plant: Plant,
    mischief: Mischief,
    seats: &'w [Seat<'w>; SEATS],
    /// The second device, once it is needed.
    edu: Option<Edu>,
    /// Whose each device is.
    owners: [Option<DomainId>; 2],
    books: &'static mut Books,
    left: Option<Left>,
    hung: Option<Hung>,
    /// A command that the unit has refused is yet to be repeated.
    refused: bool,
    overwritten: Overwritten,
    /// Frames that are kept from everybody, in a list of their own.
    drained: Option<Mfn>,
    marked: Marked,
    /// The step, and the flushes that had been asked for when it began.
    step: (u64, (u64, u64)),
    /// Batches of the last walk over a range.
    batches: u64,
    /// Flushes that were asked for once more, because they had failed.
    again: (u64, u64),
    unique: u64,
}

/// Carry out the steps.
pub(super) fn run(machine: &Machine) -> Result<(), Failure> {
    let text = match machine.module(0) {
        Some(bytes) => core::str::from_utf8(bytes).context("the boot module is no text")?,
        None => BUILT_IN,
    };
    let words = machine.command_line();
    let plant = Plant::named(words.get("plant").unwrap_or("none"))?;
    let world = setup::world(machine, &words, plant)?;
    // Large, and so filled where it is.
    let mut occupants = ArrayVec::new();
    seat_all(&world, text, &mut occupants)?;
    let seats = [1, 2, 3].map(|number| Seat::new(number, &occupants));
    let mut played = Played::new(&world, plant, &seats)?;
    if occupants.is_empty() {
        return played.play(text);
    }
    let processors = Processors::start(machine)?;
    let serve = |place: usize| {
        let seat = &seats[place];
        move || seat.serve()
    };
    let actions = [serve(0), serve(1), serve(2)];
    let mut work: ArrayVec<Work<'_>, SEATS> = ArrayVec::new();
    for (processor, action) in (1..).zip(&actions) {
        work.push(Work { processor, action });
    }
    processors.together(&work, || {
        let done = played.play(text);
        let mut set = flush::CpuSet::new();
        for (number, seat) in (1..).zip(&seats) {
            seat.stop();
            ensure!(set.insert(number), "processor {number} has an impossible number");
        }
        processors::kick(&set);
        done
    })?
}

/// Makes the virtual processors that the steps need: lines `cpu`.
#[inline(never)]
fn seat_all<'w>(
    world: &'w World,
    text: &str,
    all: &mut ArrayVec<Occupant<'w>, OCCUPANTS>,
) -> Result<(), Failure> {
    /// The first page of the memory of each, and the distance to the next one's.
    const AT: u64 = 0x60;
    const PAGES: u64 = 0x10;
    for line in scenario::lines(text).context("the boot module")? {
        let line = line.context("the boot module")?;
        let ("cpu", [cpu, domain, reach @ ..]) = (line.word, line.values.as_slice()) else {
            continue;
        };
        let seat = seat_number(*cpu)?;
        let guest = world.guest(number(*domain)?)?;
        let reach: ArrayVec<Gfn, { scenario::VALUES }> =
            reach.iter().map(|gfn| Gfn::new(*gfn)).collect();
        ensure!(!all.is_full(), "no room for another virtual processor");
        let at = Gfn::new(AT + PAGES * seat as u64);
        all.push(Occupant::new(&world.hypervisor, guest, seat + 1, at, &reach)?);
    }
    Ok(())
}

/// The place of a processor's seat.
fn seat_number(cpu: u64) -> Result<usize, Failure> {
    let seat = usize::try_from(cpu).ok().and_then(|cpu| cpu.checked_sub(1));
    seat.filter(|seat| *seat < SEATS).context("a processor from 1 to 3")
}

/// A domain's number.
fn number(domain: u64) -> Result<DomainId, Failure> {
    Ok(DomainId::new(u16::try_from(domain).context("a domain")?))
}

/// A name's number.
fn name(number: u64) -> Result<usize, Failure> {
    let number = usize::try_from(number).ok().filter(|number| *number < NAMES);
    number.context("a name's number")
}

impl<'w> Played<'w> {
    fn new(world: &'w World, plant: Plant, seats: &'w [Seat<'w>; SEATS]) -> Result<Self, Failure> {
        for seat in seats {
            seat.seen.store(!plant.unseen, core::sync::atomic::Ordering::SeqCst);
        }
        let mut played = Self {
            world,
            plant,
            mischief: Mischief { slip: plant.slip, ..Mischief::default() },
            seats,
            edu: None,
            owners: [Some(crate::world::BACKEND), None],
            // One scenario is played in a boot.
            books: SpinMutexGuard::leak(BOOKS.lock()),
            left: None,
            hung: None,
            refused: false,
            overwritten: Overwritten::default(),
            drained: None,
            marked: Marked::default(),
            step: (0, (0, 0)),
            batches: 0,
            again: (0, 0),
            unique: 0,
        };
        played.marked = played.now()?;
        Ok(played)
    }

    fn play(&mut self, text: &str) -> Result<(), Failure> {
        let mut steps = 0_u64;
        for line in scenario::lines(text).context("the boot module")? {
            let line = line.context("the boot module")?;
            steps += 1;
            if self.step.0 != line.number {
                self.step = (line.number, self.asked());
            }
            if let Err(failure) = self.carry_out(&line) {
                say!("@ broken line={}", line.number);
                fail!("line {}: {failure}", line.number);
            }
        }
        say!("@ scenario steps={steps}");
        self.world.report_boot(self.overwritten);
        Ok(())
    }

    fn carry_out(&mut self, line: &Line<'_>) -> Result<(), Failure> {
        let values = line.values.as_slice();
        let done = match line.word {
            "cpu" => true,
            "caller" => self.prepare(values)?,
            _ => {
                self.grant_step(line.word, values)?
                    || self.call_step(line.word, values)?
                    || self.memory_step(line.word, values)?
                    || self.hardware_step(line.word, values)?
                    || self.check_step(line.word, values)?
            }
        };
        ensure!(done, "there is no step `{}` with {} numbers", line.word, values.len());
        Ok(())
    }

    /// How flushes are carried out.
    fn manner(&self) -> Manner<'static> {
        Manner { cpus: self.plant.cpus, devices: self.plant.devices, ..Manner::HONEST }
    }

    /// Flushes of processors and of devices that were asked for so far.
    fn asked(&self) -> (u64, u64) {
        let audit = &self.world.audit;
        (audit.tlb.asked(), audit.iotlb.asked())
    }

    fn now(&self) -> Result<Marked, Failure> {
        let mut kicks = 0;
        for id in crate::world::DOMAINS {
            kicks += self.world.guest(id)?.cpus().counts().kicks;
        }
        Ok(Marked { counters: self.world.counters(), kicks })
    }

    fn page(&self, page: u64) -> Result<&Page, Failure> {
        let page = self.books.pages.get(name(page)?).and_then(Option::as_ref);
        page.context("a page that has been there")
    }

    fn mapping(&self, mapping: u64) -> Result<Mapped, Failure> {
        let mapping = self.books.mappings.get(name(mapping)?).copied().flatten();
        mapping.context("a mapping that has been tried")
    }

    fn know(&mut self, page: u64, known: Page) -> Result<(), Failure> {
        *self.books.pages.get_mut(name(page)?).context("a page")? = Some(known);
        Ok(())
    }
}

/// Whether an attempt ended as it was to: 0 well, 1 refused, 2 either way.
fn attempt<A>(expected: u64, result: Result<A, Failure>) -> Result<Option<A>, Failure> {
    match (expected, result) {
        (0 | 2, Ok(done)) => Ok(Some(done)),
        (1 | 2, Err(_)) => Ok(None),
        (0, Err(failure)) => Err(failure),
        (1, Ok(_)) => fail!("it works, and was to be refused"),
        (other, _) => fail!("{other} stands for no result"),
    }
}
