//! The first half of an unmap: from a handle to a pin in the batch.
//!
//! When [`unmap`] says [`Status::Okay`], the mapping and the handle are gone; page
//! reference, pin and in-use bits stay until the batch was flushed. Every other status
//! says that nothing changed.

use flush::{Cleared, Gfn, HoldError, Skipped};

use crate::{
    abi::Status,
    domain::{Action, Crash, Domain, Expected},
    maptrack::MaptrackEntry,
    pin::{PageReference, Pin},
    release::PinBatch,
};

/// One element to unmap, of either operation.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Unmap {
    /// Guest-physical byte address, or 0 to leave the mapping alone.
    pub(crate) host_addr: u64,
    /// From the map.
    pub(crate) handle: u32,
    /// What to put in its place; only 0 is possible here.
    pub(crate) new_addr: u64,
}

/// Bits of an address below its frame number.
pub(crate) const PAGE_SHIFT: u32 = 12;

/// Unmaps one element into the batch.
#[inline]
pub(crate) fn unmap<D: Domain>(domain: &D, batch: &mut PinBatch, request: Unmap) -> Status {
    match batch.hold(|skipped| clear(domain, skipped, request)) {
        Ok(()) => Status::Okay,
        Err(HoldError::Edit(status)) => status,
        // A chunk has as many elements as a batch has room for.
        Err(HoldError::Full) => Status::GeneralError,
    }
}

/// Removes one mapping. `Err(Status::Okay)` says that there was nothing to remove.
#[inline]
fn clear<'id, D: Domain>(
    domain: &D,
    skipped: &mut Skipped<'id>,
    request: Unmap,
) -> Result<(Pin, Cleared<'id>), Status> {
    let mapped = live(domain, request.handle).ok_or(Status::BadHandle)?;
    let grant = mapped.grant();
    if !domain.allows(Action::Unmap, grant.granter) {
        return Err(Status::PermissionDenied);
    }
    let removed = domain.with_granter(grant.granter, |table| {
        let clamp = |index, length| domain.clamp(index, length);
        let mfn = table.pinned_page(grant.reference, domain.id(), clamp);
        // Another unmap of the handle may have come first; this lock keeps out the next.
        let still = domain.with_maptrack(|maptrack| maptrack.still(request.handle, mapped));
        let (Some(mfn), true) = (mfn, still) else { return Err(Status::BadHandle) };
        if request.new_addr != 0 {
            return Err(Status::GeneralError);
        }
        if request.host_addr == 0 {
            return Err(Status::Okay);
        }
        let gfn = Gfn::new(request.host_addr >> PAGE_SHIFT);
        let cleared = domain.clear(gfn, Expected { mfn, rights: grant.rights }, skipped)?;
        domain.with_maptrack(|maptrack| maptrack.free(request.handle));
        Ok((mfn, cleared))
    });
    let (mfn, cleared) = removed.unwrap_or_else(|| {
        domain.crash(Crash::UnknownGranter { granter: grant.granter });
        Err(Status::GeneralError)
    })?;
    let page = PageReference::taken(mfn, mapped.typed());
    Ok((Pin::granted(page, grant), cleared))
}

#[inline]
pub(crate) fn live<D: Domain>(domain: &D, handle: u32) -> Option<MaptrackEntry> {
    domain.with_maptrack(|maptrack| {
        maptrack.live(handle, |index, length| domain.clamp(index, length))
    })
}
