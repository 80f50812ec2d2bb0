//! Whole shadows: picked, recycled, and flushed as the guest asks.
//!
//! A shadow that was marked is walked in steps by whoever needs it, and opened by the
//! flush that follows: [`Wiped`] goes through a batch like a page, so nothing but a
//! completed flush opens a shadow.

use flush::{Cleared, Iotlb, Mfn, Released, Skipped, Tlb};
use stage2::{Budget, Emptied, Format, Stop, TableMemory};

use super::{
    Nested,
    shadow::{Context, InUse, PickError, Shadow, Ticket, Unflushed},
};
use crate::record::Walkers;

/// Which nested spaces a guest wants flushed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scope {
    /// One: INVEPT of type 1 (Intel SDM volume 3C, "INVEPT").
    Context(Context),
    /// All of them: INVEPT of type 2.
    AllContexts,
}

impl Scope {
    fn has(self, shadow: &Shadow) -> bool {
        match self {
            Self::Context(context) => shadow.context == Some(context),
            Self::AllContexts => true,
        }
    }
}

/// A flush that the guest asked for and that is not done.
///
/// The instruction that asked is complete when a [`Wiped`] from this flush came out of
/// its batch.
#[derive(Debug, PartialEq, Eq)]
#[must_use = "the guest's flush is not done: go on with `flush_step`"]
pub struct EmulatedFlush(Scope);

/// The walks that ended so far are on the record of a batch.
///
/// It is held by the batch as a page would be. Out of the flushed batch it goes to
/// [`Nested::open`].
///
/// ```compile_fail,E0308
/// # use p2m::nested::{Nested, Wiped};
/// # use stage2::{Format, TableMemory};
/// fn open<F: Format, M: TableMemory>(guest: &mut Nested<'_, F, M>, wiped: Wiped) {
///     guest.open(wiped); // it was not flushed
/// }
/// ```
#[derive(Debug, PartialEq, Eq)]
#[must_use = "hold it in the batch: without it the shadows stay shut"]
pub struct Wiped {
    guest: Mfn,
    /// Tells one [`Nested`] over a p2m from the next.
    seed: u64,
    epoch: u64,
}

