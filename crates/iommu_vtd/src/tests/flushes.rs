//! From a cover to commands: which, how wide, and what failure means.

use std::format;
use std::string::String;
use std::vec::Vec;

use super::fake::{
    CAP, CAP_CM, CAP_PSI, CAP_RWBF, ECAP, Fake, Mood, QUEUE, WITH_QUEUE, WITHOUT_QUEUE,
};
use super::{TestDomain, TestUnit, caching, domain, plain, unit_up};
use crate::{
    Command, CommandError, Counters, DetachError, Device, DmaFlush, DmaFlushError, Platform,
    SourceId, Tag, UnitConfig,
};
use flush::plan::{Planner, Policy, Statistics};
use flush::{Change, Cover, Depth, DomainId, Flush, Gfn, Iotlb, Run};

fn cover(runs: &[(u64, u64)], order: u8, depth: Depth, change: Change) -> Cover {
    let mut cover = Cover::NOTHING;
    for (first, last) in runs {
        let run = Run::new(Gfn::new(*first), Gfn::new(*last)).unwrap();
        cover.record(run, order, depth, change);
    }
    cover
}

fn modified(runs: &[(u64, u64)]) -> Cover {
    cover(runs, 0, Depth::Leaves, Change::Modified)
}

fn everything() -> Cover {
    let mut cover = Cover::NOTHING;
    cover.everything(Depth::Tables);
    cover
}

