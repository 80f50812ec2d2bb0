//! Memory and edits for the tests of this crate.
//!
//! A [`Heap`] is table memory that counts its pages and can play hardware: it marks an
//! entry between the read and the store of an edit.

use core::cell::{Cell, RefCell};
use std::{boxed::Box, collections::BTreeMap, vec::Vec};

use flush::{Batch, Cover, DomainId, FreshTable, Gone, Mfn, Run, Skipped};
use stage2::{Leaf, Sink, TableMemory};

use crate::record::Walkers;

pub(crate) const DOMAIN: DomainId = DomainId::new(7);

struct Page {
    words: Box<[Cell<u64>; 512]>,
    live: Cell<u16>,
}

/// Table pages on the heap.
pub(crate) struct Heap {
    pages: RefCell<BTreeMap<u64, Page>>,
    /// How many more pages there are.
    pub(crate) stock: Cell<usize>,
    /// Bits that the next stores find set behind the edit's back, one set for each.
    pub(crate) marks: RefCell<Vec<u64>>,
    next: Cell<u64>,
}

impl Heap {
    pub(crate) fn new(stock: usize) -> Self {
        Self {
            pages: RefCell::default(),
            stock: Cell::new(stock),
            marks: RefCell::default(),
            next: Cell::new(0x1000),
        }
    }

    fn with<R>(&self, table: Mfn, run: impl FnOnce(&Page) -> R) -> R {
        run(self.pages.borrow().get(&table.get()).expect("a page of the tree"))
    }

    /// Gives back what was unlinked and flushed.
    pub(crate) fn free(&self, table: Mfn) {
        assert!(self.pages.borrow_mut().remove(&table.get()).is_some(), "freed twice");
        self.stock.set(self.stock.get() + 1);
    }

    pub(crate) fn pages(&self) -> usize {
        self.pages.borrow().len()
    }
}

impl TableMemory for &Heap {
    fn read(&self, table: Mfn, index: usize) -> u64 {
        self.with(table, |page| page.words[index].get())
    }

    fn swap(&self, table: Mfn, index: usize, new: u64) -> u64 {
        self.with(table, |page| page.words[index].replace(new))
    }

    fn compare_exchange(
        &self,
        table: Mfn,
        index: usize,
        current: u64,
        new: u64,
    ) -> Result<(), u64> {
        self.with(table, |page| {
            let word = &page.words[index];
            if let Some(marks) = self.marks.borrow_mut().pop() {
                word.set(word.get() ^ marks);
            }
            if word.get() != current {
                return Err(word.get());
            }
            word.set(new);
            Ok(())
        })
    }

    fn allocate(&self) -> Option<FreshTable> {
        self.stock.set(self.stock.get().checked_sub(1)?);
        let mfn = self.next.replace(self.next.get() + 1);
        let words = Box::new([const { Cell::new(0) }; 512]);
        self.pages.borrow_mut().insert(mfn, Page { words, live: Cell::new(0) });
        Some(FreshTable::new(Mfn::new(mfn)))
    }

    fn discard(&self, table: FreshTable) {
        self.free(table.mfn());
    }

    fn live(&self, table: Mfn) -> u16 {
        self.with(table, |page| page.live.get())
    }

    fn add_live(&self, table: Mfn, entries: u16) {
        self.with(table, |page| page.live.set(page.live.get() + entries));
    }

    fn drop_live(&self, table: Mfn) -> u16 {
        self.with(table, |page| {
            page.live.set(page.live.get() - 1);
            page.live.get()
        })
    }
}

/// What an edit left on record.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Owed {
    pub(crate) tlb: Cover,
    pub(crate) iotlb: Cover,
}

/// Runs an edit with the record of a batch of its own.
pub(crate) fn edit<R>(run: impl for<'id> FnOnce(&mut Skipped<'id>) -> R) -> (R, Owed) {
    let mut batch: Batch<(), 1> = Batch::new(DOMAIN);
    let result = batch.edit_many(|skipped, _| run(skipped));
    (result, Owed { tlb: batch.tlb().clone(), iotlb: batch.iotlb().clone() })
}

/// A sink for so many leaves, which notes what it took.
pub(crate) struct Taken<'t> {
    pub(crate) leaves: &'t mut Vec<(Run, Leaf)>,
    pub(crate) room: usize,
}

impl<'id, K: Walkers> Sink<'id, K> for Taken<'_> {
    fn left(&self) -> usize {
        self.room
    }

    fn take(&mut self, run: Run, leaf: Leaf, _gone: Gone<'id, K>) {
        self.room -= 1;
        self.leaves.push((run, leaf));
    }
}
