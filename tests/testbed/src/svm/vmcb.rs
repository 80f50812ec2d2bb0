//! The layout of a virtual machine control block (VMCB): appendix B
//!
//! A [`Vmcb`] is one page, of which the processor reads and writes every field at VMRUN
//! and at an exit. Each offset is checked where this file is compiled.

use core::mem::offset_of;

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// Bits of the intercept words, by the word they are in (table B-1).
pub mod intercept {
    /// Offset 0x00c: a physical interrupt (15.13.1).
    pub const INTERRUPT: u32 = 1;
    /// Offset 0x00c: a non-maskable interrupt (15.13.2).
    pub const NON_MASKABLE: u32 = 1 << 1;
    /// Offset 0x00c: INVD.
    pub const INVD: u32 = 1 << 22;
    /// Offset 0x00c: CPUID.
    pub const CPUID: u32 = 1 << 18;
    /// Offset 0x00c: HLT.
    pub const HALT: u32 = 1 << 24;
    /// Offset 0x00c: INVLPGA.
    pub const INVLPGA: u32 = 1 << 26;
    /// Offset 0x00c: IN and OUT, as the map of ports says (15.10).
    pub const PORTS: u32 = 1 << 27;
    /// Offset 0x00c: RDMSR and WRMSR, as the map of registers says (15.11).
    pub const MSRS: u32 = 1 << 28;
    /// Offset 0x00c: shutdown, which is what a triple fault comes to (15.14.3).
    pub const SHUTDOWN: u32 = 1 << 31;
    /// Offset 0x00c: all that a guest may not do by itself.
    pub const FIRST: u32 =
        INTERRUPT | NON_MASKABLE | INVD | CPUID | HALT | INVLPGA | PORTS | MSRS | SHUTDOWN;
    /// Offset 0x010: VMRUN, which has to be intercepted (15.5.1).
    pub const VMRUN: u32 = 1;
    /// Offset 0x010: VMMCALL.
    pub const VMMCALL: u32 = 1 << 1;
    /// Offset 0x010: VMLOAD, VMSAVE, STGI, CLGI and SKINIT.
    pub const SVM: u32 = 0x1f << 2;
    /// Offset 0x010: WBINVD.
    pub const WBINVD: u32 = 1 << 9;
    /// Offset 0x010: MONITOR and both sorts of MWAIT.
    pub const MONITOR: u32 = 7 << 10;
    /// Offset 0x010: XSETBV.
    pub const XSETBV: u32 = 1 << 13;
    /// Offset 0x010: all that a guest may not do by itself.
    pub const SECOND: u32 = VMRUN | VMMCALL | SVM | WBINVD | MONITOR | XSETBV;
}

/// A segment register with what the processor caches of its descriptor.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout,
)]
#[repr(C)]
pub struct Segment {
    /// The selector; not used for GDTR and IDTR.
    pub selector: u16,
    /// Bits 40 to 47 of a descriptor in bits 0 to 7, bits 52 to 55 in bits 8 to 11.
    pub attributes: u16,
    /// The last byte, in bytes.
    pub limit: u32,
    /// The first byte: a linear address.
    pub base: u64,
}

