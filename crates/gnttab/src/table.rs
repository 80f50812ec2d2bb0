//! A granter's table: who may use which of its pages, and who does.
//!
//! [`GrantTable`] joins the shared entries, which the granter writes, with the active
//! entries, which it cannot reach. An access begins with one look at the shared entry
//! and lasts, on the word of the active entry alone, until its last pin is released.
//! All methods take `&mut self`: the embedder's lock of this table is held, and with
//! it the active entries'.

use flush::{DomainId, Gfn, Mfn, Released};

use crate::{
    abi::{self, RESERVED_REFERENCES, entry_flags},
    active::{ACTIVE_PER_PAGE, ActiveEntry, Pins},
    domain::{GrantedFrame, NoMemory, PageError},
    entry::{self, OpenError, Opened, Rights, SharedPage, Sorts, StatusPage, Target},
    pin::{Grant, Holding, PageReference, Pin, Purpose},
    sync::AtomicU16,
};

/// Layout of the shared entries.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Version {
    /// 8 bytes an entry, 512 a page; frame numbers of 32 bits.
    V1,
    /// 16 bytes an entry, 256 a page; in-use bits in status frames.
    V2,
}

impl Version {
    /// Entries in one shared frame.
    #[must_use]
    pub const fn per_page(self) -> usize {
        match self {
            Self::V1 => 512,
            Self::V2 => 256,
        }
    }

    /// The number a guest knows it by.
    #[must_use]
    pub const fn number(self) -> u32 {
        match self {
            Self::V1 => 1,
            Self::V2 => 2,
        }
    }
}

/// Room for one domain's table, which the embedder owns and adds page by page.
///
/// Pages of each sort count from 0. Adding a page that exists succeeds and changes
/// nothing: a growth that failed half-way is asked for again.
pub trait GrantStorage {
    /// A shared frame as the words the guest also reads and writes.
    fn shared(&self, page: usize) -> Option<&SharedPage>;

    /// A frame of version 2 status words.
    fn status(&self, page: usize) -> Option<&StatusPage>;

    /// A page of active entries, out of the guest's reach.
    fn active(&mut self, page: usize) -> Option<&mut [ActiveEntry; ACTIVE_PER_PAGE]>;

    /// Adds a zeroed shared frame.
    ///
    /// # Errors
    /// [`NoMemory`]; then nothing changed. Likewise for the other two.
    fn add_shared(&mut self, page: usize) -> Result<(), NoMemory>;

    /// Adds a zeroed status frame.
    ///
    /// # Errors
    /// As [`add_shared`](Self::add_shared).
    fn add_status(&mut self, page: usize) -> Result<(), NoMemory>;

    /// Adds a page full of [`ActiveEntry::IDLE`].
    ///
    /// # Errors
    /// As [`add_shared`](Self::add_shared).
    fn add_active(&mut self, page: usize) -> Result<(), NoMemory>;

    /// The page behind a shared or status frame.
    fn frame(&self, frame: TableFrame) -> Option<Mfn>;

    /// Where the guest sees that frame, if it has mapped it.
    fn mapped_at(&self, frame: TableFrame) -> Option<Gfn>;

    /// Whether the guest has a status frame mapped anywhere, or a flush for a mapping
    /// of it is still owed.
    fn status_mapped(&self, page: usize) -> bool;

    /// Frees a status frame that is not mapped.
    fn remove_status(&mut self, page: usize);
}

/// One frame of a table that a guest may map.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TableFrame {
    /// Shared entries.
    Shared(usize),
    /// Version 2 status words.
    Status(usize),
}

/// Why an access to a granted page did not begin.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AccessError {
    /// The table has no such reference.
    OutOfRange,
    /// Another domain holds pins on the entry.
    OtherHolder,
    /// The caller holds as many pins as can be counted.
    TooManyPins,
    /// The entry grants nothing of the sort to the caller.
    Refused,
    /// The granter kept changing the entry.
    Unstable,
    /// The embedder has no reference on the page to give.
    Page(PageError),
}

/// An access that began: what it holds, and where the page was if nobody held it.
#[derive(Debug)]
pub(crate) struct Begun {
    pub(crate) pin: Pin,
    /// Frame number in the granter's space, known when nothing else had it mapped.
    pub(crate) number: Option<Gfn>,
}

/// What is known of a grant when its page is wanted.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Found {
    /// It is mapped, so the page is the one of the active entry.
    Mapped(Mfn),
    /// The entry was opened.
    Entry(Target),
}

