//! The cases: one is run for each boot.
//!
//! To add one, write a `fn(&Machine) -> Result<(), Failure>` in a file here and give it a
//! line in [`CASES`]. What it expects of QEMU's command line goes into its summary. Cases
//! for processors with VMX are in [`vmx::CASES`]: they boot in Bochs.

mod attachment;
mod calls;
mod combined;
mod demo;
mod devices;
mod endings;
mod guests;
mod kicks;
mod lies;
mod life;
mod memory;
mod platform;
mod processors;
mod queue;
mod scenario;
mod stage;
mod stale;
mod story;
mod tables;
mod traps;
mod vcpus;
mod vmx;

use testbed::fail;
use testbed::failure::Failure;

use crate::exit;
use crate::machine::Machine;
use crate::say;

/// How a case must end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Expect {
    /// As a pass, with exit status 33.
    Pass,
    /// As a failure, with exit status 35: it shows that failures are seen.
    Fail,
    /// Not at all, until the time limit outside ends it.
    Hang,
}

impl Expect {
    const fn word(self) -> &'static str {
        match self {
            Self::Pass => "pass",
            Self::Fail => "fail",
            Self::Hang => "hang",
        }
    }
}

/// One case.
struct Case {
    name: &'static str,
    expect: Expect,
    summary: &'static str,
    run: fn(&Machine) -> Result<(), Failure>,
}

