//! Shared grant entries, which a hostile granter may rewrite at any moment.
//!
//! Opening an entry sets its in-use bits and tells the frame it grants, if it grants
//! it to the caller at that instant. Version 1 keeps flags, grantee and frame in one
//! 64-bit word, so one compare-exchange settles all three. Version 2 keeps the in-use
//! bits in a status word elsewhere: set them, fence, and look at the entry again.
//! Every access has the width of the memory's own atomic type.

use core::sync::atomic::{AtomicU16, AtomicU64, Ordering, fence};

use flush::{DomainId, Gfn};

use crate::abi::entry_flags;

/// A page of shared entries: 512 of version 1, or 256 of version 2.
pub type SharedPage = [AtomicU64; 512];
/// A page of version 2 status words.
pub type StatusPage = [AtomicU16; 2048];

/// What a mapping may do with the page.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Rights {
    /// Only read.
    Read,
    /// Read and write.
    ReadWrite,
}

impl Rights {
    /// Bits that tell the granter about such a mapping.
    const fn in_use(self) -> u16 {
        match self {
            Self::Read => entry_flags::READING,
            Self::ReadWrite => entry_flags::READING | entry_flags::WRITING,
        }
    }
}

/// How often a granter may rewrite a version 1 entry under our hands.
pub(crate) const TRIES: usize = 5;

/// Why a shared entry could not be opened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum OpenError {
    /// It does not grant this.
    Refused,
    /// It kept changing.
    Unstable,
}

/// An entry that granted the access when its in-use bits were set.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Opened {
    /// The frame it names.
    pub(crate) frame: Gfn,
    /// The in-use bits that were clear before.
    pub(crate) newly_set: u16,
}

/// A word of guest-shared memory.
pub(crate) trait Word {
    fn load(&self) -> u64;
    /// Stores `new` if the word is `expected`; otherwise tells what it is.
    fn exchange(&self, expected: u64, new: u64) -> Result<(), u64>;
}

impl Word for AtomicU64 {
    fn load(&self) -> u64 {
        self.load(Ordering::Acquire)
    }

    fn exchange(&self, expected: u64, new: u64) -> Result<(), u64> {
        self.compare_exchange(expected, new, Ordering::SeqCst, Ordering::Acquire).map(|_| ())
    }
}

/// Flags of the first word of an entry, which both versions keep in bits 0-15.
pub(crate) const fn flags(head: u64) -> u16 {
    head as u16
}

/// Whether the entry grants `rights` on a whole page to `caller`.
fn check(head: u64, caller: DomainId, rights: Rights) -> Result<(), OpenError> {
    let flags = flags(head);
    let grantee = (head >> 16) as u16;
    let whole_page =
        flags & (entry_flags::TYPE | entry_flags::SUB_PAGE) == entry_flags::PERMIT_ACCESS;
    let enough = match rights {
        Rights::Read => true,
        Rights::ReadWrite => flags & entry_flags::READ_ONLY == 0,
    };
    if whole_page && grantee == caller.get() && enough { Ok(()) } else { Err(OpenError::Refused) }
}

/// Opens a version 1 entry.
///
/// The exchange covers the whole word, so the frame belongs to the flags and the
/// grantee that were checked.
pub(crate) fn open_v1<W: Word>(
    word: &W,
    caller: DomainId,
    rights: Rights,
) -> Result<Opened, OpenError> {
    let bits = rights.in_use();
    let mut seen = word.load();
    for _ in 0..TRIES {
        check(seen, caller, rights)?;
        match word.exchange(seen, seen | u64::from(bits)) {
            Ok(()) => {
                return Ok(Opened { frame: Gfn::new(seen >> 32), newly_set: bits & !flags(seen) });
            }
            Err(now) => seen = now,
        }
    }
    Err(OpenError::Unstable)
}

/// Opens a version 2 entry.
///
/// Either the granter's revocation sees the in-use bits, or the second look here sees
/// the revocation; then only what this call set is undone.
pub(crate) fn open_v2<W: Word>(
    head: &W,
    frame: &W,
    status: &AtomicU16,
    caller: DomainId,
    rights: Rights,
) -> Result<Opened, OpenError> {
    check(head.load(), caller, rights)?;
    let bits = rights.in_use();
    let newly_set = bits & !status.fetch_or(bits, Ordering::SeqCst);
    fence(Ordering::SeqCst);
    if check(head.load(), caller, rights).is_err() {
        status.fetch_and(!newly_set, Ordering::SeqCst);
        return Err(OpenError::Unstable);
    }
    Ok(Opened { frame: Gfn::new(frame.load()), newly_set })
}

/// Takes in-use bits back from a version 1 entry.
pub(crate) fn close_v1(word: &AtomicU64, bits: u16) {
    word.fetch_and(!u64::from(bits), Ordering::SeqCst);
}

/// Takes in-use bits back from a version 2 entry's status.
pub(crate) fn close_v2(status: &AtomicU16, bits: u16) {
    status.fetch_and(!bits, Ordering::SeqCst);
}
