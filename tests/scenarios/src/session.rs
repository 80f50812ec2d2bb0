//! A scenario while it runs: the world, and what its names stand for.
//!
//! A [`Session`] owns one [`World`]. Each module below has the steps of one sort, and
//! `judge` what must hold between them.

use std::{
    cell::{Cell, RefCell},
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use flush::{DomainId, Gfn, Held, Mfn};
use gnttab::{Call, Outcome, SharedPage};
use host::{
    Guest, Taken, World,
    world::{ARGUMENTS, Ended, FIRST_REFERENCE, Flushes, ModelCaller, ModelFailed, ModelRam},
};
use hwmodel::{DmaTicket, Frame, FrameState};
use iommu_vtd::Device;

use crate::{
    embedding::{Done, Manner},
    format::Action,
    parse::Played,
    plants::Slip,
};

mod calls;
mod grants;
mod hardware;
mod judge;
mod memory;
mod start;
mod tables;
mod workload;

/// Pages of arguments that each actor has.
const ARGUMENT_PAGES: u64 = 16;

/// A page with a name.
#[derive(Clone, Debug)]
pub(crate) struct Page {
    pub(crate) mfn: Mfn,
    pub(crate) order: u8,
    pub(crate) owner: DomainId,
    /// Where its owner has it.
    pub(crate) gfn: Gfn,
    /// Which lives of its frames it is.
    generations: Vec<u64>,
    /// Its grants, by table and reference.
    pub(crate) grants: Vec<(DomainId, u32)>,
}

/// A mapping with a name.
#[derive(Clone, Debug)]
pub(crate) struct Mapped {
    pub(crate) page: String,
    pub(crate) domain: DomainId,
    pub(crate) gfn: Gfn,
    pub(crate) handle: u32,
    /// The granter and the reference; nothing for a domain's own memory.
    pub(crate) grant: Option<(DomainId, u32)>,
}

/// Whose a unit's ids are.
pub(crate) type Tags = BTreeMap<(usize, u16), String>;

/// A call that was left, with the elements of all of it.
pub(crate) struct Left {
    pub(crate) rest: Call,
    pub(crate) base: u64,
    pub(crate) status_offset: usize,
    pub(crate) size: usize,
    pub(crate) count: usize,
    /// The mappings that a map makes, one for each element.
    pub(crate) names: Vec<String>,
}

/// Where counts began.
#[derive(Default)]
pub(crate) struct Marked {
    pub(crate) commands: usize,
    pub(crate) iotlb_commands: u64,
    pub(crate) pages_flushed: u64,
    pub(crate) kicks: u64,
}

/// Who does a step, and what happens at each call into the embedding.
#[derive(Clone, Copy)]
pub(crate) struct Doing<'a> {
    /// By place among the actors.
    pub(crate) actor: usize,
    /// Lets others act.
    pub(crate) hook: &'a dyn Fn(),
}

