//! What happens in the worlds that are swept, one script each.
//!
//! A script goes on whatever fails. `prepare` runs before anything does.

use flush::Gfn;
use gnttab::abi::{GrantCopy, SetVersion, SwapGrantRef};
use host::{
    calls::{Side, copy_request, map_request, operation, unmap_request},
    world::{BACKEND, FIRST_REFERENCE, FRONTEND, POISON, granted_gfn},
};
use hwmodel::UnitId;
use iommu_vtd::{Device, SourceId};

use crate::scene::{Fault, Scene};

/// Where the backend maps grants.
const FIRST: u64 = 0x10_0000;
/// Where the backend has memory of its own, but for its arguments: a multiple of 2^18.
const RAM: u64 = 0x40_0000;
const BLOCK: u64 = 512;
/// A page of the backend for copies.
const OWN: u64 = 0x2000;
/// On a bus of its own, so that its context needs a table of its own.
const OTHER_DEVICE: SourceId = SourceId::new(0x7 << 8);

fn references(count: u32) -> impl Iterator<Item = u32> {
    FIRST_REFERENCE..FIRST_REFERENCE + count
}

fn grant(scene: &Scene, count: u32) {
    for reference in references(count) {
        scene.world.grant(reference, granted_gfn(reference), false);
    }
}

pub(crate) fn nothing(_: &mut Scene) {}

pub(crate) fn grants(scene: &mut Scene) {
    grant(scene, 36);
}

/// More than one chunk, next to each other and far apart.
pub(crate) fn map_and_unmap(scene: &mut Scene) {
    scene.map(references(34).zip(FIRST..), false);
    scene.map(references(2).map(|reference| reference + 34).zip([1 << 27, 1 << 28]), true);
    scene.give_back(operation::UNMAP);
}

/// With tables of their own for each.
pub(crate) fn map_apart(scene: &mut Scene) {
    scene.map(references(4).zip((1..).map(|place| place << 27)), false);
    scene.give_back(operation::UNMAP);
}

pub(crate) fn grants_over_memory(scene: &mut Scene) {
    grant(scene, 4);
    for page in 0..4 {
        scene.populate(FIRST + page, 0);
    }
}

/// Memory gives way to grants, which are given back by the other call.
pub(crate) fn map_over_memory(scene: &mut Scene) {
    scene.map(references(4).zip(FIRST..), false);
    scene.give_back(operation::REPLACE);
}

/// A domain that grants to itself.
pub(crate) fn own_grants(scene: &mut Scene) {
    scene.populate(FIRST, 0);
    own_entry(scene, FIRST);
}

fn own_entry(scene: &Scene, gfn: u64) {
    use gnttab::GrantStorage;
    let table = scene.world.backend().grants();
    let words = table.storage().shared(0).expect("a table has a page");
    let word = 1 | u64::from(BACKEND.get()) << 16 | gfn << 32;
    words[FIRST_REFERENCE as usize].store(word, std::sync::atomic::Ordering::SeqCst);
}

/// A page moves to where its owner maps its own grant, and is lost with the mapping.
pub(crate) fn move_by_grant(scene: &mut Scene) {
    let to = Gfn::new(FIRST + (1 << 27));
    let mut map = [map_request(BACKEND, FIRST_REFERENCE, to, false)];
    scene.call(BACKEND, operation::MAP, &mut map);
    scene.touch(to);
    scene.touch(Gfn::new(FIRST));
    if map[0].status == 0 {
        scene.call(BACKEND, operation::UNMAP, &mut [unmap_request(map[0].handle, to)]);
    }
    scene.touch(to);
}

/// Nearly all handles of a page are in use; a reference is mapped 128 times at most.
pub(crate) fn few_handles_left(scene: &mut Scene) {
    for reference in references(3) {
        scene.world.grant(reference, granted_gfn(reference), true);
    }
    for (reference, places) in references(2).zip([0..128, 128..254]) {
        scene.map(places.map(|place| (reference, FIRST + place)), true);
    }
}

/// The handles of a page are not enough.
pub(crate) fn many_handles(scene: &mut Scene) {
    scene.map((0..4).map(|place| (FIRST_REFERENCE + 2, FIRST + BLOCK + place)), true);
    let rest = scene.mapped.split_off(scene.mapped.len().min(254));
    let kept = std::mem::replace(&mut scene.mapped, rest);
    scene.give_back(operation::UNMAP);
    scene.mapped.extend(kept);
}

/// Both domains' tables grow, in two steps.
pub(crate) fn grow_tables(scene: &mut Scene) {
    for (id, frames) in [(FRONTEND, 2), (BACKEND, 3), (FRONTEND, 5)] {
        scene.grow(id, frames);
    }
}

pub(crate) fn grown(scene: &mut Scene) {
    scene.grow(FRONTEND, 3);
    grant(scene, 2);
}

/// Version 2 and its status words, and version 1 again.
pub(crate) fn change_version(scene: &mut Scene) {
    for version in [2, 1] {
        scene.call(FRONTEND, operation::SET_VERSION, &mut [SetVersion { version }]);
        scene.grow(FRONTEND, 4);
    }
}

