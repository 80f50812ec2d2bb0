//! Single pages through a real batch: the path of a grant unmap.

use flush::{Batch, Change, Cover, Depth, DomainId, Flush, Gfn, Hardware, Iotlb, Mfn, Run};
use flush::{Cleared, Records, Shared, Tlb};
use stage2::{
    Access, Budget, Emptied, Leaf, Level, Over, PageError, Recorder, Rest, Sink, Unheld, clear,
    clear_page, lookup, map,
};

use crate::arena::Arena;
use crate::log::Log;
use crate::plain::{ACCESSED, DIRTY, Plain};

pub(crate) struct Idle;

impl<K: flush::Kind> Flush<K> for Idle {
    type InFlight = ();
    type Error = ();
    fn start(&self, _: DomainId, _: &Cover) {}
    fn wait(&self, (): ()) -> Result<(), ()> {
        Ok(())
    }
}

pub(crate) const HARDWARE: Hardware<'static, Idle, Idle> = Hardware { tlb: &Idle, iotlb: &Idle };

fn leaf(mfn: u64) -> Leaf {
    Leaf::new(Mfn::new(mfn), Access::READ_WRITE)
}

fn populated(format: &Plain) -> Arena {
    let arena = Arena::new(format);
    let tables = arena.tables(format);
    let mut log = Log::new();
    map(tables, Gfn::new(5), Level::PAGE, leaf(7), Over::Vacant, &mut log).unwrap();
    map(tables, Gfn::new(16), Level::TWO, leaf(0x40), Over::Vacant, &mut log).unwrap();
    arena
}

/// Clears a page of a table that only CPUs walk, in a batch of its own.
fn clear_one(
    arena: &Arena,
    format: &Plain,
    gfn: u64,
    expected: impl FnMut(&Leaf) -> bool,
) -> (Result<Leaf, PageError>, Cover) {
    let mut batch = Batch::<(), 4>::new(DomainId::new(1));
    let result = batch.edit_many(|skipped, _| {
        clear_page::<Tlb, _, _>(arena.tables(format), Gfn::new(gfn), skipped, expected)
            .map(|(leaf, _gone)| leaf)
    });
    let cover = batch.tlb().clone();
    assert!(batch.iotlb().is_nothing());
    assert!(batch.flush(&HARDWARE).is_ok());
    (result, cover)
}

#[test]
fn the_expected_page_goes_on_record_and_its_tables_stay() {
    let format = Plain::small();
    let arena = populated(&format);
    let tables = arena.linked();
    arena.marks.borrow_mut().extend([DIRTY, ACCESSED]);
    let (result, cover) = clear_one(&arena, &format, 5, |found| found.same_mapping(&leaf(7)));
    assert_eq!(result, Ok(Leaf { accessed: true, dirty: true, ..leaf(7) }));
    assert!(cover.covers(Run::single(Gfn::new(5)), Depth::Leaves));
    assert_eq!(
        (cover.pages(), cover.depth(), cover.change()),
        (1, Depth::Leaves, Change::Modified)
    );
    assert!(lookup(arena.tables(&format), Gfn::new(5)).unwrap().leaf_at(Gfn::new(5)).is_none());
    assert_eq!(arena.linked(), tables);
    arena.check(&format, 0);
}

#[track_caller]
fn check_refused(gfn: u64, expected: bool, error: PageError) {
    let format = Plain::small();
    let arena = populated(&format);
    let (result, cover) = clear_one(&arena, &format, gfn, |_| expected);
    assert_eq!(result, Err(error));
    assert!(cover.is_nothing());
    let tables = arena.tables(&format);
    assert!(lookup(tables, Gfn::new(5)).unwrap().leaf_at(Gfn::new(5)).is_some());
    assert!(lookup(tables, Gfn::new(16)).unwrap().leaf_at(Gfn::new(16)).is_some());
}

#[test]
fn any_other_page_is_refused_with_nothing_on_record() {
    check_refused(5, false, PageError::Unexpected(leaf(7)));
    check_refused(6, true, PageError::Absent);
    check_refused(200, true, PageError::Absent);
    check_refused(20, true, PageError::Large(Level::TWO));
    check_refused(256, true, PageError::OutOfRange);
    check_refused(u64::MAX, true, PageError::OutOfRange);
}

#[test]
fn a_page_that_turns_into_something_else_meanwhile_is_not_cleared() {
    let format = Plain::small();
    let arena = populated(&format);
    // The frame changes between the read and the exchange: the check is asked again.
    arena.marks.borrow_mut().push(1 << 20);
    let (result, cover) = clear_one(&arena, &format, 5, |found| found.same_mapping(&leaf(7)));
    assert_eq!(result, Err(PageError::Unexpected(leaf(0x107))));
    assert!(cover.is_nothing());
    // It keeps changing: there are four tries.
    arena.marks.borrow_mut().extend([1 << 21, 1 << 22, 1 << 23, 1 << 24]);
    let (result, cover) = clear_one(&arena, &format, 5, |_| true);
    assert_eq!(result, Err(PageError::Contended));
    assert!(cover.is_nothing());
    arena.marks.borrow_mut().extend([1 << 25, 1 << 26, 1 << 27]);
    let (result, _) = clear_one(&arena, &format, 5, |_| true);
    assert_eq!(result, Ok(leaf(0xff07)));
}

/// Counts the proofs it gets and has room for so many.
struct Proofs<'id, K: Records> {
    room: usize,
    proofs: Vec<(Run, flush::Gone<'id, K>)>,
}

