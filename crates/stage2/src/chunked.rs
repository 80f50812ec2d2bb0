//! The chunked loop of earlier systems: one walk for each piece of a range.
//!
//! [`chunked`] cuts a range into [`Chunk`]s and runs a walk over each, with a pause in
//! between where locks can be dropped. It exists to reproduce published counts and for
//! embedders whose locks want such borders; the walks themselves are those of this
//! crate, or [`Tracked::release`](crate::Tracked::release). A walk that is bounded by
//! entries read ([`Budget`](crate::Budget)) needs no chunks.

use core::fmt;
use core::ops::ControlFlow;

use flush::{Gfn, Run};

use crate::format::Geometry;
use crate::stop::{Rest, Stopped};

/// An aligned piece of the address space: 2^order frames of 4 KiB.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Chunk {
    order: u8,
}

impl Chunk {
    /// 2^`order` frames; 64 and above is the whole space.
    #[must_use]
    pub const fn new(order: u8) -> Self {
        Self { order }
    }

    /// What earlier systems take: the span of the smallest level above single pages of
    /// at least 32 MiB. That is 1 GiB with 4 KiB pages, 32 MiB with 16 and 512 MiB with
    /// 64 KiB, for the wide formats too.
    #[must_use]
    pub const fn usual(geometry: Geometry) -> Self {
        const LEAST: u8 = 13;
        let (page, index) = (geometry.page_order(), geometry.index_bits());
        let one = page.saturating_add(index);
        Self { order: if one < LEAST { one.saturating_add(index) } else { one } }
    }

    /// The lg2 of its size in frames of 4 KiB.
    #[must_use]
    pub const fn order(self) -> u8 {
        self.order
    }

    /// The piece of `rest` from its start to the end of the chunk or of the rest.
    fn first_of(self, rest: Rest) -> Rest {
        let run = rest.run();
        Rest::from(run.first(), run.last().min(Run::block(run.first(), self.order).last()))
    }
}

/// Where the next chunk begins after a walk that may have reached past its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pace {
    /// At the next chunk, whatever the walk saw: one walk for each chunk of the range.
    EveryChunk,
    /// Where the walk stopped: an entry is stepped over by its whole span, once.
    Resume,
}

/// What a failed walk of [`chunked`] returns: it says where it stopped.
pub trait Stops {
    /// The first frame that is not dealt with.
    fn at(&self) -> Gfn;
}

impl Stops for Stopped {
    fn at(&self) -> Gfn {
        self.rest.run().first()
    }
}

/// Why the loop ended early.
#[derive(Debug, PartialEq, Eq)]
pub enum Halt<E> {
    /// A walk failed, with its own error, unchanged.
    Walk(E),
    /// A walk claimed success and had not reached the end of its chunk.
    Short,
    /// The pause asked for it.
    Asked,
}

/// Where the loop ended early. All before `rest` is done and on record.
#[derive(Debug, PartialEq, Eq)]
#[must_use = "the range is not complete"]
pub struct Halted<E> {
    /// What is left to do, to the end of the whole range.
    pub rest: Rest,
    /// Why.
    pub halt: Halt<E>,
    /// Walks begun, the failed one among them.
    pub walks: u64,
}

impl<E: fmt::Display> fmt::Display for Halted<E> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.halt {
            Halt::Walk(error) => error.fmt(f),
            Halt::Short => f.write_str("a walk ended before the end of its chunk"),
            Halt::Asked => f.write_str("the pause stopped"),
        }
    }
}

/// Walks over `rest` chunk by chunk and returns the number of walks.
///
/// `walk` deals with the range it is given, every frame of it, and returns the last
/// frame that it has dealt with: [`Tally::reached`](crate::Tally::reached), or what a
/// [`Sweep`](crate::Sweep) answers. That may lie beyond its range, and beyond `rest`.
///
/// Between two walks, but not after the last, `pause` gets what is still to do. `state`
/// goes to both and holds the record of what was skipped so far: a pause that lets go
/// of a lock sees a pending flush there, and what it does not flush stays pending.
///
/// ```
/// use core::ops::ControlFlow;
/// use flush::{Batch, Tlb};
/// use stage2::{Budget, Chunk, Emptied, Format, Pace, Recorder, Rest, TableMemory, Tables, Unheld};
/// use stage2::{chunked, clear};
///
/// /// Unmaps everything in steps; whatever was cleared is on the batch's record.
/// fn unmap<F: Format, M: TableMemory>(tables: Tables<'_, F, M>, batch: &mut Batch<(), 1>) -> u64 {
///     let geometry = tables.format.geometry();
///     let walk = |batch: &mut Batch<(), 1>, rest| {
///         batch.edit_many(|skipped, _| {
///             let mut record = Recorder::<Tlb, _>::new(skipped, Unheld);
///             clear(tables, rest, &mut Budget::UNLIMITED.clone(), Emptied::Free, &mut record)
///                 .map(|tally| tally.reached)
///         })
///     };
///     let pause = |batch: &mut Batch<(), 1>, _| {
///         // Flush here if the lock is let go: `batch.is_idle()` says whether one is owed.
///         if batch.is_idle() { ControlFlow::Continue(()) } else { ControlFlow::Break(()) }
///     };
///     let space = Rest::new(geometry.space());
///     match chunked(space, Chunk::usual(geometry), Pace::Resume, batch, walk, pause) {
///         Ok(walks) => walks,
///         Err(halted) => halted.walks,
///     }
/// }
/// ```
///
/// # Errors
///
/// [`Halted`], as soon as a walk fails or the pause breaks. Another call with
/// [`Halted::rest`] goes on.
pub fn chunked<S: ?Sized, E: Stops>(
    rest: Rest,
    chunk: Chunk,
    pace: Pace,
    state: &mut S,
    mut walk: impl FnMut(&mut S, Rest) -> Result<Gfn, E>,
    mut pause: impl FnMut(&mut S, Rest) -> ControlFlow<()>,
) -> Result<u64, Halted<E>> {
    let last = rest.run().last();
    let mut rest = rest;
    let mut walks = 0u64;
    loop {
        let piece = chunk.first_of(rest);
        let (first, end) = (piece.run().first(), piece.run().last());
        walks = walks.saturating_add(1);
        let reached = match walk(state, piece) {
            Ok(reached) if reached < end => return Err(Halted { rest, halt: Halt::Short, walks }),
            Ok(reached) => reached,
            Err(error) => {
                let rest = Rest::from(error.at().clamp(first, end), last);
                return Err(Halted { rest, halt: Halt::Walk(error), walks });
            }
        };
        let done = match pace {
            Pace::EveryChunk => end,
            Pace::Resume => reached,
        };
        if done >= last {
            return Ok(walks);
        }
        rest = Rest::from(Gfn::new(done.get().saturating_add(1)), last);
        if pause(state, rest).is_break() {
            return Err(Halted { rest, halt: Halt::Asked, walks });
        }
    }
}