/// The cases but for those of guests and those that must fail, in the order in which they
/// build on each other.
static CASES: &[Case] = &[
    Case {
        name: "boot",
        expect: Expect::Pass,
        summary: "memory is managed, zeroed, and handed out once",
        run: memory::frames,
    },
    Case {
        name: "memory-functions",
        expect: Expect::Pass,
        summary: "copy, move, fill and compare do what their names say",
        run: memory::memory_functions,
    },
    Case {
        name: "trap-resumes",
        expect: Expect::Pass,
        summary: "an installed handler runs and every register survives it",
        run: traps::trap_resumes,
    },
    Case {
        name: "clock",
        expect: Expect::Pass,
        summary: "time passes, and a wait ends at its limit",
        run: platform::clock,
    },
    Case {
        name: "acpi",
        expect: Expect::Pass,
        summary: "the DMAR table is found",
        run: platform::acpi,
    },
    Case {
        name: "vtd-registers",
        expect: Expect::Pass,
        summary: "the first VT-d unit's registers answer, inside their window only",
        run: platform::registers,
    },
    Case {
        name: "pci",
        expect: Expect::Pass,
        summary: "bus 0 is enumerated and both DMA devices are on it",
        run: devices::pci,
    },
    Case {
        name: "nvme-identify",
        expect: Expect::Pass,
        summary: "without translation, NVMe Identify fills exactly one frame",
        run: devices::nvme_identify,
    },
    Case {
        name: "nvme-timestamp",
        expect: Expect::Pass,
        summary: "NVMe reads and writes 8 bytes, over more commands than the queue has slots",
        run: devices::nvme_timestamp,
    },
    Case {
        name: "nvme-lost-queue",
        expect: Expect::Pass,
        summary: "a controller that cannot reach its queues is an error in bounded time",
        run: devices::nvme_lost_queue,
    },
    Case {
        name: "edu-dma",
        expect: Expect::Pass,
        summary: "edu copies a frame's bytes from memory and back",
        run: devices::edu_dma,
    },
    Case {
        name: "demo-per-page",
        expect: Expect::Pass,
        summary: "grants=N unmapped one by one; no device write reaches a freed page",
        run: demo::per_page,
    },
    Case {
        name: "demo-batched",
        expect: Expect::Pass,
        summary: "grants=N unmapped in one hypercall; no device write reaches a freed page",
        run: demo::batched,
    },
    Case {
        name: "demo-no-flush",
        expect: Expect::Pass,
        summary: "grants=N unmapped without a flush; device writes reach freed pages",
        run: demo::no_flush,
    },
    Case {
        name: "stale-then-flushed",
        expect: Expect::Pass,
        summary: "32 grants: device writes land, still land before the flush, not after",
        run: story::flushed,
    },
    Case {
        name: "copied-arguments",
        expect: Expect::Pass,
        summary: "the same with arguments that are copied: pages are cleared one by one",
        run: story::copied,
    },
    Case {
        name: "register-mode",
        expect: Expect::Pass,
        summary: "the same with iommu=registers: no queue",
        run: story::registers,
    },
    Case {
        name: "caching-mode",
        expect: Expect::Pass,
        summary: "the same with caching-mode=on: mapping flushes too, number 0 is not used",
        run: story::caching_mode,
    },
    Case {
        name: "unmap-and-replace",
        expect: Expect::Pass,
        summary: "the same with unmap_and_replace; a new address is refused",
        run: story::replace,
    },
    Case {
        name: "shared-tables",
        expect: Expect::Pass,
        summary: "the same where devices walk the processors' tables",
        run: story::shared_tables,
    },
    Case {
        name: "large-leaf",
        expect: Expect::Pass,
        summary: "a page leaves a cached 2 MiB leaf: all of the leaf is flushed",
        run: tables::large_leaf,
    },
    Case {
        name: "read-only-grant",
        expect: Expect::Pass,
        summary: "a device reads through a read-only grant and cannot write",
        run: tables::read_only,
    },
    Case {
        name: "restricted-grant",
        expect: Expect::Pass,
        summary: "grants that rights were taken from are given back in both tables",
        run: tables::restricted,
    },
    Case {
        name: "top-of-space",
        expect: Expect::Pass,
        summary: "grants at the last pages of the 48-bit space",
        run: tables::top_of_space,
    },
    Case {
        name: "reattach",
        expect: Expect::Pass,
        summary: "a device goes to another domain and back, with nothing left over",
        run: attachment::reattach,
    },
    Case {
        name: "detach",
        expect: Expect::Pass,
        summary: "a detached device is blocked, its neighbour is not",
        run: attachment::detach,
    },
    Case {
        name: "two-devices-fault",
        expect: Expect::Pass,
        summary: "faults of two devices are seen, and a lost one is reported",
        run: attachment::two_faults,
    },
    Case {
        name: "invalid-descriptor",
        expect: Expect::Pass,
        summary: "a bad descriptor: one submission is refused and repeated, no other is",
        run: queue::invalid_descriptor,
    },
    Case {
        name: "failed-flush-holds",
        expect: Expect::Pass,
        summary: "a flush that hangs gives up no page; a later one does",
        run: queue::failed_flush,
    },
    Case {
        name: "skipped-flush-is-stale",
        expect: Expect::Pass,
        summary: "a planted bug: no flush, and the device reaches freed pages",
        run: lies::skipped,
    },
    Case {
        name: "wrong-domain-is-stale",
        expect: Expect::Pass,
        summary: "a planted bug: another domain is flushed",
        run: lies::wrong_domain,
    },
    Case {
        name: "cpu-boot",
        expect: Expect::Pass,
        summary: "three processors start, work at once, and acknowledge every kick",
        run: processors::boot,
    },
    Case {
        name: "svm-run",
        expect: Expect::Pass,
        summary: "guests of a few instructions run under nested paging, exit by exit",
        run: vcpus::run,
    },
    Case {
        name: "tlb-control-asked",
        expect: Expect::Pass,
        summary: "TLB_CONTROL and ASID in the control block ask for each flush, and no other",
        run: vcpus::tlb_control,
    },
    Case {
        name: "stale-cpu-shown",
        expect: Expect::Pass,
        summary: "a guest that nobody kicks reads a page after its entry went; a kick ends that",
        run: stale::shown,
    },
    Case {
        name: "stale-cpu-batched",
        expect: Expect::Pass,
        summary: "32 grants a guest reads on: stale until the flush, no read after the release",
        run: stale::batched,
    },
    Case {
        name: "stale-cpu-no-kick",
        expect: Expect::Pass,
        summary: "a planted bug: nobody is kicked, and the guest reads every freed page",
        run: stale::no_kick,
    },
    Case {
        name: "lost-kick-holds",
        expect: Expect::Pass,
        summary: "a kick that gets lost fails the flush: no page is given up until a later one",
        run: kicks::lost_kick,
    },
    Case {
        name: "rights-lowered",
        expect: Expect::Pass,
        summary: "a guest writes on through an entry made read-only, until the flush",
        run: stale::rights,
    },
    Case {
        name: "cpu-enters-during-batch",
        expect: Expect::Pass,
        summary: "a processor that enters in the middle of a batch is kicked with the others",
        run: kicks::enters,
    },
    Case {
        name: "vcpu-moves-between-cpus",
        expect: Expect::Pass,
        summary: "a virtual processor moves away and back, and takes no old entry along",
        run: kicks::moves,
    },
    Case {
        name: "one-kick-per-cpu",
        expect: Expect::Pass,
        summary: "32 grants: one kick of each running processor, one submission to the unit",
        run: kicks::one_kick,
    },
    Case {
        name: "other-domain-not-kicked",
        expect: Expect::Pass,
        summary: "a flush of one domain leaves the processors of another alone",
        run: kicks::bystander,
    },
    Case {
        name: "calls-from-two-cpus",
        expect: Expect::Pass,
        summary: "two virtual processors map and unmap at once while a third edits their map",
        run: calls::from_two,
    },
    Case {
        name: "calls-in-parallel",
        expect: Expect::Pass,
        summary: "the same where the processors run at the same time and meet at locks",
        run: calls::in_parallel,
    },
    Case {
        name: "combined-flushes",
        expect: Expect::Pass,
        summary: "three processors give back at once: two flushes serve all three",
        run: combined::flushes,
    },
    Case {
        name: "domain-life",
        expect: Expect::Pass,
        summary: "a domain runs, pauses, goes on and ends, and every frame of it comes back",
        run: life::whole,
    },
    Case {
        name: "domain-destroyed-in-mid-batch",
        expect: Expect::Pass,
        summary: "the unmapping domain ends before its flush: its pages stay held until then",
        run: life::ends_in_batch,
    },
    Case {
        name: "granter-destroyed-in-mid-batch",
        expect: Expect::Pass,
        summary: "the granting domain ends before the flush: its pages are free after it",
        run: life::granter_ends,
    },
    Case {
        name: "scenario",
        expect: Expect::Pass,
        summary: "the steps of the first boot module; without one, those built in",
        run: scenario::run,
    },
    Case {
        name: "scenario-with-plant",
        expect: Expect::Fail,
        summary: "plant=skip-tlb: the steps that are built in find the guest's stale write",
        run: scenario::run,
    },
];

