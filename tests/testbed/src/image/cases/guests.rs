//! Guests of Xen's interface: one alone, as a person brings it, and the project's own.

use flush::DomainId;
use testbed::ensure;
use testbed::failure::{Context as _, Failure};
use testbed::xen::Shutdown;

use crate::embedding::{Guest, Hypervisor, Iommu, Layout};
use crate::machine::Machine;
use crate::svm::turn_on;
use crate::xen::{House, Plan, start};

/// Run the boot module as a domain: `case=guest memory=MIB initial=0 -- words of the guest`.
///
/// # Errors
/// If the module is no guest, or does not fit.
pub(super) fn alone(machine: &Machine) -> Result<Shutdown, Failure> {
    let line = machine.command_line();
    let mut hypervisor = bring_up(machine)?;
    let initial = line.number("initial", 0)? != 0;
    let id = DomainId::new(if initial { 0 } else { 1 });
    hypervisor.add(Guest::new(id, Layout::Separate)?)?;
    run(machine, &hypervisor, id, line.for_guest(), initial)
}

/// The boot module turns itself off, which it does only if it got what it asked for.
pub(super) fn turns_off(machine: &Machine) -> Result<(), Failure> {
    let how = alone(machine)?;
    ensure!(how == Shutdown::PowerOff, "the guest ended as {how:?}");
    Ok(())
}

/// Guests that end otherwise. What one does is nothing to the next.
pub(super) fn ends(machine: &Machine) -> Result<(), Failure> {
    let mut hypervisor = bring_up(machine)?;
    let ends = [
        ("role=probe end=reboot", Shutdown::Reboot),
        ("role=probe end=triple", Shutdown::Crash),
        ("role=probe end=halt", Shutdown::Crash),
    ];
    for number in 1..=3 {
        hypervisor.add(Guest::new(DomainId::new(number), Layout::Separate)?)?;
    }
    for (number, (words, expected)) in (1..).zip(ends) {
        let how = run(machine, &hypervisor, DomainId::new(number), words, false)?;
        ensure!(how == expected, "`{words}` ended as {how:?}");
    }
    Ok(())
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
    let house = House::new([domain])?;
    let domain = house.domains().first().context("the domain")?;
    Ok(house.run(domain, 0, Some(vcpu)))
}
