//! What the guests do in a scenario: one grant, one element, one call at a time.

use core::sync::atomic::{Ordering, fence};

use flush::{DomainId, Gfn};
use gnttab::abi::{CopyPlace, GrantCopy, MapGrantRef, SwapGrantRef, UnmapGrantRef};
use gnttab::{Call, GrantStorage, GrantTable, GuestAddress, Outcome, Version};
use iommu_vtd::Guarded;
use testbed::fail;
use testbed::failure::{Context, Failure};
use zerocopy::{FromBytes, FromZeros, Immutable, IntoBytes};

use super::{MAPS, NO_STATUS, UNMAPS};
use crate::embedding::Guest;
use crate::world::{Manner, Mischief, Slipping, World};

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

/// The operations of a scenario that work on an array of elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Scripted {
    /// `map_grant_ref`.
    Map,
    /// `unmap_grant_ref`.
    Unmap,
    /// `unmap_and_replace`.
    Replace,
    /// `copy`.
    Copy,
    /// `swap_grant_ref`.
    Swap,
    /// `set_version`, whose one element is a number.
    SetVersion,
    /// `setup_table`, whose one element has room for a list behind it.
    SetupTable,
    /// `get_status_frames`, likewise.
    StatusFrames,
}

impl Scripted {
    /// Its number.
    const fn command(self) -> u32 {
        match self {
            Self::Map => 0,
            Self::Unmap => 1,
            Self::SetupTable => 2,
            Self::Copy => 5,
            Self::Replace => 7,
            Self::SetVersion => 8,
            Self::StatusFrames => 9,
            Self::Swap => 11,
        }
    }

    /// Where its array is. An element of a map is answered with a handle, and is kept.
    const fn array(self) -> Gfn {
        match self {
            Self::Map => MAPS,
            Self::Unmap
            | Self::Replace
            | Self::Copy
            | Self::Swap
            | Self::SetVersion
            | Self::SetupTable
            | Self::StatusFrames => UNMAPS,
        }
    }

    /// Bytes of one element, and where in it the status is.
    const fn layout(self) -> (usize, Option<usize>) {
        match self {
            Self::Map => (32, Some(18)),
            Self::Unmap | Self::Replace => (24, Some(20)),
            Self::Copy => (40, Some(36)),
            Self::Swap => (12, Some(8)),
            Self::SetVersion => (4, None),
            Self::SetupTable => (24, Some(8)),
            Self::StatusFrames => (16, Some(6)),
        }
    }

    /// The address of an element.
    fn address(self, position: u32) -> u64 {
        (self.array().get() << 12) + u64::from(position) * self.layout().0 as u64
    }
}

impl World {
    /// The caller writes an element; memory for it comes as needed.
    ///
    /// # Errors
    /// If there is none.
    pub(crate) fn put_element(
        &self,
        guest: &Guest,
        operation: Scripted,
        position: u32,
        element: &(impl IntoBytes + Immutable),
    ) -> Result<(), Failure> {
        self.put_bytes(guest, operation.address(position), element.as_bytes())
    }

    /// A domain writes bytes at an address below its own memory, which comes as needed.
    ///
    /// # Errors
    /// If there is none.
    pub(crate) fn put_bytes(&self, guest: &Guest, at: u64, bytes: &[u8]) -> Result<(), Failure> {
        let last = at.saturating_add(bytes.len().saturating_sub(1) as u64);
        for gfn in (at >> 12..=last >> 12).map(Gfn::new) {
            if guest.lookup(gfn).is_none() {
                self.hypervisor.populate(guest, gfn, 0)?;
            }
        }
        guest.write(GuestAddress(at), bytes).context("a guest's memory")
    }

    /// An element as a call left it.
    ///
    /// # Errors
    /// If the caller has no such element.
    pub(crate) fn element<E: FromBytes + FromZeros + IntoBytes>(
        &self,
        guest: &Guest,
        operation: Scripted,
        position: u32,
    ) -> Result<E, Failure> {
        let mut element = E::new_zeroed();
        let at = GuestAddress(operation.address(position));
        guest.read(at, element.as_mut_bytes()).context("a guest's memory")?;
        Ok(element)
    }

