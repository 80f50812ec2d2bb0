//! A record that a test can read, with as much room as the test gives it.

use flush::{Gfn, Run, TablePage};
use stage2::{Leaf, Record};

use crate::arena::Arena;

#[derive(Debug)]
pub(crate) struct Log {
    pub(crate) leaves_left: usize,
    pub(crate) tables_left: usize,
    pub(crate) removed: Vec<(Run, u8, Leaf)>,
    pub(crate) changed: Vec<(Run, u8, Leaf)>,
    pub(crate) added: Vec<Run>,
    pub(crate) linked: Vec<Run>,
    pub(crate) tables: Vec<(Run, TablePage)>,
    /// How often everything went on record.
    pub(crate) everything: u32,
}

impl Log {
    pub(crate) fn new() -> Self {
        Self::with_room(usize::MAX, usize::MAX)
    }

    pub(crate) fn with_room(leaves_left: usize, tables_left: usize) -> Self {
        Self {
            leaves_left,
            tables_left,
            removed: Vec::new(),
            changed: Vec::new(),
            added: Vec::new(),
            linked: Vec::new(),
            tables: Vec::new(),
            everything: 0,
        }
    }

    /// Whether hardware that does not cache absence has anything to forget.
    pub(crate) fn asks_for_flush(&self) -> bool {
        !(self.removed.is_empty() && self.changed.is_empty() && self.tables.is_empty())
            || self.everything > 0
    }

    /// The runs whose old translations have to go.
    pub(crate) fn leaf_runs(&self) -> impl Iterator<Item = Run> {
        self.removed.iter().chain(&self.changed).map(|(run, _, _)| *run)
    }

    /// The largest order that `frame` is on record with, if it is at all.
    pub(crate) fn order_of(&self, frame: Gfn) -> Option<u8> {
        let entries = self.removed.iter().chain(&self.changed);
        entries.filter(|(run, _, _)| run.contains(frame)).map(|(_, order, _)| *order).max()
    }

    /// The removed leaves, as first frame and order.
    pub(crate) fn removals(&self) -> Vec<(u64, u8)> {
        self.removed.iter().map(|(run, order, _)| (run.first().get(), *order)).collect()
    }

    /// The flush is done: table pages go back, and there is room again.
    pub(crate) fn flush(&mut self, arena: &Arena, leaves: usize, tables: usize) -> usize {
        let freed = self.tables.len();
        for (_, page) in self.tables.drain(..) {
            arena.free(page);
        }
        (self.leaves_left, self.tables_left) = (leaves, tables);
        freed
    }
}

impl Record for Log {
    fn leaves_left(&self) -> usize {
        self.leaves_left
    }

    fn tables_left(&self) -> usize {
        self.tables_left
    }

    fn removed(&mut self, run: Run, order: u8, leaf: Leaf) {
        self.leaves_left = self.leaves_left.checked_sub(1).expect("the walker asks for room");
        self.removed.push((run, order, leaf));
    }

    fn changed(&mut self, run: Run, order: u8, leaf: Leaf) {
        self.changed.push((run, order, leaf));
    }

    fn added(&mut self, run: Run) {
        self.added.push(run);
    }

    fn linked(&mut self, run: Run) {
        self.linked.push(run);
    }

    fn table(&mut self, run: Run, page: TablePage) -> Result<(), TablePage> {
        let Some(left) = self.tables_left.checked_sub(1) else { return Err(page) };
        self.tables_left = left;
        self.tables.push((run, page));
        Ok(())
    }

    fn everything(&mut self) {
        self.everything += 1;
    }
}
