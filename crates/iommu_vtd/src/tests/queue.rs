//! The ring: wrap, completion, errors, deadlines, restart.

use std::vec::Vec;

use super::fake::{CAP, ECAP, Fake, Mood, QUEUE, WITH_QUEUE};
use super::{TestUnit, unit_up};
use crate::queue::{Ended, Queue, Refused, Ticket};
use crate::spec::descriptor::Descriptor;
use crate::submit::Started;
use crate::{Command, CommandError, Drain, Platform, Tag};

const DRAIN: Drain = Drain { writes: true, reads: true };

fn iotlb(tag: u16) -> Descriptor {
    Command::IotlbDomain { tag: Tag::new(tag) }.descriptor(DRAIN)
}

fn submit(unit: &TestUnit<'_>, commands: &[Descriptor]) -> Result<Ticket, Refused> {
    unit.locked(|state| state.queue.submit(&unit.port(&QUEUE), commands))
}

fn redeem(unit: &TestUnit<'_>, ticket: Ticket) -> Result<Result<(), Ended>, Ticket> {
    unit.locked(|state| state.queue.redeem(&unit.port(&QUEUE), ticket))
}

fn expire(unit: &TestUnit<'_>, ticket: Ticket) -> Option<Result<(), Ended>> {
    unit.locked(|state| state.queue.expire(&unit.port(&QUEUE), ticket))
}

fn recover(unit: &TestUnit<'_>) {
    unit.locked(|state| state.queue.recover(&unit.port(&QUEUE)));
}

fn start(unit: &TestUnit<'_>, tags: &[u16]) -> Started {
    let mut submitter = unit.open();
    for tag in tags {
        submitter.push(Command::IotlbDomain { tag: Tag::new(*tag) });
    }
    submitter.close()
}

/// Moves the ring's head and tail to `position` (of 256) by submissions that complete.
fn advance(unit: &TestUnit<'_>, fake: &Fake, position: u64) {
    loop {
        let mut head = 0;
        fake.set(|hardware| head = hardware.head);
        if head == position {
            break;
        }
        // One descriptor more than a wait if that does not overshoot by one.
        let commands = [iotlb(1)];
        let ticket = if (position + 256 - head) % 256 == 1 {
            submit(unit, &[])
        } else {
            submit(unit, &commands)
        };
        redeem(unit, ticket.unwrap()).unwrap().unwrap();
    }
    fake.log();
}

#[test]
fn the_ring_wraps_without_losing_a_command() {
    let fake = Fake::new(CAP, ECAP);
    let unit = unit_up(&fake, WITH_QUEUE);
    for round in 0..200_u16 {
        let tags: Vec<_> = (1..=round % 7 + 1).collect();
        unit.finish(start(&unit, &tags)).unwrap();
        let expected: Vec<_> = tags.iter().map(|tag| std::format!("iotlb tag {tag} wr")).collect();
        assert_eq!(fake.commands(), expected, "{round}");
    }
}

#[test]
fn a_full_ring_is_told_from_an_empty_one_and_refuses_more() {
    let fake = Fake::new(CAP, ECAP);
    let unit = unit_up(&fake, WITH_QUEUE);
    for position in [0, 1, 100, 255] {
        advance(&unit, &fake, position);
        fake.set(|hardware| hardware.mood = Mood::Deaf);
        // 255 of 256 places: 5 x 51.
        let commands = [iotlb(3); 50];
        let tickets: Vec<_> = (0..5).map(|_| submit(&unit, &commands).unwrap()).collect();
        assert_eq!(submit(&unit, &[]).unwrap_err(), Refused::Full);
        fake.set(|hardware| hardware.mood = Mood::Prompt);
        fake.go_on();
        for ticket in tickets {
            redeem(&unit, ticket).unwrap().unwrap();
        }
        assert_eq!(fake.commands().len(), 250);
    }
}

