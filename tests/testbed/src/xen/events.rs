//! Event channels: ports of domains, joined in pairs.
//!
//! [`Events`] has the ports of all domains. A guest allocates a port for one other
//! domain, which binds a port of its own to it; what either sends, the other gets as an
//! [`Event`]. The first two ports of each domain lead to the hypervisor, which plays the
//! console and the store. A port number is below 32, so that its bit is in the first
//! word of the shared information whatever the guest's width.

use arrayvec::ArrayVec;

use super::view::View;
use super::{Domain, Errno, is_self};

/// The port of the console.
pub const CONSOLE_PORT: u32 = 1;
/// The port of the store.
pub const STORE_PORT: u32 = 2;
/// Ports of one domain, port 0 among them, which is never one.
const PORTS: usize = 32;
/// Domains there is room for.
const DOMAINS: usize = 4;

/// What a port is bound to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Port {
    Free,
    /// Waits for a domain to bind to it.
    Waiting {
        domain: u16,
    },
    /// Joined to a port of a domain.
    Joined {
        domain: u16,
        port: u32,
    },
    /// A virtual processor's own.
    Own,
    /// The hypervisor's end of a ring.
    Ring,
}

/// An event that somebody must be shown.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Event {
    /// A domain has one at a port.
    Domain {
        /// The domain.
        domain: u16,
        /// Its port.
        port: u32,
    },
    /// The hypervisor has one: the caller has put something into a ring.
    Ring,
}

struct Owner {
    domain: u16,
    ports: [Port; PORTS],
}

/// The ports of all domains.
pub struct Events {
    owners: ArrayVec<Owner, DOMAINS>,
}

impl Default for Events {
    fn default() -> Self {
        Self::new()
    }
}

impl Events {
    /// No domain yet.
    #[must_use]
    pub const fn new() -> Self {
        Self { owners: ArrayVec::new_const() }
    }

    /// Add a domain with its ports to the console and the store.
    ///
    /// Whether there was room for it.
    pub fn add(&mut self, domain: u16) -> bool {
        let mut ports = [Port::Free; PORTS];
        for port in [CONSOLE_PORT, STORE_PORT] {
            if let Some(slot) = ports.get_mut(port as usize) {
                *slot = Port::Ring;
            }
        }
        self.owners.try_push(Owner { domain, ports }).is_ok()
    }

    fn port(&mut self, domain: u16, port: u32) -> Option<&mut Port> {
        let owner = self.owners.iter_mut().find(|owner| owner.domain == domain)?;
        owner.ports.get_mut(usize::try_from(port).ok()?)
    }

    /// The lowest free port of a domain, which becomes `state`.
    fn allocate(&mut self, domain: u16, state: Port) -> Result<u32, Errno> {
        let owner = self.owners.iter_mut().find(|owner| owner.domain == domain);
        let ports = owner.ok_or(Errno::NoSuchDomain)?.ports.iter_mut();
        let free = (0..).zip(ports).skip(1).find(|(_, port)| **port == Port::Free);
        let (number, slot) = free.ok_or(Errno::NoSpace)?;
        *slot = state;
        Ok(number)
    }

    /// A port of `domain` that `remote` may bind to.
    fn allocate_waiting(&mut self, domain: u16, remote: u16) -> Result<u32, Errno> {
        self.allocate(domain, Port::Waiting { domain: remote })
    }

    /// Join a new port of `domain` to one that waits for it.
    fn join(&mut self, domain: u16, remote: u16, remote_port: u32) -> Result<u32, Errno> {
        if !self.owners.iter().any(|owner| owner.domain == remote) {
            return Err(Errno::NoSuchDomain);
        }
        let waiting = Port::Waiting { domain };
        if self.port(remote, remote_port).map(|port| *port) != Some(waiting) {
            return Err(Errno::Invalid);
        }
        let local = self.allocate(domain, Port::Joined { domain: remote, port: remote_port })?;
        if let Some(port) = self.port(remote, remote_port) {
            *port = Port::Joined { domain, port: local };
        }
        Ok(local)
    }

    /// Free a port; the other end of it waits again.
    fn close(&mut self, domain: u16, port: u32) -> Result<(), Errno> {
        let slot = self.port(domain, port).ok_or(Errno::Invalid)?;
        match *slot {
            Port::Free | Port::Ring => Err(Errno::Invalid),
            Port::Waiting { .. } | Port::Own => {
                *slot = Port::Free;
                Ok(())
            }
            Port::Joined { domain: remote, port: remote_port } => {
                *slot = Port::Free;
                if let Some(other) = self.port(remote, remote_port) {
                    *other = Port::Waiting { domain };
                }
                Ok(())
            }
        }
    }

    /// Free all ports of a domain but those of its rings.
    fn reset(&mut self, domain: u16) {
        for port in 0..PORTS as u32 {
            // A port that is not in use is no error here.
            self.close(domain, port).ok();
        }
    }

