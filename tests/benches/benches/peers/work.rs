//! What every table is asked to do, and how it is counted and timed.
//!
//! A [`Line`] is one piece of work on [`PAGES`] pages; a [`Table`] is whoever does it.

use std::hint::black_box;
use std::time::{Duration, Instant};

use criterion::{BatchSize, Bencher};

use crate::frames;

/// Pages in one piece of work: a chunk of a grant hypercall.
pub(crate) const PAGES: usize = 32;

/// Runs of a line of which the shortest counts.
const ROUNDS: u32 = 2000;

/// One piece of work.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Line {
    /// Map into an empty table: the tables on the way are made.
    MapFirst(Layout),
    /// Unmap, as a range or page by page. Tables stay.
    Unmap(Layout),
    /// Map where tables are left from before.
    MapAgain(Layout),
    /// Take the whole table down, with the pages mapped in it.
    TakeDown(Layout),
}

/// Where the pages are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Layout {
    /// One after the other.
    Contiguous,
    /// About 10 MiB apart: each has a table of leaves of its own.
    Scattered,
    /// About 512 GiB apart: each has a root entry of its own.
    Sparse,
}

impl Layout {
    fn name(self) -> &'static str {
        match self {
            Self::Contiguous => "contiguous",
            Self::Scattered => "scattered",
            Self::Sparse => "sparse",
        }
    }

    /// How many tables are worked on in a row, and timed together: enough for a clock that
    /// is not exact, and so few that the caches hold them all.
    fn tables(self) -> u32 {
        match self {
            Self::Contiguous => 8,
            Self::Scattered => 4,
            Self::Sparse => 1,
        }
    }

    /// The frame numbers.
    pub(crate) fn pages(self) -> [u64; PAGES] {
        let (first, step) = match self {
            Self::Contiguous => (0x123_45a0, 1),
            Self::Scattered => (0x4_0000, 5 * 512 + 7),
            Self::Sparse => (0x4_0000, (1 << 27) + 3 * 512 + 7),
        };
        std::array::from_fn(|place| first + place as u64 * step)
    }
}

impl Line {
    /// All of them.
    pub(crate) const ALL: [Self; 7] = [
        Self::MapFirst(Layout::Contiguous),
        Self::MapFirst(Layout::Scattered),
        Self::Unmap(Layout::Contiguous),
        Self::Unmap(Layout::Scattered),
        Self::MapAgain(Layout::Contiguous),
        Self::MapAgain(Layout::Scattered),
        Self::TakeDown(Layout::Sparse),
    ];

    /// `work/pages/layout`.
    pub(crate) fn name(self) -> String {
        let (work, layout) = match self {
            Self::MapFirst(layout) => ("map-first", layout),
            Self::Unmap(layout) => ("unmap", layout),
            Self::MapAgain(layout) => ("map-again", layout),
            Self::TakeDown(layout) => ("teardown", layout),
        };
        format!("{work}/{PAGES}/{}", layout.name())
    }

    fn layout(self) -> Layout {
        let (Self::MapFirst(layout)
        | Self::Unmap(layout)
        | Self::MapAgain(layout)
        | Self::TakeDown(layout)) = self;
        layout
    }
}

/// A page table of four levels with pages of 4 KiB, which no hardware walks.
pub(crate) trait Table: Sized {
    /// The crate's name.
    const NAME: &'static str;

    /// An empty one.
    fn new() -> Self;

    /// Maps each page, for reading and writing, to the frame of the same number.
    fn map(&mut self, pages: &[u64]);

    /// Unmaps each page, and says nothing to hardware.
    fn unmap(&mut self, pages: &[u64]);

    /// As [`map`](Self::map), for pages that follow each other: for those who map ranges.
    fn map_range(&mut self, pages: &[u64]) {
        self.map(pages);
    }

    /// As [`unmap`](Self::unmap), for pages that follow each other.
    fn unmap_range(&mut self, pages: &[u64]) {
        self.unmap(pages);
    }

    /// The frame that a page shows.
    fn shown(&self, page: u64) -> Option<u64>;

    /// Frees every table, the root too. `pages` is what is mapped, for those who have to
    /// be told.
    fn take_down(self, pages: &[u64]);
}

/// A table in the state that a line begins with.
fn ready<T: Table>(line: Line, pages: &[u64]) -> Option<T> {
    let mut table = T::new();
    match line {
        Line::MapFirst(_) => {}
        Line::Unmap(_) | Line::TakeDown(_) => table.map(pages),
        Line::MapAgain(_) => {
            table.map(pages);
            table.unmap(pages);
        }
    }
    Some(table)
}

