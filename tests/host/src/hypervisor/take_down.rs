//! The end of a domain's tables, as far as a batch has room for at a time.
//!
//! A [`TakeDown`] owns the trees of a domain that no CPU runs and no device belongs to.

use std::sync::PoisonError;

use flush::{DomainId, Iotlb, Mfn, Room, Shared, Skipped};
use iommu_vtd::{DmaDomain, Members};
use p2m::{GuestCpus, Teardown};
use stage2::{Budget, Recorder, Rest, Stopped, Unheld, format::ept::Ept};

use super::{
    DeviceTables, Guest, Locked, Tables,
    maps::{CpuEnd, CpuTables},
    ranges::{Collect, Taken, TakenBatch, take},
};
use crate::{Memory, Ram};

impl<R: Ram> Guest<R> {
    /// The end of the guest's tables. No CPU runs it and it has no device any more.
    pub fn take_down(self) -> TakeDown<R> {
        let Self { id, space, dma, cpus, grants, handles: _ } = self;
        grants.into_inner().unwrap_or_else(PoisonError::into_inner).storage().give_back();
        let trees = match space.into_inner().unwrap_or_else(PoisonError::into_inner).tables {
            Tables::Shared(both) => Trees::Shared(both.teardown()),
            Tables::Separate { cpu, device } => {
                let (tree, rest) = ((cpu.kind(), cpu.root()), Some(Rest::new(dma.space())));
                Trees::Separate { tree, cpu: Box::new(cpu.teardown()), device, rest }
            }
        };
        TakeDown { id, cpus, dma, trees }
    }
}

/// A guest that is no more, and what is left of its tables.
pub struct TakeDown<R: Ram> {
    id: DomainId,
    /// The CPUs that may hold its translations.
    pub cpus: GuestCpus,
    /// The devices that it had.
    pub dma: DmaDomain<Locked<Members>>,
    trees: Trees<R>,
}

enum Trees<R: Ram> {
    Shared(Teardown<Ept, Memory<R>, Shared>),
    Separate {
        /// Of what sort the CPUs' tree is, and where it begins.
        tree: (CpuTables, Mfn),
        cpu: Box<CpuEnd<R>>,
        device: DeviceTables<R>,
        /// What is left of the devices' tree.
        rest: Option<Rest>,
    },
}

impl<R: Ram> TakeDown<R> {
    /// Which domain it was.
    pub fn id(&self) -> DomainId {
        self.id
    }

    /// Goes on as far as the batch has room; says whether that was all.
    ///
    /// # Errors
    /// [`Stopped`] if there was no memory to split a leaf of the devices: go on later. What
    /// is in the batch has to be flushed in any case.
    ///
    /// # Panics
    /// As [`Guest::clear_range`].
    pub fn step(&mut self, batch: &mut TakenBatch) -> Result<bool, Stopped> {
        let mut budget = Budget::UNLIMITED;
        self.step_within(&mut budget, batch)
    }

    /// The same, as far as the budget goes.
    ///
    /// # Errors
    /// As [`step`](Self::step).
    pub fn step_within(
        &mut self,
        budget: &mut Budget,
        batch: &mut TakenBatch,
    ) -> Result<bool, Stopped> {
        batch.edit_many(|skipped, room| self.trees.step(&self.dma, budget, skipped, room))
    }
}

impl<R: Ram> Trees<R> {
    fn step<'id>(
        &mut self,
        dma: &DmaDomain<Locked<Members>>,
        budget: &mut Budget,
        skipped: &mut Skipped<'id>,
        room: &mut Room<'_, 'id, Taken, 32>,
    ) -> Result<bool, Stopped> {
        match self {
            Self::Shared(both) => {
                let mut leaves = Vec::new();
                let sink = Collect { left: room.left(), leaves: &mut leaves };
                let done = both.step(budget, skipped, sink).is_ok();
                for (run, leaf, gone) in leaves {
                    take(room, run, leaf, gone.into());
                }
                Ok(done)
            }
            Self::Separate { tree, cpu, device, rest } => {
                if !cpu.is_done() {
                    let all = Rest::new(dma.space());
                    device.fit(dma, *tree, all, room.left(), skipped)?;
                }
                let mut leaves = Vec::new();
                let sink = Collect { left: room.left(), leaves: &mut leaves };
                let done = cpu.step(budget, skipped, sink).is_ok();
                for (run, leaf, gone) in leaves {
                    let on_devices = device.clear_run(dma, run, skipped);
                    take(room, run, leaf, gone.with(&on_devices.expect("its leaves fit")));
                }
                if let (true, Some(left)) = (done, *rest) {
                    let mut record = Recorder::<Iotlb, _>::new(skipped, Unheld);
                    let tables = dma.tables(&device.memory);
                    let stopped = stage2::destroy(tables, left, budget, &mut record).err();
                    *rest = stopped.map(|stopped| stopped.rest);
                }
                Ok(done && rest.is_none())
            }
        }
    }
}
