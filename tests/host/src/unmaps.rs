//! A backend that maps grants and gives them back, in either embedding.
//!
//! [`Setting`] is how the frames lie and how many grants a hypercall has. It is run in the
//! lean embedding or in the one with standard locks, whoever counts or times it says what
//! the hypercalls are run inside of.

use std::{cell::RefCell, collections::HashSet, iter, sync::atomic::Ordering};

use flush::{DomainId, Gfn};
use gnttab::{
    Call, GrantStorage, GuestAddress, Outcome, VcpuId,
    abi::{MapGrantRef, UnmapGrantRef},
};
use zerocopy::{FromZeros, IntoBytes};

use crate::{
    Caller, Faults, Hypervisor, Layout, Null, PlainRam,
    lean::{Lean, Machine},
};

/// Hypercalls are repeated up to this many grants, so that the first ones weigh little.
pub const GRANTS: u32 = 1024;
/// Where the backend keeps its arguments.
const ARGUMENTS: u64 = 0x10;
const FIRST_REFERENCE: u32 = 8;
/// Where the frontend has the pages that it grants.
const GRANTED: u64 = 0x1000;
/// Frames of the machine: both domains' pages, and a table page for each grant and side.
const FRAMES: u64 = 16384;

/// A backend that can make hypercalls, and the frontend that granted it pages.
pub trait Backend {
    /// The frontend.
    const FRONTEND: DomainId;

    /// Writes the backend's memory.
    fn write(&self, at: GuestAddress, bytes: &[u8]);
    /// Reads the backend's memory.
    fn read(&self, at: GuestAddress, bytes: &mut [u8]);
    /// Makes a hypercall.
    fn call(&self, call: Call) -> Outcome;
    /// Whether anything is mapped at `gfn`.
    fn shows(&self, gfn: Gfn) -> bool;
}

impl Backend for Lean<'_> {
    const FRONTEND: DomainId = Lean::GRANTER;

    fn write(&self, at: GuestAddress, bytes: &[u8]) {
        Self::write(self, at, bytes).expect("arguments are mapped");
    }

    fn read(&self, at: GuestAddress, bytes: &mut [u8]) {
        Self::read(self, at, bytes).expect("arguments are mapped");
    }

    #[inline]
    fn call(&self, call: Call) -> Outcome {
        Self::call(self, call)
    }

    fn shows(&self, gfn: Gfn) -> bool {
        Self::shows(self, gfn) != (false, false)
    }
}

type Standard<'w> = Caller<'w, PlainRam, Null, Null>;

const FRONTEND: DomainId = DomainId::new(1);
const BACKEND: DomainId = DomainId::new(2);

impl Backend for Standard<'_> {
    const FRONTEND: DomainId = FRONTEND;

    fn write(&self, at: GuestAddress, bytes: &[u8]) {
        self.hypervisor.copy_to(self.guest, at, bytes).expect("arguments are mapped");
    }

    fn read(&self, at: GuestAddress, bytes: &mut [u8]) {
        self.hypervisor.copy_from(self.guest, at, bytes).expect("arguments are mapped");
    }

    #[inline]
    fn call(&self, call: Call) -> Outcome {
        call.run(self)
    }

    fn shows(&self, gfn: Gfn) -> bool {
        self.guest.lookup(gfn).is_some()
    }
}

/// What is unmapped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Setting {
    /// Grants in one hypercall.
    pub batch: u32,
    /// The frames lie all over 4 GiB in no order, instead of in a row.
    pub random: bool,
}

/// The backend's pages for arguments.
fn arguments() -> impl Iterator<Item = Gfn> {
    (ARGUMENTS..ARGUMENTS + 16).map(Gfn::new)
}

/// The frontend's grants: references, and the page that each shows.
fn granted() -> impl Iterator<Item = (u32, Gfn)> {
    (0..GRANTS).map(|place| (FIRST_REFERENCE + place, Gfn::new(GRANTED + u64::from(place))))
}

/// A backend with its grants mapped, and the calls that give them back.
pub trait Work {
    /// Runs the calls, each of which has to end well.
    fn run<B: Backend>(&mut self, backend: &B, calls: &[Call]);
}

impl Setting {
    /// Maps [`GRANTS`] grants in the lean embedding, and lets `work` give them back, `rounds`
    /// times.
    ///
    /// # Panics
    /// If something is left mapped or counted.
    pub fn in_lean(self, rounds: u64, work: &mut impl Work) {
        let machine = Machine::new(FRAMES);
        let lean = machine.boot();
        arguments().for_each(|gfn| lean.populate(Lean::CALLER, gfn));
        for (reference, gfn) in granted() {
            lean.populate(Lean::GRANTER, gfn);
            lean.grant(reference, gfn);
        }
        (0..rounds).for_each(|_| self.round(&lean, work));
        for (_, gfn) in granted() {
            assert_eq!(lean.counts(gfn), (1, 0), "{gfn:?} is counted by its owner alone");
        }
    }

