//! The state that a VMCS puts in place, and the way into the guest and back.
//!
//! Host state is this processor's own, so that an exit goes on where the entry was made.
//! Sections: "VM-Execution Control Fields", "Guest-State Area", "Host-State Area",
//! "Checks on Guest Control Registers".

// UNSAFETY: reads descriptor tables, sets host state, and enters guests through assembly.
#![expect(unsafe_code)]

use core::arch::{asm, global_asm};
use core::mem::offset_of;
use core::ptr;

use p2m::hardware::vmx::Eptp;
use testbed::failure::{Context as _, Failure};
use x86_64::instructions::segmentation::{CS, DS, ES, FS, GS, SS, Segment as _};
use x86_64::instructions::tables::{sgdt, sidt};
use x86_64::registers::control::{Cr0, Cr3, Cr4};

use super::processor::{ControlStructure, VmxError, VmxProcessor, outcome, read_msr};
use super::spec::{Field, Segment, entry, exit, msr, pin, primary, rights, secondary};

global_asm!(include_str!("enter.s"), host_rsp = const Field::HOST_RSP.0);

/// The guest's general registers but RSP.
#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
pub(crate) struct Registers {
    /// RAX.
    pub(crate) rax: u64,
    /// RCX.
    pub(crate) rcx: u64,
    /// RDX.
    pub(crate) rdx: u64,
    /// RBX.
    pub(crate) rbx: u64,
    /// RBP.
    pub(crate) rbp: u64,
    /// RSI.
    pub(crate) rsi: u64,
    /// RDI.
    pub(crate) rdi: u64,
    /// R8 to R15.
    pub(crate) r8_to_r15: [u64; 8],
}

const _: () = assert!(
    offset_of!(Registers, rbx) == 24
        && offset_of!(Registers, rdi) == 48
        && offset_of!(Registers, r8_to_r15) == 56
        && size_of::<Registers>() == 120
);

/// A flat guest in 32-bit protected mode with paging off, interrupts on.
const PROTECTED: u64 = 1;
/// CR0.ET is 1 on every processor.
const EXTENSION_TYPE: u64 = 1 << 4;
/// RFLAGS: the bit that is always 1, and IF. A kick ends a stay whatever IF is, but not
/// under every emulator.
const INTERRUPTS_ON: u64 = 1 << 9 | 1 << 1;

/// Fill a VMCS in: a guest that starts at `entry` on the tables of `eptp`.
///
/// It is current afterwards.
pub(super) fn set_up(
    structure: &ControlStructure<'_>,
    processor: &VmxProcessor,
    eptp: Eptp,
    entry: u64,
) -> Result<(), Failure> {
    structure.make_current()?;
    let write = |field, value| {
        // SAFETY: the controls below make every exit come back to `vmx_exit` with the host
        // state of this processor, and leave the guest no way out but an exit. Its tables
        // are those of its p2m, and its program (`program.s`) touches no memory but what
        // it is told to: managed frames, which Rust uses through atomics alone.
        unsafe { structure.write(field, value) }
    };
    for (field, value) in controls(processor)? {
        write(field, u64::from(value))?;
    }
    write(Field::EPT_POINTER, eptp.bits())?;
    for (field, value) in host()? {
        write(field, value)?;
    }
    for segment in [Segment::ES, Segment::SS, Segment::DS, Segment::FS, Segment::GS] {
        write(segment.rights(), rights::DATA_32)?;
    }
    write(Segment::CS.rights(), rights::CODE_32)?;
    write(Segment::LDTR.rights(), rights::UNUSABLE)?;
    write(Segment::TR.rights(), rights::TASK_32)?;
    for segment in [
        Segment::ES,
        Segment::CS,
        Segment::SS,
        Segment::DS,
        Segment::FS,
        Segment::GS,
        Segment::LDTR,
        Segment::TR,
    ] {
        write(segment.selector(), 0)?;
        write(segment.base(), 0)?;
        write(segment.limit(), u64::from(u32::MAX))?;
    }
    write(Segment::TR.limit(), 0x67)?;
    let capabilities = &processor.capabilities;
    // Paging and protection are the guest's own choice where it is unrestricted.
    let cr0 = capabilities.cr0 & !(1 << 31 | 1) | EXTENSION_TYPE | PROTECTED;
    for (field, value) in [
        (Field::GUEST_CR0, cr0),
        (Field::GUEST_CR3, 0),
        (Field::GUEST_CR4, capabilities.cr4),
        (Field::CR0_MASK, 0),
        (Field::CR4_MASK, 0),
        (Field::CR0_SHADOW, 0),
        (Field::CR4_SHADOW, 0),
        (Field::LINK_POINTER, u64::MAX),
        (Field::GUEST_DEBUG_CONTROL, 0),
        (Field::GUEST_EFER, 0),
        (Field::GUEST_GDTR_BASE, 0),
        (Field::GUEST_GDTR_LIMIT, 0),
        (Field::GUEST_IDTR_BASE, 0),
        (Field::GUEST_IDTR_LIMIT, 0),
        (Field::GUEST_INTERRUPTIBILITY, 0),
        (Field::GUEST_ACTIVITY, 0),
        (Field::GUEST_PENDING_DEBUG, 0),
        (Field::GUEST_SYSENTER_CS, 0),
        (Field::GUEST_SYSENTER_ESP, 0),
        (Field::GUEST_SYSENTER_EIP, 0),
        (Field::GUEST_DR7, 0x400),
        (Field::GUEST_RSP, 0),
        (Field::GUEST_RIP, entry),
        (Field::GUEST_RFLAGS, INTERRUPTS_ON),
    ] {
        write(field, value)?;
    }
    Ok(())
}

