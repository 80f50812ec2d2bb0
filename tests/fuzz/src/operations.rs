//! Whatever a guest and its hypervisor do, next to a model of what must come of it.
//!
//! The [`Reference`] knows what each frame of the backend shows and with which rights, and
//! where each device and CPU is: a few maps, none of which knows of tables, caches or
//! flushes. After every step each access goes exactly where it says, or faults.

mod steps;
mod written;

use std::collections::BTreeMap;

use flush::{Batch, Gfn, Mfn, Run};
use gnttab::Outcome;
use host::{
    Ram, World,
    calls::{map_request, operation, unmap_request},
    world::{BACKEND, DEVICE, FIRST_REFERENCE, FRONTEND, OTHER_CPU, granted_gfn},
};
use hwmodel::{Access, Frame, FrameState, Owner, UnitId};
use iommu_vtd::{Device, SourceId};
use toml::Table;

use crate::{
    script,
    sheet::{Sheet, keys, names, number},
    world::{Manner, Start, end_of},
};

use steps::{Home, Step, used};
use written::flushes;

/// Grants of the frontend, and frames of the backend where they are mapped.
const GRANTS: u64 = 40;
const WINDOW: u64 = 0x10_0000;
/// Frames of the backend's own memory that are edited: two blocks of 2 MiB.
const RAM: u64 = 0x8_0000;
const BLOCK: u64 = 512;
/// A CPU that comes and goes, and a device that moves.
const THIRD_CPU: usize = 2;
/// The backend, as the machine knows it.
const OWNER: Owner = Owner(BACKEND.get() as u32);
const SECOND_DEVICE: SourceId = SourceId::new(0x20);

/// What a frame of the backend shows.
#[derive(Clone, Copy, Debug)]
struct Shown {
    mfn: Mfn,
    writable: bool,
    /// Which grant, and its handle.
    grant: Option<(u64, u32)>,
    /// What a scenario calls the mapping, or the page where it is no grant.
    number: u32,
}

/// What must come of it all.
struct Reference {
    frames: BTreeMap<u64, Shown>,
    home: Home,
    inside: bool,
}

struct Play {
    world: World,
    reference: Reference,
    pages: Vec<Mfn>,
    sheet: Sheet,
    /// Numbers given to mappings and pages so far.
    numbers: u32,
    /// The second device is used at all.
    roams: bool,
}

impl Play {
    fn new(start: Start, steps: &[Step], manner: &Manner) -> Self {
        let world = start.world(4096, manner);
        let sheet = manner.sheet.clone();
        let roams = steps.iter().any(|step| matches!(step, Step::Move(_)));
        if roams {
            sheet.frame(
                "[device]",
                keys! { name: "roamer", source: i64::from(SECOND_DEVICE.get()) },
            );
        }
        for grant in used(steps) {
            let read_only = grant % 5 == 4;
            sheet.first("grant", || {
                keys! {
                    pages: format!("g{grant}"), reference: reference(grant), read_only: read_only,
                }
            });
        }
        world.machine.add_device(UnitId(0), SECOND_DEVICE.get(), false);
        let grant = |grant| {
            let reference = reference(grant);
            world.grant(reference, granted_gfn(reference), grant % 5 == 4)
        };
        let pages = (0..GRANTS).map(grant).collect();
        let reference = Reference { frames: BTreeMap::new(), home: Home::Nobody, inside: false };
        Self { world, reference, pages, sheet, numbers: 0, roams }
    }

    fn number(&mut self) -> u32 {
        self.numbers += 1;
        self.numbers - 1
    }

