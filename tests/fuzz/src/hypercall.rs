//! A guest's hypercalls: hostile arrays and pointers, on hardware that may fail.
//!
//! Both guests call, grant and use what they have mapped. Handles and references are
//! mostly such that they mean something, and now and then anything at all. After each
//! step no stale access was seen and every page has exactly the references of its
//! entries; a flush that failed has released nothing, and a retry releases the rest.

mod calls;
mod elements;
mod written;

use std::sync::atomic::Ordering;

use arbitrary::Arbitrary;
use flush::Gfn;
use gnttab::{
    Call, Errno, GrantStorage, GuestAddress, Outcome, Status,
    abi::{GrantCopy, MapGrantRef, SwapGrantRef, UnmapAndReplace, UnmapGrantRef},
};
use host::{
    World,
    world::{ARGUMENTS, POISON, granted_gfn},
};
use zerocopy::FromZeros;

use crate::{
    script::{self, Below},
    watched::Watcher,
    world::{Books, Manner, Start, Who, end_of, touch},
};

use elements::{
    Command, Copy, Count, Granter, Many, Map, Mostly, Piece, Place, Pointer, Trouble, Unmap,
};
use written::{Giving, Writer, first_grant};

/// Pages of each guest that can be granted, and references of its table.
const PAGES: u64 = 24;
/// Frames where grants are mapped.
const WINDOW: u64 = 0x10_0000;
/// Where arguments of the structured steps are, and how far they may reach.
const BASE: u64 = ARGUMENTS.get() << 12;
const ARGUMENT_PAGES: u64 = 64;

#[derive(Debug, Arbitrary)]
enum Step<'a> {
    Map { by: Who, elements: Many<Map>, trouble: Trouble },
    Unmap { by: Who, elements: Many<Unmap>, trouble: Trouble },
    Replace { by: Who, elements: Many<Unmap>, trouble: Trouble },
    Copy { by: Who, elements: Many<Copy>, trouble: Trouble },
    Swap { by: Who, first: Below<PAGES>, second: Below<PAGES> },
    Raw { by: Who, command: Command, at: Pointer, count: Count, bytes: Piece<'a>, trouble: Trouble },
    Grant { by: Who, reference: Below<PAGES>, read_only: bool, to: Who, page: Below<PAGES> },
    Scribble { by: Who, word: Below<64>, value: u64 },
    Touch(Place),
    Speculate,
}

/// Where a guest has the page that it grants.
fn ram(page: u64) -> Gfn {
    granted_gfn(u32::try_from(page).expect("few pages"))
}

/// A mapping that a guest was told of.
#[derive(Clone, Copy)]
struct Told {
    handle: u32,
    address: u64,
    /// What a scenario calls it.
    name: Option<u32>,
}

struct Play {
    world: World,
    books: Books,
    /// By guest.
    told: [Vec<Told>; 2],
    writer: Writer,
}

impl Play {
    fn new(start: Start, manner: &Manner) -> Self {
        let world = start.world(1024, manner);
        let mut books = Books::default();
        for who in Who::ALL {
            for page in 0..PAGES {
                world.hypervisor.populate(who.guest(&world), ram(page));
            }
        }
        let arguments = (0..ARGUMENT_PAGES).map(|page| Gfn::new(ARGUMENTS.get() + page));
        for gfn in (0..PAGES).map(ram).chain(arguments) {
            books.names(gfn);
            let pages = Who::ALL.map(|who| who.guest(&world).lookup(gfn));
            books.pages.extend(pages.into_iter().flatten().map(|found| found.mfn));
        }
        let writer = Writer::new(manner.sheet.clone());
        let play = Self { world, books, told: Default::default(), writer };
        for page in 0..PAGES {
            for who in Who::ALL {
                let (to, read_only) = first_grant(who, page);
                play.grant(who, page, flags(read_only), to, page);
            }
        }
        play
    }

    fn grant(&self, by: Who, reference: u64, flags: u64, to: Who, page: u64) {
        let head = flags | u64::from(to.id().get()) << 16;
        let table = by.guest(&self.world).grants();
        let words = table.storage().shared(0).expect("a table has a frame");
        let place = reference as usize;
        match table.version() {
            gnttab::Version::V1 => {
                words[place].store(head | ram(page).get() << 32, Ordering::SeqCst);
            }
            gnttab::Version::V2 => {
                words[2 * place + 1].store(ram(page).get(), Ordering::SeqCst);
                words[2 * place].store(head, Ordering::SeqCst);
            }
        }
    }

