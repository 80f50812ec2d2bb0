//! What the loader says about the machine, whichever loader it was.
//!
//! A `BootInfo` has passed every check of its parser. `occupied` lists all memory that
//! still holds something it refers to, so an allocator that leaves those bytes alone
//! keeps the whole of it true.

use core::fmt;

use arrayvec::ArrayVec;

use crate::address::{Extent, PhysicalAddress};
use crate::command_line::CommandLine;

/// The most memory regions a loader may list.
pub const REGIONS: usize = 64;
/// The most boot modules a loader may pass.
pub const MODULES: usize = 8;
/// The most extents in [`BootInfo::occupied`].
pub const OCCUPIED: usize = MODULES + 4;
/// The longest command line, in bytes.
pub const COMMAND_LINE: usize = 4096;

/// The protocol the image was started by.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Loader {
    /// Xen's PVH start information: `-kernel` in QEMU.
    Pvh,
    /// Multiboot2 information: GRUB.
    Multiboot2,
}

/// One line of the memory map.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Region {
    /// Where it is.
    pub extent: Extent,
    /// Whether it is ordinary memory, free for use.
    pub usable: bool,
}

/// Everything the loader passed.
#[derive(Clone, Debug)]
pub struct BootInfo<'m> {
    /// Who started the image.
    pub loader: Loader,
    /// The words that choose the case.
    pub command_line: CommandLine<'m>,
    /// The memory map in the loader's order.
    pub regions: ArrayVec<Region, REGIONS>,
    /// The ACPI root pointer, if the loader knows it.
    pub rsdp: Option<PhysicalAddress>,
    /// The boot modules in the loader's order.
    pub modules: ArrayVec<Extent, MODULES>,
    /// Memory this information and the modules lie in.
    pub occupied: ArrayVec<Extent, OCCUPIED>,
}

/// Why the loader's information could not be used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BootInfoError {
    /// The structure at this address may not be read or does not hold together.
    Unreadable(PhysicalAddress),
    /// The structure at this address does not start with its magic number.
    Magic(PhysicalAddress),
    /// The loader gave no memory map.
    NoMemoryMap,
    /// More regions than [`REGIONS`], modules than [`MODULES`] or pieces to keep.
    TooMany,
    /// The command line is not UTF-8, or longer than [`COMMAND_LINE`] bytes.
    CommandLine,
}

impl fmt::Display for BootInfoError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unreadable(at) => write!(f, "boot information at {at:?} is unreadable"),
            Self::Magic(at) => write!(f, "no boot information at {at:?}"),
            Self::NoMemoryMap => f.write_str("the loader gave no memory map"),
            Self::TooMany => f.write_str("the loader lists too many regions or modules"),
            Self::CommandLine => f.write_str("the command line is too long or not UTF-8"),
        }
    }
}

impl core::error::Error for BootInfoError {}

/// Append to one of the bounded lists.
pub(crate) fn push<T, const N: usize>(
    list: &mut ArrayVec<T, N>,
    item: T,
) -> Result<(), BootInfoError> {
    list.try_push(item).map_err(|_| BootInfoError::TooMany)
}
