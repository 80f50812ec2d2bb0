//! This project: EPT of four levels, every edit on the record of a batch.
//!
//! Pages that follow each other are mapped and cleared as ranges, others one by one. What is
//! unmapped is held by the batch until its flush, which goes to hardware that holds nothing,
//! and comes out of it. A teardown is that of a tree which no hardware can walk, as with the
//! others.

use std::cell::Cell;
use std::ops::Range;
use std::sync::atomic::{AtomicU16, AtomicU64, Ordering};

use flush::TablePage;
use flush::{Batch, Cleared, DomainId, FreshTable, Gfn, Gone, Hardware, Mfn, Room, Run, Shared};
use host::Null;
use stage2::format::ept::{Ept, EptLevels};
use stage2::{
    Access, Budget, Emptied, Leaf, Lent, Level, Likely, Marks, Near, Over, Path, Recorder, Rest,
    Sink, TableMemory, Tables, Unheld, Unwalked, clear, lookup, map, map_run,
};

use crate::frames::{self, FRAMES, Frame};
use crate::work::{PAGES, Table};

/// Where tables are: frames by their number, all mapped.
struct Memory {
    frames: &'static [Frame],
    /// Entries in use of each.
    live: &'static [AtomicU16],
    unlinked: Cell<u64>,
}

thread_local! {
    static LIVE: &'static [AtomicU16] =
        Vec::leak((0..FRAMES).map(|_| AtomicU16::new(0)).collect());
}

impl Memory {
    fn new() -> Self {
        Self { frames: frames::all(), live: LIVE.with(|live| *live), unlinked: Cell::new(0) }
    }

    #[inline]
    fn word(&self, table: Mfn, index: usize) -> Option<&AtomicU64> {
        self.frames.get(table.get() as usize).map(|frame| &frame.0[index % 512])
    }

    #[inline]
    fn change_live(&self, table: Mfn, change: impl FnOnce(u16) -> u16) -> u16 {
        let Some(live) = self.live.get(table.get() as usize) else { return 0 };
        let changed = change(live.load(Ordering::Relaxed));
        live.store(changed, Ordering::Relaxed);
        changed
    }
}

impl TableMemory for Memory {
    #[inline]
    fn read(&self, table: Mfn, index: usize) -> u64 {
        self.word(table, index).map_or(0, |word| word.load(Ordering::Acquire))
    }

    #[inline]
    fn first_in_use(&self, table: Mfn, entries: Range<usize>) -> Option<(usize, u64)> {
        let first = entries.start;
        let words = self.frames.get(table.get() as usize).and_then(|frame| frame.0.get(entries))?;
        let words = words.iter().map(|word| word.load(Ordering::Acquire));
        words.zip(first..).find(|(word, _)| *word != 0).map(|(word, index)| (index, word))
    }

    #[inline]
    fn swap(&self, table: Mfn, index: usize, new: u64) -> u64 {
        self.word(table, index).map_or(0, |word| word.swap(new, Ordering::AcqRel))
    }

    #[inline]
    fn compare_exchange(
        &self,
        table: Mfn,
        index: usize,
        current: u64,
        new: u64,
    ) -> Result<(), u64> {
        let Some(word) = self.word(table, index) else { return Err(0) };
        word.compare_exchange(current, new, Ordering::AcqRel, Ordering::Acquire).map(|_| ())
    }

    // Nobody but hardware could write an entry while a table is edited.
    #[inline]
    fn lend(&self, table: Mfn) -> Option<Lent<'_>> {
        let number = table.get() as usize;
        Some(Lent { entries: &self.frames.get(number)?.0, live: self.live.get(number)? })
    }

    fn allocate(&self) -> Option<FreshTable> {
        let number = frames::take()?;
        let mfn = Mfn::new(number as u64);
        self.frames.get(number)?.zero();
        self.change_live(mfn, |_| 0);
        Some(FreshTable::new(mfn))
    }

    #[inline]
    fn discard(&self, table: FreshTable) {
        frames::give(table.mfn().get() as usize);
    }

    #[inline]
    fn unlink(&self, table: Mfn) -> TablePage {
        self.unlinked.set(self.unlinked.get() + 1);
        TablePage::unlinked(table)
    }

    #[inline]
    fn unlinked(&self) -> Option<u64> {
        Some(self.unlinked.get())
    }

    #[inline]
    fn live(&self, table: Mfn) -> u16 {
        self.change_live(table, |live| live)
    }

    #[inline]
    fn add_live(&self, table: Mfn, entries: u16) {
        self.change_live(table, |live| live + entries);
    }

    #[inline]
    fn drop_live(&self, table: Mfn) -> u16 {
        self.change_live(table, |live| live - 1)
    }

    #[inline]
    fn drop_live_by(&self, table: Mfn, entries: u16) {
        self.change_live(table, |live| live - entries);
    }
}

/// Puts the pages that a walk clears into the batch.
struct Into<'r, 'b, 'id>(&'r mut Room<'b, 'id, Mfn, PAGES>);

