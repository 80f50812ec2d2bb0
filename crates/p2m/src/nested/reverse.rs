//! Which nested frames show a canonical frame: the reverse map.
//!
//! [`Reverse`] holds one record for each leaf of the shadow tables that it had room
//! for. It lives in storage of the caller and is found from both sides: by the
//! canonical frames of a record, to unmap what shows them, and by its nested frames, to
//! drop it together with its leaf.

use flush::{Gfn, Run};

/// No entry: the end of a chain.
const NONE: u32 = u32::MAX;
/// How many orders a frame number can have.
const ORDERS: usize = 64;

/// One leaf of a shadow table: 2^`order` nested frames show as many canonical ones.
///
/// Both runs are aligned to the order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Shown {
    /// Which shadow.
    pub(crate) shadow: usize,
    /// The lg2 of how many frames.
    pub(crate) order: u8,
    /// The first nested frame.
    pub(crate) nested: Gfn,
    /// The first canonical frame.
    pub(crate) canonical: Gfn,
}

impl Shown {
    pub(crate) fn nested_run(&self) -> Run {
        Run::block(self.nested, self.order)
    }

    pub(crate) fn canonical_run(&self) -> Run {
        Run::block(self.canonical, self.order)
    }
}

/// Neighbours in a chain.
#[derive(Clone, Copy, Debug)]
struct Links {
    previous: u32,
    next: u32,
}

impl Links {
    const NONE: Self = Self { previous: NONE, next: NONE };
}

/// The ways to a record.
#[derive(Clone, Copy)]
enum By {
    /// A bucket, if it is the first record of its canonical frames.
    Canonical = 0,
    Nested = 1,
    /// The other records of the same canonical frames. They are in no chain of a bucket,
    /// so a frame that is shown a million times is no burden to others.
    Peer = 2,
}

/// Storage for one record of the reverse map.
///
/// A slice of these is what [`Nested`](super::Nested) keeps its records in: one for each
/// leaf of the shadow tables that is to be found again.
#[derive(Clone, Copy, Debug)]
pub struct ReverseEntry {
    shown: Option<Shown>,
    /// By canonical and by nested frames, and among peers; the first also links free
    /// entries.
    links: [Links; 3],
    /// The first records of two buckets, which have nothing to do with this record.
    heads: [u32; 2],
}

impl ReverseEntry {
    /// An entry that holds no record.
    pub const EMPTY: Self = Self { shown: None, links: [Links::NONE; 3], heads: [NONE; 2] };
}

/// The reverse map of all shadows of one guest.
#[derive(Debug)]
pub(crate) struct Reverse<'s> {
    entries: &'s mut [ReverseEntry],
    /// The first free entry.
    free: u32,
    /// How many records there are of each order.
    of_order: [u32; ORDERS],
    /// One bit for each order that has any.
    orders: u64,
    /// Spreads frame numbers, which a guest chooses, over the buckets.
    seed: u64,
}

/// A search for all records that overlap a canonical run.
///
/// Records may be dropped between two steps; those found and not dropped are found
/// again.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Search {
    run: Run,
    order: u8,
    /// The block of this order, or where records outnumber blocks, the entry.
    at: u64,
    /// How many buckets and records it has looked at.
    looks: u64,
}

impl Search {
    pub(crate) fn new(run: Run) -> Self {
        Self { run, order: 0, at: 0, looks: 0 }
    }

    /// How many buckets and records it has looked at so far.
    pub(crate) fn looks(&self) -> u64 {
        self.looks
    }

    fn look(&mut self) {
        self.looks = self.looks.saturating_add(1);
    }
}

impl<'s> Reverse<'s> {
    pub(crate) fn new(entries: &'s mut [ReverseEntry], seed: u64) -> Self {
        let usable = entries.len().min(NONE as usize);
        let entries = &mut entries[..usable];
        let mut free = NONE;
        for (index, entry) in (0..NONE).zip(entries.iter_mut()) {
            *entry = ReverseEntry::EMPTY;
            entry.links[0].next = free;
            free = index;
        }
        Self { entries, free, of_order: [0; ORDERS], orders: 0, seed }
    }

    /// The seed it was made with.
    pub(crate) fn seed(&self) -> u64 {
        self.seed
    }

    /// Whether there is room for one more record.
    pub(crate) fn has_room(&self) -> bool {
        self.entry(self.free).is_some()
    }

