//! The page of the local interrupt controller, as a guest reads it.
//!
//! Nothing behind it is emulated: the page is ordinary memory that holds what a
//! controller would say of itself. A guest that writes there changes only what it reads.
//!
//! Source: AMD64 manual, volume 2, section 16.3.

use super::cpuid;

/// The registers that are not zero, as word of 32 bits and its value, for `vcpu`.
#[must_use]
pub const fn registers(vcpu: u32) -> [(usize, u32); 10] {
    const ID: usize = 0x20;
    const VERSION: usize = 0x30;
    const DESTINATION_FORMAT: usize = 0xe0;
    const SPURIOUS: usize = 0xf0;
    const LOCAL_VECTORS: [usize; 6] = [0x320, 0x330, 0x340, 0x350, 0x360, 0x370];
    const MASKED: u32 = 1 << 16;
    let [timer, thermal, counters, first, second, error] = LOCAL_VECTORS;
    [
        (ID / 4, cpuid::apic_id(vcpu) << 24),
        // Version 0x14, with the entries 0 to 5 of the local vector table.
        (VERSION / 4, 5 << 16 | 0x14),
        (DESTINATION_FORMAT / 4, u32::MAX),
        (SPURIOUS / 4, 0xff),
        (timer / 4, MASKED),
        (thermal / 4, MASKED),
        (counters / 4, MASKED),
        (first / 4, MASKED),
        (second / 4, MASKED),
        (error / 4, MASKED),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_controller_has_the_number_that_cpuid_tells() {
        for vcpu in 0..3 {
            let registers = registers(vcpu);
            assert_eq!(registers[0], (8, cpuid::apic_id(vcpu) << 24));
            assert!(registers.iter().all(|(word, _)| *word < 1024));
        }
    }
}
