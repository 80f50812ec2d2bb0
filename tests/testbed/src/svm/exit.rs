//! Why a guest stopped: the exit codes of appendix C and what comes with them.
//!
//! An [`Exit`] is read off a control block after each VMRUN. It names what the guest
//! wanted; the instruction itself has not been carried out.

/// Which way a port access goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Direction {
    /// IN: the guest reads.
    In,
    /// OUT: the guest writes.
    Out,
}

/// An access to an I/O port (15.10.2).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PortAccess {
    /// The port.
    pub port: u16,
    /// Bytes of one access: 1, 2 or 4.
    pub bytes: u8,
    /// Which way it goes.
    pub direction: Direction,
    /// INS or OUTS: memory instead of RAX.
    pub string: bool,
    /// With a REP prefix.
    pub repeated: bool,
    /// The instruction after it.
    pub next_rip: u64,
}

/// An access to a model-specific register.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ModelRegister {
    /// RDMSR of this register.
    Read(u32),
    /// WRMSR of this value to this register.
    Write(u32, u64),
}

/// What was wrong in a nested page fault: EXITINFO1 (15.25.6).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NestedError(pub u64);

impl NestedError {
    /// The entry was present: it was the rights that were missing.
    #[must_use]
    pub const fn present(self) -> bool {
        self.0 & 1 != 0
    }

    /// It was a write.
    #[must_use]
    pub const fn write(self) -> bool {
        self.0 & 1 << 1 != 0
    }

    /// It was an instruction fetch.
    #[must_use]
    pub const fn fetch(self) -> bool {
        self.0 & 1 << 4 != 0
    }

    /// The guest's own tables were being read, not what they lead to.
    #[must_use]
    pub const fn in_guest_tables(self) -> bool {
        self.0 & 1 << 33 != 0
    }
}

/// Why the guest stopped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Exit {
    /// CPUID, with EAX and ECX.
    Cpuid {
        /// EAX.
        leaf: u32,
        /// ECX.
        subleaf: u32,
    },
    /// RDMSR or WRMSR.
    Msr(ModelRegister),
    /// VMMCALL: a hypercall.
    Vmmcall,
    /// IN or OUT.
    Port(PortAccess),
    /// The nested tables did not allow an access.
    NestedFault {
        /// The guest-physical address, in bytes.
        gpa: u64,
        /// What was wrong.
        error: NestedError,
    },
    /// HLT.
    Halt,
    /// PAUSE, where it is intercepted.
    Pause,
    /// A physical interrupt: a kick.
    Interrupt,
    /// A physical non-maskable interrupt.
    NonMaskable,
    /// A triple fault.
    Shutdown,
    /// An exception, where it is intercepted.
    Exception {
        /// The vector.
        vector: u8,
        /// The error code, or zero.
        error: u64,
    },
    /// XSETBV.
    SetExtendedControl,
    /// WBINVD or INVD: nothing here depends on it.
    WriteBack,
    /// An instruction that the guest is not to know of: it gets #UD.
    Undefined,
    /// VMRUN refused the control block; nothing was run.
    Invalid,
    /// Some other exit code.
    Other(u64),
}

/// What an exit code needs to become an [`Exit`].
pub(super) struct Raw {
    pub(super) code: u64,
    pub(super) info_1: u64,
    pub(super) info_2: u64,
    pub(super) rax: u64,
    pub(super) rcx: u64,
    pub(super) rdx: u64,
}

impl Exit {
    /// The exit with this code (appendix C, table C-1).
    #[expect(clippy::cast_possible_truncation, reason = "instructions use the low halves")]
    pub(super) const fn decode(raw: &Raw) -> Self {
        let Raw { code, info_1, info_2, rax, rcx, rdx } = *raw;
        match code {
            0x040..=0x05f => Self::Exception { vector: (code - 0x40) as u8, error: info_1 },
            0x060 => Self::Interrupt,
            0x061 => Self::NonMaskable,
            0x072 => Self::Cpuid { leaf: rax as u32, subleaf: rcx as u32 },
            0x076 | 0x089 => Self::WriteBack,
            0x077 => Self::Pause,
            0x078 => Self::Halt,
            0x07b => Self::Port(port(info_1, info_2)),
            0x07c if info_1 == 0 => Self::Msr(ModelRegister::Read(rcx as u32)),
            0x07c => {
                let value = rdx << 32 | rax & 0xffff_ffff;
                Self::Msr(ModelRegister::Write(rcx as u32, value))
            }
            0x07f => Self::Shutdown,
            0x081 => Self::Vmmcall,
            // INVLPGA; VMRUN, VMLOAD, VMSAVE, STGI, CLGI, SKINIT; MONITOR and MWAIT.
            0x07a | 0x080 | 0x082..=0x086 | 0x08a..=0x08c => Self::Undefined,
            0x08d => Self::SetExtendedControl,
            0x400 => Self::NestedFault { gpa: info_2, error: NestedError(info_1) },
            // VMEXIT_INVALID is -1, of which QEMU 7.2 stores the low half.
            u64::MAX | 0xffff_ffff => Self::Invalid,
            other => Self::Other(other),
        }
    }

