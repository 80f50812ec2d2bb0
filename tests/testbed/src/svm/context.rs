//! One vCPU at rest: everything that makes it up, and how to answer its exits.
//!
//! A [`Context`] starts in one of two [`Mode`]s, both as the PVH protocol and this
//! project's own guests want them. Between two runs it can be read and changed freely.

use super::exit::{Exit, Raw};
use super::vmcb::{Segment, Vmcb, intercept};

/// The registers that the processor does not switch; RAX, RSP and RIP are in the control
/// block.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct Registers {
    /// RBX.
    pub rbx: u64,
    /// RCX.
    pub rcx: u64,
    /// RDX.
    pub rdx: u64,
    /// RSI.
    pub rsi: u64,
    /// RDI.
    pub rdi: u64,
    /// RBP.
    pub rbp: u64,
    /// R8 to R15.
    pub r8_to_r15: [u64; 8],
}

/// Floating-point state, as FXSAVE stores it.
#[derive(Clone, Debug)]
#[repr(C, align(16))]
pub struct Floating([u8; 512]);

impl Floating {
    /// As FNINIT and a reset leave it: all exceptions masked.
    const RESET: Self = {
        let mut bytes = [0; 512];
        // FCW is 037F and MXCSR 1F80.
        (bytes[0], bytes[1]) = (0x7f, 0x03);
        (bytes[24], bytes[25]) = (0x80, 0x1f);
        Self(bytes)
    };
}

/// How a vCPU starts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// 32-bit protected mode with flat segments and paging off, as PVH has it.
    Protected,
    /// 64-bit mode on page tables of the guest's own.
    Long {
        /// The guest-physical address of the top table.
        cr3: u64,
    },
}

/// An event that the guest is to see (15.20).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Event {
    /// An exception without an error code.
    Fault(u8),
    /// An exception with an error code.
    FaultWith(u8, u32),
    /// An external interrupt. Only for a guest that has interrupts on.
    Interrupt(u8),
    /// A non-maskable interrupt.
    NonMaskable,
}

impl Event {
    /// #UD.
    pub const UNDEFINED: Self = Self::Fault(6);
    /// #GP(0).
    pub const PROTECTION: Self = Self::FaultWith(13, 0);

    /// EVENTINJ: vector 0 to 7, sort 8 to 10, bit 11 with a code, valid 31, code 32 to 63.
    const fn bits(self) -> u64 {
        const EXCEPTION: u64 = 3 << 8;
        const HAS_CODE: u64 = 1 << 11;
        const VALID: u64 = 1 << 31;
        VALID
            | match self {
                Self::Fault(vector) => vector as u64 | EXCEPTION,
                Self::FaultWith(vector, code) => {
                    vector as u64 | EXCEPTION | HAS_CODE | (code as u64) << 32
                }
                Self::Interrupt(vector) => vector as u64,
                Self::NonMaskable => 2 | 2 << 8,
            }
    }
}

/// EFER.SVME, which VMRUN wants in the guest's EFER as well (15.5.1).
const SVME: u64 = 1 << 12;
/// V_INTR_MASKING: the guest's IF does not hold back physical interrupts (15.21.1).
const MASK_VIRTUALLY: u64 = 1 << 24;
/// V_IRQ and V_IGN_TPR: an interrupt is pending, whatever the guest's task priority.
const REQUESTED: u64 = 1 << 8 | 1 << 20;
/// The fields of a requested interrupt.
const REQUEST: u64 = REQUESTED | 0xf << 16 | 0xff << 32;
/// The guest's task priority.
const TASK_PRIORITY: u64 = 0xff;

/// One vCPU that is not running.
#[derive(Debug)]
pub struct Context {
    /// Its control block.
    pub vmcb: Vmcb,
    /// What the processor does not switch.
    pub registers: Registers,
    /// Its floating-point state.
    pub floating: Floating,
}

impl Context {
    /// A vCPU that starts at `entry`, a linear address, with interrupts off.
    ///
    /// It cannot run before it has nested tables and an ASID, and is
    /// [confined](Self::confine).
    #[must_use]
    pub fn new(mode: Mode, entry: u64) -> Self {
        let mut vmcb = Vmcb::zeroed();
        let save = &mut vmcb.save;
        // Descriptor bits: present, code or data, type; then granularity, size, long mode.
        const DATA: u16 = 0xc93;
        const CODE_32: u16 = 0xc9b;
        const CODE_64: u16 = 0xa9b;
        const BUSY_TASK: u16 = 0x8b;
        const LOCAL_TABLE: u16 = 0x82;
        let flat = |attributes| Segment { selector: 0, attributes, limit: u32::MAX, base: 0 };
        let table = |attributes, limit| Segment { selector: 0, attributes, limit, base: 0 };
        for data in [&mut save.es, &mut save.ss, &mut save.ds, &mut save.fs, &mut save.gs] {
            *data = flat(DATA);
        }
        save.ldtr = table(LOCAL_TABLE, 0xffff);
        // PVH: a 32-bit task segment with base 0 and limit 0x67.
        save.tr = table(BUSY_TASK, 0x67);
        save.gdtr = table(0, 0xffff);
        save.idtr = table(0, 0xffff);
        save.rflags = 2;
        save.rip = entry;
        save.dr6 = 0xffff_0ff0;
        save.dr7 = 0x400;
        // The value at reset.
        save.pat = 0x0007_0406_0007_0406;
        let (code, cr0, cr3, cr4, efer) = match mode {
            // PE and ET.
            Mode::Protected => (CODE_32, 0x11, 0, 0, SVME),
            // Also PG and MP; PAE, OSFXSR and OSXMMEXCPT; LMA, LME and NXE.
            Mode::Long { cr3 } => (CODE_64, 0x8000_0013, cr3, 0x620, SVME | 0xd00),
        };
        save.cs = flat(code);
        (save.cr0, save.cr3, save.cr4, save.efer) = (cr0, cr3, cr4, efer);
        Self { vmcb, registers: Registers::default(), floating: Floating::RESET }
    }

