//! Judgement: what must hold after every step, and what a `check` asks for.
//!
//! The model judges staleness; here the books are compared: every reference on a page is a
//! mapping, its owner's own entry, or held by a batch whose flush failed.

use std::collections::BTreeMap;

use flush::{DomainId, Mfn};
use hwmodel::{Actor, Command, Frame, FrameState, Granularity, Misuse, UnitId, Witness};
use p2m::PageKind;

use super::{Page, Session, Tags};
use crate::{format::Check, values::Names};

impl Session {
    /// What must hold at any moment, in the middle of calls too.
    ///
    /// # Errors
    /// What does not, with its history.
    pub(crate) fn unharmed(&self) -> Result<(), String> {
        if let Some(witness) = self.world.machine.witnesses().first() {
            return Err(format!("I1: {}", self.tell(witness)));
        }
        let unplugged = self.unplugged.borrow();
        // Nobody can know that a device is gone before it does not answer.
        let known = |misuse: &&Misuse| matches!(misuse, Misuse::WrongUnit(source) if unplugged.contains(source));
        let misuses = self.world.machine.misuses();
        if let Some(misuse) = misuses.iter().find(|misuse| !known(misuse)) {
            return Err(format!("hardware was misused: {misuse:?}"));
        }
        match self.world.first_early.get() {
            None => Ok(()),
            Some(witness) => Err(format!(
                "I1: a page was given up while hardware could reach it: {}",
                self.tell(&witness)
            )),
        }
    }

    /// What must hold between steps.
    ///
    /// # Errors
    /// What does not.
    pub(crate) fn settled(&self) -> Result<(), String> {
        self.unharmed()?;
        if self.batches_held() == 0
            && let Some(witness) = self.world.audit().iter().find(|found| self.is_reachable(found))
        {
            return Err(format!("I2: {}", self.tell(witness)));
        }
        self.counted()
    }

    /// Whether anybody could still use what an audit found: not through a device that is gone.
    fn is_reachable(&self, found: &Witness) -> bool {
        match found.actor {
            // A unit's pointers to tables are no device's: source id 0 stands for all.
            Actor::Unit(_, 0) => self.unplugged.borrow().is_empty(),
            Actor::Unit(_, source) | Actor::DeviceTlb(source) | Actor::InFlight(source) => {
                !self.unplugged.borrow().contains(&source)
            }
            Actor::Cpu(_) => true,
        }
    }

    /// I3: every reference is accounted for, and the grants of each are in use.
    ///
    /// # Errors
    /// What is not.
    pub(crate) fn counted(&self) -> Result<(), String> {
        let mut shown: BTreeMap<u64, u32> = BTreeMap::new();
        for (domain, gfn) in self.places.borrow().iter() {
            if let Some(found) =
                self.world.hypervisor.guest(*domain).and_then(|guest| guest.lookup(*gfn))
            {
                *shown.entry(found.mfn.get()).or_default() += 1;
            }
        }
        let mut surplus = 0;
        for (name, page) in self.pages.borrow().iter() {
            if page.order > 0 || !self.is_live(page) {
                continue;
            }
            let references = self.world.hypervisor.pages.get(page.mfn).0;
            let shown = shown.get(&page.mfn.get()).copied().unwrap_or(0);
            if references < shown {
                return Err(format!(
                    "I3: `{name}` has {references} references, and {shown} entries show it"
                ));
            }
            surplus += (references - shown) as usize;
        }
        let held = self.held.borrow().iter().map(|(_, failed)| failed.held.len()).sum::<usize>()
            + self.held_memory.borrow().iter().map(|(_, held)| held.len()).sum::<usize>();
        if surplus > held {
            return Err(format!(
                "I3: {surplus} references are no entry's, and {held} pages wait for a flush"
            ));
        }
        self.bits(held)
    }

    /// The bits that tell a granter whether its grant is in use.
    fn bits(&self, held: usize) -> Result<(), String> {
        for (name, page) in self.pages.borrow().iter().filter(|(_, page)| self.is_live(page)) {
            for (granter, reference) in &page.grants {
                if self.wild.borrow().contains(&(*granter, *reference)) {
                    continue;
                }
                let mapped = self.is_mapped(*granter, *reference, page.mfn);
                let (reading, _) = self.in_use(*granter, *reference)?;
                if mapped && !reading {
                    return Err(format!("I3: `{name}` is mapped, and its granter sees it idle"));
                }
                if !mapped && reading && held == 0 {
                    return Err(format!("I3: `{name}` is not mapped, and seen in use"));
                }
            }
        }
        Ok(())
    }

