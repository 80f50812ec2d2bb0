//! The hypercalls of a scenario, element by element.

use super::{ANY_STATUS, ELEMENTS, Lowered, Lowering, Placed, attempt, numbered};
use crate::{
    format::{
        Alter, Copy, End, Giving, GoOn, ListFrames, Map, Order, SetVersion, Sort, StatusFrame,
        Swap, Unmap,
    },
    values::OneOrMany,
};

type Statuses = Option<OneOrMany<i16>>;

impl Lowering {
    pub(super) fn map(&mut self, map: &Map) -> Lowered {
        let by = self.domain(&map.by);
        let names = map.names.as_ref().unwrap_or(&map.pages);
        for (place, (page, name)) in map.pages.0.iter().zip(&names.0).enumerate() {
            let gfn = map.at.wrapping_add(map.stride.wrapping_mul(place as u64));
            let page_number = self.number(page)?;
            let number = numbered(&mut self.numbers, name).ok_or("too many mappings")?;
            let status = status(&map.status, place, map.outcome);
            let mut placed = Placed { page: page.clone(), gfn, by, number: Some(number) };
            self.emit("map", &[number, page_number, gfn, map.read_only.into(), status, by]);
            for change in map.alter.iter().filter(|change| change.element == place) {
                if let Some(address) = change.address {
                    placed.gfn = address >> 12;
                }
                for (field, value) in fields(change) {
                    self.emit("alter-map", &[field, value]);
                }
            }
            // One that fails leaves the name to whom has it.
            if status == 0 || status == ANY_STATUS {
                self.mappings.insert(name.clone(), placed);
            } else {
                self.mappings.entry(name.clone()).or_insert(placed);
            }
        }
        self.call("call-map", by, map.pages.0.len(), map.outcome)?;
        self.asked(map.tlb, map.iotlb);
        Ok(())
    }

    pub(super) fn unmap(&mut self, unmap: &Unmap) -> Lowered {
        let by = self.domain(&unmap.by);
        if unmap.order == Order::Shuffled {
            self.skip("elements come in the order of the file");
        }
        let mut names: Vec<&String> = unmap.mappings.0.iter().collect();
        if unmap.order == Order::Reversed {
            names.reverse();
        }
        for (place, name) in names.into_iter().enumerate() {
            let number = self.mappings.get(name).and_then(|placed| placed.number);
            let number = number.ok_or_else(|| format!("`{name}` is no grant"))?;
            let status = status(&unmap.status, place, unmap.outcome);
            self.emit("unmap", &[number, status]);
            for change in unmap.alter.iter().filter(|change| change.element == place) {
                for (field, value) in fields(change) {
                    self.emit("alter-unmap", &[by, field, value]);
                }
            }
        }
        let word = match unmap.operation {
            Giving::Unmap => "call-unmap",
            Giving::Replace => "call-replace",
        };
        self.call(word, by, unmap.mappings.0.len(), unmap.outcome)?;
        self.asked(unmap.tlb, unmap.iotlb);
        Ok(())
    }

    pub(super) fn copy(&mut self, copy: &Copy) -> Lowered {
        let by = self.domain(&copy.by);
        for (place, page) in copy.pages.0.iter().enumerate() {
            let number = self.number(page)?;
            let status = status(&copy.status, place, copy.outcome);
            let own = copy.at.wrapping_add(place as u64);
            self.emit("copy", &[number, own, copy.write.into(), status, by]);
        }
        self.call("call-copy", by, copy.pages.0.len(), copy.outcome)?;
        self.asked(copy.tlb, copy.iotlb);
        Ok(())
    }

    pub(super) fn swap(&mut self, swap: &Swap) -> Lowered {
        let by = self.domain(&swap.by);
        for (place, (page, with)) in swap.pages.0.iter().zip(&swap.with.0).enumerate() {
            let (page, with) = (self.number(page)?, self.number(with)?);
            self.emit("swap", &[page, with, status(&swap.status, place, swap.outcome)]);
        }
        self.call("call-swap", by, swap.pages.0.len(), swap.outcome)
    }

    fn call(&mut self, word: &str, by: u64, elements: usize, outcome: End) -> Lowered {
        if elements > ELEMENTS {
            return Err(format!("{elements} elements; the testbed takes {ELEMENTS}"));
        }
        self.callers.insert(by);
        self.emit(word, &[by, end(outcome)]);
        Ok(())
    }

    pub(super) fn go_on(&mut self, call: &GoOn) -> Lowered {
        if matches!(call.status, Some(OneOrMany::Many(_))) {
            return Err("the testbed compares one status for all elements".to_owned());
        }
        let by = self.domain(&call.by);
        self.emit("go-on", &[by, end(call.outcome), status(&call.status, 0, call.outcome)]);
        self.asked(call.tlb, call.iotlb);
        Ok(())
    }

    pub(super) fn set_version(&mut self, set: &SetVersion) -> Lowered {
        let by = self.domain(&set.by);
        self.callers.insert(by);
        let then = set.then.unwrap_or(0).into();
        self.emit("set-version", &[by, set.version.into(), end(set.outcome), then]);
        Ok(())
    }

    pub(super) fn list_frames(&mut self, list: &ListFrames) -> Lowered {
        let by = self.domain(&list.by);
        self.callers.insert(by);
        let sort = match list.sort {
            Sort::Shared => 0,
            Sort::Status => 1,
        };
        let status = encoded(list.status);
        self.emit("list-frames", &[by, sort, list.frames.into(), status, list.written.into()]);
        Ok(())
    }

    pub(super) fn status_frame(&mut self, frame: &StatusFrame) -> Lowered {
        let by = self.domain(&frame.by);
        let (number, mapped) = (frame.frame as u64, frame.mapped.into());
        self.emit("status-frame", &[by, number, mapped, attempt(frame.result)]);
        Ok(())
    }
}

/// The fields of an element that change, by the testbed's numbers.
fn fields(change: &Alter) -> impl Iterator<Item = (u64, u64)> {
    let fields = [
        change.reference.map(u64::from),
        change.domain.map(u64::from),
        change.flags.map(u64::from),
        change.handle.map(u64::from),
        change.address,
        change.device_address.or(change.new_address),
    ];
    (0..).zip(fields).filter_map(|(field, value)| Some((field, value?)))
}

/// The testbed's number for how a call ends.
fn end(outcome: End) -> u64 {
    match outcome {
        End::Done => 0,
        End::Continue => 1,
        End::Fault => 2,
        End::Invalid => 3,
        End::Busy => 4,
        End::Any => 5,
    }
}

fn encoded(status: i16) -> u64 {
    status.cast_unsigned().into()
}

/// The status that an element must have.
fn status(statuses: &Statuses, place: usize, outcome: End) -> u64 {
    match (statuses, outcome) {
        (Some(statuses), _) => statuses.at(place).map_or(ANY_STATUS, |status| encoded(*status)),
        (None, End::Done) => 0,
        (None, _) => ANY_STATUS,
    }
}
