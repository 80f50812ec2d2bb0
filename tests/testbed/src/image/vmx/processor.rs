//! Turning VMX on, and the instructions that work on a VMCS.
//!
//! A [`VmxProcessor`] is in VMX root operation from its making to its end, on the
//! processor that made it, which it cannot leave. Sections: "Enabling and Entering VMX
//! Operation", "Restrictions on VMX Operation", "VMX Instruction Reference".

// UNSAFETY: model-specific registers, and instructions that no safe function offers.
#![expect(unsafe_code)]

use core::arch::asm;
use core::arch::x86_64::__cpuid;
use core::fmt;

use flush::Mfn;
use p2m::hardware::vmx::{Ept, Eptp, InveptError, Scope, VmxRoot};
use testbed::address::PhysicalAddress;
use testbed::failure::{Context as _, Failure};
use testbed::vmx::Capability;
use x86_64::registers::control::{Cr0, Cr4, Cr4Flags};
use x86_64::registers::model_specific::Msr;

use super::spec::{Field, basic, ept_vpid, feature_control, msr};
use crate::memory;

/// VMX is on.
pub(crate) struct VmxProcessor {
    /// The right to execute INVEPT.
    root: VmxRoot,
    /// What controls may be.
    pub(super) capabilities: Capabilities,
    /// The revision that a VMCS opens with.
    revision: u64,
    /// The VMXON region.
    region: Mfn,
}

/// What the fields of a VMCS may hold on this processor, and what its EPT can do.
pub(super) struct Capabilities {
    pub(super) pin: Capability,
    pub(super) primary: Capability,
    pub(super) secondary: Capability,
    pub(super) exit: Capability,
    pub(super) entry: Capability,
    /// Bits of CR0 that must be 1, those for paging and protection apart.
    pub(super) cr0: u64,
    /// Bits of CR4 that must be 1.
    pub(super) cr4: u64,
    ept_vpid: u64,
}

/// What a processor lacks for running guests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum NotCapable {
    /// VMX: bit 5 of ECX of CPUID leaf 1.
    NoVmx,
    /// Firmware has locked VMX off: IA32_FEATURE_CONTROL.
    LockedOff,
    /// The capability MSRs named TRUE, or write-back VMCS regions.
    OldControls,
    /// Some of what is needed of EPT: these bits of IA32_VMX_EPT_VPID_CAP.
    Ept(u64),
    /// CR0 or CR4 as VMX wants it.
    ControlRegisters,
}

impl fmt::Display for NotCapable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NoVmx => f.write_str("the processor has no VMX: `cargo xtask bochs` has one"),
            Self::LockedOff => f.write_str("firmware has locked VMX off"),
            Self::OldControls => f.write_str("the processor's VMX is too old"),
            Self::Ept(bits) => write!(f, "the processor's EPT lacks {bits:#x}"),
            Self::ControlRegisters => f.write_str("CR0 or CR4 is not as VMX needs it"),
        }
    }
}

impl core::error::Error for NotCapable {}

/// A VMX instruction failed ("VMX Instruction Reference", "Conventions").
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum VmxError {
    /// VMfailInvalid: there is no current VMCS to hold a number.
    Invalid,
    /// VMfailValid, with the number of "VM Instruction Error Numbers".
    Valid(u64),
}

impl fmt::Display for VmxError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Invalid => f.write_str("a VMX instruction failed without a current VMCS"),
            Self::Valid(number) => write!(f, "a VMX instruction failed with error {number}"),
        }
    }
}

impl core::error::Error for VmxError {}

impl VmxProcessor {
    /// Turn VMX on for the processor that runs this.
    ///
    /// # Errors
    /// If it cannot run guests under EPT with INVEPT, or VMX is on already.
    pub(crate) fn turn_on() -> Result<Self, Failure> {
        if __cpuid(1).ecx & 1 << 5 == 0 {
            return Err(NotCapable::NoVmx.into());
        }
        allow_vmx()?;
        let capabilities = Capabilities::read()?;
        let revision = read_msr(msr::BASIC) & basic::REVISION;
        let region = region(revision)?;
        let address = PhysicalAddress::of_frame(region).context("the VMXON region")?.get();
        // SAFETY: the bit exists, since the processor has VMX, and allows one instruction.
        unsafe { Cr4::update(|flags| flags.insert(Cr4Flags::VIRTUAL_MACHINE_EXTENSIONS)) };
        let on = if control_registers_fit() {
            // SAFETY: VMX is allowed, control registers are as it wants them, and the
            // region is a managed frame of its own, opened by the revision.
            unsafe { vmxon(address) }.map_err(Failure::from)
        } else {
            Err(NotCapable::ControlRegisters.into())
        };
        if let Err(failure) = on {
            memory::release(region)?;
            return Err(failure);
        }
        // SAFETY: VMXON succeeded and only the end of this value undoes it. The image runs
        // in 64-bit ring 0. `Capabilities::read` found INVEPT and both types. Neither this
        // value nor a reference to it can go to another processor: `VmxRoot` is neither
        // `Send` nor `Sync`.
        let root = unsafe { VmxRoot::assume() };
        Ok(Self { root, capabilities, revision, region })
    }