    /// The status of an element.
    ///
    /// # Errors
    /// If the caller has no such element, or it has no status.
    pub(crate) fn status(
        &self,
        guest: &Guest,
        operation: Scripted,
        position: u32,
    ) -> Result<i16, Failure> {
        let offset = operation.layout().1.context("an element with a status")?;
        let mut bytes = [0; 2];
        let at = GuestAddress(operation.address(position) + offset as u64);
        guest.read(at, &mut bytes).context("a guest's memory")?;
        Ok(i16::from_le_bytes(bytes))
    }

    /// The caller makes the call with its first `count` elements, or goes on with one that
    /// was left.
    ///
    /// # Errors
    /// If it cannot be made; how it ended is the caller's to judge.
    pub(crate) fn scripted(
        &self,
        guest: &Guest,
        operation: Scripted,
        call: Result<u32, Call>,
        manner: &Manner<'_>,
        mischief: &Mischief,
    ) -> Result<Outcome, Failure> {
        let start = operation.address(0);
        let call = call.map(|count| Call {
            command: operation.command(),
            argument: GuestAddress(start),
            count,
        });
        let (call, array) =
            (call.unwrap_or_else(|rest| rest), (start, operation.layout().0 as u64));
        self.as_caller(guest, manner, |caller| call.run(&Slipping::new(caller, mischief, array)))
    }

    /// Reach the table of a granter, as it does itself.
    fn table<A>(
        &self,
        granter: DomainId,
        action: impl FnOnce(&mut GrantTable<crate::embedding::Grants>) -> Option<A>,
    ) -> Result<A, Failure> {
        let reached = self.guest(granter)?.grants.with(action);
        reached.context("an entry of a grant table")
    }

    /// A domain writes an entry of its table, in the version that is in force.
    ///
    /// # Errors
    /// If the table cannot have such an entry.
    pub(crate) fn write_entry(
        &self,
        granter: DomainId,
        reference: u32,
        flags: u16,
        to: DomainId,
        gfn: Gfn,
    ) -> Result<(), Failure> {
        self.table(granter, |table| {
            let (page, place) = place(table.version(), reference);
            if page >= table.frames() {
                table.grow(page + 1).ok()?;
            }
            let words = table.storage().shared(page)?;
            let head = u64::from(flags) | u64::from(to.get()) << 16;
            match table.version() {
                Version::V1 => words.get(place)?.store(head | gfn.get() << 32, Ordering::SeqCst),
                Version::V2 => {
                    words.get(2 * place + 1)?.store(gfn.get(), Ordering::SeqCst);
                    words.get(2 * place)?.store(head, Ordering::SeqCst);
                }
            }
            Some(())
        })
    }

    /// A domain writes a word of its table, or one of its status words, whatever it means.
    ///
    /// # Errors
    /// If the table has no such word, or the value does not fit it.
    pub(crate) fn write_word(
        &self,
        granter: DomainId,
        status: bool,
        word: usize,
        value: u64,
    ) -> Result<(), Failure> {
        /// Words of a page.
        const SHARED: usize = 512;
        const STATUS: usize = 2048;
        self.table(granter, |table| {
            if status {
                let page = table.storage().status(word / STATUS)?;
                let value = u16::try_from(value).ok()?;
                page.get(word % STATUS)?.store(value, Ordering::SeqCst);
            } else {
                let page = table.storage().shared(word / SHARED)?;
                page.get(word % SHARED)?.store(value, Ordering::SeqCst);
            }
            Some(())
        })
    }

    /// Whether a granter sees its grant in use, for reading and for writing.
    ///
    /// # Errors
    /// If its table has no such entry.
    pub(crate) fn bits(&self, granter: DomainId, reference: u32) -> Result<(bool, bool), Failure> {
        let word = self.table(granter, |table| match table.version() {
            Version::V1 => {
                let (page, place) = place(Version::V1, reference);
                Some(table.storage().shared(page)?.get(place)?.load(Ordering::SeqCst))
            }
            Version::V2 => {
                let (page, place) = (reference as usize / 2048, reference as usize % 2048);
                Some(table.storage().status(page)?.get(place)?.load(Ordering::SeqCst).into())
            }
        })?;
        Ok((word & 1 << 3 != 0, word & 1 << 4 != 0))
    }

