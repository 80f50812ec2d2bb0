//! Any script of grants, maps and copies, judged by arrays of bytes.
//!
//! The reference knows pages as byte arrays and grants as what they say; it shares no
//! code with the crates. A failing script is shrunk.

use std::sync::atomic::Ordering;

use flush::{DomainId, Gfn, Mfn};
use gnttab::{
    GrantStorage, Outcome,
    abi::{SetVersion, SwapGrantRef},
};
use host::{
    Layout, Setup, World,
    calls::{Side, copy_request, operation},
    world::{BACKEND, FRONTEND, Flushes, POISON, granted_gfn},
};
use proptest::prelude::*;

/// Grants of the frontend, from this reference on.
const FIRST: u32 = 8;
const GRANTS: usize = 4;
/// The backend's own pages; the last is granted to the frontend, which may pass it back.
const OWN: usize = 2;
const OWN_FIRST: u64 = 0x2000;
/// In the backend's table.
const PASSED: u32 = 20;

/// What an entry says. Pages count from 0: the frontend's, then the backend's own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Entry {
    Nothing,
    Page { page: usize, read_only: bool },
    Part { page: usize, read_only: bool, first: u16, length: u16 },
    Passed { read_only: bool },
}

/// What a script names on one side of a copy.
#[derive(Clone, Copy, Debug)]
enum Named {
    Grant(usize),
    OutOfRange,
    Unknown,
    Own(usize),
    NoFrame,
    Foreign,
}

#[derive(Clone, Debug)]
enum Step {
    Write(usize, Entry),
    PassBack(Option<bool>),
    Copy { from: (Named, u16), to: (Named, u16), length: u16 },
    Map(usize, bool),
    Unmap(usize),
    Swap(usize, usize),
}

/// The reference.
struct Model {
    pages: Vec<Vec<u8>>,
    entries: [Entry; GRANTS],
    /// Whether the backend grants its last page to the frontend, and read-only.
    passed: Option<bool>,
    /// What the backend has mapped by each reference: page and whether it may write.
    mapped: [Option<(usize, bool)>; GRANTS],
}

impl Model {
    /// The page and the bytes of it that one side may use, or a status.
    fn side(&self, named: Named, write: bool) -> Result<(usize, usize, usize), i16> {
        let enough = |read_only: bool| if write && read_only { Err(-1) } else { Ok(()) };
        let grant = match named {
            Named::Own(page) => return Ok((GRANTS + page, 0, 4096)),
            Named::NoFrame => return Err(-9),
            Named::OutOfRange => return Err(-3),
            Named::Unknown | Named::Foreign => unreachable!("looked at before"),
            Named::Grant(grant) => grant,
        };
        if let Some((page, writable)) = self.mapped[grant] {
            return match self.entries[grant] {
                _ if !write || writable => Ok((page, 0, 4096)),
                Entry::Page { page: _, read_only: false } => Ok((page, 0, 4096)),
                Entry::Nothing | Entry::Page { .. } | Entry::Part { .. } | Entry::Passed { .. } => {
                    Err(-1)
                }
            };
        }
        match self.entries[grant] {
            Entry::Nothing => Err(-1),
            Entry::Page { page, read_only } => enough(read_only).map(|()| (page, 0, 4096)),
            Entry::Part { page, read_only, first, length } => enough(read_only)
                .map(|()| (page, first.into(), usize::from(first) + usize::from(length))),
            Entry::Passed { read_only } => {
                enough(read_only)?;
                enough(self.passed.ok_or(-1_i16)?)?;
                Ok((GRANTS + OWN - 1, 0, 4096))
            }
        }
    }

    fn copy(&mut self, from: (Named, u16), to: (Named, u16), length: u16) -> i16 {
        let [first, target, length] = [from.1, to.1, length].map(usize::from);
        if first + length > 4096 || target + length > 4096 {
            return -10;
        }
        for (named, _) in [from, to] {
            match named {
                Named::Unknown => return -2,
                Named::Foreign => return -8,
                Named::Grant(_) | Named::OutOfRange | Named::Own(_) | Named::NoFrame => {}
            }
        }
        let found = self.side(from.0, false).and_then(|read| Ok((read, self.side(to.0, true)?)));
        let (read, written) = match found {
            Ok(both) => both,
            Err(status) => return status,
        };
        for ((_, start, end), at) in [(read, first), (written, target)] {
            // Of a window that begins behind the page, nothing can be named.
            if at < start.min(4096) || at + length > end {
                return -1;
            }
        }
        let bytes = self.pages[read.0][first..first + length].to_vec();
        self.pages[written.0][target..target + length].copy_from_slice(&bytes);
        0
    }
}

