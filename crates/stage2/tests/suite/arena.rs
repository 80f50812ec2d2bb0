//! Table memory that knows each page's state and fails a test that misuses it.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;

use flush::{FreshTable, Gfn, Mfn, Released, TablePage};
use stage2::{Entry, Format, Level, Marks, TableMemory, Tables, lookup};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Fresh,
    Linked,
    Unlinked,
    Free,
}

#[derive(Clone, Debug)]
struct Page {
    state: State,
    words: Vec<u64>,
    live: u16,
}

/// Table pages of one geometry, the root's among them.
#[derive(Clone, Debug)]
pub(crate) struct Arena {
    pages: RefCell<BTreeMap<u64, Page>>,
    entries: usize,
    step: u64,
    root: Mfn,
    next: Cell<u64>,
    /// How many more tables may be allocated.
    pub(crate) allowance: Cell<usize>,
    /// How often an entry was read.
    pub(crate) reads: Cell<u64>,
    unlinks: Cell<u64>,
    /// Bits that hardware sets in the entry just before each of the next exchanges.
    pub(crate) marks: RefCell<Vec<u64>>,
    /// Whether marks were wanted of each stretch that was taken out.
    pub(crate) wanted: RefCell<Vec<Marks>>,
}

/// Table pages start here, far from the frames that tests map.
const FIRST_TABLE: u64 = 0x8000_0000;

impl Arena {
    pub(crate) fn new(format: &impl Format) -> Self {
        let geometry = format.geometry();
        let arena = Self {
            pages: RefCell::default(),
            entries: geometry.entries(),
            step: 1 << geometry.page_order(),
            root: Mfn::new(FIRST_TABLE),
            next: Cell::new(FIRST_TABLE),
            allowance: Cell::new(usize::MAX),
            reads: Cell::new(0),
            unlinks: Cell::new(0),
            marks: RefCell::default(),
            wanted: RefCell::default(),
        };
        for _ in 0..(geometry.root_entries() / geometry.entries()).max(1) {
            let page = arena.allocate().unwrap();
            arena.link(page);
        }
        arena
    }

    pub(crate) fn tables<'a, F: Format>(&'a self, format: &'a F) -> Tables<'a, F, Self> {
        Tables { format, memory: self, root: self.root }
    }

    /// The flush is done: the page may be used again.
    pub(crate) fn free(&self, page: TablePage) {
        self.page(page.mfn(), |page| {
            assert_eq!(page.state, State::Unlinked);
            page.state = State::Free;
        });
    }

    /// The flush is done, and a batch says so.
    pub(crate) fn recycle(&self, page: Released<TablePage>) {
        self.free(TablePage::unlinked(page.recycle().mfn()));
    }

    /// How many words of linked pages are not zero.
    pub(crate) fn linked_words(&self) -> usize {
        let pages = self.pages.borrow();
        let linked = pages.values().filter(|page| page.state == State::Linked);
        linked.flat_map(|page| &page.words).filter(|word| **word != 0).count()
    }

    /// Writes a word behind the walker's back, with the live count kept right.
    pub(crate) fn poke(&self, table: Mfn, index: usize, word: u64) {
        self.page(table, |page| {
            page.live += u16::from(page.words[index] == 0 && word != 0);
            page.live -= u16::from(page.words[index] != 0 && word == 0);
            page.words[index] = word;
        });
    }

    /// How many pages may be used again.
    pub(crate) fn free_pages(&self) -> usize {
        self.pages.borrow().values().filter(|page| page.state == State::Free).count()
    }

    /// How many pages the tree owns.
    pub(crate) fn linked(&self) -> usize {
        self.pages.borrow().values().filter(|page| page.state == State::Linked).count()
    }

    /// How many pages are neither linked, nor free, nor in somebody's hands.
    #[track_caller]
    pub(crate) fn check<F: Format>(&self, format: &F, unlinked: usize) {
        let pages = self.pages.borrow();
        let count = |state| pages.values().filter(|page| page.state == state).count();
        assert_eq!(count(State::Fresh), 0, "a fresh table was lost");
        assert_eq!(count(State::Unlinked), unlinked, "an unlinked table was lost");
        for (mfn, page) in &*pages {
            if page.state == State::Linked {
                let live = page.words.iter().filter(|word| **word != 0).count();
                assert_eq!(usize::from(page.live), live, "live count of table {mfn:#x}");
            }
        }
        let reachable = self.reachable(format, &pages);
        assert_eq!(count(State::Linked), reachable, "a linked table cannot be reached");
    }

