//! Steps of hardware: accesses, devices that come and go, CPUs, and what fails.

use flush::Gfn;
use gnttab::Teardown;
use host::{
    Guest, Ram, TakenBatch,
    world::{CALLING_CPU, Local, ModelRam},
};
use hwmodel::{Access as Wanted, Failure, Frame, FrameState, Space, UnitId};
use iommu_vtd::{DetachError, DmaFlush, MoveError, SourceId};
use p2m::{PageKind, TlbFlush};

use super::{Doing, Session, memory::budget_of};
use crate::{
    format::{
        Access, AccessKind, Attach, Attempt, DeclareGone, Destroy, Detach, DmaBegin, Enter, Fail,
        Faults, How, Memory, Reattach, Unplug,
    },
    parse::is_cpu,
    plants::Slip,
};

/// Where the tag of a named page is, in bytes from its start.
pub(super) const TAG_AT: u64 = 0xff0;
/// The upper half of a tag.
pub(super) const TAG: u64 = 0x7a67_0000_0000_0000;
/// Where devices write.
const WRITTEN_AT: u64 = 0xfe8;
/// The upper half of what they write.
const WRITTEN: u64 = 0x6477_0000_0000_0000;

/// Who accesses memory.
enum Who {
    Cpu(usize),
    Device(SourceId),
}

impl Session {
    fn who(&self, name: &str) -> Result<Who, String> {
        match is_cpu(name) {
            Some(cpu) => Ok(Who::Cpu(cpu)),
            None => Ok(Who::Device(self.device(name)?.source)),
        }
    }

    /// Where an access ends: a frame, or nowhere.
    fn reached(&self, who: &Who, gfn: Gfn, kind: AccessKind) -> Result<Option<Frame>, String> {
        let machine = &self.world.machine;
        let address = gfn.get() << 12;
        match (who, kind) {
            (Who::Cpu(cpu), kind) => {
                let wanted = match kind {
                    AccessKind::Write => Wanted::Write,
                    AccessKind::Read => Wanted::Read,
                };
                let translated = machine.access(*cpu, address, wanted);
                Ok(translated.ok().map(|found| Frame::containing(found.address)))
            }
            (Who::Device(source), AccessKind::Write) => {
                let number = self.unique.get() + 1;
                self.unique.set(number);
                let value = WRITTEN | number;
                if machine.dma_write64(source.get(), address + WRITTEN_AT, value).is_err() {
                    return Ok(None);
                }
                let found = self.find(WRITTEN_AT, value);
                found.map(Some).ok_or_else(|| "a device's write is nowhere".to_owned())
            }
            (Who::Device(source), AccessKind::Read) => {
                let Ok(value) = machine.dma_read64(source.get(), address + TAG_AT) else {
                    return Ok(None);
                };
                // What has no tag is no page with a name.
                Ok(Some(self.find(TAG_AT, value).unwrap_or(Frame(0))))
            }
        }
    }

    /// The frame with this word at this offset: named ones first.
    fn find(&self, offset: u64, value: u64) -> Option<Frame> {
        let machine = &self.world.machine;
        let holds = |frame: &Frame| machine.peek64(frame.address() + offset) == Some(value);
        let named: Vec<Frame> = self
            .pages
            .borrow()
            .values()
            .flat_map(|page| (0..1_u64 << page.order).map(|offset| Frame(page.mfn.get() + offset)))
            .collect();
        let everywhere = || (0..self.world.hypervisor.memory.ram().frames()).map(Frame);
        named.into_iter().find(holds).or_else(|| everywhere().find(holds))
    }

    /// What the page at a frame is called.
    fn name_of(&self, frame: Frame) -> String {
        let pages = self.pages.borrow();
        let named = pages.iter().find(|(_, page)| self.has_live(page, frame));
        match (named, self.world.machine.frame(frame)) {
            (Some((name, _)), _) => name.clone(),
            (None, Some(info)) if info.state == FrameState::Free => "a freed page".to_owned(),
            (None, _) => "a page of somebody else".to_owned(),
        }
    }

