//! Operations on a table itself: its size, its frames, its version.
//!
//! Frame lists are copied out in pieces, with no lock held; a list is never longer than
//! the table has frames.

use flush::DomainId;
use zerocopy::{FromZeros, IntoBytes};

use crate::{
    abi::{
        DOMID_SELF, Errno, GetStatusFrames, GetVersion, NO_FRAME, QuerySize, SetVersion,
        SetupTable, Status,
    },
    domain::{Action, Domain, GuestAddress},
    hypercall::{read, write_status},
    table::{GrantStorage, GrantTable, TableFrame, Version},
};

/// Grows the table of a domain and lists its shared frames.
pub(crate) fn setup_table<D: Domain>(domain: &D, at: GuestAddress) -> Result<(), Errno> {
    const STATUS: u64 = core::mem::offset_of!(SetupTable, status) as u64;
    let mut request = SetupTable::new_zeroed();
    read(domain, at, &mut request)?;
    let result = (|| {
        let subject = subject(domain, Action::Setup, request.domain)?;
        let frames = usize::try_from(request.frames).map_err(|_| Status::GeneralError)?;
        on_table(domain, subject, |table| table.grow(frames.max(table.frames())))??;
        list(domain, subject, request.list, frames, TableFrame::Shared)
    })();
    write_status(domain, at, STATUS, status(result))
}

/// Tells how many shared frames a domain's table has, and may have.
pub(crate) fn query_size<D: Domain>(domain: &D, at: GuestAddress) -> Result<(), Errno> {
    let mut request = QuerySize::new_zeroed();
    read(domain, at, &mut request)?;
    let result = (|| {
        let subject = subject(domain, Action::Query, request.domain)?;
        on_table(domain, subject, |table| (table.frames(), table.maximum_frames()))
    })();
    if let Ok((frames, maximum)) = result {
        request.frames = u32::try_from(frames).unwrap_or(u32::MAX);
        request.maximum = u32::try_from(maximum).unwrap_or(u32::MAX);
    }
    request.status = status(result.map(|_| ())).value();
    domain.copy_to_guest(at, request.as_bytes()).map_err(|_| Errno::Fault)
}

/// Lists the status frames of a domain's table.
pub(crate) fn get_status_frames<D: Domain>(domain: &D, at: GuestAddress) -> Result<(), Errno> {
    const STATUS: u64 = core::mem::offset_of!(GetStatusFrames, status) as u64;
    let mut request = GetStatusFrames::new_zeroed();
    read(domain, at, &mut request)?;
    let result = (|| {
        let subject = subject(domain, Action::Setup, request.domain)?;
        let have = on_table(domain, subject, |table| table.status_frames())?;
        let frames = usize::try_from(request.frames)
            .ok()
            .filter(|frames| *frames <= have)
            .ok_or(Status::GeneralError)?;
        list(domain, subject, request.list, frames, TableFrame::Status)
    })();
    write_status(domain, at, STATUS, status(result))
}

/// Changes the caller's version; the version in force is written back in any case.
pub(crate) fn set_version<D: Domain>(domain: &D, at: GuestAddress) -> Result<(), Errno> {
    let mut request = SetVersion::new_zeroed();
    read(domain, at, &mut request)?;
    let version = match request.version {
        1 => Version::V1,
        2 => Version::V2,
        _ => return Err(Errno::Invalid),
    };
    let (result, now) = domain
        .with_granter(domain.id(), |table| (table.set_version(version), table.version()))
        .ok_or(Errno::NoSuchDomain)?;
    request.version = now.number();
    domain.copy_to_guest(at, request.as_bytes()).map_err(|_| Errno::Fault)?;
    result.map_err(Errno::from)
}

/// Tells the version of a domain's table.
pub(crate) fn get_version<D: Domain>(domain: &D, at: GuestAddress) -> Result<(), Errno> {
    let mut request = GetVersion::new_zeroed();
    read(domain, at, &mut request)?;
    let version = subject(domain, Action::Query, request.domain)
        .and_then(|subject| on_table(domain, subject, |table| table.version()))
        .map_err(|status| {
            let refused = status == Status::PermissionDenied;
            if refused { Errno::NotPermitted } else { Errno::NoSuchDomain }
        })?;
    request.version = version.number();
    domain.copy_to_guest(at, request.as_bytes()).map_err(|_| Errno::Fault)
}

/// Whom an operation is about. A domain may always ask about itself.
fn subject<D: Domain>(domain: &D, action: Action, id: u16) -> Result<DomainId, Status> {
    if id == DOMID_SELF || id == domain.id().get() {
        return Ok(domain.id());
    }
    let subject = DomainId::new(id);
    on_table(domain, subject, |_| ())?;
    if domain.allows(action, subject) { Ok(subject) } else { Err(Status::PermissionDenied) }
}

fn on_table<D: Domain, R>(
    domain: &D,
    subject: DomainId,
    action: impl FnOnce(&mut GrantTable<D::Grants>) -> R,
) -> Result<R, Status> {
    domain.with_granter(subject, action).ok_or(Status::BadDomain)
}

fn status(result: Result<(), Status>) -> Status {
    result.err().unwrap_or(Status::Okay)
}

/// Writes the guest's frame numbers of the first `frames` frames of a sort.
fn list<D: Domain>(
    domain: &D,
    subject: DomainId,
    address: u64,
    frames: usize,
    sort: impl Fn(usize) -> TableFrame,
) -> Result<(), Status> {
    const PIECE: usize = 32;
    let mut numbers = [NO_FRAME; PIECE];
    let mut at = Some(GuestAddress(address));
    let mut page = 0;
    while page < frames {
        let piece = numbers.iter_mut().zip(page..frames);
        let filled = on_table(domain, subject, |table| {
            piece
                .map(|(number, page)| {
                    let gfn = table.storage().mapped_at(sort(page));
                    *number = gfn.map_or(NO_FRAME, |gfn| gfn.get());
                })
                .count()
        })?;
        let bytes = numbers.get(..filled).unwrap_or_default().as_bytes();
        at.ok_or(())
            .and_then(|at| domain.copy_to_guest(at, bytes).map_err(|_| ()))
            .map_err(|()| Status::BadVirtualAddress)?;
        at = at.and_then(|at| at.offset(bytes.len() as u64));
        page = page.saturating_add(filled.max(1));
    }
    Ok(())
}