impl<F: Format, M: TableMemory, K: Walkers> Nested<'_, F, M, K> {
    /// Takes the shadow of a context, or one that no vCPU uses any more.
    ///
    /// A shadow that had no table or served another context is marked: it has to be
    /// [prepared](Self::prepare) and [opened](Self::open) before [`root`](Self::root)
    /// gives its root.
    ///
    /// # Errors
    ///
    /// See [`PickError`].
    pub fn pick(&mut self, context: Context) -> Result<InUse, PickError> {
        self.clock = self.clock.saturating_add(1);
        let serving = |shadow: &Shadow| shadow.context == Some(context) && shadow.root.is_some();
        let slot = match self.shadows.iter().position(serving) {
            Some(slot) => slot,
            None => self.recycle(context)?,
        };
        let shadow = &mut self.shadows[slot];
        shadow.users = shadow.users.saturating_add(1);
        shadow.picked = self.clock;
        self.shadowed = true;
        Ok(InUse { slot, guest: self.p2m.root() })
    }

    /// Gives a shadow back once this vCPU's CPU no longer runs on it.
    pub fn leave(&mut self, shadow: InUse) {
        if let Some(slot) = self.slot_of(&shadow)
            && let Some(shadow) = self.shadows.get_mut(slot)
        {
            shadow.users = shadow.users.saturating_sub(1);
        }
    }

    /// The root to run the nested guest on, or `None` while the shadow has to be
    /// [prepared](Self::prepare).
    ///
    /// To be asked before every entry that loads it anew.
    #[must_use]
    pub fn root(&self, shadow: &InUse) -> Option<Mfn> {
        let shadow = self.shadows.get(self.slot_of(shadow)?)?;
        if shadow.is_open() { shadow.root } else { None }
    }

    /// To be taken before the guest's own table is read for a fill.
    #[must_use]
    pub fn ticket(&self, shadow: &InUse) -> Ticket {
        let generation = self.shadows.get(shadow.slot).map_or(0, |shadow| shadow.generation);
        Ticket { slot: shadow.slot, generation }
    }

    /// The guest asks for a flush of nested spaces: their shadows are marked.
    ///
    /// Fills under a ticket taken before are refused from now on.
    pub fn begin_flush(&mut self, scope: Scope) -> EmulatedFlush {
        let space = self.p2m.tables().format.geometry().space();
        for shadow in self.shadows.iter_mut() {
            if shadow.root.is_some() && scope.has(shadow) {
                shadow.mark(space);
            }
        }
        EmulatedFlush(scope)
    }

    /// Goes on with a flush: unmaps the marked shadows of its scope.
    ///
    /// Empty spans are stepped over. The last step puts everything that CPUs hold of the
    /// guest on record, also if nothing was mapped, and returns what belongs into the
    /// batch. Repeating a step, or several vCPUs at it, does no harm. Between the steps
    /// the embedder drops its lock.
    ///
    /// # Errors
    ///
    /// [`Stop::Budget`], or [`Stop::Full`] when the batch cannot carry another emptied
    /// table: flush it and go on. With [`Emptied::Keep`] that does not happen, and later
    /// unmaps read the kept tables again. [`Stop::Contended`] for edits without the lock.
    pub fn flush_step<'id>(
        &mut self,
        flush: &EmulatedFlush,
        budget: &mut Budget,
        emptied: Emptied,
        skipped: &mut Skipped<'id>,
    ) -> Result<(Wiped, Cleared<'id>), Stop> {
        for slot in 0..self.shadows.len() {
            if flush.0.has(&self.shadows[slot]) {
                self.walk(slot, budget, emptied, skipped)?;
            }
        }
        Ok(self.wiped(skipped))
    }

    /// Goes on with the pending unmap of a shadow, whoever marked it.
    ///
    /// # Errors
    ///
    /// As [`flush_step`](Self::flush_step).
    pub fn prepare<'id>(
        &mut self,
        shadow: &InUse,
        budget: &mut Budget,
        emptied: Emptied,
        skipped: &mut Skipped<'id>,
    ) -> Result<(Wiped, Cleared<'id>), Stop> {
        if let Some(slot) = self.slot_of(shadow) {
            self.walk(slot, budget, emptied, skipped)?;
        }
        Ok(self.wiped(skipped))
    }

    /// Opens every shadow whose walk had ended when `wiped` was made, and says how many.
    pub fn open(&mut self, wiped: Released<Wiped>) -> usize {
        let Wiped { guest, seed, epoch } = *wiped.get();
        if guest != self.p2m.root() || seed != self.reverse.seed() {
            return 0;
        }
        let mut opened = 0;
        for shadow in self.shadows.iter_mut() {
            if matches!(shadow.unflushed, Some(Unflushed::Walked(walk)) if walk <= epoch) {
                shadow.unflushed = None;
                opened += 1;
            }
        }
        opened
    }

    /// Everything that was unmapped so far goes on record once more, for the vCPUs that
    /// unmapped the rest may not have flushed it.
    fn wiped<'id>(&self, skipped: &mut Skipped<'id>) -> (Wiped, Cleared<'id>) {
        skipped.everything::<Tlb>();
        let cpus = skipped.absent::<Tlb>();
        // Devices walk no shadow.
        let devices = skipped.absent::<Iotlb>();
        let (guest, seed) = (self.p2m.root(), self.reverse.seed());
        (Wiped { guest, seed, epoch: self.epoch }, cpus.with(&devices))
    }

    /// The slot of a shadow in use, unless it is another guest's.
    pub(crate) fn slot_of(&self, shadow: &InUse) -> Option<usize> {
        (shadow.guest == self.p2m.root()).then_some(shadow.slot)
    }

    /// Turns a shadow that nobody uses over to `context`.
    fn recycle(&mut self, context: Context) -> Result<usize, PickError> {
        let mut refused = PickError::AllInUse;
        if let Some(vacant) = self.shadows.iter().position(|shadow| shadow.root.is_none()) {
            let memory = self.p2m.tables().memory;
            match memory.allocate() {
                Some(root) => {
                    let shadow = &mut self.shadows[vacant];
                    shadow.root = Some(memory.link(root));
                    shadow.context = Some(context);
                    // Empty, yet caches know a table by its root, which was another's.
                    shadow.unflushed = Some(Unflushed::Walking);
                    self.walked(vacant);
                    return Ok(vacant);
                }
                None => refused = PickError::NoTable,
            }
        }
        let space = self.p2m.tables().format.geometry().space();
        let idle = self.shadows.iter().enumerate();
        let idle = idle.filter(|(_, shadow)| shadow.root.is_some() && shadow.users == 0);
        let (slot, _) = idle.min_by_key(|(_, shadow)| shadow.picked).ok_or(refused)?;
        let shadow = &mut self.shadows[slot];
        shadow.mark(space);
        shadow.context = Some(context);
        shadow.closing = false;
        self.counts.recycled = self.counts.recycled.saturating_add(1);
        Ok(slot)
    }
}

static_assertions::assert_not_impl_any!(Wiped: Clone, Copy, Default);
static_assertions::assert_not_impl_any!(EmulatedFlush: Clone, Copy, Default);
