//! The frames of a table: growth, mapping by the guest, change of version.
//!
//! A shared frame counts only once its active entries (and status words, in version 2)
//! exist. Looking a frame up and mapping it is one step under the table's lock, so that
//! a version change can neither free a frame that is being mapped nor miss one that is.

use core::sync::atomic::Ordering;

use flush::{DomainId, Mfn};

use crate::{
    abi::{RESERVED_REFERENCES, STATUS_PER_PAGE, entry_flags},
    active::ACTIVE_PER_PAGE,
    domain::NoMemory,
    entry,
    table::{GrantStorage, GrantTable, TableFrame, Version},
};

/// Pages of active entries for one shared frame; enough for the denser version.
const ACTIVE_PAGES: usize = Version::V1.per_page() / ACTIVE_PER_PAGE;

/// Why a table has no such frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FrameError {
    /// Beyond what the table may have, or the version has none of the sort.
    OutOfRange,
    /// The embedder had no page.
    NoMemory,
}

impl From<NoMemory> for FrameError {
    fn from(NoMemory: NoMemory) -> Self {
        Self::NoMemory
    }
}

/// Why a table keeps its version.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum VersionError {
    /// A reference beyond the reserved ones holds a pin.
    Pinned,
    /// The guest has a status frame mapped.
    StatusMapped,
    /// The embedder had no page for status words.
    NoMemory,
    /// A reserved entry has no form in version 1.
    Unrepresentable,
}

impl<S: GrantStorage> GrantTable<S> {
    /// A version 1 table of `owner` with `frames` shared frames and room for more.
    ///
    /// # Errors
    /// [`FrameError::OutOfRange`] if `frames` is above `maximum_frames`,
    /// [`FrameError::NoMemory`] if the storage could not be had.
    pub fn new(
        owner: DomainId,
        storage: S,
        frames: usize,
        maximum_frames: usize,
    ) -> Result<Self, FrameError> {
        let mut table = Self {
            storage,
            owner,
            version: Version::V1,
            frames: 0,
            maximum_frames,
            references: 0,
            pinned: 0,
        };
        table.grow(frames)?;
        Ok(table)
    }

    /// Shared frames in use.
    #[must_use]
    pub fn frames(&self) -> usize {
        self.frames
    }

    /// Shared frames allowed.
    #[must_use]
    pub fn maximum_frames(&self) -> usize {
        self.maximum_frames
    }

    /// Status frames in use: none in version 1.
    #[must_use]
    pub fn status_frames(&self) -> usize {
        status_frames(self.version, self.frames)
    }

    /// Grows to `frames` shared frames; a table never shrinks.
    ///
    /// # Errors
    /// As [`new`](Self::new). What was added before memory ran out stays.
    pub fn grow(&mut self, frames: usize) -> Result<(), FrameError> {
        if frames > self.maximum_frames {
            return Err(FrameError::OutOfRange);
        }
        for page in self.frames..frames {
            for half in 0..ACTIVE_PAGES {
                self.storage.add_active(page.saturating_mul(ACTIVE_PAGES).saturating_add(half))?;
            }
            let grown = page.saturating_add(1);
            for status in self.status_frames()..status_frames(self.version, grown) {
                self.storage.add_status(status)?;
            }
            self.storage.add_shared(page)?;
            self.frames = grown;
            self.count_references();
        }
        Ok(())
    }

    /// Maps one frame of the table into the guest, growing the table if need be.
    ///
    /// `insert` runs while the table cannot change: what it is given stays valid until
    /// it has told the storage that the frame is mapped.
    ///
    /// # Errors
    /// [`FrameError`], and then `insert` did not run.
    pub fn map_frame<R>(
        &mut self,
        frame: TableFrame,
        insert: impl FnOnce(&mut S, Mfn) -> R,
    ) -> Result<R, FrameError> {
        match frame {
            TableFrame::Shared(page) => {
                self.grow(self.frames.max(page.saturating_add(1)))?;
            }
            TableFrame::Status(page) if page >= self.status_frames() => {
                return Err(FrameError::OutOfRange);
            }
            TableFrame::Status(_) => {}
        }
        let mfn = self.storage.frame(frame).ok_or(FrameError::OutOfRange)?;
        Ok(insert(&mut self.storage, mfn))
    }

