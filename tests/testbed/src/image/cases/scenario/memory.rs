//! A domain's own memory: pages that come, go, move, and lose rights.

use core::sync::atomic::Ordering;

use arrayvec::ArrayVec;
use flush::{Batch, Gfn, Mfn, Run};
use gnttab::Domain as _;
use p2m::{Expected, PageKind};
use stage2::{Access, Budget, Emptied, Rest, Stop, Stopped};
use testbed::failure::{Context, Failure};
use testbed::scenario::NONE;
use testbed::{ensure, fail};

use super::{Page, Played, attempt, number};
use crate::embedding::{Guest, PageInfo, Taken, TakenBatch, give_back};
use crate::memory;
use crate::world::WorldCaller;

/// Flush a batch of a domain's memory, and free what it held.
fn finish(caller: &WorldCaller<'_>, mut batch: TakenBatch) -> Result<(), Failure> {
    match batch.flush(&caller.hardware()) {
        Ok(flushed) => give_back(flushed),
        Err(failed) => fail!("flush: {:?}", failed.error),
    }
}

fn run(first: u64, count: u64) -> Result<Run, Failure> {
    let last = count.checked_sub(1).and_then(|more| first.checked_add(more));
    let run = last.and_then(|last| Run::new(Gfn::new(first), Gfn::new(last)));
    run.context("a range that is not empty")
}

/// Entries that may be read before a pause.
const fn allowance(budget: u64) -> Budget {
    match budget {
        0 => Budget::UNLIMITED,
        entries => Budget::new(entries),
    }
}

