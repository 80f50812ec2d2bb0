//! What CPUID tells a guest.
//!
//! Leaves from 0x4000_0000 on are the hypervisor's own. Of the processor's leaves a guest
//! sees what it may use: everything whose state the hypervisor does not keep apart for
//! each virtual processor is hidden, and so is whatever it does not emulate.
//!
//! Source: Xen's public header `arch-x86/cpuid.h`; AMD64 manual, volume 3, appendix E.

use super::version::VERSION;

/// The answer to one leaf.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Leaf {
    /// EAX.
    pub eax: u32,
    /// EBX.
    pub ebx: u32,
    /// ECX.
    pub ecx: u32,
    /// EDX.
    pub edx: u32,
}

/// Who asks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Asker {
    /// The domain.
    pub domain: u16,
    /// Its virtual processor.
    pub vcpu: u32,
    /// How many of them the domain has.
    pub vcpus: u32,
    /// Ticks of the time-stamp counter in a millisecond.
    pub kilohertz: u32,
}

/// The first leaf of the hypervisor.
pub const BASE: u32 = 0x4000_0000;
/// The last one.
const LAST: u32 = BASE + 4;
/// The register through which a guest asks for a hypercall page.
pub const HYPERCALL_PAGE: u32 = BASE;

/// Leaf 1, ECX.
mod feature_c {
    pub(super) const MONITOR: u32 = 1 << 3;
    pub(super) const VMX: u32 = 1 << 5;
    pub(super) const FMA: u32 = 1 << 12;
    pub(super) const X2APIC: u32 = 1 << 21;
    pub(super) const TSC_DEADLINE: u32 = 1 << 24;
    pub(super) const XSAVE: u32 = 1 << 26;
    pub(super) const OSXSAVE: u32 = 1 << 27;
    pub(super) const AVX: u32 = 1 << 28;
    pub(super) const F16C: u32 = 1 << 29;
    pub(super) const HYPERVISOR: u32 = 1 << 31;
    pub(super) const HIDDEN: u32 =
        MONITOR | VMX | FMA | X2APIC | TSC_DEADLINE | XSAVE | OSXSAVE | AVX | F16C;
}

/// Leaf 1, EDX.
mod feature_d {
    pub(super) const MCE: u32 = 1 << 7;
    pub(super) const MTRR: u32 = 1 << 12;
    pub(super) const MCA: u32 = 1 << 14;
    pub(super) const HIDDEN: u32 = MCE | MTRR | MCA;
}

/// Leaf 7: what may be seen. All of it is instructions, or bits of control registers.
mod structured {
    /// FSGSBASE, BMI1, SMEP, BMI2, ERMS, RDSEED, ADX, SMAP, CLFLUSHOPT, CLWB.
    pub(super) const B: u32 = 1 << 0
        | 1 << 3
        | 1 << 7
        | 1 << 8
        | 1 << 9
        | 1 << 18
        | 1 << 19
        | 1 << 20
        | 1 << 23
        | 1 << 24;
    /// UMIP, LA57.
    pub(super) const C: u32 = 1 << 2 | 1 << 16;
}

/// Leaf 0x8000_0001.
mod extended {
    /// SVM, XOP, skinit, watchdog, lightweight profiling, FMA4, topology, counters, MWAITX.
    pub(super) const HIDDEN_C: u32 = 1 << 2
        | 1 << 11
        | 1 << 12
        | 1 << 13
        | 1 << 15
        | 1 << 16
        | 1 << 22
        | 1 << 23
        | 1 << 24
        | 1 << 28
        | 1 << 29;
    /// MCE, MTRR, MCA, RDTSCP (its register is not kept apart).
    pub(super) const HIDDEN_D: u32 = 1 << 7 | 1 << 12 | 1 << 14 | 1 << 27;
}

/// Answer a guest. `host` is what the processor itself answers to the same question.
#[must_use]
pub fn answer(leaf: u32, subleaf: u32, asker: &Asker, host: Leaf) -> Leaf {
    match leaf {
        BASE..=0x4000_ffff => hypervisor(leaf, subleaf, asker),
        0 => Leaf { eax: host.eax.min(7), ..host },
        1 => {
            const CPUS: u32 = 0xff << 16;
            const APIC_ID: u32 = 0xff << 24;
            let id = apic_id(asker.vcpu) << 24;
            Leaf {
                ebx: host.ebx & !(CPUS | APIC_ID) | (asker.vcpus & 0xff) << 16 | id,
                ecx: host.ecx & !feature_c::HIDDEN | feature_c::HYPERVISOR,
                edx: host.edx & !feature_d::HIDDEN,
                ..host
            }
        }
        2 => host,
        7 if subleaf == 0 => {
            Leaf { eax: 0, ebx: host.ebx & structured::B, ecx: host.ecx & structured::C, edx: 0 }
        }
        0x8000_0000 => Leaf { eax: host.eax.min(0x8000_0008), ..host },
        0x8000_0001 => Leaf {
            ecx: host.ecx & !extended::HIDDEN_C,
            edx: host.edx & !extended::HIDDEN_D,
            ..host
        },
        0x8000_0002..=0x8000_0006 => host,
        // The counter's rate does not change with power states.
        0x8000_0007 => Leaf { edx: host.edx & 1 << 8, ..Leaf::default() },
        // Widths of addresses; one thread.
        0x8000_0008 => Leaf { eax: host.eax & 0xffff, ..Leaf::default() },
        _ => Leaf::default(),
    }
}

