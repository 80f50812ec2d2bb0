//! Whatever a remapping unit can do: 32 grants, one request, nothing stale.
//!
//! Each case is one kind of unit. On all of them the same 32 pages are looked up while
//! they are absent, mapped, used, given back in one call, and tried again.

use flush::{
    Gfn,
    plan::{Planner, Policy},
};
use gnttab::Outcome;
use host::{
    Layout, Setup, World,
    world::{OTHER_CPU, device_behind},
};
use hwmodel::{Command, Granularity, Machine, UnitConfig, UnitCounters, UnitId};
use stage2::format::vtd::VtdLevels;

const GRANTS: u32 = 32;
/// A multiple of 32, below 2^27: within three levels.
const FIRST: u64 = 0x10_0000;

fn unit() -> UnitConfig {
    UnitConfig::default()
}

fn with(unit: UnitConfig) -> Setup {
    Setup { unit, ..Setup::default() }
}

/// How a unit is told to forget the 32 pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Told {
    /// By one command for the block.
    Block,
    /// By one command for all of the domain.
    Domain,
}

fn gfns() -> Vec<Gfn> {
    (FIRST..).take(GRANTS as usize).map(Gfn::new).collect()
}

fn counters(world: &World) -> Vec<(UnitCounters, iommu_vtd::Counters)> {
    let own = world.units.iter().map(iommu_vtd::Unit::counters);
    world.machine.counters().units.into_iter().zip(own).collect()
}

fn commands(world: &World) -> Vec<Vec<Command>> {
    (0..world.units.len()).map(|unit| world.machine.commands(UnitId(unit))).collect()
}

/// The command that forgets the pages on this unit.
fn iotlb(told: Told, unit: &UnitConfig, tag: u16) -> Command {
    let (granularity, page, address_mask, hint) = match told {
        Told::Block => (Granularity::Selective, FIRST, 5, true),
        Told::Domain => (Granularity::Domain, 0, 0, false),
    };
    let (drain_writes, drain_reads) = (unit.drain_writes, unit.drain_reads);
    Command::Iotlb { granularity, did: tag, page, address_mask, hint, drain_writes, drain_reads }
}

/// Commands without what registers and descriptors say in operands nobody looks at, and
/// without the status that a wait writes.
fn essence(command: Command) -> Command {
    if matches!(command, Command::Wait { .. }) {
        return WAIT;
    }
    let Command::Iotlb { granularity, did, drain_writes, drain_reads, .. } = command else {
        return command;
    };
    if granularity == Granularity::Selective {
        return command;
    }
    let (page, address_mask, hint) = (0, 0, false);
    Command::Iotlb { granularity, did, page, address_mask, hint, drain_writes, drain_reads }
}

const WAIT: Command = Command::Wait { status: None, interrupt: false, fence: false };

/// Whether the address for an invalidation through registers can be read back. Where it
/// cannot, nobody knows that it arrived, and the domain is named instead.
fn address_reads_back(unit: UnitConfig) -> bool {
    let machine = Machine::default();
    let (id, address) = (machine.add_unit(unit), 0x1234_5000);
    machine.register_write64(id, unit.iotlb_offset.into(), address);
    machine.register_read64(id, unit.iotlb_offset.into()) == address
}

