//! What one table entry means, whatever its format.
//!
//! [`Entry`] is the only thing the walker knows about an entry; a
//! [`Format`](crate::Format) turns raw words into it and back.

use core::fmt;
use core::ops::BitOr;

use flush::Mfn;

/// The most levels any table has.
pub const MAX_LEVELS: usize = 5;

/// A level of a table, counted from the one that can only hold leaves.
///
/// Level 0 maps single pages. The manuals' own names for levels appear in the
/// format files only.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Level(u8);

impl Level {
    /// The level whose entries each map one page of the table's granule.
    pub const PAGE: Self = Self(0);
    /// One above: 2 MiB with 4 KiB granules.
    pub const ONE: Self = Self(1);
    /// Two above: 1 GiB with 4 KiB granules.
    pub const TWO: Self = Self(2);
    /// Three above: 512 GiB with 4 KiB granules.
    pub const THREE: Self = Self(3);

    /// The level with this number, or `None` if no table has that many.
    #[must_use]
    #[inline]
    pub const fn new(number: u8) -> Option<Self> {
        if (number as usize) < MAX_LEVELS { Some(Self(number)) } else { None }
    }

    /// The number, 0 for single pages.
    #[must_use]
    #[inline]
    pub const fn get(self) -> u8 {
        self.0
    }

    /// The next level towards single pages, or `None` at [`Level::PAGE`].
    #[must_use]
    #[inline]
    pub const fn below(self) -> Option<Self> {
        match self.0.checked_sub(1) {
            Some(number) => Some(Self(number)),
            None => None,
        }
    }

    /// The next level towards the root, or `None` where no table goes further.
    #[must_use]
    #[inline]
    pub const fn above(self) -> Option<Self> {
        Self::new(self.0.saturating_add(1))
    }

    /// The level in the two low bits of `bits`, which is enough for every level that
    /// leaves can have; the rest is dropped.
    #[inline]
    pub(crate) const fn from_low_bits(bits: u64) -> Self {
        Self((bits & 3) as u8)
    }

    /// The number as an array index, below [`MAX_LEVELS`].
    #[inline]
    pub(crate) const fn slot(self) -> usize {
        self.0 as usize
    }
}

impl fmt::Debug for Level {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Level({})", self.0)
    }
}

/// What a leaf allows: any mix of read, write and execute.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Access(u8);

impl Access {
    /// Nothing at all; no format can hold a leaf with it.
    pub const NONE: Self = Self(0);
    /// Reads.
    pub const READ: Self = Self(1);
    /// Writes.
    pub const WRITE: Self = Self(2);
    /// Instruction fetches; a table that serves devices ignores it.
    pub const EXECUTE: Self = Self(4);
    /// Reads and writes.
    pub const READ_WRITE: Self = Self(3);
    /// All three.
    pub const ALL: Self = Self(7);

    /// Whether everything in `other` is allowed.
    #[must_use]
    #[inline]
    pub const fn allows(self, other: Self) -> bool {
        self.0 & other.0 == other.0
    }

    /// This, less everything in `other`.
    #[must_use]
    #[inline]
    pub const fn without(self, other: Self) -> Self {
        Self(self.0 & !other.0)
    }

    /// Read is bit 0, write is bit 1, execute is bit 2; the rest is dropped.
    #[must_use]
    #[inline]
    pub const fn from_bits(bits: u8) -> Self {
        Self(bits & 7)
    }

    /// Read is bit 0, write is bit 1, execute is bit 2.
    #[must_use]
    #[inline]
    pub const fn bits(self) -> u8 {
        self.0
    }
}

impl BitOr for Access {
    type Output = Self;

    #[inline]
    fn bitor(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }
}

impl fmt::Debug for Access {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mark = |part, letter| if self.allows(part) { letter } else { '-' };
        write!(
            f,
            "Access({}{}{})",
            mark(Self::READ, 'r'),
            mark(Self::WRITE, 'w'),
            mark(Self::EXECUTE, 'x')
        )
    }
}