    fn step(&mut self, step: &Step<'_>) {
        match step {
            Step::Map { by, elements, trouble } => self.map(*by, &elements.0, trouble),
            Step::Unmap { by, elements, trouble } => {
                let (elements, givings) = self.unmaps(*by, &elements.0);
                self.writer.unmap(*by, "unmap", &givings, trouble);
                let ended = self.call_on(*by, 1, &elements, trouble, |element| element.status);
                let told = ended.iter().map(|element| (element.handle, element.status));
                self.forget(*by, told.collect());
            }
            Step::Replace { by, elements, trouble } => {
                let (elements, givings) = self.unmaps(*by, &elements.0);
                self.writer.unmap(*by, "replace", &givings, trouble);
                let replace = |(element, giving): (UnmapGrantRef, &Giving)| {
                    let UnmapGrantRef { host_addr, handle, status, padding, .. } = element;
                    let new_addr = giving.new_address;
                    UnmapAndReplace { host_addr, new_addr, handle, status, padding }
                };
                let elements: Vec<_> = std::iter::zip(elements, &givings).map(replace).collect();
                let ended = self.call_on(*by, 7, &elements, trouble, |element| element.status);
                let told = ended.iter().map(|element| (element.handle, element.status));
                self.forget(*by, told.collect());
            }
            Step::Copy { by, elements, trouble } => self.copy(*by, &elements.0, trouble),
            Step::Swap { by, first, second } => {
                let (first, second) = (first.0 as u32, second.0 as u32);
                let element = SwapGrantRef { first, second, status: POISON, padding: 0 };
                self.writer.swap(*by, &element);
                let told =
                    self.call_on(*by, 11, &[element], &Trouble::None, |element| element.status);
                if told.iter().any(|element| element.status == 0) {
                    self.writer.swapped(*by, &element);
                }
            }
            Step::Raw { by, command, at, count, bytes, trouble } => {
                self.writer.sheet.left_out(step, "calls with any pointer and any count");
                self.raw(*by, command, at, count, bytes.0, trouble);
            }
            Step::Grant { by, reference, read_only, to, page } => {
                let flags = flags(*read_only);
                self.writer.grant(*by, reference.0, flags, *to, page.0);
                self.grant(*by, reference.0, flags, *to, page.0);
            }
            Step::Scribble { by, word, value } => {
                self.writer.scribble(*by, word.0, *value);
                let table = by.guest(&self.world).grants();
                let words = table.storage().shared(0).expect("a table has a frame");
                words[word.0 as usize].store(*value, Ordering::SeqCst);
            }
            Step::Touch(place) => {
                self.writer.touch(std::iter::once(place.address() >> 12));
                touch(&self.world, Gfn::new(place.address() >> 12));
            }
            Step::Speculate => {
                self.writer.sheet.step("speculate", 0, toml::Table::new);
                self.world.machine.speculate();
            }
        }
    }

    fn map(&mut self, by: Who, elements: &[Map], trouble: &Trouble) {
        let elements: Vec<MapGrantRef> = elements
            .iter()
            .map(|map| {
                let mut element = MapGrantRef::new_zeroed();
                element.host_addr = map.at.address();
                element.flags = match map.flags {
                    Mostly::Usual(()) => 2 | u32::from(map.read_only) << 2,
                    Mostly::Rare(flags) => flags,
                };
                element.reference = match map.reference {
                    Mostly::Usual(reference) => reference.0 as u32,
                    Mostly::Rare(reference) => reference,
                };
                element.domain = match map.granter {
                    Mostly::Usual(Granter::Other | Granter::AlsoOther) => by.other().id().get(),
                    Mostly::Usual(Granter::Own) => by.id().get(),
                    Mostly::Rare(id) => id,
                };
                element.status = POISON;
                element
            })
            .collect();
        let first = self.writer.map(by, &elements, trouble);
        let told = self.call_on(by, 0, &elements, trouble, |element| element.status);
        let okay = |(_, element): &(u32, MapGrantRef)| element.status == Status::Okay.value();
        let mapped = (0..).zip(told).filter(okay).map(|(place, element)| Told {
            handle: element.handle,
            address: element.host_addr,
            name: first.map(|first| first + place),
        });
        self.told[by as usize].extend(mapped);
    }

    fn copy(&mut self, by: Who, elements: &[Copy], trouble: &Trouble) {
        let request = |copy: &Copy| GrantCopy {
            source: copy.from.place(by),
            dest: copy.to.place(by),
            length: match copy.length {
                Mostly::Usual(length) => length.0 as u16,
                Mostly::Rare(length) => length,
            },
            flags: match copy.flags {
                Mostly::Usual(()) => u16::from(copy.from.granted) | u16::from(copy.to.granted) << 1,
                Mostly::Rare(flags) => flags,
            },
            status: POISON,
            padding: 0,
        };
        self.writer.copy(by, elements, trouble);
        let elements: Vec<GrantCopy> = elements.iter().map(request).collect();
        self.call_on(by, 5, &elements, trouble, |element| element.status);
    }