    /// The same in the embedding that tests use.
    ///
    /// # Panics
    /// If something is left mapped.
    pub fn in_standard(self, work: &mut impl Work) {
        let mut hypervisor = Hypervisor::new(PlainRam::new(FRAMES));
        hypervisor.add(FRONTEND, Layout::Separate);
        hypervisor.add(BACKEND, Layout::Separate);
        let faults = Faults::default();
        let failed = RefCell::default();
        let guest = |id| hypervisor.guest(id).expect("both domains exist");
        for gfn in arguments() {
            hypervisor.populate(guest(BACKEND), gfn);
        }
        for (reference, gfn) in granted() {
            hypervisor.populate(guest(FRONTEND), gfn);
            guest(FRONTEND).with_grants(|table| {
                table.grow(4).expect("room in the table");
                let word = 1 | u64::from(BACKEND.get()) << 16 | gfn.get() << 32;
                let page = table.storage().shared(reference as usize / 512).expect("a page of it");
                page[reference as usize % 512].store(word, Ordering::SeqCst);
            });
        }
        let backend = Caller {
            hypervisor: &hypervisor,
            guest: guest(BACKEND),
            vcpu: VcpuId(0),
            tlb: Null,
            iotlb: Null,
            faults: &faults,
            ended: &|_| (),
            copying: &|| (),
            failed: &failed,
        };
        self.round(&backend, work);
    }

    fn round<B: Backend>(self, backend: &B, work: &mut impl Work) {
        let frames = frames(self.random);
        let handles = map(backend, &frames);
        assert!(frames.iter().all(|gfn| backend.shows(*gfn)), "all are mapped");
        let calls = prepare(backend, &frames, &handles, self.batch);
        work.run(backend, &calls);
        assert!(frames.iter().all(|gfn| !backend.shows(*gfn)), "all are unmapped");
    }
}

/// Where the backend maps: in a row, or anywhere in 4 GiB.
fn frames(random: bool) -> Vec<Gfn> {
    let drawn = random.then(|| anywhere(1 << 20).take(GRANTS as usize).collect());
    let offsets: Vec<u64> = drawn.unwrap_or_else(|| (0..u64::from(GRANTS)).collect());
    offsets.into_iter().map(|offset| Gfn::new(0x10_0000 + offset)).collect()
}

/// Numbers below `end`, a power of two, in no order and none of them twice: the same ones each
/// time.
pub(crate) fn anywhere(end: u64) -> impl Iterator<Item = u64> {
    let (mut state, mut seen) = (1_u64, HashSet::new());
    let drawn = iter::from_fn(move || {
        state = state.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(0x1405_7b7e_f767_814f);
        // The upper bits are the ones without a pattern.
        Some(state >> (u64::BITS - end.trailing_zeros()))
    });
    drawn.filter(move |number| seen.insert(*number))
}

fn map<B: Backend>(backend: &B, frames: &[Gfn]) -> Vec<u32> {
    let base = ARGUMENTS << 12;
    let place = |index: usize| GuestAddress(base + (index * size_of::<MapGrantRef>()) as u64);
    for (index, gfn) in frames.iter().enumerate() {
        let mut element = MapGrantRef::new_zeroed();
        element.host_addr = gfn.get() << 12;
        element.flags = 2;
        element.reference = FIRST_REFERENCE + index as u32;
        element.domain = B::FRONTEND.get();
        backend.write(place(index), element.as_bytes());
    }
    let call = Call { command: 0, argument: GuestAddress(base), count: GRANTS };
    assert_eq!(backend.call(call), Outcome::Done);
    (0..frames.len())
        .map(|index| {
            let mut element = MapGrantRef::new_zeroed();
            backend.read(place(index), element.as_mut_bytes());
            assert_eq!(element.status, 0);
            element.handle
        })
        .collect()
}

fn prepare<B: Backend>(backend: &B, frames: &[Gfn], handles: &[u32], batch: u32) -> Vec<Call> {
    let base = ARGUMENTS << 12;
    let place = |index: usize| GuestAddress(base + (index * size_of::<UnmapGrantRef>()) as u64);
    for (index, (gfn, handle)) in frames.iter().zip(handles).enumerate() {
        let mut element = UnmapGrantRef::new_zeroed();
        element.host_addr = gfn.get() << 12;
        element.handle = *handle;
        backend.write(place(index), element.as_bytes());
    }
    (0..GRANTS)
        .step_by(batch as usize)
        .map(|first| {
            let count = batch.min(GRANTS - first);
            Call { command: 1, argument: place(first as usize), count }
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Plain(usize);

    impl Work for Plain {
        fn run<B: Backend>(&mut self, backend: &B, calls: &[Call]) {
            for call in calls {
                assert_eq!(backend.call(*call), Outcome::Done);
                self.0 += call.count as usize;
            }
        }
    }

    /// What is left mapped, or counted, panics inside.
    #[test]
    fn either_embedding_maps_and_gives_back_every_grant_however_many_a_call_has() {
        for random in [false, true] {
            for batch in [1, 32, 256] {
                let mut work = Plain(0);
                Setting { batch, random }.in_lean(2, &mut work);
                Setting { batch, random }.in_standard(&mut work);
                assert_eq!(work.0, 3 * GRANTS as usize);
            }
        }
    }
}
