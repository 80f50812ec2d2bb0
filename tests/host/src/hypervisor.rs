//! A small hypervisor over the crates: domains, their tables, their pages.
//!
//! [`Guest`] is one domain: a p2m, perhaps tables of its own for devices, grants and
//! handles, each behind the lock that the crates ask for. [`Hypervisor`] has them all,
//! and counts the references on every page.

use std::{
    fmt,
    ops::ControlFlow,
    sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError},
};

use flush::{Batch, Cleared, DomainId, Gfn, Gone, Mfn, Run, Shared, Skipped};
use gnttab::{GrantTable, Maptrack};
use iommu_vtd::{DmaDomain, Guarded, Members};
use p2m::{GuestCpus, P2m, PageKind};
use stage2::{
    Access, Budget, Format, Leaf, PageError, Path, Rest, TableMemory,
    format::{
        ept::Ept,
        vtd::{Vtd, VtdLevels},
    },
};

use crate::{
    Memory, Ram,
    storage::{Grants, Handles},
    turns,
};

mod maps;
mod pages;
pub(crate) mod ranges;
pub(crate) mod take_down;

pub(crate) use maps::CpuMap;
pub use maps::CpuTables;
pub use pages::PageCounts;

/// A lock that goes on after a panic: a test that failed has said what it had to say.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    match mutex.try_lock() {
        Ok(guard) => guard,
        Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
        Err(TryLockError::WouldBlock) => wait_for(mutex),
    }
}

#[cold]
#[inline(never)]
fn wait_for<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    turns::wait(&|| !matches!(mutex.try_lock(), Err(TryLockError::WouldBlock)));
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A standard lock as the IOMMU crate asks for it.
#[derive(Debug, Default)]
pub struct Locked<T>(pub Mutex<T>);

impl<T> Guarded<T> for Locked<T> {
    fn with<R>(&self, f: impl FnOnce(&mut T) -> R) -> R {
        f(&mut lock(&self.0))
    }
}

/// Whose tables devices walk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Layout {
    /// Devices have tables of their own.
    Separate,
    /// Devices walk the CPUs' tables.
    Shared,
}

/// What is behind the p2m lock of a domain: its tables, and the last translation by them.
///
/// Guests keep the arguments of a call in few pages, so the same one is asked for again and
/// again. Both are behind one lock, so the answer is always what a walk would say.
pub(crate) struct Space<R> {
    tables: Tables<R>,
    last: Option<(Gfn, Mfn, Access)>,
}

impl<R> Space<R> {
    /// The tables, for an edit of any part of them.
    fn edit(&mut self) -> &mut Tables<R> {
        self.last = None;
        &mut self.tables
    }

    /// Looks the page up in the tables, and keeps the answer.
    #[cold]
    #[inline(never)]
    fn walk(&mut self, gfn: Gfn, needed: Access) -> Option<Mfn>
    where
        R: Ram,
    {
        let p2m::Mapping { mfn, access, .. } = self.tables.get(gfn)?;
        self.last = Some((gfn, mfn, access));
        access.allows(needed).then_some(mfn)
    }

    /// The tables, for an edit that changes what `gfn` shows and nothing else.
    #[inline]
    fn edit_page(&mut self, gfn: Gfn) -> &mut Tables<R> {
        if self.last.is_some_and(|(last, ..)| last == gfn) {
            self.last = None;
        }
        &mut self.tables
    }
}

/// The tables of a domain.
pub(crate) enum Tables<R> {
    Separate { cpu: CpuMap<R>, device: DeviceTables<R> },
    Shared(P2m<Ept, Memory<R>, Shared>),
}

/// The edits of a domain's own tables for devices.
pub(crate) struct DeviceTables<R> {
    memory: Memory<R>,
    /// The way to the last page that was cleared.
    path: Path,
    /// Plants a bug: the second table is forgotten.
    forgotten: bool,
}

/// One domain.
pub struct Guest<R> {
    pub(crate) id: DomainId,
    pub(crate) space: Mutex<Space<R>>,
    /// Its devices and the tables they walk.
    pub dma: DmaDomain<Locked<Members>>,
    /// The CPUs that run it or may hold its translations.
    pub cpus: GuestCpus,
    pub(crate) grants: Mutex<GrantTable<Grants<R>>>,
    pub(crate) handles: Mutex<Maptrack<Handles>>,
}

