//! A scenario file in the testbed: its steps, carried out one by one.
//!
//! The runner passes them as the first boot module (`testbed::scenario`). Options:
//! `tables=separate` or `tables=shared`, `lie=none`, `lie=skipped` or `lie=misdirected`.

use arrayvec::ArrayVec;
use flush::{DomainId, Gfn, Mfn};
use gnttab::Outcome;
use iommu_vtd::Counters;
use testbed::audit::Lie;
use testbed::failure::{Context, Failure};
use testbed::scenario::{self, ANY_STATUS, BUILT_IN, Line, NAMES};
use testbed::{ensure, fail};

use crate::devices::edu::Edu;
use crate::embedding::{Layout, Memory};
use crate::machine::Machine;
use crate::world::{BYSTANDER, Field, Manner, Overwritten, Scripted, World};
use crate::{poison, say};

/// Elements of one call.
const ELEMENTS: usize = 128;

/// A page that has a name.
#[derive(Clone, Copy)]
struct Page {
    frame: Mfn,
    gfn: Gfn,
    order: u8,
}

impl Page {
    /// The frame of it that is at `gfn`, or its first.
    fn at(self, gfn: Gfn) -> Mfn {
        let offset = gfn.get().wrapping_sub(self.gfn.get());
        let inside = offset < 1 << self.order;
        Mfn::new(self.frame.get() + if inside { offset } else { 0 })
    }
}

struct Played {
    world: World,
    lie: Lie,
    pages: [Option<Page>; NAMES],
    handles: [u32; NAMES],
    /// Expected statuses of the elements so far, and the mapping each is.
    elements: ArrayVec<(Option<i16>, usize), ELEMENTS>,
    marked: Counters,
}

/// Carry out the steps.
pub(super) fn run(machine: &Machine) -> Result<(), Failure> {
    let text = match machine.module(0) {
        Some(bytes) => core::str::from_utf8(bytes).context("the boot module is no text")?,
        None => BUILT_IN,
    };
    let words = machine.command_line();
    let layout = match words.get("tables") {
        None | Some("separate") => Layout::Separate,
        Some("shared") => Layout::Shared,
        Some(other) => fail!("tables={other} is neither separate nor shared"),
    };
    let lie = match words.get("lie") {
        None | Some("none") => Lie::None,
        Some("skipped") => Lie::Skipped,
        Some("misdirected") => Lie::Misdirected(BYSTANDER),
        Some(other) => fail!("lie={other} is neither none, skipped nor misdirected"),
    };
    let world = World::new(machine, layout)?;
    if lie == Lie::Misdirected(BYSTANDER) {
        // Only a domain with a device is given commands.
        let edu = Edu::open(0, u64::MAX)?;
        let device = world.hypervisor.iommu.device(edu.function())?;
        world.attach(world.guest(BYSTANDER)?, device)?;
    }
    let mut played = Played {
        marked: world.counters(),
        world,
        lie,
        pages: [None; NAMES],
        handles: [u32::MAX; NAMES],
        elements: ArrayVec::new(),
    };
    // The pages for calls are there before any command is counted.
    for position in [0, ELEMENTS as u32 - 1] {
        played.world.put_map(position, 0, Gfn::new(0), false)?;
        played.world.put_unmap(position, 0, Gfn::new(0))?;
    }
    played.marked = played.world.counters();
    let mut steps = 0_u64;
    for line in scenario::lines(text).context("the boot module")? {
        let line = line.context("the boot module")?;
        steps += 1;
        if let Err(failure) = played.step(&line) {
            say!("@ broken line={}", line.number);
            fail!("line {}: {failure}", line.number);
        }
    }
    say!("@ scenario steps={steps}");
    played.world.report_boot(Overwritten::default());
    Ok(())
}

