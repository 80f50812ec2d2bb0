//! Caches of leaf translations and of pointers to tables
//!
//! [`Leaves`] and [`Walks`] hold what was put in until it is taken out: nothing here expires, and nothing here
//! looks at the tables.

use crate::types::{Frame, Op, Rights};
use std::collections::{BTreeMap, HashSet};

/// Which entry: the tag of the space, log2 of the entry's pages, and its input page number shifted by that.
pub(crate) type LeafKey = (u64, u8, u64);

/// Sizes of leaf, as log2 of their pages.
pub(crate) const ORDERS: [u8; 3] = [0, 9, 18];

/// How something came to be cached.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Origin {
    /// When the hardware read the entry.
    pub(crate) filled: Op,
    /// When the host had last written it then: a frame given away after that is not what was meant.
    pub(crate) basis: Op,
    /// When its range was declared settled, if it was stale then.
    pub(crate) condemned: Option<Op>,
    /// Addresses of the entries it was read from, by level; 0 where none (frame 0 holds no table).
    pub(crate) path: [u64; 5],
}

/// A device and the domain it was in.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Source {
    pub(crate) sid: u16,
    pub(crate) did: u16,
}

/// A cached leaf translation.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Leaf {
    /// First frame; meaningless if not present.
    pub(crate) frame: Frame,
    pub(crate) rights: Rights,
    /// False for a cached "nothing here" (caching mode).
    pub(crate) present: bool,
    pub(crate) origin: Origin,
    /// The device it was translated for; `None` on processors.
    pub(crate) source: Option<Source>,
    /// The dirty bit is known to be set in the table.
    pub(crate) dirty: bool,
}

/// First and last input page of an entry.
pub(crate) fn span(order: u8, block: u64) -> (u64, u64) {
    let first = block.checked_shl(u32::from(order)).unwrap_or(u64::MAX);
    (first, first | ((1_u64 << order.min(63)) - 1))
}

/// `page` shifted down by `order`, 0 where nothing is left.
pub(crate) fn block_of(page: u64, order: u8) -> u64 {
    page.checked_shr(u32::from(order)).unwrap_or(0)
}

#[derive(Default)]
pub(crate) struct Leaves {
    entries: BTreeMap<LeafKey, Leaf>,
    dropped: HashSet<LeafKey>,
}

impl Leaves {
    /// The entry for `page`: of several sizes the oldest, because it is the one most likely to be stale.
    pub(crate) fn find(&self, tag: u64, page: u64) -> Option<(LeafKey, Leaf)> {
        ORDERS
            .iter()
            .filter_map(|order| {
                let key = (tag, *order, block_of(page, *order));
                self.entries.get(&key).map(|leaf| (key, *leaf))
            })
            .min_by_key(|(_, leaf)| leaf.origin.filled)
    }

    pub(crate) fn contains(&self, key: LeafKey) -> bool {
        self.entries.contains_key(&key)
    }

    /// Puts an entry in; true if an invalidation had dropped one with this key before.
    pub(crate) fn insert(&mut self, key: LeafKey, leaf: Leaf) -> bool {
        self.entries.insert(key, leaf);
        self.dropped.remove(&key)
    }

    pub(crate) fn get_mut(&mut self, key: LeafKey) -> Option<&mut Leaf> {
        self.entries.get_mut(&key)
    }

    pub(crate) fn remove(&mut self, key: LeafKey) {
        self.entries.remove(&key);
    }

    /// Drops every size of entry for `page`, as a fault there does.
    pub(crate) fn forget(&mut self, tag: u64, page: u64) {
        for order in ORDERS {
            self.entries.remove(&(tag, order, block_of(page, order)));
        }
    }

    /// An invalidation: drops what `condition` is true for and says how many that were.
    pub(crate) fn drop_where(&mut self, condition: impl Fn(&LeafKey, &Leaf) -> bool) -> u64 {
        let doomed: Vec<LeafKey> = self
            .entries
            .iter()
            .filter(|(key, leaf)| condition(key, leaf))
            .map(|(key, _)| *key)
            .collect();
        for key in &doomed {
            self.entries.remove(key);
            self.dropped.insert(*key);
        }
        doomed.len() as u64
    }

    /// Drops the entry at place `index` in order, as running out of room would.
    pub(crate) fn evict(&mut self, index: usize) {
        if let Some(key) = self.entries.keys().nth(index).copied() {
            self.entries.remove(&key);
        }
    }

    pub(crate) fn len(&self) -> usize {
        self.entries.len()
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = (&LeafKey, &Leaf)> {
        self.entries.iter()
    }
}

/// Which pointer: the tag of the space, the level of the table pointed to, and the input page number shifted by
/// the table's span.
pub(crate) type WalkKey = (u64, u8, u64);

/// A cached pointer to a table.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Pointer {
    /// `None`: cached as absent (caching mode).
    pub(crate) table: Option<Frame>,
    /// What the entries above it allow.
    pub(crate) rights: Rights,
    pub(crate) origin: Origin,
}

/// log2 of the pages a table at `level` spans.
pub(crate) const fn table_order(level: u8) -> u8 {
    9 * (level + 1)
}

#[derive(Default)]
pub(crate) struct Walks {
    entries: BTreeMap<WalkKey, Pointer>,
}

impl Walks {
    /// The lowest cached pointer on the way to `page` below the root table at `top`.
    pub(crate) fn deepest(&self, tag: u64, page: u64, top: u8) -> Option<(u8, Pointer)> {
        (0..top).find_map(|level| {
            self.get((tag, level, block_of(page, table_order(level))))
                .map(|pointer| (level, pointer))
        })
    }

    pub(crate) fn get(&self, key: WalkKey) -> Option<Pointer> {
        self.entries.get(&key).copied()
    }

    pub(crate) fn get_mut(&mut self, key: WalkKey) -> Option<&mut Pointer> {
        self.entries.get_mut(&key)
    }

    /// Keeps an older pointer that is already there.
    pub(crate) fn insert(&mut self, key: WalkKey, pointer: Pointer) {
        self.entries.entry(key).or_insert(pointer);
    }

    pub(crate) fn forget(&mut self, tag: u64, page: u64) {
        self.entries.retain(|(of, level, block), _| {
            *of != tag || *block != block_of(page, table_order(*level))
        });
    }

    pub(crate) fn drop_where(&mut self, condition: impl Fn(&WalkKey) -> bool) -> u64 {
        let before = self.entries.len();
        self.entries.retain(|key, _| !condition(key));
        before.saturating_sub(self.entries.len()) as u64
    }

    pub(crate) fn evict(&mut self, index: usize) {
        if let Some(key) = self.entries.keys().nth(index).copied() {
            self.entries.remove(&key);
        }
    }

    pub(crate) fn len(&self) -> usize {
        self.entries.len()
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = (&WalkKey, &Pointer)> {
        self.entries.iter()
    }
}
