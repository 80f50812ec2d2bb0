//! The maps of ports and model-specific registers that a guest may reach by itself.
//!
//! Both are memory that the processor reads at each access; a set bit is an intercept.

/// Registers that belong to the guest while it runs: VMLOAD and VMSAVE move them.
///
/// SYSENTER_CS, _ESP and _EIP; STAR, LSTAR, CSTAR and SFMASK; the bases of FS and GS and
/// the one that SWAPGS brings.
pub const MSRS_OF_THE_GUEST: [u32; 10] = [
    0x174,
    0x175,
    0x176,
    0xc000_0081,
    0xc000_0082,
    0xc000_0083,
    0xc000_0084,
    0xc000_0100,
    0xc000_0101,
    0xc000_0102,
];

/// The map of ports: 64 Ki bits, and some that an access to the last port runs into
/// (15.10.1).
#[derive(Debug)]
#[repr(C, align(4096))]
pub struct PortMap([u8; 3 << 12]);

impl PortMap {
    /// No port is the guest's.
    pub const CLOSED: Self = Self([0xff; 3 << 12]);
}

/// The map of model-specific registers: two bits for each, read and write (15.11).
#[derive(Debug)]
#[repr(C, align(4096))]
pub struct MsrMap([u8; 2 << 12]);

impl MsrMap {
    /// All are intercepted but those of [`MSRS_OF_THE_GUEST`].
    pub const GUEST: Self = Self::opened(&MSRS_OF_THE_GUEST);

    /// All are intercepted but these, of which each must be one that the map has.
    const fn opened(registers: &[u32]) -> Self {
        let mut map = [0xff; 2 << 12];
        let mut place = 0;
        while place < registers.len() {
            let (byte, shift) = Self::place(registers[place]);
            map[byte] &= !(3 << shift);
            place += 1;
        }
        Self(map)
    }

    /// Where the two bits of a register are. Two ranges of 8 Ki registers are used here:
    /// from 0 at offset 0, from C000_0000 at offset 0x800.
    const fn place(register: u32) -> (usize, u32) {
        let (offset, first) = if register < 0x2000 { (0, 0) } else { (0x800, 0xc000_0000) };
        let index = register - first;
        assert!(index < 0x2000, "a register that the map does not have");
        (offset + (index / 4) as usize, index % 4 * 2)
    }

    /// Whether a read and a write of the register would be intercepted.
    #[cfg(test)]
    fn intercepted(&self, register: u32) -> (bool, bool) {
        let (byte, shift) = Self::place(register);
        let bits = self.0[byte] >> shift;
        (bits & 1 != 0, bits & 2 != 0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_is_switched_is_the_guests() {
        let open = (0..0x2000).chain(0xc000_0000..0xc000_2000);
        let open = open.filter(|register| MsrMap::GUEST.intercepted(*register) != (true, true));
        assert!(open.eq(MSRS_OF_THE_GUEST));
        let both = MSRS_OF_THE_GUEST.iter().map(|register| MsrMap::GUEST.intercepted(*register));
        assert!(both.eq([(false, false); 10]));
        // The bits of EFER: 0x80 is the 33rd byte of the second range, first pair.
        assert_eq!(MsrMap::place(0xc000_0080), (0x820, 0));
    }
}
