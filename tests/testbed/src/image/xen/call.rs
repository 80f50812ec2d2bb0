//! One hypercall of one virtual processor.
//!
//! [`Call`] is this hypervisor's side of [`testbed::xen::Domain`].

use flush::Gfn;
use gnttab::abi::UnmapGrantRef;
use gnttab::{FrameError, GuestAddress, Outcome, TableFrame};
use iommu_vtd::Guarded;
use testbed::xen::events::{Event, Events};
use testbed::xen::parameters::Parameters;
use testbed::xen::ports::Source;
use testbed::xen::{Bytes, Context, Domain as Interface, Errno, Fault, Special};

use super::domain::Vcpu;
use super::ledger::Manner;
use super::linear::Linear;
use super::{Domain, House};
use crate::embedding::{Caller, PageNotMoved};

/// A virtual processor in a hypercall.
pub(super) struct Call<'a, 'h> {
    /// All domains.
    pub(super) house: &'a House<'h>,
    /// Its own.
    pub(super) domain: &'a Domain<'h>,
    /// Memory as it sees it.
    pub(super) memory: Linear<'a>,
}

impl Bytes for Call<'_, '_> {
    fn read(&self, address: u64, bytes: &mut [u8]) -> Result<(), Fault> {
        self.memory.read(address, bytes)
    }

    fn write(&self, address: u64, bytes: &[u8]) -> Result<(), Fault> {
        self.memory.write(address, bytes)
    }
}

/// Why a page was not moved, as the guest is told.
const fn errno(error: PageNotMoved) -> Errno {
    match error {
        PageNotMoved::NotMemory => Errno::NoEntry,
        PageNotMoved::NoRoom => Errno::Invalid,
        PageNotMoved::Flush => Errno::Fault,
    }
}

impl Call<'_, '_> {
    /// Show the guest one of the hypervisor's pages at `gfn`, and no longer where it was.
    fn show(&self, gfn: Gfn, page: flush::Mfn, before: Option<Gfn>) -> Result<(), Errno> {
        let Domain { hypervisor, guest, .. } = *self.domain;
        hypervisor.show(guest, gfn, page).map_err(errno)?;
        if let Some(before) = before.filter(|before| *before != gfn) {
            hypervisor.hide(guest, before).map_err(errno)?;
        }
        Ok(())
    }

    /// Give mappings back, in the manner that is asked for.
    fn give_back(&self, memory: &dyn Bytes, call: gnttab::Call) -> i64 {
        if self.house.ledger.manner() != Manner::PerPage {
            return self.carry_out(memory, call);
        }
        let gnttab::Call { command, argument: GuestAddress(first), count } = call;
        let running = self.domain.running();
        for index in 0..u64::from(count) {
            let offset = index.saturating_mul(size_of::<UnmapGrantRef>() as u64);
            let argument = GuestAddress(first.saturating_add(offset));
            let result = self.carry_out(memory, gnttab::Call { command, argument, count: 1 });
            if result != 0 {
                return result;
            }
            // A processor that was kicked is back in the guest before the next flush.
            self.domain.wait_for(running);
        }
        0
    }

    /// Carry out an operation on grants, to its end.
    fn carry_out(&self, memory: &dyn Bytes, mut call: gnttab::Call) -> i64 {
        let Domain { hypervisor, guest, .. } = *self.domain;
        let ledger = &self.house.ledger;
        guest.plan_by(ledger.manner().policy());
        let Ok(place) = guest.place() else { return i64::from(Errno::Busy as i32) };
        let seat = place.seat();
        let caller =
            Caller { hypervisor, guest, tlb: &seat, iotlb: &seat, memory, watcher: ledger };
        loop {
            match call.run(&caller) {
                Outcome::Done => return 0,
                Outcome::Failed(errno) => return errno.value(),
                Outcome::Continue { done: _, rest } => call = rest,
            }
        }
    }

    /// Whatever page of the hypervisor's was at `gfn` is not there any more.
    fn lost(&self, gfn: Gfn) {
        self.domain.shared_info_at.with(|at| *at = at.filter(|at| *at != gfn));
        self.domain.guest.grants.with(|table| table.storage().lost(gfn));
    }
}

impl Interface for Call<'_, '_> {
    fn id(&self) -> u16 {
        self.domain.id()
    }

    fn is_initial(&self) -> bool {
        self.domain.initial
    }

    fn memory(&self) -> u64 {
        self.domain.memory
    }

    fn print(&self, text: &[u8]) {
        self.domain.print(Source::Hypercall, text);
    }

