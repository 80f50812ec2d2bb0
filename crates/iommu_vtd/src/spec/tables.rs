//! Root and context entries of legacy mode (9.1, 9.3).
//!
//! An entry is two quadwords, low first. Only the low one holds the present bit,
//! so an entry is made present by writing its high quadword first.

use flush::Mfn;

/// Entries of a root table (one per bus) and of a context table (one per device function).
pub const ENTRIES: u16 = 256;

/// Present bit of a root entry's and of a context entry's low quadword (9.1, 9.3).
pub const PRESENT: u64 = 1;

/// Bits 12 to 63 of a low quadword: the frame of the next table.
const FRAME: u64 = !0xfff;

/// Low quadword of a present root entry that points at a context table (9.1).
#[must_use]
pub const fn root_low(context_table: Mfn) -> u64 {
    (context_table.get() << 12) | PRESENT
}

/// Frame a present low quadword points at.
#[must_use]
pub const fn frame(low: u64) -> Mfn {
    Mfn::new((low & FRAME) >> 12)
}

/// What a context entry lets its device do (TT field, 9.3).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TranslationType {
    /// Untranslated requests only; requests of a device TLB are blocked.
    Untranslated,
    /// Also translation requests and requests a device TLB has translated.
    WithDeviceTlb,
}

/// Low quadword of a present context entry (9.3).
#[must_use]
pub const fn context_low(root: Mfn, translation: TranslationType) -> u64 {
    let translation = match translation {
        TranslationType::Untranslated => 0,
        TranslationType::WithDeviceTlb => 1,
    };
    (root.get() << 12) | translation << 2 | PRESENT
}

/// High quadword of a context entry: address width and domain id (9.3).
///
/// `levels` is 3, 4 or 5; the width field holds `levels - 2`.
#[must_use]
pub const fn context_high(levels: u8, domain: u16) -> u64 {
    (levels.saturating_sub(2) as u64 & 7) | (domain as u64) << 8
}

/// Domain id of a context entry's high quadword (9.3).
#[must_use]
pub const fn context_domain(high: u64) -> u16 {
    (high >> 8) as u16
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn entries_have_their_fields_where_the_manual_puts_them() {
        assert_eq!(root_low(Mfn::new(0x123)), 0x12_3001);
        assert_eq!(frame(0x12_3001), Mfn::new(0x123));
        let root = Mfn::new(0xf_ffff_ffff);
        assert_eq!(context_low(root, TranslationType::Untranslated), 0xffff_ffff_f001);
        assert_eq!(context_low(root, TranslationType::WithDeviceTlb), 0xffff_ffff_f005);
        assert_eq!(context_high(3, 0), 1);
        assert_eq!(context_high(4, 0xffff), 0xff_ff02);
        assert_eq!(context_high(5, 1), 0x103);
        assert_eq!(context_domain(0xff_ff02), 0xffff);
    }
}