impl<R> fmt::Debug for Guest<R> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Guest").field("id", &self.id).finish_non_exhaustive()
    }
}

/// How many vCPUs a domain can have here.
const VCPUS: usize = 4;

impl<R: Ram> Guest<R> {
    /// A domain without memory.
    ///
    /// # Panics
    /// If the machine has no memory for its roots, or devices cannot walk the CPUs' tables
    /// but are to.
    pub fn new(
        id: DomainId,
        memory: &Memory<R>,
        cpus: CpuTables,
        layout: Layout,
        vtd: Vtd,
    ) -> Self {
        // Tables that a unit walks as well have no larger leaves than it can take.
        let largest = vtd.largest_leaf();
        let (tables, device_root) = match layout {
            Layout::Separate => {
                let cpu = CpuMap::new(cpus, largest, memory.clone());
                let root = memory.allocate().expect("memory for a root");
                let device =
                    DeviceTables { memory: memory.clone(), path: Path::NEW, forgotten: false };
                (Tables::Separate { cpu, device }, memory.link(root))
            }
            Layout::Shared => {
                assert_eq!(cpus, CpuTables::Ept, "VT-d walks EPT, and nothing is left unflushed");
                let both: P2m<_, _, Shared> =
                    P2m::new(maps::ept(largest), memory.clone()).expect("memory for a root");
                let root = both.root();
                (Tables::Shared(both), root)
            }
        };
        let grants = Grants::new(memory.clone(), id);
        Self {
            id,
            space: Mutex::new(Space { tables, last: None }),
            dma: DmaDomain::new(id, vtd, device_root, Locked::default()),
            cpus: GuestCpus::new(id),
            grants: Mutex::new(GrantTable::new(id, grants, 1, 64).expect("memory for grants")),
            handles: Mutex::new(Maptrack::new(Handles::new(VCPUS), 1024)),
        }
    }

    /// Its number.
    pub fn id(&self) -> DomainId {
        self.id
    }

    /// Runs something with the lock of its grant table.
    pub fn with_grants<A>(&self, action: impl FnOnce(&mut GrantTable<Grants<R>>) -> A) -> A {
        action(&mut lock(&self.grants))
    }