fn entry() -> impl Strategy<Value = Entry> {
    let first = prop_oneof![3 => 0..3u16, 3 => 2048..2051u16, 1 => any::<u16>()];
    let length = prop_oneof![4 => 0..8u16, 2 => 2040..2056u16, 1 => any::<u16>()];
    prop_oneof![
        1 => Just(Entry::Nothing),
        3 => (0..GRANTS, any::<bool>())
            .prop_map(|(page, read_only)| Entry::Page { page, read_only }),
        6 => (0..GRANTS, any::<bool>(), first, length).prop_map(
            |(page, read_only, first, length)| Entry::Part { page, read_only, first, length }
        ),
        2 => any::<bool>().prop_map(|read_only| Entry::Passed { read_only }),
    ]
}

fn side() -> impl Strategy<Value = (Named, u16)> {
    let named = prop_oneof![
        16 => (0..GRANTS).prop_map(Named::Grant),
        8 => (0..OWN).prop_map(Named::Own),
        1 => Just(Named::OutOfRange),
        1 => Just(Named::Unknown),
        1 => Just(Named::NoFrame),
        1 => Just(Named::Foreign),
    ];
    let offset =
        prop_oneof![6 => 0..7u16, 6 => 2046..2056u16, 1 => 4085..4100u16, 1 => any::<u16>()];
    (named, offset)
}

fn step() -> impl Strategy<Value = Step> {
    let length = prop_oneof![8 => 0..8u16, 3 => 2040..2056u16, 1 => any::<u16>()];
    prop_oneof![
        4 => (0..GRANTS, entry()).prop_map(|(grant, entry)| Step::Write(grant, entry)),
        1 => any::<Option<bool>>().prop_map(Step::PassBack),
        10 => (side(), side(), length)
            .prop_map(|(from, to, length)| Step::Copy { from, to, length }),
        2 => (0..GRANTS, any::<bool>()).prop_map(|(grant, write)| Step::Map(grant, write)),
        2 => (0..GRANTS).prop_map(Step::Unmap),
        1 => (0..GRANTS, 0..GRANTS).prop_map(|(one, other)| Step::Swap(one, other)),
    ]
}

/// The same on the model.
struct Real {
    world: World,
    pages: Vec<Mfn>,
    handles: [Option<u32>; GRANTS],
}

fn reference(grant: usize) -> u32 {
    FIRST + u32::try_from(grant).expect("few grants")
}

fn mapped_at(grant: usize) -> Gfn {
    Gfn::new(0x10_0000 + u64::from(reference(grant)))
}

fn head(flags: u64, grantee: DomainId, third: u16, fourth: u16) -> u64 {
    flags | u64::from(grantee.get()) << 16 | u64::from(third) << 32 | u64::from(fourth) << 48
}

impl Real {
    fn new(layout: Layout) -> Self {
        let world = World::new(Setup { layout, frames: 2048, ..Setup::default() });
        let mut argument = [SetVersion { version: 2 }];
        let ended = world.call_on(FRONTEND, operation::SET_VERSION, &mut argument);
        assert_eq!(ended.outcome, Outcome::Done);
        let mut pages: Vec<Mfn> = (0..GRANTS)
            .map(|grant| world.hypervisor.populate(world.frontend(), granted_gfn(reference(grant))))
            .collect();
        for page in (OWN_FIRST..).take(OWN) {
            pages.push(world.hypervisor.populate(world.backend(), Gfn::new(page)));
        }
        Self { world, pages, handles: [None; GRANTS] }
    }

    fn write(&self, grant: usize, entry: Entry) {
        let frame = |page| granted_gfn(reference(page)).get();
        let read_only = |read_only: bool| u64::from(read_only) << 2;
        let (head, frame) = match entry {
            Entry::Nothing => (0, 0),
            Entry::Page { page, read_only: ro } => {
                (head(1 | read_only(ro), BACKEND, 0, 0), frame(page))
            }
            Entry::Part { page, read_only: ro, first, length } => {
                (head(1 | 1 << 8 | read_only(ro), BACKEND, first, length), frame(page))
            }
            Entry::Passed { read_only: ro } => {
                (head(3 | read_only(ro), BACKEND, BACKEND.get(), 0), PASSED.into())
            }
        };
        self.world.write_entry_v2(FRONTEND, reference(grant), head, frame);
    }

    fn pass_back(&self, granted: Option<bool>) {
        let frame = OWN_FIRST + OWN as u64 - 1;
        let word = granted.map_or(0, |read_only| {
            1 | u64::from(read_only) << 2 | u64::from(FRONTEND.get()) << 16 | frame << 32
        });
        let table = self.world.backend().grants();
        let words = table.storage().shared(0).expect("a page of the table");
        words[PASSED as usize].store(word, Ordering::SeqCst);
    }

