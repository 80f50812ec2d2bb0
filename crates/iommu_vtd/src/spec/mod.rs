//! Layouts of the VT-d architecture: bits and offsets, nothing that acts.
//!
//! Every item names its section. All sections, here and in the rest of the crate, are
//! those of one document: *Intel Virtualization Technology for Directed I/O, Architecture
//! Specification*, revision 5.10 (November 2025, order number D51397-018). Earlier
//! revisions number some of chapter 6 differently. Only legacy mode is described.

pub mod descriptor;
pub mod dmar;
pub mod fault;
pub mod registers;
pub mod tables;

/// Extracts `width` bits of `value`, starting at bit `low`.
///
/// A `width` of 64 or more takes every bit from `low` up.
pub(crate) const fn bits(value: u64, low: u32, width: u32) -> u64 {
    let shifted = value >> low;
    if width >= 64 { shifted } else { shifted & ((1 << width) - 1) }
}

/// Whether bit `index` of `value` is set.
pub(crate) const fn bit(value: u64, index: u32) -> bool {
    (value >> index) & 1 != 0
}
