//! Interleavings of one flush with a CPU that enters, works and leaves.
//!
//! The steps are those of `enter`, `serve`, `leave` and of `TlbFlush`, taken apart at
//! each shared access. A schedule says who takes the next one, and all schedules of a
//! length are tried. Each fault leaves one step out or out of order, and the same search
//! has to find the harm that it does.

use std::{collections::BTreeMap, format, string::String, vec::Vec};

use super::*;
use crate::{
    hardware::svm::{AsidPool, FlushByAsid, Tag, TlbControl, VcpuAsid},
    testing::DOMAIN,
};

const CPU: usize = 1;
/// How many choices of a schedule are searched exhaustively.
const CHOICES: u32 = 16;
/// After those both take turns; who is not done by then never will be.
const LIMIT: u32 = 60;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Hardware {
    /// One tag for the p2m: EPT.
    Table,
    /// One tag for each vCPU, two of which take turns: NPT.
    Vcpu(FlushByAsid),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fault {
    None,
    SnapshotBeforeMark,
    NoMark,
    NoKick,
    NoWait,
    EntryIgnoresMark,
    LooksBeforeJoining,
    ServeNotesWhatItDidNotSee,
    LeaveNotesFirst,
}

/// How many steps the flush has.
const FLUSHED: u32 = 6;

/// What the CPU does next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Step {
    Join,
    Look,
    Guest,
    /// In the guest until kicked.
    Stay,
    ServeSample,
    ServeObey,
    ServeNote,
    LeaveGone,
    LeaveNote,
}

/// The CPU's stays in the guest, each entered anew; the last one lasts until a kick.
fn program(hardware: Hardware, fault: Fault) -> Vec<Step> {
    let entry = if fault == Fault::LooksBeforeJoining {
        [Step::Look, Step::Join]
    } else {
        [Step::Join, Step::Look]
    };
    let exit = if fault == Fault::LeaveNotesFirst {
        [Step::LeaveNote, Step::LeaveGone]
    } else {
        [Step::LeaveGone, Step::LeaveNote]
    };
    let serve: &[Step] = match hardware {
        Hardware::Table if fault == Fault::ServeNotesWhatItDidNotSee => {
            &[Step::ServeObey, Step::ServeSample, Step::ServeNote, Step::Guest]
        }
        Hardware::Table => &[Step::ServeSample, Step::ServeObey, Step::ServeNote, Step::Guest],
        Hardware::Vcpu(_) => &[],
    };
    let stays: [&[Step]; 3] = [serve, &[], &[Step::Stay]];
    let stay = |middle: &[Step]| [&entry[..], &[Step::Guest], middle, &exit].concat();
    stays.map(stay).concat()
}

/// Where the CPU goes on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Next {
    Step,
    Again,
    /// It was forced out: the rest of the stay is void.
    Exit,
}

/// One CPU, its caches, and the page that the table shows: 0 before the edit, then 1.
struct Model {
    guest: GuestCpus,
    hardware: Hardware,
    fault: Fault,
    page: u8,
    released: bool,
    /// Which page each tag leads to; the p2m's own has number 0.
    cache: BTreeMap<u32, u8>,
    pool: AsidPool,
    vcpus: [VcpuAsid; 2],
    stay: usize,
    /// What the next VMRUN carries, and the ASID of the last one.
    tag: Option<Tag>,
    number: Option<u32>,
    program: Vec<Step>,
    at: usize,
    seen: Generation,
    /// Steps of the CPU until the kick reaches it.
    kick: Option<u32>,
    delay: u32,
    flush: u32,
    awaited: bool,
    since: Generation,
}

impl Model {
    fn new(hardware: Hardware, fault: Fault, delay: u32) -> Self {
        let by_asid = match hardware {
            Hardware::Vcpu(by_asid) => by_asid,
            Hardware::Table => FlushByAsid::Missing,
        };
        let mut model = Self {
            guest: GuestCpus::new(DOMAIN),
            hardware,
            fault: Fault::None,
            page: 0,
            released: false,
            cache: BTreeMap::new(),
            pool: AsidPool::new(CPU, 3, by_asid).expect("two ASIDs"),
            vcpus: [VcpuAsid::new(), VcpuAsid::new()],
            stay: 0,
            tag: None,
            number: None,
            program: program(hardware, fault),
            at: 0,
            seen: Generation::NONE,
            kick: None,
            delay,
            flush: 0,
            awaited: false,
            since: Generation::NONE,
        };
        // Both vCPUs were here before and left translations behind.
        for _ in 0..2 {
            for step in [Step::Join, Step::Look, Step::Guest, Step::LeaveGone, Step::LeaveNote] {
                assert_eq!(model.cpu(step), Ok(Next::Step));
            }
        }
        assert!(!model.cache.is_empty());
        model.fault = fault;
        model
    }