impl<'id> Sink<'id, Shared> for Into<'_, '_, 'id> {
    #[inline]
    fn left(&self) -> usize {
        self.0.left()
    }

    #[inline]
    fn marks(&self) -> Marks {
        Marks::Unwanted
    }

    #[inline]
    fn take(&mut self, _: Run, leaf: Leaf, gone: Gone<'id, Shared>) {
        self.0.hold(leaf.mfn, Cleared::from(gone)).expect("the walker asked for room");
    }

    #[inline]
    fn take_all(&mut self, leaves: impl Iterator<Item = (Run, Leaf, Gone<'id, Shared>)>) {
        self.0.hold_all(&mut leaves.map(|(_, leaf, gone)| (leaf.mfn, Cleared::from(gone))));
    }
}

/// The run of pages that follow each other.
#[inline]
fn run(pages: &[u64]) -> Rest {
    let ends = pages.first().zip(pages.last());
    let run = ends.and_then(|(first, last)| Run::new(Gfn::new(*first), Gfn::new(*last)));
    Rest::new(run.expect("there are pages, in order"))
}

/// A tree that hardware could walk.
pub(crate) struct Ours {
    format: Ept,
    memory: Memory,
    root: Mfn,
    /// The way to the last page that was unmapped.
    path: Path,
}

impl Ours {
    #[inline]
    fn tables(&self) -> Tables<'_, Ept, Memory> {
        Tables { format: &self.format, memory: &self.memory, root: self.root }
    }

    /// Flushes, and takes the pages out that were held.
    #[inline]
    fn settle(batch: &mut Batch<Mfn, PAGES>) {
        let hardware = Hardware { tlb: &Null, iotlb: &Null };
        let mut flushed = batch.flush(&hardware).unwrap_or_else(|_| unreachable!("it cannot fail"));
        flushed.for_each_page(|page| {
            std::hint::black_box(*page.get());
        });
    }
}

const DOMAIN: DomainId = DomainId::new(1);

/// What a page shows: the frame of its number.
#[inline]
fn leaf(page: u64) -> Leaf {
    Leaf::new(Mfn::new(page), Access::READ_WRITE)
}

impl Table for Ours {
    const NAME: &'static str = "quiesce";

    fn new() -> Self {
        let memory = Memory::new();
        let root = memory.allocate().expect("frames do not run out");
        let root = memory.link(root);
        Self { format: Ept::new(EptLevels::Four), memory, root, path: Path::NEW }
    }

    fn map(&mut self, pages: &[u64]) {
        let mut batch = Batch::<Mfn, PAGES>::new(DOMAIN);
        batch.edit_many(|skipped, _| {
            let mut record = Recorder::<Shared, _>::new(skipped, Unheld);
            for page in pages {
                let (gfn, leaf) = (Gfn::new(*page), leaf(*page));
                map(self.tables(), gfn, Level::PAGE, leaf, Over::Vacant, &mut record)
                    .expect("nothing is mapped there");
            }
        });
        Self::settle(&mut batch);
    }

    fn unmap(&mut self, pages: &[u64]) {
        let mut batch = Batch::<Mfn, PAGES>::new(DOMAIN);
        let Self { format, memory, root, path } = self;
        let tables = Tables { format: &*format, memory: &*memory, root: *root };
        let likely = Likely::new(tables.format, leaf(0));
        batch.edit_many(|skipped, room| {
            let mut near = Near::new(tables, path);
            for page in pages {
                let (gfn, mfn) = (Gfn::new(*page), Mfn::new(*page));
                let same = |found: &Leaf| found.mfn == mfn;
                let gone = near.clear::<Shared>(gfn, mfn, skipped, &likely, same);
                let cleared = Cleared::from(gone.expect("a page is mapped there"));
                room.hold(mfn, cleared).expect("there is room for all");
            }
        });
        Self::settle(&mut batch);
    }

    fn map_range(&mut self, pages: &[u64]) {
        let mut batch = Batch::<Mfn, PAGES>::new(DOMAIN);
        let (rest, budget) = (run(pages), &mut Budget::UNLIMITED.clone());
        let first = leaf(rest.run().first().get());
        batch.edit_many(|skipped, _| {
            let mut record = Recorder::<Shared, _>::new(skipped, Unheld);
            map_run(self.tables(), rest, first, Level::PAGE, budget, &mut record)
                .expect("nothing is mapped there");
        });
        Self::settle(&mut batch);
    }

    fn unmap_range(&mut self, pages: &[u64]) {
        let mut batch = Batch::<Mfn, PAGES>::new(DOMAIN);
        let (rest, budget) = (run(pages), &mut Budget::UNLIMITED.clone());
        batch.edit_many(|skipped, room| {
            let mut record = Recorder::<Shared, _>::new(skipped, Into(room));
            clear(self.tables(), rest, budget, Emptied::Keep, &mut record)
                .expect("nothing is in the way");
        });
        Self::settle(&mut batch);
    }

    fn shown(&self, page: u64) -> Option<u64> {
        let gfn = Gfn::new(page);
        let (_, mfn) = lookup(self.tables(), gfn)?.leaf_at(gfn)?;
        Some(mfn.get())
    }

    fn take_down(self, _: &[u64]) {
        // No hardware was ever given this root.
        let root = FreshTable::new(self.root);
        let mut tree = Unwalked::new(&self.format, &self.memory, root);
        let done = tree.teardown(&mut Budget::UNLIMITED.clone(), |_, _| ());
        done.expect("nobody else edits the tree");
    }
}
