//! Model-specific registers that guests read and write through the hypervisor.
//!
//! Those that the processor keeps for each guest (segment bases, system calls, EFER, the
//! page attribute table) never come here. The others are constants, or are not there.
//!
//! Source: AMD64 manual, volume 2, appendix A.

use super::cpuid;

/// The base of the local interrupt controller, on, of the first processor or another.
const APIC_BASE: u32 = 0x1b;
/// The memory type ranges: none.
const MTRR_CAPABILITY: u32 = 0xfe;
const MTRR_DEFAULT: u32 = 0x2ff;
/// The microcode's level.
const PATCH_LEVEL: u32 = 0x8b;
/// The machine check banks: none.
const MACHINE_CHECK_CAPABILITY: u32 = 0x179;
const MACHINE_CHECK_STATUS: u32 = 0x17a;
/// System configuration, of AMD.
const SYSTEM_CONFIGURATION: u32 = 0xc001_0010;
const HARDWARE_CONFIGURATION: u32 = 0xc001_0015;

/// What a write does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Write {
    /// Nothing: the register exists.
    Ignored,
    /// Put a hypercall page at this guest frame number.
    HypercallPage(u64),
    /// The register does not exist, or not with this value: the guest gets #GP.
    Refused,
}

/// What virtual processor `vcpu` reads, or `None` for #GP.
#[must_use]
pub const fn read(register: u32, vcpu: u32) -> Option<u64> {
    const ENABLED: u64 = 1 << 11;
    const FIRST: u64 = 1 << 8;
    match register {
        APIC_BASE => {
            let first = if vcpu == 0 { FIRST } else { 0 };
            Some(crate::start_info::APIC_PAGE << 12 | ENABLED | first)
        }
        PATCH_LEVEL
        | MTRR_CAPABILITY
        | MTRR_DEFAULT
        | MACHINE_CHECK_CAPABILITY
        | MACHINE_CHECK_STATUS
        | SYSTEM_CONFIGURATION
        | HARDWARE_CONFIGURATION => Some(0),
        _ => None,
    }
}

/// What it does when virtual processor `vcpu` writes `value`.
#[must_use]
pub fn write(register: u32, value: u64, vcpu: u32) -> Write {
    match register {
        cpuid::HYPERCALL_PAGE => {
            // The low bits number the page, of which there is one.
            if value & 0xfff == 0 { Write::HypercallPage(value >> 12) } else { Write::Refused }
        }
        // It stays where it is, and on.
        APIC_BASE if read(APIC_BASE, vcpu) == Some(value) => Write::Ignored,
        PATCH_LEVEL | MACHINE_CHECK_STATUS => Write::Ignored,
        _ => Write::Refused,
    }
}

/// EFER after a guest has written `value`, or `None` for #GP (volume 2, section 3.1.7).
///
/// Whether long mode is active is the processor's to say; whether it is enabled cannot be
/// changed while the guest's paging is on. Virtualization is not for guests.
#[must_use]
pub const fn efer(old: u64, value: u64, cr0: u64) -> Option<u64> {
    const SYSTEM_CALLS: u64 = 1 << 0;
    const LONG_MODE: u64 = 1 << 8;
    const LONG_MODE_ACTIVE: u64 = 1 << 10;
    const NO_EXECUTE: u64 = 1 << 11;
    const FAST_SAVE: u64 = 1 << 14;
    const PAGING: u64 = 1 << 31;
    let known = SYSTEM_CALLS | LONG_MODE | LONG_MODE_ACTIVE | NO_EXECUTE | FAST_SAVE;
    if value & !known != 0 || (cr0 & PAGING != 0 && (old ^ value) & LONG_MODE != 0) {
        return None;
    }
    Some(value & !LONG_MODE_ACTIVE | old & LONG_MODE_ACTIVE)
}

/// Whether all eight fields are memory types (volume 2, section 7.8.1).
#[must_use]
pub fn is_page_attribute_table(value: u64) -> bool {
    value.to_le_bytes().iter().all(|kind| matches!(kind, 0 | 1 | 4..=7))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_interrupt_controller_is_on_and_stays_where_it_is() {
        assert_eq!(read(0x1b, 0), Some(0xfee0_0900));
        assert_eq!(read(0x1b, 1), Some(0xfee0_0800));
        assert_eq!(write(0x1b, 0xfee0_0900, 0), Write::Ignored);
        assert_eq!(write(0x1b, 0xfee0_0d00, 0), Write::Refused, "no x2APIC");
    }

    #[test]
    fn the_hypercall_page_goes_where_the_guest_says() {
        assert_eq!(write(0x4000_0000, 0x12_3000, 0), Write::HypercallPage(0x123));
        assert_eq!(write(0x4000_0000, 0x12_3001, 0), Write::Refused);
        assert_eq!(read(0x4000_0000, 0), None);
    }

    #[test]
    fn a_register_that_is_not_there_is_refused() {
        for register in [0x1a0, 0x802, 0xc000_0103, u32::MAX] {
            assert_eq!(read(register, 0), None);
            assert_eq!(write(register, 0, 0), Write::Refused);
        }
    }

    #[test]
    fn long_mode_is_turned_on_before_paging_and_virtualization_never() {
        const PAGING: u64 = 1 << 31;
        assert_eq!(efer(0, 0x901, 0), Some(0x901));
        assert_eq!(efer(0x500, 0x101, PAGING), Some(0x501), "the processor's bit stays");
        assert_eq!(efer(0x500, 0x401, PAGING), None);
        assert_eq!(efer(0, 0x100, PAGING), None);
        assert_eq!(efer(0, 1 << 12, 0), None);
        assert_eq!(efer(0, 1 << 63, 0), None);
    }

    #[test]
    fn a_page_attribute_table_has_memory_types_only() {
        assert!(is_page_attribute_table(0x0007_0406_0007_0406));
        assert!(is_page_attribute_table(0x0100_0501_0007_0406));
        for place in 0..8 {
            for kind in [2_u64, 3, 8, 0x80] {
                assert!(!is_page_attribute_table(kind << (8 * place)), "{kind} at {place}");
            }
        }
    }
}
