//! A generated workload as steps: map, let hardware use, give back.

use std::collections::{BTreeMap, BTreeSet};

use host::workloads::{Leaf, Step};

use super::{Doing, Session};
use crate::{
    format::{Access, AccessKind, End, Giving, Grant, Map, Order, Populate, TakeBack, Unmap},
    values::{Names, OneOrMany},
    workloads::{ELEMENTS, even_runs, named},
};

impl Session {
    pub(super) fn workload(
        &self,
        workload: &crate::format::Workload,
        doing: Doing<'_>,
    ) -> Result<(), String> {
        let found = named(&workload.name).ok_or("there is no such workload")?;
        let mut live: BTreeMap<u64, String> = BTreeMap::new();
        let mut number = 1_u64;
        let (all, steps) = (found.steps.len(), workload.steps.unwrap_or(found.steps.len()));
        for step in found.steps.iter().take(steps) {
            match step {
                Step::Use(leaves) => {
                    let leaves = &leaves[..leaves.len().min(workload.pages)];
                    let is_new = |leaf: &&Leaf| !live.contains_key(&leaf.first.get());
                    let mut seen = BTreeSet::new();
                    let first_time = |leaf: &&Leaf| seen.insert(leaf.first.get());
                    let new = leaves.iter().filter(is_new).filter(first_time);
                    let new: Vec<Leaf> = new.copied().collect();
                    for run in even_runs(&new) {
                        let names: Vec<String> =
                            (number..).take(run.len()).map(|number| format!("w{number}")).collect();
                        number += run.len() as u64;
                        self.map_run(&names, run, doing)?;
                        live.extend(run.iter().map(|leaf| leaf.first.get()).zip(names));
                    }
                    let names = leaves.iter().filter_map(|leaf| live.get(&leaf.first.get()));
                    self.touch(names.cloned().collect())?;
                }
                Step::Unmap(leaves) => {
                    let names: Vec<String> =
                        leaves.iter().filter_map(|leaf| live.remove(&leaf.first.get())).collect();
                    self.give_back(&names, doing)?;
                }
            }
            self.settled()?;
        }
        self.say(format!(
            "{} is played: {} of its {all} steps, of each up to {} pages",
            workload.name,
            steps.min(all),
            workload.pages
        ));
        let left: Vec<String> = live.into_values().collect();
        self.give_back(&left, doing)
    }

    /// Maps leaves of one size that lie evenly.
    fn map_run(&self, names: &[String], run: &[Leaf], doing: Doing<'_>) -> Result<(), String> {
        let Some(first) = run.first() else { return Ok(()) };
        let next = run.get(1).map_or(first.first.get() + 1, |leaf| leaf.first.get());
        let stride = next.wrapping_sub(first.first.get());
        let (pages, at) = (Names(names.to_vec()), first.first.get());
        if first.order > 0 {
            let populate = Populate {
                pages,
                by: "back".to_owned(),
                at,
                stride: Some(stride),
                order: first.order,
                result: crate::format::Attempt::Ok,
                tlb: None,
                iotlb: None,
            };
            return self.populate(&populate, doing);
        }
        for name in names {
            let (by, to) = ("front".to_owned(), "back".to_owned());
            let pages = Names(vec![name.clone()]);
            let reference = self.spare.borrow_mut().pop();
            self.grant(&Grant { pages, by, to, reference, read_only: false })?;
        }
        let map = Map {
            pages,
            by: "back".to_owned(),
            at,
            stride,
            read_only: false,
            names: None,
            alter: Vec::new(),
            outcome: End::Done,
            status: None,
            tlb: None,
            iotlb: None,
        };
        self.map(&map, doing)
    }

    fn touch(&self, names: Vec<String>) -> Result<(), String> {
        let by = Names(vec!["cpu1".to_owned(), "dev0".to_owned()]);
        self.access(&Access {
            by,
            mappings: Some(Names(names)),
            at: None,
            kind: AccessKind::Write,
            reaches: OneOrMany::One("same".to_owned()),
        })
    }

    fn give_back(&self, names: &[String], doing: Doing<'_>) -> Result<(), String> {
        for names in names.chunks(ELEMENTS) {
            let mut grants = Vec::new();
            for name in names {
                let mapped = self.mapping(name)?;
                match mapped.grant {
                    Some((_, reference)) => grants.push((name.clone(), reference)),
                    None => self.clear(
                        &crate::format::Clear {
                            by: "back".to_owned(),
                            first: mapped.gfn.get(),
                            count: 1 << self.page(&mapped.page)?.order,
                            budget: 0,
                            steps: None,
                            result: crate::format::Attempt::Ok,
                            tlb: None,
                            iotlb: None,
                        },
                        doing,
                    )?,
                }
            }
            if grants.is_empty() {
                continue;
            }
            let mappings = Names(grants.iter().map(|(name, _)| name.clone()).collect());
            let chunks = crate::values::Count { min: 0, max: grants.len().div_ceil(32) as u64 };
            self.unmap(
                &Unmap {
                    mappings: mappings.clone(),
                    by: "back".to_owned(),
                    operation: Giving::Unmap,
                    order: Order::Given,
                    alter: Vec::new(),
                    outcome: End::Done,
                    status: None,
                    tlb: Some(chunks),
                    iotlb: Some(chunks),
                },
                doing,
            )?;
            self.take_back(
                &TakeBack { pages: mappings, result: crate::format::Attempt::Ok },
                doing,
            )?;
            for (name, reference) in grants {
                self.forget(&name);
                self.spare.borrow_mut().push(reference);
            }
        }
        Ok(())
    }

    /// A page that was freed needs no name any more.
    fn forget(&self, name: &str) {
        let page = self.pages.borrow_mut().remove(name);
        let mapped = self.mappings.borrow_mut().remove(name);
        let mut places = self.places.borrow_mut();
        if let Some(page) = page {
            places.remove(&(page.owner, page.gfn));
        }
        if let Some(mapped) = mapped {
            places.remove(&(mapped.domain, mapped.gfn));
        }
    }
}
