//! One domain: the tables its processors and devices walk, its grants, its handles.
//!
//! Each part is behind the lock that the crates ask for. An edit changes both tables
//! or none: [`Guest::map`] and [`Guest::clear`] are the two halves of the glue between
//! p2m and IOMMU.

use core::sync::atomic::AtomicBool;

use flush::plan::Policy;
use flush::{Cleared, Combiner, DomainId, Gfn, Gone, Iotlb, Mfn, Run, Shared, Skipped, Tlb};
use gnttab::{GrantTable, Maptrack};
use iommu_vtd::{DmaDomain, Guarded, Members};
use p2m::{ClearError, GuestCpus, P2m, PageKind};
use stage2::format::ept::{Ept, EptLevels};
use stage2::format::npt::{Npt, NptLevels};
use stage2::format::vtd::{Vtd, VtdLevels};
use stage2::{Budget, Leaf, PageError, Rest, Sink, TableMemory};
use testbed::failure::{Context, Failure};

use super::flushers::{
    GuestDevices, GuestDma, GuestFlushes, GuestPlace, GuestProcessors, GuestTlb, SEATS,
};
use super::storage::{GRANT_FRAMES, Grants, HANDLE_PAGES, Handles};
use super::{Iommu, Lock, Memory};

/// Whose tables devices walk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Layout {
    /// Devices have tables of their own, processors walk nested page tables (AMD).
    Separate,
    /// One tree in the extended page table format (Intel) for both.
    Shared,
}

/// How large a domain is, and whose tables its devices walk.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Shape {
    /// Whose tables devices walk.
    pub(crate) layout: Layout,
    /// Levels of the devices' own tables, where they have some.
    pub(crate) device_levels: VtdLevels,
    /// Pages of 256 handles that it may have.
    pub(crate) handle_pages: usize,
}

impl Shape {
    /// As large as this image can have it.
    pub(crate) const fn of(layout: Layout) -> Self {
        Self { layout, device_levels: VtdLevels::Four, handle_pages: HANDLE_PAGES }
    }
}

/// The tables of one domain's processors.
pub(super) enum Tables {
    /// Its devices have others.
    Separate(P2m<Npt, Memory, Tlb>),
    /// Its devices walk them as well.
    Shared(P2m<Ept, Memory, Shared>),
}

/// One domain.
pub(crate) struct Guest {
    id: DomainId,
    /// Whether its virtual processors may run.
    pub(super) may_run: AtomicBool,
    tables: Lock<Tables>,
    /// Its processors and devices, and what flushes them.
    flushes: GuestFlushes,
    /// Its grant table.
    pub(crate) grants: Lock<GrantTable<Grants>>,
    /// What it has mapped.
    pub(crate) handles: Lock<Maptrack<Handles>>,
}

/// A mapping that was not made, and the proof that no table shows its page.
#[derive(Debug)]
#[must_use = "the page has to wait for the flush"]
pub(crate) struct NotMapped<'id> {
    /// On record: what was put in and taken out again.
    pub(crate) cleared: Cleared<'id>,
}

impl Guest {
    /// A domain without memory, whose devices will be behind units of `iommu`.
    ///
    /// # Errors
    /// If there is no memory for its roots and its grant table.
    pub(crate) fn new(id: DomainId, layout: Layout, iommu: &Iommu) -> Result<Self, Failure> {
        Self::shaped(id, Shape::of(layout), iommu)
    }

    /// As [`new`](Self::new), with another shape.
    ///
    /// # Errors
    /// As there.
    pub(crate) fn shaped(id: DomainId, shape: Shape, iommu: &Iommu) -> Result<Self, Failure> {
        let Shape { layout, device_levels, handle_pages } = shape;
        let (tables, device_root) = match layout {
            Layout::Separate => {
                let map = P2m::new(Npt::new(NptLevels::Four), Memory).context("p2m")?;
                let root = Memory.allocate().context("a root for devices")?;
                (Tables::Separate(map), Memory.link(root))
            }
            Layout::Shared => {
                let map = P2m::new(Ept::new(EptLevels::Four), Memory).context("p2m")?;
                let root = map.root();
                (Tables::Shared(map), root)
            }
        };
        let vtd = Vtd::new(device_levels);
        let dma = DmaDomain::new(id, vtd, device_root, Lock::new(Members::new()));
        let devices = GuestDevices::new(dma, iommu.units());
        let grants = GrantTable::new(id, Grants::new(), 1, GRANT_FRAMES).context("grant table")?;
        Ok(Self {
            id,
            may_run: AtomicBool::new(true),
            tables: Lock::new(tables),
            flushes: Combiner::new(id, GuestProcessors(GuestCpus::new(id)), devices),
            grants: Lock::new(grants),
            handles: Lock::new(Maptrack::new(Handles::new(), handle_pages)),
        })
    }

