//! The answer to each exit of a guest.

use core::arch::x86_64::__cpuid_count;
use core::sync::atomic::Ordering;

use flush::Gfn;
use gnttab::GuestAddress;
use iommu_vtd::Guarded;
use testbed::svm::{Context, Direction, Event, Exit, ModelRegister, NestedError, PortAccess};
use testbed::xen::cpuid::{self, Asker, Leaf};
use testbed::xen::ports::{self, StringAccess};
use testbed::xen::{Answer, Bytes, Hypercall, Shutdown, Width, hypercall_page, msr};

use super::call::Call;
use super::linear::Linear;
use super::{Domain, House};
use crate::svm::Vcpu;
use crate::{arch, clock};

/// Elements of INS or OUTS that are moved before the guest gets another turn.
const STRING: u64 = 4096;

/// What becomes of the virtual processor.
pub(super) enum Next {
    /// It goes on.
    GoOn,
    /// It goes on when others have had a turn.
    GiveWay,
    /// It waits for an event.
    Wait,
    /// Its domain ends.
    End(Shutdown),
    /// Its domain cannot go on.
    Broken(&'static str),
}

/// Let a virtual processor see that events are pending, before it goes on.
pub(super) fn deliver(domain: &Domain<'_>, number: u32, vcpu: &mut Vcpu) {
    if number != 0 || !domain.upcall.swap(false, Ordering::SeqCst) {
        return;
    }
    let vector = domain.parameters.with(|parameters| parameters.callback_vector());
    // One that waits already tells the guest as much.
    if vector.is_some_and(|vector| !vcpu.context.request(vector)) {
        domain.upcall.store(true, Ordering::SeqCst);
    }
}

/// Answer an exit.
pub(super) fn answer(
    house: &House<'_>,
    domain: &Domain<'_>,
    number: u32,
    vcpu: &mut Vcpu,
    exit: Exit,
) -> Next {
    let context = &mut vcpu.context;
    match exit {
        Exit::Cpuid { leaf, subleaf } => answer_cpuid(domain, number, context, leaf, subleaf),
        Exit::Msr(access) => {
            if !answer_msr(domain, number, context, access) {
                context.inject(Event::PROTECTION);
                return Next::GoOn;
            }
        }
        Exit::Vmmcall => {
            context.skip(&exit);
            return hypercall(house, domain, context);
        }
        Exit::Port(access) => {
            if !answer_port(domain, context, &access) {
                return Next::GoOn;
            }
        }
        Exit::NestedFault { gpa, error } => return nested_fault(domain, context, gpa, error),
        Exit::Halt if context.has_interrupts_on() => {
            context.skip(&exit);
            return Next::Wait;
        }
        Exit::Halt => return Next::Broken("it halted with interrupts off"),
        Exit::Shutdown => return Next::Broken("it ended in a triple fault"),
        Exit::Invalid => return Next::Broken("the processor refused its state"),
        Exit::Exception { .. } | Exit::Other(_) => {
            return Next::Broken("it did what the hypervisor has no answer for");
        }
        Exit::SetExtendedControl | Exit::Undefined => {
            context.inject(Event::UNDEFINED);
            return Next::GoOn;
        }
        Exit::Pause | Exit::WriteBack => {}
        Exit::Interrupt | Exit::NonMaskable => return Next::GoOn,
    }
    context.skip(&exit);
    Next::GoOn
}

fn answer_cpuid(domain: &Domain<'_>, number: u32, context: &mut Context, leaf: u32, subleaf: u32) {
    let host = __cpuid_count(leaf, subleaf);
    let host = Leaf { eax: host.eax, ebx: host.ebx, ecx: host.ecx, edx: host.edx };
    let asker = Asker {
        domain: domain.id(),
        vcpu: number,
        vcpus: domain.vcpus.len() as u32,
        kilohertz: clock::kilohertz(),
    };
    let Leaf { eax, ebx, ecx, edx } = cpuid::answer(leaf, subleaf, &asker, host);
    context.vmcb.save.rax = eax.into();
    context.registers.rbx = ebx.into();
    context.registers.rcx = ecx.into();
    context.registers.rdx = edx.into();
}

/// Whether the register exists and takes the value.
fn answer_msr(
    domain: &Domain<'_>,
    number: u32,
    context: &mut Context,
    access: ModelRegister,
) -> bool {
    const TIME_STAMP_COUNTER: u32 = 0x10;
    const PAT: u32 = 0x277;
    const EFER: u32 = 0xc000_0080;
    match access {
        ModelRegister::Read(register) => {
            let value = match register {
                EFER => Some(context.efer()),
                PAT => Some(context.vmcb.save.pat),
                TIME_STAMP_COUNTER => Some(arch::ticks()),
                other => msr::read(other, number),
            };
            let Some(value) = value else { return false };
            context.vmcb.save.rax = value & 0xffff_ffff;
            context.registers.rdx = value >> 32;
            true
        }
        ModelRegister::Write(EFER, value) => {
            let efer = msr::efer(context.efer(), value, context.vmcb.save.cr0);
            efer.map(|efer| context.set_efer(efer)).is_some()
        }
        ModelRegister::Write(PAT, value) => {
            let sound = msr::is_page_attribute_table(value);
            if sound {
                context.vmcb.save.pat = value;
            }
            sound
        }
        ModelRegister::Write(register, value) => match msr::write(register, value, number) {
            msr::Write::Ignored => true,
            msr::Write::Refused => false,
            msr::Write::HypercallPage(gfn) => {
                domain.set_width(ports::is_64_bit(context));
                let at = GuestAddress(gfn.saturating_mul(4096));
                domain.guest.write(at, &hypercall_page::build()).is_ok()
            }
        },
    }
}

/// Carry out the call that the registers hold; the guest goes on behind it.
fn hypercall(house: &House<'_>, domain: &Domain<'_>, context: &mut Context) -> Next {
    /// -EPERM: not from the guest's own user code.
    const NOT_PERMITTED: i64 = -1;
    let (save, registers) = (&context.vmcb.save, &context.registers);
    let wide = ports::is_64_bit(context);
    let (width, arguments) = if wide {
        let [r8, _, r10, ..] = registers.r8_to_r15;
        (Width::Wide, [registers.rdi, registers.rsi, registers.rdx, r10, r8])
    } else {
        let first = [registers.rbx, registers.rcx, registers.rdx];
        let [ebx, ecx, edx] = first;
        (Width::Narrow, [ebx, ecx, edx, registers.rsi, registers.rdi])
    };
    let call = Hypercall { number: (save.rax & 0xffff_ffff) as u32, arguments, width };
    let answer = if save.cpl == 0 {
        let memory = Linear::new(domain.guest, context);
        call.run(&Call { house, domain, memory })
    } else {
        Answer::Value(NOT_PERMITTED)
    };
    // What the guest has put into its rings is taken whenever it comes by: some guests wait
    // for that and only yield.
    if domain.serve_rings() {
        house.wake_all();
    }
    let (value, next) = match answer {
        Answer::Value(value) => (value, Next::GoOn),
        Answer::Yield => (0, Next::GiveWay),
        Answer::Block => (0, Next::Wait),
        Answer::Shutdown(how) => return Next::End(how),
    };
    let value = value.cast_unsigned();
    context.vmcb.save.rax = if wide { value } else { value & 0xffff_ffff };
    next
}

/// Whether the instruction is over.
fn answer_port(domain: &Domain<'_>, context: &mut Context, access: &PortAccess) -> bool {
    let PortAccess { port, bytes, direction, string, .. } = *access;
    if string {
        return string_port(domain, context, access);
    }
    match direction {
        Direction::In => {
            let rax = &mut context.vmcb.save.rax;
            *rax = ports::merged(*rax, ports::read(port), bytes);
        }
        Direction::Out => domain.write_port(port, (context.vmcb.save.rax & 0xff) as u8),
    }
    true
}

/// INS and OUTS. A fault in the guest's memory becomes #GP, where a processor would raise
/// #PF: nobody lets a device write where there is nothing.
fn string_port(domain: &Domain<'_>, context: &mut Context, access: &PortAccess) -> bool {
    let memory = Linear::new(domain.guest, context);
    let mut string = StringAccess::new(context, access);
    let element = usize::from(access.bytes).min(4);
    if access.direction == Direction::Out && !ports::is_shown(access.port) {
        string.finish();
    }
    let mut faulted = false;
    for _ in 0..STRING {
        if string.left == 0 {
            break;
        }
        let mut bytes = ports::read(access.port).to_le_bytes();
        let bytes = bytes.get_mut(..element).unwrap_or_default();
        faulted = match access.direction {
            Direction::In => memory.write(string.address(), bytes).is_err(),
            Direction::Out => memory.read(string.address(), bytes).is_err(),
        };
        if faulted {
            break;
        }
        if let (Direction::Out, Some(byte)) = (access.direction, bytes.first()) {
            domain.write_port(access.port, *byte);
        }
        string.step();
    }
    let over = string.store(context);
    if faulted {
        context.inject(Event::PROTECTION);
    }
    over
}

/// The guest touched what its nested tables do not allow.
fn nested_fault(domain: &Domain<'_>, context: &mut Context, gpa: u64, error: NestedError) -> Next {
    if error.present() {
        // A page that it may only read.
        context.inject(Event::PROTECTION);
        return Next::GoOn;
    }
    match domain.fill(Gfn::new(gpa / 4096)) {
        Ok(()) => Next::GoOn,
        Err(_) => Next::Broken("it reached too far beyond its memory"),
    }
}
