//! Whole-space unmaps, counted: walks, flushes and entries read, before and after.
//!
//! A [`Case`] is a format, a width, a chunk and what is mapped. [`Case::measure`] runs
//! the loop of one walk per chunk, the loop that resumes where a walk stopped, and one
//! walk without chunks, each over a tree of its own.

use std::ops::ControlFlow;

use flush::{Gfn, Mfn, Run};
use stage2::format::arm64::{Arm64, Granule};
use stage2::format::ept::{Ept, EptLevels};
use stage2::format::npt::{Npt, NptLevels};
use stage2::format::vtd::{Vtd, VtdLevels};
use stage2::{
    Access, Budget, Chunk, Emptied, Format, Leaf, Level, Over, Pace, Rest, Stopped, chunked, clear,
    map, map_run,
};

use crate::sparse::{Ledger, Sparse};

pub use special::Special;
pub use time::{Against, Pair, Space, Timed};

mod special;
mod time;

/// Up to this many walks are run; more are computed.
pub const MOST_WALKS: u64 = 1 << 27;

/// A region of 512 GiB, in frames.
const REGION: u64 = 1 << 27;

/// A table format with its width.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Shape {
    /// arm64 stage 2, by granule and input bits; the wide descriptors above 48 bits.
    Arm64(Granule, u8),
    /// EPT with 4 or 5 levels.
    Ept(EptLevels),
    /// NPT with 4 levels.
    Npt,
    /// VT-d second stage with 4 levels.
    Vtd,
}

/// What is mapped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Layout {
    /// Nothing.
    Empty,
    /// One page at address 0.
    OnePage,
    /// 512 GiB from address 0, in leaves of a chunk's size.
    FullRegion,
    /// One page in the chunk with this index, the highest that has any.
    TopChunk(u64),
    /// One page in the last chunk of every root entry.
    Adversarial,
}

impl Layout {
    /// The name in tables.
    pub fn name(self) -> String {
        match self {
            Self::Empty => "empty".into(),
            Self::OnePage => "one-page".into(),
            Self::FullRegion => "full-region".into(),
            Self::TopChunk(index) => format!("top-chunk-{index}"),
            Self::Adversarial => "adversarial".into(),
        }
    }
}

/// One line of the table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Case {
    /// The tables.
    pub shape: Shape,
    /// The piece of address space that one walk gets.
    pub chunk: Chunk,
    /// What is mapped.
    pub layout: Layout,
}

/// What a case cost.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Counts {
    /// Walks of the loop with one for each chunk.
    pub walks_before: u64,
    /// Walks of the loop that resumes where a walk stopped.
    pub walks_after: u64,
    /// Flushes of the first loop, if each walk is followed by one.
    pub flushes_unconditional: u64,
    /// Flushes of the same loop, if only what was mapped asks for one.
    pub flushes_conditional: u64,
    /// Entries that the one walk without chunks reads.
    pub entries_read: u64,
    /// Whether the walks before were computed and not run.
    pub computed: bool,
}

/// Runs `$body` with the format of a shape.
macro_rules! with_format {
    ($shape:expr, $format:ident => $body:expr) => {
        match $shape {
            Shape::Arm64(granule, bits) => {
                let format = Arm64::new(granule, bits).or(Arm64::wide(granule, bits));
                let $format = format.expect("every listed width exists");
                $body
            }
            Shape::Ept(levels) => {
                let $format = Ept::new(levels);
                $body
            }
            Shape::Npt => {
                let $format = Npt::new(NptLevels::Four);
                $body
            }
            Shape::Vtd => {
                let $format = Vtd::new(VtdLevels::Four);
                $body
            }
        }
    };
}

impl Case {
    /// Every line of the table, in order.
    pub fn all() -> Vec<Self> {
        use Layout::{Adversarial, Empty, FullRegion, OnePage, TopChunk};
        let tops = [21, 33, 34, 511].map(TopChunk);
        let all = [Empty, OnePage, FullRegion, Adversarial];
        let mut cases = Vec::new();
        let mut add = |shape, chunk, layouts: &[Layout]| {
            cases.extend(layouts.iter().map(|layout| Self { shape, chunk, layout: *layout }));
        };
        let usual = |shape| with_format!(shape, format => Chunk::usual(format.geometry()));
        for (granule, widths) in [
            (Granule::Kib4, &[40u8, 43, 44, 48, 52][..]),
            (Granule::Kib16, &[48, 52]),
            (Granule::Kib64, &[46, 48, 52]),
        ] {
            for bits in widths {
                let shape = Shape::Arm64(granule, *bits);
                let levels = Self { shape, chunk: usual(shape), layout: Empty }.levels_between();
                add(shape, usual(shape), &all);
                if levels == 1 {
                    add(shape, usual(shape), &tops);
                }
            }
        }
        let (gib, two_mib) = (Chunk::new(18), Chunk::new(9));
        for shape in [Shape::Ept(EptLevels::Four), Shape::Npt, Shape::Vtd] {
            add(shape, gib, &all);
            add(shape, gib, &tops);
            add(shape, two_mib, &all);
        }
        add(Shape::Ept(EptLevels::Five), gib, &all);
        add(Shape::Ept(EptLevels::Five), two_mib, &all);
        cases
    }

