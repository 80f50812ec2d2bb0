//! Devices and processors that come and go, and hardware that fails.

use super::{CONTROLLER, Layout, Lowered, Lowering, NONE, attempt};
use crate::format::{Attach, Attempt, Destroy, Detach, Enter, Fail, Faults, How, Leave, Reattach};

/// Why processors run nothing where one tree serves them and devices.
pub(super) const NO_WALK: &str =
    "no processor of QEMU walks the tables that devices walk too: it has no EPT";

impl Lowering {
    /// The number of a device.
    pub(super) fn device(&self, name: &str) -> Result<u64, String> {
        self.devices.get(name).copied().ok_or_else(|| format!("QEMU has no device `{name}`"))
    }

    /// The controller's queues need memory wherever it goes.
    fn lend_queues(&mut self, device: u64, to: u64) {
        self.controlled.extend((device == CONTROLLER).then_some(to));
    }

    pub(super) fn attach(&mut self, attach: &Attach) -> Lowered {
        if attach.result == Attempt::Refused {
            return Err("all devices are on one bus, whose table is there: it works".to_owned());
        }
        let (device, to) = (self.device(&attach.device)?, self.domain(&attach.to));
        self.lend_queues(device, to);
        self.emit("attach", &[device, to, attempt(attach.result)]);
        Ok(())
    }

    pub(super) fn detach(&mut self, detach: &Detach) -> Lowered {
        let (device, from) = (self.device(&detach.device)?, self.domain(&detach.from));
        self.emit("detach", &[device, from, attempt(detach.result)]);
        Ok(())
    }

    pub(super) fn reattach(&mut self, reattach: &Reattach) -> Lowered {
        let device = self.device(&reattach.device)?;
        let (from, to) = (self.domain(&reattach.from), self.domain(&reattach.to));
        self.lend_queues(device, to);
        self.emit("move", &[device, from, to, attempt(reattach.result)]);
        Ok(())
    }

    pub(super) fn enter(&mut self, enter: &Enter) -> Lowered {
        if self.layout == Layout::Shared {
            self.skip(NO_WALK);
            return Ok(());
        }
        if enter.vcpu.is_some_and(|vcpu| vcpu != enter.cpu) {
            return Err("the testbed's virtual processors stay on their CPU".to_owned());
        }
        let (cpu, domain) = (enter.cpu as u64, self.domain(&enter.domain));
        self.runs.entry((cpu, domain)).or_default();
        self.inside.insert(cpu, domain);
        self.emit("enter", &[cpu, domain]);
        Ok(())
    }

    pub(super) fn leave(&mut self, leave: &Leave) -> Lowered {
        if self.layout == Layout::Shared {
            self.skip(NO_WALK);
            return Ok(());
        }
        let cpu = leave.cpu as u64;
        if let Some(domain) = self.inside.remove(&cpu) {
            self.runs.entry((cpu, domain)).or_default();
        }
        self.emit("leave", &[cpu]);
        Ok(())
    }

    pub(super) fn fail(&mut self, fail: &Fail) -> Lowered {
        match fail.how {
            How::Hang => self.emit("hang", &[]),
            How::QueueError => self.emit("refuse", &[]),
            How::TimeOut | How::CompletionError => {
                return Err("QEMU's unit raises neither time-outs nor completion errors".to_owned());
            }
        }
        self.skip("the next command fails, whichever it is");
        Ok(())
    }

    pub(super) fn faults(&mut self, faults: &Faults) -> Lowered {
        if self.layout == Layout::Shared && (faults.deaf || faults.stay_out) {
            return Err(NO_WALK.to_owned());
        }
        if faults.deaf {
            // Who is not inside is not kicked.
            self.runs.entry((1, 2)).or_default();
        }
        let given = |value: Option<u64>| value.unwrap_or(NONE);
        let Faults { read, write, preempt, deny_unmap, stay_out, deaf } = *faults;
        let flags = [preempt, deny_unmap, stay_out, deaf].map(u64::from);
        self.emit("faults", &[&[given(read), given(write)][..], &flags].concat());
        Ok(())
    }

    pub(super) fn destroy(&mut self, destroy: &Destroy) -> Lowered {
        if destroy.tlb.is_some() || destroy.iotlb.is_some() {
            self.skip("the flushes of a domain's end are not counted");
        }
        self.skip("the tables of a domain that has ended stay, however many steps that takes");
        let domain = self.domain(&destroy.domain);
        self.emit("destroy", &[domain]);
        Ok(())
    }
}