#[test]
fn what_was_fetched_makes_room_before_it_completes_but_status_words_run_out() {
    let fake = Fake::new(CAP, ECAP);
    let unit = unit_up(&fake, WITH_QUEUE);
    fake.set(|hardware| hardware.mood = Mood::Fetches);
    let commands = [iotlb(3); 60];
    let tickets: Vec<_> = (0..64).map(|_| submit(&unit, &commands).unwrap()).collect();
    assert_eq!(submit(&unit, &commands).unwrap_err(), Refused::Full);
    fake.complete();
    for ticket in tickets {
        redeem(&unit, ticket).unwrap().unwrap();
    }
}

#[test]
fn a_ticket_is_not_redeemed_before_its_own_completion() {
    let fake = Fake::new(CAP, ECAP);
    let unit = unit_up(&fake, WITH_QUEUE);
    fake.set(|hardware| hardware.mood = Mood::Fetches);
    let first = submit(&unit, &[iotlb(1)]).unwrap();
    let first = redeem(&unit, first).unwrap_err();
    fake.complete();
    let second = submit(&unit, &[iotlb(2)]).unwrap();
    redeem(&unit, first).unwrap().unwrap();
    assert!(redeem(&unit, second).is_err());
}

#[test]
fn a_status_word_is_cleared_before_reuse_and_foreign_data_in_it_satisfies_nobody() {
    let fake = Fake::new(CAP, ECAP);
    let unit = unit_up(&fake, WITH_QUEUE);
    unit.finish(start(&unit, &[1])).unwrap();
    fake.set(|hardware| hardware.mood = Mood::Fetches);
    let ticket = submit(&unit, &[]).unwrap();
    assert!(!QUEUE.looks_ended(&fake, &ticket));
    fake.write(QUEUE.status, 0, 1);
    let ticket = redeem(&unit, ticket).unwrap_err();
    fake.complete();
    redeem(&unit, ticket).unwrap().unwrap();
}

#[test]
fn a_head_register_that_runs_backwards_is_not_believed() {
    let fake = Fake::new(CAP, ECAP);
    let unit = unit_up(&fake, WITH_QUEUE);
    advance(&unit, &fake, 100);
    let is_idle = || unit.locked(|state| state.queue.is_idle(&unit.port(&QUEUE)));
    assert!(is_idle());
    fake.set(|hardware| hardware.head = 50);
    assert!(is_idle());
}

#[test]
fn a_status_word_past_its_deadline_is_not_reused_and_its_late_write_satisfies_nobody() {
    let fake = Fake::new(CAP, ECAP);
    let unit = unit_up(&fake, WITH_QUEUE);
    fake.set(|hardware| hardware.mood = Mood::Fetches);
    assert_eq!(unit.finish(start(&unit, &[1])), Err(CommandError::Deadline));
    // All other words can be taken, this one cannot.
    let tickets: Vec<_> = (0..63).map(|_| submit(&unit, &[]).unwrap()).collect();
    assert_eq!(submit(&unit, &[]).unwrap_err(), Refused::Full);
    let mut waiting = Vec::new();
    for ticket in tickets {
        waiting.push(redeem(&unit, ticket).unwrap_err());
    }
    // The late completion frees the word; it is not taken for one of the others.
    fake.complete();
    for ticket in waiting {
        redeem(&unit, ticket).unwrap().unwrap();
    }
    let tickets: Vec<_> = (0..64).map(|_| submit(&unit, &[]).unwrap()).collect();
    for ticket in tickets {
        assert!(redeem(&unit, ticket).is_err());
    }
    assert_eq!(unit.counters().expired, 1);
}

#[test]
fn a_completion_between_the_last_poll_and_the_deadline_counts() {
    let fake = Fake::new(CAP, ECAP);
    let unit = unit_up(&fake, WITH_QUEUE);
    let ticket = submit(&unit, &[iotlb(1)]).unwrap();
    assert_eq!(expire(&unit, ticket), Some(Ok(())));
}

