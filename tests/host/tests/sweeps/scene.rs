//! A world in which things fail, and what is kept of calls that did.
//!
//! A [`Scene`] does what a script says as far as it can. Batches whose flush failed are
//! kept, devices whose detaching failed are noted; [`Scene::settle`] gets all of it over
//! with, by retries or through a quarantine. [`Scene::end`] destroys both domains.

use std::collections::BTreeSet;

use flush::{DomainId, Gfn, Hardware, Held, Mfn, Quarantine, Run};
use gnttab::{
    BATCH, Domain, Outcome, Pin, Teardown,
    abi::{MapGrantRef, SetupTable},
    release, release_all,
};
use host::{
    Layout, Ram, RangeError, Setup, Taken, TakenBatch, World,
    calls::{Shared, map_request, operation, unmap_requests},
    world::{
        ARGUMENTS, BACKEND, CALLING_CPU, Ended, FRONTEND, Local, ModelFailed, ModelRam, OTHER_CPU,
    },
};
use hwmodel::{Failure, Frame};
use iommu_vtd::{AttachError, DetachError, Device, DmaFlush};
use p2m::{Expected, PageKind, TlbFlush};
use stage2::Access;
use zerocopy::{FromBytes, FromZeros, Immutable, IntoBytes};

/// What fails in one run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fault {
    /// The n-th hardware operation, in this way.
    Operation(u64, Failure),
    /// The n-th request for a frame is refused.
    Allocation(u64),
    /// The n-th copy from a guest, counted from 0.
    Read(u64),
    /// The n-th copy to a guest, counted from 0.
    Write(u64),
    /// The n-th copy from page to page, counted from 0.
    PageCopy(u64),
    /// The n-th reference on a page, counted from 0, is refused.
    Reference(u64),
    /// The backend gets so many more pages of handles.
    Handles(usize),
    /// Either domain gets so many more pages of its grant table, of all sorts.
    Grants(usize),
    /// Every call is left where it can be, and made again for the rest.
    Preemption,
}

/// How much of everything a script asks for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Counts {
    pub(crate) operations: u64,
    pub(crate) allocations: u64,
    pub(crate) reads: u64,
    pub(crate) writes: u64,
    pub(crate) page_copies: u64,
    pub(crate) references: u64,
    pub(crate) handles: usize,
    pub(crate) grants: usize,
}

/// Room for what fails in one run.
const KEPT: usize = 8;

/// A world, and what failed in it.
pub(crate) struct Scene {
    pub(crate) world: World,
    /// What nobody but units has.
    set_aside: BTreeSet<u64>,
    /// Grants that the backend has mapped.
    pub(crate) mapped: Vec<Shared>,
    devices: Vec<Device>,
    /// Devices that are still members of a domain that they have to leave.
    leaving: Vec<(DomainId, Device)>,
    pins: Vec<(DomainId, ModelFailed<'static>)>,
    memory: Vec<(DomainId, Held<Taken, 32>)>,
    kept_pins: Quarantine<Pin, BATCH, KEPT>,
    kept_memory: Quarantine<Taken, 32, KEPT>,
    /// What failed goes to a quarantine.
    quarantine: bool,
}

impl Scene {
    pub(crate) fn new(setup: Setup, quarantine: bool) -> Self {
        let world = World::new(setup);
        let set_aside = world.books().strays;
        let devices = (0..setup.units).map(|unit| {
            let source = host::world::device_behind(unit);
            let device_tlb = setup.device_tlb.then_some(8);
            Device { unit, source, physical_function: source, device_tlb }
        });
        let devices = devices.collect();
        let (kept_pins, kept_memory) = (Quarantine::new(), Quarantine::new());
        let (mapped, pins, memory) = (Vec::new(), Vec::new(), Vec::new());
        Self {
            world,
            set_aside,
            mapped,
            devices,
            leaving: Vec::new(),
            pins,
            memory,
            kept_pins,
            kept_memory,
            quarantine,
        }
    }

    /// Lets something fail from now on, and counts afresh.
    pub(crate) fn arm(&self, fault: Option<Fault>) {
        let (world, faults) = (&self.world, &self.world.faults);
        faults.copies.set((0, 0));
        faults.page_copies.set(0);
        faults.pages.set(0);
        match fault {
            None => {}
            Some(Fault::Operation(n, failure)) => world.machine.fail_operation(n, failure),
            Some(Fault::Allocation(n)) => world.hypervisor.memory.ram().refuse_allocation(n),
            Some(Fault::Read(n)) => faults.fail_read.set(Some(n)),
            Some(Fault::Write(n)) => faults.fail_write.set(Some(n)),
            Some(Fault::PageCopy(n)) => faults.fail_page_copy.set(Some(n)),
            Some(Fault::Reference(n)) => faults.fail_page.set(Some(n)),
            Some(Fault::Handles(pages)) => world.backend().refuse_handles_after(pages),
            Some(Fault::Grants(pages)) => self.grants_left(pages),
            Some(Fault::Preemption) => faults.preempt.set(true),
        }
    }

