//! Mappings kept outside a table: what is mapped in a range, and what comes next.
//!
//! [`Tracked`] is a balanced tree of disjoint runs with a value each, in a pool of
//! [`Slot`]s that the caller supplies. It serves hypervisors whose table belongs to
//! somebody else, so that there is nothing to walk. [`Tracked::release`] is the range
//! walk here: like the others it answers how far it has come.

use core::fmt;
use core::marker::PhantomData;

use flush::{Gfn, Run};

use crate::chunked::Stops;
use crate::stop::{Budget, Rest};

/// The index of a slot.
type Link = u32;

/// No slot.
const NONE: Link = Link::MAX;

/// An AVL tree of 2^32 nodes has at most 46 levels.
const MAX_HEIGHT: usize = 48;

/// Where the smaller runs are, and the link of free slots.
const LEFT: usize = 0;
/// Where the larger runs are.
const RIGHT: usize = 1;

/// Room for one mapping.
#[derive(Clone, Debug)]
pub struct Slot<T> {
    run: Run,
    /// `None` in a free slot.
    value: Option<T>,
    children: [Link; 2],
    /// Of the subtree: 1 for a slot without children.
    height: u8,
}

impl<T> Slot<T> {
    /// A free slot.
    pub const VACANT: Self =
        Self { run: Run::single(Gfn::new(0)), value: None, children: [NONE; 2], height: 0 };
}

impl<T> Default for Slot<T> {
    fn default() -> Self {
        Self::VACANT
    }
}

/// Why a mapping was not taken; with its value.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Refused<T> {
    /// It overlaps the mapping over this run.
    Overlaps(T, Run),
    /// Every slot is in use.
    Full(T),
}

impl<T> fmt::Debug for Refused<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Overlaps(_, run) => write!(f, "Overlaps({run:?})"),
            Self::Full(_) => f.write_str("Full"),
        }
    }
}

impl<T> fmt::Display for Refused<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Overlaps(_, run) => write!(f, "overlaps the mapping of {run:?}"),
            Self::Full(_) => f.write_str("no slot left"),
        }
    }
}

impl<T> core::error::Error for Refused<T> {}

/// What [`Tracked::release`] did over a whole range.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sweep {
    /// Mappings that were released and are gone.
    pub released: u64,
    /// Mappings that could not be released and stay.
    pub failed: u64,
    /// Where the first mapping past the range begins, or `None` if there is none. Never
    /// inside the range, whatever stayed there.
    pub next: Option<Gfn>,
}

impl Sweep {
    /// The last frame that is dealt with: up to the next mapping, or to the end of all.
    #[must_use]
    pub fn reached(&self) -> Gfn {
        self.next.map_or(Run::ALL.last(), |next| Gfn::new(next.get().saturating_sub(1)))
    }
}

/// Where [`Tracked::release`] stopped because its budget was spent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use = "the range is not complete"]
pub struct SweepStopped {
    /// What is left to do.
    pub rest: Rest,
    /// Mappings that this call released.
    pub released: u64,
    /// Mappings that this call could not release.
    pub failed: u64,
}

impl Stops for SweepStopped {
    fn at(&self) -> Gfn {
        self.rest.run().first()
    }
}

/// Disjoint mappings, sorted, in the slots of `S`: an array, a slice, anything that
/// shows the same slots each time.
#[derive(Debug)]
pub struct Tracked<T, S> {
    slots: S,
    root: Link,
    free: Link,
    len: usize,
    value: PhantomData<T>,
}

/// The way from the root to a slot.
struct Path {
    links: [Link; MAX_HEIGHT],
    len: usize,
}

impl Path {
    const fn new() -> Self {
        Self { links: [NONE; MAX_HEIGHT], len: 0 }
    }

    fn push(&mut self, link: Link) {
        if let Some(place) = self.links.get_mut(self.len) {
            *place = link;
            self.len = self.len.saturating_add(1);
        }
    }

    fn pop(&mut self) -> Option<Link> {
        self.len = self.len.checked_sub(1)?;
        self.links.get(self.len).copied()
    }

    fn last(&self) -> Link {
        self.len.checked_sub(1).and_then(|last| self.links.get(last)).copied().unwrap_or(NONE)
    }
}

impl<T, S: AsRef<[Slot<T>]> + AsMut<[Slot<T>]>> Tracked<T, S> {
    /// No mappings. What the slots held before is dropped.
    #[must_use]
    pub fn new(mut slots: S) -> Self {
        let mut free = NONE;
        for (index, slot) in slots.as_mut().iter_mut().enumerate().rev() {
            let Ok(link) = Link::try_from(index) else { continue };
            if link != NONE {
                *slot = Slot { children: [free, NONE], ..Slot::VACANT };
                free = link;
            }
        }
        Self { slots, root: NONE, free, len: 0, value: PhantomData }
    }

