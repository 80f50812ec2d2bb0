//! The guest interface: numbers, layouts and statuses of GNTTABOP.
//!
//! This is the only module that knows a number a guest sees. A structure here is what
//! a guest wrote: every field may hold anything. Sizes and offsets are asserted below
//! against the public interface that guests are compiled with (x86, 64 bit).

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use crate::{
    domain::{ClearError, PageError},
    frames::{FrameError, VersionError},
    swap::SwapError,
    table::AccessError,
};

/// The operation of a grant-table hypercall, without its continuation cookie.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Operation {
    /// 0: map grants of other domains.
    MapGrantRef,
    /// 1: give mappings back.
    UnmapGrantRef,
    /// 2: size the caller's table, list its frames.
    SetupTable,
    /// 4: give a page away. Not offered.
    Transfer,
    /// 5: copy between granted pages and the caller's own.
    Copy,
    /// 6: frames in use and frames allowed.
    QuerySize,
    /// 7: give mappings back, putting another page there.
    UnmapAndReplace,
    /// 8: choose the entry format.
    SetVersion,
    /// 9: list the frames of status words.
    GetStatusFrames,
    /// 10: the entry format of a domain.
    GetVersion,
    /// 11: two entries of the caller's table change places.
    SwapGrantRef,
}

/// Bits of the command word that hold the operation; those above are a cookie.
const OPERATION_BITS: u32 = 0xfff;

impl Operation {
    /// Splits a command word.
    ///
    /// # Errors
    /// [`Errno::Invalid`] if a cookie comes with an operation that takes none,
    /// [`Errno::NoSystemCall`] for an operation that is not offered.
    pub fn from_command(command: u32) -> Result<Self, Errno> {
        const CACHE_FLUSH: u32 = 12;
        let cookie = command & !OPERATION_BITS;
        let number = command & OPERATION_BITS;
        if cookie != 0 && number != CACHE_FLUSH {
            return Err(Errno::Invalid);
        }
        Ok(match number {
            0 => Self::MapGrantRef,
            1 => Self::UnmapGrantRef,
            2 => Self::SetupTable,
            4 => Self::Transfer,
            5 => Self::Copy,
            6 => Self::QuerySize,
            7 => Self::UnmapAndReplace,
            8 => Self::SetVersion,
            9 => Self::GetStatusFrames,
            10 => Self::GetVersion,
            11 => Self::SwapGrantRef,
            _ => return Err(Errno::NoSystemCall),
        })
    }
}

/// Result of a whole hypercall that did not succeed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(i64)]
pub enum Errno {
    /// -1: the policy hook refused an operation that has no status field.
    NotPermitted = -1,
    /// -3: no such domain, for an operation that has no status field.
    NoSuchDomain = -3,
    /// -12: the embedder had no page for the table.
    NoMemory = -12,
    /// -14: guest memory could not be read or written, or a flush failed.
    Fault = -14,
    /// -16: grants are in use, or a status frame is still mapped.
    Busy = -16,
    /// -22: an argument that is never valid.
    Invalid = -22,
    /// -34: a reserved entry that the other version cannot express.
    Range = -34,
    /// -38: the operation is not offered.
    NoSystemCall = -38,
    /// -95: the operation exists but not for this kind of caller.
    NotSupported = -95,
}

impl Errno {
    /// The value for the guest's result register, always negative.
    #[must_use]
    pub const fn value(self) -> i64 {
        self as i64
    }
}

/// Status of one element of an operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(i16)]
pub enum Status {
    /// 0: done, or there was nothing to do.
    Okay = 0,
    /// -1: the catch-all.
    GeneralError = -1,
    /// -2: no such domain.
    BadDomain = -2,
    /// -3: grant reference out of range, or no kind of mapping asked for.
    BadReference = -3,
    /// -4: handle out of range, free, or changed meanwhile.
    BadHandle = -4,
    /// -5: the frame list could not be written.
    BadVirtualAddress = -5,
    /// -8: refused by policy.
    PermissionDenied = -8,
    /// -9: the granted frame, or the frame to copy, is not RAM.
    BadPage = -9,
    /// -10: the bytes to copy do not lie in one page.
    BadCopyArgument = -10,
    /// -12: the granted page is not present yet, or the entry is in use; ask again.
    Again = -12,
    /// -13: no handle left.
    NoSpace = -13,
}

