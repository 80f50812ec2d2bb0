//! `hvm_op`: the parameters of a domain.
//!
//! A [`Parameters`] tells a guest where its console and its store are, by page and port.
//! A guest takes port 0 for none. What a guest writes is kept, where it may write.

use super::view::View;
use super::{Domain, Errno, events, is_self};
use crate::physical::{u16_at, u32_at, u64_at};
use crate::start_info;

/// Parameters there are.
const COUNT: usize = 39;
const CALLBACK_IRQ: usize = 0;
const STORE_PFN: usize = 1;
const STORE_EVTCHN: usize = 2;
const CONSOLE_PFN: usize = 17;
const CONSOLE_EVTCHN: usize = 18;

/// The parameters of one domain.
#[derive(Clone, Debug)]
pub struct Parameters {
    values: [u64; COUNT],
}

impl Default for Parameters {
    fn default() -> Self {
        Self::new()
    }
}

impl Parameters {
    /// Those of a domain with a console and a store, at the pages of [`start_info`].
    #[must_use]
    pub const fn new() -> Self {
        let mut values = [0; COUNT];
        values[STORE_PFN] = start_info::STORE_PAGE;
        values[STORE_EVTCHN] = events::STORE_PORT as u64;
        values[CONSOLE_PFN] = start_info::CONSOLE_PAGE;
        values[CONSOLE_EVTCHN] = events::CONSOLE_PORT as u64;
        Self { values }
    }

    /// The vector the guest wants for events, if it wants one.
    #[must_use]
    pub const fn callback_vector(&self) -> Option<u8> {
        const BY_VECTOR: u64 = 2;
        let value = self.values[CALLBACK_IRQ];
        if value >> 56 == BY_VECTOR && value & 0xff >= 32 {
            Some((value & 0xff) as u8)
        } else {
            None
        }
    }
}

/// Carry out one operation.
pub(super) fn run(
    memory: &View<'_, impl Domain>,
    command: u32,
    argument: u64,
) -> Result<i64, Errno> {
    const SET: u32 = 0;
    const GET: u32 = 1;
    if !matches!(command, SET | GET) {
        return Err(Errno::NoSystemCall);
    }
    // `xen_hvm_param`: {domid: u16, index: u32, value: u64}, alike in both widths.
    let request: [u8; 16] = memory.array(argument)?;
    let owner = u16_at(&request, 0).ok_or(Errno::Fault)?;
    if !is_self(memory.domain(), owner) {
        return Err(Errno::NotPermitted);
    }
    let index = u32_at(&request, 4).and_then(|index| usize::try_from(index).ok());
    let index = index.filter(|index| *index < COUNT).ok_or(Errno::Invalid)?;
    if command == GET {
        let value =
            memory.domain().with_parameters(|parameters| parameters.values.get(index).copied());
        memory.write_at(argument, 8, &value.unwrap_or(0).to_le_bytes())?;
        return Ok(0);
    }
    if matches!(index, STORE_PFN | STORE_EVTCHN | CONSOLE_PFN | CONSOLE_EVTCHN) {
        return Err(Errno::NotPermitted);
    }
    let value = u64_at(&request, 8).ok_or(Errno::Fault)?;
    memory.domain().with_parameters(|parameters| {
        if let Some(slot) = parameters.values.get_mut(index) {
            *slot = value;
        }
    });
    Ok(0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::xen::fake::Fake;
    use crate::xen::{Answer, Hypercall, Width};

    const BASE: u64 = Fake::BASE;

    #[track_caller]
    fn call(domain: &Fake, command: u64, owner: u16, index: u32, value: u64, expected: i64) -> u64 {
        domain.put(BASE, &owner.to_le_bytes());
        domain.put(BASE + 4, &index.to_le_bytes());
        domain.put(BASE + 8, &value.to_le_bytes());
        for width in [Width::Narrow, Width::Wide] {
            let call = Hypercall { number: 34, arguments: [command, BASE, 0, 0, 0], width };
            assert_eq!(call.run(domain), Answer::Value(expected));
        }
        u64_at(&domain.get(BASE + 8, 8), 0).expect("eight bytes")
    }

    #[test]
    fn a_domain_is_told_where_its_console_and_its_store_are() {
        let domain = Fake::new();
        let get = |index| call(&domain, 1, 0x7ff0, index, 99, 0);
        assert_eq!([1, 2, 17, 18].map(get), [0xfeffc, 2, 0xfefff, 1]);
    }

    #[test]
    fn what_a_guest_sets_it_reads_and_what_is_not_its_own_stays() {
        let domain = Fake::new();
        call(&domain, 0, Fake::ID, 0, 2 << 56 | 0x30, 0);
        assert_eq!(call(&domain, 1, Fake::ID, 0, 0, 0), 2 << 56 | 0x30);
        assert_eq!(domain.with_parameters(|parameters| parameters.callback_vector()), Some(0x30));
        call(&domain, 0, Fake::ID, 0, 2 << 56 | 0x1f, 0);
        assert_eq!(domain.with_parameters(|parameters| parameters.callback_vector()), None);
        call(&domain, 0, Fake::ID, 17, 1, -1);
        call(&domain, 0, Fake::ID, 39, 1, -22);
        call(&domain, 1, Fake::ID, u32::MAX, 1, -22);
        call(&domain, 1, Fake::OTHER, 0, 1, -1);
    }
}
