//! From an ELF file to a domain that can run.

use flush::Gfn;
use gnttab::GuestAddress;
use iommu_vtd::Guarded;
use testbed::elf::{Program, Segment};
use testbed::failure::{Context as _, Failure};
use testbed::start_info::{self, APIC_PAGE, CONSOLE_PAGE, STORE_PAGE};
use testbed::svm::Mode;
use testbed::xen::apic;
use testbed::{ensure, fail};

use super::Domain;
use super::domain::Rings;
use crate::embedding::{Guest, Hypervisor};
use crate::memory;
use crate::svm::Vcpu;

/// Bytes of a page.
const PAGE: u64 = 4096;
/// Order of a large page of 2 MiB.
const LARGE: u8 = 9;

/// What a domain is to be.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Plan<'p> {
    /// Its program, an ELF file.
    pub(crate) file: &'p [u8],
    /// Its command line.
    pub(crate) command_line: &'p str,
    /// Its memory, in MiB.
    pub(crate) megabytes: u64,
    /// Virtual processors.
    pub(crate) vcpus: usize,
    /// Whether it is told that it is the first domain.
    pub(crate) initial: bool,
}

/// Put a program into `guest`, which has no memory yet, and make its first virtual
/// processor ready.
///
/// # Errors
/// If the file is no guest, does not fit, or memory is short.
pub(crate) fn start<'h>(
    hypervisor: &'h Hypervisor,
    guest: &'h Guest,
    plan: &Plan<'_>,
) -> Result<(Domain<'h>, Vcpu), Failure> {
    let program = Program::parse(plan.file)?;
    let memory = plan.megabytes.checked_mul(1 << 20).filter(|bytes| *bytes <= APIC_PAGE * PAGE);
    let memory = memory.context("memory below the interrupt controller")?;
    let at = start_info::place(&program, memory)?;
    let Ok(information) = start_info::build(at, memory, plan.command_line, plan.initial) else {
        fail!("the guest's command line is longer than {} bytes", start_info::COMMAND_LINE);
    };
    populate(hypervisor, guest, memory / PAGE)?;
    for Segment { start, bytes, .. } in &program.segments {
        // Memory is zeros already, so what the file does not have need not be written.
        guest.write(GuestAddress(*start), bytes).context("a segment")?;
    }
    guest.write(GuestAddress(at.into()), &information).context("start information")?;

    let controller = hypervisor.populate(guest, Gfn::new(APIC_PAGE), 0)?;
    let controller = memory::words(controller).context("the controller's page")?;
    for (register, value) in apic::registers(0) {
        let shift = register % 2 * 32;
        if let Some(word) = controller.get(register / 2) {
            word.fetch_or(u64::from(value) << shift, core::sync::atomic::Ordering::Relaxed);
        }
    }
    let console = hypervisor.populate(guest, Gfn::new(CONSOLE_PAGE), 0)?;
    let store = hypervisor.populate(guest, Gfn::new(STORE_PAGE), 0)?;
    grant_services(guest)?;
    let rings = Rings { console, store };
    let domain = Domain::new(hypervisor, guest, memory, plan.initial, plan.vcpus, rings)?;
    let mut vcpu = guest.vcpu(Mode::Protected, program.entry.into())?;
    vcpu.context.registers.rbx = at.into();
    Ok((domain, vcpu))
}

/// Memory from page 0 on, in large pages as far as they go.
fn populate(hypervisor: &Hypervisor, guest: &Guest, pages: u64) -> Result<(), Failure> {
    let large = 1_u64 << LARGE;
    ensure!(
        memory::free_frames() > pages,
        "a guest of {pages} pages is too large for this machine"
    );
    let mut next = 0;
    while next < pages {
        let order = if pages - next >= large { LARGE } else { 0 };
        hypervisor.populate(guest, Gfn::new(next), order)?;
        next += 1 << order;
    }
    Ok(())
}

/// The grants that a toolstack makes for a domain: its console and its store, for the
/// first domain.
fn grant_services(guest: &Guest) -> Result<(), Failure> {
    /// A version 1 entry that permits access, for domain 0.
    const PERMIT: u64 = 1;
    let written = guest.grants.with(|table| {
        let words = gnttab::GrantStorage::shared(table.storage(), 0)?;
        for (word, page) in words.iter().zip([CONSOLE_PAGE, STORE_PAGE]) {
            word.store(page << 32 | PERMIT, core::sync::atomic::Ordering::Release);
        }
        Some(())
    });
    written.context("the first page of the grant table")
}
