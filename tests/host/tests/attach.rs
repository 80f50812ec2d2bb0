//! Devices that come, move and go: commands in the right order, no id lost.
//!
//! A device's context entry is forgotten first, then what was translated under the id it
//! had; only then may the id serve another domain.

use flush::{Dfn, Gfn};
use host::{
    Layout, Setup, World,
    world::{BACKEND, DEVICE, FRONTEND},
};
use hwmodel::{Command, DmaError, Failure, Granularity, UnitConfig, UnitId, WitnessKind};
use iommu_vtd::{
    AttachError, CommandError, DetachError, Device, Fault, FaultSummary, MoveError, Reason,
    Request, SourceId, Tag,
};
use stage2::format::vtd::{Vtd, VtdLevels};

const LAYOUTS: [Layout; 2] = [Layout::Separate, Layout::Shared];
/// Where only the backend has a page.
const OF_BACKEND: Gfn = Gfn::new(0x40_0000);
/// Where only the frontend has a page.
const OF_FRONTEND: Gfn = Gfn::new(0x50_0000);
const OTHER_DEVICE: SourceId = SourceId::new(0x20);
const DEVICES: [Device; 2] = [
    Device { unit: 0, source: DEVICE, physical_function: DEVICE, device_tlb: None },
    Device { unit: 0, source: OTHER_DEVICE, physical_function: OTHER_DEVICE, device_tlb: None },
];

fn caching() -> Setup {
    let unit = UnitConfig { caching_mode: true, ..UnitConfig::default() };
    Setup { unit, ..Setup::default() }
}

/// A world with a page for each domain and a second device that belongs to nobody.
fn world(setup: Setup) -> World {
    let world = World::new(setup);
    world.machine.add_device(UnitId(0), OTHER_DEVICE.get(), false);
    world.populate_block(BACKEND, OF_BACKEND, 0);
    world.populate_block(FRONTEND, OF_FRONTEND, 0);
    world
}

fn attach(world: &World, to: flush::DomainId, device: Device) -> Result<(), AttachError> {
    let guest = world.hypervisor.guest(to).expect("a guest of this world");
    guest.dma.attach(&world.units, &world.hypervisor.memory, device)
}

fn detach(world: &World, source: SourceId) -> Result<(), DetachError> {
    world.backend().dma.detach(&world.units, &world.hypervisor.memory, 0, source)
}

fn tag(world: &World, of: flush::DomainId) -> Option<Tag> {
    world.hypervisor.guest(of).expect("a guest of this world").dma.tag(0)
}

fn reaches(world: &World, source: SourceId, gfn: Gfn) -> bool {
    world.machine.dma_write64(source.get(), gfn.get() << 12, 5).is_ok()
}

/// The commands since `since`, waits left out, and without the operand that the registers
/// still have from an earlier command for pages.
fn commands(world: &World, since: usize) -> Vec<Command> {
    let mut told = world.machine.commands(UnitId(0)).split_off(since);
    told.retain(|command| !matches!(command, Command::Wait { .. }));
    for command in &mut told {
        if let Command::Iotlb {
            granularity: Granularity::Domain, page, address_mask, hint, ..
        } = command
        {
            (*page, *address_mask, *hint) = (0, 0, false);
        }
    }
    told
}

fn forget_context(did: Tag, source: SourceId) -> Command {
    Command::Context {
        granularity: Granularity::Selective,
        did: did.get(),
        sid: source.get(),
        function_mask: 0,
    }
}

fn forget_domain(did: Tag) -> Command {
    Command::Iotlb {
        granularity: Granularity::Domain,
        did: did.get(),
        page: 0,
        address_mask: 0,
        hint: false,
        drain_writes: true,
        drain_reads: true,
    }
}

#[track_caller]
fn check_clean(world: &World) {
    let mut seen = world.machine.witnesses();
    seen.extend(world.audit());
    let seen: Vec<String> = seen.iter().map(ToString::to_string).collect();
    assert!(seen.is_empty(), "{seen:#?}");
    assert_eq!(world.machine.misuses(), []);
}

#[test]
fn a_first_attach_needs_commands_in_caching_mode_only() {
    for layout in LAYOUTS {
        for (setup, told) in [(Setup::default(), false), (caching(), true)] {
            let world = world(Setup { layout, ..setup });
            // In caching mode this is remembered, under id 0.
            assert!(!reaches(&world, OTHER_DEVICE, OF_BACKEND));
            let since = world.machine.commands(UnitId(0)).len();
            attach(&world, BACKEND, DEVICES[1]).expect("it is attached");
            let id = tag(&world, BACKEND).expect("it has a device");
            assert_ne!(id, Tag::RESERVED);
            let expected = [forget_context(Tag::RESERVED, OTHER_DEVICE), forget_domain(id)];
            assert_eq!(commands(&world, since), if told { &expected[..] } else { &[] });
            assert!(reaches(&world, OTHER_DEVICE, OF_BACKEND));
            assert!(reaches(&world, DEVICE, OF_BACKEND));
            check_clean(&world);
        }
    }
}

