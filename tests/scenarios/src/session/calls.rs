//! The hypercalls of a scenario that map grants and give them back.

use flush::{DomainId, Gfn};
use gnttab::{
    Call, Errno, GuestAddress, Outcome,
    abi::{MapGrantRef, UnmapAndReplace, UnmapGrantRef},
};
use host::{
    Ram,
    calls::{map_request, operation, unmap_request},
    world::{Flushes, POISON},
};
use zerocopy::{FromBytes, FromZeros, Immutable, IntoBytes};

use super::{Doing, Left, Mapped, Session};
use crate::{
    format::{Alter, End, Ending, Giving, GoOn, Map, Order, Unmap},
    values::OneOrMany,
};

impl Session {
    /// Makes a call over elements, which are as it left them on return.
    pub(super) fn elements<T: IntoBytes + FromBytes + Immutable>(
        &self,
        id: DomainId,
        command: u32,
        elements: &mut [T],
        doing: Doing<'_>,
    ) -> Result<(Outcome, Flushes), String> {
        let base = Self::argument_base(doing);
        self.put(id, base, elements.as_bytes())?;
        let count = u32::try_from(elements.len()).map_err(|_| "too many elements")?;
        self.longest.set(self.longest.get().max(count.into()));
        let byte = |position: u64| base + position * size_of::<T>() as u64;
        self.world.faults.unreadable.set(self.unreadable.get().map(byte));
        let call = Call { command, argument: GuestAddress(base), count };
        let ended = self.call(id, call, doing);
        self.get(id, base, elements.as_mut_bytes())?;
        Ok(ended)
    }

    fn call(&self, id: DomainId, call: Call, doing: Doing<'_>) -> (Outcome, Flushes) {
        let ended = self.world.call_as(id, |caller| {
            let manner = self.manner(doing);
            let drop_page = |page: gnttab::PageReference, typed: bool| {
                self.world.note_end(caller.guest, page.mfn());
                let pages = &self.world.hypervisor.pages;
                if pages.get(page.mfn()).0 > 0 && pages.drop_one(page.mfn(), typed) {
                    self.world.hypervisor.memory.ram().release(page.mfn());
                }
            };
            call.run(&manner.scripted(caller, &drop_page))
        });
        self.account(id, ended)
    }

    pub(super) fn put(&self, id: DomainId, address: u64, bytes: &[u8]) -> Result<(), String> {
        let guest = self.domain_by_id(id)?;
        let done = self.world.hypervisor.copy_to(guest, GuestAddress(address), bytes);
        done.map_err(|_| format!("{} has no memory for arguments", self.domain_name(id)))
    }

    pub(super) fn get(&self, id: DomainId, address: u64, bytes: &mut [u8]) -> Result<(), String> {
        let guest = self.domain_by_id(id)?;
        let done = self.world.hypervisor.copy_from(guest, GuestAddress(address), bytes);
        done.map_err(|_| format!("{} has no memory for arguments", self.domain_name(id)))
    }

    /// Judges the end of a call: outcome, statuses, flushes.
    pub(super) fn judge_call(
        &self,
        ending: &Ending,
        outcome: Outcome,
        statuses: &[i16],
        flushes: Flushes,
    ) -> Result<(), String> {
        let found = match outcome {
            Outcome::Done => End::Done,
            Outcome::Continue { .. } => End::Continue,
            Outcome::Failed(Errno::Fault) => End::Fault,
            Outcome::Failed(Errno::Busy) => End::Busy,
            Outcome::Failed(_) => End::Invalid,
        };
        let expected = ending.outcome;
        self.expect(expected == found || expected == End::Any, || {
            format!("the call ended as {outcome:?}; expected {expected:?}")
        })?;
        let okay = OneOrMany::One(0);
        let wanted = match (&ending.status, found) {
            (Some(status), _) => Some(status),
            (None, End::Done) if expected != End::Any => Some(&okay),
            (None, _) => None,
        };
        for (place, status) in statuses.iter().enumerate() {
            if let Some(wanted) = wanted.and_then(|wanted| wanted.at(place)) {
                self.expect(wanted == status, || {
                    let poison = if *status == POISON { " (never written)" } else { "" };
                    format!("element {place} has status {status}{poison}; expected {wanted}")
                })?;
            }
        }
        self.check_flushes(ending.tlb, ending.iotlb, flushes)
    }

