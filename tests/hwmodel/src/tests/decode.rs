//! Each format: what is present, what it allows, what is reserved

use crate::decode::{Decoded, Format, Limits, decode};
use crate::types::{Frame, Rights};

const POOR: Limits = Limits {
    physical_bits: 40,
    large_2m: true,
    large_1g: false,
    execute_only: false,
    snoop: false,
    transient: false,
};

#[track_caller]
fn check(format: Format, limits: Limits, cases: &[(u8, u64, Decoded)]) {
    for (level, raw, expected) in cases {
        let found = decode(format, limits, *level, *raw);
        assert_eq!(found, *expected, "{format:?} level {level} raw {raw:#x}");
    }
}

const fn leaf(frame: u64, order: u8, rights: Rights) -> Decoded {
    Decoded::Leaf { frame: Frame(frame), order, rights }
}

const fn table(frame: u64, rights: Rights) -> Decoded {
    Decoded::Table { frame: Frame(frame), rights }
}

const EXECUTE: Rights = Rights { read: false, write: false, execute: true };

#[test]
fn ept_entries_mean_what_the_manual_says() {
    check(
        Format::Ept,
        Limits::FULL,
        &[
            (0, 0, Decoded::NotPresent),
            // Software bits and suppress-#VE alone are not present.
            (0, 0xfff0_0000_0000_0000, Decoded::NotPresent),
            (0, 0x5007, leaf(5, 0, Rights::ALL)),
            (0, 0x5001, leaf(5, 0, Rights::READ)),
            // Write-back memory type, ignore-PAT, accessed, dirty, and bit 7, which level 0 ignores.
            (0, 0x53f3, leaf(5, 0, Rights::READ_WRITE)),
            (0, 0x5004, leaf(5, 0, EXECUTE)),
            (0, 0x5002, Decoded::Reserved),
            (0, 0x5006, Decoded::Reserved),
            // Memory types 2, 3 and 7.
            (0, 0x5013, Decoded::Reserved),
            (0, 0x501b, Decoded::Reserved),
            (0, 0x503b, Decoded::Reserved),
            (0, 1 << 46 | 0x5007, Decoded::Reserved),
            (1, 0x5007, table(5, Rights::ALL)),
            (1, 0x5001, table(5, Rights::READ)),
            (1, 0x500f, Decoded::Reserved),
            (1, 0x40_0087, leaf(0x400, 9, Rights::ALL)),
            (1, 0x40_1087, Decoded::Reserved),
            (2, 0x4000_0087, leaf(0x4_0000, 18, Rights::ALL)),
            (2, 0x4020_0087, Decoded::Reserved),
            (3, 0x5007, table(5, Rights::ALL)),
            (3, 0x5087, Decoded::Reserved),
            (4, 0x5007, table(5, Rights::ALL)),
            (4, 0x5087, Decoded::Reserved),
        ],
    );
    check(
        Format::Ept,
        POOR,
        &[
            (0, 0x5004, Decoded::Reserved),
            (0, 1 << 40 | 0x5007, Decoded::Reserved),
            (2, 0x4000_0087, Decoded::Reserved),
        ],
    );
}

#[test]
fn npt_entries_mean_what_the_manual_says() {
    const NO_EXECUTE: u64 = 1 << 63;
    check(
        Format::Npt,
        Limits::FULL,
        &[
            (0, 0, Decoded::NotPresent),
            (0, 0x5006, Decoded::NotPresent),
            (0, 0x5007, leaf(5, 0, Rights::ALL)),
            (0, NO_EXECUTE | 0x5007, leaf(5, 0, Rights::READ_WRITE)),
            (0, NO_EXECUTE | 0x5005, leaf(5, 0, Rights::READ)),
            // Without the user bit nothing is allowed.
            (0, 0x5003, leaf(5, 0, Rights::NONE)),
            // Page attribute bit, accessed, dirty, global.
            (0, 0x51e7, leaf(5, 0, Rights::ALL)),
            (0, 1 << 46 | 0x5007, Decoded::Reserved),
            (1, 0x5007, table(5, Rights::ALL)),
            (1, 0x40_0087, leaf(0x400, 9, Rights::ALL)),
            (1, 0x40_1087, leaf(0x400, 9, Rights::ALL)),
            (1, 0x40_2087, Decoded::Reserved),
            (2, 0x4000_0087, leaf(0x4_0000, 18, Rights::ALL)),
            (2, 0x4020_0087, Decoded::Reserved),
            (3, 0x5087, Decoded::Reserved),
            (4, 0x5007, table(5, Rights::ALL)),
        ],
    );
    check(Format::Npt, POOR, &[(2, 0x4000_0087, Decoded::Reserved)]);
}

#[test]
fn vtd_entries_mean_what_the_manual_says() {
    check(
        Format::Vtd,
        Limits::FULL,
        &[
            (0, 0, Decoded::NotPresent),
            // Execute and memory type are ignored, so such an entry is not present.
            (0, 0x507c, Decoded::NotPresent),
            (0, 0x5003, leaf(5, 0, Rights::READ_WRITE)),
            (0, 0x5001, leaf(5, 0, Rights::READ)),
            (0, 0x5002, leaf(5, 0, Rights { read: false, write: true, execute: false })),
            // An EPT leaf, write-back, with suppress-#VE.
            (0, 1 << 63 | 0x5077, leaf(5, 0, Rights::READ_WRITE)),
            (0, 0x5803, leaf(5, 0, Rights::READ_WRITE)),
            (0, 1 << 62 | 0x5003, leaf(5, 0, Rights::READ_WRITE)),
            (0, 1 << 46 | 0x5003, Decoded::Reserved),
            (1, 0x5003, table(5, Rights::READ_WRITE)),
            (1, 0x5803, Decoded::Reserved),
            (1, 1 << 62 | 0x5003, Decoded::Reserved),
            (1, 0x40_0083, leaf(0x400, 9, Rights::READ_WRITE)),
            (1, 0x40_1083, Decoded::Reserved),
            (2, 0x4000_0083, leaf(0x4_0000, 18, Rights::READ_WRITE)),
            (2, 0x4020_0083, Decoded::Reserved),
            (3, 0x5083, Decoded::Reserved),
        ],
    );
    check(
        Format::Vtd,
        POOR,
        &[
            (0, 0x5803, Decoded::Reserved),
            (0, 1 << 62 | 0x5003, Decoded::Reserved),
            (2, 0x4000_0083, Decoded::Reserved),
        ],
    );
}
