//! Edits of more than one page: large leaves, ranges, rights, the end.
//!
//! [`Guest`] joins the two tables of a domain for these as it does for single pages:
//! a page is [`Taken`] only with the proof for both.

use std::sync::PoisonError;

use flush::{
    Batch, Cleared, DomainId, Failure, Flush, Gfn, Gone, Iotlb, Mfn, Records, Room, Run, Shared,
    Skipped, Tlb,
};
use iommu_vtd::{DmaDomain, Members};
use p2m::{GuestCpus, PageKind, SetError, Teardown};
use stage2::{
    Access, Budget, Emptied, Leaf, Level, Recorder, Rest, Sink, Stop, Stopped, Unheld,
    format::ept::Ept,
};

use super::{DeviceTables, Guest, Hypervisor, Locked, Tables, lock, maps::CpuEnd};
use crate::{Caller, Memory, Ram};

/// What one cleared leaf showed: 2^`order` frames from `mfn` on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Taken {
    /// The first machine frame.
    pub mfn: Mfn,
    /// Binary logarithm of the number of frames.
    pub order: u8,
}

/// Collects the proofs of one table's leaves, as many as the batch can hold.
struct Collect<'c, 'id, K: Records> {
    left: usize,
    leaves: &'c mut Vec<(Run, Leaf, Gone<'id, K>)>,
}

impl<'id, K: Records> Sink<'id, K> for Collect<'_, 'id, K> {
    fn left(&self) -> usize {
        self.left
    }

    fn take(&mut self, run: Run, leaf: Leaf, gone: Gone<'id, K>) {
        self.left = self.left.saturating_sub(1);
        self.leaves.push((run, leaf, gone));
    }
}

/// A batch of leaves.
pub type TakenBatch = Batch<Taken, 32>;

fn take<'id>(room: &mut Room<'_, 'id, Taken, 32>, run: Run, leaf: Leaf, cleared: Cleared<'id>) {
    let order = run.pages().ilog2() as u8;
    let held = room.hold(Taken { mfn: leaf.mfn, order }, cleared);
    held.expect("the sink had no more room than the batch");
}

impl<R: Ram> Guest<R> {
    /// Maps 2^`order` frames where nothing is mapped, in every table.
    ///
    /// # Errors
    /// Why not, in words.
    pub fn map_block(
        &self,
        gfn: Gfn,
        order: u8,
        mfn: Mfn,
        kind: PageKind,
        skipped: &mut Skipped<'_>,
    ) -> Result<(), String> {
        let in_words = |error: SetError| format!("{error:?}");
        let displaced = match lock(&self.space).edit() {
            Tables::Shared(both) => {
                both.set(gfn, order, mfn, kind, skipped).map_err(in_words)?.is_some()
            }
            Tables::Separate { cpu, device } => {
                let run = Run::block(gfn, order);
                let displaced = cpu.set(gfn, order, mfn, kind, skipped).map_err(in_words)?;
                if let Err(error) = device.map_run(&self.dma, run, mfn, kind, skipped) {
                    // What either table got of it goes; both flushes are on record then.
                    let (rest, mut budget) = (Rest::new(run), Budget::UNLIMITED);
                    let sink = Collect { left: usize::MAX, leaves: &mut Vec::new() };
                    let undone =
                        cpu.clear_range(rest, &mut budget, Emptied::Keep, skipped, sink).is_ok();
                    drop(device.clear_run(&self.dma, run, skipped));
                    debug_assert!(undone, "what was just mapped can be cleared");
                    return Err(error);
                }
                displaced.is_some()
            }
        };
        if displaced { Err(format!("{gfn:?} was taken")) } else { Ok(()) }
    }

