//! A generated workload as steps: map, let hardware use, give back.
//!
//! Names and references of pages that were given back are used again, so that no more of
//! them are needed than there are pages at a time.

use std::collections::BTreeMap;

use host::workloads::{Leaf, Step};

use super::{CONTROLLER, Layout, Lowered, Lowering, hardware::NO_WALK};
use crate::{
    format::{Attempt, Clear, End, Giving, Grant, Map, Order, Populate, Unmap, Workload},
    values::{Count, Names},
    workloads::{ELEMENTS, even_runs, named},
};

/// A page that is mapped.
struct Live {
    name: String,
    leaf: Leaf,
    /// The reference of its grant; nothing for a domain's own memory.
    reference: Option<u32>,
}

/// Pages by where they are, and what is there to be used again.
#[derive(Default)]
struct Mapped {
    live: BTreeMap<u64, Live>,
    names: Vec<String>,
    references: Vec<u32>,
    /// Names so far.
    count: usize,
}

impl Mapped {
    fn name(&mut self) -> String {
        self.names.pop().unwrap_or_else(|| {
            self.count += 1;
            format!("w{}", self.count)
        })
    }
}

impl Lowering {
    pub(super) fn workload(&mut self, workload: &Workload) -> Lowered {
        let found = named(&workload.name).ok_or("there is no such workload")?;
        if self.layout == Layout::Shared {
            self.skip(NO_WALK);
        } else {
            self.runs.entry((1, 2)).or_default();
        }
        let mut mapped = Mapped::default();
        for step in found.steps.iter().take(workload.steps.unwrap_or(usize::MAX)) {
            match step {
                Step::Use(leaves) => {
                    let leaves = &leaves[..leaves.len().min(workload.pages)];
                    let is_new = |leaf: &&Leaf| !mapped.live.contains_key(&leaf.first.get());
                    let mut new: Vec<Leaf> = leaves.iter().filter(is_new).copied().collect();
                    new.dedup();
                    for run in even_runs(&new) {
                        self.map_run(&mut mapped, run)?;
                    }
                    self.touch(
                        leaves.iter().filter_map(|leaf| mapped.live.get(&leaf.first.get())),
                    )?;
                }
                Step::Unmap(leaves) => {
                    let gone =
                        leaves.iter().filter_map(|leaf| mapped.live.remove(&leaf.first.get()));
                    let gone = gone.collect();
                    self.give_back(&mut mapped, gone)?;
                }
            }
        }
        let gone = std::mem::take(&mut mapped.live).into_values().collect();
        self.give_back(&mut mapped, gone)
    }

    /// Maps leaves of one size that lie evenly.
    fn map_run(&mut self, mapped: &mut Mapped, run: &[Leaf]) -> Lowered {
        let Some(first) = run.first() else { return Ok(()) };
        let at = first.first.get();
        let next = run.get(1).map_or(at + 1, |leaf| leaf.first.get());
        let stride = next.wrapping_sub(at);
        let names: Vec<String> = run.iter().map(|_| mapped.name()).collect();
        let mut references = Vec::new();
        if first.order > 0 {
            let (pages, by) = (Names(names.clone()), "back".to_owned());
            self.populate(&Populate {
                pages,
                by,
                at,
                stride: Some(stride),
                order: first.order,
                result: Attempt::Ok,
                tlb: None,
                iotlb: None,
            })?;
            references.resize(run.len(), None);
        } else {
            for name in &names {
                let reference = mapped.references.pop();
                let next =
                    self.references.get(&1).copied().unwrap_or(super::grants::FIRST_REFERENCE);
                references.push(reference.or_else(|| u32::try_from(next).ok()));
                let (by, to) = ("front".to_owned(), "back".to_owned());
                let pages = Names(vec![name.clone()]);
                self.grant(&Grant { pages, by, to, reference, read_only: false })?;
            }
            self.map(&Map {
                pages: Names(names.clone()),
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
            })?;
        }
        for ((leaf, name), reference) in run.iter().zip(names).zip(references) {
            mapped.live.insert(leaf.first.get(), Live { name, leaf: *leaf, reference });
        }
        Ok(())
    }

    /// Everybody writes to each of the pages, and all of them are looked at afterwards.
    fn touch<'l>(&mut self, pages: impl Iterator<Item = &'l Live>) -> Lowered {
        let mut pages: Vec<(u64, &String)> =
            pages.map(|live| (live.leaf.first.get(), &live.name)).collect();
        // A page that is used twice in a step is looked at once.
        pages.sort_unstable();
        pages.dedup();
        for pages in pages.chunks(ELEMENTS) {
            for who in [1, CONTROLLER] {
                if who != CONTROLLER && self.layout == Layout::Shared {
                    continue;
                }
                for (gfn, name) in pages {
                    if who != CONTROLLER {
                        let reach = self.runs.entry((1, 2)).or_default();
                        reach.extend((gfn >> 27 != 0).then_some(gfn >> 27));
                    }
                    let number = self.number(name)?;
                    self.emit("use", &[*gfn, number]);
                }
                self.emit("touch", &[who]);
            }
        }
        Ok(())
    }

    fn give_back(&mut self, mapped: &mut Mapped, pages: Vec<Live>) -> Lowered {
        for pages in pages.chunks(ELEMENTS) {
            let mut grants = Vec::new();
            for Live { name, leaf, reference } in pages {
                match reference {
                    Some(reference) => {
                        grants.push(name.clone());
                        mapped.references.push(*reference);
                    }
                    None => self.clear(&Clear {
                        by: "back".to_owned(),
                        first: leaf.first.get(),
                        count: 1 << leaf.order,
                        budget: 0,
                        steps: None,
                        result: Attempt::Ok,
                        tlb: None,
                        iotlb: None,
                    })?,
                }
                mapped.names.push(name.clone());
            }
            if grants.is_empty() {
                continue;
            }
            let chunks = Count { min: 0, max: grants.len().div_ceil(32) as u64 };
            let mappings = Names(grants);
            // Only what this call asks for is compared.
            self.emit("begin", &[]);
            self.unmap(&Unmap {
                mappings: mappings.clone(),
                by: "back".to_owned(),
                operation: Giving::Unmap,
                order: Order::Given,
                alter: Vec::new(),
                outcome: End::Done,
                status: None,
                tlb: None,
                iotlb: None,
            })?;
            self.asked(Some(chunks), Some(chunks));
            self.end_grants("take-back", &mappings, Attempt::Ok)?;
        }
        Ok(())
    }
}