    /// How many mappings there are.
    #[must_use]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there is none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The most slots that a search looks at: at most 1.45 times the lg2 of their number.
    #[must_use]
    pub fn height(&self) -> u8 {
        self.height_of(self.root)
    }

    /// The first mapping that ends at `gfn` or beyond: the one that contains it, or the
    /// next.
    #[must_use]
    pub fn first_from(&self, gfn: Gfn) -> Option<(Run, &T)> {
        let slot = self.slot(self.find_from(gfn))?;
        Some((slot.run, slot.value.as_ref()?))
    }

    /// The mapping that contains `gfn`.
    #[must_use]
    pub fn get(&self, gfn: Gfn) -> Option<(Run, &T)> {
        self.first_from(gfn).filter(|(run, _)| run.contains(gfn))
    }

    /// Where the first mapping begins that lies wholly past `run`, or `None`.
    #[must_use]
    pub fn next_past(&self, run: Run) -> Option<Gfn> {
        let (first, _) = self.first_from(run.last())?;
        if first.first() > run.last() {
            return Some(first.first());
        }
        let after = Gfn::new(first.last().get().checked_add(1)?);
        self.first_from(after).map(|(next, _)| next.first())
    }

    /// Takes a mapping in.
    ///
    /// # Errors
    ///
    /// See [`Refused`]; nothing was changed.
    pub fn insert(&mut self, run: Run, value: T) -> Result<(), Refused<T>> {
        if let Some((other, _)) = self.first_from(run.first())
            && other.first() <= run.last()
        {
            return Err(Refused::Overlaps(value, other));
        }
        let link = self.free;
        let Some(slot) = self.slot_mut(link) else { return Err(Refused::Full(value)) };
        let next_free = slot.children[LEFT];
        *slot = Slot { run, value: Some(value), children: [NONE; 2], height: 1 };
        self.free = next_free;
        self.len = self.len.saturating_add(1);

        let (mut path, mut at) = (Path::new(), self.root);
        let mut side = LEFT;
        while let Some(slot) = self.slot(at) {
            path.push(at);
            side = if slot.run.first() < run.first() { RIGHT } else { LEFT };
            at = slot.children[side];
        }
        self.set_child(path.last(), side, link);
        self.retrace(path);
        Ok(())
    }

    /// Takes out the mapping that contains `gfn`.
    pub fn remove(&mut self, gfn: Gfn) -> Option<(Run, T)> {
        let (mut path, mut at) = (Path::new(), self.root);
        let slot = loop {
            let slot = self.slot(at)?;
            if slot.run.contains(gfn) {
                break slot;
            }
            path.push(at);
            at = slot.children[if slot.run.last() < gfn { RIGHT } else { LEFT }];
        };
        let children = slot.children;
        let mut gone = at;
        if children.iter().all(|child| *child != NONE) {
            // The next larger one changes places with it: that has no left child.
            path.push(at);
            gone = children[RIGHT];
            while let Some(left) = self.slot(gone).map(|slot| slot.children[LEFT])
                && left != NONE
            {
                path.push(gone);
                gone = left;
            }
            self.exchange(at, gone);
        }
        let slot = self.slot(gone)?;
        let only =
            if slot.children[LEFT] == NONE { slot.children[RIGHT] } else { slot.children[LEFT] };
        self.replace_child(path.last(), gone, only);
        self.retrace(path);

        let free = self.free;
        let slot = self.slot_mut(gone)?;
        let (run, value) = (slot.run, slot.value.take()?);
        (slot.children, slot.height) = ([free, NONE], 0);
        self.free = gone;
        self.len = self.len.saturating_sub(1);
        Some((run, value))
    }

