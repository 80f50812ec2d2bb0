//! Guests of Xen's interface: one that a person brings, and the project's own.

use core::fmt::Write as _;
use core::sync::atomic::{AtomicBool, Ordering};

use arrayvec::ArrayString;
use flush::DomainId;
use iommu_vtd::Guarded;
use testbed::failure::{Context as _, Failure};
use testbed::xen::Shutdown;
use testbed::{ensure, fail};

use super::{Case, Expect};
use crate::embedding::{Guest, Hypervisor, Iommu, Layout, Lock};
use crate::machine::Machine;
use crate::processors::{Processors, Work};
use crate::say;
use crate::svm::turn_on;
use crate::xen::{Assigned, House, Plan, start};

/// The cases of guests; each has its boot module.
pub(super) static CASES: &[Case] = &[
    Case {
        name: "guest-probe",
        expect: Expect::Pass,
        summary: "the boot module, a guest, turns itself off",
        run: turns_off,
    },
    Case {
        name: "guest-initial",
        expect: Expect::Pass,
        summary: "the same as the first domain, with initial=1",
        run: turns_off,
    },
    Case {
        name: "guest-narrow",
        expect: Expect::Pass,
        summary: "the same with a guest of 32-bit code",
        run: turns_off,
    },
    Case {
        name: "guest-ends",
        expect: Expect::Pass,
        summary: "guests that end otherwise",
        run: ends,
    },
    Case {
        name: "guest-scribbles",
        expect: Expect::Pass,
        summary: "two guests ask for anything, a third gets all it wants",
        run: scribblers,
    },
    Case {
        name: "two-guests",
        expect: Expect::Pass,
        summary: "a frontend grants, a backend maps and gives back, its device writes",
        run: two,
    },
    Case {
        name: "guest-bench",
        expect: Expect::Pass,
        summary: "the same, giving back in three manners, with `-- bench`",
        run: two,
    },
    Case { name: "soak", expect: Expect::Pass, summary: "the same for a long time", run: two },
];

/// Run the boot module as a domain: `case=guest memory=MIB initial=0 -- words of the guest`.
///
/// # Errors
/// If the module is no guest, or does not fit.
pub(super) fn alone(machine: &Machine) -> Result<Shutdown, Failure> {
    let line = machine.command_line();
    let mut hypervisor = bring_up(machine)?;
    let initial = line.number("initial", 0)? != 0;
    let id = DomainId::new(if initial { 0 } else { 1 });
    hypervisor.add(Guest::new(id, Layout::Separate, &hypervisor.iommu)?)?;
    if !initial {
        add_first(&mut hypervisor)?;
    }
    run(machine, &hypervisor, id, line.for_guest(), initial)
}

/// The boot module turns itself off, which it does only if it got what it asked for.
fn turns_off(machine: &Machine) -> Result<(), Failure> {
    let how = alone(machine)?;
    ensure!(how == Shutdown::PowerOff, "the guest ended as {how:?}");
    Ok(())
}

