//! EPT entries: rights, large leaves, misconfigurations
//!
//! Intel SDM volume 3C, chapter "VMX support for address translation". Levels 0 to 4 are the manual's EPT PTE, PDE, PDPTE, PML4E and PML5E. Format tables: "Format of an EPT
//! PML4 entry" and those after it; misconfigurations: section "EPT misconfigurations".

use super::{Decoded, Limits, bits, leaf, table};
use crate::types::Rights;

const READ: u64 = 1 << 0;
const WRITE: u64 = 1 << 1;
const EXECUTE: u64 = 1 << 2;
const LARGE: u64 = 1 << 7;

pub(super) fn decode(limits: Limits, level: u8, raw: u64) -> Decoded {
    let rights =
        Rights { read: raw & READ != 0, write: raw & WRITE != 0, execute: raw & EXECUTE != 0 };
    if rights == Rights::NONE {
        return Decoded::NotPresent;
    }
    let execute_only = rights.execute && !rights.read && !rights.write;
    if (rights.write && !rights.read) || (execute_only && !limits.execute_only) {
        return Decoded::Reserved;
    }
    if raw & limits.beyond_width() != 0 {
        return Decoded::Reserved;
    }
    let is_leaf = level == 0 || (raw & LARGE != 0 && limits.leaf_at(level));
    if is_leaf {
        // Memory types 2, 3 and 7 do not exist.
        let type_is_valid = matches!((raw >> 3) & 7, 0 | 1 | 4 | 5 | 6);
        let low_address = if level == 0 { 0 } else { bits(12, 11 + 9 * u32::from(level)) };
        if !type_is_valid || raw & low_address != 0 {
            return Decoded::Reserved;
        }
        leaf(level, raw, rights)
    } else if raw & bits(3, 7) != 0 {
        Decoded::Reserved
    } else {
        table(raw, rights)
    }
}
