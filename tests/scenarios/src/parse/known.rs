//! What steps may name: only what was introduced before.

use std::collections::BTreeSet;

use super::{LAST_CPU, is_cpu};
use crate::{
    format::{Access, Action, Alter, Map, NewDomain, Scenario, Sort, Unmap},
    values::{Names, OneOrMany},
};

/// What has a name so far.
pub(super) struct Known {
    domains: BTreeSet<String>,
    devices: BTreeSet<String>,
    pages: BTreeSet<String>,
    mappings: BTreeSet<String>,
}

impl Known {
    pub(super) fn new(scenario: &Scenario) -> Self {
        let further = scenario.domain.iter().map(|domain| domain.get_ref());
        let mut domains: BTreeSet<String> =
            further.map(|NewDomain { name }| name.clone()).collect();
        domains.extend(["front".to_owned(), "back".to_owned()]);
        let further = scenario.device.iter().map(|device| device.get_ref().name.clone());
        let first = (0..scenario.unit.count).map(|unit| format!("dev{unit}"));
        Self {
            domains,
            devices: further.chain(first).collect(),
            pages: BTreeSet::new(),
            mappings: BTreeSet::new(),
        }
    }

    pub(super) fn check(&mut self, action: &Action) -> Result<(), String> {
        match action {
            Action::Grant(grant) => {
                self.domain(&grant.by)?;
                self.domain(&grant.to)?;
                self.pages.extend(grant.pages.0.iter().cloned());
                Ok(())
            }
            Action::Entry(entry) => {
                self.domain(&entry.by)?;
                self.domain(&entry.to)?;
                entry.page.iter().try_for_each(|page| self.page(page))
            }
            Action::Word(word) => {
                self.domain(&word.by)?;
                let status = word.sort == Sort::Status;
                if status && (word.high > 0 || word.low > u16::MAX.into()) {
                    return Err("a status word has 16 bits; expected `low` up to 65535".into());
                }
                Ok(())
            }
            Action::EndAccess(end) => self.pages(&end.pages),
            Action::TakeBack(take) => self.pages(&take.pages),
            Action::Map(map) => self.map(map),
            Action::Unmap(unmap) => self.unmap(unmap),
            Action::Copy(copy) => {
                self.domain(&copy.by)?;
                self.pages(&copy.pages)?;
                fits("status", copy.status.as_ref(), copy.pages.0.len())
            }
            Action::GoOn(call) => self.domain(&call.by),
            Action::Swap(swap) => {
                self.domain(&swap.by)?;
                self.pages(&swap.pages)?;
                self.pages(&swap.with)?;
                let (pages, with) = (swap.pages.0.len(), swap.with.0.len());
                if pages != with {
                    return Err(format!(
                        "with has {with} names; expected {pages}, one for each page"
                    ));
                }
                fits("status", swap.status.as_ref(), pages)
            }
            Action::SetVersion(set) => self.domain(&set.by),
            Action::ListFrames(list) => self.domain(&list.by),
            Action::StatusFrame(frame) => self.domain(&frame.by),
            Action::Populate(populate) => {
                self.domain(&populate.by)?;
                if ![0, 9].contains(&populate.order) {
                    return Err(format!("order is {}; expected 0 or 9", populate.order));
                }
                if populate.at & ((1 << populate.order) - 1) != 0 {
                    return Err(format!("at is {:#x}; expected a multiple of 512", populate.at));
                }
                for page in &populate.pages.0 {
                    if !self.pages.insert(page.clone()) {
                        return Err(format!("`{page}` is a page already"));
                    }
                }
                self.mappings.extend(populate.pages.0.iter().cloned());
                Ok(())
            }
            Action::Clear(clear) => {
                self.domain(&clear.by)?;
                if clear.count == 0 { Err("count is 0; expected 1 or more".into()) } else { Ok(()) }
            }
            Action::Restrict(restrict) => {
                self.domain(&restrict.by)?;
                let none = restrict.count == 0;
                if none { Err("count is 0; expected 1 or more".into()) } else { Ok(()) }
            }
            Action::SwapPage(swap) => {
                self.pages.insert(swap.page.clone());
                self.mappings.insert(swap.page.clone());
                self.domain(&swap.by)
            }
            Action::MovePage(page) => self.domain(&page.by),
            Action::Reuse(reuse) => reuse.forge.iter().try_for_each(|page| self.page(page)),
            Action::Access(access) => self.access(access),
            Action::DmaBegin(begin) => {
                self.device(&begin.by)?;
                self.mappings(&begin.mappings)
            }
            Action::Attach(attach) => {
                self.device(&attach.device)?;
                self.domain(&attach.to)
            }
            Action::Detach(detach) => {
                self.device(&detach.device)?;
                self.domain(&detach.from)
            }
            Action::Reattach(reattach) => {
                self.device(&reattach.device)?;
                self.domain(&reattach.from)?;
                self.domain(&reattach.to)
            }
            Action::Unplug(unplug) => self.device(&unplug.device),
            Action::DeclareGone(gone) => self.device(&gone.device),
            Action::Enter(enter) => {
                cpu(enter.cpu)?;
                if let Some(vcpu) = enter.vcpu
                    && !(1..=LAST_CPU).contains(&vcpu)
                {
                    return Err(format!("there is no vcpu {vcpu}; expected 1 to {LAST_CPU}"));
                }
                self.domain(&enter.domain)
            }
            Action::Leave(leave) => cpu(leave.cpu),
            Action::Destroy(destroy) => self.domain(&destroy.domain),
            Action::Check(check) => {
                let mappings = [&check.mapped, &check.held, &check.released];
                mappings.into_iter().flatten().try_for_each(|names| self.mappings(names))?;
                let pages = [
                    &check.free,
                    &check.kept,
                    &check.writing,
                    &check.reading,
                    &check.idle,
                    &check.counted,
                ];
                pages.into_iter().flatten().try_for_each(|names| self.pages(names))?;
                if check.counted.is_some() != check.references.is_some() {
                    return Err("`references` and `counted` go together".into());
                }
                Ok(())
            }
            Action::Workload(workload) => match crate::workloads::known(&workload.name) {
                true => Ok(()),
                false => Err(format!("`{}` is no workload; expected W1 to W8", workload.name)),
            },
            Action::Speculate(_)
            | Action::DmaFinish(_)
            | Action::Fail(_)
            | Action::Repair(_)
            | Action::Faults(_)
            | Action::Memory(_)
            | Action::Retry(_)
            | Action::Mark(_) => Ok(()),
        }
    }

