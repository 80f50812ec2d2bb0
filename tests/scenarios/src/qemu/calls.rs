//! The hypercalls of a scenario, as the testbed's backend makes them.

use super::{ANY_STATUS, ELEMENTS, Lowered, Lowering, NAMES, Placed};
use crate::{
    format::{Alter, End, Giving, Map, Order, Unmap},
    values::{Count, OneOrMany},
};

impl Lowering {
    pub(super) fn map(&mut self, map: &Map) -> Lowered {
        may_end(&map.by, map.outcome)?;
        let names = map.names.as_ref().unwrap_or(&map.pages);
        for (place, (page, name)) in map.pages.0.iter().zip(&names.0).enumerate() {
            if !self.granted.contains(page) {
                return Err("the page is not granted".to_owned());
            }
            let gfn = map.at.wrapping_add(map.stride.wrapping_mul(place as u64));
            let page_number = self.number(page)? as u64;
            let handle = self.handles;
            if handle == NAMES {
                return Err("too many mappings".to_owned());
            }
            self.handles += 1;
            let status = status(map.status.as_ref(), place, map.outcome)?;
            let mut placed = Placed { page: page.clone(), gfn, number: Some(handle) };
            self.emit("map", &[handle as u64, page_number, gfn, map.read_only.into(), status]);
            for change in map.alter.iter().filter(|change| change.element == place) {
                if let Some(address) = change.address {
                    placed.gfn = address >> 12;
                }
                self.alter("alter-map", change);
            }
            self.mappings.insert(name.clone(), placed);
        }
        self.end_call("call-map", map.pages.0.len(), map.tlb, map.iotlb)
    }

    /// Changes fields of the element that was emitted last, by the testbed's numbers.
    fn alter(&mut self, word: &str, change: &Alter) {
        let fields = [
            change.reference.map(u64::from),
            change.domain.map(u64::from),
            change.flags.map(u64::from),
            change.handle.map(u64::from),
            change.address,
            change.device_address.or(change.new_address),
        ];
        for (field, value) in (0..).zip(fields) {
            if let Some(value) = value {
                self.emit(word, &[field, value]);
            }
        }
    }

    pub(super) fn unmap(&mut self, unmap: &Unmap) -> Lowered {
        may_end(&unmap.by, unmap.outcome)?;
        if unmap.order == Order::Shuffled {
            self.skip("elements come in the order of the file");
        }
        let mut names: Vec<&String> = unmap.mappings.0.iter().collect();
        if unmap.order == Order::Reversed {
            names.reverse();
        }
        for (place, name) in names.into_iter().enumerate() {
            let Some(Placed { gfn, number: Some(number), .. }) = self.mappings.get(name).cloned()
            else {
                return Err(format!("`{name}` is no grant"));
            };
            let status = status(unmap.status.as_ref(), place, unmap.outcome)?;
            self.emit("unmap", &[number as u64, gfn, status]);
            for change in unmap.alter.iter().filter(|change| change.element == place) {
                self.alter("alter-unmap", change);
            }
        }
        let word = match unmap.operation {
            Giving::Unmap => "call-unmap",
            Giving::Replace => "call-replace",
        };
        self.end_call(word, unmap.mappings.0.len(), unmap.tlb, unmap.iotlb)
    }

    fn end_call(
        &mut self,
        word: &str,
        elements: usize,
        tlb: Option<Count>,
        iotlb: Option<Count>,
    ) -> Lowered {
        if elements > ELEMENTS {
            return Err(format!("{elements} elements; the testbed takes {ELEMENTS}"));
        }
        let any = Count { min: 0, max: u64::MAX };
        let (tlb, iotlb) = (tlb.unwrap_or(any), iotlb.unwrap_or(any));
        self.emit(word, &[tlb.min, tlb.max, iotlb.min, iotlb.max]);
        Ok(())
    }
}

/// The testbed has the calls of its backend end well, or as they may.
fn may_end(by: &str, outcome: End) -> Lowered {
    if by == "back" && matches!(outcome, End::Done | End::Any) {
        Ok(())
    } else {
        Err("the testbed's backend makes calls that end well".to_owned())
    }
}

/// The status that an element must have, without its sign.
fn status(statuses: Option<&OneOrMany<i16>>, place: usize, outcome: End) -> Result<u64, String> {
    if statuses.is_none() && outcome == End::Any {
        return Ok(ANY_STATUS);
    }
    let status = statuses.and_then(|statuses| statuses.at(place)).copied().unwrap_or(0);
    u64::try_from(-i32::from(status)).map_err(|_| "a status is never positive".to_owned())
}
