//! Copies between granted pages and the caller's own.
//!
//! [`copy`] takes hold of both pages, has the embedder move the bytes, and gives both
//! back, the later one first. No two tables are locked at once, and none while bytes
//! move.
//!
//! A copy flushes nothing. It makes no translation: the bytes move through the
//! hypervisor's own mapping of memory, which no guest and no device can use, and that use
//! is over when [`Domain::copy_page`] returns. The pins still leave through a batch, with
//! the proof that no table ever showed the page to the caller on their behalf; where the
//! page is mapped as well, the mapping's own pin stays until its own flush.

use flush::{DomainId, Gfn};

use crate::{
    abi::{CopyPlace, DOMID_SELF, Errno, GrantCopy, PAGE_BYTES, Status, copy_flags},
    domain::{Action, Domain, GrantedFrame, NotCopied, PageBytes, PageCopy},
    entry::{Rights, Sorts, Window},
    lend::{Lent, Loan, Passage},
    map::untouched,
    pin::Pin,
    release::{PinBatch, settle},
    table::AccessError,
};

/// Where one side of a copy is, as the guest may name it.
#[derive(Clone, Copy, Debug)]
enum Place {
    /// Granted to the caller.
    Grant { granter: DomainId, reference: u32 },
    /// A frame number of the caller.
    Own(Gfn),
}

/// One side of a copy, held.
#[derive(Debug)]
struct Side {
    pin: Pin,
    window: Window,
    passage: Option<Passage>,
}

impl Side {
    /// The page from byte `first` on, and whose it is.
    fn bytes<D: Domain>(&self, domain: &D, first: u16) -> PageBytes {
        let owner = self.pin.grant().map_or(domain.id(), |grant| grant.granter);
        PageBytes { owner, page: self.pin.mfn(), first }
    }
}

/// Copies what one element asks for, and tells its status.
///
/// # Errors
/// [`Errno::Fault`] if a side could not be given back: the embedder has its page.
pub(crate) fn copy<D: Domain>(
    domain: &D,
    batch: &mut PinBatch,
    request: &GrantCopy,
) -> Result<Status, Errno> {
    let (mut from, mut to) = (None, None);
    let done = attempt(domain, request, &mut from, &mut to);
    let mut result = Ok(done.err().unwrap_or(Status::Okay));
    for side in [to, from].into_iter().flatten() {
        result = give_back(domain, batch, side).and(result);
    }
    result
}

/// Copies, leaving what it took in `from` and `to`, however it ends.
fn attempt<D: Domain>(
    domain: &D,
    request: &GrantCopy,
    from: &mut Option<Side>,
    to: &mut Option<Side>,
) -> Result<(), Status> {
    let GrantCopy { source, dest, length, flags, status: _, padding: _ } = *request;
    if !in_page(source.offset, length) || !in_page(dest.offset, length) {
        return Err(Status::BadCopyArgument);
    }
    let read = place(domain, source, flags & copy_flags::SOURCE_REFERENCE != 0)?;
    let written = place(domain, dest, flags & copy_flags::DEST_REFERENCE != 0)?;
    let from = from.insert(take(domain, read, Rights::Read)?);
    let to = to.insert(take(domain, written, Rights::ReadWrite)?);
    let clamp = |index, length| domain.clamp(index, length);
    let found = from.window.place(source.offset, length, clamp).zip(to.window.place(
        dest.offset,
        length,
        clamp,
    ));
    let ((first, count), (target, room)) = found.ok_or(Status::GeneralError)?;
    let copy = PageCopy {
        from: from.bytes(domain, first),
        to: to.bytes(domain, target),
        // Equal, save on a mispredicted path.
        length: count.min(room),
    };
    domain.copy_page(&copy).map_err(|NotCopied| Status::GeneralError)
}

/// Whether the bytes lie in one page.
fn in_page(offset: u16, length: u16) -> bool {
    offset.checked_add(length).is_some_and(|end| end <= PAGE_BYTES)
}

