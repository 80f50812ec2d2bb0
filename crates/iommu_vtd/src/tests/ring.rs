//! Two submitters on one ring: every error, at every position, at every moment.
//!
//! Each submission ends exactly one way: done, aborted and submitted again, or failed. The
//! universe is small enough to go through: 256 positions in the ring, 1 to 3 commands a
//! submission, each number of descriptors executed and fetched when the error comes.

use std::vec::Vec;

use super::fake::{CAP, ECAP, Fake, Mood, QUEUE, WITH_QUEUE};
use super::{TestUnit, unit_up};
use crate::queue::{Ended, Ticket};
use crate::spec::descriptor::Descriptor;
use crate::{Command, Drain, Tag};

const RING: u64 = 256;
/// The ring was gone round this often before.
const ROUNDS: u64 = 5;

/// Bits of the fault status register (11.4.7.1).
const QUEUE_ERROR: u32 = 1 << 4;
const COMPLETION: u32 = 1 << 5;
const TIME_OUT: u32 = 1 << 6;

/// What goes wrong.
#[derive(Clone, Copy, Debug)]
struct Case {
    /// Where in the ring the first command lies.
    position: u64,
    /// Commands of the two submissions.
    commands: [usize; 2],
    /// Descriptors that hardware had executed.
    done: usize,
    /// Descriptors that it had fetched. The next is the one it refuses, if it does.
    fetched: usize,
    /// Error bits.
    errors: u32,
    /// The first submission was given up before.
    late: bool,
}

/// How a submission ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum End {
    Done,
    Aborted,
    Failed,
}

impl Case {
    /// First descriptor and wait of a submission, counted from the first of all.
    fn place(&self, submission: usize) -> (usize, usize) {
        let first = if submission == 0 { 0 } else { self.commands[0] + 1 };
        (first, first + self.commands[submission])
    }

    /// What the manual says must become of a submission (6.5.2.11).
    fn end(&self, submission: usize) -> End {
        let (first, wait) = self.place(submission);
        if wait < self.done {
            // Executed before anything went wrong.
            return End::Done;
        }
        if self.errors & TIME_OUT != 0 && first < self.fetched {
            return End::Aborted;
        }
        let refused = first <= self.fetched && self.fetched <= wait;
        if self.errors & QUEUE_ERROR != 0 && refused { End::Failed } else { End::Done }
    }
}

fn tag(submission: usize, command: usize) -> u16 {
    (10 * (submission + 1) + command) as u16
}

fn line(submission: usize, command: usize) -> std::string::String {
    std::format!("iotlb tag {} wr", tag(submission, command))
}

struct Bench<'f> {
    fake: &'f Fake,
    unit: TestUnit<'f>,
}

