//! A guest with nested guests, on the software model and against a reference.
//!
//! [`NestedWorld`] embeds [`p2m::nested`]: two CPUs run nested guests on shadow tables,
//! a third one edits the guest's map and carries out the flushes that the guest asks
//! for. [`Step`]s drive it. What a nested guest reaches is compared with what the guest's
//! own tables said since its last flush, and the model reports each stale use.
//! [`precise`] counts what one changed page costs.

use flush::{Batch, DomainId, Gfn, Mfn};
use p2m::{
    Expected, P2m, PageKind,
    nested::{Context, Nested, ReverseEntry, Shadow, Walked, Wiped},
};
use stage2::{
    Access, Budget, Emptied,
    format::ept::{Ept, EptLevels},
};

use crate::{Memory, Null, PlainRam};

pub use script::Step;
pub use sorts::Walks;
pub use tables::Shown;
pub use world::{NestedLie, NestedSetup, NestedWorld, Storage};

mod edits;
mod script;
mod sorts;
mod tables;
mod world;

/// Nested leaves that go when one canonical page changes, of `nested_pages` that show a
/// page each: before, where the whole shadow is unmapped, and after, with the reverse map.
///
/// # Panics
/// If the guest cannot be set up; up to 2^20 pages there is memory for it.
#[must_use]
pub fn precise(nested_pages: u64) -> (u64, u64) {
    let records = usize::try_from(nested_pages).expect("that many records fit");
    (touched(nested_pages, 0), touched(nested_pages, records))
}

fn touched(nested_pages: u64, records: usize) -> u64 {
    const GUEST: DomainId = DomainId::new(1);
    const RAM: PageKind = PageKind::RamReadWrite;
    // Tables alone take frames: two trees, each with a table for 512 pages.
    let memory = Memory::new(PlainRam::new(64 + 2 * nested_pages.div_ceil(512)));
    let mut shadows = [Shadow::VACANT];
    let mut entries = vec![ReverseEntry::EMPTY; records];
    let p2m = P2m::new(Ept::new(EptLevels::Four), memory).expect("a root");
    let mut nested: Nested<'_, _, _> = Nested::new(p2m, &mut shadows, &mut entries, 0x5eed);
    let mut batch: Batch<Wiped, 1> = Batch::new(GUEST);
    let hardware = flush::Hardware { tlb: &Null, iotlb: &Null };

    let shadow = nested.pick(Context(0x1000)).expect("it is vacant");
    let mut budget = Budget::UNLIMITED;
    let held = batch.hold(|skipped| nested.prepare(&shadow, &mut budget, Emptied::Keep, skipped));
    held.expect("there is nothing to unmap");
    let mut flushed = batch.flush(&hardware).expect("nothing can fail");
    nested.open(flushed.next_page().expect("just held"));

    let ticket = nested.ticket(&shadow);
    let mfn = |page: u64| Mfn::new(0x100_0000 + page);
    batch.edit_many(|skipped, _| {
        for page in 0..nested_pages {
            let gfn = Gfn::new(page);
            let set = nested.set(gfn, 0, mfn(page), RAM, &mut budget, skipped);
            assert!(set.expect("memory for tables").is_none());
            let walked = Walked { canonical: gfn, order: 0, access: Access::ALL };
            let at = Gfn::new(0x10_0000 + page);
            nested.fill(&shadow, ticket, at, walked, skipped).expect("memory for tables");
        }
        let before = nested.counts();
        let middle = nested_pages / 2;
        let expected = Expected { mfn: mfn(middle), kind: RAM };
        drop(nested.clear(Gfn::new(middle), expected, &mut budget, skipped).expect("mapped"));
        let after = nested.counts();
        (after.precise - before.precise) + (after.swept - before.swept)
    })
}