    /// What makes this processor forget the tables of `eptp`.
    pub(crate) const fn local(&self, eptp: Eptp) -> Ept<'_> {
        Ept { cpu: &self.root, eptp }
    }

    /// Execute INVEPT.
    ///
    /// # Errors
    /// As `p2m` tells it.
    pub(crate) fn invept(&self, scope: Scope) -> Result<(), InveptError> {
        self.root.invept(scope)
    }

    /// A new VMCS, neither active nor launched.
    ///
    /// # Errors
    /// If memory is short, or the processor refuses the region.
    pub(super) fn control_structure(&self) -> Result<ControlStructure<'_>, Failure> {
        let region = region(self.revision)?;
        let structure = ControlStructure { _processor: self, region };
        structure.clear()?;
        Ok(structure)
    }
}

impl Drop for VmxProcessor {
    fn drop(&mut self) {
        // SAFETY: this is the processor that is in VMX operation, and no VMCS is active,
        // since each borrows this value and clears itself at its end. INVEPT is executed
        // through `root` alone, which ends here too.
        unsafe { asm!("vmxoff", options(nostack)) };
        // The region was allocated and is released once, so this cannot be refused.
        memory::release(self.region).ok();
    }
}

impl Capabilities {
    fn read() -> Result<Self, NotCapable> {
        const NEEDED: u64 = ept_vpid::FOUR_LEVELS | ept_vpid::WRITE_BACK | ept_vpid::INVEPT;
        const WRITE_BACK: u64 = 6;
        let basic = read_msr(msr::BASIC);
        let regions = (basic >> basic::MEMORY_TYPE_SHIFT) & 0xf;
        if basic & basic::TRUE_CONTROLS == 0 || regions != WRITE_BACK {
            return Err(NotCapable::OldControls);
        }
        let ept_vpid = read_msr(msr::EPT_VPID);
        if ept_vpid & NEEDED != NEEDED {
            return Err(NotCapable::Ept(NEEDED & !ept_vpid));
        }
        let capability = |register| Capability(read_msr(register));
        Ok(Self {
            pin: capability(msr::TRUE_PIN),
            primary: capability(msr::TRUE_PRIMARY),
            secondary: capability(msr::SECONDARY),
            exit: capability(msr::TRUE_EXIT),
            entry: capability(msr::TRUE_ENTRY),
            cr0: read_msr(msr::CR0_FIXED_0),
            cr4: read_msr(msr::CR4_FIXED_0),
            ept_vpid,
        })
    }

    /// Whether leaves of 2 MiB, and of 1 GiB, are possible.
    pub(super) const fn large_leaves(&self) -> (bool, bool) {
        (self.ept_vpid & ept_vpid::LEAF_2M != 0, self.ept_vpid & ept_vpid::LEAF_1G != 0)
    }
}

/// One VMCS. It is active on its processor, at most, and cleared at its end.
pub(super) struct ControlStructure<'p> {
    _processor: &'p VmxProcessor,
    region: Mfn,
}

impl ControlStructure<'_> {
    /// Make it neither active, current nor launched.
    fn clear(&self) -> Result<(), VmxError> {
        self.by_address(|address| {
            let (carry, zero): (u8, u8);
            // SAFETY: VMX is on, since the processor is borrowed. The region is a managed
            // frame that this value owns, and the processor alone writes it.
            unsafe {
                asm!("vmclear qword ptr [{}]", "setc {}", "setz {}", in(reg) &raw const address,
                    out(reg_byte) carry, out(reg_byte) zero, options(nostack));
            }
            outcome(carry, zero)
        })
    }

    /// Make it the one that reads, writes and entries work on.
    pub(super) fn make_current(&self) -> Result<(), VmxError> {
        self.by_address(|address| {
            let (carry, zero): (u8, u8);
            // SAFETY: as in `clear`.
            unsafe {
                asm!("vmptrld qword ptr [{}]", "setc {}", "setz {}", in(reg) &raw const address,
                    out(reg_byte) carry, out(reg_byte) zero, options(nostack));
            }
            outcome(carry, zero)
        })
    }

    /// A field, after [`make_current`](Self::make_current).
    pub(super) fn read(&self, field: Field) -> Result<u64, VmxError> {
        read_current(field)
    }

    /// Set a field, after [`make_current`](Self::make_current).
    ///
    /// # Safety
    /// Entering with the field so set must be sound: the host state is that of this
    /// processor, and the tables of the guest show it no memory that Rust relies on.
    pub(super) unsafe fn write(&self, field: Field, value: u64) -> Result<(), VmxError> {
        let (carry, zero): (u8, u8);
        // SAFETY: VMX is on. Nothing happens before the next entry, and what that needs
        // the caller vouches for.
        unsafe {
            asm!("vmwrite {}, {}", "setc {}", "setz {}", in(reg) u64::from(field.0),
                in(reg) value, out(reg_byte) carry, out(reg_byte) zero, options(nostack));
        }
        outcome(carry, zero)
    }

    fn by_address(
        &self,
        instruction: impl FnOnce(u64) -> Result<(), VmxError>,
    ) -> Result<(), VmxError> {
        instruction(PhysicalAddress::of_frame(self.region).ok_or(VmxError::Invalid)?.get())
    }
}

