//! Linear owners of what a mapping or a copy holds: page, type reference, pin.
//!
//! Holding a [`Pin`] says that its page is still counted, whatever became of the
//! mapping. It goes into a batch with the proof that the mapping is gone, and comes
//! out as `Released<Pin>`, which is the only thing that drops the references.

use flush::{DomainId, Mfn};

use crate::{active::Use, entry::Rights};

/// One reference on a page, and perhaps one on its writable type.
///
/// It cannot be cloned: one taken is one to drop.
#[derive(Debug, PartialEq, Eq)]
#[must_use = "dropping it leaks a reference; it belongs into the mapping it was taken for"]
pub struct PageReference {
    mfn: Mfn,
    typed: bool,
}

impl PageReference {
    /// A reference that the embedder just took on `mfn`.
    ///
    /// `typed` says that a writable type reference was taken with it. The embedder
    /// answers for both: call this only where the counters go up.
    pub const fn taken(mfn: Mfn, typed: bool) -> Self {
        Self { mfn, typed }
    }

    /// The page.
    #[must_use]
    pub const fn mfn(&self) -> Mfn {
        self.mfn
    }

    /// Whether a writable type reference goes with it.
    #[must_use]
    pub const fn typed(&self) -> bool {
        self.typed
    }
}

/// What a grant is held for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Purpose {
    /// A mapping, until it is unmapped and flushed.
    Map,
    /// One copy, until its bytes are moved.
    Copy,
}

/// The grant behind a pin.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Grant {
    /// Whose page it is.
    pub granter: DomainId,
    /// Reference in the granter's table.
    pub reference: u32,
    /// What the holder could do.
    pub rights: Rights,
    /// What it is held for.
    pub purpose: Purpose,
}

/// What a page is held for, in one word: as the maptrack keeps it, and as a batch does.
///
/// From bit 0 flags, from 16 the granter, from 32 the reference: what is compared is in the
/// lower half.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(transparent)]
pub(crate) struct Holding(u64);

/// There is a grant behind it.
const GRANTED: u64 = 1;
/// A writable type reference goes with it.
const TYPED: u64 = 2;
/// An unmap is at work on it, or is done with it. Only the maptrack knows this.
const TAKEN: u64 = 4;
/// Only for reading, and for a copy: together they say where the pin's [counter](Use) is.
const READ_ONLY: u64 = 8;
const COPY: u64 = 16;
/// The granter, and that there is one.
const WHOSE: u64 = 0xffff << 16 | GRANTED;

impl Holding {
    /// Nothing.
    pub(crate) const NOTHING: Self = Self(0);

    const fn of(grant: Grant, typed: bool) -> Self {
        let Grant { granter, reference, rights, purpose } = grant;
        let rights = match rights {
            Rights::Read => READ_ONLY,
            Rights::ReadWrite => 0,
        };
        let purpose = match purpose {
            Purpose::Map => 0,
            Purpose::Copy => COPY,
        };
        let typed = if typed { TYPED } else { 0 };
        Self((reference as u64) << 32 | Self::whose(granter) | rights | purpose | typed)
    }

    const fn whose(granter: DomainId) -> u64 {
        (granter.get() as u64) << 16 | GRANTED
    }

    /// What a mapping of a grant of `granter` holds that no unmap is at work on, whatever else
    /// it is.
    #[inline]
    pub(crate) const fn is_live_of(self, granter: DomainId) -> bool {
        self.0 & (WHOSE | TAKEN) == Self::whose(granter)
    }

    /// Whether it is of a grant of `granter`.
    #[inline]
    pub(crate) const fn is_of(self, granter: DomainId) -> bool {
        self.0 & WHOSE == Self::whose(granter)
    }

    #[inline]
    pub(crate) const fn reference(self) -> u32 {
        (self.0 >> 32) as u32
    }

    #[inline]
    pub(crate) const fn granter(self) -> DomainId {
        DomainId::new((self.0 >> 16) as u16)
    }

    #[inline]
    pub(crate) const fn rights(self) -> Rights {
        if self.0 & READ_ONLY == 0 { Rights::ReadWrite } else { Rights::Read }
    }

    #[inline]
    pub(crate) const fn is_granted(self) -> bool {
        self.0 & GRANTED != 0
    }

    #[inline]
    const fn typed(self) -> bool {
        self.0 & TYPED != 0
    }

    #[inline]
    pub(crate) const fn taken(self) -> Self {
        Self(self.0 | TAKEN)
    }

    #[inline]
    pub(crate) const fn put_back(self) -> Self {
        Self(self.0 & !TAKEN)
    }

    /// The grant, or `None` if there is none behind it.
    #[inline]
    pub(crate) const fn grant(self) -> Option<Grant> {
        if !self.is_granted() {
            return None;
        }
        Some(Grant {
            granter: self.granter(),
            reference: self.reference(),
            rights: self.rights(),
            purpose: if self.0 & COPY == 0 { Purpose::Map } else { Purpose::Copy },
        })
    }

    /// The counter that a pin on it moves.
    #[inline]
    pub(crate) const fn pin_use(self) -> Use {
        Use::at(self.0 as u32)
    }

    /// Whether its holder may have written to the page through its own translations.
    ///
    /// Whoever moves the bytes of a copy notes it then.
    #[inline]
    pub(crate) const fn wrote(self) -> bool {
        self.0 & (GRANTED | READ_ONLY | COPY) == GRANTED
    }
}

impl From<Grant> for Holding {
    /// Without a type reference.
    fn from(grant: Grant) -> Self {
        Self::of(grant, false)
    }
}

/// What a mapping held until the flush, or a copy until its end: a counted page, and the
/// grant it came from.
#[derive(Debug)]
#[must_use = "dropping it leaks the page; it belongs into a batch"]
pub struct Pin {
    mfn: Mfn,
    holding: Holding,
}

impl Pin {
    /// The pin of a grant.
    pub(crate) const fn granted(page: PageReference, grant: Grant) -> Self {
        let PageReference { mfn, typed } = page;
        Self { mfn, holding: Holding::of(grant, typed) }
    }

    /// A page with no grant behind it: RAM that lost its place to a mapping, or the
    /// caller's own page in a copy.
    pub(crate) const fn ungranted(page: PageReference) -> Self {
        let PageReference { mfn, typed } = page;
        Self { mfn, holding: Holding(if typed { TYPED } else { 0 }) }
    }

    /// The pin that the maptrack's entry stood for, on the page of the active entry.
    #[inline]
    pub(crate) const fn stored(mfn: Mfn, holding: Holding) -> Self {
        Self { mfn, holding }
    }

    /// What the maptrack's entry keeps, which stands for it from then on.
    pub(crate) fn into_stored(self) -> Holding {
        self.holding
    }

    #[inline]
    pub(crate) const fn holding(&self) -> Holding {
        self.holding
    }

    /// The page, of which there is a reference to drop.
    #[must_use]
    #[inline]
    pub const fn mfn(&self) -> Mfn {
        self.mfn
    }

    /// Whether there is a writable type reference to drop with it.
    #[must_use]
    #[inline]
    pub const fn typed(&self) -> bool {
        self.holding.typed()
    }

    /// The grant, or `None` for a page that a mapping displaced, and for the caller's own
    /// page in a copy.
    #[must_use]
    #[inline]
    pub const fn grant(&self) -> Option<Grant> {
        self.holding.grant()
    }
}

static_assertions::assert_not_impl_any!(PageReference: Clone, Copy, Default);
static_assertions::assert_not_impl_any!(Pin: Clone, Copy, Default);