impl<'id, K: Records> Sink<'id, K> for Proofs<'id, K> {
    fn left(&self) -> usize {
        self.room - self.proofs.len()
    }

    fn take(&mut self, run: Run, _: Leaf, gone: flush::Gone<'id, K>) {
        self.proofs.push((run, gone));
    }
}

#[test]
fn a_range_walk_of_a_shared_table_records_both_kinds_and_hands_out_each_proof() {
    let format = Plain::small();
    let arena = populated(&format);
    let mut batch = Batch::<Run, 4>::new(DomainId::new(1));
    batch.edit_many(|skipped, room| {
        let sink = Proofs::<Shared> { room: room.left(), proofs: Vec::new() };
        let mut record = Recorder::new(skipped, sink);
        let space = Rest::new(format.geometry.space());
        let mut budget = Budget::UNLIMITED;
        let tally =
            clear(arena.tables(&format), space, &mut budget, Emptied::Free, &mut record).unwrap();
        assert_eq!((tally.leaves, tally.tables), (2, 3));
        for (run, gone) in record.into_sink().proofs {
            room.hold(run, Cleared::from(gone)).unwrap();
        }
    });
    for cover in [batch.tlb(), batch.iotlb()] {
        assert_eq!((cover.depth(), cover.order()), (Depth::Tables, 4));
        assert!(cover.covers(Run::block(Gfn::new(0), 4), Depth::Tables));
        assert!(cover.covers(Run::block(Gfn::new(16), 4), Depth::Tables));
    }
    arena.check(&format, 3);
    let mut flushed = batch.flush(&HARDWARE).unwrap();
    let mut pages = 0;
    while let Some(page) = flushed.next_page() {
        pages += page.get().pages();
    }
    assert_eq!(pages, 17);
    let mut tables = 0;
    while let Some(page) = flushed.next_table() {
        assert!(page.get().mfn().get() != 0);
        tables += 1;
    }
    assert_eq!(tables, 3);
}

#[test]
fn a_walk_stops_where_the_batch_is_full() {
    let format = Plain::small();
    let arena = populated(&format);
    let mut batch = Batch::<Run, 1>::new(DomainId::new(1));
    batch.edit_many(|skipped, room| {
        let sink = Proofs::<Shared> { room: room.left(), proofs: Vec::new() };
        let mut record = Recorder::new(skipped, sink);
        let space = Rest::new(format.geometry.space());
        let mut budget = Budget::UNLIMITED;
        let stopped = clear(arena.tables(&format), space, &mut budget, Emptied::Keep, &mut record)
            .unwrap_err();
        assert_eq!(stopped.stop, stage2::Stop::Full);
        assert_eq!(stopped.rest.run().first(), Gfn::new(16));
        for (run, gone) in record.into_sink().proofs {
            room.hold(run, Cleared::from(gone)).unwrap();
        }
    });
    assert_eq!(batch.len(), 1);
    assert!(batch.flush(&HARDWARE).is_ok());
}

/// What a map of one page puts on record for CPUs and for devices.
fn map_one<K: Records>(gfn: u64) -> (Cover, Cover) {
    let format = Plain::small();
    let arena = populated(&format);
    let mut batch = Batch::<(), 1>::new(DomainId::new(1));
    batch.edit_many(|skipped, _| {
        let mut record = Recorder::<K>::new(skipped, Unheld);
        let tables = arena.tables(&format);
        map(tables, Gfn::new(gfn), Level::PAGE, leaf(9), Over::Vacant, &mut record).unwrap();
    });
    let covers = (batch.tlb().clone(), batch.iotlb().clone());
    assert!(batch.flush(&HARDWARE).is_ok());
    covers
}

#[test]
fn a_new_page_is_work_for_devices_only_and_a_new_table_goes_deeper() {
    for covers in [map_one::<Tlb>(6), map_one::<Tlb>(200)] {
        assert!(covers.0.is_nothing() && covers.1.is_nothing());
    }
    for (tlb, iotlb) in [map_one::<Iotlb>(6), map_one::<Shared>(6)] {
        assert!(tlb.is_nothing());
        assert_eq!((iotlb.pages(), iotlb.change()), (1, Change::Added));
        assert_eq!(iotlb.depth(), Depth::Leaves);
    }
    for (tlb, iotlb) in [map_one::<Iotlb>(200), map_one::<Shared>(200)] {
        assert!(tlb.is_nothing());
        assert_eq!((iotlb.pages(), iotlb.change()), (1, Change::Added));
        assert!(iotlb.covers(Run::single(Gfn::new(200)), Depth::Tables));
    }
}

#[test]
fn a_leaf_that_is_replaced_goes_on_record_for_everybody_who_walks_the_table() {
    let format = Plain::small();
    let arena = populated(&format);
    let mut batch = Batch::<(), 1>::new(DomainId::new(1));
    batch.edit_many(|skipped, _| {
        let mut record = Recorder::<Shared>::new(skipped, Unheld);
        let (tables, over) = (arena.tables(&format), Over::Expected(leaf(7)));
        map(tables, Gfn::new(5), Level::PAGE, leaf(9), over, &mut record).unwrap();
    });
    for cover in [batch.tlb(), batch.iotlb()] {
        assert_eq!((cover.pages(), cover.change()), (1, Change::Modified));
    }
    assert!(batch.flush(&HARDWARE).is_ok());
}
