//! Table memory without hardware, for spaces that are huge and mostly empty.
//!
//! [`Sparse`] holds table pages of any granule, and of each only the frames that were
//! ever written. [`Ledger`] is a record for it that has room for everything and counts.

use std::cell::{Cell, OnceCell, RefCell};
use std::ops::Range;

use flush::{FreshTable, Mfn, Run, TablePage};
use stage2::{Format, Leaf, Record, TableMemory, Tables};

/// Table pages begin here: aligned for every root, below every physical width.
const FIRST_TABLE: u64 = 1 << 32;

/// Words of a frame of 4 KiB.
const WORDS: usize = 512;

/// Tables that there is room for, if nobody says.
const TABLES: usize = 1 << 13;

#[derive(Debug)]
struct Frame {
    words: [Cell<u64>; WORDS],
    /// Entries in use, if a table page begins here.
    live: Cell<u16>,
}

/// Pages for the tables of one geometry, the root's first.
///
/// A read is plain loads, as it is for a hypervisor: a borrow to be counted in and out
/// would cost more than a walk of an empty space does.
#[derive(Debug)]
pub struct Sparse {
    frames: Box<[OnceCell<Box<Frame>>]>,
    free: RefCell<Vec<Mfn>>,
    /// Frames of a table page.
    step: usize,
    /// Frames given out so far, in use or not.
    given: Cell<usize>,
    roots: usize,
    in_use: Cell<usize>,
}

impl Sparse {
    /// Memory with an empty root for `format` in it, and room for thousands of tables.
    pub fn new(format: &impl Format) -> Self {
        Self::with_room(format, TABLES)
    }

    /// Memory with an empty root for `format` in it, and room for `tables` more.
    pub fn with_room(format: &impl Format, tables: usize) -> Self {
        let geometry = format.geometry();
        let roots = (geometry.root_entries() / geometry.entries()).max(1);
        let step = 1 << geometry.page_order();
        let memory = Self {
            frames: (0..(roots + tables) * step).map(|_| OnceCell::new()).collect(),
            free: RefCell::default(),
            step,
            given: Cell::new(0),
            roots,
            in_use: Cell::new(0),
        };
        for _ in 0..memory.roots {
            let page = memory.allocate().expect("there is room for the root");
            let root = memory.link(page);
            // It is there, and has to be read like any other.
            (0..step).for_each(|frame| _ = memory.written(root, frame * WORDS));
        }
        memory
    }

    /// The tree.
    pub fn tables<'a, F: Format>(&'a self, format: &'a F) -> Tables<'a, F, Self> {
        Tables { format, memory: self, root: Mfn::new(FIRST_TABLE) }
    }

    /// How many pages are in use.
    pub fn tables_in_use(&self) -> usize {
        self.in_use.get()
    }

    /// How many of them are the root's.
    pub fn roots(&self) -> usize {
        self.roots
    }

    /// Takes a page back that nothing leads to any more. No hardware walks this memory.
    pub fn free(&self, page: TablePage) {
        self.discard(FreshTable::new(page.mfn()));
    }

    /// The cell of the frame with this entry of `table`.
    #[inline]
    fn cell(&self, table: Mfn, index: usize) -> Option<&OnceCell<Box<Frame>>> {
        let number = table.get().wrapping_sub(FIRST_TABLE) as usize;
        self.frames.get(number.wrapping_add(index / WORDS))
    }

    /// The frame with this entry of `table`, if it was ever written.
    #[inline]
    fn frame(&self, table: Mfn, index: usize) -> Option<&Frame> {
        self.cell(table, index)?.get().map(|frame| &**frame)
    }

    /// The same frame, made if it was not there.
    fn written(&self, table: Mfn, index: usize) -> Option<&Frame> {
        let empty = || Frame { words: [const { Cell::new(0) }; WORDS], live: Cell::new(0) };
        Some(self.cell(table, index)?.get_or_init(|| Box::new(empty())))
    }
}

impl TableMemory for Sparse {
    #[inline]
    fn read(&self, table: Mfn, index: usize) -> u64 {
        self.frame(table, index).map_or(0, |frame| frame.words[index % WORDS].get())
    }