    fn copy(&self, from: (Named, u16), to: (Named, u16), length: u16) -> i16 {
        let side = |(named, offset)| match named {
            Named::Grant(grant) => Side::Grant(FRONTEND, reference(grant), offset),
            Named::OutOfRange => Side::Grant(FRONTEND, 256, offset),
            Named::Unknown => Side::Grant(DomainId::new(99), 8, offset),
            Named::Own(page) => Side::Own(Gfn::new(OWN_FIRST + page as u64), offset),
            Named::NoFrame | Named::Foreign => Side::Own(Gfn::new(0x3000), offset),
        };
        let mut element = copy_request(side(from), side(to), length);
        for (place, (named, _)) in [(&mut element.source, from), (&mut element.dest, to)] {
            if let Named::Foreign = named {
                place.domain = FRONTEND.get();
            }
        }
        let (ended, statuses) = self.world.copy(vec![element]);
        assert_eq!((ended.outcome, ended.flushes), (Outcome::Done, Flushes::default()));
        statuses[0]
    }

    fn swap(&self, one: usize, other: usize) -> i16 {
        let (first, second) = (reference(one), reference(other));
        let mut elements = [SwapGrantRef { first, second, status: POISON, padding: 0 }];
        let ended = self.world.call_on(FRONTEND, operation::SWAP, &mut elements);
        assert_eq!((ended.outcome, ended.flushes), (Outcome::Done, Flushes::default()));
        elements[0].status
    }

    fn unmap(&mut self, grant: usize) {
        if let Some(handle) = self.handles[grant].take() {
            let ended = self.world.unmap(&[(handle, mapped_at(grant))]);
            assert_eq!(ended.outcome, Outcome::Done);
            assert_eq!(self.world.statuses(1), [0]);
        }
    }

    /// References on each page, whatever is mapped.
    fn check_counts(&self, model: &Model) -> Result<(), TestCaseError> {
        for (page, mfn) in self.pages.iter().enumerate() {
            let maps = model.mapped.iter().flatten().filter(|(mapped, _)| *mapped == page);
            let (mut references, mut writable) = (1, 0);
            for (_, write) in maps {
                references += 1;
                writable += u32::from(*write);
            }
            let counts = self.world.hypervisor.pages.get(*mfn);
            prop_assert_eq!(counts, (references, writable), "page {}", page);
        }
        Ok(())
    }
}

fn run(layout: Layout, first: [Entry; GRANTS], steps: &[Step]) -> Result<(), TestCaseError> {
    let mut real = Real::new(layout);
    let pages = real.pages.iter().zip(1..).map(|(page, seed)| real.world.fill(*page, seed));
    let mut model =
        Model { pages: pages.collect(), entries: first, passed: None, mapped: [None; GRANTS] };
    for (grant, entry) in first.into_iter().enumerate() {
        real.write(grant, entry);
    }
    for step in steps {
        match *step {
            Step::Write(grant, entry) => {
                real.write(grant, entry);
                model.entries[grant] = entry;
            }
            Step::PassBack(granted) => {
                real.pass_back(granted);
                model.passed = granted;
            }
            Step::Copy { from, to, length } => {
                let status = real.copy(from, to, length);
                prop_assert_eq!(status, model.copy(from, to, length), "{:?}", step);
            }
            Step::Map(grant, write) => {
                if real.handles[grant].is_some() {
                    continue;
                }
                let done = real.world.map(&[(reference(grant), mapped_at(grant))], !write)[0];
                let want = match model.entries[grant] {
                    Entry::Page { page, read_only } if !(write && read_only) => {
                        model.mapped[grant] = Some((page, write));
                        real.handles[grant] = Some(done.1);
                        0
                    }
                    Entry::Nothing
                    | Entry::Page { .. }
                    | Entry::Part { .. }
                    | Entry::Passed { .. } => -1,
                };
                prop_assert_eq!(done.0, want, "{:?}", step);
            }
            Step::Unmap(grant) => {
                real.unmap(grant);
                model.mapped[grant] = None;
            }
            Step::Swap(one, other) => {
                let status = real.swap(one, other);
                let busy = model.mapped[one].is_some() || model.mapped[other].is_some();
                prop_assert_eq!(status, if busy && one != other { -12 } else { 0 });
                if status == 0 {
                    model.entries.swap(one, other);
                }
            }
        }
        for (page, bytes) in real.pages.iter().zip(&model.pages) {
            prop_assert!(real.world.content(*page) == *bytes, "{:?}: {:?}", step, page);
        }
        real.check_counts(&model)?;
    }
    for grant in 0..GRANTS {
        real.unmap(grant);
        model.mapped[grant] = None;
    }
    real.check_counts(&model)?;
    real.world.check_idle(FRONTEND);
    real.world.check_idle(BACKEND);
    real.world.check_clean();
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn any_script_moves_the_bytes_that_arrays_would_and_says_so(
        first in prop::array::uniform4(entry()),
        steps in prop::collection::vec(step(), 1..40),
        shared in any::<bool>(),
    ) {
        run(if shared { Layout::Shared } else { Layout::Separate }, first, &steps)?;
    }
}