    pub(super) fn map(&self, map: &Map, doing: Doing<'_>) -> Result<(), String> {
        let id = self.domain(&map.by)?.id();
        let names = map.names.as_ref().unwrap_or(&map.pages);
        let mut elements = Vec::new();
        let mut made = Vec::new();
        for (place, (page, name)) in map.pages.0.iter().zip(&names.0).enumerate() {
            let gfn = Gfn::new(map.at.wrapping_add(map.stride.wrapping_mul(place as u64)));
            let found = self.page(page)?;
            let (granter, reference) =
                found.grants.last().copied().unwrap_or((found.owner, u32::MAX));
            let mut element = map_request(granter, reference, gfn, map.read_only);
            let mut mapped = Mapped {
                page: page.clone(),
                domain: id,
                gfn,
                handle: u32::MAX,
                grant: Some((granter, reference)),
            };
            for change in map.alter.iter().filter(|change| change.element == place) {
                alter_map(change, &mut element, &mut mapped);
            }
            elements.push(element);
            made.push((name, mapped));
        }
        let (outcome, flushes) = self.elements(id, operation::MAP, &mut elements, doing)?;
        let statuses: Vec<i16> = elements.iter().map(|element| element.status).collect();
        let mut good = 0;
        for (element, (name, mut mapped)) in elements.iter().zip(made) {
            mapped.handle = element.handle;
            if element.status == 0 {
                good += 1;
                self.places.borrow_mut().insert((id, mapped.gfn));
                self.mappings.borrow_mut().insert(name.clone(), mapped);
            } else {
                self.places.borrow_mut().insert((id, mapped.gfn));
                self.mappings.borrow_mut().entry(name.clone()).or_insert(mapped);
            }
        }
        self.note_left(id, outcome, doing, elements.len(), size_of::<MapGrantRef>(), 18);
        if let (Outcome::Continue { .. }, Some(left)) =
            (outcome, self.left.borrow_mut().get_mut(&id))
        {
            left.names.clone_from(&names.0);
        }
        self.say(format!(
            "{} maps {} grant(s), {good} of them well: {outcome:?}, {} + {} flushes",
            map.by,
            elements.len(),
            flushes.tlb,
            flushes.iotlb
        ));
        let ending = Ending {
            outcome: map.outcome,
            status: map.status.clone(),
            tlb: map.tlb,
            iotlb: map.iotlb,
        };
        self.judge_call(&ending, outcome, &statuses, flushes)
    }

    pub(super) fn unmap(&self, unmap: &Unmap, doing: Doing<'_>) -> Result<(), String> {
        let id = self.domain(&unmap.by)?.id();
        let mut names: Vec<&String> = unmap.mappings.0.iter().collect();
        match unmap.order {
            Order::Given => {}
            Order::Reversed => names.reverse(),
            Order::Shuffled => shuffle(&mut names),
        }
        let mut plain = Vec::new();
        for (place, name) in names.iter().enumerate() {
            let mapped = self.mapping(name)?;
            let mut element = unmap_request(mapped.handle, mapped.gfn);
            for change in unmap.alter.iter().filter(|change| change.element == place) {
                element.handle = change.handle.unwrap_or(element.handle);
                element.host_addr = change.address.unwrap_or(element.host_addr);
                element.dev_bus_addr = change.device_address.unwrap_or(element.dev_bus_addr);
            }
            plain.push(element);
        }
        let (outcome, flushes, statuses) = match unmap.operation {
            Giving::Unmap => {
                let (outcome, flushes) = self.elements(id, operation::UNMAP, &mut plain, doing)?;
                let statuses: Vec<i16> = plain.iter().map(|element| element.status).collect();
                (outcome, flushes, statuses)
            }
            Giving::Replace => {
                let mut elements: Vec<UnmapAndReplace> =
                    plain.iter().map(|element| replacing(element, unmap, &plain)).collect();
                let (outcome, flushes) =
                    self.elements(id, operation::REPLACE, &mut elements, doing)?;
                let statuses = elements.iter().map(|element| element.status).collect();
                (outcome, flushes, statuses)
            }
        };
        self.note_left(id, outcome, doing, plain.len(), size_of::<UnmapGrantRef>(), 20);
        self.say(format!(
            "{} gives {} mapping(s) back: {outcome:?}, {} + {} flushes",
            unmap.by,
            plain.len(),
            flushes.tlb,
            flushes.iotlb
        ));
        let ending = Ending {
            outcome: unmap.outcome,
            status: unmap.status.clone(),
            tlb: unmap.tlb,
            iotlb: unmap.iotlb,
        };
        self.judge_call(&ending, outcome, &statuses, flushes)
    }

