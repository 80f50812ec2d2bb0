//! A guest's physical map: which page is behind which guest frame number.
//!
//! [`P2m`] owns one table tree. Its edits are lent the record of a batch
//! ([`Skipped`]); what an entry held before decides what goes on it. Nothing is flushed
//! here, and nothing that was mapped may be given away before the batch was.
//!
//! The embedder keeps a `P2m` behind a lock: edits take `&mut self`. That lock is not
//! held while a batch is flushed.

use core::marker::PhantomData;

use flush::{Gfn, Gone, Mfn, Run, Skipped, Tlb};
use stage2::{
    Access, Budget, Emptied, Entry, Format, Found, Leaf, Level, Likely, Near, Over, PageError,
    Path, Rest, Shown, Sink, Stopped, TableMemory, Tables, Tally, Unencodable, Unheld,
};

use crate::{
    error::{ClearError, NewError, SetError},
    kind::PageKind,
    record::{Edit, Walkers},
    teardown::Teardown,
};

/// The physical map of one guest.
///
/// `K` says who walks its tables: [`Tlb`] for the CPUs alone,
/// [`Shared`](flush::Shared) where a VT-d unit uses the same tables. A shared table
/// records every change for both kinds.
///
/// Its tables are not handed out: an edit past it would make a proof that knows nothing of
/// page kinds, or of shadows that still show the page.
///
/// ```compile_fail,E0624
/// fn edit<F: stage2::Format, M: stage2::TableMemory>(map: &p2m::P2m<F, M>) {
///     let tables = map.tables();
/// }
/// ```
#[derive(Debug)]
pub struct P2m<F, M, K = Tlb> {
    format: F,
    memory: M,
    root: Mfn,
    /// The way to the last page that was cleared.
    path: Path,
    walkers: PhantomData<fn() -> K>,
}

/// What a guest frame number shows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mapping {
    /// The machine frame behind the guest frame that was asked for.
    pub mfn: Mfn,
    /// All guest frames of the entry: one, or a large leaf's.
    pub run: Run,
    /// What it is, or `None` for an entry that somebody else wrote, with bits that no
    /// kind has.
    pub kind: Option<PageKind>,
    /// What CPUs may do now: the kind's rights, less what
    /// [`restrict`](P2m::restrict) took.
    pub access: Access,
}

/// What a frame number must show for [`P2m::clear`] to clear it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Expected {
    /// This machine frame,
    pub mfn: Mfn,
    /// as this kind. For a grant that fixes the rights.
    pub kind: PageKind,
}

/// A mapping that [`P2m::set`] replaced, and the proof for the page behind it.
#[derive(Debug)]
#[must_use = "the page behind it stays reachable until the batch is flushed"]
pub struct Displaced<'id, K: Walkers> {
    /// What was there.
    pub mapping: Mapping,
    /// Its flush is on record.
    pub gone: Gone<'id, K>,
}

impl<F: Format, M: TableMemory, K: Walkers> P2m<F, M, K> {
    /// An empty map with a root of its own.
    ///
    /// Its [`GuestCpus`](crate::GuestCpus) must be new as well. A dropped map leaks its
    /// tables; [`teardown`](Self::teardown) gives them back.
    ///
    /// # Errors
    ///
    /// See [`NewError`].
    pub fn new(format: F, memory: M) -> Result<Self, NewError> {
        if format.break_before_make() {
            return Err(NewError::BreakBeforeMake);
        }
        let root = memory.link(memory.allocate().ok_or(NewError::NoTable)?);
        Ok(Self { format, memory, root, path: Path::NEW, walkers: PhantomData })
    }

    /// The page of the root, for an EPTP, a VMCB or a context entry.
    #[must_use]
    pub fn root(&self) -> Mfn {
        self.root
    }

