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
    entry::Rights,
    maptrack::Taken,
    pin::{Grant, PageReference, Pin, Purpose},
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
    /// The handle of the mapping.
    taken: Taken,
    /// Its reference in the granter's table.
    reference: u32,
    /// The place of its element among those that are looked at together.
    place: u8,
    rights: Rights,
    /// Whether it holds a writable type reference.
    typed: bool,
}

impl Removals {
    /// Where each of them is, in the caller's space, and what has to be there: in the order of
    /// their elements.
    #[inline]
    pub fn iter(&self) -> impl ExactSizeIterator<Item = (Gfn, Expected)> {
        let Self(removals) = self;
        removals.iter().map(|one| (one.gfn, Expected { mfn: one.mfn, rights: one.rights }))
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
            let granter = mapped.grant().granter;
            if domain.allows(Action::Unmap, granter) {
                let done = domain.with_granter(granter, |table| {
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
    let elements = elements.iter().take(batch.left());
    let done = take(domain, (granter, table), elements, statuses, &mut removals);
    if !removals.0.is_empty() {
        // One bit for each that was not cleared.
        let mut kept = 0_u32;
        batch.edit_many(|skipped, room| {
            let mut each = removals.0.iter().zip(0..);
            domain.clear_all(&removals, skipped, |result| {
                // More answers than questions are those of an embedder in error.
                let Some((removal, place)) = each.next() else { return };
                match result {
                    // There are not more than the batch has room for.
                    Ok(cleared) => drop(room.hold(removal.pin(granter), cleared)),
                    Err(error) => kept |= removal.keep(place, error.into(), statuses),
                }
            });
            each.for_each(|(removal, place)| {
                kept |= removal.keep(place, Status::GeneralError, statuses);
            });
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
    fn pin(&self, granter: DomainId) -> Pin {
        let Self { gfn: _, mfn, taken: _, reference, place: _, rights, typed } = *self;
        let grant = Grant { granter, reference, rights, purpose: Purpose::Map };
        Pin::granted(PageReference::taken(mfn, typed), grant)
    }

    /// Says that its mapping stays. Returns its bit.
    #[cold]
    fn keep(&self, place: u32, status: Status, statuses: &mut [Status]) -> u32 {
        if let Some(place) = statuses.get_mut(usize::from(self.place)) {
            *place = status;
        }
        1 << place
    }
}

/// Takes the handles of elements that go together. Returns how many elements were looked at;
/// each has the status that it has once what was taken is cleared.
// By itself its loop has the registers that it needs.
#[inline(never)]
fn take<'e, D: Domain>(
    domain: &D,
    (granter, table): (DomainId, &mut GrantTable<D::Grants>),
    elements: impl Iterator<Item = &'e (impl Unmaps + 'e)>,
    statuses: &mut [Status],
    removals: &mut Removals,
) -> usize {
    let (id, clamp) = (domain.id(), |index, length| domain.clamp(index, length));
    domain.with_maptrack(|maptrack| {
        let mut done = 0_u8;
        for ((element, status), place) in elements.zip(statuses).zip(0..) {
            let Unmap { host_addr, handle, new_addr } = element.request();
            done = place;
            *status = match maptrack.find(handle, clamp) {
                None => Status::BadHandle,
                Some(entry) => {
                    let grant = entry.grant();
                    if grant.granter != granter || entry.is_taken() {
                        if place > 0 {
                            // It may be one of those before it: how that ends is open.
                            return usize::from(place);
                        }
                        // It was looked at before the lock: another unmap came first.
                        *status = Status::BadHandle;
                        continue;
                    }
                    match table.pinned_page(grant.reference, id, clamp) {
                        None => Status::BadHandle,
                        Some(_) if new_addr != 0 => Status::GeneralError,
                        Some(_) if host_addr == 0 => Status::Okay,
                        Some(mfn) => {
                            // There is room for as many as a batch takes.
                            removals.0.extend([Removal {
                                gfn: Gfn::new(host_addr >> PAGE_SHIFT),
                                mfn,
                                taken: entry.take(handle),
                                reference: grant.reference,
                                place,
                                rights: grant.rights,
                                typed: entry.typed(),
                            }]);
                            Status::Okay
                        }
                    }
                }
            };
        }
        // Without room in the batch the first one fails, for it has to end.
        usize::from(done).saturating_add(1)
    })
}

const _: () = assert!(BATCH <= u32::BITS as usize);