#[inline]
fn work<T: Table>(line: Line, table: &mut Option<T>, pages: &[u64]) {
    match (line, table.as_mut()) {
        (Line::MapFirst(Layout::Contiguous) | Line::MapAgain(Layout::Contiguous), Some(table)) => {
            table.map_range(pages);
        }
        (Line::Unmap(Layout::Contiguous), Some(table)) => table.unmap_range(pages),
        (Line::MapFirst(_) | Line::MapAgain(_), Some(table)) => table.map(pages),
        (Line::Unmap(_), Some(table)) => table.unmap(pages),
        (Line::TakeDown(_), Some(_)) => {
            if let Some(table) = table.take() {
                table.take_down(pages);
            }
        }
        (_, None) => {}
    }
}

/// Holds nothing but the work: what instructions are counted of.
#[inline(never)]
fn measured<T: Table>(line: Line, table: &mut Option<T>, pages: &[u64]) {
    work(line, table, pages);
}

/// Does a line once, and checks what the table shows afterwards.
pub(crate) fn count<T: Table>(line: Line) -> Result<(), String> {
    let pages = line.layout().pages();
    // Once uncounted, so that the frames are there.
    let mut warm = Done { table: ready::<T>(line, &pages), line };
    work(line, &mut warm.table, &pages);
    drop(warm);
    let mut table = ready::<T>(line, &pages);
    check(line, "before", table.as_ref(), matches!(line, Line::Unmap(_) | Line::TakeDown(_)))?;
    measured(black_box(line), &mut table, &pages);
    check(line, "after", table.as_ref(), matches!(line, Line::MapFirst(_) | Line::MapAgain(_)))?;
    drop(Done { table, line });
    match frames::taken() {
        0 => Ok(()),
        lost => Err(format!("{}/{}: {lost} frames were lost", line.name(), T::NAME)),
    }
}

fn check<T: Table>(line: Line, when: &str, table: Option<&T>, mapped: bool) -> Result<(), String> {
    let Some(table) = table else { return Ok(()) };
    let wrong = |page: &u64| table.shown(*page) != mapped.then_some(*page);
    match line.layout().pages().iter().find(|page| wrong(page)) {
        None => Ok(()),
        Some(page) => {
            let (name, shown) = (T::NAME, table.shown(*page));
            Err(format!("{}/{name}: {when} it, page {page:#x} shows {shown:x?}", line.name()))
        }
    }
}

/// The shortest of many times of a line, in nanoseconds; making the tables and freeing them
/// are not timed.
pub(crate) fn shortest<T: Table>(line: Line) -> f64 {
    let pages = line.layout().pages();
    let tables = line.layout().tables();
    let once = |_| {
        let done = |_| Done { table: ready::<T>(line, &pages), line };
        let mut all: Vec<_> = (0..tables).map(done).collect();
        let start = Instant::now();
        for done in &mut all {
            measured(black_box(line), &mut done.table, &pages);
        }
        start.elapsed()
    };
    let shortest = (0..ROUNDS).map(once).min().unwrap_or(Duration::MAX);
    shortest.as_secs_f64() * 1e9 / f64::from(tables)
}

/// Frees what a line left.
fn finish<T: Table>(table: T, line: Line, pages: &[u64]) {
    match line {
        Line::MapFirst(_) | Line::MapAgain(_) => table.take_down(pages),
        Line::Unmap(_) | Line::TakeDown(_) => table.take_down(&[]),
    }
}

/// A table after its work, which it frees.
struct Done<T: Table> {
    table: Option<T>,
    line: Line,
}

impl<T: Table> Drop for Done<T> {
    fn drop(&mut self) {
        if let Some(table) = self.table.take() {
            finish(table, self.line, &self.line.layout().pages());
        }
    }
}

/// Times a line with criterion; making the table and freeing it are not timed.
pub(crate) fn bench<T: Table>(line: Line, bencher: &mut Bencher<'_>) {
    let pages = line.layout().pages();
    let prepare = || ready::<T>(line, &pages);
    let run = |table: Option<T>| {
        let mut done = Done { table, line };
        work(line, &mut done.table, &pages);
        done
    };
    bencher.iter_batched(prepare, run, BatchSize::SmallInput);
}
