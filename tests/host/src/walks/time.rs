//! How long a whole-space unmap takes, flushing hardware that does nothing.

use std::cell::RefCell;
use std::hint::black_box;
use std::time::Instant;

use flush::{Batch, DomainId, Hardware, Tlb};
use stage2::format::arm64::{Arm64, Granule};
use stage2::{Chunk, Format, Pace};

use super::{Case, Layout, Shape, unmap};
use crate::plain::Null;
use crate::sparse::{Ledger, Sparse};

/// The shortest times of one unmap, in nanoseconds: what a busy machine disturbs least.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Timed {
    /// One walk for each chunk, and a flush behind each walk.
    pub before: u64,
    /// Walks that resume, and a flush where one is owed.
    pub after: u64,
}

/// Times the unmap of a 48-bit arm64 space with 4 KiB pages, `rounds` times each way.
///
/// # Errors
/// If a walk stops early.
pub fn timed(layout: Layout, rounds: u32) -> Result<Timed, String> {
    let granule = Granule::Kib4;
    let format = Arm64::new(granule, 48).ok_or("there is no width of 48 bits")?;
    let chunk = Chunk::usual(format.geometry());
    let case = Case { shape: Shape::Arm64(granule, 48), chunk, layout };
    let memory = Sparse::new(&format);
    let mut ledger = Ledger::default();
    let batch = RefCell::new(Batch::new(DomainId::new(1)));

    let mut shortest = |pace, conditional: bool, rounds: u32| {
        let mut times = Vec::new();
        for _ in 0..rounds.max(1) {
            case.fill(&format, &memory);
            let behind = |ledger: &mut Ledger| {
                let flush = || flush(&mut batch.borrow_mut());
                if !conditional {
                    flush();
                    ledger.settle(&memory, || ());
                } else {
                    ledger.settle(&memory, flush);
                }
            };
            let start = Instant::now();
            let walks = unmap(&format, &memory, (chunk, pace), &mut ledger, behind)?;
            times.push(start.elapsed().as_nanos());
            black_box(walks);
        }
        let least = times.into_iter().min().unwrap_or(0);
        Ok::<_, String>(u64::try_from(least).unwrap_or(u64::MAX))
    };
    let before = shortest(Pace::EveryChunk, false, rounds)?;
    let after = shortest(Pace::Resume, true, rounds.saturating_mul(20))?;
    Ok(Timed { before, after })
}

/// A flush of everything through a batch, to CPUs that hold nothing: all that the code
/// does for one, and nothing that hardware does.
#[inline(never)]
fn flush(batch: &mut Batch<(), 1>) {
    batch.edit_many(|skipped, _| skipped.everything::<Tlb>());
    let flushed = batch.flush(&Hardware { tlb: &Null, iotlb: &Null });
    black_box(flushed.is_ok());
}