/// Let the guest go on at this address.
pub(super) fn set_rip(structure: &ControlStructure<'_>, rip: u64) -> Result<(), VmxError> {
    // SAFETY: wherever the guest goes on, it is under the same controls and tables.
    unsafe { structure.write(Field::GUEST_RIP, rip) }
}

/// Every exit that there can be for such a guest, no events, no lists of registers.
fn controls(processor: &VmxProcessor) -> Result<[(Field, u32); 13], Failure> {
    let capabilities = &processor.capabilities;
    let pins = pin::EXTERNAL_INTERRUPT_EXITING | pin::NMI_EXITING;
    let first = primary::HLT_EXITING | primary::UNCONDITIONAL_IO_EXITING | primary::SECONDARY;
    let second = secondary::ENABLE_EPT | secondary::UNRESTRICTED_GUEST;
    let exits = exit::HOST_64_BIT | exit::LOAD_EFER;
    Ok([
        (Field::PIN_CONTROLS, capabilities.pin.setting(pins)?),
        (Field::PRIMARY_CONTROLS, capabilities.primary.setting(first)?),
        (Field::SECONDARY_CONTROLS, capabilities.secondary.setting(second)?),
        (Field::EXIT_CONTROLS, capabilities.exit.setting(exits)?),
        (Field::ENTRY_CONTROLS, capabilities.entry.setting(entry::LOAD_EFER)?),
        (Field::EXCEPTION_BITMAP, u32::MAX),
        (Field::PAGE_FAULT_MASK, 0),
        (Field::PAGE_FAULT_MATCH, 0),
        (Field::CR3_TARGETS, 0),
        (Field::EXIT_MSR_STORES, 0),
        (Field::EXIT_MSR_LOADS, 0),
        (Field::ENTRY_MSR_LOADS, 0),
        (Field::ENTRY_EVENT, 0),
    ])
}

/// What an exit restores: this processor as it is now.
fn host() -> Result<[(Field, u64); 20], Failure> {
    let selector = |value: x86_64::structures::gdt::SegmentSelector| u64::from(value.0);
    let (cr3, cr3_flags) = Cr3::read_raw();
    let (task, task_base) = task_segment().context("a task segment")?;
    Ok([
        (Field::HOST_CR0, Cr0::read_raw()),
        (Field::HOST_CR3, cr3.start_address().as_u64() | u64::from(cr3_flags)),
        (Field::HOST_CR4, Cr4::read_raw()),
        (Field::HOST_ES_SELECTOR, selector(ES::get_reg())),
        (Field::HOST_CS_SELECTOR, selector(CS::get_reg())),
        (Field::HOST_SS_SELECTOR, selector(SS::get_reg())),
        (Field::HOST_DS_SELECTOR, selector(DS::get_reg())),
        (Field::HOST_FS_SELECTOR, selector(FS::get_reg())),
        (Field::HOST_GS_SELECTOR, selector(GS::get_reg())),
        (Field::HOST_TR_SELECTOR, u64::from(task)),
        (Field::HOST_FS_BASE, read_msr(msr::FS_BASE)),
        (Field::HOST_GS_BASE, read_msr(msr::GS_BASE)),
        (Field::HOST_TR_BASE, task_base),
        (Field::HOST_GDTR_BASE, sgdt().base.as_u64()),
        (Field::HOST_IDTR_BASE, sidt().base.as_u64()),
        (Field::HOST_SYSENTER_CS, read_msr(msr::SYSENTER_CS)),
        (Field::HOST_SYSENTER_ESP, read_msr(msr::SYSENTER_ESP)),
        (Field::HOST_SYSENTER_EIP, read_msr(msr::SYSENTER_EIP)),
        (Field::HOST_EFER, read_msr(msr::EFER)),
        (Field::HOST_RIP, ptr::addr_of!(vmx_exit).addr() as u64),
    ])
}

/// Selector and base of the task segment, from its descriptor of 16 bytes ("TSS Descriptor
/// in 64-bit mode").
fn task_segment() -> Option<(u16, u64)> {
    let selector: u16;
    // SAFETY: the instruction reads a register.
    unsafe { asm!("str {:x}", out(reg) selector, options(nomem, nostack, preserves_flags)) };
    let table = sgdt();
    let offset = u64::from(selector & !7);
    if offset == 0 || offset + 15 > u64::from(table.limit) {
        return None;
    }
    let descriptor = (table.base.as_u64() + offset) as *const [u64; 2];
    // SAFETY: the table is this processor's, static, and as long as its limit says. Its
    // entries are 8 bytes each; the processor sets no bit of a task segment in use.
    let [low, high] = unsafe { descriptor.read_unaligned() };
    let base = (low >> 16) & 0xff_ffff | (low >> 56) << 24 | high << 32;
    Some((selector, base))
}

/// One entry and one exit. The structure is current, set up, and `is_launched` says whether
/// it was entered before. Interrupts are off before and after; one that is pending ends the
/// stay at once.
pub(super) fn enter(registers: &mut Registers, is_launched: bool) -> Result<(), VmxError> {
    // SAFETY: `set_up` has filled the current structure in, on this processor. The assembly
    // keeps what the calling convention wants kept; guests use no floating point.
    let failed = unsafe { vmx_enter(registers, u64::from(is_launched)) };
    outcome(u8::from(failed == 2), u8::from(failed == 1))
}

unsafe extern "sysv64" {
    fn vmx_enter(registers: *mut Registers, is_launched: u64) -> u64;
}

// SAFETY: the assembly defines it; only its address is used.
unsafe extern "C" {
    safe static vmx_exit: u8;
}
