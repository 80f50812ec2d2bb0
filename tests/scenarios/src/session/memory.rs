//! Steps about a domain's own memory, and about memory that runs out.

use flush::{Batch, Gfn, Run};
use host::{Ram, Taken, TakenBatch};
use hwmodel::{Frame, Owner};
use p2m::{Expected, PageKind};
use stage2::{Access, Budget, Rest, Stop, Stopped};

use super::{Doing, Page, Session};
use crate::{
    format::{Allowed, Clear, Memory, MovePage, Populate, Restrict, Retry, Reuse, SwapPage},
    values::Count,
};

/// Who takes frames that were freed, and those that run out.
const STRANGER: Owner = Owner(99);

/// How many entries may be read before a walk pauses; 0 is no pause.
pub(super) fn budget_of(entries: u64) -> Budget {
    match entries {
        0 => Budget::UNLIMITED,
        entries => Budget::new(entries),
    }
}

impl Session {
    pub(super) fn populate(&self, populate: &Populate, doing: Doing<'_>) -> Result<(), String> {
        let id = self.domain(&populate.by)?.id();
        let stride = populate.stride.unwrap_or(1 << populate.order);
        let mut total = host::world::Flushes::default();
        for (place, name) in populate.pages.0.iter().enumerate() {
            let gfn = Gfn::new(populate.at.wrapping_add(stride.wrapping_mul(place as u64)));
            let given = self.give_memory(id, gfn, populate.order, doing);
            let result = match given {
                Ok((mfn, flushes)) => {
                    total.tlb += flushes.tlb;
                    total.iotlb += flushes.iotlb;
                    self.mappings.borrow_mut().remove(name);
                    self.name_page(name, mfn, populate.order, id, gfn);
                    Ok(())
                }
                Err(error) => Err(error),
            };
            self.attempt(populate.result, result, &format!("memory at {gfn:?}"))?;
        }
        self.say(format!(
            "{} gets {} page(s) of order {}",
            populate.by,
            populate.pages.0.len(),
            populate.order
        ));
        self.check_flushes(populate.tlb, populate.iotlb, total)
    }

    pub(super) fn clear(&self, clear: &Clear, doing: Doing<'_>) -> Result<(), String> {
        let id = self.domain(&clear.by)?.id();
        let last = clear.first.checked_add(clear.count - 1).ok_or("the range wraps")?;
        let run = Run::new(Gfn::new(clear.first), Gfn::new(last)).ok_or("the range is empty")?;
        let (mut result, mut batches) = (self.only_memory(id, run), 0);
        let flushes = self.as_domain(id, |caller| {
            if result.is_err() {
                return;
            }
            let manner = self.manner(doing);
            let (tlb, iotlb) = manner.hardware(caller);
            let mut rest = Some(Rest::new(run));
            while let Some(left) = rest {
                let mut batch = TakenBatch::new(id);
                let mut budget = budget_of(clear.budget);
                let edited = batch.edit_many(|skipped, room| {
                    caller.guest.clear_range(left, &mut budget, skipped, room)
                });
                rest = match edited {
                    Ok(()) => None,
                    Err(Stopped { rest, stop: Stop::Full | Stop::Budget, .. }) => Some(rest),
                    Err(Stopped { stop, .. }) => {
                        result = Err(format!("the range cannot be cleared: {stop:?}"));
                        None
                    }
                };
                (doing.hook)();
                batches += 1;
                match batch.flush(&flush::Hardware { tlb: &tlb, iotlb: &iotlb }) {
                    Ok(flushed) => self.world.hypervisor.free(flushed),
                    Err(failed) => {
                        result = Err("the flush failed".to_owned());
                        self.held_memory.borrow_mut().push((id, failed.held));
                        rest = None;
                    }
                }
            }
        });
        self.note_lost(id, run);
        self.say(format!(
            "{} pages of {} are cleared in {batches} batch(es), {} + {} flushes",
            clear.count, clear.by, flushes.tlb, flushes.iotlb
        ));
        self.attempt(clear.result, result, "clearing the range")?;
        self.check_steps(clear.steps, batches)?;
        self.check_flushes(clear.tlb, clear.iotlb, flushes)
    }

    /// Whether something was done in as many steps as was expected.
    pub(super) fn check_steps(&self, expected: Option<Count>, steps: u64) -> Result<(), String> {
        let holds = expected.is_none_or(|expected| expected.allows(steps));
        self.expect(holds, || {
            let expected = expected.map(|expected| expected.to_string()).unwrap_or_default();
            format!("it took {steps} steps; expected {expected}")
        })
    }

    /// Of pages that their owner no longer has, every reference is a mapping's.
    fn note_lost(&self, id: flush::DomainId, run: Run) {
        let Ok(guest) = self.domain_by_id(id) else { return };
        let pages = self.pages.borrow();
        let inside = |page: &&Page| page.owner == id && run.contains(page.gfn);
        let gone = |page: &&Page| guest.lookup(page.gfn).is_none_or(|found| found.mfn != page.mfn);
        for page in pages.values().filter(inside).filter(gone) {
            if self.is_live(page) {
                self.world.hypervisor.pages.lose(page.mfn);
            }
        }
    }

