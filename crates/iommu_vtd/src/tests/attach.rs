//! Attaching, moving and detaching devices: which commands, in which order.

use std::vec::Vec;

use super::fake::{CAP, CAP_CM, CAP_RWBF, ECAP, Fake, Mood, WITH_QUEUE, WITHOUT_QUEUE};
use super::{caching, domain, plain, unit, unit_up};
use crate::{AttachError, CommandError, DetachError, Device, MoveError, SourceId, Tag};
use flush::DomainId;

/// The entry of function 0 of device 0: quadwords 0 and 1 of its bus's context table.
const PRESENT_1: &str = "entry 0 = 0x5007001";
const CLEARED: &str = "entry 0 = 0x0";
/// After everything was forgotten: the entry is nobody's.
const FREE: &str = "entry 1 = 0x0";

#[test]
fn a_first_attach_writes_the_high_half_first_and_needs_no_command() {
    let fake = Fake::new(CAP, ECAP);
    let units = [unit_up(&fake, WITH_QUEUE)];
    let domain = domain(7);
    domain.attach(&units, &fake, plain(1)).unwrap();
    fake.expect(&["entry 1 = 0x102", PRESENT_1]);
    assert_eq!((domain.tag(0), domain.devices()), (Some(Tag::new(1)), 1));
    assert_eq!(units[0].owner(Tag::new(1)), Some(DomainId::new(7)));
    // The bus's context table hangs in the root table.
    assert_eq!(fake.word(fake.root(), 2), 0x0100_1001);
}

#[test]
fn hardware_that_caches_absence_or_buffers_writes_is_told_of_a_first_attach() {
    #[track_caller]
    fn check(cap: u64, expected: &[&str]) {
        let fake = Fake::new(cap, ECAP);
        let units = [unit_up(&fake, WITH_QUEUE)];
        domain(7).attach(&units, &fake, plain(1)).unwrap();
        let log = fake.log();
        assert_eq!(log[..2], ["entry 1 = 0x102", PRESENT_1]);
        assert_eq!(log[2..], *expected);
    }
    // Absent entries are cached under the reserved id 0.
    let absent = ["tail", "context tag 0 device 0x0100", "iotlb tag 1 wr", "wait"];
    check(CAP | CAP_CM, &absent);
    check(CAP | CAP_CM | CAP_RWBF, &absent);
    check(CAP | CAP_RWBF, &["write buffer"]);
}

#[test]
fn detaching_forgets_context_then_translations_by_the_old_tag_then_the_device() {
    let fake = Fake::new(CAP, ECAP);
    let units = [unit_up(&fake, WITH_QUEUE)];
    let domain = domain(7);
    domain.attach(&units, &fake, caching(0, 1, 4)).unwrap();
    assert_eq!(fake.log()[1], "entry 0 = 0x5007005");
    domain.detach(&units, &fake, 0, SourceId::at(1, 0, 0).unwrap()).unwrap();
    fake.expect(&[
        CLEARED,
        "tail",
        "context tag 1 device 0x0100",
        "iotlb tag 1 wr",
        "device 0x0100 pending 4 page 0x0 order 52",
        "wait",
        FREE,
    ]);
    assert_eq!((domain.tag(0), domain.devices(), units[0].owner(Tag::new(1))), (None, 0, None));
    let again = domain.detach(&units, &fake, 0, SourceId::at(1, 0, 0).unwrap());
    assert_eq!(again, Err(DetachError::NotMember));
}

#[test]
fn moving_a_device_goes_through_not_present_and_names_the_old_tag() {
    let fake = Fake::new(CAP, ECAP);
    let units = [unit_up(&fake, WITH_QUEUE)];
    let (old, new) = (domain(7), domain(9));
    old.attach(&units, &fake, plain(1)).unwrap();
    new.attach(&units, &fake, plain(2)).unwrap();
    fake.log();
    old.reattach(&new, &units, &fake, plain(1)).unwrap();
    fake.expect(&[
        CLEARED,
        "tail",
        "context tag 1 device 0x0100",
        "iotlb tag 1 wr",
        "wait",
        FREE,
        "entry 1 = 0x202",
        "entry 0 = 0x5009001",
    ]);
    assert_eq!((old.devices(), new.devices()), (0, 2));
}