    /// See to it that the guest cannot get at this side, whatever was written to its control
    /// block before; more may be intercepted than this wants. To be called before each
    /// VMRUN, with the physical addresses of a [`PortMap`](super::PortMap) and a
    /// [`MsrMap`](super::MsrMap).
    pub const fn confine(&mut self, port_map: u64, msr_map: u64) {
        let control = &mut self.vmcb.control;
        control.intercept_first |= intercept::FIRST;
        control.intercept_second |= intercept::SECOND;
        // No virtual GIF, NMI or interrupt controller: the last has the processor write to
        // pages that nothing here has given it.
        control.virtual_interrupt &= TASK_PRIORITY | REQUEST;
        control.virtual_interrupt |= MASK_VIRTUALLY;
        (control.port_map, control.msr_map) = (port_map, msr_map);
        // Nested paging, and nothing that encrypts. The root is for `p2m` to write.
        (control.nested_control, control.last_branch, control.clean) = (1, 0, 0);
    }

    /// Read off why it stopped, and see to it that an event whose delivery was cut short
    /// by that is delivered by the next VMRUN. To be called once after each VMRUN.
    pub fn stopped(&mut self) -> Exit {
        let (control, save) = (&mut self.vmcb.control, &self.vmcb.save);
        let Registers { rcx, rdx, .. } = self.registers;
        let exit = Exit::decode(&Raw {
            code: control.exit_code,
            info_1: control.exit_info_1,
            info_2: control.exit_info_2,
            rax: save.rax,
            rcx,
            rdx,
        });
        if exit != Exit::Invalid {
            control.event_injection = cut_short(control.exit_event);
        }
        exit
    }

    /// Go on behind the instruction that was intercepted.
    ///
    /// Nothing is done for an exit that no single instruction caused.
    pub fn skip(&mut self, exit: &Exit) {
        let Self { vmcb: Vmcb { control, save }, .. } = self;
        let Some(next) = exit.next_instruction(save.rip, control.next_rip) else { return };
        save.rip = next;
        control.interrupt_shadow &= !1;
    }

    /// Let the next VMRUN deliver an event. It takes the place of one that waits already.
    pub const fn inject(&mut self, event: Event) {
        self.vmcb.control.event_injection = event.bits();
    }

    /// Let an interrupt be delivered as soon as the guest has interrupts on (15.21.4).
    ///
    /// One waits at a time: `false`, with nothing done, if another does.
    #[must_use]
    pub const fn request(&mut self, vector: u8) -> bool {
        const HIGHEST_PRIORITY: u64 = 0xf << 16;
        let field = &mut self.vmcb.control.virtual_interrupt;
        if *field & 1 << 8 != 0 {
            return false;
        }
        *field = *field & !REQUEST | REQUESTED | HIGHEST_PRIORITY | (vector as u64) << 32;
        true
    }

    /// Whether the guest has interrupts on.
    #[must_use]
    pub const fn has_interrupts_on(&self) -> bool {
        self.vmcb.save.rflags & 1 << 9 != 0
    }

    /// EFER as the guest sees it.
    #[must_use]
    pub const fn efer(&self) -> u64 {
        self.vmcb.save.efer & !SVME
    }

    /// Set EFER as the guest wants it. SVM stays out of its reach.
    pub const fn set_efer(&mut self, efer: u64) {
        self.vmcb.save.efer = efer | SVME;
    }
}