/// A scenario that runs.
pub(crate) struct Session {
    pub(crate) world: World,
    domains: BTreeMap<String, DomainId>,
    devices: BTreeMap<String, Device>,
    pub(crate) pages: RefCell<BTreeMap<String, Page>>,
    pub(crate) mappings: RefCell<BTreeMap<String, Mapped>>,
    /// Every place a domain ever had a page at.
    places: RefCell<BTreeSet<(DomainId, Gfn)>>,
    /// Commands that units carried out, in words, and how many of each were put so.
    told: RefCell<Vec<String>>,
    put: RefCell<Vec<usize>>,
    references: RefCell<BTreeMap<DomainId, u32>>,
    /// Pages of entries of version 1, as their guest has them.
    views: RefCell<BTreeMap<(DomainId, usize), Arc<SharedPage>>>,
    /// Steps that have begun and not ended.
    under_way: Cell<u32>,
    /// Entries that a guest wrote word for word.
    wild: RefCell<BTreeSet<(DomainId, u32)>>,
    held: RefCell<Vec<(DomainId, ModelFailed<'static>)>>,
    held_memory: RefCell<Vec<(DomainId, Held<Taken, 32>)>>,
    left: RefCell<BTreeMap<DomainId, Left>>,
    flushes: Cell<Flushes>,
    extra: Cell<u64>,
    /// Flushes of CPUs and of devices that are done.
    done: [Done; 2],
    flights: RefCell<Vec<DmaTicket>>,
    drained: RefCell<Vec<Frame>>,
    /// An edit of the hypervisor's own, which holds no page, could not be flushed.
    pub(crate) unflushed: Cell<bool>,
    /// The element at this position of a call's array cannot be read.
    pub(crate) unreadable: Cell<Option<u64>>,
    /// Elements of the longest call so far.
    pub(crate) longest: Cell<u64>,
    /// Devices whose detaching failed half-way, with their domain.
    detached: RefCell<Vec<(String, String)>>,
    /// Source ids of devices that were unplugged.
    unplugged: RefCell<BTreeSet<u16>>,
    /// References whose grants are over, for workloads.
    spare: RefCell<Vec<u32>>,
    marked: RefCell<Marked>,
    slip: Option<Slip>,
    unique: Cell<u64>,
    /// Broken expectations count. In a fault sweep only what must always hold does.
    pub(crate) strict: bool,
    /// When each step began, for the history of a stale entry.
    moments: RefCell<Vec<(u64, usize)>>,
    /// What happened, in words.
    pub(crate) story: RefCell<Vec<String>>,
}

impl Session {
    /// Does a step.
    ///
    /// # Errors
    /// What was expected and did not come about, in words.
    pub(crate) fn step(&self, step: &Played, doing: Doing<'_>) -> Result<(), String> {
        self.moment(step.line);
        self.under_way.set(self.under_way.get() + 1);
        let tags = self.tags();
        let result = self.act(step, doing);
        self.put_into_words(&tags);
        self.under_way.set(self.under_way.get() - 1);
        result
    }

    /// Whether no other actor is in the middle of a step: its flush may be still to come.
    fn is_alone(&self) -> bool {
        self.under_way.get() <= 1
    }

    fn act(&self, step: &Played, doing: Doing<'_>) -> Result<(), String> {
        match &step.action {
            Action::Grant(grant) => self.grant(grant),
            Action::Entry(entry) => self.entry(entry),
            Action::Word(word) => self.word(word),
            Action::EndAccess(end) => self.end_access(end),
            Action::TakeBack(take) => self.take_back(take, doing),
            Action::Map(map) => self.map(map, doing),
            Action::Unmap(unmap) => self.unmap(unmap, doing),
            Action::Copy(copy) => self.copy(copy, doing),
            Action::GoOn(call) => self.go_on(call, doing),
            Action::Swap(swap) => self.swap(swap, doing),
            Action::SetVersion(set) => self.set_version(set, doing),
            Action::ListFrames(list) => self.list_frames(list, doing),
            Action::StatusFrame(frame) => self.status_frame(frame),
            Action::Populate(populate) => self.populate(populate, doing),
            Action::Clear(clear) => self.clear(clear, doing),
            Action::Restrict(restrict) => self.restrict(restrict, doing),
            Action::SwapPage(swap) => self.swap_page(swap, doing),
            Action::MovePage(page) => self.move_page(page, doing),
            Action::Reuse(reuse) => self.reuse(reuse),
            Action::Access(access) => self.access(access),
            Action::Speculate(_) => {
                self.world.machine.speculate();
                Ok(())
            }
            Action::DmaBegin(begin) => self.dma_begin(begin),
            Action::DmaFinish(_) => self.dma_finish(),
            Action::Attach(attach) => self.attach(attach),
            Action::Detach(detach) => self.detach(detach),
            Action::Reattach(reattach) => self.reattach(reattach),
            Action::Unplug(unplug) => self.unplug(unplug),
            Action::DeclareGone(gone) => self.declare_gone(gone),
            Action::Enter(enter) => self.enter(enter),
            Action::Leave(leave) => {
                self.world.leave(leave.cpu);
                Ok(())
            }
            Action::Fail(fail) => self.fail(fail),
            Action::Repair(_) => {
                self.world.machine.repair();
                Ok(())
            }
            Action::Faults(faults) => {
                self.faults(faults);
                Ok(())
            }
            Action::Memory(memory) => self.memory(**memory),
            Action::Retry(retry) => self.retry(**retry),
            Action::Mark(_) => {
                self.set_mark();
                Ok(())
            }
            Action::Check(check) => self.check(check),
            Action::Workload(workload) => self.workload(workload, doing),
            Action::Destroy(_) => Err("a domain is destroyed by `step_alone`".to_owned()),
        }
    }