    /// A granter ends a grant, unless it is in use. Returns whether it did.
    ///
    /// # Errors
    /// If its table has no such entry.
    pub(crate) fn revoke(&self, granter: DomainId, reference: u32) -> Result<bool, Failure> {
        self.table(granter, |table| {
            let (page, place) = place(table.version(), reference);
            let words = table.storage().shared(page)?;
            match table.version() {
                Version::V1 => {
                    let word = words.get(place)?;
                    let found = word.load(Ordering::SeqCst);
                    let idle = found & (1 << 3 | 1 << 4) == 0;
                    let (now, order) = (0, Ordering::SeqCst);
                    Some(idle && word.compare_exchange(found, now, order, order).is_ok())
                }
                Version::V2 => {
                    let word = words.get(2 * place)?;
                    let head = word.swap(0, Ordering::SeqCst);
                    fence(Ordering::SeqCst);
                    let (page, place) = (reference as usize / 2048, reference as usize % 2048);
                    let status = table.storage().status(page)?.get(place)?;
                    let idle = status.load(Ordering::SeqCst) == 0;
                    if !idle {
                        word.store(head, Ordering::SeqCst);
                    }
                    Some(idle)
                }
            }
        })
    }
}

/// The page of a table that an entry is in, and its place there.
const fn place(version: Version, reference: u32) -> (usize, usize) {
    let per_page = version.per_page();
    (reference as usize / per_page, reference as usize % per_page)
}

/// An element that maps a grant.
pub(crate) fn map_element(
    granter: DomainId,
    reference: u32,
    gfn: Gfn,
    read_only: bool,
) -> MapGrantRef {
    const HOST_MAP: u32 = 1 << 1;
    let mut element = MapGrantRef::new_zeroed();
    element.host_addr = gfn.get() << 12;
    element.flags = HOST_MAP | u32::from(read_only) << 2;
    element.reference = reference;
    element.domain = granter.get();
    element.status = NO_STATUS;
    element
}

/// An element that gives a mapping back.
///
/// Elements of both operations have one size, and the same fields in their places: what is
/// a device address in one is a new address in the other.
pub(crate) fn unmap_element(handle: u32, gfn: Gfn) -> UnmapGrantRef {
    let mut element = UnmapGrantRef::new_zeroed();
    (element.host_addr, element.handle) = (gfn.get() << 12, handle);
    element.status = NO_STATUS;
    element
}

/// An element that copies the start of a granted page to one of the caller's own, or, if
/// `write`, from there into the granted one.
pub(crate) fn copy_element(granter: DomainId, reference: u32, own: Gfn, write: bool) -> GrantCopy {
    /// How a guest names itself.
    const SELF: u16 = 0x7ff0;
    const BYTES: u16 = 512;
    let granted =
        CopyPlace { frame: reference.into(), domain: granter.get(), offset: 0, padding: 0 };
    let own = CopyPlace { frame: own.get(), domain: SELF, offset: 0, padding: 0 };
    let (source, dest) = if write { (own, granted) } else { (granted, own) };
    // Bit 0: the source is a grant, bit 1: the destination is one.
    let flags = if write { 2 } else { 1 };
    GrantCopy { source, dest, length: BYTES, flags, status: NO_STATUS, padding: 0 }
}

/// An element that lets two entries of the caller's table change places.
pub(crate) fn swap_element(first: u32, second: u32) -> SwapGrantRef {
    let mut element = SwapGrantRef::new_zeroed();
    (element.first, element.second, element.status) = (first, second, NO_STATUS);
    element
}

/// Change a field of an element of a map.
///
/// # Errors
/// If a map has no such field, or the value does not fit it.
pub(crate) fn alter_map(
    element: &mut MapGrantRef,
    field: Field,
    value: u64,
) -> Result<(), Failure> {
    match field {
        Field::Reference => element.reference = u32::try_from(value).context("a reference")?,
        Field::Domain => element.domain = u16::try_from(value).context("a domain")?,
        Field::Flags => element.flags = u32::try_from(value).context("flags")?,
        Field::Address => element.host_addr = value,
        Field::Handle | Field::Other => fail!("a map has no {field:?}"),
    }
    Ok(())
}

/// Change a field of an element of an unmap or a replacement.
///
/// # Errors
/// If it has no such field, or the value does not fit it.
pub(crate) fn alter_unmap(
    element: &mut UnmapGrantRef,
    field: Field,
    value: u64,
) -> Result<(), Failure> {
    match field {
        Field::Handle => element.handle = u32::try_from(value).context("a handle")?,
        Field::Address => element.host_addr = value,
        Field::Other => element.dev_bus_addr = value,
        Field::Reference | Field::Domain | Field::Flags => fail!("an unmap has no {field:?}"),
    }
    Ok(())
}