#[test]
fn a_detached_device_is_forgotten_by_the_id_it_had_and_blocked() {
    for layout in LAYOUTS {
        for registers in [false, true] {
            let world = world(Setup { layout, registers, ..Setup::default() });
            assert!(reaches(&world, DEVICE, OF_BACKEND));
            let old = tag(&world, BACKEND).expect("it has a device");
            let since = world.machine.commands(UnitId(0)).len();
            detach(&world, DEVICE).expect("it is detached");
            assert_eq!(commands(&world, since), [forget_context(old, DEVICE), forget_domain(old)]);
            assert_eq!((tag(&world, BACKEND), world.units[0].owner(old)), (None, None));
            assert_eq!(world.backend().dma.devices(), 0);
            assert!(!reaches(&world, DEVICE, OF_BACKEND));
            assert_eq!(detach(&world, DEVICE), Err(DetachError::NotMember));
            check_clean(&world);
        }
    }
}

#[test]
fn a_device_with_a_tlb_is_told_last_when_it_is_detached() {
    let world = world(Setup { device_tlb: true, ..Setup::default() });
    assert!(reaches(&world, DEVICE, OF_BACKEND));
    let old = tag(&world, BACKEND).expect("it has a device");
    let since = world.machine.commands(UnitId(0)).len();
    detach(&world, DEVICE).expect("it is detached");
    let told = commands(&world, since);
    assert_eq!(told[..2], [forget_context(old, DEVICE), forget_domain(old)]);
    let [.., Command::DeviceTlb { sid, page: _, order: 52.. }] = told[..] else {
        panic!("not all of the device's own cache: {told:?}");
    };
    assert_eq!((told.len(), sid), (3, DEVICE.get()));
    assert!(!reaches(&world, DEVICE, OF_BACKEND));
    check_clean(&world);
}

#[test]
fn a_moved_device_sees_the_new_domain_and_nothing_of_the_old() {
    for layout in LAYOUTS {
        for setup in [Setup::default(), caching()] {
            let world = world(Setup { layout, ..setup });
            // The frontend has an id of its own already.
            attach(&world, FRONTEND, DEVICES[1]).expect("it is attached");
            assert!(reaches(&world, DEVICE, OF_BACKEND) && !reaches(&world, DEVICE, OF_FRONTEND));
            let (old, new) = (tag(&world, BACKEND), tag(&world, FRONTEND));
            let (old, new) = (old.expect("a device"), new.expect("a device"));
            assert_ne!(old, new);
            let since = world.machine.commands(UnitId(0)).len();
            let (from, to) = (&world.backend().dma, &world.frontend().dma);
            let memory = &world.hypervisor.memory;
            from.reattach(to, &world.units, memory, DEVICES[0]).expect("it is moved");
            let told = commands(&world, since);
            assert_eq!(told[..2], [forget_context(old, DEVICE), forget_domain(old)]);
            let then = [forget_context(Tag::RESERVED, DEVICE), forget_domain(new)];
            let caching_mode = setup.unit.caching_mode;
            assert_eq!(told[2..], if caching_mode { &then[..] } else { &[] }[..]);
            assert!(!reaches(&world, DEVICE, OF_BACKEND) && reaches(&world, DEVICE, OF_FRONTEND));
            assert_eq!((from.devices(), to.devices()), (0, 2));
            check_clean(&world);
        }
    }
}

#[test]
fn an_id_that_was_not_flushed_serves_nobody_else() {
    for failure in [Failure::Hang, Failure::QueueError] {
        let world = world(Setup::default());
        assert!(reaches(&world, DEVICE, OF_BACKEND));
        let old = tag(&world, BACKEND).expect("it has a device");
        world.machine.fail_operation(2, failure);
        assert!(matches!(detach(&world, DEVICE), Err(DetachError::Command(_))));
        assert_eq!((tag(&world, BACKEND), world.backend().dma.devices()), (Some(old), 1));
        assert_eq!(world.units[0].owner(old), Some(BACKEND));
        // What is cached still works, and leads to pages that are still the backend's.
        assert!(reaches(&world, DEVICE, OF_BACKEND));

        world.machine.repair();
        attach(&world, FRONTEND, DEVICES[1]).expect("it is attached");
        assert_ne!(tag(&world, FRONTEND), Some(old));
        let (from, to) = (&world.backend().dma, &world.frontend().dma);
        let memory = &world.hypervisor.memory;
        from.reattach(to, &world.units, memory, DEVICES[0]).expect("it is moved");
        assert_eq!(world.units[0].owner(old), None);
        assert!(!reaches(&world, DEVICE, OF_BACKEND) && reaches(&world, DEVICE, OF_FRONTEND));
        check_clean(&world);
    }
}

