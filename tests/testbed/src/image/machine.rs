//! What a case is given: the machine as the loader and firmware described it.

use testbed::acpi;
use testbed::address::Extent;
use testbed::boot_info::BootInfo;
use testbed::command_line::CommandLine;
use testbed::failure::{Context, Failure};

use crate::memory::{self, Firmware};

/// The machine a case runs on. Frames, ports and devices are reached through their modules.
pub(crate) struct Machine {
    /// What the loader passed.
    pub(crate) boot: BootInfo<'static>,
}

impl Machine {
    /// The machine with this boot information.
    pub(crate) const fn new(boot: BootInfo<'static>) -> Self {
        Self { boot }
    }

    /// The words that chose the case, with its options.
    pub(crate) fn command_line(&self) -> CommandLine<'static> {
        self.boot.command_line
    }

    /// The DMAR table, header included, checksum checked.
    ///
    /// # Errors
    /// When the loader names no root pointer, or there is no sound DMAR table.
    pub(crate) fn dmar(&self) -> Result<&'static [u8], Failure> {
        let root = self.boot.rsdp.context("ACPI root pointer")?;
        Ok(acpi::find(&Firmware, root, *b"DMAR")?)
    }

    /// The bytes of a boot module, by its place in the loader's list.
    pub(crate) fn module(&self, index: usize) -> Option<&'static [u8]> {
        let Extent { start, length } = *self.boot.modules.get(index)?;
        memory::firmware(start, usize::try_from(length).ok()?)
    }
}