    /// Its number.
    pub(crate) const fn id(&self) -> DomainId {
        self.id
    }

    /// The processors that run it or may hold its translations.
    pub(crate) const fn cpus(&self) -> &GuestCpus {
        &self.flushes.tlb().0
    }

    /// Its devices, and the tables they walk.
    pub(crate) const fn dma(&self) -> &DmaDomain<Lock<Members>> {
        &self.flushes.iotlb().dma
    }

    /// What its flushes were up to now.
    pub(crate) const fn flushes(&self) -> &GuestFlushes {
        &self.flushes
    }

    /// A place to flush from, together with whoever flushes it at the same time.
    ///
    /// # Errors
    /// If all places are taken.
    pub(crate) fn place(&self) -> Result<GuestPlace<'_>, Failure> {
        let place = (0..SEATS).find_map(|number| self.flushes.place(number));
        place.map(GuestPlace).context("a seat to flush from")
    }

    /// What flushes its processors for one caller alone.
    pub(crate) const fn tlb_alone(&self) -> GuestTlb<'_> {
        self.flushes.tlb().alone()
    }

    /// What flushes its devices for one caller alone.
    pub(crate) fn iotlb_alone(&self) -> GuestDma<'_> {
        self.flushes.iotlb().alone()
    }

    /// Choose commands for its devices like this from now on.
    pub(crate) fn plan_by(&self, policy: Policy) {
        self.flushes.iotlb().plan_by(policy);
    }

    /// Whether its devices walk the tables of its processors.
    pub(crate) fn is_shared(&self) -> bool {
        self.tables.with(|tables| match tables {
            Tables::Separate(_) => false,
            Tables::Shared(map) => map.root() == self.dma().root(),
        })
    }

    /// Do something with its tables, under their lock.
    pub(super) fn with_tables<A>(&self, action: impl FnOnce(&mut Tables) -> A) -> A {
        self.tables.with(action)
    }

    /// All frame numbers that its tables have.
    pub(super) fn space(&self) -> Run {
        self.dma().space()
    }

    /// What is left of a domain that has ended: tables, and who may have walked them.
    pub(super) fn into_tables(self) -> (Tables, DmaDomain<Lock<Members>>, GuestCpus) {
        let (GuestProcessors(cpus), devices) = self.flushes.into_hardware();
        (self.tables.into_inner(), devices.dma, cpus)
    }

    /// The page of the root of its processors' tables.
    pub(super) fn root(&self) -> Mfn {
        self.tables.with(|tables| match tables {
            Tables::Separate(map) => map.root(),
            Tables::Shared(map) => map.root(),
        })
    }

    /// What a frame number shows its processors.
    pub(crate) fn lookup(&self, gfn: Gfn) -> Option<p2m::Mapping> {
        self.with_mapping(gfn, |mapping| mapping)
    }

    /// Do something with what a frame number shows its processors, while it does.
    ///
    /// A page that is in the tables is counted: whoever takes it out drops what counted it
    /// later. So a reference has to be taken in here, and not when the lock is gone again.
    pub(super) fn with_mapping<A>(
        &self,
        gfn: Gfn,
        action: impl FnOnce(Option<p2m::Mapping>) -> A,
    ) -> A {
        self.tables.with(|tables| {
            action(match tables {
                Tables::Separate(map) => map.get(gfn),
                Tables::Shared(map) => map.get(gfn),
            })
        })
    }

    /// What a frame number shows its devices.
    pub(crate) fn device_lookup(&self, gfn: Gfn) -> Option<Mfn> {
        let found = self.tables.with(|_| self.dma().lookup(&Memory, gfn.into()))?;
        found.leaf_at(gfn).map(|(_, mfn)| mfn)
    }

    /// Map 2^`order` frames in every table.
    ///
    /// Memory of the guest's own that was there comes back with its proof; it is a single
    /// page then. Anything else there is not replaced.
    ///
    /// # Errors
    /// [`NotMapped`], with every table as it was.
    pub(crate) fn map<'id>(
        &self,
        gfn: Gfn,
        order: u8,
        mfn: Mfn,
        kind: PageKind,
        skipped: &mut Skipped<'id>,
    ) -> Result<Option<(Mfn, Cleared<'id>)>, NotMapped<'id>> {
        self.tables.with(|tables| match tables {
            Tables::Shared(map) => match map.set(gfn, order, mfn, kind, skipped) {
                Ok(was) => Ok(was.map(|was| (was.mapping.mfn, was.gone.into()))),
                Err(_) => Err(NotMapped { cleared: untouched(skipped) }),
            },
            Tables::Separate(map) => self.map_both(map, gfn, order, mfn, kind, skipped),
        })
    }

    /// The devices' table first, where an error leaves nothing to undo in the other.
    fn map_both<'id>(
        &self,
        map: &mut P2m<Npt, Memory, Tlb>,
        gfn: Gfn,
        order: u8,
        mfn: Mfn,
        kind: PageKind,
        skipped: &mut Skipped<'id>,
    ) -> Result<Option<(Mfn, Cleared<'id>)>, NotMapped<'id>> {
        let run = Run::block(gfn, order);
        let old = match map.get(gfn) {
            None => None,
            Some(p2m::Mapping { mfn, kind: Some(kind), .. }) if kind.gives_way() => {
                match self.clear_device(gfn, mfn, kind, skipped) {
                    Ok(gone) => Some((mfn, kind, gone)),
                    Err(_) => return Err(NotMapped { cleared: untouched(skipped) }),
                }
            }
            Some(_) => return Err(NotMapped { cleared: untouched(skipped) }),
        };
        let put_back = |skipped: &mut Skipped<'id>| {
            if let Some((mfn, kind, _)) = &old {
                // Its table is still there: this needs no memory and cannot fail.
                self.map_device(Run::single(gfn), *mfn, *kind, skipped).ok();
            }
        };
        if self.map_device(run, mfn, kind, skipped).is_err() {
            put_back(skipped);
            return Err(NotMapped { cleared: untouched(skipped) });
        }
        match map.set(gfn, order, mfn, kind, skipped) {
            Ok(None) => Ok(None),
            Ok(Some(was)) => {
                let device = old.map_or_else(|| skipped.absent(), |(_, _, gone)| gone);
                Ok(Some((was.mapping.mfn, was.gone.with(&device))))
            }
            Err(_) => {
                let gone = self.clear_device_run(run, skipped);
                put_back(skipped);
                Err(NotMapped { cleared: skipped.absent::<Tlb>().with(&gone) })
            }
        }
    }

    /// Clear one page in every table, if it shows what is expected.
    ///
    /// # Errors
    /// As [`P2m::clear`]. For a grant nothing has changed then. (For a page of a large
    /// leaf the devices' table may have been changed and the other not: the page stays
    /// counted, and devices fault.)
    #[inline]
    pub(crate) fn clear<'id>(
        &self,
        gfn: Gfn,
        expected: p2m::Expected,
        skipped: &mut Skipped<'id>,
    ) -> Result<Cleared<'id>, ClearError> {
        self.tables.with(|tables| match tables {
            Tables::Shared(map) => Ok(map.clear(gfn, expected, skipped)?.into()),
            Tables::Separate(map) => {
                let p2m::Expected { mfn, kind } = expected;
                // The p2m knows what the page is, so it is asked first and edited last.
                match map.get(gfn) {
                    Some(found) if found.mfn == mfn && found.kind == Some(kind) => {}
                    Some(found) => return Err(ClearError::Unexpected(found)),
                    None => return Err(ClearError::Absent),
                }
                let device = self.clear_device(gfn, mfn, kind, skipped)?;
                Ok(map.clear(gfn, expected, skipped)?.with(&device))
            }
        })
    }

    /// Map a run in the devices' own table; the lock of the tables is held.
    fn map_device(
        &self,
        run: Run,
        mfn: Mfn,
        kind: PageKind,
        skipped: &mut Skipped<'_>,
    ) -> Result<(), stage2::MapStopped> {
        let (rest, access) = (Rest::new(run), kind.device_access());
        self.dma().map(&Memory, rest, mfn, access, &mut Budget::UNLIMITED.clone(), skipped)
    }

    /// Clear a page in the devices' own table; the lock of the tables is held.
    #[inline]
    fn clear_device<'id>(
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

    /// Take out again what [`map_device`](Self::map_device) put in.
    fn clear_device_run<'id>(&self, run: Run, skipped: &mut Skipped<'id>) -> Gone<'id, Iotlb> {
        let mut budget = Budget::UNLIMITED;
        let rest = Rest::new(run);
        // Every leaf of the run is this mapping's own, and each goes on record.
        self.dma().clear_run(&Memory, rest, &mut budget, skipped, stage2::Unheld).ok();
        skipped.absent()
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

/// The proof for a page that no table has shown.
pub(super) fn untouched<'id>(skipped: &mut Skipped<'id>) -> Cleared<'id> {
    let cpus = skipped.absent::<Tlb>();
    cpus.with(&skipped.absent::<Iotlb>())
}