/// Whom and what one side names, and whether the caller may ask.
fn place<D: Domain>(domain: &D, place: CopyPlace, granted: bool) -> Result<Place, Status> {
    let CopyPlace { frame, domain: id, offset: _, padding: _ } = place;
    if !granted {
        // Memory of others is reached by what they granted, never by its frame number. The
        // interface has one name for the caller here, and no other is looked at.
        let own = Place::Own(Gfn::new(frame));
        return if id == DOMID_SELF { Ok(own) } else { Err(Status::PermissionDenied) };
    }
    let subject = if id == DOMID_SELF { domain.id() } else { DomainId::new(id) };
    domain.with_granter(subject, |_| ()).ok_or(Status::BadDomain)?;
    permit(domain, subject)?;
    // The reference is the low half of the word; a guest leaves anything in the other.
    Ok(Place::Grant { granter: subject, reference: frame as u32 })
}

fn permit<D: Domain>(domain: &D, subject: DomainId) -> Result<(), Status> {
    let allowed = subject == domain.id() || domain.allows(Action::Copy, subject);
    if allowed { Ok(()) } else { Err(Status::PermissionDenied) }
}

/// Takes hold of one side. After an error nothing of it is held.
fn take<D: Domain>(domain: &D, place: Place, rights: Rights) -> Result<Side, Status> {
    let caller = domain.id();
    let (granter, reference) = match place {
        Place::Grant { granter, reference } => (granter, reference),
        Place::Own(gfn) => {
            let page = domain.get_page(caller, GrantedFrame::Number(gfn), rights);
            let pin = Pin::ungranted(page.map_err(AccessError::Page)?);
            return Ok(Side { pin, window: Window::PAGE, passage: None });
        }
    };
    let loan = Loan { reference, holder: caller, rights, sorts: Sorts::Forwards };
    match lend(domain, granter, loan).ok_or(Status::BadDomain)?? {
        Lent::Page { pin, window } => Ok(Side { pin, window, passage: None }),
        Lent::Forward { passage, granter: third, reference } => {
            let loan = Loan { reference, holder: granter, rights, sorts: Sorts::Parts };
            match pass(domain, third, loan) {
                Ok((pin, window)) => Ok(Side { pin, window, passage: Some(passage) }),
                Err(status) => {
                    end_passage(domain, passage);
                    Err(status)
                }
            }
        }
    }
}

/// Takes what a third domain granted to the one that passes it on. That is the only step
/// there can be.
fn pass<D: Domain>(domain: &D, third: DomainId, loan: Loan) -> Result<(Pin, Window), Status> {
    domain.with_granter(third, |_| ()).ok_or(Status::GeneralError)?;
    permit(domain, third)?;
    match lend(domain, third, loan).ok_or(Status::GeneralError)?? {
        Lent::Page { pin, window } => Ok((pin, window)),
        Lent::Forward { passage, .. } => {
            end_passage(domain, passage);
            Err(Status::GeneralError)
        }
    }
}

/// `None` if there is no such domain.
fn lend<D: Domain>(domain: &D, granter: DomainId, loan: Loan) -> Option<Result<Lent, AccessError>> {
    domain.with_granter(granter, |table| {
        table.lend(
            loan,
            |index, length| domain.clamp(index, length),
            |frame| domain.get_page(granter, frame, loan.rights),
        )
    })
}

fn end_passage<D: Domain>(domain: &D, passage: Passage) {
    // A granter is found as long as its entries are in use.
    domain.with_granter(passage.granter(), |table| table.end_passage(passage));
}

/// Gives one side back: references, pin and in-use bits, then the passage.
fn give_back<D: Domain>(domain: &D, batch: &mut PinBatch, side: Side) -> Result<(), Errno> {
    let Side { pin, window: _, passage } = side;
    batch.edit_many(|skipped, room| {
        let cleared = untouched(skipped);
        // The batch of copies is empty here; without room the page would be lost.
        drop(room.hold(pin, cleared));
    });
    // Nothing is on record, so no hardware is asked; what comes out has its proof.
    let result = settle(domain, batch);
    if let Some(passage) = passage {
        end_passage(domain, passage);
    }
    result
}
