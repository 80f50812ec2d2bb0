//! VT-d second-stage entries: rights, large leaves, reserved bits
//!
//! VT-d specification, section 9.8 "second-stage paging entries". Levels 0 to 4 are the manual's SS-PTE, SS-PDE, SS-PDPE, SS-PML4E and SS-PML5E. Legacy mode: bit 2 and the
//! memory-type bits 3 to 6 are ignored, so an EPT leaf reads as the same leaf here.

use super::{Decoded, Limits, bits, leaf, table};
use crate::types::Rights;

const READ: u64 = 1 << 0;
const WRITE: u64 = 1 << 1;
const LARGE: u64 = 1 << 7;
const SNOOP: u64 = 1 << 11;
const TRANSIENT: u64 = 1 << 62;

pub(super) fn decode(limits: Limits, level: u8, raw: u64) -> Decoded {
    let rights = Rights { read: raw & READ != 0, write: raw & WRITE != 0, execute: false };
    if rights == Rights::NONE {
        return Decoded::NotPresent;
    }
    if raw & limits.beyond_width() != 0 {
        return Decoded::Reserved;
    }
    if level > 0 && raw & LARGE == 0 {
        // Snoop and transient belong to leaves.
        return if raw & (SNOOP | TRANSIENT) != 0 { Decoded::Reserved } else { table(raw, rights) };
    }
    if !limits.leaf_at(level)
        || (raw & SNOOP != 0 && !limits.snoop)
        || (raw & TRANSIENT != 0 && !limits.transient)
        || (level > 0 && raw & bits(12, 11 + 9 * u32::from(level)) != 0)
    {
        return Decoded::Reserved;
    }
    leaf(level, raw, rights)
}
