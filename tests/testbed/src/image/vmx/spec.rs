//! Numbers of VMX: capability MSRs, VMCS fields, controls, exit reasons.
//!
//! After the Intel SDM, volumes 3C and 3D. Editions number their chapters differently, so
//! sections go by their titles. A [`Field`] is an encoding of appendix B, "Field Encoding
//! in VMCS"; only fields that the testbed sets or reads are here.

/// A field of the VMCS.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Field(pub(super) u32);

/// Model-specific registers: appendix A, "VMX Capability Reporting Facility".
pub(super) mod msr {
    pub(in super::super) const FEATURE_CONTROL: u32 = 0x3a;
    pub(in super::super) const SYSENTER_CS: u32 = 0x174;
    pub(in super::super) const SYSENTER_ESP: u32 = 0x175;
    pub(in super::super) const SYSENTER_EIP: u32 = 0x176;
    pub(in super::super) const BASIC: u32 = 0x480;
    pub(in super::super) const CR0_FIXED_0: u32 = 0x486;
    pub(in super::super) const CR0_FIXED_1: u32 = 0x487;
    pub(in super::super) const CR4_FIXED_0: u32 = 0x488;
    pub(in super::super) const CR4_FIXED_1: u32 = 0x489;
    pub(in super::super) const SECONDARY: u32 = 0x48b;
    pub(in super::super) const EPT_VPID: u32 = 0x48c;
    pub(in super::super) const TRUE_PIN: u32 = 0x48d;
    pub(in super::super) const TRUE_PRIMARY: u32 = 0x48e;
    pub(in super::super) const TRUE_EXIT: u32 = 0x48f;
    pub(in super::super) const TRUE_ENTRY: u32 = 0x490;
    pub(in super::super) const FS_BASE: u32 = 0xc000_0100;
    pub(in super::super) const GS_BASE: u32 = 0xc000_0101;
    pub(in super::super) const EFER: u32 = 0xc000_0080;
}

/// Bits of IA32_FEATURE_CONTROL ("Enabling and Entering VMX Operation").
pub(super) mod feature_control {
    pub(in super::super) const LOCKED: u64 = 1;
    pub(in super::super) const VMX_OUTSIDE_SMX: u64 = 1 << 2;
}

/// Bits of IA32_VMX_BASIC (appendix A, "Basic VMX Information").
pub(super) mod basic {
    /// The revision that opens a VMXON region or a VMCS.
    pub(in super::super) const REVISION: u64 = 0x7fff_ffff;
    /// Bits 53:50: the memory type of VMCS regions; 6 is write-back.
    pub(in super::super) const MEMORY_TYPE_SHIFT: u32 = 50;
    /// The capability MSRs named TRUE exist.
    pub(in super::super) const TRUE_CONTROLS: u64 = 1 << 55;
}

/// Bits of IA32_VMX_EPT_VPID_CAP (appendix A, "VPID and EPT Capabilities").
pub(super) mod ept_vpid {
    pub(in super::super) const FOUR_LEVELS: u64 = 1 << 6;
    pub(in super::super) const WRITE_BACK: u64 = 1 << 14;
    pub(in super::super) const LEAF_2M: u64 = 1 << 16;
    pub(in super::super) const LEAF_1G: u64 = 1 << 17;
    /// INVEPT, and its types 1 and 2.
    pub(in super::super) const INVEPT: u64 = 1 << 20 | 1 << 25 | 1 << 26;
}

/// "Pin-Based VM-Execution Controls".
pub(super) mod pin {
    pub(in super::super) const EXTERNAL_INTERRUPT_EXITING: u32 = 1;
    pub(in super::super) const NMI_EXITING: u32 = 1 << 3;
}

/// "Processor-Based VM-Execution Controls": the primary ones.
pub(super) mod primary {
    pub(in super::super) const HLT_EXITING: u32 = 1 << 7;
    pub(in super::super) const UNCONDITIONAL_IO_EXITING: u32 = 1 << 24;
    pub(in super::super) const SECONDARY: u32 = 1 << 31;
}

