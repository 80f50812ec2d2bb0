//! A lean embedding: what the crates cost where the glue costs little.
//!
//! [`Lean`] is what a hypervisor has: all memory mapped, spin locks, domains found by their
//! number. It is for counting instructions: two domains, a granter and a caller with tables
//! of its own for devices, and flush hardware that does nothing. The embedding that tests
//! use has standard locks and can be made to fail; see [`Caller`](crate::Caller).

mod domain;
mod memory;
mod storage;

use std::sync::atomic::Ordering;

use flush::{Batch, Cleared, DomainId, Gfn, Hardware, Mfn, Run, Skipped, Tlb};
use gnttab::{Call, GrantTable, GuestAddress, Maptrack, Outcome};
use iommu_vtd::{DmaDomain, Guarded, Members};
use p2m::{P2m, PageKind};
use spin::mutex::SpinMutex;
use stage2::{
    Budget, Path, Rest, TableMemory,
    format::{
        ept::{Ept, EptLevels},
        vtd::{Vtd, VtdLevels},
    },
};

use crate::Null;
use memory::Direct;
use storage::{Grants, Handles};

/// A spin lock as the IOMMU crate asks for it.
#[derive(Debug)]
struct Spin<T>(SpinMutex<T>);

impl<T> Guarded<T> for Spin<T> {
    fn with<R>(&self, f: impl FnOnce(&mut T) -> R) -> R {
        f(&mut self.0.lock())
    }
}

/// What is behind a domain's p2m lock.
#[derive(Debug)]
struct Space<'m> {
    cpu: P2m<Ept, &'m Direct, Tlb>,
    /// The way to the last page that was taken out of the tables for devices.
    path: Path,
    /// The last page of the domain's own memory that arguments were in. Whoever takes memory
    /// away has to drop it: here nobody does, and a grant is never taken for memory.
    last: Option<(Gfn, Mfn)>,
}

/// One domain.
#[derive(Debug)]
struct Guest<'m> {
    space: SpinMutex<Space<'m>>,
    dma: DmaDomain<Spin<Members>>,
    grants: SpinMutex<GrantTable<Grants<'m>>>,
    handles: SpinMutex<Maptrack<Handles>>,
}

/// A machine for two domains.
#[derive(Debug)]
pub struct Machine(Direct);

impl Machine {
    /// A machine with this many frames of memory.
    #[must_use]
    pub fn new(frames: u64) -> Self {
        Self(Direct::new(frames))
    }

    /// Boots it, with a granter and a caller.
    ///
    /// # Panics
    /// If there is no memory for their roots and tables.
    #[must_use]
    pub fn boot(&self) -> Lean<'_> {
        let memory = &self.0;
        let guest = |id| {
            let root = (&memory).allocate().expect("memory for a root");
            let root = (&memory).link(root);
            let members = Spin(SpinMutex::new(Members::new()));
            let grants = GrantTable::new(id, Grants::new(memory), 1, 64);
            let cpu = P2m::new(Ept::new(EptLevels::Four), memory).expect("memory for a root");
            Guest {
                space: SpinMutex::new(Space { cpu, path: Path::NEW, last: None }),
                dma: DmaDomain::new(id, Vtd::new(VtdLevels::Four), root, members),
                grants: SpinMutex::new(grants.expect("memory for grants")),
                handles: SpinMutex::new(Maptrack::new(Handles::default(), 1024)),
            }
        };
        Lean { memory, guests: [guest(Lean::GRANTER), guest(Lean::CALLER)] }
    }
}

/// A hypervisor with two domains.
#[derive(Debug)]
pub struct Lean<'m> {
    memory: &'m Direct,
    /// By number.
    guests: [Guest<'m>; 2],
}

impl<'m> Lean<'m> {
    /// The domain that grants.
    pub const GRANTER: DomainId = DomainId::new(0);
    /// The domain that maps and unmaps.
    pub const CALLER: DomainId = DomainId::new(1);

