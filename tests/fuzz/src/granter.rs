//! A hostile granter: it rewrites its entries whenever it gets a chance.
//!
//! A chance is every call between the crate and its embedder, and every access to memory
//! and turn of a wait behind that. What the granter ever offered is on record, so a
//! mapping of a page that was never offered, or with rights that never were, is noticed.

mod rewriter;

use std::{
    cell::RefCell,
    collections::{BTreeMap, BTreeSet},
    sync::atomic::Ordering,
};

use arbitrary::Arbitrary;
use flush::{Gfn, Mfn};
use gnttab::{Call, GrantStorage, GuestAddress, Outcome, TableFrame};
use host::{
    Ram, World,
    calls::{map_request, operation, unmap_request},
    world::{ARGUMENTS, BACKEND, FRONTEND, OTHER_CPU},
};
use hwmodel::Access;
use toml::Table;
use zerocopy::{FromBytes, Immutable, IntoBytes};

use crate::{
    script::{self, Below},
    sheet::{Sheet, keys, names, number},
    watched::{Watched, Watcher},
    world::{Manner, Start, end_of, touch},
};

use rewriter::{Granter, Move, Offer, granted};

/// References that are used, and pages that may be behind them.
const REFERENCES: u64 = 12;
const WINDOW: u64 = 0x10_0000;

#[derive(Debug, Arbitrary)]
struct Head {
    start: Start,
    version_2: bool,
}

#[derive(Debug, Arbitrary)]
enum Step {
    /// What the granter does at its next chances.
    Plan(Vec<Move>),
    Map(Maps),
    MapMany(Maps, Maps, Maps, Maps),
    Unmap(Below<8>),
    UnmapAll,
    Version(bool),
    /// The granter takes a page away that it grants.
    Withdraw(Below<REFERENCES>),
    Touch,
}

#[derive(Debug, Arbitrary)]
struct Maps {
    reference: Below<REFERENCES>,
    read_only: bool,
    again: bool,
}

/// A live mapping.
#[derive(Clone, Copy, Debug)]
struct Mapped {
    reference: u64,
    handle: u32,
    gfn: Gfn,
    mfn: Mfn,
    read_only: bool,
    /// What a scenario calls it.
    name: u32,
}

struct Play {
    world: World,
    granter: Granter,
    mapped: Vec<Mapped>,
    pages: Vec<Option<Mfn>>,
    next: u64,
    withdrawn: RefCell<BTreeSet<Mfn>>,
    sheet: Sheet,
}

impl Play {
    fn new(head: &Head, manner: &Manner) -> Self {
        let world = head.start.world(1024, manner);
        let sheet = manner.sheet.clone();
        if head.version_2 {
            sheet.first("set_version", || keys! { version: 2 });
        }
        let all: Vec<u32> = (0..REFERENCES as u32).collect();
        sheet.first("grant", || keys! { pages: names("f", &all), reference: 0 });
        let pages = (0..REFERENCES)
            .map(|page| Some(world.hypervisor.populate(world.frontend(), Gfn::new(granted(page)))))
            .collect();
        let words = {
            let table = world.frontend().grants();
            let frame = table.storage().frame(TableFrame::Shared(0)).expect("a table has a frame");
            world.hypervisor.memory.ram().words(frame).expect("it is memory")
        };
        let granter = Granter::new(words, sheet.clone());
        let watching = granter.clone();
        world.observe(Some(Box::new(move || watching.turn())));
        let play = Self {
            world,
            granter,
            mapped: Vec::new(),
            pages,
            next: 0,
            withdrawn: RefCell::default(),
            sheet,
        };
        play.set_version(head.version_2);
        for reference in 0..REFERENCES {
            play.granter.lock().offer(reference, Offer::Good(Below(reference)));
        }
        play
    }

    fn call<T: FromBytes + IntoBytes + Immutable>(
        &self,
        id: flush::DomainId,
        command: u32,
        elements: &mut [T],
    ) -> Outcome {
        let base = ARGUMENTS.get() << 12;
        self.world.put(id, base, elements.as_bytes());
        let count = u32::try_from(elements.len()).expect("few elements");
        let call = Call { command, argument: GuestAddress(base), count };
        let ended =
            self.world.call_as(id, |domain| call.run(&Watched { domain, watcher: &self.granter }));
        self.world.get(id, base, elements.as_mut_bytes());
        assert!(ended.failed.is_empty());
        // Only under the table's lock are its status words in reach here.
        let table = self.world.frontend().grants();
        for (reference, value) in self.granter.lock().statuses.drain(..) {
            if let Some(words) = table.storage().status(0) {
                let index = usize::try_from(reference).expect("few references");
                words[index].store(value, Ordering::SeqCst);
            }
        }
        drop(table);
        ended.outcome
    }

    /// Writes down a call, during which the granter does what it planned, in any order.
    fn write_call(&self, action: &str, flushes: u64, keys: impl FnOnce() -> Table) {
        if self.granter.lock().plan.is_empty() {
            self.sheet.step(action, flushes, keys);
        } else {
            // What the granter did in an earlier call stays there.
            self.sheet.step("mark", 0, Table::new);
            self.sheet.step_of(Some("caller"), action, flushes, keys);
        }
    }

