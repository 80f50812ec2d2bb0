//! Table memory without hardware, for spaces that are huge and mostly empty.
//!
//! [`Sparse`] holds pages of any granule, as many as are linked. [`Ledger`] is a record
//! for it that has room for everything and counts.

use std::cell::{Cell, RefCell};

use flush::{FreshTable, Mfn, Run, TablePage};
use stage2::{Format, Leaf, Record, TableMemory, Tables};

/// Table pages begin here: aligned for every root, below every physical width.
const FIRST_TABLE: u64 = 1 << 32;

#[derive(Clone, Debug)]
struct Page {
    words: Vec<u64>,
    live: u16,
}

/// Pages for the tables of one geometry, the root's first.
#[derive(Debug)]
pub struct Sparse {
    pages: RefCell<Vec<Page>>,
    free: RefCell<Vec<Mfn>>,
    entries: usize,
    /// The lg2 of the page size in frames.
    order: u8,
    roots: usize,
    in_use: Cell<usize>,
}

impl Sparse {
    /// Memory with an empty root for `format` in it.
    pub fn new(format: &impl Format) -> Self {
        let geometry = format.geometry();
        let memory = Self {
            pages: RefCell::default(),
            free: RefCell::default(),
            entries: geometry.entries(),
            order: geometry.page_order(),
            roots: (geometry.root_entries() / geometry.entries()).max(1),
            in_use: Cell::new(0),
        };
        for _ in 0..memory.roots {
            let page = memory.allocate().expect("memory has no bounds");
            memory.link(page);
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

    #[inline]
    fn place(&self, table: Mfn) -> usize {
        let number = table.get().wrapping_sub(FIRST_TABLE) >> self.order;
        usize::try_from(number).unwrap_or(usize::MAX)
    }

    #[inline]
    fn page<R>(&self, table: Mfn, change: impl FnOnce(&mut Page) -> R) -> Option<R> {
        self.pages.borrow_mut().get_mut(self.place(table)).map(change)
    }

    #[inline]
    fn word<R>(&self, table: Mfn, index: usize, change: impl FnOnce(&mut u64) -> R) -> Option<R> {
        self.page(table, |page| page.words.get_mut(index).map(change)).flatten()
    }
}

impl TableMemory for Sparse {
    #[inline]
    fn read(&self, table: Mfn, index: usize) -> u64 {
        let pages = self.pages.borrow();
        pages.get(self.place(table)).and_then(|page| page.words.get(index)).copied().unwrap_or(0)
    }

    fn swap(&self, table: Mfn, index: usize, new: u64) -> u64 {
        self.word(table, index, |word| std::mem::replace(word, new)).unwrap_or(0)
    }

    fn compare_exchange(
        &self,
        table: Mfn,
        index: usize,
        current: u64,
        new: u64,
    ) -> Result<(), u64> {
        let exchange = |word: &mut u64| {
            if *word != current {
                return Err(*word);
            }
            *word = new;
            Ok(())
        };
        self.word(table, index, exchange).unwrap_or(Err(0))
    }

    fn allocate(&self) -> Option<FreshTable> {
        self.in_use.set(self.in_use.get() + 1);
        if let Some(mfn) = self.free.borrow_mut().pop() {
            return Some(FreshTable::new(mfn));
        }
        let mut pages = self.pages.borrow_mut();
        let mfn = FIRST_TABLE + ((pages.len() as u64) << self.order);
        pages.push(Page { words: vec![0; self.entries], live: 0 });
        Some(FreshTable::new(Mfn::new(mfn)))
    }

    fn discard(&self, table: FreshTable) {
        self.page(table.mfn(), |page| {
            page.words.fill(0);
            page.live = 0;
        });
        self.in_use.set(self.in_use.get() - 1);
        self.free.borrow_mut().push(table.mfn());
    }

    fn live(&self, table: Mfn) -> u16 {
        self.page(table, |page| page.live).unwrap_or(0)
    }

    fn add_live(&self, table: Mfn, entries: u16) {
        self.page(table, |page| page.live += entries);
    }

    fn drop_live(&self, table: Mfn) -> u16 {
        let drop = |page: &mut Page| {
            page.live -= 1;
            page.live
        };
        self.page(table, drop).unwrap_or(0)
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
