//! Edits of ranges of a guest's own memory, in every table
//!
//! A leaf comes out as [`Taken`], with the proof for each table that showed it, and
//! [`give_back`] frees what a flushed batch held.

use arrayvec::ArrayVec;
use flush::{Batch, Cleared, Flushed, Gfn, Gone, Iotlb, Mfn, Records, Room, Run, Skipped};
use p2m::PageKind;
use stage2::{Access, Budget, Emptied, Leaf, Recorder, Rest, Sink, Stopped, Unheld};
use testbed::failure::Failure;

use super::guest::Tables;
use super::page_info::PageInfo;
use super::{Guest, Memory};
use crate::memory;

/// Leaves of one batch.
const LEAVES: usize = 32;

/// What one cleared leaf showed.
#[derive(Debug)]
pub(crate) struct Taken {
    /// The first frame.
    pub(crate) mfn: Mfn,
    /// How many frames.
    pub(crate) pages: u64,
    /// Of the domain's own memory, which it counts. What it had mapped of others is
    /// counted by its handles.
    pub(crate) own: bool,
}

/// A batch of leaves.
pub(crate) type TakenBatch = Batch<Taken, LEAVES>;

/// Collects the proofs of leaves.
struct Collect<'c, 'id, K: Records> {
    left: usize,
    leaves: &'c mut ArrayVec<(Run, Leaf, Gone<'id, K>), LEAVES>,
}

impl<'id, K: Records> Sink<'id, K> for Collect<'_, 'id, K> {
    fn left(&self) -> usize {
        self.left
    }

    fn take(&mut self, run: Run, leaf: Leaf, gone: Gone<'id, K>) {
        self.left = self.left.saturating_sub(1);
        // There is room: `left` began as no more than that.
        self.leaves.push((run, leaf, gone));
    }
}

fn hold<'id>(room: &mut Room<'_, 'id, Taken, LEAVES>, run: Run, leaf: Leaf, cleared: Cleared<'id>) {
    let own = PageKind::from_tag(leaf.tag).is_some_and(PageKind::gives_way);
    let taken = Taken { mfn: leaf.mfn, pages: run.pages(), own };
    // The sink took no more leaves than there was room for.
    room.hold(taken, cleared).ok();
}

/// What of `rest` comes before `left`.
fn before(rest: Rest, left: Rest) -> Option<Run> {
    let last = left.run().first().get().checked_sub(1)?;
    Run::new(rest.run().first(), Gfn::new(last))
}

/// From where `at` begins to where `rest` ends.
fn up_to(at: Rest, rest: Rest) -> Rest {
    Rest::new(Run::new(at.run().first(), rest.run().last()).unwrap_or(rest.run()))
}

impl Guest {
    /// Clear what is mapped in `rest`, as far as the batch has room and `budget` goes; the
    /// tables that this empties stay, or wait for the same flush.
    ///
    /// # Errors
    /// [`Stopped`] with what is left. What comes before it is cleared in every table.
    pub(crate) fn clear_range<'id>(
        &self,
        rest: Rest,
        emptied: Emptied,
        budget: &mut Budget,
        skipped: &mut Skipped<'id>,
        room: &mut Room<'_, 'id, Taken, LEAVES>,
    ) -> Result<(), Stopped> {
        let left = room.left();
        self.with_tables(|tables| match tables {
            Tables::Shared(map) => {
                let mut leaves = ArrayVec::new();
                let sink = Collect { left, leaves: &mut leaves };
                let done = map.clear_range(rest, budget, emptied, skipped, sink);
                for (run, leaf, gone) in leaves {
                    hold(room, run, leaf, gone.into());
                }
                done.map(drop)
            }
            Tables::Separate(map) => {
                let mut leaves = ArrayVec::new();
                let sink = Collect { left, leaves: &mut leaves };
                let done = map.clear_range(rest, budget, emptied, skipped, sink);
                for (run, leaf, gone) in leaves {
                    let device = self.clear_device_leaves(run, skipped)?;
                    hold(room, run, leaf, gone.with(&device));
                }
                let walked = match &done {
                    Ok(_) => Some(rest.run()),
                    Err(stopped) => before(rest, stopped.rest),
                };
                // Every page has its proofs by now: a stop loses none.
                if let (Emptied::Free, Some(walked)) = (emptied, walked) {
                    let mut budget = Budget::UNLIMITED;
                    let walked = Rest::new(walked);
                    let freed = self.dma().clear_run(&Memory, walked, &mut budget, skipped, Unheld);
                    freed.map_err(|stopped| Stopped {
                        rest: up_to(stopped.rest, rest),
                        ..stopped
                    })?;
                }
                done.map(drop)
            }
        })
    }

    /// Clear a run in the devices' own table, whose tables stay.
    fn clear_device_leaves<'id>(
        &self,
        run: Run,
        skipped: &mut Skipped<'id>,
    ) -> Result<Gone<'id, Iotlb>, Stopped> {
        let mut record = Recorder::<Iotlb, _>::new(skipped, Unheld);
        let (rest, mut budget) = (Rest::new(run), Budget::UNLIMITED);
        stage2::clear(self.dma().tables(&Memory), rest, &mut budget, Emptied::Keep, &mut record)?;
        // Each leaf of the run is on record by now.
        Ok(skipped.absent())
    }

    /// Take rights from every mapping of a range, in every table, as far as `budget` goes.
    ///
    /// # Errors
    /// As [`p2m::P2m::restrict`]; what lies before the rest is done in every table.
    pub(crate) fn restrict(
        &self,
        rest: Rest,
        allowed: Access,
        budget: &mut Budget,
        skipped: &mut Skipped<'_>,
    ) -> Result<(), Stopped> {
        self.with_tables(|tables| match tables {
            Tables::Shared(map) => map.restrict(rest, allowed, budget, skipped).map(drop),
            Tables::Separate(map) => {
                let done = map.restrict(rest, allowed, budget, skipped);
                let walked = match &done {
                    Ok(_) => Some(rest.run()),
                    Err(stopped) => before(rest, stopped.rest),
                };
                if let Some(walked) = walked {
                    let taken = Access::ALL.without(allowed);
                    let mut record = Recorder::<Iotlb, _>::new(skipped, Unheld);
                    let (walked, mut budget) = (Rest::new(walked), Budget::UNLIMITED);
                    let tables = self.dma().tables(&Memory);
                    let taken = stage2::protect(tables, walked, &mut budget, &mut record, |leaf| {
                        leaf.access.without(taken)
                    });
                    taken.map_err(|stopped| Stopped {
                        rest: up_to(stopped.rest, rest),
                        ..stopped
                    })?;
                }
                done.map(drop)
            }
        })
    }
}

/// Give back what a flushed batch held.
///
/// # Errors
/// If a page is given back that is not allocated.
pub(crate) fn give_back(mut flushed: Flushed<'_, Taken, LEAVES>) -> Result<(), Failure> {
    while let Some(table) = flushed.next_table() {
        Memory::free_table(table.recycle());
    }
    while let Some(released) = flushed.next_page() {
        let Taken { mfn, pages, own } = *released.get();
        for frame in (mfn.get()..).take(pages as usize).map(Mfn::new) {
            if own && PageInfo::of(frame).is_some_and(|info| info.drop_one(false)) {
                memory::release(frame)?;
            }
        }
    }
    Ok(())
}
