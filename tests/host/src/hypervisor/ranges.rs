//! Edits of more than one page: large leaves, ranges, rights.
//!
//! [`Guest`] joins the two tables of a domain for these as it does for single pages:
//! a page is [`Taken`] only with the proof for both.

use std::ops::ControlFlow;

use flush::{
    Batch, Cleared, Failure, Flush, Gfn, Gone, Iotlb, Mfn, Records, Released, Room, Run, Skipped,
    Tlb,
};
use iommu_vtd::{DmaDomain, Members};
use p2m::{PageKind, SetError};
use stage2::{
    Access, Budget, Emptied, Entry, Leaf, Level, Recorder, Rest, Sink, SplitError, Stop, Stopped,
    Unheld, lookup,
};

use super::{DeviceTables, Guest, Hypervisor, Locked, Tables, lock, maps::CpuTables};
use crate::{Caller, Ram};

/// What one cleared leaf showed: 2^`order` frames from `mfn` on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Taken {
    /// The first machine frame.
    pub mfn: Mfn,
    /// Binary logarithm of the number of frames.
    pub order: u8,
}

/// Collects the proofs of one table's leaves, as many as the batch can hold.
pub(super) struct Collect<'c, 'id, K: Records> {
    pub(super) left: usize,
    pub(super) leaves: &'c mut Vec<(Run, Leaf, Gone<'id, K>)>,
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