    /// Does a step that nobody else can be in the middle of.
    ///
    /// # Errors
    /// As [`step`](Self::step).
    pub(crate) fn step_alone(&mut self, step: &Played) -> Result<(), String> {
        if let Action::Destroy(destroy) = &step.action {
            self.moment(step.line);
            return self.destroy(destroy);
        }
        self.step(step, Doing { actor: 0, hook: &|| {} })
    }

    /// From this moment on, what happens is the step's in that line.
    pub(crate) fn moment(&self, line: usize) {
        self.moments.borrow_mut().push((self.world.machine.now().0, line));
    }

    /// A broken expectation, unless they do not count.
    pub(crate) fn expect(&self, holds: bool, text: impl FnOnce() -> String) -> Result<(), String> {
        if holds || !self.strict { Ok(()) } else { Err(text()) }
    }

    pub(crate) fn say(&self, text: String) {
        self.story.borrow_mut().push(text);
    }

    pub(crate) fn domain(&self, name: &str) -> Result<&Guest<ModelRam>, String> {
        let id = self.domains.get(name).copied();
        id.and_then(|id| self.world.hypervisor.guest(id))
            .ok_or_else(|| format!("domain `{name}` is gone"))
    }

    pub(crate) fn domain_name(&self, id: DomainId) -> String {
        let found = self.domains.iter().find(|(_, known)| **known == id);
        found.map_or_else(|| format!("domain {}", id.get()), |(name, _)| name.clone())
    }

    pub(crate) fn device(&self, name: &str) -> Result<Device, String> {
        self.devices.get(name).copied().ok_or_else(|| format!("there is no device `{name}`"))
    }

    fn device_name(&self, source: u16) -> String {
        let found = self.devices.iter().find(|(_, device)| device.source.get() == source);
        found.map_or_else(|| format!("{source:#x}"), |(name, _)| name.clone())
    }

    pub(crate) fn page(&self, name: &str) -> Result<Page, String> {
        let page = self.pages.borrow().get(name).cloned();
        page.ok_or_else(|| format!("page `{name}` was never had: an earlier step failed"))
    }

    pub(crate) fn mapping(&self, name: &str) -> Result<Mapped, String> {
        let mapped = self.mappings.borrow().get(name).cloned();
        mapped.ok_or_else(|| format!("mapping `{name}` was never made: an earlier step failed"))
    }

    /// Whether a page is still what its name said; of a large one its first frame.
    pub(crate) fn is_live(&self, page: &Page) -> bool {
        self.has_live(page, Frame(page.mfn.get()))
    }

    /// Whether a frame is part of a page, and still what the page's name said.
    fn has_live(&self, page: &Page, frame: Frame) -> bool {
        let place = frame.0.checked_sub(page.mfn.get()).and_then(|at| usize::try_from(at).ok());
        let generation = place.and_then(|place| page.generations.get(place));
        self.world.machine.frame(frame).is_some_and(|info| {
            Some(&info.generation) == generation && info.state != FrameState::Free
        })
    }

    pub(crate) fn domain_by_id(&self, id: DomainId) -> Result<&Guest<ModelRam>, String> {
        self.world.hypervisor.guest(id).ok_or_else(|| format!("{id:?} is gone"))
    }