/// A frontend that grants and a backend that maps, each on processors of its own, while
/// the backend's device writes to the same pages. Their command lines end in the words of
/// the case's own, after `--`.
fn two(machine: &Machine) -> Result<(), Failure> {
    const BACKEND: DomainId = DomainId::new(1);
    const FRONTEND: DomainId = DomainId::new(2);
    let processors = Processors::start(machine)?;
    ensure!(processors.count() >= 3, "{} processors, not 3", processors.count());
    let mut hypervisor = bring_up(machine)?;
    for id in [BACKEND, FRONTEND] {
        hypervisor.add(Guest::new(id, Layout::Separate, &hypervisor.iommu)?)?;
    }
    let words = machine.command_line().for_guest();
    let file = machine.module(0).context("a boot module with the guests")?;
    let begin = |id, role, vcpus| {
        let mut command_line = ArrayString::<256>::new();
        write!(command_line, "role={role} {words}").context("the guests' words")?;
        let plan = Plan { file, command_line: &command_line, megabytes: 16, vcpus, initial: false };
        let guest = hypervisor.guest(id).context("a domain")?;
        start(&hypervisor, guest, &plan)
    };
    let (backend, backend_vcpu) = begin(BACKEND, "backend", 2)?;
    let (frontend, frontend_vcpu) = begin(FRONTEND, "frontend", 1)?;
    let assigned = Assigned::new(&hypervisor, backend.guest)?;
    let house = House::new([backend, frontend], Some(assigned))?;
    let [backend, frontend] = house.domains() else { fail!("two domains") };

    let frontend_vcpu = Lock::new(Some(frontend_vcpu));
    let capable = AtomicBool::new(true);
    // What one of them needs, the other may wait for in vain: neither outlives a crash.
    let run = |domain, number, vcpu: Option<_>| {
        let end = house.run(domain, number, vcpu);
        if end == Shutdown::Crash {
            house.end_all();
        }
        end
    };
    let on_other = |domain, number, vcpu| {
        if turn_on().is_ok() {
            run(domain, number, vcpu);
        } else {
            capable.store(false, Ordering::SeqCst);
            house.end_all();
        }
    };
    let ended = processors.together(
        &[
            Work { processor: 1, action: &|| on_other(backend, 1, None) },
            Work {
                processor: 2,
                action: &|| on_other(frontend, 0, frontend_vcpu.with(Option::take)),
            },
        ],
        || run(backend, 0, Some(backend_vcpu)),
    )?;
    ensure!(capable.load(Ordering::SeqCst), "a processor cannot run guests");
    let ends = [Some(ended), frontend.ended()];
    ensure!(ends == [Some(Shutdown::PowerOff); 2], "the guests ended as {ends:?}");
    let counters = hypervisor.iommu.units().first().context("a unit")?.counters();
    say!("@ boot iotlb_commands={} waits={}", counters.iotlb_commands, counters.waits);
    Ok(())
}

/// Guests that end otherwise. What one does is nothing to the next.
fn ends(machine: &Machine) -> Result<(), Failure> {
    let mut hypervisor = bring_up(machine)?;
    add_first(&mut hypervisor)?;
    let ends = [
        ("role=probe end=reboot", Shutdown::Reboot),
        ("role=probe end=triple", Shutdown::Crash),
        ("role=probe end=halt", Shutdown::Crash),
    ];
    for number in 1..=3 {
        hypervisor.add(Guest::new(DomainId::new(number), Layout::Separate, &hypervisor.iommu)?)?;
    }
    for (number, (words, expected)) in (1..).zip(ends) {
        let how = run(machine, &hypervisor, DomainId::new(number), words, false)?;
        ensure!(how == expected, "`{words}` ended as {how:?}");
    }
    Ok(())
}

/// Guests that ask for anything, which may end them; then one that must get all it wants.
fn scribblers(machine: &Machine) -> Result<(), Failure> {
    let mut hypervisor = bring_up(machine)?;
    add_first(&mut hypervisor)?;
    for number in 1..=3 {
        hypervisor.add(Guest::new(DomainId::new(number), Layout::Separate, &hypervisor.iommu)?)?;
    }
    for (number, words) in [(1, "role=scribbler seed=1"), (2, "role=scribbler seed=2")] {
        let how = run(machine, &hypervisor, DomainId::new(number), words, false)?;
        say!("@ scribbler domain={number} end={how:?}");
    }
    let how = run(machine, &hypervisor, DomainId::new(3), "role=probe", false)?;
    ensure!(how == Shutdown::PowerOff, "the guest after them ended as {how:?}");
    Ok(())
}

/// The first domain, which every other may expect to exist. This one grants nothing.
fn add_first(hypervisor: &mut Hypervisor) -> Result<(), Failure> {
    hypervisor.add(Guest::new(DomainId::new(0), Layout::Separate, &hypervisor.iommu)?)
}

fn bring_up(machine: &Machine) -> Result<Hypervisor, Failure> {
    turn_on()?;
    Ok(Hypervisor::new(Iommu::bring_up(machine.dmar()?, true)?))
}

/// Run the boot module as domain `id`, to its end.
fn run(
    machine: &Machine,
    hypervisor: &Hypervisor,
    id: DomainId,
    command_line: &str,
    initial: bool,
) -> Result<Shutdown, Failure> {
    let plan = Plan {
        file: machine.module(0).context("a boot module with the guest")?,
        command_line,
        megabytes: machine.command_line().number("memory", 16)?,
        vcpus: 1,
        initial,
    };
    let guest = hypervisor.guest(id).context("the domain")?;
    let (domain, vcpu) = start(hypervisor, guest, &plan)?;
    let house = House::new([domain], None)?;
    let domain = house.domains().first().context("the domain")?;
    Ok(house.run(domain, 0, Some(vcpu)))
}