/// One domain's grants.
#[derive(Debug)]
pub struct GrantTable<S> {
    pub(crate) storage: S,
    pub(crate) owner: DomainId,
    pub(crate) version: Version,
    pub(crate) frames: usize,
    pub(crate) maximum_frames: usize,
    /// References that exist: frames times entries a frame.
    pub(crate) references: usize,
    /// References beyond the reserved ones that hold a pin.
    pub(crate) pinned: usize,
}

impl<S: GrantStorage> GrantTable<S> {
    /// The domain whose pages these are.
    #[must_use]
    pub fn owner(&self) -> DomainId {
        self.owner
    }

    /// The embedder's storage.
    pub fn storage(&self) -> &S {
        &self.storage
    }

    /// The layout in use.
    #[must_use]
    pub fn version(&self) -> Version {
        self.version
    }

    /// References that exist.
    #[must_use]
    pub fn references(&self) -> usize {
        self.references
    }

    /// References, reserved ones apart, that somebody holds a pin on.
    #[must_use]
    pub fn pinned(&self) -> usize {
        self.pinned
    }

    /// Begins the access of a mapping: checks the entry, marks it in use, counts page and
    /// pin.
    ///
    /// A domain's own page that is pinned and has not [moved](Self::note_move) is on its way
    /// to another number, or about to be given back: nobody may take it for one that has.
    ///
    /// After an error nothing is held, and no in-use bit stays set that this set.
    pub(crate) fn begin_access(
        &mut self,
        reference: u32,
        caller: DomainId,
        rights: Rights,
        clamp: impl Fn(usize, usize) -> usize,
        get_page: impl FnOnce(GrantedFrame) -> Result<PageReference, PageError>,
    ) -> Result<Begun, AccessError> {
        let grant = Grant { granter: self.owner, reference, rights, purpose: Purpose::Map };
        if caller == self.owner
            && let Some(index) = self.index(reference, &clamp)
            && let Some(active) = self.active(index)
            && active.pins.mapped()
            && !active.moved
        {
            return Err(AccessError::Page(PageError::NotPresent));
        }
        let (index, (page, number)) = self.begin(grant, caller, Sorts::Pages, clamp, |found| {
            let (frame, number) = match found {
                Found::Mapped(mfn) => (GrantedFrame::Pinned(mfn), None),
                Found::Entry(Target::Page { frame, window: _ }) => {
                    (GrantedFrame::Number(frame), Some(frame))
                }
                Found::Entry(Target::Forward { .. }) => return Err(AccessError::Refused),
            };
            Ok((get_page(frame).map_err(AccessError::Page)?, number))
        })?;
        if let Some(active) = self.active(index) {
            active.mfn = page.mfn();
        }
        Ok(Begun { pin: Pin::granted(page, grant), number })
    }

    /// Notes that the page of the owner's own grant, which is pinned, has left its number.
    pub(crate) fn note_move(&mut self, reference: u32) {
        let Some(index) = self.index(reference, |index, _| index) else { return };
        if let Some(active) = self.active(index) {
            active.moved = true;
        }
    }

    /// Checks and counts an access to what `grant` says; `take` gets hold of its page.
    ///
    /// Returns the index with what `take` returned. After an error nothing is counted, and
    /// no in-use bit stays set that this set.
    pub(crate) fn begin<T>(
        &mut self,
        grant: Grant,
        caller: DomainId,
        sorts: Sorts,
        clamp: impl Fn(usize, usize) -> usize,
        take: impl FnOnce(Found) -> Result<T, AccessError>,
    ) -> Result<(usize, T), AccessError> {
        let Grant { granter: _, reference, rights, purpose: _ } = grant;
        let index = self.index(reference, clamp).ok_or(AccessError::OutOfRange)?;
        let active = *self.active(index).ok_or(AccessError::OutOfRange)?;
        let first = active.pins.is_empty();
        if !first && active.holder != caller {
            return Err(AccessError::OtherHolder);
        }
        let pins =
            active.pins.add(Holding::from(grant).pin_use()).ok_or(AccessError::TooManyPins)?;
        // Once mapped, the entry is read again only for a right it was not asked before.
        let mapped = active.pins.mapped();
        let sorts = if mapped { Sorts::Pages } else { sorts };
        let opened = if !mapped || (rights == Rights::ReadWrite && !active.pins.mapped_writable()) {
            Some(self.open(index, caller, rights, sorts)?)
        } else {
            None
        };
        let found = match opened {
            Some(Opened { target, .. }) if !mapped => Found::Entry(target),
            Some(_) | None => Found::Mapped(active.mfn),
        };
        let taken = match take(found) {
            Ok(taken) => taken,
            Err(error) => {
                self.close(index, opened.map_or(0, |opened| opened.newly_set));
                return Err(error);
            }
        };
        if first && index >= RESERVED_REFERENCES {
            self.pinned = self.pinned.saturating_add(1);
        }
        if let Some(active) = self.active(index) {
            active.pins = pins;
            active.holder = caller;
        }
        Ok((index, taken))
    }

