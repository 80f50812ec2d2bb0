//! A guest's memory by the addresses its own code uses.

use gnttab::GuestAddress;
use testbed::paging::{Access, NotTranslated, Paging, Tables};
use testbed::svm::Context;
use testbed::xen::{Bytes, Fault};

use crate::embedding::Guest;

/// Bytes of a page.
const PAGE: u64 = 4096;

/// The memory of a guest as one of its virtual processors sees it, at supervisor level.
pub(super) struct Linear<'g> {
    guest: &'g Guest,
    paging: Paging,
}

impl<'g> Linear<'g> {
    /// What a virtual processor at rest sees.
    pub(super) const fn new(guest: &'g Guest, context: &Context) -> Self {
        let save = &context.vmcb.save;
        let paging = Paging { cr0: save.cr0, cr3: save.cr3, cr4: save.cr4, efer: context.efer() };
        Self { guest, paging }
    }

    /// Do something with each piece of a run of bytes that lies in one page.
    fn each(
        &self,
        address: u64,
        length: usize,
        access: Access,
        mut action: impl FnMut(GuestAddress, core::ops::Range<usize>) -> Result<(), Fault>,
    ) -> Result<(), Fault> {
        let mut done = 0_usize;
        while done < length {
            let here = address.checked_add(done as u64).ok_or(Fault)?;
            let in_page = usize::try_from(PAGE - here % PAGE).map_err(|_| Fault)?;
            let end = length.min(done.saturating_add(in_page));
            let physical = self.paging.translate(&InGuest(self.guest), here, access);
            let physical = physical.map_err(|NotTranslated| Fault)?;
            action(GuestAddress(physical), done..end)?;
            done = end;
        }
        Ok(())
    }
}

impl Bytes for Linear<'_> {
    fn read(&self, address: u64, bytes: &mut [u8]) -> Result<(), Fault> {
        self.each(address, bytes.len(), Access::Read, |at, range| {
            let piece = bytes.get_mut(range).ok_or(Fault)?;
            self.guest.read(at, piece).map_err(|_| Fault)
        })
    }

    fn write(&self, address: u64, bytes: &[u8]) -> Result<(), Fault> {
        self.each(address, bytes.len(), Access::Write, |at, range| {
            let piece = bytes.get(range).ok_or(Fault)?;
            self.guest.write(at, piece).map_err(|_| Fault)
        })
    }

    fn writable(&self, address: u64) -> Option<u64> {
        self.paging.translate(&InGuest(self.guest), address, Access::Write).ok()
    }
}

/// A guest's memory, for a walk of its page tables.
struct InGuest<'g>(&'g Guest);

impl Tables for InGuest<'_> {
    fn word(&self, address: u64) -> Option<u64> {
        let mut bytes = [0; 8];
        self.0.read(GuestAddress(address), &mut bytes).ok()?;
        Some(u64::from_le_bytes(bytes))
    }
}
