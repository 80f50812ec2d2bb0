//! Intel: the EPT pointer and INVEPT.
//!
//! An [`Eptp`] names a p2m to the hardware, and [`Ept`] makes the CPU that runs it
//! forget that p2m. A [`VmxRoot`] says that the CPU can execute INVEPT at all.
//!
//! After the Intel SDM, volume 3C. Editions number its chapters differently, so sections
//! go by their titles here: "Extended-Page-Table Pointer (EPTP)", "Creating and Using
//! Cached Translation Information", "Guidelines for Use of the INVEPT Instruction", and
//! INVEPT in "VMX Instruction Reference". Capability bits: appendix A, "VPID and EPT
//! Capabilities".

// UNSAFETY: INVEPT is an instruction that no safe function offers.
#![expect(unsafe_code)]

use core::{arch::asm, error, fmt, marker::PhantomData};

use flush::Mfn;

use crate::cpus::Invalidate;

/// Bits 2:0 of an EPTP: the tables are read through the caches (write-back is 6).
const WRITE_BACK: u64 = 6;
/// Bits 5:3 of an EPTP hold the levels less one.
const WALK_LENGTH_SHIFT: u32 = 3;
/// Bit 6 of an EPTP: hardware sets accessed and dirty bits.
const ACCESSED_DIRTY: u64 = 1 << 6;
/// The frame of the root is in bits 51:12.
const FRAME_SHIFT: u32 = 12;
const FRAME_BITS: u32 = 40;

/// An EPT pointer: the root of the tables and how to walk them.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Eptp(u64);

/// Whether hardware sets the accessed and dirty bits of entries.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AccessedDirty {
    /// It leaves them alone.
    Off,
    /// It sets them: needs bit 21 of IA32_VMX_EPT_VPID_CAP.
    On,
}

impl Eptp {
    /// The pointer to `root`, whose tables have 4 or 5 levels and are read write-back.
    ///
    /// `None` for another number of levels (5 needs bit 7 of IA32_VMX_EPT_VPID_CAP) or
    /// a root beyond 52 bits of address.
    #[must_use]
    pub const fn new(root: Mfn, levels: u8, accessed_dirty: AccessedDirty) -> Option<Self> {
        let walk_length = match levels {
            4 => 3,
            5 => 4,
            _ => return None,
        };
        if root.get() >> FRAME_BITS != 0 {
            return None;
        }
        let marks = match accessed_dirty {
            AccessedDirty::Off => 0,
            AccessedDirty::On => ACCESSED_DIRTY,
        };
        let root = root.get() << FRAME_SHIFT;
        Some(Self(root | marks | walk_length << WALK_LENGTH_SHIFT | WRITE_BACK))
    }

    /// The value for the VMCS field.
    #[must_use]
    pub const fn bits(self) -> u64 {
        self.0
    }
}

impl fmt::Debug for Eptp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Eptp({:#x})", self.0)
    }
}

/// What INVEPT forgets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scope {
    /// Everything derived from one EPTP: INVEPT type 1.
    SingleContext(Eptp),
    /// Everything derived from any EPTP: INVEPT type 2.
    AllContexts,
}

impl Scope {
    const fn operands(self) -> (u64, Descriptor) {
        match self {
            Self::SingleContext(eptp) => (1, Descriptor { eptp: eptp.0, reserved: 0 }),
            Self::AllContexts => (2, Descriptor { eptp: 0, reserved: 0 }),
        }
    }
}

/// The memory operand of INVEPT: the EPTP in the low half, zero in the high half.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C, align(16))]
struct Descriptor {
    eptp: u64,
    reserved: u64,
}

const _: () = assert!(size_of::<Descriptor>() == 16);

/// INVEPT failed: the CPU may have forgotten nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum InveptError {
    /// VMfailInvalid: no VMCS is current, so there is no error number.
    Invalid,
    /// VMfailValid: the error number is in the VM-instruction error field of the
    /// current VMCS (28 for a bad operand).
    Valid,
}

impl InveptError {
    /// What the carry and zero flags say after a VMX instruction ("VMX Instruction
    /// Reference", "Conventions").
    const fn from_flags(carry: bool, zero: bool) -> Result<(), Self> {
        match (carry, zero) {
            (true, _) => Err(Self::Invalid),
            (false, true) => Err(Self::Valid),
            (false, false) => Ok(()),
        }
    }
}