pub(super) fn take<'id>(
    room: &mut Room<'_, 'id, Taken, 32>,
    run: Run,
    leaf: Leaf,
    cleared: Cleared<'id>,
) {
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
        let mut space = lock(&self.space);
        if space.tables.get(gfn).is_some() {
            return Err(format!("{gfn:?} is taken"));
        }
        match space.edit() {
            Tables::Shared(both) => {
                both.set(gfn, order, mfn, kind, skipped).map_err(in_words)?;
            }
            Tables::Separate { cpu, device } => {
                let run = Run::block(gfn, order);
                cpu.set(gfn, order, mfn, kind, skipped).map_err(in_words)?;
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
            }
        }
        Ok(())
    }

    /// Clears a range in every table and frees the tables that it empties.
    ///
    /// # Errors
    /// [`Stopped`] where the budget or the room of the batch was used up, or where a leaf
    /// had to be split and there was no memory: what lies before the rest is cleared in
    /// every table, and of the rest nothing in any.
    ///
    /// # Panics
    /// If the devices' leaves cannot be cleared where the CPUs' could.
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
                device.fit(&self.dma, (cpu.kind(), cpu.root()), rest, left, skipped)?;
                let mut leaves = Vec::new();
                let sink = Collect { left, leaves: &mut leaves };
                let result = cpu.clear_range(rest, budget, Emptied::Free, skipped, sink);
                for (run, leaf, gone) in leaves {
                    let on_devices = device.clear_run(&self.dma, run, skipped);
                    take(room, run, leaf, gone.with(&on_devices.expect("its leaves fit")));
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

    /// Splits leaves until none reaches beyond the part of `rest` that one of the CPUs' next
    /// `left` leaves shows: those can then be cleared without memory.
    pub(super) fn fit(
        &self,
        dma: &DmaDomain<Locked<Members>>,
        (cpus, root): (CpuTables, Mfn),
        rest: Rest,
        left: usize,
        skipped: &mut Skipped<'_>,
    ) -> Result<(), Stopped> {
        let range = rest.run();
        let mut parts = Vec::new();
        let collect = |run: Run, _| {
            if parts.len() >= left {
                return ControlFlow::Break(());
            }
            let first = run.first().max(range.first());
            parts.extend(Run::new(first, run.last().min(range.last())));
            ControlFlow::Continue(())
        };
        let tally = match cpus.visit(&self.memory, root, rest, collect) {
            Ok(tally) | Err(Stopped { stop: Stop::Asked, tally, .. }) => tally,
            Err(stopped) => return Err(stopped),
        };
        for part in parts {
            let level = match part.pages() {
                0x4_0000 => Level::TWO,
                0x200 => Level::ONE,
                _ => Level::PAGE,
            };
            for edge in [part.first(), part.last()] {
                let found = lookup(dma.tables(&self.memory), edge);
                let reaches_beyond = found.is_some_and(|found| {
                    matches!(found.entry, Entry::Leaf(_)) && !part.covers(found.run)
                });
                if !reaches_beyond {
                    continue;
                }
                let mut record = Recorder::<Iotlb, _>::new(skipped, Unheld);
                let split = stage2::split(dma.tables(&self.memory), edge, level, &mut record);
                split.map_err(|error| Stopped {
                    rest,
                    stop: match error {
                        SplitError::NoTable => Stop::NoTable,
                        SplitError::Unencodable(error) => Stop::Refused(error),
                        SplitError::Pending(pending) => Stop::Split(pending),
                        SplitError::OutOfRange => Stop::OutOfRange,
                        SplitError::Absent | SplitError::Contended => Stop::Contended,
                    },
                    tally,
                })?;
            }
        }
        Ok(())
    }

    /// Clears the leaves of a run and keeps the tables.
    pub(super) fn clear_run<'id>(
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

/// Why a range was not cleared to its end.
#[derive(Debug)]
pub enum RangeError<T, I> {
    /// The edit stopped; what came before it was flushed and freed.
    Stopped(Stopped),
    /// The flush of a batch failed; nothing of that batch was freed.
    Flush(Box<Failure<Taken, 32, T, I>>),
}

impl<R: Ram, T: Flush<Tlb>, I: Flush<Iotlb>> Caller<'_, R, T, I> {
    /// Clears a range of the guest's own memory in as many batches as it takes, and frees
    /// pages and tables. `edited` is called between each edit and its flush.
    ///
    /// Returns the number of batches.
    ///
    /// # Errors
    /// [`RangeError`]: the first batch whose flush failed, or where there was no memory.
    pub fn clear_range(
        &self,
        run: Run,
        mut edited: impl FnMut(&TakenBatch),
    ) -> Result<u64, RangeError<T::Error, I::Error>> {
        let mut rest = Some(Rest::new(run));
        let mut batches = 0;
        while let Some(left) = rest {
            let mut batch = TakenBatch::new(self.guest.id());
            let mut budget = Budget::UNLIMITED;
            let result = batch.edit_many(|skipped, room| {
                self.guest.clear_range(left, &mut budget, skipped, room)
            });
            let ended;
            (rest, ended) = match result {
                Ok(()) => (None, Ok(())),
                Err(Stopped { rest, stop: Stop::Full, .. }) => (Some(rest), Ok(())),
                Err(stopped) => (None, Err(stopped)),
            };
            edited(&batch);
            batches += 1;
            let hardware = flush::Hardware { tlb: &self.tlb, iotlb: &self.iotlb };
            self.hypervisor.free(
                batch.flush(&hardware).map_err(|failure| RangeError::Flush(Box::new(failure)))?,
            );
            ended.map_err(RangeError::Stopped)?;
        }
        Ok(batches)
    }
}

impl<R: Ram> Hypervisor<R> {
    /// Frees what a flushed batch held.
    pub fn free(&self, mut flushed: flush::Flushed<'_, Taken, 32>) {
        while let Some(page) = flushed.next_page() {
            self.free_taken(page);
        }
        while let Some(table) = flushed.next_table() {
            self.memory.free_table(table.recycle());
        }
    }

    /// Frees what one leaf showed.
    pub fn free_taken(&self, page: Released<Taken>) {
        let Taken { mfn, order } = *page.get();
        for offset in 0..1_u64 << order {
            let mfn = Mfn::new(mfn.get() + offset);
            if self.pages.drop_one(mfn, false) {
                self.memory.ram().release(mfn);
            }
        }
    }
}