    fn note_left(
        &self,
        id: DomainId,
        outcome: Outcome,
        doing: Doing<'_>,
        count: usize,
        size: usize,
        status_offset: usize,
    ) {
        if let Outcome::Continue { rest, .. } = outcome {
            let base = Self::argument_base(doing);
            let names = Vec::new();
            let left = Left { rest, base, status_offset, size, count, names };
            self.left.borrow_mut().insert(id, left);
        }
    }

    pub(super) fn go_on(&self, call: &GoOn, doing: Doing<'_>) -> Result<(), String> {
        let id = self.domain(&call.by)?.id();
        let left = self.left.borrow_mut().remove(&id);
        let Some(mut left) = left else {
            return self.expect(false, || format!("{} has left no call", call.by));
        };
        let (outcome, flushes) = self.call(id, left.rest, doing);
        let mut bytes = vec![0; left.count * left.size];
        self.get(id, left.base, &mut bytes)?;
        let statuses: Vec<i16> = bytes
            .chunks(left.size)
            .filter_map(|element| element.get(left.status_offset..left.status_offset + 2))
            .map(|status| i16::from_le_bytes([status[0], status[1]]))
            .collect();
        for (name, element) in left.names.iter().zip(bytes.chunks(left.size)) {
            if let Ok(element) = MapGrantRef::read_from_bytes(element)
                && let Some(mapped) = self.mappings.borrow_mut().get_mut(name)
                && element.status == 0
            {
                mapped.handle = element.handle;
            }
        }
        self.say(format!("the call of {} goes on: {outcome:?}", call.by));
        if let Outcome::Continue { rest, .. } = outcome {
            left.rest = rest;
            self.left.borrow_mut().insert(id, left);
        }
        let ending = Ending {
            outcome: call.outcome,
            status: call.status.clone(),
            tlb: call.tlb,
            iotlb: call.iotlb,
        };
        self.judge_call(&ending, outcome, &statuses, flushes)
    }
}

fn alter_map(change: &Alter, element: &mut MapGrantRef, mapped: &mut Mapped) {
    let granter = change.domain.map(DomainId::new);
    if let Some((known_granter, known_reference)) = &mut mapped.grant {
        *known_reference = change.reference.unwrap_or(*known_reference);
        *known_granter = granter.unwrap_or(*known_granter);
        element.reference = *known_reference;
        element.domain = known_granter.get();
    }
    element.flags = change.flags.unwrap_or(element.flags);
    if let Some(address) = change.address {
        element.host_addr = address;
        mapped.gfn = Gfn::new(address >> 12);
    }
}

fn replacing(element: &UnmapGrantRef, unmap: &Unmap, all: &[UnmapGrantRef]) -> UnmapAndReplace {
    let mut replacing = UnmapAndReplace::new_zeroed();
    (replacing.host_addr, replacing.handle) = (element.host_addr, element.handle);
    replacing.status = POISON;
    let place = all.iter().position(|other| other.handle == element.handle);
    let change = unmap.alter.iter().find(|change| Some(change.element) == place);
    replacing.new_addr = change.and_then(|change| change.new_address).unwrap_or(0);
    replacing
}

/// Puts items into an order that looks like none, the same each time.
fn shuffle<T>(items: &mut [T]) {
    let mut state = 0x9e37_79b9_7f4a_7c15_u64;
    for end in (1..items.len()).rev() {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        items.swap(end, usize::try_from(state % (end as u64 + 1)).unwrap_or(0));
    }
}
