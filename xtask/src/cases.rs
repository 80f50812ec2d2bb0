//! Every case that boots in an emulator: what it shows and the machine it needs
//!
//! A `Case` is one boot of the testbed. The testbed holds the code of each case;
//! these tables hold what must be known before it starts: [`CASES`] for QEMU,
//! [`BOCHS`] for Bochs. The runners compare them with the testbed's own list, so
//! that a case cannot exist in one place only.

use std::time::Duration;

/// How a boot is meant to end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Expected {
    /// The case reports success.
    Pass,
    /// The case reports failure: it shows that a failure is seen.
    Fail,
    /// The case does not end: it shows that the time limit holds.
    Hang,
}

impl Expected {
    /// The word by which the testbed's list of cases says the same.
    pub(crate) fn word(self) -> &'static str {
        match self {
            Self::Pass => "pass",
            Self::Fail => "fail",
            Self::Hang => "hang",
        }
    }
}

/// What processors a machine has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Processors {
    /// One, of QEMU's default sort.
    One,
    /// One that runs guests: SVM with nested paging.
    OneWithGuests,
    /// Three that run guests. They take turns.
    ThreeWithGuests,
    /// Four that run guests of up to 48 bits of guest-physical address. They take turns.
    FourWithGuests,
    /// Three that run guests, at the same time: on as many threads.
    ThreeInParallel,
}

/// A guest that a case runs, of the package `quiesce-guests`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Guest {
    /// The one whose command line says what it does.
    Guest,
    /// The one of 32-bit code, as a 32-bit object.
    Narrow,
}

/// One boot of the testbed.
#[derive(Debug)]
pub(crate) struct Case {
    /// Lower-case words joined by `-`; `case=NAME` on the command line.
    pub(crate) name: &'static str,
    /// One line for `--list`.
    pub(crate) about: &'static str,
    /// What processors the machine has.
    pub(crate) processors: Processors,
    /// Its memory, in MiB.
    pub(crate) memory: u64,
    /// The boot module, where there is one.
    pub(crate) module: Option<Guest>,
    /// Further properties of `-device intel-iommu`, such as `caching-mode=on`.
    pub(crate) iommu: &'static str,
    /// Further words of the command line, as `key=value`.
    pub(crate) words: &'static str,
    /// How the boot is meant to end.
    pub(crate) expected: Expected,
    /// How long the boot may take.
    pub(crate) limit: Duration,
    /// Whether it runs only when it is named.
    pub(crate) only_by_name: bool,
}

impl Case {
    pub(crate) const fn new(name: &'static str, about: &'static str) -> Self {
        Self {
            name,
            about,
            processors: Processors::One,
            memory: 256,
            module: None,
            iommu: "",
            words: "",
            expected: Expected::Pass,
            limit: Duration::from_secs(30),
            only_by_name: false,
        }
    }

    pub(crate) const fn guests(mut self) -> Self {
        self.processors = Processors::ThreeWithGuests;
        self
    }

    const fn parallel(mut self) -> Self {
        self.processors = Processors::ThreeInParallel;
        self
    }

    const fn four(mut self) -> Self {
        self.processors = Processors::FourWithGuests;
        self
    }

    pub(crate) const fn iommu(mut self, properties: &'static str) -> Self {
        self.iommu = properties;
        self
    }

    /// Runs `guest`, on one processor.
    const fn alone(mut self, guest: Guest) -> Self {
        self.processors = Processors::OneWithGuests;
        self.module = Some(guest);
        self
    }

    /// Runs two of the guests, on three processors.
    const fn together(mut self) -> Self {
        self.processors = Processors::ThreeWithGuests;
        self.module = Some(Guest::Guest);
        self
    }

    const fn words(mut self, words: &'static str) -> Self {
        self.words = words;
        self
    }

    /// Takes long, and so runs only when it is named.
    const fn takes_long(mut self) -> Self {
        self.limit = Duration::from_secs(1200);
        self.only_by_name = true;
        self
    }

    const fn must_fail(mut self) -> Self {
        self.expected = Expected::Fail;
        self
    }

    const fn must_hang(mut self) -> Self {
        self.expected = Expected::Hang;
        self.limit = Duration::from_secs(3);
        self
    }
}

