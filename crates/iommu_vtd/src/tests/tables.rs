//! A domain's own tables, edited through a batch.

use super::fake::{CAP, CAP_CM, ECAP, Fake, Lock, Mood, WITH_QUEUE};
use super::{TestDomain, plain, unit_up};
use crate::{DmaDomain, DmaFlush, Expected, Members};
use flush::{
    Batch, Cover, Dfn, DomainId, Flush, FlushError, Gfn, Hardware, HoldError, Iotlb, Mfn, NoIommu,
    Report, Run, Skipped, Tlb,
};
use stage2::format::vtd::{Vtd, VtdLevels};
use stage2::{Access, Budget, PageError, Rest, TableMemory, Unheld};

/// Grants: 32 contiguous pages at a multiple of 32, read and write.
const FIRST: u64 = 0x4020;
const FRAMES: u64 = 0x9000;

/// A CPU side that has nothing to forget in these tests.
struct Cpus;

impl Flush<Tlb> for Cpus {
    type InFlight = ();
    type Error = ();

    fn start(&self, _: DomainId, _: &Cover) {}

    fn wait(&self, (): ()) -> Result<(), ()> {
        Ok(())
    }
}

fn domain_with_tables(fake: &Fake) -> TestDomain {
    let root = fake.link(fake.allocate().unwrap());
    let format = Vtd::new(VtdLevels::Four);
    DmaDomain::new(DomainId::new(7), format, root, Lock::new(Members::new()))
}

/// Flushes a batch that holds no page.
fn drain<I: Flush<Iotlb, Error: core::fmt::Debug>>(
    batch: &mut Batch<u64, 32>,
    hardware: &Hardware<'_, Cpus, I>,
) {
    let flushed = batch.flush(hardware).map_err(|failure| failure.error).unwrap();
    assert_eq!(flushed.report(), Report { tlb: false, iotlb: true });
}

fn grants() -> Run {
    Run::block(Gfn::new(FIRST), 5)
}

fn map(domain: &TestDomain, fake: &Fake, skipped: &mut Skipped<'_>) {
    let (first, access) = (Mfn::new(FRAMES), Access::READ_WRITE);
    let mut budget = Budget::UNLIMITED;
    domain.map(fake, Rest::new(grants()), first, access, &mut budget, skipped).unwrap();
}

fn expected(index: u64) -> Expected {
    Expected { mfn: Mfn::new(FRAMES + index), access: Access::READ_WRITE }
}

#[test]
fn thirty_two_pages_are_cleared_with_one_command_and_released_after_its_wait() {
    let fake = Fake::new(CAP, ECAP);
    let units = [unit_up(&fake, WITH_QUEUE)];
    let domain = domain_with_tables(&fake);
    let mut batch = Batch::<u64, 32>::new(domain.id());
    batch.edit_many(|skipped, _| map(&domain, &fake, skipped));
    domain.attach(&units, &fake, plain(1)).unwrap();
    let hardware = Hardware { tlb: &Cpus, iotlb: &DmaFlush::new(&units, &domain) };
    drain(&mut batch, &hardware);
    fake.log();
    for index in 0..32 {
        let held = batch.hold(|skipped| {
            let dfn = Dfn::new(FIRST + index);
            let iotlb = domain.clear(&fake, dfn, expected(index), skipped)?;
            let cleared = skipped.absent::<Tlb>().with(&iotlb);
            Ok::<_, PageError>((index, cleared))
        });
        assert_eq!(held, Ok(()));
    }
    assert!(fake.commands().is_empty(), "nothing is flushed before the batch is");
    let mut flushed = batch.flush(&hardware).map_err(|failure| failure.error).unwrap();
    assert_eq!(fake.commands(), ["iotlb tag 1 page 0x4020 order 5 leaves wr"]);
    assert_eq!(core::iter::from_fn(|| flushed.next_page()).count(), 32);
}