    /// Clears a range in every table and frees the tables that it empties.
    ///
    /// # Errors
    /// [`Stopped`] where the budget or the room of the batch was used up: what lies
    /// before the rest is cleared in every table.
    pub fn clear_range<'id>(
        &self,
        rest: Rest,
        budget: &mut Budget,
        skipped: &mut Skipped<'id>,
        room: &mut Room<'_, 'id, Taken, 32>,
    ) -> Result<(), Stopped> {
        let left = room.left();
        match lock(&self.space).edit() {
            Tables::Shared(both) => {
                let mut leaves = Vec::new();
                let sink = Collect { left, leaves: &mut leaves };
                let result = both.clear_range(rest, budget, Emptied::Free, skipped, sink);
                for (run, leaf, gone) in leaves {
                    take(room, run, leaf, gone.into());
                }
                result.map(drop)
            }
            Tables::Separate { cpu, device } => {
                let mut leaves = Vec::new();
                let sink = Collect { left, leaves: &mut leaves };
                let result = cpu.clear_range(rest, budget, Emptied::Free, skipped, sink);
                for (run, leaf, gone) in leaves {
                    let on_devices = device.clear_run(&self.dma, run, skipped)?;
                    take(room, run, leaf, gone.with(&on_devices));
                }
                let done = match &result {
                    Ok(_) => Some(rest.run()),
                    Err(stopped) => before(rest, stopped.rest),
                };
                // Every page has its proofs by now: a stop loses none.
                if let Some(done) = done {
                    let freed = device.free_tables(&self.dma, done, skipped);
                    freed.map_err(|stopped| Stopped {
                        rest: up_to(stopped.rest, rest),
                        ..stopped
                    })?;
                }
                result.map(drop)
            }
        }
    }

    /// Takes rights from every mapping of a range in every table.
    ///
    /// # Errors
    /// As [`p2m::P2m::restrict`].
    pub fn restrict(
        &self,
        run: Run,
        allowed: Access,
        skipped: &mut Skipped<'_>,
    ) -> Result<(), Stopped> {
        let mut budget = Budget::UNLIMITED;
        self.restrict_within(Rest::new(run), allowed, &mut budget, skipped)
    }

    /// The same, as far as the budget goes.
    ///
    /// # Errors
    /// As [`p2m::P2m::restrict`]; what lies before the rest is done in every table.
    pub fn restrict_within(
        &self,
        rest: Rest,
        allowed: Access,
        budget: &mut Budget,
        skipped: &mut Skipped<'_>,
    ) -> Result<(), Stopped> {
        match lock(&self.space).edit() {
            Tables::Shared(both) => both.restrict(rest, allowed, budget, skipped).map(drop),
            Tables::Separate { cpu, device } => {
                let result = cpu.restrict(rest, allowed, budget, skipped);
                let done = match &result {
                    Ok(_) => Some(rest.run()),
                    Err(stopped) => before(rest, stopped.rest),
                };
                if let Some(done) = done {
                    let taken = device.restrict(&self.dma, done, allowed, skipped);
                    taken.map_err(|stopped| Stopped {
                        rest: up_to(stopped.rest, rest),
                        ..stopped
                    })?;
                }
                result.map(drop)
            }
        }
    }

    /// The end of the guest's tables. No CPU runs it and it has no device any more.
    pub fn take_down(self) -> TakeDown<R> {
        let Self { id, space, dma, cpus, grants: _, handles: _ } = self;
        let trees = match space.into_inner().unwrap_or_else(PoisonError::into_inner).tables {
            Tables::Shared(both) => Trees::Shared(both.teardown()),
            Tables::Separate { cpu, device } => {
                let rest = Some(Rest::new(dma.space()));
                Trees::Separate { cpu: Box::new(cpu.teardown()), device, rest }
            }
        };
        TakeDown { id, cpus, dma, trees }
    }
}

/// From where `at` begins to where `rest` ends.
fn up_to(at: Rest, rest: Rest) -> Rest {
    Rest::new(Run::new(at.run().first(), rest.run().last()).unwrap_or(rest.run()))
}

/// What of `rest` comes before `left`.
fn before(rest: Rest, left: Rest) -> Option<Run> {
    let last = left.run().first().get().checked_sub(1)?;
    Run::new(rest.run().first(), Gfn::new(last))
}

