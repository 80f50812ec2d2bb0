//! Copies between grants: bytes arrive, nothing is flushed, and nothing stays held.

use flush::Gfn;
use gnttab::{
    Errno, Outcome, Version,
    abi::{GrantCopy, SetVersion, SwapGrantRef},
};
use host::{
    Layout, Setup, World,
    calls::{Fate, Shared, Side, copy_request, operation},
    world::{ARGUMENTS, BACKEND, FRONTEND, Flushes, OTHER_CPU, POISON, granted_gfn},
};

const FIRST: u64 = 0x10_0000;
/// Where the backend has pages of its own.
const OWN: [Gfn; 2] = [Gfn::new(0x2000), Gfn::new(0x2001)];
/// Two grants of the frontend.
const ONE: u32 = 8;
const TWO: u32 = 9;

fn each_world(check: impl Fn(&World)) {
    for layout in [Layout::Separate, Layout::Shared] {
        check(&World::new(Setup { layout, frames: 2048, ..Setup::default() }));
    }
}

fn granted(reference: u32, offset: u16) -> Side {
    Side::Grant(FRONTEND, reference, offset)
}

/// Copies in one call that flushes nothing and ends well; the statuses.
#[track_caller]
fn copy(world: &World, elements: &[GrantCopy]) -> Vec<i16> {
    let (ended, statuses) = world.copy(elements.to_vec());
    assert_eq!(ended.outcome, Outcome::Done);
    assert_eq!(ended.flushes, Flushes::default());
    statuses
}

#[test]
fn bytes_arrive_in_both_directions_without_a_flush() {
    each_world(|world| {
        let [one, two] =
            [ONE, TWO].map(|reference| world.grant(reference, granted_gfn(reference), false));
        let own = world.hypervisor.populate(world.backend(), OWN[0]);
        let read = world.fill(one, 1);
        let mut written = world.fill(two, 2);
        let elements = [
            copy_request(granted(ONE, 3), Side::Own(OWN[0], 512), 1000),
            copy_request(Side::Own(OWN[0], 512), granted(TWO, 4000), 96),
            copy_request(granted(ONE, 0), granted(TWO, 1), 2000),
            copy_request(Side::Own(OWN[0], 512), granted(TWO, 3000), 1),
        ];
        assert_eq!(copy(world, &elements), [0; 4]);
        assert_eq!(world.content(own)[512..1512], read[3..1003]);
        written[4000..].copy_from_slice(&read[3..99]);
        written[3000] = read[3];
        written[1..2001].copy_from_slice(&read[..2000]);
        assert!(world.content(two) == written);
        assert!(world.content(one) == read);
        let dirty = [one, two, own].map(|page| world.hypervisor.pages.dirty(page));
        assert_eq!(dirty, [0, 3, 1], "once for each copy that wrote");
        for page in [one, two, own] {
            assert_eq!(world.hypervisor.pages.get(page), (1, 0));
        }
        world.check_idle(FRONTEND);
        world.take_back(ONE, granted_gfn(ONE));
        world.take_back(TWO, granted_gfn(TWO));
        world.check_clean();
    });
}

#[test]
fn a_copy_leaves_a_mapping_of_the_same_grant_and_its_flush_alone() {
    each_world(|world| {
        let grants = world.share_at(FIRST, 2, 40);
        world.hypervisor.populate(world.backend(), OWN[0]);
        let elements: Vec<GrantCopy> = grants
            .iter()
            .flat_map(|grant| {
                let (grant, own) = (granted(grant.reference, 0), Side::Own(OWN[0], 0));
                [copy_request(grant, own, 4096), copy_request(own, grant, 4096)]
            })
            .collect();
        assert!(copy(world, &elements).iter().all(|status| *status == 0));
        world.check_fates(&grants, |_| Fate::Mapped);
        let (ended, statuses) = world.give_back(&grants);
        assert_eq!(ended.flushes, Flushes { tlb: 2, iotlb: 2 });
        assert!(statuses.iter().all(|status| *status == 0));
        world.take_back_and_try(&grants, OTHER_CPU);
    });
}