/// "Processor-Based VM-Execution Controls": the secondary ones.
pub(super) mod secondary {
    pub(in super::super) const ENABLE_EPT: u32 = 1 << 1;
    pub(in super::super) const UNRESTRICTED_GUEST: u32 = 1 << 7;
}

/// "VM-Exit Controls".
pub(super) mod exit {
    pub(in super::super) const HOST_64_BIT: u32 = 1 << 9;
    pub(in super::super) const LOAD_EFER: u32 = 1 << 21;
}

/// "VM-Entry Controls".
pub(super) mod entry {
    pub(in super::super) const LOAD_EFER: u32 = 1 << 15;
}

/// Appendix C, "VMX Basic Exit Reasons".
pub(super) mod reason {
    pub(in super::super) const EXCEPTION: u16 = 0;
    pub(in super::super) const EXTERNAL_INTERRUPT: u16 = 1;
    pub(in super::super) const TRIPLE_FAULT: u16 = 2;
    pub(in super::super) const CPUID: u16 = 10;
    pub(in super::super) const HLT: u16 = 12;
    pub(in super::super) const VMCALL: u16 = 18;
    pub(in super::super) const EPT_VIOLATION: u16 = 48;
    /// The bit of the exit reason that says that the entry failed.
    pub(in super::super) const ENTRY_FAILURE: u64 = 1 << 31;
}

/// "Format of Access Rights": present segments of ring 0 that were accessed.
pub(super) mod rights {
    /// 32-bit code, limit in pages.
    pub(in super::super) const CODE_32: u64 = 0xc09b;
    /// 32-bit writable data, limit in pages.
    pub(in super::super) const DATA_32: u64 = 0xc093;
    /// A busy 32-bit task segment.
    pub(in super::super) const TASK_32: u64 = 0x008b;
    /// No segment.
    pub(in super::super) const UNUSABLE: u64 = 1 << 16;
}

/// A segment register of the guest, by its place in the order of appendix B.
///
/// Its selector, limit, rights and base are each one field, two encodings apart from the
/// next segment's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Segment(u32);

impl Segment {
    pub(super) const ES: Self = Self(0);
    pub(super) const CS: Self = Self(2);
    pub(super) const SS: Self = Self(4);
    pub(super) const DS: Self = Self(6);
    pub(super) const FS: Self = Self(8);
    pub(super) const GS: Self = Self(10);
    pub(super) const LDTR: Self = Self(12);
    pub(super) const TR: Self = Self(14);

    pub(super) const fn selector(self) -> Field {
        Field(0x0800 + self.0)
    }

    pub(super) const fn limit(self) -> Field {
        Field(0x4800 + self.0)
    }

    pub(super) const fn rights(self) -> Field {
        Field(0x4814 + self.0)
    }

    pub(super) const fn base(self) -> Field {
        Field(0x6806 + self.0)
    }
}

impl Field {
    pub(super) const HOST_ES_SELECTOR: Self = Self(0x0c00);
    pub(super) const HOST_CS_SELECTOR: Self = Self(0x0c02);
    pub(super) const HOST_SS_SELECTOR: Self = Self(0x0c04);
    pub(super) const HOST_DS_SELECTOR: Self = Self(0x0c06);
    pub(super) const HOST_FS_SELECTOR: Self = Self(0x0c08);
    pub(super) const HOST_GS_SELECTOR: Self = Self(0x0c0a);
    pub(super) const HOST_TR_SELECTOR: Self = Self(0x0c0c);

    pub(super) const EPT_POINTER: Self = Self(0x201a);
    pub(super) const GUEST_PHYSICAL_ADDRESS: Self = Self(0x2400);
    pub(super) const LINK_POINTER: Self = Self(0x2800);
    pub(super) const GUEST_DEBUG_CONTROL: Self = Self(0x2802);
    pub(super) const GUEST_EFER: Self = Self(0x2806);
    pub(super) const HOST_EFER: Self = Self(0x2c02);