    /// Adds a record, or says that there is no room for it.
    #[must_use]
    pub(crate) fn insert(&mut self, shown: Shown) -> bool {
        let index = self.free;
        let Some(entry) = self.entries.get_mut(index as usize) else { return false };
        let Some(count) = self.of_order.get_mut(usize::from(shown.order)) else { return false };
        *count = count.saturating_add(1);
        self.orders |= 1 << shown.order;
        self.free = entry.links[0].next;
        entry.shown = Some(shown);
        self.set_links(By::Peer, index, Links::NONE);
        match self.first_of(&shown, &mut 0) {
            Some((first, _)) => self.link_peer(first, index),
            None => self.link(By::Canonical, index, &shown),
        }
        self.link(By::Nested, index, &shown);
        true
    }

    /// Drops the record of a leaf, and says whether there was one.
    pub(crate) fn remove(&mut self, shadow: usize, order: u8, nested: Gfn) -> bool {
        let key = Shown { shadow, order, nested, canonical: Gfn::new(0) };
        let bucket = self.bucket(By::Nested, &key);
        let mut index = self.head(By::Nested, bucket);
        while let Some(ReverseEntry { shown: Some(shown), links, .. }) = self.entry(index) {
            if (shown.shadow, shown.order, shown.nested) == (shadow, order, nested) {
                self.drop_record(index);
                return true;
            }
            index = links[By::Nested as usize].next;
        }
        false
    }

    /// Drops every record of a shadow. Looks at the whole storage.
    pub(crate) fn forget(&mut self, shadow: usize) {
        for index in 0..self.entries.len() {
            if self.entries[index].shown.is_some_and(|shown| shown.shadow == shadow) {
                self.drop_record(index as u32);
            }
        }
    }

    /// The next record that overlaps the run of the search.
    ///
    /// Costs a bucket for each block of the run, for each order that has records; where
    /// the run has more blocks than there is storage, one look at all storage.
    pub(crate) fn next(&self, search: &mut Search) -> Option<Shown> {
        loop {
            let from = u64::MAX.checked_shl(u32::from(search.order)).unwrap_or(0);
            // At most 64: what is left is 0 then.
            let order = (self.orders & from).trailing_zeros() as u8;
            if usize::from(order) >= ORDERS {
                return None;
            }
            if order != search.order {
                *search = Search { order, at: 0, ..*search };
            }
            let found = self.next_of_order(search);
            if found.is_some() {
                return found;
            }
            *search = Search { order: order.saturating_add(1), at: 0, ..*search };
        }
    }

