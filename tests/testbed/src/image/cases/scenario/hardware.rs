//! Devices that change hands, processors that come and go, hardware that fails.

use core::sync::atomic::Ordering;

use flush::{DomainId, Gfn};
use iommu_vtd::Device;
use testbed::failure::{Context, Failure};
use testbed::scenario::{DEVICES, NONE};
use testbed::{ensure, fail};

use super::{Played, attempt, number, seat_number};
use crate::devices::edu::Edu;
use crate::embedding::{Kicks, Memory};
use crate::world::{Faults, World};

/// The controller, and the second device.
const CONTROLLER: usize = 0;

impl Played<'_> {
    pub(super) fn hardware_step(&mut self, word: &str, values: &[u64]) -> Result<bool, Failure> {
        match (word, values) {
            ("attach", [device, to, expected]) => {
                let device = self.device_number(*device)?;
                let done = self.attach(device, number(*to)?);
                attempt(*expected, done)?;
            }
            ("detach", [device, from, expected]) => {
                let device = self.device_number(*device)?;
                let done = self.detach(device, number(*from)?);
                attempt(*expected, done)?;
            }
            ("move", [device, from, to, expected]) => {
                let device = self.device_number(*device)?;
                let done = self.hand_over(device, number(*from)?, number(*to)?);
                attempt(*expected, done)?;
            }
            ("enter", [cpu, domain]) => {
                let guest = self.world.guest(number(*domain)?)?;
                self.seats[seat_number(*cpu)?].enter(guest)?;
            }
            ("leave", [cpu]) => {
                self.seats[seat_number(*cpu)?].leave()?;
            }
            ("faults", [read, write, preempt, deny, stay_out, deaf]) => {
                let given = |value: u64| (value != NONE).then_some(value);
                self.mischief.faults = Faults {
                    read: given(*read),
                    write: given(*write),
                    preempt: *preempt != 0,
                    deny_unmap: *deny != 0,
                };
                self.mischief.written.set(0);
                for seat in self.seats {
                    seat.stays_out.store(*stay_out != 0, Ordering::SeqCst);
                }
                Kicks::lose(*deaf != 0);
            }
            ("hang", []) => {
                ensure!(self.hung.is_none(), "the unit hangs already");
                self.hung = Some(self.world.hang_queue()?);
            }
            ("repair", []) => {
                if let Some(hung) = self.hung.take() {
                    hung.resume()?;
                }
            }
            ("refuse", []) => {
                self.world.plant_bad_descriptor()?;
                self.refused = true;
            }
            // So that the controller's coming changes nothing that is counted.
            ("queues", [domain]) => self.world.lend_queues(self.world.guest(number(*domain)?)?)?,
            ("retry", [left]) => {
                let before = self.asked();
                for id in crate::world::DOMAINS {
                    let guest = self.world.guest(id)?;
                    let manner = self.manner();
                    self.world
                        .as_caller(guest, &manner, |caller| caller.hypervisor.retry(caller))?;
                }
                // A flush that is tried again was asked for before.
                let after = self.asked();
                self.again.0 += after.0 - before.0;
                self.again.1 += after.1 - before.1;
                let found = self.world.hypervisor.batches_held() as u64;
                ensure!(found == *left, "{found} batches are still held, not {left}");
            }
            ("destroy", [domain]) => self.destroy(number(*domain)?)?,
            _ => return Ok(false),
        }
        Ok(true)
    }

    pub(super) fn device_number(&self, device: u64) -> Result<usize, Failure> {
        let device = device.checked_sub(DEVICES).and_then(|device| usize::try_from(device).ok());
        device.filter(|device| *device < self.owners.len()).context("a device of this testbed")
    }

    /// A device as the unit knows it.
    fn device(&mut self, device: usize) -> Result<Device, Failure> {
        if device == CONTROLLER {
            return Ok(self.world.controller);
        }
        let function = self.edu()?.function();
        self.world.hypervisor.iommu.device(function)
    }

    /// The second device.
    pub(super) fn edu(&mut self) -> Result<&Edu, Failure> {
        match &mut self.edu {
            Some(edu) => Ok(edu),
            none => Ok(none.insert(Edu::open(0, u64::MAX)?)),
        }
    }

    fn attach(&mut self, device: usize, to: DomainId) -> Result<(), Failure> {
        let (known, guest) = (self.device(device)?, self.world.guest(to)?);
        if device == CONTROLLER {
            self.world.stop_controller()?;
        }
        self.world.attach(guest, known)?;
        if device == CONTROLLER {
            self.world.start_controller(guest)?;
        }
        self.owners[device] = Some(to);
        Ok(())
    }

    /// The device goes on with what it was told: nobody tells it that it was taken away.
    fn detach(&mut self, device: usize, from: DomainId) -> Result<(), Failure> {
        let (known, guest) = (self.device(device)?, self.world.guest(from)?);
        let units = self.world.hypervisor.iommu.units();
        guest.dma().detach(units, &Memory, known.unit, known.source).context("detach")?;
        self.owners[device] = None;
        Ok(())
    }

    fn hand_over(&mut self, device: usize, from: DomainId, to: DomainId) -> Result<(), Failure> {
        let known = self.device(device)?;
        let (old, new) = (self.world.guest(from)?, self.world.guest(to)?);
        if device == CONTROLLER {
            self.world.stop_controller()?;
        }
        let units = self.world.hypervisor.iommu.units();
        old.dma().reattach(new.dma(), units, &Memory, known).context("reattach")?;
        self.owners[device] = Some(to);
        if device == CONTROLLER { self.world.start_controller(new) } else { Ok(()) }
    }

    fn destroy(&mut self, domain: DomainId) -> Result<(), Failure> {
        let guest = self.world.guest(domain)?;
        let mut devices = arrayvec::ArrayVec::<Device, 2>::new();
        for device in 0..self.owners.len() {
            if self.owners[device] == Some(domain) {
                devices.push(self.device(device)?);
                self.owners[device] = None;
            }
        }
        self.world.hypervisor.end(guest, &devices)
    }

    /// A write of a device to `gfn`. A device that cannot work any more has written nothing.
    ///
    /// # Errors
    /// If a device of a domain does not work.
    pub(super) fn device_writes(&mut self, device: usize, gfn: Gfn) -> Result<(), Failure> {
        let owned = self.owners[device].is_some();
        let written = if device == CONTROLLER {
            self.world.write_page(gfn)
        } else {
            World::edu_writes(self.edu()?, gfn)
        };
        match written {
            Err(failure) if owned => fail!("the device does not work: {failure}"),
            Ok(()) | Err(_) => Ok(()),
        }
    }
}
