//! How a scenario begins: its world, its names, and memory for them.

use std::{cell::Cell, cell::RefCell, collections::BTreeMap};

use flush::{Batch, DomainId, Gfn, Mfn};
use host::{
    Ram, Setup, World,
    world::{ARGUMENTS, Asids, BACKEND, FRONTEND, Flushes, device_behind},
};
use hwmodel::{Frame, Owner, Policy, UnitConfig, UnitId};
use iommu_vtd::{Device, SourceId};
use p2m::{PageKind, hardware::svm::FlushByAsid};
use stage2::format::vtd::VtdLevels;

use super::{ARGUMENT_PAGES, Doing, Mapped, Page, Session, hardware};
use crate::{
    format::Scenario,
    machines::Sort,
    parse::Script,
    plants::{Plant, Slip},
};

/// What a world of `scenario` is made of.
fn setup(scenario: &Scenario, sort: Sort, policy: Policy, slow: bool) -> Setup {
    let (machine, unit) = (&scenario.machine, &scenario.unit);
    let levels = match machine.levels {
        3 => VtdLevels::Three,
        5 => VtdLevels::Five,
        _ => VtdLevels::Four,
    };
    let flush_by_asid = match machine.flush_by_asid {
        Some(false) => FlushByAsid::Missing,
        Some(true) | None => FlushByAsid::Available,
    };
    let asids = Asids { count: machine.asids.unwrap_or(8), flush_by_asid };
    let unit = UnitConfig {
        page_selective: unit.page_selective,
        max_address_mask: unit.max_address_mask,
        caching_mode: unit.caching_mode,
        coherent: unit.coherent,
        write_buffer: unit.write_buffer,
        drain_writes: unit.drain_writes,
        drain_reads: unit.drain_reads,
        levels_5: machine.levels == 5,
        large_2m: unit.large_leaves,
        large_1g: unit.large_leaves,
        domain_id_bits: unit.domain_id_bits,
        address_bits: unit.address_bits,
        latency: if slow { unit.latency.max(50) } else { unit.latency },
        fault_records: unit.fault_records,
        queue: !machine.registers,
        ..UnitConfig::default()
    };
    Setup {
        cpus: sort.cpus,
        asids,
        layout: sort.layout,
        unit,
        registers: machine.registers,
        device_tlb: machine.device_tlb,
        policy,
        frames: machine.frames,
        units: scenario.unit.count,
        levels,
        ring: scenario.unit.ring,
    }
}

impl Session {
    /// A world as the script wants it, with a bug planted or none.
    pub(crate) fn new(script: &Script, sort: Sort, policy: Policy, plant: Option<&Plant>) -> Self {
        let scenario = &script.scenario;
        let setup = setup(scenario, sort, policy, plant.is_some_and(|plant| plant.slow));
        let mut world = World::new(setup);
        // Both ways are gone; others may act in more places of the one that copies.
        world.faults.lends.set(matches!(policy, Policy::Random(_)));
        let mut domains =
            BTreeMap::from([("front".to_owned(), FRONTEND), ("back".to_owned(), BACKEND)]);
        for (number, domain) in (3..).zip(&scenario.domain) {
            let id = DomainId::new(number);
            world.hypervisor.add_on(id, sort.cpus, sort.layout, setup.device_format());
            let guest = world.hypervisor.guest(id).expect("just added");
            for page in 0..ARGUMENT_PAGES {
                world.hypervisor.populate(guest, Gfn::new(ARGUMENTS.get() + page));
            }
            domains.insert(domain.get_ref().name.clone(), id);
        }
        for guest in &world.hypervisor.guests {
            guest.limit_handles(scenario.machine.handle_pages);
        }
        let mut devices = BTreeMap::new();
        for unit in 0..scenario.unit.count {
            let source = device_behind(unit);
            let device_tlb = scenario.machine.device_tlb.then_some(8);
            devices.insert(
                format!("dev{unit}"),
                Device { unit, source, physical_function: source, device_tlb },
            );
        }
        for device in &scenario.device {
            let device = device.get_ref();
            let source = SourceId::new(device.source);
            world.machine.add_device(UnitId(device.unit), device.source, device.device_tlb);
            let device_tlb = device.device_tlb.then_some(8);
            devices.insert(
                device.name.clone(),
                Device { unit: device.unit, source, physical_function: source, device_tlb },
            );
        }
        let slip = plant.and_then(|plant| plant.slip);
        if slip == Some(Slip::Unseen) {
            world.leave(host::world::OTHER_CPU);
            world.enter_unseen(BACKEND, host::world::OTHER_CPU);
        }
        if let Some(plant) = plant {
            (plant.apply)(&world);
        }
        let session = Self {
            world,
            domains,
            devices,
            pages: RefCell::default(),
            mappings: RefCell::default(),
            places: RefCell::default(),
            told: RefCell::default(),
            put: RefCell::default(),
            references: RefCell::default(),
            views: RefCell::default(),
            under_way: Cell::default(),
            wild: RefCell::default(),
            held: RefCell::default(),
            held_memory: RefCell::default(),
            left: RefCell::default(),
            flushes: Cell::default(),
            extra: Cell::default(),
            done: Default::default(),
            flights: RefCell::default(),
            drained: RefCell::default(),
            unflushed: Cell::default(),
            unreadable: Cell::default(),
            longest: Cell::default(),
            detached: RefCell::default(),
            unplugged: RefCell::default(),
            spare: RefCell::default(),
            marked: RefCell::default(),
            slip,
            unique: Cell::new(0),
            strict: true,
            moments: RefCell::default(),
            story: RefCell::default(),
        };
        session.put_into_words(&session.tags());
        session.set_mark();
        session
    }