    fn is_mapped(&self, granter: DomainId, reference: u32, mfn: Mfn) -> bool {
        self.mappings.borrow().values().any(|mapped| {
            mapped.grant == Some((granter, reference))
                && self.shows(mapped.domain, mapped.gfn, mfn, true)
        })
    }

    /// Whether a domain's entry shows a frame, as a grant or as its own.
    fn shows(&self, domain: DomainId, gfn: flush::Gfn, mfn: Mfn, grant: bool) -> bool {
        let found = self.world.hypervisor.guest(domain).and_then(|guest| guest.lookup(gfn));
        found.is_some_and(|found| {
            let kind = found.kind;
            let is_grant = matches!(kind, Some(PageKind::GrantReadOnly | PageKind::GrantReadWrite));
            found.mfn == mfn && is_grant == grant
        })
    }

    /// I6, at the end: the flushes of the whole scenario are within its bound.
    ///
    /// # Errors
    /// If they are not.
    pub(crate) fn bounded(&self, bound: &crate::format::Bound) -> Result<(), String> {
        let flushes = self.flushes();
        let extra = self.extra.get();
        let counters = self.world.machine.counters();
        let commands: u64 = counters.units.iter().map(|unit| unit.iotlb_commands()).sum();
        let (tlb, iotlb) = (flushes.tlb + extra.div_ceil(2), flushes.iotlb + extra / 2);
        let counts = [
            ("CPU flushes", tlb, Some(bound.tlb)),
            ("device flushes", iotlb, Some(bound.iotlb)),
            ("IOTLB commands", commands, bound.commands),
        ];
        for (what, count, most) in counts {
            if let Some(most) = most
                && count > most
            {
                return Err(format!("I6: {count} {what}; the bound is {most}"));
            }
        }
        Ok(())
    }

    /// How a stale translation came about, with the steps it happened in.
    fn tell(&self, witness: &Witness) -> String {
        let moments = self.moments.borrow();
        let step = |op: u64| {
            let found = moments.iter().rev().find(|(from, _)| *from <= op);
            found.map_or_else(|| "the set-up".to_owned(), |(_, line)| format!("line {line}"))
        };
        let history = witness.history;
        let mut text = format!("{witness}\n    cached in {}", step(history.filled.0));
        for (what, op) in [
            ("tables changed", history.table_changed),
            ("frame given away", history.given_away),
            ("declared flushed", history.settled),
        ] {
            if let Some(op) = op {
                text += &format!(", {what} in {}", step(op.0));
            }
        }
        text += &format!(", seen in {}", step(witness.op.0));
        text
    }

    fn each(
        &self,
        names: Option<&Names>,
        holds: impl Fn(&str) -> Result<bool, String>,
        what: &str,
    ) -> Result<(), String> {
        for name in names.iter().flat_map(|names| &names.0) {
            let holds = holds(name)?;
            self.expect(holds, || format!("`{name}` is not {what}"))?;
        }
        Ok(())
    }

    pub(super) fn check(&self, check: &Check) -> Result<(), String> {
        let shown = |name: &str| {
            let mapped = self.mapping(name)?;
            let page = self.page(&mapped.page)?;
            Ok::<_, String>(self.shows(mapped.domain, mapped.gfn, page.mfn, mapped.grant.is_some()))
        };
        let in_use = |name: &str| {
            let mapped = self.mapping(name)?;
            let (granter, reference) = mapped.grant.ok_or("it is no grant")?;
            self.in_use(granter, reference)
        };
        self.each(check.mapped.as_ref(), shown, "mapped")?;
        self.each(check.held.as_ref(), |name| Ok(!shown(name)? && in_use(name)?.0), "held")?;
        self.each(
            check.released.as_ref(),
            |name| Ok(!shown(name)? && !in_use(name)?.0),
            "released",
        )?;
        let state = |page: &Page| {
            let info = self.world.machine.frame(Frame(page.mfn.get()));
            info.map(|info| info.state)
        };
        let free = |name: &str| {
            let page = self.page(name)?;
            Ok(!self.is_live(&page) || state(&page) == Some(FrameState::Free))
        };
        self.each(check.free.as_ref(), free, "free")?;
        self.each(check.kept.as_ref(), |name| Ok(!free(name)?), "kept")?;
        let bits = |name: &str| {
            let page = self.page(name)?;
            let mut bits = (false, false);
            for (granter, reference) in &page.grants {
                let (reading, writing) = self.in_use(*granter, *reference)?;
                bits = (bits.0 | reading, bits.1 | writing);
            }
            Ok::<_, String>(bits)
        };
        let writing = |name: &str| Ok(bits(name)? == (true, true));
        let reading = |name: &str| Ok(bits(name)? == (true, false));
        let idle = |name: &str| Ok(bits(name)? == (false, false));
        self.each(check.writing.as_ref(), writing, "in use for writing")?;
        self.each(check.reading.as_ref(), reading, "in use for reading only")?;
        self.each(check.idle.as_ref(), idle, "idle")?;
        if let Some(expected) = check.references {
            for name in check.counted.iter().flat_map(|names| &names.0) {
                let found = self.world.hypervisor.pages.get(self.page(name)?.mfn).0;
                self.expect(found == expected, || {
                    format!("`{name}` has {found} references; expected {expected}")
                })?;
            }
        }
        self.check_counts(check)
    }