    /// The case with this [`name`](Self::name).
    pub fn named(name: &str) -> Option<Self> {
        Self::all().into_iter().find(|case| case.name() == name)
    }

    /// `format/granule/bits/chunk/layout`.
    pub fn name(&self) -> String {
        let layout = self.layout.name();
        format!("{}/{}/{}/{}/{layout}", self.format(), self.granule(), self.bits(), self.chunk())
    }

    /// The format's name.
    pub fn format(&self) -> &'static str {
        match self.shape {
            Shape::Arm64(..) => "arm64",
            Shape::Ept(_) => "ept",
            Shape::Npt => "npt",
            Shape::Vtd => "vtd",
        }
    }

    /// The page size.
    pub fn granule(&self) -> &'static str {
        match self.shape {
            Shape::Arm64(Granule::Kib16, _) => "16K",
            Shape::Arm64(Granule::Kib64, _) => "64K",
            Shape::Arm64(Granule::Kib4, _) | Shape::Ept(_) | Shape::Npt | Shape::Vtd => "4K",
        }
    }

    /// The width of an address.
    pub fn bits(&self) -> u8 {
        with_format!(self.shape, format => format.geometry().address_bits())
    }

    /// The chunk's size.
    pub fn chunk(&self) -> String {
        let order = self.chunk.order() + 12;
        match order {
            30.. => format!("{}G", 1u64 << (order - 30)),
            _ => format!("{}M", 1u64 << (order - 20)),
        }
    }

    /// How many levels there are between a root entry and the entries of a chunk's size.
    fn levels_between(&self) -> u8 {
        with_format!(self.shape, format => {
            let geometry = format.geometry();
            geometry.order(geometry.top()).saturating_sub(self.chunk.order()) / geometry.index_bits()
        })
    }

    /// How many chunks there are.
    fn chunks(&self) -> u64 {
        1 << (self.bits() - 12 - self.chunk.order())
    }

    /// Whether the walks before are too many to run.
    pub fn is_computed(&self) -> bool {
        self.chunks() > MOST_WALKS
    }

    /// Walks before and after, by the closed form; the second only where there is one.
    pub fn expected(&self) -> (u64, Option<u64>) {
        let (roots, entries) = with_format!(self.shape, format => {
            let geometry = format.geometry();
            (geometry.root_entries() as u64, geometry.entries() as u64)
        });
        let after = match (self.layout, self.levels_between()) {
            (Layout::Empty, _) => Some(roots),
            // Its own walk, one for the rest of its root entry, one for each other.
            (Layout::OnePage, 1..) => Some(roots + 1),
            (Layout::OnePage, 0) => Some(roots),
            (Layout::TopChunk(index), 1) => {
                let chunks = self.chunks() / roots;
                Some((index + 2).min(chunks) + roots - 1)
            }
            // At each level below a root entry all but the last entry are empty and larger
            // than a chunk, or one. With one level no walk gets further than its chunk.
            (Layout::Adversarial, levels) => Some(roots * (u64::from(levels) * (entries - 1) + 1)),
            (Layout::TopChunk(_) | Layout::FullRegion, _) => None,
        };
        (self.chunks(), after)
    }

    /// Runs both loops and the walk without chunks.
    ///
    /// # Errors
    /// If a walk stops early, or what both loops leave or owe differs.
    pub fn measure(&self) -> Result<Counts, String> {
        let (walks_after, flushes_after) = self.walks(Pace::Resume)?;
        let computed = self.is_computed();
        let (walks_before, flushes_conditional) =
            if computed { (self.chunks(), flushes_after) } else { self.walks(Pace::EveryChunk)? };
        if flushes_conditional != flushes_after {
            return Err(format!("{}: the loops owe different flushes", self.name()));
        }
        Ok(Counts {
            walks_before,
            walks_after,
            flushes_unconditional: walks_before,
            flushes_conditional,
            entries_read: self.entries_read()?,
            computed,
        })
    }

    /// Unmaps the whole space in chunks; returns walks, and flushes that were owed.
    ///
    /// # Errors
    /// If a walk stops early, or a table is left.
    pub fn walks(&self, pace: Pace) -> Result<(u64, u64), String> {
        with_format!(self.shape, format => {
            let memory = self.filled(&format);
            let mut ledger = Ledger::default();
            let settle = |ledger: &mut Ledger| ledger.settle(&memory, || ());
            let walks = unmap(&format, &memory, (self.chunk, pace), &mut ledger, settle)?;
            self.nothing_left(&memory)?;
            Ok((walks, ledger.flushes))
        })
    }

    /// Unmaps the whole space in one walk; returns the entries that it read.
    ///
    /// # Errors
    /// If it stops early, owes more than one flush, or leaves a table.
    pub fn entries_read(&self) -> Result<u64, String> {
        with_format!(self.shape, format => {
            let memory = self.filled(&format);
            let mut ledger = Ledger::default();
            let (space, budget) = (Rest::new(format.geometry().space()), &mut Budget::UNLIMITED.clone());
            let tally = clear(memory.tables(&format), space, budget, Emptied::Free, &mut ledger)
                .map_err(|stopped| format!("{}: {}", self.name(), stopped.stop))?;
            ledger.settle(&memory, || ());
            self.nothing_left(&memory)?;
            Ok(tally.reads)
        })
    }

    fn nothing_left(&self, memory: &Sparse) -> Result<(), String> {
        if memory.tables_in_use() == memory.roots() {
            return Ok(());
        }
        Err(format!("{}: a table was left", self.name()))
    }

    /// Memory with the layout's mappings in it.
    fn filled<F: Format>(&self, format: &F) -> Sparse {
        let geometry = format.geometry();
        let memory = match self.layout {
            Layout::Adversarial => {
                let below = usize::from(geometry.levels()) - 1;
                Sparse::with_room(format, geometry.root_entries() * below)
            }
            Layout::Empty | Layout::OnePage | Layout::FullRegion | Layout::TopChunk(_) => {
                Sparse::new(format)
            }
        };
        self.fill(format, &memory);
        memory
    }

    fn fill<F: Format>(&self, format: &F, memory: &Sparse) {
        let geometry = format.geometry();
        let put = |gfn: u64| {
            let leaf = Leaf::new(Mfn::new(gfn & 0xffff_ffff), Access::READ_WRITE);
            let record = &mut Ledger::default();
            map(memory.tables(format), Gfn::new(gfn), Level::PAGE, leaf, Over::Vacant, record)
                .expect("the space is empty");
        };
        match self.layout {
            Layout::Empty => {}
            Layout::OnePage => put(0),
            Layout::TopChunk(index) => put(index << self.chunk.order()),
            Layout::Adversarial => {
                let order = geometry.order(geometry.top());
                let last = (1 << order) - (1 << self.chunk.order());
                (0..geometry.root_entries() as u64).for_each(|root| put((root << order) + last));
            }
            Layout::FullRegion => {
                let levels = (0..geometry.levels()).filter_map(Level::new);
                let fits = |level: &Level| geometry.order(*level) == self.chunk.order();
                let level = levels.into_iter().find(fits).expect("a chunk is one entry");
                let region = Run::new(Gfn::new(0), Gfn::new(REGION - 1)).expect("in order");
                let leaf = Leaf::new(Mfn::new(0), Access::READ_WRITE);
                let (tables, budget) = (memory.tables(format), &mut Budget::UNLIMITED.clone());
                let ledger = &mut Ledger::default();
                map_run(tables, Rest::new(region), leaf, level, budget, ledger)
                    .expect("the space is empty");
            }
        }
    }
}

/// Unmaps a whole space in chunks, with `after` behind each walk; returns the walks.
///
/// # Errors
/// If a walk stops early.
#[inline]
fn unmap<F: Format>(
    format: &F,
    memory: &Sparse,
    (chunk, pace): (Chunk, Pace),
    ledger: &mut Ledger,
    after: impl Fn(&mut Ledger),
) -> Result<u64, String> {
    let tables = memory.tables(format);
    let walk = |ledger: &mut Ledger, rest| {
        let tally = clear(tables, rest, &mut Budget::UNLIMITED.clone(), Emptied::Free, ledger)?;
        after(ledger);
        Ok::<_, Stopped>(tally.reached)
    };
    let go_on = |_: &mut Ledger, _| ControlFlow::Continue(());
    let space = Rest::new(format.geometry().space());
    chunked(space, chunk, pace, ledger, walk, go_on).map_err(|halted| format!("{halted:?}"))
}
