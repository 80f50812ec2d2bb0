//! Guests under nested paging: every sort of exit, and what survives a stay.

use flush::{DomainId, Gfn};
use gnttab::GuestAddress;
use p2m::hardware::svm::TlbControl;
use testbed::ensure;
use testbed::failure::{Context as _, Failure};
use testbed::svm::{Direction, Event, Exit, Mode, ModelRegister, NestedError, PortAccess};

use crate::embedding::{Guest, Hypervisor, Iommu, Layout};
use crate::guest::Program;
use crate::machine::Machine;
use crate::say;
use crate::svm::{NotRun, Vcpu, turn_on};

/// Where the code is.
const CODE: Gfn = Gfn::new(0x100);
/// Where the probe leaves what it saw.
const RESULTS: Gfn = Gfn::new(0x101);
/// Where nothing is at first.
const NOTHING: Gfn = Gfn::new(0x200);

/// Both programs run to their ends, exit by exit.
pub(super) fn run(machine: &Machine) -> Result<(), Failure> {
    let hypervisor = Hypervisor::new(Iommu::bring_up(machine.dmar()?, true)?);
    let guest = Guest::new(DomainId::new(1), Layout::Separate, &hypervisor.iommu)?;
    hypervisor.populate(&guest, CODE, 0)?;
    hypervisor.populate(&guest, RESULTS, 0)?;
    let mut vcpu = guest.vcpu(Mode::Protected, CODE.get() << 12)?;
    ensure!(guest.run(&mut vcpu) == Err(NotRun::NotOn), "a guest ran while SVM was off");
    turn_on()?;
    turn_on()?;
    let probed = probe(&hypervisor, &guest, vcpu)?;
    let long = long(&hypervisor, &guest)?;
    let counters = hypervisor.iommu.units().first().context("a unit")?.counters();
    say!("@ svm stays_in_32_bit={probed} stays_in_64_bit={long}");
    say!("@ boot iotlb_commands={} waits={}", counters.iotlb_commands, counters.waits);
    Ok(())
}

/// The next exit must be this one; the guest goes on behind its instruction.
fn expect(guest: &Guest, vcpu: &mut Vcpu, expected: Exit) -> Result<(), Failure> {
    let exit = guest.run(vcpu)?;
    let rip = vcpu.context.vmcb.save.rip;
    ensure!(exit == expected, "the guest ended at {rip:#x} with {exit:x?}, not {expected:x?}");
    vcpu.context.skip(&exit);
    Ok(())
}

