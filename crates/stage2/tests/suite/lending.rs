//! Table memory that lends its tables as they are.

use std::cell::Cell;
use std::sync::atomic::{AtomicU16, AtomicU64, Ordering::Relaxed};

use flush::{FreshTable, Mfn};
use stage2::{Format, Lent, TableMemory, Tables};

/// As many pages as it is made for, of one geometry, the root's among them. None is freed.
#[derive(Debug)]
pub(crate) struct Lending {
    pages: Vec<Page>,
    step: u64,
    taken: Cell<usize>,
    /// How often a table was lent.
    pub(crate) lent: Cell<u64>,
    /// How often an entry was read or exchanged.
    pub(crate) asked: Cell<u64>,
}

#[derive(Debug)]
struct Page {
    entries: Vec<AtomicU64>,
    live: AtomicU16,
}

/// Table pages start here, far from the frames that tests map.
const FIRST_TABLE: u64 = 0x8000_0000;

impl Lending {
    pub(crate) fn new(format: &impl Format, pages: usize) -> Self {
        let geometry = format.geometry();
        let page = |_| Page {
            entries: (0..geometry.entries()).map(|_| AtomicU64::new(0)).collect(),
            live: AtomicU16::new(0),
        };
        let roots = (geometry.root_entries() / geometry.entries()).max(1);
        Self {
            pages: (0..pages).map(page).collect(),
            step: 1 << geometry.page_order(),
            taken: Cell::new(roots),
            lent: Cell::new(0),
            asked: Cell::new(0),
        }
    }

    pub(crate) fn tables<'a, F: Format>(&'a self, format: &'a F) -> Tables<'a, F, Self> {
        Tables { format, memory: self, root: self.table(0) }
    }

    fn page(&self, table: Mfn) -> &Page {
        &self.pages[((table.get() - FIRST_TABLE) / self.step) as usize]
    }

    /// The table that was allocated in this place; the root has the first ones.
    pub(crate) fn table(&self, place: u64) -> Mfn {
        Mfn::new(FIRST_TABLE + place * self.step)
    }

    /// Sets bits in an entry of the only table that has one in this place, as hardware does.
    #[track_caller]
    pub(crate) fn mark(&self, index: usize, bits: u64) {
        let used = |entry: &&AtomicU64| entry.load(Relaxed) != 0;
        let mut entries = self.pages.iter().map(|page| &page.entries[index]).filter(used);
        entries.next().expect("an entry in use").fetch_or(bits, Relaxed);
        assert!(entries.next().is_none(), "it is not the only one");
    }

    /// Each page counts its entries in use.
    #[track_caller]
    pub(crate) fn check(&self) {
        for page in &self.pages {
            let live = page.entries.iter().filter(|word| word.load(Relaxed) != 0).count();
            assert_eq!(usize::from(page.live.load(Relaxed)), live);
        }
    }
}

impl TableMemory for Lending {
    fn read(&self, table: Mfn, index: usize) -> u64 {
        self.asked.set(self.asked.get() + 1);
        self.page(table).entries[index].load(Relaxed)
    }

    fn swap(&self, table: Mfn, index: usize, new: u64) -> u64 {
        self.asked.set(self.asked.get() + 1);
        self.page(table).entries[index].swap(new, Relaxed)
    }

    fn compare_exchange(
        &self,
        table: Mfn,
        index: usize,
        current: u64,
        new: u64,
    ) -> Result<(), u64> {
        self.asked.set(self.asked.get() + 1);
        let entry = &self.page(table).entries[index];
        entry.compare_exchange(current, new, Relaxed, Relaxed).map(|_| ())
    }

    fn lend(&self, table: Mfn) -> Option<Lent<'_>> {
        self.lent.set(self.lent.get() + 1);
        let Page { entries, live } = self.page(table);
        Some(Lent { entries, live })
    }

    fn allocate(&self) -> Option<FreshTable> {
        let place = self.taken.get();
        self.pages.get(place)?;
        self.taken.set(place + 1);
        Some(FreshTable::new(self.table(place as u64)))
    }

    fn discard(&self, _: FreshTable) {}

    fn unlinked(&self) -> Option<u64> {
        Some(0)
    }

    fn live(&self, table: Mfn) -> u16 {
        self.page(table).live.load(Relaxed)
    }

    fn add_live(&self, table: Mfn, entries: u16) {
        self.page(table).live.fetch_add(entries, Relaxed);
    }

    fn drop_live(&self, table: Mfn) -> u16 {
        self.page(table).live.fetch_sub(1, Relaxed) - 1
    }
}