fn flush(units: &[TestUnit<'_>], domain: &TestDomain, cover: &Cover) -> Result<(), DmaFlushError> {
    let hardware = DmaFlush::new(units, domain);
    let in_flight = Flush::<Iotlb>::start(&hardware, domain.id(), cover);
    Flush::<Iotlb>::wait(&hardware, in_flight)
}

#[track_caller]
fn check(cap: u64, config: UnitConfig, devices: &[Device], cover: &Cover, expected: &[&str]) {
    let fake = Fake::new(cap, ECAP);
    let units = [unit_up(&fake, config)];
    let domain = domain(7);
    for device in devices {
        domain.attach(&units, &fake, *device).unwrap();
    }
    fake.log();
    flush(&units, &domain, cover).unwrap();
    fake.expect(expected);
}

#[test]
fn runs_become_the_cheapest_blocks_and_all_share_one_wait_and_one_tail_write() {
    let one = [plain(1)];
    check(
        CAP,
        WITH_QUEUE,
        &one,
        &modified(&[(0x20, 0x3f)]),
        &["tail", "iotlb tag 1 page 0x20 order 5 leaves wr", "wait"],
    );
    check(
        CAP,
        WITH_QUEUE,
        &one,
        &modified(&[(3, 4), (0x100, 0x100), (0x1ff, 0x200)]),
        &[
            "tail",
            "iotlb tag 1 page 0x0 order 3 leaves wr",
            "iotlb tag 1 page 0x100 order 0 leaves wr",
            "iotlb tag 1 page 0x1ff order 0 leaves wr",
            "iotlb tag 1 page 0x200 order 0 leaves wr",
            "wait",
        ],
    );
}

#[test]
fn the_embedder_chooses_the_policy_and_one_without_batching_waits_for_each_block() {
    let check = |policy, devices: &[Device], runs: &[(u64, u64)], expected: &[&str]| {
        let fake = Fake::new(CAP, ECAP);
        let units = [unit_up(&fake, WITH_QUEUE)];
        let domain = domain(7);
        for device in devices {
            domain.attach(&units, &fake, *device).unwrap();
        }
        fake.log();
        let hardware = DmaFlush::new(&units, &domain).with_planner(Planner::new(policy));
        let in_flight = Flush::<Iotlb>::start(&hardware, domain.id(), &modified(runs));
        Flush::<Iotlb>::wait(&hardware, in_flight).unwrap();
        fake.expect(expected);
    };
    let runs = [(3, 4), (8, 8)];
    let page = ["3", "4", "8"].map(|page| format!("iotlb tag 1 page 0x{page} order 0 leaves wr"));
    let [three, four, eight] = page.each_ref().map(String::as_str);
    let around = "iotlb tag 1 page 0x0 order 3 leaves wr";
    let one = [plain(1)];
    let each = ["tail", three, "wait", "tail", four, "wait", "tail", eight, "wait"];
    check(Policy::PerPage, &one, &runs, &each);
    check(Policy::Hull, &one, &runs, &["tail", "iotlb tag 1 page 0x0 order 4 leaves wr", "wait"]);
    check(Policy::Gather, &one, &runs, &["tail", around, "wait", "tail", eight, "wait"]);
    for policy in [Policy::Exact, Policy::TwoBlock] {
        check(policy, &one, &runs, &["tail", three, four, eight, "wait"]);
    }
    check(
        Policy::Planned,
        &one,
        &runs,
        &["tail", "iotlb tag 1 page 0x0 order 4 leaves wr", "wait"],
    );
    // A block that the unit cannot name is the domain; the device's own cache takes it.
    let device = "device 0x0100 pending 1 page 0x0 order 19";
    let domain = ["tail", "iotlb tag 1 wr", device, "wait"];
    check(Policy::Hull, &[caching(0, 1, 1)], &[(0x3ffff, 0x40000)], &domain);
    check(Policy::Gather, &[caching(0, 1, 1)], &[(0x3ffff, 0x40000)], &domain);
}

#[test]
fn pages_that_were_flushed_last_are_not_spared_by_the_next_flush_of_the_domain() {
    let fake = Fake::new(CAP, ECAP);
    let units = [unit_up(&fake, WITH_QUEUE)];
    let domain = domain(7);
    domain.attach(&units, &fake, plain(1)).unwrap();
    let check = |expected: &[&str]| {
        fake.log();
        flush(&units, &domain, &modified(&[(46, 63)])).unwrap();
        fake.expect(expected);
    };
    let low = "iotlb tag 1 page 0x2e order 1 leaves wr";
    let apart = ["tail", low, "iotlb tag 1 page 0x30 order 4 leaves wr", "wait"];
    check(&apart);
    flush(&units, &domain, &modified(&[(20, 45)])).unwrap();
    let added = cover(&[(46, 63)], 0, Depth::Leaves, Change::Added);
    flush(&units, &domain, &added).unwrap();
    flush(&units, &domain, &modified(&[(20, 45)])).unwrap();
    check(&["tail", "iotlb tag 1 page 0x20 order 5 leaves wr", "wait"]);
    flush(&units, &domain, &cover(&[(30, 30)], 0, Depth::Leaves, Change::Added)).unwrap();
    check(&apart);
}

#[test]
fn statistics_say_what_the_units_were_told() {
    let fakes = [Fake::new(CAP, ECAP), Fake::new(CAP, ECAP)];
    let units: Vec<_> = fakes.iter().map(|fake| unit_up(fake, WITH_QUEUE)).collect();
    let domain = domain(7);
    domain.attach(&units, &fakes[0], plain(1)).unwrap();
    domain.attach(&units, &fakes[1], Device { unit: 1, ..plain(2) }).unwrap();
    let before = [units[0].counters(), units[1].counters()];
    let statistics = Statistics::new();
    let planner = Planner::new(Policy::TwoBlock);
    let hardware =
        DmaFlush::new(&units, &domain).with_planner(planner).with_statistics(&statistics);
    for cover in [modified(&[(3, 4), (8, 10)]), everything(), Cover::NOTHING] {
        let in_flight = Flush::<Iotlb>::start(&hardware, domain.id(), &cover);
        Flush::<Iotlb>::wait(&hardware, in_flight).unwrap();
    }
    let told = |figure: fn(&Counters) -> u64| -> u64 {
        let units = units.iter().zip(&before);
        units.map(|(unit, before)| figure(&unit.counters()) - figure(before)).sum()
    };
    let figures = statistics.read();
    assert_eq!((figures.flushes, figures.leaves, figures.avoided()), (4, 10, 6));
    assert_eq!((figures.commands, told(|counters| counters.iotlb_commands)), (8, 8));
    assert_eq!((figures.wide_commands, told(|counters| counters.wide_commands)), (2, 2));
    assert_eq!((figures.waits, told(|counters| counters.waits)), (4, 4));
    assert_eq!((figures.pages_flushed, told(|counters| counters.pages_flushed)), (12, 12));
    assert_eq!(figures.pages_changed, 10);
}

#[test]
fn walk_caches_are_kept_only_if_no_table_changed_and_large_leaves_set_the_order() {
    let one = [plain(1)];
    let tables = cover(&[(5, 5)], 0, Depth::Tables, Change::Modified);
    check(
        CAP,
        WITH_QUEUE,
        &one,
        &tables,
        &["tail", "iotlb tag 1 page 0x5 order 0 tables wr", "wait"],
    );
    let large = cover(&[(0x205, 0x205)], 9, Depth::Leaves, Change::Modified);
    check(
        CAP,
        WITH_QUEUE,
        &one,
        &large,
        &["tail", "iotlb tag 1 page 0x200 order 9 leaves wr", "wait"],
    );
    // A mask that the unit cannot name: the whole domain.
    let small_mask = CAP & !(63 << 48) | 8 << 48;
    check(small_mask, WITH_QUEUE, &one, &large, &["tail", "iotlb tag 1 wr", "wait"]);
}

#[test]
fn what_cannot_be_named_in_pages_flushes_the_domain() {
    let one = [plain(1)];
    let domain = ["tail", "iotlb tag 1 wr", "wait"];
    check(CAP, WITH_QUEUE, &one, &everything(), &domain);
    check(CAP & !CAP_PSI, WITH_QUEUE, &one, &modified(&[(5, 5)]), &domain);
    // A thousand runs' worth of blocks: dearer than the domain.
    check(CAP & !(63 << 48), WITH_QUEUE, &one, &modified(&[(0x1000, 0x1fff)]), &domain);
    check(CAP, WITH_QUEUE, &one, &modified(&[(0, u64::MAX)]), &domain);
    let top = (1 << 36) - 1;
    check(
        CAP,
        WITH_QUEUE,
        &one,
        &modified(&[(top, top)]),
        &["tail", "iotlb tag 1 page 0xfffffffff order 0 leaves wr", "wait"],
    );
}

#[test]
fn drains_are_asked_for_where_they_are_offered() {
    let one = [plain(1)];
    let domain = |line| ["tail", line, "wait"];
    check(CAP & !(1 << 55), WITH_QUEUE, &one, &everything(), &domain("iotlb tag 1 w"));
    check(CAP & !(1 << 54), WITH_QUEUE, &one, &everything(), &domain("iotlb tag 1r"));
    check(CAP & !(3 << 54), WITH_QUEUE, &one, &everything(), &domain("iotlb tag 1"));
    check(CAP & !(1 << 55), WITHOUT_QUEUE, &one, &everything(), &["register iotlb tag 1 w"]);
}

#[test]
fn added_entries_cost_nothing_unless_hardware_caches_absence_or_buffers_writes() {
    let one = [plain(1)];
    let added = cover(&[(5, 5)], 0, Depth::Leaves, Change::Added);
    check(CAP, WITH_QUEUE, &one, &added, &[]);
    check(CAP | CAP_RWBF, WITH_QUEUE, &one, &added, &["write buffer"]);
    let pages = ["tail", "iotlb tag 1 page 0x5 order 0 leaves wr", "wait"];
    check(CAP | CAP_CM, WITH_QUEUE, &one, &added, &pages);
    check(CAP | CAP_CM | CAP_RWBF, WITH_QUEUE, &one, &added, &pages);
    // Above the lowest level, what was absent may be cached as a missing table.
    let large = cover(&[(512, 1023)], 9, Depth::Leaves, Change::Added);
    let missing = ["tail", "iotlb tag 1 page 0x200 order 9 tables wr", "wait"];
    check(CAP | CAP_CM, WITH_QUEUE, &one, &large, &missing);
    check(CAP, WITH_QUEUE, &one, &large, &[]);
    // Where a table is new, the one before it may be cached: freed by another batch, and
    // not flushed yet.
    let linked = cover(&[(5, 5)], 0, Depth::Tables, Change::Added);
    let tables = ["tail", "iotlb tag 1 page 0x5 order 0 tables wr", "wait"];
    check(CAP, WITH_QUEUE, &one, &linked, &tables);
    check(CAP | CAP_RWBF, WITH_QUEUE, &one, &linked, &tables);
    // A real invalidation flushes the write buffers on its way.
    check(CAP | CAP_RWBF, WITH_QUEUE, &one, &modified(&[(5, 5)]), &pages);
}

#[test]
fn no_device_means_no_command() {
    check(CAP, WITH_QUEUE, &[], &everything(), &[]);
    check(CAP | CAP_RWBF, WITH_QUEUE, &[], &modified(&[(1, 2)]), &[]);
    check(CAP, WITH_QUEUE, &[plain(1)], &Cover::NOTHING, &[]);
}

#[test]
fn device_caches_follow_the_units_own_and_only_those_that_exist() {
    check(
        CAP,
        WITH_QUEUE,
        &[caching(0, 1, 4), plain(2), caching(0, 3, 32)],
        &modified(&[(5, 5), (8, 11)]),
        &[
            "tail",
            "iotlb tag 1 page 0x5 order 0 leaves wr",
            "iotlb tag 1 page 0x8 order 2 leaves wr",
            "device 0x0100 pending 4 page 0x5 order 0",
            "device 0x0100 pending 4 page 0x8 order 2",
            "device 0x0300 pending 0 page 0x5 order 0",
            "device 0x0300 pending 0 page 0x8 order 2",
            "wait",
        ],
    );
}

#[test]
fn devices_are_reached_through_their_own_unit_and_all_units_start_before_any_is_waited_for() {
    let fakes = [Fake::new(CAP, ECAP), Fake::new(CAP, ECAP), Fake::new(CAP, ECAP)];
    let units: Vec<_> = fakes.iter().map(|fake| unit_up(fake, WITH_QUEUE)).collect();
    let (own, other) = (domain(7), domain(8));
    other.attach(&units, &fakes[1], Device { unit: 1, ..plain(9) }).unwrap();
    own.attach(&units, &fakes[0], caching(0, 1, 1)).unwrap();
    own.attach(&units, &fakes[2], caching(2, 2, 1)).unwrap();
    for fake in &fakes {
        fake.log();
        fake.set(|hardware| hardware.mood = Mood::Fetches);
    }
    let hardware = DmaFlush::new(&units, &own);
    let in_flight = Flush::<Iotlb>::start(&hardware, own.id(), &modified(&[(5, 5)]));
    let page = "iotlb tag 1 page 0x5 order 0 leaves wr";
    fakes[0].expect(&["tail", page, "device 0x0100 pending 1 page 0x5 order 0", "wait"]);
    fakes[1].expect(&[]);
    fakes[2].expect(&["tail", page, "device 0x0200 pending 1 page 0x5 order 0", "wait"]);
    fakes[0].complete();
    fakes[2].complete();
    Flush::<Iotlb>::wait(&hardware, in_flight).unwrap();
    // A unit that does not answer is named, and the other one was waited for.
    let in_flight = Flush::<Iotlb>::start(&hardware, own.id(), &modified(&[(5, 5)]));
    fakes[0].complete();
    let error = DmaFlushError::Command { unit: 2, error: CommandError::Deadline };
    assert_eq!(Flush::<Iotlb>::wait(&hardware, in_flight), Err(error));
}

/// Symptom: a page was released although a device could still reach it with a translation
/// of its own. Cause: a device declared gone was left out of the flush, while its context
/// entry was present. Cure: the flush fails and names it until it is detached.
#[test]
fn a_member_that_is_gone_or_whose_unit_does_not_translate_gets_no_command_and_fails_the_flush() {
    let fake = Fake::new(CAP, ECAP);
    let units = [unit_up(&fake, WITH_QUEUE)];
    let domain = domain(7);
    let (silent, other) = (caching(0, 1, 1), caching(0, 2, 1));
    domain.attach(&units, &fake, silent).unwrap();
    domain.attach(&units, &fake, other).unwrap();
    units[0].device_gone(silent.source).unwrap();
    fake.log();
    let gone = Err(DmaFlushError::Gone { unit: 0, source: silent.source });
    assert_eq!(flush(&units, &domain, &modified(&[(5, 5)])), gone);
    let page = "iotlb tag 1 page 0x5 order 0 leaves wr";
    assert_eq!(fake.commands(), [page, "device 0x0200 pending 1 page 0x5 order 0"]);

    units[0].device_returned(silent.source);
    units[0].locked(|state| state.translating = false);
    let down = Err(DmaFlushError::Command { unit: 0, error: CommandError::Stopped });
    assert_eq!(flush(&units, &domain, &modified(&[(5, 5)])), down);
    assert_eq!(fake.commands(), [page]);
    // Nor is it detached, before its own cache can be reached.
    let down = Err(DetachError::Command(CommandError::Stopped));
    assert_eq!(domain.detach(&units, &fake, 0, silent.source), down);
    units[0].locked(|state| state.translating = true);
    domain.detach(&units, &fake, 0, silent.source).unwrap();
    flush(&units, &domain, &modified(&[(5, 5)])).unwrap();
}

#[test]
fn more_commands_than_the_ring_holds_go_in_pieces() {
    let fake = Fake::new(CAP, ECAP);
    let units = [unit_up(&fake, WITH_QUEUE)];
    let domain = domain(7);
    for bus in 1..=16 {
        domain.attach(&units, &fake, caching(0, bus, 1)).unwrap();
    }
    let runs: Vec<(u64, u64)> = (0..32).map(|index| (index * 16, index * 16)).collect();
    fake.log();
    flush(&units, &domain, &modified(&runs)).unwrap();
    let log = fake.log();
    let count = |word: &str| log.iter().filter(|line| line.starts_with(word)).count();
    // 544 commands in pieces of 64.
    assert_eq!((count("iotlb"), count("device"), count("wait"), count("tail")), (32, 512, 9, 9));
    assert_eq!(units[0].counters().pages_flushed, 32);
    // A refusal in the first of the pieces fails the flush.
    fake.set(|hardware| hardware.refuse = Some((0xf, 2)));
    let error = DmaFlushError::Command { unit: 0, error: CommandError::Refused };
    assert_eq!(flush(&units, &domain, &modified(&runs)), Err(error));
}

#[test]
fn another_domains_batch_is_refused_without_a_command() {
    let fake = Fake::new(CAP, ECAP);
    let units = [unit_up(&fake, WITH_QUEUE)];
    let domain = domain(7);
    domain.attach(&units, &fake, plain(1)).unwrap();
    fake.log();
    let hardware = DmaFlush::new(&units, &domain);
    let in_flight = Flush::<Iotlb>::start(&hardware, DomainId::new(8), &everything());
    assert_eq!(Flush::<Iotlb>::wait(&hardware, in_flight), Err(DmaFlushError::OtherDomain));
    let hardware = DmaFlush::new(&units[..0], &domain);
    let in_flight = Flush::<Iotlb>::start(&hardware, domain.id(), &everything());
    let error = Err(DmaFlushError::NoUnit { unit: 0 });
    assert_eq!(Flush::<Iotlb>::wait(&hardware, in_flight), error);
    fake.expect(&[]);
}

#[test]
fn a_devices_time_out_is_retried_wider_and_a_bounded_number_of_times() {
    let fake = Fake::new(CAP, ECAP);
    let units = [unit_up(&fake, WITH_QUEUE)];
    let domain = domain(7);
    domain.attach(&units, &fake, caching(0, 1, 1)).unwrap();
    fake.log();
    fake.set(|hardware| hardware.deaf_devices = 1);
    flush(&units, &domain, &modified(&[(5, 5)])).unwrap();
    let commands = fake.commands();
    assert_eq!(
        commands[commands.len() - 2..],
        ["iotlb tag 1 wr", "device 0x0100 pending 1 page 0x0 order 52"]
    );
    fake.set(|hardware| hardware.deaf_devices = usize::MAX);
    let error = DmaFlushError::Command { unit: 0, error: CommandError::DeviceTimeOut };
    assert_eq!(flush(&units, &domain, &modified(&[(5, 5)])), Err(error));
    assert_eq!(fake.commands().len(), 6, "the first try and two retries, two commands each");
    // Once the embedder gives the device up and detaches it, the domain can be flushed.
    let source = caching(0, 1, 1).source;
    units[0].device_gone(source).unwrap();
    let gone = DmaFlushError::Gone { unit: 0, source };
    assert_eq!(flush(&units, &domain, &modified(&[(5, 5)])), Err(gone));
    domain.detach(&units, &fake, 0, source).unwrap();
    flush(&units, &domain, &modified(&[(5, 5)])).unwrap();
}

/// Symptom: flushes of a domain failed for good on a unit that takes no pages, whatever
/// its capabilities say. Cause: only register commands were made wider. Cure: what the
/// queue refused is asked for once more, as the whole domain.
#[test]
fn what_the_queue_refuses_is_asked_for_once_more_as_the_domain() {
    let fake = Fake::new(CAP, ECAP);
    let units = [unit_up(&fake, WITH_QUEUE)];
    let domain = domain(7);
    domain.attach(&units, &fake, caching(0, 1, 1)).unwrap();
    fake.log();
    fake.set(|hardware| hardware.refuse = Some((0x3f, 0x32)));
    flush(&units, &domain, &modified(&[(5, 5)])).unwrap();
    let wide = ["iotlb tag 1 wr", "device 0x0100 pending 1 page 0x0 order 52"];
    assert_eq!(fake.commands(), wide);
    fake.set(|hardware| hardware.refuse = Some((0xf, 2)));
    let error = DmaFlushError::Command { unit: 0, error: CommandError::Refused };
    assert_eq!(flush(&units, &domain, &modified(&[(5, 5)])), Err(error));
    assert_eq!(units[0].counters().refused, 3, "once for the page, twice for the last");
}

#[test]
fn a_unit_that_throttles_devices_is_told_the_physical_function() {
    for (ecap, expected) in [(ECAP | 1 << 41, 0xabc0_0100_0000_d003), (ECAP, 0x0100_0000_0003)] {
        let fake = Fake::new(CAP, ecap);
        let units = [unit_up(&fake, WITH_QUEUE)];
        let domain = domain(7);
        let physical_function = SourceId::new(0xabcd);
        let device = Device { physical_function, ..caching(0, 1, 32) };
        domain.attach(&units, &fake, device).unwrap();
        // Three descriptors of the bring-up, then the IOTLB's, then the device's.
        flush(&units, &domain, &modified(&[(5, 5)])).unwrap();
        assert_eq!(fake.word(QUEUE.ring, 2 * 4), expected);
        // And context and IOTLB before the device, after the wait.
        domain.detach(&units, &fake, 0, device.source).unwrap();
        assert_eq!(fake.word(QUEUE.ring, 2 * 8), expected);
    }
}

#[test]
fn register_commands_widen_where_hardware_refuses_and_fail_at_the_widest() {
    let fake = Fake::new(CAP, ECAP);
    let units = [unit_up(&fake, WITHOUT_QUEUE)];
    let domain = domain(7);
    domain.attach(&units, &fake, plain(1)).unwrap();
    fake.log();
    flush(&units, &domain, &modified(&[(5, 5)])).unwrap();
    fake.expect(&["register iotlb tag 1 page 0x5 order 0 leaves wr"]);
    fake.set(|hardware| hardware.refuse_granularity = Some(3));
    flush(&units, &domain, &modified(&[(5, 5)])).unwrap();
    fake.expect(&["register iotlb tag 1 page 0x5 order 0 leaves wr", "register iotlb tag 1 wr"]);
    fake.set(|hardware| hardware.refuse_granularity = Some(2));
    flush(&units, &domain, &everything()).unwrap();
    fake.expect(&["register iotlb tag 1 wr", "register iotlb all wr"]);
    fake.set(|hardware| hardware.mood = Mood::Deaf);
    let error = DmaFlushError::Command { unit: 0, error: CommandError::Deadline };
    assert_eq!(flush(&units, &domain, &everything()), Err(error));
    // The registers stay taken until hardware is done with them.
    fake.set(|hardware| hardware.mood = Mood::Prompt);
    assert_eq!(flush(&units, &domain, &everything()), Err(error));
    fake.set(|hardware| {
        hardware.refuse_granularity = None;
        hardware.finish_registers();
    });
    flush(&units, &domain, &everything()).unwrap();
    assert_eq!(units[0].counters().waits, 0);
}

#[test]
fn the_result_of_an_earlier_register_command_is_not_taken_for_a_lost_one() {
    for (register, lost_top) in [(0x28, 0), (0x28, 1), (0xf8, 0), (0xf8, 1)] {
        let fake = Fake::new(CAP, ECAP);
        let units = [unit_up(&fake, WITHOUT_QUEUE)];
        let domain = domain(7);
        domain.attach(&units, &fake, plain(1)).unwrap();
        flush(&units, &domain, &everything()).unwrap();
        fake.set(|hardware| (hardware.lost, hardware.lost_top) = (Some(register), lost_top));
        let detached = domain.detach(&units, &fake, 0, plain(1).source);
        assert!(detached.is_err(), "{register:#x} {lost_top}");
        fake.set(|hardware| hardware.lost = None);
        domain.detach(&units, &fake, 0, plain(1).source).unwrap();
    }
}

#[test]
fn an_address_that_does_not_read_back_is_not_relied_on() {
    let fake = Fake::new(CAP, ECAP);
    let units = [unit_up(&fake, WITHOUT_QUEUE)];
    let domain = domain(7);
    domain.attach(&units, &fake, plain(1)).unwrap();
    fake.log();
    fake.set(|hardware| hardware.lost = Some(0xf0));
    flush(&units, &domain, &modified(&[(5, 5)])).unwrap();
    fake.expect(&["register iotlb tag 1 wr"]);
    let counters = units[0].counters();
    assert_eq!((counters.pages_flushed, counters.wide_commands), (0, 2), "one at bring-up");
}

/// Symptom: a flush of many pieces on a dead queue waited a deadline for each. Cause: it
/// went on after the first was late. Cure: what follows a late piece is not sent.
#[test]
fn a_dead_queue_costs_a_few_deadlines_however_many_pieces_there_are() {
    let fake = Fake::new(CAP, ECAP);
    let unit = unit_up(&fake, WITH_QUEUE);
    fake.set(|hardware| hardware.mood = Mood::Deaf);
    let begun = unit.platform.now_us();
    let mut submitter = unit.open();
    for _ in 0..1024 {
        submitter.push(Command::IotlbDomain { tag: Tag::new(1) });
        submitter.submit();
    }
    assert_eq!(unit.finish(submitter.close()), Err(CommandError::Deadline));
    let spent = unit.platform.now_us() - begun;
    assert!(spent < 10 * WITH_QUEUE.timeout_us, "{spent} us");
}
