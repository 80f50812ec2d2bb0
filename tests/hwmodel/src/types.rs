//! Frame numbers, owners, moments, rights: the words the model speaks in
//!
//! Input addresses (guest-physical or device) are plain `u64` byte addresses; host frames are [`Frame`].

use core::fmt;

/// A host frame of 4 KiB, by number.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct Frame(pub u64);

impl Frame {
    /// Byte address of the frame. Numbers of 2^52 and up have none and give the last page of the space.
    #[must_use]
    pub const fn address(self) -> u64 {
        if self.0 >> 52 != 0 { !0xfff } else { self.0 << 12 }
    }

    /// The frame that holds byte `address`.
    #[must_use]
    pub const fn containing(address: u64) -> Self {
        Self(address >> 12)
    }

    /// The frame `pages` after this one, stopping at the last number.
    #[must_use]
    pub const fn plus(self, pages: u64) -> Self {
        Self(self.0.saturating_add(pages))
    }
}

/// Who a frame belongs to. The numbers mean what the test says they mean.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct Owner(pub u32);

/// A moment: every event that goes into the machine has its own number, later ones are larger.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default)]
pub struct Op(pub u64);

/// Which of the machine's VT-d units, in order of [`crate::Machine::add_unit`].
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct UnitId(pub usize);

/// What an access wants to do.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum Access {
    /// A load.
    Read,
    /// A store.
    Write,
    /// An instruction fetch; devices never do it.
    Execute,
}

/// What a translation allows.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Rights {
    /// Loads.
    pub read: bool,
    /// Stores.
    pub write: bool,
    /// Instruction fetches.
    pub execute: bool,
}

impl Rights {
    /// Everything.
    pub const ALL: Self = Self { read: true, write: true, execute: true };
    /// Nothing.
    pub const NONE: Self = Self { read: false, write: false, execute: false };
    /// Loads only.
    pub const READ: Self = Self { read: true, write: false, execute: false };
    /// Loads and stores.
    pub const READ_WRITE: Self = Self { read: true, write: true, execute: false };

    /// Is `access` allowed?
    #[must_use]
    pub const fn allows(self, access: Access) -> bool {
        match access {
            Access::Read => self.read,
            Access::Write => self.write,
            Access::Execute => self.execute,
        }
    }

    /// What both allow.
    #[must_use]
    pub const fn and(self, other: Self) -> Self {
        Self {
            read: self.read && other.read,
            write: self.write && other.write,
            execute: self.execute && other.execute,
        }
    }

    /// Does this allow anything that `other` does not?
    #[must_use]
    pub const fn exceeds(self, other: Self) -> bool {
        (self.read && !other.read)
            || (self.write && !other.write)
            || (self.execute && !other.execute)
    }
}

impl fmt::Debug for Rights {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mark = |on: bool, letter: char| if on { letter } else { '-' };
        write!(
            formatter,
            "{}{}{}",
            mark(self.read, 'r'),
            mark(self.write, 'w'),
            mark(self.execute, 'x')
        )
    }
}

/// An address space as a cache tells it from others.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum Space {
    /// A guest's physical space on the processors, by its tag (EPT root frame, or ASID).
    Cpu(u64),
    /// A DMA domain of one unit, by the unit's domain id.
    Device {
        /// The unit.
        unit: UnitId,
        /// The domain id in that unit's context entries.
        did: u16,
    },
}