    /// Whom an event at a port of `domain` is for.
    fn send(&mut self, domain: u16, port: u32) -> Result<Option<Event>, Errno> {
        match self.port(domain, port).copied().ok_or(Errno::Invalid)? {
            Port::Free => Err(Errno::Invalid),
            Port::Waiting { .. } => Ok(None),
            Port::Own => Ok(Some(Event::Domain { domain, port })),
            Port::Joined { domain, port } => Ok(Some(Event::Domain { domain, port })),
            Port::Ring => Ok(Some(Event::Ring)),
        }
    }

    /// What `status` tells of a port: its state, and the domain and port it names.
    fn status(&mut self, domain: u16, port: u32) -> Result<(u32, u16, u32), Errno> {
        const CLOSED: u32 = 0;
        const UNBOUND: u32 = 1;
        const INTERDOMAIN: u32 = 2;
        const IPI: u32 = 5;
        Ok(match self.port(domain, port).copied().ok_or(Errno::Invalid)? {
            Port::Free => (CLOSED, 0, 0),
            Port::Waiting { domain } => (UNBOUND, domain, 0),
            Port::Joined { domain, port } => (INTERDOMAIN, domain, port),
            Port::Own => (IPI, 0, 0),
            Port::Ring => (INTERDOMAIN, 0, port),
        })
    }
}