    /// Its grant table, locked.
    pub fn grants(&self) -> MutexGuard<'_, GrantTable<Grants<R>>> {
        lock(&self.grants)
    }

    /// Forgets all handles, and has room for so many pages of them from now on.
    pub fn limit_handles(&self, pages: usize) {
        *lock(&self.handles) = Maptrack::new(Handles::new(VCPUS), pages);
    }

    /// From now on so many pages of handles can still be added.
    pub fn refuse_handles_after(&self, pages: usize) {
        lock(&self.handles).storage().pages_left.set(pages);
    }

    /// How many handles it has, free or not.
    pub fn handles(&self) -> usize {
        lock(&self.handles).handles()
    }

    /// What its CPUs walk.
    pub fn cpu_tables(&self) -> CpuTables {
        match &lock(&self.space).tables {
            Tables::Separate { cpu, device: _ } => cpu.kind(),
            Tables::Shared(_) => CpuTables::Ept,
        }
    }

    /// The root of the tables its CPUs walk.
    pub fn cpu_root(&self) -> Mfn {
        match &lock(&self.space).tables {
            Tables::Separate { cpu, device: _ } => cpu.root(),
            Tables::Shared(both) => both.root(),
        }
    }

    /// What a frame number shows.
    pub fn lookup(&self, gfn: Gfn) -> Option<p2m::Mapping> {
        self.with_lookup(gfn, |found| found)
    }

    /// Runs something on what a frame number shows, while that cannot change.
    pub(crate) fn with_lookup<A>(
        &self,
        gfn: Gfn,
        action: impl FnOnce(Option<p2m::Mapping>) -> A,
    ) -> A {
        let space = lock(&self.space);
        action(space.tables.get(gfn))
    }

    /// Whether any frame number shows a page.
    pub(crate) fn shows(&self, memory: &Memory<R>, mfn: Mfn) -> bool {
        let whole = self.cpu_tables().space();
        let looks = |_, leaf: Leaf| {
            if leaf.mfn == mfn { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
        };
        self.cpu_tables().visit(memory, self.cpu_root(), whole, looks).is_err()
    }

    /// The pages that its entries show and that are not its own memory.
    pub fn foreign_pages(&self, memory: &Memory<R>) -> Vec<Mfn> {
        let mut pages = Vec::new();
        let looks = |_, leaf: Leaf| {
            if PageKind::from_tag(leaf.tag) != Some(PageKind::RamReadWrite) {
                pages.push(leaf.mfn);
            }
            ControlFlow::Continue(())
        };
        let whole = self.cpu_tables().space();
        self.cpu_tables().visit(memory, self.cpu_root(), whole, looks).ok();
        pages
    }

    /// The page behind a frame number, if the guest itself may reach it so.
    ///
    /// The hypervisor's own view of a page can be written in any case.
    #[inline(always)]
    pub(crate) fn translate(&self, gfn: Gfn, needed: Access) -> Option<Mfn> {
        let mut space = lock(&self.space);
        match space.last {
            Some((last, mfn, access)) if last == gfn && access.allows(needed) => Some(mfn),
            Some(_) | None => space.walk(gfn, needed),
        }
    }

    /// Plants a bug: from now on only the CPUs' table is edited.
    pub fn forget_device_tables(&self) {
        if let Tables::Separate { cpu: _, device } = lock(&self.space).edit() {
            device.forgotten = true;
        }
    }

    /// Maps one page in every table. What was there is gone with the returned proof.
    ///
    /// # Errors
    /// Why not, in words; then every table is as it was, and what was touched is on record.
    pub fn map<'id>(
        &self,
        gfn: Gfn,
        mfn: Mfn,
        kind: PageKind,
        skipped: &mut Skipped<'id>,
    ) -> Result<Option<(Mfn, Cleared<'id>)>, String> {
        match lock(&self.space).edit_page(gfn) {
            Tables::Shared(both) => {
                let displaced =
                    both.set(gfn, 0, mfn, kind, skipped).map_err(|error| format!("{error:?}"))?;
                Ok(displaced.map(|was| (was.mapping.mfn, Cleared::from(was.gone))))
            }
            Tables::Separate { cpu, device } => {
                let old = cpu.get(gfn).and_then(|was| Some((was.mfn, was.kind?)));
                let displaced =
                    cpu.set(gfn, 0, mfn, kind, skipped).map_err(|error| format!("{error:?}"))?;
                match device.replace(&self.dma, gfn, old, (mfn, kind), skipped) {
                    Ok(gone) => Ok(displaced.map(|was| (was.mapping.mfn, was.gone.with(&gone)))),
                    Err(error) => {
                        // The table is there by now: neither of the two needs memory.
                        drop(cpu.clear(gfn, p2m::Expected { mfn, kind }, skipped));
                        if let Some((mfn, kind)) = old {
                            drop(cpu.set(gfn, 0, mfn, kind, skipped));
                        }
                        Err(error)
                    }
                }
            }
        }
    }

    /// Clears one page in every table, if it shows what is expected.
    ///
    /// # Errors
    /// As [`P2m::clear`]; then nothing changed.
    pub fn clear<'id>(
        &self,
        gfn: Gfn,
        expected: p2m::Expected,
        skipped: &mut Skipped<'id>,
    ) -> Result<Cleared<'id>, p2m::ClearError> {
        match lock(&self.space).edit_page(gfn) {
            Tables::Shared(both) => Ok(both.clear(gfn, expected, skipped)?.into()),
            Tables::Separate { cpu, device } => {
                let cpu_gone = cpu.clear(gfn, expected, skipped)?;
                let p2m::Expected { mfn, kind } = expected;
                match device.clear(&self.dma, gfn, mfn, kind, skipped) {
                    Ok(device_gone) => Ok(cpu_gone.with(&device_gone)),
                    Err(_) => {
                        // The page's table is there by now: this needs no memory.
                        drop(cpu.set(gfn, 0, mfn, kind, skipped));
                        Err(p2m::ClearError::NoTable)
                    }
                }
            }
        }
    }
}