    fn first_in_use(&self, table: Mfn, entries: Range<usize>) -> Option<(usize, u64)> {
        let mut index = entries.start;
        while index < entries.end {
            let end = entries.end.min((index / WORDS + 1) * WORDS);
            let frame = self.frame(table, index);
            let words = frame.map_or(&[][..], |frame| &frame.words[index % WORDS..][..end - index]);
            if let Some(place) = words.iter().position(|word| word.get() != 0) {
                return Some((index + place, words[place].get()));
            }
            index = end;
        }
        None
    }

    fn swap(&self, table: Mfn, index: usize, new: u64) -> u64 {
        let frame = self.written(table, index);
        frame.map_or(0, |frame| frame.words[index % WORDS].replace(new))
    }

    fn compare_exchange(
        &self,
        table: Mfn,
        index: usize,
        current: u64,
        new: u64,
    ) -> Result<(), u64> {
        match self.read(table, index) {
            found if found == current => {
                self.swap(table, index, new);
                Ok(())
            }
            found => Err(found),
        }
    }

    fn allocate(&self) -> Option<FreshTable> {
        let table = match self.free.borrow_mut().pop() {
            Some(table) => table,
            None => {
                let first = self.given.get();
                let given = first.checked_add(self.step).filter(|end| *end <= self.frames.len())?;
                self.given.set(given);
                Mfn::new(FIRST_TABLE + first as u64)
            }
        };
        let entries = (0..self.step).map(|frame| frame * WORDS);
        for frame in entries.filter_map(|index| self.frame(table, index)) {
            frame.words.iter().for_each(|word| word.set(0));
            frame.live.set(0);
        }
        self.in_use.set(self.in_use.get() + 1);
        Some(FreshTable::new(table))
    }

    fn discard(&self, table: FreshTable) {
        self.in_use.set(self.in_use.get() - 1);
        self.free.borrow_mut().push(table.mfn());
    }

    #[inline]
    fn live(&self, table: Mfn) -> u16 {
        self.frame(table, 0).map_or(0, |frame| frame.live.get())
    }

    fn add_live(&self, table: Mfn, entries: u16) {
        if let Some(frame) = self.written(table, 0) {
            frame.live.set(frame.live.get() + entries);
        }
    }

    fn drop_live(&self, table: Mfn) -> u16 {
        let Some(frame) = self.frame(table, 0) else { return 0 };
        frame.live.set(frame.live.get() - 1);
        frame.live.get()
    }
}

/// A record with room for everything, which counts.
#[derive(Debug, Default)]
pub struct Ledger {
    /// Valid leaves that went or changed, over its whole life.
    pub leaves: u64,
    /// Flushes carried out.
    pub flushes: u64,
    pending: bool,
    pages: Vec<TablePage>,
}

impl Ledger {
    /// Whether something must be forgotten before anything is given out.
    #[must_use]
    #[inline]
    pub fn owes_flush(&self) -> bool {
        self.pending
    }

    /// Carries a flush out if one is owed, with `flush`, and takes the pages back that
    /// waited for it.
    #[inline]
    pub fn settle(&mut self, memory: &Sparse, flush: impl FnOnce()) {
        if self.pending {
            flush();
            self.finish(memory);
        }
    }

    #[cold]
    fn finish(&mut self, memory: &Sparse) {
        self.flushes += 1;
        self.pending = false;
        for page in self.pages.drain(..) {
            memory.free(page);
        }
    }
}

impl Record for Ledger {
    fn leaves_left(&self) -> usize {
        usize::MAX
    }

    fn tables_left(&self) -> usize {
        usize::MAX
    }

    fn removed(&mut self, _: Run, _: u8, _: Leaf) {
        self.leaves += 1;
        self.pending = true;
    }

    fn changed(&mut self, _: Run, _: u8, _: Leaf) {
        self.leaves += 1;
        self.pending = true;
    }

    fn added(&mut self, _: Run) {}

    fn linked(&mut self, _: Run) {}

    fn table(&mut self, _: Run, page: TablePage) -> Result<(), TablePage> {
        self.pending = true;
        self.pages.push(page);
        Ok(())
    }

    fn everything(&mut self) {
        self.pending = true;
    }
}