/// `event_channel_op`. The structures are alike in both widths.
pub(super) fn run(
    memory: &View<'_, impl Domain>,
    command: u32,
    argument: u64,
) -> Result<i64, Errno> {
    const BIND_INTERDOMAIN: u32 = 0;
    const BIND_VIRQ: u32 = 1;
    const CLOSE: u32 = 3;
    const SEND: u32 = 4;
    const STATUS: u32 = 5;
    const ALLOCATE_UNBOUND: u32 = 6;
    const BIND_IPI: u32 = 7;
    const BIND_VCPU: u32 = 8;
    const UNMASK: u32 = 9;
    const RESET: u32 = 10;
    let domain = memory.domain();
    let id = domain.id();
    let word = |offset: u64| {
        let at = argument.checked_add(offset).ok_or(Errno::Fault)?;
        Ok::<u32, Errno>(u32::from_le_bytes(memory.array(at)?))
    };
    let short = |offset: u64| word(offset).map(|word| (word & 0xffff) as u16);
    let other = |offset| short(offset).map(|named| if is_self(domain, named) { id } else { named });
    let own = |named| if is_self(domain, named) { Ok(()) } else { Err(Errno::NotPermitted) };
    // A port that could not be told to the guest is given back.
    let tell = |port: u32, offset| {
        let told = memory.write_at(argument, offset, &port.to_le_bytes());
        if told.is_err() {
            domain.with_events(|events| events.close(id, port))?;
        }
        told.map_err(Errno::from)
    };
    match command {
        BIND_INTERDOMAIN => {
            let (remote, remote_port) = (other(0)?, word(4)?);
            let port = domain.with_events(|events| events.join(id, remote, remote_port))?;
            tell(port, 8)?;
        }
        BIND_VIRQ | BIND_IPI => {
            let (vcpu, out) = if command == BIND_VIRQ { (word(4)?, 8) } else { (word(0)?, 4) };
            domain.is_up(vcpu)?;
            tell(domain.with_events(|events| events.allocate(id, Port::Own))?, out)?;
        }
        CLOSE => {
            let port = word(0)?;
            domain.with_events(|events| events.close(id, port))?;
        }
        SEND => {
            let port = word(0)?;
            if let Some(event) = domain.with_events(|events| events.send(id, port))? {
                domain.notify(event);
            }
        }
        STATUS => {
            own(short(0)?)?;
            let port = word(4)?;
            let (state, remote, remote_port) =
                domain.with_events(|events| events.status(id, port))?;
            memory.write_at(argument, 8, &state.to_le_bytes())?;
            memory.write_at(argument, 12, &0_u32.to_le_bytes())?;
            memory.write_at(argument, 16, &u32::from(remote).to_le_bytes())?;
            memory.write_at(argument, 20, &remote_port.to_le_bytes())?;
        }
        ALLOCATE_UNBOUND => {
            own(short(0)?)?;
            let remote = other(2)?;
            tell(domain.with_events(|events| events.allocate_waiting(id, remote))?, 4)?;
        }
        // Events go to the first processor.
        BIND_VCPU | UNMASK => {
            let port = word(0)?;
            let (state, ..) = domain.with_events(|events| events.status(id, port))?;
            if state == 0 {
                return Err(Errno::Invalid);
            }
            if command == UNMASK {
                domain.unmask(port);
            }
        }
        RESET => {
            own(short(0)?)?;
            domain.with_events(|events| events.reset(id));
        }
        _ => return Err(Errno::NoSystemCall),
    }
    Ok(0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::physical::u32_at;
    use crate::xen::fake::Fake;
    use crate::xen::{Answer, Hypercall, Width};

    const BASE: u64 = Fake::BASE;
    const SELF: u32 = 0x7ff0;
    const ID: u16 = Fake::ID;
    const OTHER: u16 = Fake::OTHER;

    /// Call with these words, and the words after.
    #[track_caller]
    fn call(domain: &Fake, command: u64, words: &[u32], expected: i64) -> [u32; 6] {
        for (place, word) in words.iter().enumerate() {
            domain.put(BASE + 4 * place as u64, &word.to_le_bytes());
        }
        let arguments = [command, BASE, 0, 0, 0];
        let call = Hypercall { number: 32, arguments, width: Width::Narrow };
        assert_eq!(call.run(domain), Answer::Value(expected), "command {command}");
        let bytes = domain.get(BASE, 24);
        [0, 4, 8, 12, 16, 20].map(|offset| u32_at(&bytes, offset).expect("inside"))
    }

    #[test]
    fn two_ports_that_were_joined_carry_events_both_ways() {
        let mut events = Events::new();
        assert!(events.add(ID) && events.add(OTHER));
        let waiting = events.allocate_waiting(ID, OTHER).expect("room");
        assert_eq!(events.send(ID, waiting), Ok(None));
        let joined = events.join(OTHER, ID, waiting).expect("it waits");
        let at = |domain, port| Ok(Some(Event::Domain { domain, port }));
        assert_eq!(events.send(ID, waiting), at(OTHER, joined));
        assert_eq!(events.send(OTHER, joined), at(ID, waiting));
        assert_eq!(events.join(OTHER, ID, waiting), Err(Errno::Invalid), "it is taken");
        events.close(OTHER, joined).expect("it is open");
        assert_eq!(events.send(ID, waiting), Ok(None), "it waits again");
        assert_eq!(events.send(OTHER, joined), Err(Errno::Invalid));
    }

    #[test]
    fn only_the_domain_it_waits_for_may_join_a_port() {
        let mut events = Events::new();
        for domain in [ID, OTHER, 9] {
            assert!(events.add(domain));
        }
        let waiting = events.allocate_waiting(ID, OTHER).expect("room");
        assert_eq!(events.join(9, ID, waiting), Err(Errno::Invalid));
        assert_eq!(events.join(OTHER, 77, waiting), Err(Errno::NoSuchDomain));
        for port in [0, CONSOLE_PORT, STORE_PORT, 31, 32, u32::MAX] {
            assert_eq!(events.join(OTHER, ID, port), Err(Errno::Invalid), "port {port}");
        }
    }

    #[test]
    fn ports_run_out_and_come_back() {
        let mut events = Events::new();
        assert!(events.add(ID));
        let mut ports = std::vec::Vec::new();
        while let Ok(port) = events.allocate_waiting(ID, OTHER) {
            ports.push(port);
        }
        assert_eq!(ports, (3..32).collect::<std::vec::Vec<_>>());
        events.reset(ID);
        assert_eq!(events.allocate_waiting(ID, OTHER), Ok(3));
        for port in [CONSOLE_PORT, STORE_PORT] {
            assert_eq!(events.send(ID, port), Ok(Some(Event::Ring)), "port {port} stays");
        }
    }

    #[test]
    fn a_guest_reaches_the_console_and_the_store_by_their_ports() {
        let domain = Fake::new();
        for port in [CONSOLE_PORT, STORE_PORT] {
            call(&domain, 4, &[port], 0);
            call(&domain, 3, &[port], -22);
        }
        assert_eq!(*domain.told.borrow(), [Event::Ring; 2]);
        for port in [0, 3, 32, u32::MAX] {
            call(&domain, 4, &[port], -22);
        }
    }

    #[test]
    fn the_commands_read_and_write_the_fields_they_should() {
        let domain = Fake::new();
        let [_, port, ..] = call(&domain, 6, &[SELF | u32::from(OTHER) << 16, 99], 0);
        assert_eq!(port, 3);
        let [.., state, _, remote, _] = call(&domain, 5, &[SELF, port, 99, 99, 99, 99], 0);
        assert_eq!((state, remote), (1, u32::from(OTHER)));
        let theirs = domain.with_events(|events| events.join(OTHER, ID, port)).expect("it waits");
        let [.., state, _, remote, remote_port] = call(&domain, 5, &[SELF, port], 0);
        assert_eq!((state, remote, remote_port), (2, u32::from(OTHER), theirs));
        let waiting = domain.with_events(|events| events.allocate_waiting(OTHER, ID));
        let waiting = waiting.expect("room");
        let [_, _, joined, ..] = call(&domain, 0, &[OTHER.into(), waiting, 99], 0);
        assert_eq!(joined, 4);
        let [_, ipi, ..] = call(&domain, 7, &[1, 99], 0);
        let [_, _, virq, ..] = call(&domain, 1, &[0, 1, 99], 0);
        assert_eq!((ipi, virq), (5, 6));
        call(&domain, 7, &[2, 99], -2);
        call(&domain, 8, &[ipi, 1], 0);
        call(&domain, 9, &[ipi], 0);
        assert_eq!(*domain.unmasked.borrow(), [ipi]);
        call(&domain, 9, &[7], -22);
        call(&domain, 6, &[OTHER.into(), 0], -1);
        call(&domain, 10, &[SELF], 0);
        call(&domain, 9, &[ipi], -22);
        call(&domain, 11, &[0], -38);
    }
}