    /// The tables: for this crate's eyes, since an edit past the p2m would make a proof
    /// that knows nothing of page kinds, of its lock, or of shadows.
    #[must_use]
    #[inline]
    pub(crate) fn tables(&self) -> Tables<'_, F, M> {
        Tables { format: &self.format, memory: &self.memory, root: self.root }
    }

    /// What `gfn` shows, or `None` for nothing, also beyond the space.
    #[must_use]
    pub fn get(&self, gfn: Gfn) -> Option<Mapping> {
        mapping(stage2::lookup(self.tables(), gfn)?, gfn)
    }

    /// Maps 2^`order` frames from `gfn` on to those from `mfn` on, as `kind`.
    ///
    /// What was there gives way only if it is the guest's own memory, of this size or
    /// part of a larger leaf, which is split. If it showed another page, that is returned:
    /// the page may be another's as soon as the batch was flushed, not before. A page that
    /// only changes its kind is still mapped, so it is not: the change is on record, and
    /// nothing is given away. Setting what is there already changes nothing.
    ///
    /// # Errors
    ///
    /// See [`SetError`].
    pub fn set<'id>(
        &mut self,
        gfn: Gfn,
        order: u8,
        mfn: Mfn,
        kind: PageKind,
        skipped: &mut Skipped<'id>,
    ) -> Result<Option<Displaced<'id, K>>, SetError> {
        let tables = self.tables();
        let leaf = kind.leaf(mfn);
        // Everything is refused before the first change.
        let level = self.level(order, kind)?;
        let block = Run::block(gfn, order);
        if block.first() != gfn {
            return Err(SetError::Unencodable(Unencodable::Frame));
        }
        self.format.leaf(level, leaf).map_err(SetError::Unencodable)?;
        let found = stage2::lookup(tables, gfn).ok_or(SetError::OutOfRange)?;
        let Some(was) = mapping(found, gfn) else {
            let mut edit = Edit::<K, _>::new(skipped, Unheld);
            return match stage2::map(tables, gfn, level, leaf, Over::Vacant, &mut edit) {
                Ok(_) => Ok(None),
                Err(error) => Err(error.into()),
            };
        };
        if !was.kind.is_some_and(PageKind::gives_way) {
            return Err(SetError::Protected(was));
        }
        if found.level < level {
            return Err(SetError::Occupied);
        }
        let Entry::Leaf(old) = found.entry else { return Err(SetError::Contended) };
        let old = Leaf { mfn: was.mfn, ..old };
        if old.same_mapping(&leaf) {
            return Ok(None);
        }
        let mut edit = Edit::<K, _>::new(skipped, Unheld);
        if found.level > level {
            stage2::split(tables, gfn, level, &mut edit)?;
        }
        stage2::map(tables, gfn, level, leaf, Over::Expected(old), &mut edit)?;
        let mapping = Mapping { run: block, ..was };
        let replaced = edit.into_replaced().filter(|_| was.mfn != mfn);
        Ok(replaced.map(|gone| Displaced { mapping, gone }))
    }

    /// Clears the one frame `gfn`, if it shows what is expected.
    ///
    /// This is how a grant is unmapped, or a page of RAM taken away. The proof goes to
    /// the batch together with the page. Tables stay where they are: a large leaf that
    /// the frame is part of is split, an emptied table stays linked.
    ///
    /// # Errors
    ///
    /// See [`ClearError`].
    #[inline]
    pub fn clear<'id>(
        &mut self,
        gfn: Gfn,
        expected: Expected,
        skipped: &mut Skipped<'id>,
    ) -> Result<Gone<'id, K>, ClearError> {
        self.clearing().clear(gfn, expected, skipped)
    }

    /// To clear several frames, each as [`clear`](Self::clear) does.
    #[inline]
    pub fn clearing(&mut self) -> Clearing<'_, F, M, K> {
        let Self { format, memory, root, path, walkers: _ } = self;
        let tables = Tables { format: &*format, memory: &*memory, root: *root };
        // What is cleared most.
        let kind = PageKind::GrantReadWrite;
        let likely = Likely::new(format, kind.leaf(Mfn::new(0)));
        Clearing { near: Near::new(tables, path), kind, likely, walkers: PhantomData }
    }

    /// Takes rights from every mapping of the range, or gives them back: each gets
    /// those of `allowed` that its kind has.
    ///
    /// A large leaf that the range covers in part is split. Entries of no known kind
    /// stay as they are.
    ///
    /// # Errors
    ///
    /// As [`stage2::protect`]; `allowed` has to be something that a leaf of the format
    /// can say, for every kind in the range.
    pub fn restrict(
        &mut self,
        rest: Rest,
        allowed: Access,
        budget: &mut Budget,
        skipped: &mut Skipped<'_>,
    ) -> Result<Tally, Stopped> {
        let taken = Access::ALL.without(allowed);
        let mut edit = Edit::<K, _>::new(skipped, Unheld);
        stage2::protect(self.tables(), rest, budget, &mut edit, |leaf| {
            PageKind::from_tag(leaf.tag).map_or(leaf.access, |kind| kind.access().without(taken))
        })
    }

    /// Clears every mapping of the range, whatever its kind, into `sink`.
    ///
    /// Nothing is compared with an expectation: the caller answers for grants and
    /// foreign pages in the range, whose frames come out like all others. Tables that
    /// are emptied stay linked or go on record as `emptied` says.
    ///
    /// # Errors
    ///
    /// As [`stage2::clear`]; what was cleared before the rest is on record and in
    /// `sink`.
    pub fn clear_range<'id>(
        &mut self,
        rest: Rest,
        budget: &mut Budget,
        emptied: Emptied,
        skipped: &mut Skipped<'id>,
        sink: impl Sink<'id, K>,
    ) -> Result<Tally, Stopped> {
        let mut edit = Edit::new(skipped, sink);
        stage2::clear(self.tables(), rest, budget, emptied, &mut edit)
    }

    /// The end of the map: see [`Teardown`].
    pub fn teardown(self) -> Teardown<F, M, K> {
        Teardown::new(self)
    }

    /// The level whose leaves have 2^`order` frames and may be of this kind.
    fn level(&self, order: u8, kind: PageKind) -> Result<Level, SetError> {
        let geometry = self.format.geometry();
        let mut level = Level::PAGE;
        while geometry.order(level) < order && !kind.single_pages_only() {
            level = level
                .above()
                .filter(|above| *above <= self.format.largest_leaf())
                .ok_or(SetError::Order(order))?;
        }
        if geometry.order(level) == order { Ok(level) } else { Err(SetError::Order(order)) }
    }
}