    /// One step of the CPU.
    fn cpu(&mut self, step: Step) -> Result<Next, String> {
        self.kick = self.kick.map(|steps| steps.saturating_sub(1));
        let kicked = self.kick == Some(0);
        match step {
            Step::Join => {
                // A kick that came before is taken with interrupts still on.
                if kicked {
                    self.kick = None;
                }
                assert!(self.guest.running.join(CPU));
            }
            Step::Look => self.look(),
            Step::Guest | Step::Stay if kicked => return Ok(Next::Exit),
            Step::Guest => self.access()?,
            Step::Stay => {
                self.access()?;
                return Ok(Next::Again);
            }
            Step::ServeSample => self.seen = self.guest.generation(),
            Step::ServeObey => {
                if self.guest.marked.test_and_clear(CPU) {
                    self.cache.clear();
                }
            }
            Step::ServeNote => self.guest.note(CPU, self.seen),
            Step::LeaveGone => {
                self.stay += 1;
                self.number = None;
                self.guest.running.leave(CPU);
            }
            Step::LeaveNote => self.guest.note(CPU, self.guest.generation()),
        }
        Ok(Next::Step)
    }

    fn look(&mut self) {
        let ignored = self.fault == Fault::EntryIgnoresMark;
        match self.hardware {
            Hardware::Table => {
                if self.guest.marked.test_and_clear(CPU) && !ignored {
                    self.cache.clear();
                }
            }
            Hardware::Vcpu(_) => {
                let entered = if ignored { Generation::NONE } else { self.guest.generation() };
                let vcpu = &mut self.vcpus[self.stay % 2];
                self.tag = Some(vcpu.prepare(&mut self.pool, entered));
            }
        }
    }

    /// The guest uses its page, by way of the cache.
    fn access(&mut self) -> Result<(), String> {
        if let Some(tag) = self.tag.take() {
            match tag.control() {
                TlbControl::Nothing => {}
                TlbControl::Everything => self.cache.clear(),
                TlbControl::ThisAsid => {
                    self.cache.remove(&tag.asid());
                }
            }
            self.number = Some(tag.asid());
            self.vcpus[self.stay % 2].ran(&mut self.pool, tag);
        }
        let page = *self.cache.entry(self.number.unwrap_or(0)).or_insert(self.page);
        if page == 0 && self.released {
            return Err(format!("page 0 used after its release, in stay {}", self.stay));
        }
        Ok(())
    }

    fn step_cpu(&mut self) -> Result<(), String> {
        let Some(step) = self.program.get(self.at).copied() else { return Ok(()) };
        match self.cpu(step)? {
            Next::Step => self.at += 1,
            Next::Again => {}
            Next::Exit => {
                let exits = |step: &Step| matches!(step, Step::LeaveGone | Step::LeaveNote);
                self.at += self.program[self.at..].iter().position(exits).expect("it ends so");
            }
        }
        Ok(())
    }

    /// The flush's next step. `true`: it is done.
    fn step_flush(&mut self) -> bool {
        let early = self.fault == Fault::SnapshotBeforeMark;
        match self.flush {
            0 => self.page = 1,
            1 if early => self.awaited = self.guest.running.snapshot().contains(CPU),
            1 if self.fault == Fault::NoMark => self.since = self.guest.generation(),
            2 if !early => self.awaited = self.guest.running.snapshot().contains(CPU),
            1 | 2 => (self.since, _) = self.guest.mark_all(),
            3 => {
                if self.awaited && self.fault != Fault::NoKick {
                    self.kick = Some(self.delay);
                }
            }
            4 => {
                let wait = self.awaited && self.fault != Fault::NoWait;
                if wait && !self.guest.has_left(CPU, self.since) {
                    return false;
                }
            }
            5 => self.released = true,
            _ => return true,
        }
        self.flush += 1;
        false
    }

    fn run(mut self, schedule: u32) -> Result<(), String> {
        for turn in 0..LIMIT {
            let flush = if turn < CHOICES { schedule >> turn & 1 == 1 } else { turn % 2 == 0 };
            if flush {
                self.step_flush();
            } else {
                self.step_cpu()?;
            }
            if self.flush == FLUSHED && self.at == self.program.len() {
                break;
            }
        }
        if self.step_flush() { Ok(()) } else { Err(String::from("the flush never ends")) }
    }
}

/// The first schedule that goes wrong, if any does.
fn search(hardware: Hardware, fault: Fault) -> Option<(u32, String)> {
    (0..3).find_map(|delay| {
        (0..1 << CHOICES).find_map(|schedule| {
            let harm = Model::new(hardware, fault, delay).run(schedule).err()?;
            Some((schedule, harm))
        })
    })
}

const EVERY_HARDWARE: [Hardware; 3] =
    [Hardware::Table, Hardware::Vcpu(FlushByAsid::Available), Hardware::Vcpu(FlushByAsid::Missing)];

#[test]
fn no_interleaving_uses_a_page_after_its_flush_or_blocks_the_flush() {
    for hardware in EVERY_HARDWARE {
        assert_eq!(search(hardware, Fault::None), None, "{hardware:?}");
    }
}

#[test]
fn each_step_left_out_or_out_of_order_is_found_by_the_same_search() {
    let faults = [
        Fault::SnapshotBeforeMark,
        Fault::NoMark,
        Fault::NoKick,
        Fault::NoWait,
        Fault::EntryIgnoresMark,
        Fault::LooksBeforeJoining,
        Fault::LeaveNotesFirst,
    ];
    for hardware in EVERY_HARDWARE {
        for fault in faults {
            assert!(search(hardware, fault).is_some(), "{hardware:?} with {fault:?}");
        }
    }
    assert!(search(Hardware::Table, Fault::ServeNotesWhatItDidNotSee).is_some());
}
