//! This project: EPT of four levels, every edit on the record of a batch.
//!
//! Pages that are unmapped are held by the batch until its flush, which goes to hardware
//! that holds nothing, and come out of it. A teardown is that of a tree which no hardware
//! can walk, as with the others.

use std::cell::{Cell, RefCell};
use std::sync::atomic::{AtomicU64, Ordering};

use flush::{Batch, Cleared, DomainId, FreshTable, Gfn, Hardware, Mfn, Shared};
use host::Null;
use stage2::format::ept::{Ept, EptLevels};
use stage2::{
    Access, Budget, Leaf, Level, Over, Recorder, TableMemory, Tables, Unheld, Unwalked, clear_page,
    lookup, map,
};

use crate::frames::Frame;
use crate::work::{PAGES, Table};

/// A page of entries, and how many are in use.
struct Page {
    frame: Box<Frame>,
    live: Cell<u16>,
}

/// Where tables are: frames by their number, which are taken and given back one by one.
#[derive(Default)]
struct Memory {
    pages: RefCell<Vec<Option<Page>>>,
}

impl Memory {
    #[inline]
    fn page<R>(&self, table: Mfn, look: impl FnOnce(&Page) -> R) -> Option<R> {
        self.pages.borrow().get(table.get() as usize)?.as_ref().map(look)
    }

    #[inline]
    fn word<R>(&self, table: Mfn, index: usize, look: impl FnOnce(&AtomicU64) -> R) -> Option<R> {
        self.page(table, |page| page.frame.0.get(index).map(look)).flatten()
    }
}

impl TableMemory for Memory {
    #[inline]
    fn read(&self, table: Mfn, index: usize) -> u64 {
        self.word(table, index, |word| word.load(Ordering::Acquire)).unwrap_or(0)
    }

    #[inline]
    fn swap(&self, table: Mfn, index: usize, new: u64) -> u64 {
        self.word(table, index, |word| word.swap(new, Ordering::AcqRel)).unwrap_or(0)
    }

    #[inline]
    fn compare_exchange(
        &self,
        table: Mfn,
        index: usize,
        current: u64,
        new: u64,
    ) -> Result<(), u64> {
        let exchange = |word: &AtomicU64| {
            word.compare_exchange(current, new, Ordering::AcqRel, Ordering::Acquire).map(|_| ())
        };
        self.word(table, index, exchange).unwrap_or(Err(0))
    }

    fn allocate(&self) -> Option<FreshTable> {
        let mut pages = self.pages.borrow_mut();
        let mfn = Mfn::new(pages.len() as u64);
        pages.push(Some(Page { frame: Frame::take_zeroed(), live: Cell::new(0) }));
        Some(FreshTable::new(mfn))
    }

    fn discard(&self, table: FreshTable) {
        let mut pages = self.pages.borrow_mut();
        let page = pages.get_mut(table.mfn().get() as usize).and_then(Option::take);
        page.into_iter().for_each(|page| Frame::give(page.frame));
    }

    #[inline]
    fn live(&self, table: Mfn) -> u16 {
        self.page(table, |page| page.live.get()).unwrap_or(0)
    }

    #[inline]
    fn add_live(&self, table: Mfn, entries: u16) {
        self.page(table, |page| page.live.set(page.live.get() + entries));
    }

    #[inline]
    fn drop_live(&self, table: Mfn) -> u16 {
        let drop = |page: &Page| {
            page.live.set(page.live.get() - 1);
            page.live.get()
        };
        self.page(table, drop).unwrap_or(0)
    }
}

/// A tree that hardware could walk.
pub(crate) struct Ours {
    format: Ept,
    memory: Memory,
    root: Mfn,
}

impl Ours {
    fn tables(&self) -> Tables<'_, Ept, Memory> {
        Tables { format: &self.format, memory: &self.memory, root: self.root }
    }

    fn batch() -> Batch<Mfn, PAGES> {
        Batch::new(DomainId::new(1))
    }

    /// Flushes, and takes the pages out that were held.
    fn settle(mut batch: Batch<Mfn, PAGES>) {
        let hardware = Hardware { tlb: &Null, iotlb: &Null };
        let mut flushed = batch.flush(&hardware).unwrap_or_else(|_| unreachable!("it cannot fail"));
        while let Some(page) = flushed.next_page() {
            std::hint::black_box(page.get());
        }
    }
}

impl Table for Ours {
    const NAME: &'static str = "quiesce";

    fn new() -> Self {
        let memory = Memory::default();
        let root = memory.allocate().expect("frames do not run out");
        let root = memory.link(root);
        Self { format: Ept::new(EptLevels::Four), memory, root }
    }

    fn map(&mut self, pages: &[u64]) {
        let mut batch = Self::batch();
        batch.edit_many(|skipped, _| {
            let mut record = Recorder::<Shared, _>::new(skipped, Unheld);
            for page in pages {
                let leaf = Leaf::new(Mfn::new(*page), Access::READ_WRITE);
                let gfn = Gfn::new(*page);
                map(self.tables(), gfn, Level::PAGE, leaf, Over::Vacant, &mut record)
                    .expect("nothing is mapped there");
            }
        });
        Self::settle(batch);
    }

    fn unmap(&mut self, pages: &[u64]) {
        let mut batch = Self::batch();
        for page in pages {
            let held = batch.hold(|skipped| {
                let gfn = Gfn::new(*page);
                let (leaf, gone) =
                    clear_page::<Shared, _, _>(self.tables(), gfn, skipped, |_| true)?;
                Ok::<_, stage2::PageError>((leaf.mfn, Cleared::from(gone)))
            });
            held.expect("a page is mapped there");
        }
        Self::settle(batch);
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
