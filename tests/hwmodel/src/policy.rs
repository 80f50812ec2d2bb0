//! How the hardware uses its freedom: keep everything, or act at random
//!
//! A [`Policy`] decides what happens where the manuals leave the hardware a choice.

/// What the hardware does where it may choose.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Policy {
    /// Keep every entry until a command forces it out; carry out commands as late as allowed. Finds the most.
    #[default]
    Greedy,
    /// Evict, prefetch and delay at random. The same seed gives the same run.
    Random(u64),
}

/// Marsaglia's xorshift64 generator with the shifts 13, 7, 17: small, repeatable, no better than it must be.
#[derive(Clone, Debug)]
pub(crate) struct Xorshift(u64);

impl Xorshift {
    pub(crate) fn new(seed: u64) -> Self {
        // Zero is the one state the generator never leaves.
        Self(if seed == 0 { 0x9e37_79b9_7f4a_7c15 } else { seed })
    }

    pub(crate) fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }
}

/// The policy and, for the random one, where its generator is.
#[derive(Clone, Debug)]
pub(crate) struct Whim {
    random: Option<Xorshift>,
}

impl Whim {
    pub(crate) fn new(policy: Policy) -> Self {
        Self {
            random: match policy {
                Policy::Greedy => None,
                Policy::Random(seed) => Some(Xorshift::new(seed)),
            },
        }
    }

    pub(crate) fn is_greedy(&self) -> bool {
        self.random.is_none()
    }

    /// True once in `one_in` times on average at random, never when greedy.
    pub(crate) fn chance(&mut self, one_in: u64) -> bool {
        match &mut self.random {
            None => false,
            Some(random) => random.next() % one_in.max(1) == 0,
        }
    }

    /// Any number below `bound` at random (0 for a bound of 0), 0 when greedy.
    pub(crate) fn below(&mut self, bound: usize) -> usize {
        match &mut self.random {
            None => 0,
            Some(random) => {
                let bound = bound.max(1) as u64;
                (random.next() % bound) as usize
            }
        }
    }
}
