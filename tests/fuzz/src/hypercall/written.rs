//! What two guests do, as steps of a scenario.
//!
//! A [`Writer`] knows what a scenario calls pages and mappings. What each element of a call
//! comes to is not said, for no model knows it: what must hold at any time has to.

use std::{
    cell::{Cell, RefCell},
    collections::{BTreeMap, BTreeSet},
};

use flush::Gfn;
use gnttab::{
    Action,
    abi::{MapGrantRef, SwapGrantRef, UnmapGrantRef},
};
use toml::{Table, Value};

use super::{
    BASE, PAGES,
    elements::{Copy, Mostly, Place, Side, Trouble},
    ram,
};
use crate::{
    sheet::{Sheet, keys, names, number, numbers},
    world::{Fails, Who},
};

/// Pages that hold the arguments of a scenario's calls.
const IN_USE: u64 = 2;
/// How a guest names itself.
const SELF: u16 = 0x7ff0;
/// A mapping that gives its name to elements that name none.
const SPARE: &str = "spare";

/// Writes steps down.
#[derive(Debug, Default)]
pub(super) struct Writer {
    pub(super) sheet: Sheet,
    /// Pages that the story is about.
    used: RefCell<BTreeSet<(Who, u64)>>,
    /// By which reference a page was granted last.
    granted: RefCell<BTreeMap<(Who, u64), u64>>,
    mappings: Cell<u32>,
    spare: Cell<bool>,
    /// The call under way is one of the scenario's as well.
    calls: Cell<bool>,
}

/// An element that gives a mapping back.
pub(super) struct Giving {
    /// What the scenario calls the mapping.
    pub(super) name: Option<u32>,
    pub(super) handle: u32,
    pub(super) address: u64,
    pub(super) new_address: u64,
}

fn name(who: Who) -> &'static str {
    match who {
        Who::Front => "front",
        Who::Back => "back",
    }
}

/// Whom a grant goes to at first, and whether only for reading.
pub(super) fn first_grant(who: Who, page: u64) -> (Who, bool) {
    match who {
        Who::Front => (Who::Back, page % 4 == 3),
        // One in three is for itself.
        Who::Back => (if page.is_multiple_of(3) { Who::Back } else { Who::Front }, false),
    }
}

/// Flushes of each kind that a call over so many elements may ask for: where mappings hit
/// each other, a batch ends early.
fn flushes(elements: usize) -> u64 {
    elements as u64 + 1
}

impl Writer {
    pub(super) fn new(sheet: Sheet) -> Self {
        Self { sheet, ..Self::default() }
    }

    /// The name of a page, which its owner has and grants from the start.
    fn page(&self, who: Who, page: u64) -> String {
        let text = format!("{}{page}", if who == Who::Front { "f" } else { "b" });
        if self.used.borrow_mut().insert((who, page)) {
            self.granted.borrow_mut().insert((who, page), page);
            let (to, read_only) = first_grant(who, page);
            self.sheet.first("grant", || {
                keys! {
                    pages: text.clone(), by: name(who), to: name(to), reference: number(page),
                    read_only: read_only,
                }
            });
        }
        text
    }

    /// Notes that a guest's own page at an address matters, if there is one.
    fn at(&self, by: Who, address: u64) {
        if let Some(page) = (0..PAGES).find(|page| ram(*page).get() == address >> 12) {
            self.page(by, page);
        }
    }

    /// What goes wrong in the next call, over elements of this size; whether a scenario can
    /// say so.
    fn trouble(&self, trouble: &Trouble, action: Action, size: usize) -> bool {
        let faults = |keys| self.sheet.step("faults", 0, || keys);
        match trouble {
            Trouble::None => {}
            Trouble::Read(n) => faults(keys! { read: 8 * i64::from(*n) / size as i64 }),
            Trouble::Write(n) => faults(keys! { write: i64::from(*n) }),
            Trouble::Preempt => faults(keys! { preempt: true }),
            Trouble::Denied(Action::Unmap) => faults(keys! { deny_unmap: true }),
            Trouble::Denied(denied) if *denied == action => return false,
            Trouble::Denied(_) => {}
            Trouble::Hardware(n, fails) => self.sheet.step("fail", 0, || {
                let how = match fails {
                    Fails::Hang => "hang",
                    Fails::QueueError => "queue-error",
                    Fails::TimeOut => "time-out",
                    Fails::CompletionError => "completion-error",
                };
                keys! { operation: i64::from(*n) % 40 + 1, how: how }
            }),
        }
        true
    }