#[test]
fn a_move_that_fails_half_way_leaves_the_device_blocked() {
    let world = world(Setup::default());
    assert!(reaches(&world, DEVICE, OF_BACKEND));
    let (from, to) = (&world.backend().dma, &world.frontend().dma);
    let memory = &world.hypervisor.memory;
    let device = Device { device_tlb: Some(33), ..DEVICES[0] };
    let moved = from.reattach(to, &world.units, memory, device);
    assert_eq!(moved, Err(MoveError::Attach(AttachError::DeviceTlb)));
    assert_eq!((from.devices(), to.devices()), (0, 0));
    assert!(!reaches(&world, DEVICE, OF_BACKEND) && !reaches(&world, DEVICE, OF_FRONTEND));
    check_clean(&world);
}

/// Attaches the other device to the frontend 100 times; each time it fails. Units tell
/// 16 ids apart here, so that a leak of one is seen.
#[track_caller]
fn check_refused(
    setup: Setup,
    device: Device,
    before: impl Fn(&World),
    expected: impl Fn(AttachError) -> bool,
) {
    let unit = UnitConfig { domain_id_bits: 4, ..setup.unit };
    let world = world(Setup { unit, ..setup });
    let tables = world.hypervisor.memory.tables_in_use();
    for _ in 0..100 {
        before(&world);
        let error = attach(&world, FRONTEND, device).expect_err("it is refused");
        assert!(expected(error), "{error:?}");
        world.machine.repair();
        assert_eq!((tag(&world, FRONTEND), world.frontend().dma.devices()), (None, 0));
        assert!(!reaches(&world, OTHER_DEVICE, OF_FRONTEND));
    }
    assert!(world.hypervisor.memory.tables_in_use() <= tables + 1, "a context table at most");
    world.units[0].device_returned(OTHER_DEVICE);
    attach(&world, FRONTEND, DEVICES[1]).expect("it is attached");
    assert!(reaches(&world, OTHER_DEVICE, OF_FRONTEND) && reaches(&world, DEVICE, OF_BACKEND));
    check_clean(&world);
}

#[test]
fn a_hundred_failed_attaches_cost_no_id() {
    let (free, nothing) = (DEVICES[1], |_: &World| {});
    check_refused(Setup::default(), DEVICES[0], nothing, |error| error == AttachError::Taken);
    let without = Setup { registers: true, ..Setup::default() };
    let with_tlb = Device { device_tlb: Some(1), ..free };
    check_refused(without, with_tlb, nothing, |error| error == AttachError::DeviceTlb);
    let gone = |world: &World| {
        world.units[0].device_gone(OTHER_DEVICE).expect("room for one");
    };
    check_refused(Setup::default(), free, gone, |error| error == AttachError::Gone);
    let beyond = Device { unit: 1, ..free };
    check_refused(Setup::default(), beyond, nothing, |error| error == AttachError::NoUnit);
    // Hardware refuses the command that lets it see the new entry.
    let refuse = |world: &World| world.machine.fail_operation(2, Failure::QueueError);
    let refused = |error| matches!(error, AttachError::Command(CommandError::Refused));
    check_refused(caching(), free, refuse, refused);
}

#[test]
fn an_attach_that_hardware_never_confirms_leaves_a_member_to_be_detached() {
    let world = world(caching());
    world.machine.fail_operation(2, Failure::Hang);
    let error = attach(&world, FRONTEND, DEVICES[1]).expect_err("hardware hangs");
    assert!(matches!(error, AttachError::StillMember(_)), "{error:?}");
    let id = tag(&world, FRONTEND).expect("still a member");
    assert_eq!(world.units[0].owner(id), Some(FRONTEND));
    world.machine.repair();
    let memory = &world.hypervisor.memory;
    world.frontend().dma.detach(&world.units, memory, 0, OTHER_DEVICE).expect("it is detached");
    assert_eq!((tag(&world, FRONTEND), world.units[0].owner(id)), (None, None));
    attach(&world, FRONTEND, DEVICES[1]).expect("it is attached");
    assert!(reaches(&world, OTHER_DEVICE, OF_FRONTEND));
    check_clean(&world);
}

