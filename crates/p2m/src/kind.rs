//! What a guest frame is, and what follows from that.
//!
//! A [`PageKind`] decides the rights of CPUs and devices, the memory type, and what may
//! happen to the mapping later. It is kept in the entry itself, in bits that hardware
//! ignores, so that one atomic step changes the translation and its meaning together.

use flush::Mfn;
use stage2::{Access, Leaf, MemoryType, Tag};

/// What is behind a guest frame number that is mapped.
///
/// A frame number with nothing behind it has no kind.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(u8)]
pub enum PageKind {
    /// The guest's own memory.
    RamReadWrite = 1,
    /// The guest's own memory, which it may not write.
    RamReadOnly = 2,
    /// The guest's own memory, write-protected so that its first write is noticed.
    LogDirty = 3,
    /// Another domain's page through a writable grant.
    GrantReadWrite = 4,
    /// Another domain's page through a read-only grant.
    GrantReadOnly = 5,
    /// Another domain's page, mapped by a privileged guest without a grant.
    Foreign = 6,
    /// Registers of a device that belongs to the guest.
    MmioDirect = 7,
}

impl PageKind {
    /// Every kind, in the order of their tags.
    pub const ALL: [Self; 7] = [
        Self::RamReadWrite,
        Self::RamReadOnly,
        Self::LogDirty,
        Self::GrantReadWrite,
        Self::GrantReadOnly,
        Self::Foreign,
        Self::MmioDirect,
    ];

    /// The bits that stand for this kind in an entry, never 0.
    #[must_use]
    #[inline]
    pub const fn tag(self) -> Tag {
        Tag::from_low_bits(self as u64)
    }

    /// The kind that these bits stand for, or `None` for bits that no kind has.
    #[must_use]
    #[inline]
    pub const fn from_tag(tag: Tag) -> Option<Self> {
        match tag.get() {
            1 => Some(Self::RamReadWrite),
            2 => Some(Self::RamReadOnly),
            3 => Some(Self::LogDirty),
            4 => Some(Self::GrantReadWrite),
            5 => Some(Self::GrantReadOnly),
            6 => Some(Self::Foreign),
            7 => Some(Self::MmioDirect),
            _ => None,
        }
    }

    /// What the guest's CPUs may do. Pages of other domains are never executable.
    #[must_use]
    #[inline]
    pub const fn access(self) -> Access {
        match self {
            Self::RamReadWrite | Self::MmioDirect => Access::ALL,
            Self::RamReadOnly | Self::LogDirty => Access::ALL.without(Access::WRITE),
            Self::GrantReadWrite | Self::Foreign => Access::READ_WRITE,
            Self::GrantReadOnly => Access::READ,
        }
    }

    /// What the guest's devices may do, in a table of their own.
    ///
    /// A device cannot be made to repeat a write, so log-dirty memory stays writable
    /// for it: whoever logs has to count pages that devices reach as written. (A table
    /// shared with the CPUs gives devices [`access`](Self::access) instead.)
    #[must_use]
    #[inline]
    pub const fn device_access(self) -> Access {
        match self {
            Self::RamReadWrite
            | Self::LogDirty
            | Self::GrantReadWrite
            | Self::Foreign
            | Self::MmioDirect => Access::READ_WRITE,
            Self::RamReadOnly | Self::GrantReadOnly => Access::READ,
        }
    }

    /// How CPUs may cache it.
    #[must_use]
    #[inline]
    pub const fn memory_type(self) -> MemoryType {
        match self {
            Self::MmioDirect => MemoryType::Uncacheable,
            Self::RamReadWrite
            | Self::RamReadOnly
            | Self::LogDirty
            | Self::GrantReadWrite
            | Self::GrantReadOnly
            | Self::Foreign => MemoryType::WriteBack,
        }
    }

    /// Whether it is mapped by single 4 KiB pages only.
    ///
    /// Each page of another domain is counted and given back on its own.
    #[must_use]
    #[inline]
    pub const fn single_pages_only(self) -> bool {
        match self {
            Self::GrantReadWrite | Self::GrantReadOnly | Self::Foreign => true,
            Self::RamReadWrite | Self::RamReadOnly | Self::LogDirty | Self::MmioDirect => false,
        }
    }

    /// Whether something else may be mapped over it without clearing it first.
    ///
    /// Only the guest's own memory gives way. Behind the other kinds stands somebody
    /// who counts the mapping.
    #[must_use]
    #[inline]
    pub const fn gives_way(self) -> bool {
        match self {
            Self::RamReadWrite | Self::RamReadOnly | Self::LogDirty => true,
            Self::GrantReadWrite | Self::GrantReadOnly | Self::Foreign | Self::MmioDirect => false,
        }
    }

    /// The leaf that shows `mfn` as a page of this kind.
    #[must_use]
    #[inline]
    pub const fn leaf(self, mfn: Mfn) -> Leaf {
        Leaf::new(mfn, self.access()).tagged(self.tag()).cached(self.memory_type())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_tag_stands_for_its_own_kind_or_for_none() {
        for value in 0..1 << Tag::BITS {
            let tag = Tag::new(value).expect("below the limit");
            let kind = PageKind::ALL.into_iter().find(|kind| kind.tag() == tag);
            assert_eq!(PageKind::from_tag(tag), kind, "tag {value}");
        }
        assert_eq!(PageKind::from_tag(Tag::default()), None);
    }

    #[track_caller]
    fn check(kind: PageKind, cpu: &str, device: &str, memory: MemoryType, single: bool, own: bool) {
        let access = |letters: &str| {
            letters.chars().fold(Access::NONE, |access, letter| {
                access
                    | match letter {
                        'r' => Access::READ,
                        'w' => Access::WRITE,
                        'x' => Access::EXECUTE,
                        other => panic!("no right is called {other}"),
                    }
            })
        };
        assert_eq!(kind.access(), access(cpu));
        assert_eq!(kind.device_access(), access(device));
        assert_eq!(kind.memory_type(), memory);
        assert_eq!(kind.single_pages_only(), single);
        assert_eq!(kind.gives_way(), own);
    }

    #[test]
    fn rights_follow_from_the_kind() {
        use MemoryType::{Uncacheable, WriteBack};
        check(PageKind::RamReadWrite, "rwx", "rw", WriteBack, false, true);
        check(PageKind::RamReadOnly, "rx", "r", WriteBack, false, true);
        check(PageKind::LogDirty, "rx", "rw", WriteBack, false, true);
        check(PageKind::GrantReadWrite, "rw", "rw", WriteBack, true, false);
        check(PageKind::GrantReadOnly, "r", "r", WriteBack, true, false);
        check(PageKind::Foreign, "rw", "rw", WriteBack, true, false);
        check(PageKind::MmioDirect, "rwx", "rw", Uncacheable, false, false);
    }
}
