//! Scenarios for QEMU: what the testbed can carry out, and what QEMU cannot show.
//!
//! [`lower`] turns a [`Script`] into a [`Program`]: for each layout of tables a [`Boot`]
//! with lines of numbers that the testbed reads from a boot module. What of it cannot be
//! shown is said step by step; a step without which the rest means nothing makes the whole
//! layout one that is not shown.

use std::collections::{BTreeMap, BTreeSet};

use crate::{
    format::{Action, Attempt, Cpus, Tables},
    parse::Script,
    values::Count,
};

mod access;
mod calls;
mod check;
mod grants;
mod hardware;
mod machine;
mod memory;
mod workload;

/// The first line of a program.
const HEAD: &str = "quiesce-scenario 2";
/// Pages and mappings that a program can name.
const NAMES: usize = 2048;
/// Elements that one call can have.
const ELEMENTS: usize = 512;
/// Halves of the address space, of 512 GiB each, that a processor can be told to reach
/// beside the first.
const PLACES: usize = 6;
/// The testbed's word for a status that may be anything.
const ANY_STATUS: u64 = 0x8000;
/// The testbed's words for no page, and for whatever page it is.
const NONE: u64 = u64::MAX;
const ANY: u64 = u64::MAX - 1;

/// The testbed's number for its first device, the one that shows what it reads.
const CONTROLLER: u64 = 16;

/// What the testbed is given.
#[derive(Clone, Debug)]
pub struct Program {
    /// One for each layout that can be shown.
    pub boots: Vec<Boot>,
    /// The unit is in caching mode.
    pub caching_mode: bool,
    /// What cannot be shown, with the reason.
    pub unshown: Vec<String>,
    /// What the testbed calls pages, devices and mappings, and what the file does.
    names: BTreeMap<String, String>,
}

impl Program {
    /// What the testbed says, with the names of the file.
    #[must_use]
    pub fn in_words(&self, text: &str) -> String {
        let mut words = text.split(' ').peekable();
        let mut told = Vec::new();
        while let Some(word) = words.next() {
            let number = words.peek().map_or("", |next| next.trim_end_matches([';', ',']));
            match self.names.get(&format!("{word} {number}")) {
                Some(name) => {
                    let rest = words.next().map_or("", |next| &next[number.len()..]);
                    told.push(format!("{name}{rest}"));
                }
                None => told.push(word.to_owned()),
            }
        }
        told.join(" ")
    }
}

/// One boot of the testbed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Boot {
    /// The boot module.
    pub text: String,
    /// Words for the command line.
    pub words: String,
    /// Processors run guests.
    pub guests: bool,
}

/// Planted bugs that the testbed has too, under the same names.
const PLANTS: [&str; 13] = [
    "skip-tlb",
    "skip-iotlb",
    "unseen-cpu",
    "lost-write",
    "uncounted",
    "entry-kept",
    "early-drop",
    "flush-twice",
    "no-preemption",
    "ignore-iotlb",
    "ignore-context",
    "wrong-domain",
    "smaller-mask",
];

/// Whether the testbed has a planted bug too.
#[must_use]
pub fn has_plant(plant: &str) -> bool {
    PLANTS.contains(&plant)
}

/// What the testbed can do of a script.
///
/// # Errors
/// Why nothing of it can be shown.
pub fn lower(script: &Script) -> Result<Program, String> {
    let words = machine::words(script)?;
    let machine = &script.scenario.machine;
    let layouts: &[Layout] = match machine.tables {
        // VT-d does not walk NPT.
        Tables::Both if machine.cpus == Cpus::Npt => &[Layout::Separate],
        Tables::Both => &[Layout::Separate, Layout::Shared],
        Tables::Separate => &[Layout::Separate],
        Tables::Shared => &[Layout::Shared],
    };
    let mut unshown = Vec::new();
    if !script.actors.is_empty() {
        unshown
            .push("actors do not take turns in QEMU: their steps come as in the file".to_owned());
    }
    let unit = &script.scenario.unit;
    if !unit.coherent || unit.write_buffer {
        unshown.push("QEMU's unit sees every store at once".to_owned());
    }
    if !unit.drain_writes || !unit.drain_reads {
        unshown.push("QEMU has no access on its way for a command to wait for".to_owned());
    }
    let mut boots = Vec::new();
    let mut names = BTreeMap::new();
    let mut refused = None;
    for layout in layouts {
        let mut lowering = Lowering::new(script, *layout);
        match lowering.script(script) {
            Ok(()) => {
                unshown.extend(lowering.unshown.iter().cloned());
                names.extend(lowering.names());
                boots.push(lowering.boot(&words));
            }
            Err(why) => refused = Some(why),
        }
    }
    match (boots.is_empty(), refused) {
        (true, why) => return Err(why.unwrap_or_default()),
        (false, Some(why)) => unshown.push(format!("one of the two layouts: {why}")),
        (false, None) => {}
    }
    let mut seen = BTreeSet::new();
    unshown.retain(|why| seen.insert(why.clone()));
    Ok(Program { boots, caching_mode: script.scenario.unit.caching_mode, unshown, names })
}