impl Bench<'_> {
    fn submit(&self, submission: usize, commands: usize) -> Ticket {
        let drain = Drain { writes: true, reads: true };
        let command = |command| Command::IotlbDomain { tag: Tag::new(tag(submission, command)) };
        let commands: Vec<Descriptor> =
            (0..commands).map(|number| command(number).descriptor(drain)).collect();
        let port = self.unit.port(&QUEUE);
        self.unit.locked(|state| state.queue.submit(&port, &commands)).expect("room")
    }

    fn redeem(&self, ticket: Ticket) -> Result<End, Ticket> {
        let port = self.unit.port(&QUEUE);
        let end = self.unit.locked(|state| state.queue.redeem(&port, ticket))?;
        Ok(match end {
            Ok(()) => End::Done,
            Err(Ended::Aborted) => End::Aborted,
            Err(Ended::Failed) => End::Failed,
        })
    }

    fn recover(&self) {
        self.unit.locked(|state| state.queue.recover(&self.unit.port(&QUEUE)));
    }

    /// The low word of a descriptor in the ring.
    fn low_word(&self, case: &Case, descriptor: usize) -> u64 {
        let index = (case.position + descriptor as u64) % RING;
        self.fake.word(QUEUE.ring, 2 * index as usize)
    }

    #[track_caller]
    fn run(&self, case: &Case) {
        let (fake, port) = (self.fake, self.unit.port(&QUEUE));
        fake.set(|hardware| {
            hardware.place(case.position);
            hardware.mood = Mood::Deaf;
            hardware.refuse = None;
        });
        self.unit.locked(|state| state.queue.place(ROUNDS * RING + case.position));
        fake.log();
        let mut tickets = [0, 1].map(|number| Some(self.submit(number, case.commands[number])));

        // Some are executed, some fetched, one is refused.
        for (mood, fetches) in
            [(Mood::Prompt, case.done), (Mood::Fetches, case.fetched - case.done)]
        {
            fake.set(|hardware| (hardware.mood, hardware.fetches) = (mood, fetches));
            fake.go_on();
        }
        if case.errors & QUEUE_ERROR != 0 {
            let bad = self.low_word(case, case.fetched);
            fake.set(|hardware| (hardware.refuse, hardware.fetches) = (Some((u64::MAX, bad)), 1));
            fake.go_on();
        }
        if case.late
            && let Some(ticket) = tickets[0].take()
        {
            let ended = self.unit.locked(|state| state.queue.expire(&port, ticket));
            // Only one that hardware had completed is not given up.
            let completed = (case.place(0).1 < case.done).then_some(Ok(()));
            assert_eq!(ended, completed, "{case:?}");
        }
        if case.errors & TIME_OUT != 0 {
            fake.time_out();
        }
        fake.set(|hardware| {
            hardware.fsts |= case.errors & COMPLETION;
            assert_eq!(hardware.fsts, case.errors, "{case:?}");
            (hardware.mood, hardware.fetches) = (Mood::Prompt, usize::MAX);
        });

        // Both submitters find it.
        self.recover();
        self.recover();
        let mut again = Vec::new();
        for _attempt in 0..2 {
            for number in [1, 0] {
                let Some(ticket) = tickets[number].take() else { continue };
                if case.end(number) != End::Done {
                    // Hardware went on, and no wait of this one was left in the ring.
                    let word = fake.word(QUEUE.status, ticket.word());
                    assert_eq!(word, u64::MAX, "{case:?}: {number} was completed late");
                }
                match self.redeem(ticket) {
                    Ok(end) => {
                        assert_eq!(end, case.end(number), "{case:?}: {number}");
                        if end == End::Aborted {
                            again.push(number);
                        }
                    }
                    Err(ticket) => tickets[number] = Some(ticket),
                }
            }
            // Waits that were fetched before, and not dropped, come last.
            fake.complete();
        }
        assert!(tickets.iter().all(Option::is_none), "{case:?}: one never ended");

        let log = fake.commands();
        for number in [0, 1] {
            let (first, _) = case.place(number);
            let seen = |command| log.contains(&line(number, command));
            for command in 0..case.commands[number] {
                match case.end(number) {
                    End::Done => assert!(seen(command), "{case:?}: done, and was not"),
                    End::Failed if first + command >= case.fetched => {
                        assert!(!seen(command), "{case:?}: carried out behind the refused one");
                    }
                    End::Aborted | End::Failed => {}
                }
            }
        }
        fake.set(|hardware| hardware.refuse = None);
        for number in again {
            let ticket = self.submit(number, case.commands[number]);
            assert!(matches!(self.redeem(ticket), Ok(End::Done)), "{case:?}: again");
            let log = fake.commands();
            assert!((0..case.commands[number]).all(|command| log.contains(&line(number, command))));
        }
        fake.set(|hardware| assert_eq!(hardware.fsts, 0, "{case:?}"));
        let free = self.unit.locked(|state| {
            assert!(state.queue.is_idle(&port), "{case:?}");
            state.queue.free_words(&port)
        });
        assert_eq!(free, 64, "{case:?}: a status word is lost");
    }
}

/// Every case with these error bits.
fn check(errors: u32) -> u64 {
    let fake = Fake::new(CAP, ECAP);
    let bench = Bench { fake: &fake, unit: unit_up(&fake, WITH_QUEUE) };
    let mut cases = 0;
    for position in 0..RING {
        for (first, second) in (1..=3).flat_map(|first| (1..=3).map(move |second| (first, second)))
        {
            let descriptors = first + second + 2;
            // A refused one has to be there.
            let last = descriptors - usize::from(errors & QUEUE_ERROR != 0);
            for fetched in 0..=last {
                for done in 0..=fetched {
                    // Giving up depends on the position only where submissions wrap.
                    let late = position % 8 == 0 || position >= RING - 8;
                    for late in [false, true].into_iter().take(1 + usize::from(late)) {
                        let commands = [first, second];
                        bench.run(&Case { position, commands, done, fetched, errors, late });
                        cases += 1;
                    }
                }
            }
        }
    }
    cases
}

#[test]
fn a_time_out_anywhere_ends_each_of_two_submissions_exactly_one_way() {
    assert_eq!(check(TIME_OUT), check_count(0));
}

#[test]
fn a_completion_error_anywhere_ends_no_submission() {
    assert_eq!(check(COMPLETION), check_count(0));
}

#[test]
fn both_device_errors_at_once_end_each_submission_exactly_one_way() {
    assert_eq!(check(TIME_OUT | COMPLETION), check_count(0));
}

#[test]
fn a_refused_descriptor_anywhere_ends_its_submission_and_no_other() {
    assert_eq!(check(QUEUE_ERROR), check_count(1));
}

#[test]
fn a_refused_descriptor_behind_a_time_out_ends_each_submission_exactly_one_way() {
    assert_eq!(check(QUEUE_ERROR | TIME_OUT), check_count(1));
}

/// How many cases there are, `fewer` moments less each.
fn check_count(fewer: u64) -> u64 {
    let sizes = (1..=3_u64).flat_map(|first| (1..=3).map(move |second| first + second + 3 - fewer));
    // Of n moments, two in order: executed so far, fetched so far.
    (RING + RING / 8 + 7) * sizes.map(|moments| moments * (moments + 1) / 2).sum::<u64>()
}
