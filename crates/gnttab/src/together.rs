//! Unmaps whose statuses cannot fail: those of one granter, under each lock once.
//!
//! An element of an [`unmap_together`] ends as it does in [`unmap`](crate::unmap), one by
//! one and in their order. What goes through together ends before an element of another
//! granter, and before a handle that is in it already.

use arrayvec::ArrayVec;
use flush::{DomainId, Gfn, Mfn};

use crate::{
    abi::Status,
    domain::{Action, BATCH, Crash, Domain, Expected},
    maptrack::Taken,
    pin::{Holding, Pin},
    release::PinBatch,
    table::GrantTable,
    unmap::{PAGE_SHIFT, Unmap, Unmaps, live},
};

/// Mappings of one granter to remove, at most [`BATCH`].
///
/// See [`Domain::clear_all`].
#[derive(Debug)]
pub struct Removals(ArrayVec<Removal, BATCH>);

/// A mapping to remove, and what it holds.
#[derive(Clone, Copy, Debug)]
struct Removal {
    gfn: Gfn,
    mfn: Mfn,
    holding: Holding,
    /// The handle of the mapping.
    taken: Taken,
    /// The place of its element among those that are looked at together.
    place: u32,
}

impl Removals {
    /// Where each of them is, in the caller's space, and what has to be there: in the order of
    /// their elements.
    #[inline]
    pub fn iter(&self) -> impl ExactSizeIterator<Item = (Gfn, Expected)> {
        let Self(removals) = self;
        removals
            .iter()
            .map(|one| (one.gfn, Expected { mfn: one.mfn, rights: one.holding.rights() }))
    }
}

/// Unmaps the elements into the batch, up to as many as a batch has room for, and says how
/// each of them ended.
#[inline]
pub(crate) fn unmap_together<D: Domain>(
    domain: &D,
    batch: &mut PinBatch,
    elements: &[impl Unmaps],
    statuses: &mut [Status],
) {
    let (mut elements, mut statuses) = (elements, statuses);
    while !elements.is_empty() {
        let done = begin(domain, batch, elements, statuses);
        elements = elements.get(done..).unwrap_or_default();
        statuses = statuses.get_mut(done..).unwrap_or_default();
    }
}

/// Unmaps the first element, and with it all that may go together with it. Returns how many
/// have their status: at least one.
#[inline]
fn begin<D: Domain>(
    domain: &D,
    batch: &mut PinBatch,
    elements: &[impl Unmaps],
    statuses: &mut [Status],
) -> usize {
    let refused = match elements.first().and_then(|first| live(domain, first.request().handle)) {
        None => Status::BadHandle,
        Some(mapped) => {
            let granter = mapped.holding().granter();
            if domain.allows(Action::Unmap, granter) {
                let done = domain.with_granter(granter, |table| {
                    let (elements, _) = elements.split_at(elements.len().min(batch.left()));
                    unmap_run(domain, batch, (granter, table), elements, statuses)
                });
                if let Some(done) = done {
                    return done;
                }
                domain.crash(Crash::UnknownGranter { granter });
                Status::GeneralError
            } else {
                Status::PermissionDenied
            }
        }
    };
    if let Some(status) = statuses.first_mut() {
        *status = refused;
    }
    1
}

/// Unmaps what goes together, from the first element on. The granter's table is locked.
#[inline]
fn unmap_run<D: Domain>(
    domain: &D,
    batch: &mut PinBatch,
    (granter, table): (DomainId, &mut GrantTable<D::Grants>),
    elements: &[impl Unmaps],
    statuses: &mut [Status],
) -> usize {
    let mut removals = Removals(ArrayVec::new_const());
    let done = take(domain, (granter, table), elements, statuses, &mut removals);
    if !removals.0.is_empty() {
        // One bit for each that was not cleared.
        let mut kept = 0_u32;
        batch.edit_many(|skipped, room| {
            let mut answered = 0;
            domain.clear_all(&removals, skipped, |result| {
                // More answers than questions are those of an embedder in error.
                let Some(removal) = removals.0.get(answered) else { return };
                match result {
                    // There are not more than the batch has room for.
                    Ok(cleared) => drop(room.hold(removal.pin(), cleared)),
                    Err(error) => kept |= removal.keep(answered, error.into(), statuses),
                }
                answered += 1;
            });
            for (index, removal) in removals.0.iter().enumerate().skip(answered) {
                kept |= removal.keep(index, Status::GeneralError, statuses);
            }
        });
        domain.with_maptrack(|maptrack| {
            if kept == 0 {
                maptrack.free_all(&removals.0, |removal| removal.taken);
            } else {
                for (removal, place) in removals.0.iter().zip(0..) {
                    if kept & 1 << place == 0 {
                        maptrack.free(removal.taken.handle);
                    } else {
                        maptrack.put_back(removal.taken.handle);
                    }
                }
            }
        });
    }
    done
}

impl Removal {
    /// What its mapping held.
    #[inline]
    fn pin(&self) -> Pin {
        Pin::stored(self.mfn, self.holding)
    }

    /// Says that its mapping stays. Returns its bit, which is that of its index.
    #[cold]
    fn keep(&self, index: usize, status: Status, statuses: &mut [Status]) -> u32 {
        if let Some(place) = statuses.get_mut(self.place as usize) {
            *place = status;
        }
        1 << index
    }
}

/// Takes the handles of elements that go together. Returns how many elements were looked at;
/// each has the status that it has once what was taken is cleared.
// By itself its loop has the registers that it needs.
#[inline(never)]
fn take<D: Domain>(
    domain: &D,
    (granter, table): (DomainId, &mut GrantTable<D::Grants>),
    elements: &[impl Unmaps],
    statuses: &mut [Status],
    removals: &mut Removals,
) -> usize {
    let (id, clamp) = (domain.id(), |index, length| domain.clamp(index, length));
    domain.with_maptrack(|maptrack| {
        for (place, (element, status)) in elements.iter().zip(statuses).enumerate() {
            let Unmap { host_addr, handle, new_addr } = element.request();
            *status = match maptrack.find(handle, clamp) {
                None => Status::BadHandle,
                Some(entry) => {
                    let holding = entry.holding();
                    if !holding.is_live_of(granter) {
                        if place > 0 {
                            // It may be of another granter, or one of those before it: how that
                            // ends is open.
                            return place;
                        }
                        // It was looked at before the lock: another unmap came first.
                        *status = Status::BadHandle;
                        continue;
                    }
                    match table.pinned_page(holding.reference(), id, clamp) {
                        None => Status::BadHandle,
                        Some(_) if new_addr != 0 => Status::GeneralError,
                        Some(_) if host_addr == 0 => Status::Okay,
                        Some(mfn) => {
                            // There is room for as many as a batch takes.
                            removals.0.extend([Removal {
                                gfn: Gfn::new(host_addr >> PAGE_SHIFT),
                                mfn,
                                holding,
                                taken: entry.take(handle),
                                place: place as u32,
                            }]);
                            Status::Okay
                        }
                    }
                }
            };
        }
        // Without room in the batch the first one fails, for it has to end.
        elements.len().max(1)
    })
}

const _: () = assert!(BATCH <= u32::BITS as usize);
