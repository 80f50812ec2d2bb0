//! Bringing a unit up and shutting it down, with hardware that fails at any step.

use super::fake::{CAP, ECAP, Fake, Mood, QUEUE, WITH_QUEUE, WITHOUT_QUEUE};
use super::{domain, plain, unit, unit_up};
use crate::{BringUpError, CommandError, QueueMemory, UnitConfig};
use flush::Mfn;

#[test]
fn a_unit_with_a_queue_comes_up_in_the_order_that_works() {
    let fake = Fake::new(CAP, ECAP);
    let unit = unit(&fake, WITH_QUEUE);
    unit.bring_up(&fake).unwrap();
    fake.expect(&[
        "root pointer",
        "queue on",
        "tail",
        "context all",
        "iotlb all wr",
        "wait",
        "translation on",
    ]);
    assert_eq!(fake.root(), Mfn::new(0x1000));
    let counters = unit.counters();
    assert_eq!((counters.context_commands, counters.iotlb_commands), (1, 1));
    assert_eq!((counters.waits, counters.tail_writes, counters.register_commands), (1, 1, 0));
}

#[test]
fn a_unit_without_a_queue_uses_its_command_registers() {
    for (ecap, config) in [(ECAP, WITHOUT_QUEUE), (ECAP & !2, WITH_QUEUE)] {
        let fake = Fake::new(CAP, ecap);
        let unit = unit(&fake, config);
        assert!(!unit.uses_queue());
        unit.bring_up(&fake).unwrap();
        fake.expect(&[
            "root pointer",
            "register context all",
            "register iotlb all wr",
            "translation on",
        ]);
        assert_eq!(unit.counters().register_commands, 2);
    }
}

#[test]
fn what_firmware_left_on_is_turned_off_first() {
    let fake = Fake::new(CAP, ECAP);
    fake.set(|hardware| {
        hardware.gsts = 1 << 31 | 1 << 26;
        hardware.fsts = 1 << 4 | 1;
        hardware.records[2] = (0x1000, 1 << 63);
    });
    unit(&fake, WITH_QUEUE).bring_up(&fake).unwrap();
    assert_eq!(fake.log()[..3], ["translation off", "queue off", "root pointer"]);
    fake.set(|hardware| assert_eq!((hardware.fsts, hardware.records[2].1), (0, 0)));
}

#[test]
fn shutting_down_forgets_everything_and_turns_off_translation_before_the_queue() {
    let fake = Fake::new(CAP, ECAP);
    let unit = unit_up(&fake, WITH_QUEUE);
    unit.shut_down().unwrap();
    fake.expect(&["tail", "context all", "iotlb all wr", "wait", "translation off", "queue off"]);
    // It can come up again, on the root table it had.
    unit.bring_up(&fake).unwrap();
    assert_eq!(fake.root(), Mfn::new(0x1000));
}

/// Symptom: a second `shut_down` failed, as did one after an error in the middle. Cause:
/// it began with commands, for which the queue no longer ran. Cure: what is done is not
/// done again.
#[test]
fn shutting_down_again_goes_on_where_it_stopped() {
    let fake = Fake::new(CAP, ECAP);
    let unit = unit_up(&fake, WITH_QUEUE);
    fake.set(|hardware| hardware.mood = Mood::Stuck);
    assert_eq!(unit.shut_down(), Err(BringUpError::Stuck));
    fake.expect(&["tail", "context all", "iotlb all wr", "wait"]);
    assert_eq!(unit.shut_down(), Err(BringUpError::Stuck));
    fake.set(|hardware| hardware.mood = Mood::Prompt);
    assert_eq!(unit.shut_down(), Ok(()));
    fake.expect(&["translation off", "queue off"]);
    assert_eq!(unit.shut_down(), Ok(()));
    fake.expect(&[]);
}

/// Symptom: devices reached all of memory while a stopped queue was started again. Cause:
/// `bring_up` turned translation off first, whoever had turned it on. Cure: what this
/// crate turned on stays on, and only the queue starts again.
#[test]
fn starting_a_stopped_queue_again_keeps_attached_devices_translated() {
    let again = ["context all", "iotlb all wr"];
    for (config, steps) in
        [(WITH_QUEUE, &["queue off", "queue on", "tail"][..]), (WITHOUT_QUEUE, &[])]
    {
        let fake = Fake::new(CAP, ECAP);
        let units = [unit_up(&fake, config)];
        let domain = domain(7);
        domain.attach(&units, &fake, plain(1)).unwrap();
        if units[0].uses_queue() {
            units[0].locked(|state| state.queue.stop());
        }
        fake.log();
        units[0].bring_up(&fake).unwrap();
        let log = fake.log();
        assert_eq!(log[..steps.len()], *steps);
        for (line, command) in log[steps.len()..].iter().zip(again) {
            assert_eq!(line.trim_start_matches("register "), command);
        }
        assert!(log.iter().all(|line| !line.contains("translation")), "{log:?}");
        domain.detach(&units, &fake, 0, plain(1).source).unwrap();
    }
}

