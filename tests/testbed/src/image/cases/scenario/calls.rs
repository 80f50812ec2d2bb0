//! Hypercalls, element by element, and how they end.

use core::cell::Cell;

use flush::{DomainId, Gfn};
use gnttab::abi::{GetStatusFrames, MapGrantRef, SetupTable, UnmapGrantRef};
use gnttab::{Errno, Outcome, Status, TableFrame};
use iommu_vtd::Guarded as _;
use testbed::failure::{Context, Failure};
use testbed::scenario::ANY_STATUS;
use testbed::{ensure, fail};
use zerocopy::FromZeros as _;

use super::{ELEMENTS, Element, Left, Mapped, Page, Played, name, number};
use crate::embedding::PageInfo;
use crate::world::Manner;
use crate::world::scripted::{
    Field, Scripted, alter_map, alter_unmap, copy_element, map_element, swap_element, unmap_element,
};

/// What a list of frame numbers is filled with before a call.
const UNWRITTEN: u64 = 0x5a5a_5a5a_5a5a_5a5a;
/// Numbers that a list has room for.
const LIST: usize = 512;
/// Written into a status before a call.
const NO_STATUS: i16 = 0x5a5a;

/// Some of the calls use each other's arrays: what they do takes one element after another.
const ARRAYS: [Scripted; 3] = [Scripted::Map, Scripted::Copy, Scripted::Unmap];

/// How a call was to end, by number.
fn ends(outcome: Outcome) -> u64 {
    match outcome {
        Outcome::Done => 0,
        Outcome::Continue { .. } => 1,
        Outcome::Failed(Errno::Fault) => 2,
        Outcome::Failed(Errno::Busy) => 4,
        Outcome::Failed(_) => 3,
    }
}

/// How a call may end in any way.
const ANY_END: u64 = 5;

/// How often the first frame of a page is counted.
fn counts(page: &Page) -> u64 {
    PageInfo::of(page.frame).map_or(0, |info| info.counts().0.into())
}

/// A status as a line has it.
fn status(value: u64) -> Result<Option<i16>, Failure> {
    if value == ANY_STATUS {
        return Ok(None);
    }
    Ok(Some(u16::try_from(value).context("a status")?.cast_signed()))
}

/// A field by its number, as the runner counts them.
fn field(number: u64) -> Result<Field, Failure> {
    Ok(match number {
        0 => Field::Reference,
        1 => Field::Domain,
        2 => Field::Flags,
        3 => Field::Handle,
        4 => Field::Address,
        5 => Field::Other,
        other => fail!("there is no field {other}"),
    })
}