/// 32-bit code with paging off: one exit of each sort.
fn probe(hypervisor: &Hypervisor, guest: &Guest, mut vcpu: Vcpu) -> Result<u64, Failure> {
    let address = |gfn: Gfn| gfn.get() << 12;
    guest.write(GuestAddress(address(CODE)), Program::Probe.code()).context("the code")?;
    let vcpu = &mut vcpu;
    vcpu.context.registers.rdi = address(RESULTS);
    vcpu.context.registers.rsi = address(NOTHING);

    expect(guest, vcpu, Exit::Cpuid { leaf: 0x4000_0000, subleaf: 0 })?;
    vcpu.context.registers.rbx = 0x5555_aaaa;
    expect(guest, vcpu, Exit::Vmmcall)?;
    ensure!(vcpu.context.vmcb.save.rax == 7, "RAX is {:#x}", vcpu.context.vmcb.save.rax);
    ensure!(vcpu.context.registers.rbp == 0x1234_5678, "RBP is lost");
    vcpu.context.vmcb.save.rax = 0xffff_ffda;
    let written = ModelRegister::Write(0x4000_0000, 0x0123_4567_89ab_cdef);
    expect(guest, vcpu, Exit::Msr(written))?;
    expect(guest, vcpu, Exit::Msr(ModelRegister::Read(0xc000_0080)))?;
    vcpu.context.vmcb.save.rax = vcpu.context.efer();
    let mut access = PortAccess {
        port: 0x3f8,
        bytes: 1,
        direction: Direction::Out,
        string: false,
        repeated: false,
        next_rip: 0,
    };
    for (bytes, direction) in [(1, Direction::Out), (2, Direction::In)] {
        let exit = guest.run(vcpu)?;
        (access.bytes, access.direction) = (bytes, direction);
        let Exit::Port(PortAccess { next_rip, .. }) = exit else {
            testbed::fail!("{exit:x?} instead of a port access");
        };
        access.next_rip = next_rip;
        ensure!(exit == Exit::Port(access), "{exit:x?} instead of {access:x?}");
        vcpu.context.skip(&exit);
    }
    vcpu.context.vmcb.save.rax = 0xbeef;

    // A read of nothing faults until there is something.
    let fault = |error| Exit::NestedFault { gpa: address(NOTHING), error: NestedError(error) };
    const FINAL: u64 = 1 << 32;
    const USER: u64 = 1 << 2;
    expect(guest, vcpu, fault(FINAL | USER))?;
    expect(guest, vcpu, fault(FINAL | USER))?;
    hypervisor.populate(guest, NOTHING, 0)?;
    guest.write(GuestAddress(address(NOTHING)), &[1, 2, 3, 4]).context("the new page")?;
    expect(guest, vcpu, Exit::Halt)?;
    let mut results = [0; 20];
    guest.read(GuestAddress(address(RESULTS)), &mut results).context("the results")?;
    let expected = [0x5555_aaaa, 0xffff_ffda, 0, 0xbeef, 0x0403_0201_u32].map(u32::to_le_bytes);
    ensure!(results == *expected.as_flattened(), "the guest saw {results:x?}");
    let mut written = [0; 4];
    guest.read(GuestAddress(address(NOTHING) + 4), &mut written).context("the new page")?;
    ensure!(u32::from_le_bytes(written) == 0x1234_5678, "the guest wrote {written:x?}");

    // A delivery that a fault of the nested tables cuts short is made up for. Without a
    // table, an exception is the end, injected or not.
    expect(guest, vcpu, Exit::Vmmcall)?;
    let rip = vcpu.context.vmcb.save.rip;
    vcpu.context.inject(Event::UNDEFINED);
    let event = vcpu.context.vmcb.control.event_injection;
    let error = NestedError(FINAL | USER);
    expect(guest, vcpu, Exit::NestedFault { gpa: 6 * 8, error })?;
    ensure!(vcpu.context.vmcb.control.event_injection == event, "the exception is lost");
    vcpu.context.vmcb.save.idtr.limit = 0;
    expect(guest, vcpu, Exit::Shutdown)?;
    vcpu.context.vmcb.save.rip = rip;
    expect(guest, vcpu, Exit::Shutdown)?;
    // A control block that VMRUN refuses: EFER without SVME.
    vcpu.context.vmcb.save.efer = 0;
    let before = vcpu.stays();
    let refused = guest.run(vcpu)?;
    ensure!(refused == Exit::Invalid, "a bad control block was run: {refused:x?}");
    ensure!(vcpu.stays() == before, "a refused VMRUN was counted");
    Ok(before)
}

/// 64-bit code on tables of the guest's own.
fn long(hypervisor: &Hypervisor, guest: &Guest) -> Result<u64, Failure> {
    /// The guest's three levels of tables.
    const TABLES: u64 = 0x110;
    /// Present and writable.
    const LINK: u64 = 3;
    /// Also large.
    const LEAF: u64 = 0x83;
    let entries = [(TABLES + 1) << 12 | LINK, (TABLES + 2) << 12 | LINK, LEAF];
    for (gfn, entry) in (TABLES..).zip(entries) {
        hypervisor.populate(guest, Gfn::new(gfn), 0)?;
        guest.write(GuestAddress(gfn << 12), &entry.to_le_bytes()).context("a guest's table")?;
    }
    let code = GuestAddress(CODE.get() << 12);
    guest.write(code, Program::Long.code()).context("the code")?;
    let mut vcpu = guest.vcpu(Mode::Long { cr3: TABLES << 12 }, code.0)?;
    let vcpu = &mut vcpu;
    expect(guest, vcpu, Exit::Vmmcall)?;
    let registers = vcpu.context.registers.r8_to_r15;
    ensure!(registers == [8, 9, 10, 11, 12, 13, 14, 15], "R8 to R15 are {registers:?}");
    // Whatever this side does with floating point in between is not the guest's.
    let scaled = core::hint::black_box(1.5_f64) * core::hint::black_box(2.0);
    ensure!(scaled.to_bits() == 3.0_f64.to_bits(), "floating point is broken");
    expect(guest, vcpu, Exit::Vmmcall)?;
    let rbx = vcpu.context.registers.rbx;
    ensure!(rbx == 0x0123_4567_89ab_cdef, "XMM0 became {rbx:#x}");
    expect(guest, vcpu, Exit::Halt)?;

    guest.pause()?;
    ensure!(guest.run(vcpu) == Err(NotRun::Paused), "a paused guest ran");
    guest.resume();
    vcpu.context.vmcb.save.rip = code.0;
    expect(guest, vcpu, Exit::Vmmcall)?;
    Ok(vcpu.stays())
}