#[test]
fn an_unmap_in_the_middle_of_a_copy_is_flushed_and_the_page_stays_until_the_copy_ends() {
    each_world(|world| {
        let grants = world.share_at(FIRST, 1, 2);
        let raced: Vec<Shared> = grants.clone();
        *world.during_copy.borrow_mut() = Some(Box::new(move |world| {
            let (ended, statuses) = world.give_back(&raced);
            assert_eq!((ended.outcome, statuses), (Outcome::Done, vec![0, 0]));
            assert_eq!(ended.flushes, Flushes { tlb: 1, iotlb: 1 });
            // Its owner's reference and the copy's; the bits that the copy is for.
            assert_eq!(world.hypervisor.pages.get(raced[0].mfn), (2, 0));
            assert_eq!(world.hypervisor.pages.get(raced[1].mfn), (2, 1));
            assert_eq!(world.in_use(raced[0].reference), (true, false));
            assert_eq!(world.in_use(raced[1].reference), (true, true));
            assert!(!world.device_reaches(raced[0].gfn));
        }));
        let sides = (granted(grants[0].reference, 0), granted(grants[1].reference, 0));
        assert_eq!(copy(world, &[copy_request(sides.0, sides.1, 4096)]), [0]);
        assert!(world.during_copy.borrow().is_none(), "it happened");
        assert!(world.content(grants[0].mfn) == world.content(grants[1].mfn));
        world.check_fates(&grants, |_| Fate::Back);
        world.take_back_and_try(&grants, OTHER_CPU);
        world.check_handles_free(0);
    });
}

#[test]
fn a_copy_does_not_let_go_of_a_page_whose_flush_failed() {
    each_world(|world| {
        let grants = world.share_at(FIRST, 1, 1);
        world.hypervisor.populate(world.backend(), OWN[0]);
        world.deaf.set(true);
        let (ended, statuses) = world.give_back(&grants);
        world.deaf.set(false);
        assert_eq!(ended.outcome, Outcome::Failed(Errno::Fault));
        assert_eq!(statuses, [0]);
        world.check_fates(&grants, |_| Fate::Held);
        let (grant, own) = (granted(grants[0].reference, 0), Side::Own(OWN[0], 0));
        let elements = [copy_request(grant, own, 100), copy_request(own, grant, 100)];
        assert_eq!(copy(world, &elements), [0, 0]);
        world.check_fates(&grants, |_| Fate::Held);
        assert!(world.retry(BACKEND, ended.failed).is_empty());
        world.check_fates(&grants, |_| Fate::Back);
        world.take_back_and_try(&grants, OTHER_CPU);
    });
}

/// Makes the frontend's table one of version 2.
fn change_version(world: &World) {
    let mut argument = [SetVersion { version: 2 }];
    let ended = world.call_on(FRONTEND, operation::SET_VERSION, &mut argument);
    assert_eq!(ended.outcome, Outcome::Done);
    assert_eq!(world.frontend().grants().version(), Version::V2);
}

/// A version 2 head: flags, grantee, and what lies beside them.
fn head(flags: u64, grantee: flush::DomainId, third: u16, fourth: u16) -> u64 {
    flags | u64::from(grantee.get()) << 16 | u64::from(third) << 32 | u64::from(fourth) << 48
}

/// One of the steps of a call that can fail.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Step {
    Read,
    Write,
    Page,
    Bytes,
}

const ELEMENTS: usize = 4;

