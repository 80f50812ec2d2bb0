//! A domain for the tests: a page of memory, and a list of what was asked of it.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::vec::Vec;

use super::events::{Event, Events};
use super::parameters::Parameters;
use super::{Bytes, Context, Domain, Errno, Fault, Special};

/// A domain, number 5.
pub(super) struct Fake {
    pub(super) memory: RefCell<BTreeMap<u64, u8>>,
    pub(super) everywhere: bool,
    pub(super) initial: bool,
    pub(super) printed: RefCell<Vec<u8>>,
    pub(super) placed: RefCell<Vec<(Special, u64)>>,
    pub(super) removed: RefCell<Vec<u64>>,
    pub(super) grants: RefCell<Vec<(u32, u64, u32)>>,
    pub(super) told: RefCell<Vec<Event>>,
    pub(super) unmasked: RefCell<Vec<u32>>,
    pub(super) started: RefCell<Vec<(u32, Context)>>,
    pub(super) parameters: RefCell<Parameters>,
    pub(super) events: RefCell<Events>,
    /// What a grant operation does with its argument.
    pub(super) on_grants: fn(&dyn Bytes, u32, u64, u32) -> i64,
}

impl Fake {
    /// The number of the domain.
    pub(super) const ID: u16 = 5;
    /// Its neighbour's.
    pub(super) const OTHER: u16 = 6;
    /// The first byte of its memory.
    pub(super) const BASE: u64 = 0x10_0000;
    /// How much memory it has.
    pub(super) const LENGTH: u64 = 0x2000;

    pub(super) fn new() -> Self {
        let mut events = Events::new();
        events.add(Self::ID);
        events.add(Self::OTHER);
        Self {
            memory: RefCell::default(),
            everywhere: false,
            initial: false,
            printed: RefCell::default(),
            placed: RefCell::default(),
            removed: RefCell::default(),
            grants: RefCell::default(),
            told: RefCell::default(),
            unmasked: RefCell::default(),
            started: RefCell::default(),
            parameters: RefCell::new(Parameters::new()),
            events: RefCell::new(events),
            on_grants: |_, _, _, _| 0,
        }
    }

    /// With memory at every address.
    pub(super) fn everywhere() -> Self {
        Self { everywhere: true, ..Self::new() }
    }

    pub(super) fn put(&self, address: u64, bytes: &[u8]) {
        self.memory.borrow_mut().extend((address..).zip(bytes.iter().copied()));
    }

    pub(super) fn get(&self, address: u64, length: u64) -> Vec<u8> {
        let memory = self.memory.borrow();
        (address..).take(length as usize).map(|at| memory.get(&at).copied().unwrap_or(0)).collect()
    }

    fn reaches(&self, address: u64, length: usize) -> Result<(), Fault> {
        let end = address.checked_add(length as u64).ok_or(Fault)?;
        let inside = Self::BASE <= address && end <= Self::BASE + Self::LENGTH;
        if inside || self.everywhere { Ok(()) } else { Err(Fault) }
    }
}

impl Bytes for Fake {
    fn read(&self, address: u64, bytes: &mut [u8]) -> Result<(), Fault> {
        self.reaches(address, bytes.len())?;
        bytes.copy_from_slice(&self.get(address, bytes.len() as u64));
        Ok(())
    }

    fn write(&self, address: u64, bytes: &[u8]) -> Result<(), Fault> {
        self.reaches(address, bytes.len())?;
        self.put(address, bytes);
        Ok(())
    }

    fn writable(&self, address: u64) -> Option<u64> {
        self.reaches(address, 1).is_ok().then_some(address)
    }
}

impl Domain for Fake {
    fn id(&self) -> u16 {
        Self::ID
    }

    fn is_initial(&self) -> bool {
        self.initial
    }

    fn memory(&self) -> u64 {
        128 << 20
    }

    fn print(&self, text: &[u8]) {
        self.printed.borrow_mut().extend(text);
    }

    fn place(&self, what: Special, gfn: u64) -> Result<(), Errno> {
        self.placed.borrow_mut().push((what, gfn));
        Ok(())
    }

    fn remove(&self, gfn: u64) -> Result<(), Errno> {
        self.removed.borrow_mut().push(gfn);
        Ok(())
    }

    fn grant_table_op(&self, memory: &dyn Bytes, command: u32, argument: u64, count: u32) -> i64 {
        self.grants.borrow_mut().push((command, argument, count));
        (self.on_grants)(memory, command, argument, count)
    }

    fn with_parameters<R>(&self, action: impl FnOnce(&mut Parameters) -> R) -> R {
        action(&mut self.parameters.borrow_mut())
    }

    fn with_events<R>(&self, action: impl FnOnce(&mut Events) -> R) -> R {
        action(&mut self.events.borrow_mut())
    }

    fn notify(&self, event: Event) {
        self.told.borrow_mut().push(event);
    }

    fn unmask(&self, port: u32) {
        self.unmasked.borrow_mut().push(port);
    }

    fn initialise(&self, vcpu: u32, context: &Context) -> Result<(), Errno> {
        if vcpu != 1 {
            return Err(Errno::NoEntry);
        }
        self.started.borrow_mut().push((vcpu, *context));
        Ok(())
    }

    fn bring_up(&self, vcpu: u32) -> Result<(), Errno> {
        if vcpu == 1 { Ok(()) } else { Err(Errno::NoEntry) }
    }

    fn service(&self, _: u32, _: [u64; 2]) -> Result<i64, Errno> {
        Err(Errno::NoSystemCall)
    }

    fn is_up(&self, vcpu: u32) -> Result<bool, Errno> {
        if vcpu < 2 { Ok(vcpu == 0) } else { Err(Errno::NoEntry) }
    }
}
