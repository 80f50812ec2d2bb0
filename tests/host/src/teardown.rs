//! What taking a whole table down costs, by what is mapped and by the width.
//!
//! A [`Teardown`] is a width, a number of mappings and how far apart they lie.
//! [`Teardown::prepare`] maps them; [`Standing::take_down`] is the teardown alone, for
//! whoever counts or times it.

use std::time::Instant;

use flush::{Gfn, Mfn, Run};
use stage2::format::vtd::{Vtd, VtdLevels};
use stage2::{Access, Budget, Format, Leaf, Level, MapError, Over, Rest, destroy, map, map_run};

use crate::sparse::{Ledger, Sparse};

/// Frames that one table of leaves spans.
const TABLE: u64 = 512;

/// How far apart mappings lie.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Spread {
    /// Page after page, from address 0.
    Together,
    /// One in each 2 MiB, so that each has a table of its own.
    Apart,
}

/// A table to be taken down. VT-d's format, because it has all of the widths; every
/// format of four-kilobyte tables is walked by the same code.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Teardown {
    levels: VtdLevels,
    /// Pages of 4 KiB that are mapped.
    pub mappings: u64,
    spread: Spread,
}

/// What a teardown did.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cost {
    /// Entries read, of all levels.
    pub entries_read: u64,
    /// Table pages given back, the root's among them.
    pub tables_freed: u64,
    /// Leaves cleared.
    pub leaves: u64,
}

impl Teardown {
    /// Every line of the table: the number of mappings grows in the first ones, the width
    /// in the last.
    pub fn all() -> Vec<Self> {
        use Spread::{Apart, Together};
        use VtdLevels::{Five, Four, Three};
        let of =
            |levels, spread| move |mappings: &u64| Self { levels, mappings: *mappings, spread };
        let mut all = Vec::new();
        all.extend([1, 16, 256, 4096, 65_536, 1 << 20].iter().map(of(Four, Together)));
        all.extend([16, 256, 4096, 16_384].iter().map(of(Four, Apart)));
        for levels in [Three, Five] {
            all.extend([1, 65_536].iter().map(of(levels, Together)));
            all.extend([256].iter().map(of(levels, Apart)));
        }
        all
    }

    /// The line with this [`name`](Self::name).
    pub fn named(name: &str) -> Option<Self> {
        Self::all().into_iter().find(|line| line.name() == name)
    }

    /// `bits/spread/mappings`.
    pub fn name(&self) -> String {
        let spread = match self.spread {
            Spread::Together => "together",
            Spread::Apart => "apart",
        };
        format!("{}/{spread}/{}", self.bits(), self.mappings)
    }

    /// The width of an address.
    pub fn bits(&self) -> u8 {
        Vtd::new(self.levels).geometry().address_bits()
    }

    /// Walks of a loop that makes one for each GiB of the space, whatever is mapped.
    pub fn chunks(&self) -> u64 {
        1 << (self.bits() - 30)
    }

    fn stride(&self) -> u64 {
        match self.spread {
            Spread::Together => 1,
            Spread::Apart => TABLE,
        }
    }

    /// What the teardown has to cost: each table that exists is read once and freed.
    pub fn expected(&self) -> Cost {
        let spanned = self.mappings.saturating_sub(1) * self.stride() + 1;
        let levels = u32::from(Vtd::new(self.levels).geometry().levels());
        let tables = (1..=levels).map(|above| spanned.div_ceil(TABLE.pow(above))).sum();
        Cost { entries_read: TABLE * tables, tables_freed: tables, leaves: self.mappings }
    }

    /// Maps everything.
    ///
    /// # Errors
    /// If something cannot be mapped.
    pub fn prepare(&self) -> Result<Standing, String> {
        let format = Vtd::new(self.levels);
        let tables = usize::try_from(self.expected().tables_freed);
        let memory = Sparse::with_room(&format, tables.map_err(|error| error.to_string())?);
        self.fill(&format, &memory).map_err(|error| error.to_string())?;
        Ok(Standing { format, memory, ledger: Ledger::default() })
    }

    fn fill(&self, format: &Vtd, memory: &Sparse) -> Result<(), MapError> {
        let (tables, record) = (memory.tables(format), &mut Ledger::default());
        let leaf = Leaf::new(Mfn::new(0), Access::READ_WRITE);
        match self.spread {
            Spread::Together => {
                let last = Gfn::new(self.mappings.saturating_sub(1));
                let run = Run::new(Gfn::new(0), last).unwrap_or(Run::single(last));
                let budget = &mut Budget::UNLIMITED.clone();
                map_run(tables, Rest::new(run), leaf, Level::PAGE, budget, record)
                    .map_err(|stopped| stopped.error)
            }
            Spread::Apart => (0..self.mappings).try_for_each(|place| {
                let gfn = Gfn::new(place * self.stride());
                map(tables, gfn, Level::PAGE, leaf, Over::Vacant, record).map(|_| ())
            }),
        }
    }

    /// The shortest of `rounds` teardowns, in nanoseconds. The pages go back to the
    /// allocator outside of it.
    ///
    /// # Errors
    /// As [`prepare`](Self::prepare) and [`Standing::take_down`].
    pub fn shortest(&self, rounds: u32) -> Result<u64, String> {
        let mut shortest = u64::MAX;
        for _ in 0..rounds.max(1) {
            let mut standing = self.prepare()?;
            let start = Instant::now();
            standing.take_down()?;
            let took = u64::try_from(start.elapsed().as_nanos()).unwrap_or(u64::MAX);
            standing.settle()?;
            shortest = shortest.min(took);
        }
        Ok(shortest)
    }
}

/// A table with its mappings in it.
#[derive(Debug)]
pub struct Standing {
    format: Vtd,
    memory: Sparse,
    ledger: Ledger,
}

impl Standing {
    /// Clears everything and unlinks every table; the pages wait on record for a flush.
    ///
    /// # Errors
    /// If the walk stops early.
    #[inline]
    pub fn take_down(&mut self) -> Result<Cost, String> {
        let space = Rest::new(self.format.geometry().space());
        let tables = self.memory.tables(&self.format);
        let tally = destroy(tables, space, &mut Budget::UNLIMITED.clone(), &mut self.ledger)
            .map_err(|stopped| stopped.stop.to_string())?;
        Ok(Cost { entries_read: tally.reads, tables_freed: tally.tables, leaves: tally.leaves })
    }

    /// Flushes, and takes the pages back.
    ///
    /// # Errors
    /// If a page is missing, or more than one flush was owed.
    pub fn settle(mut self) -> Result<(), String> {
        self.ledger.settle(&self.memory, || ());
        match (self.memory.tables_in_use(), self.ledger.flushes) {
            (0, 1) => Ok(()),
            (left, flushes) => Err(format!("{left} tables are left after {flushes} flushes")),
        }
    }
}