    /// Every record.
    #[cfg(test)]
    pub(crate) fn records(&self) -> impl Iterator<Item = Shown> + '_ {
        self.entries.iter().filter_map(|entry| entry.shown)
    }

    fn next_of_order(&self, search: &mut Search) -> Option<Shown> {
        let order = search.order;
        let (first, last) = (search.run.first().get() >> order, search.run.last().get() >> order);
        let here = |shown: &Shown| {
            let block = shown.canonical.get() >> order;
            shown.order == order && (first..=last).contains(&block)
        };
        if last - first >= self.entries.len() as u64 {
            for (index, entry) in (0..).zip(self.entries.iter()).skip(search.at as usize) {
                search.at = index;
                search.look();
                if let Some(shown) = entry.shown.filter(here) {
                    return Some(shown);
                }
            }
            return None;
        }
        while search.at <= last - first {
            let block = first + search.at;
            if let Some(shown) = self.of_block(order, block, search) {
                return Some(shown);
            }
            search.at += 1;
        }
        None
    }

    /// A record of this order for this block of canonical frames.
    fn of_block(&self, order: u8, block: u64, search: &mut Search) -> Option<Shown> {
        let canonical = Gfn::new(block << order);
        let key = Shown { shadow: 0, order, nested: Gfn::new(0), canonical };
        let (_, shown) = self.first_of(&key, &mut search.looks)?;
        Some(shown)
    }

    /// The first record of the same canonical frames, and its entry. Adds to `looks`.
    fn first_of(&self, key: &Shown, looks: &mut u64) -> Option<(u32, Shown)> {
        let mut index = self.head(By::Canonical, self.bucket(By::Canonical, key));
        *looks = looks.saturating_add(1);
        while let Some(ReverseEntry { shown: Some(shown), links, .. }) = self.entry(index) {
            *looks = looks.saturating_add(1);
            if (shown.order, shown.canonical) == (key.order, key.canonical) {
                return Some((index, *shown));
            }
            index = links[By::Canonical as usize].next;
        }
        None
    }

    fn drop_record(&mut self, index: u32) {
        let Some(shown) = self.entry(index).and_then(|entry| entry.shown) else { return };
        self.unlink_peer(index, &shown);
        self.unlink(By::Nested, index, &shown);
        if let Some(count) = self.of_order.get_mut(usize::from(shown.order)) {
            *count = count.saturating_sub(1);
            if *count == 0 {
                self.orders &= !(1 << shown.order);
            }
        }
        let free = self.free;
        if let Some(entry) = self.entries.get_mut(index as usize) {
            entry.shown = None;
            entry.links[0].next = free;
            self.free = index;
        }
    }

    fn link(&mut self, by: By, index: u32, shown: &Shown) {
        let bucket = self.bucket(by, shown);
        let first = self.head(by, bucket);
        self.set_links(by, index, Links { previous: NONE, next: first });
        self.change_links(by, first, |links| links.previous = index);
        self.set_head(by, bucket, index);
    }

    /// Puts a record behind the first one of the same canonical frames.
    fn link_peer(&mut self, first: u32, index: u32) {
        let next = self.entry(first).map_or(NONE, |entry| entry.links[By::Peer as usize].next);
        self.set_links(By::Peer, index, Links { previous: first, next });
        self.change_links(By::Peer, first, |links| links.next = index);
        self.change_links(By::Peer, next, |links| links.previous = index);
    }

    /// Takes a record away from those of the same canonical frames. If it was the first,
    /// another one takes its place in the bucket.
    fn unlink_peer(&mut self, index: u32, shown: &Shown) {
        let Some(Links { previous, next }) = self.entry(index).map(|e| e.links[By::Peer as usize])
        else {
            return;
        };
        self.change_links(By::Peer, previous, |links| links.next = next);
        self.change_links(By::Peer, next, |links| links.previous = previous);
        if previous == NONE {
            self.unlink(By::Canonical, index, shown);
            if next != NONE {
                self.link(By::Canonical, next, shown);
            }
        }
    }

    fn unlink(&mut self, by: By, index: u32, shown: &Shown) {
        let Some(Links { previous, next }) = self.entry(index).map(|e| e.links[by as usize]) else {
            return;
        };
        if previous == NONE {
            let bucket = self.bucket(by, shown);
            self.set_head(by, bucket, next);
        }
        self.change_links(by, previous, |links| links.next = next);
        self.change_links(by, next, |links| links.previous = previous);
    }

    fn entry(&self, index: u32) -> Option<&ReverseEntry> {
        self.entries.get(index as usize)
    }

    fn set_links(&mut self, by: By, index: u32, links: Links) {
        self.change_links(by, index, |own| *own = links);
    }

    fn change_links(&mut self, by: By, index: u32, change: impl FnOnce(&mut Links)) {
        if let Some(entry) = self.entries.get_mut(index as usize) {
            change(&mut entry.links[by as usize]);
        }
    }

    fn head(&self, by: By, bucket: usize) -> u32 {
        self.entries.get(bucket).map_or(NONE, |entry| entry.heads[by as usize])
    }

    fn set_head(&mut self, by: By, bucket: usize, head: u32) {
        if let Some(entry) = self.entries.get_mut(bucket) {
            entry.heads[by as usize] = head;
        }
    }

    /// The bucket of a record: a keyed mix, so that no guest can aim at one.
    fn bucket(&self, by: By, shown: &Shown) -> usize {
        let key = match by {
            By::Canonical | By::Peer => shown.canonical.get(),
            By::Nested => shown.nested.get() ^ (shown.shadow as u64).rotate_left(48),
        };
        let mut mixed = key ^ u64::from(shown.order).rotate_right(6) ^ self.seed;
        for factor in [0xbf58_476d_1ce4_e5b9, 0x94d0_49bb_1331_11eb] {
            // A mix of bits: what overflows is meant to be lost.
            mixed = (mixed ^ (mixed >> 30)).wrapping_mul(factor).rotate_left(31) ^ self.seed;
        }
        let buckets = (self.entries.len() as u64).max(1);
        ((mixed ^ (mixed >> 33)) % buckets) as usize
    }
}

#[cfg(test)]
#[path = "reverse_tests.rs"]
mod tests;