    /// Grants are given back by those who mapped them, not cleared as memory.
    fn only_memory(&self, id: flush::DomainId, run: Run) -> Result<(), String> {
        let guest = self.domain_by_id(id)?;
        let places = self.places.borrow().clone();
        let mut inside =
            places.into_iter().filter(|(domain, gfn)| *domain == id && run.contains(*gfn));
        let is_grant = |found: p2m::Mapping| found.kind != Some(PageKind::RamReadWrite);
        match inside.find(|(_, gfn)| guest.lookup(*gfn).is_some_and(is_grant)) {
            Some((_, gfn)) => Err(format!("a grant is mapped at {gfn:?}")),
            None => Ok(()),
        }
    }

    pub(super) fn restrict(&self, restrict: &Restrict, doing: Doing<'_>) -> Result<(), String> {
        let guest = self.domain(&restrict.by)?;
        let last = restrict.first.checked_add(restrict.count - 1).ok_or("the range wraps")?;
        let run = Run::new(Gfn::new(restrict.first), Gfn::new(last)).ok_or("an empty range")?;
        let allowed = match restrict.allow {
            Allowed::Read => Access::READ,
            Allowed::ReadWrite => Access::READ_WRITE,
        };
        let (mut result, mut batches) = (Ok(()), 0);
        let flushes = self.as_domain(guest.id(), |caller| {
            let manner = self.manner(doing);
            let (tlb, iotlb) = manner.hardware(caller);
            let mut rest = Some(Rest::new(run));
            while let Some(left) = rest {
                let mut batch: Batch<(), 1> = Batch::new(guest.id());
                let mut budget = budget_of(restrict.budget);
                let edited = batch.edit_many(|skipped, _| {
                    caller.guest.restrict_within(left, allowed, &mut budget, skipped)
                });
                rest = match edited {
                    Ok(()) => None,
                    Err(Stopped { rest, stop: Stop::Full | Stop::Budget, .. }) => Some(rest),
                    Err(Stopped { stop, .. }) => {
                        result = Err(format!("stopped: {stop:?}"));
                        None
                    }
                };
                (doing.hook)();
                batches += 1;
                if batch.flush(&flush::Hardware { tlb: &tlb, iotlb: &iotlb }).is_err() {
                    result = Err("the flush failed".to_owned());
                    self.unflushed.set(true);
                    rest = None;
                }
            }
        });
        // A CPU that could not forget stays outside, which the model's own verdict ignores.
        if result.is_ok() && self.strict && self.is_alone() {
            self.settle(guest, restrict.first, last);
        }
        self.say(format!(
            "rights of {} pages of {} are taken in {batches} batch(es), {} + {} flushes",
            restrict.count, restrict.by, flushes.tlb, flushes.iotlb
        ));
        self.expect(result.is_ok(), || format!("taking rights: {result:?}"))?;
        self.check_steps(restrict.steps, batches)?;
        self.check_flushes(restrict.tlb, restrict.iotlb, flushes)
    }

    pub(super) fn swap_page(&self, swap: &SwapPage, doing: Doing<'_>) -> Result<(), String> {
        let id = self.domain(&swap.by)?.id();
        let gfn = Gfn::new(swap.at);
        let mfn = self.world.hypervisor.memory.ram().allocate(id).ok_or("no memory is left")?;
        self.world.hypervisor.pages.take(mfn, false);
        let mut result = Ok(());
        let flushes = self.as_domain(id, |caller| {
            let mut batch: TakenBatch = TakenBatch::new(id);
            let edited = batch.edit_many(|skipped, room| {
                let kind = PageKind::RamReadWrite;
                let was = caller.guest.map(gfn, mfn, kind, skipped)?;
                if let Some((mfn, cleared)) = was {
                    let held = room.hold(Taken { mfn, order: 0 }, cleared);
                    held.map_err(|_| "no room for a page".to_owned())?;
                }
                Ok::<(), String>(())
            });
            result = edited;
            (doing.hook)();
            self.finish(id, batch, caller, doing, &mut result);
        });
        if result.is_ok() {
            self.name_page(&swap.page, mfn, 0, id, gfn);
        } else if self.domain_by_id(id)?.lookup(gfn).is_none_or(|found| found.mfn != mfn) {
            self.world.hypervisor.pages.drop_one(mfn, false);
            self.world.machine.release(Frame(mfn.get()));
        }
        self.say(format!("{} has another page at {:#x}", swap.by, swap.at));
        self.expect(result.is_ok(), || format!("replacing the page: {result:?}"))?;
        self.check_flushes(swap.tlb, swap.iotlb, flushes)
    }