/// The cases, in the order in which they run.
pub(crate) const CASES: &[Case] = &[
    Case::new("boot", "the image starts; memory is managed, zeroed and handed out once"),
    Case::new("memory-functions", "copy, move, fill and compare do what their names say"),
    Case::new("trap-resumes", "an installed trap handler runs and every register survives it"),
    Case::new("clock", "time passes, and a wait ends at its limit"),
    Case::new("acpi", "the DMAR table is found and its checksum holds"),
    Case::new("vtd-registers", "the VT-d unit's registers answer, inside their window only"),
    Case::new("pci", "bus 0 is enumerated and both DMA devices are on it"),
    Case::new("nvme-identify", "the NVMe controller writes 4 KiB by DMA, untranslated"),
    Case::new("nvme-timestamp", "the NVMe controller reads and writes 8 bytes by DMA"),
    Case::new("nvme-lost-queue", "a controller that cannot reach its queues ends in an error"),
    Case::new("edu-dma", "the edu device reads and writes memory by DMA, untranslated"),
    Case::new(
        "demo-per-page",
        "32 grants unmapped one by one: no device write reaches a freed page",
    ),
    Case::new(
        "demo-batched",
        "32 grants unmapped in one call: no device write reaches a freed page",
    ),
    Case::new("demo-no-flush", "32 grants unmapped without a flush: device writes do reach them"),
    Case::new(
        "stale-then-flushed",
        "32 grants: device writes land, still land before the flush, and not after",
    ),
    Case::new("copied-arguments", "the same with arguments that are copied: one page at a time"),
    Case::new("register-mode", "the same through the command registers, without a queue")
        .words("iommu=registers"),
    Case::new("caching-mode", "the same where the unit may cache absence: mapping flushes too")
        .iommu("caching-mode=on"),
    Case::new("unmap-and-replace", "the same with unmap_and_replace; a new address is refused"),
    Case::new("shared-tables", "the same where devices walk the processors' tables"),
    Case::new("large-leaf", "a page leaves a cached 2 MiB leaf: all of the leaf is flushed"),
    Case::new("read-only-grant", "a device reads through a read-only grant and cannot write"),
    Case::new("restricted-grant", "grants that rights were taken from go from both tables"),
    Case::new("top-of-space", "grants at the last pages of the 48-bit space, to the last byte"),
    Case::new("reattach", "a device goes to another domain and back, with nothing left over"),
    Case::new("detach", "a detached device is blocked, and its neighbour is not"),
    Case::new("two-devices-fault", "faults of two devices are seen, and a lost one is reported"),
    Case::new("invalid-descriptor", "a bad descriptor: one submission is repeated, no other is"),
    Case::new(
        "failed-flush-holds",
        "a flush that hangs gives up no page, a later one gives up all",
    ),
    Case::new("skipped-flush-is-stale", "a planted bug: no flush, so writes reach freed pages"),
    Case::new("wrong-domain-is-stale", "a planted bug: another domain is flushed instead"),
    Case::new("cpu-boot", "three processors start, work at once, and acknowledge every kick")
        .guests(),
    Case::new("svm-run", "guests of a few instructions run under nested paging, exit by exit")
        .guests(),
    Case::new("tlb-control-asked", "each flush is asked for in the control block, and no other")
        .guests(),
    Case::new("stale-cpu-shown", "a guest reads a page whose entry is gone, until it is kicked")
        .guests(),
    Case::new("stale-cpu-batched", "32 grants a guest reads: stale until the flush, not after")
        .guests(),
    Case::new("stale-cpu-no-kick", "a planted bug: no kick, so the guest reads every freed page")
        .guests(),
    Case::new("lost-kick-holds", "a kick that gets lost: no page is given up until a later one")
        .guests(),
    Case::new("rights-lowered", "a guest writes a page made read-only, until the flush").guests(),
    Case::new("cpu-enters-during-batch", "a processor that enters in mid-batch is kicked as well")
        .guests(),
    Case::new("vcpu-moves-between-cpus", "a virtual processor moves away and back, and forgets")
        .guests(),
    Case::new("one-kick-per-cpu", "32 grants: one kick of each running processor, one submission")
        .guests(),
    Case::new("other-domain-not-kicked", "a flush of one domain leaves another's processors alone")
        .guests(),
    Case::new("calls-from-two-cpus", "two virtual processors map and unmap grants at once")
        .guests(),
    Case::new("calls-in-parallel", "the same where the processors run at the same time").parallel(),
    Case::new("combined-flushes", "three processors give back at once: two flushes serve them all")
        .four(),
    Case::new("domain-life", "a domain runs, pauses and ends, and every frame comes back").guests(),
    Case::new("domain-destroyed-in-mid-batch", "a domain ends before the flush of its own unmap")
        .guests(),
    Case::new("granter-destroyed-in-mid-batch", "the granter ends before the flush of an unmap")
        .guests(),
    Case::new("guest-probe", "a guest of the PVH protocol gets what it asks of Xen's interface")
        .alone(Guest::Guest)
        .words("-- role=probe"),
    Case::new("guest-initial", "the same as the first domain, as its start information says")
        .alone(Guest::Guest)
        .words("initial=1 -- role=probe"),
    Case::new("guest-narrow", "a 32-bit guest, on every sort of page tables and on none")
        .alone(Guest::Narrow),
    Case::new("guest-ends", "reboot, a triple fault and a halt end the guest, each in its way")
        .alone(Guest::Guest),
    Case::new("guest-scribbles", "guests that ask for anything bring nobody down but themselves")
        .alone(Guest::Guest),
    Case::new("two-guests", "two guests: 200 batches mapped and given back, with a device writing")
        .together()
        .words("-- batches=200 seed=1"),
    Case::new("guest-bench", "what giving back costs two guests, in three manners")
        .together()
        .words("-- bench"),
    Case::new("soak", "two guests, 10,000 batches; it takes long and runs only if named")
        .together()
        .words("-- batches=10000 seed=2")
        .takes_long(),
    Case::new("scenario", "a scenario file's steps; here the ones that are built in").four(),
    Case::new("scenario-with-plant", "steps find the stale write of a guest that was not kicked")
        .four()
        .words("plant=skip-tlb")
        .must_fail(),
    Case::new("error-is-a-failure", "a case that returns an error fails").must_fail(),
    Case::new("panic-is-a-failure", "a case that panics fails").must_fail(),
    Case::new("trap-is-a-failure", "an unexpected trap fails the case").must_fail(),
    Case::new("null-is-a-failure", "a read of the null page fails the case").must_fail(),
    Case::new("overflow-is-a-failure", "a stack that runs over fails the case").must_fail(),
    Case::new("panic-elsewhere-fails", "a panic on another processor fails the case")
        .guests()
        .must_fail(),
    Case::new("overflow-elsewhere-fails", "a stack of another processor that runs over fails it")
        .guests()
        .must_fail(),
    Case::new("hang-is-a-failure", "a case that does not end meets its time limit").must_hang(),
];