impl<R: Ram> Tables<R> {
    fn get(&self, gfn: Gfn) -> Option<p2m::Mapping> {
        match self {
            Self::Separate { cpu, device: _ } => cpu.get(gfn),
            Self::Shared(both) => both.get(gfn),
        }
    }
}

impl<R: Ram> DeviceTables<R> {
    /// Puts a page where `old` was, or where nothing was. After an error nothing changed.
    fn replace<'id>(
        &mut self,
        dma: &DmaDomain<Locked<Members>>,
        gfn: Gfn,
        old: Option<(Mfn, PageKind)>,
        (mfn, kind): (Mfn, PageKind),
        skipped: &mut Skipped<'id>,
    ) -> Result<Gone<'id, flush::Iotlb>, String> {
        let gone = match old {
            Some((mfn, kind)) => self.clear(dma, gfn, mfn, kind, skipped)?,
            None => skipped.absent(),
        };
        if let Err(error) = self.map(dma, gfn, mfn, kind, skipped) {
            if let Some((mfn, kind)) = old {
                self.map(dma, gfn, mfn, kind, skipped)?;
            }
            return Err(error);
        }
        Ok(gone)
    }

    fn map(
        &self,
        dma: &DmaDomain<Locked<Members>>,
        gfn: Gfn,
        mfn: Mfn,
        kind: PageKind,
        skipped: &mut Skipped<'_>,
    ) -> Result<(), String> {
        let rest = Rest::new(Run::single(gfn));
        let access = kind.device_access();
        let mut budget = Budget::UNLIMITED;
        dma.map(&self.memory, rest, mfn, access, &mut budget, skipped)
            .map_err(|stopped| format!("{:?}", stopped.error))
    }

    #[inline]
    fn clear<'id>(
        &mut self,
        dma: &DmaDomain<Locked<Members>>,
        gfn: Gfn,
        mfn: Mfn,
        kind: PageKind,
        skipped: &mut Skipped<'id>,
    ) -> Result<Gone<'id, flush::Iotlb>, String> {
        if self.forgotten {
            return Ok(skipped.absent());
        }
        let expected = iommu_vtd::Expected { mfn, access: kind.device_access() };
        match dma.clear_near(&self.memory, &mut self.path, gfn.into(), expected, skipped) {
            Ok(gone) => Ok(gone),
            Err(error) => self.clear_otherwise(dma, gfn, expected, error, skipped),
        }
    }

    /// The single leaf was not there: a large one may have to be split.
    #[cold]
    #[inline(never)]
    fn clear_otherwise<'id>(
        &mut self,
        dma: &DmaDomain<Locked<Members>>,
        gfn: Gfn,
        expected: iommu_vtd::Expected,
        error: PageError,
        skipped: &mut Skipped<'id>,
    ) -> Result<Gone<'id, flush::Iotlb>, String> {
        let PageError::Large(_) = error else { return Err(format!("{error:?}")) };
        self.split(dma, gfn, skipped)?;
        let cleared = dma.clear(&self.memory, gfn.into(), expected, skipped);
        cleared.map_err(|error| format!("{error:?}"))
    }
}

/// The hypervisor: its memory and its domains.
#[derive(Debug)]
pub struct Hypervisor<R> {
    /// All memory.
    pub memory: Memory<R>,
    /// All domains.
    pub guests: Vec<Guest<R>>,
    /// References on every page.
    pub pages: Arc<PageCounts>,
}

impl<R: Ram> Hypervisor<R> {
    /// No domain yet.
    pub fn new(ram: R) -> Self {
        let pages = Arc::new(PageCounts::new(ram.frames()));
        Self { memory: Memory::new(ram), guests: Vec::new(), pages }
    }

    /// Adds a domain.
    pub fn add(&mut self, id: DomainId, layout: Layout) {
        self.add_with(id, layout, Vtd::new(VtdLevels::Four));
    }