#[test]
fn a_flush_that_fails_gives_no_page_out_and_can_be_retried() {
    let fake = Fake::new(CAP, ECAP);
    let units = [unit_up(&fake, WITH_QUEUE)];
    let domain = domain_with_tables(&fake);
    let mut batch = Batch::<u64, 32>::new(domain.id());
    batch.edit_many(|skipped, _| map(&domain, &fake, skipped));
    domain.attach(&units, &fake, plain(1)).unwrap();
    batch
        .hold(|skipped| {
            let iotlb = domain.clear(&fake, Dfn::new(FIRST), expected(0), skipped)?;
            Ok::<_, PageError>((0, skipped.absent::<Tlb>().with(&iotlb)))
        })
        .unwrap();
    fake.set(|hardware| hardware.mood = Mood::Deaf);
    let hardware = Hardware { tlb: &Cpus, iotlb: &DmaFlush::new(&units, &domain) };
    let mut failure = batch.flush(&hardware).expect_err("the unit does not answer");
    assert!(matches!(failure.error, FlushError { tlb: None, iotlb: Some(_) }));
    fake.set(|hardware| hardware.mood = Mood::Prompt);
    let mut flushed = failure.held.retry(&hardware).unwrap();
    assert_eq!(flushed.next_page().map(|page| *page.get()), Some(0));
}

#[test]
fn a_page_that_is_not_as_expected_stays_and_nothing_is_recorded() {
    let fake = Fake::new(CAP, ECAP);
    let domain = domain_with_tables(&fake);
    let mut batch = Batch::<u64, 32>::new(domain.id());
    batch.edit_many(|skipped, _| map(&domain, &fake, skipped));
    let hardware =
        Hardware { tlb: &Cpus, iotlb: &DmaFlush::new(&[] as &[super::TestUnit<'_>], &domain) };
    drain(&mut batch, &hardware);
    let other_frame = Expected { mfn: Mfn::new(1), ..expected(0) };
    let other_rights = Expected { access: Access::READ, ..expected(0) };
    for (dfn, wanted) in [
        (FIRST, other_frame),
        (FIRST, other_rights),
        (FIRST + 32, expected(32)),
        (1 << 36, expected(0)),
    ] {
        let held = batch.hold(|skipped| {
            let iotlb = domain.clear(&fake, Dfn::new(dfn), wanted, skipped)?;
            Ok::<_, PageError>((0, skipped.absent::<Tlb>().with(&iotlb)))
        });
        assert!(matches!(held, Err(HoldError::Edit(_))));
        assert!(batch.iotlb().is_nothing() && batch.is_empty());
    }
    let found = domain.lookup(&fake, Dfn::new(FIRST)).unwrap();
    assert_eq!(found.run, Run::single(Gfn::new(FIRST)));
}

#[test]
fn mapping_is_flushed_where_absence_is_cached() {
    let fake = Fake::new(CAP | CAP_CM, ECAP);
    let units = [unit_up(&fake, WITH_QUEUE)];
    let domain = domain_with_tables(&fake);
    domain.attach(&units, &fake, plain(1)).unwrap();
    fake.log();
    let mut batch = Batch::<u64, 32>::new(domain.id());
    batch.edit_many(|skipped, _| map(&domain, &fake, skipped));
    let hardware = Hardware { tlb: &Cpus, iotlb: &DmaFlush::new(&units, &domain) };
    drain(&mut batch, &hardware);
    assert_ne!(fake.commands().len(), 0);
}

#[test]
fn a_cleared_run_frees_its_tables_through_the_record() {
    let fake = Fake::new(CAP, ECAP);
    let units = [unit_up(&fake, WITH_QUEUE)];
    let domain = domain_with_tables(&fake);
    let mut batch = Batch::<u64, 32>::new(domain.id());
    batch.edit_many(|skipped, _| map(&domain, &fake, skipped));
    domain.attach(&units, &fake, plain(1)).unwrap();
    let hardware = Hardware { tlb: &Cpus, iotlb: &DmaFlush::new(&units, &domain) };
    drain(&mut batch, &hardware);
    fake.log();
    batch.edit_many(|skipped, _| {
        let mut budget = Budget::UNLIMITED;
        let rest = Rest::new(domain.space());
        domain.clear_run(&fake, rest, &mut budget, skipped, Unheld).unwrap();
    });
    let mut flushed = batch.flush(&hardware).map_err(|failure| failure.error).unwrap();
    assert_eq!(core::iter::from_fn(|| flushed.next_table()).count(), 3);
    let commands = fake.commands();
    assert!(!commands.is_empty() && commands.iter().all(|line| !line.contains("leaves")));
}

#[test]
fn a_domain_that_was_said_to_have_no_iommu_cannot_flush_what_was_recorded_for_it() {
    let fake = Fake::new(CAP, ECAP);
    let domain = domain_with_tables(&fake);
    let mut batch = Batch::<u64, 32>::new(domain.id());
    batch.edit_many(|skipped, _| map(&domain, &fake, skipped));
    let hardware = Hardware { tlb: &Cpus, iotlb: &NoIommu };
    assert!(batch.flush(&hardware).is_err());
}
