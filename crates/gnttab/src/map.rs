//! Mapping a grant: count first, insert then, and undo through the batch.
//!
//! A map takes its references before its entry appears. One that fails afterwards puts
//! its pin into the batch, like an unmap does, so that nothing is dropped before a
//! flush. So does RAM that the mapping displaced.

use flush::{Cleared, Gfn, Iotlb, Room, Skipped, Tlb};

use crate::{
    abi::{MapGrantRef, NO_HANDLE, Status, map_flags},
    domain::{Action, BATCH, Domain, Inserted, Mapping, NotInserted, Removed},
    entry::Rights,
    maptrack::Reservation,
    pin::Pin,
    release::PinBatch,
    table::Begun,
    unmap::{PAGE_SHIFT, Unmap, unmap_single},
};

/// Pages that one map may put into the batch: displaced, moved, and its own when the
/// guest cannot be told of it.
pub(crate) const ROOM_FOR_MAP: usize = 3;

/// Maps one element; the out-fields say how it went.
///
/// The batch needs [`ROOM_FOR_MAP`].
pub(crate) fn map<D: Domain>(domain: &D, batch: &mut PinBatch, request: &mut MapGrantRef) {
    let (status, handle, dev_bus_addr) = match try_map(domain, batch, request) {
        // A translated domain's devices see its own frame numbers.
        Ok((handle, gfn)) => (Status::Okay, handle, gfn.get() << PAGE_SHIFT),
        Err(status) => (status, NO_HANDLE, 0),
    };
    request.status = status.value();
    request.handle = handle;
    request.dev_bus_addr = dev_bus_addr;
}

/// Takes back a map that the guest could not be told of: nobody could ever unmap it.
pub(crate) fn take_back<D: Domain>(domain: &D, batch: &mut PinBatch, request: &MapGrantRef) {
    if request.status == Status::Okay.value() {
        // The address 0 is a mapping at frame 0 here, not "leave it alone".
        let host_addr = request.host_addr | 1;
        let mapped = Unmap { host_addr, handle: request.handle, new_addr: 0 };
        // Another vCPU may have guessed the handle and come first. If policy or the tables
        // refuse, the mapping stays as it is: counted, and unmapped at the domain's end.
        unmap_single(domain, batch, mapped);
    }
}

fn try_map<D: Domain>(
    domain: &D,
    batch: &mut PinBatch,
    request: &MapGrantRef,
) -> Result<(u32, Gfn), Status> {
    const FOREIGN: u32 = map_flags::DEVICE | map_flags::APPLICATION | map_flags::CONTAINS_PTE;
    let flags = request.flags;
    if flags & (map_flags::HOST | map_flags::DEVICE) == 0 {
        return Err(Status::BadReference);
    }
    if flags & FOREIGN != 0 {
        return Err(Status::GeneralError);
    }
    let rights = if flags & map_flags::READ_ONLY != 0 { Rights::Read } else { Rights::ReadWrite };
    let granter = flush::DomainId::new(request.domain);
    domain.with_granter(granter, |_| ()).ok_or(Status::BadDomain)?;
    if !domain.allows(Action::Map, granter) {
        return Err(Status::PermissionDenied);
    }
    let handle =
        domain.with_maptrack(|maptrack| maptrack.reserve(domain.vcpu())).ok_or(Status::NoSpace)?;
    let begun = domain.with_granter(granter, |table| {
        table.begin_access(
            request.reference,
            domain.id(),
            rights,
            |index, length| domain.clamp(index, length),
            |frame| domain.get_page(granter, frame, rights),
        )
    });
    let begun = begun.map_or(Err(Status::BadDomain), |begun| begun.map_err(Status::from));
    let Begun { pin, number } = match begun {
        Ok(begun) => begun,
        Err(status) => {
            domain.with_maptrack(|maptrack| maptrack.cancel(handle));
            return Err(status);
        }
    };
    let gfn = Gfn::new(request.host_addr >> PAGE_SHIFT);
    let mapping = Mapping {
        gfn,
        mfn: pin.mfn(),
        rights,
        granter,
        moved_from: number.filter(|_| granter == domain.id()),
    };
    let known = map_flags::HOST | map_flags::READ_ONLY;
    let inserted = batch.edit_many(|skipped, room| {
        let result = if flags & !known == 0 {
            domain.insert(&mapping, skipped)
        } else {
            Err(NotInserted { cleared: untouched(skipped) })
        };
        keep(result, pin, room)
    });
    if mapping.moved_from.is_some() && inserted.is_some() {
        // Before the handle exists, so before anybody could unmap it.
        domain.with_granter(granter, |table| table.note_move(request.reference));
    }
    finish(domain, handle, inserted).map(|handle| (handle, gfn))
}

/// Puts into the batch what has to wait for its flush. The pin comes back if it is needed.
fn keep<'id>(
    result: Result<Inserted<'id>, NotInserted<'id>>,
    pin: Pin,
    room: &mut Room<'_, 'id, Pin, BATCH>,
) -> Option<Pin> {
    // Room was looked at before; a page that found none anyway is lost, never released.
    let mut hold = |pin, cleared| drop(room.hold(pin, cleared));
    match result {
        Ok(Inserted { displaced, moved }) => {
            for Removed { page, cleared } in [displaced, moved].into_iter().flatten() {
                hold(Pin::ungranted(page), cleared);
            }
            Some(pin)
        }
        Err(NotInserted { cleared }) => {
            hold(pin, cleared);
            None
        }
    }
}

/// The proof for a page that never got an entry.
pub(crate) fn untouched<'id>(skipped: &mut Skipped<'id>) -> Cleared<'id> {
    let cpus = skipped.absent::<Tlb>();
    let devices = skipped.absent::<Iotlb>();
    cpus.with(&devices)
}

/// Commits the handle to a mapping that exists, or cancels it.
fn finish<D: Domain>(domain: &D, handle: Reservation, pin: Option<Pin>) -> Result<u32, Status> {
    domain.with_maptrack(|maptrack| match pin {
        Some(pin) => Ok(maptrack.commit(handle, pin)),
        None => {
            maptrack.cancel(handle);
            Err(Status::GeneralError)
        }
    })
}
