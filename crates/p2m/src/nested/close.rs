//! The end of shadow tables.
//!
//! [`Nested::close`] frees every table of every shadow through the record of a batch;
//! after it [`Nested::into_p2m`] gives the canonical map back, for its own teardown.

use core::fmt;

use flush::{Skipped, Tlb};
use stage2::{Budget, Format, Rest, Stop, TableMemory};

use super::{Nested, edit, shadow::Shadow};
use crate::{record::Walkers, table::P2m};

/// Why the shadows are not closed.
#[derive(Debug, PartialEq, Eq)]
pub enum CloseError {
    /// Some vCPU has picked one of them; nothing was done.
    InUse,
    /// The walk stopped: flush if need be, then go on by calling again.
    Stopped(Stop),
}

impl fmt::Display for CloseError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::InUse => f.write_str("some shadow table is in use"),
            Self::Stopped(stop) => write!(f, "shadow tables not freed: {stop}"),
        }
    }
}

impl core::error::Error for CloseError {}

impl<'s, F: Format, M: TableMemory, K: Walkers> Nested<'s, F, M, K> {
    /// Frees every table of every shadow, their roots last, in as many steps as it
    /// takes. The record of each table goes to the batch.
    ///
    /// # Errors
    ///
    /// See [`CloseError`].
    pub fn close(
        &mut self,
        budget: &mut Budget,
        skipped: &mut Skipped<'_>,
    ) -> Result<(), CloseError> {
        if self.shadows.iter().any(|shadow| shadow.users > 0) {
            return Err(CloseError::InUse);
        }
        for slot in 0..self.shadows.len() {
            self.destroy(slot, budget, skipped).map_err(CloseError::Stopped)?;
        }
        Ok(())
    }

    /// The canonical map alone, once no shadow has a table.
    ///
    /// # Errors
    ///
    /// Gives everything back while some shadow has.
    #[expect(clippy::result_large_err, reason = "no heap, and the error is the whole value")]
    pub fn into_p2m(self) -> Result<P2m<F, M, K>, Self> {
        if self.roots().next().is_some() { Err(self) } else { Ok(self.p2m) }
    }

    fn destroy(
        &mut self,
        slot: usize,
        budget: &mut Budget,
        skipped: &mut Skipped<'_>,
    ) -> Result<(), Stop> {
        let space = self.p2m.tables().format.geometry().space();
        let shadow = &mut self.shadows[slot];
        if shadow.root.is_none() {
            return Ok(());
        }
        if !shadow.closing {
            // From the start: a walk that was under way may have kept emptied tables.
            shadow.mark(space);
            shadow.rest = Some(Rest::new(space));
            shadow.context = None;
            shadow.closing = true;
        }
        let rest = shadow.rest.unwrap_or(Rest::new(space));
        let Some((tables, mut edit)) =
            edit(&self.p2m, &mut *self.shadows, &mut self.reverse, slot, skipped)
        else {
            return Ok(());
        };
        let ended = stage2::destroy(tables, rest, budget, &mut edit);
        let shadow = &mut self.shadows[slot];
        match ended {
            Ok(tally) => {
                self.counts.swept = self.counts.swept.saturating_add(tally.leaves);
                let (generation, recorded) = (shadow.generation, shadow.recorded);
                *shadow = Shadow { generation, ..Shadow::VACANT };
                skipped.everything::<Tlb>();
                if recorded > 0 {
                    self.reverse.forget(slot);
                }
                Ok(())
            }
            Err(stopped) => {
                self.counts.swept = self.counts.swept.saturating_add(stopped.tally.leaves);
                shadow.rest = Some(stopped.rest);
                Err(stopped.stop)
            }
        }
    }
}
