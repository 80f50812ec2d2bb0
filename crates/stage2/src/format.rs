//! Table formats: bits into meaning and back, and the shape of the tree.
//!
//! A [`Format`] touches no memory. [`Geometry`] says how many levels there are and
//! which bits of a frame number select an entry at each.

use core::fmt;

use flush::{Gfn, Mfn, Run};

use crate::entry::{Access, Entry, Leaf, Level, MAX_LEVELS};

pub mod arm64;
pub mod ept;
pub mod npt;
pub mod vtd;
mod words;

/// Why a format cannot express a leaf or a table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unencodable {
    /// No leaf, or no table, is possible at this level.
    Level,
    /// The frame is not aligned to the level, or beyond the physical width.
    Frame,
    /// The rights: none at all, or a mix the format does not know.
    Access,
    /// The memory type.
    Memory,
}

impl fmt::Display for Unencodable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Level => "no such entry at this level",
            Self::Frame => "frame misaligned or beyond the physical width",
            Self::Access => "rights that the format cannot express",
            Self::Memory => "memory type that the format cannot express",
        })
    }
}

impl core::error::Error for Unencodable {}

/// One table format: pure functions from words to meaning and back.
///
/// The word 0 is [`Entry::Empty`] in every format, and no other word is.
/// A word decodes to [`Entry::Inert`] only where the manual says that hardware never
/// caches it; in doubt a format says [`Entry::Leaf`], which costs a flush at worst.
pub trait Format {
    /// The shape of the tree.
    fn geometry(&self) -> Geometry;

    /// The highest level that may hold a leaf.
    fn largest_leaf(&self) -> Level;

    /// What the word means at this level.
    fn decode(&self, level: Level, raw: u64) -> Entry;

    /// The table that the word points at, if it does: what [`decode`](Self::decode) says,
    /// for the way down.
    #[inline]
    fn child(&self, level: Level, raw: u64) -> Option<Mfn> {
        match self.decode(level, raw) {
            Entry::Table(table) => Some(table),
            Entry::Empty | Entry::Inert | Entry::Leaf(_) => None,
        }
    }

    /// The word for a leaf at this level, [`tag`](Leaf::tag) and [`origin`](Leaf::origin)
    /// included: three and two bits that hardware ignores.
    ///
    /// # Errors
    ///
    /// See [`Unencodable`].
    fn leaf(&self, level: Level, leaf: Leaf) -> Result<u64, Unencodable>;

    /// The word for an entry at this level that points at a table one below.
    ///
    /// Tables allow everything; leaves decide.
    ///
    /// # Errors
    ///
    /// [`Unencodable::Level`] at level 0, [`Unencodable::Frame`] for a table beyond
    /// the physical width.
    fn table(&self, level: Level, table: Mfn) -> Result<u64, Unencodable>;

    /// The word of a leaf with its rights replaced and every other bit kept, the
    /// [`origin`](Leaf::origin) among them.
    ///
    /// # Errors
    ///
    /// [`Unencodable::Access`] if the format has no leaf with these rights.
    fn with_access(&self, level: Level, raw: u64, access: Access) -> Result<u64, Unencodable>;

    /// The bits in which the words of two pages may differ so that [`like`](Self::like)
    /// tells one from the other: the frame, and the marks that hardware sets by itself.
    ///
    /// A format that does not say has each page [decoded](Self::decode), and takes the longer
    /// way to clear one that is marked.
    #[inline]
    fn varying(&self) -> u64 {
        0
    }

    /// The leaf of a page's word that differs from the word of `leaf` in bits that
    /// [vary](Self::varying) alone.
    #[inline]
    fn like(&self, _raw: u64, leaf: Leaf) -> Leaf {
        leaf
    }

    /// Whether a valid entry may only change through empty and a flush.
    ///
    /// With such a format a split stops with [`Stop::Split`](crate::Stop::Split) once
    /// the old leaf is gone, and is finished after the flush.
    fn break_before_make(&self) -> bool {
        false
    }
}

/// The shape of a table tree.
///
/// Frame numbers count 4 KiB whatever the granule: with 16 KiB pages (`page_order` 2)
/// a leaf of level 0 spans 4 frames, and runs have to be aligned to that.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Geometry {
    page_order: u8,
    index_bits: u8,
    levels: u8,
    root_bits: u8,
    /// How many bits a frame number has.
    frame_bits: u8,
    /// The order of a root entry.
    top_order: u8,
    /// Selects the index in a page.
    index_mask: u64,
}

impl Geometry {
    /// A tree of `levels` levels over pages of 2^`page_order` frames.
    ///
    /// `index_bits` select an entry in a table page, `root_bits` one in the root: less
    /// for a root that is partly used, up to 4 more for a root of concatenated pages.
    /// `None` if there is no such tree: `levels` not in `1..=5`, `page_order` above 4,
    /// `index_bits` not in `1..=13`, `root_bits` not in `1..=index_bits + 4`, or more
    /// than 52 bits of frame number.
    #[must_use]
    pub const fn new(page_order: u8, index_bits: u8, levels: u8, root_bits: u8) -> Option<Self> {
        if levels == 0 || levels as usize > MAX_LEVELS || page_order > 4 {
            return None;
        }
        if index_bits == 0 || index_bits > 13 || root_bits == 0 || root_bits > index_bits + 4 {
            return None;
        }
        let tree = Self::build(page_order, index_bits, levels, root_bits);
        if tree.frame_bits > 52 { None } else { Some(tree) }
    }