    pub(super) fn access(&self, access: &Access) -> Result<(), String> {
        let mut places = Vec::new();
        if let Some(names) = &access.mappings {
            for name in &names.0 {
                let mapped = self.mapping(name)?;
                places.push((mapped.gfn, Some(mapped.page)));
            }
        }
        if let Some(numbers) = &access.at {
            let count = numbers.many().unwrap_or(1);
            let numbers = (0..count).filter_map(|place| numbers.at(place));
            places.extend(numbers.map(|number| (Gfn::new(*number), None)));
        }
        let mut reached = 0;
        for name in &access.by.0 {
            let who = self.who(name)?;
            for (place, (gfn, own)) in places.iter().enumerate() {
                let found = self.reached(&who, *gfn, access.kind)?;
                reached += u32::from(found.is_some());
                let found = found.map(|frame| self.name_of(frame));
                let found = found.unwrap_or_else(|| "fault".to_owned());
                let expected = access.reaches.at(place).map_or("any", String::as_str);
                let wanted = match (expected, own) {
                    ("same", Some(own)) => own.as_str(),
                    (expected, _) => expected,
                };
                self.expect(wanted == "any" || found == wanted, || {
                    format!("{name} at {:#x} reaches {found}; expected {wanted}", gfn.get())
                })?;
            }
        }
        let tries = places.len() * access.by.0.len();
        let who = access.by.0.join(" and ");
        self.say(format!("{who} access {} page(s): {reached} of {tries} arrive", places.len()));
        Ok(())
    }

    pub(super) fn dma_begin(&self, begin: &DmaBegin) -> Result<(), String> {
        let device = self.device(&begin.by)?;
        for name in &begin.mappings.0 {
            let address = self.mapping(name)?.gfn.get() << 12;
            let (machine, source) = (&self.world.machine, device.source.get());
            let begun = match begin.kind {
                AccessKind::Write => machine.dma_begin_write(source, address, &[7; 8]),
                AccessKind::Read => machine.dma_begin_read(source, address, 8),
            };
            match begun {
                Ok(ticket) => self.flights.borrow_mut().push(ticket),
                Err(error) => {
                    self.expect(false, || format!("{} cannot begin: {error:?}", begin.by))?;
                }
            }
        }
        let what = match begin.kind {
            AccessKind::Write => "writes",
            AccessKind::Read => "reads",
        };
        self.say(format!("{} begins {} {what}", begin.by, begin.mappings.0.len()));
        Ok(())
    }

    pub(super) fn dma_finish(&self) -> Result<(), String> {
        for ticket in self.flights.take() {
            let finished = self.world.machine.dma_finish(ticket);
            self.expect(finished.is_ok(), || format!("an access is lost: {finished:?}"))?;
        }
        self.say("what is on its way arrives".to_owned());
        Ok(())
    }

    pub(super) fn attach(&self, attach: &Attach) -> Result<(), String> {
        let guest = self.domain(&attach.to)?;
        let result = self.put_behind(&attach.device, guest);
        self.say(format!("{} goes to {}: {result:?}", attach.device, attach.to));
        self.attempt(attach.result, result, &format!("attaching {}", attach.device))
    }

    /// Gives a device to a domain. One whose detaching failed is still the old domain's.
    fn put_behind(&self, name: &str, guest: &Guest<ModelRam>) -> Result<(), String> {
        if let Some((_, owner)) = self.detached.borrow().iter().find(|(owed, _)| owed == name) {
            return Err(format!("it is still a device of {owner}"));
        }
        let device = self.device(name)?;
        let memory = &self.world.hypervisor.memory;
        let attached = guest.dma.attach(&self.world.units, memory, device);
        attached.map_err(|error| format!("{error:?}"))
    }

    pub(super) fn detach(&self, detach: &Detach) -> Result<(), String> {
        let guest = self.domain(&detach.from)?;
        let device = self.device(&detach.device)?;
        let memory = &self.world.hypervisor.memory;
        let result = guest.dma.detach(&self.world.units, memory, device.unit, device.source);
        self.say(format!("{} leaves {}: {result:?}", detach.device, detach.from));
        if let Err(DetachError::Command(_)) = result {
            self.owe_detach(&detach.device, &detach.from);
        } else if result.is_ok() {
            self.detached.borrow_mut().retain(|(owed, _)| *owed != detach.device);
        }
        let result = result.map_err(|error| format!("{error:?}"));
        self.attempt(detach.result, result, &format!("detaching {}", detach.device))
    }

    /// A device may have been taken away without its caches being told.
    fn owe_detach(&self, device: &str, from: &str) {
        self.detached.borrow_mut().retain(|(owed, _)| owed != device);
        self.detached.borrow_mut().push((device.to_owned(), from.to_owned()));
    }

    /// Takes away, on hardware that works again, what could not be taken away before.
    pub(crate) fn detach_again(&self) -> Result<(), String> {
        for (device, from) in self.detached.take() {
            self.detach(&Detach { device, from, result: Attempt::Any })?;
        }
        Ok(())
    }