/// What a VMRUN asks for, in the control block: a flush exactly after each flush of the
/// guest, for each of its virtual processors, and once for the processor at first.
pub(super) fn tlb_control(machine: &Machine) -> Result<(), Failure> {
    const FLUSHES: u64 = 40;
    let hypervisor = Hypervisor::new(Iommu::bring_up(machine.dmar()?, true)?);
    let guest = Guest::new(DomainId::new(1), Layout::Separate, &hypervisor.iommu)?;
    hypervisor.populate(&guest, CODE, 0)?;
    let entry = CODE.get() << 12;
    guest.write(GuestAddress(entry), Program::Probe.code()).context("the code")?;
    turn_on()?;
    let mut vcpus = [guest.vcpu(Mode::Protected, entry)?, guest.vcpu(Mode::Protected, entry)?];
    // One stay: what its VMRUN carried.
    let stay = |vcpu: &mut Vcpu| {
        vcpu.context.vmcb.save.rip = entry;
        let exit = guest.run(vcpu)?;
        ensure!(matches!(exit, Exit::Cpuid { .. }), "the guest ended with {exit:x?}");
        let (asid, control) = vcpu.tag();
        Ok::<_, Failure>((asid, control.context("TLB_CONTROL")?))
    };
    // Nobody knows what ran on this processor before.
    let [one, two] = &mut vcpus;
    ensure!(stay(one)? == (1, TlbControl::Everything), "the first VMRUN of all flushed nothing");
    ensure!(stay(two)? == (2, TlbControl::Nothing), "another virtual processor has no ASID");

    let mut tags = [(1, TlbControl::Nothing), (2, TlbControl::Nothing)];
    let mut everything = 0;
    for round in 0..FLUSHES {
        // Nothing is asked for without a flush, nor after one that has been seen to.
        for _ in 0..2 {
            for (vcpu, tag) in vcpus.iter_mut().zip(&tags) {
                let found = stay(vcpu)?;
                ensure!(found == *tag, "round {round}: {found:?} without a flush, not {tag:?}");
            }
        }
        // Adding a page asks for nothing either: absence is not cached.
        hypervisor.populate(&guest, NOTHING, 0)?;
        for (vcpu, tag) in vcpus.iter_mut().zip(&tags) {
            let found = stay(vcpu)?;
            ensure!(found == *tag, "round {round}: {found:?} after an addition, not {tag:?}");
        }
        hypervisor.depopulate(&guest, NOTHING, |_| Ok(()))?;
        for (vcpu, tag) in vcpus.iter_mut().zip(&mut tags) {
            let (asid, control) = stay(vcpu)?;
            let flushes = control == TlbControl::Everything;
            let own = asid == tag.0 && control == TlbControl::ThisAsid;
            ensure!(
                flushes || own || asid != tag.0,
                "round {round}: a flush was not asked for: {:?}",
                (asid, control)
            );
            everything += u64::from(flushes);
            *tag = (asid, TlbControl::Nothing);
        }
        // If that used the last number up, all that were handed out before are void.
        for (vcpu, tag) in vcpus.iter_mut().zip(&mut tags) {
            let (asid, control) = stay(vcpu)?;
            ensure!(control == TlbControl::Nothing, "round {round}: a flush was asked for twice");
            *tag = (asid, control);
        }
    }
    let counts = guest.cpus().counts();
    ensure!(counts.flushes == FLUSHES, "{} flushes instead of {FLUSHES}", counts.flushes);
    ensure!(counts.added_only == 0, "{} additions were flushed", counts.added_only);
    ensure!(counts.kicks == 0, "{} processors were kicked", counts.kicks);
    let counters = hypervisor.iommu.units().first().context("a unit")?.counters();
    say!("@ tlb_control flushes={FLUSHES} virtual_processors=2 everything={everything}");
    say!("@ boot iotlb_commands={} waits={}", counters.iotlb_commands, counters.waits);
    Ok(())
}