#[test]
fn register_mode_detaches_with_the_same_commands() {
    let fake = Fake::new(CAP, ECAP);
    let units = [unit_up(&fake, WITHOUT_QUEUE)];
    let domain = domain(7);
    domain.attach(&units, &fake, plain(1)).unwrap();
    fake.log();
    domain.detach(&units, &fake, 0, SourceId::at(1, 0, 0).unwrap()).unwrap();
    let commands = ["register context tag 1 device 0x0100", "register iotlb tag 1 wr"];
    fake.expect(&[CLEARED, commands[0], commands[1], FREE]);
}

#[test]
fn a_device_that_is_gone_gets_no_command_and_is_not_attached_again() {
    let fake = Fake::new(CAP, ECAP);
    let units = [unit_up(&fake, WITH_QUEUE)];
    let domain = domain(7);
    let device = caching(0, 1, 1);
    domain.attach(&units, &fake, device).unwrap();
    units[0].device_gone(device.source).unwrap();
    fake.log();
    domain.detach(&units, &fake, 0, device.source).unwrap();
    assert_eq!(fake.commands(), ["context tag 1 device 0x0100", "iotlb tag 1 wr"]);
    assert_eq!(domain.attach(&units, &fake, device), Err(AttachError::Gone));
    units[0].device_returned(device.source);
    domain.attach(&units, &fake, device).unwrap();
}

#[test]
fn a_detach_whose_flush_failed_keeps_member_and_tag_until_it_is_repeated() {
    let fake = Fake::new(CAP, ECAP);
    let units = [unit_up(&fake, WITH_QUEUE)];
    let domain = domain(7);
    domain.attach(&units, &fake, plain(1)).unwrap();
    fake.set(|hardware| hardware.mood = Mood::Deaf);
    let failed = domain.detach(&units, &fake, 0, SourceId::at(1, 0, 0).unwrap());
    assert_eq!(failed, Err(DetachError::Command(CommandError::Deadline)));
    assert_eq!((domain.devices(), domain.tag(0)), (1, Some(Tag::new(1))));
    // The entry is not present all the same, and nobody else gets the tag.
    let other = super::domain(8);
    other.attach(&units, &fake, plain(2)).unwrap();
    assert_eq!(other.tag(0), Some(Tag::new(2)));
    fake.set(|hardware| hardware.mood = Mood::Prompt);
    for taker in [&domain, &other] {
        assert_eq!(taker.attach(&units, &fake, plain(1)), Err(AttachError::Taken), "not before");
    }
    domain.detach(&units, &fake, 0, SourceId::at(1, 0, 0).unwrap()).unwrap();
    assert_eq!(units[0].owner(Tag::new(1)), None);
    other.attach(&units, &fake, plain(1)).unwrap();
}

#[test]
fn an_attach_that_hardware_was_not_told_of_is_undone_or_stays_a_member() {
    let fake = Fake::new(CAP | CAP_CM, ECAP);
    let units = [unit_up(&fake, WITH_QUEUE)];
    let domain = domain(7);
    fake.set(|hardware| hardware.mood = Mood::Deaf);
    let failed = domain.attach(&units, &fake, plain(1));
    assert_eq!(failed, Err(AttachError::StillMember(CommandError::Deadline)));
    assert_eq!(domain.devices(), 1);
    assert!(fake.log().contains(&CLEARED.into()), "not left present");
    fake.set(|hardware| hardware.mood = Mood::Prompt);
    domain.detach(&units, &fake, 0, SourceId::at(1, 0, 0).unwrap()).unwrap();
    // Only the commands of the attach are refused: the undoing ones complete.
    fake.set(|hardware| hardware.refuse = Some((0xffff_003f, 0x0000_0031)));
    let failed = domain.attach(&units, &fake, plain(1));
    assert_eq!(failed, Err(AttachError::Command(CommandError::Refused)));
    assert_eq!((domain.devices(), units[0].owner(Tag::new(1))), (0, None));
}

