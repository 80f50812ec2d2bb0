//! The oracle judged: small cases whose right answer is known from the manuals
//!
//! [`Tables`] builds tables by hand, [`Driver`] drives a unit the way the manual asks for; neither is shared with
//! the crates under test.

mod books;
mod decode;
mod device;
mod faults;
mod lies;
mod memory;
mod processor;
mod queue;
mod random;
mod unit;

use crate::decode::Format;
use crate::machine::{Machine, MachineConfig};
use crate::policy::Policy;
use crate::types::{Frame, Owner, Rights, Space, UnitId};
use crate::vtd::config::UnitConfig;
use crate::vtd::registers::*;

pub(super) const HYPERVISOR: Owner = Owner(0);
pub(super) const GUEST: Owner = Owner(1);
pub(super) const STRANGER: Owner = Owner(2);

/// Enough memory for a 1 GiB leaf only where a test asks for it.
pub(super) fn machine(policy: Policy) -> Machine {
    Machine::new(MachineConfig { frames: 4096, cpus: 2, policy, ..MachineConfig::default() })
}

/// An entry in the bits of `format`.
pub(super) fn entry(format: Format, frame: Frame, rights: Rights, large: bool) -> u64 {
    let flag = |on: bool, bit: u32| u64::from(on) << bit;
    let bits = match format {
        Format::Ept => {
            flag(rights.read, 0) | flag(rights.write, 1) | flag(rights.execute, 2) | flag(large, 7)
        }
        Format::Npt => {
            flag(rights.read, 0)
                | flag(rights.write, 1)
                | flag(rights.read, 2)
                | flag(large, 7)
                | flag(!rights.execute, 63)
        }
        Format::Vtd => flag(rights.read, 0) | flag(rights.write, 1) | flag(large, 7),
    };
    frame.address() | bits
}

/// Tables built by hand.
pub(super) struct Tables {
    pub(super) machine: Machine,
    pub(super) format: Format,
    pub(super) levels: u8,
    pub(super) root: Frame,
}

impl Tables {
    #[track_caller]
    pub(super) fn new(machine: &Machine, format: Format, levels: u8) -> Self {
        Self {
            machine: machine.clone(),
            format,
            levels,
            root: machine.allocate_zeroed(HYPERVISOR).expect("a root"),
        }
    }

    /// Address of the entry for `page` in the table at `level`, building the tables above it.
    #[track_caller]
    pub(super) fn slot(&self, page: u64, level: u8) -> u64 {
        let mut table = self.root;
        for above in (level + 1..self.levels).rev() {
            let slot = table.address() + 8 * ((page >> (9 * above)) & 511);
            let raw = self.machine.read64(slot);
            if raw == 0 {
                let fresh = self.machine.allocate_zeroed(HYPERVISOR).expect("a table");
                let link = entry(self.format, fresh, Rights::ALL, false);
                self.machine.write64(slot, link);
                table = fresh;
            } else {
                table = Frame((raw & 0x000f_ffff_ffff_f000) >> 12);
            }
        }
        table.address() + 8 * ((page >> (9 * level)) & 511)
    }

    #[track_caller]
    pub(super) fn map(&self, page: u64, order: u8, frame: Frame, rights: Rights) {
        let raw = entry(self.format, frame, rights, order != 0);
        self.machine.write64(self.slot(page, order / 9), raw);
    }

    #[track_caller]
    pub(super) fn clear(&self, page: u64, order: u8) {
        self.machine.write64(self.slot(page, order / 9), 0);
    }
}

/// A unit driven through its registers.
pub(super) struct Driver {
    pub(super) machine: Machine,
    pub(super) unit: UnitId,
    ring: Frame,
    status: u64,
    next: std::cell::Cell<u64>,
    pub(super) root: Frame,
    contexts: Frame,
}

pub(super) type Descriptor = (u64, u64);

pub(super) fn context_global() -> Descriptor {
    (0x11, 0)
}

pub(super) fn context_domain(did: u16) -> Descriptor {
    (0x21 | u64::from(did) << 16, 0)
}

pub(super) fn context_device(did: u16, sid: u16) -> Descriptor {
    (0x31 | u64::from(did) << 16 | u64::from(sid) << 32, 0)
}

/// All IOTLB descriptors drain; take bits 6 and 7 away where that matters.
pub(super) fn iotlb_global() -> Descriptor {
    (0xd2, 0)
}

pub(super) fn iotlb_domain(did: u16) -> Descriptor {
    (0xe2 | u64::from(did) << 16, 0)
}

pub(super) fn iotlb_page(did: u16, page: u64, mask: u8) -> Descriptor {
    (0xf2 | u64::from(did) << 16, page << 12 | u64::from(mask))
}

pub(super) fn hinted(descriptor: Descriptor) -> Descriptor {
    (descriptor.0, descriptor.1 | 64)
}

pub(super) fn undrained(descriptor: Descriptor) -> Descriptor {
    (descriptor.0 & !0xc0, descriptor.1)
}

pub(super) fn device_tlb(sid: u16, page: u64) -> Descriptor {
    (0x3 | u64::from(sid) << 32, page << 12)
}

pub(super) const STATUS_DONE: u32 = 0xd0e;

