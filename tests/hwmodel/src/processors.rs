//! The machine's processors, as guests and the hypervisor use them
//!
//! Guest accesses go through a processor's caches; loading a root, leaving and interrupts never drop anything.

use crate::cache::Origin;
use crate::cpu::{CpuFault, InvalidateFailed, Root, Translation};
use crate::failure::{CpuLie, OperationKind};
use crate::machine::Machine;
use crate::types::Access;

/// Processors. Each method panics for a processor number that the machine does not have.
impl Machine {
    /// Loads a root and enters the guest: the next access translates from it. Drops nothing.
    pub fn load_root(&self, cpu: usize, root: Root) {
        self.with(|state| {
            let op = state.world.step();
            state.spaces.insert(root.tag, root);
            let origin = Origin { filled: op, basis: op, condemned: None, path: [0; 5] };
            let cpu = &mut state.cpus[cpu];
            cpu.root = Some((root, origin));
            cpu.running = true;
        });
    }

    /// Leaves the guest. Cached entries stay.
    pub fn leave(&self, cpu: usize) {
        self.with(|state| {
            state.world.step();
            state.cpus[cpu].running = false;
        });
    }

    /// Enters the guest again with the root loaded before.
    ///
    /// # Errors
    /// [`CpuFault::NoRoot`] if none was.
    pub fn enter(&self, cpu: usize) -> Result<(), CpuFault> {
        self.with(|state| {
            state.world.step();
            let cpu = &mut state.cpus[cpu];
            if cpu.root.is_none() {
                return Err(CpuFault::NoRoot);
            }
            cpu.running = true;
            Ok(())
        })
    }

    /// Is the processor in its guest?
    #[must_use]
    pub fn is_running(&self, cpu: usize) -> bool {
        self.with(|state| state.cpus[cpu].running)
    }

    /// Declares that nothing may translate under `tag` any more: an audit then reports whatever is cached for it.
    pub fn retire_tag(&self, tag: u64) {
        self.with(|state| {
            state.world.step();
            state.spaces.remove(&tag);
        });
    }

    /// Translates `gpa` on a processor, and judges the access as if it had been made.
    ///
    /// # Errors
    /// As the hardware would fault; what was cached for the address is dropped then.
    pub fn access(&self, cpu: usize, gpa: u64, access: Access) -> Result<Translation, CpuFault> {
        self.with(|state| {
            state.world.step();
            let (translation, used) =
                state.cpus[cpu].translate(&mut state.world, cpu, gpa, access)?;
            if state.world.ram.info(used.frame).is_none() {
                return Err(CpuFault::OutsideRam);
            }
            state.world.judge_access(&used);
            Ok(translation)
        })
    }

    /// A guest load of 8 bytes at a multiple of 8 (the low bits are ignored).
    ///
    /// # Errors
    /// As [`Machine::access`].
    pub fn cpu_read64(&self, cpu: usize, gpa: u64) -> Result<u64, CpuFault> {
        let mut bytes = [0; 8];
        self.cpu_read(cpu, gpa & !7, &mut bytes)?;
        Ok(u64::from_le_bytes(bytes))
    }

    /// A guest store of 8 bytes at a multiple of 8 (the low bits are ignored).
    ///
    /// # Errors
    /// As [`Machine::access`].
    pub fn cpu_write64(&self, cpu: usize, gpa: u64, value: u64) -> Result<(), CpuFault> {
        self.cpu_write(cpu, gpa & !7, &value.to_le_bytes())
    }

    /// A guest load of bytes within one page.
    ///
    /// # Errors
    /// As [`Machine::access`]; [`CpuFault::Width`] if it crosses a page.
    pub fn cpu_read(&self, cpu: usize, gpa: u64, bytes: &mut [u8]) -> Result<(), CpuFault> {
        self.with(|state| {
            state.world.step();
            let used = state.cpus[cpu].within_page(
                &mut state.world,
                cpu,
                gpa,
                bytes.len(),
                Access::Read,
            )?;
            state.world.ram.read_bytes(used.0, bytes);
            Ok(())
        })
    }

    /// A guest store of bytes within one page.
    ///
    /// # Errors
    /// As [`Machine::access`]; [`CpuFault::Width`] if it crosses a page.
    pub fn cpu_write(&self, cpu: usize, gpa: u64, bytes: &[u8]) -> Result<(), CpuFault> {
        self.with(|state| {
            state.world.step();
            let used = state.cpus[cpu].within_page(
                &mut state.world,
                cpu,
                gpa,
                bytes.len(),
                Access::Write,
            )?;
            state.world.ram.write_bytes(used.0, bytes);
            Ok(())
        })
    }

    /// Drops everything the processor cached under `tag` (INVEPT single-context; TLB_CONTROL for one ASID).
    ///
    /// # Errors
    /// If the operation was made to fail; nothing is dropped then.
    pub fn invalidate(&self, cpu: usize, tag: u64) -> Result<(), InvalidateFailed> {
        self.invalidate_tags(cpu, Some(tag))
    }

    /// Drops everything the processor cached (INVEPT all-context; TLB_CONTROL for all ASIDs).
    ///
    /// # Errors
    /// If the operation was made to fail; nothing is dropped then.
    pub fn invalidate_all(&self, cpu: usize) -> Result<(), InvalidateFailed> {
        self.invalidate_tags(cpu, None)
    }

    fn invalidate_tags(&self, cpu: usize, tag: Option<u64>) -> Result<(), InvalidateFailed> {
        self.with(|state| {
            state.world.step();
            if state.world.operation(OperationKind::Invalidate).is_some() {
                return Err(InvalidateFailed);
            }
            state.cpus[cpu].invalidate(&mut state.world, cpu, tag);
            Ok(())
        })
    }

    /// Plants or removes a bug in a processor.
    pub fn set_cpu_lie(&self, cpu: usize, lie: Option<CpuLie>) {
        self.with(|state| state.cpus[cpu].lie = lie);
    }

    /// Sends an inter-processor interrupt. It takes effect when the processor takes it.
    pub fn send_ipi(&self, cpu: usize) {
        self.with(|state| {
            state.world.step();
            state.cpus[cpu].interrupt = true;
            if let Some(counters) = state.world.counters.cpus.get_mut(cpu) {
                counters.ipis = counters.ipis.saturating_add(1);
            }
        });
    }

    /// The processor takes a pending interrupt, which forces it out of its guest. False if none is pending, or
    /// if taking it was made to fail: then it is never taken, and later ones are not either.
    pub fn take_ipi(&self, cpu: usize) -> bool {
        self.with(|state| {
            state.world.step();
            let processor = &mut state.cpus[cpu];
            if !processor.interrupt || processor.interrupt_lost {
                return false;
            }
            if state.world.operation(OperationKind::IpiAcknowledge).is_some() {
                processor.interrupt_lost = true;
                return false;
            }
            processor.interrupt = false;
            if processor.lie != Some(CpuLie::KeepRunning) {
                processor.running = false;
            }
            if let Some(counters) = state.world.counters.cpus.get_mut(cpu) {
                counters.acknowledged = counters.acknowledged.saturating_add(1);
            }
            true
        })
    }

    /// Is an interrupt waiting for the processor?
    #[must_use]
    pub fn ipi_pending(&self, cpu: usize) -> bool {
        self.with(|state| state.cpus[cpu].interrupt)
    }
}