    /// The instruction after the one at `rip` that was intercepted, if there is but one.
    ///
    /// `reported` is what the processor says of it, or zero. Without that the length of
    /// the instruction is taken, which prefixes without a meaning make longer.
    pub(super) const fn next_instruction(&self, rip: u64, reported: u64) -> Option<u64> {
        let length = match self {
            Self::Port(access) => return Some(access.next_rip),
            Self::Halt => 1,
            // 0F A2; 0F 32 and 0F 30; F3 90; 0F 08 and 0F 09.
            Self::Cpuid { .. } | Self::Msr(_) | Self::Pause | Self::WriteBack => 2,
            // 0F 01 D9 and 0F 01 D1.
            Self::Vmmcall | Self::SetExtendedControl => 3,
            Self::NestedFault { .. }
            | Self::Interrupt
            | Self::NonMaskable
            | Self::Shutdown
            | Self::Exception { .. }
            | Self::Undefined
            | Self::Invalid
            | Self::Other(_) => return None,
        };
        // A guest that reaches the end of its address space faults there.
        Some(if reported == 0 { rip.saturating_add(length) } else { reported })
    }
}

/// EXITINFO1 of a port access: bit 0 IN, 2 string, 3 REP, 4 to 6 the size, 16 to 31 the
/// port; EXITINFO2 is the next instruction.
const fn port(info_1: u64, info_2: u64) -> PortAccess {
    PortAccess {
        port: (info_1 >> 16 & 0xffff) as u16,
        // One bit for each of 1, 2 and 4.
        bytes: (info_1 >> 4 & 7) as u8,
        direction: if info_1 & 1 == 0 { Direction::Out } else { Direction::In },
        string: info_1 & 1 << 2 != 0,
        repeated: info_1 & 1 << 3 != 0,
        next_rip: info_2,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn check(code: u64, info: (u64, u64), expected: Exit) {
        let raw = Raw {
            code,
            info_1: info.0,
            info_2: info.1,
            rax: 0xffff_ffff_4000_0000,
            rcx: 0xffff_ffff_c000_0080,
            rdx: 0xffff_ffff_0000_0007,
        };
        assert_eq!(Exit::decode(&raw), expected, "{code:#x}");
    }

    #[test]
    fn every_exit_code_that_is_intercepted_has_a_meaning() {
        check(0x72, (0, 0), Exit::Cpuid { leaf: 0x4000_0000, subleaf: 0xc000_0080 });
        check(0x7c, (0, 0), Exit::Msr(ModelRegister::Read(0xc000_0080)));
        let written = ModelRegister::Write(0xc000_0080, 0x7_4000_0000);
        check(0x7c, (1, 0), Exit::Msr(written));
        check(0x81, (0, 0), Exit::Vmmcall);
        check(0x78, (0, 0), Exit::Halt);
        check(0x60, (0, 0), Exit::Interrupt);
        check(0x7f, (0, 0), Exit::Shutdown);
        check(0x4e, (2, 5), Exit::Exception { vector: 14, error: 2 });
        check(u64::MAX, (0, 0), Exit::Invalid);
        check(0xffff_ffff, (0, 0), Exit::Invalid);
        check(0x8d, (0, 0), Exit::SetExtendedControl);
        for svm in [0x7a, 0x80, 0x82, 0x86, 0x8a, 0x8c] {
            check(svm, (0, 0), Exit::Undefined);
        }
        check(0x7d, (0, 0), Exit::Other(0x7d));
    }

    #[test]
    fn a_nested_fault_names_its_address_and_what_was_wrong() {
        let error = NestedError(1 << 33 | 1 << 2 | 1 << 1 | 1);
        check(0x400, (error.0, 0xfee0_0300), Exit::NestedFault { gpa: 0xfee0_0300, error });
        assert!(error.present() && error.write() && !error.fetch() && error.in_guest_tables());
        assert!(!NestedError(0).present() && NestedError(1 << 4).fetch());
    }

    #[test]
    fn a_port_access_is_taken_apart() {
        let access = PortAccess {
            port: 0x3f8,
            bytes: 1,
            direction: Direction::Out,
            string: false,
            repeated: false,
            next_rip: 0x1002,
        };
        check(0x7b, (0x03f8_0010, 0x1002), Exit::Port(access));
        let access = PortAccess {
            port: 0xcfc,
            bytes: 4,
            direction: Direction::In,
            string: true,
            repeated: true,
            next_rip: 2,
        };
        check(0x7b, (0x0cfc_004d, 2), Exit::Port(access));
    }
}