    fn reachable<F: Format>(&self, format: &F, pages: &BTreeMap<u64, Page>) -> usize {
        let geometry = format.geometry();
        let roots = (geometry.root_entries() / geometry.entries()).max(1) as u64;
        let mut todo: Vec<(u64, Level)> =
            (0..roots).map(|page| (self.root.get() + page * self.step, geometry.top())).collect();
        let mut seen = 0;
        while let Some((mfn, level)) = todo.pop() {
            seen += 1;
            for word in &pages[&mfn].words {
                if let Entry::Table(child) = format.decode(level, *word) {
                    todo.push((child.get(), level.below().unwrap()));
                }
            }
        }
        seen
    }

    fn page<R>(&self, table: Mfn, use_it: impl FnOnce(&mut Page) -> R) -> R {
        let mut pages = self.pages.borrow_mut();
        use_it(pages.get_mut(&table.get()).expect("a page of the arena"))
    }

    fn usable<R>(&self, table: Mfn, use_it: impl FnOnce(&mut Page) -> R) -> R {
        self.page(table, |page| {
            assert!(matches!(page.state, State::Fresh | State::Linked), "{table:?} is gone");
            use_it(page)
        })
    }
}

impl TableMemory for Arena {
    fn read(&self, table: Mfn, index: usize) -> u64 {
        self.reads.set(self.reads.get() + 1);
        self.usable(table, |page| page.words[index])
    }

    fn swap(&self, table: Mfn, index: usize, new: u64) -> u64 {
        self.usable(table, |page| std::mem::replace(&mut page.words[index], new))
    }

    fn compare_exchange(
        &self,
        table: Mfn,
        index: usize,
        current: u64,
        new: u64,
    ) -> Result<(), u64> {
        let marks = self.marks.borrow_mut().pop().unwrap_or(0);
        self.usable(table, |page| {
            page.words[index] |= marks;
            if page.words[index] != current {
                return Err(page.words[index]);
            }
            page.words[index] = new;
            Ok(())
        })
    }

    fn take_out(&self, table: Mfn, index: usize, taken: &mut [u64], marks: Marks) {
        self.wanted.borrow_mut().push(marks);
        for (taken, index) in taken.iter_mut().zip(index..) {
            *taken = self.swap(table, index, 0);
        }
    }

    fn fill(&self, table: &FreshTable, index: usize, words: &[u64]) {
        self.page(table.mfn(), |page| {
            assert_eq!(page.state, State::Fresh);
            page.words[index..][..words.len()].copy_from_slice(words);
        });
    }

    fn allocate(&self) -> Option<FreshTable> {
        self.allowance.set(self.allowance.get().checked_sub(1)?);
        let mfn = self.next.get();
        self.next.set(mfn + self.step);
        let page = Page { state: State::Fresh, words: vec![0; self.entries], live: 0 };
        self.pages.borrow_mut().insert(mfn, page);
        Some(FreshTable::new(Mfn::new(mfn)))
    }

    fn discard(&self, table: FreshTable) {
        self.page(table.mfn(), |page| {
            // Unlinked comes from a tree that no hardware can walk.
            assert!(matches!(page.state, State::Fresh | State::Unlinked));
            page.state = State::Free;
        });
    }

    fn link(&self, table: FreshTable) -> Mfn {
        let retired = table.mfn() == self.root;
        self.page(table.mfn(), |page| {
            assert_eq!(page.state, if retired { page.state } else { State::Fresh });
            page.state = State::Linked;
        });
        table.mfn()
    }

    fn unlinked(&self) -> Option<u64> {
        Some(self.unlinks.get())
    }

    fn unlink(&self, table: Mfn) -> TablePage {
        self.unlinks.set(self.unlinks.get() + 1);
        let retired = table == self.root;
        self.page(table, |page| {
            assert_eq!(page.state, State::Linked);
            let empty = page.words.iter().all(|word| *word == 0);
            assert!(empty || retired, "unlinked with entries in it");
            page.state = State::Unlinked;
        });
        TablePage::unlinked(table)
    }

    fn live(&self, table: Mfn) -> u16 {
        self.usable(table, |page| page.live)
    }

    fn add_live(&self, table: Mfn, entries: u16) {
        self.usable(table, |page| page.live += entries);
    }

    fn drop_live(&self, table: Mfn) -> u16 {
        self.usable(table, |page| {
            page.live -= 1;
            page.live
        })
    }
}

/// What each frame of the space shows: machine frame and rights.
pub(crate) type View = Vec<Option<(u64, u8)>>;

/// The view through `lookup`, frame by frame. For small spaces.
pub(crate) fn view<F: Format>(tables: Tables<'_, F, Arena>) -> View {
    (0..tables.format.geometry().space().pages())
        .map(|frame| {
            let gfn = Gfn::new(frame);
            let (leaf, mfn) = lookup(tables, gfn)?.leaf_at(gfn)?;
            Some((mfn.get(), leaf.access.bits()))
        })
        .collect()
}