    fn place(&self, what: Special, gfn: u64) -> Result<(), Errno> {
        let gfn = Gfn::new(gfn);
        let frame = match what {
            Special::SharedInfo => {
                let Domain { shared_info, shared_info_at, .. } = self.domain;
                let before = shared_info_at.with(|at| *at);
                self.show(gfn, *shared_info, before)?;
                self.lost(gfn);
                shared_info_at.with(|at| *at = Some(gfn));
                return Ok(());
            }
            Special::Grants(page) => TableFrame::Shared(page as usize),
            Special::GrantStatus(page) => TableFrame::Status(page as usize),
        };
        let grants = &self.domain.guest.grants;
        // Noted first: from here on a change of the table's version finds the frame in use.
        let noted = grants.with(|table| {
            table.map_frame(frame, |storage, page| (page, storage.note(frame, Some(gfn))))
        });
        let (page, before) = match noted {
            Ok(noted) => noted,
            Err(FrameError::OutOfRange) => return Err(Errno::Invalid),
            Err(FrameError::NoMemory) => return Err(Errno::NoMemory),
        };
        let shown = self.show(gfn, page, before);
        if shown.is_ok() {
            self.lost(gfn);
        }
        let at = if shown.is_ok() { Some(gfn) } else { before };
        grants.with(|table| table.storage().note(frame, at));
        shown
    }

    fn remove(&self, gfn: u64) -> Result<(), Errno> {
        let gfn = Gfn::new(gfn);
        let Domain { hypervisor, guest, .. } = *self.domain;
        hypervisor.hide(guest, gfn).map_err(errno)?;
        self.lost(gfn);
        Ok(())
    }

    fn grant_table_op(&self, memory: &dyn Bytes, command: u32, argument: u64, count: u32) -> i64 {
        let ledger = &self.house.ledger;
        let call = gnttab::Call { command, argument: GuestAddress(argument), count };
        match gnttab::Operation::from_command(command) {
            Ok(gnttab::Operation::UnmapGrantRef) => {
                ledger.measure(self.domain, count, || self.give_back(memory, call))
            }
            Ok(_) | Err(_) => self.carry_out(memory, call),
        }
    }

    fn with_parameters<R>(&self, action: impl FnOnce(&mut Parameters) -> R) -> R {
        self.domain.parameters.with(action)
    }

    fn with_events<R>(&self, action: impl FnOnce(&mut Events) -> R) -> R {
        self.house.events.with(action)
    }

    fn notify(&self, event: Event) {
        match event {
            Event::Ring if self.domain.serve_rings() => self.house.wake_all(),
            Event::Ring => {}
            Event::Domain { domain, port } => self.house.notify(domain, port),
        }
    }

    fn unmask(&self, port: u32) {
        if self.domain.unmask(port) {
            self.house.wake_all();
        }
    }

    fn initialise(&self, vcpu: u32, context: &Context) -> Result<(), Errno> {
        self.domain.vcpu(vcpu)?.with(|vcpu| match vcpu {
            Vcpu::New => {
                *vcpu = Vcpu::Ready(*context);
                Ok(())
            }
            Vcpu::Ready(_) | Vcpu::Starting(_) | Vcpu::Up => Err(Errno::Exists),
        })
    }

    fn bring_up(&self, vcpu: u32) -> Result<(), Errno> {
        self.domain.vcpu(vcpu)?.with(|vcpu| match *vcpu {
            Vcpu::New => Err(Errno::Invalid),
            Vcpu::Ready(context) => {
                *vcpu = Vcpu::Starting(context);
                Ok(())
            }
            Vcpu::Starting(_) | Vcpu::Up => Ok(()),
        })?;
        self.house.wake_all();
        Ok(())
    }

    fn service(&self, command: u32, arguments: [u64; 2]) -> Result<i64, Errno> {
        const WRITE_BY_DEVICE: u32 = 0;
        const OPEN_ROW: u32 = 1;
        const CLOSE_ROW: u32 = 2;
        const COMPARE: u32 = 3;
        let (domain, ledger) = (self.domain, &self.house.ledger);
        let [argument, displaced] = arguments;
        // Only those that have the device are here to test.
        let assigned = self.house.assigned.as_ref().ok_or(Errno::NoSystemCall)?;
        match command {
            WRITE_BY_DEVICE => assigned.write(domain.hypervisor, domain.guest.id(), argument)?,
            OPEN_ROW => ledger.open(Manner::from_number(argument).ok_or(Errno::Invalid)?),
            CLOSE_ROW => ledger.close(argument),
            COMPARE if ledger.agrees(domain, argument, displaced) => {}
            COMPARE => return Err(Errno::Invalid),
            _ => return Err(Errno::NoSystemCall),
        }
        Ok(0)
    }

    fn is_up(&self, vcpu: u32) -> Result<bool, Errno> {
        Ok(self.domain.vcpu(vcpu)?.with(|vcpu| matches!(vcpu, Vcpu::Starting(_) | Vcpu::Up)))
    }
}
