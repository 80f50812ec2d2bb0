//! Scenarios for QEMU: what the testbed can carry out, and what QEMU cannot show.
//!
//! [`lower`] turns a [`Script`] into a [`Program`]: lines of numbers that the testbed reads
//! from a boot module. What of it cannot be shown is said step by step; a step without
//! which the rest means nothing makes the whole scenario one that is not shown.

use std::collections::{BTreeMap, BTreeSet};

use crate::{
    format::{Access, AccessKind, Action, Attempt, Check, Clear, Cpus, Populate, Tables, Unit},
    parse::Script,
    values::{Count, Names},
};

mod calls;

/// The first line of a program.
const HEAD: &str = "quiesce-scenario 1";
/// Pages and mappings that a program can name.
const NAMES: usize = 128;
/// Elements that one call can have.
const ELEMENTS: usize = 128;
/// The testbed's word for a status that may be anything.
const ANY_STATUS: u64 = 0xffff;
/// Pages that the testbed clears one by one before it takes too long.
const CLEARED: u64 = 4096;

/// What the testbed is given.
#[derive(Clone, Debug)]
pub struct Program {
    /// The boot module.
    pub text: String,
    /// Words for the command line, one set for each boot.
    pub boots: Vec<String>,
    /// The unit is in caching mode.
    pub caching_mode: bool,
    /// Steps that QEMU cannot show, with the reason.
    pub unshown: Vec<String>,
}

/// The testbed's word for a planted bug that it has too.
#[must_use]
pub fn lie(plant: &str) -> Option<&'static str> {
    match plant {
        "skip-iotlb" => Some("lie=skipped"),
        "wrong-domain" => Some("lie=misdirected"),
        _ => None,
    }
}

/// What the testbed can do of a script.
///
/// # Errors
/// Why nothing of it can be shown.
pub fn lower(script: &Script) -> Result<Program, String> {
    let scenario = &script.scenario;
    let (unit, machine) = (&scenario.unit, &scenario.machine);
    let plain = Unit { caching_mode: unit.caching_mode, latency: unit.latency, ..Unit::default() };
    if *unit != plain {
        return Err("QEMU's unit has other properties than the file's".to_owned());
    }
    if machine.cpus == Cpus::Npt || machine.accessed {
        return Err("the file is about CPUs, and none runs a guest".to_owned());
    }
    if machine.device_tlb {
        return Err("the testbed's device has no TLB of its own".to_owned());
    }
    if machine.levels != 4 || machine.handle_pages != 1024 {
        return Err("the testbed's domains have four levels and all their handles".to_owned());
    }
    if scenario.domain.len() > 1 || !scenario.device.is_empty() {
        return Err("the testbed has one further domain and no further device".to_owned());
    }
    let mut lowering = Lowering::new(script);
    for step in &script.steps {
        lowering.line = step.line;
        lowering
            .step(&step.action)
            .map_err(|why| format!("line {}: {}: {why}", step.line, step.action.name()))?;
    }
    if lowering.accesses == 0 {
        return Err("no step is an access of the device that QEMU has".to_owned());
    }
    if !script.actors.is_empty() {
        let why = "actors do not take turns in QEMU: their steps come as in the file";
        lowering.unshown.insert(0, why.to_owned());
    }
    let layouts: &[&str] = match machine.tables {
        Tables::Both => &["tables=separate", "tables=shared"],
        Tables::Separate => &["tables=separate"],
        Tables::Shared => &["tables=shared"],
    };
    let iommu = if machine.registers { " iommu=registers" } else { "" };
    Ok(Program {
        text: lowering.text,
        boots: layouts.iter().map(|layout| format!("{layout}{iommu}")).collect(),
        caching_mode: unit.caching_mode,
        unshown: lowering.unshown,
    })
}

/// A mapping, as far as the testbed has to know it.
#[derive(Clone, Debug)]
struct Placed {
    page: String,
    gfn: u64,
    /// None for a domain's own memory.
    number: Option<usize>,
}

