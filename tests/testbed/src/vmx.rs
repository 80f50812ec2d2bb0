//! Words that VMX hands out: what controls may be, and why a guest was left.
//!
//! After the Intel SDM, volume 3C. Editions number its chapters differently, so sections
//! go by their titles here.

use core::fmt;

/// Which settings a control field can have: one of the VMX capability MSRs.
///
/// Appendix A, "VM-Execution Controls" and the sections for exit and entry controls: the
/// low half has the bits that must be 1, the high half those that may be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Capability(pub u64);

/// A control that this processor does not have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Unsupported {
    /// The bits that were asked for and cannot be set.
    pub bits: u32,
}

impl fmt::Display for Unsupported {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "this processor lacks the VMX controls {:#x}", self.bits)
    }
}

impl core::error::Error for Unsupported {}

impl Capability {
    /// The field that sets `wanted`, and besides only what must be set.
    ///
    /// # Errors
    /// [`Unsupported`] if a bit of `wanted` cannot be set.
    pub const fn setting(self, wanted: u32) -> Result<u32, Unsupported> {
        let must = (self.0 & 0xffff_ffff) as u32;
        let may = (self.0 >> 32) as u32;
        let bits = wanted & !may;
        if bits != 0 {
            return Err(Unsupported { bits });
        }
        Ok(wanted | must)
    }
}

/// An access that the EPT did not allow, as the exit qualification tells it.
///
/// "Exit Qualification for EPT Violations".
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Violation {
    /// What the access was: a read, a write, an instruction fetch.
    pub access: Rights,
    /// What all entries on the way allow together.
    pub allowed: Rights,
    /// Whether the guest-linear address is known.
    pub linear: bool,
    /// Whether it was the access itself, and not the walk of the guest's own page tables.
    pub last_step: bool,
}

/// Three rights, or three ways to use one.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Rights(u8);

impl Rights {
    /// No right.
    pub const NONE: Self = Self(0);
    /// To read.
    pub const READ: Self = Self(1);
    /// To write.
    pub const WRITE: Self = Self(2);
    /// To fetch instructions.
    pub const EXECUTE: Self = Self(4);
    /// To read and to write.
    pub const READ_WRITE: Self = Self(3);
    /// To read and to fetch instructions.
    pub const READ_EXECUTE: Self = Self(5);
    /// All three.
    pub const ALL: Self = Self(7);

    const fn low(bits: u64) -> Self {
        Self((bits & 7) as u8)
    }
}

impl fmt::Debug for Rights {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (bit, letter) in [(1, "r"), (2, "w"), (4, "x")] {
            f.write_str(if self.0 & bit == 0 { "-" } else { letter })?;
        }
        Ok(())
    }
}

impl Violation {
    /// The violation with this exit qualification.
    #[must_use]
    pub const fn decode(qualification: u64) -> Self {
        Self {
            access: Rights::low(qualification),
            allowed: Rights::low(qualification >> 3),
            linear: qualification & 1 << 7 != 0,
            last_step: qualification & 1 << 7 != 0 && qualification & 1 << 8 != 0,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::format;

    use super::*;

    #[track_caller]
    fn set(capability: u64, wanted: u32, expected: Result<u32, Unsupported>) {
        assert_eq!(Capability(capability).setting(wanted), expected);
    }

    #[test]
    fn a_control_has_what_must_be_set_and_nothing_that_may_not() {
        set(0x0000_00ff_0000_0016, 0x1, Ok(0x17));
        set(0x0000_00ff_0000_0016, 0, Ok(0x16));
        set(0x0000_00ff_0000_0016, 0x180, Err(Unsupported { bits: 0x100 }));
        set(u64::MAX << 32, 1 << 31, Ok(1 << 31));
        set(0, 0, Ok(0));
    }

    #[track_caller]
    fn tells(qualification: u64, access: Rights, allowed: Rights, linear: bool, last_step: bool) {
        let expected = Violation { access, allowed, linear, last_step };
        assert_eq!(Violation::decode(qualification), expected, "{qualification:#x}");
    }

    #[test]
    fn a_qualification_tells_access_rights_and_step() {
        tells(0x181, Rights::READ, Rights::NONE, true, true);
        tells(0x18a, Rights::WRITE, Rights::READ, true, true);
        tells(0x19c, Rights::EXECUTE, Rights::READ_WRITE, true, true);
        tells(0x081, Rights::READ, Rights::NONE, true, false);
        // Bit 8 says nothing where bit 7 is clear.
        tells(0x101, Rights::READ, Rights::NONE, false, false);
        tells(u64::MAX, Rights::ALL, Rights::ALL, true, true);
    }

    #[test]
    fn rights_are_shown_by_their_letters() {
        assert_eq!(format!("{:?} {:?}", Rights::READ_WRITE, Rights::EXECUTE), "rw- --x");
    }
}