/// Runs four copies with one step failing: through a grant that the frontend passes on,
/// from part of a page, between grants, and between own pages.
///
/// Returns how many steps of that sort there were.
#[track_caller]
fn check_failure(layout: Layout, step: Step, at: Option<u64>) -> u64 {
    let name = format!("{layout:?}: {step:?} {at:?}");
    let world = World::new(Setup { layout, frames: 2048, ..Setup::default() });
    change_version(&world);
    let frontend: Vec<_> = [ONE, TWO]
        .map(|reference| world.hypervisor.populate(world.frontend(), granted_gfn(reference)))
        .into();
    let own: Vec<_> = OWN.map(|gfn| world.hypervisor.populate(world.backend(), gfn)).into();
    let part = head(1 | 1 << 8, BACKEND, 100, 50);
    world.write_entry_v2(FRONTEND, ONE, part, granted_gfn(ONE).get());
    world.write_entry_v2(FRONTEND, TWO, head(1, BACKEND, 0, 0), granted_gfn(TWO).get());
    // The backend's own page, granted to the frontend and passed back.
    let table = world.backend().grants();
    let word = 1 | u64::from(FRONTEND.get()) << 16 | OWN[1].get() << 32;
    gnttab::GrantStorage::shared(table.storage(), 0).expect("a page of the table")[20]
        .store(word, std::sync::atomic::Ordering::SeqCst);
    drop(table);
    let forward = head(3, BACKEND, BACKEND.get(), 0);
    world.write_entry_v2(FRONTEND, 10, forward, 20);

    let mut elements = [
        copy_request(granted(10, 0), Side::Own(OWN[0], 0), 4096),
        copy_request(granted(ONE, 100), Side::Own(OWN[0], 0), 50),
        copy_request(granted(ONE, 149), granted(TWO, 0), 1),
        copy_request(Side::Own(OWN[0], 7), Side::Own(OWN[1], 9), 200),
    ];
    let faults = &world.faults;
    faults.copies.set((0, 0));
    let fails = |wanted| at.filter(|_| step == wanted);
    let byte = |at: u64| (ARGUMENTS.get() << 12) + at * size_of::<GrantCopy>() as u64;
    faults.unreadable.set(fails(Step::Read).map(byte));
    faults.fail_write.set(fails(Step::Write));
    faults.fail_page.set(fails(Step::Page));
    faults.fail_page_copy.set(fails(Step::Bytes));
    let ended = world.call_on(BACKEND, operation::COPY, &mut elements);
    let (reads, writes) = faults.copies.get();
    let bytes = faults.page_copies.get();
    let steps = match step {
        Step::Read => reads,
        Step::Write => writes,
        Step::Page => faults.pages.get(),
        Step::Bytes => bytes,
    };

    assert_eq!(ended.flushes, Flushes::default(), "{name}");
    let statuses: Vec<i16> = elements.iter().map(|element| element.status).collect();
    let place = |at: u64| usize::try_from(at).expect("few");
    match (step, at) {
        (Step::Read | Step::Write, Some(at)) => {
            assert_eq!(ended.outcome, Outcome::Failed(Errno::Fault), "{name}");
            let mut want = vec![0; place(at)];
            want.resize(ELEMENTS, POISON);
            assert_eq!(statuses, want, "{name}");
            assert_eq!(bytes, at + u64::from(step == Step::Write), "{name}");
        }
        (Step::Page | Step::Bytes, Some(at)) => {
            assert_eq!(ended.outcome, Outcome::Done, "{name}");
            // Each copy takes two pages and moves bytes once.
            let failed = if step == Step::Page { place(at) / 2 } else { place(at) };
            let want: Vec<i16> = (0..ELEMENTS).map(|place| -i16::from(place == failed)).collect();
            assert_eq!(statuses, want, "{name}");
        }
        (_, None) => {
            assert_eq!(ended.outcome, Outcome::Done, "{name}");
            assert_eq!(statuses, [0; ELEMENTS], "{name}");
        }
    }
    for page in frontend.iter().chain(&own) {
        assert_eq!(world.hypervisor.pages.get(*page), (1, 0), "{name}");
    }
    world.check_idle(FRONTEND);
    world.check_idle(BACKEND);
    world.check_clean();
    steps
}

#[test]
fn whichever_step_of_a_copy_fails_nothing_stays_held() {
    for layout in [Layout::Separate, Layout::Shared] {
        for (step, want) in [(Step::Read, 4), (Step::Write, 4), (Step::Page, 8), (Step::Bytes, 4)] {
            let steps = check_failure(layout, step, None);
            assert_eq!(steps, want, "{step:?}");
            for at in 0..steps {
                check_failure(layout, step, Some(at));
            }
        }
    }
}

#[test]
fn after_a_swap_a_map_gets_the_other_page_and_what_is_mapped_is_not_swapped() {
    fn swap(world: &World) -> i16 {
        let mut elements = [SwapGrantRef { first: ONE, second: TWO, status: POISON, padding: 0 }];
        let ended = world.call_on(FRONTEND, operation::SWAP, &mut elements);
        assert_eq!((ended.outcome, ended.flushes), (Outcome::Done, Flushes::default()));
        elements[0].status
    }
    each_world(|world| {
        let pages =
            [ONE, TWO].map(|reference| world.grant(reference, granted_gfn(reference), false));
        assert_eq!(swap(world), 0);
        let shared = world.share_again(ONE, Gfn::new(FIRST), false);
        assert_eq!(shared.mfn, pages[1]);
        world.touch(shared.gfn);
        assert_eq!(swap(world), -12);
        let (ended, statuses) = world.give_back(&[shared]);
        assert_eq!((ended.outcome, statuses), (Outcome::Done, vec![0]));
        assert_eq!(swap(world), 0);
        let again = world.share_again(ONE, Gfn::new(FIRST), false);
        assert_eq!(again.mfn, pages[0]);
        world.give_back(&[again]);
        world.take_back(ONE, granted_gfn(ONE));
        world.take_back(TWO, granted_gfn(TWO));
        world.check_clean();
    });
}