impl Played<'_> {
    pub(super) fn memory_step(&mut self, word: &str, values: &[u64]) -> Result<bool, Failure> {
        match (word, values) {
            ("populate", [page, domain, gfn, order, expected]) => {
                let owner = number(*domain)?;
                let (gfn, order) = (Gfn::new(*gfn), u8::try_from(*order).context("an order")?);
                let guest = self.world.guest(owner)?;
                let given = attempt(*expected, self.give_memory(guest, gfn, order))?;
                if let Some(frame) = given {
                    let grants = ArrayVec::new();
                    self.know(*page, Page { frame, gfn, order, owner, grants })?;
                }
            }
            ("clear", [domain, first, count, budget, expected]) => {
                let guest = self.world.guest(number(*domain)?)?;
                let cleared = run(*first, *count).and_then(|run| self.clear(guest, run, *budget));
                self.batches = attempt(*expected, cleared)?.unwrap_or(0);
            }
            ("restrict", [domain, first, count, write, budget]) => {
                let guest = self.world.guest(number(*domain)?)?;
                let allowed = if *write == 0 { Access::READ } else { Access::READ_WRITE };
                self.batches = self.restrict(guest, run(*first, *count)?, allowed, *budget)?;
            }
            ("swap-page", [domain, gfn, page]) => {
                let (owner, gfn) = (number(*domain)?, Gfn::new(*gfn));
                let frame = self.swap_page(self.world.guest(owner)?, gfn)?;
                let grants = ArrayVec::new();
                self.know(*page, Page { frame, gfn, order: 0, owner, grants })?;
            }
            ("move-page", [domain, from, to]) => {
                let owner = number(*domain)?;
                let (from, to) = (Gfn::new(*from), Gfn::new(*to));
                let frame = self.move_page(self.world.guest(owner)?, from, to)?;
                let moved = self.books.pages.iter_mut().flatten();
                for page in moved.filter(|page| page.frame == frame && page.owner == owner) {
                    page.gfn = to;
                }
            }
            ("memory", [left]) => self.leave_memory(*left)?,
            _ => return Ok(false),
        }
        Ok(true)
    }

    /// As the hypervisor's own, with flushes that may lie and are counted.
    fn give_memory(&self, guest: &Guest, gfn: Gfn, order: u8) -> Result<Mfn, Failure> {
        let first = memory::allocate_block(order)?;
        for frame in (first.get()..).take(1 << order) {
            let info = PageInfo::of(Mfn::new(frame)).context("books of a frame")?;
            info.take(false).context("a first reference")?;
        }
        let mapped = self.world.as_caller(guest, &self.manner(), |caller| {
            let mut batch = TakenBatch::new(guest.id());
            let mapped = batch.edit_many(|skipped, _| {
                let was = guest.map(gfn, order, first, PageKind::RamReadWrite, skipped);
                was.is_ok_and(|was| was.is_none())
            });
            finish(caller, batch).map(|()| mapped)
        })??;
        if !mapped {
            for frame in (first.get()..).take(1 << order).map(Mfn::new) {
                if PageInfo::of(frame).is_some_and(|info| info.drop_one(false)) {
                    memory::release(frame)?;
                }
            }
            fail!("no room for memory at {gfn:?}");
        }
        Ok(first)
    }

    /// Clears a range, in as many batches as it takes.
    fn clear(&self, guest: &Guest, run: Run, budget: u64) -> Result<u64, Failure> {
        let is_grant = |found: p2m::Mapping| found.kind != Some(PageKind::RamReadWrite);
        for mapped in self.books.mappings.iter().flatten() {
            let inside = mapped.by == guest.id() && run.contains(mapped.gfn);
            let grant = inside && guest.lookup(mapped.gfn).is_some_and(is_grant);
            ensure!(!grant, "a grant is mapped at {:?}", mapped.gfn);
        }
        self.world.as_caller(guest, &self.manner(), |caller| {
            let (mut rest, mut batches) = (Some(Rest::new(run)), 0);
            while let Some(left) = rest {
                batches += 1;
                let mut batch = TakenBatch::new(guest.id());
                let mut budget = allowance(budget);
                let edited = batch.edit_many(|skipped, room| {
                    guest.clear_range(left, Emptied::Free, &mut budget, skipped, room)
                });
                let stopped = match edited {
                    Ok(()) => None,
                    Err(Stopped { rest, stop: Stop::Full | Stop::Budget, .. }) => Some(Ok(rest)),
                    Err(stopped) => Some(Err(stopped.stop)),
                };
                // What was taken by then is flushed in any case.
                finish(caller, batch)?;
                rest = match stopped {
                    None => None,
                    Some(Ok(rest)) => Some(rest),
                    Some(Err(stop)) => fail!("the range cannot be cleared: {stop}"),
                };
            }
            Ok(batches)
        })?
    }

    /// Takes rights, in as many batches as it takes.
    fn restrict(
        &self,
        guest: &Guest,
        run: Run,
        allowed: Access,
        budget: u64,
    ) -> Result<u64, Failure> {
        self.world.as_caller(guest, &self.manner(), |caller| {
            let (mut rest, mut batches) = (Some(Rest::new(run)), 0);
            while let Some(left) = rest {
                batches += 1;
                let mut batch: Batch<(), 1> = Batch::new(guest.id());
                let mut budget = allowance(budget);
                let edited = batch
                    .edit_many(|skipped, _| guest.restrict(left, allowed, &mut budget, skipped));
                if let Err(failed) = batch.flush(&caller.hardware()) {
                    fail!("flush: {:?}", failed.error);
                }
                rest = match edited {
                    Ok(()) => None,
                    Err(Stopped { rest, stop: Stop::Budget, .. }) => Some(rest),
                    Err(stopped) => fail!("rights cannot be taken: {}", stopped.stop),
                };
            }
            Ok(batches)
        })?
    }

    fn swap_page(&self, guest: &Guest, gfn: Gfn) -> Result<Mfn, Failure> {
        let frame = memory::allocate()?;
        let info = PageInfo::of(frame).context("books of a frame")?;
        info.take(false).context("a first reference")?;
        self.world.as_caller(guest, &self.manner(), |caller| {
            let mut batch = TakenBatch::new(guest.id());
            let edited = batch.edit_many(|skipped, room| {
                let was = guest.map(gfn, 0, frame, PageKind::RamReadWrite, skipped);
                match was {
                    Ok(Some((mfn, cleared))) => {
                        room.hold(Taken { mfn, pages: 1, own: true }, cleared).is_ok()
                    }
                    Ok(None) => true,
                    Err(_) => false,
                }
            });
            finish(caller, batch)?;
            ensure!(edited, "the page at {gfn:?} is not replaced");
            Ok(frame)
        })?
    }

    fn move_page(&self, guest: &Guest, from: Gfn, to: Gfn) -> Result<Mfn, Failure> {
        let mfn = guest.lookup(from).context("a page to move")?.mfn;
        let info = PageInfo::of(mfn).context("books of a frame")?;
        // The new number counts the page for itself.
        info.take(false).context("another reference")?;
        self.world.as_caller(guest, &self.manner(), |caller| {
            let mut batch = TakenBatch::new(guest.id());
            let kind = PageKind::RamReadWrite;
            let held = batch.hold(|skipped| {
                let cleared = guest.clear(from, Expected { mfn, kind }, skipped)?;
                Ok::<_, p2m::ClearError>((Taken { mfn, pages: 1, own: true }, cleared))
            });
            held.context("a page to move")?;
            let mapped = batch.edit_many(|skipped, _| {
                guest.map(to, 0, mfn, kind, skipped).is_ok_and(|was| was.is_none())
            });
            finish(caller, batch)?;
            ensure!(mapped, "there is no room at {to:?}");
            Ok(mfn)
        })?
    }

    /// Takes all memory but so many frames, or gives back what was taken.
    fn leave_memory(&mut self, left: u64) -> Result<(), Failure> {
        // The frames that were taken are a list: the first word of each names the next.
        let target = if left == NONE { u64::MAX } else { left };
        while memory::free_frames() > target {
            let frame = memory::allocate()?;
            let next = self.drained.map_or(0, Mfn::get);
            let words = memory::words(frame).context("words of a frame")?;
            words[0].store(next, Ordering::Relaxed);
            self.drained = Some(frame);
        }
        while let Some(frame) = self.drained.filter(|_| memory::free_frames() < target) {
            let words = memory::words(frame).context("words of a frame")?;
            let next = words[0].load(Ordering::Relaxed);
            self.drained = (next != 0).then_some(Mfn::new(next));
            memory::release(frame)?;
        }
        Ok(())
    }
}