    pub(super) fn reattach(&self, reattach: &Reattach) -> Result<(), String> {
        let (from, to) = (self.domain(&reattach.from)?, self.domain(&reattach.to)?);
        let device = self.device(&reattach.device)?;
        let memory = &self.world.hypervisor.memory;
        let result = from.dma.reattach(&to.dma, &self.world.units, memory, device);
        if result.is_ok() {
            self.detached.borrow_mut().retain(|(owed, _)| *owed != reattach.device);
        }
        self.say(format!(
            "{} goes from {} to {}: {result:?}",
            reattach.device, reattach.from, reattach.to
        ));
        if let Err(MoveError::Detach(DetachError::Command(_))) = result {
            self.owe_detach(&reattach.device, &reattach.from);
        }
        let result = result.map_err(|error| format!("{error:?}"));
        self.attempt(reattach.result, result, &format!("moving {}", reattach.device))
    }

    pub(super) fn unplug(&self, unplug: &Unplug) -> Result<(), String> {
        let device = self.device(&unplug.device)?;
        self.world.machine.remove_device(device.source.get());
        self.unplugged.borrow_mut().insert(device.source.get());
        self.say(format!("{} is unplugged", unplug.device));
        Ok(())
    }

    pub(super) fn declare_gone(&self, gone: &DeclareGone) -> Result<(), String> {
        let device = self.device(&gone.device)?;
        let unit = self.world.units.get(device.unit).ok_or("there is no such unit")?;
        let noted = unit.device_gone(device.source);
        self.say(format!("{} is known to be gone", gone.device));
        self.expect(noted.is_ok(), || format!("{noted:?}"))
    }

    pub(super) fn enter(&self, enter: &Enter) -> Result<(), String> {
        let id = self.domain(&enter.domain)?.id();
        if self.slip == Some(Slip::Unseen) {
            self.world.enter_unseen(id, enter.cpu);
            return Ok(());
        }
        self.world.leave(enter.cpu);
        let vcpu = enter.vcpu.unwrap_or(enter.cpu);
        if let Some(cpu) = self.world.runs(id, vcpu) {
            return Err(format!("CPU {cpu} runs vCPU {vcpu} of {}: it has to leave", enter.domain));
        }
        let entered = self.world.try_enter_as(id, vcpu, enter.cpu);
        self.say(format!("CPU {} enters {} as vCPU {vcpu}: {entered}", enter.cpu, enter.domain));
        self.expect(entered, || format!("CPU {} cannot enter", enter.cpu))
    }

    pub(super) fn fail(&self, fail: &Fail) -> Result<(), String> {
        let failure = match fail.how {
            How::Hang => Failure::Hang,
            How::QueueError => Failure::QueueError,
            How::TimeOut => Failure::TimeOut,
            How::CompletionError => Failure::CompletionError,
        };
        for place in 0..fail.operation.many().unwrap_or(1) {
            if let Some(number) = fail.operation.at(place) {
                self.world.machine.fail_operation(*number, failure);
            }
        }
        Ok(())
    }

    pub(super) fn faults(&self, faults: &Faults) {
        let scripted = &self.world.faults;
        scripted.copies.set((0, 0));
        self.unreadable.set(faults.read);
        scripted.fail_write.set(faults.write);
        scripted.preempt.set(faults.preempt);
        scripted.denied.set(faults.deny_unmap.then_some(gnttab::Action::Unmap));
        self.world.stay_out.set(faults.stay_out);
        self.world.deaf.set(faults.deaf);
    }

    /// Declares that what was taken from a range has been flushed.
    pub(super) fn settle(&self, guest: &Guest<ModelRam>, first: u64, last: u64) {
        // A CPU outside may hold what it forgets before it enters, which the model cannot
        // know. Then only audits judge.
        if self.world.machine.audit().len() == self.world.audit().len() {
            for space in self.world.cpu_spaces(guest) {
                self.world.machine.settled(space, first, last);
            }
        }
        for unit in 0..self.world.units.len() {
            if let Some(tag) = guest.dma.tag(unit) {
                let space = Space::Device { unit: UnitId(unit), did: tag.get() };
                self.world.machine.settled(space, first, last);
            }
        }
    }

