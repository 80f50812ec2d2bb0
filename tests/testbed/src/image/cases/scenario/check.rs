//! Accesses, and what must be so: counts, pages, mappings, grants.

use flush::Gfn;
use iommu_vtd::Guarded as _;
use testbed::audit::Lie;
use testbed::ensure;
use testbed::failure::{Context as _, Failure};

use super::{Marked, Played, name};
use crate::world::{BACKEND, FRONTEND};

/// What a count must be.
fn within(what: &str, found: u64, least: u64, most: u64) -> Result<(), Failure> {
    ensure!((least..=most).contains(&found), "{found} {what}; from {least} to {most} expected");
    Ok(())
}

impl Played<'_> {
    pub(super) fn check_step(&mut self, word: &str, values: &[u64]) -> Result<bool, Failure> {
        match (word, values) {
            ("reaches", [who, gfn, page, write]) => self.access([*who, *gfn, *page, *write])?,
            ("use", [gfn, page]) => {
                let used = (Gfn::new(*gfn), name(*page)?);
                self.books.used.try_push(used).ok().context("room for another page to use")?;
            }
            ("touch", [who]) => self.touch(*who)?,
            ("begin", []) => self.step.1 = self.asked(),
            ("mark", []) => self.marked = self.now()?,
            ("asked", [tlb, most_tlb, iotlb, most_iotlb]) => {
                let (tlb_before, iotlb_before) = self.step.1;
                let (tlb_now, iotlb_now) = self.asked();
                self.asked_within(
                    (tlb_now - tlb_before, iotlb_now - iotlb_before),
                    (*tlb, *most_tlb),
                    (*iotlb, *most_iotlb),
                )?;
            }
            ("steps", [least, most]) => within("steps", self.batches, *least, *most)?,
            ("bound", [tlb, iotlb]) => {
                let (all, again) = (self.asked(), self.again);
                let found = (all.0 - again.0, all.1 - again.1);
                self.asked_within(found, (0, *tlb), (0, *iotlb))?;
            }
            ("commands", [least, most]) => {
                let Marked { counters, .. } = self.now()?;
                let given = counters.iotlb_commands - self.marked.counters.iotlb_commands;
                within("IOTLB commands", given, *least, *most)?;
            }
            ("flushed", [least, most]) => {
                let Marked { counters, .. } = self.now()?;
                let pages = counters.pages_flushed - self.marked.counters.pages_flushed;
                within("pages flushed", pages, *least, *most)?;
            }
            ("kicks", [least, most]) => {
                within("kicks", self.now()?.kicks - self.marked.kicks, *least, *most)?;
            }
            ("in-use", [page, reading, writing]) => {
                let mut bits = (false, false);
                for (granter, reference) in self.page(*page)?.grants.clone() {
                    let found = self.world.bits(granter, reference)?;
                    bits = (bits.0 | found.0, bits.1 | found.1);
                }
                let expected = (*reading != 0, *writing != 0);
                ensure!(bits == expected, "page {page} is in use: {bits:?}, not {expected:?}");
            }
            ("mapping", [mapping, mapped, in_use]) => {
                let found = self.shown(*mapping)?;
                let expected = (*mapped != 0, *in_use != 0);
                ensure!(found == expected, "mapping {mapping} is (there, in use): {found:?}");
            }
            ("kept", [page, kept]) => {
                let found = self.is_kept(*page)?;
                ensure!(found == (*kept != 0), "page {page} is somebody's: {found}");
            }
            ("counted", [page, references]) => {
                let found = self.references(*page)?;
                ensure!(found == *references, "page {page} has {found} references");
            }
            ("pinned", [count]) => {
                let table = &self.world.guest(FRONTEND)?.grants;
                let found = table.with(|table| table.pinned()) as u64;
                ensure!(found == *count, "{found} grants are pinned, not {count}");
            }
            ("held", [count]) => {
                let found = self.world.hypervisor.batches_held() as u64;
                ensure!(found == *count, "{found} batches are held, not {count}");
            }
            ("handles", [least, most]) => {
                let handles = &self.world.guest(BACKEND)?.handles;
                let found = u64::try_from(handles.with(|handles| handles.handles()));
                within("handles", found.context("a number of handles")?, *least, *most)?;
            }
            _ => return Ok(false),
        }
        Ok(true)
    }

    /// Flushes that were asked for. Of a kind whose flusher lies none is carried out, so
    /// that nothing can be said.
    fn asked_within(
        &self,
        found: (u64, u64),
        tlb: (u64, u64),
        iotlb: (u64, u64),
    ) -> Result<(), Failure> {
        if self.plant.cpus == Lie::None {
            within("flushes of processors", found.0, tlb.0, tlb.1)?;
        }
        if self.plant.devices == Lie::None {
            within("flushes of devices", found.1, iotlb.0, iotlb.1)?;
        }
        Ok(())
    }
}