    pub(crate) fn manner<'a>(&'a self, doing: Doing<'a>) -> Manner<'a> {
        Manner {
            hook: doing.hook,
            vcpu: u32::try_from(doing.actor).unwrap_or(0),
            slip: self.slip,
            extra: &self.extra,
            done: &self.done,
        }
    }

    /// Does something in the hypervisor as a domain; the flushes it asked for.
    pub(crate) fn as_domain(&self, id: DomainId, action: impl FnOnce(&ModelCaller<'_>)) -> Flushes {
        let ended = self.world.call_as(id, |caller| {
            action(caller);
            Outcome::Done
        });
        self.account(id, ended).1
    }

    /// Keeps what a call left behind, and adds up its flushes.
    fn account(&self, id: DomainId, ended: Ended<'_>) -> (Outcome, Flushes) {
        let Ended { outcome, flushes, failed } = ended;
        self.held.borrow_mut().extend(failed.into_iter().map(|failure| (id, failure)));
        let Flushes { tlb, iotlb } = self.flushes.get();
        let total = Flushes { tlb: tlb + flushes.tlb, iotlb: iotlb + flushes.iotlb };
        self.flushes.set(total);
        (outcome, flushes)
    }

    /// Takes flushes out of the account that are no part of what a scenario bounds.
    fn forgive(&self, flushes: Flushes) {
        let Flushes { tlb, iotlb } = self.flushes.get();
        self.flushes.set(Flushes { tlb: tlb - flushes.tlb, iotlb: iotlb - flushes.iotlb });
    }

    /// The flushes that all calls asked for so far.
    pub(crate) fn flushes(&self) -> Flushes {
        self.flushes.get()
    }

    /// The next reference of a domain's table that is free.
    fn next_reference(&self, id: DomainId) -> u32 {
        *self.references.borrow().get(&id).unwrap_or(&FIRST_REFERENCE)
    }

    fn argument_base(doing: Doing<'_>) -> u64 {
        (ARGUMENTS.get() + ARGUMENT_PAGES * doing.actor as u64) << 12
    }

    /// Whether a step that may be refused ended as it was to.
    fn attempt(
        &self,
        expected: crate::format::Attempt,
        result: Result<(), String>,
        what: &str,
    ) -> Result<(), String> {
        use crate::format::Attempt;
        match (expected, result) {
            (Attempt::Any, _) | (Attempt::Ok, Ok(())) => Ok(()),
            (Attempt::Refused | Attempt::Busy, Err(_)) => Ok(()),
            (Attempt::Ok, Err(error)) => self.expect(false, || format!("{what}: {error}")),
            (Attempt::Refused | Attempt::Busy, Ok(())) => {
                self.expect(false, || format!("{what} works, and was to be refused"))
            }
        }
    }

    fn check_flushes(
        &self,
        tlb: Option<crate::values::Count>,
        iotlb: Option<crate::values::Count>,
        flushes: Flushes,
    ) -> Result<(), String> {
        for (kind, expected, found) in
            [("CPUs", tlb, flushes.tlb), ("devices", iotlb, flushes.iotlb)]
        {
            if let Some(expected) = expected {
                self.expect(expected.allows(found), || {
                    format!("{found} flushes of {kind} were asked for; expected {expected}")
                })?;
            }
        }
        Ok(())
    }

    /// Whose each id is at this moment.
    fn tags(&self) -> Tags {
        let mut tags = Tags::new();
        for guest in &self.world.hypervisor.guests {
            for unit in 0..self.world.units.len() {
                if let Some(tag) = guest.dma.tag(unit) {
                    tags.insert((unit, tag.get()), self.domain_name(guest.id()));
                }
            }
        }
        tags
    }

    fn set_mark(&self) {
        let counters = self.world.machine.counters();
        *self.marked.borrow_mut() = Marked {
            commands: self.told.borrow().len(),
            iotlb_commands: counters.units.iter().map(|unit| unit.iotlb_commands()).sum(),
            pages_flushed: counters.units.iter().map(|unit| unit.pages_flushed).sum(),
            kicks: counters.cpus.iter().map(|cpu| cpu.ipis).sum(),
        };
    }
}
