//! How long a whole-space unmap takes, flushing hardware that does nothing.

use std::cell::RefCell;
use std::hint::black_box;
use std::time::{Duration, Instant};

use flush::{Batch, DomainId, Hardware, Tlb};
use stage2::format::arm64::{Arm64, Granule};
use stage2::{Budget, Chunk, Emptied, Format, Pace, Rest, clear};

use super::{Case, Layout, Shape, unmap};
use crate::plain::Null;
use crate::sparse::{Ledger, Sparse};

/// Unmaps afterwards for each one before, which takes hundreds of times as long.
const AFTER: u32 = 20;

/// What the walk without chunks may read at once: more than either layout has.
const ENTRIES: u64 = 1 << 16;

/// What is set beside one walk for each chunk, with a flush behind each.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Against {
    /// The same chunks, walks that resume, and a flush where one is owed.
    Resuming,
    /// One walk without chunks, bounded by the entries it reads, and one flush if it is
    /// owed.
    EntriesBounded,
}

/// A pair that is timed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pair {
    /// What is mapped before each unmap.
    pub layout: Layout,
    /// The side after.
    pub against: Against,
}

/// The shortest times of one unmap, in nanoseconds: what a busy machine disturbs least. A
/// median favours the side after, which is over before it can be interrupted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Timed {
    /// One walk for each chunk, and a flush behind each walk.
    pub before: u64,
    /// What it is set against.
    pub after: u64,
}

impl Pair {
    /// Every pair.
    pub const ALL: [Self; 4] = [
        Self { layout: Layout::Empty, against: Against::Resuming },
        Self { layout: Layout::TopChunk(511), against: Against::Resuming },
        Self { layout: Layout::Empty, against: Against::EntriesBounded },
        Self { layout: Layout::TopChunk(511), against: Against::EntriesBounded },
    ];

    /// The name in results: the layout's, and how it is walked if not in chunks.
    pub fn name(&self) -> String {
        match self.against {
            Against::Resuming => self.layout.name(),
            Against::EntriesBounded => format!("{}-entries-bounded", self.layout.name()),
        }
    }

    /// A 48-bit arm64 space with 4 KiB pages to time the pair on.
    ///
    /// # Errors
    /// If there is no such format.
    pub fn space(&self) -> Result<Space, String> {
        let granule = Granule::Kib4;
        let format = Arm64::new(granule, 48).ok_or("there is no width of 48 bits")?;
        let chunk = Chunk::usual(format.geometry());
        Ok(Space {
            case: Case { shape: Shape::Arm64(granule, 48), chunk, layout: self.layout },
            against: self.against,
            memory: Sparse::new(&format),
            format,
            ledger: RefCell::default(),
            batch: RefCell::new(Batch::new(DomainId::new(1))),
        })
    }

    /// Times `rounds` times one unmap before and twenty after.
    ///
    /// # Errors
    /// If a walk stops early.
    pub fn time(&self, rounds: u32) -> Result<Timed, String> {
        let space = self.space()?;
        let (mut before, mut after) = (Duration::MAX, Duration::MAX);
        for _ in 0..rounds.max(1) {
            before = before.min(space.before()?);
            for _ in 0..AFTER {
                after = after.min(space.after()?);
            }
        }
        let nanoseconds = |time: Duration| u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
        Ok(Timed { before: nanoseconds(before), after: nanoseconds(after) })
    }
}

/// One space and all that its unmaps share. Each finds the layout made anew, outside of
/// the time.
#[derive(Debug)]
pub struct Space {
    case: Case,
    against: Against,
    format: Arm64,
    memory: Sparse,
    ledger: RefCell<Ledger>,
    batch: RefCell<Batch<(), 1>>,
}

impl Space {
    /// One walk for each chunk, and a flush behind each.
    ///
    /// # Errors
    /// If a walk stops early.
    pub fn before(&self) -> Result<Duration, String> {
        self.time(|| self.every_chunk())
    }

    /// What the pair sets against that.
    ///
    /// # Errors
    /// If a walk stops early.
    pub fn after(&self) -> Result<Duration, String> {
        match self.against {
            Against::Resuming => self.time(|| self.resuming()),
            Against::EntriesBounded => self.time(|| self.entries_bounded()),
        }
    }

    fn time(&self, unmap: impl FnOnce() -> Result<u64, String>) -> Result<Duration, String> {
        self.case.fill(&self.format, &self.memory);
        let start = Instant::now();
        let walks = unmap()?;
        let time = start.elapsed();
        black_box(walks);
        Ok(time)
    }

    fn every_chunk(&self) -> Result<u64, String> {
        self.chunks(Pace::EveryChunk, |ledger| {
            flush(&mut self.batch.borrow_mut());
            ledger.settle(&self.memory, || ());
        })
    }

    fn resuming(&self) -> Result<u64, String> {
        self.chunks(Pace::Resume, |ledger| self.settle(ledger))
    }

    fn entries_bounded(&self) -> Result<u64, String> {
        let (space, budget) = (self.format.geometry().space(), &mut Budget::new(ENTRIES));
        let (tables, ledger) = (self.memory.tables(&self.format), &mut *self.ledger.borrow_mut());
        let tally = clear(tables, Rest::new(space), budget, Emptied::Free, ledger)
            .map_err(|stopped| stopped.stop.to_string())?;
        self.settle(ledger);
        Ok(tally.reads)
    }

    fn chunks(&self, pace: Pace, after: impl Fn(&mut Ledger)) -> Result<u64, String> {
        let ledger = &mut *self.ledger.borrow_mut();
        unmap(&self.format, &self.memory, (self.case.chunk, pace), ledger, after)
    }

    fn settle(&self, ledger: &mut Ledger) {
        ledger.settle(&self.memory, || flush(&mut self.batch.borrow_mut()));
    }
}

/// A flush of everything through a batch, to CPUs that hold nothing: all that the code
/// does for one, and nothing that hardware does.
#[inline(never)]
fn flush(batch: &mut Batch<(), 1>) {
    batch.edit_many(|skipped, _| skipped.everything::<Tlb>());
    let flushed = batch.flush(&Hardware { tlb: &Null, iotlb: &Null });
    black_box(flushed.is_ok());
}