    fn step(&mut self, step: &Step) {
        match step {
            Step::Map(mappings) => self
                .map(mappings.iter().map(|map| (map.grant.0, map.at.0, map.read_only)).collect()),
            Step::MapAll { read_only } => {
                self.map((0..GRANTS).map(|grant| (grant, grant, *read_only)).collect());
            }
            Step::Unmap { first, count } => {
                self.unmap(WINDOW + first.0, WINDOW + first.0 + count.0);
            }
            Step::UnmapAll => self.unmap(WINDOW, WINDOW + GRANTS),
            Step::Populate { page } => self.populate(page.gfn(), 0),
            Step::PopulateBlock { second } => self.populate(RAM + BLOCK * u64::from(*second), 9),
            Step::Clear { from, pages } => self.clear(pages.run(*from)),
            Step::Restrict { from, pages } => self.restrict(pages.run(*from)),
            Step::Move(home) => self.send(*home),
            Step::Enter => {
                if !self.reference.inside {
                    self.sheet.step("enter", 0, || keys! { cpu: THIRD_CPU as u32 });
                    self.world.enter(BACKEND, THIRD_CPU);
                    self.reference.inside = true;
                }
            }
            Step::Leave => {
                self.sheet.step("leave", 0, || keys! { cpu: THIRD_CPU as u32 });
                self.world.leave(THIRD_CPU);
                self.reference.inside = false;
            }
            Step::Use(place) => self.check_access(WINDOW + place.0),
            Step::UseRam(page) => self.check_access(page.gfn()),
            Step::Speculate => {
                self.sheet.step("speculate", 0, Table::new);
                self.world.machine.speculate();
            }
        }
        self.check();
    }

    fn map(&mut self, asked: Vec<(u64, u64, bool)>) {
        if asked.is_empty() {
            return;
        }
        let request = |(grant, at, read_only): &(u64, u64, bool)| {
            map_request(FRONTEND, reference(*grant), Gfn::new(WINDOW + at), *read_only)
        };
        let mut elements: Vec<_> = asked.iter().map(request).collect();
        let first = self.numbers;
        self.numbers += elements.len() as u32;
        self.write_map(&asked, &elements, first);
        let ended = self.world.call_on(BACKEND, operation::MAP, &mut elements);
        assert_eq!(ended.outcome, Outcome::Done);
        let asked = (first..).zip(asked).zip(elements);
        for ((number, (grant, at, read_only)), element) in asked {
            let free = !self.reference.frames.contains_key(&(WINDOW + at));
            let granted = read_only || grant % 5 != 4;
            assert_eq!(element.status == 0, free && granted, "{grant} at {at}: {element:?}");
            if element.status == 0 {
                let shown = Shown {
                    mfn: self.pages[usize::try_from(grant).expect("few grants")],
                    writable: !read_only,
                    grant: Some((grant, element.handle)),
                    number,
                };
                self.reference.frames.insert(WINDOW + at, shown);
            }
        }
        self.write_use();
    }

    fn unmap(&mut self, first: u64, last: u64) {
        let inside = self.reference.frames.range(first..=last);
        let inside: Vec<(u64, Shown)> = inside.map(|(gfn, shown)| (*gfn, *shown)).collect();
        let handle = |(gfn, shown): &(u64, Shown)| Some((*gfn, shown.grant?.1));
        let mapped: Vec<(u64, u32)> = inside.iter().filter_map(handle).collect();
        if mapped.is_empty() {
            return;
        }
        self.sheet.step("unmap", flushes(mapped.len()), || {
            let made: Vec<u32> = inside.iter().map(|(_, shown)| shown.number).collect();
            let flushes = number(flushes(mapped.len()));
            keys! { mappings: names("m", &made), tlb: flushes.clone(), iotlb: flushes }
        });
        let request = |(gfn, handle): &(u64, u32)| unmap_request(*handle, Gfn::new(*gfn));
        let mut elements: Vec<_> = mapped.iter().map(request).collect();
        let ended = self.world.call_on(BACKEND, operation::UNMAP, &mut elements);
        assert_eq!(ended.outcome, Outcome::Done);
        assert!(elements.iter().all(|element| element.status == 0), "{elements:?}");
        let flushes = u64::try_from(mapped.len().div_ceil(32)).expect("few flushes");
        assert_eq!((ended.flushes.tlb, ended.flushes.iotlb), (flushes, flushes));
        for (gfn, _) in &mapped {
            self.reference.frames.remove(gfn);
        }
        let gone: Vec<u64> = mapped.into_iter().map(|(gfn, _)| gfn).collect();
        self.check_accesses(&gone);
        self.write_use();
    }