impl Played<'_> {
    /// The pages for a domain's calls are there before anything is counted.
    pub(super) fn prepare(&mut self, values: &[u64]) -> Result<bool, Failure> {
        let [domain] = values else { return Ok(false) };
        let guest = self.world.guest(number(*domain)?)?;
        for array in ARRAYS {
            for position in (0..ELEMENTS as u32).step_by(16).chain([ELEMENTS as u32 - 1]) {
                self.world.put_element(guest, array, position, &[0_u8; 4])?;
            }
        }
        self.marked = self.now()?;
        Ok(true)
    }

    pub(super) fn call_step(&mut self, word: &str, values: &[u64]) -> Result<bool, Failure> {
        match (word, values) {
            ("map", [mapping, page, gfn, read_only, expected, by]) => {
                let (page, by) = (name(*page)?, number(*by)?);
                let found = self.books.pages.get(page).and_then(Option::as_ref);
                let grant = found.and_then(|page| page.grants.last().copied());
                let grant = grant.unwrap_or((crate::world::FRONTEND, u32::MAX));
                let gfn = Gfn::new(*gfn);
                let made = Mapped { page, by, gfn, handle: u32::MAX, grant };
                let element = map_element(grant.0, grant.1, gfn, *read_only != 0);
                self.put(by, Scripted::Map, &element)?;
                self.push(*expected, Some((name(*mapping)?, made)), None)?;
            }
            ("unmap", [mapping, expected]) => {
                let Mapped { by, gfn, handle, .. } = self.mapping(*mapping)?;
                self.put(by, Scripted::Unmap, &unmap_element(handle, gfn))?;
                self.push(*expected, None, None)?;
            }
            ("copy", [page, gfn, write, expected, by]) => {
                let (granter, reference) = self.last_grant(*page)?;
                let element = copy_element(granter, reference, Gfn::new(*gfn), *write != 0);
                self.put(number(*by)?, Scripted::Copy, &element)?;
                self.push(*expected, None, None)?;
            }
            ("swap", [page, with, expected]) => {
                let (one, other) = (self.last_grant(*page)?, self.last_grant(*with)?);
                ensure!(one.0 == other.0, "the two grants are of two tables");
                self.put(one.0, Scripted::Swap, &swap_element(one.1, other.1))?;
                self.push(*expected, None, Some((one, other)))?;
            }
            ("alter-map", [number, value]) => self.alter_map(field(*number)?, *value)?,
            ("alter-unmap", [by, number, value]) => {
                self.alter_unmap(super::number(*by)?, field(*number)?, *value)?;
            }
            ("call-map", [by, end]) => self.call(Scripted::Map, *by, *end)?,
            ("call-unmap", [by, end]) => self.call(Scripted::Unmap, *by, *end)?,
            ("call-replace", [by, end]) => self.call(Scripted::Replace, *by, *end)?,
            ("call-copy", [by, end]) => self.call(Scripted::Copy, *by, *end)?,
            ("call-swap", [by, end]) => self.call(Scripted::Swap, *by, *end)?,
            ("go-on", [by, end, expected]) => self.go_on(number(*by)?, *end, *expected)?,
            ("set-version", [by, version, end, then]) => {
                self.set_version(number(*by)?, *version, *end, *then)?;
            }
            ("list-frames", [by, sort, frames, expected, written]) => {
                self.list_frames(number(*by)?, *sort != 0, *frames, *expected, *written)?;
            }
            ("status-frame", [by, frame, mapped, expected]) => {
                let frame = TableFrame::Status(usize::try_from(*frame).context("a frame")?);
                // Where the guest has it, by a number at which nothing else is.
                let at = (*mapped != 0).then_some(Gfn::new(0x50));
                let changed = self.world.guest(number(*by)?)?.grants.with(|table| {
                    table.map_frame(frame, |storage, _| storage.note(frame, at)).context("a frame")
                });
                super::attempt(*expected, changed)?;
            }
            _ => return Ok(false),
        }
        Ok(true)
    }

    /// Writes an element behind those that are there.
    fn put(
        &self,
        by: DomainId,
        array: Scripted,
        element: &(impl zerocopy::IntoBytes + zerocopy::Immutable),
    ) -> Result<(), Failure> {
        let position = u32::try_from(self.books.elements.len()).context("an element")?;
        self.world.put_element(self.world.guest(by)?, array, position, element)
    }

    fn push(
        &mut self,
        expected: u64,
        made: Option<(usize, Mapped)>,
        swapped: Option<((DomainId, u32), (DomainId, u32))>,
    ) -> Result<(), Failure> {
        let element = Element { status: status(expected)?, made, swapped };
        self.books.elements.try_push(element).ok().context("room for another element")
    }

    fn last_grant(&self, page: u64) -> Result<(DomainId, u32), Failure> {
        self.page(page)?.grants.last().copied().context("a grant of the page")
    }

    /// The position of the element that was written last.
    fn last_element(&self) -> Result<u32, Failure> {
        let last = self.books.elements.len().checked_sub(1).context("an element to change")?;
        u32::try_from(last).context("an element")
    }

    fn alter_map(&mut self, field: Field, value: u64) -> Result<(), Failure> {
        let position = self.last_element()?;
        let element = self.books.elements.last_mut().and_then(|element| element.made.as_mut());
        let (_, made) = element.context("an element of a map")?;
        let guest = self.world.guest(made.by)?;
        let mut element: MapGrantRef = self.world.element(guest, Scripted::Map, position)?;
        alter_map(&mut element, field, value)?;
        made.gfn = Gfn::new(element.host_addr >> 12);
        made.grant = (DomainId::new(element.domain), element.reference);
        self.world.put_element(guest, Scripted::Map, position, &element)
    }

    fn alter_unmap(&self, by: DomainId, field: Field, value: u64) -> Result<(), Failure> {
        let (position, guest) = (self.last_element()?, self.world.guest(by)?);
        let mut element: UnmapGrantRef = self.world.element(guest, Scripted::Unmap, position)?;
        alter_unmap(&mut element, field, value)?;
        self.world.put_element(guest, Scripted::Unmap, position, &element)
    }

    fn call(&mut self, operation: Scripted, by: u64, end: u64) -> Result<(), Failure> {
        let by = number(by)?;
        let elements = core::mem::take(&mut self.books.elements);
        let count = u32::try_from(elements.len()).context("elements")?;
        let outcome = self.make(by, operation, Ok(count))?;
        self.left = match outcome {
            Outcome::Continue { rest, .. } => {
                Some(Left { by, operation, rest, elements: elements.len() })
            }
            Outcome::Done | Outcome::Failed(_) => None,
        };
        let guest = self.world.guest(by)?;
        let mut broken = None;
        for (position, element) in (0..).zip(elements) {
            let status = self.world.status(guest, operation, position)?;
            if let Some((mapping, mut made)) = element.made {
                let answer: MapGrantRef = self.world.element(guest, operation, position)?;
                made.handle = answer.handle;
                let known = self.books.mappings.get_mut(mapping).context("a mapping")?;
                if status == Status::Okay.value() || known.is_none() {
                    *known = Some(made);
                }
            }
            if let (Some((one, other)), 0) = (element.swapped, status) {
                self.rename_grants(one, other);
            }
            if let Some(expected) = element.status.filter(|expected| *expected != status) {
                broken = broken.or(Some((position, status, expected)));
            }
        }
        ensure!(end == ANY_END || end == ends(outcome), "the call ended as {outcome:?}");
        if let Some((position, status, expected)) = broken {
            fail!("element {position} has status {status}, not {expected}");
        }
        Ok(())
    }

    /// Makes a call, or goes on with one, on a unit that may be about to refuse a command.
    fn make(
        &mut self,
        by: DomainId,
        operation: Scripted,
        call: Result<u32, gnttab::Call>,
    ) -> Result<Outcome, Failure> {
        let guest = self.world.guest(by)?;
        let before = self.world.counters();
        let (pages, audit) = (&self.books.pages, &self.world.audit);
        let counted = || pages.iter().flatten().map(counts).sum::<u64>() + audit.given_up();
        // Whatever was given up by the last flush, nothing more is before the next one.
        let (all, early) = (counted(), Cell::new(false));
        let look = || early.set(early.get() || counted() < all);
        let manner = Manner { before_flush: &look, ..self.manner() };
        let outcome = self.world.scripted(guest, operation, call, &manner, &self.mischief)?;
        ensure!(!early.get(), "a page was given up before the flush");
        let after = self.world.counters();
        if self.refused && after.refused > before.refused {
            // What was refused was submitted again. Waits took its place, all counted.
            self.refused = false;
            self.overwritten.iotlb_commands = (after.iotlb_commands - before.iotlb_commands) / 2;
            self.overwritten.waits = after.refused - before.refused;
        }
        Ok(outcome)
    }

    fn go_on(&mut self, by: DomainId, end: u64, expected: u64) -> Result<(), Failure> {
        let left = self.left.take().filter(|left| left.by == by);
        let Left { operation, rest, elements, .. } = left.context("a call that was left")?;
        let outcome = self.make(by, operation, Err(rest))?;
        if let Outcome::Continue { rest, .. } = outcome {
            self.left = Some(Left { by, operation, rest, elements });
        }
        ensure!(end == ANY_END || end == ends(outcome), "the call ended as {outcome:?}");
        let (expected, guest) = (status(expected)?, self.world.guest(by)?);
        for position in 0..u32::try_from(elements).context("elements")? {
            let status = self.world.status(guest, operation, position)?;
            let expected = expected.unwrap_or(status);
            ensure!(status == expected, "element {position} has status {status}, not {expected}");
        }
        Ok(())
    }

    /// What one of two grants was is the other one now.
    fn rename_grants(&mut self, one: (DomainId, u32), other: (DomainId, u32)) {
        for grant in self.books.pages.iter_mut().flatten().flat_map(|page| &mut page.grants) {
            if *grant == one {
                *grant = other;
            } else if *grant == other {
                *grant = one;
            }
        }
    }

    fn set_version(
        &mut self,
        by: DomainId,
        version: u64,
        end: u64,
        then: u64,
    ) -> Result<(), Failure> {
        let version = u32::try_from(version).context("a version")?;
        let guest = self.world.guest(by)?;
        self.world.put_element(guest, Scripted::SetVersion, 0, &version)?;
        let outcome = self.make(by, Scripted::SetVersion, Ok(1))?;
        if outcome == Outcome::Done {
            // What a change wipes is no grant any more.
            for page in self.books.pages.iter_mut().flatten() {
                page.grants.retain(|(granter, reference)| *granter != by || *reference < 8);
            }
        }
        ensure!(end == ANY_END || end == ends(outcome), "the call ended as {outcome:?}");
        let now: u32 = self.world.element(guest, Scripted::SetVersion, 0)?;
        ensure!(then == 0 || then == u64::from(now), "version {now} is in force, not {then}");
        Ok(())
    }

    fn list_frames(
        &mut self,
        by: DomainId,
        statuses: bool,
        frames: u64,
        expected: u64,
        written: u64,
    ) -> Result<(), Failure> {
        /// Where the list is: behind every array.
        const AT: u64 = 0x58 << 12;
        let frames = u32::try_from(frames).context("frames")?;
        let guest = self.world.guest(by)?;
        let empty = [UNWRITTEN; LIST];
        self.world.put_bytes(guest, AT, zerocopy::IntoBytes::as_bytes(&empty))?;
        let operation = if statuses { Scripted::StatusFrames } else { Scripted::SetupTable };
        if statuses {
            let mut element = GetStatusFrames::new_zeroed();
            (element.domain, element.frames) = (by.get(), frames);
            (element.list, element.status) = (AT, NO_STATUS);
            self.world.put_element(guest, operation, 0, &element)?;
        } else {
            let mut element = SetupTable::new_zeroed();
            (element.domain, element.frames) = (by.get(), frames);
            (element.list, element.status) = (AT, NO_STATUS);
            self.world.put_element(guest, operation, 0, &element)?;
        }
        let outcome = self.make(by, operation, Ok(1))?;
        ensure!(outcome == Outcome::Done, "the call ended as {outcome:?}");
        let found = self.world.status(guest, operation, 0)?;
        let expected = status(expected)?.unwrap_or(found);
        ensure!(found == expected, "the list has status {found}, not {expected}");
        let mut list = [0_u64; LIST];
        let bytes = zerocopy::IntoBytes::as_mut_bytes(&mut list);
        guest.read(gnttab::GuestAddress(AT), bytes).context("a list")?;
        let count = list.iter().filter(|number| **number != UNWRITTEN).count() as u64;
        ensure!(count == written, "{count} frame numbers were written, not {written}");
        Ok(())
    }
}
