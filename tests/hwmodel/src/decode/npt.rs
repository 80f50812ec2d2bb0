//! Nested page table entries: rights, large leaves, reserved bits
//!
//! AMD APM volume 2, sections 5.3 "long-mode page translation" and 15.25. Levels 0 to 4 are the manual's PTE, PDE, PDPE, PML4E and PML5E. The nested walk is a user access
//! (15.25.5), so an entry without the user bit allows nothing.

use super::{Decoded, Limits, bits, leaf, table};
use crate::types::Rights;

const PRESENT: u64 = 1 << 0;
const WRITE: u64 = 1 << 1;
const USER: u64 = 1 << 2;
const LARGE: u64 = 1 << 7;
const NO_EXECUTE: u64 = 1 << 63;

pub(super) fn decode(limits: Limits, level: u8, raw: u64) -> Decoded {
    if raw & PRESENT == 0 {
        return Decoded::NotPresent;
    }
    if raw & limits.beyond_width() != 0 {
        return Decoded::Reserved;
    }
    let user = raw & USER != 0;
    let rights = Rights {
        read: user,
        write: user && raw & WRITE != 0,
        execute: user && raw & NO_EXECUTE == 0,
    };
    if level == 0 {
        // Bit 7 is the page attribute bit here.
        return leaf(0, raw, rights);
    }
    if raw & LARGE == 0 {
        return table(raw, rights);
    }
    // Bit 12 is the page attribute bit of a large leaf, the address bits above it must be zero.
    if !limits.leaf_at(level) || raw & bits(13, 11 + 9 * u32::from(level)) != 0 {
        return Decoded::Reserved;
    }
    leaf(level, raw, rights)
}