#[test]
fn attaches_that_fail_take_no_tag_and_change_no_entry() {
    let fake = Fake::new(CAP & !(1 << 11), ECAP & !4);
    let units = [unit_up(&fake, WITH_QUEUE)];
    let holder = domain(7);
    holder.attach(&units, &fake, plain(1)).unwrap();
    fake.log();
    #[track_caller]
    fn check(units: &[super::TestUnit<'_>], fake: &Fake, device: Device, error: AttachError) {
        let domain = domain(8);
        for _ in 0..10 {
            assert_eq!(domain.attach(units, fake, device), Err(error));
        }
        assert_eq!((domain.devices(), domain.tag(0)), (0, None));
        assert_eq!(units[0].owner(Tag::new(2)), None, "the pool does not shrink");
        fake.expect(&[]);
    }
    check(&units, &fake, plain(1), AttachError::Taken);
    assert_eq!(holder.attach(&units, &fake, plain(1)), Err(AttachError::Taken));
    assert_eq!(holder.devices(), 1, "it stays attached");
    check(&units, &fake, Device { unit: 1, ..plain(2) }, AttachError::NoUnit);
    check(&units, &fake, caching(0, 2, 1), AttachError::DeviceTlb);
    check(&units, &fake, caching(0, 2, 0), AttachError::DeviceTlb);
    let pages = fake.run_out_of_pages();
    check(&units, &fake, plain(3), AttachError::NoMemory);
    fake.pages_back(pages);
    let down = [unit(&fake, WITH_QUEUE)];
    assert_eq!(domain(8).attach(&down, &fake, plain(3)), Err(AttachError::Down));
    let moved = domain(8).reattach(&holder, &units, &fake, plain(3));
    assert_eq!(moved, Err(MoveError::Detach(DetachError::NotMember)));
}

#[test]
fn a_device_tlb_takes_between_one_and_thirty_two_invalidations_at_a_time() {
    let fake = Fake::new(CAP, ECAP);
    let units = [unit_up(&fake, WITH_QUEUE)];
    for (pending, result) in [
        (0, Err(AttachError::DeviceTlb)),
        (1, Ok(())),
        (32, Ok(())),
        (33, Err(AttachError::DeviceTlb)),
    ] {
        let device = caching(0, pending, pending);
        assert_eq!(domain(7).attach(&units, &fake, device), result, "{pending}");
    }
}

#[test]
fn tables_the_unit_cannot_walk_are_refused() {
    // Without 4-level walks; without 1 GiB leaves.
    for cap in [CAP & !(1 << 10), CAP & !(1 << 35)] {
        let fake = Fake::new(cap, ECAP);
        let units = [unit_up(&fake, WITH_QUEUE)];
        assert_eq!(domain(7).attach(&units, &fake, plain(1)), Err(AttachError::Tables));
    }
}

#[test]
fn a_tag_serves_the_next_domain_only_after_its_last_device_left() {
    let fake = Fake::new(CAP & !7, ECAP);
    let units = [unit_up(&fake, WITH_QUEUE)];
    let domains: Vec<_> = (1..=15).map(domain).collect();
    for (bus, own) in (1..).zip(&domains) {
        own.attach(&units, &fake, plain(bus)).unwrap();
    }
    domains[0].attach(&units, &fake, plain(100)).unwrap();
    let late = domain(99);
    assert_eq!(late.attach(&units, &fake, plain(50)), Err(AttachError::NoTag));
    domains[0].detach(&units, &fake, 0, SourceId::at(1, 0, 0).unwrap()).unwrap();
    assert_eq!(late.attach(&units, &fake, plain(50)), Err(AttachError::NoTag));
    domains[0].detach(&units, &fake, 0, SourceId::at(100, 0, 0).unwrap()).unwrap();
    late.attach(&units, &fake, plain(50)).unwrap();
    assert_eq!(late.tag(0), Some(Tag::new(1)));
}