impl Played {
    fn step(&mut self, line: &Line<'_>) -> Result<(), Failure> {
        match (line.word, line.values.as_slice()) {
            ("grant", [page, read_only]) => self.grant(*page, *read_only != 0),
            ("populate", [page, domain, gfn, order]) => {
                self.populate(*page, *domain, Gfn::new(*gfn), *order)
            }
            ("map", [mapping, page, gfn, read_only, status]) => {
                let position = self.element(*mapping, *status)?;
                let place = u32::try_from(*page).context("a page")?;
                self.world.put_map(position, place, Gfn::new(*gfn), *read_only != 0)
            }
            ("unmap", [mapping, gfn, status]) => {
                let position = self.element(*mapping, *status)?;
                let handle = *self.handles.get(name(*mapping)?).context("a mapping")?;
                self.world.put_unmap(position, handle, Gfn::new(*gfn))
            }
            ("alter-map", [field, value]) => {
                self.world.alter_map(self.last_element()?, named(*field)?, *value)
            }
            ("alter-unmap", [field, value]) => {
                self.world.alter_unmap(self.last_element()?, named(*field)?, *value)
            }
            ("call-map", [tlb, most_tlb, iotlb, most_iotlb]) => {
                self.call(Scripted::Map, (*tlb, *most_tlb), (*iotlb, *most_iotlb))
            }
            ("call-unmap", [tlb, most_tlb, iotlb, most_iotlb]) => {
                self.call(Scripted::Unmap, (*tlb, *most_tlb), (*iotlb, *most_iotlb))
            }
            ("call-replace", [tlb, most_tlb, iotlb, most_iotlb]) => {
                self.call(Scripted::Replace, (*tlb, *most_tlb), (*iotlb, *most_iotlb))
            }
            ("take-back", [page]) => {
                let place = u32::try_from(*page).context("a page")?;
                self.world.take_back(place).map(|_| ())
            }
            ("clear", [domain, first, count]) => self.clear(*domain, *first, *count),
            ("reaches", [gfn, page]) => self.access(Gfn::new(*gfn), Some(*page)),
            ("faults", [gfn]) => self.access(Gfn::new(*gfn), None),
            ("move", [from, to]) => self.hand_over(*from, *to),
            ("mark", []) => {
                self.marked = self.world.counters();
                Ok(())
            }
            ("commands", [least, most]) => {
                let now = self.world.counters().iotlb_commands;
                let given = now - self.marked.iotlb_commands;
                ensure!((*least..=*most).contains(&given), "{given} IOTLB commands were given");
                Ok(())
            }
            ("flushed", [least, most]) => {
                let pages = self.world.counters().pages_flushed - self.marked.pages_flushed;
                ensure!((*least..=*most).contains(&pages), "{pages} pages were named");
                Ok(())
            }
            ("in-use", [page, reading, writing]) => {
                let place = u32::try_from(*page).context("a page")?;
                let in_use = self.world.in_use(place)?;
                let expected = (*reading != 0, *writing != 0);
                ensure!(in_use == expected, "grant {page} is in use: {in_use:?}");
                Ok(())
            }
            ("ends", [page, works]) => {
                let place = u32::try_from(*page).context("a page")?;
                let ended = self.world.end_grant(place)?;
                ensure!(ended == (*works != 0), "grant {page} is ended: {ended}");
                Ok(())
            }
            (word, values) => fail!("there is no step `{word}` with {} numbers", values.len()),
        }
    }

    fn domain(&self, number: u64) -> Result<DomainId, Failure> {
        let number = u16::try_from(number).context("a domain")?;
        Ok(self.world.guest(DomainId::new(number))?.id())
    }

    fn know(&mut self, page: u64, known: Page) -> Result<(), Failure> {
        *self.pages.get_mut(name(page)?).context("a page")? = Some(known);
        Ok(())
    }

    fn grant(&mut self, page: u64, read_only: bool) -> Result<(), Failure> {
        let place = u32::try_from(page).context("a page")?;
        let frame = self.world.grant_one(place, read_only)?;
        // Where its owner has it concerns no device.
        self.know(page, Page { frame, gfn: Gfn::new(u64::MAX), order: 0 })
    }

    fn populate(&mut self, page: u64, domain: u64, gfn: Gfn, order: u64) -> Result<(), Failure> {
        let guest = self.world.guest(self.domain(domain)?)?;
        let order = u8::try_from(order).context("an order")?;
        let frame = self.world.hypervisor.populate(guest, gfn, order)?;
        self.know(page, Page { frame, gfn, order })
    }

    /// Takes note of an element of the call to come; its position.
    fn element(&mut self, mapping: u64, status: u64) -> Result<u32, Failure> {
        let position = u32::try_from(self.elements.len()).context("an element")?;
        // A status is written as the number it is without its sign.
        let status = match status {
            ANY_STATUS => None,
            status => Some(i16::try_from(status).context("a status")?.wrapping_neg()),
        };
        let element = (status, name(mapping)?);
        self.elements.try_push(element).ok().context("no room for another element")?;
        Ok(position)
    }