/// Whose tables devices walk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Layout {
    Separate,
    Shared,
}

/// A mapping, as far as the testbed has to know it.
#[derive(Clone, Debug)]
struct Placed {
    page: String,
    gfn: u64,
    by: u64,
    /// None for a domain's own memory.
    number: Option<u64>,
}

struct Lowering {
    layout: Layout,
    text: String,
    unshown: Vec<String>,
    said: BTreeSet<(usize, &'static str)>,
    line: usize,
    domains: BTreeMap<String, u64>,
    devices: BTreeMap<String, u64>,
    pages: BTreeMap<String, u64>,
    mappings: BTreeMap<String, Placed>,
    /// The number of each mapping's name.
    numbers: BTreeMap<String, u64>,
    /// The next reference of each table.
    references: BTreeMap<u64, u64>,
    /// Domains that each processor runs, and halves of the space that it reaches there.
    runs: BTreeMap<(u64, u64), BTreeSet<u64>>,
    /// What each processor runs at the moment.
    inside: BTreeMap<u64, u64>,
    callers: BTreeSet<u64>,
    /// Domains that have the controller at some time.
    controlled: BTreeSet<u64>,
}

type Lowered = Result<(), String>;

impl Lowering {
    fn new(script: &Script, layout: Layout) -> Self {
        let mut domains = BTreeMap::from([("front".to_owned(), 1), ("back".to_owned(), 2)]);
        let further = script.scenario.domain.iter().map(|domain| domain.get_ref().name.clone());
        domains.extend(further.zip(3..));
        let mut devices = BTreeMap::from([("dev0".to_owned(), CONTROLLER)]);
        let further = script.scenario.device.iter().map(|device| device.get_ref().name.clone());
        devices.extend(further.zip(CONTROLLER + 1..));
        Self {
            layout,
            text: String::new(),
            unshown: Vec::new(),
            said: BTreeSet::new(),
            line: 0,
            domains,
            devices,
            pages: BTreeMap::new(),
            mappings: BTreeMap::new(),
            numbers: BTreeMap::new(),
            references: BTreeMap::new(),
            runs: BTreeMap::new(),
            inside: BTreeMap::from([(1, 2)]),
            callers: BTreeSet::new(),
            controlled: BTreeSet::from([2]),
        }
    }

    fn script(&mut self, script: &Script) -> Lowered {
        for step in &script.steps {
            self.line = step.line;
            self.step(&step.action)
                .map_err(|why| format!("line {}: {}: {why}", step.line, step.action.name()))?;
        }
        self.line = script.steps.last().map_or(0, |step| step.line);
        if script.steps.iter().any(|step| matches!(step.action, Action::Memory(_))) {
            self.skip("which table lacks memory differs, so all flushes together are not compared");
        } else {
            let bound = script.scenario.bound.get_ref();
            self.emit("bound", &[bound.tlb, bound.iotlb]);
        }
        if self.runs.values().any(|reach| reach.len() > PLACES) {
            return Err(format!("processors reach {PLACES} far places"));
        }
        Ok(())
    }

    /// What comes before the steps, then the steps.
    fn boot(self, words: &str) -> Boot {
        let mut text = format!("{HEAD}\n");
        for ((cpu, domain), reach) in &self.runs {
            let reach: String = reach.iter().map(|half| format!(" {:#x}", half << 27)).collect();
            text += &format!("0 cpu {cpu} {domain}{reach}\n");
        }
        for domain in &self.controlled {
            text += &format!("0 queues {domain}\n");
        }
        for domain in &self.callers {
            text += &format!("0 caller {domain}\n");
        }
        // One processor runs the backend from the beginning.
        if self.runs.contains_key(&(1, 2)) {
            text += "0 enter 1 2\n";
        }
        text += "0 mark\n";
        let tables = match self.layout {
            Layout::Separate => "tables=separate",
            Layout::Shared => "tables=shared",
        };
        Boot {
            text: text + &self.text,
            words: format!("{tables}{words}"),
            guests: !self.runs.is_empty(),
        }
    }

    /// What has a name in the file and a number in the testbed.
    fn names(&self) -> impl Iterator<Item = (String, String)> {
        let named = |what: &'static str| {
            move |(name, number): (&String, &u64)| (format!("{what} {number}"), format!("`{name}`"))
        };
        let devices = self
            .devices
            .iter()
            .map(|(name, number)| (format!("device {}", number - CONTROLLER), format!("`{name}`")));
        let processors = (1..=3).map(|cpu| (format!("processor {cpu}"), format!("`cpu{cpu}`")));
        let pages = self.pages.iter().map(named("page"));
        pages.chain(self.numbers.iter().map(named("mapping"))).chain(devices).chain(processors)
    }