struct Lowering {
    text: String,
    unshown: Vec<String>,
    said: BTreeSet<(usize, &'static str)>,
    line: usize,
    accesses: usize,
    domains: BTreeMap<String, u16>,
    pages: BTreeMap<String, usize>,
    granted: BTreeSet<String>,
    mappings: BTreeMap<String, Placed>,
    handles: usize,
    /// The testbed has given commands of its own since the mark.
    own_commands: bool,
}

type Lowered = Result<(), String>;

impl Lowering {
    fn new(script: &Script) -> Self {
        let mut domains = BTreeMap::from([("front".to_owned(), 1), ("back".to_owned(), 2)]);
        let further = script.scenario.domain.iter().map(|domain| domain.get_ref().name.clone());
        domains.extend(further.zip(3..));
        Self {
            text: format!("{HEAD}\n"),
            unshown: Vec::new(),
            said: BTreeSet::new(),
            line: 0,
            accesses: 0,
            domains,
            pages: BTreeMap::new(),
            granted: BTreeSet::new(),
            mappings: BTreeMap::new(),
            handles: 0,
            own_commands: false,
        }
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

    fn number(&mut self, page: &str) -> Result<usize, String> {
        let next = self.pages.len();
        let number = *self.pages.entry(page.to_owned()).or_insert(next);
        if number < NAMES { Ok(number) } else { Err("too many pages".to_owned()) }
    }

    fn domain(&self, name: &str) -> u64 {
        self.domains.get(name).copied().unwrap_or(0).into()
    }

    fn step(&mut self, action: &Action) -> Lowered {
        match action {
            Action::Grant(grant) => {
                if grant.by != "front" || grant.to != "back" || grant.reference.is_some() {
                    return Err("the testbed's frontend grants to its backend only".to_owned());
                }
                for page in &grant.pages.0 {
                    if self.pages.contains_key(page) {
                        return Err("the testbed grants a page once".to_owned());
                    }
                    let number = self.number(page)?;
                    self.granted.insert(page.clone());
                    self.emit("grant", &[number as u64, grant.read_only.into()]);
                }
                Ok(())
            }
            Action::TakeBack(take) => {
                if take.result != Attempt::Ok {
                    return Err("it may be refused".to_owned());
                }
                for page in &take.pages.0 {
                    let number = self.number(page)?;
                    self.emit("take-back", &[number as u64]);
                }
                Ok(())
            }
            Action::EndAccess(end) => {
                let works = match end.result {
                    Attempt::Ok => 1,
                    Attempt::Busy | Attempt::Refused => 0,
                    Attempt::Any => return Err("it may be refused".to_owned()),
                };
                for page in &end.pages.0 {
                    let number = self.number(page)?;
                    self.emit("ends", &[number as u64, works]);
                }
                Ok(())
            }
            Action::Map(map) => self.map(map),
            Action::Unmap(unmap) => self.unmap(unmap),
            Action::Populate(populate) => self.populate(populate),
            Action::Clear(clear) => self.clear(clear),
            Action::Access(access) => self.access(access),
            Action::Reattach(reattach) => {
                if reattach.device != "dev0" || reattach.result != Attempt::Ok {
                    return Err("only its one device moves".to_owned());
                }
                let (from, to) = (self.domain(&reattach.from), self.domain(&reattach.to));
                self.own_commands = true;
                self.emit("move", &[from, to]);
                Ok(())
            }
            Action::Mark(_) => {
                self.own_commands = false;
                self.emit("mark", &[]);
                Ok(())
            }
            Action::Check(check) => self.check(check),
            Action::Speculate(_) => {
                self.skip("QEMU prefetches nothing");
                Ok(())
            }
            Action::Reuse(_) => {
                self.skip("freed frames are not given to a stranger");
                Ok(())
            }
            Action::Enter(_) | Action::Leave(_) => {
                self.skip("no CPU runs a guest");
                Ok(())
            }
            Action::DmaBegin(_) | Action::DmaFinish(_) => {
                self.skip("QEMU's DMA is not on its way: it has landed");
                Ok(())
            }
            Action::Entry(_)
            | Action::Word(_)
            | Action::Copy(_)
            | Action::GoOn(_)
            | Action::Swap(_)
            | Action::SetVersion(_)
            | Action::ListFrames(_)
            | Action::StatusFrame(_)
            | Action::Restrict(_)
            | Action::SwapPage(_)
            | Action::MovePage(_)
            | Action::Attach(_)
            | Action::Detach(_)
            | Action::Unplug(_)
            | Action::DeclareGone(_)
            | Action::Fail(_)
            | Action::Repair(_)
            | Action::Faults(_)
            | Action::Memory(_)
            | Action::Retry(_)
            | Action::Destroy(_)
            | Action::Workload(_) => Err("the testbed has no such step".to_owned()),
        }
    }

    fn populate(&mut self, populate: &Populate) -> Lowered {
        if populate.result != Attempt::Ok {
            return Err("it may be refused".to_owned());
        }
        let domain = self.domain(&populate.by);
        let stride = populate.stride.unwrap_or(1 << populate.order);
        for (place, name) in populate.pages.0.iter().enumerate() {
            let gfn = populate.at.wrapping_add(stride.wrapping_mul(place as u64));
            let number = self.number(name)?;
            let placed = Placed { page: name.clone(), gfn, number: None };
            self.mappings.insert(name.clone(), placed);
            self.emit("populate", &[number as u64, domain, gfn, populate.order.into()]);
        }
        Ok(())
    }

    fn clear(&mut self, clear: &Clear) -> Lowered {
        if clear.result != Attempt::Ok || clear.count > CLEARED {
            return Err("the testbed clears few pages, one by one".to_owned());
        }
        self.skip("pages are cleared one by one, each with its flush; tables stay");
        let domain = self.domain(&clear.by);
        self.own_commands = true;
        self.emit("clear", &[domain, clear.first, clear.count]);
        Ok(())
    }

    fn access(&mut self, access: &Access) -> Lowered {
        if access.by.0.iter().any(|name| name != "dev0") {
            self.skip("no CPU runs a guest, and there is no other device");
        }
        if !access.by.0.iter().any(|name| name == "dev0") {
            return Ok(());
        }
        if access.kind == AccessKind::Read {
            self.skip("what a device reads is not seen");
            return Ok(());
        }
        let mut places = Vec::new();
        for name in access.mappings.iter().flat_map(|names| &names.0) {
            let placed = self.mappings.get(name).ok_or_else(|| format!("`{name}` is nowhere"))?;
            places.push((placed.gfn, placed.page.clone()));
        }
        if let Some(numbers) = &access.at {
            let count = numbers.many().unwrap_or(1);
            let numbers = (0..count).filter_map(|place| numbers.at(place));
            places.extend(numbers.map(|gfn| (*gfn, String::new())));
        }
        for (place, (gfn, own)) in places.into_iter().enumerate() {
            let page = match access.reaches.at(place).map_or("any", String::as_str) {
                "any" => continue,
                "fault" => {
                    self.accesses += 1;
                    self.emit("faults", &[gfn]);
                    continue;
                }
                "same" => own,
                other => other.to_owned(),
            };
            self.accesses += 1;
            let number = self.number(&page)?;
            self.emit("reaches", &[gfn, number as u64]);
        }
        Ok(())
    }

    fn check(&mut self, check: &Check) -> Lowered {
        let commands = check.commands.as_ref().map(|commands| {
            let iotlb = commands.iter().filter(|command| command.starts_with("iotlb")).count();
            Count { min: iotlb as u64, max: iotlb as u64 }
        });
        for count in [commands, check.iotlb_commands].into_iter().flatten() {
            if !self.own_commands {
                self.emit("commands", &[count.min, count.max]);
            }
        }
        if let Some(count) = check.pages_flushed
            && !self.own_commands
        {
            self.emit("flushed", &[count.min, count.max]);
        }
        let released = check.released.iter().flat_map(|names: &Names| &names.0);
        let released: Vec<String> = released
            .filter_map(|name| self.mappings.get(name).map(|placed| placed.page.clone()))
            .collect();
        let idle = check.idle.iter().flat_map(|names| names.0.clone());
        let of = |names: &Option<Names>| names.clone().unwrap_or_default().0;
        let bits = [
            (released.into_iter().chain(idle).collect(), 0, 0),
            (of(&check.reading), 1, 0),
            (of(&check.writing), 1, 1),
        ];
        for (pages, reading, writing) in bits {
            for page in pages {
                let number = self.number(&page)?;
                self.emit("in-use", &[number as u64, reading, writing]);
            }
        }
        let counted = check.iotlb_commands.is_some() || check.pages_flushed.is_some();
        if self.own_commands && (counted || check.commands.is_some()) {
            self.skip("the testbed has given commands of its own, so none are counted");
        } else if check.commands.is_some() {
            self.skip("of the commands only the number of those for the IOTLB is compared");
        }
        let others = [
            check.mapped.is_some(),
            check.held.is_some(),
            check.free.is_some(),
            check.kept.is_some(),
            check.counted.is_some(),
            check.kicks.is_some(),
            check.tables.is_some(),
            check.batches_held.is_some(),
            check.pinned.is_some(),
            check.handles.is_some(),
        ];
        if others.contains(&true) {
            self.skip("what the model's books say is not looked at");
        }
        Ok(())
    }
}