    /// A call was left, and goes on.
    pub(super) fn go_on(&self, by: Who) {
        if !self.calls.get() {
            return;
        }
        self.sheet.step("go_on", 4, || keys! { by: name(by), outcome: "any" });
    }

    /// Gets over what went wrong: hardware uses what it holds, and works again.
    pub(super) fn get_over(&self, trouble: &Trouble, places: &[Gfn]) {
        if !self.calls.replace(false) {
            return;
        }
        if let Trouble::Hardware(..) = trouble {
            self.sheet.step("speculate", 0, Table::new);
            self.touch(places.iter().map(|gfn| gfn.get()));
            self.sheet.step("repair", 0, Table::new);
            self.sheet.step("retry", 0, Table::new);
            self.sheet.step("enter", 0, || keys! { cpu: 1 });
        } else if !matches!(trouble, Trouble::None | Trouble::Denied(_))
            || matches!(trouble, Trouble::Denied(Action::Unmap))
        {
            self.sheet.step("faults", 0, Table::new);
        }
    }

    /// A map; what its mappings are called, if a scenario can say it.
    pub(super) fn map(&self, by: Who, elements: &[MapGrantRef], trouble: &Trouble) -> Option<u32> {
        let hits_arguments =
            |element: &MapGrantRef| (BASE..BASE + (IN_USE << 12)).contains(&element.host_addr);
        if elements.iter().any(hits_arguments) {
            self.sheet.left_out(&elements, "mappings over the arguments of calls");
            return None;
        }
        if !self.trouble(trouble, Action::Map, size_of::<MapGrantRef>()) {
            self.sheet.left_out(&elements, "calls that policy forbids");
            return None;
        }
        self.calls.set(true);
        let first = self.mappings.get();
        self.mappings.set(first + elements.len() as u32);
        let granter = |element: &MapGrantRef| match element.domain {
            SELF => by.id().get(),
            domain => domain,
        };
        let page = |element: &MapGrantRef| {
            self.at(by, element.host_addr);
            let owner = Who::ALL.into_iter().find(|who| who.id().get() == granter(element));
            match (owner, u64::from(element.reference)) {
                (Some(owner), reference) if reference < PAGES => self.page(owner, reference),
                _ => self.page(by.other(), 0),
            }
        };
        let pages: Vec<String> = elements.iter().map(page).collect();
        let alter = elements.iter().enumerate().map(|(place, element)| {
            keys! {
                element: place as u32, reference: element.reference, flags: element.flags,
                domain: i64::from(granter(element)), address: number(element.host_addr),
            }
        });
        self.sheet.step("map", flushes(elements.len()), || {
            let made: Vec<u32> = (first..).take(elements.len()).collect();
            keys! {
                pages: pages, by: name(by), as: names("m", &made), at: 0,
                alter: alter.collect::<Vec<_>>(), outcome: "any",
            }
        });
        Some(first)
    }

    pub(super) fn unmap(&self, by: Who, operation: &str, givings: &[Giving], trouble: &Trouble) {
        self.trouble(trouble, Action::Unmap, size_of::<UnmapGrantRef>());
        self.calls.set(true);
        let of = |giving: &Giving| match giving.name {
            Some(name) => format!("m{name}"),
            None => self.spare(),
        };
        let mappings: Vec<String> = givings.iter().map(of).collect();
        let alter = givings.iter().enumerate().map(|(place, giving)| {
            self.at(by, giving.address);
            let mut keys = keys! { element: place as u32, address: number(giving.address) };
            if giving.new_address != 0 {
                keys.insert("new_address".to_owned(), number(giving.new_address));
            }
            if giving.name.is_none() {
                keys.insert("handle".to_owned(), Value::from(giving.handle));
            }
            keys
        });
        let alter: Vec<Table> = alter.collect();
        self.sheet.step("unmap", flushes(givings.len()), || {
            keys! {
                mappings: mappings, by: name(by), operation: operation, alter: alter,
                outcome: "any",
            }
        });
    }

    fn spare(&self) -> String {
        if !self.spare.replace(true) {
            self.sheet.first("populate", || keys! { pages: SPARE, at: 0x9_0000 });
        }
        SPARE.to_owned()
    }