/// The number of a virtual processor's interrupt controller.
#[must_use]
pub const fn apic_id(vcpu: u32) -> u32 {
    vcpu.saturating_mul(2) & 0xff
}

/// The leaves of the hypervisor.
fn hypervisor(leaf: u32, subleaf: u32, asker: &Asker) -> Leaf {
    const VCPU_ID_PRESENT: u32 = 1 << 3;
    const DOMAIN_ID_PRESENT: u32 = 1 << 4;
    let word = |bytes| u32::from_le_bytes(bytes);
    match leaf - BASE {
        0 => Leaf { eax: LAST, ebx: word(*b"XenV"), ecx: word(*b"MMXe"), edx: word(*b"nVMM") },
        1 => Leaf { eax: VERSION, ..Leaf::default() },
        2 => Leaf { eax: 1, ebx: HYPERCALL_PAGE, ..Leaf::default() },
        3 if subleaf == 0 => Leaf { ecx: asker.kilohertz, ..Leaf::default() },
        3 if subleaf == 2 => Leaf { eax: asker.kilohertz, ..Leaf::default() },
        4 => Leaf {
            eax: VCPU_ID_PRESENT | DOMAIN_ID_PRESENT,
            ebx: asker.vcpu,
            ecx: u32::from(asker.domain),
            edx: 0,
        },
        _ => Leaf::default(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ASKER: Asker = Asker { domain: 5, vcpu: 1, vcpus: 2, kilohertz: 1000 };
    const ALL: Leaf = Leaf { eax: u32::MAX, ebx: u32::MAX, ecx: u32::MAX, edx: u32::MAX };

    fn of(leaf: u32) -> Leaf {
        answer(leaf, 0, &ASKER, ALL)
    }

    #[test]
    fn the_hypervisor_names_itself_and_its_page() {
        let Leaf { eax, ebx, ecx, edx } = of(BASE);
        let name = [ebx, ecx, edx].map(u32::to_le_bytes).concat();
        assert_eq!((eax, name.as_slice()), (BASE + 4, b"XenVMMXenVMM".as_slice()));
        assert_eq!(of(BASE + 1).eax, 0x4_0011);
        assert_eq!((of(BASE + 2).eax, of(BASE + 2).ebx), (1, 0x4000_0000));
        assert_eq!(of(BASE + 4), Leaf { eax: 0x18, ebx: 1, ecx: 5, edx: 0 });
        assert_eq!(of(BASE + 5), Leaf::default());
    }

    #[test]
    fn a_guest_sees_a_hypervisor_and_no_way_to_be_one() {
        assert_ne!(of(1).ecx & feature_c::HYPERVISOR, 0);
        assert_eq!(of(1).ecx & (feature_c::VMX | feature_c::X2APIC | feature_c::XSAVE), 0);
        assert_eq!(of(0x8000_0001).ecx & 1 << 2, 0);
        assert_eq!(of(0x8000_000a), Leaf::default());
        assert_eq!(of(0xd), Leaf::default());
    }

    #[test]
    fn each_processor_has_its_own_number() {
        assert_eq!(of(1).ebx >> 24, 2);
        assert_eq!(of(1).ebx >> 16 & 0xff, 2);
        assert_eq!((of(0).eax, of(0x8000_0000).eax), (7, 0x8000_0008));
    }

    #[test]
    fn what_the_processor_lacks_a_guest_does_not_get() {
        for leaf in (0..32).chain(0x8000_0000..0x8000_0020) {
            let seen = answer(leaf, 0, &ASKER, Leaf::default());
            let ours = Leaf { ebx: 0x0202_0000, ecx: feature_c::HYPERVISOR, ..Leaf::default() };
            assert_eq!(seen, if leaf == 1 { ours } else { Leaf::default() }, "leaf {leaf:#x}");
        }
    }
}