impl Drop for ControlStructure<'_> {
    fn drop(&mut self) {
        // A region that could not be cleared may still be written by the processor, so it
        // is nobody else's from now on.
        if self.clear().is_ok() {
            memory::release(self.region).ok();
        }
    }
}

/// A frame that opens with the revision.
fn region(revision: u64) -> Result<Mfn, Failure> {
    let region = memory::allocate()?;
    let words = memory::words(region).context("a region for VMX")?;
    words[0].store(revision, core::sync::atomic::Ordering::SeqCst);
    Ok(region)
}

fn read_current(field: Field) -> Result<u64, VmxError> {
    let (value, carry, zero): (u64, u8, u8);
    // SAFETY: VMX is on where this is called from, and reading changes nothing.
    unsafe {
        asm!("vmread {}, {}", "setc {}", "setz {}", out(reg) value,
            in(reg) u64::from(field.0), out(reg_byte) carry, out(reg_byte) zero,
            options(nostack));
    }
    match (carry, zero) {
        (0, 0) => Ok(value),
        // Not the number of this failure, lest one failure leads to the next.
        (0, _) => Err(VmxError::Valid(0)),
        (..) => Err(VmxError::Invalid),
    }
}

/// What carry and zero say after a VMX instruction.
pub(super) fn outcome(carry: u8, zero: u8) -> Result<(), VmxError> {
    match (carry, zero) {
        (0, 0) => Ok(()),
        (0, _) => Err(VmxError::Valid(read_current(Field::INSTRUCTION_ERROR)?)),
        (..) => Err(VmxError::Invalid),
    }
}

/// Allow VMXON, unless firmware has decided otherwise for good.
fn allow_vmx() -> Result<(), NotCapable> {
    use feature_control::{LOCKED, VMX_OUTSIDE_SMX};
    let control = read_msr(msr::FEATURE_CONTROL);
    if control & LOCKED == 0 {
        // SAFETY: a processor with VMX has the register, and while it is not locked, the
        // two bits may be set.
        unsafe { Msr::new(msr::FEATURE_CONTROL).write(control | LOCKED | VMX_OUTSIDE_SMX) };
        return Ok(());
    }
    if control & VMX_OUTSIDE_SMX == 0 { Err(NotCapable::LockedOff) } else { Ok(()) }
}

/// Whether CR0 and CR4 have every bit that must be set and none that must not.
fn control_registers_fit() -> bool {
    let fits = |value: u64, must: u32, may: u32| {
        value & read_msr(must) == read_msr(must) && value & !read_msr(may) == 0
    };
    fits(Cr0::read_raw(), msr::CR0_FIXED_0, msr::CR0_FIXED_1)
        && fits(Cr4::read_raw(), msr::CR4_FIXED_0, msr::CR4_FIXED_1)
}

/// A register of a processor that has VMX.
pub(super) fn read_msr(register: u32) -> u64 {
    // SAFETY: callers name registers of `spec::msr`, which every 64-bit processor with
    // VMX and TRUE controls has; reading them changes nothing.
    unsafe { Msr::new(register).read() }
}

/// # Safety
/// VMX must be allowed, CR0 and CR4 as it wants them, and the region at `address` nobody
/// else's until VMXOFF.
unsafe fn vmxon(address: u64) -> Result<(), VmxError> {
    let (carry, zero): (u8, u8);
    // SAFETY: by the caller's word.
    unsafe {
        asm!("vmxon qword ptr [{}]", "setc {}", "setz {}", in(reg) &raw const address,
            out(reg_byte) carry, out(reg_byte) zero, options(nostack));
    }
    // There is no current VMCS whose error number could be read.
    if carry == 0 && zero == 0 { Ok(()) } else { Err(VmxError::Invalid) }
}
