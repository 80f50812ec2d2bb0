//! All domains, and how their virtual processors are run.
//!
//! [`House::run`] runs one virtual processor on the processor that calls it, until its
//! domain ends. Domains end alone: what one does wrong is answered inside it, or ends it.

use arrayvec::ArrayVec;
use flush::CpuSet;
use iommu_vtd::Guarded;
use testbed::failure::{Context as _, Failure};
use testbed::svm::{Context, Exit, Mode};
use testbed::xen::events::Events;
use testbed::xen::{self, Shutdown};

use super::Domain;
use super::assigned::Assigned;
use super::domain;
use super::exits::{self, Next};
use super::ledger::Ledger;
use crate::embedding::Lock;
use crate::svm::{NotRun, Vcpu};
use crate::{arch, processors, say};

/// Domains there is room for.
const DOMAINS: usize = 2;

/// All domains.
pub(crate) struct House<'h> {
    domains: ArrayVec<Domain<'h>, DOMAINS>,
    pub(super) events: Lock<Events>,
    /// What is counted.
    pub(super) ledger: Ledger,
    /// A device that one of them has.
    pub(super) assigned: Option<Assigned>,
    /// Who has come to run virtual processors.
    processors: Lock<CpuSet>,
}

impl<'h> House<'h> {
    /// A house of these domains, of which one may have a device.
    ///
    /// # Errors
    /// If there are too many.
    pub(crate) fn new(
        domains: impl IntoIterator<Item = Domain<'h>>,
        assigned: Option<Assigned>,
    ) -> Result<Self, Failure> {
        let mut house = Self {
            domains: ArrayVec::new_const(),
            events: Lock::new(Events::new()),
            ledger: Ledger::new(),
            assigned,
            processors: Lock::new(CpuSet::new()),
        };
        for domain in domains {
            let known = house.events.with(|events| events.add(domain.id()));
            let added = house.domains.try_push(domain).is_ok();
            (known && added).then_some(()).context("room for a domain")?;
        }
        Ok(house)
    }

    /// The domains, in the order in which they were added.
    pub(crate) fn domains(&self) -> &[Domain<'h>] {
        &self.domains
    }

    /// Show a domain an event.
    pub(super) fn notify(&self, domain: u16, port: u32) {
        let found = self.domains.iter().find(|candidate| candidate.id() == domain);
        if found.is_some_and(|domain| domain.raise(port)) {
            self.wake_all();
        }
    }

    /// Let every processor that runs a virtual one look again at what it waits for.
    pub(super) fn wake_all(&self) {
        self.processors.with(|processors| processors::kick(processors));
    }

    /// Run virtual processor `number` of `domain`, from `vcpu` or from the state that the
    /// domain gives it, until the domain ends.
    pub(crate) fn run(&self, domain: &Domain<'h>, number: u32, vcpu: Option<Vcpu>) -> Shutdown {
        let this = arch::this_processor();
        if !self.processors.with(|processors| processors.insert(this)) {
            say!("processor {this} is beyond the CPU sets");
            return Shutdown::Crash;
        }
        let end = match vcpu.or_else(|| self.wait_for_start(domain, number)) {
            Some(mut vcpu) => self.turns(domain, number, &mut vcpu),
            None => Shutdown::Crash,
        };
        domain.finish(end);
        domain.serve_rings();
        self.wake_all();
        domain.ended().unwrap_or(end)
    }

    /// End all domains, as crashed if they have not ended yet.
    pub(crate) fn end_all(&self) {
        for domain in &self.domains {
            domain.finish(Shutdown::Crash);
        }
        self.wake_all();
    }

    /// Wait until the domain starts one of its further processors. `None` at its end.
    fn wait_for_start(&self, domain: &Domain<'h>, number: u32) -> Option<Vcpu> {
        let place = domain.vcpu(number).ok()?;
        loop {
            if domain.ended().is_some() {
                return None;
            }
            let starting = place.with(|vcpu| match *vcpu {
                domain::Vcpu::Starting(context) => {
                    *vcpu = domain::Vcpu::Up;
                    Some(context)
                }
                domain::Vcpu::New | domain::Vcpu::Ready(_) | domain::Vcpu::Up => None,
            });
            match starting {
                Some(context) => return started(domain, &context),
                None => arch::sleep(),
            }
        }
    }