    #[inline]
    fn guest(&self, id: DomainId) -> Option<&Guest<'m>> {
        self.guests.get(usize::from(id.get()))
    }

    fn caller(&self) -> &Guest<'m> {
        let [_, caller] = &self.guests;
        caller
    }

    /// Makes a grant-table hypercall of the caller.
    #[inline]
    pub fn call(&self, call: Call) -> Outcome {
        call.run(&domain::Caller { lean: self, guest: self.caller() })
    }

    /// Gives a domain a page of RAM at `gfn`, where nothing was.
    ///
    /// # Panics
    /// If there is no memory, or no such domain, or the number is taken.
    pub fn populate(&self, id: DomainId, gfn: Gfn) {
        let guest = self.guest(id).expect("one of the two domains");
        let mfn = self.memory.take().expect("memory for a guest");
        self.memory.count(mfn, false);
        let mut batch: Batch<(), 1> = Batch::new(id);
        batch.edit_many(|skipped, _| {
            let set = guest.space.lock().cpu.set(gfn, 0, mfn, PageKind::RamReadWrite, skipped);
            assert!(set.expect("room for RAM").is_none(), "{gfn:?} was taken");
        });
        drop(batch.flush(&Hardware { tlb: &Null, iotlb: &Null }).expect("this cannot fail"));
    }

    /// Grants the page at `gfn` of the granter to the caller, for reading and writing.
    ///
    /// # Panics
    /// If its table cannot grow that far.
    pub fn grant(&self, reference: u32, gfn: Gfn) {
        let [granter, _] = &self.guests;
        let mut table = granter.grants.lock();
        let (page, index) = (reference as usize / 512, reference as usize % 512);
        let frames = table.frames().max(page + 1);
        table.grow(frames).expect("room in the table");
        let word = 1 | u64::from(Self::CALLER.get()) << 16 | gfn.get() << 32;
        let shared = gnttab::GrantStorage::shared(table.storage(), page).expect("a page of it");
        shared[index].store(word, Ordering::SeqCst);
    }

    /// Whether the caller's CPUs see anything at `gfn`, and its devices.
    #[must_use]
    pub fn shows(&self, gfn: Gfn) -> (bool, bool) {
        let caller = self.caller();
        let device = caller.dma.lookup(&self.memory, gfn.into());
        let device = device.and_then(|found| found.leaf_at(gfn)).is_some();
        (caller.space.lock().cpu.get(gfn).is_some(), device)
    }

    /// How often the page at `gfn` of the granter is counted, and how often as writable.
    #[must_use]
    pub fn counts(&self, gfn: Gfn) -> (u32, u32) {
        let [granter, _] = &self.guests;
        let mapping = granter.space.lock().cpu.get(gfn);
        mapping.map_or((0, 0), |mapping| self.memory.counts(mapping.mfn))
    }

    /// Reads the caller's memory.
    ///
    /// # Errors
    /// [`GuestFault`](gnttab::GuestFault) where nothing is mapped.
    pub fn read(&self, at: GuestAddress, bytes: &mut [u8]) -> Result<(), gnttab::GuestFault> {
        domain::Caller { lean: self, guest: self.caller() }.read(at, bytes)
    }

    /// Writes the caller's memory.
    ///
    /// # Errors
    /// As [`read`](Self::read).
    pub fn write(&self, at: GuestAddress, bytes: &[u8]) -> Result<(), gnttab::GuestFault> {
        domain::Caller { lean: self, guest: self.caller() }.write(at, bytes)
    }
}

impl Guest<'_> {
    /// Puts a page where nothing is, in both tables. After an error nothing changed.
    fn map<'id>(
        &self,
        memory: &Direct,
        gfn: Gfn,
        (mfn, kind): (Mfn, PageKind),
        skipped: &mut Skipped<'id>,
    ) -> Option<()> {
        let mut space = self.space.lock();
        if space.cpu.get(gfn).is_some() {
            return None;
        }
        space.cpu.set(gfn, 0, mfn, kind, skipped).ok()?;
        let rest = Rest::new(Run::single(gfn));
        let (access, budget) = (kind.device_access(), &mut Budget::UNLIMITED.clone());
        let mapped = self.dma.map(&memory, rest, mfn, access, budget, skipped);
        if mapped.is_err() {
            drop(space.cpu.clear(gfn, p2m::Expected { mfn, kind }, skipped));
        }
        mapped.ok()
    }

    /// Takes pages out of both tables, each if both show what is expected, and tells `taken`
    /// of each. The domain's tables are locked once for all.
    #[inline(never)]
    fn clear<'id, T: Copy>(
        &self,
        memory: &Direct,
        pages: impl Iterator<Item = (Gfn, p2m::Expected, T)>,
        skipped: &mut Skipped<'id>,
        mut taken: impl FnMut(T, Result<Cleared<'id>, p2m::ClearError>),
    ) {
        let Space { cpu, path, last: _ } = &mut *self.space.lock();
        let (mut cpu, mut device) = (cpu.clearing(), self.dma.clearing(&memory, path));
        for (gfn, expected, page) in pages {
            let cleared = if let Some(cpu) = cpu.shown(gfn, expected)
                && let Some(device) = device.shown(gfn.into(), for_devices(expected))
            {
                Ok(cpu.clear_with(device, skipped))
            } else {
                one_by_one(&mut cpu, &mut device, gfn, expected, skipped)
            };
            taken(page, cleared);
        }
    }
}

const fn for_devices(expected: p2m::Expected) -> iommu_vtd::Expected {
    let p2m::Expected { mfn, kind } = expected;
    iommu_vtd::Expected { mfn, access: kind.device_access() }
}

/// As [`Guest::clear`], for a page that is not where it mostly is.
#[cold]
#[inline(never)]
fn one_by_one<'id>(
    cpu: &mut p2m::Clearing<'_, Ept, &Direct>,
    device: &mut iommu_vtd::Clearing<'_, &Direct>,
    gfn: Gfn,
    expected: p2m::Expected,
    skipped: &mut Skipped<'id>,
) -> Result<Cleared<'id>, p2m::ClearError> {
    let cpu = cpu.clear(gfn, expected, skipped)?;
    // This embedding never lets the two differ.
    let device = device.clear(gfn.into(), for_devices(expected), skipped);
    device.map_or(Err(p2m::ClearError::Contended), |device| Ok(cpu.with(&device)))
}