/// What has to be injected after an exit with this EXITINTINFO, or zero.
///
/// What the guest's own instruction raises, it raises again: the instruction is not over.
const fn cut_short(exit_event: u64) -> u64 {
    const VALID: u64 = 1 << 31;
    let (vector, sort) = (exit_event & 0xff, exit_event >> 8 & 7);
    match sort {
        // External and non-maskable interrupts.
        0 | 2 if exit_event & VALID != 0 => exit_event,
        // Exceptions, but for INT3 and INTO.
        3 if exit_event & VALID != 0 && !matches!(vector, 3 | 4) => exit_event,
        _ => 0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn context() -> Context {
        Context::new(Mode::Protected, 0x10_0000)
    }

    #[test]
    fn a_skip_goes_to_the_next_instruction_of_an_intercept_and_nowhere_otherwise() {
        let mut guest = context();
        guest.vmcb.control.exit_code = 0x81;
        guest.vmcb.control.interrupt_shadow = 1;
        let exit = guest.stopped();
        guest.skip(&exit);
        assert_eq!((exit, guest.vmcb.save.rip), (Exit::Vmmcall, 0x10_0003));
        assert_eq!(guest.vmcb.control.interrupt_shadow, 0);
        guest.vmcb.control.next_rip = 0x10_0005;
        guest.skip(&Exit::Halt);
        assert_eq!(guest.vmcb.save.rip, 0x10_0005);
        for exit in [Exit::Interrupt, Exit::Shutdown, Exit::Undefined, Exit::Invalid] {
            guest.skip(&exit);
            assert_eq!(guest.vmcb.save.rip, 0x10_0005, "{exit:?}");
        }
        guest.vmcb.control.next_rip = 0;
        (guest.vmcb.save.rip, guest.vmcb.control.exit_code) = (u64::MAX, 0x78);
        guest.skip(&Exit::Halt);
        assert_eq!(guest.vmcb.save.rip, u64::MAX);
        guest.vmcb.control.exit_code = 0x7b;
        guest.vmcb.control.exit_info_2 = 0x77;
        let exit = guest.stopped();
        guest.skip(&exit);
        assert_eq!(guest.vmcb.save.rip, 0x77);
    }

    #[test]
    fn an_event_is_written_as_the_manual_has_it() {
        for (event, bits) in [
            (Event::UNDEFINED, 0x8000_0306),
            (Event::FaultWith(14, 2), 0x0002_8000_0b0e),
            (Event::PROTECTION, 0x8000_0b0d),
            (Event::Interrupt(0xf3), 0x8000_00f3),
            (Event::NonMaskable, 0x8000_0202),
        ] {
            let mut guest = context();
            guest.inject(event);
            assert_eq!(guest.vmcb.control.event_injection, bits, "{event:?}");
        }
    }

    #[test]
    fn a_delivery_that_was_cut_short_is_repeated_unless_the_instruction_is() {
        for (was, repeated) in [
            (0x8000_00f3, true),
            (0x8000_0202, true),
            (0x8000_0b0e, true),
            (0x8000_0303, false),
            (0x8000_0480, false),
            (0x0000_00f3, false),
        ] {
            let mut guest = context();
            guest.vmcb.control.exit_code = 0x400;
            guest.vmcb.control.exit_event = was;
            guest.stopped();
            let expected = if repeated { was } else { 0 };
            assert_eq!(guest.vmcb.control.event_injection, expected, "{was:#x}");
        }
        // A VMRUN that was refused delivered nothing.
        let mut guest = context();
        guest.inject(Event::UNDEFINED);
        guest.vmcb.control.exit_code = u64::MAX;
        assert_eq!(guest.stopped(), Exit::Invalid);
        assert_eq!(guest.vmcb.control.event_injection, 0x8000_0306);
    }

    #[test]
    fn one_interrupt_waits_at_a_time() {
        let mut guest = context();
        assert!(guest.request(0x30) && !guest.request(0x31));
        assert_eq!(guest.vmcb.control.virtual_interrupt, 0x30_001f_0100);
        // Delivered: the processor clears V_IRQ.
        guest.vmcb.control.virtual_interrupt &= !(1 << 8);
        assert!(guest.request(0x31));
        assert_eq!(guest.vmcb.control.virtual_interrupt, 0x31_001f_0100);
        guest.vmcb.save.rflags |= 1 << 9;
        assert!(guest.has_interrupts_on());
    }

    #[test]
    fn a_guest_is_confined_whatever_was_written_before() {
        let mut guest = context();
        let control = &mut guest.vmcb.control;
        (control.nested_control, control.clean, control.last_branch) = (0x6, u64::MAX, 3);
        control.intercept_first = intercept::NON_MASKABLE | 1 << 14;
        control.virtual_interrupt = 1 << 31 | 1 << 30 | 1 << 25 | 1 << 9 | 7;
        assert!(guest.request(0x30));
        guest.confine(0x5000, 0x8000);
        let control = &guest.vmcb.control;
        assert_eq!((control.nested_control, control.clean, control.last_branch), (1, 0, 0));
        assert_eq!(control.intercept_first, intercept::FIRST | 1 << 14);
        assert_eq!(control.intercept_second & 1, 1, "VMRUN has to be intercepted");
        assert_eq!((control.port_map, control.msr_map), (0x5000, 0x8000));
        assert_eq!(control.virtual_interrupt, MASK_VIRTUALLY | 0x30_001f_0107);
    }

    #[test]
    fn the_guest_never_sees_that_svm_is_on() {
        let mut guest = context();
        assert_eq!((guest.efer(), guest.vmcb.save.efer), (0, 0x1000));
        guest.set_efer(0x101);
        assert_eq!((guest.efer(), guest.vmcb.save.efer), (0x101, 0x1101));
    }
}