/// The control area, offsets 0x000 to 0x3ff (table B-1).
#[derive(Debug, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct Control {
    /// 0x000: reads of CR0 to CR15 in the low half, writes in the high half.
    pub intercept_cr: u32,
    /// 0x004: the same for DR0 to DR15.
    pub intercept_dr: u32,
    /// 0x008: exceptions, by vector.
    pub intercept_exceptions: u32,
    /// 0x00c: see [`intercept::FIRST`].
    pub intercept_first: u32,
    /// 0x010: see [`intercept::SECOND`].
    pub intercept_second: u32,
    /// 0x014: further instructions.
    pub intercept_third: u32,
    reserved_018: [u32; 9],
    /// 0x03c: PAUSE filter threshold, then PAUSE filter count (15.14.4).
    pub pause_filter: [u16; 2],
    /// 0x040: physical address of the map of ports (15.10.1).
    pub port_map: u64,
    /// 0x048: physical address of the map of registers (15.11).
    pub msr_map: u64,
    /// 0x050: added to what the guest reads as its time-stamp counter (15.30.2).
    pub tsc_offset: u64,
    /// 0x058: the address space identifier. `p2m` writes it.
    pub asid: u32,
    /// 0x05c: TLB_CONTROL in the low byte. `p2m` writes it.
    pub tlb_control: u32,
    /// 0x060: virtual interrupts (15.21): V_IRQ is bit 8, V_INTR_PRIO bits 16 to 19,
    /// V_IGN_TPR bit 20, V_INTR_MASKING bit 24, V_INTR_VECTOR bits 32 to 39.
    pub virtual_interrupt: u64,
    /// 0x068: bit 0 is set in an interrupt shadow (15.21.5).
    pub interrupt_shadow: u64,
    /// 0x070: why the guest stopped.
    pub exit_code: u64,
    /// 0x078: EXITINFO1, by exit code.
    pub exit_info_1: u64,
    /// 0x080: EXITINFO2, by exit code.
    pub exit_info_2: u64,
    /// 0x088: EXITINTINFO: the event that was being delivered when the guest stopped
    /// (15.7.2), laid out as [`event_injection`](Self::event_injection).
    pub exit_event: u64,
    /// 0x090: bit 0 turns nested paging on. `p2m` writes it.
    pub nested_control: u64,
    reserved_098: [u64; 2],
    /// 0x0a8: EVENTINJ: the event that the next VMRUN delivers (15.20).
    pub event_injection: u64,
    /// 0x0b0: the root of the nested tables. `p2m` writes it.
    pub nested_cr3: u64,
    /// 0x0b8: bit 0 turns on the switch of last-branch records (15.23).
    pub last_branch: u64,
    /// 0x0c0: fields that the processor may take from memory of its own (15.15).
    pub clean: u64,
    /// 0x0c8: the instruction after the one that was intercepted, on processors that say
    /// so (15.7.1); zero on others.
    pub next_rip: u64,
    /// 0x0d0: how many bytes of the instruction were fetched, and up to 15 of them.
    pub fetched: [u8; 16],
    reserved_0e0: [u64; 100],
}

/// The state save area, offsets 0x400 to 0xfff (table B-2).
#[derive(Debug, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct Save {
    /// 0x400.
    pub es: Segment,
    /// 0x410.
    pub cs: Segment,
    /// 0x420.
    pub ss: Segment,
    /// 0x430.
    pub ds: Segment,
    /// 0x440: VMLOAD and VMSAVE move it.
    pub fs: Segment,
    /// 0x450: VMLOAD and VMSAVE move it.
    pub gs: Segment,
    /// 0x460.
    pub gdtr: Segment,
    /// 0x470: VMLOAD and VMSAVE move it.
    pub ldtr: Segment,
    /// 0x480.
    pub idtr: Segment,
    /// 0x490: VMLOAD and VMSAVE move it.
    pub tr: Segment,
    reserved_4a0: [u8; 0x2b],
    /// 0x4cb: the current privilege level.
    pub cpl: u8,
    reserved_4cc: u32,
    /// 0x4d0: SVME, bit 12, has to be set (15.5.1).
    pub efer: u64,
    reserved_4d8: [u64; 14],
    /// 0x548.
    pub cr4: u64,
    /// 0x550.
    pub cr3: u64,
    /// 0x558.
    pub cr0: u64,
    /// 0x560.
    pub dr7: u64,
    /// 0x568.
    pub dr6: u64,
    /// 0x570.
    pub rflags: u64,
    /// 0x578.
    pub rip: u64,
    reserved_580: [u64; 11],
    /// 0x5d8.
    pub rsp: u64,
    reserved_5e0: [u64; 3],
    /// 0x5f8.
    pub rax: u64,
    /// 0x600: this and the seven that follow are moved by VMLOAD and VMSAVE.
    pub star: u64,
    /// 0x608.
    pub lstar: u64,
    /// 0x610.
    pub cstar: u64,
    /// 0x618.
    pub sfmask: u64,
    /// 0x620.
    pub kernel_gs_base: u64,
    /// 0x628.
    pub sysenter_cs: u64,
    /// 0x630.
    pub sysenter_esp: u64,
    /// 0x638.
    pub sysenter_eip: u64,
    /// 0x640.
    pub cr2: u64,
    reserved_648: [u64; 4],
    /// 0x668: the guest's PAT, with nested paging (15.25.4).
    pub pat: u64,
    /// 0x670.
    pub debug_control: u64,
    reserved_678: [u64; 305],
}