    fn grants_left(&self, pages: usize) {
        for guest in &self.world.hypervisor.guests {
            guest.grants().storage().pages_left.set(pages);
        }
    }

    /// Nothing fails any more.
    pub(crate) fn disarm(&self) {
        let (world, faults) = (&self.world, &self.world.faults);
        world.machine.repair();
        world.hypervisor.memory.ram().refuse_allocation(0);
        let counted =
            [&faults.fail_read, &faults.fail_write, &faults.fail_page_copy, &faults.fail_page];
        counted.into_iter().for_each(|fault| fault.set(None));
        for guest in &world.hypervisor.guests {
            guest.refuse_handles_after(usize::MAX);
        }
        self.grants_left(usize::MAX);
        faults.preempt.set(false);
    }

    /// What was asked for since [`arm`](Self::arm), given the totals before.
    pub(crate) fn counts(&self, before: Counts) -> Counts {
        let now = self.totals();
        let faults = &self.world.faults;
        let (reads, writes) = faults.copies.get();
        Counts {
            operations: now.operations - before.operations,
            allocations: now.allocations - before.allocations,
            // A domain that has ended takes its pages along.
            handles: now.handles.saturating_sub(before.handles),
            grants: now.grants.saturating_sub(before.grants),
            reads,
            writes,
            page_copies: faults.page_copies.get(),
            references: faults.pages.get(),
        }
    }

    /// What was asked for since the beginning, as far as that is counted.
    pub(crate) fn totals(&self) -> Counts {
        let world = &self.world;
        let pages_left =
            |guest: &host::Guest<_>| usize::MAX - guest.grants().storage().pages_left.get();
        Counts {
            operations: world.machine.counters().operations,
            allocations: world.hypervisor.memory.ram().allocations(),
            handles: world.hypervisor.guests.iter().map(handles).sum(),
            grants: world.hypervisor.guests.iter().map(pages_left).sum(),
            ..Counts::default()
        }
    }

    /// Whether both domains have ended.
    pub(crate) fn is_over(&self) -> bool {
        self.world.hypervisor.guests.is_empty()
    }

    /// Nothing stale was used, and every frame and reference is accounted for.
    #[track_caller]
    pub(crate) fn check(&self) {
        self.world.check_unharmed();
        let books = self.world.books();
        assert_eq!((books.wrong, books.unlike), (Vec::new(), Vec::new()));
        let (mut pages, mut tables) = (0, 0);
        for (_, failure) in &self.pins {
            pages += failure.held.len();
            tables += failure.held.tables();
        }
        let mut taken = 0;
        for (_, held) in &self.memory {
            taken += held.len();
            tables += held.tables();
        }
        pages += self.kept_pins.pages();
        taken += self.kept_memory.pages();
        tables += self.kept_pins.tables() + self.kept_memory.tables();
        // A leaf that was taken is one page or a block of them.
        let held = books.references as usize;
        let fits = if taken == 0 { held == pages } else { held >= pages + taken };
        assert!(fits, "{held} references have no entry; {pages} pages and {taken} leaves are held");
        let lost: Vec<_> = books.strays.difference(&self.set_aside).collect();
        assert_eq!(lost.len(), tables, "frames that are neither in use nor held: {lost:x?}");
        if !self.is_held() {
            assert_eq!(self.world.audit(), []);
        }
    }

    /// Whether a flush failed or a detach, and was not made good yet.
    pub(crate) fn is_held(&self) -> bool {
        let kept = self.kept_pins.batches() + self.kept_memory.batches();
        self.pins.len() + self.memory.len() + kept + self.leaving.len() > 0
    }

    fn ended(&mut self, id: DomainId, failed: Vec<ModelFailed<'static>>) {
        for failure in failed {
            if self.quarantine {
                self.kept_pins.keep(failure.held).expect("room for it");
            } else {
                self.pins.push((id, failure));
            }
        }
    }