impl Driver {
    #[track_caller]
    pub(super) fn new(machine: &Machine, config: UnitConfig) -> Self {
        let take = || machine.allocate_zeroed(HYPERVISOR).expect("a frame");
        let driver = Self {
            machine: machine.clone(),
            unit: machine.add_unit(config),
            ring: take(),
            status: take().address(),
            next: std::cell::Cell::new(0),
            root: take(),
            contexts: take(),
        };
        let unit = driver.unit;
        machine.write64(driver.root.address(), driver.contexts.address() | 1);
        machine.write_back(driver.root.address());
        machine.register_write64(unit, RTADDR, driver.root.address());
        driver.command(GCMD_SRTP, GSTS_RTPS);
        if config.queue {
            machine.register_write64(unit, IQT, 0);
            machine.register_write64(unit, IQA, driver.ring.address());
            driver.command(GCMD_QIE, GSTS_QIES);
            driver.run(&[context_global(), iotlb_global()]);
        }
        driver.command(GCMD_TE, GSTS_TES);
        driver
    }

    /// Gives a global command and waits for its status.
    #[track_caller]
    pub(super) fn command(&self, command: u32, status: u32) {
        let now = self.machine.register_read32(self.unit, GSTS) & 0x96ff_ffff;
        self.machine.register_write32(self.unit, GCMD, now | command);
        self.poll("a global command", || {
            self.machine.register_read32(self.unit, GSTS) & status == status
        });
    }

    #[track_caller]
    pub(super) fn poll(&self, what: &str, mut done: impl FnMut() -> bool) {
        for _ in 0..1000 {
            if done() {
                return;
            }
            self.machine.tick();
        }
        panic!("{what} does not end");
    }

    /// Writes descriptors into the ring without telling the unit.
    pub(super) fn write(&self, descriptors: &[Descriptor]) {
        for (low, high) in descriptors {
            let at = self.ring.address() + self.next.get();
            self.machine.write64(at, *low);
            self.machine.write64(at + 8, *high);
            self.next.set((self.next.get() + 16) % 4096);
        }
    }

    pub(super) fn next_slot(&self) -> u64 {
        self.next.get()
    }

    pub(super) fn slot_address(&self, slot: u64) -> u64 {
        self.ring.address() + slot
    }

    pub(super) fn write_tail(&self) {
        self.machine.register_write64(self.unit, IQT, self.next.get());
    }

    pub(super) fn wait_descriptor(&self) -> Descriptor {
        (0x25 | u64::from(STATUS_DONE) << 32, self.status)
    }

    /// Descriptors and a wait; not awaited.
    pub(super) fn submit(&self, descriptors: &[Descriptor]) {
        self.machine.write32(self.status, 0);
        self.write(descriptors);
        self.write(&[self.wait_descriptor()]);
        self.write_tail();
    }

    pub(super) fn is_done(&self) -> bool {
        self.machine.read32(self.status) == STATUS_DONE
    }

    /// Descriptors, a wait, and waiting for it.
    #[track_caller]
    pub(super) fn run(&self, descriptors: &[Descriptor]) {
        self.submit(descriptors);
        self.poll("a submission", || self.is_done());
    }

    /// Writes a context entry for a device on bus 0; `kind` 0 is tables, 1 tables with device TLB, 2 pass-through.
    pub(super) fn set_context(&self, sid: u16, did: u16, tables: &Tables, kind: u64) {
        let at = self.contexts.address() + 16 * u64::from(sid & 0xff);
        let width = u64::from(tables.levels) - 2;
        self.machine.write64(at + 8, u64::from(did) << 8 | width);
        self.machine.write64(at, tables.root.address() | kind << 2 | 1);
        self.machine.write_back(at);
    }

    pub(super) fn clear_context(&self, sid: u16) {
        let at = self.contexts.address() + 16 * u64::from(sid & 0xff);
        self.machine.write64(at, 0);
        self.machine.write_back(at);
    }

    pub(super) fn space(&self, did: u16) -> Space {
        Space::Device { unit: self.unit, did }
    }
}

/// A device with source id 8 in domain 7 behind a unit, tables of four levels.
pub(super) struct Bench {
    pub(super) machine: Machine,
    pub(super) driver: Driver,
    pub(super) tables: Tables,
}

pub(super) const SID: u16 = 8;
pub(super) const DID: u16 = 7;

impl Bench {
    #[track_caller]
    pub(super) fn new(config: UnitConfig) -> Self {
        Self::with_policy(config, Policy::Greedy, false)
    }

    #[track_caller]
    pub(super) fn with_policy(config: UnitConfig, policy: Policy, ats: bool) -> Self {
        let machine = machine(policy);
        let driver = Driver::new(&machine, config);
        let tables = Tables::new(&machine, Format::Vtd, 4);
        driver.set_context(SID, DID, &tables, u64::from(ats));
        machine.add_device(driver.unit, SID, ats);
        Self { machine, driver, tables }
    }

    /// A guest frame mapped read-write at `page`.
    #[track_caller]
    pub(super) fn mapped(&self, page: u64) -> Frame {
        let frame = self.machine.allocate(GUEST).expect("a page");
        self.tables.map(page, 0, frame, Rights::READ_WRITE);
        frame
    }

    /// Does a device write at `page` still get through?
    pub(super) fn reaches(&self, page: u64) -> bool {
        self.machine.dma_write64(SID, page << 12, 0x1d1e).is_ok()
    }
}