#[track_caller]
fn check_in(setup: Setup, told: Told) {
    let by_page = !setup.registers || address_reads_back(setup.unit);
    let told = if by_page { told } else { Told::Domain };
    let world = World::new(setup);
    // One block for the run, else the domain: what depends on the unit alone.
    world.planner.set(Planner::new(Policy::Hull));
    let gfns = gfns();
    for gfn in &gfns {
        assert!(!world.device_reaches(*gfn), "nothing is mapped yet");
    }
    // Each device reaches each page at once, whatever was cached of its absence.
    let shared = world.share(&gfns);
    let mappings: Vec<_> =
        shared.iter().zip(&gfns).map(|((_, handle), gfn)| (*handle, *gfn)).collect();

    let (counted, logged) = (counters(&world), commands(&world));
    let ended = world.unmap(&mappings);
    assert_eq!((ended.outcome, ended.flushes.iotlb), (Outcome::Done, 1));
    for (number, (model, own)) in counters(&world).into_iter().enumerate() {
        let (model_before, own_before) = counted[number];
        let tag = world.backend().dma.tag(number).expect("a device is attached").get();
        let mut expected = vec![iotlb(told, &setup.unit, tag)];
        if setup.device_tlb {
            let sid = device_behind(number).get();
            expected.push(Command::DeviceTlb { sid, page: FIRST, order: 5 });
        }
        if !setup.registers {
            expected.push(WAIT);
        }
        let new = world.machine.commands(UnitId(number)).split_off(logged[number].len());
        let new: Vec<_> = new.into_iter().map(essence).collect();
        assert_eq!(new, expected, "unit {number}");

        // The crate's books say what the hardware saw.
        let submissions = u64::from(!setup.registers);
        assert_eq!(model.waits - model_before.waits, submissions);
        assert_eq!(own.waits - own_before.waits, submissions);
        assert_eq!(model.tail_writes - model_before.tail_writes, submissions);
        assert_eq!(own.tail_writes - own_before.tail_writes, submissions);
        let registers = u64::from(setup.registers);
        assert_eq!(model.register_iotlb - model_before.register_iotlb, registers);
        assert_eq!(own.register_commands - own_before.register_commands, registers);
        assert_eq!(own.iotlb_commands - own_before.iotlb_commands, 1);
        let pages = if told == Told::Block { u64::from(GRANTS) } else { 0 };
        assert_eq!(own.pages_flushed - own_before.pages_flushed, pages);
        assert_eq!(own.wide_commands - own_before.wide_commands, u64::from(pages == 0));
        let device = u64::from(setup.device_tlb);
        assert_eq!(own.device_commands - own_before.device_commands, device);
        let flushed = model.write_buffer_flushes;
        assert_eq!(own.write_buffer_flushes, flushed, "since bring-up");
        let buffered = setup.unit.write_buffer && !setup.unit.caching_mode;
        assert_eq!(flushed > 0, buffered, "only for a unit that asks for it and is told nothing");
    }

    world.take_back_all(GRANTS);
    for gfn in &gfns {
        assert!(!world.device_reaches(*gfn) && !world.cpu_reaches(OTHER_CPU, *gfn));
    }
    assert_eq!(world.machine.witnesses(), []);
    assert_eq!(world.audit(), []);
    assert_eq!(world.machine.misuses(), []);
    assert_eq!(world.released_early.get(), 0);
    assert_eq!(world.machine.counters().write_backs > 0, !setup.unit.coherent);
}

/// In both table layouts.
#[track_caller]
fn check(setup: Setup, told: Told) {
    for layout in [Layout::Separate, Layout::Shared] {
        check_in(Setup { layout, ..setup }, told);
    }
}

#[test]
fn units_that_name_pages_are_told_the_block_and_others_the_domain() {
    check(with(unit()), Told::Block);
    for (max_address_mask, told) in
        [(0, Told::Domain), (4, Told::Domain), (5, Told::Block), (9, Told::Block)]
    {
        check(with(UnitConfig { max_address_mask, ..unit() }), told);
    }
    check(with(UnitConfig { page_selective: false, ..unit() }), Told::Domain);
}

#[test]
fn units_in_caching_mode_see_a_new_mapping_at_once() {
    let unit = UnitConfig { caching_mode: true, ..unit() };
    check(with(unit), Told::Block);
    check(Setup { registers: true, ..with(unit) }, Told::Block);
    check(with(UnitConfig { page_selective: false, ..unit }), Told::Domain);
    check(with(UnitConfig { write_buffer: true, coherent: false, ..unit }), Told::Block);
}

#[test]
fn units_with_write_buffers_see_a_new_mapping_at_once() {
    let unit = UnitConfig { write_buffer: true, ..unit() };
    check(with(unit), Told::Block);
    check(Setup { registers: true, ..with(unit) }, Told::Block);
}