    fn populate(&mut self, first: u64, order: u8) {
        let last = first + (1 << order) - 1;
        if self.reference.frames.range(first..=last).next().is_some() {
            return;
        }
        let page = self.number();
        self.sheet.step("populate", 1, || {
            keys! { pages: format!("r{page}"), at: number(first), order: i64::from(order) }
        });
        let block = self.world.populate_block(BACKEND, Gfn::new(first), order);
        for offset in 0..1 << order {
            let mfn = Mfn::new(block.get() + offset);
            let shown = Shown { mfn, writable: true, grant: None, number: page };
            self.reference.frames.insert(first + offset, shown);
        }
    }

    fn clear(&mut self, (first, last): (u64, u64)) {
        let pages = self.reference.frames.range(first..=last).count();
        self.sheet.step("clear", flushes(pages) + 1, || {
            keys! { first: number(first), count: number(last - first + 1) }
        });
        let ended = self.world.call_as(BACKEND, |caller| {
            caller.clear_range(run(first, last), |_| {}).expect("the hardware works");
            Outcome::Done
        });
        assert!(ended.failed.is_empty());
        let mut kept = self.reference.frames.split_off(&first);
        let mut after = kept.split_off(&(last + 1));
        self.reference.frames.append(&mut after);
        let mut tried = Vec::new();
        for (gfn, shown) in kept.iter().step_by(1 + kept.len() / 4) {
            let frame = self.world.machine.frame(Frame(shown.mfn.get())).expect("a frame");
            // A table that a later batch needed may be there by now.
            let given = frame.state == FrameState::Free || frame.owner != OWNER;
            assert!(given, "{gfn:x}: {shown:?}, {frame:?}");
            tried.push(*gfn);
        }
        self.check_accesses(&tried);
    }

    fn restrict(&mut self, (first, last): (u64, u64)) {
        self.sheet.step("restrict", 1, || {
            keys! { first: number(first), count: number(last - first + 1), allow: "read" }
        });
        self.world.call_as(BACKEND, |caller| {
            let mut batch: Batch<(), 1> = Batch::new(BACKEND);
            let read = stage2::Access::READ;
            let lowered = batch
                .edit_many(|skipped, _| caller.guest.restrict(run(first, last), read, skipped));
            lowered.expect("there is memory to split with");
            let hardware = gnttab::Domain::hardware(caller);
            drop(batch.flush(&hardware).expect("the hardware works"));
            Outcome::Done
        });
        for (_, shown) in self.reference.frames.range_mut(first..=last) {
            shown.writable = false;
        }
        self.check_accesses(&[first, last]);
    }

    fn send(&mut self, home: Home) {
        let World { units, hypervisor, .. } = &self.world;
        let guest = |home| match home {
            Home::Nobody => None,
            Home::Front => Some(self.world.frontend()),
            Home::Back => Some(self.world.backend()),
        };
        let (from, to) = (guest(self.reference.home), guest(home));
        let device = Device {
            unit: 0,
            source: SECOND_DEVICE,
            physical_function: SECOND_DEVICE,
            device_tlb: None,
        };
        let memory = &hypervisor.memory;
        self.write_move(home);
        match (from, to) {
            (Some(from), Some(to)) if self.reference.home != home => {
                from.dma.reattach(&to.dma, units, memory, device).expect("it moves");
            }
            (None, Some(to)) => to.dma.attach(units, memory, device).expect("it attaches"),
            (Some(from), None) => {
                from.dma.detach(units, memory, 0, SECOND_DEVICE).expect("it detaches");
            }
            (Some(_), Some(_)) | (None, None) => {}
        }
        self.reference.home = home;
    }

    #[track_caller]
    fn check_access(&self, gfn: u64) {
        self.check_accesses(&[gfn]);
    }

    #[track_caller]
    fn check_accesses(&self, gfns: &[u64]) {
        if !gfns.is_empty() {
            self.write_accesses(gfns);
        }
        gfns.iter().for_each(|gfn| self.try_access(*gfn));
    }