    fn write_touch(&self, mappings: &[Mapped], reaches: &str) {
        if mappings.is_empty() {
            return;
        }
        for kind in ["read", "write"] {
            self.sheet.step("access", 0, || {
                let made: Vec<u32> = mappings.iter().map(|mapped| mapped.name).collect();
                let by = vec!["cpu1", "dev0"];
                keys! { by: by, mappings: names("m", &made), kind: kind, reaches: reaches }
            });
        }
    }

    fn version(&self, version_2: bool) {
        let version = 1 + u32::from(version_2);
        self.write_call("set_version", 0, || keys! { version: version, outcome: "any" });
        self.set_version(version_2);
    }

    fn set_version(&self, version_2: bool) {
        let mut argument = [1 + u32::from(version_2)];
        let outcome = self.call(FRONTEND, operation::SET_VERSION, &mut argument);
        let version = self.world.frontend().grants().version();
        assert_eq!(argument[0], version.number());
        let pinned = self.world.frontend().grants().pinned() > 0;
        assert!(!pinned || version == self.granter.lock().version, "{outcome:?}");
        self.granter.lock().version = version;
    }

    fn map(&mut self, maps: &[&Maps]) {
        let mut asked = Vec::new();
        for maps in maps {
            for _ in 0..=u8::from(maps.again) {
                asked.push((maps.reference.0, maps.read_only, Gfn::new(WINDOW + self.next)));
                self.next += 1;
            }
        }
        self.write_map(&asked);
        let first = self.next as u32 - asked.len() as u32;
        let mut elements: Vec<_> = asked
            .iter()
            .map(|(reference, read_only, gfn)| {
                let reference = u32::try_from(*reference).expect("few references");
                map_request(FRONTEND, reference, *gfn, *read_only)
            })
            .collect();
        self.granter.lock().begin();
        assert_eq!(self.call(BACKEND, operation::MAP, &mut elements), Outcome::Done);
        let asked = (first..).zip(asked).zip(elements);
        for ((name, (reference, read_only, gfn)), element) in asked {
            let found = self.world.backend().lookup(gfn);
            if element.status != 0 {
                assert_eq!((found, element.handle), (None, u32::MAX), "{reference} at {gfn:?}");
                continue;
            }
            let mfn = found.expect("a map that went well shows a page").mfn;
            let handle = element.handle;
            let mapped = Mapped { reference, handle, gfn, mfn, read_only, name };
            self.write_touch(&[mapped], "any");
            self.check_offered(&mapped);
            self.mapped.push(mapped);
        }
    }

    fn write_map(&self, asked: &[(u64, bool, Gfn)]) {
        let Some((_, _, first)) = asked.first() else { return };
        let element = |(place, (reference, read_only, _)): (usize, &(u64, bool, Gfn))| {
            let flags = 2 | u32::from(*read_only) << 2;
            keys! { element: place as u32, reference: number(*reference), flags: flags }
        };
        self.write_call("map", flushes(asked.len()), || {
            let pages: Vec<u32> = asked.iter().map(|(reference, ..)| *reference as u32).collect();
            let made: Vec<u32> = (0_u32..)
                .map(|place| (first.get() - WINDOW) as u32 + place)
                .take(asked.len())
                .collect();
            keys! {
                pages: names("f", &pages), as: names("m", &made), at: number(first.get()),
                alter: asked.iter().enumerate().map(element).collect::<Vec<_>>(), outcome: "any",
            }
        });
    }

    /// A new mapping shows a page that was offered while it was made, for what it was
    /// offered for. Where the grant was mapped already, the page is that one.
    fn check_offered(&self, mapped: &Mapped) {
        let offered = self.granter.lock().offered(mapped.reference, !mapped.read_only);
        let same = |other: &&Mapped| other.reference == mapped.reference;
        let before: Vec<&Mapped> = self.mapped.iter().filter(same).collect();
        if let Some(first) = before.first() {
            assert_eq!(first.mfn, mapped.mfn, "{mapped:?} is another page than {first:?}");
            let asked = mapped.read_only || before.iter().any(|other| !other.read_only);
            assert!(asked || !offered.is_empty(), "{mapped:?} may write, and nobody allowed it");
        } else {
            let page = self.pages.iter().position(|page| *page == Some(mapped.mfn));
            let gfn = page.map(|page| granted(page as u64));
            let was_offered = gfn.is_some_and(|gfn| offered.contains(&gfn));
            assert!(was_offered, "{mapped:?} was not offered; these were: {offered:x?}");
        }
        let writes = self.world.machine.access(OTHER_CPU, mapped.gfn.get() << 12, Access::Write);
        assert_eq!(writes.is_ok(), !mapped.read_only, "{mapped:?}");
    }

