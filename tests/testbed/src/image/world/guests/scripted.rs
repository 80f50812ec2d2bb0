//! What the guests do in a scenario: one grant, one element, one call at a time.

use core::sync::atomic::Ordering;

use flush::{Gfn, Mfn};
use gnttab::Outcome;
use gnttab::abi::{MapGrantRef, UnmapGrantRef};
use testbed::fail;
use testbed::failure::{Context, Failure};
use zerocopy::FromZeros;

use super::{Grants, MAPS, NO_STATUS, UNMAPS};
use crate::world::{BACKEND, FRONTEND, Manner, World};

/// A field of an element that a scenario sets to something else.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Field {
    /// The reference of a map.
    Reference,
    /// The granter of a map.
    Domain,
    /// The flags of a map.
    Flags,
    /// The handle of an unmap.
    Handle,
    /// The address.
    Address,
    /// The device address of an unmap, or the new address of a replacement.
    Other,
}

/// The operations of a scenario, as guests number them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Scripted {
    /// `map_grant_ref`.
    Map,
    /// `unmap_grant_ref`.
    Unmap,
    /// `unmap_and_replace`.
    Replace,
}

impl World {
    /// The frontend grants one page to the backend. Returns the page.
    ///
    /// # Errors
    /// If memory or the table is full.
    pub(crate) fn grant_one(&self, place: u32, read_only: bool) -> Result<Mfn, Failure> {
        let gfn = Grants::granted(place);
        let page = self.hypervisor.populate(self.guest(FRONTEND)?, gfn, 0)?;
        let flags = 1 | u64::from(read_only) << 2;
        let entry = flags | u64::from(BACKEND.get()) << 16 | gfn.get() << 32;
        self.entry(place, |word| word.store(entry, Ordering::SeqCst))?;
        Ok(page)
    }

    /// The backend writes element `position` of a map: the grant at `place`, to `gfn`.
    ///
    /// # Errors
    /// If it has no memory for it.
    pub(crate) fn put_map(
        &self,
        position: u32,
        place: u32,
        gfn: Gfn,
        read_only: bool,
    ) -> Result<(), Failure> {
        const HOST_MAP: u32 = 1 << 1;
        let mut element = MapGrantRef::new_zeroed();
        element.host_addr = gfn.get() << 12;
        element.flags = HOST_MAP | u32::from(read_only) << 2;
        element.reference = Grants::reference(place);
        element.domain = FRONTEND.get();
        element.status = NO_STATUS;
        self.put(MAPS, position, &element)
    }

    /// The backend writes element `position` of an unmap or a replacement.
    ///
    /// # Errors
    /// If it has no memory for it.
    pub(crate) fn put_unmap(&self, position: u32, handle: u32, gfn: Gfn) -> Result<(), Failure> {
        // Elements of both operations have one size, and the same fields in their places:
        // what is a device address in one is a new address in the other, and zero in both.
        let mut element = UnmapGrantRef::new_zeroed();
        (element.host_addr, element.handle) = (gfn.get() << 12, handle);
        element.status = NO_STATUS;
        self.put(UNMAPS, position, &element)
    }

    /// The backend makes the call with its first `count` elements.
    ///
    /// # Errors
    /// If it cannot be made; how it ended is the caller's to judge.
    pub(crate) fn scripted(
        &self,
        operation: Scripted,
        count: u32,
        manner: &Manner<'_>,
    ) -> Result<Outcome, Failure> {
        let (command, array, size) = match operation {
            Scripted::Map => (0, MAPS, size_of::<MapGrantRef>()),
            Scripted::Unmap => (1, UNMAPS, size_of::<UnmapGrantRef>()),
            Scripted::Replace => (7, UNMAPS, size_of::<UnmapGrantRef>()),
        };
        let call = super::request(command, array, size, 0..count);
        self.call(self.guest(super::BACKEND)?, call, manner)
    }

    /// Status and handle that a map left in element `position`.
    ///
    /// # Errors
    /// If the backend has no such element.
    pub(crate) fn map_answer(&self, position: u32) -> Result<(i16, u32), Failure> {
        let MapGrantRef { status, handle, .. } = self.get(MAPS, position)?;
        Ok((status, handle))
    }

    /// Changes a field of element `position` of a map.
    ///
    /// # Errors
    /// If a map has no such field, or the value does not fit it.
    pub(crate) fn alter_map(&self, position: u32, field: Field, value: u64) -> Result<(), Failure> {
        let mut element: MapGrantRef = self.get(MAPS, position)?;
        match field {
            Field::Reference => element.reference = u32::try_from(value).context("a reference")?,
            Field::Domain => element.domain = u16::try_from(value).context("a domain")?,
            Field::Flags => element.flags = u32::try_from(value).context("flags")?,
            Field::Address => element.host_addr = value,
            Field::Handle | Field::Other => fail!("a map has no {field:?}"),
        }
        self.put(MAPS, position, &element)
    }

    /// Changes a field of element `position` of an unmap or a replacement.
    ///
    /// # Errors
    /// If it has no such field, or the value does not fit it.
    pub(crate) fn alter_unmap(
        &self,
        position: u32,
        field: Field,
        value: u64,
    ) -> Result<(), Failure> {
        let mut element: UnmapGrantRef = self.get(UNMAPS, position)?;
        match field {
            Field::Handle => element.handle = u32::try_from(value).context("a handle")?,
            Field::Address => element.host_addr = value,
            Field::Other => element.dev_bus_addr = value,
            Field::Reference | Field::Domain | Field::Flags => fail!("an unmap has no {field:?}"),
        }
        self.put(UNMAPS, position, &element)
    }

    /// The frontend ends a grant, unless it is in use. Returns whether it did.
    ///
    /// # Errors
    /// If its table has no such entry.
    pub(crate) fn end_grant(&self, place: u32) -> Result<bool, Failure> {
        const IN_USE: u64 = 1 << 3 | 1 << 4;
        self.entry(place, |word| {
            let found = word.load(Ordering::SeqCst);
            let (now, order) = (0, Ordering::SeqCst);
            found & IN_USE == 0 && word.compare_exchange(found, now, order, order).is_ok()
        })
    }
}