/// One control block: a page of its own.
#[derive(Debug, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C, align(4096))]
pub struct Vmcb {
    /// What is intercepted, and what happened.
    pub control: Control,
    /// The guest's state.
    pub save: Save,
}

impl Vmcb {
    /// Nothing but zeros: not fit for VMRUN.
    #[must_use]
    pub fn zeroed() -> Self {
        zerocopy::FromZeros::new_zeroed()
    }

    /// The same page as 32-bit words, as `p2m::hardware::svm` takes it.
    #[must_use]
    pub fn words(&mut self) -> &mut [u32; 1024] {
        let Ok(words) = FromBytes::mut_from_bytes(self.as_mut_bytes()) else {
            unreachable!("a control block has 1024 words, and more than their alignment")
        };
        words
    }
}

macro_rules! at {
    ($($structure:ident.$field:ident = $offset:literal)*) => {
        $(const _: () = assert!(offset_of!(Vmcb, $structure.$field) == $offset);)*
    };
}

at! {
    control.intercept_cr = 0x000
    control.intercept_dr = 0x004
    control.intercept_exceptions = 0x008
    control.intercept_first = 0x00c
    control.intercept_second = 0x010
    control.intercept_third = 0x014
    control.pause_filter = 0x03c
    control.port_map = 0x040
    control.msr_map = 0x048
    control.tsc_offset = 0x050
    control.asid = 0x058
    control.tlb_control = 0x05c
    control.virtual_interrupt = 0x060
    control.interrupt_shadow = 0x068
    control.exit_code = 0x070
    control.exit_info_1 = 0x078
    control.exit_info_2 = 0x080
    control.exit_event = 0x088
    control.nested_control = 0x090
    control.event_injection = 0x0a8
    control.nested_cr3 = 0x0b0
    control.last_branch = 0x0b8
    control.clean = 0x0c0
    control.next_rip = 0x0c8
    control.fetched = 0x0d0
    save.es = 0x400
    save.cs = 0x410
    save.ss = 0x420
    save.ds = 0x430
    save.fs = 0x440
    save.gs = 0x450
    save.gdtr = 0x460
    save.ldtr = 0x470
    save.idtr = 0x480
    save.tr = 0x490
    save.cpl = 0x4cb
    save.efer = 0x4d0
    save.cr4 = 0x548
    save.cr3 = 0x550
    save.cr0 = 0x558
    save.dr7 = 0x560
    save.dr6 = 0x568
    save.rflags = 0x570
    save.rip = 0x578
    save.rsp = 0x5d8
    save.rax = 0x5f8
    save.star = 0x600
    save.lstar = 0x608
    save.cstar = 0x610
    save.sfmask = 0x618
    save.kernel_gs_base = 0x620
    save.sysenter_cs = 0x628
    save.sysenter_esp = 0x630
    save.sysenter_eip = 0x638
    save.cr2 = 0x640
    save.pat = 0x668
    save.debug_control = 0x670
}

const _: () = assert!(size_of::<Vmcb>() == 4096 && size_of::<Control>() == 0x400);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_and_fields_are_the_same_memory() {
        let mut vmcb = Vmcb::zeroed();
        vmcb.words()[0x5c / 4] = 3;
        vmcb.words()[0x578 / 4] = 0x1000;
        assert_eq!((vmcb.control.tlb_control, vmcb.save.rip), (3, 0x1000));
    }
}