#[test]
fn a_refused_descriptor_fails_its_submission_and_no_other_wherever_it_sits() {
    for position in [0, 3, 250, 252, 253, 254, 255] {
        for bad in 0..4 {
            let fake = Fake::new(CAP, ECAP);
            let unit = unit_up(&fake, WITH_QUEUE);
            advance(&unit, &fake, position);
            let before = start(&unit, &[5, 6]);
            let mut commands = [iotlb(10), iotlb(11), iotlb(12), iotlb(13)];
            commands[bad].low |= 0xf;
            fake.set(|hardware| hardware.refuse = Some((0xf, 0xf)));
            let failed = submit(&unit, &commands).unwrap();
            let after = start(&unit, &[7, 8]);
            recover(&unit);
            let end = redeem(&unit, failed).unwrap();
            assert_eq!(end, Err(Ended::Failed), "bad {bad} at {position}");
            unit.finish(before).unwrap();
            unit.finish(after).unwrap();
            let mut expected: Vec<_> = [5, 6].to_vec();
            expected.extend((10..).take(bad));
            expected.extend([7, 8]);
            let lines: Vec<_> =
                expected.iter().map(|tag| std::format!("iotlb tag {tag} wr")).collect();
            assert_eq!(fake.commands(), lines);
            fake.set(|hardware| assert_eq!(hardware.fsts, 0));
        }
    }
}

#[test]
fn a_refused_wait_does_not_report_success() {
    let fake = Fake::new(CAP, ECAP);
    let unit = unit_up(&fake, WITH_QUEUE);
    fake.set(|hardware| hardware.mood = Mood::Deaf);
    let first = submit(&unit, &[iotlb(1)]).unwrap();
    let second = submit(&unit, &[iotlb(2)]).unwrap();
    // Refuse exactly the first submission's wait, by its data.
    let wait = fake.word(QUEUE.ring, 2 * 4);
    assert_eq!(wait & 0xf, 5);
    fake.set(|hardware| {
        hardware.refuse = Some((u64::MAX, wait));
        hardware.mood = Mood::Prompt;
    });
    fake.go_on();
    recover(&unit);
    assert_eq!(redeem(&unit, first).unwrap(), Err(Ended::Failed));
    redeem(&unit, second).unwrap().unwrap();
}

#[test]
fn waiting_notices_a_refusal_by_itself_and_counts_the_replacing_waits() {
    let fake = Fake::new(CAP, ECAP);
    let unit = unit_up(&fake, WITH_QUEUE);
    let before = unit.counters();
    fake.set(|hardware| hardware.refuse = Some((0xffff_000f, 0x0002_0002)));
    let good = start(&unit, &[1]);
    let bad = start(&unit, &[2, 3]);
    assert_eq!(unit.finish(bad), Err(CommandError::Refused));
    unit.finish(good).unwrap();
    let after = unit.counters();
    assert_eq!(after.refused - before.refused, 1);
    // Two submissions' waits, and three descriptors that became waits.
    assert_eq!(after.waits - before.waits, 5);
    assert_eq!(after.tail_writes - before.tail_writes, 3);
}

#[test]
fn an_error_without_a_descriptor_stops_the_queue_and_ends_every_submission() {
    let fake = Fake::new(CAP, ECAP);
    let unit = unit_up(&fake, WITH_QUEUE);
    fake.set(|hardware| hardware.mood = Mood::Fetches);
    let waiting = start(&unit, &[1]);
    fake.set(|hardware| hardware.fsts = 1 << 4);
    assert_eq!(unit.finish(waiting), Err(CommandError::Refused));
    assert_eq!(unit.finish(start(&unit, &[1])), Err(CommandError::Stopped));
    fake.set(|hardware| {
        hardware.forget_waits();
        hardware.mood = Mood::Prompt;
    });
    unit.bring_up(&fake).unwrap();
    unit.finish(start(&unit, &[1])).unwrap();
    // Hardware had turned its queue off: every word can be used again.
    let tickets: Vec<_> = (0..64).map(|_| submit(&unit, &[]).unwrap()).collect();
    for ticket in tickets {
        redeem(&unit, ticket).unwrap().unwrap();
    }
}

