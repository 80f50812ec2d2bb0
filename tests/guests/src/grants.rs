//! This guest's grant table (version 1), and mapping what others granted.
//!
//! Source: Xen's public header `grant_table.h`.

use core::sync::atomic::{AtomicU64, Ordering};

use crate::arch::Page;
use crate::xen::{add_to_physmap, grant_table_op};

/// The first page of the table.
static TABLE: Page = Page::zero();
/// The space of grant tables.
const GRANT_TABLE: u32 = 1;

/// Bits of an entry: permitted, in use.
const PERMIT: u64 = 1;
const IN_USE: u64 = 3 << 3;

/// One element of a map.
#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
pub(crate) struct Map {
    /// Where.
    pub(crate) address: u64,
    /// What sort.
    pub(crate) flags: u32,
    /// Which entry of the granter's.
    pub(crate) reference: u32,
    /// The granter.
    pub(crate) domain: u16,
    /// What came of it.
    pub(crate) status: i16,
    /// What to give it back by.
    pub(crate) handle: u32,
    /// Where devices reach it.
    pub(crate) bus_address: u64,
}

/// A mapping for this guest's processors.
pub(crate) const HOST_MAP: u32 = 1 << 1;

/// One that can only be read.
pub(crate) const READ_ONLY: u32 = 1 << 2;

/// One element of an unmap.
#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
pub(crate) struct Unmap {
    /// Where it is mapped.
    pub(crate) address: u64,
    /// Not used.
    pub(crate) bus_address: u64,
    /// By which it was mapped.
    pub(crate) handle: u32,
    /// What came of it.
    pub(crate) status: i16,
    padding: u16,
}

impl Unmap {
    /// Give back what `map` mapped.
    pub(crate) const fn of(map: &Map) -> Self {
        Self { address: map.address, bus_address: 0, handle: map.handle, status: 1, padding: 0 }
    }
}

/// Show the first page of the table; the result of the call.
pub(crate) fn show_table() -> i64 {
    add_to_physmap(GRANT_TABLE, 0, TABLE.gfn())
}

/// Choose the version of the table; the result of the call.
pub(crate) fn set_version(version: u32) -> i64 {
    grant_table_op(8, &mut [version])
}

/// Map; the result of the call.
pub(crate) fn map(elements: &mut [Map]) -> i64 {
    grant_table_op(0, elements)
}

/// Give back; the result of the call.
pub(crate) fn unmap(elements: &mut [Unmap]) -> i64 {
    grant_table_op(1, elements)
}

fn entry(reference: usize) -> Option<&'static AtomicU64> {
    TABLE.words().get(reference)
}

/// Let `domain` use a page.
pub(crate) fn grant(reference: usize, domain: u16, gfn: u64) {
    if let Some(entry) = entry(reference) {
        entry.store(gfn << 32 | u64::from(domain) << 16 | PERMIT, Ordering::SeqCst);
    }
}

/// The entry as it is.
pub(crate) fn look(reference: usize) -> u64 {
    entry(reference).map_or(0, |entry| entry.load(Ordering::SeqCst))
}

/// Whether somebody uses the page.
pub(crate) fn is_in_use(reference: usize) -> bool {
    look(reference) & IN_USE != 0
}

/// Take a page back; whether nobody used it, so that it is this guest's alone now.
pub(crate) fn revoke(reference: usize) -> bool {
    entry(reference).is_some_and(|entry| {
        let now = entry.load(Ordering::SeqCst);
        let unused = now & IN_USE == 0;
        unused && entry.compare_exchange(now, 0, Ordering::SeqCst, Ordering::SeqCst).is_ok()
    })
}
