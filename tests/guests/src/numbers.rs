//! Numbers that look random, the same ones each time.

/// A linear congruence, of which the high bits are used (Knuth's MMIX constants).
pub(crate) struct Numbers(u64);

impl Numbers {
    /// Those that follow from a seed.
    pub(crate) const fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// 31 bits.
    fn next(&mut self) -> u64 {
        const FACTOR: u64 = 6_364_136_223_846_793_005;
        const SUMMAND: u64 = 1_442_695_040_888_963_407;
        // Modulo 2^64 is what the congruence is made for.
        self.0 = self.0.wrapping_mul(FACTOR).wrapping_add(SUMMAND);
        self.0 >> 33
    }

    /// A number below `limit`, which is not zero.
    pub(crate) fn below(&mut self, limit: u64) -> u64 {
        self.next() % limit
    }

    /// 64 bits, of which often few are set.
    pub(crate) fn word(&mut self) -> u64 {
        let word = self.next() << 33 ^ self.next() << 11 ^ self.next();
        match self.below(4) {
            0 => word,
            1 => word & 0xffff,
            2 => word & 0xf,
            _ => 1 << (word % 64),
        }
    }
}