    fn emit(&mut self, word: &str, values: &[u64]) {
        let values: String = values.iter().map(|value| format!(" {value:#x}")).collect();
        self.text += &format!("{} {word}{values}\n", self.line);
    }

    /// Says, once a step, that something of it is not shown.
    fn skip(&mut self, why: &'static str) {
        if self.said.insert((self.line, why)) {
            self.unshown.push(format!("line {}: {why}", self.line));
        }
    }

    fn number(&mut self, page: &str) -> Result<u64, String> {
        numbered(&mut self.pages, page).ok_or_else(|| "too many pages".to_owned())
    }

    fn domain(&self, name: &str) -> u64 {
        self.domains.get(name).copied().unwrap_or(0)
    }

    /// How many flushes the step asks for.
    fn asked(&mut self, tlb: Option<Count>, iotlb: Option<Count>) {
        if tlb.is_none() && iotlb.is_none() {
            return;
        }
        let any = Count { min: 0, max: u64::MAX };
        let (tlb, iotlb) = (tlb.unwrap_or(any), iotlb.unwrap_or(any));
        self.emit("asked", &[tlb.min, tlb.max, iotlb.min, iotlb.max]);
    }

    fn step(&mut self, action: &Action) -> Lowered {
        match action {
            Action::Grant(grant) => self.grant(grant),
            Action::Entry(entry) => self.entry(entry),
            Action::Word(word) => self.word(word),
            Action::TakeBack(take) => self.end_grants("take-back", &take.pages, take.result),
            Action::EndAccess(end) => self.end_grants("ends", &end.pages, end.result),
            Action::Map(map) => self.map(map),
            Action::Unmap(unmap) => self.unmap(unmap),
            Action::Copy(copy) => self.copy(copy),
            Action::GoOn(call) => self.go_on(call),
            Action::Swap(swap) => self.swap(swap),
            Action::SetVersion(set) => self.set_version(set),
            Action::ListFrames(list) => self.list_frames(list),
            Action::StatusFrame(frame) => self.status_frame(frame),
            Action::Populate(populate) => self.populate(populate),
            Action::Clear(clear) => self.clear(clear),
            Action::Restrict(restrict) => self.restrict(restrict),
            Action::SwapPage(swap) => self.swap_page(swap),
            Action::MovePage(page) => self.move_page(page),
            Action::Memory(memory) => {
                self.emit("memory", &[memory.left.map_or(NONE, |left| left as u64)]);
                Ok(())
            }
            Action::Access(access) => self.access(access),
            Action::Attach(attach) => self.attach(attach),
            Action::Detach(detach) => self.detach(detach),
            Action::Reattach(reattach) => self.reattach(reattach),
            Action::Enter(enter) => self.enter(enter),
            Action::Leave(leave) => self.leave(leave),
            Action::Fail(fail) => self.fail(fail),
            Action::Repair(_) => {
                self.emit("repair", &[]);
                Ok(())
            }
            Action::Faults(faults) => self.faults(faults),
            Action::Retry(retry) => {
                self.emit("retry", &[retry.left as u64]);
                Ok(())
            }
            Action::Destroy(destroy) => self.destroy(destroy),
            Action::Mark(_) => {
                self.emit("mark", &[]);
                Ok(())
            }
            Action::Check(check) => self.check(check),
            Action::Speculate(_) => {
                self.skip("QEMU prefetches nothing");
                Ok(())
            }
            Action::Reuse(_) => {
                self.skip("freed frames are not given to a stranger: QEMU keeps no way to tables");
                Ok(())
            }
            Action::DmaBegin(_) | Action::DmaFinish(_) => {
                self.skip("QEMU's DMA is not on its way: it has landed");
                Ok(())
            }
            Action::Unplug(_) | Action::DeclareGone(_) => {
                Err("the testbed's devices stay".to_owned())
            }
            Action::Workload(workload) => self.workload(workload),
        }
    }
}

/// The number of a name, a new one if it has none.
fn numbered(numbers: &mut BTreeMap<String, u64>, name: &str) -> Option<u64> {
    let next = numbers.len() as u64;
    let number = *numbers.entry(name.to_owned()).or_insert(next);
    (number < NAMES as u64).then_some(number)
}

/// The testbed's word for what becomes of an attempt.
fn attempt(result: Attempt) -> u64 {
    match result {
        Attempt::Ok => 0,
        Attempt::Busy | Attempt::Refused => 1,
        Attempt::Any => 2,
    }
}

#[cfg(test)]
mod tests;