    fn check_counts(&self, check: &Check) -> Result<(), String> {
        let counters = self.world.machine.counters();
        let marked = self.marked.borrow();
        let commands: u64 = counters.units.iter().map(|unit| unit.iotlb_commands()).sum();
        let pages: u64 = counters.units.iter().map(|unit| unit.pages_flushed).sum();
        let kicks: u64 = counters.cpus.iter().map(|cpu| cpu.ipis).sum();
        let tables = self.world.hypervisor.memory.tables_in_use();
        let handles = self.domain("back").map_or(0, |guest| guest.handles() as u64);
        for (what, expected, found) in [
            ("IOTLB commands", check.iotlb_commands, commands - marked.iotlb_commands),
            ("pages flushed", check.pages_flushed, pages - marked.pages_flushed),
            ("kicks", check.kicks, kicks - marked.kicks),
            ("table pages", check.tables, tables),
            ("handles", check.handles, handles),
        ] {
            if let Some(expected) = expected {
                self.expect(expected.allows(found), || {
                    format!("{found} {what}; expected {expected}")
                })?;
            }
        }
        if let Some(expected) = check.batches_held {
            let found = self.batches_held();
            self.expect(found == expected, || {
                format!("{found} batches are held; expected {expected}")
            })?;
        }
        if let Some(expected) = check.pinned {
            let found = self.domain("front")?.grants().pinned();
            self.expect(found == expected, || {
                format!("{found} grants are pinned; expected {expected}")
            })?;
        }
        if let Some(expected) = &check.commands {
            let told = self.told.borrow();
            let found = &told[marked.commands..];
            self.expect(found == *expected, || {
                format!("the commands are {found:?}; expected {expected:?}")
            })?;
        }
        Ok(())
    }

    /// Puts commands into words that units have carried out since the last time, with the
    /// ids as they were before the step and, from where a device is attached, as they are.
    pub(super) fn put_into_words(&self, before: &Tags) {
        let now = self.tags();
        let mut put = self.put.borrow_mut();
        put.resize(self.world.units.len(), 0);
        for (unit, put) in put.iter_mut().enumerate() {
            let mut tags = before;
            for command in self.world.machine.commands(UnitId(unit)).into_iter().skip(*put) {
                *put += 1;
                if matches!(command, Command::Context { did: 0, .. }) {
                    tags = &now;
                }
                let shown = self.shown(unit, command, tags, &now);
                self.told.borrow_mut().extend(shown);
            }
        }
    }

    /// A command in words; nothing for a wait.
    fn shown(&self, unit: usize, command: Command, tags: &Tags, now: &Tags) -> Option<String> {
        let whose = |did: u16| match did {
            0 => "nobody".to_owned(),
            did => {
                let known = tags.get(&(unit, did)).or_else(|| now.get(&(unit, did)));
                known.cloned().unwrap_or_else(|| format!("id {did}"))
            }
        };
        match command {
            Command::Wait { .. } | Command::Interrupt => None,
            Command::Context { granularity, did, sid, function_mask: _ } => {
                Some(match granularity {
                    Granularity::Global => "context all".to_owned(),
                    Granularity::Domain => format!("context {}", whose(did)),
                    Granularity::Selective => {
                        format!("context {} {}", whose(did), self.device_name(sid))
                    }
                })
            }
            Command::Iotlb { granularity, did, page, address_mask, .. } => {
                Some(match granularity {
                    Granularity::Global => "iotlb all".to_owned(),
                    Granularity::Domain => format!("iotlb {}", whose(did)),
                    Granularity::Selective => {
                        let first = page >> address_mask << address_mask;
                        format!("iotlb {} {first:#x}/{address_mask}", whose(did))
                    }
                })
            }
            Command::DeviceTlb { sid, page, order } => {
                let name = self.device_name(sid);
                Some(match order {
                    52.. => format!("device-tlb {name} all"),
                    order => format!("device-tlb {name} {page:#x}/{order}"),
                })
            }
        }
    }
}