/// A guest that is no more, and what is left of its tables.
pub struct TakeDown<R: Ram> {
    id: DomainId,
    /// The CPUs that may hold its translations.
    pub cpus: GuestCpus,
    /// The devices that it had.
    pub dma: DmaDomain<Locked<Members>>,
    trees: Trees<R>,
}

enum Trees<R: Ram> {
    Shared(Teardown<Ept, Memory<R>, Shared>),
    Separate {
        cpu: Box<CpuEnd<R>>,
        device: DeviceTables<R>,
        /// What is left of the devices' tree.
        rest: Option<Rest>,
    },
}

impl<R: Ram> TakeDown<R> {
    /// Which domain it was.
    pub fn id(&self) -> DomainId {
        self.id
    }

    /// Goes on as far as the batch has room; says whether that was all.
    pub fn step(&mut self, batch: &mut TakenBatch) -> bool {
        let mut budget = Budget::UNLIMITED;
        self.step_within(&mut budget, batch)
    }

    /// The same, as far as the budget goes.
    pub fn step_within(&mut self, budget: &mut Budget, batch: &mut TakenBatch) -> bool {
        batch.edit_many(|skipped, room| self.trees.step(&self.dma, budget, skipped, room))
    }
}

impl<R: Ram> Trees<R> {
    fn step<'id>(
        &mut self,
        dma: &DmaDomain<Locked<Members>>,
        budget: &mut Budget,
        skipped: &mut Skipped<'id>,
        room: &mut Room<'_, 'id, Taken, 32>,
    ) -> bool {
        match self {
            Self::Shared(both) => {
                let mut leaves = Vec::new();
                let sink = Collect { left: room.left(), leaves: &mut leaves };
                let done = both.step(budget, skipped, sink).is_ok();
                for (run, leaf, gone) in leaves {
                    take(room, run, leaf, gone.into());
                }
                done
            }
            Self::Separate { cpu, device, rest } => {
                let mut leaves = Vec::new();
                let sink = Collect { left: room.left(), leaves: &mut leaves };
                let done = cpu.step(budget, skipped, sink).is_ok();
                for (run, leaf, gone) in leaves {
                    let on_devices = device.clear_run(dma, run, skipped);
                    let on_devices = on_devices.expect("as on the CPUs' side");
                    take(room, run, leaf, gone.with(&on_devices));
                }
                if let (true, Some(left)) = (done, *rest) {
                    let mut record = Recorder::<Iotlb, _>::new(skipped, Unheld);
                    let tables = dma.tables(&device.memory);
                    let stopped = stage2::destroy(tables, left, budget, &mut record).err();
                    *rest = stopped.map(|stopped| stopped.rest);
                }
                done && rest.is_none()
            }
        }
    }
}

impl<R: Ram> DeviceTables<R> {
    fn map_run(
        &self,
        dma: &DmaDomain<Locked<Members>>,
        run: Run,
        mfn: Mfn,
        kind: PageKind,
        skipped: &mut Skipped<'_>,
    ) -> Result<(), String> {
        let (rest, mut budget) = (Rest::new(run), Budget::UNLIMITED);
        dma.map(&self.memory, rest, mfn, kind.device_access(), &mut budget, skipped)
            .map_err(|stopped| format!("{:?}", stopped.error))
    }

    /// Breaks the large leaf around a page.
    pub(super) fn split(
        &self,
        dma: &DmaDomain<Locked<Members>>,
        gfn: Gfn,
        skipped: &mut Skipped<'_>,
    ) -> Result<(), String> {
        let mut record = Recorder::<Iotlb, _>::new(skipped, Unheld);
        stage2::split(dma.tables(&self.memory), gfn, Level::PAGE, &mut record)
            .map_err(|error| format!("{error:?}"))
    }

