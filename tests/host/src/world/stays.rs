//! CPUs that enter guests and leave them.
//!
//! What a CPU does at an entry depends on what it walks: with EPT it loads a root, with NPT
//! it does a VMRUN.

use flush::DomainId;
use hwmodel::{InvalidateFailed, Root, Space};
use p2m::EnterError;

use super::{Local, ModelRam, World};
use crate::{CpuTables, Guest};

/// Stays of CPUs in guests.
impl World {
    /// Lets a CPU run a guest, until the world ends or the guest is kicked out of it;
    /// after a kick it enters again at once.
    ///
    /// # Panics
    /// If the CPU cannot invalidate.
    pub fn enter(&self, id: DomainId, cpu: usize) {
        assert!(self.try_enter(id, cpu), "CPU {cpu} enters {id:?}");
    }

    /// As [`enter`](Self::enter); a CPU that cannot invalidate stays outside.
    ///
    /// # Panics
    /// If there is no such guest or CPU.
    pub fn try_enter(&self, id: DomainId, cpu: usize) -> bool {
        self.try_enter_as(id, cpu, cpu)
    }

    /// Lets a CPU run one of a guest's vCPUs; other methods take the one with the CPU's own
    /// number. What a vCPU is matters only where each has an ASID.
    ///
    /// # Panics
    /// If there is no such guest or CPU, or another CPU runs the vCPU.
    pub fn try_enter_as(&self, id: DomainId, vcpu: usize, cpu: usize) -> bool {
        let guest = self.hypervisor.guest(id).expect("a guest of this world");
        let elsewhere = self.runs(id, vcpu).filter(|other| *other != cpu);
        assert_eq!(elsewhere, None, "a CPU runs vCPU {vcpu} of {id:?}");
        let entered = if let Some(vmruns) = &self.vmruns {
            match guest.cpus.enter_tagged(cpu) {
                Ok(entered) => {
                    let ran = vmruns.borrow_mut().enter(guest, vcpu, cpu, entered);
                    if ran.is_err() {
                        guest.cpus.leave(cpu);
                    }
                    ran.is_ok()
                }
                Err(_) => panic!("CPU {cpu} does not exist"),
            }
        } else {
            let local = Local { world: self, cpu, root: guest.cpu_root() };
            match guest.cpus.enter(cpu, &local) {
                Ok(_) => {
                    self.load_root(guest, cpu);
                    true
                }
                Err(EnterError::Invalidate(InvalidateFailed)) => false,
                Err(EnterError::UnknownCpu) => panic!("CPU {cpu} does not exist"),
            }
        };
        if entered {
            self.resident.borrow_mut().insert(cpu, (id, vcpu));
        }
        entered
    }

    /// Plants a bug: a CPU runs a guest that does not know of it.
    ///
    /// # Panics
    /// If there is no such guest, or a VMRUN does not flush.
    pub fn enter_unseen(&self, id: DomainId, cpu: usize) {
        let guest = self.hypervisor.guest(id).expect("a guest of this world");
        match &self.vmruns {
            None => self.load_root(guest, cpu),
            Some(vmruns) => {
                let entered = guest.cpus.generation();
                let ran = vmruns.borrow_mut().enter(guest, cpu, cpu, entered);
                ran.expect("the CPU flushes as it is told");
            }
        }
    }

    /// Plants a bug: VMRUNs are not told what to flush.
    pub fn forget_tlb_control(&self) {
        if let Some(vmruns) = &self.vmruns {
            vmruns.borrow_mut().forgets_control = true;
        }
    }

    fn load_root(&self, guest: &Guest<ModelRam>, cpu: usize) {
        let marks = guest.cpu_tables() == CpuTables::MarkedEpt && !self.without_marks.get();
        // Write-back, four levels, perhaps accessed and dirty flags (Intel SDM 3C, EPT pointer).
        let eptp = guest.cpu_root().get() << 12 | u64::from(marks) << 6 | 3 << 3 | 6;
        self.machine.load_root(cpu, Root::from_eptp(eptp));
    }

    /// What a guest's translations are known by in the caches of CPUs.
    #[must_use]
    pub fn cpu_spaces(&self, guest: &Guest<ModelRam>) -> Vec<Space> {
        match &self.vmruns {
            None => vec![Space::Cpu(guest.cpu_root().get() << 12)],
            Some(vmruns) => vmruns.borrow().spaces(guest.id()),
        }
    }

    /// The CPU that runs a vCPU.
    #[must_use]
    pub fn runs(&self, id: DomainId, vcpu: usize) -> Option<usize> {
        let resident = self.resident.borrow();
        resident.iter().find(|(_, running)| **running == (id, vcpu)).map(|(cpu, _)| *cpu)
    }

    /// The CPUs that run a guest.
    pub fn residents(&self, id: DomainId) -> Vec<usize> {
        let resident = self.resident.borrow();
        resident.iter().filter(|(_, (running, _))| *running == id).map(|(cpu, _)| *cpu).collect()
    }

    /// Takes a CPU out of the guest it runs. What it cached stays.
    pub fn leave(&self, cpu: usize) {
        if let Some((id, _)) = self.resident.borrow_mut().remove(&cpu) {
            self.machine.leave(cpu);
            if let Some(guest) = self.hypervisor.guest(id) {
                guest.cpus.leave(cpu);
            }
        }
    }
}