    /// Adds a domain whose devices walk tables of this format. Where they walk the CPUs'
    /// tables it has four levels.
    pub fn add_with(&mut self, id: DomainId, layout: Layout, vtd: Vtd) {
        self.add_on(id, CpuTables::Ept, layout, vtd);
    }

    /// The same with CPUs that walk tables of this kind.
    pub fn add_on(&mut self, id: DomainId, cpus: CpuTables, layout: Layout, vtd: Vtd) {
        let guest = Guest::new(id, &self.memory, cpus, layout, vtd);
        self.guests.push(guest);
    }

    /// The domain with this number.
    #[inline]
    pub fn guest(&self, id: DomainId) -> Option<&Guest<R>> {
        self.guests.iter().find(|guest| guest.id == id)
    }

    /// Gives a domain a page of RAM at `gfn`, where nothing was.
    ///
    /// # Panics
    /// If there is no memory or the number is taken.
    pub fn populate(&self, guest: &Guest<R>, gfn: Gfn) -> Mfn {
        let mfn = self.memory.ram().allocate(guest.id).expect("memory for a guest");
        self.pages.take(mfn, false);
        let mut batch: Batch<(), 1> = Batch::new(guest.id);
        batch.edit_many(|skipped, _| {
            let was = guest.map(gfn, mfn, PageKind::RamReadWrite, skipped).expect("room for RAM");
            assert!(was.is_none(), "{gfn:?} was taken");
        });
        let nobody = flush::Hardware { tlb: &crate::Null, iotlb: &crate::Null };
        // Nobody caches the absence of an entry here: see `World` for caching mode.
        drop(batch.flush(&nobody).expect("this cannot fail"));
        mfn
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Null, PlainRam};

    /// Edits in a batch of its own; `true` if the edit was done.
    fn edit<E>(edit: impl FnOnce(&mut Skipped<'_>) -> Result<(), E>) -> bool {
        let mut batch: Batch<(), 1> = Batch::new(DomainId::new(1));
        let done = batch.edit_many(|skipped, _| edit(skipped).is_ok());
        drop(batch.flush(&flush::Hardware { tlb: &Null, iotlb: &Null }).expect("it cannot fail"));
        done
    }

    #[test]
    fn a_translation_that_is_kept_says_what_the_tables_say_after_every_edit() {
        for layout in [Layout::Separate, Layout::Shared] {
            let mut hypervisor = Hypervisor::new(PlainRam::new(64));
            hypervisor.add(DomainId::new(1), layout);
            let guest = hypervisor.guest(DomainId::new(1)).expect("just added");
            let (one, two) = (Gfn::new(1), Gfn::new(2));
            let pages = [one, two].map(|gfn| hypervisor.populate(guest, gfn));
            let kind = PageKind::RamReadWrite;
            let check = |expected: [Option<Mfn>; 2]| {
                // The edited page comes first and last, so that it is the one that is kept.
                for (gfn, index) in [(two, 1), (one, 0), (two, 1)] {
                    assert_eq!(guest.translate(gfn, Access::READ), expected[index]);
                }
            };
            check(pages.map(Some));
            let expected = p2m::Expected { mfn: pages[1], kind };
            assert!(edit(|skipped| guest.clear(two, expected, skipped).map(drop)));
            check([Some(pages[0]), None]);
            assert!(edit(|skipped| guest.map(two, pages[0], kind, skipped).map(drop)));
            check([Some(pages[0]); 2]);
            assert!(edit(|skipped| guest.map(two, pages[1], kind, skipped).map(drop)));
            check(pages.map(Some));
            let mut batch = ranges::TakenBatch::new(guest.id());
            let done = batch.edit_many(|skipped, room| {
                let run = Run::new(one, two).expect("in order");
                let mut budget = Budget::UNLIMITED;
                guest.clear_range(Rest::new(run), &mut budget, skipped, room)
            });
            assert!(done.is_ok());
            check([None; 2]);
            let hardware = flush::Hardware { tlb: &Null, iotlb: &Null };
            hypervisor.free(batch.flush(&hardware).expect("it cannot fail"));
        }
    }
}