    /// The page behind a reference that `holder` has mapped.
    #[inline]
    pub(crate) fn pinned_page(
        &mut self,
        reference: u32,
        holder: DomainId,
        clamp: impl Fn(usize, usize) -> usize,
    ) -> Option<Mfn> {
        let index = self.index(reference, clamp)?;
        let active = self.active(index)?;
        (active.pins.mapped() && active.holder == holder).then_some(active.mfn)
    }

    /// Ends an access whose flush completed: `put` drops the references, then the pin
    /// goes, and with the last pin of its sort the in-use bit the granter sees.
    #[inline]
    pub(crate) fn end_access(
        &mut self,
        holding: Holding,
        released: Released<Pin>,
        put: impl FnOnce(Released<Pin>),
    ) {
        put(released);
        self.unpin(holding);
    }

    /// Takes one pin away; with the last of its sort goes the in-use bit.
    #[inline(always)]
    pub(crate) fn unpin(&mut self, holding: Holding) {
        let Ok(index) = usize::try_from(holding.reference()) else { return };
        // There is one: a table never shrinks, and keeps its version while pins are held.
        let Some(active) = self.active(index) else { return };
        if active.pins.is_last(holding.pin_use()) {
            (active.pins, active.moved) = (Pins::default(), false);
            if index >= RESERVED_REFERENCES {
                self.pinned = self.pinned.saturating_sub(1);
            }
            self.close(index, entry_flags::IN_USE);
        } else {
            self.unpin_shared(index, holding);
        }
    }

    /// Takes away a pin that is not the only one.
    #[cold]
    fn unpin_shared(&mut self, index: usize, holding: Holding) {
        let Some(active) = self.active(index) else { return };
        let pins = active.pins.remove(holding.pin_use());
        active.pins = pins;
        active.moved &= pins.mapped();
        if holding.rights() == Rights::ReadWrite && !pins.writable() && !pins.is_empty() {
            self.close(index, entry_flags::WRITING);
        }
    }

    /// A guest's reference as an index into the table.
    #[inline]
    pub(crate) fn index(
        &self,
        reference: u32,
        clamp: impl Fn(usize, usize) -> usize,
    ) -> Option<usize> {
        let index = usize::try_from(reference).ok().filter(|index| *index < self.references)?;
        Some(clamp(index, self.references))
    }

    #[inline]
    pub(crate) fn active(&mut self, index: usize) -> Option<&mut ActiveEntry> {
        let page = self.storage.active(index / ACTIVE_PER_PAGE)?;
        Some(&mut page[index % ACTIVE_PER_PAGE])
    }

    fn open(
        &self,
        index: usize,
        caller: DomainId,
        rights: Rights,
        sorts: Sorts,
    ) -> Result<Opened, AccessError> {
        let per_page = self.version.per_page();
        let words = self.storage.shared(index / per_page).ok_or(AccessError::OutOfRange)?;
        let opened = match self.version {
            Version::V1 => entry::open_v1(&words[index % 512], caller, rights),
            Version::V2 => {
                let status = self.status_word(index).ok_or(AccessError::OutOfRange)?;
                let head = index % 256 * 2;
                entry::open_v2(&words[head], &words[head + 1], status, caller, rights, sorts)
            }
        };
        opened.map_err(|error| match error {
            OpenError::Refused => AccessError::Refused,
            OpenError::Unstable => AccessError::Unstable,
        })
    }

    #[inline]
    fn close(&self, index: usize, bits: u16) {
        if bits == 0 {
            return;
        }
        match self.version {
            Version::V1 => {
                if let Some(words) = self.storage.shared(index / 512) {
                    entry::close_v1(&words[index % 512], bits);
                }
            }
            Version::V2 => {
                if let Some(status) = self.status_word(index) {
                    entry::close_v2(status, bits);
                }
            }
        }
    }

    pub(crate) fn status_word(&self, index: usize) -> Option<&AtomicU16> {
        let page = self.storage.status(index / abi::STATUS_PER_PAGE)?;
        Some(&page[index % abi::STATUS_PER_PAGE])
    }
}
