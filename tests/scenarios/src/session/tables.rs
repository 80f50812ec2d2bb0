//! Steps about a domain's grant table as a whole, and copies between pages.

use flush::{DomainId, Gfn};
use gnttab::{
    Outcome, TableFrame,
    abi::{GetStatusFrames, SetupTable, SwapGrantRef},
};
use host::{
    calls::{Side, copy_request, operation},
    world::{Flushes, POISON},
};
use zerocopy::{FromZeros, IntoBytes};

use super::{Doing, Session};
use crate::format::{Copy, Ending, ListFrames, SetVersion, Sort, StatusFrame, Swap};
use crate::values::Count;

const SETUP_TABLE: u32 = 2;
const GET_STATUS_FRAMES: u32 = 9;
/// Where lists of frames are written: the last pages of an actor's arguments.
const LIST: u64 = 8 << 12;
/// How much of that a call may write.
const LIST_WORDS: usize = 4 * 512;
/// What a list of frames is filled with before a call.
const UNWRITTEN: u64 = 0x5a5a_5a5a_5a5a_5a5a;

/// Bytes that a copy moves: not the tag of a page.
const COPIED: u16 = 512;

impl Session {
    pub(super) fn set_version(&self, set: &SetVersion, doing: Doing<'_>) -> Result<(), String> {
        let id = self.domain(&set.by)?.id();
        // Whether a page has entries of version 1 is not known any more.
        self.views.borrow_mut().retain(|(granter, _), _| *granter != id);
        let mut version = [set.version];
        let (outcome, _) = self.elements(id, operation::SET_VERSION, &mut version, doing)?;
        if outcome == Outcome::Done {
            // What a change wipes is no grant any more; entries of a guest stay wild.
            for page in self.pages.borrow_mut().values_mut() {
                page.grants.retain(|(granter, reference)| *granter != id || *reference < 8);
            }
        }
        self.say(format!("{} asks for version {}: {outcome:?}", set.by, set.version));
        let ending = Ending { outcome: set.outcome, ..Ending::default() };
        self.judge_call(&ending, outcome, &[], Flushes::default())?;
        match set.then {
            Some(then) => self.expect(version[0] == then, || {
                format!("version {} is in force; expected {then}", version[0])
            }),
            None => Ok(()),
        }
    }

    pub(super) fn swap(&self, swap: &Swap, doing: Doing<'_>) -> Result<(), String> {
        let id = self.domain(&swap.by)?.id();
        let mut elements = Vec::new();
        for (page, with) in swap.pages.0.iter().zip(&swap.with.0) {
            let mut element = SwapGrantRef::new_zeroed();
            element.first = self.last_grant(page, id)?;
            element.second = self.last_grant(with, id)?;
            element.status = POISON;
            elements.push(element);
        }
        let (outcome, flushes) = self.elements(id, operation::SWAP, &mut elements, doing)?;
        for element in &elements {
            let (one, other) = ((id, element.first), (id, element.second));
            // A call that ends at a fault may have swapped the pair whose status it could
            // not write.
            let done = element.status == 0
                || element.status == POISON && outcome != Outcome::Done && self.changed(one, other);
            if done {
                self.rename_grants(one, other);
            }
            if element.status == POISON {
                break;
            }
        }
        let statuses: Vec<i16> = elements.iter().map(|element| element.status).collect();
        self.say(format!("{} swaps {} pair(s) of entries: {outcome:?}", swap.by, elements.len()));
        let (status, none) = (swap.status.clone(), Some(Count { min: 0, max: 0 }));
        let ending = Ending { outcome: swap.outcome, status, tlb: none, iotlb: none };
        self.judge_call(&ending, outcome, &statuses, flushes)
    }

    /// The reference of the newest grant of a page in the table of `granter`.
    fn last_grant(&self, page: &str, granter: DomainId) -> Result<u32, String> {
        let grants = self.page(page)?.grants;
        let found = grants.iter().rev().find(|(by, _)| *by == granter);
        let found = found.map(|(_, reference)| *reference);
        found.ok_or_else(|| format!("{} does not grant `{page}`", self.domain_name(granter)))
    }