impl Status {
    /// The value a guest reads.
    #[must_use]
    pub const fn value(self) -> i16 {
        self as i16
    }
}

impl From<AccessError> for Status {
    fn from(error: AccessError) -> Self {
        match error {
            AccessError::OutOfRange => Self::BadReference,
            AccessError::Page(PageError::NotRam) => Self::BadPage,
            AccessError::Page(PageError::NotPresent) => Self::Again,
            AccessError::Page(PageError::Refused)
            | AccessError::OtherHolder
            | AccessError::TooManyPins
            | AccessError::Refused
            | AccessError::Unstable => Self::GeneralError,
        }
    }
}

impl From<ClearError> for Status {
    fn from(error: ClearError) -> Self {
        match error {
            ClearError::NotGrant
            | ClearError::OtherFrame
            | ClearError::OtherRights
            | ClearError::Failed => Self::GeneralError,
        }
    }
}

impl From<SwapError> for Status {
    fn from(error: SwapError) -> Self {
        match error {
            SwapError::OutOfRange => Self::BadReference,
            SwapError::InUse => Self::Again,
        }
    }
}

impl From<FrameError> for Status {
    fn from(error: FrameError) -> Self {
        match error {
            FrameError::OutOfRange | FrameError::NoMemory => Self::GeneralError,
        }
    }
}

impl From<VersionError> for Errno {
    fn from(error: VersionError) -> Self {
        match error {
            VersionError::Pinned | VersionError::StatusMapped => Self::Busy,
            VersionError::NoMemory => Self::NoMemory,
            VersionError::Unrepresentable => Self::Range,
        }
    }
}

/// Domain id with which a guest means itself, where that is translated.
pub(crate) const DOMID_SELF: u16 = 0x7ff0;

/// Frame number that says "nowhere" in a frame list.
pub(crate) const NO_FRAME: u64 = u64::MAX;

/// Handle that is never valid, written where a map failed.
pub(crate) const NO_HANDLE: u32 = u32::MAX;

/// Bytes of a page.
pub(crate) const PAGE_BYTES: u16 = 4096;

/// Version 2 status words in one frame.
pub(crate) const STATUS_PER_PAGE: usize = 2048;

/// References that a toolstack sets up and that survive a version change.
pub const RESERVED_REFERENCES: usize = 8;

/// Bits of a shared entry's flags word.
pub(crate) mod entry_flags {
    pub(crate) const TYPE: u16 = 0b11;
    pub(crate) const PERMIT_ACCESS: u16 = 1;
    pub(crate) const TRANSITIVE: u16 = 3;
    pub(crate) const READ_ONLY: u16 = 1 << 2;
    pub(crate) const READING: u16 = 1 << 3;
    pub(crate) const WRITING: u16 = 1 << 4;
    pub(crate) const SUB_PAGE: u16 = 1 << 8;
    pub(crate) const IN_USE: u16 = READING | WRITING;
}

/// Bits of a map request.
pub(crate) mod map_flags {
    pub(crate) const DEVICE: u32 = 1 << 0;
    pub(crate) const HOST: u32 = 1 << 1;
    pub(crate) const READ_ONLY: u32 = 1 << 2;
    pub(crate) const APPLICATION: u32 = 1 << 3;
    pub(crate) const CONTAINS_PTE: u32 = 1 << 4;
}

/// Bits of a copy request; no other has a meaning.
pub(crate) mod copy_flags {
    pub(crate) const SOURCE_REFERENCE: u16 = 1 << 0;
    pub(crate) const DEST_REFERENCE: u16 = 1 << 1;
}