    /// Everybody who might reach a frame tries, and gets there or not as the model says.
    #[track_caller]
    fn try_access(&self, gfn: u64) {
        let Reference { frames, home, inside } = &self.reference;
        let (machine, address) = (&self.world.machine, gfn << 12);
        let shown = frames.get(&gfn);
        let reads = shown.map(|shown| shown.mfn);
        let writes = shown.filter(|shown| shown.writable).map(|shown| shown.mfn);
        for cpu in [OTHER_CPU, THIRD_CPU] {
            if cpu == THIRD_CPU && !inside {
                continue;
            }
            for (access, expected) in [(Access::Read, reads), (Access::Write, writes)] {
                let found = machine.access(cpu, address, access).ok();
                let found = found.map(|found| Mfn::new(found.address >> 12));
                assert_eq!(found, expected, "{access:?} of {gfn:x} by CPU {cpu}");
            }
        }
        for (source, reaches) in [(DEVICE, true), (SECOND_DEVICE, *home == Home::Back)] {
            let token = u64::from(source.get()) << 32 | gfn;
            let written = machine.dma_write64(source.get(), address, token).is_ok();
            let expected = writes.filter(|_| reaches);
            assert_eq!(written, expected.is_some(), "write of {gfn:x} by {source:?}");
            if let Some(mfn) = expected {
                assert_eq!(machine.peek64(mfn.get() << 12), Some(token), "{gfn:x}, {source:?}");
            }
            let read = machine.dma_read64(source.get(), address).ok();
            let expected = reads.filter(|_| reaches);
            let expected = expected.and_then(|mfn| machine.peek64(mfn.get() << 12));
            assert_eq!(read, expected, "read of {gfn:x} by {source:?}");
        }
    }

    #[track_caller]
    fn check(&self) {
        let mut counts: BTreeMap<Mfn, (u32, u32)> = BTreeMap::new();
        for (_, shown) in self.reference.frames.range(WINDOW..) {
            let count = counts.entry(shown.mfn).or_default();
            *count = (count.0 + 1, count.1 + u32::from(shown.writable));
        }
        for (grant, mfn) in self.pages.iter().enumerate() {
            let (all, writable) = counts.get(mfn).copied().unwrap_or_default();
            let counted = self.world.hypervisor.pages.get(*mfn);
            assert_eq!(counted, (1 + all, writable), "grant {grant}");
            let in_use = self.world.in_use(reference(grant as u64));
            assert_eq!(in_use, (all > 0, writable > 0), "grant {grant}");
        }
        self.world.check_unharmed();
    }
}

fn reference(grant: u64) -> u32 {
    FIRST_REFERENCE + u32::try_from(grant).expect("few grants")
}

fn run(first: u64, last: u64) -> Run {
    Run::new(Gfn::new(first), Gfn::new(last)).expect("first before last")
}

fn read(bytes: &[u8]) -> Option<(Start, Vec<Step>)> {
    script::read(bytes)
}

pub(crate) fn play(bytes: &[u8], manner: &Manner) {
    let Some((start, steps)) = read(bytes) else { return };
    let mut play = Play::new(start, &steps, manner);
    script::each(&steps, |step| play.step(step));
    play.unmap(WINDOW, WINDOW + GRANTS);
    play.clear((RAM, RAM + 2 * BLOCK - 1));
    play.send(Home::Nobody);
    play.check();
    play.sheet.step("leave", 0, || keys! { cpu: THIRD_CPU as u32 });
    play.world.leave(THIRD_CPU);
    assert_eq!(play.world.audit(), []);
    end_of(&play.world);
    let grants: Vec<u32> = used(&steps).into_iter().map(|grant| grant as u32).collect();
    if !grants.is_empty() {
        play.sheet.step("take_back", 0, || keys! { pages: names("g", &grants) });
    }
    let free = |mfn: &Mfn| play.world.hypervisor.pages.drop_one(*mfn, false);
    assert!(play.pages.iter().all(free), "a granted page is counted by its owner alone");
    play.pages.iter().for_each(|mfn| play.world.hypervisor.memory.ram().release(*mfn));
    play.world.check_unharmed();
}

pub(crate) fn seed(bytes: &[u8]) -> u64 {
    read(bytes).map_or(0, |(start, _)| start.seed())
}

pub(crate) fn tell(bytes: &[u8]) -> String {
    read(bytes).map_or_else(String::new, |(start, steps)| script::tell(&start, &steps))
}
