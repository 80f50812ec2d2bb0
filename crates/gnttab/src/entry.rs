//! Shared grant entries, which a hostile granter may rewrite at any moment.
//!
//! Opening an entry sets its in-use bits and tells the frame it grants, if it grants
//! it to the caller at that instant. Version 1 keeps flags, grantee and frame in one
//! 64-bit word, so one compare-exchange settles all three. Version 2 keeps the in-use
//! bits in a status word elsewhere: set them, fence, and look at the entry again.
//! Every access has the width of the memory's own atomic type.

use core::sync::atomic::Ordering;

use flush::{DomainId, Gfn};

use crate::{
    abi::{PAGE_BYTES, entry_flags},
    sync::{AtomicU16, AtomicU64, fence},
};

/// A page of shared entries: 512 of version 1, or 256 of version 2.
pub type SharedPage = [AtomicU64; 512];
/// A page of version 2 status words.
pub type StatusPage = [AtomicU16; 2048];

/// What a mapping or a copy may do with the page.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Rights {
    /// Only read.
    Read,
    /// Read and write.
    ReadWrite,
}

impl Rights {
    /// Bits that tell the granter about such an access.
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

/// Which sorts of entry will do; each takes what those before it take.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Sorts {
    /// For a mapping: a whole page.
    Pages,
    /// For a copy that was passed on once: also part of a page.
    Parts,
    /// For a copy: also a grant that a third domain made, passed on.
    Forwards,
}

/// The bytes of a page that an entry grants. It never leaves the page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Window {
    first: u16,
    length: u16,
}

impl Window {
    /// All of the page.
    pub(crate) const PAGE: Self = Self { first: 0, length: PAGE_BYTES };

    /// What lies in the page of any two numbers.
    pub(crate) const fn of(first: u16, length: u16) -> Self {
        let first = if first < PAGE_BYTES { first } else { PAGE_BYTES };
        let room = PAGE_BYTES.saturating_sub(first);
        Self { first, length: if length < room { length } else { room } }
    }

    /// Where `length` bytes at `offset` are in the page, if all of them are granted.
    ///
    /// `clamp` is the embedder's: on a mispredicted path it keeps them in the window.
    pub(crate) fn place(
        self,
        offset: u16,
        length: u16,
        clamp: impl Fn(usize, usize) -> usize,
    ) -> Option<(u16, u16)> {
        let into = offset.checked_sub(self.first)?;
        let spare = self.length.checked_sub(length)?;
        if into > spare {
            return None;
        }
        let within = |index: u16, last: u16| {
            u16::try_from(clamp(index.into(), usize::from(last).saturating_add(1))).ok()
        };
        let length = within(length, self.length)?;
        let into = within(into, self.length.checked_sub(length)?)?;
        Some((self.first.checked_add(into)?, length))
    }
}

/// What an entry grants.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Target {
    /// A page of the granter, or part of it.
    Page { frame: Gfn, window: Window },
    /// What another domain granted to the granter.
    Forward { granter: DomainId, reference: u32 },
}

/// An entry that granted the access when its in-use bits were set.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Opened {
    /// What it grants.
    pub(crate) target: Target,
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

/// Tells what an entry grants, if it grants `rights` to `caller` and is of these `sorts`.
///
/// `frame` reads the word of a version 2 entry that names the frame, or the reference.
/// An entry that is passed on and has a window has no place for the window: it grants
/// nothing.
fn check(
    head: u64,
    frame: impl FnOnce() -> u64,
    caller: DomainId,
    rights: Rights,
    sorts: Sorts,
) -> Result<Target, OpenError> {
    const PAGE: u16 = entry_flags::PERMIT_ACCESS;
    const PART: u16 = entry_flags::PERMIT_ACCESS | entry_flags::SUB_PAGE;
    const FORWARD: u16 = entry_flags::TRANSITIVE;
    let flags = flags(head);
    let grantee = (head >> 16) as u16;
    let enough = match rights {
        Rights::Read => true,
        Rights::ReadWrite => flags & entry_flags::READ_ONLY == 0,
    };
    if grantee != caller.get() || !enough {
        return Err(OpenError::Refused);
    }
    let (third, fourth) = ((head >> 32) as u16, (head >> 48) as u16);
    match flags & (entry_flags::TYPE | entry_flags::SUB_PAGE) {
        PAGE => Ok(Target::Page { frame: Gfn::new(frame()), window: Window::PAGE }),
        PART if sorts >= Sorts::Parts => {
            Ok(Target::Page { frame: Gfn::new(frame()), window: Window::of(third, fourth) })
        }
        FORWARD if sorts >= Sorts::Forwards => {
            Ok(Target::Forward { granter: DomainId::new(third), reference: frame() as u32 })
        }
        _ => Err(OpenError::Refused),
    }
}

/// Opens a version 1 entry, which always grants a whole page.
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
        let target = check(seen, || seen >> 32, caller, rights, Sorts::Pages)?;
        match word.exchange(seen, seen | u64::from(bits)) {
            Ok(()) => return Ok(Opened { target, newly_set: bits & !flags(seen) }),
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
    sorts: Sorts,
) -> Result<Opened, OpenError> {
    check(head.load(), || 0, caller, rights, sorts)?;
    let bits = rights.in_use();
    let newly_set = bits & !status.fetch_or(bits, Ordering::SeqCst);
    fence(Ordering::SeqCst);
    let Ok(target) = check(head.load(), || frame.load(), caller, rights, sorts) else {
        status.fetch_and(!newly_set, Ordering::SeqCst);
        return Err(OpenError::Unstable);
    };
    Ok(Opened { target, newly_set })
}

/// Takes in-use bits back from a version 1 entry.
pub(crate) fn close_v1(word: &AtomicU64, bits: u16) {
    word.fetch_and(!u64::from(bits), Ordering::SeqCst);
}

/// Takes in-use bits back from a version 2 entry's status.
pub(crate) fn close_v2(status: &AtomicU16, bits: u16) {
    status.fetch_and(!bits, Ordering::SeqCst);
}