    /// The tree of the x86 formats: 512 entries a page, `levels` in `1..=5`.
    pub(crate) const fn x86(levels: u8) -> Self {
        Self::build(0, 9, levels, 9)
    }

    /// The same tree, made by [`x86`](Self::x86), with what all of those share as constants
    /// that the compiler sees wherever this is inlined.
    #[inline]
    pub(crate) const fn known_x86(self) -> Self {
        Self { page_order: 0, index_bits: 9, index_mask: 511, ..self }
    }

    /// The arguments are as small as [`new`](Self::new) wants them: no sum exceeds 73.
    const fn build(page_order: u8, index_bits: u8, levels: u8, root_bits: u8) -> Self {
        let top_order = page_order + (levels - 1) * index_bits;
        Self {
            page_order,
            index_bits,
            levels,
            root_bits,
            frame_bits: top_order + root_bits,
            top_order,
            index_mask: (1 << index_bits) - 1,
        }
    }

    /// How many levels there are.
    #[must_use]
    #[inline]
    pub const fn levels(self) -> u8 {
        self.levels
    }

    /// The level of the root's entries.
    #[must_use]
    #[inline]
    pub const fn top(self) -> Level {
        match Level::new(self.levels - 1) {
            Some(level) => level,
            // Not reached: the constructors bound `levels`.
            None => Level::PAGE,
        }
    }

    /// The lg2 of the page size in frames: 0 for 4 KiB, 2 for 16 KiB, 4 for 64 KiB.
    #[must_use]
    #[inline]
    pub const fn page_order(self) -> u8 {
        self.page_order
    }

    /// The lg2 of how many entries a table page has.
    #[must_use]
    #[inline]
    pub const fn index_bits(self) -> u8 {
        self.index_bits
    }

    /// The lg2 of how many frames one entry at `level` spans.
    #[must_use]
    #[inline]
    pub const fn order(self, level: Level) -> u8 {
        self.page_order + level.get() * self.index_bits
    }

    /// How many entries a table page has.
    #[must_use]
    #[inline]
    pub const fn entries(self) -> usize {
        1 << self.index_bits
    }

    /// How many entries the root has, over all of its pages.
    #[must_use]
    #[inline]
    pub const fn root_entries(self) -> usize {
        1 << self.root_bits
    }

    /// How many bits an input address has.
    #[must_use]
    #[inline]
    pub const fn address_bits(self) -> u8 {
        12 + self.frame_bits
    }

    /// The run of every frame the tree can map.
    #[must_use]
    #[inline]
    pub const fn space(self) -> Run {
        Run::block(Gfn::new(0), self.frame_bits)
    }

    /// Whether the tree can map `frame`.
    #[must_use]
    #[inline]
    pub const fn contains(self, frame: Gfn) -> bool {
        frame.get() >> self.frame_bits == 0
    }

    /// The run that the entry for `frame` at `level` spans.
    #[must_use]
    #[inline]
    pub const fn span(self, level: Level, frame: Gfn) -> Run {
        Run::block(frame, self.order(level))
    }

    /// Whether `run` begins and ends at borders of the granule's pages.
    #[must_use]
    pub(crate) fn cuts_no_page(self, run: Run) -> bool {
        let inside = !(u64::MAX << self.page_order);
        run.first().get() & inside == 0 && run.last().get() & inside == inside
    }

    /// The page and the index in it of the entry for `frame` at `level`, where `table`
    /// is the (first) page of the table at that level. `frame` is inside the space.
    #[must_use]
    #[inline]
    pub const fn slot(self, table: Mfn, level: Level, frame: Gfn) -> (Mfn, usize) {
        if level.get() + 1 < self.levels {
            (table, self.index(self.order(level), frame))
        } else {
            self.root_slot(table, frame)
        }
    }

    /// The page and the index in it of the root's entry for `frame`, inside the space.
    #[inline]
    pub(crate) const fn root_slot(self, root: Mfn, frame: Gfn) -> (Mfn, usize) {
        // Zero but for a concatenated root.
        let page = frame.get() >> (self.top_order + self.index_bits);
        let table = Mfn::new(root.get().saturating_add(page << self.page_order));
        (table, self.index(self.top_order, frame))
    }

    /// The index in its page of the entry for `frame` that spans 2^`order` frames.
    #[inline]
    pub(crate) const fn index(self, order: u8, frame: Gfn) -> usize {
        ((frame.get() >> order) & self.index_mask) as usize
    }

    /// The order of a root entry, and by how much it shrinks from level to level.
    #[inline]
    pub(crate) const fn orders(self) -> (u8, u8) {
        (self.top_order, self.index_bits)
    }
}