/// The cases that boot in Bochs, on processors with VMX and EPT and without a VT-d unit.
pub(crate) const BOCHS: &[Case] = &[
    Case::new("vmx-run", "a guest of a few instructions runs under EPT, exit by exit"),
    Case::new("ept-violation", "each forbidden access exits and says which it was, and why"),
    Case::new("ept-leaves", "leaves of 4 KiB, 2 MiB and 1 GiB show first, middle and last page"),
    Case::new("ept-split", "a page leaves a large leaf: it is gone, its neighbours are not"),
    Case::new("invept", "both types succeed, a bad operand fails; once a flush, at entry"),
    Case::new("ept-stale-shown", "before its flush, two processors still read a cleared page"),
    Case::new("ept-stale-flushed", "kick and INVEPT: no read comes after the release"),
    Case::new("ept-batch", "32 pages in one batch: one kick and one INVEPT a processor, not 32"),
    Case::new("ept-stale-large", "the same for a page of a 2 MiB and of a 1 GiB leaf"),
    Case::new("ept-rights-lowered", "writes land until the flush of a lowered right, not after"),
    Case::new("ept-no-kick-is-stale", "a planted bug: no kick, so two processors read on"),
    Case::new("ept-no-kick-is-a-failure", "the check of ept-stale-flushed fails with that bug")
        .must_fail(),
];

/// The boot that prints the testbed's own list.
pub(crate) const fn list() -> Case {
    Case::new("list", "the names of all cases")
}

/// The cases that run when none is named.
pub(crate) fn ordinary() -> impl Iterator<Item = &'static Case> {
    CASES.iter().filter(|case| !case.only_by_name)
}

/// The names of all cases that boot in QEMU.
pub(crate) fn names() -> impl Iterator<Item = &'static str> {
    CASES.iter().map(|case| case.name)
}

/// The names of all cases that boot in Bochs.
pub(crate) fn bochs_names() -> impl Iterator<Item = &'static str> {
    BOCHS.iter().map(|case| case.name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_case_has_a_name_of_its_own_and_one_line_about_it() {
        for (position, case) in CASES.iter().chain(BOCHS).enumerate() {
            let letters = |letter: char| {
                letter.is_ascii_lowercase() || letter.is_ascii_digit() || letter == '-'
            };
            assert!(case.name.chars().all(letters), "{}", case.name);
            let mut earlier = names().chain(bochs_names()).take(position);
            assert!(!earlier.any(|name| name == case.name), "{}", case.name);
            assert!(!case.about.is_empty() && !case.about.contains('\n'), "{}", case.name);
        }
    }
}