    /// The position of the element that was written last.
    fn last_element(&self) -> Result<u32, Failure> {
        let last = self.elements.len().checked_sub(1).context("an element to change")?;
        u32::try_from(last).context("an element")
    }

    fn call(
        &mut self,
        operation: Scripted,
        tlb: (u64, u64),
        iotlb: (u64, u64),
    ) -> Result<(), Failure> {
        let audit = &self.world.audit;
        let before = (audit.tlb.carried_out(), audit.iotlb.carried_out());
        let count = u32::try_from(self.elements.len()).context("elements")?;
        let outcome = self.world.scripted(operation, count, &Manner::lying(self.lie))?;
        ensure!(outcome == Outcome::Done, "the call ended as {outcome:?}");
        let elements = core::mem::take(&mut self.elements);
        for (position, (expected, mapping)) in (0..).zip(elements) {
            let status = if operation == Scripted::Map {
                let (status, handle) = self.world.map_answer(position)?;
                *self.handles.get_mut(mapping).context("a mapping")? = handle;
                status
            } else {
                self.world.unmap_status(position)?
            };
            let expected = expected.unwrap_or(status);
            ensure!(status == expected, "element {position} has status {status}, not {expected}");
        }
        if self.lie == Lie::None {
            let audit = &self.world.audit;
            let tlb_flushes = audit.tlb.carried_out() - before.0;
            let iotlb_flushes = audit.iotlb.carried_out() - before.1;
            ensure!((tlb.0..=tlb.1).contains(&tlb_flushes), "{tlb_flushes} flushes of CPUs");
            ensure!(
                (iotlb.0..=iotlb.1).contains(&iotlb_flushes),
                "{iotlb_flushes} flushes of devices"
            );
        }
        Ok(())
    }

    fn clear(&self, domain: u64, first: u64, count: u64) -> Result<(), Failure> {
        let guest = self.world.guest(self.domain(domain)?)?;
        for gfn in (first..first.saturating_add(count)).map(Gfn::new) {
            if guest.lookup(gfn).is_some() {
                self.world.hypervisor.depopulate(guest, gfn, |_| Ok(()))?;
            }
        }
        Ok(())
    }

    /// Lets the controller write at `gfn`: it must reach `page`, or nothing that has a name.
    fn access(&self, gfn: Gfn, page: Option<u64>) -> Result<(), Failure> {
        let wanted = match page {
            Some(page) => {
                let known = self.pages.get(name(page)?).copied().flatten();
                Some(known.context("the page has never been")?.at(gfn))
            }
            None => None,
        };
        for known in self.pages.iter().flatten() {
            poison::fill(known.at(gfn))?;
        }
        // What was recorded before is no concern of this access.
        self.world.faults();
        self.world.write_page(gfn)?;
        for (number, known) in self.pages.iter().enumerate() {
            let Some(known) = known else { continue };
            let frame = known.at(gfn);
            let words = crate::memory::words(frame).context("words of a frame")?;
            let written = words.iter().filter(|word| !poison::is_left(word)).count();
            let expected = if wanted == Some(frame) { words.len() } else { 0 };
            ensure!(
                written == expected,
                "the device wrote {written} words of page {number} ({frame:?}), not {expected}"
            );
        }
        self.world.faults();
        Ok(())
    }

    /// The controller goes from one domain to another, onto queues in its memory.
    fn hand_over(&self, from: u64, to: u64) -> Result<(), Failure> {
        let (from, to) = (self.domain(from)?, self.domain(to)?);
        let (from, to) = (self.world.guest(from)?, self.world.guest(to)?);
        self.world.stop_controller()?;
        let units = self.world.hypervisor.iommu.units();
        from.dma().reattach(to.dma(), units, &Memory, self.world.controller).context("reattach")?;
        self.world.start_controller(to)
    }
}

/// A name's number.
fn name(number: u64) -> Result<usize, Failure> {
    let number = usize::try_from(number).ok().filter(|number| *number < NAMES);
    number.context("a name's number below 128")
}

/// A field by its number, as the runner counts them.
fn named(field: u64) -> Result<Field, Failure> {
    Ok(match field {
        0 => Field::Reference,
        1 => Field::Domain,
        2 => Field::Flags,
        3 => Field::Handle,
        4 => Field::Address,
        5 => Field::Other,
        other => fail!("there is no field {other}"),
    })
}
