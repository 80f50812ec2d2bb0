//! One gate of the interrupt descriptor table, as two words.
//!
//! Layout: Intel SDM volume 3A, section 7.14.1, figure 7-8 (64-bit IDT gate).

/// An interrupt gate for ring 0: the handler starts with interrupts off.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub struct Gate {
    low: u64,
    high: u64,
}

impl Gate {
    /// The gate to the code at `handler` in segment `selector`.
    ///
    /// `stack` is the entry of the interrupt stack table to switch to, 1 to 7; 0 keeps
    /// the stack, and only the low three bits count.
    #[must_use]
    pub const fn interrupt(handler: u64, selector: u16, stack: u8) -> Self {
        const PRESENT_INTERRUPT_GATE: u64 = 0x8e << 40;
        let low = handler & 0xffff
            | (selector as u64) << 16
            | ((stack & 7) as u64) << 32
            | PRESENT_INTERRUPT_GATE
            | ((handler >> 16) & 0xffff) << 48;
        Self { low, high: handler >> 32 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_handler_address_is_spread_over_three_fields() {
        let gate = Gate::interrupt(0x1122_3344_5566_7788, 8, 9);
        assert_eq!(gate.low, 0x5566_8e01_0008_7788);
        assert_eq!(gate.high, 0x1122_3344);
    }
}
