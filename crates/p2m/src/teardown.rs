//! Taking a whole p2m down, in as many steps as it takes.
//!
//! [`Teardown`] holds what is left of one. When it is done, every table of it is on the
//! record of some batch.

use flush::{Skipped, Tlb};
use stage2::{Budget, Format, Rest, Sink, Stopped, TableMemory};

use crate::{
    record::{Edit, Walkers},
    table::P2m,
};

/// The end of a [`P2m`]: everything is cleared, every table goes on record, the root
/// last.
///
/// The guest runs nowhere any more and its devices are detached. Each step can be a
/// batch of its own.
#[derive(Debug)]
#[must_use = "what is not torn down is leaked"]
pub struct Teardown<F, M, K = Tlb> {
    p2m: P2m<F, M, K>,
    /// `None` once the root is on record.
    rest: Option<Rest>,
}

impl<F: Format, M: TableMemory, K: Walkers> Teardown<F, M, K> {
    pub(crate) fn new(p2m: P2m<F, M, K>) -> Self {
        let rest = Rest::new(p2m.tables().format.geometry().space());
        Self { p2m, rest: Some(rest) }
    }

    /// Goes on until everything is on record, or as far as the budget, the sink and the
    /// record have room. The leaves' pages go to `sink`, whatever their kind.
    ///
    /// # Errors
    ///
    /// As [`stage2::destroy`]. The next step goes on there.
    pub fn step<'id>(
        &mut self,
        budget: &mut Budget,
        skipped: &mut Skipped<'id>,
        sink: impl Sink<'id, K>,
    ) -> Result<(), Stopped> {
        let Some(rest) = self.rest else { return Ok(()) };
        let mut edit = Edit::new(skipped, sink);
        match stage2::destroy(self.p2m.tables(), rest, budget, &mut edit) {
            Ok(_) => self.rest = None,
            Err(stopped) => {
                self.rest = Some(stopped.rest);
                return Err(stopped);
            }
        }
        Ok(())
    }

    /// Whether everything is on record. The tables must not be given to hardware again
    /// from the first step on.
    #[must_use]
    pub fn is_done(&self) -> bool {
        self.rest.is_none()
    }
}
