//! A guest's memory, read and written by its own addresses.
//!
//! Every access goes through the p2m, so that a page which is gone faults, and one that
//! goes meanwhile is nobody else's before the copy is over. Words are changed as wholes:
//! the guest may write the bytes beside those that are copied. [`LentWords`] are not copied:
//! they stay where they are for the length of a call.

use core::sync::atomic::{AtomicU64, Ordering};

use flush::{Gfn, Mfn};
use gnttab::{GuestAddress, GuestFault, GuestWords};
use p2m::PageKind;
use stage2::Access;
use testbed::words::merge;
use testbed::xen::{Bytes, Fault};

use super::Guest;
use super::page_info::PageInfo;
use crate::memory::{self, Words};

/// Bytes of a word.
const WORD: usize = 8;

impl Guest {
    /// Read `bytes` at `address`.
    ///
    /// # Errors
    /// [`GuestFault`] where nothing is mapped, or past the end of the space.
    pub(crate) fn read(&self, address: GuestAddress, bytes: &mut [u8]) -> Result<(), GuestFault> {
        let mut place = Place::at(address, Access::READ);
        let mut left = bytes;
        while !left.is_empty() {
            let (word, start) = place.word(self)?;
            let from = word.load(Ordering::Acquire).to_le_bytes();
            let length = left.len().min(WORD - start);
            let (now, later) = left.split_at_mut(length);
            now.copy_from_slice(&from[start..start + length]);
            left = later;
            place.step(length)?;
        }
        Ok(())
    }

    /// Write `bytes` at `address`.
    ///
    /// # Errors
    /// As [`read`](Self::read), and where the guest may not write itself; what came before
    /// the fault is written.
    pub(crate) fn write(&self, address: GuestAddress, bytes: &[u8]) -> Result<(), GuestFault> {
        let mut place = Place::at(address, Access::WRITE);
        let mut left = bytes;
        while !left.is_empty() {
            let (word, start) = place.word(self)?;
            let length = left.len().min(WORD - start);
            let (now, later) = left.split_at(length);
            merge(word, start, now);
            left = later;
            place.step(length)?;
        }
        Ok(())
    }
}

impl Bytes for Guest {
    fn read(&self, address: u64, bytes: &mut [u8]) -> Result<(), Fault> {
        Self::read(self, GuestAddress(address), bytes).map_err(|GuestFault| Fault)
    }

    fn write(&self, address: u64, bytes: &[u8]) -> Result<(), Fault> {
        Self::write(self, GuestAddress(address), bytes).map_err(|GuestFault| Fault)
    }

    // Its own addresses, and what it may do there the p2m says.
    fn writable(&self, address: u64) -> Option<u64> {
        Some(address)
    }
}

/// Consecutive words of a guest's own memory, on one page or on two that are counted.
pub(super) struct LentWords {
    first: Counted,
    second: Option<Counted>,
    /// The place of the first word in its page.
    from: usize,
    count: usize,
}

impl LentWords {
    /// `count` words from `address` on, which eight divides, as `memory` leads there; `None`
    /// unless all of it is RAM of `guest` that it may write.
    pub(super) fn new(
        guest: &Guest,
        memory: &dyn Bytes,
        address: u64,
        count: usize,
    ) -> Option<Self> {
        let page = |address| {
            let gfn = Gfn::new(memory.writable(address)? / 4096);
            let is_ram = |mapping: &p2m::Mapping| mapping.kind == Some(PageKind::RamReadWrite);
            Counted::new(guest, gfn, is_ram).ok()
        };
        let from = (address % 4096) as usize / WORD;
        let first = page(address)?;
        let second = if from.checked_add(count)? > first.words.len() {
            Some(page((address - address % 4096).checked_add(4096)?)?)
        } else {
            None
        };
        Some(Self { first, second, from, count })
    }

    /// All of them, if they do not need a third page.
    pub(super) fn get(&self) -> Option<GuestWords<'_>> {
        let first = self.first.words.get(self.from..)?;
        Some(match &self.second {
            None => GuestWords::new(first.get(..self.count)?, &[]),
            Some(second) => {
                let beyond = self.count.checked_sub(first.len())?;
                GuestWords::new(first, second.words.get(..beyond)?)
            }
        })
    }
}

/// Where a copy has got to; the page is looked up once.
struct Place {
    address: u64,
    page: Option<(Gfn, Counted)>,
    /// What the guest itself must be allowed. The hypervisor's view of a page is writable
    /// in any case, so nothing else would stop a guest from having it written.
    needed: Access,
}

/// A page that this side uses, counted as long as it does.
struct Counted {
    mfn: Mfn,
    words: &'static Words,
}

impl Counted {
    /// The page at `gfn`, if it may be used. It is counted while it cannot be taken away.
    fn new(
        guest: &Guest,
        gfn: Gfn,
        may_use: impl FnOnce(&p2m::Mapping) -> bool,
    ) -> Result<Self, GuestFault> {
        let mfn = guest.with_mapping(gfn, |mapping| {
            let p2m::Mapping { mfn, .. } = mapping.filter(may_use)?;
            PageInfo::of(mfn)?.take(false).ok()?;
            Some(mfn)
        });
        let mfn = mfn.ok_or(GuestFault)?;
        match memory::words(mfn) {
            Some(words) => Ok(Self { mfn, words }),
            None => {
                give_back(mfn);
                Err(GuestFault)
            }
        }
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        give_back(self.mfn);
    }
}

/// No translation led to this use of the page. If it is the last, whoever took the page out
/// of the tables has dropped his own reference, after his flush.
fn give_back(mfn: Mfn) {
    if PageInfo::of(mfn).is_some_and(|info| info.drop_one(false)) {
        // The allocator refuses what is not its own; such a frame goes nowhere.
        memory::release(mfn).ok();
    }
}

impl Place {
    const fn at(address: GuestAddress, needed: Access) -> Self {
        Self { address: address.0, page: None, needed }
    }

    /// The word at this place, and the first byte of it.
    fn word(&mut self, guest: &Guest) -> Result<(&'static AtomicU64, usize), GuestFault> {
        let gfn = Gfn::new(self.address / 4096);
        let words = match &self.page {
            Some((known, page)) if *known == gfn => page.words,
            Some(_) | None => {
                let page = Counted::new(guest, gfn, |mapping| mapping.access.allows(self.needed))?;
                let words = page.words;
                self.page = Some((gfn, page));
                words
            }
        };
        let byte = (self.address % 4096) as usize;
        Ok((words.get(byte / WORD).ok_or(GuestFault)?, byte % WORD))
    }

    fn step(&mut self, bytes: usize) -> Result<(), GuestFault> {
        self.address = self.address.checked_add(bytes as u64).ok_or(GuestFault)?;
        Ok(())
    }
}
