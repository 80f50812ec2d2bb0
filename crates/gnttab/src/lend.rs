//! A granted page lent for one copy, directly or passed on by one domain.
//!
//! Lending looks at the shared entry like a map does, takes a reference on the page and
//! a pin, and sets the in-use bits until the copy is over. An entry that passes on what
//! a third domain granted has no page of its own: it is a [`Passage`], pinned for as
//! long as the third domain's entry, whose page it leads to.

use flush::DomainId;

use crate::{
    domain::{GrantedFrame, PageError},
    entry::{Rights, Sorts, Target, Window},
    pin::{Grant, PageReference, Pin, Purpose},
    table::{AccessError, Found, GrantStorage, GrantTable},
};

/// What a copy asks a granter's table for.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Loan {
    /// In this table.
    pub(crate) reference: u32,
    /// Whom it has to be granted to.
    pub(crate) holder: DomainId,
    pub(crate) rights: Rights,
    pub(crate) sorts: Sorts,
}

/// What a table lent.
#[derive(Debug)]
pub(crate) enum Lent {
    /// A page, of which the copy may touch what is in the window.
    Page { pin: Pin, window: Window },
    /// What `granter` granted to the owner of this table.
    Forward { passage: Passage, granter: DomainId, reference: u32 },
}

/// An entry that is passed through: pinned, with no page of its own.
#[derive(Debug, PartialEq, Eq)]
#[must_use = "dropping it leaves the entry in use for ever; end it after its page is released"]
pub(crate) struct Passage(Grant);

impl Passage {
    /// Whose entry it is.
    pub(crate) const fn granter(&self) -> DomainId {
        self.0.granter
    }
}

static_assertions::assert_not_impl_any!(Passage: Clone, Copy, Default);

impl<S: GrantStorage> GrantTable<S> {
    /// Begins a copy's access: checks the entry, marks it in use, counts pin and page.
    ///
    /// A grant that is mapped lends the page that is mapped. After an error nothing is
    /// held, and no in-use bit stays set that this set.
    pub(crate) fn lend(
        &mut self,
        loan: Loan,
        clamp: impl Fn(usize, usize) -> usize,
        get_page: impl FnOnce(GrantedFrame) -> Result<PageReference, PageError>,
    ) -> Result<Lent, AccessError> {
        let Loan { reference, holder, rights, sorts } = loan;
        let grant = Grant { granter: self.owner, reference, rights, purpose: Purpose::Copy };
        let page = |frame, window| {
            let page = get_page(frame).map_err(AccessError::Page)?;
            Ok(Lent::Page { pin: Pin::granted(page, grant), window })
        };
        let (_, lent) = self.begin(grant, holder, sorts, clamp, |found| match found {
            Found::Mapped(mfn) => page(GrantedFrame::Pinned(mfn), Window::PAGE),
            Found::Entry(Target::Page { frame, window }) => {
                page(GrantedFrame::Number(frame), window)
            }
            Found::Entry(Target::Forward { granter, .. }) if granter == grant.granter => {
                Err(AccessError::Refused)
            }
            Found::Entry(Target::Forward { granter, reference }) => {
                Ok(Lent::Forward { passage: Passage(grant), granter, reference })
            }
        })?;
        Ok(lent)
    }

    /// Ends a passage, whose page was given up or never got.
    pub(crate) fn end_passage(&mut self, passage: Passage) {
        let Passage(grant) = passage;
        self.unpin(grant.into());
    }
}