    pub(super) const PIN_CONTROLS: Self = Self(0x4000);
    pub(super) const PRIMARY_CONTROLS: Self = Self(0x4002);
    pub(super) const EXCEPTION_BITMAP: Self = Self(0x4004);
    pub(super) const PAGE_FAULT_MASK: Self = Self(0x4006);
    pub(super) const PAGE_FAULT_MATCH: Self = Self(0x4008);
    pub(super) const CR3_TARGETS: Self = Self(0x400a);
    pub(super) const EXIT_CONTROLS: Self = Self(0x400c);
    pub(super) const EXIT_MSR_STORES: Self = Self(0x400e);
    pub(super) const EXIT_MSR_LOADS: Self = Self(0x4010);
    pub(super) const ENTRY_CONTROLS: Self = Self(0x4012);
    pub(super) const ENTRY_MSR_LOADS: Self = Self(0x4014);
    pub(super) const ENTRY_EVENT: Self = Self(0x4016);
    pub(super) const SECONDARY_CONTROLS: Self = Self(0x401e);
    pub(super) const INSTRUCTION_ERROR: Self = Self(0x4400);
    pub(super) const EXIT_REASON: Self = Self(0x4402);
    pub(super) const EXIT_EVENT: Self = Self(0x4404);
    pub(super) const EXIT_INSTRUCTION_LENGTH: Self = Self(0x440c);
    pub(super) const GUEST_GDTR_LIMIT: Self = Self(0x4810);
    pub(super) const GUEST_IDTR_LIMIT: Self = Self(0x4812);
    pub(super) const GUEST_INTERRUPTIBILITY: Self = Self(0x4824);
    pub(super) const GUEST_ACTIVITY: Self = Self(0x4826);
    pub(super) const GUEST_SYSENTER_CS: Self = Self(0x482a);
    pub(super) const HOST_SYSENTER_CS: Self = Self(0x4c00);

    pub(super) const CR0_MASK: Self = Self(0x6000);
    pub(super) const CR4_MASK: Self = Self(0x6002);
    pub(super) const CR0_SHADOW: Self = Self(0x6004);
    pub(super) const CR4_SHADOW: Self = Self(0x6006);
    pub(super) const EXIT_QUALIFICATION: Self = Self(0x6400);
    pub(super) const GUEST_LINEAR_ADDRESS: Self = Self(0x640a);
    pub(super) const GUEST_CR0: Self = Self(0x6800);
    pub(super) const GUEST_CR3: Self = Self(0x6802);
    pub(super) const GUEST_CR4: Self = Self(0x6804);
    pub(super) const GUEST_GDTR_BASE: Self = Self(0x6816);
    pub(super) const GUEST_IDTR_BASE: Self = Self(0x6818);
    pub(super) const GUEST_DR7: Self = Self(0x681a);
    pub(super) const GUEST_RSP: Self = Self(0x681c);
    pub(super) const GUEST_RIP: Self = Self(0x681e);
    pub(super) const GUEST_RFLAGS: Self = Self(0x6820);
    pub(super) const GUEST_PENDING_DEBUG: Self = Self(0x6822);
    pub(super) const GUEST_SYSENTER_ESP: Self = Self(0x6824);
    pub(super) const GUEST_SYSENTER_EIP: Self = Self(0x6826);
    pub(super) const HOST_CR0: Self = Self(0x6c00);
    pub(super) const HOST_CR3: Self = Self(0x6c02);
    pub(super) const HOST_CR4: Self = Self(0x6c04);
    pub(super) const HOST_FS_BASE: Self = Self(0x6c06);
    pub(super) const HOST_GS_BASE: Self = Self(0x6c08);
    pub(super) const HOST_TR_BASE: Self = Self(0x6c0a);
    pub(super) const HOST_GDTR_BASE: Self = Self(0x6c0c);
    pub(super) const HOST_IDTR_BASE: Self = Self(0x6c0e);
    pub(super) const HOST_SYSENTER_ESP: Self = Self(0x6c10);
    pub(super) const HOST_SYSENTER_EIP: Self = Self(0x6c12);
    /// Written by the assembly, just before it enters the guest.
    pub(super) const HOST_RSP: Self = Self(0x6c14);
    pub(super) const HOST_RIP: Self = Self(0x6c16);
}