    /// Clears the leaves of a run and keeps the tables.
    fn clear_run<'id>(
        &self,
        dma: &DmaDomain<Locked<Members>>,
        run: Run,
        skipped: &mut Skipped<'id>,
    ) -> Result<Gone<'id, Iotlb>, Stopped> {
        if self.forgotten {
            return Ok(skipped.absent());
        }
        let mut leaves = Vec::new();
        let sink = Collect { left: usize::MAX, leaves: &mut leaves };
        let mut record = Recorder::<Iotlb, _>::new(skipped, sink);
        let (rest, mut budget) = (Rest::new(run), Budget::UNLIMITED);
        let tables = dma.tables(&self.memory);
        stage2::clear(tables, rest, &mut budget, Emptied::Keep, &mut record)?;
        // All of them are on the same record: one proof stands for the run.
        Ok(leaves.pop().map_or_else(|| skipped.absent(), |(_, _, gone)| gone))
    }

    /// Frees the tables of a run whose leaves are gone.
    fn free_tables(
        &self,
        dma: &DmaDomain<Locked<Members>>,
        run: Run,
        skipped: &mut Skipped<'_>,
    ) -> Result<(), Stopped> {
        if self.forgotten {
            return Ok(());
        }
        let mut budget = Budget::UNLIMITED;
        dma.clear_run(&self.memory, Rest::new(run), &mut budget, skipped, Unheld).map(drop)
    }

    fn restrict(
        &self,
        dma: &DmaDomain<Locked<Members>>,
        run: Run,
        allowed: Access,
        skipped: &mut Skipped<'_>,
    ) -> Result<(), Stopped> {
        if self.forgotten {
            return Ok(());
        }
        let taken = Access::ALL.without(allowed);
        let mut record = Recorder::<Iotlb, _>::new(skipped, Unheld);
        let (rest, mut budget) = (Rest::new(run), Budget::UNLIMITED);
        stage2::protect(dma.tables(&self.memory), rest, &mut budget, &mut record, |leaf| {
            leaf.access.without(taken)
        })
        .map(drop)
    }
}

/// A batch of leaves whose flush failed.
pub type TakenFailed<T, I> =
    Failure<Taken, 32, <T as Flush<Tlb>>::Error, <I as Flush<Iotlb>>::Error>;

impl<R: Ram, T: Flush<Tlb>, I: Flush<Iotlb>> Caller<'_, R, T, I> {
    /// Clears a range of the guest's own memory in as many batches as it takes, and frees
    /// pages and tables. `edited` is called between each edit and its flush.
    ///
    /// Returns the number of batches.
    ///
    /// # Errors
    /// The first batch whose flush failed; nothing of it was freed.
    ///
    /// # Panics
    /// If the tables cannot be cleared.
    #[expect(clippy::result_large_err, reason = "the failed batch is what a test looks at")]
    pub fn clear_range(
        &self,
        run: Run,
        mut edited: impl FnMut(&TakenBatch),
    ) -> Result<u64, TakenFailed<T, I>> {
        let mut rest = Some(Rest::new(run));
        let mut batches = 0;
        while let Some(left) = rest {
            let mut batch = TakenBatch::new(self.guest.id());
            let mut budget = Budget::UNLIMITED;
            let result = batch.edit_many(|skipped, room| {
                self.guest.clear_range(left, &mut budget, skipped, room)
            });
            rest = match result {
                Ok(()) => None,
                Err(Stopped { rest, stop: Stop::Full, .. }) => Some(rest),
                Err(stopped) => panic!("the range cannot be cleared: {stopped:?}"),
            };
            edited(&batch);
            batches += 1;
            let hardware = flush::Hardware { tlb: &self.tlb, iotlb: &self.iotlb };
            self.hypervisor.free(batch.flush(&hardware)?);
        }
        Ok(batches)
    }
}

impl<R: Ram> Hypervisor<R> {
    /// Frees what a flushed batch held.
    pub fn free(&self, mut flushed: flush::Flushed<'_, Taken, 32>) {
        while let Some(page) = flushed.next_page() {
            let Taken { mfn, order } = *page.get();
            for offset in 0..1_u64 << order {
                let mfn = Mfn::new(mfn.get() + offset);
                if self.pages.drop_one(mfn, false) {
                    self.memory.ram().release(mfn);
                }
            }
        }
        while let Some(table) = flushed.next_table() {
            self.memory.free_table(table.recycle());
        }
    }
}