#[test]
fn a_restart_ends_what_was_in_flight_and_no_late_write_of_it_satisfies_anybody() {
    let fake = Fake::new(CAP, ECAP);
    let unit = unit_up(&fake, WITH_QUEUE);
    fake.set(|hardware| hardware.mood = Mood::Fetches);
    let late = submit(&unit, &[iotlb(1)]).unwrap();
    let waiting = submit(&unit, &[iotlb(2)]).unwrap();
    assert_eq!(expire(&unit, late), None);
    // Neither completes before the queue starts again.
    let mut never = Vec::new();
    fake.set(|hardware| {
        never = hardware.forget_waits();
        hardware.mood = Mood::Prompt;
    });
    unit.bring_up(&fake).unwrap();
    assert_eq!(redeem(&unit, waiting).unwrap(), Err(Ended::Failed));
    // Hardware carries them out all the same, against the manual: while the words serve
    // others, and after those others have completed.
    fake.set(|hardware| hardware.mood = Mood::Fetches);
    for after in [false, true] {
        let tickets: Vec<_> = (0..64).map(|_| submit(&unit, &[]).unwrap()).collect();
        let mut own = Vec::new();
        fake.set(|hardware| own = hardware.forget_waits());
        for waits in if after { [&own, &never] } else { [&never, &own] } {
            fake.set(|hardware| hardware.remember_waits(waits.clone()));
            fake.complete();
        }
        let mut lost = Vec::new();
        for (slot, ticket) in tickets.into_iter().enumerate() {
            match redeem(&unit, ticket) {
                Ok(end) => end.unwrap(),
                Err(ticket) => {
                    lost.push(slot);
                    assert_eq!(expire(&unit, ticket), None, "no success");
                }
            }
        }
        assert_eq!(lost, if after { [0, 1].as_slice() } else { &[] });
    }
}

/// Submissions of 1 to 3 commands with their waits; a time-out when hardware has
/// executed `done` descriptors and fetched `fetched`.
#[track_caller]
fn check_time_out(position: u64, done: usize, fetched: usize) {
    let fake = Fake::new(CAP, ECAP);
    let unit = unit_up(&fake, WITH_QUEUE);
    advance(&unit, &fake, position);
    fake.set(|hardware| hardware.mood = Mood::Deaf);
    let all = [iotlb(1), iotlb(2), iotlb(3)];
    let sizes = [1, 3, 2, 1, 2];
    let tickets: Vec<_> = sizes.iter().map(|size| submit(&unit, &all[..*size]).unwrap()).collect();
    for (mood, fetches) in [(Mood::Prompt, done), (Mood::Fetches, fetched - done)] {
        fake.set(|hardware| (hardware.mood, hardware.fetches) = (mood, fetches));
        fake.go_on();
    }
    fake.set(|hardware| (hardware.mood, hardware.fetches) = (Mood::Prompt, usize::MAX));
    fake.time_out();
    recover(&unit);
    let mut first = 0;
    for (slot, (ticket, size)) in tickets.into_iter().zip(sizes).enumerate() {
        let next = first + size + 1;
        let untouched = next <= done || first >= fetched;
        let expected = if untouched { Ok(()) } else { Err(Ended::Aborted) };
        if !untouched {
            // Not even late, by a wait that was still in the ring.
            assert_eq!(fake.word(QUEUE.status, slot), u64::MAX);
        }
        let end = redeem(&unit, ticket).expect("over");
        assert_eq!(end, expected, "{first} at {position}: {done} done, {fetched} fetched");
        first = next;
    }
    // Every status word is free again.
    let tickets: Vec<_> = (0..64).map(|_| submit(&unit, &[]).unwrap()).collect();
    for ticket in tickets {
        redeem(&unit, ticket).unwrap().unwrap();
    }
}