    fn keep(&mut self, id: DomainId, held: Option<Held<Taken, 32>>) {
        let Some(held) = held else { return };
        if self.quarantine {
            self.kept_memory.keep(held).expect("room for it");
        } else {
            self.memory.push((id, held));
        }
    }

    /// Makes a call to its end, however often it is preempted.
    pub(crate) fn call<T: FromBytes + IntoBytes + Immutable>(
        &mut self,
        id: DomainId,
        operation: u32,
        elements: &mut [T],
    ) {
        let base = ARGUMENTS.get() << 12;
        self.world.put(id, base, elements.as_bytes());
        let (mut argument, mut command) = (base, operation);
        let mut count = u32::try_from(elements.len()).expect("few elements");
        loop {
            let Ended { outcome, failed, .. } = self.world.call(id, command, argument, count);
            self.ended(id, failed);
            let Outcome::Continue { rest, .. } = outcome else { break };
            (command, argument, count) = (rest.command, rest.argument.0, rest.count);
        }
        self.world.get(id, base, elements.as_mut_bytes());
    }

    /// The backend maps grants of the frontend; those that it got are used, and noted.
    pub(crate) fn map(&mut self, grants: impl IntoIterator<Item = (u32, u64)>, read_only: bool) {
        let request = |(reference, gfn)| map_request(FRONTEND, reference, Gfn::new(gfn), read_only);
        let mut elements: Vec<MapGrantRef> = grants.into_iter().map(request).collect();
        self.call(BACKEND, operation::MAP, &mut elements);
        for element in elements.iter().filter(|element| element.status == 0) {
            let gfn = Gfn::new(element.host_addr >> 12);
            let mfn = self.world.backend().lookup(gfn).expect("it was just mapped").mfn;
            let (reference, handle) = (element.reference, element.handle);
            self.mapped.push(Shared { reference, gfn, mfn, handle, read_only });
            self.touch(gfn);
        }
    }

    /// The backend gives all mapped grants back by `operation`; what fails stays noted.
    pub(crate) fn give_back(&mut self, operation: u32) {
        let grants = std::mem::take(&mut self.mapped);
        let mut elements = unmap_requests(&grants);
        self.call(BACKEND, operation, &mut elements);
        let shows = |grant: &Shared| {
            self.world.backend().lookup(grant.gfn).is_some_and(|found| found.mfn == grant.mfn)
        };
        self.mapped = grants.into_iter().filter(shows).collect();
    }

    /// The backend's CPU and its devices try to use a page.
    pub(crate) fn touch(&self, gfn: Gfn) {
        if !self.world.machine.is_running(OTHER_CPU) {
            self.world.try_enter(BACKEND, OTHER_CPU);
        }
        let address = gfn.get() << 12;
        self.world.machine.cpu_write64(OTHER_CPU, address, 1).ok();
        for device in &self.devices {
            self.world.machine.dma_write64(device.source.get(), address, 2).ok();
        }
    }

    /// Asks for a table of `frames` frames.
    pub(crate) fn grow(&mut self, id: DomainId, frames: u32) {
        let mut element = SetupTable::new_zeroed();
        (element.domain, element.frames) = (0x7ff0, frames);
        element.list = (ARGUMENTS.get() + 32) << 12;
        self.call(id, operation::SETUP_TABLE, &mut [element]);
    }

