//! Taking a domain's own tables down, in as many steps as it takes.
//!
//! A [`DmaTeardown`] holds what is left of a domain that has no device any more. When it
//! is done, every table of it is on the record of some batch.

use flush::{Iotlb, Skipped};
use stage2::{Budget, Recorder, Rest, Sink, Stopped, TableMemory};

use crate::unit::{Unit, UnitState};
use crate::{DmaDomain, DmaFlush, Guarded, Members, Mmio, Platform};

/// The end of a [`DmaDomain`] with tables of its own: everything is cleared, every table
/// goes on record, the root last.
///
/// No device can get at the tables: the domain had none, and takes no more.
#[derive(Debug)]
#[must_use = "what is not torn down is leaked"]
pub struct DmaTeardown<G> {
    domain: DmaDomain<G>,
    /// `None` once the root is on record.
    rest: Option<Rest>,
}

impl<G: Guarded<Members>> DmaDomain<G> {
    /// Begins to take the domain's own tables down.
    ///
    /// This is the way to free its root: devices walk it from the context entries that
    /// [`detach`](Self::detach) clears. Not for tables that CPUs walk as well; those go
    /// with their p2m, once this domain has no [`devices`](Self::devices).
    ///
    /// # Errors
    ///
    /// Gives the domain back while it has a device, those included whose detach has not
    /// completed.
    pub fn teardown(self) -> Result<DmaTeardown<G>, Self> {
        if self.devices() != 0 {
            return Err(self);
        }
        let rest = Rest::new(self.space());
        Ok(DmaTeardown { domain: self, rest: Some(rest) })
    }
}

impl<G: Guarded<Members>> DmaTeardown<G> {
    /// Goes on until everything is on record, or as far as the budget, the sink and the
    /// record have room. Each step can be a batch of its own; the proofs of the leaves go
    /// to `sink`. `budget` counts entries read.
    ///
    /// # Errors
    ///
    /// As [`stage2::destroy`]. The next step goes on there.
    pub fn step<'id>(
        &mut self,
        memory: &impl TableMemory,
        budget: &mut Budget,
        skipped: &mut Skipped<'id>,
        sink: impl Sink<'id, Iotlb>,
    ) -> Result<(), Stopped> {
        let Some(rest) = self.rest else { return Ok(()) };
        let mut record = Recorder::new(skipped, sink);
        match stage2::destroy(self.domain.tables(memory), rest, budget, &mut record) {
            Ok(_) => self.rest = None,
            Err(stopped) => {
                self.rest = Some(stopped.rest);
                return Err(stopped);
            }
        }
        Ok(())
    }

    /// The flusher for the batches of the steps.
    pub const fn flusher<'a, P: Platform, R: Mmio, L: Guarded<UnitState>>(
        &'a self,
        units: &'a [Unit<P, R, L>],
    ) -> DmaFlush<'a, P, R, L, G> {
        DmaFlush::new(units, &self.domain)
    }

    /// Whether everything is on record.
    #[must_use]
    pub const fn is_done(&self) -> bool {
        self.rest.is_none()
    }
}