#[test]
fn tables_that_a_unit_cannot_walk_are_refused() {
    let small = UnitConfig { large_1g: false, ..UnitConfig::default() };
    for (unit, format) in [
        (UnitConfig::default(), Vtd::new(VtdLevels::Five)),
        (UnitConfig { levels_4: false, ..small }, Vtd::new(VtdLevels::Four)),
        (small, Vtd::new(VtdLevels::Three)),
    ] {
        let levels = if unit.levels_4 { VtdLevels::Four } else { VtdLevels::Three };
        let mut world = world(Setup { unit, levels, ..Setup::default() });
        let other = flush::DomainId::new(7);
        world.hypervisor.add_with(other, Layout::Separate, format);
        assert_eq!(attach(&world, other, DEVICES[1]), Err(AttachError::Tables), "{format:?}");
        assert_eq!(tag(&world, other), None);
    }
}

fn faults(world: &World) -> (Vec<Fault>, FaultSummary) {
    let mut faults = Vec::new();
    let summary = world.units[0].take_faults(|fault| faults.push(fault));
    (faults, summary)
}

#[test]
fn a_refused_access_is_recorded_once_with_page_and_reason() {
    let world = world(Setup::default());
    let fault =
        |source, page, request, reason| Fault { source, page: Dfn::new(page), request, reason };
    let absent = OF_FRONTEND.get();
    let beyond = 1 << 36;
    let write = |source: SourceId, page: u64| {
        let done = world.machine.dma_write64(source.get(), page << 12, 0);
        assert!(matches!(done, Err(DmaError::Fault(_))), "{done:?}");
    };
    let read = |source: SourceId, page: u64| {
        let done = world.machine.dma_read64(source.get(), page << 12);
        assert!(matches!(done, Err(DmaError::Fault(_))), "{done:?}");
    };
    let one = FaultSummary { records: 1, overflowed: false };
    let check = |expected: Fault| {
        assert_eq!(faults(&world), (vec![expected], one));
        assert_eq!(faults(&world), (vec![], FaultSummary::default()), "taken is taken");
    };
    write(DEVICE, absent);
    check(fault(DEVICE, absent, Request::Write, Reason::NotWritable));
    read(DEVICE, absent + 1);
    check(fault(DEVICE, absent + 1, Request::Read, Reason::NotReadable));
    write(DEVICE, beyond);
    check(fault(DEVICE, beyond, Request::Write, Reason::AddressWidth));
    write(OTHER_DEVICE, absent);
    check(fault(OTHER_DEVICE, absent, Request::Write, Reason::NotAttached));
    detach(&world, DEVICE).expect("it is detached");
    write(DEVICE, OF_BACKEND.get());
    check(fault(DEVICE, OF_BACKEND.get(), Request::Write, Reason::NotAttached));
}

#[test]
fn an_unmapped_grant_faults_with_its_page() {
    for layout in LAYOUTS {
        let world = world(Setup { layout, ..Setup::default() });
        let gfn = Gfn::new(0x10_0007);
        let handle = world.share(&[gfn])[0].1;
        assert_eq!(faults(&world).1, FaultSummary::default());
        assert_eq!(world.unmap(&[(handle, gfn)]).outcome, gnttab::Outcome::Done);
        assert!(!world.device_reaches(gfn));
        let (faults, _) = faults(&world);
        let expected = Fault {
            source: DEVICE,
            page: Dfn::from(gfn),
            request: Request::Write,
            reason: Reason::NotWritable,
        };
        assert_eq!(faults, [expected]);
    }
}

#[test]
fn more_faults_than_records_are_reported_as_lost() {
    let unit = UnitConfig { fault_records: 4, ..UnitConfig::default() };
    let world = world(Setup { unit, ..Setup::default() });
    // A unit keeps one record of what the same requester did at a time.
    let sources: Vec<_> = (0x40..).take(6).map(SourceId::new).collect();
    for source in &sources {
        world.machine.add_device(UnitId(0), source.get(), false);
    }
    let reach = |source| assert!(!reaches(&world, source, OF_FRONTEND));
    sources[..4].iter().copied().for_each(reach);
    let (seen, summary) = faults(&world);
    assert_eq!(summary, FaultSummary { records: 4, overflowed: false });
    assert_eq!(seen.iter().map(|fault| fault.source).collect::<Vec<_>>(), sources[..4]);
    sources.iter().copied().for_each(reach);
    let (seen, summary) = faults(&world);
    assert_eq!((seen.len(), summary.overflowed), (4, true));
    // Recording goes on afterwards.
    reach(DEVICE);
    assert_eq!(faults(&world).1, FaultSummary { records: 1, overflowed: false });
    assert_eq!(world.machine.count(WitnessKind::ReleasedFrame), 0);
}