    fn map(&mut self, map: &Map) -> Result<(), String> {
        self.domain(&map.by)?;
        self.pages(&map.pages)?;
        let count = map.pages.0.len();
        if let Some(names) = &map.names
            && names.0.len() != count
        {
            return Err(format!("`as` has {} names; expected {count}", names.0.len()));
        }
        fits("status", map.status.as_ref(), count)?;
        elements(&map.alter, count)?;
        self.mappings.extend(map.names.as_ref().unwrap_or(&map.pages).0.iter().cloned());
        Ok(())
    }

    fn unmap(&self, unmap: &Unmap) -> Result<(), String> {
        self.domain(&unmap.by)?;
        self.mappings(&unmap.mappings)?;
        let count = unmap.mappings.0.len();
        fits("status", unmap.status.as_ref(), count)?;
        elements(&unmap.alter, count)
    }

    fn access(&self, access: &Access) -> Result<(), String> {
        for name in &access.by.0 {
            match is_cpu(name) {
                Some(number) => cpu(number)?,
                None => self.device(name)?,
            }
        }
        let count = match (&access.mappings, &access.at) {
            (Some(names), None) => {
                self.mappings(names)?;
                names.0.len()
            }
            (None, Some(numbers)) => numbers.many().unwrap_or(1),
            (None, None) | (Some(_), Some(_)) => {
                return Err("an access is of `mappings` or `at` frame numbers, one of them".into());
            }
        };
        fits("reaches", Some(&access.reaches), count)?;
        for place in 0..count {
            match access.reaches.at(place).map(String::as_str) {
                Some("fault" | "any") | None => {}
                Some("same") if access.mappings.is_some() => {}
                Some("same") => return Err("`same` needs `mappings`".into()),
                Some(page) => self.page(page)?,
            }
        }
        Ok(())
    }

    fn domain(&self, name: &str) -> Result<(), String> {
        known("domain", name, &self.domains)
    }

    fn device(&self, name: &str) -> Result<(), String> {
        known("device", name, &self.devices)
    }

    fn page(&self, name: &str) -> Result<(), String> {
        known("page", name, &self.pages)
    }

    fn pages(&self, names: &Names) -> Result<(), String> {
        names.0.iter().try_for_each(|name| self.page(name))
    }

    fn mappings(&self, names: &Names) -> Result<(), String> {
        names.0.iter().try_for_each(|name| known("mapping", name, &self.mappings))
    }
}

fn known(what: &str, name: &str, names: &BTreeSet<String>) -> Result<(), String> {
    if names.contains(name) {
        return Ok(());
    }
    const SHOWN: usize = 8;
    let mut list: Vec<&str> = names.iter().take(SHOWN).map(String::as_str).collect();
    if names.len() > SHOWN {
        list.push("...");
    }
    let list = if list.is_empty() { "none so far".to_owned() } else { list.join(", ") };
    Err(format!("there is no {what} `{name}` here; expected one of: {list}"))
}

fn cpu(number: usize) -> Result<(), String> {
    if (1..=LAST_CPU).contains(&number) {
        Ok(())
    } else {
        Err(format!("there is no cpu {number} for guests; expected 1 to {LAST_CPU}"))
    }
}

fn fits<T>(key: &str, values: Option<&OneOrMany<T>>, count: usize) -> Result<(), String> {
    match values.and_then(OneOrMany::many) {
        Some(many) if many != count => {
            Err(format!("`{key}` has {many} values for {count} elements"))
        }
        Some(_) | None => Ok(()),
    }
}

fn elements(changes: &[Alter], count: usize) -> Result<(), String> {
    match changes.iter().find(|change| change.element >= count) {
        Some(change) => Err(format!(
            "element {} is altered; expected 0 to {}",
            change.element,
            count.saturating_sub(1)
        )),
        None => Ok(()),
    }
}