impl fmt::Display for InveptError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Invalid => "INVEPT failed without a current VMCS",
            Self::Valid => "INVEPT failed, see the VM-instruction error field",
        })
    }
}

impl error::Error for InveptError {}

/// Says that the CPU which runs this can execute INVEPT. It stays on that CPU.
#[derive(Debug)]
pub struct VmxRoot(PhantomData<*mut ()>);

impl VmxRoot {
    /// Takes the caller's word.
    ///
    /// # Safety
    ///
    /// While the value lives, on the CPU that made it:
    /// 1. the CPU is in VMX root operation, at privilege level 0, in 64-bit mode;
    /// 2. IA32_VMX_EPT_VPID_CAP has bits 20 (INVEPT), 25 (single-context) and 26
    ///    (all-context) set;
    /// 3. the code that uses the value does not move to another CPU.
    #[must_use]
    pub const unsafe fn assume() -> Self {
        Self(PhantomData)
    }

    /// Makes this CPU forget all guest-physical and combined mappings of `scope`,
    /// walk caches included.
    ///
    /// # Errors
    ///
    /// See [`InveptError`].
    pub fn invept(&self, scope: Scope) -> Result<(), InveptError> {
        let (kind, descriptor) = scope.operands();
        let (carry, zero): (u8, u8);
        // SAFETY: the instruction exists and is permitted here, by conditions 1 to 3 of
        // `VmxRoot::assume`. It reads 16 bytes, which `descriptor` is, writes no memory
        // and no register but the flags. Forgetting a translation never makes an access
        // wrong. The compiler must not move memory accesses across it, and does not, for
        // the block does not claim `nomem`.
        unsafe {
            asm!(
                "invept {kind}, xmmword ptr [{descriptor}]",
                "setc {carry}",
                "setz {zero}",
                kind = in(reg) kind,
                descriptor = in(reg) &raw const descriptor,
                carry = out(reg_byte) carry,
                zero = out(reg_byte) zero,
                options(nostack),
            );
        }
        InveptError::from_flags(carry != 0, zero != 0)
    }
}

/// One p2m, as the CPU that runs this knows it.
///
/// Its tag is the EPTP, whichever vCPU runs, so it goes with
/// [`GuestCpus::enter`](crate::GuestCpus::enter).
#[derive(Debug)]
pub struct Ept<'a> {
    /// The CPU.
    pub cpu: &'a VmxRoot,
    /// The p2m.
    pub eptp: Eptp,
}

impl Invalidate for Ept<'_> {
    type Error = InveptError;

    fn invalidate(&self) -> Result<(), InveptError> {
        self.cpu.invept(Scope::SingleContext(self.eptp))
    }
}

static_assertions::assert_not_impl_any!(VmxRoot: Send, Sync, Clone);

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn check(root: u64, levels: u8, marks: AccessedDirty, bits: Option<u64>) {
        assert_eq!(Eptp::new(Mfn::new(root), levels, marks).map(Eptp::bits), bits);
    }

    #[test]
    fn an_eptp_holds_root_levels_and_memory_type_and_nothing_else() {
        check(0x1234, 4, AccessedDirty::Off, Some(0x0123_401e));
        check(0x1234, 4, AccessedDirty::On, Some(0x0123_405e));
        check(0x1234, 5, AccessedDirty::Off, Some(0x0123_4026));
        check(0xff_ffff_ffff, 5, AccessedDirty::On, Some(0x000f_ffff_ffff_f066));
        check(0x100_0000_0000, 4, AccessedDirty::Off, None);
        check(u64::MAX, 4, AccessedDirty::Off, None);
        for levels in [0, 3, 6, 255] {
            check(0x1234, levels, AccessedDirty::Off, None);
        }
    }

    #[test]
    fn each_scope_has_its_type_and_a_descriptor_with_a_zero_upper_half() {
        let eptp = Eptp::new(Mfn::new(7), 4, AccessedDirty::Off).expect("small root");
        let operands = Scope::SingleContext(eptp).operands();
        assert_eq!(operands, (1, Descriptor { eptp: 0x701e, reserved: 0 }));
        assert_eq!(Scope::AllContexts.operands(), (2, Descriptor { eptp: 0, reserved: 0 }));
    }

    #[test]
    fn either_flag_is_a_failure() {
        assert_eq!(InveptError::from_flags(false, false), Ok(()));
        assert_eq!(InveptError::from_flags(true, false), Err(InveptError::Invalid));
        assert_eq!(InveptError::from_flags(false, true), Err(InveptError::Valid));
    }
}