    /// Flushes a batch of a domain's own memory and frees what it held.
    pub(super) fn finish(
        &self,
        id: flush::DomainId,
        batch: TakenBatch,
        caller: &host::world::ModelCaller<'_>,
        doing: Doing<'_>,
        result: &mut Result<(), String>,
    ) {
        let manner = self.manner(doing);
        let (tlb, iotlb) = manner.hardware(caller);
        let mut batch = batch;
        match batch.flush(&flush::Hardware { tlb: &tlb, iotlb: &iotlb }) {
            Ok(flushed) => self.world.hypervisor.free(flushed),
            Err(failed) => {
                self.held_memory.borrow_mut().push((id, failed.held));
                *result = Err("the flush failed".to_owned());
            }
        }
    }

    pub(super) fn move_page(&self, page: &MovePage, doing: Doing<'_>) -> Result<(), String> {
        let id = self.domain(&page.by)?.id();
        let (from, to) = (Gfn::new(page.from), Gfn::new(page.to));
        let Some(found) = self.domain_by_id(id)?.lookup(from) else {
            return self.expect(false, || format!("{} has nothing at {from:?}", page.by));
        };
        let mfn = found.mfn;
        let pages = &self.world.hypervisor.pages;
        // The new number counts the page for itself.
        pages.take(mfn, false);
        let mut moved = false;
        let mut result = Ok(());
        let flushes = self.as_domain(id, |caller| {
            let mut batch: TakenBatch = TakenBatch::new(id);
            let kind = PageKind::RamReadWrite;
            let held = batch.hold(|skipped| {
                let cleared = caller.guest.clear(from, Expected { mfn, kind }, skipped)?;
                Ok::<_, p2m::ClearError>((Taken { mfn, order: 0 }, cleared))
            });
            if held.is_err() {
                result = Err("the old entry cannot be cleared".to_owned());
            } else {
                (doing.hook)();
                let mapped = batch
                    .edit_many(|skipped, _| caller.guest.map(to, mfn, kind, skipped).map(drop));
                moved = mapped.is_ok();
                if let Err(error) = mapped {
                    result = Err(error);
                }
            }
            (doing.hook)();
            self.finish(id, batch, caller, doing, &mut result);
        });
        if !moved && pages.drop_one(mfn, false) {
            self.world.machine.release(Frame(mfn.get()));
        }
        if moved {
            self.places.borrow_mut().insert((id, to));
            for known in self.pages.borrow_mut().values_mut() {
                if known.mfn == mfn && known.owner == id {
                    known.gfn = to;
                }
            }
            for mapped in self.mappings.borrow_mut().values_mut() {
                if mapped.domain == id && mapped.gfn == from && mapped.grant.is_none() {
                    mapped.gfn = to;
                }
            }
        }
        self.say(format!("a page of {} moves from {from:?} to {to:?}", page.by));
        self.expect(result.is_ok(), || format!("moving the page: {result:?}"))?;
        self.check_flushes(page.tlb, page.iotlb, flushes)
    }

    pub(super) fn reuse(&self, reuse: &Reuse) -> Result<(), String> {
        let machine = &self.world.machine;
        let forged = match &reuse.forge {
            // Present, readable, writable and executable, in each of the table formats.
            Some(page) => self.page(page)?.mfn.get() << 12 | 6 << 3 | 7,
            None => 0,
        };
        for _ in 0..reuse.frames {
            let frame = machine.allocate(STRANGER).ok_or("there is no free frame")?;
            for word in 0..512 {
                machine.write64(frame.address() + 8 * word, forged);
                machine.write_back(frame.address() + 8 * word);
            }
        }
        self.say(format!("a stranger gets {} frame(s) and writes to them", reuse.frames));
        Ok(())
    }

    pub(super) fn memory(&self, memory: Memory) -> Result<(), String> {
        let machine = &self.world.machine;
        let mut drained = self.drained.borrow_mut();
        match memory.left {
            None => {
                drained.drain(..).for_each(|frame| machine.release(frame));
            }
            Some(left) => {
                while let Some(frame) = machine.allocate(STRANGER) {
                    drained.push(frame);
                }
                let keep = drained.len().saturating_sub(left);
                drained.drain(keep..).for_each(|frame| machine.release(frame));
            }
        }
        Ok(())
    }

    pub(crate) fn retry(&self, retry: Retry) -> Result<(), String> {
        let held = self.held.take();
        for (id, failure) in held {
            let left = self.world.retry(id, vec![failure]);
            self.held.borrow_mut().extend(left.into_iter().map(|failure| (id, failure)));
        }
        let held = self.held_memory.take();
        for (id, mut held) in held {
            let mut flushed = false;
            self.as_domain(id, |caller| {
                use gnttab::Domain;
                if let Ok(pages) = held.retry(&caller.hardware()) {
                    self.world.hypervisor.free(pages);
                    flushed = true;
                }
            });
            if !flushed {
                self.held_memory.borrow_mut().push((id, held));
            }
        }
        let left = self.batches_held();
        self.say(format!("failed flushes are tried again; {left} still fail"));
        self.expect(left == retry.left, || {
            format!("{left} batches are still held; expected {}", retry.left)
        })
    }

    /// How many batches could not be flushed.
    pub(crate) fn batches_held(&self) -> usize {
        self.held.borrow().len() + self.held_memory.borrow().len()
    }
}
