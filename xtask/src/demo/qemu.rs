//! The demo's rows from QEMU, cross-checked with QEMU's own trace
//!
//! The cases `demo-per-page`, `demo-batched` and `demo-no-flush` print two lines
//! of results: `@ demo ...` with the figures of the unmap alone, and
//! `@ boot iotlb_commands=.. waits=..` with the project's counters over the whole
//! boot, which must equal what QEMU's trace shows for the whole boot.

use anyhow::{Context, Result, ensure};

use super::row::{Hardware, Policy, Row};
use crate::cases::{CASES, Case};
use crate::qemu::{Testbed, Trace, Verdict};
use crate::records::{self, Record};

/// A testbed that is ready to unmap a number of grants.
pub(super) struct Demo {
    testbed: Testbed,
    grants: u32,
}

impl Demo {
    /// Finds or installs QEMU and builds the image.
    pub(super) fn prepare(grants: u32) -> Result<Self> {
        let testbed = Testbed::prepare()?;
        Ok(Self { testbed, grants })
    }

    /// Boots the case of `policy`.
    ///
    /// # Errors
    /// If the boot does not pass, prints no figures, or its counters and QEMU's differ.
    pub(super) fn run(&self, policy: Policy) -> Result<Row> {
        let case = case(policy)?;
        let words = format!("policy={} grants={}", policy.name(), self.grants);
        let boot = self.testbed.boot(case, &words)?;
        ensure!(
            boot.verdict == Verdict::Passed,
            "the QEMU case {} did not pass\n{}",
            case.name,
            boot.explain(case)
        );
        row(&boot.records, &boot.trace, policy)
            .with_context(|| format!("the QEMU case {}", case.name))
    }
}

fn case(policy: Policy) -> Result<&'static Case> {
    let name = match policy {
        Policy::PerPage => "demo-per-page",
        Policy::Batched => "demo-batched",
        Policy::NoFlush => "demo-no-flush",
    };
    let found = CASES.iter().find(|case| case.name == name);
    found.with_context(|| format!("the case `{name}` has no row in xtask/src/cases.rs"))
}

fn row(printed: &[Record], trace: &Trace, policy: Policy) -> Result<Row> {
    let all = records::only(printed, "boot")?;
    for (name, traced) in [("iotlb_commands", trace.iotlb_commands()), ("waits", trace.waits())] {
        let counted: u64 = all.get(name)?;
        ensure!(
            counted == traced,
            "this project counted {counted} {name} over the boot, QEMU's trace shows {traced}"
        );
    }
    let unmap = records::only(printed, "demo")?;
    let ran: String = unmap.get("policy")?;
    ensure!(ran == policy.name(), "it ran the policy `{ran}`");
    Ok(Row {
        hardware: Hardware::Qemu,
        policy,
        grants: unmap.get("grants")?,
        tlb_flushes: unmap.get("tlb_flushes")?,
        iotlb_flushes: unmap.get("iotlb_flushes")?,
        iotlb_commands: unmap.get("iotlb_commands")?,
        waits: unmap.get("waits")?,
        pages_changed: unmap.get("pages_changed")?,
        pages_flushed: unmap.get("pages_flushed")?,
        stale_accesses: unmap.get("stale_accesses")?,
        released_early: unmap.get("released_early")?,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const DEMO: &str = "@ demo policy=batched grants=32 tlb_flushes=1 iotlb_flushes=1 \
        iotlb_commands=1 waits=1 pages_changed=32 pages_flushed=32 stale_accesses=0 \
        released_early=0\n";
    const TRACE: &str = "vtd_inv_desc_iotlb_global iotlb invalidate global\n\
        vtd_inv_desc_wait_sw wait\nvtd_inv_desc_iotlb_pages iotlb\nvtd_inv_desc_wait_sw wait\n";

    #[track_caller]
    fn reads(serial: &str, trace: &str, policy: Policy, expected: bool) {
        let read = row(&records::parse(serial), &Trace::parse(trace), policy);
        assert_eq!(read.is_ok(), expected, "{serial}{trace}{read:?}");
    }

    #[test]
    fn counters_that_differ_from_the_trace_are_an_error() {
        let serial = |boot: &str| format!("{DEMO}@ boot {boot}\n");
        let right = serial("iotlb_commands=2 waits=2");
        reads(&right, TRACE, Policy::Batched, true);
        reads(&right, TRACE, Policy::PerPage, false);
        reads(&right, "", Policy::Batched, false);
        reads(&serial("iotlb_commands=1 waits=2"), TRACE, Policy::Batched, false);
        reads(&serial("iotlb_commands=2 waits=3"), TRACE, Policy::Batched, false);
        reads(&serial("waits=2"), TRACE, Policy::Batched, false);
        reads(DEMO, TRACE, Policy::Batched, false);
    }
}