    /// Releases every mapping that has a frame in the range: whole, even where it
    /// reaches beyond.
    ///
    /// `release` gets the mapping and gives its value back if it could not be released:
    /// then the mapping stays, and the sweep goes on behind it. Each mapping costs one
    /// of `budget` and a search.
    ///
    /// # Errors
    ///
    /// [`SweepStopped`] when the budget is spent; what it did is done.
    pub fn release(
        &mut self,
        rest: Rest,
        budget: &mut Budget,
        mut release: impl FnMut(Run, T) -> Result<(), T>,
    ) -> Result<Sweep, SweepStopped> {
        let range = rest.run();
        let (mut released, mut failed) = (0u64, 0u64);
        let mut at = range.first();
        loop {
            let link = self.find_from(at);
            let Some(run) = self.slot(link).map(|slot| slot.run) else { break };
            if run.first() > range.last() {
                break;
            }
            if !budget.take() {
                let rest = Rest::from(at, range.last());
                return Err(SweepStopped { rest, released, failed });
            }
            match self.remove(run.first()) {
                Some((run, value)) => match release(run, value) {
                    Ok(()) => released = released.saturating_add(1),
                    Err(value) => {
                        failed = failed.saturating_add(1);
                        // There is room: its own slot was freed.
                        if self.insert(run, value).is_err() {
                            break;
                        }
                    }
                },
                None => break,
            }
            if run.last() >= range.last() {
                break;
            }
            at = Gfn::new(run.last().get().saturating_add(1));
        }
        Ok(Sweep { released, failed, next: self.next_past(range) })
    }

    fn slot(&self, link: Link) -> Option<&Slot<T>> {
        self.slots.as_ref().get(usize::try_from(link).ok()?)
    }

    fn slot_mut(&mut self, link: Link) -> Option<&mut Slot<T>> {
        self.slots.as_mut().get_mut(usize::try_from(link).ok()?)
    }

    fn find_from(&self, gfn: Gfn) -> Link {
        let (mut best, mut at) = (NONE, self.root);
        while let Some(slot) = self.slot(at) {
            if slot.run.last() < gfn {
                at = slot.children[RIGHT];
            } else {
                best = at;
                at = slot.children[LEFT];
            }
        }
        best
    }

    fn height_of(&self, link: Link) -> u8 {
        self.slot(link).map_or(0, |slot| slot.height)
    }

    fn children(&self, link: Link) -> [Link; 2] {
        self.slot(link).map_or([NONE; 2], |slot| slot.children)
    }

    /// Without a parent it is the root that is set.
    fn set_child(&mut self, parent: Link, side: usize, child: Link) {
        match self.slot_mut(parent) {
            Some(slot) => slot.children[side] = child,
            None => self.root = child,
        }
    }

    fn replace_child(&mut self, parent: Link, old: Link, new: Link) {
        let side = if self.children(parent)[LEFT] == old { LEFT } else { RIGHT };
        self.set_child(parent, side, new);
    }

    /// Two slots change mappings, not places in the tree.
    fn exchange(&mut self, one: Link, other: Link) {
        let take = |slot: &mut Slot<T>| (slot.run, slot.value.take());
        let Some(first) = self.slot_mut(one).map(take) else { return };
        let Some(slot) = self.slot_mut(other) else { return };
        let second = take(slot);
        (slot.run, slot.value) = first;
        if let Some(slot) = self.slot_mut(one) {
            (slot.run, slot.value) = second;
        }
    }

    /// Balances every subtree on the way, from below.
    fn retrace(&mut self, mut path: Path) {
        while let Some(link) = path.pop() {
            let top = self.balance(link);
            self.replace_child(path.last(), link, top);
        }
    }

    /// Makes the heights below `link` differ by at most one; returns what is on top then.
    fn balance(&mut self, link: Link) -> Link {
        let heights = self.children(link).map(|child| self.height_of(child));
        let heavy = if heights[LEFT] > heights[RIGHT] { LEFT } else { RIGHT };
        if heights[heavy] <= heights[1 - heavy].saturating_add(1) {
            self.measure(link);
            return link;
        }
        let child = self.children(link)[heavy];
        let inner = self.children(child).map(|grandchild| self.height_of(grandchild));
        if inner[1 - heavy] > inner[heavy] {
            let top = self.rotate(child, 1 - heavy);
            self.set_child(link, heavy, top);
        }
        self.rotate(link, heavy)
    }

    /// Lifts the child on `side` above `link`; returns the child.
    fn rotate(&mut self, link: Link, side: usize) -> Link {
        let child = self.children(link)[side];
        let inner = self.children(child)[1 - side];
        self.set_child(link, side, inner);
        self.set_child(child, 1 - side, link);
        self.measure(link);
        self.measure(child);
        child
    }

    fn measure(&mut self, link: Link) {
        let [left, right] = self.children(link).map(|child| self.height_of(child));
        if let Some(slot) = self.slot_mut(link) {
            slot.height = left.max(right).saturating_add(1);
        }
    }
}

static_assertions::assert_not_impl_any!(Tracked<u8, [Slot<u8>; 1]>: Clone, Copy, Default);