    fn unmap(&mut self, places: impl Iterator<Item = usize>) {
        let ended: Vec<Mapped> =
            places.filter_map(|place| self.mapped.get(place).copied()).collect();
        if ended.is_empty() {
            return;
        }
        self.write_call("unmap", flushes(ended.len()), || {
            let made: Vec<u32> = ended.iter().map(|mapped| mapped.name).collect();
            keys! { mappings: names("m", &made), outcome: "any" }
        });
        let elements = ended.iter().map(|mapped| unmap_request(mapped.handle, mapped.gfn));
        let mut elements: Vec<_> = elements.collect();
        assert_eq!(self.call(BACKEND, operation::UNMAP, &mut elements), Outcome::Done);
        // Whatever the granter wrote meanwhile, a holder can give back what it holds.
        assert!(elements.iter().all(|element| element.status == 0), "{ended:?}");
        let gone = |mapped: &Mapped| ended.iter().any(|other| other.handle == mapped.handle);
        self.mapped.retain(|mapped| !gone(mapped));
        self.write_touch(&ended, "fault");
        for mapped in ended {
            assert_eq!(self.world.backend().lookup(mapped.gfn), None);
            assert_eq!(touch(&self.world, mapped.gfn), [false; 4], "{mapped:?}");
        }
    }

    /// The granter's own mapping of a page goes; the page lives as long as it is mapped.
    fn withdraw(&self, page: u64) {
        let guest = self.world.frontend();
        let gfn = Gfn::new(granted(page));
        let Some(found) = guest.lookup(gfn) else { return };
        self.write_call("clear", 1, || {
            keys! { by: "front", first: number(gfn.get()), count: 1 }
        });
        let expected = p2m::Expected { mfn: found.mfn, kind: p2m::PageKind::RamReadWrite };
        self.world.call_as(FRONTEND, |caller| {
            let mut batch: flush::Batch<Mfn, 1> = flush::Batch::new(FRONTEND);
            let held = batch.hold(|skipped| {
                Ok::<_, p2m::ClearError>((found.mfn, guest.clear(gfn, expected, skipped)?))
            });
            held.expect("the page is cleared");
            let hardware = gnttab::Domain::hardware(caller);
            let mut flushed = batch.flush(&hardware).expect("the flush completes");
            let page = flushed.next_page().expect("one page was held");
            self.world.hypervisor.pages.lose(*page.get());
            if self.world.hypervisor.pages.drop_one(*page.get(), false) {
                self.world.hypervisor.memory.ram().release(*page.get());
            }
            Outcome::Done
        });
        self.withdrawn.borrow_mut().insert(found.mfn);
    }

    fn step(&mut self, step: &Step) {
        match step {
            Step::Plan(moves) => self.granter.lock().plan.extend(moves),
            Step::Map(maps) => self.map(&[maps]),
            Step::MapMany(one, two, three, four) => self.map(&[one, two, three, four]),
            Step::Unmap(place) => self.unmap(std::iter::once(place.0 as usize)),
            Step::UnmapAll => self.unmap(0..self.mapped.len()),
            Step::Version(version_2) => self.version(*version_2),
            Step::Withdraw(page) => self.withdraw(page.0),
            Step::Touch => {
                self.write_touch(&self.mapped, "any");
                for mapped in &self.mapped {
                    let writes = !mapped.read_only;
                    let reached = touch(&self.world, mapped.gfn);
                    assert_eq!(reached, [true, writes, true, writes], "{mapped:?}");
                }
            }
        }
        self.check();
    }

    fn check(&self) {
        let mut counts: BTreeMap<Mfn, (u32, u32)> = BTreeMap::new();
        for mapped in &self.mapped {
            let count = counts.entry(mapped.mfn).or_default();
            count.0 += 1;
            count.1 += u32::from(!mapped.read_only);
        }
        for mfn in self.pages.iter().flatten() {
            let (mappings, writable) = counts.get(mfn).copied().unwrap_or_default();
            let owned = u32::from(!self.withdrawn.borrow().contains(mfn));
            let counted = self.world.hypervisor.pages.get(*mfn);
            assert_eq!(counted, (mappings + owned, writable), "{mfn:?}");
        }
        let pinned: BTreeSet<u64> = self
            .mapped
            .iter()
            .map(|mapped| mapped.reference)
            .filter(|reference| *reference >= 8)
            .collect();
        assert_eq!(self.world.frontend().grants().pinned(), pinned.len());
        self.world.check_unharmed();
    }
}

/// The most flushes of each kind that a call over so many elements asks for.
fn flushes(elements: usize) -> u64 {
    elements.div_ceil(32) as u64 + 1
}

fn read(bytes: &[u8]) -> Option<(Head, Vec<Step>)> {
    script::read(bytes)
}

pub(crate) fn play(bytes: &[u8], manner: &Manner) {
    let Some((head, steps)) = read(bytes) else { return };
    let mut play = Play::new(&head, manner);
    script::each(&steps, |step| play.step(step));
    play.granter.lock().plan.clear();
    play.unmap(0..play.mapped.len());
    play.check();
    assert_eq!(play.world.audit(), []);
    end_of(&play.world);
}

pub(crate) fn seed(bytes: &[u8]) -> u64 {
    read(bytes).map_or(0, |(head, _)| head.start.seed())
}

pub(crate) fn tell(bytes: &[u8]) -> String {
    read(bytes).map_or_else(String::new, |(head, steps)| script::tell(&head, &steps))
}