/// Run the case that the command line names.
///
/// # Errors
/// What the case returns, or that there is no such case.
pub(crate) fn run(machine: &Machine) -> Result<(), Failure> {
    let Some(wanted) = machine.command_line().get("case") else {
        fail!("no case was named: add case=NAME, or case=list for all names");
    };
    if wanted == "list" {
        exit::name("list");
        list();
        return Ok(());
    }
    if wanted == "guest" {
        exit::name("guest");
        exit::guest(guests::alone(machine)?);
    }
    let Some(case) = all().chain(vmx::CASES).find(|case| case.name == wanted) else {
        fail!("there is no case {wanted}: case=list prints all names");
    };
    exit::name(case.name);
    (case.run)(machine)
}

/// All cases that boot in QEMU.
fn all() -> impl Iterator<Item = &'static Case> {
    CASES.iter().chain(guests::CASES).chain(endings::CASES)
}

/// Print every case.
fn list() {
    for case in all() {
        say!("@ case={} expect={}", case.name, case.expect.word());
        say!("  {}", case.summary);
    }
    // These need processors with VMX, which QEMU does not emulate.
    for case in vmx::CASES {
        say!("@ case={} expect={} machine=bochs", case.name, case.expect.word());
        say!("  {}", case.summary);
    }
}