/// How a CPU may cache a leaf's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum MemoryType {
    /// Every access goes to the bus, in order.
    Uncacheable,
    /// Writes may be gathered; nothing is cached.
    WriteCombining,
    /// Reads are cached, writes go through.
    WriteThrough,
    /// Reads are cached, writes drop the line.
    WriteProtected,
    /// Ordinary memory.
    WriteBack,
}

/// A few bits of a leaf that hardware ignores and the embedder may use, `0..=7`.
///
/// A p2m keeps the kind of the page here.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Tag(u8);

impl Tag {
    /// How many bits every format has for it.
    pub const BITS: u32 = 3;

    /// The tag with this value, or `None` above 7.
    #[must_use]
    #[inline]
    pub const fn new(value: u8) -> Option<Self> {
        if value < 1 << Self::BITS { Some(Self(value)) } else { None }
    }

    /// The value, `0..=7`.
    #[must_use]
    #[inline]
    pub const fn get(self) -> u8 {
        self.0
    }

    /// The tag in the low bits of `bits`; the rest is dropped.
    #[must_use]
    #[inline]
    pub const fn from_low_bits(bits: u64) -> Self {
        Self((bits & ((1 << Self::BITS) - 1)) as u8)
    }
}

/// A valid mapping: hardware may hold it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Leaf {
    /// The first frame it shows, aligned to the leaf's order.
    pub mfn: Mfn,
    /// What it allows.
    pub access: Access,
    /// How a CPU may cache it.
    pub memory: MemoryType,
    /// The embedder's bits.
    pub tag: Tag,
    /// The level of the leaf that this one was split from, or [`Level::PAGE`].
    ///
    /// Hardware may hold the old leaf until the batch that split it is flushed, and an
    /// invalidation smaller than a cached leaf need not drop it. So whoever takes a part
    /// away, in whichever batch, records it at the order of the old leaf. The mark stays
    /// for as long as the part shows the same frame. A leaf put where nothing was has
    /// none: through a large one from before, hardware reaches the page that was there
    /// then, and the batch that took that page away holds it until its own flush.
    pub origin: Level,
    /// Whether hardware has used it since it was written, or used what it replaced if that
    /// showed the same frame.
    pub accessed: bool,
    /// Whether hardware has written through it since it was written.
    pub dirty: bool,
}

impl Leaf {
    /// A leaf of ordinary memory with tag 0, neither accessed nor dirty.
    #[must_use]
    #[inline]
    pub const fn new(mfn: Mfn, access: Access) -> Self {
        Self {
            mfn,
            access,
            memory: MemoryType::WriteBack,
            tag: Tag(0),
            origin: Level::PAGE,
            accessed: false,
            dirty: false,
        }
    }

    /// The same leaf with another tag.
    #[must_use]
    #[inline]
    pub const fn tagged(self, tag: Tag) -> Self {
        Self { tag, ..self }
    }

    /// The same leaf with another memory type.
    #[must_use]
    #[inline]
    pub const fn cached(self, memory: MemoryType) -> Self {
        Self { memory, ..self }
    }

    /// Whether both show the same thing in the same way: all but the bits that
    /// hardware sets by itself, and [`origin`](Self::origin).
    #[must_use]
    #[inline]
    pub fn same_mapping(&self, other: &Self) -> bool {
        self.mfn == other.mfn
            && self.access == other.access
            && self.memory == other.memory
            && self.tag == other.tag
    }
}

/// What one table entry means.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Entry {
    /// All zero: nothing here, nothing in the whole span.
    Empty,
    /// Not zero, yet hardware neither uses nor caches it: a note of the embedder,
    /// or a word that the manual calls misconfigured.
    Inert,
    /// The next table down.
    Table(Mfn),
    /// A mapping of the entry's whole span.
    Leaf(Leaf),
}
