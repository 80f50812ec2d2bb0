//! A caller's memory as its width sees it, with room for translated structures.
//!
//! A [`View`] of a narrow guest refuses addresses beyond 4 GiB, and so there is room for
//! a few bytes of the hypervisor's own above: a structure that is put there in the wide
//! layout is read and written by code that knows that layout only.

use core::cell::RefCell;

use super::{Bytes, Domain, Fault, Width};

/// Where the room for translated structures begins.
pub(super) const ROOM: u64 = 1 << 62;
/// How many bytes it has.
pub(super) const ROOM_BYTES: usize = 1024;

/// The memory of one caller in one call.
pub struct View<'d, D> {
    domain: &'d D,
    width: Width,
    room: RefCell<[u8; ROOM_BYTES]>,
}

/// Where an access goes.
enum Place {
    Guest,
    Room(usize),
}

impl<'d, D: Domain> View<'d, D> {
    /// The memory of `domain`.
    pub fn new(domain: &'d D, width: Width) -> Self {
        Self { domain, width, room: RefCell::new([0; ROOM_BYTES]) }
    }

    /// The caller.
    pub(super) const fn domain(&self) -> &'d D {
        self.domain
    }

    /// Its width.
    pub(super) const fn width(&self) -> Width {
        self.width
    }

    /// Read `N` bytes.
    pub(super) fn array<const N: usize>(&self, address: u64) -> Result<[u8; N], Fault> {
        let mut bytes = [0; N];
        self.read(address, &mut bytes)?;
        Ok(bytes)
    }

    /// Write at an offset from `address`.
    pub(super) fn write_at(&self, address: u64, offset: u64, bytes: &[u8]) -> Result<(), Fault> {
        self.write(address.checked_add(offset).ok_or(Fault)?, bytes)
    }

    fn place(&self, address: u64, length: usize) -> Result<Place, Fault> {
        const LIMIT: u64 = 1 << 32;
        let end = address.checked_add(length as u64).ok_or(Fault)?;
        match self.width {
            Width::Wide => Ok(Place::Guest),
            Width::Narrow if end <= LIMIT => Ok(Place::Guest),
            Width::Narrow => {
                let offset = address.checked_sub(ROOM).ok_or(Fault)?;
                usize::try_from(offset).map(Place::Room).map_err(|_| Fault)
            }
        }
    }
}

impl<D: Domain> Bytes for View<'_, D> {
    fn read(&self, address: u64, bytes: &mut [u8]) -> Result<(), Fault> {
        match self.place(address, bytes.len())? {
            Place::Guest => self.domain.read(address, bytes),
            Place::Room(start) => {
                let room = self.room.borrow();
                let end = start.checked_add(bytes.len()).ok_or(Fault)?;
                bytes.copy_from_slice(room.get(start..end).ok_or(Fault)?);
                Ok(())
            }
        }
    }

    fn write(&self, address: u64, bytes: &[u8]) -> Result<(), Fault> {
        match self.place(address, bytes.len())? {
            Place::Guest => self.domain.write(address, bytes),
            Place::Room(start) => {
                let mut room = self.room.borrow_mut();
                let end = start.checked_add(bytes.len()).ok_or(Fault)?;
                room.get_mut(start..end).ok_or(Fault)?.copy_from_slice(bytes);
                Ok(())
            }
        }
    }

    fn writable(&self, address: u64) -> Option<u64> {
        match self.place(address, 1) {
            Ok(Place::Guest) => self.domain.writable(address),
            Ok(Place::Room(_)) | Err(Fault) => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::xen::fake::Fake;

    #[track_caller]
    fn check(width: Width, address: u64, length: usize, expected: bool) {
        let domain = Fake::everywhere();
        let view = View::new(&domain, width);
        let mut bytes = std::vec![0; length];
        assert_eq!(view.read(address, &mut bytes).is_ok(), expected, "read {address:#x}");
        assert_eq!(view.write(address, &bytes).is_ok(), expected, "write {address:#x}");
    }

    #[test]
    fn a_narrow_guest_has_no_memory_beyond_4_gib_and_a_wide_one_has_no_room() {
        for width in [Width::Narrow, Width::Wide] {
            check(width, 0xffff_fff0, 16, true);
            check(width, u64::MAX, 2, false);
        }
        check(Width::Narrow, 0xffff_fff0, 17, false);
        check(Width::Narrow, ROOM - 1, 1, false);
        check(Width::Narrow, ROOM, ROOM_BYTES, true);
        check(Width::Narrow, ROOM + 1, ROOM_BYTES, false);
        let domain = Fake::new();
        let wide = View::new(&domain, Width::Wide);
        assert_eq!(wide.write(ROOM, &[1]), Err(Fault), "it is the guest's address there");
    }

    #[test]
    fn only_what_is_the_guests_own_has_a_physical_address() {
        let domain = Fake::everywhere();
        for (width, address, expected) in [
            (Width::Wide, 0x7000, Some(0x7000)),
            (Width::Wide, ROOM, Some(ROOM)),
            (Width::Narrow, 0xffff_ffff, Some(0xffff_ffff)),
            (Width::Narrow, 0x1_0000_0000, None),
            (Width::Narrow, ROOM, None),
        ] {
            let view = View::new(&domain, width);
            assert_eq!(view.writable(address), expected, "{width:?} {address:#x}");
        }
    }
}
