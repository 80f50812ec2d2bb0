//! QEMU's own log of the invalidation descriptors its VT-d unit carried out
//!
//! A `Trace` counts them by name. It is evidence that does not come from this
//! project's code, so the project's counters are compared with it.

use std::collections::BTreeMap;

/// How often each traced event happened.
#[derive(Debug, Default)]
pub(crate) struct Trace {
    counts: BTreeMap<String, u64>,
}

impl Trace {
    /// Counts the events in QEMU's log, which may put process and time before a name.
    pub(crate) fn parse(text: &str) -> Self {
        let mut trace = Self::default();
        for line in text.lines() {
            let first = line.split_whitespace().next().unwrap_or_default();
            let name = first.rsplit(':').next().unwrap_or_default();
            if name.starts_with("vtd_") {
                *trace.counts.entry(name.to_owned()).or_default() += 1;
            }
        }
        trace
    }

    /// Descriptors that invalidate the IOTLB: page-selective, domain-selective or global.
    pub(crate) fn iotlb_commands(&self) -> u64 {
        self.sum(&[
            "vtd_inv_desc_iotlb_pages",
            "vtd_inv_desc_iotlb_domain",
            "vtd_inv_desc_iotlb_global",
        ])
    }

    /// Wait descriptors, whether they end in a status write or in an interrupt.
    pub(crate) fn waits(&self) -> u64 {
        self.sum(&["vtd_inv_desc_wait_sw", "vtd_inv_desc_wait_irq"])
    }

    fn sum(&self, names: &[&str]) -> u64 {
        names.iter().filter_map(|name| self.counts.get(*name)).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn counts(text: &str, iotlb_commands: u64, waits: u64) {
        let trace = Trace::parse(text);
        assert_eq!((trace.iotlb_commands(), trace.waits()), (iotlb_commands, waits), "{text}");
    }

    #[test]
    fn each_kind_of_descriptor_is_counted_once() {
        counts("", 0, 0);
        counts("vtd_inv_desc_cc_global context invalidate globally\n", 0, 0);
        counts("vtd_inv_desc_iotlb_global iotlb invalidate global\n", 1, 0);
        counts("vtd_inv_desc_iotlb_domain iotlb invalidate whole domain 0x1\n", 1, 0);
        counts(
            "vtd_inv_desc_iotlb_pages iotlb invalidate domain 0x1 addr 0x200000 mask 0x5\n\
             vtd_inv_desc_wait_sw wait invalidate status write addr 0x110000 data 0x1\n\
             vtd_inv_desc_wait_write_fail write fail\n",
            1,
            1,
        );
    }

    #[test]
    fn a_process_and_a_time_before_the_name_are_passed_over() {
        counts("71@1700000000.123456:vtd_inv_desc_wait_sw wait\n", 0, 1);
    }
}
