//! Pages that are taken out of a domain's tables: out of all of them, or of none.
//!
//! [`Guest::clear`] takes out one page of any kind, [`Guest::clear_grants`] the mappings of
//! many grants, for which it locks the tables once.

use flush::{Cleared, Gfn, Gone, Iotlb, Mfn, Run, Skipped};
use p2m::{ClearError, Mapping, PageKind};
use stage2::{Budget, Leaf, PageError, Path, Rest, Sink};

use super::guest::Tables;
use super::{Guest, Memory};

impl Guest {
    /// Clear one page in every table, if it shows what is expected.
    ///
    /// # Errors
    /// As [`P2m::clear`](p2m::P2m::clear). For a grant nothing has changed then. (For a page
    /// of a large leaf the devices' table may have been changed and the other not: the page
    /// stays counted, and devices fault.)
    #[inline]
    pub(crate) fn clear<'id>(
        &self,
        gfn: Gfn,
        expected: p2m::Expected,
        skipped: &mut Skipped<'id>,
    ) -> Result<Cleared<'id>, ClearError> {
        self.with_tables(|tables| match tables {
            Tables::Shared(map) => Ok(map.clear(gfn, expected, skipped)?.into()),
            Tables::Separate(map) => {
                let p2m::Expected { mfn, kind } = expected;
                // The p2m knows what the page is, so it is asked first and edited last.
                is_shown(map.get(gfn), expected)?;
                let device = self.clear_device(gfn, mfn, kind, skipped)?;
                Ok(map.clear(gfn, expected, skipped)?.with(&device))
            }
        })
    }

    /// Clear mappings of grants in every table, one after the other, and tell of each.
    ///
    /// What is told is what [`clear`](Self::clear) returns.
    pub(super) fn clear_grants<'id>(
        &self,
        grants: impl Iterator<Item = (Gfn, p2m::Expected)>,
        skipped: &mut Skipped<'id>,
        mut cleared: impl FnMut(Mfn, Result<Cleared<'id>, ClearError>),
    ) {
        self.with_tables(|tables| match tables {
            Tables::Shared(map) => {
                let mut map = map.clearing();
                for (gfn, expected) in grants {
                    let gone = map.clear(gfn, expected, skipped);
                    cleared(expected.mfn, gone.map(Cleared::from));
                }
            }
            Tables::Separate(map) => {
                // Known from page to page, not from call to call: this memory does not count
                // the tables that are unlinked.
                let mut path = Path::NEW;
                let mut devices = self.dma().clearing(&Memory, &mut path);
                let mut map = map.clearing();
                for (gfn, expected) in grants {
                    let p2m::Expected { mfn, kind } = expected;
                    let shown = iommu_vtd::Expected { mfn, access: kind.device_access() };
                    let gone = is_shown(map.get(gfn), expected).and_then(|()| {
                        let device = match devices.clear(gfn.into(), shown, skipped) {
                            Ok(device) => device,
                            Err(_) => self.clear_device(gfn, mfn, kind, skipped)?,
                        };
                        Ok(map.clear(gfn, expected, skipped)?.with(&device))
                    });
                    cleared(mfn, gone);
                }
            }
        });
    }

    /// Clear a page in the devices' own table; the lock of the tables is held.
    #[inline]
    pub(super) fn clear_device<'id>(
        &self,
        gfn: Gfn,
        mfn: Mfn,
        kind: PageKind,
        skipped: &mut Skipped<'id>,
    ) -> Result<Gone<'id, Iotlb>, ClearError> {
        let expected = iommu_vtd::Expected { mfn, access: kind.device_access() };
        match self.dma().clear(&Memory, gfn.into(), expected, skipped) {
            Ok(gone) => Ok(gone),
            Err(PageError::Large(_)) => self.clear_out_of_large(gfn, skipped),
            // Somebody took rights from the page, which a table for devices has no way to tell.
            Err(PageError::Unexpected(leaf)) if leaf.mfn == mfn => {
                let expected = iommu_vtd::Expected { mfn, access: leaf.access };
                let cleared = self.dma().clear(&Memory, gfn.into(), expected, skipped);
                cleared.map_err(|_| ClearError::Contended)
            }
            // The two tables disagree: the page must not go anywhere.
            Err(_) => Err(ClearError::Contended),
        }
    }

    /// The page is part of a large leaf, which is split and flushed as a whole.
    fn clear_out_of_large<'id>(
        &self,
        gfn: Gfn,
        skipped: &mut Skipped<'id>,
    ) -> Result<Gone<'id, Iotlb>, ClearError> {
        let mut one = OnePage(None);
        let rest = Rest::new(Run::single(gfn));
        let mut budget = Budget::UNLIMITED;
        let cleared = self.dma().clear_run(&Memory, rest, &mut budget, skipped, &mut one);
        cleared.map_err(|_| ClearError::NoTable)?;
        one.0.ok_or(ClearError::Contended)
    }
}

/// Whether the p2m shows what is expected.
fn is_shown(found: Option<Mapping>, expected: p2m::Expected) -> Result<(), ClearError> {
    match found {
        Some(found) if found.mfn == expected.mfn && found.kind == Some(expected.kind) => Ok(()),
        Some(found) => Err(ClearError::Unexpected(found)),
        None => Err(ClearError::Absent),
    }
}

/// Takes the proof for one page.
struct OnePage<'id>(Option<Gone<'id, Iotlb>>);

impl<'id> Sink<'id, Iotlb> for &mut OnePage<'id> {
    fn left(&self) -> usize {
        usize::from(self.0.is_none())
    }

    fn take(&mut self, _: Run, _: Leaf, gone: Gone<'id, Iotlb>) {
        self.0 = Some(gone);
    }
}