#[test]
fn a_time_out_ends_each_submission_exactly_one_way_wherever_the_head_is() {
    for position in [0, 1, 120, 240, 241, 242, 243, 245, 250, 253, 254, 255] {
        for fetched in 0..=14 {
            for done in 0..=fetched {
                check_time_out(position, done, fetched);
            }
        }
    }
}

#[test]
fn a_time_out_lets_go_of_words_that_were_past_their_deadline() {
    let fake = Fake::new(CAP, ECAP);
    let unit = unit_up(&fake, WITH_QUEUE);
    fake.set(|hardware| hardware.mood = Mood::Fetches);
    let late = submit(&unit, &[iotlb(1)]).unwrap();
    assert_eq!(expire(&unit, late), None);
    fake.time_out();
    recover(&unit);
    fake.set(|hardware| hardware.mood = Mood::Prompt);
    let tickets: Vec<_> = (0..64).map(|_| submit(&unit, &[]).unwrap()).collect();
    for ticket in tickets {
        redeem(&unit, ticket).unwrap().unwrap();
    }
}

#[test]
fn a_completion_error_aborts_nothing_and_is_cleared() {
    let fake = Fake::new(CAP, ECAP);
    let unit = unit_up(&fake, WITH_QUEUE);
    fake.set(|hardware| hardware.mood = Mood::Fetches);
    let ticket = submit(&unit, &[iotlb(1)]).unwrap();
    fake.set(|hardware| hardware.fsts = 1 << 5);
    recover(&unit);
    let ticket = redeem(&unit, ticket).unwrap_err();
    fake.complete();
    redeem(&unit, ticket).unwrap().unwrap();
    fake.set(|hardware| assert_eq!(hardware.fsts, 0));
}

/// Symptom: a flush of another CPU during a restart left the queue off. Cause: it was let
/// in before hardware had the queue on, and moved the tail. Cure: it is refused until then.
#[test]
fn a_queue_takes_nothing_between_its_reset_and_its_start() {
    let mut queue = Queue::new();
    let fake = Fake::new(CAP, ECAP);
    let unit = unit_up(&fake, WITH_QUEUE);
    let port = unit.port(&QUEUE);
    queue.reset(&port);
    assert!(matches!(queue.submit(&port, &[]), Err(Refused::Stopped)));
    fake.set(|hardware| hardware.head = 0);
    queue.run();
    let _ticket = queue.submit(&port, &[]).unwrap();
}

#[test]
fn status_data_never_repeats_zero_or_the_nudge() {
    let mut queue = Queue::new();
    let fake = Fake::new(CAP, ECAP);
    let unit = unit_up(&fake, WITH_QUEUE);
    let port = unit.port(&QUEUE);
    queue.reset(&port);
    queue.run();
    fake.set(|hardware| {
        hardware.mood = Mood::Fetches;
        hardware.head = 0;
    });
    queue.set_last_data(u32::MAX - 2);
    let mut data = Vec::new();
    for index in 0..3 {
        let _ticket = queue.submit(&port, &[]).unwrap();
        data.push(fake.word(QUEUE.ring, 2 * index) >> 32);
    }
    assert_eq!(data, [0xffff_fffe, 1, 2]);
}

#[test]
fn many_threads_share_one_ring_and_each_gets_its_own_answer() {
    let fake = Fake::new(CAP, ECAP);
    let unit = unit_up(&fake, WITH_QUEUE);
    fake.set(|hardware| hardware.refuse = Some((0xffff_000f, 0x0063_0002)));
    std::thread::scope(|scope| {
        for thread in 0..4_u16 {
            let unit = &unit;
            scope.spawn(move || {
                for round in 0..200 {
                    // The last thread's every fourth submission is refused.
                    let bad = thread == 3 && round % 4 == 0;
                    let tags = [thread + 1, if bad { 0x63 } else { 9 }];
                    let end = unit.finish(start(unit, &tags));
                    let expected = if bad { Err(CommandError::Refused) } else { Ok(()) };
                    assert_eq!(end, expected, "thread {thread}, round {round}");
                }
            });
        }
    });
}