macro_rules! guest_structures {
    ($($(#[$meta:meta])* $name:ident, $size:literal {
        $($(#[$field_meta:meta])* $field:ident: $kind:ty = $offset:literal,)*
    })*) => {$(
        $(#[$meta])*
        #[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout)]
        #[repr(C)]
        pub struct $name { $($(#[$field_meta])* pub $field: $kind,)* }
        const _: () = {
            assert!(size_of::<$name>() == $size);
            $(assert!(core::mem::offset_of!($name, $field) == $offset);)*
        };
    )*};
}

guest_structures! {
    /// One element of [`Operation::MapGrantRef`]; all of it is written back.
    MapGrantRef, 32 {
        /// In: where to map it, a guest-physical address; the low 12 bits are ignored.
        host_addr: u64 = 0,
        /// In: kinds of mapping and rights.
        flags: u32 = 8,
        /// In: reference in the granter's table.
        reference: u32 = 12,
        /// In: the granter. A domain's own number is not translated here.
        domain: u16 = 16,
        /// Out: [`Status`].
        status: i16 = 18,
        /// Out: names the mapping when it is given back.
        handle: u32 = 20,
        /// Out: address a device of the caller reaches the page at.
        dev_bus_addr: u64 = 24,
    }
    /// One element of [`Operation::UnmapGrantRef`]; only the status is written back.
    UnmapGrantRef, 24 {
        /// In: where it is mapped; 0 leaves that part alone.
        host_addr: u64 = 0,
        /// In: a device part to unmap; a translated caller has none.
        dev_bus_addr: u64 = 8,
        /// In: from the map.
        handle: u32 = 16,
        /// Out: [`Status`].
        status: i16 = 20,
        /// Not looked at.
        padding: u16 = 22,
    }
    /// One element of [`Operation::UnmapAndReplace`]; only the status is written back.
    UnmapAndReplace, 24 {
        /// In: where it is mapped; 0 leaves it alone.
        host_addr: u64 = 0,
        /// In: what to put there; a translated caller may only say 0.
        new_addr: u64 = 8,
        /// In: from the map.
        handle: u32 = 16,
        /// Out: [`Status`].
        status: i16 = 20,
        /// Not looked at.
        padding: u16 = 22,
    }
    /// Argument of [`Operation::SetupTable`].
    SetupTable, 24 {
        /// In: whose table.
        domain: u16 = 0,
        /// Not looked at.
        padding: u16 = 2,
        /// In: frames wanted, and length of the list.
        frames: u32 = 4,
        /// Out: [`Status`].
        status: i16 = 8,
        /// Not looked at.
        padding_before_list: [u16; 3] = 10,
        /// In: address of an array of 64-bit frame numbers.
        list: u64 = 16,
    }
    /// One side of a [`GrantCopy`].
    CopyPlace, 16 {
        /// In: a reference in its low 32 bits, or a frame number of the caller.
        frame: u64 = 0,
        /// In: the granter. With a frame number it has to be `0x7ff0`, which is the caller.
        domain: u16 = 8,
        /// In: first byte in the page.
        offset: u16 = 10,
        /// Not looked at.
        padding: u32 = 12,
    }
    /// One element of [`Operation::Copy`]; only the status is written back.
    GrantCopy, 40 {
        /// In: where to read.
        source: CopyPlace = 0,
        /// In: where to write.
        dest: CopyPlace = 16,
        /// In: how many bytes.
        length: u16 = 32,
        /// In: which sides are references: bit 0 the source, bit 1 the destination.
        flags: u16 = 34,
        /// Out: [`Status`].
        status: i16 = 36,
        /// Not looked at.
        padding: u16 = 38,
    }
    /// One element of [`Operation::SwapGrantRef`]; only the status is written back.
    SwapGrantRef, 12 {
        /// In: a reference of the caller's table.
        first: u32 = 0,
        /// In: another.
        second: u32 = 4,
        /// Out: [`Status`].
        status: i16 = 8,
        /// Not looked at.
        padding: u16 = 10,
    }
    /// Argument of [`Operation::QuerySize`].
    QuerySize, 16 {
        /// In: whose table.
        domain: u16 = 0,
        /// Not looked at.
        padding: u16 = 2,
        /// Out: frames in use.
        frames: u32 = 4,
        /// Out: frames allowed.
        maximum: u32 = 8,
        /// Out: [`Status`].
        status: i16 = 12,
        /// Not looked at.
        padding_at_end: u16 = 14,
    }
    /// Argument of [`Operation::GetStatusFrames`].
    GetStatusFrames, 16 {
        /// In: length of the list.
        frames: u32 = 0,
        /// In: whose table.
        domain: u16 = 4,
        /// Out: [`Status`].
        status: i16 = 6,
        /// In: address of an array of 64-bit frame numbers.
        list: u64 = 8,
    }
    /// Argument of [`Operation::GetVersion`].
    GetVersion, 8 {
        /// In: whose table.
        domain: u16 = 0,
        /// Not looked at.
        padding: u16 = 2,
        /// Out: 1 or 2.
        version: u32 = 4,
    }
    /// Argument of [`Operation::SetVersion`].
    SetVersion, 4 {
        /// In: the version wanted. Out: the version now.
        version: u32 = 0,
    }
}
