//! Comparisons that are no single line of the table.

use flush::{Gfn, Mfn};
use stage2::format::arm64::{Arm64, Granule};
use stage2::{Access, Chunk, Format, Leaf, Level, Over, Pace, free_root, map};

use super::unmap;
use crate::sparse::{Ledger, Sparse};

/// A comparison: what a whole run cost before and after.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Special {
    /// 36 whole-space unmaps of a 48-bit space with 4 KiB pages, of which the first finds
    /// a few dozen pages in two chunks: flushes.
    Unmaps36,
    /// Teardown of an empty 52-bit space with 16 KiB pages: walks.
    Destroy16K,
    /// One canonical page changes under a shadow table: nested leaves that go.
    NestedPrecise,
}

/// Pages that the nested guest sees in [`Special::NestedPrecise`].
const NESTED_PAGES: u64 = 4096;

impl Special {
    /// All of them.
    pub const ALL: [Self; 3] = [Self::Unmaps36, Self::Destroy16K, Self::NestedPrecise];

    /// The name in results.
    pub fn name(self) -> &'static str {
        match self {
            Self::Unmaps36 => "36-unmaps",
            Self::Destroy16K => "destroy-16k-52",
            Self::NestedPrecise => "nested-precise",
        }
    }

    /// What is counted.
    pub fn unit(self) -> &'static str {
        match self {
            Self::Unmaps36 => "flushes",
            Self::Destroy16K => "walks",
            Self::NestedPrecise => "nested-leaves",
        }
    }

    /// What it has to come to, before and after.
    pub fn expected(self) -> (u64, u64) {
        match self {
            Self::Unmaps36 => (36 << 18, 2),
            Self::Destroy16K => (1 << 27, 32),
            Self::NestedPrecise => (NESTED_PAGES, 1),
        }
    }

    /// Runs both and returns the counts, before and after.
    ///
    /// # Errors
    /// If a walk stops early, or something of the tree is left.
    pub fn measure(self) -> Result<(u64, u64), String> {
        Ok((self.run(Pace::EveryChunk)?, self.after()?))
    }

    /// Runs only what comes after.
    ///
    /// # Errors
    /// As [`measure`](Self::measure).
    pub fn after(self) -> Result<u64, String> {
        self.run(Pace::Resume)
    }

    fn run(self, pace: Pace) -> Result<u64, String> {
        match self {
            Self::Unmaps36 => unmaps(pace),
            Self::Destroy16K => destroy(pace),
            Self::NestedPrecise => {
                let (before, after) = crate::nested::precise(NESTED_PAGES);
                Ok(if pace == Pace::EveryChunk { before } else { after })
            }
        }
    }
}

fn format(granule: Granule, bits: u8) -> Result<Arm64, String> {
    let format = Arm64::new(granule, bits).or(Arm64::wide(granule, bits));
    format.ok_or_else(|| format!("there is no width of {bits} bits"))
}

/// The flushes of 36 unmaps: one behind each walk before, and only where one is owed
/// after.
fn unmaps(pace: Pace) -> Result<u64, String> {
    let format = format(Granule::Kib4, 48)?;
    let memory = Sparse::new(&format);
    let chunk = Chunk::usual(format.geometry());
    let mut ledger = Ledger::default();
    for page in 0..24 {
        for chunk_index in [3u64, 21] {
            let gfn = Gfn::new((chunk_index << chunk.order()) + page * 5);
            let leaf = Leaf::new(Mfn::new(page), Access::READ_WRITE);
            map(memory.tables(&format), gfn, Level::PAGE, leaf, Over::Vacant, &mut ledger)
                .map_err(|error| error.to_string())?;
        }
    }
    let mut walks = 0;
    for _ in 0..36 {
        let settle = |ledger: &mut Ledger| ledger.settle(&memory, || ());
        walks += unmap(&format, &memory, (chunk, pace), &mut ledger, settle)?;
    }
    Ok(match pace {
        Pace::EveryChunk => walks,
        Pace::Resume => ledger.flushes,
    })
}

/// The walks of a teardown, the root's page at its end.
fn destroy(pace: Pace) -> Result<u64, String> {
    let format = format(Granule::Kib16, 52)?;
    let memory = Sparse::new(&format);
    let chunk = Chunk::usual(format.geometry());
    let mut ledger = Ledger::default();
    let settle = |ledger: &mut Ledger| ledger.settle(&memory, || ());
    let walks = unmap(&format, &memory, (chunk, pace), &mut ledger, settle)?;
    free_root(memory.tables(&format), &mut ledger).map_err(|error| error.to_string())?;
    ledger.settle(&memory, || ());
    if memory.tables_in_use() != 0 {
        return Err("a table was left".into());
    }
    Ok(walks)
}
