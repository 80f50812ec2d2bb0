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

impl Grant {
    /// The counter that a pin on it moves.
    #[inline]
    pub(crate) const fn pin_use(self) -> Use {
        match (self.purpose, self.rights) {
            (Purpose::Map, Rights::Read) => Use::HostRead,
            (Purpose::Map, Rights::ReadWrite) => Use::HostWrite,
            (Purpose::Copy, Rights::Read) => Use::CopyRead,
            (Purpose::Copy, Rights::ReadWrite) => Use::CopyWrite,
        }
    }
}

/// What a mapping held until the flush, or a copy until its end: a counted page, and the
/// grant it came from.
#[derive(Debug)]
#[must_use = "dropping it leaks the page; it belongs into a batch"]
pub struct Pin {
    page: PageReference,
    grant: Option<Grant>,
}

impl Pin {
    /// The pin of a grant.
    pub(crate) const fn granted(page: PageReference, grant: Grant) -> Self {
        Self { page, grant: Some(grant) }
    }

    /// A page with no grant behind it: RAM that lost its place to a mapping, or the
    /// caller's own page in a copy.
    pub(crate) const fn ungranted(page: PageReference) -> Self {
        Self { page, grant: None }
    }

    /// Takes it apart for the maptrack, whose entry stands for it from then on.
    pub(crate) fn into_stored(self) -> Option<(Grant, bool)> {
        let Self { page: PageReference { mfn: _, typed }, grant } = self;
        Some((grant?, typed))
    }

    /// The reference to drop.
    #[inline]
    pub const fn page(&self) -> &PageReference {
        &self.page
    }

    /// The grant, or `None` for a page that a mapping displaced, and for the caller's own
    /// page in a copy.
    #[must_use]
    #[inline]
    pub const fn grant(&self) -> Option<Grant> {
        self.grant
    }
}

static_assertions::assert_not_impl_any!(PageReference: Clone, Copy, Default);
static_assertions::assert_not_impl_any!(Pin: Clone, Copy, Default);