    /// Edits memory of the backend in a batch, flushes it and frees what it held.
    fn edit(&mut self, edit: impl FnOnce(&host::world::ModelCaller<'_>, &mut TakenBatch)) {
        let mut left = None;
        let ended = self.world.call_as(BACKEND, |caller| {
            let mut batch = TakenBatch::new(BACKEND);
            edit(caller, &mut batch);
            match batch.flush(&caller.hardware()) {
                Ok(flushed) => self.world.hypervisor.free(flushed),
                Err(failure) => left = Some(failure.held),
            }
            Outcome::Done
        });
        assert!(ended.failed.is_empty());
        self.keep(BACKEND, left);
    }

    /// The backend gets 2^`order` frames of memory, or not.
    pub(crate) fn populate(&mut self, gfn: u64, order: u8) {
        let owner = hwmodel::Owner(u32::from(BACKEND.get()));
        let first = if order == 0 {
            self.world.hypervisor.memory.ram().allocate(BACKEND)
        } else {
            self.world.machine.allocate_block(owner, order).map(|frame| Mfn::new(frame.0))
        };
        let Some(first) = first else { return };
        let frames = (0..1 << order).map(|offset| Mfn::new(first.get() + offset));
        frames.clone().for_each(|mfn| self.world.hypervisor.pages.take(mfn, false));
        let mut mapped = false;
        self.edit(|caller, batch| {
            let kind = PageKind::RamReadWrite;
            let done = batch.edit_many(|skipped, _| {
                caller.guest.map_block(Gfn::new(gfn), order, first, kind, skipped)
            });
            mapped = done.is_ok();
        });
        if !mapped {
            for mfn in frames {
                self.world.hypervisor.pages.drop_one(mfn, false);
                self.world.machine.release(Frame(mfn.get()));
            }
        }
        self.touch(Gfn::new(gfn));
    }

    /// Another page takes the place of the one at `gfn`, or not.
    pub(crate) fn replace(&mut self, gfn: u64) {
        let ram = self.world.hypervisor.memory.ram();
        let Some(mfn) = ram.allocate(BACKEND) else { return };
        self.world.hypervisor.pages.take(mfn, false);
        let mut mapped = false;
        self.edit(|caller, batch| {
            mapped = batch.edit_many(|skipped, room| {
                let kind = PageKind::RamReadWrite;
                let was = caller.guest.map(Gfn::new(gfn), mfn, kind, skipped);
                let mapped = was.is_ok();
                if let Ok(Some((mfn, cleared))) = was {
                    room.hold(Taken { mfn, order: 0 }, cleared).expect("the batch is empty");
                }
                mapped
            });
        });
        if !mapped {
            self.world.hypervisor.pages.drop_one(mfn, false);
            self.world.hypervisor.memory.ram().release(mfn);
        }
        self.touch(Gfn::new(gfn));
    }

    /// The page at `gfn` goes, out of the middle of a large leaf perhaps.
    pub(crate) fn clear(&mut self, gfn: u64) {
        let Some(found) = self.world.backend().lookup(Gfn::new(gfn)) else { return };
        let (mfn, kind) = (found.mfn, PageKind::RamReadWrite);
        self.edit(|caller, batch| {
            // A refusal is fine.
            batch
                .hold(|skipped| {
                    let cleared =
                        caller.guest.clear(Gfn::new(gfn), Expected { mfn, kind }, skipped)?;
                    Ok::<_, p2m::ClearError>((Taken { mfn, order: 0 }, cleared))
                })
                .ok();
        });
        self.touch(Gfn::new(gfn));
    }

    /// Memory from `first` to `last` goes.
    pub(crate) fn clear_range(&mut self, first: u64, last: u64) {
        let run = Run::new(Gfn::new(first), Gfn::new(last)).expect("first before last");
        let mut left = None;
        let ended = self.world.call_as(BACKEND, |caller| {
            match caller.clear_range(run, |_| {}) {
                Ok(_) | Err(RangeError::Stopped(_)) => {}
                Err(RangeError::Flush(failure)) => left = Some(failure.held),
            }
            Outcome::Done
        });
        assert!(ended.failed.is_empty());
        self.keep(BACKEND, left);
        self.touch(Gfn::new(first));
        self.touch(Gfn::new(last));
    }

    /// Memory from `first` to `last` may only be read.
    pub(crate) fn restrict(&mut self, first: u64, last: u64) {
        let run = Run::new(Gfn::new(first), Gfn::new(last)).expect("first before last");
        self.edit(|caller, batch| {
            // A refusal is fine.
            batch.edit_many(|skipped, _| caller.guest.restrict(run, Access::READ, skipped)).ok();
        });
        self.touch(Gfn::new(first));
    }

    /// A domain gets a device, or not.
    pub(crate) fn attach(&mut self, id: DomainId, device: Device) {
        let guest = self.world.hypervisor.guest(id).expect("a guest of this world");
        let memory = &self.world.hypervisor.memory;
        if let Err(AttachError::StillMember(_)) =
            guest.dma.attach(&self.world.units, memory, device)
        {
            self.leaving.push((id, device));
        }
        if !self.devices.contains(&device) {
            self.devices.push(device);
        }
    }

    /// A device is taken from a domain, or not.
    pub(crate) fn detach(&mut self, id: DomainId, device: Device) {
        let guest = self.world.hypervisor.guest(id).expect("a guest of this world");
        let memory = &self.world.hypervisor.memory;
        match guest.dma.detach(&self.world.units, memory, device.unit, device.source) {
            Ok(()) | Err(DetachError::NotMember) => {}
            Err(DetachError::Command(_)) => self.leaving.push((id, device)),
            Err(DetachError::NoUnit) => panic!("{device:?} is behind no unit"),
        }
    }

    /// Flushes again what could not be; whether nothing is left.
    pub(crate) fn settle(&mut self) -> bool {
        for (id, device) in std::mem::take(&mut self.leaving) {
            self.detach(id, device);
        }
        for (id, failure) in std::mem::take(&mut self.pins) {
            let left = self.world.retry(id, vec![failure]);
            self.pins.extend(left.into_iter().map(|failure| (id, failure)));
        }
        for (id, mut held) in std::mem::take(&mut self.memory) {
            let mut flushed = false;
            self.world.call_as(id, |caller| {
                if let Ok(pages) = held.retry(&caller.hardware()) {
                    self.world.hypervisor.free(pages);
                    flushed = true;
                }
                Outcome::Done
            });
            if !flushed {
                self.memory.push((id, held));
            }
        }
        for id in [FRONTEND, BACKEND] {
            if self.world.hypervisor.guest(id).is_some() {
                self.settle_quarantine(id);
            }
        }
        !self.is_held()
    }

    fn settle_quarantine(&mut self, id: DomainId) {
        let Self { world, kept_pins, kept_memory, .. } = self;
        world.call_as(id, |caller| {
            if let Some(owed) = kept_pins.owed(id) {
                kept_pins.settle(owed.flush(&caller.hardware()).paid);
            }
            while let Some(pin) = kept_pins.next_page(id) {
                release(caller, pin);
            }
            while let Some(table) = kept_pins.next_table(id) {
                caller.put_table(table);
            }
            if let Some(owed) = kept_memory.owed(id) {
                kept_memory.settle(owed.flush(&caller.hardware()).paid);
            }
            while let Some(page) = kept_memory.next_page(id) {
                world.hypervisor.free_taken(page);
            }
            while let Some(table) = kept_memory.next_table(id) {
                caller.put_table(table);
            }
            Outcome::Done
        });
    }

    /// Both domains are destroyed; what fails on the way is repaired and done again.
    pub(crate) fn end(&mut self) {
        for cpu in self.world.residents(BACKEND) {
            self.world.leave(cpu);
        }
        for id in [BACKEND, FRONTEND] {
            self.devices.clone().into_iter().for_each(|device| self.detach(id, device));
        }
        for id in [BACKEND, FRONTEND] {
            let mut from = 0;
            loop {
                let mut end = Teardown::Done;
                let ended = self.world.call_as(id, |caller| {
                    end = release_all(caller, from);
                    Outcome::Done
                });
                let failed = ended.failed;
                self.ended(id, failed);
                match end {
                    Teardown::Done => break,
                    Teardown::Continue(next) | Teardown::FlushFailed(next) => from = next,
                }
            }
            if !self.settle() {
                self.disarm();
                assert!(self.settle(), "held with repaired hardware");
            }
            self.take_down(id);
        }
        self.mapped.clear();
    }

    fn take_down(&mut self, id: DomainId) {
        let guests = &mut self.world.hypervisor.guests;
        let place = guests.iter().position(|guest| guest.id() == id).expect("it is there");
        let guest = guests.swap_remove(place);
        // Its entries for others' pages are cleared with the rest, their references are gone.
        for mfn in guest.foreign_pages(&self.world.hypervisor.memory) {
            self.world.hypervisor.pages.take(mfn, false);
        }
        let root = guest.cpu_root();
        let mut end = guest.take_down();
        let mut done = Ok(false);
        while done != Ok(true) {
            if done.is_err() {
                self.disarm();
            }
            let mut batch = TakenBatch::new(id);
            done = end.step(&mut batch).map_err(|stopped| stopped.stop.to_string());
            let local = Local::new(&self.world, CALLING_CPU, root);
            let tlb = TlbFlush { guest: &end.cpus, machine: &self.world, local: &local };
            let iotlb = DmaFlush::new(&self.world.units, &end.dma);
            let hardware = Hardware { tlb: &tlb, iotlb: &iotlb };
            match batch.flush(&hardware) {
                Ok(flushed) => self.world.hypervisor.free(flushed),
                Err(mut failure) => {
                    self.world.machine.repair();
                    let again = failure.held.retry(&hardware).expect("repaired hardware");
                    self.world.hypervisor.free(again);
                }
            }
        }
    }
}

/// Pages of handles.
fn handles(guest: &host::Guest<ModelRam>) -> usize {
    guest.handles() / gnttab::MAPTRACK_PER_PAGE
}

/// Both layouts of tables.
pub(crate) const LAYOUTS: [Layout; 2] = [Layout::Separate, Layout::Shared];
