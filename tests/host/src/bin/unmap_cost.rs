//! Unmaps grants with flush hardware that does nothing, for counting instructions.
//!
//! The argument is `unmap/N/contiguous` or `unmap/N/random`: grants in a hypercall,
//! and how their frames lie. Tables for CPUs and for devices are real, in plain memory,
//! and so are the copies from and to the guest. Everything but the hypercalls happens
//! outside [`measured`].

use std::{cell::RefCell, env, hint::black_box, process::ExitCode};

use flush::{DomainId, Gfn};
use gnttab::{
    Call, GrantStorage, GuestAddress, Outcome, VcpuId,
    abi::{MapGrantRef, UnmapGrantRef},
};
use host::{Caller, Faults, Guest, Hypervisor, Layout, Null, PlainRam};
use zerocopy::{FromZeros, IntoBytes};

const FRONTEND: DomainId = DomainId::new(1);
const BACKEND: DomainId = DomainId::new(2);
/// Hypercalls are repeated up to this many grants, so that the first ones weigh little.
const GRANTS: u32 = 1024;
/// Where the backend keeps its arguments.
const ARGUMENTS: u64 = 0x10;
const FIRST_REFERENCE: u32 = 8;

type Backend<'w> = Caller<'w, PlainRam, Null, Null>;

fn main() -> ExitCode {
    let name = env::args().nth(1).unwrap_or_default();
    let parts: Vec<&str> = name.split('/').collect();
    let (batch, random) = match parts[..] {
        ["unmap", batch, "contiguous"] => (batch.parse().ok(), false),
        ["unmap", batch, "random"] => (batch.parse().ok(), true),
        _ => (None, false),
    };
    let Some(batch) = batch.filter(|batch| (1..=GRANTS).contains(batch)) else {
        eprintln!("usage: unmap_cost unmap/N/contiguous|random, N from 1 to {GRANTS}");
        return ExitCode::FAILURE;
    };
    let mut hypervisor = Hypervisor::new(PlainRam::new(16384));
    hypervisor.add(FRONTEND, Layout::Separate);
    hypervisor.add(BACKEND, Layout::Separate);
    let faults = Faults::default();
    let failed = RefCell::default();
    let guest = |id| hypervisor.guest(id).expect("both domains exist");
    for page in 0..16 {
        hypervisor.populate(guest(BACKEND), Gfn::new(ARGUMENTS + page));
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
    let frames = frames(random);
    grant(&hypervisor, guest(FRONTEND));
    let handles = map(&backend, &frames);
    let calls = prepare(&backend, &frames, &handles, batch);
    measured(&backend, &calls);
    assert!(frames.iter().all(|gfn| guest(BACKEND).lookup(*gfn).is_none()), "all are unmapped");
    println!("@ unmap grants={GRANTS}");
    ExitCode::SUCCESS
}

/// The hypercalls, and nothing else.
#[inline(never)]
fn measured(backend: &Backend<'_>, calls: &[Call]) {
    for call in calls {
        assert_eq!(black_box(*call).run(backend), Outcome::Done);
    }
}

/// Where the backend maps: in a row, or all over 4 GiB in no order.
fn frames(random: bool) -> Vec<Gfn> {
    let mut frames: Vec<Gfn> = (0x10_0000..).take(GRANTS as usize).map(Gfn::new).collect();
    if random {
        let mut state = 1_u64;
        for (place, frame) in frames.iter_mut().enumerate() {
            state = state.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(0x1405_7b7e_f767_814f);
            // Distinct: each place has a span of 1024 frames of its own, in bit-reversed order.
            let span = (place as u64).reverse_bits() >> 54;
            *frame = Gfn::new(0x10_0000 + (span << 10) + (state >> 54));
        }
    }
    frames
}

fn grant(hypervisor: &Hypervisor<PlainRam>, frontend: &Guest<PlainRam>) {
    frontend.with_grants(|table| {
        table.grow(4).expect("room in the table");
        for place in 0..GRANTS {
            let reference = FIRST_REFERENCE + place;
            let gfn = Gfn::new(0x1000 + u64::from(place));
            hypervisor.populate(frontend, gfn);
            let word = 1 | u64::from(BACKEND.get()) << 16 | gfn.get() << 32;
            let page = table.storage().shared(reference as usize / 512).expect("a page of it");
            page[reference as usize % 512].store(word, std::sync::atomic::Ordering::SeqCst);
        }
    });
}

fn map(backend: &Backend<'_>, frames: &[Gfn]) -> Vec<u32> {
    let base = ARGUMENTS << 12;
    let place = |index: usize| GuestAddress(base + (index * size_of::<MapGrantRef>()) as u64);
    for (index, gfn) in frames.iter().enumerate() {
        let mut element = MapGrantRef::new_zeroed();
        element.host_addr = gfn.get() << 12;
        element.flags = 2;
        element.reference = FIRST_REFERENCE + index as u32;
        element.domain = FRONTEND.get();
        let done = backend.hypervisor.copy_to(backend.guest, place(index), element.as_bytes());
        done.expect("arguments are mapped");
    }
    let call = Call { command: 0, argument: GuestAddress(base), count: GRANTS };
    assert_eq!(call.run(backend), Outcome::Done);
    (0..frames.len())
        .map(|index| {
            let mut element = MapGrantRef::new_zeroed();
            let bytes = element.as_mut_bytes();
            let done = backend.hypervisor.copy_from(backend.guest, place(index), bytes);
            done.expect("arguments are mapped");
            assert_eq!(element.status, 0);
            element.handle
        })
        .collect()
}

fn prepare(backend: &Backend<'_>, frames: &[Gfn], handles: &[u32], batch: u32) -> Vec<Call> {
    let base = ARGUMENTS << 12;
    let place = |index: usize| GuestAddress(base + (index * size_of::<UnmapGrantRef>()) as u64);
    for (index, (gfn, handle)) in frames.iter().zip(handles).enumerate() {
        let mut element = UnmapGrantRef::new_zeroed();
        element.host_addr = gfn.get() << 12;
        element.handle = *handle;
        let done = backend.hypervisor.copy_to(backend.guest, place(index), element.as_bytes());
        done.expect("arguments are mapped");
    }
    (0..GRANTS)
        .step_by(batch as usize)
        .map(|first| {
            let count = batch.min(GRANTS - first);
            Call { command: 1, argument: place(first as usize), count }
        })
        .collect()
}
