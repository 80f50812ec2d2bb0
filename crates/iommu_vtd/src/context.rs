//! Root and context tables: which domain's tables a requester is translated with.
//!
//! An entry changes only through not-present, and each change is followed by the
//! invalidations it needs: the context cache first, then the IOTLB under the tag the
//! entry had *before* (6.2.2.1, 6.5.3.3).

use flush::Mfn;
use stage2::TableMemory;

use crate::spec::tables::{self, TranslationType};
use crate::submit::CommandError;
use crate::unit::{Reach, Unit, UnitState};
use crate::{Block, Command, Device, Guarded, Mmio, Platform, SourceId, Tag};

/// Where and how a requester is to be translated.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Binding {
    pub(crate) source: SourceId,
    pub(crate) tag: Tag,
    pub(crate) root: Mfn,
    pub(crate) levels: u8,
    pub(crate) translation: TranslationType,
}

/// Why a context entry was not written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ContextError {
    /// The unit was not brought up.
    Down,
    /// No page for a context table.
    NoMemory,
    /// The requester's entry is present: it belongs to another domain.
    Taken,
    /// A command that makes the new entry visible did not complete.
    Command(CommandError),
}

impl<P: Platform, R: Mmio, L: Guarded<UnitState>> Unit<P, R, L> {
    /// The context table of `bus`, if it has one.
    fn context_table(&self, memory: &impl TableMemory, bus: u8) -> Option<Mfn> {
        let root = self.locked(|state| state.root)?;
        let low = memory.read(root, 2 * usize::from(bus));
        (low & tables::PRESENT != 0).then(|| tables::frame(low))
    }

    /// The context table of `bus`, made if there is none. Tables stay for good.
    fn make_context_table(&self, memory: &impl TableMemory, bus: u8) -> Result<Mfn, ContextError> {
        let root = self.locked(|state| state.root).ok_or(ContextError::Down)?;
        if let Some(table) = self.context_table(memory, bus) {
            return Ok(table);
        }
        let fresh = memory.allocate().ok_or(ContextError::NoMemory)?;
        let low = tables::root_low(fresh.mfn());
        // Two devices of one bus may be attached at the same time: the first table stays.
        match memory.compare_exchange(root, 2 * usize::from(bus), 0, low) {
            Ok(()) => Ok(memory.link(fresh)),
            Err(present) => {
                memory.discard(fresh);
                Ok(tables::frame(present))
            }
        }
    }

    /// Makes the requester's entry present, and known to hardware that caches absence.
    ///
    /// The high half goes first: hardware looks at it only when the low half is present. It
    /// is never 0, so it also says whose the entry is, from before the first use until
    /// nothing of it is cached any more.
    pub(crate) fn bind(
        &self,
        memory: &impl TableMemory,
        binding: Binding,
    ) -> Result<(), ContextError> {
        let Binding { source, tag, root, levels, translation } = binding;
        let table = self.make_context_table(memory, source.bus())?;
        let index = 2 * usize::from(source.device_function());
        let high = tables::context_high(levels, tag.get());
        memory.compare_exchange(table, index + 1, 0, high).map_err(|_| ContextError::Taken)?;
        memory.swap(table, index, tables::context_low(root, translation));
        if self.capabilities().caching_mode() {
            // The absent entry may be cached, under tag 0 (6.2.2).
            self.run(|submitter| {
                submitter.push(Command::ContextDevice { tag: Tag::RESERVED, source });
                submitter.push(Command::IotlbDomain { tag });
            })
            .map_err(ContextError::Command)?;
        } else if self.capabilities().needs_write_buffer_flush() {
            self.flush_write_buffers().map_err(ContextError::Command)?;
        }
        Ok(())
    }

    /// Makes the requester's entry not present and everything cached through it
    /// forgotten: context cache, IOTLB under `tag`, and the device's own cache.
    ///
    /// A device that is gone is not asked. Repeating it after an error is safe and needed.
    pub(crate) fn unbind(
        &self,
        memory: &impl TableMemory,
        device: &Device,
        tag: Tag,
    ) -> Result<(), CommandError> {
        let source = device.source;
        let table = self.context_table(memory, source.bus());
        let index = 2 * usize::from(source.device_function());
        if let Some(table) = table {
            memory.swap(table, index, 0);
        }
        self.run(|submitter| {
            submitter.push(Command::ContextDevice { tag, source });
            submitter.push(Command::IotlbDomain { tag });
            let extended = self.extended_capabilities();
            if let Some(command) = device.command(extended, Block::ALL) {
                match self.reach(source) {
                    Reach::Commands => submitter.push(command),
                    Reach::Down => submitter.note(Err(CommandError::Stopped)),
                    // It comes back with an empty cache, and is not attached before.
                    Reach::Gone => {}
                }
            }
        })?;
        if let Some(table) = table {
            memory.swap(table, index + 1, 0);
        }
        Ok(())
    }
}