#[test]
fn translation_that_hardware_lost_is_turned_on_again() {
    let fake = Fake::new(CAP, ECAP);
    let unit = unit_up(&fake, WITH_QUEUE);
    fake.set(|hardware| {
        hardware.gsts = 0;
        hardware.forget_addresses();
    });
    unit.bring_up(&fake).unwrap();
    assert_eq!(fake.log().last().unwrap(), "translation on");
    assert_eq!(fake.root(), Mfn::new(0x1000));
}

/// Symptom: a unit whose queue was started again 64 times took no more commands. Cause:
/// status words past their deadline were never used again. Cure: once hardware showed its
/// queue as off, they are free.
#[test]
fn no_number_of_restarts_uses_the_status_words_up() {
    let fake = Fake::new(CAP, ECAP);
    let unit = unit_up(&fake, WITH_QUEUE);
    for round in 0..70 {
        fake.set(|hardware| hardware.mood = Mood::Deaf);
        assert!(unit.bring_up(&fake).is_err());
        fake.set(|hardware| hardware.mood = Mood::Prompt);
        assert_eq!(unit.bring_up(&fake), Ok(()), "round {round}");
    }
}

#[test]
fn every_step_that_hangs_ends_in_an_error_and_can_be_tried_again() {
    #[track_caller]
    fn check(mood: Mood, config: UnitConfig, error: BringUpError) {
        let fake = Fake::new(CAP, ECAP);
        let unit = unit(&fake, config);
        fake.set(|hardware| hardware.mood = mood);
        assert_eq!(unit.bring_up(&fake), Err(error), "{mood:?}");
        fake.set(|hardware| {
            assert_eq!(hardware.gsts >> 31, 0, "translation stays off");
            hardware.mood = Mood::Prompt;
        });
        // A register command that hung is over when its bit clears.
        fake.set(|hardware| hardware.finish_registers());
        unit.bring_up(&fake).unwrap();
    }
    let deadline = BringUpError::Invalidation(CommandError::Deadline);
    check(Mood::Stuck, WITH_QUEUE, BringUpError::Stuck);
    check(Mood::Deaf, WITH_QUEUE, deadline);
    check(Mood::Fetches, WITH_QUEUE, deadline);
    check(Mood::Deaf, WITHOUT_QUEUE, deadline);
}

#[test]
fn a_register_that_does_not_take_its_value_stops_the_bring_up() {
    // Root table address, queue tail, queue address.
    for lost in [0x20, 0x88, 0x90] {
        let fake = Fake::new(CAP, ECAP);
        let unit = unit_up(&fake, WITH_QUEUE);
        unit.shut_down().unwrap();
        fake.set(|hardware| hardware.forget_addresses());
        fake.set(|hardware| hardware.lost = Some(lost));
        assert_eq!(unit.bring_up(&fake), Err(BringUpError::Stuck), "{lost:#x}");
        fake.set(|hardware| hardware.lost = None);
        unit.bring_up(&fake).unwrap();
    }
}

#[test]
fn memory_that_cannot_serve_is_refused_before_anything_is_written() {
    #[track_caller]
    fn check(fake: &Fake, config: UnitConfig, error: BringUpError) {
        assert_eq!(unit(fake, config).bring_up(fake), Err(error));
        fake.expect(&[]);
    }
    let fake = Fake::new(CAP, ECAP);
    for (ring, order) in [(0x101, 1), (0x140, 7), (0x100, 8), (0x100, 64)] {
        let memory = QueueMemory { ring: Mfn::new(ring), order, status: QUEUE.status };
        let config = UnitConfig { queue: Some(memory), timeout_us: 100 };
        check(&fake, config, BringUpError::QueueMemory);
    }
    fake.run_out_of_pages();
    check(&fake, WITH_QUEUE, BringUpError::NoMemory);
}