    /// Handles that were given back are not asked for again, as a rule.
    fn forget(&mut self, by: Who, ended: Vec<(u32, i16)>) {
        let gone = |handle: u32| ended.iter().any(|(of, status)| *of == handle && *status == 0);
        self.told[by as usize].retain(|told| !gone(told.handle));
    }

    /// Elements that give mappings back, and the same for a scenario.
    fn unmaps(&self, by: Who, elements: &[Unmap]) -> (Vec<UnmapGrantRef>, Vec<Giving>) {
        let told = &self.told[by as usize];
        let giving = |unmap: &Unmap| {
            let unknown = |handle| Told { handle, address: WINDOW << 12, name: None };
            let known = match unmap.mapping {
                Mostly::Usual(place) if !told.is_empty() => told[usize::from(place) % told.len()],
                Mostly::Usual(place) => unknown(u32::from(place)),
                Mostly::Rare(handle) => unknown(handle),
            };
            let address = match &unmap.at {
                Mostly::Usual(()) => known.address,
                Mostly::Rare(place) => place.address(),
            };
            let new_address = match unmap.new_addr {
                Mostly::Usual(()) => 0,
                Mostly::Rare(address) => address,
            };
            Giving { name: known.name, handle: known.handle, address, new_address }
        };
        let givings: Vec<Giving> = elements.iter().map(giving).collect();
        let element = |giving: &Giving| {
            let mut element = UnmapGrantRef::new_zeroed();
            (element.handle, element.host_addr) = (giving.handle, giving.address);
            element.status = POISON;
            element
        };
        (givings.iter().map(element).collect(), givings)
    }

    /// What is mapped in the end, as far as the guests were told.
    fn write_end(&self) {
        let giving = |told: &Told| Giving {
            name: told.name,
            handle: told.handle,
            address: told.address,
            new_address: 0,
        };
        let left = Who::ALL.map(|who| {
            let told = &self.told[who as usize];
            (who, told.iter().filter(|told| told.name.is_some()).map(giving).collect())
        });
        self.writer.end(&left);
    }

    fn raw(
        &mut self,
        by: Who,
        command: &Command,
        at: &Pointer,
        count: &Count,
        bytes: &[u8],
        trouble: &Trouble,
    ) {
        let end = BASE + (ARGUMENT_PAGES << 12);
        let command = match command {
            Command::Offered(number) => number.0 as u32,
            Command::Any(command) => *command,
        };
        let count = match count {
            Count::One => 1,
            Count::Few(count) => count.0 as u32,
            Count::Any(count) => *count,
        };
        let mut argument = match at {
            Pointer::Arguments(offset) => BASE + u64::from(*offset),
            Pointer::Edge(before) => end - before.0,
            Pointer::End(before) => u64::MAX - before.0,
            Pointer::Any(address) => *address,
        };
        if count > 100 && argument < end {
            // So many elements run into the end of memory; it need not take a minute.
            argument = end - 2048 + argument % 2048;
        }
        let guest = by.guest(&self.world);
        // Some of it may be beyond the end, which is fine.
        let copied = self.world.hypervisor.copy_to(guest, GuestAddress(argument), bytes);
        copied.unwrap_or(());
        let call = Call { command, argument: GuestAddress(argument), count };
        let outcome = self.run(by, call, trouble);
        let negative = i32::try_from(count).is_err();
        assert!(!negative || outcome == Outcome::Failed(Errno::Invalid), "{call:?}: {outcome:?}");
    }
}

/// Of an entry that permits access.
fn flags(read_only: bool) -> u64 {
    1 | u64::from(read_only) << 2
}

fn read(bytes: &[u8]) -> Option<(Start, Vec<Step<'_>>)> {
    script::read(bytes)
}

pub(crate) fn play(bytes: &[u8], manner: &Manner) {
    let Some((start, steps)) = read(bytes) else { return };
    let mut play = Play::new(start, manner);
    script::each(&steps, |step| {
        play.step(step);
        play.books.check(&play.world, &[]);
    });
    assert_eq!(play.world.audit(), []);
    assert_eq!(*play.world.faults.crashes.borrow(), []);
    play.write_end();
    end_of(&play.world);
    play.books.check_end(&play.world);
}

pub(crate) fn seed(bytes: &[u8]) -> u64 {
    read(bytes).map_or(0, |(start, _)| start.seed())
}

pub(crate) fn tell(bytes: &[u8]) -> String {
    read(bytes).map_or_else(String::new, |(start, steps)| script::tell(&start, &steps))
}