/// A table of version 2 with a grant, of a whole page.
pub(crate) fn version_2(scene: &mut Scene) {
    for reference in references(2) {
        scene.world.grant(reference, granted_gfn(reference), false);
    }
    scene.call(FRONTEND, operation::SET_VERSION, &mut [SetVersion { version: 2 }]);
    for reference in references(2) {
        let head = 1 | u64::from(BACKEND.get()) << 16;
        scene.world.write_entry_v2(FRONTEND, reference, head, granted_gfn(reference).get());
    }
    scene.populate(OWN, 0);
}

pub(crate) fn map_version_2(scene: &mut Scene) {
    scene.map(references(2).zip(FIRST..), false);
    copies(scene);
    // Refused while a grant is mapped.
    scene.call(FRONTEND, operation::SET_VERSION, &mut [SetVersion { version: 1 }]);
    scene.give_back(operation::UNMAP);
}

pub(crate) fn two_grants(scene: &mut Scene) {
    grant(scene, 2);
    scene.populate(OWN, 0);
}

/// To a grant, from one, and from grant to grant.
pub(crate) fn copies(scene: &mut Scene) {
    let granted = |reference, offset| Side::Grant(FRONTEND, reference, offset);
    let own = |offset| Side::Own(Gfn::new(OWN), offset);
    let mut elements: Vec<GrantCopy> = vec![
        copy_request(granted(FIRST_REFERENCE, 3), own(512), 1000),
        copy_request(own(512), granted(FIRST_REFERENCE + 1, 4000), 96),
        copy_request(granted(FIRST_REFERENCE, 0), granted(FIRST_REFERENCE + 1, 1), 2000),
        copy_request(own(0), own(2048), 8),
    ];
    scene.call(BACKEND, operation::COPY, &mut elements);
}

/// Entries change places while one of two is mapped.
pub(crate) fn swap(scene: &mut Scene) {
    scene.map([(FIRST_REFERENCE, FIRST)], false);
    let pair = |first, second| SwapGrantRef { first, second, status: POISON, padding: 0 };
    let mut pairs = [
        pair(FIRST_REFERENCE + 1, FIRST_REFERENCE + 2),
        pair(FIRST_REFERENCE, FIRST_REFERENCE + 1),
    ];
    scene.call(FRONTEND, operation::SWAP, &mut pairs);
    scene.give_back(operation::UNMAP);
}

/// Tables come with memory, in blocks and in pages.
pub(crate) fn populate(scene: &mut Scene) {
    scene.populate(RAM, 9);
    scene.populate(RAM + 2 * BLOCK, 0);
    scene.populate(RAM + (1 << 27), 0);
    scene.replace(RAM + 2 * BLOCK);
}

pub(crate) fn block(scene: &mut Scene) {
    scene.populate(RAM, 9);
}

/// Pages go out of a large leaf, which has to be split.
pub(crate) fn split(scene: &mut Scene) {
    scene.clear(RAM + 77);
    scene.clear(RAM + 78);
    scene.replace(RAM + 79);
}

pub(crate) fn split_by_rights(scene: &mut Scene) {
    scene.restrict(RAM + 7, RAM + 9);
    scene.clear_range(RAM + 8, RAM + 20);
}

/// A part of a leaf that reaches over batches.
pub(crate) fn split_by_range(scene: &mut Scene) {
    scene.clear_range(RAM + 100, RAM + 139);
    scene.clear_range(RAM + 90, RAM + 150);
}

/// Pages with a table each.
pub(crate) fn sparse(scene: &mut Scene) {
    for page in 0..33 {
        scene.populate(RAM + 16 * BLOCK * page + page, 0);
    }
}

pub(crate) fn clear_sparse(scene: &mut Scene) {
    scene.clear_range(RAM, RAM + 16 * BLOCK * 33);
}

fn other_device() -> Device {
    let source = OTHER_DEVICE;
    Device { unit: 0, source, physical_function: source, device_tlb: None }
}

fn owner_writes(scene: &Scene) {
    scene.world.machine.dma_write64(OTHER_DEVICE.get(), RAM << 12, 5).ok();
}

pub(crate) fn second_device(scene: &mut Scene) {
    scene.world.machine.add_device(UnitId(0), OTHER_DEVICE.get(), false);
    scene.populate(RAM, 0);
}

/// A device comes, goes to the other domain, comes back and goes; its memory goes with it.
pub(crate) fn attach_and_detach(scene: &mut Scene) {
    for id in [BACKEND, FRONTEND, BACKEND] {
        scene.attach(id, other_device());
        owner_writes(scene);
        scene.detach(id, other_device());
        owner_writes(scene);
    }
    scene.attach(BACKEND, other_device());
    owner_writes(scene);
    scene.clear_range(RAM, RAM);
    owner_writes(scene);
}

pub(crate) fn mapped(scene: &mut Scene) {
    grant(scene, 36);
    scene.map(references(36).zip(FIRST..), false);
    scene.populate(RAM, 9);
    // Memory runs out between the two tables: the CPUs' leaf is split, the devices' is not.
    scene.arm(Some(Fault::Allocation(2)));
    scene.clear(RAM + 3);
    scene.disarm();
}

/// Both domains go, the one that maps first.
pub(crate) fn end(scene: &mut Scene) {
    scene.end();
}