    /// Changes the layout of the entries.
    ///
    /// All entries are wiped but the reserved ones, which are carried over with their
    /// in-use bits. Going from version 1 to 2 halves the references.
    ///
    /// # Errors
    /// [`VersionError`]; then nothing changed, except that status frames may have been
    /// added to the storage.
    pub fn set_version(&mut self, version: Version) -> Result<(), VersionError> {
        if version == self.version {
            return Ok(());
        }
        if self.pinned != 0 {
            return Err(VersionError::Pinned);
        }
        match version {
            Version::V2 => self.change_to_v2(),
            Version::V1 => self.change_to_v1(),
        }
    }

    fn change_to_v2(&mut self) -> Result<(), VersionError> {
        for page in 0..status_frames(Version::V2, self.frames) {
            self.storage.add_status(page).map_err(|NoMemory| VersionError::NoMemory)?;
        }
        let mut reserved = [0; RESERVED_REFERENCES];
        if let Some(words) = self.storage.shared(0) {
            for (kept, word) in reserved.iter_mut().zip(words) {
                *kept = word.load(Ordering::Acquire);
            }
        }
        self.wipe();
        self.version = Version::V2;
        self.count_references();
        for (index, old) in reserved.into_iter().enumerate() {
            let in_use = entry::flags(old) & entry_flags::IN_USE;
            let head = old & HEAD & !u64::from(entry_flags::IN_USE);
            if let Some(status) = self.status_word(index) {
                status.store(in_use, Ordering::Release);
            }
            self.write(index * 2 + 1, old >> 32);
            self.write(index * 2, head);
        }
        Ok(())
    }

    fn change_to_v1(&mut self) -> Result<(), VersionError> {
        let mut reserved = [0; RESERVED_REFERENCES];
        if let Some(words) = self.storage.shared(0) {
            for (kept, words) in reserved.iter_mut().zip(words.chunks_exact(2)) {
                let head = words[0].load(Ordering::Acquire);
                let frame = words[1].load(Ordering::Acquire);
                *kept = v1_entry(head, frame).ok_or(VersionError::Unrepresentable)?;
            }
        }
        let frames = self.status_frames();
        if (0..frames).any(|page| self.storage.status_mapped(page)) {
            return Err(VersionError::StatusMapped);
        }
        for (index, kept) in reserved.iter_mut().enumerate() {
            let in_use = self.status_word(index).map_or(0, |word| word.load(Ordering::Acquire));
            *kept |= u64::from(in_use & entry_flags::IN_USE);
        }
        self.wipe();
        self.version = Version::V1;
        self.count_references();
        for page in 0..frames {
            self.storage.remove_status(page);
        }
        for (index, word) in reserved.into_iter().enumerate() {
            self.write(index, word);
        }
        Ok(())
    }

    /// Makes every shared entry grant nothing.
    fn wipe(&self) {
        for word in (0..self.frames).filter_map(|page| self.storage.shared(page)).flatten() {
            word.store(0, Ordering::Release);
        }
    }

    /// Writes a word of the first shared frame.
    fn write(&self, word: usize, value: u64) {
        if let Some(word) = self.storage.shared(0).and_then(|words| words.get(word)) {
            word.store(value, Ordering::Release);
        }
    }

    fn count_references(&mut self) {
        self.references = self.frames.saturating_mul(self.version.per_page());
    }
}

/// Flags and grantee, which lie alike in both versions.
const HEAD: u64 = 0xffff_ffff;

/// A version 2 entry in version 1's form, without in-use bits; `None` if it has none.
fn v1_entry(head: u64, frame: u64) -> Option<u64> {
    let flags = entry::flags(head);
    let plain =
        flags & entry_flags::SUB_PAGE == 0 && flags & entry_flags::TYPE != entry_flags::TRANSITIVE;
    if flags & entry_flags::TYPE == 0 {
        return Some(0);
    }
    let frame = u32::try_from(frame).ok().filter(|_| plain)?;
    Some(u64::from(frame) << 32 | head & HEAD & !u64::from(entry_flags::IN_USE))
}

/// Status frames that `frames` shared frames need.
const fn status_frames(version: Version, frames: usize) -> usize {
    match version {
        Version::V1 => 0,
        Version::V2 => frames.saturating_mul(Version::V2.per_page()).div_ceil(STATUS_PER_PAGE),
    }
}