#[test]
fn units_that_do_not_snoop_see_every_table_entry() {
    let unit = UnitConfig { coherent: false, ..unit() };
    check(with(unit), Told::Block);
    check(Setup { registers: true, device_tlb: false, ..with(unit) }, Told::Block);
}

#[test]
fn units_without_a_queue_are_told_through_their_registers() {
    check(Setup { registers: true, ..with(unit()) }, Told::Block);
    let none = UnitConfig { page_selective: false, ..unit() };
    check(Setup { registers: true, ..with(none) }, Told::Domain);
    let none = UnitConfig { queue: false, device_tlb: false, ..unit() };
    check(Setup { registers: true, ..with(none) }, Told::Block);
}

#[test]
fn units_without_drain_bits_are_not_asked_to_drain() {
    check(with(UnitConfig { drain_writes: false, ..unit() }), Told::Block);
    let neither = UnitConfig { drain_writes: false, drain_reads: false, ..unit() };
    check(with(neither), Told::Block);
    check(Setup { registers: true, ..with(neither) }, Told::Block);
}

#[test]
fn tables_of_three_and_five_levels_are_walked_and_flushed_like_those_of_four() {
    let three = UnitConfig { levels_4: false, address_bits: 39, ..unit() };
    check_in(Setup { levels: VtdLevels::Three, ..with(three) }, Told::Block);
    let five = UnitConfig { levels_5: true, address_bits: 57, ..unit() };
    check_in(Setup { levels: VtdLevels::Five, ..with(five) }, Told::Block);
}

#[test]
fn units_without_large_leaves_or_with_few_domain_ids_do_as_well() {
    check(with(UnitConfig { large_2m: false, large_1g: false, ..unit() }), Told::Block);
    check(with(UnitConfig { domain_id_bits: 4, ..unit() }), Told::Block);
    check(with(UnitConfig { fetch_ahead: 1, latency: 20, ..unit() }), Told::Block);
}

#[test]
fn a_device_tlb_is_told_after_its_unit() {
    let setup = Setup { device_tlb: true, ..with(unit()) };
    check(setup, Told::Block);
    check(with_mask_zero_and_device_tlb(), Told::Domain);
    let caching = UnitConfig { caching_mode: true, ..unit() };
    check(Setup { device_tlb: true, ..with(caching) }, Told::Block);
}

fn with_mask_zero_and_device_tlb() -> Setup {
    Setup { device_tlb: true, ..with(UnitConfig { max_address_mask: 0, ..unit() }) }
}

#[test]
fn every_unit_with_a_device_of_the_domain_is_told_once() {
    check(Setup { units: 3, ..with(unit()) }, Told::Block);
    check(Setup { units: 2, device_tlb: true, ..with(unit()) }, Told::Block);
    check(Setup { units: 2, registers: true, ..with(unit()) }, Told::Block);
}

/// 256 descriptors fit into the ring of a page; a flush takes two.
#[test]
fn a_ring_that_wraps_many_times_loses_nothing() {
    let world = World::new(with(UnitConfig { latency: 1, ..unit() }));
    let gfn = Gfn::new(FIRST);
    let (_, mut handle) = world.share(&[gfn])[0];
    let rounds = 300;
    for _ in 0..rounds {
        assert_eq!(world.unmap(&[(handle, gfn)]).outcome, Outcome::Done);
        assert_eq!(world.statuses(1), [0]);
        assert!(!world.device_reaches(gfn));
        let (status, again) = world.map(&[(host::world::FIRST_REFERENCE, gfn)], false)[0];
        assert_eq!(status, 0);
        world.touch(gfn);
        handle = again;
    }
    let own = world.units[0].counters();
    assert!(own.waits > rounds, "two descriptors each: more than two rings full");
    assert_eq!(world.machine.witnesses(), []);
    assert_eq!(world.audit(), []);
    assert_eq!(world.machine.misuses(), []);
}