    /// Stay after stay in the guest, with an answer to each exit.
    fn turns(&self, domain: &Domain<'h>, number: u32, vcpu: &mut Vcpu) -> Shutdown {
        loop {
            if let Some(end) = domain.ended() {
                return end;
            }
            exits::deliver(domain, number, vcpu);
            let exit = match domain.guest.run(vcpu) {
                Ok(exit) => exit,
                Err(NotRun::Paused) => {
                    arch::sleep();
                    continue;
                }
                Err(error) => {
                    say!("{:?} cannot run: {error}", domain.guest.id());
                    return Shutdown::Crash;
                }
            };
            match exits::answer(self, domain, number, vcpu, exit) {
                Next::GoOn => {}
                Next::GiveWay => arch::take_interrupts(),
                Next::Wait => {
                    while !domain.has_events() && domain.ended().is_none() {
                        arch::sleep();
                    }
                }
                Next::End(end) => return end,
                Next::Broken(why) => {
                    say!("{:?} is ended: {why}", domain.guest.id());
                    dump(&vcpu.context, exit);
                    return Shutdown::Crash;
                }
            }
        }
    }
}

/// A virtual processor with this state.
fn started(domain: &Domain<'_>, context: &xen::Context) -> Option<Vcpu> {
    let mode = Mode::Long { cr3: context.cr3 };
    let mut vcpu = domain.guest.vcpu(mode, context.rip).ok()?;
    let [rax, rcx, rdx, rbx, rsp, rbp, rsi, rdi] = context.general;
    let registers = &mut vcpu.context.registers;
    (registers.rcx, registers.rdx, registers.rbx) = (rcx, rdx, rbx);
    (registers.rbp, registers.rsi, registers.rdi) = (rbp, rsi, rdi);
    let save = &mut vcpu.context.vmcb.save;
    (save.rax, save.rsp) = (rax, rsp);
    // The bit that always reads as one.
    save.rflags = context.rflags | 2;
    (save.cr0, save.cr4) = (context.cr0, context.cr4);
    vcpu.context.set_efer(context.efer);
    Some(vcpu)
}

/// Print the state of a virtual processor that cannot go on.
fn dump(context: &Context, exit: Exit) {
    let (save, registers) = (&context.vmcb.save, &context.registers);
    say!("exit {exit:x?} at privilege level {}", save.cpl);
    say!("rip {:016x} rsp {:016x} rflags {:08x}", save.rip, save.rsp, save.rflags);
    say!(
        "rax {:016x} rbx {:016x} rcx {:016x} rdx {:016x}",
        save.rax,
        registers.rbx,
        registers.rcx,
        registers.rdx
    );
    say!(
        "rsi {:016x} rdi {:016x} rbp {:016x} efer {:x}",
        registers.rsi,
        registers.rdi,
        registers.rbp,
        context.efer()
    );
    let [r8, r9, r10, r11, r12, r13, r14, r15] = registers.r8_to_r15;
    say!("r8  {r8:016x} r9  {r9:016x} r10 {r10:016x} r11 {r11:016x}");
    say!("r12 {r12:016x} r13 {r13:016x} r14 {r14:016x} r15 {r15:016x}");
    say!("cr0 {:x} cr2 {:x} cr3 {:x} cr4 {:x}", save.cr0, save.cr2, save.cr3, save.cr4);
    for (name, segment) in
        [("cs", save.cs), ("ss", save.ss), ("gdtr", save.gdtr), ("idtr", save.idtr)]
    {
        say!(
            "{name} {:04x} base {:x} limit {:x} attributes {:x}",
            segment.selector,
            segment.base,
            segment.limit,
            segment.attributes
        );
    }
}