    /// Whether the entry of one grant shows the page that was the other's.
    fn changed(&self, one: (DomainId, u32), other: (DomainId, u32)) -> bool {
        let is_others = |page: &&super::Page| page.grants.contains(&other);
        let gfn = self.pages.borrow().values().find(is_others).map(|page| page.gfn);
        gfn.is_some() && self.entry_frame(one.0, one.1) == gfn
    }

    /// What one of two grants was is the other one now.
    fn rename_grants(&self, one: (DomainId, u32), other: (DomainId, u32)) {
        let mut wild = self.wild.borrow_mut();
        if wild.contains(&one) || wild.contains(&other) {
            wild.extend([one, other]);
        }
        for grant in self.pages.borrow_mut().values_mut().flat_map(|page| &mut page.grants) {
            if *grant == one {
                *grant = other;
            } else if *grant == other {
                *grant = one;
            }
        }
    }

    pub(super) fn list_frames(&self, list: &ListFrames, doing: Doing<'_>) -> Result<(), String> {
        let id = self.domain(&list.by)?.id();
        let at = Self::argument_base(doing) + LIST;
        self.put(id, at, [UNWRITTEN; LIST_WORDS].as_bytes())?;
        let (outcome, status) = match list.sort {
            Sort::Shared => {
                let mut argument = [SetupTable::new_zeroed()];
                (argument[0].domain, argument[0].frames) = (id.get(), list.frames);
                (argument[0].list, argument[0].status) = (at, POISON);
                let ended = self.elements(id, SETUP_TABLE, &mut argument, doing)?;
                (ended.0, argument[0].status)
            }
            Sort::Status => {
                let mut argument = [GetStatusFrames::new_zeroed()];
                (argument[0].domain, argument[0].frames) = (id.get(), list.frames);
                (argument[0].list, argument[0].status) = (at, POISON);
                let ended = self.elements(id, GET_STATUS_FRAMES, &mut argument, doing)?;
                (ended.0, argument[0].status)
            }
        };
        let mut words = [0_u64; LIST_WORDS];
        self.get(id, at, words.as_mut_bytes())?;
        let written = words.iter().filter(|word| **word != UNWRITTEN).count();
        self.say(format!("{} lists frames: status {status}, {written} written", list.by));
        self.expect(outcome == Outcome::Done && status == list.status, || {
            format!("{outcome:?} with status {status}; expected status {}", list.status)
        })?;
        self.expect(written == list.written as usize, || {
            format!("{written} frame numbers were written; expected {}", list.written)
        })
    }

    pub(super) fn status_frame(&self, frame: &StatusFrame) -> Result<(), String> {
        let mut table = self.domain(&frame.by)?.grants();
        let changed = table.map_frame(TableFrame::Status(frame.frame), |storage, _| {
            if frame.mapped {
                storage.mapped_status.insert(frame.frame)
            } else {
                storage.mapped_status.remove(&frame.frame)
            }
        });
        drop(table);
        self.say(format!("status frame {}: mapped {}: {changed:?}", frame.frame, frame.mapped));
        let result = changed.map(|_| ()).map_err(|error| format!("{error:?}"));
        self.attempt(frame.result, result, "mapping the status frame")
    }

    pub(super) fn copy(&self, copy: &Copy, doing: Doing<'_>) -> Result<(), String> {
        let id = self.domain(&copy.by)?.id();
        let mut elements = Vec::new();
        for (place, name) in (0..).zip(&copy.pages.0) {
            let page = self.page(name)?;
            let (granter, reference) =
                page.grants.last().copied().unwrap_or((page.owner, u32::MAX));
            let granted = Side::Grant(granter, reference, 0);
            let own = Side::Own(Gfn::new(copy.at.wrapping_add(place)), 0);
            elements.push(match copy.write {
                true => copy_request(own, granted, COPIED),
                false => copy_request(granted, own, COPIED),
            });
        }
        let (outcome, flushes) = self.elements(id, operation::COPY, &mut elements, doing)?;
        let statuses: Vec<i16> = elements.iter().map(|element| element.status).collect();
        self.say(format!("{} copies {} page(s): {outcome:?}", copy.by, elements.len()));
        let ending = Ending {
            outcome: copy.outcome,
            status: copy.status.clone(),
            tlb: copy.tlb,
            iotlb: copy.iotlb,
        };
        self.judge_call(&ending, outcome, &statuses, flushes)
    }
}