    /// Copies, one call for each: what a scenario copies is the start of a page.
    pub(super) fn copy(&self, by: Who, elements: &[Copy], trouble: &Trouble) {
        for copy in elements {
            let (granted, own) = match (copy.from.granted, copy.to.granted) {
                (true, false) => (&copy.from, &copy.to),
                (false, true) => (&copy.to, &copy.from),
                _ => {
                    self.sheet.left_out(copy, "copies of two grants, or of none");
                    continue;
                }
            };
            let plain = matches!(trouble, Trouble::None)
                && matches!(granted.granter, Mostly::Usual(_))
                && matches!(copy.flags, Mostly::Usual(()))
                && matches!(own.at, Place::Window(_) | Place::Ram(_));
            let Some(page) = self.copied(by, granted).filter(|_| plain) else {
                self.sheet.left_out(copy, "copies that are not plain");
                continue;
            };
            let address = own.at.address();
            self.at(by, address);
            self.sheet.step("copy", 0, || {
                keys! {
                    pages: page, by: name(by), at: number(address >> 12),
                    write: copy.to.granted, outcome: "any",
                }
            });
        }
    }

    /// The page that a scenario believes to be behind one side of a copy.
    fn copied(&self, by: Who, side: &Side) -> Option<String> {
        let place = side.place(by);
        let owner = Who::ALL.into_iter().find(|who| who.id().get() == place.domain)?;
        self.shown(owner, place.frame)
    }

    fn shown(&self, owner: Who, reference: u64) -> Option<String> {
        if !self.used.borrow().contains(&(owner, reference)) && reference < PAGES {
            self.page(owner, reference);
        }
        let granted = self.granted.borrow();
        let found = granted.iter().find(|((by, _), last)| *by == owner && **last == reference);
        found.map(|((by, page), _)| self.page(*by, *page))
    }

    pub(super) fn swap(&self, by: Who, element: &SwapGrantRef) {
        let page = |reference: u32| self.shown(by, reference.into());
        let (Some(first), Some(second)) = (page(element.first), page(element.second)) else {
            self.sheet.left_out(element, "entries that show no page");
            return;
        };
        self.sheet.step("swap", 0, || {
            keys! { pages: first, with: second, by: name(by), outcome: "any" }
        });
    }

    pub(super) fn swapped(&self, by: Who, element: &SwapGrantRef) {
        let (one, other) = (u64::from(element.first), u64::from(element.second));
        for ((owner, _), reference) in &mut *self.granted.borrow_mut() {
            match *reference {
                _ if *owner != by => {}
                last if last == one => *reference = other,
                last if last == other => *reference = one,
                _ => {}
            }
        }
    }

    pub(super) fn grant(&self, by: Who, reference: u64, flags: u64, to: Who, page: u64) {
        let text = self.page(by, page);
        self.granted.borrow_mut().insert((by, page), reference);
        self.sheet.step("entry", 0, || {
            keys! {
                by: name(by), reference: number(reference), flags: number(flags),
                to: name(to), page: text,
            }
        });
    }

    pub(super) fn scribble(&self, by: Who, word: u64, value: u64) {
        self.sheet.step("word", 0, || {
            keys! {
                by: name(by), sort: "shared", word: number(word), low: value as u32,
                high: (value >> 32) as u32,
            }
        });
    }

    pub(super) fn touch(&self, gfns: impl Iterator<Item = u64>) {
        let gfns: Vec<u64> = gfns.collect();
        gfns.iter().for_each(|gfn| self.at(Who::Back, gfn << 12));
        for kind in ["read", "write"] {
            self.sheet.step("access", 0, || {
                let by = vec!["cpu1", "dev0"];
                keys! { by: by, at: numbers(gfns.clone()), kind: kind, reaches: "any" }
            });
        }
    }

    /// All that is left is given back, and nobody uses it any more.
    pub(super) fn end(&self, told: &[(Who, Vec<Giving>)]) {
        self.sheet.step("leave", 0, || keys! { cpu: 1 });
        self.sheet.step("detach", 0, || keys! { device: "dev0" });
        for (who, givings) in told.iter().filter(|(_, givings)| !givings.is_empty()) {
            self.unmap(*who, "unmap", givings, &Trouble::None);
        }
    }
}