    /// The end of a domain: CPUs, devices, handles, tables, in that order.
    pub(super) fn destroy(&mut self, destroy: &Destroy) -> Result<(), String> {
        let id = self.domain(&destroy.domain)?.id();
        let pinned = self.domain_by_id(id)?.grants().pinned();
        if pinned > 0 {
            return self.expect(false, || format!("{pinned} of its grants are still mapped"));
        }
        for cpu in self.world.residents(id) {
            self.world.leave(cpu);
        }
        let devices: Vec<_> = self.devices.keys().cloned().collect();
        for device in devices {
            let is_member = |unit: usize| {
                self.domain_by_id(id).ok().and_then(|guest| guest.dma.tag(unit)).is_some()
            };
            if is_member(self.device(&device)?.unit) {
                let (result, from) = (Attempt::Any, destroy.domain.clone());
                let unit = self.device(&device)?.unit;
                self.detach(&Detach { device: device.clone(), from: from.clone(), result })?;
                if is_member(unit) && self.attached(id, &device)? {
                    // As an operator would: nothing else can be freed before.
                    self.world.machine.repair();
                    self.detach(&Detach { device, from, result: Attempt::Ok })?;
                }
            }
        }
        let mut from = 0;
        let mut total = host::world::Flushes::default();
        loop {
            let mut end = Teardown::Done;
            let flushes = self.as_domain(id, |caller| {
                let nobody = Doing { actor: 0, hook: &|| {} };
                let manner = self.manner(nobody);
                let drop_page = |_: gnttab::PageReference, _: bool| {};
                end = gnttab::release_all(&manner.scripted(caller, &drop_page), from);
            });
            total.tlb += flushes.tlb;
            total.iotlb += flushes.iotlb;
            match end {
                Teardown::Done => break,
                Teardown::Continue(next) => from = next,
                Teardown::FlushFailed(next) => {
                    self.expect(false, || "a flush failed at the end".to_owned())?;
                    from = next;
                }
            }
        }
        self.check_flushes(destroy.tlb, destroy.iotlb, total)?;
        if self.batches_held() > 0 {
            // As an operator would: its tables go last.
            self.world.machine.repair();
            self.retry(crate::format::Retry::default())?;
        }
        let steps = self.take_down(id, destroy.budget)?;
        self.check_steps(destroy.steps, steps)?;
        self.say(format!("{} is destroyed, its tables in {steps} step(s)", destroy.domain));
        Ok(())
    }

    /// Whether a device still belongs to a domain: then it cannot be detached again.
    fn attached(&self, id: flush::DomainId, name: &str) -> Result<bool, String> {
        let device = self.device(name)?;
        let guest = self.domain_by_id(id)?;
        Ok(guest.dma.devices() > 0 && guest.dma.tag(device.unit).is_some())
    }

    /// In how many steps.
    fn take_down(&mut self, id: flush::DomainId, budget: u64) -> Result<u64, String> {
        let guests = &mut self.world.hypervisor.guests;
        let place = guests.iter().position(|guest| guest.id() == id).ok_or("it is gone")?;
        // What its tables show of others' pages was released with the handles.
        let foreign: Vec<_> = {
            let guest = &guests[place];
            let places = self.places.borrow();
            let own = places.iter().filter(|(domain, _)| *domain == id);
            own.filter_map(|(_, gfn)| guest.lookup(*gfn))
                .filter(|found| found.kind != Some(PageKind::RamReadWrite))
                .map(|found| found.mfn)
                .collect()
        };
        for mfn in foreign {
            self.world.hypervisor.pages.take(mfn, false);
        }
        let guest = self.world.hypervisor.guests.swap_remove(place);
        let root = guest.cpu_root();
        let mut end = guest.take_down();
        let (mut done, mut refused, mut steps) = (false, false, 0);
        while !done {
            let mut batch = TakenBatch::new(id);
            let step = end.step_within(&mut budget_of(budget), &mut batch);
            steps += 1;
            let local = Local::new(&self.world, CALLING_CPU, root);
            let tlb = TlbFlush { guest: &end.cpus, machine: &self.world, local: &local };
            let iotlb = DmaFlush::new(&self.world.units, &end.dma);
            let hardware = flush::Hardware { tlb: &tlb, iotlb: &iotlb };
            match batch.flush(&hardware) {
                Ok(flushed) => self.world.hypervisor.free(flushed),
                Err(mut failed) => {
                    self.world.machine.repair();
                    match failed.held.retry(&hardware) {
                        Ok(flushed) => self.world.hypervisor.free(flushed),
                        Err(_) => return Err("the last flush of a domain failed".to_owned()),
                    }
                }
            }
            match step {
                Ok(all) => (done, refused) = (all, false),
                Err(stopped) if refused => {
                    return Err(format!("the end of a domain stopped: {:?}", stopped.stop));
                }
                Err(_) => {
                    // As an operator would: it needs a page now and gives back many.
                    self.memory(Memory { left: None })?;
                    refused = true;
                }
            }
        }
        self.places.borrow_mut().retain(|(domain, _)| *domain != id);
        self.mappings.borrow_mut().retain(|_, mapped| mapped.domain != id);
        Ok(steps)
    }
}