    pub(super) fn name_page(&self, name: &str, mfn: Mfn, order: u8, owner: DomainId, gfn: Gfn) {
        let frames = (0..1_u64 << order).map(|offset| Frame(mfn.get() + offset));
        let generation = |frame| self.world.machine.frame(frame).map_or(0, |info| info.generation);
        let generations = frames.map(generation).collect();
        let page = Page { mfn, order, owner, gfn, generations, grants: Vec::new() };
        self.pages.borrow_mut().insert(name.to_owned(), page);
        self.places.borrow_mut().insert((owner, gfn));
        let own =
            Mapped { page: name.to_owned(), domain: owner, gfn, handle: u32::MAX, grant: None };
        self.mappings.borrow_mut().entry(name.to_owned()).or_insert(own);
        for offset in 0..1_u64 << order {
            let number = self.unique.get() + 1;
            self.unique.set(number);
            let at = (mfn.get() + offset) << 12;
            self.world.machine.write64(at + hardware::TAG_AT, hardware::TAG | number);
            self.world.machine.write_back(at + hardware::TAG_AT);
        }
    }

    /// Gives a domain 2^`order` frames; the caller names them. Nothing is left of a failure.
    pub(super) fn give_memory(
        &self,
        id: DomainId,
        gfn: Gfn,
        order: u8,
        doing: Doing<'_>,
    ) -> Result<(Mfn, Flushes), String> {
        let machine = &self.world.machine;
        let first = if order == 0 {
            self.world.hypervisor.memory.ram().allocate(id)
        } else {
            let block = machine.allocate_block(Owner(u32::from(id.get())), order);
            block.map(|frame| Mfn::new(frame.0))
        };
        let first = first.ok_or("there is no memory left")?;
        let frames = || (0..1_u64 << order).map(|offset| Mfn::new(first.get() + offset));
        frames().for_each(|mfn| self.world.hypervisor.pages.take(mfn, false));
        let mut problem = None;
        let ended = self.as_domain(id, |caller| {
            let kind = PageKind::RamReadWrite;
            let mut batch: Batch<(), 1> = Batch::new(id);
            let mapped = batch.edit_many(|skipped, _| match order {
                0 => match caller.guest.map(gfn, first, kind, skipped) {
                    Ok(None) => Ok(()),
                    Ok(Some(_)) => Err(format!("{gfn:?} was taken")),
                    Err(error) => Err(error),
                },
                order => caller.guest.map_block(gfn, order, first, kind, skipped),
            });
            problem = mapped.err();
            let manner = self.manner(doing);
            let (tlb, iotlb) = manner.hardware(caller);
            if let Err(failed) = batch.flush(&flush::Hardware { tlb: &tlb, iotlb: &iotlb }) {
                problem.get_or_insert(format!("the flush failed: {:?}", failed.error));
                self.unflushed.set(true);
            }
        });
        match problem {
            None => Ok((first, ended)),
            Some(problem) => {
                if self.domain_by_id(id)?.lookup(gfn).is_none_or(|found| found.mfn != first) {
                    for mfn in frames() {
                        if self.world.hypervisor.pages.drop_one(mfn, false) {
                            machine.release(Frame(mfn.get()));
                        }
                    }
                }
                Err(problem)
            }
        }
    }
}
