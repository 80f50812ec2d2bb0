//! The first half of an unmap: from a handle to a pin in the batch.
//!
//! When [`unmap`] says [`Status::Okay`], the mapping and the handle are gone; page
//! reference, pin and in-use bits stay until the batch was flushed. Every other status
//! says that nothing changed.

use arrayvec::ArrayVec;
use flush::{Cleared, Gfn, HoldError, Skipped};
use zerocopy::{FromBytes, IntoBytes};

use crate::{
    abi::{Status, UnmapAndReplace, UnmapGrantRef},
    domain::{Action, Crash, Domain, Expected},
    maptrack::MaptrackEntry,
    pin::Pin,
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

/// An element of either operation that unmaps.
pub(crate) trait Unmaps: FromBytes + IntoBytes + Copy {
    /// Where its status is.
    const STATUS: u64;

    fn request(&self) -> Unmap;
}

impl Unmaps for UnmapGrantRef {
    const STATUS: u64 = core::mem::offset_of!(Self, status) as u64;

    #[inline]
    fn request(&self) -> Unmap {
        let Self { host_addr, dev_bus_addr: _, handle, status: _, padding: _ } = *self;
        Unmap { host_addr, handle, new_addr: 0 }
    }
}

impl Unmaps for UnmapAndReplace {
    const STATUS: u64 = core::mem::offset_of!(Self, status) as u64;

    #[inline]
    fn request(&self) -> Unmap {
        let Self { host_addr, new_addr, handle, status: _, padding: _ } = *self;
        Unmap { host_addr, handle, new_addr }
    }
}

/// Bits of an address below its frame number.
pub(crate) const PAGE_SHIFT: u32 = 12;

/// The handles of up to `N` elements, looked up together and freed together.
///
/// A handle that was [taken](crate::Maptrack::take) stands for nothing any more, but comes back to
/// its free list only here: the lock is taken once for all of them, before any flush.
#[derive(Debug)]
#[must_use = "handles that were taken are lost until `free`"]
pub(crate) struct Handles<const N: usize> {
    found: [Option<MaptrackEntry>; N],
    taken: ArrayVec<u32, N>,
}

impl<const N: usize> Handles<N> {
    /// What stands behind each of the `handles`, of which the first `N` count.
    #[inline]
    pub(crate) fn look<D: Domain>(domain: &D, handles: impl Iterator<Item = u32>) -> Self {
        let mut found = [None; N];
        domain.with_maptrack(|maptrack| {
            for (found, handle) in found.iter_mut().zip(handles) {
                *found = maptrack.live(handle, |index, length| domain.clamp(index, length));
            }
        });
        Self { found, taken: ArrayVec::new_const() }
    }

    /// Puts every handle that was taken on its free list.
    #[inline]
    pub(crate) fn free<D: Domain>(self, domain: &D) {
        let Self { found: _, taken } = self;
        if !taken.is_empty() {
            domain.with_maptrack(|maptrack| {
                taken.into_iter().for_each(|handle| maptrack.free(handle));
            });
        }
    }
}

/// Unmaps one element into the batch; its handle is the one at `index` of `handles`.
#[inline]
pub(crate) fn unmap<D: Domain, const N: usize>(
    domain: &D,
    batch: &mut PinBatch,
    request: Unmap,
    handles: &mut Handles<N>,
    index: usize,
) -> Status {
    match batch.hold(|skipped| clear(domain, skipped, request, handles, index)) {
        Ok(()) => Status::Okay,
        Err(HoldError::Edit(status)) => status,
        // A chunk has as many elements as a batch has room for.
        Err(HoldError::Full) => Status::GeneralError,
    }
}

/// Removes one mapping. `Err(Status::Okay)` says that there was nothing to remove.
#[inline]
fn clear<'id, D: Domain, const N: usize>(
    domain: &D,
    skipped: &mut Skipped<'id>,
    request: Unmap,
    handles: &mut Handles<N>,
    index: usize,
) -> Result<(Pin, Cleared<'id>), Status> {
    let mapped = handles.found.get(index).copied().flatten().ok_or(Status::BadHandle)?;
    let holding = mapped.holding();
    let granter = holding.granter();
    if !domain.allows(Action::Unmap, granter) {
        return Err(Status::PermissionDenied);
    }
    let removed = domain.with_granter(granter, |table| {
        let clamp = |index, length| domain.clamp(index, length);
        let mfn = table.pinned_page(holding.reference(), domain.id(), clamp);
        // Another unmap of the handle may have come first; this lock keeps out the next.
        let taken = domain.with_maptrack(|maptrack| maptrack.take(request.handle, mapped));
        if !taken {
            return Err(Status::BadHandle);
        }
        let cleared = match mfn {
            None => Err(Status::BadHandle),
            Some(_) if request.new_addr != 0 => Err(Status::GeneralError),
            Some(_) if request.host_addr == 0 => Err(Status::Okay),
            Some(mfn) => {
                let gfn = Gfn::new(request.host_addr >> PAGE_SHIFT);
                let expected = Expected { mfn, rights: holding.rights() };
                let cleared = domain.clear(gfn, expected, skipped);
                cleared.map(|cleared| (mfn, cleared)).map_err(Status::from)
            }
        };
        match &cleared {
            // One for each element, of which there are as many as there is room.
            Ok(_) => handles.taken.extend([request.handle]),
            Err(_) => domain.with_maptrack(|maptrack| maptrack.put_back(request.handle)),
        }
        cleared
    });
    let (mfn, cleared) = removed.unwrap_or_else(|| {
        domain.crash(Crash::UnknownGranter { granter });
        Err(Status::GeneralError)
    })?;
    Ok((Pin::stored(mfn, holding), cleared))
}

/// Unmaps one element whose handle was not looked up yet.
pub(crate) fn unmap_single<D: Domain>(domain: &D, batch: &mut PinBatch, request: Unmap) -> Status {
    let mut handles = Handles::<1>::look(domain, [request.handle].into_iter());
    let status = unmap(domain, batch, request, &mut handles, 0);
    handles.free(domain);
    status
}

#[inline]
pub(crate) fn live<D: Domain>(domain: &D, handle: u32) -> Option<MaptrackEntry> {
    domain.with_maptrack(|maptrack| {
        maptrack.live(handle, |index, length| domain.clamp(index, length))
    })
}