/// Frames of one map that are cleared one after the other, all under its lock.
#[derive(Debug)]
pub struct Clearing<'p, F, M, K = Tlb> {
    near: Near<'p, 'p, F, M>,
    /// The kind of the last page,
    kind: PageKind,
    /// and what pages of that kind are like.
    likely: Likely,
    walkers: PhantomData<fn() -> K>,
}

impl<F: Format, M: TableMemory, K: Walkers> Clearing<'_, F, M, K> {
    /// The entry of the single page at `gfn`, if it shows what is expected, to be cleared with
    /// that of another table. Nothing is changed.
    ///
    /// `None` says nothing about the page: [`clear`](Self::clear) looks harder.
    #[inline(always)]
    pub fn shown(&mut self, gfn: Gfn, expected: Expected) -> Option<Shown<'_, K>> {
        let Expected { mfn, kind } = expected;
        self.expect(kind);
        self.near.shown(gfn, mfn, &self.likely)
    }

    /// As [`P2m::get`].
    #[must_use]
    pub fn get(&self, gfn: Gfn) -> Option<Mapping> {
        mapping(stage2::lookup(self.near.tables(), gfn)?, gfn)
    }

    #[inline(always)]
    fn expect(&mut self, kind: PageKind) {
        if self.kind != kind {
            self.kind = kind;
            self.likely = Likely::new(self.near.tables().format, kind.leaf(Mfn::new(0)));
        }
    }

    /// As [`P2m::clear`].
    ///
    /// # Errors
    ///
    /// See [`ClearError`].
    #[inline]
    pub fn clear<'id>(
        &mut self,
        gfn: Gfn,
        expected: Expected,
        skipped: &mut Skipped<'id>,
    ) -> Result<Gone<'id, K>, ClearError> {
        match self.clear_single(gfn, expected, skipped) {
            Ok(gone) => Ok(gone),
            Err(error) => self.clear_otherwise(gfn, expected, error, skipped),
        }
    }

    #[inline(always)]
    fn clear_single<'id>(
        &mut self,
        gfn: Gfn,
        Expected { mfn, kind }: Expected,
        skipped: &mut Skipped<'id>,
    ) -> Result<Gone<'id, K>, PageError> {
        let expected = |leaf: &Leaf| leaf.mfn == mfn && leaf.tag == kind.tag();
        self.expect(kind);
        self.near.clear(gfn, mfn, skipped, &self.likely, expected)
    }

    /// The single leaf was not there: a large one may have to be split.
    #[cold]
    #[inline(never)]
    fn clear_otherwise<'id>(
        &mut self,
        gfn: Gfn,
        expected: Expected,
        error: PageError,
        skipped: &mut Skipped<'id>,
    ) -> Result<Gone<'id, K>, ClearError> {
        let PageError::Large(_) = error else { return Err(ClearError::single(error, gfn)) };
        let tables = self.near.tables();
        let was = stage2::lookup(tables, gfn).and_then(|found| mapping(found, gfn));
        let was = was.ok_or(ClearError::Absent)?;
        if was.mfn != expected.mfn || was.kind != Some(expected.kind) {
            return Err(ClearError::Unexpected(was));
        }
        // A split adds a table and takes none away: what is known of the way stays right.
        let mut edit = Edit::<K, _>::new(skipped, Unheld);
        stage2::split(tables, gfn, Level::PAGE, &mut edit)?;
        self.clear_single(gfn, expected, skipped).map_err(|error| ClearError::single(error, gfn))
    }
}

fn mapping(found: Found, gfn: Gfn) -> Option<Mapping> {
    let (leaf, mfn) = found.leaf_at(gfn)?;
    let kind = PageKind::from_tag(leaf.tag);
    Some(Mapping { mfn, run: found.run, kind, access: leaf.access })
}

#[cfg(test)]
#[path = "table_tests.rs"]
mod tests;
